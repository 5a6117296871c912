//! What the proxy tells the kernels, and what it refuses.

use super::*;

const LANE: usize = 1 << 16;
/// The domain from which the signals come, and its rank.
const FROM: usize = 2;

/// Ten rows in four units, the second of which has no rows; chunks of 4 rows.
fn plan(epoch: u32) -> RailPlan {
    let mut plan = plan_of(epoch, &[(3, 4), (3, 6), (8, 6), (10, 9)]);
    plan.sections =
        [section(0, 64, RailPer::Row), section(1024, 4, RailPer::Copy), section(2048, 8, RailPer::Once)];
    plan
}

/// All signals of a set of [`plan`].
fn signals(epoch: u32) -> Vec<Signal> {
    let parts = [(0, 0, 1), (0, 2, 4), (1, 0, 2), (1, 2, 4), (2, 0, 1)];
    let parts = parts.map(|(section, first, end)| part(epoch, section, first, end));
    [plan_signal(epoch)].into_iter().chain(parts).collect()
}

fn take(bench: &Bench, pump: &mut Pump, signal: Signal) {
    bench.script.arrive(RANKS[FROM], signal);
    settle(pump);
}

#[test]
fn chunks_arrive_once_the_units_before_their_end_have_arrived_with_all_sections() {
    let (bench, mut pump) = Bench::pump(LANE);
    bench.put_plan(FROM, &plan(1));
    let steps = [
        (part(1, 0, 0, 1), false, 0),
        (plan_signal(1), true, 0),
        // Rows 3 to 7, while sections 1 and 2 of unit 0 are missing.
        (part(1, 0, 2, 3), true, 0),
        (part(1, 2, 0, 1), true, 0),
        // The copies of units 0 and 1. Unit 1 has no rows and unit 2 no copies, so the first 8 rows have arrived.
        (part(1, 1, 0, 2), true, 2),
        (part(1, 0, 3, 4), true, 2),
        (part(1, 1, 3, 4), true, 3),
    ];
    for (step, (signal, entered, chunks)) in steps.into_iter().enumerate() {
        take(&bench, &mut pump, signal);
        assert_eq!((bench.entered(FROM, 1), bench.arrived(FROM, 1)), (entered, chunks), "step {step}");
    }
    assert_eq!(bench.reports(), []);
    assert!(!bench.entered(1, 1), "the other peer has sent nothing");
}

#[test]
fn signals_of_two_epochs_may_arrive_in_any_order() {
    let mut random = Random(7);
    let rounds = if cfg!(miri) { 3 } else { 200 };
    for _ in 0..rounds {
        let (bench, mut pump) = Bench::pump(LANE);
        for first in [1, 3] {
            let mut both: Vec<Signal> = (first..first + 2).flat_map(signals).collect();
            for epoch in first..first + 2 {
                bench.put_plan(FROM, &plan(epoch));
            }
            while !both.is_empty() {
                take(&bench, &mut pump, both.swap_remove(random.below(both.len())));
            }
            for epoch in first..first + 2 {
                assert!(bench.entered(FROM, epoch) && bench.arrived(FROM, epoch) == 3);
            }
        }
        assert_eq!(bench.reports(), []);
    }
}

