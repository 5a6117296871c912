//! An engine that emulates a link between ranks of one machine: `loopback` with a bandwidth and a latency.
//!
//! It serves to measure how an operator overlaps its work inside a domain with the transfers between domains. No
//! network is involved, so it shows neither congestion nor the costs of a network card.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ep::{
    EnvironmentError, Error, Pace, PeerError, PeerFault, Posted, Put, Rank, Result, Signal, Transport,
    Unconnected,
};

use crate::Loopback;

/// The thread sleeps until this long before a delivery, because Linux may wake it up to this much later.
const AWAKE_BEFORE: Duration = Duration::from_micros(100);
/// How long the thread looks for further puts without sleeping after the last one: waking it takes longer than a message.
const SPIN: Duration = Duration::from_millis(20);
/// The pause between two checks of a drain for puts under way.
const NAP: Duration = Duration::from_micros(50);

/// How an emulated link copies the bytes of puts to the peers' windows.
pub trait Carry: Send + Sync + fmt::Debug + 'static {
    /// A copy that has begun.
    type Copy: Send + fmt::Debug;

    /// Begins to copy the bytes of a put. The engine calls this once for each put, in order.
    ///
    /// # Errors
    /// Those of [`Transport::put`].
    fn begin(&self, put: &Put) -> Result<Self::Copy>;

    /// Whether a copy has ended: its bytes are in the peer's window.
    ///
    /// # Errors
    /// An environment error after which the engine delivers nothing more.
    fn has_ended(&self, copy: &Self::Copy) -> Result<bool>;

    /// Maximum number of copies under way at a time.
    fn most(&self) -> usize {
        usize::MAX
    }
}

/// Copies between windows in host memory. A copy ends before [`begin`](Carry::begin) returns.
#[derive(Debug)]
pub struct InHostMemory(Arc<Loopback>);

impl Carry for InHostMemory {
    type Copy = ();

    fn begin(&self, put: &Put) -> Result<()> {
        self.0.copy(put)
    }

    fn has_ended(&self, (): &()) -> Result<bool> {
        Ok(true)
    }
}

/// Delivers the signals of an engine [`Loopback`] as late as a link with a bandwidth and a latency would.
///
/// A rank has one link, which the puts to all its peers share: a put occupies the link for its bytes over the bandwidth,
/// after the puts before it. Its signal arrives when the link has taken in the last byte and the latency has passed, and
/// not before the bytes are in the peer's window. Links between other ranks, and the receiver's own, never delay it.
#[derive(Debug)]
pub struct Paced<C: Carry> {
    shared: Arc<Shared<C>>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread.
    process: u32,
}

#[derive(Debug)]
struct Shared<C: Carry> {
    loopback: Arc<Loopback>,
    carry: C,
    pace: Pace,
    /// Maximum number of puts under way, to all peers together.
    most: usize,
    link: Mutex<Link<C::Copy>>,
    /// Notified when puts are added, and when the engine is dropped.
    changed: Condvar,
}

/// The link of this rank.
#[derive(Debug)]
struct Link<T> {
    /// When the link has taken in the bytes of all puts so far.
    free_at: Instant,
    /// Puts whose signals are not delivered, in the order of their arrivals.
    under_way: VecDeque<Flight<T>>,
    /// The error after which nothing is delivered any more.
    failed: Option<Error>,
    ended: bool,
}

#[derive(Debug)]
struct Flight<T> {
    peer: Rank,
    signal: Signal,
    arrives: Instant,
    copy: T,
}

impl Paced<InHostMemory> {
    /// The engine for windows in host memory. `signals` is the number of ring slots of `loopback`.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the thread cannot be started.
    pub fn new(loopback: Loopback, pace: Pace, signals: usize) -> Result<Self> {
        let loopback = Arc::new(loopback);
        Self::with(Arc::clone(&loopback), InHostMemory(loopback), pace, signals)
    }
}

