//! A script: the operators that all ranks call, with their inputs and the oracle's results; and the file from which the
//! program reads it.

use std::fs;
use std::path::{Path, PathBuf};

use ep::oracle::{self, CombineSpec, Dispatched, ReceivedRows, Tokens};
use ep::{Counts, DispatchMode, Element, Rank, ReceiveShape, Routing, ScaleFormat, TokenFormat, World};

use crate::content::Random;
use crate::program::RAILS;
use crate::record::{File, Record, floats, words};

/// The content of outputs before an operator, like `POISON` of the program.
const POISON: u8 = 0xA7;
/// "No bound".
const NONE: u32 = u32::MAX;

/// A script that is being written.
pub(crate) struct Script {
    name: String,
    world: World,
    owners: Record,
    operators: Vec<Operator>,
    random: Random,
}

/// The routings of all ranks, and the layout of rows.
pub(crate) struct Plan {
    pub(crate) routings: Vec<Routing>,
    pub(crate) form: Form,
    pub(crate) mode: DispatchMode,
    pub(crate) capacity: Vec<Option<usize>>,
    pub(crate) chunk_tokens: usize,
}

/// The format of a routing.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Form {
    TopK,
    TopKWide,
    Map,
    Rows,
}

/// The handles of all ranks.
pub(crate) struct Handle {
    plan: Plan,
    received: Vec<ReceivedRows>,
    /// The arguments of every operator that uses the handle, by rank.
    facts: Vec<Record>,
}

/// How a kernel copies rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copies {
    Bulk,
    Plain,
}

/// A dispatch of all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dispatch {
    pub(crate) copies: Copies,
    pub(crate) format: TokenFormat,
    pub(crate) hidden: usize,
    pub(crate) pieces: usize,
    pub(crate) probs: Probs,
    /// Whether the map of local experts is requested, in plain mode.
    pub(crate) local_experts: bool,
}

/// Where the probabilities of a dispatch come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probs {
    Skip,
    Routing,
    Dense,
}

/// Codes of the kernels' `FaultKind`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    None = 0,
    Stalled = 1,
    Aborted = 2,
    Mismatch = 3,
    Index = 4,
    Duplicate = 5,
    Nan = 6,
    Left = 8,
    TooManyCopies = 9,
    Died = 10,
    Late = 11,
    Silent = 12,
    RailCopies = 14,
    Unreachable = 15,
}

/// Codes of the kernels' `GoneWord`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Gone {
    Left = 1,
    Died = 2,
    Silent = 3,
    Unreachable = 4,
    LeftEarly = 5,
}

/// A combine of all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Combine {
    pub(crate) copies: Copies,
    pub(crate) hidden: usize,
    pub(crate) element: Element,
    pub(crate) wire: Element,
    pub(crate) probs: bool,
}

/// What one operator of a rank sends to one other domain.
struct RailSet {
    /// Tokens of which the domain needs one row or sum.
    tokens: usize,
    /// Their copies for experts of the domain.
    copies: usize,
    /// Maximum number of bytes in all sections.
    bytes: usize,
}

/// A kernel, and each rank's arguments.
struct Operator {
    kernel: String,
    ranks: Vec<Record>,
}

