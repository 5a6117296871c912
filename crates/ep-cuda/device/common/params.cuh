// What the host tells a kernel, and what ranks tell each other. Mirrored in src/params.rs; both sides assert the sizes.
#pragma once
#include "types.cuh"

constexpr u32 MAX_RANKS = 72;
// Chunks of one rank's tokens, and groups of pieces of a row, that have a flag of their own.
constexpr u32 MAX_CHUNKS = 1024;
constexpr u32 MAX_GROUPS = 4;
constexpr u32 MAX_FLAGS = MAX_CHUNKS * MAX_GROUPS;

// How scales are laid out; 0 where there are none.
enum ScaleFormat : u32 { SCALES_NONE = 0, SCALES_F32_128 = 1, SCALES_UE8M0_128 = 2, SCALES_UE8M0_32 = 3 };

enum ProbsOrigin : u32 { PROBS_SKIP = 0, PROBS_ROUTING = 1, PROBS_DENSE = 2 };

// How the routing is given.
enum RoutingForm : u32 { ROUTING_TOPK = 0, ROUTING_MAP = 1, ROUTING_ROWS = 2 };

enum FaultKind : u32 {
    FAULT_NONE = 0,
    FAULT_TIMEOUT = 1,         // waited too long for `peer`
    FAULT_ABORTED = 2,         // another rank has given up; `peer` is to blame, and `cause` what became of it
    FAULT_MISMATCH = 3,        // `peer` called something else: `seen` instead of `expected`
    FAULT_INDEX = 4,           // routing: row `index` has expert index `seen`
    FAULT_DUPLICATE = 5,       // routing: row `index` has expert `seen` twice
    FAULT_NAN = 6,             // routing: row `index` has a NaN weight for expert `seen`
    FAULT_TOO_MANY_ROWS = 7,   // `peer` would receive `index` rows
    FAULT_LEFT = 8,            // `peer` has dropped its buffer
    FAULT_DIED = 10,           // the process of `peer` is gone
    FAULT_TOO_MANY_COPIES = 9, // routing: `index` choices, where `expected` were announced
};

enum WaitingFor : u32 { FOR_HELLO = 0, FOR_COUNTS = 1, FOR_CHUNK = 2, FOR_BLOCKS = 3 };

// The first thing that went wrong on a rank; in host memory.
struct Fault {
    u32 kind;
    u32 peer;
    u32 waiting_for;
    u32 step;
    u32 expected;
    u32 seen;
    u64 index;
    u64 waited_ns;
    u32 operation;  // as the host calls it
    u32 awaited;    // who was waited for; NONE for nobody
    u32 cause;      // a FaultKind
    u32 reserved;
};
static_assert(sizeof(Fault) == 56, "mirrored in src/fault.rs");

// The word by which a rank that gives up tells the others: why, who says so, and who is to blame.
__device__ inline u32 abort_word(FaultKind cause, u32 by, u32 to_blame) { return cause << 16 | by << 8 | (to_blame + 1); }
__device__ inline FaultKind abort_cause(u32 word) { return static_cast<FaultKind>(word >> 16); }
__device__ inline u32 abort_by(u32 word) { return word >> 8 & 0xFF; }
__device__ inline u32 abort_to_blame(u32 word) { return (word & 0xFF) - 1; }
static_assert(MAX_RANKS < 0xFF, "a rank fits a byte");

// A rank's words at the start of an operator: it is here, and its memory for this operator lies there. Pointers are
// the speaker's; `Params::delta` makes them the listener's.
struct Hello {
    u64 tokens;         // dispatch: received tokens; combine: partial sums
    u64 scales;         // dispatch: received scales
    u64 probs;          // dispatch: received probs; combine: gathered probs, by copy
    u64 local_experts;  // dispatch, plain mode
    u64 recv;           // lists of the speaker's handle, see handle.cuh
    u64 recv_begin;
    u64 dst_copies;
    u64 dst_begin;
    u32 chunks;
    u32 signature;  // of the call
    u32 epoch;      // written last
    u32 reserved[13];
};
static_assert(sizeof(Hello) == 128, "mirrored in src/params.rs");

