//! Small cases, each of which exercises different code.

use ep::workload::Workload;
use ep::{DispatchMode, Element, Rank, Routing, ScaleFormat, TokenFormat, World};

use crate::content::Random;
use crate::script::{Combine, Copies, Dispatch, Fault, Form, Gone, Handle, Plan, Probs, Script};

const PLAIN: DispatchMode = DispatchMode::Plain;
const BLOCKS: u64 = 2;

fn pad(pad_multiple: usize) -> DispatchMode {
    DispatchMode::permuted(pad_multiple).unwrap()
}

fn dispatch(copies: Copies, hidden: usize) -> Dispatch {
    let format = TokenFormat::Bf16;
    Dispatch { copies, format, hidden, pieces: 1, probs: Probs::Routing, local_experts: true }
}

fn combine(copies: Copies, hidden: usize) -> Combine {
    Combine { copies, hidden, element: Element::Bf16, wire: Element::Bf16, probs: false }
}

/// A routing of `tokens[rank]` tokens on every rank, each to `topk` experts.
fn top_k(world: &World, tokens: &[usize], topk: usize, seed: u64) -> Vec<Routing> {
    let experts = world.experts();
    let workload = |tokens| Workload { tokens, experts, topk, skew: 0.6, seed };
    world.topology().all_ranks().map(|rank| workload(tokens[rank.index()]).routing(rank)).collect()
}

/// Routings with rows without an expert, with all experts, and with about one in `one_in` experts.
fn multi_hot(world: &World, tokens: &[usize], one_in: u64, seed: u64) -> Vec<Routing> {
    let experts = world.experts();
    let routing = |rank: Rank| {
        let mut random = Random(seed ^ u64::from(rank.0) << 32);
        let cells = tokens[rank.index()] * experts;
        let map: Vec<u8> = (0..cells)
            .map(|cell| match (cell / experts + rank.index()) % 5 {
                0 => 0,
                1 => 1,
                _ => u8::from(random.next().is_multiple_of(one_in)),
            })
            .collect();
        let weights: Vec<f32> = (0..cells).map(|cell| 0.25 + cell as f32).collect();
        Routing::from_map(rank, experts, &map, &weights).unwrap()
    };
    world.topology().all_ranks().map(routing).collect()
}

fn unbounded(routings: Vec<Routing>, form: Form, mode: DispatchMode) -> Plan {
    let capacity = vec![None; routings.len()];
    Plan { routings, form, mode, capacity, chunk_tokens: 1 }
}

/// Handles whose memory is reused while other handles are in use. Every operator runs in even and odd epochs.
fn steps(copies: Copies) -> Script {
    let mut script = Script::new(
        &format!("steps {copies:?}"),
        World::builder().ranks(2).experts(6).build().unwrap(),
        BLOCKS + 1,
    );
    let world = script.world().clone();
    let hidden = 64;
    let f32_on_wire = Combine { wire: Element::F32, probs: true, ..combine(copies, hidden) };
    let first = script.preprocess(unbounded(top_k(&world, &[9, 6], 3, 1), Form::TopK, pad(4)), 0);
    script.dispatch(&first, dispatch(copies, hidden));
    script.combine(&first, combine(copies, hidden));
    let second = script.preprocess(unbounded(top_k(&world, &[4, 11], 4, 2), Form::TopKWide, pad(1)), 1);
    script.combine(&first, f32_on_wire);
    script.dispatch(&second, Dispatch { probs: Probs::Dense, ..dispatch(copies, hidden) });
    // Reuses the first handle's memory two operators after its last use, the earliest time at which the arena does so.
    let third = script.preprocess(unbounded(top_k(&world, &[5, 5], 2, 3), Form::Rows, PLAIN), 0);
    script.combine(&second, combine(copies, hidden));
    script.dispatch(&third, Dispatch { probs: Probs::Skip, ..dispatch(copies, hidden) });
    script.combine(&third, f32_on_wire);
    script
}