#[test]
fn the_last_chunk_waits_for_units_without_rows_and_an_empty_set_has_one_chunk() {
    let (bench, mut pump) = Bench::pump(LANE);
    let mut plan = plan_of(1, &[(4, 1), (4, 3)]);
    plan.sections =
        [section(0, 16, RailPer::Row), section(64, 4, RailPer::Copy), section(0, 0, RailPer::Row)];
    bench.put_plan(FROM, &plan);
    for (signal, chunks) in
        [(plan_signal(1), 0), (part(1, 0, 0, 2), 0), (part(1, 1, 0, 1), 0), (part(1, 1, 1, 2), 1)]
    {
        take(&bench, &mut pump, signal);
        assert_eq!(bench.arrived(FROM, 1), chunks);
    }
    bench.put_plan(FROM, &plan_of(2, &[]));
    take(&bench, &mut pump, plan_signal(2));
    assert_eq!(bench.arrived(FROM, 2), 1);
    let mut counts = plan_of(3, &[]);
    counts.sections[1] = section(0, 40, RailPer::Once);
    bench.put_plan(FROM, &counts);
    take(&bench, &mut pump, plan_signal(3));
    // The chunk of epoch 1, whose progress was in the same word, does not count.
    assert_eq!((bench.entered(FROM, 3), bench.arrived(FROM, 3)), (true, 0));
    take(&bench, &mut pump, part(3, 1, 0, 1));
    assert_eq!(bench.arrived(FROM, 3), 1);
    // Sections that no unit has bytes in.
    bench.put_plan(FROM, &RailPlan { sections: plan.sections, ..plan_of(4, &[(0, 0), (0, 0)]) });
    take(&bench, &mut pump, plan_signal(4));
    assert_eq!(bench.arrived(FROM, 4), 1);
    assert_eq!(bench.reports(), []);
}

#[test]
fn a_plan_that_changes_after_it_has_arrived_changes_nothing() {
    let (bench, mut pump) = Bench::pump(LANE);
    bench.put_plan(FROM, &plan(1));
    take(&bench, &mut pump, plan_signal(1));
    bench.put_plan(FROM, &RailPlan { units: u32::MAX, chunk_rows: 0, ..plan_of(1, &[(1 << 31, 0)]) });
    for signal in signals(1).split_off(1) {
        take(&bench, &mut pump, signal);
    }
    assert_eq!((bench.arrived(FROM, 1), bench.reports()), (3, vec![]));
}

/// The report after these signals, of which the last must be the one that the proxy refuses.
fn refused(plan: &RailPlan, before: &[Signal], last: Signal) -> String {
    let (bench, mut pump) = Bench::pump(LANE);
    // This rank's kernels are in a dispatch.
    bench.release(FROM, &plan_of(1, &[]));
    bench.put_plan(FROM, plan);
    for &signal in before {
        take(&bench, &mut pump, signal);
        assert_eq!(bench.reports(), []);
    }
    take(&bench, &mut pump, last);
    let reports = bench.reports();
    let [(rank, text)] = reports.as_slice() else { panic!("{reports:?}") };
    assert_eq!(*rank, RANKS[FROM]);
    let arrived = bench.arrived(FROM, 1);
    // Later signals of a peer that broke the protocol are ignored.
    signals(1).into_iter().for_each(|signal| take(&bench, &mut pump, signal));
    assert_eq!((bench.arrived(FROM, 1), bench.reports().len()), (arrived, 1));
    let found = text.strip_prefix("rank 9 broke the protocol (dispatch #1): rank 5 found ");
    found.unwrap_or_else(|| panic!("{text}")).to_string()
}

