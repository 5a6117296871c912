//! Proxies between threads that behave like kernels: every byte arrives, and no chunk arrives before its bytes.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use ep::conformance::Reordering;
use ep::{CallerError, Limits};

use super::*;
use crate::rail::{Proxy, limits};

/// Miri is a thousand times slower than a processor.
const LANE: usize = if cfg!(miri) { 4096 } else { 1 << 16 };
const MOST_ROWS: usize = if cfg!(miri) { 8 } else { 300 };
/// Ends a test that hangs.
const LONG: Duration = Duration::from_secs(120);

/// The windows of a rail, and the signals under way to each of its ranks.
struct Network {
    limits: Limits,
    windows: Vec<Arc<Memory>>,
    /// By receiving domain: the sender and its signal.
    signals: Vec<Mutex<Vec<(Rank, Signal)>>>,
}

/// An engine that copies between the windows of a process. Its queue seems to be full at random.
struct Copies {
    network: Arc<Network>,
    rail: Rail,
    random: Mutex<Random>,
}

impl Transport for Copies {
    fn name(&self) -> &str {
        "copies"
    }

    fn put(&self, put: Put) -> Result<Posted> {
        let to = self.rail.peer_index(put.peer)?;
        if self.random.lock().unwrap().below(3) == 0 {
            return Ok(Posted::Full);
        }
        if put.source < RESERVED || put.destination < RESERVED || put.len > self.network.limits.put_bytes {
            let (expected, found) = (self.network.limits.put_bytes, put.len);
            return Err(CallerError::Shape { what: "a put", expected, found, unit: "bytes" }.into());
        }
        let own = &self.network.windows[self.rail.own_index()];
        let (from, peer) =
            (own.at(put.source, put.len), self.network.windows[to].at(put.destination, put.len));
        // SAFETY: both ranges are inside windows, of different ranks, and the protocol orders the accesses to them.
        unsafe { peer.copy_from_nonoverlapping(from, put.len) };
        let mut signals = self.network.signals[to].lock().unwrap();
        signals.push((self.rail.own(), put.signal));
        let in_flight = signals.iter().filter(|(rank, _)| *rank == self.rail.own()).count();
        assert!(in_flight <= self.network.limits.signals);
        Ok(Posted::Yes)
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        let signals = std::mem::take(&mut *self.network.signals[self.rail.own_index()].lock().unwrap());
        signals.into_iter().for_each(|(rank, signal)| on_signal(rank, signal));
        Ok(())
    }

    fn drain(&self, _: Rank, _: Instant) -> Result<()> {
        Ok(())
    }
}

/// A job of kernels: what every rank sends follows from the seed.
#[derive(Clone, Copy)]
struct Job {
    seed: u64,
    domains: usize,
    layout: RailLayout,
}

impl Job {
    /// The random numbers of one plan, and the key of its bytes.
    fn random(&self, epoch: u32, from: usize, to: usize) -> (Random, u64) {
        let mut random = Random(self.seed ^ u64::from(epoch) << 32 ^ (from as u64) << 8 ^ to as u64);
        let key = random.next();
        (random, key)
    }

    /// What domain `from` sends to domain `to`.
    fn plan(&self, epoch: u32, from: usize, to: usize) -> RailPlan {
        let (mut random, _) = self.random(epoch, from, to);
        let rows = [0, 1, 1 + random.below(MOST_ROWS), 1 + random.below(MOST_ROWS / 8)][random.below(4)];
        let most_units = [1, 3, 40][random.below(3)];
        let units = if rows == 0 { random.below(2) } else { 1 + random.below(most_units) };
        let copies = if units == 0 { 0 } else { random.below(3 * rows + 1) };
        let mut ends_of = |total: usize| {
            let mut ends: Vec<u32> = (1..units).map(|_| random.below(total + 1) as u32).collect();
            ends.sort_unstable();
            ends.into_iter().chain((units > 0).then_some(total as u32))
        };
        let ends: Vec<(u32, u32)> = ends_of(rows).zip(ends_of(copies)).collect();
        let mut plan = plan_of(epoch, &ends);
        let mut offset = 0;
        for at in 0..RAIL_SECTIONS {
            let per = [RailPer::Row, RailPer::Copy, RailPer::Once][random.below(3)];
            offset += random.below(100);
            let count = [rows, copies, 1][per as usize].max(1);
            let stride =
                [0, 1 + random.below(16), 1 + random.below((LANE - offset) / 4 / count)][random.below(3)];
            plan.sections[at] = section(offset as u64, stride as u32, per);
            offset += stride * count;
        }
        plan.flags_per_unit = if units == 0 { 0 } else { 1 + random.below(4) as u32 };
        plan.chunk_rows = 1 + random.below(64) as u32;
        plan.signature = random.next() as u32;
        plan
    }
}