/// Three ranks, rows of any number of experts, and a rank that has nothing to send.
fn plain(copies: Copies) -> Script {
    let mut script = Script::new(
        &format!("plain {copies:?}"),
        World::builder().ranks(3).experts(9).build().unwrap(),
        BLOCKS,
    );
    let world = script.world().clone();
    let hidden = 16;
    let handle = script.preprocess(unbounded(multi_hot(&world, &[7, 0, 10], 3, 5), Form::Map, PLAIN), 0);
    for probs in [Probs::Routing, Probs::Dense, Probs::Skip] {
        let local_experts = probs != Probs::Skip;
        script.dispatch(&handle, Dispatch { probs, local_experts, ..dispatch(copies, hidden) });
        script.combine(&handle, Combine { probs: local_experts, ..combine(copies, hidden) });
    }
    script
}

/// Every format and every scale, in one piece and in several.
fn formats(copies: Copies) -> Script {
    let mut script = Script::new(
        &format!("formats {copies:?}"),
        World::builder().ranks(2).experts(4).build().unwrap(),
        BLOCKS,
    );
    let world = script.world().clone();
    let mut handles = Vec::new();
    for (mode, memory) in [(pad(2), 0), (PLAIN, 1)] {
        let routings = top_k(&world, &[6, 5], 3, 7);
        handles.push(script.preprocess(unbounded(routings, Form::TopK, mode), memory));
    }
    for scales in [ScaleFormat::F32Per128, ScaleFormat::Ue8m0Per128, ScaleFormat::Ue8m0Per32] {
        for (handle, pieces) in handles.iter().zip([2, 1]) {
            let wide = Dispatch { pieces, ..dispatch(copies, 288) };
            script.dispatch(handle, Dispatch { format: TokenFormat::QuantizeFp8(scales), ..wide });
            script.dispatch(handle, Dispatch { format: TokenFormat::Fp8(scales), ..wide });
        }
    }
    script.dispatch(&handles[0], Dispatch { pieces: 5, ..dispatch(copies, 80) });
    script
}

/// Capacities that drop rows, on one rank all of them.
fn capacities(copies: Copies) -> Script {
    let mut script = Script::new(
        &format!("capacities {copies:?}"),
        World::builder().ranks(3).experts(6).build().unwrap(),
        BLOCKS,
    );
    let world = script.world().clone();
    let hidden = 32;
    for (mode, memory, form) in [(pad(4), 0, Form::Rows), (PLAIN, 1, Form::TopK)] {
        let routings = multi_hot(&world, &[6, 8, 5], 2, 11);
        let capacity = vec![Some(8), Some(0), None];
        let handle = script.preprocess(Plan { routings, form, mode, capacity, chunk_tokens: 2 }, memory);
        script.dispatch(&handle, dispatch(copies, hidden));
        script.combine(&handle, Combine { probs: true, ..combine(copies, hidden) });
        let format = TokenFormat::QuantizeFp8(ScaleFormat::Ue8m0Per32);
        script.dispatch(&handle, Dispatch { format, ..dispatch(copies, hidden) });
    }
    script
}

/// Sums with more rows than a warp has lanes, rows with more elements than a warp adds in a step, all types.
fn sums(copies: Copies) -> Script {
    let mut script = Script::new(
        &format!("sums {copies:?}"),
        World::builder().ranks(2).experts(80).build().unwrap(),
        BLOCKS,
    );
    let world = script.world().clone();
    let types = [Element::Bf16, Element::F32];
    let all = types.iter().flat_map(|&element| types.map(|wire| (element, wire)));
    let many = script.preprocess(unbounded(multi_hot(&world, &[3, 4], 1, 13), Form::Rows, pad(1)), 0);
    for (element, wire) in all.clone() {
        let probs = element == wire;
        script.combine(&many, Combine { element, wire, probs, ..combine(copies, 24) });
    }
    let wide = script.preprocess(unbounded(top_k(&world, &[2, 1], 6, 17), Form::TopK, PLAIN), 1);
    for (element, wire) in all.clone() {
        script.combine(&wide, Combine { element, wire, ..combine(copies, 1032) });
    }
    // Several rows of a token. The slices have an odd number of turns (rows of 520 elements), or are full (3,584
    // elements of bf16 are two full slices), or belong to several segments (3,600).
    let rows = script.preprocess(unbounded(top_k(&world, &[2, 1], 6, 18), Form::TopK, pad(1)), 0);
    for (element, wire) in all {
        for hidden in [520, 3584, 3600] {
            script.combine(&rows, Combine { element, wire, ..combine(copies, hidden) });
        }
    }
    script
}

