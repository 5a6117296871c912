//! The reduction of dense gradients over all ranks: first inside each datacenter, then between them, through a codec.
//!
//! ```text
//!  begin                 thread `inside`              thread `between`                finish
//!
//!  shares ──scatter──▶  sum of the datacenter ──exchange──▶ sum of all ──gather──▶  all elements
//!         to its ranks  of this rank's share    to owners    of this     to the
//!                                               of the share share       datacenter
//! ```
//!
//! The stages form a pipeline: the link between datacenters carries one bucket while the next one is summed inside.

mod plan;
mod shares;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ep::{CallerError, Element, Interrupt, Operator, PeerFault, Rank, Result};
use ep_codec::{GradientCodec, GradientEncoder, Weight, add_gradient};

pub use self::plan::Bucket;
use self::plan::{BucketPlan, Held};
pub use self::shares::Datacenters;
use crate::carrier::Carrier;
use crate::header::{HEADER_BYTES, Kind};
use crate::inbox::{Call, Window};
use crate::post::{Post, Resend, Setup};
use crate::threads::{GRACE, join_within_grace};

/// The stages. A header of dense gradients has the stage in the field that has the layer in other headers.
const SCATTER: usize = 0;
const EXCHANGE: usize = 1;
const GATHER: usize = 2;
const STAGES: [&str; 3] =
    ["parts of this datacenter's sum", "sums of other datacenters", "sums over all ranks"];
/// Number of receives that are posted ahead for each peer, so that one is posted while the message of the other is
/// taken.
const POSTED: usize = 2;
/// A sequence number has the number of the round in its high bits, and the bucket in these low bits.
const BUCKET_BITS: u32 = 24;

/// The last round that has sequence numbers.
const LAST_ROUND: u64 = u64::MAX >> BUCKET_BITS;

/// How gradients are reduced. All ranks must have the same settings.
#[derive(Debug, Clone)]
pub struct DenseSettings {
    /// The codec between datacenters.
    pub codec: GradientCodec,
    /// The largest number of elements of a bucket whose messages have receives that are posted before the headers
    /// arrive. These receives take memory for two shares of such a bucket, in f32, for each peer. Each message of a
    /// longer bucket takes one more round trip.
    pub regular_elements: usize,
    /// The longest wait for a peer. All ranks return an error at most a second later.
    pub timeout: Duration,
    /// A number that the ranks of a job agree on. Messages with a different number are refused.
    pub run: u64,
    /// Lets the program stop a waiting call.
    pub interrupt: Interrupt,
}

/// Bytes of messages of a [`DenseReduction`], with their headers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DenseTraffic {
    /// Sent to other datacenters.
    pub link_sent: u64,
    /// Received from other datacenters.
    pub link_received: u64,
    /// Sent to ranks of this datacenter.
    pub inside_sent: u64,
    /// Received from ranks of this datacenter.
    pub inside_received: u64,
}

/// A bucket of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Turn {
    /// What [`DenseReduction::add_plan`] returned.
    pub plan: usize,
    /// The bucket's index in the plan.
    pub bucket: usize,
    /// The number of the round, below 2^40, the same on all ranks and higher than those of earlier rounds. Each bucket is
    /// reduced at most once in a round.
    pub round: u64,
    /// The step that an error names.
    pub step: u64,
}

/// One rank's part in the reduction of dense gradients. The [crate](crate) describes carriers.
///
/// For each element, in f32: `part = 0`, then `part += gradient` for each rank of a datacenter, ascending; `sum = 0`, then
/// `sum += decoded(part)` for each datacenter, in the order of [`Datacenters`]; `sum` is rounded to the type of the
/// bucket. The results have the same bits on every rank and in every run.
///
/// In each round all ranks begin the same buckets in the same order, and then finish them in that order. A
/// [`Peer`](ep::Error::Peer) error ends the reduction: every later call returns it. Dropping the value [closes](Self::close) it.
pub struct DenseReduction {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    datacenters: Datacenters,
    codec: GradientCodec,
    interrupt: Interrupt,
    post: Arc<Post>,
    /// The peers. The index of a peer is its position in `post`.
    peers: Vec<Rank>,
    plans: Mutex<Vec<Arc<BucketPlan>>>,
    line: Mutex<Line>,
    changed: Condvar,
    /// Work with a lower sequence number is abandoned.
    oldest: AtomicU64,
    traffic: Mutex<DenseTraffic>,
}