/// The bytes of a lane that belong to a unit of a section.
fn bytes_of(plan: &RailPlan, section: usize, unit: usize) -> Range<usize> {
    let RailSection { offset, stride, per } = plan.sections[section];
    let end = |unit: usize| match RailPer::of(per).unwrap() {
        RailPer::Row => plan.ends[unit].rows,
        RailPer::Copy => plan.ends[unit].copies,
        // The only element belongs to the first unit.
        RailPer::Once => 1,
    };
    let begin = unit.checked_sub(1).map_or(0, end);
    let at = |element: u32| offset as usize + (element * stride) as usize;
    at(begin)..at(end(unit))
}

/// The byte at this place of a lane.
fn byte(key: u64, place: usize) -> u8 {
    (key.wrapping_add(place as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// The kernels of one rank.
struct Kernels {
    job: Job,
    own: usize,
    memory: Arc<Memory>,
}

/// What has arrived of a set.
struct Seen {
    plan: RailPlan,
    key: u64,
    entered: bool,
    chunks: usize,
}

impl Kernels {
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.own;
        (0..self.job.domains).filter(move |&domain| domain != own)
    }

    /// One operator.
    fn run(&self, epoch: u32) {
        let plans: Vec<(usize, RailPlan)> =
            self.others().map(|to| (to, self.job.plan(epoch, self.own, to))).collect();
        let mut items = Vec::new();
        for (at, (to, plan)) in plans.iter().enumerate() {
            if plan.units == 0 {
                self.store(epoch, *to, plan, 0, 0, 1);
            }
            let out = self.end(*to, epoch) + offset_of!(RailEnd, out);
            self.memory.write_plan(out, plan);
            items.extend((0..plan.units * plan.flags_per_unit).map(|flag| (at, flag as usize)));
        }
        let mut random = self.job.random(epoch, self.own, self.own).0;
        for last in (1..items.len()).rev() {
            items.swap(last, random.below(last + 1));
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                for (at, flag) in items {
                    let (to, plan) = &plans[at];
                    let flags = plan.flags_per_unit as usize;
                    self.store(epoch, *to, plan, flag / flags, flag % flags, flags);
                    let word = self.end(*to, epoch) + offset_of!(RailEnd, out_flags) + 4 * flag;
                    self.memory.word(word).store(epoch, Release);
                }
            });
            self.receive(epoch);
        });
    }

    fn end(&self, domain: usize, epoch: u32) -> usize {
        self.job.layout.end(domain, (epoch & 1) as usize)
    }

    /// Stores one of `of` interleaved groups of a unit's bytes.
    fn store(&self, epoch: u32, to: usize, plan: &RailPlan, unit: usize, group: usize, of: usize) {
        let (_, key) = self.job.random(epoch, self.own, to);
        let lane = self.job.layout.out_lane(to, (epoch & 1) as usize);
        for section in 0..RAIL_SECTIONS {
            for place in bytes_of(plan, section, unit).skip(group).step_by(of) {
                // SAFETY: a byte of the lane, which only this item writes.
                unsafe { self.memory.at(lane + place, 1).write(byte(key, place)) };
            }
        }
    }

    /// Waits for the sets of all other domains and checks their bytes.
    fn receive(&self, epoch: u32) {
        let start = Instant::now();
        let mut sets: Vec<(usize, Seen)> = (self.others())
            .map(|from| {
                let plan = self.job.plan(epoch, from, self.own);
                let (_, key) = self.job.random(epoch, from, self.own);
                (from, Seen { plan, key, entered: false, chunks: 0 })
            })
            .collect();
        while !sets.is_empty() {
            sets.retain_mut(|(from, seen)| !self.look(epoch, *from, seen));
            assert!(start.elapsed() < LONG, "epoch {epoch} does not arrive in domain {}", self.own);
            thread::yield_now();
        }
    }

    /// Checks what has arrived from a domain. Returns whether everything has.
    fn look(&self, epoch: u32, from: usize, seen: &mut Seen) -> bool {
        let state = self.end(from, epoch) + offset_of!(RailEnd, state);
        let progress = self.memory.long_word(state + offset_of!(RailState, progress)).load(Acquire);
        if progress >> 32 != u64::from(epoch) {
            return false;
        }
        let arrived = progress as u32 as usize;
        if !seen.entered {
            let input =
                self.memory.at(self.end(from, epoch) + offset_of!(RailEnd, input), size_of::<RailPlan>());
            // SAFETY: a plan that has arrived and is not written to during this epoch.
            let found = unsafe { &*input.cast::<RailPlan>() };
            assert_eq!(bytes_of_plan(found), bytes_of_plan(&seen.plan), "epoch {epoch} from {from}");
            seen.entered = true;
        }
        let plan = &seen.plan;
        let chunks = plan.rows.div_ceil(plan.chunk_rows).max(1) as usize;
        assert!(arrived <= chunks, "{arrived} of {chunks} chunks");
        while seen.chunks < arrived {
            seen.chunks += 1;
            let rows = seen.chunks as u32 * plan.chunk_rows;
            let units = plan.units.max(1) as usize;
            // Up to the unit with the last row of the chunk.
            let covered = match seen.chunks == chunks {
                true => units,
                false => 1 + plan.ends.iter().position(|end| end.rows >= rows).unwrap(),
            };
            for (section, unit) in
                (0..RAIL_SECTIONS).flat_map(|section| (0..covered).map(move |unit| (section, unit)))
            {
                self.check(epoch, from, seen, bytes_of(plan, section, unit));
            }
        }
        seen.chunks == chunks
    }

    fn check(&self, epoch: u32, from: usize, seen: &Seen, places: Range<usize>) {
        let lane = self.job.layout.in_lane(from, (epoch & 1) as usize);
        for place in places {
            // SAFETY: a byte that has arrived and is not written to during this epoch.
            let found = unsafe { self.memory.at(lane + place, 1).read() };
            assert_eq!(
                found,
                byte(seen.key, place),
                "epoch {epoch} from {from} to {}, byte {place}",
                self.own
            );
        }
    }
}

