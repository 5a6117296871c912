//! Tests of the cases and of the checker. A correct backend of one rank, made from the oracle, passes, and the checker
//! reports every fault that the tests inject into it.

mod fake;

use std::collections::HashSet;

use self::fake::{Fake, Fault};
use super::case::pad;
use super::*;
use crate::backend::{DispatchMode, Element, TokenFormat};
use crate::error::Error;
use crate::topology::{Rank, World};

/// Cases of one rank: those of the suite, and random ones.
fn one_rank_cases() -> Vec<Prepared> {
    let of_suite = suite().into_iter().filter(|case| case.ranks == 1);
    of_suite.chain((0..80).map(|seed| random_case(seed, 1, 1))).map(|case| case.prepare().unwrap()).collect()
}

fn failures(cases: &[Prepared], fault: Fault) -> Vec<Failure> {
    cases.iter().filter_map(|case| case.check(&mut Fake::new(case.world(), fault)).err()).collect()
}

#[test]
fn a_good_backend_passes() {
    let found = failures(&one_rank_cases(), Fault::None);
    assert!(found.is_empty(), "{}", found[0]);
}

#[test]
fn every_fault_is_reported() {
    let cases = one_rank_cases();
    for (fault, operator, text) in [
        (Fault::FlipsBit, "dispatch", "received tokens, row "),
        (Fault::LeavesPadding, "dispatch", "as before the call"),
        (
            Fault::WritesBehind,
            "dispatch",
            "received tokens, byte 0 after the last row: expected 0xa5 (165), found 0x00 (0)",
        ),
        (Fault::WritesSpareRow, "dispatch", "byte 0, in an unused row: expected 0xa5"),
        (Fault::ForgetsRow, "dispatch", "received tokens, row 1 column 0: expected 0x"),
        (Fault::SwapsRows, "dispatch", "received tokens, row 0 "),
        (Fault::WrongScale, "dispatch", "received scales, row 0 column 0: "),
        (Fault::WrongProb, "dispatch", "received probs, row 0 column 0: expected 0x"),
        (Fault::WrongLocalExpert, "dispatch", "local experts, row 0 column 0: expected 0x"),
        (Fault::WrongShape, "receive_shape", "expected ReceiveShape {"),
        (Fault::WrongHandleShape, "handle_shape", "expected HandleShape {"),
        (Fault::LeavesReport, "preprocess_on_device", "tokens per expert, row 0"),
        (Fault::LeavesOverflow, "preprocess_on_device", "overflow, row 0"),
        (Fault::ForgetsFirstHandle, "combine", "combined tokens, row "),
        (Fault::SumsBackwards, "combine", "combined tokens, row "),
        (Fault::AddsPadding, "combine", "found 0x7fff (NaN)"),
        (Fault::RoundsDown, "combine", "combined tokens, row 0 column 0: expected 0x"),
        (Fault::LeavesUnchosenProbs, "combine with probs", "gathered probs, row "),
        (Fault::IgnoresProbStride, "combine with probs", "gathered probs, row "),
        (Fault::OnlyOnce, "dispatch", "as before the call"),
        (Fault::TruncatesWeighted, "weight_rows", "weighted rows, row "),
        (Fault::SkipsLastElement, "weight_rows with gradients", "gradients of weights, row "),
        (Fault::LeavesDots, "weight_rows with gradients", "is further from the exact"),
    ] {
        let found = failures(&cases, fault);
        assert!(found.len() > 4, "{fault:?} is seen in {} cases only", found.len());
        for failure in &found {
            assert_eq!(failure.operator, operator, "{failure}");
            let late = matches!(fault, Fault::ForgetsFirstHandle | Fault::OnlyOnce);
            assert!(failure.run > 0 || !late, "{failure}");
        }
        assert!(found.iter().any(|failure| failure.to_string().contains(text)), "{fault:?}: {}", found[0]);
    }
}

