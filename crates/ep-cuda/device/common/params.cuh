// Kernel parameters, structs that ranks write into each other's memory, and sizes of shared memory.
//
// GENERATED from src/params.rs and src/shared.rs. To change it, edit those files and run
// HYBRID_EP_UPDATE_PARAMS=1 cargo test -p ep-cuda --lib params
#pragma once
#include "types.cuh"

// Entries of the lists of a handle: see lists.cuh.
struct Send;
struct Copy;
struct Receive;
struct DstCopy;

// Maximum number of ranks, in all NVLink domains together.
constexpr u32 MAX_RANKS = 72;
// Maximum number of chunks of one rank's tokens.
constexpr u32 MAX_CHUNKS = 1024;
// Maximum number of groups of pieces of a row in dispatch, and of shares of a row in combine. Each has its own flags.
constexpr u32 MAX_GROUPS = 4;
// Maximum number of flags for one source in a control block. A source is a rank of the world.
constexpr u32 MAX_FLAGS = 4096;
// No value: no capacity bound, no rank, no list index. `NO_ROW` of lists.cuh has the same value.
constexpr u32 NONE = 4294967295;
// Threads of a block of `preprocess`.
constexpr u32 PREPROCESS_THREADS = 1024;
// The same with rails, where threads need more registers.
constexpr u32 PREPROCESS_RAIL_THREADS = 512;
// Threads of a block of `weight_rows`.
constexpr u32 WEIGHT_ROWS_THREADS = 256;
// Threads of a block of `dense`.
constexpr u32 DENSE_THREADS = 256;
// Threads of a block of the kernels of codecs.
constexpr u32 CODEC_THREADS = 256;
// Elements that a block of `residuals` handles at a time.
constexpr u32 RESIDUAL_TILE = 2048;
// `residuals` counts by the upper bits of a magnitude: its exponent and four bits of its mantissa.
constexpr u32 RESIDUAL_BIN_SHIFT = 19;
// Number of these counts.
constexpr u32 RESIDUAL_BINS = 4096;
// Threads of the block of `lane_copy`: one warp takes commands, one says which copies have ended, the others copy.
constexpr u32 LANE_COPY_THREADS = 576;
// Words of 64 bits from one command of `lane_copy` to the next.
constexpr u32 LANE_COMMAND_WORDS = 8;
// Maximum number of ring stages of a block of dispatch: the size of its static array of barriers.
constexpr u32 MOST_STAGES = 128;
// Words of a call that must be equal on all ranks: see src/call.rs.
constexpr u32 CALL_WORDS = 6;
// Words of 32 bits of a `Handshake`.
constexpr u32 HANDSHAKE_WORDS = 38;
// Bytes of a worker's buffer for scales, if dispatch quantises.
constexpr u32 SCALE_BUFFER_BYTES = 512;
// Stages of the ring of a team of combine.
constexpr u32 COMBINE_STAGES = 7;
// Maximum number of turns of a slice. A lane adds one vector (of at most 16 bytes) in each turn, and its registers,
// which hold the sums, limit the number.
constexpr u32 COMBINE_TURNS = 7;
// Bytes of a consumer's slice of a stage of combine.
constexpr u32 COMBINE_SLICE_BYTES = 3584;
// Index in a handle's shape, after the three words per local expert: rows that this rank receives, padding
// included.
constexpr u32 SHAPE_ROWS = 0;
// Like `SHAPE_ROWS`, for the rows that this rank would receive without a capacity.
constexpr u32 SHAPE_WANTED = 1;
// Like `SHAPE_ROWS`, for the rows that this rank sends to other ranks of its domain, one per (token, rank). Rows that a
// capacity drops are counted; rows in lanes to other domains are not.
constexpr u32 SHAPE_REMOTE = 2;
// Number of words of a shape after the three words per local expert.
constexpr u32 SHAPE_WORDS = 3;
// Maximum number of sections of a lane: parts of different stride that one operator sends along a rail.
constexpr u32 RAIL_SECTIONS = 3;
// Bits of a word of `Control::left` that hold the `GoneWord`. If the rank has left after it had sent everything along
// its rail, the bits above hold its last epoch.
constexpr u32 GONE_BITS = 3;
// Bits of a rank in an abort word (sync.cuh). The lowest bits have the rank at fault plus one, the next ones the rank
// that wrote the word first, and those above the cause.
constexpr u32 ABORT_RANK_BITS = 8;

// The format of scales.
enum ScaleCode : u32 {
    SCALES_NONE = 0,
    SCALES_F32_128 = 1,
    SCALES_UE8M0_128 = 2,
    SCALES_UE8M0_32 = 3,
};

// The source of the probabilities that dispatch sends.
enum ProbsOrigin : u32 {
    PROBS_SKIP = 0,
    PROBS_ROUTING = 1,
    PROBS_DENSE = 2,
};

// The format of a routing.
enum RoutingForm : u32 {
    ROUTING_TOPK = 0,
    ROUTING_MAP = 1,
    ROUTING_ROWS = 2,
    // Bit masks of the experts of this domain, as rails carry them.
    ROUTING_MASKS = 3,
};

// What a section of a lane has one element for.
enum RailPer : u32 {
    // Each row of the set: tokens, scales, domain sums, masks.
    RAIL_PER_ROW = 0,
    // Each copy of the set: weights.
    RAIL_PER_COPY = 1,
    // The operator: the counts of preprocess. Sent with the first unit.
    RAIL_ONCE = 2,
};

// The fault of a rank; says which fields of `Fault` hold what.
enum FaultKind : u32 {
    FAULT_NONE = 0,
    // `peer` did not write the awaited word within the bound of the wait (`bound_of`, sync.cuh). `Late` is the
    // same for the entry bound.
    FAULT_STALLED = 1,
    // Another rank has given up; `peer` is the rank at fault, and `cause` is what happened to `peer`.
    FAULT_ABORTED = 2,
    // `peer` called with different arguments: its signature is `seen`, this rank's is `expected`.
    FAULT_MISMATCH = 3,
    // Routing: row `index` has the expert index `seen`.
    FAULT_INDEX = 4,
    // Routing: row `index` has expert `seen` twice.
    FAULT_DUPLICATE = 5,
    // Routing: row `index` has a NaN weight for expert `seen`.
    FAULT_NAN = 6,
    // `peer` would receive `index` rows; in plain mode with `expected` weights each, unless `expected` is 0.
    FAULT_TOO_MANY_ROWS = 7,
    // `peer` has left: it has dropped its buffer, or failed.
    FAULT_LEFT = 8,
    // Routing: it has `index` copies; the handle has room for `expected`.
    FAULT_TOO_MANY_COPIES = 9,
    // The process of `peer` has ended.
    FAULT_DIED = 10,
    // `peer` did not enter the operator within the entry bound (`timeout`).
    FAULT_LATE = 11,
    // The process of `peer` has sent no heartbeat for the stall bound.
    FAULT_SILENT = 12,
    // What this rank sends to another domain needs a lane of `index` bytes.
    FAULT_SHORT_LANE = 13,
    // Routing: it has `index` copies in another domain; a set has at most `expected`.
    FAULT_RAIL_COPIES = 14,
    // The network does not reach the machine of `peer`.
    FAULT_UNREACHABLE = 15,
};