/// Work between stages.
#[derive(Default)]
struct Line {
    inside: VecDeque<Work>,
    between: VecDeque<(Work, Parts)>,
    done: HashMap<u64, Vec<f32>>,
    is_over: bool,
}

struct Work {
    plan: Arc<BucketPlan>,
    turn: Turn,
    /// f32 of this rank's share: its gradient, then the sum of the datacenter, then the sum over all ranks.
    values: Vec<f32>,
}

/// The streams of this datacenter's sum, one for each atom.
type Parts = Vec<Vec<u8>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sequence number of a bucket of a round. A round past the last has `u64::MAX`, which is higher than all others: a
/// plan has fewer buckets than a round has numbers.
fn sequence(round: u64, bucket: usize) -> u64 {
    if round > LAST_ROUND { u64::MAX } else { (round << BUCKET_BITS) | bucket as u64 }
}

impl Turn {
    fn sequence(self) -> u64 {
        sequence(self.round, self.bucket)
    }

    /// Identifies the message of a stage.
    fn call(self, stage: usize) -> Call {
        Call { operator: Operator::Reduce, step: self.sequence(), layer: stage }
    }

    fn refused(self, problem: impl Into<String>) -> ep::Error {
        CallerError::Dense { bucket: self.bucket, problem: problem.into() }.into()
    }
}

impl Work {
    fn held(&self) -> &Held {
        &self.plan.buckets[self.turn.bucket]
    }
}

impl DenseReduction {
    /// Starts a reduction, and its threads.
    ///
    /// # Errors
    /// [`CallerError`] if the timeout is zero or `regular_elements` exceeds `u32::MAX`. [`EnvironmentError`](ep::EnvironmentError) if a thread cannot start.
    pub fn new(datacenters: Datacenters, settings: DenseSettings, carrier: Box<dyn Carrier>) -> Result<Self> {
        if settings.timeout.is_zero() {
            let problem = "must be positive".into();
            return Err(CallerError::Config { key: "timeout", value: "0".into(), problem }.into());
        }
        // A stream has at most this many elements.
        let most = u32::MAX as usize;
        if settings.regular_elements > most {
            let (value, problem) = (settings.regular_elements.to_string(), format!("must be at most {most}"));
            return Err(CallerError::Config { key: "regular_elements", value, problem }.into());
        }
        let peers = datacenters.peers();
        // A receiver knows how long a message must be only when it takes the message.
        let longest = vec![GradientCodec::Exact.max_bytes(Element::F32, most) as u64; STAGES.len()];
        let setup = Setup {
            rank: datacenters.rank(),
            peers: peers.clone(),
            run: settings.run,
            first_step: 0,
            longest: [Vec::new(), longest],
            windows: [
                Window { regular: 0, bodies: 0, posted: 0 },
                Window {
                    regular: datacenters.most_bytes(settings.codec, settings.regular_elements) as u64,
                    bodies: usize::MAX,
                    posted: POSTED,
                },
            ],
            // A rank is at most a round ahead of its peers.
            most_sent: usize::MAX,
            timeout: settings.timeout,
            asks: true,
            interrupt: settings.interrupt.clone(),
        };
        let resend: Resend = Arc::new(|_, _, _| Ok(()));
        let (post, threads) = Post::start(setup, carrier, &resend)?;
        let shared = Arc::new(Shared {
            datacenters,
            codec: settings.codec,
            interrupt: settings.interrupt,
            post,
            peers,
            plans: Mutex::default(),
            line: Mutex::default(),
            changed: Condvar::new(),
            oldest: AtomicU64::new(0),
            traffic: Mutex::default(),
        });
        let new = Self { shared, threads: Mutex::new(threads) };
        for (name, run) in
            [("ep-inside", Shared::run_inside as fn(&Shared)), ("ep-between", Shared::run_between)]
        {
            let own = new.shared.clone();
            match new.shared.post.spawn(name.into(), move || run(&own)) {
                Ok(thread) => lock(&new.threads).push(thread),
                Err(error) => {
                    let error = new.shared.post.fail(error);
                    new.close_at_once();
                    return Err(error);
                }
            }
        }
        Ok(new)
    }