/// The failures in the first iterations of a soak, with the numbers of the iterations.
fn soak_failures(fault: Fault, iterations: u64) -> Vec<(u64, Failure)> {
    let soak = Soak::new(2, 1, 1).unwrap();
    let (mut backend, mut rank) = (Fake::new(soak.world(), fault), Soaking::default());
    let check = |number| {
        let iteration = soak.prepare(number).unwrap();
        rank.check(&mut backend, &iteration).err().map(|failure| (number, failure))
    };
    (0..iterations).filter_map(check).collect()
}

#[test]
fn a_soak_sees_what_single_cases_cannot() {
    assert_eq!(soak_failures(Fault::None, 200), []);
    assert_eq!(failures(&one_rank_cases(), Fault::ForgetsOldHandles), []);
    let found = soak_failures(Fault::ForgetsOldHandles, 200);
    assert!(found.len() > 10, "{}", found.len());
    for (number, failure) in found {
        assert_eq!(failure.operator, "combine", "{failure}");
        assert!(failure.case.starts_with(&format!("iteration {number} on the handle of ")), "{failure}");
    }
}

/// A failure reports both the first difference and whether a later error stopped the rank.
#[test]
fn a_rank_that_differs_goes_on_unless_an_error_stops_it() {
    let cases = one_rank_cases();
    assert!(failures(&cases, Fault::FlipsBit).iter().all(|failure| !failure.stopped));
    // The backend fails in the third run of the cases that have three runs.
    let found = failures(&cases, Fault::FlipsBitAndFails);
    let differ = found.iter().filter(|failure| matches!(*failure.problem, Problem::Differs(_)));
    let (stopped, went_on): (Vec<_>, Vec<_>) = differ.partition(|failure| failure.stopped);
    assert!(stopped.len() > 4 && went_on.len() > 4, "{} {}", stopped.len(), went_on.len());
}

#[test]
fn errors_and_worlds_are_reported() {
    let prepared = suite()[0].prepare().unwrap();
    let failure = prepared.check(&mut Fake::new(prepared.world(), Fault::Fails)).unwrap_err();
    assert!(matches!(*failure.problem, Problem::Error(Error::Environment(_))));
    let text = failure.to_string();
    assert!(text.starts_with("worlds: seed 1, 1 ranks in 1 domains, 2 experts, tokens [4] of 64"), "{text}");
    assert!(text.ends_with("rank 0, dispatch, run 2: dispatch: no more"), "{text}");

    assert!(failure.stopped);

    let other = World::builder().ranks(1).experts(3).build().unwrap();
    let failure = prepared.check(&mut Fake::new(&other, Fault::None)).unwrap_err();
    assert_eq!(*failure.problem, Problem::World);
}

#[test]
fn backends_that_accept_invalid_calls_are_reported() {
    let world = World::builder().ranks(1).experts(4).build().unwrap();
    let misuse = |fault| check_misuse(&mut Fake::new(&world, fault), &mut Fake::new(&world, Fault::None));
    misuse(Fault::None).unwrap();
    for (fault, text) in [
        (Fault::WrongShape, "receive_shape, run 0: expected ReceiveShape"),
        (
            Fault::TakesAnyCapacity,
            "preprocess, run 0: a capacity that is not a multiple of pad_multiple: must be refused",
        ),
        (
            Fault::BlamesEnvironment,
            "dispatch, run 0: rows that are not a multiple of 16 bytes: must be refused with a caller's error, but failed with",
        ),
        (Fault::SendsFirst, "dispatch, run 0: rows that are not a multiple of 16 bytes: bytes were sent"),
    ] {
        let found = misuse(fault).unwrap_err().to_string();
        assert!(found.contains(text), "{found}");
    }
    for (operator, arguments) in [
        (
            "dispatch",
            &[
                "tokens",
                "scales",
                "dense probs",
                "received tokens",
                "received scales",
                "received probs",
                "local experts",
            ][..],
        ),
        ("combine", &["expert rows", "probs", "combined tokens", "gathered probs"]),
        (
            "weight_rows",
            &[
                "rows to be weighted",
                "weights",
                "weighted rows",
                "rows that were weighted",
                "gradients of weights",
            ],
        ),
        ("upload", &["upload"]),
        ("download", &["download"]),
    ] {
        for &argument in arguments {
            let found = misuse(Fault::TakesForeign(argument)).unwrap_err().to_string();
            let text = format!("{operator}, run 0: another buffer's memory for {argument}: must be refused");
            assert!(found.contains(&text), "{found}");
        }
    }
}

