//! Converts a top-k routing on the GPU to a routing map and dense probabilities: one launch, without a buffer.

use std::ffi::c_void;

use ep::call::check_len;
use ep::{CallerError, Indices, Result};

use crate::buffer::address;
use crate::device::KernelKey;
use crate::driver::{Device, Stream};
use crate::kernels::Kernels;
use crate::memory::CudaMemory;
use crate::params::{DENSE_THREADS, DenseParams};

const THREADS: u32 = DENSE_THREADS as u32;
/// Blocks per multiprocessor: the number that it runs at the same time.
const BLOCKS_PER_SM: u32 = 8;

/// A top-k routing in GPU memory. Indices outside 0 .. `experts` choose no expert.
#[derive(Debug, Clone, Copy)]
pub struct TopK<'a> {
    /// Number of tokens.
    pub tokens: usize,
    /// Choices per token.
    pub k: usize,
    /// Number of experts.
    pub experts: usize,
    /// `[tokens, k]`.
    pub indices: Indices<'a, CudaMemory>,
    /// f32 `[tokens, k]`; `None` = zero.
    pub weights: Option<&'a CudaMemory>,
}

impl TopK<'_> {
    /// Writes `map` (`[tokens, experts]` bytes, 1 if the token chose the expert, else 0) and `probs` (f32
    /// `[tokens, experts]`, the sum of the weights that the token gives the expert), each if given, in the order of
    /// `stream`.
    ///
    /// # Errors
    /// [`CallerError`] for memory of the wrong size; [`ep::EnvironmentError`] if the kernel cannot be compiled or
    /// loaded.
    ///
    /// # Safety
    /// `stream` is a stream of the GPU's primary context. The stream and the memory live until the launch has finished.
    pub unsafe fn spread(
        &self,
        gpu: usize,
        stream: *mut c_void,
        map: Option<&mut CudaMemory>,
        probs: Option<&mut CudaMemory>,
    ) -> Result<()> {
        let &Self { tokens, k, experts, indices, weights } = self;
        let [tokens_32, k_32, experts_32] =
            [("tokens", tokens), ("k", k), ("experts", experts)].map(|(key, value)| narrow(key, value));
        let (tokens_32, k_32, experts_32) = (tokens_32?, k_32?, experts_32?);
        let (indices, wide) = match indices {
            Indices::Narrow(memory) => (memory, false),
            Indices::Wide(memory) => (memory, true),
        };
        let choices = product(tokens, k)?;
        check_len("topk_idx", product(choices, if wide { 8 } else { 4 })?, indices.len())?;
        weights.map_or(Ok(()), |memory| check_len("topk_weights", product(choices, 4)?, memory.len()))?;
        let elements = product(tokens, experts)?;
        map.as_ref().map_or(Ok(()), |memory| check_len("routing_map", elements, memory.len()))?;
        probs.as_ref().map_or(Ok(()), |memory| check_len("probs", product(elements, 4)?, memory.len()))?;
        if elements == 0 {
            return Ok(());
        }
        let params = DenseParams {
            indices: indices.address(),
            weights: address(weights),
            map: address(map.as_deref()),
            probs: address(probs.as_deref()),
            tokens: tokens_32,
            k: k_32,
            experts: experts_32,
            wide: wide.into(),
        };
        let device = Device::open(gpu)?;
        let kernel = Kernels::get().load(&device, KernelKey::Dense, false)?;
        let blocks = tokens_32.div_ceil(THREADS / 32).min(BLOCKS_PER_SM * device.multiprocessors);
        let stream = Stream::borrowed(&device, stream.cast());
        // SAFETY: the parameters are this kernel's; sizes were checked; the caller guarantees that the memory stays.
        unsafe { kernel.launch(&stream, blocks, THREADS, 0, &params) }
    }
}

fn narrow(key: &'static str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| too_many(key, value))
}

fn product(one: usize, other: usize) -> Result<usize> {
    one.checked_mul(other).ok_or_else(|| too_many("tokens", one))
}

fn too_many(key: &'static str, value: usize) -> ep::Error {
    CallerError::Config { key, value: value.to_string(), problem: "must be below 2^32".into() }.into()
}