impl<C: Carry> Paced<C> {
    /// The engine that delivers the signals of `loopback` and copies bytes by `carry`. `signals` is the number of ring
    /// slots of `loopback`.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the thread cannot be started.
    pub fn with(loopback: Arc<Loopback>, carry: C, pace: Pace, signals: usize) -> Result<Self> {
        let own = loopback.rail().own();
        let most = signals.saturating_mul(loopback.rail().ranks().len()).min(carry.most());
        let link = Link { free_at: Instant::now(), under_way: VecDeque::new(), failed: None, ended: false };
        let (link, changed) = (Mutex::new(link), Condvar::new());
        let shared = Arc::new(Shared { loopback, carry, pace, most, link, changed });
        let served = Arc::clone(&shared);
        let thread = thread::Builder::new().name(format!("ep-link-{own}")).spawn(move || served.deliver());
        let thread = thread.map_err(|error| {
            let hint = "raise the limit of threads (ulimit -u)";
            EnvironmentError::new("starting the thread of an emulated link", error, hint)
        })?;
        Ok(Self { shared, thread: Some(thread), process: std::process::id() })
    }
}

impl<C: Carry> Shared<C> {
    fn lock(&self) -> MutexGuard<'_, Link<C::Copy>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers signals until the engine is dropped or fails.
    fn deliver(&self) {
        let mut link = self.lock();
        let mut spin_until = Instant::now();
        while !link.ended && link.failed.is_none() {
            let Some(first) = link.under_way.front() else {
                if Instant::now() < spin_until {
                    link = self.let_others_lock(link);
                } else {
                    link = self.changed.wait(link).unwrap_or_else(PoisonError::into_inner);
                }
                continue;
            };
            spin_until = first.arrives + SPIN;
            let left = first.arrives.saturating_duration_since(Instant::now());
            if left > AWAKE_BEFORE {
                let waited = self.changed.wait_timeout(link, left - AWAKE_BEFORE);
                link = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let delivered = match left.is_zero() {
                true => self.deliver_first(first),
                false => Ok(false),
            };
            match delivered {
                Ok(true) => drop(link.under_way.pop_front()),
                Ok(false) => link = self.let_others_lock(link),
                Err(error) => link.failed = Some(error),
            }
        }
    }

    fn let_others_lock<'a>(&'a self, link: MutexGuard<'a, Link<C::Copy>>) -> MutexGuard<'a, Link<C::Copy>> {
        drop(link);
        thread::yield_now();
        self.lock()
    }

    /// Delivers the signal of a put that is due. Returns false if its bytes are not in the peer's window yet, or if the
    /// peer's ring is full.
    fn deliver_first(&self, first: &Flight<C::Copy>) -> Result<bool> {
        if !self.carry.has_ended(&first.copy)? {
            return Ok(false);
        }
        Ok(self.loopback.put(Put::new(first.peer, first.signal))? == Posted::Yes)
    }
}

impl<C: Carry> Unconnected for Paced<C> {
    fn blob(&self) -> Vec<u8> {
        Vec::new()
    }

    fn connect(self: Box<Self>, _: &[Vec<u8>]) -> Result<Box<dyn Transport>> {
        Ok(self)
    }
}

impl<C: Carry> Transport for Paced<C> {
    fn name(&self) -> &str {
        "paced"
    }

    fn put(&self, put: Put) -> Result<Posted> {
        let Shared { loopback, carry, pace, most, changed, .. } = &*self.shared;
        loopback.rail().peer_index(put.peer)?;
        let mut link = self.shared.lock();
        if let Some(error) = &link.failed {
            return Err(error.clone());
        }
        if link.under_way.len() >= *most {
            return Ok(Posted::Full);
        }
        let copy = carry.begin(&put)?;
        link.free_at = link.free_at.max(Instant::now()) + pace.transmission(put.len as u64);
        let arrives = link.free_at + pace.latency();
        link.under_way.push_back(Flight { peer: put.peer, signal: put.signal, arrives, copy });
        changed.notify_one();
        Ok(Posted::Yes)
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        self.shared.loopback.poll(on_signal)?;
        self.shared.lock().failed.clone().map_or(Ok(()), Err)
    }

