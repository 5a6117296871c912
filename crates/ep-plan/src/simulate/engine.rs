//! The event loop. Every actor runs the program on its streams, groups wait for their members, and flows share links.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::clock::{Instant, at_once};
use super::fair::{Crossing, Priority};
use super::mesh::Mesh;
use super::outcome::Phase;
use super::pipe::{Pipe, Tag};
use super::program::{Operation, Program, Stream, Task};
use super::random::Jitter;
use super::timeline::{Span, Timeline};
use super::world::{Route, World};
use crate::units::{Bytes, Seconds};

/// The input of the engine.
pub(crate) struct Setup<'a> {
    pub(crate) world: &'a World,
    pub(crate) program: &'a Program,
    pub(crate) jitter: Option<Jitter>,
    pub(crate) recorder: Option<Recorder>,
}

/// The recorded timeline, and the tracks of recorded actors and links.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pub(crate) timeline: Timeline,
    /// For each actor, the first of the stream tracks of each recorded GPU that it represents.
    pub(crate) actors: HashMap<u32, Vec<usize>>,
    /// The tracks of each recorded link, and the start of its current busy time.
    pub(crate) links: HashMap<u32, LinkRecord>,
}

#[derive(Debug, Default)]
pub(crate) struct LinkRecord {
    pub(crate) tracks: Vec<usize>,
    busy_since: Option<f64>,
}

/// The results of the engine.
#[derive(Debug)]
pub(crate) struct Counts {
    pub(crate) end: f64,
    pub(crate) events: u64,
    pub(crate) flows: u64,
    /// Busy time of each actor by phase.
    pub(crate) busy: Vec<[f64; Phase::ALL.len()]>,
    /// Bytes and busy time of each link.
    pub(crate) links: Vec<(f64, f64)>,
    pub(crate) timeline: Option<Timeline>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// (actor, operation): the actor has finished a computation.
    Computed(u32, u32),
    /// (actor, operation): the actor has started the messages of an exchange.
    Started(u32, u32),
    /// (operation, group): the last acknowledgement of the group's exchange has arrived.
    Exchanged(u32, u32),
    /// (pipe, version): a flow on the pipe ends, unless the pipe has a newer version.
    PipeEnd(u32, u32),
}

/// The state of one stream of an actor.
#[derive(Debug, Clone, Default)]
struct StreamState {
    running: Option<u32>,
    since: f64,
    /// Operations that are ready to start, as (rank, operation). The last entry is the next to start.
    ready: Vec<Reverse<(u32, u32)>>,
    /// Number of flows of the running exchange that have not ended.
    open: u32,
}

struct Engine<'a> {
    world: &'a World,
    program: &'a Program,
    jitter: Option<Jitter>,
    recorder: Option<Recorder>,
    now: f64,
    queue: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    /// Number of scheduled events. Events of one time are processed in the order in which they were scheduled.
    sequence: u64,
    streams: Vec<[StreamState; Stream::COUNT]>,
    /// For each operation and actor, the completed operations that it waited for.
    waits: Vec<Tally>,
    /// For each operation and group, the members that have sent.
    arrivals: Vec<Tally>,
    /// The grouping of each exchange.
    groupings: Vec<usize>,
    pipes: Vec<Pipe>,
    mesh: Mesh,
    /// For each link, its number in the mesh.
    to_mesh: Vec<u32>,
    /// For each link of the mesh, its number in the world.
    from_mesh: Vec<u32>,
    /// Actors whose streams may start an operation after all events of the current time.
    wake: Vec<u32>,
    ended: Vec<Tag>,
    counts: Counts,
}

/// One counter per actor or group. The counters are allocated only while they are in use.
#[derive(Debug, Default)]
struct Tally {
    counts: Option<Box<[u32]>>,
    closed: usize,
}

impl Tally {
    /// Increments a counter and returns whether it has reached `wanted`. When all `entries` counters have reached it,
    /// they are freed.
    fn arrive(&mut self, entry: u32, wanted: u32, entries: usize) -> bool {
        let counts = self.counts.get_or_insert_with(|| vec![0; entries].into_boxed_slice());
        counts[entry as usize] += 1;
        let complete = counts[entry as usize] == wanted;
        self.closed += usize::from(complete);
        if self.closed == entries {
            self.counts = None;
        }
        complete
    }
}

