//! Multiplies experts' outputs by their weights: one launch, on all SMs.

use ep::{CallerError, Element, Result, WeightGradients, WeightRows, WeightedRows};

use crate::buffer::{CudaBuffer, address};
use crate::device::KernelKey;
use crate::memory::CudaMemory;
use crate::params::{WEIGHT_ROWS_THREADS, WeightRowsParams};

const THREADS: u32 = WEIGHT_ROWS_THREADS as u32;
/// Blocks per multiprocessor: enough warps to keep the memory busy.
const BLOCKS_PER_SM: u32 = 4;

impl WeightRows for CudaBuffer {
    fn weight_rows(
        &mut self,
        input: &WeightedRows<'_, CudaMemory>,
        element: Element,
        out: &mut CudaMemory,
        backward: Option<WeightGradients<'_, CudaMemory>>,
    ) -> Result<()> {
        self.check_usable()?;
        input.check(self.id, element, out, backward.as_ref(), CudaMemory::facts)?;
        let &WeightedRows { rows, hidden, values, element: values_element, weights, .. } = input;
        let too_many = |_| CallerError::TooManyRows { rank: self.rank, rows: rows as u64 };
        let count = u32::try_from(rows).map_err(too_many)?;
        let hidden = u32::try_from(hidden).map_err(too_many)?;
        if count == 0 {
            return Ok(());
        }
        self.notice_capture()?;
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
        // SAFETY: the parameters are this kernel's; sizes were checked; memory stays until the stream has executed the
        // launch, by the contract of `Backend` and of borrowed memory.
        unsafe { kernel.launch(&self.stream, blocks, THREADS, 0, &params) }?;
        self.notice_work()
    }
}
