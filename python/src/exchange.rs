//! PyTorch's tensors through DLPack's C exchange interface, which PyTorch 2.11 has: the native module reads the
//! addresses, types and sizes of tensors, and makes tensors, without calls of Python code.
//!
//! A call reads its tensors here first. A tensor that [`look`](Exchange::look) does not accept is nothing wrong: Python
//! then checks the arguments, says what is wrong, or makes copies that the operators can use.

use std::ffi::{CStr, c_int, c_void};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyType};

use crate::dlpack::{DataType, Device, Export, Shape, Tensor, delete};

/// The attribute of a tensor class that holds the interface, and the name of its capsule.
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const NAME: &CStr = c"dlpack_exchange_api";
/// The function of `torch._C` that makes the capsule.
const OF_PYTORCH: &str = "_dlpack_exchange_api";

/// The version of DLPack whose structures are declared here. Versions with the same major number can be read.
const MAJOR: u32 = 1;
const MINOR: u32 = 1;

/// `DLPackVersion`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Managed {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    flags: u64,
    tensor: Tensor,
}

/// `DLPackExchangeAPI`. Its functions return 0, or -1 with a Python exception set.
#[derive(Debug)]
#[repr(C)]
struct Api {
    version: Version,
    previous: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    /// Makes a tensor that owns what the managed tensor owns; takes it over also if it fails.
    import: Option<unsafe extern "C" fn(*mut Managed, *mut *mut pyo3::ffi::PyObject) -> c_int>,
    /// Describes a tensor. The sizes and strides that it points to live as long as the tensor is unchanged.
    view: Option<unsafe extern "C" fn(*mut pyo3::ffi::PyObject, *mut Tensor) -> c_int>,
    /// The current stream of a device.
    stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// The interface of `torch.Tensor`.
#[derive(Debug)]
pub(crate) struct Exchange {
    class: Py<PyType>,
    /// The method of the class, which an attribute of a tensor cannot replace.
    is_neg: Py<PyAny>,
    bfloat16: Py<PyAny>,
    float32: Py<PyAny>,
    uint8: Py<PyAny>,
    import: unsafe extern "C" fn(*mut Managed, *mut *mut pyo3::ffi::PyObject) -> c_int,
    view: unsafe extern "C" fn(*mut pyo3::ffi::PyObject, *mut Tensor) -> c_int,
    stream: unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int,
}

static EXCHANGE: PyOnceLock<Option<Exchange>> = PyOnceLock::new();

/// Reads tensors of this class by themselves from now on, if it has the interface. Returns whether it has.
#[pyfunction]
pub(crate) fn adopt_tensors(class: &Bound<'_, PyType>) -> PyResult<bool> {
    let py = class.py();
    Ok(EXCHANGE.get_or_try_init(py, || Exchange::of(class))?.is_some())
}

/// A tensor of one or two dimensions with memory of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) address: usize,
    pub(crate) device: Device,
    pub(crate) dtype: DataType,
    pub(crate) rows: usize,
    /// `None`: a vector.
    pub(crate) columns: Option<usize>,
    /// From an element to that of the next row, and of the next column, in elements.
    strides: [usize; 2],
}

impl Seen {
    pub(crate) fn is_matrix(&self) -> bool {
        self.columns.is_some()
    }

    /// Columns of a matrix; 1 for a vector.
    pub(crate) fn width(&self) -> usize {
        self.columns.unwrap_or(1)
    }

    /// Whether the elements follow each other, rows after rows, from a multiple of `alignment` on.
    pub(crate) fn is_dense(&self, alignment: usize) -> bool {
        let [row, column] = self.strides;
        let rows = self.rows <= 1 || row == self.width();
        rows && (self.width() <= 1 || column == 1) && self.address.is_multiple_of(alignment)
    }

    /// From one row to the next, in elements, if the elements of each row follow each other and rows do not overlap.
    pub(crate) fn row_stride(&self) -> Option<usize> {
        let [row, column] = self.strides;
        let aligned = self.address.is_multiple_of(self.dtype.bytes());
        (self.is_matrix() && column == 1 && row >= self.width() && aligned).then_some(row)
    }

    /// Bytes of a dense tensor.
    pub(crate) fn bytes(&self) -> usize {
        self.rows * self.width() * self.dtype.bytes()
    }
}

impl Exchange {
    /// The interface, if [`adopt_tensors`] has found it.
    pub(crate) fn get(py: Python<'_>) -> Option<&Self> {
        EXCHANGE.get(py)?.as_ref()
    }

    fn of(class: &Bound<'_, PyType>) -> PyResult<Option<Self>> {
        let py = class.py();
        let torch = py.import("torch")?;
        // Other libraries add interfaces of their own to a PyTorch that has none.
        if !torch.getattr("_C")?.hasattr(OF_PYTORCH)? {
            return Ok(None);
        }
        let Ok(capsule) = class.getattr(ATTRIBUTE) else { return Ok(None) };
        let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
        let Ok(api) = capsule.pointer_checked(Some(NAME)) else { return Ok(None) };
        // SAFETY: a capsule of this name points to the structure, which lives as long as the process.
        let api = unsafe { api.cast::<Api>().as_ref() };
        let (MAJOR, Some(import), Some(view), Some(stream)) =
            (api.version.major, api.import, api.view, api.stream)
        else {
            return Ok(None);
        };
        let dtype = |name: &str| torch.getattr(name).map(Bound::unbind);
        Ok(Some(Self {
            class: class.clone().unbind(),
            is_neg: class.getattr("is_neg")?.unbind(),
            bfloat16: dtype("bfloat16")?,
            float32: dtype("float32")?,
            uint8: dtype("uint8")?,
            import,
            view,
            stream,
        }))
    }

