//! Tests of the proxy without a GPU: threads take the place of kernels, and engines in memory that of the network.

mod ends;
mod flow;
mod receiving;
mod sending;

use std::collections::VecDeque;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ep::{Error, Operator, Posted, Put, Rail, Rank, Result, Signal, Transport, Window};

use ep_rail::Segment;

use super::losses::OnLost;
use super::pump::Pump;
use super::signal::{Arrival, Part, What};
use super::{ProxyParts, RailLayout};
use crate::params::{
    CALL_WORDS, MAX_CHUNKS, RAIL_SECTIONS, RailEnd, RailPer, RailPlan, RailSection, RailState, UnitEnd,
};

/// The ranks of the rail, by domain: neither in order nor equal to their indices.
const RANKS: [Rank; 3] = [Rank(5), Rank(1), Rank(9)];
/// Bytes at the start of a window that the engine reserves.
const RESERVED: usize = 100;

/// Host memory that all threads of a test write to, each in places of its own.
struct Memory(Segment);

impl Memory {
    fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self(Segment::private(bytes).unwrap()))
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        self.0.at(offset, len)
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the memory, and all fields of a `RailEnd` that tests access this way are aligned.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    fn long_word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    /// Writes a plan as a kernel does: its epoch last, with release order.
    fn write_plan(&self, offset: usize, plan: &RailPlan) {
        const EPOCH: usize = offset_of!(RailPlan, epoch);
        let from = std::ptr::from_ref(plan).cast::<u8>();
        for part in [0..EPOCH, EPOCH + 4..size_of::<RailPlan>()] {
            let to = self.at(offset + part.start, part.len());
            // SAFETY: both ranges are inside a plan, and the protocol lets nothing else access the words at `to` now.
            unsafe { to.copy_from_nonoverlapping(from.add(part.start), part.len()) };
        }
        self.word(offset + EPOCH).store(plan.epoch, Release);
    }
}

