//! Soaks with a faulty rank.

use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;

use ep::join::ThreadRendezvous;
use ep::{
    Backend, CombineInput, CombineOutput, DispatchInput, DispatchMode, DispatchOutput, Element,
    EnvironmentError, HandleShape, Rank, ReceiveShape, Routing, Traffic, WeightGradients, WeightRows,
    WeightedRows, World,
};
use ep_host::{HostHandle, HostMemory};

use super::*;
use crate::verify::args::parse;

fn plan(options: &str) -> Result<SoakPlan, Failure> {
    let args = parse(&format!("--backend host {options}")).unwrap();
    SoakPlan::resolve(&args, args.soak.unwrap(), &ProcessRole::Threads, "hybrid-ep")
}

#[test]
fn the_replay_command_reaches_the_same_iteration() {
    let plan = plan("--soak 50 --ranks 3 --seed 8").unwrap();
    let replay = plan.replay(17);
    assert_eq!(replay, "hybrid-ep verify --soak 18 --seed 8 --ranks 3 --domains 1");
    let again = self::plan(replay.strip_prefix("hybrid-ep verify").unwrap()).unwrap();
    assert_eq!(again.iterations, 18);
    let case = |plan: &SoakPlan| plan.soak.prepare(17).unwrap().case().clone();
    assert_eq!(case(&again), case(&plan));
}

