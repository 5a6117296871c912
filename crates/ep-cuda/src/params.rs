//! What kernels are told, and what ranks tell each other: the mirror of `device/common/params.cuh`, which asserts the
//! same sizes.

use std::mem::{offset_of, size_of};

use crate::driver::DeviceAddress;

/// Ranks of one NVLink domain, at most.
pub(crate) const MAX_RANKS: usize = 72;
/// Chunks of one rank's tokens, at most.
pub(crate) const MAX_CHUNKS: usize = 1024;
/// Groups of pieces of a row that have a flag of their own, at most.
pub(crate) const MAX_GROUPS: usize = 4;

/// Stands for "no row", "no bound".
pub(crate) const NONE: u32 = u32::MAX;

/// Bytes of a rank's words to the others.
const HELLO_BYTES: usize = 128;

/// First byte of the words by which peers say that they have left.
pub(crate) const LEFT_OFFSET: usize = 256;

/// Bytes of a control block, without the counts behind it.
pub(crate) const CONTROL_BYTES: usize =
    256 + 4 * MAX_RANKS + 2 * MAX_RANKS * HELLO_BYTES + 4 * MAX_RANKS * MAX_CHUNKS * MAX_GROUPS;

/// Words of the record of the first fault.
pub(crate) const FAULT_WORDS: usize = 14;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Common {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) experts: u32,
    pub(crate) signature: u32,
    pub(crate) timeout_ns: u64,
    pub(crate) own: DeviceAddress,
    pub(crate) fault: DeviceAddress,
    pub(crate) control: [DeviceAddress; MAX_RANKS],
    pub(crate) delta: [i64; MAX_RANKS],
    pub(crate) owner_begin: [u32; MAX_RANKS + 1],
    pub(crate) operation: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandleView {
    pub(crate) sends: DeviceAddress,
    pub(crate) send_begin: DeviceAddress,
    pub(crate) token_begin: DeviceAddress,
    pub(crate) copies: DeviceAddress,
    pub(crate) copy_begin: DeviceAddress,
    pub(crate) recv: DeviceAddress,
    pub(crate) recv_begin: DeviceAddress,
    pub(crate) dst_copies: DeviceAddress,
    pub(crate) dst_begin: DeviceAddress,
    pub(crate) shape: DeviceAddress,
    pub(crate) tokens: u32,
    pub(crate) chunks: u32,
    pub(crate) chunk_tokens: u32,
    pub(crate) permuted: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreprocessParams {
    pub(crate) common: Common,
    pub(crate) handle: HandleView,
    pub(crate) form: u32,
    pub(crate) topk: u32,
    pub(crate) pad_multiple: u32,
    pub(crate) capacity: u32,
    pub(crate) count_words: u32,
    pub(crate) tile: u32,
    pub(crate) most_copies: u32,
    pub(crate) reserved: u32,
    pub(crate) topk_idx: DeviceAddress,
    pub(crate) topk_idx_wide: DeviceAddress,
    pub(crate) weights: DeviceAddress,
    pub(crate) map: DeviceAddress,
    pub(crate) row_begin: DeviceAddress,
    pub(crate) row_experts: DeviceAddress,
    pub(crate) position_of: DeviceAddress,
    pub(crate) block_columns: DeviceAddress,
    pub(crate) host_shape: DeviceAddress,
    pub(crate) tokens_per_expert: DeviceAddress,
    pub(crate) kept_per_expert: DeviceAddress,
    pub(crate) overflow: DeviceAddress,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct DispatchParams {
    pub(crate) common: Common,
    pub(crate) handle: HandleView,
    pub(crate) tokens: DeviceAddress,
    pub(crate) scales: DeviceAddress,
    pub(crate) dense: DeviceAddress,
    pub(crate) out_tokens: DeviceAddress,
    pub(crate) out_scales: DeviceAddress,
    pub(crate) out_probs: DeviceAddress,
    pub(crate) out_local_experts: DeviceAddress,
    pub(crate) probs: u32,
    pub(crate) scale_format: u32,
    pub(crate) row_bytes_in: u32,
    pub(crate) row_bytes_out: u32,
    pub(crate) scale_row_bytes: u32,
    pub(crate) pieces: u32,
    pub(crate) piece_bytes: u32,
    pub(crate) groups: u32,
    pub(crate) stages: u32,
    pub(crate) stage_bytes: u32,
    pub(crate) reserved: [u32; 2],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CombineParams {
    pub(crate) common: Common,
    pub(crate) handle: HandleView,
    pub(crate) rows: DeviceAddress,
    pub(crate) row_probs: DeviceAddress,
    pub(crate) out_tokens: DeviceAddress,
    pub(crate) out_probs: DeviceAddress,
    pub(crate) partials: DeviceAddress,
    pub(crate) prob_scratch: DeviceAddress,
    pub(crate) hidden: u32,
    pub(crate) slack: u32,
}

const _: () = {
    assert!(size_of::<Common>() == 40 + 16 * MAX_RANKS + 4 * MAX_RANKS + 8);
    assert!(offset_of!(Common, control) == 40);
    assert!(size_of::<HandleView>() == 96);
    assert!(size_of::<PreprocessParams>() == size_of::<Common>() + size_of::<HandleView>() + 32 + 96);
    assert!(size_of::<DispatchParams>() == size_of::<Common>() + size_of::<HandleView>() + 56 + 48);
    assert!(size_of::<CombineParams>() == size_of::<Common>() + size_of::<HandleView>() + 48 + 8);
};