    /// Describes a tensor, if it is exactly a `torch.Tensor`, has one or two dimensions, and its memory holds its
    /// elements as they are. Not accepted: subclasses, tensors of a tracer, views with the opposite sign, and tensors
    /// without elements.
    pub(crate) fn look(&self, object: &Bound<'_, PyAny>) -> Option<Seen> {
        let py = object.py();
        if !object.get_type().is(&self.class) {
            return None;
        }
        // Before the address is read: a function mode may run Python code here.
        let is_negated = self.is_neg.bind(py).call1((object,)).and_then(|negated| negated.is_truthy());
        if !matches!(is_negated, Ok(false)) {
            return None;
        }
        let seen = self.look_at_memory(object)?;
        // DLPack does not tell `uint8` from the types of fewer bits.
        let is_known = seen.dtype != DataType::U8
            || object.getattr(intern!(py, "dtype")).is_ok_and(|dtype| dtype.is(&self.uint8));
        is_known.then_some(seen)
    }

    /// Like [`look`](Self::look), for tensors that this package has made. Accepts views with the opposite sign, too.
    pub(crate) fn look_at_memory(&self, object: &Bound<'_, PyAny>) -> Option<Seen> {
        let py = object.py();
        if !object.get_type().is(&self.class) {
            return None;
        }
        let mut tensor = std::mem::MaybeUninit::<Tensor>::uninit();
        // SAFETY: the object is a `torch.Tensor`, whose function this is; it fills the structure if it returns 0.
        let tensor = unsafe {
            if (self.view)(object.as_ptr(), tensor.as_mut_ptr()) != 0 {
                // The tensor has no address that DLPack could describe.
                drop(PyErr::take(py));
                return None;
            }
            tensor.assume_init()
        };
        let dimensions =
            usize::try_from(tensor.ndim).ok().filter(|dimensions| (1..=2).contains(dimensions))?;
        if tensor.data.is_null() || tensor.shape.is_null() || tensor.strides.is_null() {
            return None;
        }
        // SAFETY: both have an element for each dimension, and live as long as the tensor, which `object` keeps.
        let (sizes, strides) = unsafe {
            let at = |from: *mut i64| std::slice::from_raw_parts(from, dimensions);
            (at(tensor.shape), at(tensor.strides))
        };
        let number =
            |from: &[i64], at: usize| from.get(at).map_or(Ok(0), |&number| usize::try_from(number)).ok();
        let (rows, columns) = (number(sizes, 0)?, number(sizes, 1)?);
        Some(Seen {
            address: (tensor.data as usize).checked_add(usize::try_from(tensor.byte_offset).ok()?)?,
            device: tensor.device,
            dtype: tensor.dtype,
            rows,
            columns: (dimensions == 2).then_some(columns),
            strides: [number(strides, 0)?, number(strides, 1)?],
        })
    }

    /// The current stream of a device; 0 on the CPU.
    pub(crate) fn stream(&self, py: Python<'_>, device: Device) -> PyResult<usize> {
        if device == Device::CPU {
            return Ok(0);
        }
        let mut stream = std::ptr::null_mut();
        // SAFETY: PyTorch's function, which writes the stream if it returns 0.
        match unsafe { (self.stream)(device.kind(), device.ordinal(), &raw mut stream) } {
            0 => Ok(stream as usize),
            _ => Err(PyErr::fetch(py)),
        }
    }

    /// Whether an object is `torch.float32`, or false for `torch.bfloat16`; `None` for all else.
    pub(crate) fn is_wide(&self, dtype: &Bound<'_, PyAny>) -> Option<bool> {
        if dtype.is(&self.float32) {
            return Some(true);
        }
        dtype.is(&self.bfloat16).then_some(false)
    }

    /// Makes a row-major tensor that owns `owner`. Dropping the tensor drops it, on any thread.
    ///
    /// # Safety
    /// As long as `owner` lives, `data` points to at least the elements of `shape` on `device`.
    pub(crate) unsafe fn tensor<'py, T: Send + 'static>(
        &self,
        py: Python<'py>,
        owner: T,
        data: *mut c_void,
        device: Device,
        dtype: DataType,
        shape: Shape,
    ) -> PyResult<Bound<'py, PyAny>> {
        let managed = Managed {
            version: Version { major: MAJOR, minor: MINOR },
            context: std::ptr::null_mut(),
            deleter: Some(delete::<Managed, T>),
            flags: 0,
            tensor: Tensor::unsized_at(data, device, dtype, shape),
        };
        let export = Export::leak(managed, |managed| &mut managed.tensor, shape, owner);
        let mut made = std::ptr::null_mut();
        // SAFETY: the managed tensor is valid, and its deleter fits its type. The function takes it over.
        unsafe {
            match (self.import)(export.as_ptr(), &raw mut made) {
                0 => Bound::from_owned_ptr_or_err(py, made),
                _ => Err(PyErr::fetch(py)),
            }
        }
    }
}
