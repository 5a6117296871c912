//! Conformance of the host backend, with thread ranks, over many settings, in registered and in other memory.

use std::ops::Range;

use ep::conformance::{Failure, Prepared, Problem, check_misuse, random_case, suite};
use ep::join::Rendezvous;
use ep::{
    Backend, CombineInput, CombineOutput, Config, DispatchInput, DispatchMode, DispatchOutput, Element,
    Error, HandleShape, Rank, ReceiveShape, Result, Routing, Traffic, WeightGradients, WeightRows,
    WeightedRows, World,
};
use ep_host::{HostBuffer, HostHandle, HostMemory};

/// A buffer that allocates every `every`-th tensor in memory that peers cannot access.
struct Unregistered {
    inner: HostBuffer,
    every: usize,
    allocated: usize,
}

impl Backend for Unregistered {
    type Memory = HostMemory;
    type Handle = HostHandle;

    fn threads(world: &World, config: &Config) -> Result<Vec<Self>> {
        let buffers = HostBuffer::threads(world, config)?;
        Ok(buffers.into_iter().map(|inner| Self { inner, every: 2, allocated: 0 }).collect())
    }

    fn join(world: &World, rendezvous: &mut dyn Rendezvous, config: &Config) -> Result<Self> {
        Ok(Self { inner: HostBuffer::join(world, rendezvous, config)?, every: 2, allocated: 0 })
    }

    fn alloc(&mut self, bytes: usize) -> Result<HostMemory> {
        self.allocated += 1;
        if self.allocated.is_multiple_of(self.every) {
            HostMemory::normal(bytes)
        } else {
            self.inner.alloc(bytes)
        }
    }

    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> &World {
        self.inner.world()
    }

    fn upload(&mut self, bytes: &[u8], memory: &mut HostMemory) -> Result<()> {
        self.inner.upload(bytes, memory)
    }

    fn download(&mut self, memory: &HostMemory, bytes: &mut [u8]) -> Result<()> {
        self.inner.download(memory, bytes)
    }

    fn clear(&mut self, memory: &mut HostMemory, bytes: Range<usize>) -> Result<()> {
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
    ) -> Result<HostHandle> {
        self.inner.preprocess(routing, mode, capacity)
    }

    fn receive_shape(&mut self, handle: &HostHandle) -> Result<ReceiveShape> {
        Backend::receive_shape(&mut self.inner, handle)
    }

    fn dispatch(
        &mut self,
        handle: &HostHandle,
        input: DispatchInput<'_, HostMemory>,
        output: DispatchOutput<'_, HostMemory>,
    ) -> Result<()> {
        self.inner.dispatch(handle, input, output)
    }