/// Runs the program to its end.
pub(crate) fn run(setup: Setup<'_>) -> Counts {
    let mut engine = Engine::new(setup);
    engine.start();
    engine.process();
    engine.finish()
}

impl<'a> Engine<'a> {
    fn new(setup: Setup<'a>) -> Self {
        let Setup { world, program, jitter, recorder } = setup;
        let operations = program.operations.len();
        let groupings = program.operations.iter().map(|operation| match &operation.task {
            Task::Exchange(_, exchange, _) => world.grouping_of(exchange.family, exchange.level),
            Task::Compute(_) => usize::MAX,
        });
        let mut mesh = Mesh::default();
        let mut from_mesh = Vec::new();
        let to_mesh = world.links.iter().enumerate().map(|(number, link)| {
            if !link.meshed {
                return u32::MAX;
            }
            from_mesh.push(number as u32);
            mesh.add_link(link.capacity)
        });
        Self {
            groupings: groupings.collect(),
            to_mesh: to_mesh.collect(),
            from_mesh,
            mesh,
            now: 0.0,
            queue: BinaryHeap::new(),
            sequence: 0,
            streams: vec![Default::default(); world.actors()],
            waits: (0..operations).map(|_| Tally::default()).collect(),
            arrivals: (0..operations).map(|_| Tally::default()).collect(),
            pipes: world.links.iter().map(|link| Pipe::new(link.capacity)).collect(),
            wake: (0..world.actors() as u32).rev().collect(),
            ended: Vec::new(),
            counts: Counts {
                end: 0.0,
                events: 0,
                flows: 0,
                busy: vec![[0.0; Phase::ALL.len()]; world.actors()],
                links: Vec::new(),
                timeline: None,
            },
            world,
            program,
            jitter,
            recorder,
        }
    }

    /// Makes the operations without dependencies ready.
    fn start(&mut self) {
        for (number, operation) in self.program.operations.iter().enumerate() {
            if operation.waits_for == 0 {
                for actor in 0..self.world.actors() as u32 {
                    self.make_ready(actor, number as u32);
                }
            }
        }
    }

    fn process(&mut self) {
        loop {
            let event = self.queue.peek().map(|&Reverse((at, ..))| at.0);
            let flow = self.mesh.next_end();
            let next = event.unwrap_or(f64::INFINITY).min(flow.unwrap_or(f64::INFINITY));
            if !at_once(self.now, next) {
                // All events of the current time are processed. Start the operations that became ready, then compute
                // the new rates.
                if let Some(actor) = self.wake.pop() {
                    (0..Stream::COUNT).for_each(|stream| self.start_next(actor, stream));
                    continue;
                }
                if !self.mesh.is_settled() {
                    self.mesh.settle(self.now);
                    continue;
                }
            }
            if next.is_infinite() {
                return;
            }
            self.now = self.now.max(next);
            if flow == Some(next) {
                self.counts.events += 1;
                let mut ended = std::mem::take(&mut self.ended);
                self.mesh.take_ended(self.now, &mut ended);
                self.end_flows(ended);
            } else if let Some(Reverse((_, _, event))) = self.queue.pop() {
                self.handle(event);
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Computed(actor, operation) => {
                self.counts.events += 1;
                self.release(actor, operation);
                self.complete(actor, operation);
            }
            Event::Started(actor, operation) => {
                self.counts.events += 1;
                self.send(actor, operation);
            }
            Event::Exchanged(operation, group) => {
                self.counts.events += 1;
                let world = self.world;
                let grouping = world.grouping(self.groupings[operation as usize]);
                for &actor in grouping.members(group) {
                    self.complete(actor, operation);
                }
            }
            Event::PipeEnd(pipe, version) => {
                if self.pipes[pipe as usize].version() == version {
                    self.counts.events += 1;
                    let mut ended = std::mem::take(&mut self.ended);
                    self.pipes[pipe as usize].take_ended(self.now, &mut ended);
                    self.end_flows(ended);
                    self.schedule_pipe(pipe);
                    self.note_link(pipe);
                }
            }
        }
    }

    fn operation(&self, number: u32) -> &'a Operation {
        &self.program.operations[number as usize]
    }

