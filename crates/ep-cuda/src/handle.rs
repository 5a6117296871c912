//! What preprocessing found out: lists on the GPU, of which peers read their part.

use std::cell::{Cell, OnceCell};

use ep::{DispatchMode, ReceiveShape};

use crate::arena::{Arena, Part};
use crate::driver::DeviceAddress;
use crate::params::{HandleView, MAX_CHUNKS};

/// A routing laid out: made by preprocess, used by dispatch and combine while the routing stands.
#[derive(Debug)]
pub struct CudaHandle {
    /// The buffer that made it.
    pub(crate) buffer: u64,
    /// The step of its preprocessing; the same on every rank.
    pub(crate) id: u64,
    pub(crate) mode: DispatchMode,
    pub(crate) capacity: Option<usize>,
    /// Bounds of the lists that combine needs scratch memory for.
    pub(crate) sizes: Sizes,
    pub(crate) view: HandleView,
    /// What the rank receives, as far as the host knows.
    pub(crate) shape: OnceCell<ReceiveShape>,
    pub(crate) dispatched: Cell<bool>,
    /// Tokens that go to other ranks, one for each; known with the shape.
    pub(crate) remote_rows: Cell<u32>,
    pub(crate) _memory: Part,
}

impl CudaHandle {
    /// Where the shape lies on the GPU: `[3 * local experts + 4]` u32: first row, kept rows, padded rows of each local
    /// expert, then rows, wanted rows, rows that this rank sends to others, and its own tokens with an expert here.
    pub fn shape_address(&self) -> u64 {
        self.view.shape
    }

    /// The shape of what this rank receives; `None` as long as nobody has waited for it.
    pub fn receive_shape(&self) -> Option<&ReceiveShape> {
        self.shape.get()
    }
}

/// Words of a shape: `SHAPE_WORDS` of `device/common/handle.cuh` beside three for each local expert.
pub(crate) fn shape_words(local_experts: usize) -> usize {
    3 * local_experts + 4
}

/// Upper bounds of a handle's lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) tokens: usize,
    pub(crate) copies: usize,
    pub(crate) ranks: usize,
    pub(crate) local_experts: usize,
    pub(crate) chunks: usize,
    pub(crate) chunk_tokens: usize,
}

impl Sizes {
    pub(crate) fn new(
        tokens: usize,
        copies: usize,
        ranks: usize,
        local_experts: usize,
        most_chunk_tokens: usize,
    ) -> Self {
        let chunk_tokens = chunk_tokens(tokens, most_chunk_tokens);
        Self { tokens, copies, ranks, local_experts, chunks: tokens.div_ceil(chunk_tokens), chunk_tokens }
    }

    /// Entries of the list of sends: a copy each at most, and one for each token without any.
    pub(crate) fn sends(&self) -> usize {
        self.copies + self.tokens
    }

    /// Allocates the lists.
    pub(crate) fn allocate(&self, arena: &Arena, permuted: bool) -> ep::Result<(Part, HandleView)> {
        let (_, bytes) = self.lay_out(0, permuted);
        let part = arena.alloc(bytes as usize, true)?;
        let (view, _) = self.lay_out(part.address(), permuted);
        Ok((part, view))
    }

    /// The lists from `base` on, and where they end: sizes and addresses come from one walk.
    fn lay_out(&self, base: DeviceAddress, permuted: bool) -> (HandleView, DeviceAddress) {
        let begins = self.chunks + 1;
        let mut end = base;
        let mut place = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(16) as DeviceAddress;
            at
        };
        let view = HandleView {
            sends: place(8 * self.sends()),
            send_begin: place(4 * begins),
            token_begin: place(4 * (self.tokens + 1)),
            copies: place(16 * self.copies),
            copy_begin: place(4 * begins),
            recv: place(8 * self.copies),
            recv_begin: place(4 * begins * self.ranks),
            dst_copies: place(8 * self.copies),
            dst_begin: place(4 * begins * self.ranks),
            shape: place(4 * self.shape_words()),
            tokens: self.tokens as u32,
            chunks: self.chunks as u32,
            chunk_tokens: self.chunk_tokens as u32,
            permuted: permuted.into(),
        };
        (view, end)
    }

    /// Words of the shape: three for each local expert, and the rest.
    pub(crate) fn shape_words(&self) -> usize {
        shape_words(self.local_experts)
    }
}

/// Tokens that move as a unit: few enough that all workers have some, and that the first arrive early; many enough
/// that their lists are read in few pieces. No more than `most`, unless there would be too many chunks.
fn chunk_tokens(tokens: usize, most: usize) -> usize {
    (tokens / 256).clamp(1, 4).min(most).max(tokens.div_ceil(MAX_CHUNKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_stay_within_their_flags() {
        for tokens in [0, 1, 3, 4, 255, 256, 1023, 4096, 4097, 100_000, 10_000_000] {
            for most in [1, 2, 64] {
                let sizes = Sizes::new(tokens, 8 * tokens, 8, 4, most);
                assert!(sizes.chunks <= MAX_CHUNKS, "{tokens}: {}", sizes.chunks);
                assert!(sizes.chunks * sizes.chunk_tokens >= tokens);
                assert!(sizes.chunk_tokens <= most || sizes.chunk_tokens == tokens.div_ceil(MAX_CHUNKS));
            }
        }
        let chunks = |most| Sizes::new(1024, 8192, 8, 4, most).chunks;
        assert_eq!([1, 2, 4, 64].map(chunks), [1024, 512, 256, 256]);
    }

    #[test]
    fn lists_follow_one_another_and_end_where_the_walk_says() {
        for (tokens, copies) in [(0, 0), (1, 0), (5, 11), (4096, 32_768)] {
            let sizes = Sizes::new(tokens, copies, 8, 4, 64);
            let (_, bytes) = sizes.lay_out(0, true);
            let (view, end) = sizes.lay_out(4096, true);
            assert_eq!(end, 4096 + bytes);
            let begins = 4 * (sizes.chunks + 1);
            let lists = [
                (view.sends, 8 * sizes.sends()),
                (view.send_begin, begins),
                (view.token_begin, 4 * (tokens + 1)),
                (view.copies, 16 * copies),
                (view.copy_begin, begins),
                (view.recv, 8 * copies),
                (view.recv_begin, 8 * begins),
                (view.dst_copies, 8 * copies),
                (view.dst_begin, 8 * begins),
                (view.shape, 4 * (3 * 4 + 4)),
            ];
            let nexts = lists.iter().skip(1).map(|&(at, _)| at).chain([end]);
            for ((at, bytes), next) in lists.into_iter().zip(nexts) {
                assert!(
                    at % 16 == 0
                        && at + bytes as DeviceAddress <= next
                        && next < at + bytes as DeviceAddress + 16
                );
            }
        }
    }
}