/// So many tokens that a block of preprocess has several tiles, and a worker several chunks.
fn tiles(copies: Copies) -> Script {
    let world = World::builder().ranks(2).placement(&[1, 0, 1, 1, 0, 1].map(Rank)).build().unwrap();
    let mut script = Script::new(&format!("tiles {copies:?}"), world.clone(), BLOCKS);
    for (mode, memory) in [(pad(8), 0), (PLAIN, 1)] {
        let routings = top_k(&world, &[101, 40], 2, 19);
        let plan = Plan { chunk_tokens: 3, ..unbounded(routings, Form::TopKWide, mode) };
        let handle = script.preprocess(plan, memory);
        script.dispatch(&handle, dispatch(copies, 8));
        script.combine(&handle, combine(copies, 8));
    }
    script
}

/// Maps of so many experts that a thread reads sixteen bytes at once, with a placement that shuffles the experts;
/// several tiles per block; capacities that drop rows.
fn maps(copies: Copies) -> Script {
    let owners: Vec<Rank> = (0..48).map(|expert| Rank(expert * 7 % 3)).collect();
    let world = World::builder().ranks(3).placement(&owners).build().unwrap();
    let mut script = Script::new(&format!("maps {copies:?}"), world.clone(), BLOCKS);
    for (mode, memory) in [(pad(8), 0), (PLAIN, 1)] {
        let routings = multi_hot(&world, &[70, 0, 35], 16, 31);
        let capacity = vec![None, Some(40), Some(1000)];
        let handle =
            script.preprocess(Plan { routings, form: Form::Map, mode, capacity, chunk_tokens: 3 }, memory);
        script.dispatch(&handle, dispatch(copies, 8));
        script.combine(&handle, combine(copies, 8));
    }
    script
}

/// Worlds of several domains: with one rank and with several ranks each, in both modes, with all types and formats, with
/// capacities that drop rows, and with ranks that have nothing to send.
fn rails(copies: Copies) -> Vec<Script> {
    let world = |ranks, domains, experts| {
        World::builder().ranks(ranks).domains(domains).experts(experts).build().unwrap()
    };
    let hidden = 24;
    let all_types = |script: &mut Script, handle: &Handle| {
        for (element, wire) in [
            (Element::Bf16, Element::Bf16),
            (Element::F32, Element::Bf16),
            (Element::Bf16, Element::F32),
            (Element::F32, Element::F32),
        ] {
            let probs = element == wire;
            script.combine(handle, Combine { element, wire, probs, ..combine(copies, hidden) });
        }
    };

    // One rank per domain: no links inside domains.
    let mut lines = Script::new(&format!("rails alone {copies:?}"), world(3, 3, 6), BLOCKS);
    let of = lines.world().clone();
    for (mode, memory, form) in [(pad(4), 0, Form::TopK), (PLAIN, 1, Form::Map)] {
        let plan = Plan { chunk_tokens: 2, ..unbounded(multi_hot(&of, &[7, 0, 11], 2, 41), form, mode) };
        let handle = lines.preprocess(plan, memory);
        lines.dispatch(&handle, dispatch(copies, hidden));
        all_types(&mut lines, &handle);
    }

    let mut square = Script::new(&format!("rails square {copies:?}"), world(4, 2, 8), BLOCKS + 1);
    let of = square.world().clone();
    let first = square.preprocess(unbounded(top_k(&of, &[9, 6, 3, 12], 3, 43), Form::TopK, pad(4)), 0);
    square.dispatch(&first, dispatch(copies, hidden));
    square.combine(&first, Combine { probs: true, ..combine(copies, hidden) });
    let second = square.preprocess(unbounded(top_k(&of, &[4, 11, 20, 0], 4, 44), Form::TopKWide, PLAIN), 1);
    square.dispatch(&second, Dispatch { probs: Probs::Dense, ..dispatch(copies, hidden) });
    square.combine(&first, combine(copies, hidden));
    all_types(&mut square, &second);

    // A placement that mixes the experts of the domains, masks of more than one word, capacities.
    let owners: Vec<Rank> = (0..80).map(|expert| Rank(expert * 7 % 6)).collect();
    let mixed = World::builder().ranks(6).domains(2).placement(&owners).build().unwrap();
    let mut wide = Script::new(&format!("rails wide {copies:?}"), mixed.clone(), BLOCKS);
    for (mode, memory, form) in [(pad(4), 0, Form::Map), (PLAIN, 1, Form::Rows)] {
        let routings = top_k(&mixed, &[24, 5, 0, 9, 17, 1], 6, 47);
        let capacity = vec![None, Some(8), Some(0), Some(16), None, Some(1000)];
        let handle = wide.preprocess(Plan { routings, form, mode, capacity, chunk_tokens: 2 }, memory);
        wide.dispatch(&handle, dispatch(copies, hidden));
        wide.combine(&handle, Combine { probs: true, ..combine(copies, hidden) });
    }

    let mut formats = Script::new(&format!("rails formats {copies:?}"), world(6, 3, 6), BLOCKS);
    let of = formats.world().clone();
    for (mode, memory) in [(pad(2), 0), (PLAIN, 1)] {
        let handle =
            formats.preprocess(unbounded(top_k(&of, &[6, 5, 7, 1, 0, 8], 3, 53), Form::TopK, mode), memory);
        for (scales, pieces) in [(ScaleFormat::F32Per128, 1), (ScaleFormat::Ue8m0Per32, 2)] {
            let wide = Dispatch { pieces, ..dispatch(copies, 288) };
            formats.dispatch(&handle, Dispatch { format: TokenFormat::QuantizeFp8(scales), ..wide });
            formats.dispatch(&handle, Dispatch { format: TokenFormat::Fp8(scales), ..wide });
        }
        formats.combine(&handle, Combine { probs: true, ..combine(copies, hidden) });
    }
    vec![lines.apart(), square, wide.apart(), formats.apart()]
}