    fn make_ready(&mut self, actor: u32, number: u32) {
        let operation = self.operation(number);
        let ready = &mut self.streams[actor as usize][operation.stream as usize].ready;
        let entry = Reverse((operation.rank, number));
        let place = ready.partition_point(|other| *other < entry);
        ready.insert(place, entry);
    }

    /// Makes the operations ready that waited only for this one.
    fn complete(&mut self, actor: u32, number: u32) {
        self.counts.end = self.counts.end.max(self.now);
        for &successor in &self.operation(number).successors {
            let wanted = u32::from(self.operation(successor).waits_for);
            if self.waits[successor as usize].arrive(actor, wanted, self.world.actors()) {
                self.make_ready(actor, successor);
            }
        }
        self.wake.push(actor);
    }

    fn start_next(&mut self, actor: u32, stream: usize) {
        let state = &mut self.streams[actor as usize][stream];
        if state.running.is_some() {
            return;
        }
        let Some(Reverse((_, number))) = state.ready.pop() else { return };
        state.running = Some(number);
        state.since = self.now;
        match &self.operation(number).task {
            Task::Compute(parts) => {
                let time: f64 = parts.iter().map(|&(_, time)| time).sum();
                let end = self.now + time * self.slowness(actor, number);
                self.push(end, Event::Computed(actor, number));
            }
            Task::Exchange(_, exchange, _) if exchange.start > 0.0 => {
                self.push(self.now + exchange.start, Event::Started(actor, number));
            }
            Task::Exchange(..) => self.send(actor, number),
        }
    }

    /// The duration of a computation over its planned duration: the slowdown of a straggler times the factor of jitter.
    fn slowness(&mut self, actor: u32, number: u32) -> f64 {
        let gpu = self.world.kinds.first[actor as usize];
        let factor = self.jitter.as_mut().map_or(1.0, |jitter| jitter.factor(gpu, number));
        self.world.slowdown[actor as usize] * factor
    }

    fn send(&mut self, actor: u32, number: u32) {
        let operation = self.operation(number);
        let Task::Exchange(_, exchange, priority) = &operation.task else { return };
        let tag = u64::from(actor) << 32 | u64::from(number);
        let state = &mut self.streams[actor as usize][operation.stream as usize];
        let bytes = exchange.bytes / exchange.peers as f64;
        match self.world.route(actor, exchange) {
            Route::Alone(crossing) => {
                state.open = 1;
                self.send_on_pipe(crossing, bytes, *priority, tag);
            }
            Route::Each(crossings) => {
                state.open = crossings.len() as u32;
                for crossing in crossings {
                    self.send_on_pipe(crossing, bytes, *priority, tag);
                }
            }
            Route::Through(bundles) => {
                state.open = bundles.len() as u32;
                self.counts.flows += bundles.len() as u64;
                for mut path in bundles {
                    for crossing in &mut path {
                        crossing.link = self.to_mesh[crossing.link as usize];
                    }
                    let uplink = path[0].link;
                    self.mesh.add(self.now, path, bytes, *priority, tag);
                    self.note_link(self.from_mesh[uplink as usize]);
                }
            }
        }
    }

    fn send_on_pipe(&mut self, crossing: Crossing, bytes: f64, priority: Priority, tag: Tag) {
        self.counts.flows += 1;
        self.pipes[crossing.link as usize].add(self.now, crossing.count, bytes, priority, tag);
        self.schedule_pipe(crossing.link);
        self.note_link(crossing.link);
    }

    fn end_flows(&mut self, mut ended: Vec<Tag>) {
        for tag in ended.drain(..) {
            let (actor, number) = ((tag >> 32) as u32, tag as u32);
            let stream = self.operation(number).stream as usize;
            let state = &mut self.streams[actor as usize][stream];
            state.open -= 1;
            if state.open == 0 {
                self.release(actor, number);
                self.arrive(actor, number);
                self.wake.push(actor);
            }
        }
        self.ended = ended;
    }