impl Window for Memory {
    fn start(&self) -> NonNull<u8> {
        self.0.start()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Random numbers (SplitMix64).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// The bytes of a plan that travel: those before the places of units that it does not have.
fn bytes_of_plan(plan: &RailPlan) -> &[u8] {
    let ends = plan.units as usize * size_of::<UnitEnd>();
    &bytemuck::bytes_of(plan)[..offset_of!(RailPlan, ends) + ends]
}

/// A plan of `epoch` with these ends of units, as (rows, copies), and no sections.
fn plan_of(epoch: u32, ends: &[(u32, u32)]) -> RailPlan {
    let (rows, copies) = ends.last().copied().unwrap_or_default();
    let mut call = [0; CALL_WORDS];
    call[0] = Operator::Dispatch as u64;
    let mut plan = RailPlan {
        call,
        sections: [RailSection { offset: 0, stride: 0, per: 0 }; RAIL_SECTIONS],
        rows,
        copies,
        units: ends.len() as u32,
        flags_per_unit: 1,
        chunk_rows: 4,
        signature: 0,
        reserved: 0,
        epoch,
        ends: [UnitEnd::default(); MAX_CHUNKS],
    };
    for (unit, &(rows, copies)) in ends.iter().enumerate() {
        plan.ends[unit] = UnitEnd { rows, copies };
    }
    plan
}

fn section(offset: u64, stride: u32, per: RailPer) -> RailSection {
    RailSection { offset, stride, per: per as u32 }
}

fn part(epoch: u32, section: usize, first: usize, end: usize) -> Signal {
    let what = What::Part(Part { section, units: first..end });
    Arrival { parity: (epoch & 1) as usize, what }.signal()
}

fn plan_signal(epoch: u32) -> Signal {
    Arrival { parity: (epoch & 1) as usize, what: What::Plan }.signal()
}

/// An engine that delivers what a test queues and records what the proxy posts.
struct Script {
    arriving: Mutex<VecDeque<(Rank, Signal)>>,
    /// What the next polls return.
    polled: Mutex<VecDeque<Error>>,
    puts: Mutex<Vec<Put>>,
    answer: Mutex<Answer>,
    drained: Mutex<Vec<Rank>>,
}

/// What the engine answers to a put. Puts that it accepts are recorded.
type Answer = Box<dyn FnMut(&Put) -> Result<Posted> + Send>;

impl Script {
    fn puts(&self) -> Vec<Put> {
        std::mem::take(&mut self.puts.lock().unwrap())
    }

    fn answer(&self, answer: impl FnMut(&Put) -> Result<Posted> + Send + 'static) {
        *self.answer.lock().unwrap() = Box::new(answer);
    }

    fn arrive(&self, from: Rank, signal: Signal) {
        self.arriving.lock().unwrap().push_back((from, signal));
    }

    fn fail_poll(&self, error: impl Into<Error>) {
        self.polled.lock().unwrap().push_back(error.into());
    }
}

struct Scripted(Arc<Script>);

impl Transport for Scripted {
    fn name(&self) -> &str {
        "scripted"
    }

    fn put(&self, put: Put) -> Result<Posted> {
        let posted = (self.0.answer.lock().unwrap())(&put)?;
        if posted == Posted::Yes {
            self.0.puts.lock().unwrap().push(put);
        }
        Ok(posted)
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        let arriving = std::mem::take(&mut *self.0.arriving.lock().unwrap());
        arriving.into_iter().for_each(|(rank, signal)| on_signal(rank, signal));
        self.0.polled.lock().unwrap().pop_front().map_or(Ok(()), Err)
    }

    fn drain(&self, peer: Rank, _: Instant) -> Result<()> {
        self.0.drained.lock().unwrap().push(peer);
        Ok(())
    }
}

/// The reports of lost peers.
type Reports = Arc<Mutex<Vec<(Rank, String)>>>;

fn reports() -> (Reports, OnLost) {
    let reports = Reports::default();
    let to = Arc::clone(&reports);
    let report = move |rank, error: &Error| to.lock().unwrap().push((rank, error.to_string()));
    (reports, Box::new(report))
}

/// The parts of the rank in domain 0 of three, over a scripted engine.
struct Bench {
    script: Arc<Script>,
    memory: Arc<Memory>,
    layout: RailLayout,
    reports: Reports,
}

impl Bench {
    fn new(lane_bytes: usize) -> (Self, ProxyParts) {
        let script = Arc::new(Script {
            arriving: Mutex::default(),
            polled: Mutex::default(),
            puts: Mutex::default(),
            answer: Mutex::new(Box::new(|_| Ok(Posted::Yes))),
            drained: Mutex::default(),
        });
        let layout = RailLayout::new(RANKS.len(), lane_bytes, RESERVED).unwrap();
        let memory = Memory::new(layout.bytes());
        let (reports, on_lost) = reports();
        let transport = Box::new(Scripted(Arc::clone(&script)));
        let window = Arc::clone(&memory) as Arc<dyn Window>;
        let rail = Rail::new(RANKS.to_vec(), 0).unwrap();
        (
            Self { script, memory, layout, reports },
            ProxyParts { rail, transport, window, layout, show: None, on_lost },
        )
    }

    /// With a pump, whose steps the test makes.
    fn pump(lane_bytes: usize) -> (Self, Pump) {
        let (bench, parts) = Self::new(lane_bytes);
        (bench, Pump::new(parts).unwrap())
    }

    fn end(&self, domain: usize, epoch: u32) -> usize {
        self.layout.end(domain, (epoch & 1) as usize)
    }

    /// The kernels release a plan to a domain.
    fn release(&self, domain: usize, plan: &RailPlan) {
        self.memory.write_plan(self.end(domain, plan.epoch) + offset_of!(RailEnd, out), plan);
    }

    /// The kernels complete a unit that has one flag.
    fn complete(&self, domain: usize, epoch: u32, unit: usize) {
        let flags = self.end(domain, epoch) + offset_of!(RailEnd, out_flags);
        self.memory.word(flags + 4 * unit).store(epoch, Release);
    }

    /// The peer in a domain puts a plan, without its signal.
    fn put_plan(&self, domain: usize, plan: &RailPlan) {
        self.memory.write_plan(self.end(domain, plan.epoch) + offset_of!(RailEnd, input), plan);
    }

    fn entered(&self, domain: usize, epoch: u32) -> bool {
        self.progress(domain, epoch).is_some()
    }

    /// How many chunks at the start have arrived.
    fn arrived(&self, domain: usize, epoch: u32) -> usize {
        self.progress(domain, epoch).unwrap_or(0)
    }

    /// What the proxy has told the kernels of this epoch.
    fn progress(&self, domain: usize, epoch: u32) -> Option<usize> {
        let state = self.end(domain, epoch) + offset_of!(RailEnd, state);
        let progress = self.memory.long_word(state + offset_of!(RailState, progress)).load(Acquire);
        (progress >> 32 == u64::from(epoch)).then_some(progress as u32 as usize)
    }

    fn reports(&self) -> Vec<(Rank, String)> {
        self.reports.lock().unwrap().clone()
    }
}

/// Makes steps until there is nothing to do.
fn settle(pump: &mut Pump) {
    while pump.step().unwrap() {}
}