#[test]
fn invalid_worlds_are_refused() {
    for (options, part) in [
        ("--soak 1 --ranks 0", "--ranks 0"),
        ("--soak 1 --ranks 4 --domains 3", "4 ranks"),
        ("--soak 1 --domains 5000", "--domains 5000"),
    ] {
        let message = plan(options).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    let conflict = parse("--soak 5 --cases 3").unwrap_err();
    assert_eq!(conflict.kind(), clap::error::ErrorKind::ArgumentConflict);
}

#[test]
fn batches_hold_every_iteration_once() {
    let all: Vec<u64> = plan("--soak 100").unwrap().batches().flatten().collect();
    assert_eq!(all, (0..100).collect::<Vec<_>>());
}

/// A rank of the host backend that fails at one of its dispatches.
struct Spoiled {
    inner: HostBuffer,
    fault: Option<(Fault, u32)>,
    dispatches: u32,
}

#[derive(Clone, Copy)]
enum Fault {
    Differs,
    Fails,
    Panics,
}

thread_local! {
    /// The fault to inject into the next world of this thread: the rank, the kind, and the number of the dispatch.
    static FAULT: Cell<Option<(u32, Fault, u32)>> = const { Cell::new(None) };
}

impl Spoiled {
    fn new(inner: HostBuffer) -> Self {
        let mine = FAULT.get().filter(|(rank, ..)| Rank(*rank) == inner.rank());
        Self { inner, fault: mine.map(|(_, fault, at)| (fault, at)), dispatches: 0 }
    }
}

impl Backend for Spoiled {
    type Memory = HostMemory;
    type Handle = HostHandle;

    fn threads(world: &World, config: &Config) -> ep::Result<Vec<Self>> {
        Ok(HostBuffer::threads(world, config)?.into_iter().map(Self::new).collect())
    }

    fn join(world: &World, meet: &mut dyn Rendezvous, config: &Config) -> ep::Result<Self> {
        HostBuffer::join(world, meet, config).map(Self::new)
    }

    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> &World {
        self.inner.world()
    }

    fn alloc(&mut self, bytes: usize) -> ep::Result<HostMemory> {
        self.inner.alloc(bytes)
    }

    fn upload(&mut self, bytes: &[u8], memory: &mut HostMemory) -> ep::Result<()> {
        self.inner.upload(bytes, memory)
    }

    fn download(&mut self, memory: &HostMemory, bytes: &mut [u8]) -> ep::Result<()> {
        self.inner.download(memory, bytes)?;
        if let Some((Fault::Differs, _)) = self.fault.filter(|(_, at)| *at <= self.dispatches) {
            self.fault = None;
            bytes.iter_mut().take(1).for_each(|byte| *byte ^= 1);
        }
        Ok(())
    }

    fn clear(&mut self, memory: &mut HostMemory, bytes: Range<usize>) -> ep::Result<()> {
        self.inner.clear(memory, bytes)
    }

    fn registered_bytes(&self) -> usize {
        self.inner.registered_bytes()
    }

    fn handle_shape(&self, handle: &HostHandle) -> HandleShape {
        self.inner.handle_shape(handle)
    }

    fn preprocess(
        &mut self,
        routing: &Routing,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> ep::Result<HostHandle> {
        self.inner.preprocess(routing, mode, capacity)
    }

    fn receive_shape(&mut self, handle: &HostHandle) -> ep::Result<ReceiveShape> {
        Backend::receive_shape(&mut self.inner, handle)
    }

    fn dispatch(
        &mut self,
        handle: &HostHandle,
        input: DispatchInput<'_, HostMemory>,
        output: DispatchOutput<'_, HostMemory>,
    ) -> ep::Result<()> {
        self.dispatches += 1;
        match self.fault.filter(|(_, at)| *at == self.dispatches) {
            Some((Fault::Fails, _)) => Err(EnvironmentError::new("dispatch", "broken for a test", "").into()),
            Some((Fault::Panics, _)) => panic!("expected in this test"),
            _ => self.inner.dispatch(handle, input, output),
        }
    }

    fn combine(
        &mut self,
        handle: &HostHandle,
        input: CombineInput<'_, HostMemory>,
        output: CombineOutput<'_, HostMemory>,
    ) -> ep::Result<()> {
        self.inner.combine(handle, input, output)
    }

    fn synchronize(&mut self) -> ep::Result<()> {
        self.inner.synchronize()
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

impl WeightRows for Spoiled {
    fn weight_rows(
        &mut self,
        input: &WeightedRows<'_, HostMemory>,
        element: Element,
        out: &mut HostMemory,
        backward: Option<WeightGradients<'_, HostMemory>>,
    ) -> ep::Result<()> {
        self.inner.weight_rows(input, element, out, backward)
    }
}

/// Runs a soak of ranks 0, 1 and 2 in which rank 1 fails at its 150th dispatch.
fn spoiled(fault: Fault, run: impl FnOnce(&SoakPlan) -> Outcomes) -> (Outcomes, SoakPlan) {
    let plan = plan("--soak 400 --ranks 3 --seed 4").unwrap();
    FAULT.set(Some((1, fault, 150)));
    let outcomes = run(&plan);
    FAULT.set(None);
    (outcomes, plan)
}

fn as_threads(plan: &SoakPlan) -> Outcomes {
    on_threads::<Spoiled>(plan, &ProgressBar::hidden()).unwrap()
}

/// Runs the code of ranks that are processes on threads of this process.
fn like_processes(plan: &SoakPlan) -> Outcomes {
    let buffers = Spoiled::threads(plan.soak.world(), &plan.config).unwrap();
    let meets = ThreadRendezvous::new(buffers.len(), Duration::from_secs(60));
    let all_outcomes = std::thread::scope(|scope| {
        let start = |(buffer, mut meet): (Spoiled, ThreadRendezvous)| {
            let (queue, batches) = mpsc::sync_channel(1);
            scope.spawn(move || plan.prepare_all(&queue));
            scope.spawn(move || run_as_process(buffer, &mut meet, batches, &mut Reporter::Silent).unwrap())
        };
        let ranks: Vec<_> = buffers.into_iter().zip(meets).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(
        all_outcomes.iter().all(|outcomes| outcomes == &all_outcomes[0]),
        "all ranks have the same outcome: {all_outcomes:?}"
    );
    all_outcomes.into_iter().next().unwrap()
}

#[test]
fn a_failure_of_one_rank_ends_the_soak_of_all_ranks() {
    for run in [as_threads, like_processes] {
        assert_eq!(run(&plan("--soak 70 --ranks 3 --seed 4").unwrap()).passed_by_all(), 70);
        for (fault, said) in [
            (Fault::Differs, "rank 1, dispatch, run "),
            (Fault::Fails, "broken for a test"),
            (Fault::Panics, "a rank panicked"),
        ] {
            let (outcomes, plan) = spoiled(fault, run);
            let (number, message) = outcomes.first_cause().unwrap();
            assert!(message.contains(said), "{message}");
            assert!(message.starts_with(&format!("iteration {number}")), "{message}");
            assert_eq!(outcomes.passed_by_all(), number, "{outcomes:?}");
            assert!((75..150).contains(&number), "two runs an iteration at most: {number}");
            assert!(plan.replay(number).contains(&format!("--soak {} --seed 4", number + 1)));
        }
    }
}

#[test]
fn own_failures_are_reported_before_lost_peers() {
    let report = |number: u64, own: bool| (number, CheckReport::of_test(own, &format!("{number} {own}")));
    let mut outcomes = Outcomes::new(2);
    assert_eq!(outcomes.first_cause(), None);
    outcomes.reports = vec![report(4, false), report(3, false)];
    assert_eq!(outcomes.first_cause(), Some((3, "3 false")));
    outcomes.reports.extend([report(7, true), report(5, true)]);
    assert_eq!(outcomes.first_cause(), Some((5, "5 true")));
    for (rank, number) in [(0, 0), (0, 1), (1, 0)] {
        outcomes.record(RankOutcome { rank, number, report: None });
    }
    assert_eq!(outcomes.passed_by_all(), 1);
}

#[test]
fn a_rank_without_a_thread_ends_the_soak() {
    let plan = plan("--soak 70 --ranks 3 --seed 4").unwrap();
    for allowed in 0..3 {
        let run = || on_threads::<HostBuffer>(&plan, &ProgressBar::hidden());
        let error = threads::quota::of(allowed, run).unwrap_err().to_string();
        assert!(error.contains(&format!("starting the thread of rank {allowed}")), "{error}");
    }
}

#[test]
fn a_peer_that_reports_an_earlier_iteration_does_not_end_the_count() {
    let mut reporter = Reporter::ToLauncher { reported: 64 };
    let report = CheckReport::of_test(true, "row 3 differs");
    reporter.progress(&Outcomes { passed: vec![96], reports: vec![(3, report)] }).unwrap();
    assert!(matches!(reporter, Reporter::ToLauncher { reported: 64 }));
    let plan = plan("--soak 70 --ranks 3 --seed 4").unwrap();
    assert!(plan.replay(u64::MAX).contains(&u64::MAX.to_string()));
}
