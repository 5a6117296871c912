//! Kernel parameters, codes, and the structs that ranks write into each other's memory, defined once for Rust and C++.
//!
//! A test generates `device/common/params.cuh` from this file and from the formulas of `shared.rs`, and fails when the
//! checked-in header differs.

use std::mem::offset_of;

use crate::driver::DeviceAddress;
use crate::mirror::{codes, constants, structs};

constants! { CONSTANTS:
    /// Maximum number of ranks, in all NVLink domains together.
    MAX_RANKS: usize = 72;
    /// Maximum number of chunks of one rank's tokens.
    MAX_CHUNKS: usize = 1024;
    /// Maximum number of groups of pieces of a row in dispatch, and of shares of a row in combine. Each has its own flags.
    MAX_GROUPS: usize = 4;
    /// Maximum number of flags for one source in a control block. A source is a rank of the world.
    MAX_FLAGS: usize = MAX_CHUNKS * MAX_GROUPS;
    /// No value: no capacity bound, no rank, no list index. `NO_ROW` of lists.cuh has the same value.
    NONE: u32 = u32::MAX;
    /// Threads of a block of `preprocess`.
    PREPROCESS_THREADS: usize = 1024;
    /// The same with rails, where threads need more registers.
    PREPROCESS_RAIL_THREADS: usize = 512;
    /// Threads of a block of `weight_rows`.
    WEIGHT_ROWS_THREADS: usize = 256;
    /// Threads of a block of `dense`.
    DENSE_THREADS: usize = 256;
    /// Threads of a block of the kernels of codecs.
    CODEC_THREADS: usize = 256;
    /// Elements that a block of `residuals` handles at a time.
    RESIDUAL_TILE: usize = 2048;
    /// `residuals` counts by the upper bits of a magnitude: its exponent and four bits of its mantissa.
    RESIDUAL_BIN_SHIFT: usize = 19;
    /// Number of these counts.
    RESIDUAL_BINS: usize = 1 << (31 - RESIDUAL_BIN_SHIFT);
    /// Threads of the block of `lane_copy`: one warp takes commands, one says which copies have ended, the others copy.
    LANE_COPY_THREADS: usize = 18 * 32;
    /// Words of 64 bits from one command of `lane_copy` to the next.
    LANE_COMMAND_WORDS: usize = 8;
    /// Maximum number of ring stages of a block of dispatch: the size of its static array of barriers.
    MOST_STAGES: usize = 128;
    /// Words of a call that must be equal on all ranks: see src/call.rs.
    CALL_WORDS: usize = 6;
    /// Words of 32 bits of a `Handshake`.
    HANDSHAKE_WORDS: usize = 26 + 2 * CALL_WORDS;
    /// Bytes of a worker's buffer for scales, if dispatch quantises.
    SCALE_BUFFER_BYTES: usize = 512;
    /// Stages of the ring of a team of combine.
    COMBINE_STAGES: usize = 7;
    /// Maximum number of turns of a slice. A lane adds one vector (of at most 16 bytes) in each turn, and its registers,
    /// which hold the sums, limit the number.
    COMBINE_TURNS: usize = 7;
    /// Bytes of a consumer's slice of a stage of combine.
    COMBINE_SLICE_BYTES: usize = COMBINE_TURNS * 16 * 32;
    /// Index in a handle's shape, after the three words per local expert: rows that this rank receives, padding
    /// included.
    SHAPE_ROWS: usize = 0;
    /// Like `SHAPE_ROWS`, for the rows that this rank would receive without a capacity.
    SHAPE_WANTED: usize = 1;
    /// Like `SHAPE_ROWS`, for the rows that this rank sends to other ranks of its domain, one per (token, rank). Rows that a
    /// capacity drops are counted; rows in lanes to other domains are not.
    SHAPE_REMOTE: usize = 2;
    /// Number of words of a shape after the three words per local expert.
    SHAPE_WORDS: usize = 3;
    /// Maximum number of sections of a lane: parts of different stride that one operator sends along a rail.
    RAIL_SECTIONS: usize = 3;
    /// Bits of a word of `Control::left` that hold the `GoneWord`. If the rank has left after it had sent everything along
    /// its rail, the bits above hold its last epoch.
    GONE_BITS: u32 = 3;
    /// Bits of a rank in an abort word (sync.cuh). The lowest bits have the rank at fault plus one, the next ones the rank
    /// that wrote the word first, and those above the cause.
    ABORT_RANK_BITS: u32 = 8;
}