#[test]
fn each_word_of_a_hostile_plan_is_checked() {
    let all = |row| [(row, 0); MAX_CHUNKS];
    let with = |change: &dyn Fn(&mut RailPlan)| {
        let mut plan = plan(1);
        change(&mut plan);
        plan
    };
    let set = |index: usize, section: RailSection| with(&move |plan| plan.sections[index] = section);
    let unknown = RailSection { offset: 0, stride: 1, per: 3 };
    let lane = LANE as u64;
    let outside = |index, count, stride, offset: u64| {
        format!(
            "section {index} of {count} elements of {stride} bytes at offset {offset}, outside a lane of 65536 bytes"
        )
    };
    let cases = [
        // A correct plan of epoch 3 has the parity of epoch 1.
        (plan(3), "epoch 3 in place of epoch 1".into()),
        (with(&|plan| plan.units = 1025), "1025 units; at most 1024 are possible".into()),
        (with(&|plan| plan.flags_per_unit = 0), "0 flags per unit; from 1 to 4 are possible".into()),
        (with(&|plan| plan.flags_per_unit = 5), "5 flags per unit; from 1 to 4 are possible".into()),
        (
            with(&|plan| plan.chunk_rows = 0),
            "10 rows in chunks of 0; from 1 to 1024 chunks are possible".into(),
        ),
        (
            RailPlan { chunk_rows: 0, ..plan_of(1, &[]) },
            "0 rows in chunks of 0; from 1 to 1024 chunks are possible".into(),
        ),
        (
            RailPlan { chunk_rows: 1, ..plan_of(1, &all(1025)) },
            "1025 rows in chunks of 1; from 1 to 1024 chunks are possible".into(),
        ),
        (with(&|plan| plan.rows = 9), "9 rows, but its units have 10".into()),
        (with(&|plan| plan.copies = 10), "10 copies, but its units have 9".into()),
        (with(&|plan| plan.units = 0), "10 rows, but its units have 0".into()),
        (
            with(&|plan| plan.ends[1].rows = 2),
            "unit 1 ends after 2 rows, but the unit before it after 3".into(),
        ),
        (
            with(&|plan| plan.ends[3].copies = 5),
            "unit 3 ends after 5 copies, but the unit before it after 6".into(),
        ),
        (set(1, unknown), "section 1 with the unknown code 3".into()),
        (set(0, section(0, 6554, RailPer::Row)), outside(0, 10, 6554, 0)),
        (set(1, section(lane - 35, 4, RailPer::Copy)), outside(1, 9, 4, lane - 35)),
        (set(2, section(lane, 1, RailPer::Once)), outside(2, 1, 1, lane)),
        (set(2, section(u64::MAX, 1, RailPer::Once)), outside(2, 1, 1, u64::MAX)),
        (set(0, section(u64::MAX / 2, u32::MAX, RailPer::Row)), outside(0, 10, u32::MAX, u64::MAX / 2)),
    ];
    for (plan, problem) in cases {
        // `put_plan` uses the place of the plan's parity.
        assert_eq!(refused(&plan, &[], plan_signal(1)), format!("an invalid plan: {problem}"));
    }
}

#[test]
fn a_plan_at_each_limit_is_valid() {
    let full: Vec<(u32, u32)> = (1..=1024).map(|unit| (unit, 0)).collect();
    let mut most = RailPlan { chunk_rows: 1, flags_per_unit: 4, ..plan_of(1, &full) };
    most.sections[0] = section(0, 64, RailPer::Row);
    let mut far = plan(2);
    far.sections[2] = section(LANE as u64 - 8, 8, RailPer::Once);
    let (bench, mut pump) = Bench::pump(LANE);
    for plan in [most, far] {
        bench.put_plan(FROM, &plan);
        take(&bench, &mut pump, plan_signal(plan.epoch));
        assert!(bench.entered(FROM, plan.epoch));
    }
    (0..64).for_each(|run| take(&bench, &mut pump, part(1, 0, 16 * run, 16 * run + 16)));
    assert_eq!((bench.arrived(FROM, 1), bench.reports()), (1024, vec![]));
}