/// A world of one rank, and worlds without copies.
fn edges(copies: Copies) -> Vec<Script> {
    let mut alone = Script::new(
        &format!("alone {copies:?}"),
        World::builder().ranks(1).experts(3).build().unwrap(),
        BLOCKS,
    );
    let world = alone.world().clone();
    let handle = alone.preprocess(unbounded(top_k(&world, &[5], 2, 23), Form::TopK, pad(4)), 0);
    alone.dispatch(&handle, dispatch(copies, 16));
    let format = TokenFormat::QuantizeFp8(ScaleFormat::F32Per128);
    alone.dispatch(&handle, Dispatch { format, ..dispatch(copies, 16) });
    alone.combine(&handle, Combine { probs: true, ..combine(copies, 16) });

    let mut nothing = Script::new(
        &format!("nothing {copies:?}"),
        World::builder().ranks(3).experts(3).build().unwrap(),
        BLOCKS,
    );
    let world = nothing.world().clone();
    // The last handle has many tokens in an item, none of which is stored: no store synchronises the lanes of a warp.
    for (tokens, memory, chunk_tokens) in [([0, 0, 0], 0, 1), ([0, 3, 0], 1, 1), ([40, 0, 31], 0, 9)] {
        let none = |rank: Rank| {
            let cells = 3 * tokens[rank.index()];
            Routing::from_map(rank, 3, &vec![0; cells], &vec![0.0; cells]).unwrap()
        };
        let routings = world.topology().all_ranks().map(none).collect();
        let plan = Plan { chunk_tokens, ..unbounded(routings, Form::TopK, pad(2)) };
        let handle = nothing.preprocess(plan, memory);
        nothing.dispatch(&handle, dispatch(copies, 16));
        nothing.combine(&handle, Combine { probs: true, ..combine(copies, 16) });
    }
    vec![alone, nothing]
}

/// All cases.
pub(crate) fn all() -> Vec<Script> {
    let of = |copies| {
        let cases = vec![
            steps(copies),
            plain(copies),
            formats(copies),
            maps(copies),
            capacities(copies),
            sums(copies),
            tiles(copies),
        ];
        cases.into_iter().chain(edges(copies)).chain(rails(copies)).collect::<Vec<_>>()
    };
    [of(Copies::Bulk), of(Copies::Plain)].into_iter().flatten().collect()
}