codes! { CODES:
    /// The format of scales.
    ScaleCode {
        None = 0 as "SCALES_NONE",
        F32Per128 = 1 as "SCALES_F32_128",
        Ue8m0Per128 = 2 as "SCALES_UE8M0_128",
        Ue8m0Per32 = 3 as "SCALES_UE8M0_32",
    }

    /// The source of the probabilities that dispatch sends.
    ProbsOrigin {
        Skip = 0 as "PROBS_SKIP",
        Routing = 1 as "PROBS_ROUTING",
        Dense = 2 as "PROBS_DENSE",
    }

    /// The format of a routing.
    RoutingForm {
        TopK = 0 as "ROUTING_TOPK",
        Map = 1 as "ROUTING_MAP",
        Rows = 2 as "ROUTING_ROWS",
        /// Bit masks of the experts of this domain, as rails carry them.
        Masks = 3 as "ROUTING_MASKS",
    }

    /// What a section of a lane has one element for.
    RailPer {
        /// Each row of the set: tokens, scales, domain sums, masks.
        Row = 0 as "RAIL_PER_ROW",
        /// Each copy of the set: weights.
        Copy = 1 as "RAIL_PER_COPY",
        /// The operator: the counts of preprocess. Sent with the first unit.
        Once = 2 as "RAIL_ONCE",
    }

    /// The fault of a rank; says which fields of `Fault` hold what.
    FaultKind {
        None = 0 as "FAULT_NONE",
        /// `peer` did not write the awaited word within the bound of the wait (`bound_of`, sync.cuh). `Late` is the
        /// same for the entry bound.
        Stalled = 1 as "FAULT_STALLED",
        /// Another rank has given up; `peer` is the rank at fault, and `cause` is what happened to `peer`.
        Aborted = 2 as "FAULT_ABORTED",
        /// `peer` called with different arguments: its signature is `seen`, this rank's is `expected`.
        Mismatch = 3 as "FAULT_MISMATCH",
        /// Routing: row `index` has the expert index `seen`.
        Index = 4 as "FAULT_INDEX",
        /// Routing: row `index` has expert `seen` twice.
        Duplicate = 5 as "FAULT_DUPLICATE",
        /// Routing: row `index` has a NaN weight for expert `seen`.
        Nan = 6 as "FAULT_NAN",
        /// `peer` would receive `index` rows; in plain mode with `expected` weights each, unless `expected` is 0.
        TooManyRows = 7 as "FAULT_TOO_MANY_ROWS",
        /// `peer` has left: it has dropped its buffer, or failed.
        Left = 8 as "FAULT_LEFT",
        /// Routing: it has `index` copies; the handle has room for `expected`.
        TooManyCopies = 9 as "FAULT_TOO_MANY_COPIES",
        /// The process of `peer` has ended.
        Died = 10 as "FAULT_DIED",
        /// `peer` did not enter the operator within the entry bound (`timeout`).
        Late = 11 as "FAULT_LATE",
        /// The process of `peer` has sent no heartbeat for the stall bound.
        Silent = 12 as "FAULT_SILENT",
        /// What this rank sends to another domain needs a lane of `index` bytes.
        ShortLane = 13 as "FAULT_SHORT_LANE",
        /// Routing: it has `index` copies in another domain; a set has at most `expected`.
        RailCopies = 14 as "FAULT_RAIL_COPIES",
        /// The network does not reach the machine of `peer`.
        Unreachable = 15 as "FAULT_UNREACHABLE",
    }

    /// What a rank was waiting for when it failed.
    WaitingFor {
        /// A peer's handshake or plan: the peer may not have entered the operator yet.
        Handshake = 0 as "FOR_HANDSHAKE",
        /// A chunk from a peer that has entered.
        Chunk = 1 as "FOR_CHUNK",
        /// The other blocks of the rank's own kernel.
        Blocks = 2 as "FOR_BLOCKS",
        /// Rows along the rail, from a peer that has entered.
        Rail = 3 as "FOR_RAIL",
        /// A chunk of a foreign set from its forwarder, or with rails a handshake of preprocess: the sender may itself
        /// wait for another domain.
        Foreign = 4 as "FOR_FOREIGN",
    }

    /// The state of a peer as a host writes it into `Control::left`. Any value but `Here` ends waits for that peer, except
    /// `Left` of a rank of another domain that took part in the operator (`gone_of` in sync.cuh).
    GoneWord {
        Here = 0 as "GONE_HERE",
        Left = 1 as "GONE_LEFT",
        Died = 2 as "GONE_DIED",
        /// The peer's heartbeat has stopped; the host writes `Here` again when the heartbeat resumes.
        Silent = 3 as "GONE_SILENT",
        /// The network does not reach the peer's machine.
        Unreachable = 4 as "GONE_UNREACHABLE",
        /// The peer has left after a fault of its own, before its work was over, or before its proxy had sent everything to
        /// other domains.
        LeftEarly = 5 as "GONE_LEFT_EARLY",
    }
}