impl Script {
    /// `blocks`: the number of blocks of dispatch and combine.
    pub(crate) fn new(name: &str, world: World, blocks: u64) -> Self {
        let seed = name.bytes().fold(0, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let mut owners = Record::default();
        let mut begins = vec![0];
        begins
            .extend(world.topology().all_ranks().map(|rank| world.placement().positions_of(rank).end as u32));
        owners.number("ranks", world.ranks());
        owners.number("experts", world.experts());
        owners.number("count words", Counts::words(&world));
        // Far apart, because the clock runs fast when all lanes wait.
        owners.number("timeout ns", 1 << 34);
        owners.number("stall timeout ns", 1 << 28);
        owners.numbers.insert("blocks", blocks);
        owners.number("domains", world.topology().domains());
        owners.number("machines", 1);
        owners.number("leaves", 0);
        // Maximum number of rows and of copies of a set, and the rows of a chunk.
        owners.number("set rows", 24);
        owners.number("set copies", 24 * 6);
        owners.number("rail chunk rows", 3);
        owners.input("owner_begin", words(&begins));
        Self { name: name.into(), world, owners, operators: Vec::new(), random: Random(seed) }
    }

    /// Makes the last operator this rank's last one: the rank leaves before its proxy has sent anything of that
    /// operator.
    pub(crate) fn leaves(&mut self, rank: usize) {
        self.owners.number("leaves", rank + 1);
        self.is_gone(rank, Gone::Left);
    }

    /// Puts each domain on a machine of its own: ranks see no memory of other domains.
    pub(crate) fn apart(mut self) -> Self {
        self.owners.number("machines", self.world.topology().domains());
        self
    }

    pub(crate) fn world(&self) -> &World {
        &self.world
    }

    /// A preprocess. `memory`: the number of the ranks' memory region for the handle.
    pub(crate) fn preprocess(&mut self, plan: Plan, memory: usize) -> Handle {
        let received = oracle::rows(&self.world, &plan.routings, plan.mode, &plan.capacity);
        let mut handle = Handle { plan, received, facts: Vec::new() };
        handle.facts = (0..self.world.ranks()).map(|rank| self.facts(&handle, rank, memory)).collect();
        let ranks = (0..self.world.ranks()).map(|rank| self.preprocess_of(&handle, rank)).collect();
        self.call("preprocess".into(), ranks);
        handle
    }

    fn facts(&self, handle: &Handle, rank: usize, memory: usize) -> Record {
        let routing = &handle.plan.routings[rank];
        let mut facts = Record::default();
        facts.number("tokens", routing.tokens());
        facts.number("most copies", most_copies(routing, handle.plan.form));
        facts.number("chunk tokens", handle.plan.chunk_tokens);
        facts.number("shape words", 3 * self.world.placement().local_experts(Rank(rank as u32)) + 3);
        facts.number("permuted", usize::from(handle.plan.mode != DispatchMode::Plain));
        facts.number("memory of handle", memory);
        facts
    }

    fn preprocess_of(&self, handle: &Handle, rank: usize) -> Record {
        let Plan { routings, form, mode, capacity, .. } = &handle.plan;
        let mut record = handle.facts[rank].clone();
        let pad = if *mode == DispatchMode::Plain { 0 } else { mode.pad_multiple() };
        record.number("pad multiple", pad);
        record.number("capacity", capacity[rank].unwrap_or(NONE as usize));
        // The smallest tile.
        record.number("tile", 32);
        give_routing(&mut record, &routings[rank], *form);
        if !self.world.placement().is_in_order() {
            let experts = 0..self.world.experts() as u32;
            let positions: Vec<u32> =
                experts.map(|expert| self.world.placement().position_of(expert)).collect();
            record.input("position_of", words(&positions));
        }
        // Counts, and a mask of the domain's experts for each token.
        self.bound_rails(&mut record, |domain| {
            let (tokens, copies) = self.crossing(&routings[rank], domain);
            let (topology, placement) = (self.world.topology(), self.world.placement());
            let experts: usize =
                topology.domain_ranks(domain).map(|rank| placement.local_experts(rank)).sum();
            let counts = experts + topology.domain_size();
            RailSet { tokens, copies, bytes: 4 * counts + tokens * 4 * experts.div_ceil(32) }
        });
        if capacity[rank].is_none() {
            record.output("host shape", shape_words(&self.world, handle, rank));
        } else {
            let shape = &handle.received[rank].shape;
            let wide =
                |counts: &[u32]| counts.iter().flat_map(|&count| i64::from(count).to_le_bytes()).collect();
            record.output("tokens per expert", wide(&shape.tokens_per_expert));
            record.output("kept per expert", wide(&shape.kept_per_expert));
            record.output("overflow", words(&[shape.overflow().into()]));
        }
        record
    }

    /// A dispatch.
    pub(crate) fn dispatch(&mut self, handle: &Handle, dispatch: Dispatch) {
        let Dispatch { copies, format, hidden, .. } = dispatch;
        let routings = &handle.plan.routings;
        let inputs: Vec<Tokens> = routings
            .iter()
            .map(|routing| {
                let tokens = routing.tokens();
                let data = match format {
                    TokenFormat::Fp8(_) | TokenFormat::F32 => {
                        self.random.bytes(tokens * format.input_row_bytes(hidden))
                    }
                    TokenFormat::Bf16 | TokenFormat::QuantizeFp8(_) => self.random.bf16s(tokens * hidden),
                };
                let scales = match format {
                    TokenFormat::Fp8(_) => self.random.bytes(tokens * format.scale_row_bytes(hidden)),
                    TokenFormat::Bf16 | TokenFormat::F32 | TokenFormat::QuantizeFp8(_) => Vec::new(),
                };
                let probs = match dispatch.probs {
                    Probs::Dense => self.random.weights(tokens * routing.experts()),
                    Probs::Skip | Probs::Routing => routing.dense_probs(),
                };
                Tokens { data, scales, probs }
            })
            .collect();
        let outputs =
            oracle::dispatch(&self.world, &handle.received, handle.plan.mode, format, hidden, &inputs);
        let ranks = (inputs.iter().zip(&outputs).enumerate())
            .map(|(rank, (input, output))| self.dispatch_of(handle, rank, dispatch, input, output))
            .collect();
        let payload = if matches!(format, TokenFormat::QuantizeFp8(_)) { "quantize" } else { "copy" };
        self.call(format!("dispatch {payload} {}", copies.name()), ranks);
    }

    fn dispatch_of(
        &self,
        handle: &Handle,
        rank: usize,
        dispatch: Dispatch,
        input: &Tokens,
        output: &Dispatched,
    ) -> Record {
        let Dispatch { format, hidden, pieces, probs, local_experts, .. } = dispatch;
        let mut record = handle.facts[rank].clone();
        let row_bytes = format.input_row_bytes(hidden);
        let unit = if matches!(format, TokenFormat::QuantizeFp8(_)) { 256 } else { 16 };
        let piece = if pieces == 1 { row_bytes } else { row_bytes.div_ceil(pieces).next_multiple_of(unit) };
        record.number("row bytes in", row_bytes);
        record.number("row bytes out", format.output_row_bytes(hidden));
        record.number("scale row bytes", format.scale_row_bytes(hidden));
        record.number("scale format", scale_code(format));
        record.number("probs origin", probs as usize);
        // Rows are divided into up to 4 pieces with flags of their own, on each rank into a different number.
        let share = |bits: usize| row_bytes.div_ceil(1 << bits).next_multiple_of(16);
        let divides = pieces == 1 && unit == 16 && self.world.topology().domains() == 1;
        let bits = if divides { (rank + self.operators.len()) % 3 } else { 0 };
        let bits = (0..=bits).rev().find(|&bits| share(bits) * ((1 << bits) - 1) < row_bytes).unwrap_or(0);
        let piece = if bits > 0 { share(bits) } else { piece };
        let pieces_found = row_bytes.div_ceil(piece);
        record.number("long rows", usize::from(pieces > 1));
        record.number("pieces", pieces_found);
        record.number("piece bytes", piece);
        record.number("share bits", pieces_found.min(4).ilog2() as usize);
        record.number("stages", 3);
        // A block has two warps (program.rs).
        let blocks = self.owners.numbers["blocks"] as usize;
        let plain = handle.plan.mode == DispatchMode::Plain;
        record.number("senders", if plain { 2 * blocks - 1 } else { blocks });

        let rows = handle.received[rank].shape.allocated_rows();
        let local = self.world.placement().local_experts(Rank(rank as u32));
        let probs_per_row = if plain { local } else { 1 };
        record.input("tokens in", input.data.clone());
        record.output("tokens", fill(&output.tokens, rows * format.output_row_bytes(hidden)));
        if format.scales().is_some() {
            record.output("scales", fill(&output.scales, rows * format.scale_row_bytes(hidden)));
        }
        if matches!(format, TokenFormat::Fp8(_)) {
            record.input("scales in", input.scales.clone());
        }
        if probs == Probs::Dense {
            record.input("dense", floats(&input.probs));
        }
        if probs != Probs::Skip {
            record.output("probs", fill(&floats(&output.probs), 4 * rows * probs_per_row));
        }
        self.bound_rails(&mut record, |domain| {
            let (tokens, copies) = self.crossing(&handle.plan.routings[rank], domain);
            let row = format.output_row_bytes(hidden) + format.scale_row_bytes(hidden);
            let weights = if probs == Probs::Skip { 0 } else { 4 * copies };
            RailSet { tokens, copies, bytes: tokens * row + weights }
        });
        if plain && local_experts {
            record.output("local_experts", fill(&output.local_experts, rows * local));
        }
        record
    }

    /// A combine.
    pub(crate) fn combine(&mut self, handle: &Handle, combine: Combine) {
        let Combine { copies, hidden, element, wire, probs } = combine;
        let Handle { plan, received, .. } = handle;
        let spec = CombineSpec { hidden, element, wire };
        let rows: Vec<Vec<u8>> =
            received.iter().map(|received| self.expert_rows(received, spec)).collect::<Vec<_>>();
        let widths: Vec<usize> = (0..self.world.ranks())
            .map(|rank| match plan.mode {
                DispatchMode::Plain => self.world.placement().local_experts(Rank(rank as u32)),
                DispatchMode::Permuted { .. } => 1,
            })
            .collect();
        let row_probs: Vec<Vec<f32>> = received
            .iter()
            .zip(&widths)
            .map(|(received, width)| self.random.weights(received.shape.allocated_rows() * width))
            .collect();
        let combined = oracle::combine(&self.world, &plan.routings, received, spec, &rows);
        let gathered = oracle::combine_probs(&self.world, &plan.routings, received, plan.mode, &row_probs);
        let ranks = (0..self.world.ranks())
            .map(|rank| {
                let mut record = handle.facts[rank].clone();
                record.number("hidden", hidden);
                // Rows are divided into up to 4 shares, on each rank into a different number.
                let one_domain = self.world.topology().domains() == 1;
                let share_bits = if one_domain { (rank + self.operators.len()) % 3 } else { 0 };
                record.number("share bits", share_bits);
                // Where teams of one and of two consumers are possible, ranks of one combine have either.
                let both = one_domain
                    && plan.mode == DispatchMode::Plain
                    && (element, wire) == (Element::Bf16, Element::Bf16);
                record.number(
                    "pairs",
                    usize::from(both && (rank + self.operators.len() / 2).is_multiple_of(2)),
                );
                record.input("rows", rows[rank].clone());
                record.output("combined", combined[rank].clone());
                // A sum for each token that the rail peer has sent to this domain.
                self.bound_rails(&mut record, |domain| {
                    let topology = self.world.topology();
                    let own = Rank(rank as u32);
                    let peer = domain * topology.domain_size() + topology.local_rank_of(own);
                    let (tokens, copies) = self.crossing(&plan.routings[peer], topology.domain_of(own));
                    let weights = if probs { 4 * copies } else { 0 };
                    RailSet { tokens, copies, bytes: tokens * hidden * wire.bytes() + weights }
                });
                if probs {
                    // Rows of odd ranks have a gap of two NaNs.
                    let gap = rank % 2 * 2;
                    let rows = row_probs[rank].chunks(widths[rank].max(1));
                    let with_gaps: Vec<f32> =
                        rows.flat_map(|row| [row, &[f32::NAN; 2][..gap]].concat()).collect();
                    record.number("prob stride", widths[rank] + gap);
                    record.input("row probs", floats(&with_gaps));
                    record.output("combined probs", floats(&gathered[rank]));
                }
                record
            })
            .collect();
        let name = |element| if element == Element::F32 { "f32" } else { "bf16" };
        self.call(format!("combine {} {} {}", name(element), name(wire), copies.name()), ranks);
    }

    /// Sets what the rank's proxy may send to each domain.
    fn bound_rails(&self, record: &mut Record, set: impl Fn(usize) -> RailSet) {
        let domains = self.world.topology().domains();
        if domains > 1 {
            let sets: Vec<u32> = (0..domains)
                .map(set)
                .flat_map(|set| [set.tokens, set.copies, set.bytes].map(|number| number as u32))
                .collect();
            record.input("rail sets", words(&sets));
        }
    }

    /// The number of a rank's tokens that a domain needs, and of their copies for experts of the domain.
    fn crossing(&self, routing: &Routing, domain: usize) -> (usize, usize) {
        let placement = self.world.placement();
        let here = |&&expert: &&u32| placement.domain_at(placement.position_of(expert)) == domain;
        let copies: Vec<usize> =
            routing.rows().map(|(experts, _)| experts.iter().filter(here).count()).collect();
        (copies.iter().filter(|&&copies| copies > 0).count(), copies.iter().sum())
    }

    /// Expert outputs. Rows without a token are NaN, so that adding such a row is detected.
    fn expert_rows(&mut self, received: &ReceivedRows, spec: CombineSpec) -> Vec<u8> {
        let mut bytes = Vec::new();
        for row in 0..received.shape.allocated_rows() {
            let holds_token = received.rows.get(row).is_some_and(Option::is_some);
            for _ in 0..spec.hidden {
                // Values of very different magnitudes, so that the order of a sum affects its result.
                let bits = if holds_token { self.random.float(12).to_bits() } else { f32::NAN.to_bits() };
                match spec.element {
                    Element::Bf16 => bytes.extend(((bits >> 16) as u16).to_le_bytes()),
                    Element::F32 => bytes.extend(bits.to_le_bytes()),
                }
            }
        }
        bytes
    }

    fn call(&mut self, mut kernel: String, mut ranks: Vec<Record>) {
        if self.world.topology().domains() > 1 && kernel != "say_gone" {
            kernel += RAILS;
        }
        for record in &mut ranks {
            record.numbers.entry("pairs").or_insert(0);
            record.number("takes part", 1);
            record.number("stands still", 0);
            // Equal on all ranks, and different for each operator.
            record.number("signature", 1000 + self.operators.len());
            record.number("faults", 1 << Fault::None as usize);
            record.number("at fault", NONE as usize);
            record.number("untouched", 0);
        }
        self.operators.push(Operator { kernel, ranks });
    }

    /// Changes a number of one rank in the last operator.
    pub(crate) fn otherwise(&mut self, rank: usize, name: &'static str, value: usize) {
        self.operators.last_mut().unwrap().ranks[rank].number(name, value);
    }

    /// Sets the maximum number of rows and of copies of a set, in place of those of `new`.
    pub(crate) fn bounds(&mut self, rows: usize, copies: usize) {
        self.owners.number("set rows", rows);
        self.owners.number("set copies", copies);
    }

    /// Like [`otherwise`](Self::otherwise), for an input.
    pub(crate) fn other_input(&mut self, rank: usize, name: &'static str, bytes: Vec<u8>) {
        self.operators.last_mut().unwrap().ranks[rank].input(name, bytes);
    }

    /// Expects that the last operator fails on every rank with one of these kinds, and that the reports name
    /// `at_fault`, if it is known. Outputs are undefined.
    pub(crate) fn fails(&mut self, faults: &[Fault], at_fault: Option<usize>) {
        for record in &mut self.operators.last_mut().unwrap().ranks {
            record.number("faults", faults.iter().map(|&fault| 1 << fault as usize).sum());
            record.number("at fault", at_fault.unwrap_or(NONE as usize));
        }
    }

    /// Expects that the last operator does nothing, because an earlier one has failed with one of these faults, and
    /// that its outputs do not change.
    pub(crate) fn does_not_begin(&mut self, faults: &[Fault], at_fault: usize) {
        self.fails(faults, Some(at_fault));
        for record in &mut self.operators.last_mut().unwrap().ranks {
            record.number("untouched", 1);
        }
    }

    /// Writes the gone word of one rank to all control blocks, as the hosts do.
    pub(crate) fn is_gone(&mut self, rank: usize, word: Gone) {
        let mut record = Record::default();
        record.number("gone", word as usize);
        self.call("say_gone".into(), vec![record; self.world.ranks()]);
        for other in (0..self.world.ranks()).filter(|&other| other != rank) {
            self.otherwise(other, "takes part", 0);
        }
    }

    /// Writes the file that the program reads.
    pub(crate) fn write(&self) -> PathBuf {
        let mut file = File::default();
        file.record(&self.owners);
        file.word(self.operators.len() as u64);
        for Operator { kernel, ranks } in &self.operators {
            file.bytes(kernel.as_bytes());
            ranks.iter().for_each(|record| file.record(record));
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("roles-cases");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(self.name.replace(' ', "-"));
        fs::write(&path, file.0).unwrap();
        path
    }
}

impl Copies {
    fn name(self) -> &'static str {
        match self {
            Self::Bulk => "bulk",
            Self::Plain => "plain",
        }
    }
}

/// Like `scale_code` of the crate.
fn scale_code(format: TokenFormat) -> usize {
    match format.scales() {
        None => 0,
        Some(ScaleFormat::F32Per128) => 1,
        Some(ScaleFormat::Ue8m0Per128) => 2,
        Some(ScaleFormat::Ue8m0Per32) => 3,
        Some(other) => panic!("{other:?} has no `ScaleCode`"),
    }
}

fn most_copies(routing: &Routing, form: Form) -> usize {
    match form {
        Form::TopK | Form::TopKWide => routing.tokens() * longest_row(routing),
        Form::Map => routing.tokens() * routing.experts(),
        Form::Rows => routing.copies(),
    }
}

fn longest_row(routing: &Routing) -> usize {
    routing.rows().map(|(experts, _)| experts.len()).max().unwrap_or(0).max(1)
}

/// The routing as a router provides it: rows are not ordered by expert, and short rows have gaps.
fn give_routing(record: &mut Record, routing: &Routing, form: Form) {
    let dense = || {
        let mut map = vec![0u8; routing.tokens() * routing.experts()];
        for (token, (experts, _)) in routing.rows().enumerate() {
            experts.iter().for_each(|&expert| map[token * routing.experts() + expert as usize] = 1);
        }
        map
    };
    let k = longest_row(routing);
    let rotated = || {
        routing.rows().enumerate().flat_map(move |(token, (experts, weights))| {
            (0..k).map(move |at| {
                let at = (at + token) % k;
                experts.get(at).map_or((-1, f32::NAN), |&expert| (i64::from(expert), weights[at]))
            })
        })
    };
    record.number("topk", if matches!(form, Form::TopK | Form::TopKWide) { k } else { 0 });
    record.number(
        "form",
        match form {
            Form::TopK | Form::TopKWide => 0,
            Form::Map => 1,
            Form::Rows => 2,
        },
    );
    match form {
        Form::TopK => {
            record
                .input("topk_idx", rotated().flat_map(|(expert, _)| (expert as i32).to_le_bytes()).collect());
        }
        Form::TopKWide => {
            record.input("topk_idx_wide", rotated().flat_map(|(expert, _)| expert.to_le_bytes()).collect());
        }
        Form::Map => record.input("map", dense()),
        Form::Rows => {
            record.input("row_begin", words(routing.row_begins()));
            record.input("row_experts", words(routing.all_experts()));
        }
    }
    record.input(
        "weights",
        match form {
            Form::TopK | Form::TopKWide => rotated().flat_map(|(_, weight)| weight.to_le_bytes()).collect(),
            Form::Map => floats(&routing.dense_probs()),
            Form::Rows => floats(routing.all_weights()),
        },
    );
}

/// The host shape that preprocess writes; in plain mode it does not write the words per expert.
fn shape_words(world: &World, handle: &Handle, rank: usize) -> Vec<u8> {
    let ReceiveShape { rows, wanted_rows, first_row, kept_per_expert, tokens_per_expert, .. } =
        &handle.received[rank].shape;
    let own = Rank(rank as u32);
    let routing = &handle.plan.routings[rank];
    let topology = world.topology();
    // The destination ranks of each token in this rank's domain.
    let targets = routing.rows().map(|(experts, _)| {
        let owner = |&expert: &u32| world.placement().owner_at(world.placement().position_of(expert));
        let near = |rank: &Rank| topology.domain_of(*rank) == topology.domain_of(own);
        let mut ranks: Vec<Rank> = experts.iter().map(owner).filter(near).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    });
    let remote = targets.flatten().filter(|&rank| rank != own).count();
    let mut shape = [first_row, kept_per_expert, tokens_per_expert].map(|column| words(column)).concat();
    shape.resize(12 * world.placement().local_experts(own), POISON);
    let rest = [*rows, *wanted_rows, remote];
    shape.extend(rest.iter().flat_map(|&count| (count as u32).to_le_bytes()));
    shape
}

/// The rows, followed by the previous content.
fn fill(rows: &[u8], bytes: usize) -> Vec<u8> {
    let mut all = rows.to_vec();
    all.resize(bytes, POISON);
    all
}