// What a rank was waiting for when it failed.
enum WaitingFor : u32 {
    // A peer's handshake or plan: the peer may not have entered the operator yet.
    FOR_HANDSHAKE = 0,
    // A chunk from a peer that has entered.
    FOR_CHUNK = 1,
    // The other blocks of the rank's own kernel.
    FOR_BLOCKS = 2,
    // Rows along the rail, from a peer that has entered.
    FOR_RAIL = 3,
    // A chunk of a foreign set from its forwarder, or with rails a handshake of preprocess: the sender may itself
    // wait for another domain.
    FOR_FOREIGN = 4,
};

// The state of a peer as a host writes it into `Control::left`. Any value but `Here` ends waits for that peer, except
// `Left` of a rank of another domain that took part in the operator (`gone_of` in sync.cuh).
enum GoneWord : u32 {
    GONE_HERE = 0,
    GONE_LEFT = 1,
    GONE_DIED = 2,
    // The peer's heartbeat has stopped; the host writes `Here` again when the heartbeat resumes.
    GONE_SILENT = 3,
    // The network does not reach the peer's machine.
    GONE_UNREACHABLE = 4,
    // The peer has left after a fault of its own, before its work was over, or before its proxy had sent everything to
    // other domains.
    GONE_LEFT_EARLY = 5,
};

// The first fault of a rank.
struct Fault {
    // A `FaultKind`, written last.
    u32 kind;
    u32 peer;
    // A `WaitingFor`.
    u32 waiting_for;
    // The epoch. Messages show it as `#7`.
    u32 step;
    u32 expected;
    u32 seen;
    u64 index;
    u64 waited_ns;
    // The operator as a number of `ep::Operator`.
    u32 operation;
    // The rank that this rank was waiting for; NONE if it was not waiting.
    u32 awaited;
    // A `FaultKind`.
    u32 cause;
    // The rank that recorded the fault.
    u32 rank;
};

// A fault and, if `kind` is `Mismatch`, the words of both calls.
struct FaultRecord {
    Fault fault;
    u64 call[CALL_WORDS];
    // The call of `fault.peer`.
    u64 peer_call[CALL_WORDS];
};

// The kernel's report to its host; in host memory.
struct FaultReport {
    FaultRecord own;
    // If another rank gave up first: a copy of the record of the rank at fault or, if that rank has none, of the
    // rank that wrote the abort word.
    FaultRecord theirs;
};

// What a rank tells every rank of its domain when it enters an operator (in preprocess, after its counts): the addresses
// of its outputs and lists, and its call. Addresses are the sender's; the receiver adds `Common::delta`. It travels as
// packets (`Control::handshake`).
struct Handshake {
    // dispatch: received tokens; combine: partial sums.
    u64 tokens;
    // dispatch: received scales.
    u64 scales;
    // dispatch: received probabilities; combine: `prob_scratch`, by copy.
    u64 probs;
    // dispatch, plain mode: the map of local experts.
    u64 local_experts;
    // Lists of the sender's handle, see lists.cuh.
    u64 recv;
    u64 recv_begin;
    u64 dst_copies;
    u64 dst_begin;
    u32 chunks;
    // Checksum of `call`.
    u32 signature;
    // The logarithm to base 2 of the number of items of one chunk of the sender's tokens. Each has a part of every row, and
    // flags of its own: a group of pieces (dispatch) or a share (combine, `Segments` in sum.cuh).
    u32 share_bits;
    u32 reserved;
    // With rails: the lists of the foreign sets that the sender forwards.
    u64 sets;
    // combine with rails: partial sums and probabilities of those sets.
    u64 set_tokens;
    u64 set_probs;
    // The arguments of the sender's call; read only if the signatures differ.
    u64 call[CALL_WORDS];
};

// A copy of a part of a `RailPlan`, in GPU memory.
struct SeenPlan {
    // Offsets of the sections in the lane.
    u64 sections[RAIL_SECTIONS];
    u32 rows;
    u32 reserved;
};

// A rank's control block, in registered memory: words that it shares with peers and hosts, and words that only its own
// kernels access. docs/protocol.md lists every word's writers, readers and memory order. The counts of preprocess
// follow the block: `[2][ranks][count_words]`.
struct Control {
    // Operators that this rank has finished, modulo 2^32. Only this rank's kernels access the words from here to
    // `reserved`; with rails, this rank's host reads `epoch` when the rank leaves.
    u32 epoch;
    // Blocks of the running kernel that have finished.
    u32 blocks_done;
    // Blocks of the running kernel that have reached the grid barrier (`all_blocks`).
    u32 blocks_arrived;
    // 1 once a thread has claimed the right to report this rank's first fault.
    u32 fault_claimed;
    // combine: tokens, or shares of tokens, that workers have claimed for the reduce role.
    u32 tokens_taken;
    // Items that workers have claimed for the push role (combine) or the send role (dispatch), not counting the first
    // item of each worker.
    u32 items_taken;
    // dispatch: items that workers have claimed for the duplicate role, not counting the first item of each worker.
    u32 arrivals_taken;
    u32 reserved[25];
    // Written by this rank, by peers, and by this rank's host for ranks that cannot reach it: an `abort_word`, see
    // sync.cuh.
    u32 abort;
    u32 unused[31];
    // `left[peer]`: a `GoneWord` and an epoch (`GONE_BITS`), written by hosts.
    u32 left[MAX_RANKS];
    // With rails, by domain: what workers have claimed of the domain's foreign set. combine: tokens, for the reduce
    // role. dispatch: items, for the forward role, not counting the first item of each worker. Only this rank's kernels
    // access it.
    u32 set_taken[MAX_RANKS];
    // preprocess with rails: blocks that have reached the grid barriers after the first one, by barrier.
    u32 more_arrived[MAX_RANKS + 1];
    // This rank's first fault; peers read it when this rank has given up.
    FaultRecord record;
    // `handshake[epoch % 2][peer][word]`: a packet, which has a word of the peer's `Handshake` in its lower half and the
    // epoch in its upper half. A reader knows of each packet whether it belongs to an operator. So packets need no order
    // among each other, and the writer waits for none of them.
    u64 handshake[2][MAX_RANKS][HANDSHAKE_WORDS];
    // `flags[rank][index]`: the epoch in which a rank of the domain has written what the index stands for: an item
    // (`SourceItems::place` in rails.cuh). `rank` is the writer of the flag; for foreign sets it is the writer's rail peer in
    // the set's domain (`alias` in rails.cuh).
    u32 flags[MAX_RANKS][MAX_FLAGS];
    // `rail_seen[epoch % 2][domain]`, with rails: `RailState::progress` of the rail peer as a thread of this rank has
    // last read it, after the check of the peer's arguments. Only this rank's kernels access it and the next words.
    u64 rail_seen[2][MAX_RANKS];
    // `rail_looking[domain]`, with rails: 1 while a thread of this rank reads `RailState::progress`.
    u32 rail_looking[MAX_RANKS];
    // `rail_plans[epoch % 2][domain]`, with rails: what the kernels need of the plan of the rail peer, copied by the
    // thread that first sees its epoch.
    SeenPlan rail_plans[2][MAX_RANKS];
};

