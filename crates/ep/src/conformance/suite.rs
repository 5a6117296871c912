//! The fixed cases: each dimension varied alone, and combinations that have failed before.

use super::case::{CapacityKind, Case, ProbsKind, RoutingKind, pad};
use super::random::SCALE_FORMATS;
use crate::backend::{DispatchMode, Element, TokenFormat};
use crate::topology::Rank;

const PLAIN: DispatchMode = DispatchMode::Plain;
const ELEMENTS: [Element; 2] = [Element::Bf16, Element::F32];

/// The cases that every backend must pass. The cases are small; their run time depends mostly on the number of ranks.
pub fn suite() -> Vec<Case> {
    let groups = [
        worlds(),
        token_counts(),
        routings(),
        paddings(),
        capacities(),
        formats(),
        combines(),
        probs(),
        widths(),
        placements(),
        streams(),
        special_values(),
    ];
    let mut cases: Vec<Case> = groups.into_iter().flatten().collect();
    for (case, seed) in cases.iter_mut().zip(1..) {
        case.seed = seed;
    }
    cases
}

fn worlds() -> Vec<Case> {
    let sizes = [
        (1, 1),
        (2, 1),
        (2, 2),
        (3, 1),
        (3, 3),
        (4, 2),
        (4, 4),
        (6, 2),
        (6, 3),
        (8, 1),
        (8, 2),
        (8, 4),
        (12, 4),
        (16, 1),
        (16, 2),
        (16, 4),
    ];
    let mut cases = Vec::new();
    for (ranks, domains) in sizes {
        for mode in [PLAIN, pad(16)] {
            cases.push(Case { mode, ..Case::base("worlds", ranks, domains, 2 * ranks) });
        }
    }
    cases.push(Case { mode: PLAIN, ..Case::base("one expert", 1, 1, 1) });
    cases.push(Case::base("one expert", 1, 1, 1));
    cases.push(Case {
        routing: RoutingKind::TopK { k: 8, skew: 0.8 },
        ..Case::base("many experts", 8, 2, 256)
    });
    cases
}

fn token_counts() -> Vec<Case> {
    let mut cases = Vec::new();
    for mode in [PLAIN, pad(16)] {
        for (domains, tokens) in [
            (1, vec![7, 0, 1, 19]),
            (2, vec![0, 0, 0, 23]),
            (2, vec![21, 0, 0, 0]),
            (4, vec![0, 3, 0, 11]),
            (1, vec![0; 4]),
            (2, vec![0; 4]),
            (2, vec![1; 4]),
        ] {
            cases.push(Case { mode, tokens, ..Case::base("token counts", 4, domains, 8) });
        }
    }
    cases.push(Case { tokens: vec![0], ..Case::base("token counts", 1, 1, 4) });
    cases
}

fn routings() -> Vec<Case> {
    let mut cases = Vec::new();
    for mode in [PLAIN, pad(1), pad(16)] {
        for routing in [
            RoutingKind::MultiHot { density: 0.3 },
            RoutingKind::HotExpert,
            RoutingKind::Nothing,
            RoutingKind::TopK { k: 1, skew: 0.0 },
            RoutingKind::TopK { k: 12, skew: 1.5 },
        ] {
            cases.push(Case { mode, routing, ..Case::base("routings", 4, 2, 12) });
        }
        let routing = RoutingKind::MultiHot { density: 0.9 };
        cases.push(Case { mode, routing, ..Case::base("routings", 3, 1, 24) });
        cases.push(Case { mode, routing, ..Case::base("routings", 1, 1, 6) });
    }
    cases
}

fn paddings() -> Vec<Case> {
    let mut cases = Vec::new();
    for multiple in [1, 16, 128] {
        for (ranks, domains) in [(1, 1), (2, 1), (4, 2)] {
            let (mode, hidden) = (pad(multiple), 16);
            cases.push(Case { mode, hidden, ..Case::base("paddings", ranks, domains, 2 * ranks) });
        }
    }
    cases
}

fn capacities() -> Vec<Case> {
    use CapacityKind::{Exact, Larger, TooSmall, Unbounded, Zero};
    let mut cases = Vec::new();
    for mode in [PLAIN, pad(1), pad(16)] {
        for kind in [Exact, TooSmall, Zero, Larger] {
            cases.push(Case { mode, capacity: vec![kind; 4], ..Case::base("capacities", 4, 2, 8) });
        }
        let capacity = vec![TooSmall, Unbounded, Zero, Larger, Exact, TooSmall];
        for domains in [1, 3] {
            let (capacity, routing) = (capacity.clone(), RoutingKind::MultiHot { density: 0.5 });
            cases.push(Case { mode, capacity, routing, ..Case::base("capacities", 6, domains, 18) });
        }
        cases.push(Case { mode, capacity: vec![TooSmall], ..Case::base("capacities", 1, 1, 5) });
        let (capacity, routing) = (vec![TooSmall; 4], RoutingKind::HotExpert);
        cases.push(Case { mode, capacity, routing, ..Case::base("capacities", 4, 4, 4) });
    }
    cases
}

fn all_formats() -> Vec<TokenFormat> {
    let fp8 = SCALE_FORMATS.into_iter().flat_map(|s| [TokenFormat::Fp8(s), TokenFormat::QuantizeFp8(s)]);
    [TokenFormat::Bf16, TokenFormat::F32].into_iter().chain(fp8).collect()
}

