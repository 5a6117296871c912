//! What preprocessing found out, kept for any number of dispatches and combines.

use std::ops::Range;
use std::sync::OnceLock;

use ep::layout::TokenCopy;
use ep::{DispatchLayout, DispatchMode, ReceiveShape};

/// A routing laid out: made by preprocess, used by dispatch and combine while the routing stands.
#[derive(Debug)]
pub struct HostHandle {
    /// The buffer that made it.
    pub(crate) buffer: u64,
    /// The step of its preprocessing; the same on every rank.
    pub(crate) id: u64,
    pub(crate) mode: DispatchMode,
    pub(crate) layout: DispatchLayout,
    pub(crate) shape: ReceiveShape,
    /// Number of tokens of this rank's rail peer in each domain, its own included.
    pub(crate) rail_tokens: Vec<usize>,
    /// By domain: where the tokens of this rank's rail peer go in this domain. Learnt from the first dispatch.
    pub(crate) forwarded: OnceLock<Vec<ForwardList>>,
}

impl HostHandle {
    /// The shape of what this rank receives.
    pub fn receive_shape(&self) -> &ReceiveShape {
        &self.shape
    }
}

/// Tokens of a rank in another domain, and where their copies go in this one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ForwardList {
    /// Token indices at the source, ascending: those with a copy in this domain.
    tokens: Vec<u32>,
    /// Where each token's copies end.
    ends: Vec<u32>,
    copies: Vec<TokenCopy>,
}

impl ForwardList {
    /// Appends the next token; indices must ascend.
    pub(crate) fn push(&mut self, token: u32, copies: &[TokenCopy]) {
        debug_assert!(self.tokens.last().is_none_or(|&last| last < token));
        self.tokens.push(token);
        self.copies.extend_from_slice(copies);
        self.ends.push(self.copies.len() as u32);
    }

    /// Appends another list, all of whose tokens come later.
    pub(crate) fn append(&mut self, other: &Self) {
        for at in 0..other.tokens.len() {
            self.push(other.tokens[at], other.copies(at));
        }
    }

    /// Places in this list of the tokens whose index lies in `tokens`.
    pub(crate) fn places(&self, tokens: Range<usize>) -> Range<usize> {
        let place = |bound: usize| self.tokens.partition_point(|&token| (token as usize) < bound);
        place(tokens.start)..place(tokens.end)
    }

    /// The copies of the token at a place.
    pub(crate) fn copies(&self, place: usize) -> &[TokenCopy] {
        let start = if place == 0 { 0 } else { self.ends[place - 1] as usize };
        &self.copies[start..self.ends[place] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_tokens() {
        let copy = |row| TokenCopy { position: 1, row };
        let mut list = ForwardList::default();
        list.push(2, &[copy(0), copy(1)]);
        let mut later = ForwardList::default();
        later.push(5, &[copy(2)]);
        later.push(9, &[copy(3), copy(4)]);
        list.append(&later);
        assert_eq!(list.places(0..2), 0..0);
        assert_eq!(list.places(2..6), 0..2);
        assert_eq!(list.places(6..100), 2..3);
        assert_eq!(list.copies(0), [copy(0), copy(1)]);
        assert_eq!(list.copies(1), [copy(2)]);
        assert_eq!(list.copies(2), [copy(3), copy(4)]);
    }
}