// The addresses of a rank, a foreign set or a lane, in this rank's address space: where this rank writes, and the lists
// that it reads. Those of a rank come from its handshake, those of a set from the forwarder's. Each block has its views
// in shared memory.
struct PeerView {
    u8* tokens;
    u8* scales;
    float* probs;
    u8* local_experts;
    const Receive* recv;
    const u32* recv_begin;
    const DstCopy* dst_copies;
    const u32* dst_begin;
    // The flags that this rank sets on the peer.
    u32* flags;
    u32 chunks;
    // Of a rank, its `Handshake::share_bits`; of a foreign set, this rank's, since with rails all ranks have the same.
    u32 share_bits;
};

// A part of a lane: elements of `stride` bytes, the first at `offset`. A section with stride 0 is not used.
struct RailSection {
    u64 offset;
    u32 stride;
    // A `RailPer`.
    u32 per;
};

// Rows and copies of all units of a plan up to and including one.
struct UnitEnd {
    u32 rows;
    u32 copies;
};

// What an operator sends to one other domain; see docs/cuda-rails.md.
struct RailPlan {
    // The arguments of the sender's call.
    u64 call[CALL_WORDS];
    RailSection sections[RAIL_SECTIONS];
    // Rows of the set, and their copies.
    u32 rows;
    u32 copies;
    // Number of units, and of flags of each unit.
    u32 units;
    u32 flags_per_unit;
    // Rows of a chunk, the unit of `RailState::progress`.
    u32 chunk_rows;
    // Checksum of `call`.
    u32 signature;
    u32 reserved;
    // Written last, with release order.
    u32 epoch;
    // By unit. They are last, so that the proxy sends a plan without the places of units that it does not have.
    UnitEnd ends[MAX_CHUNKS];
};

// What a rank's proxy tells the rank's kernels about one rail peer.
struct RailState {
    // Upper 32 bits: the last epoch whose plan has arrived. Lower 32 bits: how many chunks at the start of its rows
    // have arrived.
    u64 progress;
    u32 unused[30];
};

// The words of one rail peer for the epochs of one parity, in host memory.
struct RailEnd {
    // Written by this rank's kernels.
    RailPlan out;
    // `out_flags[unit * flags_per_unit + n]`: the epoch in which the unit's part n was stored to the lane.
    u32 out_flags[MAX_FLAGS];
    // Written by the peer's engine.
    RailPlan input;
    // Written by this rank's proxy.
    RailState state;
};

// A rank's place among the NVLink domains, and its rail window, in this rank's addresses. Kernels of a world of one
// domain are compiled without rails and do not read it.
struct Rails {
    // `[domains][2]`: by domain, and by parity of the epoch.
    RailEnd* ends;
    // `[domains][2][2][lane_bytes]`: by domain, by parity, `out` then `in`.
    u8* lanes;
    u64 lane_bytes;
    u32 domains;
    // This rank's domain.
    u32 domain;
    // The domain's ranks are `first .. first + local_ranks`.
    u32 first;
    u32 local_ranks;
    // Rows of a chunk of a set; equal on all ranks.
    u32 chunk_rows;
    // Maximum number of rows of a set, and of their copies; equal on all ranks.
    u32 most_rows;
    u32 most_copies;
    u32 reserved;
};

// Parameters that all operators share.
struct Common {
    u32 rank;
    u32 ranks;
    u32 experts;
    // The operator as a number of `ep::Operator`.
    u32 operation;
    // Entry bound. `bound_of` (sync.cuh) computes the length of each wait from this bound and the next one.
    u64 timeout_ns;
    // Stall bound.
    u64 stall_timeout_ns;
    Control* own;
    FaultReport* report;
    // This rank's.
    Handshake handshake;
    // Every rank's control block, in this rank's addresses. For a mirrored rank, the mirror, which ends before
    // `Control::handshake`.
    Control* control[MAX_RANKS];
    // `delta[peer]` turns an address of that peer into an address of this rank.
    i64 delta[MAX_RANKS];
    // First expert position of every rank, and one past the last position.
    u32 owner_begin[MAX_RANKS + 1];
    u32 reserved;
    Rails rails;
};

// The lists of a handle; see lists.cuh.
struct HandleView {
    Send* sends;
    u32* send_begin;
    u32* token_begin;
    Copy* copies;
    u32* copy_begin;
    Receive* recv;
    u32* recv_begin;
    DstCopy* dst_copies;
    u32* dst_begin;
    u32* shape;
    // `[domains][2][chunks + 1]`: for each domain, its rail rows before each chunk of this rank's tokens, then their
    // copies. Null without rails, like the next two.
    u32* rail_begin;
    // `[ranks]`: the rows of each foreign set, by the rank whose tokens they are.
    u32* set_rows;
    // `[domains]`: the lists of the foreign sets that this rank forwards, see rails.cuh.
    u8* sets;
    u32 tokens;
    u32 chunks;
    u32 chunk_tokens;
    u32 permuted;
};