    /// Waits until the signals of the puts are delivered.
    fn drain(&self, peer: Rank, deadline: Instant) -> Result<()> {
        let rail = self.shared.loopback.rail();
        rail.peer_index(peer)?;
        let start = Instant::now();
        loop {
            let link = self.shared.lock();
            if let Some(error) = &link.failed {
                return Err(error.clone());
            }
            let left = link.under_way.iter().filter(|flight| flight.peer == peer).count();
            drop(link);
            if left == 0 {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let what = format!("{left} puts to rank {peer} over an emulated link");
                let (fault, waited) = (PeerFault::Stalled, start.elapsed());
                return Err(PeerError::joining(rail.own(), peer, fault, what, waited).into());
            }
            thread::sleep(NAP);
        }
    }
}

impl<C: Carry> Drop for Paced<C> {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // A forked child: the thread does not exist, and may have held the lock when the process forked.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.lock().ended = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed, and this rank no longer needs the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use ep::conformance::{End, Reordering, TRANSPORT_LIMITS, check_transport};
    use ep::{CallerError, Rail};

    use super::*;
    use crate::Segment;
    use crate::testing::Usable;

    const SIGNALS: usize = TRANSPORT_LIMITS.signals;

    /// The engines of a rail of ranks 0, 1, .., not paced.
    fn rail(ranks: usize) -> Vec<(Loopback, Usable)> {
        let windows: Vec<Arc<Segment>> =
            (0..ranks).map(|_| Arc::new(Segment::private(1 << 20).unwrap())).collect();
        let all: Vec<Rank> = (0..ranks as u32).map(Rank).collect();
        let engine = |own: usize| {
            let rail = Rail::new(all.clone(), own).unwrap();
            // SAFETY: the tests access no byte that a put in flight may access, and rings with atomics only.
            let loopback = unsafe { Loopback::new(rail, windows.clone(), SIGNALS) }.unwrap();
            (loopback, Usable::of(&windows[own], ranks, SIGNALS))
        };
        (0..ranks).map(engine).collect()
    }

    fn pace(text: &str) -> Pace {
        text.parse().unwrap()
    }

    fn paced(loopback: Loopback, text: &str) -> Paced<InHostMemory> {
        Paced::new(loopback, pace(text), SIGNALS).unwrap()
    }

    fn signal(word: u32) -> Signal {
        Signal::new(word).unwrap()
    }

    /// Polls until a signal arrives, for a minute at most.
    fn take(engine: &dyn Transport) -> (Rank, u32) {
        let until = Instant::now() + Duration::from_secs(60);
        let mut found = None;
        while found.is_none() && Instant::now() < until {
            engine.poll(&mut |rank, signal| found = Some((rank, signal.word()))).unwrap();
        }
        found.expect("a signal within a minute")
    }

    #[test]
    #[cfg_attr(miri, ignore = "hours")]
    fn the_engine_conformance_suite_passes() {
        for (ranks, reorder, text) in [
            (1, false, "1GB/s,5us"),
            (2, false, "100MB/s,300us"),
            (3, true, "10GB/s,0us"),
            (4, false, "1GB/s,20us"),
        ] {
            let end = |(loopback, window): (Loopback, Usable)| {
                let rail = loopback.rail().clone();
                let engine = Box::new(paced(loopback, text)) as Box<dyn Unconnected>;
                let engine = engine.connect(&[]).unwrap();
                let transport = if reorder { Box::new(Reordering::new(engine, 7)) } else { engine };
                End { rail, transport, window: Box::new(window) }
            };
            let ends: Vec<End> = rail(ranks).into_iter().map(end).collect();
            thread::scope(|scope| {
                let check = |end| scope.spawn(|| check_transport(end, Duration::from_secs(60)));
                let threads: Vec<_> = ends.into_iter().map(check).collect();
                threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
            });
        }
    }