structs! { STRUCTS:
    /// The first fault of a rank.
    #[derive(bytemuck::Zeroable, bytemuck::Pod)]
    Fault {
        /// A `FaultKind`, written last.
        kind: u32,
        peer: u32,
        /// A `WaitingFor`.
        waiting_for: u32,
        /// The epoch. Messages show it as `#7`.
        step: u32,
        expected: u32,
        seen: u32,
        index: u64,
        waited_ns: u64,
        /// The operator as a number of `ep::Operator`.
        operation: u32,
        /// The rank that this rank was waiting for; NONE if it was not waiting.
        awaited: u32,
        /// A `FaultKind`.
        cause: u32,
        /// The rank that recorded the fault.
        rank: u32,
    }

    /// A fault and, if `kind` is `Mismatch`, the words of both calls.
    #[derive(bytemuck::Zeroable, bytemuck::Pod)]
    FaultRecord {
        fault: Fault,
        call: [u64; CALL_WORDS],
        /// The call of `fault.peer`.
        peer_call: [u64; CALL_WORDS],
    }

    /// The kernel's report to its host; in host memory.
    #[derive(bytemuck::Zeroable, bytemuck::Pod)]
    FaultReport {
        own: FaultRecord,
        /// If another rank gave up first: a copy of the record of the rank at fault or, if that rank has none, of the
        /// rank that wrote the abort word.
        theirs: FaultRecord,
    }

    /// What a rank tells every rank of its domain when it enters an operator (in preprocess, after its counts): the addresses
    /// of its outputs and lists, and its call. Addresses are the sender's; the receiver adds `Common::delta`. It travels as
    /// packets (`Control::handshake`).
    #[derive(Default)]
    Handshake {
        /// dispatch: received tokens; combine: partial sums.
        tokens: u64,
        /// dispatch: received scales.
        scales: u64,
        /// dispatch: received probabilities; combine: `prob_scratch`, by copy.
        probs: u64,
        /// dispatch, plain mode: the map of local experts.
        local_experts: u64,
        /// Lists of the sender's handle, see lists.cuh.
        recv: u64,
        recv_begin: u64,
        dst_copies: u64,
        dst_begin: u64,
        chunks: u32,
        /// Checksum of `call`.
        signature: u32,
        /// The logarithm to base 2 of the number of items of one chunk of the sender's tokens. Each has a part of every row, and
        /// flags of its own: a group of pieces (dispatch) or a share (combine, `Segments` in sum.cuh).
        share_bits: u32,
        reserved: u32,
        /// With rails: the lists of the foreign sets that the sender forwards.
        sets: u64,
        /// combine with rails: partial sums and probabilities of those sets.
        set_tokens: u64,
        set_probs: u64,
        /// The arguments of the sender's call; read only if the signatures differ.
        call: [u64; CALL_WORDS],
    }

    /// A copy of a part of a `RailPlan`, in GPU memory.
    SeenPlan {
        /// Offsets of the sections in the lane.
        sections: [u64; RAIL_SECTIONS],
        rows: u32,
        reserved: u32,
    }

    /// A rank's control block, in registered memory: words that it shares with peers and hosts, and words that only its own
    /// kernels access. docs/protocol.md lists every word's writers, readers and memory order. The counts of preprocess
    /// follow the block: `[2][ranks][count_words]`.
    Control {
        /// Operators that this rank has finished, modulo 2^32. Only this rank's kernels access the words from here to
        /// `reserved`; with rails, this rank's host reads `epoch` when the rank leaves.
        epoch: u32,
        /// Blocks of the running kernel that have finished.
        blocks_done: u32,
        /// Blocks of the running kernel that have reached the grid barrier (`all_blocks`).
        blocks_arrived: u32,
        /// 1 once a thread has claimed the right to report this rank's first fault.
        fault_claimed: u32,
        /// combine: tokens, or shares of tokens, that workers have claimed for the reduce role.
        tokens_taken: u32,
        /// Items that workers have claimed for the push role (combine) or the send role (dispatch), not counting the first
        /// item of each worker.
        items_taken: u32,
        /// dispatch: items that workers have claimed for the duplicate role, not counting the first item of each worker.
        arrivals_taken: u32,
        reserved: [u32; 25],
        /// Written by this rank, by peers, and by this rank's host for ranks that cannot reach it: an `abort_word`, see
        /// sync.cuh.
        abort: u32,
        unused: [u32; 31],
        /// `left[peer]`: a `GoneWord` and an epoch (`GONE_BITS`), written by hosts.
        left: [u32; MAX_RANKS],
        /// With rails, by domain: what workers have claimed of the domain's foreign set. combine: tokens, for the reduce
        /// role. dispatch: items, for the forward role, not counting the first item of each worker. Only this rank's kernels
        /// access it.
        set_taken: [u32; MAX_RANKS],
        /// preprocess with rails: blocks that have reached the grid barriers after the first one, by barrier.
        more_arrived: [u32; MAX_RANKS + 1],
        /// This rank's first fault; peers read it when this rank has given up.
        record: FaultRecord,
        /// `handshake[epoch % 2][peer][word]`: a packet, which has a word of the peer's `Handshake` in its lower half and the
        /// epoch in its upper half. A reader knows of each packet whether it belongs to an operator. So packets need no order
        /// among each other, and the writer waits for none of them.
        handshake: [[[u64; HANDSHAKE_WORDS]; MAX_RANKS]; 2],
        /// `flags[rank][index]`: the epoch in which a rank of the domain has written what the index stands for: an item
        /// (`SourceItems::place` in rails.cuh). `rank` is the writer of the flag; for foreign sets it is the writer's rail peer in
        /// the set's domain (`alias` in rails.cuh).
        flags: [[u32; MAX_FLAGS]; MAX_RANKS],
        /// `rail_seen[epoch % 2][domain]`, with rails: `RailState::progress` of the rail peer as a thread of this rank has
        /// last read it, after the check of the peer's arguments. Only this rank's kernels access it and the next words.
        rail_seen: [[u64; MAX_RANKS]; 2],
        /// `rail_looking[domain]`, with rails: 1 while a thread of this rank reads `RailState::progress`.
        rail_looking: [u32; MAX_RANKS],
        /// `rail_plans[epoch % 2][domain]`, with rails: what the kernels need of the plan of the rail peer, copied by the
        /// thread that first sees its epoch.
        rail_plans: [[SeenPlan; MAX_RANKS]; 2],
    }

    /// The addresses of a rank, a foreign set or a lane, in this rank's address space: where this rank writes, and the lists
    /// that it reads. Those of a rank come from its handshake, those of a set from the forwarder's. Each block has its views
    /// in shared memory.
    PeerView {
        tokens: DeviceAddress as "u8*",
        scales: DeviceAddress as "u8*",
        probs: DeviceAddress as "float*",
        local_experts: DeviceAddress as "u8*",
        recv: DeviceAddress as "const Receive*",
        recv_begin: DeviceAddress as "const u32*",
        dst_copies: DeviceAddress as "const DstCopy*",
        dst_begin: DeviceAddress as "const u32*",
        /// The flags that this rank sets on the peer.
        flags: DeviceAddress as "u32*",
        chunks: u32,
        /// Of a rank, its `Handshake::share_bits`; of a foreign set, this rank's, since with rails all ranks have the same.
        share_bits: u32,
    }

    /// A part of a lane: elements of `stride` bytes, the first at `offset`. A section with stride 0 is not used.
    #[derive(bytemuck::Zeroable, bytemuck::Pod)]
    RailSection {
        offset: u64,
        stride: u32,
        /// A `RailPer`.
        per: u32,
    }

    /// Rows and copies of all units of a plan up to and including one.
    #[derive(Default, bytemuck::Zeroable, bytemuck::Pod)]
    UnitEnd {
        rows: u32,
        copies: u32,
    }

    /// What an operator sends to one other domain; see docs/cuda-rails.md.
    #[derive(bytemuck::Zeroable, bytemuck::Pod)]
    RailPlan {
        /// The arguments of the sender's call.
        call: [u64; CALL_WORDS],
        sections: [RailSection; RAIL_SECTIONS],
        /// Rows of the set, and their copies.
        rows: u32,
        copies: u32,
        /// Number of units, and of flags of each unit.
        units: u32,
        flags_per_unit: u32,
        /// Rows of a chunk, the unit of `RailState::progress`.
        chunk_rows: u32,
        /// Checksum of `call`.
        signature: u32,
        reserved: u32,
        /// Written last, with release order.
        epoch: u32,
        /// By unit. They are last, so that the proxy sends a plan without the places of units that it does not have.
        ends: [UnitEnd; MAX_CHUNKS],
    }

    /// What a rank's proxy tells the rank's kernels about one rail peer.
    RailState {
        /// Upper 32 bits: the last epoch whose plan has arrived. Lower 32 bits: how many chunks at the start of its rows
        /// have arrived.
        progress: u64,
        unused: [u32; 30],
    }

    /// The words of one rail peer for the epochs of one parity, in host memory.
    RailEnd {
        /// Written by this rank's kernels.
        out: RailPlan,
        /// `out_flags[unit * flags_per_unit + n]`: the epoch in which the unit's part n was stored to the lane.
        out_flags: [u32; MAX_FLAGS],
        /// Written by the peer's engine.
        input: RailPlan,
        /// Written by this rank's proxy.
        state: RailState,
    }

    /// A rank's place among the NVLink domains, and its rail window, in this rank's addresses. Kernels of a world of one
    /// domain are compiled without rails and do not read it.
    #[derive(bytemuck::Zeroable, bytemuck::Pod)]
    Rails {
        /// `[domains][2]`: by domain, and by parity of the epoch.
        ends: DeviceAddress as "RailEnd*",
        /// `[domains][2][2][lane_bytes]`: by domain, by parity, `out` then `in`.
        lanes: DeviceAddress as "u8*",
        lane_bytes: u64,
        domains: u32,
        /// This rank's domain.
        domain: u32,
        /// The domain's ranks are `first .. first + local_ranks`.
        first: u32,
        local_ranks: u32,
        /// Rows of a chunk of a set; equal on all ranks.
        chunk_rows: u32,
        /// Maximum number of rows of a set, and of their copies; equal on all ranks.
        most_rows: u32,
        most_copies: u32,
        reserved: u32,
    }

    /// Parameters that all operators share.
    Common {
        rank: u32,
        ranks: u32,
        experts: u32,
        /// The operator as a number of `ep::Operator`.
        operation: u32,
        /// Entry bound. `bound_of` (sync.cuh) computes the length of each wait from this bound and the next one.
        timeout_ns: u64,
        /// Stall bound.
        stall_timeout_ns: u64,
        own: DeviceAddress as "Control*",
        report: DeviceAddress as "FaultReport*",
        /// This rank's.
        handshake: Handshake,
        /// Every rank's control block, in this rank's addresses. For a mirrored rank, the mirror, which ends before
        /// `Control::handshake`.
        control: [DeviceAddress; MAX_RANKS] as "Control*",
        /// `delta[peer]` turns an address of that peer into an address of this rank.
        delta: [i64; MAX_RANKS],
        /// First expert position of every rank, and one past the last position.
        owner_begin: [u32; MAX_RANKS + 1],
        reserved: u32,
        rails: Rails,
    }

    /// The lists of a handle; see lists.cuh.
    HandleView {
        sends: DeviceAddress as "Send*",
        send_begin: DeviceAddress as "u32*",
        token_begin: DeviceAddress as "u32*",
        copies: DeviceAddress as "Copy*",
        copy_begin: DeviceAddress as "u32*",
        recv: DeviceAddress as "Receive*",
        recv_begin: DeviceAddress as "u32*",
        dst_copies: DeviceAddress as "DstCopy*",
        dst_begin: DeviceAddress as "u32*",
        shape: DeviceAddress as "u32*",
        /// `[domains][2][chunks + 1]`: for each domain, its rail rows before each chunk of this rank's tokens, then their
        /// copies. Null without rails, like the next two.
        rail_begin: DeviceAddress as "u32*",
        /// `[ranks]`: the rows of each foreign set, by the rank whose tokens they are.
        set_rows: DeviceAddress as "u32*",
        /// `[domains]`: the lists of the foreign sets that this rank forwards, see rails.cuh.
        sets: DeviceAddress as "u8*",
        tokens: u32,
        chunks: u32,
        chunk_tokens: u32,
        permuted: u32,
    }

    /// Parameters of preprocess.
    PreprocessParams {
        common: Common,
        handle: HandleView,
        /// A `RoutingForm`.
        form: u32,
        topk: u32,
        /// Permuted mode: each expert's rows are padded to a multiple of this. 0: plain mode.
        pad_multiple: u32,
        /// Rows that this rank can receive; NONE: no limit.
        capacity: u32,
        /// Words of the counts of one rank.
        count_words: u32,
        /// Tokens of a tile; a multiple of 32.
        tile: u32,
        /// Copies that the handle has room for.
        most_copies: u32,
        reserved: u32,
        topk_idx: DeviceAddress as "const i32*",
        topk_idx_wide: DeviceAddress as "const i64*",
        weights: DeviceAddress as "const float*",
        map: DeviceAddress as "const u8*",
        row_begin: DeviceAddress as "const u32*",
        row_experts: DeviceAddress as "const u32*",
        /// Expert position by expert; null: the identity.
        position_of: DeviceAddress as "const u32*",
        /// `[blocks][columns]`; with rails `[2][blocks][columns]`.
        block_columns: DeviceAddress as "u32*",
        /// Host memory; null: not requested.
        host_shape: DeviceAddress as "u32*",
        /// The caller's `[local experts]`, rows with padding (permuted mode); null: not requested.
        tokens_per_expert: DeviceAddress as "i64*",
        /// The caller's `[local experts]`, rows without padding (permuted mode); null: not requested.
        kept_per_expert: DeviceAddress as "i64*",
        /// The caller's `[1]`: 1 if rows were dropped, else 0; null: not requested.
        overflow: DeviceAddress as "i32*",
    }

    /// Parameters of dispatch.
    DispatchParams {
        common: Common,
        handle: HandleView,
        tokens: DeviceAddress as "const u8*",
        scales: DeviceAddress as "const u8*",
        dense: DeviceAddress as "const float*",
        out_tokens: DeviceAddress as "u8*",
        out_scales: DeviceAddress as "u8*",
        out_probs: DeviceAddress as "float*",
        out_local_experts: DeviceAddress as "u8*",
        /// A `ProbsOrigin`.
        probs: u32,
        /// A `ScaleCode`.
        scale_format: u32,
        row_bytes_in: u32,
        row_bytes_out: u32,
        scale_row_bytes: u32,
        /// Number of pieces of a row of this rank's tokens. They form groups, whose number is in `Handshake::share_bits`: group g
        /// has the pieces g, g + groups, g + 2 groups, ...
        pieces: u32,
        /// Bytes of a piece of an input row.
        piece_bytes: u32,
        /// 1: a row has several pieces because it is long, and those of all ranks are equal. 0: a row is one piece, or one group
        /// for each piece because its rank has few tokens, which differs between ranks.
        long_rows: u32,
        /// Number of stages of one worker's ring.
        stages: u32,
        /// Distance between two stages, in bytes.
        stage_bytes: u32,
        /// Warps of the launch that begin with the send role; the others begin with the duplicate role.
        senders: u32,
        unused: u32,
    }

    /// Parameters of combine.
    CombineParams {
        common: Common,
        handle: HandleView,
        rows: DeviceAddress as "const u8*",
        /// `[rows][local experts]`, in permuted mode `[rows]`, with `prob_stride` elements from one row to the next; null
        /// without probabilities.
        row_probs: DeviceAddress as "const float*",
        prob_stride: u64,
        out_tokens: DeviceAddress as "u8*",
        out_probs: DeviceAddress as "float*",
        /// `[sends]` rows of `hidden` elements of the wire type, rounded up to a multiple of 8, in registered memory: peers
        /// write partial sums here.
        partials: DeviceAddress as "u8*",
        /// `[copies]`, in registered memory: peers write probabilities here.
        prob_scratch: DeviceAddress as "float*",
        /// Like `partials` and `prob_scratch`, for the foreign sets that this rank forwards: by domain, for the maximum
        /// number of rows and copies. Null without rails, like the next two.
        set_partials: DeviceAddress as "u8*",
        set_prob_scratch: DeviceAddress as "float*",
        /// `[domains][MAX_CHUNKS]`, a count for each chunk of a foreign set: each of the 2 consumers of a team adds 1 for
        /// each row of the chunk of which it has stored all its slices; the chunk is complete at 2 x rows. 0 between
        /// operators.
        set_done: DeviceAddress as "u32*",
        hidden: u32,
        /// By how many tokens, or shares of tokens, peers are assumed to be behind this rank, when the reduce role estimates
        /// which sums have arrived.
        slack: u32,
    }

    /// Parameters of weight_rows.
    WeightRowsParams {
        /// `[count, hidden]`. Forward: the rows. Backward: the gradients of the weighted rows.
        values: DeviceAddress as "const u8*",
        /// Backward: the rows `[count, hidden]`, of the type of `out`. Forward: null.
        rows: DeviceAddress as "const u8*",
        /// `[count]`.
        weights: DeviceAddress as "const float*",
        /// `[count, hidden]`: values times weights.
        out: DeviceAddress as "u8*",
        /// Backward: `[count]`, the gradients of the weights.
        dots: DeviceAddress as "float*",
        /// Number of rows.
        count: u32,
        /// A multiple of 8.
        hidden: u32,
        /// 1: `values` is f32; 0: bf16.
        values_f32: u32,
        /// 1: `out` is f32; 0: bf16.
        out_f32: u32,
    }

    /// Parameters of dense.
    DenseParams {
        /// `[tokens, k]`, i32 or i64; an index outside 0 .. `experts` chooses no expert.
        indices: DeviceAddress as "const u8*",
        /// `[tokens, k]`, or null.
        weights: DeviceAddress as "const float*",
        /// Output `[tokens, experts]`: 1 if the token chose the expert, else 0; null: not requested.
        map: DeviceAddress as "u8*",
        /// Output `[tokens, experts]`: the sum of the weights; null: not requested.
        probs: DeviceAddress as "float*",
        tokens: u32,
        k: u32,
        experts: u32,
        /// 1: `indices` is i64; 0: i32.
        wide: u32,
    }

    /// Parameters of lane_copy.
    LaneCopyParams {
        /// The ring of commands, in host memory: `[slots][LANE_COMMAND_WORDS]`. Each word has the command's number in its upper
        /// half. The lower halves are, from the first word on: the source's address, its lower and its upper half; the
        /// destination's address; the number of bytes.
        commands: DeviceAddress as "const u64*",
        /// Host memory: the number of the last copy that has ended.
        ended: DeviceAddress as "u32*",
        /// Host memory: the number of the last launch that takes no further commands.
        left: DeviceAddress as "u32*",
        /// The number of the first command. Numbers wrap around.
        first: u32,
        /// The number of this launch.
        launch: u32,
        /// A power of two.
        slots: u32,
        /// The launch ends when no command has come for this time.
        patience_ns: u32,
    }

    /// Parameters of int8_encode.
    Int8EncodeParams {
        /// `[count]`, f32 or bf16.
        elements: DeviceAddress as "const u8*",
        /// `[count]`: what to add to the elements first; null: nothing.
        carry: DeviceAddress as "const float*",
        /// Output `[count]`, with a carry: what the payload lacks.
        left: DeviceAddress as "float*",
        /// Output: one for each 128 elements.
        scales: DeviceAddress as "float*",
        /// Output `[count]`; at a multiple of 4.
        codes: DeviceAddress as "u8*",
        /// Lowered to the first index of a number that is not finite.
        bad: DeviceAddress as "u32*",
        count: u32,
        /// 1: `elements` is f32; 0: bf16.
        f32: u32,
    }

    /// Parameters of int8_decode.
    Int8DecodeParams {
        /// One for each 128 elements.
        scales: DeviceAddress as "const float*",
        /// `[count]`, at a multiple of 4.
        codes: DeviceAddress as "const u8*",
        /// Output `[count]`, f32 or bf16.
        out: DeviceAddress as "u8*",
        count: u32,
        /// 1: `out` is f32; 0: bf16.
        f32: u32,
        /// 1: adds to `out`, which is f32.
        adds: u32,
        unused: u32,
    }

    /// Parameters of residuals.
    ResidualsParams {
        /// `[count]`, f32 or bf16.
        expert: DeviceAddress as "const u8*",
        /// `[count]` of the same type; null: zeros.
        base: DeviceAddress as "const u8*",
        /// `[RESIDUAL_BINS]`, to which the numbers of residuals are added; null: residuals are collected.
        counts: DeviceAddress as "u32*",
        /// Output `[capacity]`: positions of the collected residuals in their block of 65,536 elements.
        positions: DeviceAddress as "u16*",
        /// Output `[capacity]`.
        values: DeviceAddress as "float*",
        /// Output: for each tile, where its residuals begin in the outputs, and their number.
        segments: DeviceAddress as "u32*",
        /// The number of collected residuals.
        cursor: DeviceAddress as "u32*",
        /// Residuals with at least these bits as magnitude are collected.
        floor: u32,
        count: u32,
        capacity: u32,
        /// 1: elements are f32; 0: bf16.
        f32: u32,
    }

    /// Parameters of entries.
    EntriesParams {
        /// `[count]`, each once.
        indices: DeviceAddress as "const u32*",
        /// `[count]`.
        values: DeviceAddress as "const float*",
        /// In and out, f32 or bf16.
        elements: DeviceAddress as "u8*",
        count: u32,
        /// 1: `elements` is f32; 0: bf16.
        f32: u32,
        /// 1: values are subtracted; 0: added.
        subtracts: u32,
        unused: u32,
    }

    /// Parameters of sums.
    SumsParams {
        /// `[count]`, f32 or bf16.
        elements: DeviceAddress as "const u8*",
        /// `[count]`: what to add; null: nothing.
        addend: DeviceAddress as "const float*",
        /// Output `[count]`; null: none. May be `addend`.
        sums: DeviceAddress as "float*",
        /// Lowered to the first index of a sum that is not finite; null: not asked for.
        bad: DeviceAddress as "u32*",
        count: u32,
        /// 1: `elements` is f32; 0: bf16.
        f32: u32,
    }

    /// Parameters of spin.
    SpinParams {
        nanoseconds: u64,
    }
}