// A rank's block of registered memory for everybody's words. The counts of preprocessing follow it:
// `[2][ranks][count_words]`.
struct Control {
    // This rank's own.
    u32 epoch;           // operators done
    u32 blocks_done;     // of the running kernel
    u32 blocks_arrived;  // at the kernel's barrier
    u32 fault_claimed;
    // Of the running combine, what its workers have taken: tokens to be reduced, and items to be pushed but the first of
    // each.
    u32 tokens_taken;
    u32 items_taken;
    u32 reserved[26];
    // Written by peers: an `abort_word`; and, of each, whether it has left (1) or died (2).
    u32 abort;
    u32 unused[31];
    u32 left[MAX_RANKS];
    Hello hello[2][MAX_RANKS];
    // `flags[peer][chunk * groups + group]`: the epoch in which the peer finished it.
    u32 flags[MAX_RANKS][MAX_FLAGS];
};
static_assert(sizeof(Control) == 256 + 4 * MAX_RANKS + 2 * MAX_RANKS * sizeof(Hello) + MAX_RANKS * MAX_FLAGS * 4, "mirrored");

// What all kernels need.
struct Common {
    u32 rank;
    u32 ranks;
    u32 experts;
    u32 signature;
    u64 timeout_ns;
    Control* own;
    Fault* fault;
    // Every rank's control block, as addressed from here.
    Control* control[MAX_RANKS];
    // To be added to a pointer of that rank's.
    i64 delta[MAX_RANKS];
    // First expert position of every rank, and one past the last.
    u32 owner_begin[MAX_RANKS + 1];
    u32 operation;  // what the host calls this
};
static_assert(sizeof(Common) == 40 + 16 * MAX_RANKS + 4 * MAX_RANKS + 8, "mirrored in src/params.rs");

// A handle's arrays; see handle.cuh.
struct HandleView {
    uint2* sends;
    u32* send_begin;
    u32* token_begin;
    uint4* copies;
    u32* copy_begin;
    uint2* recv;
    u32* recv_begin;
    uint2* dst_copies;
    u32* dst_begin;
    u32* shape;
    u32 tokens;
    u32 chunks;
    u32 chunk_tokens;
    u32 permuted;
};
static_assert(sizeof(HandleView) == 96, "mirrored in src/params.rs");

struct PreprocessParams {
    Common common;
    HandleView handle;
    u32 form;
    u32 topk;
    u32 pad_multiple;  // 0: plain mode
    u32 capacity;      // NONE: unbounded
    u32 count_words;
    u32 tile;          // tokens that a block works on at a time; a multiple of 32
    u32 most_copies;   // that the handle has room for
    u32 reserved;
    const i32* topk_idx;
    const i64* topk_idx_wide;
    const float* weights;
    const u8* map;
    const u32* row_begin;
    const u32* row_experts;
    const u32* position_of;  // by expert; null: the identity
    u32* block_columns;      // [blocks][columns]
    u32* host_shape;         // host memory; null: not wanted
    // The caller's, each null where not wanted: [local experts] with and without padding (permuted mode), and [1].
    i64* tokens_per_expert;
    i64* kept_per_expert;
    i32* overflow;
};
static_assert(sizeof(PreprocessParams) == sizeof(Common) + sizeof(HandleView) + 32 + 96, "mirrored");

struct DispatchParams {
    Common common;
    HandleView handle;
    const u8* tokens;
    const u8* scales;
    const float* dense;
    u8* out_tokens;
    u8* out_scales;
    float* out_probs;
    u8* out_local_experts;
    u32 probs;          // ProbsOrigin
    u32 scale_format;
    u32 row_bytes_in;
    u32 row_bytes_out;
    u32 scale_row_bytes;
    u32 pieces;         // of a row
    u32 piece_bytes;    // of an input row
    u32 groups;         // of pieces
    u32 stages;         // of one worker's ring
    u32 stage_bytes;
    u32 reserved[2];
};
static_assert(sizeof(DispatchParams) == sizeof(Common) + sizeof(HandleView) + 56 + 48, "mirrored in src/params.rs");

struct CombineParams {
    Common common;
    HandleView handle;
    const u8* rows;
    const float* row_probs;
    u8* out_tokens;
    float* out_probs;
    u8* partials;        // registered: [sends][hidden] of the wire's type
    float* prob_scratch; // registered: [copies]
    u32 hidden;
    u32 slack;           // tokens that peers may be behind this rank
};
static_assert(sizeof(CombineParams) == sizeof(Common) + sizeof(HandleView) + 48 + 8, "mirrored in src/params.rs");