/// Operators in which a rank fails: all ranks end them and report the rank at fault.
pub(crate) fn faults() -> Vec<Script> {
    let new = |name: &str| Script::new(name, World::builder().ranks(3).experts(6).build().unwrap(), BLOCKS);
    let plan = |script: &Script, form| unbounded(top_k(script.world(), &[5, 4, 6], 2, 29), form, pad(2));
    let hidden = 16;
    let mut cases = Vec::new();

    let mut absent = new("a rank that does not enter");
    let handle = absent.preprocess(plan(&absent, Form::TopK), 0);
    absent.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    absent.otherwise(2, "takes part", 0);
    absent.fails(&[Fault::Late, Fault::Aborted], Some(2));
    cases.push(absent);

    let mut still = new("a rank that stands still in dispatch");
    let handle = still.preprocess(plan(&still, Form::TopK), 0);
    still.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    still.otherwise(2, "stands still", 1);
    still.fails(&[Fault::Stalled, Fault::Aborted], Some(2));
    cases.push(still);

    let mut still = new("a rank that stands still in combine");
    let handle = still.preprocess(plan(&still, Form::TopK), 0);
    still.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    still.combine(&handle, combine(Copies::Bulk, hidden));
    still.otherwise(0, "stands still", 1);
    still.fails(&[Fault::Stalled, Fault::Aborted], Some(0));
    cases.push(still);

    for (name, word, fault) in [
        ("a rank that has left", Gone::Left, Fault::Left),
        ("a rank that has died", Gone::Died, Fault::Died),
        ("a rank without heartbeats", Gone::Silent, Fault::Silent),
    ] {
        let mut gone = new(name);
        let handle = gone.preprocess(plan(&gone, Form::TopK), 0);
        gone.dispatch(&handle, dispatch(Copies::Bulk, hidden));
        gone.is_gone(1, word);
        gone.combine(&handle, combine(Copies::Bulk, hidden));
        gone.otherwise(1, "takes part", 0);
        gone.fails(&[fault, Fault::Aborted], Some(1));
        cases.push(gone);
    }

    let mut mismatch = new("ranks that call different things");
    let handle = mismatch.preprocess(plan(&mismatch, Form::TopK), 0);
    mismatch.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    mismatch.otherwise(0, "signature", 7);
    mismatch.fails(&[Fault::Mismatch, Fault::Aborted], None);
    cases.push(mismatch);

    // Inputs of rank 1: expert index 6 where there are 6 experts; one expert twice for a token; a weight that is NaN.
    let index = 6i32.to_le_bytes().repeat(8);
    let twice = 2i32.to_le_bytes().repeat(8);
    let weights = f32::NAN.to_le_bytes().repeat(8);
    for (name, fault, input, bytes) in [
        ("an index out of range", Fault::Index, "topk_idx", index),
        ("an expert twice", Fault::Duplicate, "topk_idx", twice),
        ("a weight that is no number", Fault::Nan, "weights", weights),
    ] {
        let mut script = new(name);
        script.preprocess(plan(&script, Form::TopK), 0);
        script.other_input(1, input, bytes);
        script.fails(&[fault, Fault::Aborted], Some(1));
        cases.push(script);
    }

    // On one machine, and with a machine per domain.
    cases.extend(faults_across_rails("", |script| script));
    cases.extend(faults_across_rails(" on another machine", Script::apart));

    // With a capacity the host does not wait, and calls the next operators before it knows of the fault.
    let mut behind = new("operators behind one that failed");
    let plan = Plan { capacity: vec![Some(16); 3], ..plan(&behind, Form::TopK) };
    let handle = behind.preprocess(plan, 0);
    behind.other_input(1, "weights", f32::NAN.to_le_bytes().repeat(8));
    let faults = [Fault::Nan, Fault::Aborted];
    behind.fails(&faults, Some(1));
    behind.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    behind.does_not_begin(&faults, 1);
    behind.combine(&handle, combine(Copies::Bulk, hidden));
    behind.does_not_begin(&faults, 1);
    cases.push(behind);
    cases
}