    /// Adds a plan, which is a list of buckets, and returns its number. All ranks add the same plans in the same order.
    /// `saved` is what [`save`](Self::save) returned for this plan.
    ///
    /// # Errors
    /// [`CallerError`] if there are too many buckets, a bucket has too many elements, the codec's density is out of range, or the state
    /// is damaged or not of this rank, these buckets and this codec.
    pub fn add_plan(&self, buckets: &[Bucket], saved: Option<&[u8]>) -> Result<usize> {
        let here = &self.shared;
        if buckets.len() >= 1 << BUCKET_BITS {
            let problem = format!("at most {} buckets are possible", (1 << BUCKET_BITS) - 1);
            return Err(CallerError::Dense { bucket: buckets.len(), problem }.into());
        }
        let plan = BucketPlan::new(&here.datacenters, here.codec, buckets, saved)?;
        let mut plans = lock(&here.plans);
        plans.push(Arc::new(plan));
        Ok(plans.len() - 1)
    }

    /// Sends the shares of a bucket to the ranks of this datacenter, and queues this rank's own. Does not wait for a peer.
    ///
    /// # Errors
    /// [`CallerError`] if the plan, the bucket, its length or the round does not fit, or if a gradient is not finite and the
    /// codec is lossy: nothing is sent then. [`PeerError`](ep::PeerError) if a peer is lost.
    pub fn begin<T: Weight>(&self, turn: Turn, gradients: &[T]) -> Result<()> {
        let here = &self.shared;
        here.post.enter(Call { operator: Operator::Reduce, step: turn.step, layer: 0 })?;
        let plan = here.plan::<T>(turn, gradients.len())?;
        if turn.sequence() < here.oldest.load(Ordering::SeqCst) {
            return Err(turn.refused(format!("round {} is over", turn.round)));
        }
        if !here.codec.is_lossless()
            && let Some(at) = gradients.iter().position(|gradient| !gradient.to_f32().is_finite())
        {
            return Err(turn.refused(format!("element {at} is not finite; nothing was sent")));
        }
        let own = here.datacenters.own_share(gradients.len());
        for (place, &rank) in here.datacenters.inside().iter().enumerate() {
            let share = here.datacenters.share_at(place, gradients.len());
            if rank != here.datacenters.rank() && !share.is_empty() {
                let body = exact(&gradients[share]).map_err(|error| turn.refused(error.to_string()))?;
                here.send(rank, turn, SCATTER, body)?;
            }
        }
        let values = gradients[own].iter().map(|gradient| gradient.to_f32()).collect();
        lock(&here.line).inside.push_back(Work { plan, turn, values });
        here.changed.notify_all();
        Ok(())
    }

    /// Waits for the sum over all ranks of a bucket that was begun, and writes it to `sums`.
    ///
    /// # Errors
    /// [`CallerError`] if the length or the round does not fit, the bucket was not begun, the sum of a datacenter is not
    /// finite and the codec is lossy, or the program interrupted the wait. [`PeerError`](ep::PeerError) if a peer is lost,
    /// late, or sends what cannot be decoded.
    pub fn finish<T: Weight>(&self, turn: Turn, sums: &mut [T]) -> Result<()> {
        let here = &self.shared;
        here.plan::<T>(turn, sums.len())?;
        let values = here.result(turn)?;
        let own = here.datacenters.own_share(sums.len());
        let write = |sums: &mut [T], values: &[f32]| {
            sums.iter_mut().zip(values).for_each(|(sum, &value)| *sum = T::from_f32(value));
        };
        write(&mut sums[own], &values);
        for (place, &rank) in here.datacenters.inside().iter().enumerate() {
            let share = here.datacenters.share_at(place, sums.len());
            if rank == here.datacenters.rank() || share.is_empty() {
                continue;
            }
            let Some(body) = here.take(rank, turn, GATHER)? else {
                return Err(turn.refused("the round was abandoned"));
            };
            let mut values = vec![0.0; share.len()];
            here.add(rank, turn, GATHER, &body, [&mut values[..]])?;
            write(&mut sums[share], &values);
        }
        Ok(())
    }

