//! How ranks name memory to each other.

/// The identity of a segment among those of its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentName {
    /// The owner's number for the segment; never reused.
    pub(crate) id: u64,
    pub(crate) len: usize,
}

/// The location of memory that a rank publishes to its peers: bytes `offset..offset + len` of one of its segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PublishedMemory {
    pub(crate) segment: SegmentName,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}
