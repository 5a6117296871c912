//! Experts' outputs times their weights: one launch, on as many SMs as there are.

use ep::{CallerError, Element, Result, WeightGradients, WeightRows, WeightedRows};

use crate::buffer::{CudaBuffer, address};
use crate::device::KernelKey;
use crate::driver::DeviceAddress;
use crate::memory::CudaMemory;

/// Threads of a block; the kernel's bounds say the same.
pub(crate) const THREADS: u32 = 256;
/// Blocks for each multiprocessor: enough warps for its memory to be busy.
const BLOCKS_PER_SM: u32 = 4;

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

impl WeightRows for CudaBuffer {
    fn weight_rows(
        &mut self,
        input: &WeightedRows<'_, CudaMemory>,
        element: Element,
        out: &mut CudaMemory,
        backward: Option<WeightGradients<'_, CudaMemory>>,
    ) -> Result<()> {
        self.check_usable()?;
        input.check(element, out, backward.as_ref(), CudaMemory::len)?;
        let &WeightedRows { rows, hidden, values, element: values_element, weights } = input;
        let too_many = |_| CallerError::TooManyRows { rank: self.rank, rows: rows as u64 };
        let count = u32::try_from(rows).map_err(too_many)?;
        let hidden = u32::try_from(hidden).map_err(too_many)?;
        if count == 0 {
            return Ok(());
        }
        let params = WeightRowsParams {
            values: values.address(),
            rows: address(backward.as_ref().map(|backward| backward.rows)),
            weights: weights.address(),
            out: out.address(),
            dots: address(backward.as_ref().map(|backward| &*backward.weights)),
            count,
            hidden,
            values_f32: (values_element == Element::F32).into(),
            out_f32: (element == Element::F32).into(),
        };
        let blocks = count.div_ceil(THREADS / 32).min(BLOCKS_PER_SM * self.device.multiprocessors);
        let kernel = self.kernel(KernelKey::WeightRows)?;
        // SAFETY: the kernel's own parameters; sizes were checked; memory stays until the stream has passed, by the
        // contract of `Backend` and of borrowed memory.
        unsafe { kernel.launch(&self.stream, blocks, THREADS, 0, &params) }
    }
}