    /// Forgets all buckets of rounds before `round`, begun or not, and discards what peers send for them. Every rank
    /// must call this, though not at the same time.
    pub fn abandon(&self, round: u64) {
        let here = &self.shared;
        here.oldest.fetch_max(sequence(round, 0), Ordering::SeqCst);
        let oldest = here.oldest.load(Ordering::SeqCst);
        let mut line = lock(&here.line);
        line.inside.retain(|work| work.turn.sequence() >= oldest);
        line.between.retain(|(work, _)| work.turn.sequence() >= oldest);
        line.done.retain(|&sequence, _| sequence >= oldest);
        drop(line);
        here.post.wake();
    }

    /// Ends the reduction on all ranks: another part of the program found that `rank` is at fault.
    pub fn blame(&self, rank: Rank, fault: PeerFault) {
        self.shared.post.blame(rank, fault);
        self.shared.changed.notify_all();
    }

    /// Returns the error of this reduction, if it has one. Its threads notice a lost peer even while no call waits for
    /// that peer.
    ///
    /// # Errors
    /// The error that every later call returns.
    pub fn check(&self) -> Result<()> {
        self.shared.post.check_error()
    }

    /// The state of the codec of a plan, for [`add_plan`](Self::add_plan) of a later run. Save it when no bucket is under way.
    ///
    /// # Errors
    /// [`CallerError`] if there is no such plan.
    pub fn save(&self, plan: usize) -> Result<Vec<u8>> {
        let plan = self.shared.plan_at(plan)?;
        Ok(plan.save(&self.shared.datacenters, self.shared.codec))
    }

    /// What this rank has moved so far.
    pub fn traffic(&self) -> DenseTraffic {
        *lock(&self.shared.traffic)
    }

    /// Tells the peers that this rank needs nothing more, waits until they say the same, and closes the connections. The wait is at
    /// most the timeout, or a second after an error. Calls after this one return an error.
    pub fn close(&self) {
        self.close_within(self.shared.post.timeout());
    }

    /// Like [`close`](Self::close), but waits at most a second for the peers. For a program that ends because of an
    /// error.
    pub fn close_at_once(&self) {
        self.close_within(GRACE);
    }

    fn close_within(&self, patience: Duration) {
        if !self.shared.post.is_of_this_process() {
            return;
        }
        self.abandon(u64::MAX);
        self.shared.post.close(patience);
        lock(&self.shared.line).is_over = true;
        self.shared.changed.notify_all();
        join_within_grace(lock(&self.threads).drain(..));
    }
}

impl Drop for DenseReduction {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn plan_at(&self, plan: usize) -> Result<Arc<BucketPlan>> {
        let plans = lock(&self.plans);
        let (expected, found) = (plans.len(), plan.saturating_add(1));
        let missing = CallerError::Shape { what: "plans of dense gradients", expected, found, unit: "plans" };
        plans.get(plan).cloned().ok_or_else(|| missing.into())
    }

    /// The plan of a turn. Returns an error if the bucket of the turn does not have this type and length.
    fn plan<T: Weight>(&self, turn: Turn, elements: usize) -> Result<Arc<BucketPlan>> {
        let plan = self.plan_at(turn.plan)?;
        let Some(held) = plan.buckets.get(turn.bucket) else {
            return Err(turn.refused(format!("the plan has {} buckets", plan.buckets.len())));
        };
        if turn.round > LAST_ROUND {
            return Err(turn.refused(format!("round {}: at most {LAST_ROUND} is possible", turn.round)));
        }
        if (held.elements, held.element) != (elements, T::ELEMENT) {
            let (wide, found) = (held.element, T::ELEMENT);
            let problem =
                format!("{} elements of {wide:?} expected, found {elements} of {found:?}", held.elements);
            return Err(turn.refused(problem));
        }
        Ok(plan)
    }

    // ---- messages

    fn is_inside(&self, rank: Rank) -> bool {
        self.datacenters.inside().contains(&rank)
    }