// Parameters of preprocess.
struct PreprocessParams {
    Common common;
    HandleView handle;
    // A `RoutingForm`.
    u32 form;
    u32 topk;
    // Permuted mode: each expert's rows are padded to a multiple of this. 0: plain mode.
    u32 pad_multiple;
    // Rows that this rank can receive; NONE: no limit.
    u32 capacity;
    // Words of the counts of one rank.
    u32 count_words;
    // Tokens of a tile; a multiple of 32.
    u32 tile;
    // Copies that the handle has room for.
    u32 most_copies;
    u32 reserved;
    const i32* topk_idx;
    const i64* topk_idx_wide;
    const float* weights;
    const u8* map;
    const u32* row_begin;
    const u32* row_experts;
    // Expert position by expert; null: the identity.
    const u32* position_of;
    // `[blocks][columns]`; with rails `[2][blocks][columns]`.
    u32* block_columns;
    // Host memory; null: not requested.
    u32* host_shape;
    // The caller's `[local experts]`, rows with padding (permuted mode); null: not requested.
    i64* tokens_per_expert;
    // The caller's `[local experts]`, rows without padding (permuted mode); null: not requested.
    i64* kept_per_expert;
    // The caller's `[1]`: 1 if rows were dropped, else 0; null: not requested.
    i32* overflow;
};

// Parameters of dispatch.
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
    // A `ProbsOrigin`.
    u32 probs;
    // A `ScaleCode`.
    u32 scale_format;
    u32 row_bytes_in;
    u32 row_bytes_out;
    u32 scale_row_bytes;
    // Number of pieces of a row of this rank's tokens. They form groups, whose number is in `Handshake::share_bits`: group g
    // has the pieces g, g + groups, g + 2 groups, ...
    u32 pieces;
    // Bytes of a piece of an input row.
    u32 piece_bytes;
    // 1: a row has several pieces because it is long, and those of all ranks are equal. 0: a row is one piece, or one group
    // for each piece because its rank has few tokens, which differs between ranks.
    u32 long_rows;
    // Number of stages of one worker's ring.
    u32 stages;
    // Distance between two stages, in bytes.
    u32 stage_bytes;
    // Warps of the launch that begin with the send role; the others begin with the duplicate role.
    u32 senders;
    u32 unused;
};

// Parameters of combine.
struct CombineParams {
    Common common;
    HandleView handle;
    const u8* rows;
    // `[rows][local experts]`, in permuted mode `[rows]`, with `prob_stride` elements from one row to the next; null
    // without probabilities.
    const float* row_probs;
    u64 prob_stride;
    u8* out_tokens;
    float* out_probs;
    // `[sends]` rows of `hidden` elements of the wire type, rounded up to a multiple of 8, in registered memory: peers
    // write partial sums here.
    u8* partials;
    // `[copies]`, in registered memory: peers write probabilities here.
    float* prob_scratch;
    // Like `partials` and `prob_scratch`, for the foreign sets that this rank forwards: by domain, for the maximum
    // number of rows and copies. Null without rails, like the next two.
    u8* set_partials;
    float* set_prob_scratch;
    // `[domains][MAX_CHUNKS]`, a count for each chunk of a foreign set: each of the 2 consumers of a team adds 1 for
    // each row of the chunk of which it has stored all its slices; the chunk is complete at 2 x rows. 0 between
    // operators.
    u32* set_done;
    u32 hidden;
    // By how many tokens, or shares of tokens, peers are assumed to be behind this rank, when the reduce role estimates
    // which sums have arrived.
    u32 slack;
};

// Parameters of weight_rows.
struct WeightRowsParams {
    // `[count, hidden]`. Forward: the rows. Backward: the gradients of the weighted rows.
    const u8* values;
    // Backward: the rows `[count, hidden]`, of the type of `out`. Forward: null.
    const u8* rows;
    // `[count]`.
    const float* weights;
    // `[count, hidden]`: values times weights.
    u8* out;
    // Backward: `[count]`, the gradients of the weights.
    float* dots;
    // Number of rows.
    u32 count;
    // A multiple of 8.
    u32 hidden;
    // 1: `values` is f32; 0: bf16.
    u32 values_f32;
    // 1: `out` is f32; 0: bf16.
    u32 out_f32;
};

// Parameters of dense.
struct DenseParams {
    // `[tokens, k]`, i32 or i64; an index outside 0 .. `experts` chooses no expert.
    const u8* indices;
    // `[tokens, k]`, or null.
    const float* weights;
    // Output `[tokens, experts]`: 1 if the token chose the expert, else 0; null: not requested.
    u8* map;
    // Output `[tokens, experts]`: the sum of the weights; null: not requested.
    float* probs;
    u32 tokens;
    u32 k;
    u32 experts;
    // 1: `indices` is i64; 0: i32.
    u32 wide;
};

// Parameters of lane_copy.
struct LaneCopyParams {
    // The ring of commands, in host memory: `[slots][LANE_COMMAND_WORDS]`. Each word has the command's number in its upper
    // half. The lower halves are, from the first word on: the source's address, its lower and its upper half; the
    // destination's address; the number of bytes.
    const u64* commands;
    // Host memory: the number of the last copy that has ended.
    u32* ended;
    // Host memory: the number of the last launch that takes no further commands.
    u32* left;
    // The number of the first command. Numbers wrap around.
    u32 first;
    // The number of this launch.
    u32 launch;
    // A power of two.
    u32 slots;
    // The launch ends when no command has come for this time.
    u32 patience_ns;
};

// Parameters of int8_encode.
struct Int8EncodeParams {
    // `[count]`, f32 or bf16.
    const u8* elements;
    // `[count]`: what to add to the elements first; null: nothing.
    const float* carry;
    // Output `[count]`, with a carry: what the payload lacks.
    float* left;
    // Output: one for each 128 elements.
    float* scales;
    // Output `[count]`; at a multiple of 4.
    u8* codes;
    // Lowered to the first index of a number that is not finite.
    u32* bad;
    u32 count;
    // 1: `elements` is f32; 0: bf16.
    u32 f32;
};

// Parameters of int8_decode.
struct Int8DecodeParams {
    // One for each 128 elements.
    const float* scales;
    // `[count]`, at a multiple of 4.
    const u8* codes;
    // Output `[count]`, f32 or bf16.
    u8* out;
    u32 count;
    // 1: `out` is f32; 0: bf16.
    u32 f32;
    // 1: adds to `out`, which is f32.
    u32 adds;
    u32 unused;
};