    fn combine(
        &mut self,
        handle: &HostHandle,
        input: CombineInput<'_, HostMemory>,
        output: CombineOutput<'_, HostMemory>,
    ) -> Result<()> {
        self.inner.combine(handle, input, output)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

impl WeightRows for Unregistered {
    fn weight_rows(
        &mut self,
        input: &WeightedRows<'_, HostMemory>,
        element: Element,
        out: &mut HostMemory,
        backward: Option<WeightGradients<'_, HostMemory>>,
    ) -> Result<()> {
        self.inner.weight_rows(input, element, out, backward)
    }
}

/// Checks misuse on every rank. Each rank also gets a buffer of another world, whose memory it must refuse.
fn check_misuse_in(world: &World, config: &Config) {
    let others = threads(world, config).into_iter();
    let pairs: Vec<_> = threads(world, config).into_iter().zip(others).collect();
    on_all_ranks(pairs, |(buffer, other)| check_misuse(buffer, other), "misuse");
}

/// Runs every rank on its own thread. Panics with the failures of all ranks, peer errors last.
fn on_all_ranks<B: Send>(buffers: Vec<B>, run: impl Fn(&mut B) -> Result<(), Failure> + Sync, context: &str) {
    let run = &run;
    let mut failures: Vec<Failure> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            buffers.into_iter().map(|mut buffer| scope.spawn(move || run(&mut buffer))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().filter_map(|thread| join(thread).err()).collect()
    });
    // A peer error is a consequence of another rank's failure.
    failures.sort_by_key(|failure| matches!(*failure.problem, Problem::Error(Error::Peer(_))));
    let texts: Vec<String> = failures.iter().map(Failure::to_string).collect();
    assert!(texts.is_empty(), "{context}\n{}", texts.join("\n"));
}

fn threads(world: &World, config: &Config) -> Vec<HostBuffer> {
    HostBuffer::threads(world, config).expect("the world fits this machine")
}

fn check(prepared: &Prepared, config: &Config) {
    on_all_ranks(threads(prepared.world(), config), |buffer| prepared.check(buffer), &format!("{config:?}"));
}

/// Settings that must not change any bit of the results.
fn config(workers: usize, chunk_tokens: usize, slots: usize) -> Config {
    let mut config = Config::default();
    config.host.workers = workers;
    config.chunk_tokens = chunk_tokens;
    config.host.slots = slots;
    config
}

fn check_suite(config: &Config) {
    for case in suite() {
        check(&case.prepare().expect("a valid case"), config);
    }
}

#[test]
fn suite_with_one_worker() {
    check_suite(&config(1, 64, 4));
}

#[test]
fn suite_with_three_workers() {
    check_suite(&config(3, 16, 2));
}

#[test]
fn suite_with_the_smallest_chunks() {
    // With one slot, every message waits for the credit of the one before it.
    check_suite(&config(1, 3, 1));
}

#[test]
fn suite_with_small_slots_and_many_workers() {
    let mut config = config(4, 1, 1);
    // Little more than the widest row of the suite.
    config.host.slot_bytes = 48 << 10;
    // The transport copies messages, like one that lends no slots.
    config.host.lend = false;
    check_suite(&config);
}

#[test]
fn suite_with_streaming_stores() {
    let mut config = config(2, 64, 4);
    config.host.streaming_bytes = 0;
    check_suite(&config);
}

#[test]
fn suite_over_an_emulated_link() {
    let mut config = config(2, 16, 2);
    config.host.transport.engine = "paced:2GB/s,30us".into();
    check_suite(&config);
}

/// The settings for an engine of libfabric; `None` where the library is not installed.
#[cfg(feature = "fabric")]
fn over(provider: &str, mut config: Config) -> Option<Config> {
    config.host.transport.engine = provider.into();
    config.host.transport.libfabric = ep_fabric::testing::installed()?;
    Some(config)
}

#[test]
#[cfg(feature = "fabric")]
fn suite_over_tcp() {
    if let Some(config) = over("tcp", config(2, 16, 2)) {
        check_suite(&config);
    }
}

#[test]
#[cfg(feature = "fabric")]
fn suite_over_shm() {
    if let Some(config) = over("shm", config(1, 3, 1)) {
        check_suite(&config);
    }
}

/// The buffers of ranks that join as if each domain were on a machine of its own: domains share no memory, and their
/// ranks see each other's state through mirrors.
#[cfg(all(feature = "fabric", target_os = "linux"))]
fn on_machines(world: &World, config: &Config) -> Vec<HostBuffer> {
    let meetings = ep::join::ThreadRendezvous::new(world.ranks(), std::time::Duration::from_secs(60));
    std::thread::scope(|scope| {
        let join = |mut meeting: ep::join::ThreadRendezvous| {
            let mut config = config.clone();
            config.machine = Some(format!("node-{}", world.topology().domain_of(meeting.rank())));
            // The loopback interface, by its name.
            config.host.transport.address = Some("lo".into());
            scope.spawn(move || HostBuffer::join(world, &mut meeting, &config).expect("all ranks join"))
        };
        let threads: Vec<_> = meetings.into_iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[test]
#[cfg(all(feature = "fabric", target_os = "linux"))]
fn suite_on_several_machines() {
    let Some(config) = over("tcp", config(1, 16, 2)) else { return };
    for case in suite() {
        let prepared = case.prepare().expect("a valid case");
        let buffers = on_machines(prepared.world(), &config);
        on_all_ranks(buffers, |buffer| prepared.check(buffer), "on several machines");
    }
    let world = World::builder().ranks(4).domains(2).experts(8).build().expect("a valid world");
    let pairs: Vec<_> = on_machines(&world, &config).into_iter().zip(on_machines(&world, &config)).collect();
    on_all_ranks(pairs, |(buffer, other)| check_misuse(buffer, other), "misuse on several machines");
}

#[test]
fn suite_in_unregistered_memory() {
    let config = config(1, 8, 2);
    for (at, case) in suite().into_iter().enumerate() {
        let prepared = case.prepare().expect("a valid case");
        let every = 1 + at % 3;
        let wrap = |inner| Unregistered { inner, every, allocated: 0 };
        let buffers: Vec<_> = threads(prepared.world(), &config).into_iter().map(wrap).collect();
        on_all_ranks(buffers, |buffer| prepared.check(buffer), &format!("every {every} unregistered"));
    }
}

/// `HYBRID_EP_RANDOM_CASES` sets the number of cases; 2,000 take about half a minute on two cores.
#[test]
fn random_cases() {
    let cases = std::env::var("HYBRID_EP_RANDOM_CASES").ok().and_then(|cases| cases.parse().ok());
    for seed in 0..cases.unwrap_or(60) {
        let prepared = random_case(seed, 8, 4).prepare().expect("a valid case");
        let config =
            config(1 + seed as usize % 3, [1, 3, 64][seed as usize / 3 % 3], 1 + seed as usize / 9 % 4);
        check(&prepared, &config);
    }
}

#[test]
fn cases_one_after_another_on_the_same_buffers() {
    // State that one case leaves in buffers and rings must not affect the next case.
    let world =
        suite().into_iter().find(|case| case.ranks == 4 && case.domains == 2 && case.owners.is_none());
    let (experts, world) =
        world.map(|case| (case.experts, case.world().expect("a valid case"))).expect("there is one");
    let prepared: Vec<Prepared> = suite()
        .into_iter()
        .filter(|case| case.world().expect("a valid case") == world && case.experts == experts)
        .map(|case| case.prepare().expect("a valid case"))
        .collect();
    assert!(prepared.len() > 10);
    on_all_ranks(
        threads(&world, &config(2, 7, 2)),
        |buffer| prepared.iter().try_for_each(|prepared| prepared.check(buffer)),
        "one after another",
    );
}

#[test]
fn misuse_is_refused_on_every_rank() {
    for (ranks, domains, experts) in [(1, 1, 4), (3, 1, 6), (4, 2, 8), (4, 4, 4)] {
        let world =
            World::builder().ranks(ranks).domains(domains).experts(experts).build().expect("a valid world");
        check_misuse_in(&world, &config(1, 64, 4));
    }
    // Ranks without experts must refuse the same calls as the others.
    let world = World::builder().ranks(3).placement(&[2, 0, 2].map(Rank)).build().expect("a valid world");
    check_misuse_in(&world, &config(2, 64, 4));
}