    #[test]
    fn puts_to_all_peers_share_one_link() {
        let mut engines = rail(3).into_iter();
        let (a, window) = engines.next().unwrap();
        let at = window.start();
        let [b, c] = [(); 2].map(|()| engines.next().unwrap().0);
        // 64 KB take 6.4 ms.
        let a = paced(a, "10MB/s,1ms");
        let start = Instant::now();
        for (peer, word) in [(1, 5), (2, 6)] {
            let put = Put::new(Rank(peer), signal(word)).bytes(at..at + 64_000, at);
            assert_eq!(a.put(put).unwrap(), Posted::Yes);
        }
        assert_eq!(take(&b), (Rank(0), 5));
        assert!(start.elapsed() >= Duration::from_micros(6400 + 1000));
        assert_eq!(take(&c), (Rank(0), 6));
        assert!(start.elapsed() >= Duration::from_micros(2 * 6400 + 1000));
    }

    /// Copies nothing. Copies end when `ended` is set, and fail when `broken` is set.
    #[derive(Debug, Clone, Default)]
    struct Manual {
        ended: Arc<AtomicBool>,
        broken: Arc<AtomicBool>,
    }

    impl Carry for Manual {
        type Copy = ();

        fn begin(&self, _: &Put) -> Result<()> {
            Ok(())
        }

        fn has_ended(&self, (): &()) -> Result<bool> {
            if self.broken.load(Relaxed) {
                return Err(EnvironmentError::new("copying", "a broken copy", "").into());
            }
            Ok(self.ended.load(Relaxed))
        }
    }

    fn manual() -> (Paced<Manual>, Loopback, Manual) {
        let mut engines = rail(2).into_iter().map(|(loopback, _)| loopback);
        let (a, b) = (Arc::new(engines.next().unwrap()), engines.next().unwrap());
        let carry = Manual::default();
        (Paced::with(a, carry.clone(), pace("1GB/s,0us"), SIGNALS).unwrap(), b, carry)
    }

    #[test]
    fn a_signal_waits_for_its_bytes() {
        let (a, b, carry) = manual();
        assert_eq!(a.put(Put::new(Rank(1), signal(3))).unwrap(), Posted::Yes);
        for _ in 0..200 {
            b.poll(&mut |_, _| panic!("the copy has not ended")).unwrap();
            thread::sleep(Duration::from_micros(20));
        }
        let Err(Error::Peer(error)) = a.drain(Rank(1), Instant::now()) else { panic!("a put is under way") };
        assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Stalled));
        carry.ended.store(true, Relaxed);
        assert_eq!(take(&b), (Rank(0), 3));
        a.drain(Rank(1), Instant::now() + Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_copy_that_fails_is_an_error_of_every_call() {
        let (a, _b, carry) = manual();
        assert_eq!(a.put(Put::new(Rank(1), signal(3))).unwrap(), Posted::Yes);
        carry.broken.store(true, Relaxed);
        let until = Instant::now() + Duration::from_secs(60);
        let failed =
            |result: Result<()>| result.is_err_and(|error| error.to_string().contains("a broken copy"));
        while !failed(a.poll(&mut |_, _| {})) {
            assert!(Instant::now() < until);
        }
        assert!(failed(a.drain(Rank(1), until)));
        assert!(failed(a.put(Put::new(Rank(1), signal(4))).map(drop)));
    }

    #[test]
    fn as_many_puts_are_under_way_as_the_limits_allow() {
        let (a, _b, _) = manual();
        let put = Put::new(Rank(1), signal(0));
        for _ in 0..2 * SIGNALS {
            assert_eq!(a.put(put).unwrap(), Posted::Yes);
        }
        assert_eq!(a.put(put).unwrap(), Posted::Full);
    }

    #[test]
    fn puts_outside_a_window_or_the_rail_are_refused() {
        let (a, window) = rail(2).remove(0);
        let at = window.start();
        let a = paced(a, "1GB/s,0us");
        for put in [
            Put::new(Rank(1), signal(0)).bytes(at..at + 8, (1 << 20) - 4),
            Put::new(Rank(1), signal(0)).bytes(0..8, at),
            Put::new(Rank(0), signal(0)),
            Put::new(Rank(9), signal(0)),
        ] {
            assert!(matches!(
                a.put(put),
                Err(Error::Caller(CallerError::Shape { .. } | CallerError::Topology(_)))
            ));
        }
    }
}
