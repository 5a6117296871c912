//! What the proxy posts.

use std::time::{Duration, Instant};

use ep::{EnvironmentError, Posted};

use super::*;
use crate::rail::signal::MOST_UNITS;

const LANE: usize = 4 << 20;
/// The domain to which most tests send, and its rank.
const TO: usize = 1;

/// A signal with the offsets that it must have in the lanes.
fn sent(bench: &Bench, put: &Put, epoch: u32) -> (Signal, usize, usize) {
    let parity = (epoch & 1) as usize;
    assert_eq!(put.peer, RANKS[TO]);
    // In the peer's window, domain 0 is that of this rank.
    let begin = put.source - bench.layout.out_lane(TO, parity);
    assert_eq!(put.destination - bench.layout.in_lane(0, parity), begin);
    (put.signal, begin, put.len)
}

/// Whether the put is that of a plan of `units` units.
fn is_plan(bench: &Bench, put: &Put, epoch: u32, units: usize) -> bool {
    let expected = Put::new(RANKS[TO], plan_signal(epoch));
    let from = bench.end(TO, epoch) + offset_of!(RailEnd, out);
    let to = bench.end(0, epoch) + offset_of!(RailEnd, input);
    *put == expected.bytes(from..from + offset_of!(RailPlan, ends) + units * size_of::<UnitEnd>(), to)
}

/// Units of `rows` rows each, and twice as many copies.
fn units(count: u32, rows: u32) -> Vec<(u32, u32)> {
    (1..=count).map(|unit| (unit * rows, 2 * unit * rows)).collect()
}

#[test]
fn the_plan_comes_first_and_units_follow_in_their_order_once_they_are_complete() {
    let (bench, mut pump) = Bench::pump(LANE);
    assert!(!pump.step().unwrap());
    let mut plan = plan_of(1, &units(4, 3));
    plan.sections =
        [section(0, 100, RailPer::Row), section(4096, 4, RailPer::Copy), section(8192, 60, RailPer::Once)];
    bench.release(TO, &plan);
    settle(&mut pump);
    let puts = bench.script.puts();
    assert!(puts.len() == 1 && is_plan(&bench, &puts[0], 1, 4), "{puts:?}");

    bench.complete(TO, 1, 1);
    settle(&mut pump);
    assert_eq!(bench.script.puts(), [], "unit 0 is not complete");

    bench.complete(TO, 1, 0);
    settle(&mut pump);
    let puts: Vec<_> = bench.script.puts().iter().map(|put| sent(&bench, put, 1)).collect();
    let expected = [(part(1, 0, 0, 2), 0, 600), (part(1, 1, 0, 2), 4096, 48), (part(1, 2, 0, 2), 8192, 60)];
    assert_eq!(puts, expected);

    bench.complete(TO, 1, 3);
    bench.complete(TO, 1, 2);
    settle(&mut pump);
    let puts: Vec<_> = bench.script.puts().iter().map(|put| sent(&bench, put, 1)).collect();
    assert_eq!(puts, [(part(1, 0, 2, 4), 600, 600), (part(1, 1, 2, 4), 4096 + 48, 48)]);

    // The next epoch uses the other copies.
    bench.release(TO, &plan_of(2, &units(1, 3)));
    settle(&mut pump);
    let puts = bench.script.puts();
    assert!(puts.len() == 1 && is_plan(&bench, &puts[0], 2, 1), "{puts:?}");
}

#[test]
fn each_section_has_runs_of_its_own() {
    let (bench, mut pump) = Bench::pump(LANE);
    let (long, short) = (600_000, 4);
    let mut plan = plan_of(1, &units(4, 1));
    plan.sections =
        [section(0, long, RailPer::Row), section(3 << 20, short, RailPer::Row), section(0, 0, RailPer::Row)];
    bench.release(TO, &plan);
    bench.complete(TO, 1, 0);
    settle(&mut pump);
    let puts: Vec<_> = bench.script.puts()[1..].iter().map(|put| put.signal).collect();
    assert_eq!(puts, [part(1, 0, 0, 1), part(1, 1, 0, 1)]);
    // Two units of the long section are more than a run; all of the short section are one.
    (1..4).for_each(|unit| bench.complete(TO, 1, unit));
    settle(&mut pump);
    let puts: Vec<_> = bench.script.puts().iter().map(|put| put.signal).collect();
    assert_eq!(puts, [part(1, 0, 1, 2), part(1, 1, 1, 4), part(1, 0, 2, 3), part(1, 0, 3, 4)]);
}

