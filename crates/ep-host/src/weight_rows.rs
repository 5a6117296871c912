//! [`WeightRows`] for [`HostBuffer`]: multiplies expert outputs by their weights on this rank's workers. A program
//! calls it through the trait; it needs no peer.

use ep::{Element, Result, WeightGradients, WeightRows, WeightedRows};

use crate::buffer::HostBuffer;
use crate::memory::HostMemory;
use crate::simd::{self, Backward};
use crate::workers;

/// Rows per piece of work.
const PIECE: usize = 16;
const F32: usize = size_of::<f32>();

impl WeightRows for HostBuffer {
    fn weight_rows(
        &mut self,
        input: &WeightedRows<'_, HostMemory>,
        element: Element,
        out: &mut HostMemory,
        backward: Option<WeightGradients<'_, HostMemory>>,
    ) -> Result<()> {
        self.check_usable()?;
        input.check(self.maker(), element, out, backward.as_ref(), HostMemory::facts)?;
        let &WeightedRows { rows, hidden, element: from, .. } = input;
        let (given, dots) = backward
            .map(|backward| (backward.rows.as_bytes(), &mut backward.weights.as_bytes_mut()[..rows * F32]))
            .unzip();
        // With 0 rows, `hidden` may have any value; with `hidden` 0, the number of rows.
        if rows == 0 || hidden == 0 {
            dots.into_iter().for_each(|dots: &mut [u8]| dots.fill(0));
            return Ok(());
        }
        let (row_in, row_out) = (hidden * from.bytes(), hidden * element.bytes());
        let (values, weights) = (input.values.as_bytes(), input.weights.as_bytes());
        let comm = self.comm();
        let (level, streaming) = (comm.level, rows * row_out > comm.config.host.streaming_bytes);
        let weight_row = |row: usize, out: &mut [u8], dot: Option<&mut [u8]>| {
            let mut sum = 0.0;
            let weight = f32::from_ne_bytes(std::array::from_fn(|at| weights[row * F32 + at]));
            let backward =
                given.map(|given| Backward { row: &given[row * row_out..][..row_out], dot: &mut sum });
            let values = &values[row * row_in..][..row_in];
            simd::weight_row(level, (values, from), weight, (out, element), streaming, backward);
            if let Some(dot) = dot {
                dot.copy_from_slice(&sum.to_ne_bytes());
            }
        };
        let mut dots = dots.map(|dots| dots.chunks_mut(PIECE * F32));
        let pieces: Vec<_> = out.as_bytes_mut()[..rows * row_out]
            .chunks_mut(PIECE * row_out)
            .map(|out| (out, dots.as_mut().and_then(Iterator::next)))
            .collect();
        workers::each(self.pool(), pieces, |piece, (out, dots)| {
            let mut dots = dots.map(|dots| dots.chunks_exact_mut(F32));
            for (row, out) in (piece * PIECE..).zip(out.chunks_exact_mut(row_out)) {
                weight_row(row, out, dots.as_mut().and_then(Iterator::next));
            }
            simd::stream_fence();
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ep::numeric::{bf16_to_f32, f32_to_bf16};
    use ep::{Backend, Config, World};

    use super::*;

    fn buffer(workers: usize) -> HostBuffer {
        let mut config = Config::default();
        config.host.workers = workers;
        HostBuffer::threads(&World::builder().ranks(1).experts(1).build().unwrap(), &config)
            .unwrap()
            .pop()
            .unwrap()
    }

    fn upload(buffer: &mut HostBuffer, bytes: &[u8]) -> HostMemory {
        let mut memory = buffer.alloc(bytes.len()).unwrap();
        buffer.upload(bytes, &mut memory).unwrap();
        memory
    }

    #[test]
    fn all_rows_are_weighted_by_any_number_of_workers() {
        let hidden = 40;
        for (workers, rows) in [(1, 3), (3, 0), (3, 1), (3, PIECE), (3, 5 * PIECE + 3)] {
            let mut buffer = buffer(workers);
            let values: Vec<u16> =
                (0..rows * hidden).map(|at| f32_to_bf16(at as f32 % 97.0 - 48.0)).collect();
            let weights: Vec<f32> = (0..rows).map(|row| row as f32 / 8.0 - 3.0).collect();
            let input = upload(&mut buffer, bytemuck::cast_slice(&values));
            let by = upload(&mut buffer, bytemuck::cast_slice(&weights));
            let mut out = buffer.alloc(input.len()).unwrap();
            let mut dots = buffer.alloc(by.len()).unwrap();
            let rows_of = WeightedRows::new(&input, [rows, hidden], &by);
            let expected: Vec<u16> = (0..rows * hidden)
                .map(|at| f32_to_bf16(bf16_to_f32(values[at]) * weights[at / hidden]))
                .collect();
            buffer.weight_rows(&rows_of, Element::Bf16, &mut out, None).unwrap();
            assert_eq!(out.as_bytes(), bytemuck::cast_slice::<_, u8>(&expected), "{workers} {rows}");

            out.as_bytes_mut().fill(0xA5);
            let backward = WeightGradients::new(&input, &mut dots);
            buffer.weight_rows(&rows_of, Element::Bf16, &mut out, Some(backward)).unwrap();
            assert_eq!(out.as_bytes(), bytemuck::cast_slice::<_, u8>(&expected), "{workers} {rows}");
            let squares: Vec<f32> = values
                .chunks(hidden)
                .map(|row| row.iter().map(|&value| bf16_to_f32(value) * bf16_to_f32(value)).sum())
                .collect();
            // Sums of small whole numbers are exact, so their order does not matter.
            assert_eq!(dots.as_bytes(), bytemuck::cast_slice::<_, u8>(&squares), "{workers} {rows}");
        }
    }

    #[test]
    fn memory_that_is_too_short_is_refused() {
        let mut buffer = buffer(1);
        let [short, row, weights] = [14, 16, 4].map(|bytes| buffer.alloc(bytes).unwrap());
        let mut out = buffer.alloc(16).unwrap();
        let mut refused = |values, hidden, weights| {
            let input = WeightedRows::new(values, [1, hidden], weights);
            buffer.weight_rows(&input, Element::Bf16, &mut out, None).unwrap_err().to_string()
        };
        assert!(refused(&short, 8, &weights).contains("rows to be weighted"));
        assert!(refused(&row, 7, &weights).contains("multiple of 8"));
        let none = HostMemory::normal(0).unwrap();
        assert!(refused(&row, 8, &none).contains("weights"));
    }
}