// Parameters of residuals.
struct ResidualsParams {
    // `[count]`, f32 or bf16.
    const u8* expert;
    // `[count]` of the same type; null: zeros.
    const u8* base;
    // `[RESIDUAL_BINS]`, to which the numbers of residuals are added; null: residuals are collected.
    u32* counts;
    // Output `[capacity]`: positions of the collected residuals in their block of 65,536 elements.
    u16* positions;
    // Output `[capacity]`.
    float* values;
    // Output: for each tile, where its residuals begin in the outputs, and their number.
    u32* segments;
    // The number of collected residuals.
    u32* cursor;
    // Residuals with at least these bits as magnitude are collected.
    u32 floor;
    u32 count;
    u32 capacity;
    // 1: elements are f32; 0: bf16.
    u32 f32;
};

// Parameters of entries.
struct EntriesParams {
    // `[count]`, each once.
    const u32* indices;
    // `[count]`.
    const float* values;
    // In and out, f32 or bf16.
    u8* elements;
    u32 count;
    // 1: `elements` is f32; 0: bf16.
    u32 f32;
    // 1: values are subtracted; 0: added.
    u32 subtracts;
    u32 unused;
};

// Parameters of sums.
struct SumsParams {
    // `[count]`, f32 or bf16.
    const u8* elements;
    // `[count]`: what to add; null: nothing.
    const float* addend;
    // Output `[count]`; null: none. May be `addend`.
    float* sums;
    // Lowered to the first index of a sum that is not finite; null: not asked for.
    u32* bad;
    u32 count;
    // 1: `elements` is f32; 0: bf16.
    u32 f32;
};

// Parameters of spin.
struct SpinParams {
    u64 nanoseconds;
};

// Bytes of one `PeerView` in shared memory.
constexpr u32 PEER_VIEW_BYTES = 80;