#[test]
fn all_flags_of_a_unit_must_be_those_of_the_epoch() {
    let (bench, mut pump) = Bench::pump(LANE);
    let mut plan = plan_of(1, &units(2, 3));
    plan.sections[0] = section(0, 8, RailPer::Row);
    plan.flags_per_unit = 3;
    bench.release(TO, &plan);
    settle(&mut pump);
    bench.script.puts();
    for flag in [0, 2, 3, 4, 5] {
        bench.complete(TO, 1, flag);
        settle(&mut pump);
        assert_eq!(bench.script.puts(), []);
    }
    bench.complete(TO, 1, 1);
    settle(&mut pump);
    let signals: Vec<_> = bench.script.puts().iter().map(|put| put.signal).collect();
    assert_eq!(signals, [part(1, 0, 0, 2)]);
    // The flags of epoch 3 are in the words of epoch 1, whose values no longer count.
    bench.release(TO, &plan_of(2, &[]));
    bench.release(TO, &RailPlan { epoch: 3, ..plan });
    settle(&mut pump);
    assert_eq!(bench.script.puts().len(), 2, "two plans");
}

#[test]
fn units_without_bytes_are_not_awaited() {
    let (bench, mut pump) = Bench::pump(LANE);
    // Units 0 and 2 have no bytes.
    let mut plan = plan_of(1, &[(0, 0), (5, 0), (5, 3)]);
    plan.sections[0] = section(0, 8, RailPer::Row);
    bench.release(TO, &plan);
    bench.complete(TO, 1, 1);
    settle(&mut pump);
    let signals: Vec<_> = bench.script.puts().iter().map(|put| put.signal).collect();
    assert_eq!(signals, [plan_signal(1), part(1, 0, 0, 3)]);
    // The peer has all of epoch 1, so the kernels may overwrite the flags with those of epoch 3.
    bench.release(TO, &plan_of(2, &[(4, 0)]));
    bench.release(TO, &RailPlan { epoch: 3, ..plan });
    (0..3).for_each(|unit| bench.complete(TO, 3, unit));
    settle(&mut pump);
    let signals: Vec<_> = bench.script.puts().iter().map(|put| put.signal).collect();
    assert_eq!(signals, [plan_signal(2), plan_signal(3), part(3, 0, 0, 3)]);
}

#[test]
fn what_follows_many_units_without_bytes_is_sent_before_leaving() {
    let (bench, mut pump) = Bench::pump(LANE);
    let mut ends = vec![(0, 0); 700];
    ends[699] = (5, 0);
    let mut plan = plan_of(1, &ends);
    plan.sections[0] = section(0, 8, RailPer::Row);
    bench.release(TO, &plan);
    // The step that posts the plan.
    assert!(pump.step().unwrap());
    bench.complete(TO, 1, 699);
    pump.drain(Instant::now() + Duration::from_secs(60)).unwrap();
    let signals: Vec<_> = bench.script.puts().iter().map(|put| put.signal).collect();
    assert_eq!(signals.len(), 2, "the plan and the unit: {signals:?}");
}

#[test]
fn a_put_has_at_most_256_units_and_a_mebibyte_unless_one_unit_is_longer() {
    let (bench, mut pump) = Bench::pump(LANE);
    let mut post = |epoch, count, stride| {
        let mut plan = plan_of(epoch, &units(count, 1));
        plan.sections[0] = section(0, stride, RailPer::Row);
        bench.release(TO, &plan);
        (0..count as usize).for_each(|unit| bench.complete(TO, epoch, unit));
        settle(&mut pump);
        bench.script.puts()[1..].iter().map(|put| sent(&bench, put, epoch)).collect::<Vec<_>>()
    };
    let expected = [(0, 256), (256, 288), (288, 296)]
        .map(|(from, to)| (part(1, 0, from, to), from * 8, (to - from) * 8));
    assert_eq!(post(1, 296, 8), expected);
    assert_eq!(MOST_UNITS, 256);
    let third = 350_000;
    let expected =
        [(0, 2), (2, 4), (4, 5)].map(|(from, to)| (part(2, 0, from, to), from * third, (to - from) * third));
    assert_eq!(post(2, 5, third as u32), expected);
    let long = 2 << 20;
    assert_eq!(post(3, 2, long as u32), [(part(3, 0, 0, 1), 0, long), (part(3, 0, 1, 2), long, long)]);
}