/// Faults in a world of two domains: ranks 0 and 1, ranks 2 and 3.
fn faults_across_rails(place: &str, placed: impl Fn(Script) -> Script) -> Vec<Script> {
    let world = || World::builder().ranks(4).domains(2).experts(8).build().unwrap();
    let rails = |name: &str| Script::new(&format!("{name}{place}"), world(), BLOCKS);
    let far = |script: &Script| unbounded(top_k(script.world(), &[5, 4, 6, 3], 3, 29), Form::TopK, pad(2));
    let (hidden, mut cases) = (16, Vec::new());
    let mut absent = rails("a rank of another domain that does not enter");
    let handle = absent.preprocess(far(&absent), 0);
    absent.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    absent.otherwise(3, "takes part", 0);
    absent.fails(&[Fault::Late, Fault::Aborted], Some(3));
    cases.push(absent);

    let mut still = rails("a rank of another domain that stands still");
    let handle = still.preprocess(far(&still), 0);
    still.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    still.combine(&handle, combine(Copies::Bulk, hidden));
    still.otherwise(0, "stands still", 1);
    still.fails(&[Fault::Stalled, Fault::Aborted], Some(0));
    cases.push(still);

    for (name, word, fault) in [
        ("has died", Gone::Died, Fault::Died),
        ("has left", Gone::Left, Fault::Left),
        ("has left early", Gone::LeftEarly, Fault::Left),
        ("is unreachable", Gone::Unreachable, Fault::Unreachable),
    ] {
        let mut gone = rails(&format!("a rank of another domain that {name}"));
        let handle = gone.preprocess(far(&gone), 0);
        gone.is_gone(2, word);
        gone.dispatch(&handle, dispatch(Copies::Bulk, hidden));
        gone.otherwise(2, "takes part", 0);
        gone.fails(&[fault, Fault::Aborted], Some(2));
        cases.push(gone);
    }

    // No fault: what the rank has sent arrives after the news that it has left.
    let mut leaving = rails("a rank of another domain that leaves after dispatch");
    let handle = leaving.preprocess(far(&leaving), 0);
    leaving.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    leaving.leaves(2);
    cases.push(leaving);

    let mut leaving = rails("a rank of another domain that leaves after combine");
    let handle = leaving.preprocess(far(&leaving), 0);
    leaving.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    leaving.combine(&handle, combine(Copies::Bulk, hidden));
    leaving.leaves(2);
    cases.push(leaving);

    let mut mismatch = rails("ranks of two domains that call different things");
    let handle = mismatch.preprocess(far(&mismatch), 0);
    mismatch.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    for rank in [2, 3] {
        mismatch.otherwise(rank, "signature", 7);
    }
    mismatch.fails(&[Fault::Mismatch, Fault::Aborted], None);
    cases.push(mismatch);

    let mut wrong = rails("a routing of another domain that is wrong");
    wrong.preprocess(far(&wrong), 0);
    wrong.other_input(2, "topk_idx", 8i32.to_le_bytes().repeat(18));
    wrong.fails(&[Fault::Index, Fault::Aborted], Some(2));
    cases.push(wrong);

    // Rank 2, whose blocks have several tiles, finds the fault before it announces its set.
    let mut much = rails("a set with too many copies");
    much.bounds(96, 100);
    much.preprocess(unbounded(top_k(much.world(), &[5, 4, 90, 3], 4, 29), Form::TopK, pad(2)), 0);
    much.fails(&[Fault::RailCopies, Fault::Aborted], Some(2));
    cases.push(much);

    // Rank 2 fails after it has sent its masks. Its domain fails with it, and the other domain has everything. The
    // operators that rank 2 runs after the failed one have no lists, so they must not announce rows.
    let mut behind = rails("operators of another domain behind one that failed");
    let handle = behind.preprocess(far(&behind), 0);
    behind.otherwise(2, "most copies", 1);
    let faults = [Fault::TooManyCopies, Fault::Aborted];
    behind.fails(&[Fault::None, Fault::TooManyCopies, Fault::Aborted], Some(2));
    behind.dispatch(&handle, dispatch(Copies::Bulk, hidden));
    behind.fails(&faults, Some(2));
    behind.combine(&handle, combine(Copies::Bulk, hidden));
    behind.fails(&faults, Some(2));
    cases.push(behind);
    cases.into_iter().map(placed).collect()
}