constants! { SIZES:
    /// Bytes of one `PeerView` in shared memory.
    PEER_VIEW_BYTES: usize = size_of::<PeerView>();
}

/// Bytes of a control block, without the counts of preprocess that follow it.
pub(crate) const CONTROL_BYTES: usize = size_of::<Control>();
/// Offset of `Control::left`, in bytes.
pub(crate) const LEFT_OFFSET: usize = offset_of!(Control, left);
/// Offset of `Control::epoch`, in bytes.
pub(crate) const EPOCH_OFFSET: usize = offset_of!(Control, epoch);
/// Offset of `Control::abort`, in bytes.
pub(crate) const ABORT_OFFSET: usize = offset_of!(Control, abort);
/// Offset of `Control::record`, in bytes.
pub(crate) const RECORD_OFFSET: usize = offset_of!(Control, record);
/// Bytes of the mirror of a control block: the words that ranks of other domains access.
pub(crate) const MIRROR_BYTES: usize = offset_of!(Control, handshake);
/// Number of 32-bit words of a `FaultReport`.
pub(crate) const REPORT_WORDS: usize = size_of::<FaultReport>() / 4;

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::{env, fs};

    use super::*;
    use crate::mirror::header;
    use crate::shared::FORMULAS;

    const HEAD: &str = "\
// Kernel parameters, structs that ranks write into each other's memory, and sizes of shared memory.
//
// GENERATED from src/params.rs and src/shared.rs. To change it, edit those files and run
// HYBRID_EP_UPDATE_PARAMS=1 cargo test -p ep-cuda --lib params
#pragma once
#include \"types.cuh\"

// Entries of the lists of a handle: see lists.cuh.
struct Send;
struct Copy;
struct Receive;
struct DstCopy;
";

    #[test]
    fn the_checked_in_header_equals_the_generated_one() {
        let items = [CONSTANTS, CODES, STRUCTS, SIZES, FORMULAS].concat();
        let expected = format!("{HEAD}{}", header::of(&items));
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("device/common/params.cuh");
        if env::var("HYBRID_EP_UPDATE_PARAMS").as_deref() == Ok("1") {
            fs::write(&file, &expected).unwrap();
        }
        let found = fs::read_to_string(&file).unwrap();
        let difference = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
        assert!(
            found == expected,
            "device/common/params.cuh differs from src/params.rs and src/shared.rs, first at (found, expected): \
             {difference:?}\nif the change is intended, run HYBRID_EP_UPDATE_PARAMS=1 cargo test -p ep-cuda --lib \
             params and commit the header"
        );
    }

    #[test]
    fn codes_are_found_by_their_numbers() {
        assert_eq!(FaultKind::of(FaultKind::Died as u32), Some(FaultKind::Died));
        assert_eq!(FaultKind::of(1000), None);
    }
}