    fn peer(&self, rank: Rank) -> usize {
        self.peers
            .iter()
            .position(|&peer| peer == rank)
            .expect("`peers` has the owners of all common elements")
    }

    fn send(&self, to: Rank, turn: Turn, stage: usize, body: Vec<u8>) -> Result<()> {
        let bytes = (body.len() + HEADER_BYTES) as u64;
        self.post.send(self.peer(to), turn.call(stage), Kind::Gradients, 1, Arc::new(body))?;
        let mut traffic = lock(&self.traffic);
        *(if self.is_inside(to) { &mut traffic.inside_sent } else { &mut traffic.link_sent }) += bytes;
        Ok(())
    }

    /// Waits for the body of a stage's message; `None` once the turn is abandoned.
    fn take(&self, from: Rank, turn: Turn, stage: usize) -> Result<Option<Vec<u8>>> {
        let peer = self.peer(from);
        let what =
            || format!("dense gradients of bucket {} from rank {from}: {}", turn.bucket, STAGES[stage]);
        let is_wanted = || turn.sequence() >= self.oldest.load(Ordering::SeqCst);
        // A peer may abandon this round, and send messages of the next one, before this rank abandons it.
        let is_due = |step: u64| step >> BUCKET_BITS <= turn.round;
        loop {
            let Some(message) = self.post.next_while(turn.call(stage), peer, what, is_wanted, is_due)? else {
                return Ok(None);
            };
            let bytes = (message.body.len() + HEADER_BYTES) as u64;
            let mut traffic = lock(&self.traffic);
            *(if self.is_inside(from) {
                &mut traffic.inside_received
            } else {
                &mut traffic.link_received
            }) += bytes;
            drop(traffic);
            match message.header.step {
                // The message belongs to a round that this rank has abandoned.
                step if step < turn.sequence() => {}
                step if step == turn.sequence() => return Ok(Some(message.body)),
                step => {
                    let (round, bucket) = (step >> BUCKET_BITS, step & ((1 << BUCKET_BITS) - 1));
                    let found = format!("{}: a message of bucket {bucket}, round {round} instead", what());
                    return Err(self.post.undecodable(peer, found));
                }
            }
        }
    }