#[test]
fn a_sum_beyond_its_roundings_is_reported() {
    let mut prepared = suite()[0].prepare().unwrap();
    let exact = &mut prepared.runs[1][0].exact;
    assert!(exact.iter().all(|exact| exact.bound > 0.0));
    exact[65].sum += 2.01 * exact[65].bound;
    let failure = prepared.check(&mut Fake::new(prepared.world(), Fault::None)).unwrap_err();
    assert!(matches!(*failure.problem, Problem::Rounding { row: 1, column: 1, .. }), "{failure}");
}

#[test]
fn random_cases_follow_from_their_seed() {
    let mut distinct = HashSet::new();
    for seed in 0..300 {
        let case = random_case(seed, 8, 4);
        assert_eq!(case, random_case(seed, 8, 4));
        assert!((1..=8).contains(&case.ranks) && (1..=4).contains(&case.domains));
        assert_eq!(case.world().unwrap().ranks(), case.ranks, "{case}");
        distinct.insert(case.to_string());
    }
    assert_eq!(distinct.len(), 300);
    let prepared = random_case(5, 4, 2).prepare().unwrap();
    let again = random_case(5, 4, 2).prepare().unwrap();
    let content = |prepared: &Prepared| format!("{:?}", prepared.content(0, Rank(0)));
    assert_eq!(content(&prepared), content(&again));
    assert!((0..200).any(|seed| random_case(seed, 8, 4).ranks == 8));
}

#[test]
fn every_case_of_the_suite_can_be_prepared_and_has_its_own_text() {
    let mut texts = HashSet::new();
    for case in suite() {
        let prepared = case.prepare().unwrap();
        assert_eq!(prepared.world().ranks(), case.ranks);
        assert!(!case.to_string().contains('\n'));
        assert!(texts.insert(case.to_string()), "twice: {case}");
    }
}

#[test]
fn invalid_cases_say_why() {
    let message = |case: Case| case.prepare().unwrap_err().to_string();
    let base = || Case::base("bad", 4, 2, 8);
    assert!(message(Case { tokens: vec![1; 3], ..base() }).contains("tokens: expected 4 ranks, found 3"));
    assert!(message(Case { capacity: vec![], ..base() }).contains("capacity: expected 4 ranks, found 0"));
    assert!(message(Case { hidden: 12, ..base() }).contains("hidden of 12 elements"));
    assert!(message(Case { domains: 3, ..base() }).contains("equal size"));
    assert!(message(Case { owners: Some(vec![Rank(0)]), ..base() }).contains("owners: expected 8 experts"));
}

/// Asserts that the suite has a case for which `like` returns true.
fn covers(what: &str, like: impl Fn(&Case) -> bool) {
    let found: Vec<Case> = suite().into_iter().filter(|case| like(case)).collect();
    assert!(!found.is_empty(), "no case of {what}");
}

/// Asserts that the suite has such a case with one domain, and one with several.
fn covers_in_and_across_domains(what: &str, like: impl Fn(&Case) -> bool) {
    covers(what, |case| like(case) && case.ranks > 1 && case.domains == 1);
    covers(what, |case| like(case) && case.domains > 1);
}