// `value`, rounded up to a multiple of `multiple`.
constexpr u32 round_up(u32 value, u32 multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Bytes of the views of all peers.
constexpr u32 peers_bytes(u32 ranks) {
    return round_up(ranks * PEER_VIEW_BYTES, 128);
}

// Bytes between two stages of a ring of dispatch: stages begin at multiples of 128.
constexpr u32 stage_stride(u32 piece_bytes) {
    return round_up(piece_bytes, 128);
}

// Bytes of a piece of a row of `row_bytes` bytes that has a group for each piece, because the rank has few tokens.
constexpr u32 share_bytes(u32 row_bytes, u32 groups) {
    return round_up((row_bytes + groups - 1) / groups, 16);
}

// Bytes of a worker of dispatch: its ring and, if it quantises, its scales.
constexpr u32 dispatch_worker_bytes(u32 stages, u32 stage_bytes, u32 quantize) {
    return stages * stage_bytes + quantize * SCALE_BUFFER_BYTES;
}

// Bytes of a block of dispatch. `ranks`: ranks and, with rails, domains.
constexpr u32 dispatch_bytes(u32 ranks, u32 warps, u32 stages, u32 stage_bytes, u32 quantize) {
    return peers_bytes(ranks) + warps * dispatch_worker_bytes(stages, stage_bytes, quantize);
}

// Bytes of a team of combine: its ring, and `TeamMemory` (steps.cuh): a step and three barriers for each stage.
constexpr u32 combine_team_bytes(u32 consumers) {
    return COMBINE_STAGES * consumers * COMBINE_SLICE_BYTES + round_up(COMBINE_STAGES * (16 + 3 * 8), 128);
}

// Bytes of a block of combine. `ranks`: as in `dispatch_bytes`.
constexpr u32 combine_bytes(u32 ranks, u32 teams, u32 consumers) {
    return peers_bytes(ranks) + teams * combine_team_bytes(consumers);
}

// The number of sums over tokens in preprocess: copies per expert, copies and tokens per rank, `sends`, `copies`, and
// with rails the tokens per domain. `domains` is 0 without rails, here and below.
constexpr u32 count_columns(u32 experts, u32 ranks, u32 domains) {
    return experts + 2 * ranks + 2 + domains;
}

// Words of a row of a tile's bit matrix: odd, so that rows of adjacent tokens begin in different banks.
constexpr u32 tile_row_words(u32 experts) {
    return (round_up(experts, 32) / 32) | 1;
}

// Words of a tile of preprocess: bits by token, expert, rank and domain; scans; expert and owner by position.
constexpr u32 tile_words(u32 experts, u32 ranks, u32 domains, u32 tile) {
    return tile * tile_row_words(experts) + (experts + ranks + domains) * (tile / 32) + (ranks + 2) * (tile + 1) + round_up(experts, 2) / 2 + round_up(experts, 4) / 4;
}

// Bytes of a block of preprocess: 64-bit row count and base per segment; two sets of column sums; a limit and two
// begins per rank; a tile. `segments`: the larger of experts and ranks.
constexpr u32 preprocess_bytes(u32 experts, u32 ranks, u32 domains, u32 segments, u32 tile) {
    return 4 * (3 * segments + 2 * count_columns(experts, ranks, domains) + 3 * ranks + tile_words(experts, ranks, domains, tile));
}

// Bytes of the lists of a foreign set. `copies`, `rows`, `chunks`: the maximum numbers of a set.
constexpr u32 set_bytes(u32 rows, u32 copies, u32 chunks, u32 ranks) {
    return round_up(8 * (copies + rows), 16) + 2 * round_up(4 * (chunks + 1), 16) + round_up(4 * (rows + 1), 16) + 16 * copies + 2 * round_up(8 * copies, 16) + 2 * round_up(4 * (chunks + 1) * ranks, 16);
}

// Words of a handle's shape.
constexpr u32 shape_words(u32 local_experts) {
    return 3 * local_experts + SHAPE_WORDS;
}

// The layout of these structs in src/params.rs.
static_assert(OFFSET_OF(Fault, kind) == 0);
static_assert(OFFSET_OF(Fault, peer) == 4);
static_assert(OFFSET_OF(Fault, waiting_for) == 8);
static_assert(OFFSET_OF(Fault, step) == 12);
static_assert(OFFSET_OF(Fault, expected) == 16);
static_assert(OFFSET_OF(Fault, seen) == 20);
static_assert(OFFSET_OF(Fault, index) == 24);
static_assert(OFFSET_OF(Fault, waited_ns) == 32);
static_assert(OFFSET_OF(Fault, operation) == 40);
static_assert(OFFSET_OF(Fault, awaited) == 44);
static_assert(OFFSET_OF(Fault, cause) == 48);
static_assert(OFFSET_OF(Fault, rank) == 52);
static_assert(sizeof(Fault) == 56);
static_assert(OFFSET_OF(FaultRecord, fault) == 0);
static_assert(OFFSET_OF(FaultRecord, call) == 56);
static_assert(OFFSET_OF(FaultRecord, peer_call) == 104);
static_assert(sizeof(FaultRecord) == 152);
static_assert(OFFSET_OF(FaultReport, own) == 0);
static_assert(OFFSET_OF(FaultReport, theirs) == 152);
static_assert(sizeof(FaultReport) == 304);
static_assert(OFFSET_OF(Handshake, tokens) == 0);
static_assert(OFFSET_OF(Handshake, scales) == 8);
static_assert(OFFSET_OF(Handshake, probs) == 16);
static_assert(OFFSET_OF(Handshake, local_experts) == 24);
static_assert(OFFSET_OF(Handshake, recv) == 32);
static_assert(OFFSET_OF(Handshake, recv_begin) == 40);
static_assert(OFFSET_OF(Handshake, dst_copies) == 48);
static_assert(OFFSET_OF(Handshake, dst_begin) == 56);
static_assert(OFFSET_OF(Handshake, chunks) == 64);
static_assert(OFFSET_OF(Handshake, signature) == 68);
static_assert(OFFSET_OF(Handshake, share_bits) == 72);
static_assert(OFFSET_OF(Handshake, reserved) == 76);
static_assert(OFFSET_OF(Handshake, sets) == 80);
static_assert(OFFSET_OF(Handshake, set_tokens) == 88);
static_assert(OFFSET_OF(Handshake, set_probs) == 96);
static_assert(OFFSET_OF(Handshake, call) == 104);
static_assert(sizeof(Handshake) == 152);
static_assert(OFFSET_OF(SeenPlan, sections) == 0);
static_assert(OFFSET_OF(SeenPlan, rows) == 24);
static_assert(OFFSET_OF(SeenPlan, reserved) == 28);
static_assert(sizeof(SeenPlan) == 32);
static_assert(OFFSET_OF(Control, epoch) == 0);
static_assert(OFFSET_OF(Control, blocks_done) == 4);
static_assert(OFFSET_OF(Control, blocks_arrived) == 8);
static_assert(OFFSET_OF(Control, fault_claimed) == 12);
static_assert(OFFSET_OF(Control, tokens_taken) == 16);
static_assert(OFFSET_OF(Control, items_taken) == 20);
static_assert(OFFSET_OF(Control, arrivals_taken) == 24);
static_assert(OFFSET_OF(Control, reserved) == 28);
static_assert(OFFSET_OF(Control, abort) == 128);
static_assert(OFFSET_OF(Control, unused) == 132);
static_assert(OFFSET_OF(Control, left) == 256);
static_assert(OFFSET_OF(Control, set_taken) == 544);
static_assert(OFFSET_OF(Control, more_arrived) == 832);
static_assert(OFFSET_OF(Control, record) == 1128);
static_assert(OFFSET_OF(Control, handshake) == 1280);
static_assert(OFFSET_OF(Control, flags) == 45056);
static_assert(OFFSET_OF(Control, rail_seen) == 1224704);
static_assert(OFFSET_OF(Control, rail_looking) == 1225856);
static_assert(OFFSET_OF(Control, rail_plans) == 1226144);
static_assert(sizeof(Control) == 1230752);
static_assert(OFFSET_OF(PeerView, tokens) == 0);
static_assert(OFFSET_OF(PeerView, scales) == 8);
static_assert(OFFSET_OF(PeerView, probs) == 16);
static_assert(OFFSET_OF(PeerView, local_experts) == 24);
static_assert(OFFSET_OF(PeerView, recv) == 32);
static_assert(OFFSET_OF(PeerView, recv_begin) == 40);
static_assert(OFFSET_OF(PeerView, dst_copies) == 48);
static_assert(OFFSET_OF(PeerView, dst_begin) == 56);
static_assert(OFFSET_OF(PeerView, flags) == 64);
static_assert(OFFSET_OF(PeerView, chunks) == 72);
static_assert(OFFSET_OF(PeerView, share_bits) == 76);
static_assert(sizeof(PeerView) == 80);
static_assert(OFFSET_OF(RailSection, offset) == 0);
static_assert(OFFSET_OF(RailSection, stride) == 8);
static_assert(OFFSET_OF(RailSection, per) == 12);
static_assert(sizeof(RailSection) == 16);
static_assert(OFFSET_OF(UnitEnd, rows) == 0);
static_assert(OFFSET_OF(UnitEnd, copies) == 4);
static_assert(sizeof(UnitEnd) == 8);
static_assert(OFFSET_OF(RailPlan, call) == 0);
static_assert(OFFSET_OF(RailPlan, sections) == 48);
static_assert(OFFSET_OF(RailPlan, rows) == 96);
static_assert(OFFSET_OF(RailPlan, copies) == 100);
static_assert(OFFSET_OF(RailPlan, units) == 104);
static_assert(OFFSET_OF(RailPlan, flags_per_unit) == 108);
static_assert(OFFSET_OF(RailPlan, chunk_rows) == 112);
static_assert(OFFSET_OF(RailPlan, signature) == 116);
static_assert(OFFSET_OF(RailPlan, reserved) == 120);
static_assert(OFFSET_OF(RailPlan, epoch) == 124);
static_assert(OFFSET_OF(RailPlan, ends) == 128);
static_assert(sizeof(RailPlan) == 8320);
static_assert(OFFSET_OF(RailState, progress) == 0);
static_assert(OFFSET_OF(RailState, unused) == 8);
static_assert(sizeof(RailState) == 128);
static_assert(OFFSET_OF(RailEnd, out) == 0);
static_assert(OFFSET_OF(RailEnd, out_flags) == 8320);
static_assert(OFFSET_OF(RailEnd, input) == 24704);
static_assert(OFFSET_OF(RailEnd, state) == 33024);
static_assert(sizeof(RailEnd) == 33152);
static_assert(OFFSET_OF(Rails, ends) == 0);
static_assert(OFFSET_OF(Rails, lanes) == 8);
static_assert(OFFSET_OF(Rails, lane_bytes) == 16);
static_assert(OFFSET_OF(Rails, domains) == 24);
static_assert(OFFSET_OF(Rails, domain) == 28);
static_assert(OFFSET_OF(Rails, first) == 32);
static_assert(OFFSET_OF(Rails, local_ranks) == 36);
static_assert(OFFSET_OF(Rails, chunk_rows) == 40);
static_assert(OFFSET_OF(Rails, most_rows) == 44);
static_assert(OFFSET_OF(Rails, most_copies) == 48);
static_assert(OFFSET_OF(Rails, reserved) == 52);
static_assert(sizeof(Rails) == 56);
static_assert(OFFSET_OF(Common, rank) == 0);
static_assert(OFFSET_OF(Common, ranks) == 4);
static_assert(OFFSET_OF(Common, experts) == 8);
static_assert(OFFSET_OF(Common, operation) == 12);
static_assert(OFFSET_OF(Common, timeout_ns) == 16);
static_assert(OFFSET_OF(Common, stall_timeout_ns) == 24);
static_assert(OFFSET_OF(Common, own) == 32);
static_assert(OFFSET_OF(Common, report) == 40);
static_assert(OFFSET_OF(Common, handshake) == 48);
static_assert(OFFSET_OF(Common, control) == 200);
static_assert(OFFSET_OF(Common, delta) == 776);
static_assert(OFFSET_OF(Common, owner_begin) == 1352);
static_assert(OFFSET_OF(Common, reserved) == 1644);
static_assert(OFFSET_OF(Common, rails) == 1648);
static_assert(sizeof(Common) == 1704);
static_assert(OFFSET_OF(HandleView, sends) == 0);
static_assert(OFFSET_OF(HandleView, send_begin) == 8);
static_assert(OFFSET_OF(HandleView, token_begin) == 16);
static_assert(OFFSET_OF(HandleView, copies) == 24);
static_assert(OFFSET_OF(HandleView, copy_begin) == 32);
static_assert(OFFSET_OF(HandleView, recv) == 40);
static_assert(OFFSET_OF(HandleView, recv_begin) == 48);
static_assert(OFFSET_OF(HandleView, dst_copies) == 56);
static_assert(OFFSET_OF(HandleView, dst_begin) == 64);
static_assert(OFFSET_OF(HandleView, shape) == 72);
static_assert(OFFSET_OF(HandleView, rail_begin) == 80);
static_assert(OFFSET_OF(HandleView, set_rows) == 88);
static_assert(OFFSET_OF(HandleView, sets) == 96);
static_assert(OFFSET_OF(HandleView, tokens) == 104);
static_assert(OFFSET_OF(HandleView, chunks) == 108);
static_assert(OFFSET_OF(HandleView, chunk_tokens) == 112);
static_assert(OFFSET_OF(HandleView, permuted) == 116);
static_assert(sizeof(HandleView) == 120);
static_assert(OFFSET_OF(PreprocessParams, common) == 0);
static_assert(OFFSET_OF(PreprocessParams, handle) == 1704);
static_assert(OFFSET_OF(PreprocessParams, form) == 1824);
static_assert(OFFSET_OF(PreprocessParams, topk) == 1828);
static_assert(OFFSET_OF(PreprocessParams, pad_multiple) == 1832);
static_assert(OFFSET_OF(PreprocessParams, capacity) == 1836);
static_assert(OFFSET_OF(PreprocessParams, count_words) == 1840);
static_assert(OFFSET_OF(PreprocessParams, tile) == 1844);
static_assert(OFFSET_OF(PreprocessParams, most_copies) == 1848);
static_assert(OFFSET_OF(PreprocessParams, reserved) == 1852);
static_assert(OFFSET_OF(PreprocessParams, topk_idx) == 1856);
static_assert(OFFSET_OF(PreprocessParams, topk_idx_wide) == 1864);
static_assert(OFFSET_OF(PreprocessParams, weights) == 1872);
static_assert(OFFSET_OF(PreprocessParams, map) == 1880);
static_assert(OFFSET_OF(PreprocessParams, row_begin) == 1888);
static_assert(OFFSET_OF(PreprocessParams, row_experts) == 1896);
static_assert(OFFSET_OF(PreprocessParams, position_of) == 1904);
static_assert(OFFSET_OF(PreprocessParams, block_columns) == 1912);
static_assert(OFFSET_OF(PreprocessParams, host_shape) == 1920);
static_assert(OFFSET_OF(PreprocessParams, tokens_per_expert) == 1928);
static_assert(OFFSET_OF(PreprocessParams, kept_per_expert) == 1936);
static_assert(OFFSET_OF(PreprocessParams, overflow) == 1944);
static_assert(sizeof(PreprocessParams) == 1952);
static_assert(OFFSET_OF(DispatchParams, common) == 0);
static_assert(OFFSET_OF(DispatchParams, handle) == 1704);
static_assert(OFFSET_OF(DispatchParams, tokens) == 1824);
static_assert(OFFSET_OF(DispatchParams, scales) == 1832);
static_assert(OFFSET_OF(DispatchParams, dense) == 1840);
static_assert(OFFSET_OF(DispatchParams, out_tokens) == 1848);
static_assert(OFFSET_OF(DispatchParams, out_scales) == 1856);
static_assert(OFFSET_OF(DispatchParams, out_probs) == 1864);
static_assert(OFFSET_OF(DispatchParams, out_local_experts) == 1872);
static_assert(OFFSET_OF(DispatchParams, probs) == 1880);
static_assert(OFFSET_OF(DispatchParams, scale_format) == 1884);
static_assert(OFFSET_OF(DispatchParams, row_bytes_in) == 1888);
static_assert(OFFSET_OF(DispatchParams, row_bytes_out) == 1892);
static_assert(OFFSET_OF(DispatchParams, scale_row_bytes) == 1896);
static_assert(OFFSET_OF(DispatchParams, pieces) == 1900);
static_assert(OFFSET_OF(DispatchParams, piece_bytes) == 1904);
static_assert(OFFSET_OF(DispatchParams, long_rows) == 1908);
static_assert(OFFSET_OF(DispatchParams, stages) == 1912);
static_assert(OFFSET_OF(DispatchParams, stage_bytes) == 1916);
static_assert(OFFSET_OF(DispatchParams, senders) == 1920);
static_assert(OFFSET_OF(DispatchParams, unused) == 1924);
static_assert(sizeof(DispatchParams) == 1928);
static_assert(OFFSET_OF(CombineParams, common) == 0);
static_assert(OFFSET_OF(CombineParams, handle) == 1704);
static_assert(OFFSET_OF(CombineParams, rows) == 1824);
static_assert(OFFSET_OF(CombineParams, row_probs) == 1832);
static_assert(OFFSET_OF(CombineParams, prob_stride) == 1840);
static_assert(OFFSET_OF(CombineParams, out_tokens) == 1848);
static_assert(OFFSET_OF(CombineParams, out_probs) == 1856);
static_assert(OFFSET_OF(CombineParams, partials) == 1864);
static_assert(OFFSET_OF(CombineParams, prob_scratch) == 1872);
static_assert(OFFSET_OF(CombineParams, set_partials) == 1880);
static_assert(OFFSET_OF(CombineParams, set_prob_scratch) == 1888);
static_assert(OFFSET_OF(CombineParams, set_done) == 1896);
static_assert(OFFSET_OF(CombineParams, hidden) == 1904);
static_assert(OFFSET_OF(CombineParams, slack) == 1908);
static_assert(sizeof(CombineParams) == 1912);
static_assert(OFFSET_OF(WeightRowsParams, values) == 0);
static_assert(OFFSET_OF(WeightRowsParams, rows) == 8);
static_assert(OFFSET_OF(WeightRowsParams, weights) == 16);
static_assert(OFFSET_OF(WeightRowsParams, out) == 24);
static_assert(OFFSET_OF(WeightRowsParams, dots) == 32);
static_assert(OFFSET_OF(WeightRowsParams, count) == 40);
static_assert(OFFSET_OF(WeightRowsParams, hidden) == 44);
static_assert(OFFSET_OF(WeightRowsParams, values_f32) == 48);
static_assert(OFFSET_OF(WeightRowsParams, out_f32) == 52);
static_assert(sizeof(WeightRowsParams) == 56);
static_assert(OFFSET_OF(DenseParams, indices) == 0);
static_assert(OFFSET_OF(DenseParams, weights) == 8);
static_assert(OFFSET_OF(DenseParams, map) == 16);
static_assert(OFFSET_OF(DenseParams, probs) == 24);
static_assert(OFFSET_OF(DenseParams, tokens) == 32);
static_assert(OFFSET_OF(DenseParams, k) == 36);
static_assert(OFFSET_OF(DenseParams, experts) == 40);
static_assert(OFFSET_OF(DenseParams, wide) == 44);
static_assert(sizeof(DenseParams) == 48);
static_assert(OFFSET_OF(LaneCopyParams, commands) == 0);
static_assert(OFFSET_OF(LaneCopyParams, ended) == 8);
static_assert(OFFSET_OF(LaneCopyParams, left) == 16);
static_assert(OFFSET_OF(LaneCopyParams, first) == 24);
static_assert(OFFSET_OF(LaneCopyParams, launch) == 28);
static_assert(OFFSET_OF(LaneCopyParams, slots) == 32);
static_assert(OFFSET_OF(LaneCopyParams, patience_ns) == 36);
static_assert(sizeof(LaneCopyParams) == 40);
static_assert(OFFSET_OF(Int8EncodeParams, elements) == 0);
static_assert(OFFSET_OF(Int8EncodeParams, carry) == 8);
static_assert(OFFSET_OF(Int8EncodeParams, left) == 16);
static_assert(OFFSET_OF(Int8EncodeParams, scales) == 24);
static_assert(OFFSET_OF(Int8EncodeParams, codes) == 32);
static_assert(OFFSET_OF(Int8EncodeParams, bad) == 40);
static_assert(OFFSET_OF(Int8EncodeParams, count) == 48);
static_assert(OFFSET_OF(Int8EncodeParams, f32) == 52);
static_assert(sizeof(Int8EncodeParams) == 56);
static_assert(OFFSET_OF(Int8DecodeParams, scales) == 0);
static_assert(OFFSET_OF(Int8DecodeParams, codes) == 8);
static_assert(OFFSET_OF(Int8DecodeParams, out) == 16);
static_assert(OFFSET_OF(Int8DecodeParams, count) == 24);
static_assert(OFFSET_OF(Int8DecodeParams, f32) == 28);
static_assert(OFFSET_OF(Int8DecodeParams, adds) == 32);
static_assert(OFFSET_OF(Int8DecodeParams, unused) == 36);
static_assert(sizeof(Int8DecodeParams) == 40);
static_assert(OFFSET_OF(ResidualsParams, expert) == 0);
static_assert(OFFSET_OF(ResidualsParams, base) == 8);
static_assert(OFFSET_OF(ResidualsParams, counts) == 16);
static_assert(OFFSET_OF(ResidualsParams, positions) == 24);
static_assert(OFFSET_OF(ResidualsParams, values) == 32);
static_assert(OFFSET_OF(ResidualsParams, segments) == 40);
static_assert(OFFSET_OF(ResidualsParams, cursor) == 48);
static_assert(OFFSET_OF(ResidualsParams, floor) == 56);
static_assert(OFFSET_OF(ResidualsParams, count) == 60);
static_assert(OFFSET_OF(ResidualsParams, capacity) == 64);
static_assert(OFFSET_OF(ResidualsParams, f32) == 68);
static_assert(sizeof(ResidualsParams) == 72);
static_assert(OFFSET_OF(EntriesParams, indices) == 0);
static_assert(OFFSET_OF(EntriesParams, values) == 8);
static_assert(OFFSET_OF(EntriesParams, elements) == 16);
static_assert(OFFSET_OF(EntriesParams, count) == 24);
static_assert(OFFSET_OF(EntriesParams, f32) == 28);
static_assert(OFFSET_OF(EntriesParams, subtracts) == 32);
static_assert(OFFSET_OF(EntriesParams, unused) == 36);
static_assert(sizeof(EntriesParams) == 40);
static_assert(OFFSET_OF(SumsParams, elements) == 0);
static_assert(OFFSET_OF(SumsParams, addend) == 8);
static_assert(OFFSET_OF(SumsParams, sums) == 16);
static_assert(OFFSET_OF(SumsParams, bad) == 24);
static_assert(OFFSET_OF(SumsParams, count) == 32);
static_assert(OFFSET_OF(SumsParams, f32) == 36);
static_assert(sizeof(SumsParams) == 40);
static_assert(OFFSET_OF(SpinParams, nanoseconds) == 0);
static_assert(sizeof(SpinParams) == 8);
