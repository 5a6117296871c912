//! Export of memory to a tensor library by DLPack's capsules, which every version of PyTorch takes. The tensor owns the
//! memory; freeing the tensor returns it. `exchange` has the quicker way of newer versions.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// The name of a capsule that has not been consumed. By the DLPack protocol, the consumer renames it.
const NAME: &CStr = c"dltensor";

/// `DLDevice` of the DLPack specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Device {
    kind: i32,
    ordinal: i32,
}

impl Device {
    pub(crate) const CPU: Self = Self { kind: 1, ordinal: 0 };

    pub(crate) fn cuda(ordinal: usize) -> Self {
        Self { kind: 2, ordinal: ordinal as i32 }
    }

    /// The alignment of tensors in bytes that operators on the device need.
    pub(crate) fn alignment(self) -> usize {
        if self == Self::CPU { 4 } else { 16 }
    }

    pub(crate) fn kind(self) -> i32 {
        self.kind
    }

    pub(crate) fn ordinal(self) -> i32 {
        self.ordinal
    }
}

/// `DLDataType` of the DLPack specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DataType {
    pub(crate) const I64: Self = Self { code: 0, bits: 64, lanes: 1 };
    pub(crate) const U8: Self = Self { code: 1, bits: 8, lanes: 1 };
    pub(crate) const F32: Self = Self { code: 2, bits: 32, lanes: 1 };
    pub(crate) const BF16: Self = Self { code: 4, bits: 16, lanes: 1 };
    pub(crate) const BOOL: Self = Self { code: 6, bits: 8, lanes: 1 };
    pub(crate) const F8_E4M3: Self = Self { code: 10, bits: 8, lanes: 1 };
    pub(crate) const F8_E8M0: Self = Self { code: 14, bits: 8, lanes: 1 };

    /// Whether elements are four bytes or two, as [`Element`](ep::Element) of rows that are summed.
    pub(crate) fn is_float(self) -> bool {
        self == Self::F32 || self == Self::BF16
    }

    pub(crate) fn bytes(self) -> usize {
        usize::from(self.bits) / 8
    }

    /// The type, or `U8` for types that a capsule without a version cannot have.
    fn for_capsules(self) -> Self {
        if self == Self::BOOL || self == Self::F8_E4M3 { Self::U8 } else { self }
    }
}

/// `DLTensor` of the DLPack specification.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Tensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: Device,
    pub(crate) ndim: i32,
    pub(crate) dtype: DataType,
    pub(crate) shape: *mut i64,
    /// In elements. Null: row-major, contiguous.
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

impl Tensor {
    /// A tensor of this shape, whose sizes and strides are not set yet.
    pub(crate) fn unsized_at(data: *mut c_void, device: Device, dtype: DataType, shape: Shape) -> Self {
        Self {
            data,
            device,
            ndim: if shape.columns.is_some() { 2 } else { 1 },
            dtype,
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        }
    }
}

/// `DLManagedTensor` of the DLPack specification.
#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// A managed tensor of either form, with its owner. The managed tensor is the first field, so that both have the same
/// address.
#[repr(C)]
pub(crate) struct Export<M, T> {
    managed: M,
    sizes: [i64; 2],
    strides: [i64; 2],
    _owner: T,
}

impl<M, T> Export<M, T> {
    /// Leaks a row-major tensor, which `delete` frees. `tensor`: the tensor inside of `managed`, whose sizes and strides this
    /// sets.
    pub(crate) fn leak(
        managed: M,
        tensor: impl FnOnce(&mut M) -> &mut Tensor,
        shape: Shape,
        owner: T,
    ) -> NonNull<M> {
        let (sizes, strides) = (shape.sizes(), [shape.columns.unwrap_or(1) as i64, 1]);
        let mut export = Box::new(Self { managed, sizes, strides, _owner: owner });
        let places = (export.sizes.as_mut_ptr(), export.strides.as_mut_ptr());
        let tensor = tensor(&mut export.managed);
        (tensor.shape, tensor.strides) = places;
        NonNull::from(Box::leak(export)).cast()
    }
}

/// A row-major matrix, or a vector where `columns` is `None`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) columns: Option<usize>,
}

impl Shape {
    /// The sizes of the dimensions; of a vector, the second one has no meaning.
    pub(crate) fn sizes(self) -> [i64; 2] {
        [self.rows as i64, self.columns.unwrap_or(0) as i64]
    }
}

/// Makes a capsule that `torch.from_dlpack` turns into a tensor. Dropping the tensor drops `owner`, and so does
/// dropping an unconsumed capsule; either may happen on any thread.
///
/// # Safety
/// As long as `owner` lives, `data` points to at least the elements of `shape` on `device`.
pub(crate) unsafe fn capsule<'py, T: Send + 'static>(
    py: Python<'py>,
    owner: T,
    data: *mut c_void,
    device: Device,
    dtype: DataType,
    shape: Shape,
) -> PyResult<Bound<'py, PyCapsule>> {
    let managed = ManagedTensor {
        tensor: Tensor::unsized_at(data, device, dtype.for_capsules(), shape),
        context: std::ptr::null_mut(),
        deleter: Some(delete::<ManagedTensor, T>),
    };
    let export = Export::leak(managed, |managed| &mut managed.tensor, shape, owner).cast();
    // SAFETY: the pointer is that of an export, which `discard` or the capsule's consumer frees.
    let capsule = unsafe { PyCapsule::new_with_pointer_and_destructor(py, export, NAME, Some(discard)) };
    if capsule.is_err() {
        // SAFETY: made above, and no capsule refers to it.
        unsafe { delete::<ManagedTensor, T>(export.as_ptr().cast()) };
    }
    capsule
}

/// Frees an export.
///
/// # Safety
/// `managed` is the address of an `Export<M, T>` that [`Export::leak`] has made and that has not been freed.
pub(crate) unsafe extern "C" fn delete<M, T>(managed: *mut M) {
    // SAFETY: the caller's promise; `managed` is the first field.
    drop(unsafe { Box::from_raw(managed.cast::<Export<M, T>>()) });
}

/// The destructor of a capsule: frees the export if the capsule was not consumed.
///
/// # Safety
/// `capsule` is a capsule that [`capsule`] made and that is being destroyed.
unsafe extern "C" fn discard(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: the caller passes a capsule. If it was renamed, its consumer owns the export.
    let managed = unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 0 {
            return;
        }
        pyo3::ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<ManagedTensor>()
    };
    // SAFETY: a capsule of this name holds an export, whose deleter fits its type.
    unsafe {
        if let Some(deleter) = (*managed).deleter {
            deleter(managed);
        }
    }
}