    /// Notes that an actor has sent its part of an exchange. The last actor of the group ends the exchange.
    fn arrive(&mut self, actor: u32, number: u32) {
        let Task::Exchange(_, exchange, _) = &self.operation(number).task else { return };
        let grouping = self.world.grouping(self.groupings[number as usize]);
        let group = grouping.group_of(actor);
        let wanted = grouping.members(group).len() as u32;
        if self.arrivals[number as usize].arrive(group, wanted, grouping.groups()) {
            self.push(self.now + exchange.round_trip, Event::Exchanged(number, group));
        }
        if self.recorder.is_some()
            && self.world.links[self.world.uplink(actor, exchange.level) as usize].meshed
        {
            self.note_link(self.world.uplink(actor, exchange.level));
        }
    }

    /// Frees the stream, and adds the finished operation to the busy times and the timeline.
    fn release(&mut self, actor: u32, number: u32) {
        let operation = self.operation(number);
        let state = &mut self.streams[actor as usize][operation.stream as usize];
        state.running = None;
        let (start, took) = (state.since, self.now - state.since);
        let busy = &mut self.counts.busy[actor as usize];
        match &operation.task {
            Task::Exchange(phase, exchange, _) => {
                busy[*phase as usize] += took;
                let (phase, level) = (Some(*phase), Some(exchange.level));
                self.record(
                    actor,
                    number,
                    Span { phase, level, bytes: Bytes(exchange.bytes), ..span(start, self.now) },
                );
            }
            Task::Compute(parts) => {
                let planned: f64 = parts.iter().map(|&(_, time)| time).sum();
                let mut from = start;
                for &(phase, time) in parts {
                    let part = took * (time / planned);
                    self.counts.busy[actor as usize][phase as usize] += part;
                    self.record(actor, number, Span { phase: Some(phase), ..span(from, from + part) });
                    from += part;
                }
            }
        }
    }

    fn record(&mut self, actor: u32, number: u32, what: Span) {
        let operation = self.operation(number);
        let pass = self.program.passes[operation.pass as usize];
        let Some(recorder) = &mut self.recorder else { return };
        let Some(tracks) = recorder.actors.get(&actor) else { return };
        for &first in tracks {
            recorder.timeline.spans.push(Span {
                track: first + operation.stream as usize,
                layer: pass.layer,
                micro_batch: pass.micro_batch,
                backward: pass.backward,
                chunk: usize::from(operation.chunk),
                ..what
            });
        }
    }

    /// For a recorded link, notes when it becomes busy, and records a span when it becomes idle.
    fn note_link(&mut self, link: u32) {
        let Some(recorder) = &mut self.recorder else { return };
        let Some(entry) = recorder.links.get_mut(&link) else { return };
        let idle = match self.world.links[link as usize].meshed {
            true => self.mesh.is_idle(self.to_mesh[link as usize]),
            false => self.pipes[link as usize].is_idle(),
        };
        match (idle, entry.busy_since) {
            (false, None) => entry.busy_since = Some(self.now),
            (true, Some(since)) => {
                entry.busy_since = None;
                for &track in &entry.tracks {
                    let level = Some(self.world.links[link as usize].level);
                    recorder.timeline.spans.push(Span { track, level, ..span(since, self.now) });
                }
            }
            _ => {}
        }
    }

    fn schedule_pipe(&mut self, pipe: u32) {
        let state = &self.pipes[pipe as usize];
        if let Some(end) = state.next_end() {
            let version = state.version();
            self.push(end.max(self.now), Event::PipeEnd(pipe, version));
        }
    }

    fn push(&mut self, at: f64, event: Event) {
        self.sequence += 1;
        self.queue.push(Reverse((Instant(at), self.sequence, event)));
    }

    fn finish(mut self) -> Counts {
        self.counts.links = (0..self.world.links.len())
            .map(|link| match self.world.links[link].meshed {
                true => self.mesh.usage(self.to_mesh[link]),
                false => (self.pipes[link].carried(), self.pipes[link].busy()),
            })
            .collect();
        self.counts.timeline = self.recorder.map(|recorder| recorder.timeline);
        self.counts
    }
}

fn span(start: f64, end: f64) -> Span {
    Span {
        track: 0,
        phase: None,
        start: Seconds(start),
        end: Seconds(end),
        bytes: Bytes::ZERO,
        level: None,
        layer: 0,
        micro_batch: 0,
        backward: false,
        chunk: 0,
    }
}