    /// Adds the streams of a message to sums, one after the other.
    fn add<'s>(
        &self,
        from: Rank,
        turn: Turn,
        stage: usize,
        body: &[u8],
        sums: impl IntoIterator<Item = &'s mut [f32]>,
    ) -> Result<()> {
        let broken = |problem: String| {
            let found = format!("dense gradients of bucket {}, {}: {problem}", turn.bucket, STAGES[stage]);
            self.post.undecodable(self.peer(from), found)
        };
        let mut rest = body;
        for sum in sums {
            let info = add_gradient(rest, sum).map_err(|error| broken(error.to_string()))?;
            rest = &rest[info.bytes..];
        }
        if rest.is_empty() { Ok(()) } else { Err(broken(format!("{} bytes too many", rest.len()))) }
    }

    // ---- the stages

    /// Runs a stage on the work of a queue until the reduction closes or fails.
    fn serve<W>(&self, next: impl Fn(&mut Line) -> Option<W>, stage: impl Fn(W) -> Result<()>) {
        loop {
            let work = {
                let mut line = lock(&self.line);
                loop {
                    if line.is_over {
                        return;
                    }
                    if let Some(work) = next(&mut line) {
                        break work;
                    }
                    line = self.changed.wait(line).unwrap_or_else(PoisonError::into_inner);
                }
            };
            if let Err(error) = stage(work) {
                // Also reports the error to the peers, even if it is this rank's own.
                self.post.fail(error);
                self.changed.notify_all();
                return;
            }
            self.changed.notify_all();
        }
    }

    fn run_inside(&self) {
        self.serve(|line| line.inside.pop_front(), |work| self.sum_inside(work));
    }

    fn run_between(&self) {
        self.serve(|line| line.between.pop_front(), |(work, parts)| self.sum_between(work, parts));
    }

    /// Sums this rank's share over its datacenter, and sends the sum to the owners in the other datacenters.
    fn sum_inside(&self, mut work: Work) -> Result<()> {
        let turn = work.turn;
        if work.values.is_empty() {
            lock(&self.line).between.push_back((work, Vec::new()));
            return Ok(());
        }
        let mut sum = vec![0.0; work.values.len()];
        for &rank in self.datacenters.inside() {
            if rank == self.datacenters.rank() {
                sum.iter_mut().zip(&work.values).for_each(|(sum, value)| *sum += value);
            } else if let Some(body) = self.take(rank, turn, SCATTER)? {
                self.add(rank, turn, SCATTER, &body, [&mut sum[..]])?;
            } else {
                return Ok(());
            }
        }
        let mut parts = Vec::new();
        if self.datacenters.members().len() > 1 {
            parts = work.held().encode(&sum, turn)?;
            for datacenter in (0..self.datacenters.members().len()).filter(|&at| at != self.datacenters.own())
            {
                for (owner, atoms) in work.held().atoms_by_owner(datacenter) {
                    self.send(owner, turn, EXCHANGE, parts[atoms].concat())?;
                }
            }
        }
        work.values = sum;
        lock(&self.line).between.push_back((work, parts));
        Ok(())
    }

    /// Sums this rank's share over the datacenters, and sends the sum to the other ranks of this datacenter.
    fn sum_between(&self, work: Work, parts: Parts) -> Result<()> {
        let turn = work.turn;
        let mut values = work.values.clone();
        if !parts.is_empty() {
            values.fill(0.0);
            for datacenter in 0..self.datacenters.members().len() {
                for (owner, atoms) in work.held().atoms_by_owner(datacenter) {
                    let body = if owner == self.datacenters.rank() {
                        parts.concat()
                    } else if let Some(body) = self.take(owner, turn, EXCHANGE)? {
                        body
                    } else {
                        return Ok(());
                    };
                    let sums = work.held().split(&mut values, atoms);
                    self.add(owner, turn, EXCHANGE, &body, sums)?;
                }
            }
        }
        if !values.is_empty() {
            let body = match work.held().element {
                Element::F32 => exact(&values),
                Element::Bf16 => exact(&values.iter().map(|&value| u16::from_f32(value)).collect::<Vec<_>>()),
            };
            let body = body.map_err(|error| turn.refused(error.to_string()))?;
            // This rank uses the values that the others decode, so that all ranks have the same bits, even the sign of
            // a zero.
            values.fill(0.0);
            add_gradient(&body, &mut values).map_err(|error| turn.refused(error.to_string()))?;
            for &rank in self.datacenters.inside().iter().filter(|&&rank| rank != self.datacenters.rank()) {
                self.send(rank, turn, GATHER, body.clone())?;
            }
        }
        let mut line = lock(&self.line);
        if turn.sequence() >= self.oldest.load(Ordering::SeqCst) {
            line.done.insert(turn.sequence(), values);
        }
        Ok(())
    }

    /// Waits for the sum of this rank's share.
    fn result(&self, turn: Turn) -> Result<Vec<f32>> {
        let mut line = lock(&self.line);
        loop {
            if let Some(values) = line.done.remove(&turn.sequence()) {
                return Ok(values);
            }
            self.post.check_error()?;
            if turn.sequence() < self.oldest.load(Ordering::SeqCst) {
                return Err(turn.refused("the round was abandoned"));
            }
            let (next, _) =
                self.changed.wait_timeout(line, Interrupt::EVERY).unwrap_or_else(PoisonError::into_inner);
            line = next;
            if self.interrupt.is_set() {
                // `asked` runs code of the program, which may call this library: the lock must be free.
                drop(line);
                if self.interrupt.asked() {
                    let (operator, rank) = (Operator::Reduce, self.datacenters.rank());
                    let waited_for = format!("the sum of bucket {}", turn.bucket);
                    return Err(self.post.fail(CallerError::Interrupted { operator, rank, waited_for }));
                }
                line = lock(&self.line);
            }
        }
    }
}

/// A stream that holds the elements unchanged.
fn exact<T: Weight>(elements: &[T]) -> Result<Vec<u8>, ep_codec::Error> {
    let mut bytes = Vec::new();
    GradientEncoder::new(GradientCodec::Exact, elements.len())?.encode(elements, &mut bytes)?;
    Ok(bytes)
}