#[test]
fn sections_without_bytes_need_no_put() {
    let (bench, mut pump) = Bench::pump(LANE);
    // Unit 0 has no rows; unit 1 has no copies.
    let mut plan = plan_of(1, &[(0, 2), (5, 2)]);
    plan.sections = [section(0, 8, RailPer::Row), section(64, 8, RailPer::Copy), section(0, 0, RailPer::Row)];
    bench.release(TO, &plan);
    for unit in [0, 1] {
        bench.complete(TO, 1, unit);
        settle(&mut pump);
    }
    let puts: Vec<_> = bench.script.puts()[1..].iter().map(|put| sent(&bench, put, 1)).collect();
    assert_eq!(puts, [(part(1, 1, 0, 1), 64, 16), (part(1, 0, 1, 2), 0, 40)]);
}

#[test]
fn an_empty_plan_sends_its_single_elements_as_unit_0() {
    let (bench, mut pump) = Bench::pump(LANE);
    let mut plan = plan_of(1, &[]);
    plan.sections[1] = section(128, 20, RailPer::Once);
    (plan.flags_per_unit, plan.chunk_rows) = (0, 7);
    bench.release(TO, &plan);
    bench.release(TO, &plan_of(2, &[]));
    settle(&mut pump);
    let puts = bench.script.puts();
    assert!(
        puts.len() == 3 && is_plan(&bench, &puts[0], 1, 0) && is_plan(&bench, &puts[2], 2, 0),
        "{puts:?}"
    );
    assert_eq!(sent(&bench, &puts[1], 1), (part(1, 1, 0, 1), 128, 20));
}

#[test]
fn puts_that_find_the_queue_full_are_posted_later_in_the_same_order() {
    let post = |refusals: usize| {
        let (bench, mut pump) = Bench::pump(LANE);
        let mut refused = 0;
        bench.script.answer(move |_| {
            refused = if refused == refusals { 0 } else { refused + 1 };
            Ok(if refused == 0 { Posted::Yes } else { Posted::Full })
        });
        let mut plan = plan_of(1, &units(20, 2));
        plan.sections =
            [section(0, 8, RailPer::Row), section(4096, 4, RailPer::Copy), section(9000, 6, RailPer::Once)];
        bench.release(TO, &plan);
        (0..20).for_each(|unit| bench.complete(TO, 1, unit));
        for _ in 0..200 {
            pump.step().unwrap();
        }
        bench.script.puts()
    };
    let expected = post(0);
    assert_eq!(expected.len(), 1 + 3 + 2);
    for refusals in 1..4 {
        assert_eq!(post(refusals), expected);
    }
}

#[test]
fn a_full_queue_to_one_peer_does_not_delay_another() {
    let (bench, mut pump) = Bench::pump(LANE);
    bench.script.answer(|put| Ok(if put.peer == RANKS[1] { Posted::Full } else { Posted::Yes }));
    for domain in [1, 2] {
        bench.release(domain, &plan_of(1, &[]));
    }
    settle(&mut pump);
    assert_eq!(bench.script.puts().iter().map(|put| put.peer).collect::<Vec<_>>(), [RANKS[2]]);
}

#[test]
fn an_invalid_plan_of_the_own_kernels_is_an_environment_error() {
    let (bench, mut pump) = Bench::pump(LANE);
    bench.release(2, &RailPlan { rows: 7, ..plan_of(1, &[(5, 0)]) });
    let error = pump.step().unwrap_err();
    let text = "sending epoch 1 along the rail from rank 5 to rank 9: the kernels of rank 5 wrote an invalid plan: \
                7 rows, but its units have 5; report this bug of the kernels";
    assert_eq!(error.to_string(), text);
    assert!(matches!(error, Error::Environment(EnvironmentError { .. })));
    assert_eq!(bench.reports(), [(RANKS[1], text.to_string()), (RANKS[2], text.to_string())]);
    assert_eq!(pump.step().unwrap_err(), error, "and stays");
    assert_eq!(bench.script.puts(), []);
}
