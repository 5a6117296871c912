//! The result of preprocess: lists on the GPU. `device/common/lists.cuh` describes their entries.

use std::cell::{Cell, OnceCell};
use std::sync::Arc;

use ep::call::Maker;
use ep::{DispatchMode, HandleShape, ReceiveShape};

use crate::arena::{Arena, Part};
use crate::driver::DeviceAddress;
use crate::params::{HandleView, MAX_CHUNKS};
use crate::rails::Bounds;
use crate::shared;

/// The result of preprocess for one routing. Any number of dispatches and combines may use it.
#[derive(Debug)]
pub struct CudaHandle {
    /// The buffer that made it.
    pub(crate) buffer: Maker,
    /// The step of its preprocess; the same on every rank.
    pub(crate) id: u64,
    pub(crate) mode: DispatchMode,
    pub(crate) capacity: Option<usize>,
    /// Upper bounds of the lists' lengths.
    pub(crate) sizes: Sizes,
    pub(crate) view: HandleView,
    /// What this rank receives; empty until the host has read it.
    pub(crate) shape: OnceCell<ReceiveShape>,
    pub(crate) dispatched: Cell<bool>,
    /// Rows that this rank sends to other ranks of its domain, one per (token, rank); 0 until the host has read the shape.
    pub(crate) remote_rows: Cell<u32>,
    pub(crate) memory: Arc<Part>,
    /// The last capture whose graph keeps `memory`.
    pub(crate) kept_by: Cell<Option<u64>>,
}

impl CudaHandle {
    /// The address of the shape in GPU memory, `[3 * local experts + 3]` u32: the first row of each local expert, then
    /// the kept rows of each, then the padded rows of each; then the rows received, the rows wanted, and the rows that
    /// this rank sends to other ranks of its domain.
    pub fn shape_address(&self) -> u64 {
        self.view.shape
    }

    /// The sizes of the arguments of dispatch and combine, as far as the host has them.
    pub(crate) fn shape_so_far(&self) -> HandleShape {
        let known = self.shape.get();
        HandleShape {
            mode: self.mode,
            tokens: self.sizes.tokens,
            rows: known.map_or(self.capacity.unwrap_or(0), ReceiveShape::allocated_rows),
            capacity: self.capacity,
            received_rows: known.map(|shape| shape.rows),
        }
    }

    /// The shape of what this rank receives; `None` until `preprocess` without capacity or `receive_shape` has waited
    /// for it.
    pub fn receive_shape(&self) -> Option<&ReceiveShape> {
        self.shape.get()
    }
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

    /// Upper bound of the number of entries of `sends`. A token has one entry for each other rank or lane that gets it, one
    /// for each of its copies on this rank, and one if it has no copy. In a map, a token may have a copy for every expert.
    pub(crate) fn sends(&self) -> usize {
        self.copies.min(self.tokens.saturating_mul(self.ranks - 1 + self.local_experts)) + self.tokens
    }

    /// Allocates the lists.
    pub(crate) fn allocate(
        &self,
        arena: &Arena,
        permuted: bool,
        rails: Option<&Bounds>,
    ) -> ep::Result<(Part, HandleView)> {
        let (_, bytes) = self.lay_out(0, permuted, rails);
        let part = arena.alloc(bytes as usize, true)?;
        let (view, _) = self.lay_out(part.address(), permuted, rails);
        Ok((part, view))
    }

    /// Places the lists one after the other, the first at `base`. Returns them and the end of the last one.
    /// [`allocate`](Self::allocate) computes both the size and the addresses with it.
    fn lay_out(
        &self,
        base: DeviceAddress,
        permuted: bool,
        rails: Option<&Bounds>,
    ) -> (HandleView, DeviceAddress) {
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
            rail_begin: rails.map_or(0, |rails| place(4 * rails.domains() * 2 * begins)),
            set_rows: rails.map_or(0, |_| place(4 * self.ranks)),
            sets: rails.map_or(0, |rails| place(rails.list_bytes())),
            tokens: self.tokens as u32,
            chunks: self.chunks as u32,
            chunk_tokens: self.chunk_tokens as u32,
            permuted: permuted.into(),
        };
        (view, end)
    }

    /// Words of the shape.
    pub(crate) fn shape_words(&self) -> usize {
        shared::shape_words(self.local_experts)
    }
}

/// Tokens of a chunk. Small chunks give all workers work, and the first ones arrive early; the lists of large chunks are
/// read in fewer pieces. At most `most`, unless there would be more than [`MAX_CHUNKS`] chunks.
fn chunk_tokens(tokens: usize, most: usize) -> usize {
    (tokens / 256).clamp(1, 4).min(most).max(tokens.div_ceil(MAX_CHUNKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_never_more_chunks_than_flags() {
        for tokens in [0, 1, 3, 4, 255, 256, 1023, 4096, 4097, 100_000, 10_000_000] {
            for most in [1, 2, 64] {
                let sizes = Sizes::new(tokens, 8 * tokens, 8, 4, most);
                assert!(sizes.chunks <= MAX_CHUNKS, "{tokens}: {}", sizes.chunks);
                assert!(sizes.chunks * sizes.chunk_tokens >= tokens);
                assert!(sizes.chunk_tokens <= most || sizes.chunk_tokens == tokens.div_ceil(MAX_CHUNKS));
            }
        }
        let sends = |copies: usize| Sizes::new(1024, copies * 1024, 8, 32, 64).sends();
        assert_eq!([1, 8, 39, 40, 256].map(sends), [2, 9, 40, 40, 40].map(|each: usize| each * 1024));
        let chunks = |most| Sizes::new(1024, 8192, 8, 4, most).chunks;
        assert_eq!([1, 2, 4, 64].map(chunks), [1024, 512, 256, 256]);
    }

    #[test]
    fn lists_do_not_overlap_and_end_where_lay_out_says() {
        for (tokens, copies) in [(0, 0), (1, 0), (5, 11), (4096, 32_768)] {
            let sizes = Sizes::new(tokens, copies, 8, 4, 64);
            let (_, bytes) = sizes.lay_out(0, true, None);
            let (view, end) = sizes.lay_out(4096, true, None);
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
                (view.shape, 4 * sizes.shape_words()),
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