#[test]
fn the_suite_covers_worlds_tokens_and_routings() {
    for ranks in [1, 2, 3, 4, 6, 8, 12, 16] {
        covers("ranks", |case| case.ranks == ranks);
    }
    for domains in 1..=4 {
        covers("domains", |case| case.domains == domains && case.ranks > domains);
    }
    covers("one expert", |case| case.ranks == 1 && case.experts == 1);
    covers_in_and_across_domains("unequal and zero tokens", |case| {
        case.tokens.contains(&0) && case.tokens.iter().collect::<HashSet<_>>().len() > 2
    });
    covers_in_and_across_domains("no tokens at all", |case| case.tokens.iter().all(|&tokens| tokens == 0));
    covers_in_and_across_domains("many tokens", |case| case.tokens.iter().sum::<usize>() > 600);
    covers_in_and_across_domains("multi-hot", |case| matches!(case.routing, RoutingKind::MultiHot { .. }));
    covers("a hot expert", |case| case.routing == RoutingKind::HotExpert && case.domains > 1);
    covers("nothing chosen", |case| case.routing == RoutingKind::Nothing && case.domains > 1);
    covers_in_and_across_domains("ranks without experts", |case| {
        let world = case.world().unwrap();
        world.topology().all_ranks().any(|rank| world.placement().local_experts(rank) == 0)
    });
    assert!(suite().iter().filter(|case| case.runs == 3).count() > 100);
}

#[test]
fn multi_hot_rows_are_empty_and_full() {
    let case = suite().into_iter().find(|case| matches!(case.routing, RoutingKind::MultiHot { .. })).unwrap();
    let prepared = case.prepare().unwrap();
    let lens: HashSet<usize> = prepared
        .routings
        .iter()
        .flat_map(|r| (0..r.tokens()).map(|token| r.experts_of(token).len()))
        .collect();
    assert!(lens.contains(&0) && lens.contains(&case.experts) && lens.len() > 3, "{lens:?}");
}

#[test]
fn the_suite_covers_modes_capacities_and_probs() {
    covers_in_and_across_domains("plain", |case| case.mode == DispatchMode::Plain);
    for pad_multiple in [1, 16, 128] {
        covers_in_and_across_domains("pad", |case| case.mode == pad(pad_multiple));
    }
    for plain in [false, true] {
        let mode_is = |case: &Case| (case.mode == DispatchMode::Plain) == plain;
        use CapacityKind::{Exact, Larger, TooSmall, Zero};
        for kind in [Exact, TooSmall, Zero, Larger] {
            covers_in_and_across_domains("capacity", |case| mode_is(case) && case.capacity.contains(&kind));
        }
        for probs in [ProbsKind::Skip, ProbsKind::Routing, ProbsKind::Dense] {
            covers_in_and_across_domains("probs", |case| mode_is(case) && case.probs == probs);
        }
    }
    for case in suite().iter().filter(|case| case.name == "capacities") {
        let prepared = case.prepare().unwrap();
        let overflow = prepared.received.iter().any(|received| received.shape.overflow());
        let small = |kind: &CapacityKind| matches!(kind, CapacityKind::TooSmall | CapacityKind::Zero);
        assert_eq!(overflow, case.capacity.iter().any(small), "{case}");
    }
}

#[test]
fn the_suite_covers_types_and_widths() {
    for scales in super::random::SCALE_FORMATS {
        for format in [TokenFormat::Fp8(scales), TokenFormat::QuantizeFp8(scales), TokenFormat::Bf16] {
            covers_in_and_across_domains("format", |case| case.format == format);
            covers("special values", |case| case.format == format && case.special);
        }
    }
    for element in [Element::Bf16, Element::F32] {
        for wire in [Element::Bf16, Element::F32] {
            let like = |case: &Case| case.element == element && case.wire == wire;
            covers_in_and_across_domains("combine", like);
            covers_in_and_across_domains("special values", |case| like(case) && case.special);
        }
    }
    for hidden in [16, 4096, 7168, 8192] {
        covers("width", |case| case.hidden == hidden);
    }
    covers_in_and_across_domains("rows of an odd number of 16 bytes", |case| {
        !case.format.output_row_bytes(case.hidden).is_multiple_of(32)
    });
}
