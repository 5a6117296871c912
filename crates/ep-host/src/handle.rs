//! [`HostHandle`]: the result of preprocess, reused by any number of dispatches and combines. `operators` makes it;
//! `dispatch` and `combine` read it.

use std::ops::Range;
use std::sync::OnceLock;

use ep::call::Maker;
use ep::layout::TokenCopy;
use ep::{DispatchLayout, DispatchMode, HandleShape, ReceiveShape};

/// The layout of a routing: made by preprocess, used by dispatch and combine as long as the routing does not change.
#[derive(Debug)]
pub struct HostHandle {
    /// The buffer that made the handle.
    pub(crate) buffer: Maker,
    /// The step of the preprocess that made it; equal on every rank.
    pub(crate) id: u64,
    pub(crate) mode: DispatchMode,
    pub(crate) layout: DispatchLayout,
    pub(crate) shape: ReceiveShape,
    /// By domain: number of tokens of this rank's rail peer; in this rank's domain, of this rank.
    pub(crate) rail_tokens: Vec<usize>,
    /// By domain: the copies in this domain of the tokens of this rank's rail peer. Set by the first dispatch.
    pub(crate) forward_lists: OnceLock<Vec<ForwardList>>,
}

impl HostHandle {
    /// The sizes of the arguments of dispatch and combine.
    pub(crate) fn sizes(&self) -> HandleShape {
        HandleShape {
            mode: self.mode,
            tokens: self.layout.tokens(),
            rows: self.shape.allocated_rows(),
            capacity: self.shape.capacity,
            received_rows: Some(self.shape.rows),
        }
    }

    /// The shape of what this rank receives.
    pub fn receive_shape(&self) -> &ReceiveShape {
        &self.shape
    }
}

/// The tokens of a rank in another domain that have copies in this domain, and those copies. An entry is one token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ForwardList {
    /// By entry: index of the token at the source, ascending.
    tokens: Vec<u32>,
    /// By entry: end of its copies in `copies`.
    ends: Vec<usize>,
    copies: Vec<TokenCopy>,
}

impl ForwardList {
    /// An empty list with room for `tokens` tokens and `copies` copies.
    pub(crate) fn with_capacity(tokens: usize, copies: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(tokens),
            ends: Vec::with_capacity(tokens),
            copies: Vec::with_capacity(copies),
        }
    }

    /// Appends a copy of the token that the next [`close`](Self::close) names.
    pub(crate) fn add(&mut self, copy: TokenCopy) {
        self.copies.push(copy);
    }

    /// Appends the entry of `token` with the copies added since the last entry. Token indices must ascend.
    pub(crate) fn close(&mut self, token: u32) {
        debug_assert!(self.tokens.last().is_none_or(|&last| last < token));
        self.tokens.push(token);
        self.ends.push(self.copies.len());
    }

    /// Appends another list. All its token indices must be higher than those of this list.
    pub(crate) fn append(&mut self, other: &Self) {
        let before = self.copies.len();
        debug_assert!(self.tokens.last() < other.tokens.first() || other.tokens.is_empty());
        self.tokens.extend_from_slice(&other.tokens);
        self.ends.extend(other.ends.iter().map(|end| before + end));
        self.copies.extend_from_slice(&other.copies);
    }

    /// The entries whose token index lies in `tokens`.
    pub(crate) fn entries(&self, tokens: Range<usize>) -> Range<usize> {
        let entry = |bound: usize| self.tokens.partition_point(|&token| (token as usize) < bound);
        entry(tokens.start)..entry(tokens.end)
    }

    /// The copies of an entry.
    pub(crate) fn copies(&self, entry: usize) -> &[TokenCopy] {
        &self.copies[self.begin(entry)..self.ends[entry]]
    }

    /// Number of copies of these entries.
    pub(crate) fn copies_in(&self, entries: Range<usize>) -> usize {
        if entries.is_empty() { 0 } else { self.ends[entries.end - 1] - self.begin(entries.start) }
    }

    fn begin(&self, entry: usize) -> usize {
        if entry == 0 { 0 } else { self.ends[entry - 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_by_token_index() {
        let copy = |row| TokenCopy { position: 1, row };
        let push = |list: &mut ForwardList, token, copies: &[TokenCopy]| {
            copies.iter().for_each(|&copy| list.add(copy));
            list.close(token);
        };
        let mut list = ForwardList::default();
        push(&mut list, 2, &[copy(0), copy(1)]);
        let mut later = ForwardList::with_capacity(2, 3);
        push(&mut later, 5, &[copy(2)]);
        push(&mut later, 9, &[copy(3), copy(4)]);
        list.append(&later);
        assert_eq!(list.entries(0..2), 0..0);
        assert_eq!(list.entries(2..6), 0..2);
        assert_eq!(list.entries(6..100), 2..3);
        assert_eq!(list.copies(0), [copy(0), copy(1)]);
        assert_eq!(list.copies(1), [copy(2)]);
        assert_eq!(list.copies(2), [copy(3), copy(4)]);
        assert_eq!([0..0, 0..2, 1..3, 2..2].map(|entries| list.copies_in(entries)), [0, 3, 3, 0]);
    }
}
