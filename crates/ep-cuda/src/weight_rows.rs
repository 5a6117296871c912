//! Experts' outputs times their weights: what a layer does between its experts and combine.

use ep::call::check_len;
use ep::{CallerError, Element, Result};

use crate::buffer::CudaBuffer;
use crate::device::KernelKey;
use crate::driver::DeviceAddress;
use crate::memory::CudaMemory;

/// Threads of a block; the kernel's bounds say the same.
pub(crate) const THREADS: u32 = 256;
/// Blocks for each multiprocessor: enough warps for its memory to be busy.
const BLOCKS_PER_SM: u32 = 4;
/// Elements that are moved as one.
const VECTOR: usize = 8;

/// Rows `[rows, hidden]` and their weights, f32 `[rows]`.
#[derive(Debug, Clone, Copy)]
pub struct WeightedRows<'a> {
    /// How many rows.
    pub rows: usize,
    /// Elements of a row, a multiple of 8.
    pub hidden: usize,
    /// The rows, or the gradients of weighted rows; at a multiple of 16 bytes.
    pub values: &'a CudaMemory,
    /// Type of the values.
    pub element: Element,
    /// Each row's weight.
    pub weights: &'a CudaMemory,
}

/// The mirror of `WeightRowsParams` in `device/weight_rows.cu`.
#[repr(C)]
struct WeightRowsParams {
    values: DeviceAddress,
    rows: DeviceAddress,
    weights: DeviceAddress,
    out: DeviceAddress,
    dots: DeviceAddress,
    count: u32,
    hidden: u32,
    values_f32: u32,
    out_f32: u32,
}

const _: () = assert!(size_of::<WeightRowsParams>() == 56);

impl CudaBuffer {
    /// Writes each row times its weight, multiplied in f32 and rounded to `element` once, in the stream's order. No other
    /// rank takes part.
    ///
    /// # Errors
    /// [`CallerError`] where memory has not the size that the shape says, [`ep::EnvironmentError`] when the driver
    /// refuses.
    pub fn weight_rows(
        &self,
        input: &WeightedRows<'_>,
        element: Element,
        out: &mut CudaMemory,
    ) -> Result<()> {
        self.launch_weight_rows(input, element, out, None)
    }

    /// The gradients of [`weight_rows`](Self::weight_rows): `values` are those of its output, `rows` its input of type
    /// `element`. Writes the gradients of the rows, `out`, in their type, and of the weights, `dots`, f32 `[rows]`: in an
    /// order of summation that is always the same.
    ///
    /// # Errors
    /// As [`weight_rows`](Self::weight_rows).
    pub fn weight_rows_backward(
        &self,
        gradients: &WeightedRows<'_>,
        rows: &CudaMemory,
        element: Element,
        out: &mut CudaMemory,
        dots: &mut CudaMemory,
    ) -> Result<()> {
        self.launch_weight_rows(gradients, element, out, Some((rows, dots)))
    }

    fn launch_weight_rows(
        &self,
        input: &WeightedRows<'_>,
        element: Element,
        out: &CudaMemory,
        backward: Option<(&CudaMemory, &CudaMemory)>,
    ) -> Result<()> {
        let &WeightedRows { rows, hidden, values, element: values_element, weights } = input;
        if !hidden.is_multiple_of(VECTOR) || hidden > u32::MAX as usize {
            let problem = format!("must be a multiple of {VECTOR} below 2^32");
            return Err(CallerError::Config { key: "hidden", value: hidden.to_string(), problem }.into());
        }
        let count = u32::try_from(rows)
            .map_err(|_| CallerError::TooManyRows { rank: self.rank, rows: rows as u64 })?;
        check_len("values", rows * hidden * values_element.bytes(), values.len())?;
        check_len("weights", rows * size_of::<f32>(), weights.len())?;
        check_len("weighted rows", rows * hidden * element.bytes(), out.len())?;
        if let Some((rows_of, dots)) = backward {
            check_len("rows", rows * hidden * element.bytes(), rows_of.len())?;
            check_len("gradients of weights", rows * size_of::<f32>(), dots.len())?;
        }
        if count == 0 {
            return Ok(());
        }
        let params = WeightRowsParams {
            values: values.address(),
            rows: backward.map_or(0, |(rows, _)| rows.address()),
            weights: weights.address(),
            out: out.address(),
            dots: backward.map_or(0, |(_, dots)| dots.address()),
            count,
            hidden: hidden as u32,
            values_f32: (values_element == Element::F32).into(),
            out_f32: (element == Element::F32).into(),
        };
        let blocks = count.div_ceil(THREADS / 32).min(BLOCKS_PER_SM * self.device.multiprocessors);
        let kernel = self.kernel(KernelKey::WeightRows)?;
        // SAFETY: the kernel's own parameters; sizes were checked; memory stays until the stream has passed, by the
        // contract of borrowed memory.
        unsafe { kernel.launch(&self.stream, blocks, THREADS, 0, &params) }
    }
}