/// Runs a rail: a proxy and kernels per rank. Each rank stops its proxy as soon as its own kernels have ended.
fn run(seed: u64, domains: usize, epochs: u32, reorder: bool) {
    let epochs = if cfg!(miri) { 3 } else { epochs };
    let layout = RailLayout::new(domains, LANE, RESERVED).unwrap();
    let network = Arc::new(Network {
        limits: limits(&layout),
        windows: (0..domains).map(|_| Memory::new(layout.bytes())).collect(),
        signals: (0..domains).map(|_| Mutex::default()).collect(),
    });
    let job = Job { seed, domains, layout };
    let rank = |own: usize| {
        let rail = Rail::new(RANKS[..domains].to_vec(), own).unwrap();
        let (seed, memory) = (seed + own as u64, Arc::clone(&network.windows[own]));
        let random = Mutex::new(Random(seed));
        let copies = Box::new(Copies { network: Arc::clone(&network), rail: rail.clone(), random });
        let transport: Box<dyn Transport> =
            if reorder { Box::new(Reordering::new(copies, seed)) } else { copies };
        let (reports, on_lost) = reports();
        let window = Arc::clone(&memory) as Arc<dyn Window>;
        let parts = ProxyParts { rail, transport, window, layout, show: None, on_lost };
        let proxy = Proxy::start(parts, LONG).unwrap();
        let kernels = Kernels { job, own, memory };
        (1..=epochs).for_each(|epoch| kernels.run(epoch));
        // Each plan and each byte of a section was put once, and nothing else.
        let of_plan = |plan: &RailPlan| {
            let units = plan.units.max(1) as usize;
            let parts = (0..RAIL_SECTIONS).flat_map(|section| (0..units).map(move |unit| (section, unit)));
            bytes_of_plan(plan).len()
                + parts.map(|(section, unit)| bytes_of(plan, section, unit).len()).sum::<usize>()
        };
        let expected: usize = (1..=epochs)
            .flat_map(|epoch| kernels.others().map(move |to| job.plan(epoch, own, to)))
            .map(|plan| of_plan(&plan))
            .sum();
        let start = Instant::now();
        while proxy.sent().0 < expected as u64 && start.elapsed() < LONG {
            thread::yield_now();
        }
        assert_eq!(proxy.sent().0, expected as u64);
        assert_eq!((proxy.stop(), reports.lock().unwrap().len()), (Ok(()), 0));
    };
    thread::scope(|scope| {
        for own in 0..domains {
            scope.spawn(move || rank(own));
        }
    });
}

#[test]
fn every_byte_arrives_between_two_domains() {
    run(1, 2, 400, false);
}

#[test]
fn every_byte_arrives_between_three_domains_over_an_engine_without_order() {
    run(2, 3, 300, true);
}

#[test]
fn every_byte_arrives_between_two_domains_over_an_engine_without_order() {
    run(3, 2, 300, true);
}