fn formats() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in all_formats() {
        for (mode, ranks, domains, hidden) in
            [(pad(16), 4, 2, 256), (PLAIN, 4, 4, 400), (pad(1), 3, 1, 48), (PLAIN, 1, 1, 144)]
        {
            cases.push(Case { mode, hidden, format, ..Case::base("formats", ranks, domains, 2 * ranks) });
        }
        let capacity = vec![CapacityKind::TooSmall, CapacityKind::Larger];
        cases.push(Case { format, capacity, ..Case::base("formats", 2, 2, 6) });
    }
    cases
}

fn combines() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in ELEMENTS {
        for wire in ELEMENTS {
            for (ranks, domains) in [(1, 1), (4, 1), (4, 4), (8, 2)] {
                let routing = RoutingKind::TopK { k: 6, skew: 0.0 };
                let case = Case::base("combines", ranks, domains, 3 * ranks);
                cases.push(Case { element, wire, routing, ..case.clone() });
                cases.push(Case { element, wire, routing, mode: PLAIN, ..case });
            }
        }
    }
    cases
}

fn probs() -> Vec<Case> {
    let mut cases = Vec::new();
    for probs in [ProbsKind::Skip, ProbsKind::Routing, ProbsKind::Dense] {
        for (mode, domains) in [(PLAIN, 1), (PLAIN, 2), (pad(1), 2), (pad(16), 1)] {
            let routing = RoutingKind::MultiHot { density: 0.4 };
            cases.push(Case { mode, probs, routing, hidden: 16, ..Case::base("probs", 4, domains, 12) });
        }
    }
    cases
}

fn widths() -> Vec<Case> {
    let mut cases = Vec::new();
    // Rows of 16, 48, 80, 272 bytes and so on: multiples of 16, but many not of 64.
    for hidden in [8, 16, 24, 40, 136, 520, 1024, 2056, 4096, 7168, 8192] {
        let tokens = if hidden > 1024 { vec![2, 1, 0, 2] } else { vec![3, 5, 0, 4] };
        for (domains, element) in [(1, Element::Bf16), (2, Element::F32)] {
            let (mode, tokens) = (pad(1), tokens.clone());
            cases.push(Case {
                hidden,
                mode,
                tokens,
                element,
                runs: 2,
                ..Case::base("widths", 4, domains, 8)
            });
        }
    }
    for hidden in [16, 112, 2064, 8192] {
        for format in all_formats() {
            let (mode, tokens) = (PLAIN, vec![2, 1]);
            cases.push(Case { hidden, mode, tokens, format, runs: 2, ..Case::base("widths", 2, 2, 4) });
        }
    }
    // Rows that are moved in several pieces, with several experts per rank.
    for format in all_formats() {
        for domains in [1, 2] {
            let (mode, tokens) = (pad(16), vec![9, 14]);
            cases.push(Case {
                hidden: 7168,
                mode,
                tokens,
                format,
                runs: 2,
                ..Case::base("widths", 2, domains, 8)
            });
        }
    }
    cases
}

fn placements() -> Vec<Case> {
    let on = |owners: &[u32]| Some(owners.iter().copied().map(Rank).collect::<Vec<_>>());
    let mut cases = Vec::new();
    for mode in [PLAIN, pad(1), pad(16)] {
        for (name, domains, owners) in [
            ("shuffled placement", 2, on(&[3, 0, 2, 1, 1, 3, 0, 2])),
            ("uneven placement", 2, on(&[3, 1, 3, 1, 3, 3, 1, 3, 3])),
            ("uneven placement", 1, on(&[2, 0, 0, 2, 0])),
            ("one expert of many ranks", 4, on(&[2])),
            ("all experts on one rank", 2, on(&[3, 3, 3, 3, 3])),
        ] {
            let experts = owners.as_ref().map_or(0, Vec::len);
            let routing = RoutingKind::MultiHot { density: 0.5 };
            let case = Case { owners, mode, ..Case::base(name, 4, domains, experts) };
            cases.push(Case { routing, probs: ProbsKind::Dense, ..case.clone() });
            cases.push(Case { format: TokenFormat::QuantizeFp8(SCALE_FORMATS[1]), ..case });
        }
    }
    cases
}

/// Enough tokens for several chunks, and for every ring to wrap around several times.
fn streams() -> Vec<Case> {
    let mut cases = Vec::new();
    for (domains, tokens) in
        [(1, vec![300, 7, 150, 301]), (2, vec![300, 7, 150, 301]), (4, vec![130, 400, 0, 129])]
    {
        for mode in [PLAIN, pad(16)] {
            let tokens = tokens.clone();
            cases.push(Case { tokens, mode, hidden: 16, runs: 2, ..Case::base("streams", 4, domains, 8) });
        }
    }
    let routing = RoutingKind::HotExpert;
    cases.push(Case {
        tokens: vec![400, 350],
        routing,
        hidden: 32,
        runs: 2,
        ..Case::base("streams", 2, 2, 4)
    });
    let (capacity, tokens) = (vec![CapacityKind::TooSmall; 2], vec![333, 260]);
    cases.push(Case { tokens, capacity, hidden: 32, runs: 2, ..Case::base("streams", 2, 2, 4) });
    cases
}

fn special_values() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in ELEMENTS {
        for wire in ELEMENTS {
            for (mode, domains) in [(PLAIN, 2), (pad(16), 1), (pad(16), 4)] {
                let case = Case::base("special values", 4, domains, 12);
                cases.push(Case { special: true, element, wire, mode, probs: ProbsKind::Dense, ..case });
            }
        }
    }
    for format in all_formats() {
        let case = Case::base("special values", 2, 2, 6);
        cases.push(Case {
            special: true,
            format,
            hidden: 400,
            routing: RoutingKind::MultiHot { density: 0.4 },
            ..case
        });
    }
    cases
}