#[test]
fn signals_that_match_nothing_are_refused() {
    let first = plan_signal(1);
    let unused = RailPlan { sections: [section(0, 8, RailPer::Row); 3], ..plan_of(1, &[(4, 4)]) };
    let unused = RailPlan {
        sections: [unused.sections[0], section(0, 0, RailPer::Row), unused.sections[2]],
        ..unused
    };
    let cases = [
        (plan(1), vec![first], part(1, 0, 3, 5), "section 0, units 3 to 4, of a plan of 4 units"),
        (plan(1), vec![first], part(1, 0, 1, 2), "section 0, units 1 to 1, which have no bytes there"),
        (plan(1), vec![first], part(1, 2, 1, 3), "section 2, units 1 to 2, which have no bytes there"),
        (
            plan(1),
            vec![first, part(1, 0, 2, 3)],
            part(1, 0, 0, 4),
            "section 0, units 0 to 3, of which unit 2 has arrived before",
        ),
        (unused, vec![first], part(1, 1, 0, 1), "section 1, units 0 to 0, of a plan without that section"),
        // Signals before their plan are checked with it.
        (plan(1), vec![part(1, 1, 4, 5)], first, "section 1, units 4 to 4, of a plan of 4 units"),
        (
            plan(1),
            vec![part(1, 0, 0, 1), part(1, 0, 0, 1)],
            first,
            "section 0, units 0 to 0, of which unit 0 has arrived before",
        ),
    ];
    for (plan, before, last, problem) in cases {
        assert_eq!(refused(&plan, &before, last), format!("a signal of {problem}"));
    }
    assert_eq!(refused(&plan(1), &[first], first), "a second plan of epoch 1");
    let invalid = |word| refused(&plan(1), &[], Signal::new(word).unwrap());
    // A plan with a unit, and a part of four units of which the last is unit 2.
    assert_eq!(invalid(1 << 16 | 5 << 4), "an invalid signal (0x10050)");
    assert_eq!(invalid(1 << 14 | 2 << 4 | 3), "an invalid signal (0x4023)");
    let flood = vec![part(1, 0, 0, 1); RAIL_SECTIONS * MAX_CHUNKS];
    assert_eq!(refused(&plan(1), &flood, flood[0]), "more than 3072 parts of a set before its plan");
}

#[test]
fn a_peer_that_is_two_epochs_ahead_is_refused() {
    let (bench, mut pump) = Bench::pump(LANE);
    bench.put_plan(FROM, &plan(2));
    signals(2).into_iter().for_each(|signal| take(&bench, &mut pump, signal));
    assert_eq!(bench.arrived(FROM, 2), 3, "one epoch ahead");
    take(&bench, &mut pump, plan_signal(4));
    let text = "rank 9 broke the protocol (join): rank 5 found a signal of epoch 4 before all of epoch 1";
    assert_eq!(bench.reports(), [(RANKS[FROM], text.to_string())]);
}

/// What the network has written is shown to the kernels after the signals have come and before the kernels are told. If that
/// fails, nothing more is told.
#[test]
fn arrivals_are_shown_before_the_kernels_are_told() {
    let (bench, mut parts) = Bench::new(LANE);
    let log = Arc::new(Mutex::new(Vec::new()));
    let (memory, to, end) = (Arc::clone(&bench.memory), Arc::clone(&log), bench.end(FROM, 1));
    let progress = end + offset_of!(RailEnd, state) + offset_of!(crate::params::RailState, progress);
    parts.show = Some(Box::new(move || {
        let mut log = to.lock().unwrap();
        log.push(memory.word(progress).load(Acquire) & 0xFFFF);
        match log.len() {
            1..3 => Ok(()),
            _ => Err(ep::EnvironmentError::new("flushing", "it failed", "a hint").into()),
        }
    }));
    let mut pump = Pump::new(parts).unwrap();
    bench.put_plan(FROM, &plan(1));
    // A round without news shows nothing.
    pump.step().unwrap();
    for signal in [plan_signal(1), part(1, 0, 0, 1), part(1, 2, 0, 1), part(1, 1, 0, 2)] {
        bench.script.arrive(RANKS[FROM], signal);
    }
    pump.step().unwrap();
    assert_eq!(bench.arrived(FROM, 1), 0, "the second chunk needs unit 2");
    bench.script.arrive(RANKS[FROM], part(1, 0, 2, 3));
    pump.step().unwrap();
    assert_eq!(bench.arrived(FROM, 1), 2);
    assert_eq!(*log.lock().unwrap(), [0, 0], "shown once for all signals of a round, before the chunks");
    for signal in [part(1, 0, 3, 4), part(1, 1, 3, 4)] {
        bench.script.arrive(RANKS[FROM], signal);
    }
    let error = pump.step().unwrap_err().to_string();
    assert!(error.contains("flushing"), "{error}");
    assert_eq!(bench.arrived(FROM, 1), 2);
    assert_eq!(bench.reports().len(), 2, "both peers are lost");
}
