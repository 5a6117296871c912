//! [`RailCarrier`]: what callers see. Orders go to the carrier's thread, which is in `pump`.

use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use ep::{CallerError, EnvironmentError, Rank, Result};
use ep_migrate::{Carrier, CarrierError, Lane, Receiving, Sending};
use ep_rail::Streams;

use crate::ends::Ends;
use crate::outgoing::Letter;
use crate::pump::Pump;
use crate::transfer::{Promise, Transfer};

/// How long closing a carrier waits for its thread. A call of a library may never return.
const GRACE: Duration = Duration::from_secs(1);

/// A [`Carrier`] over an engine of [`ep_rail`]: `loopback`, an emulated link, or a provider of libfabric.
///
/// Every rank of the carrier has a window with a ring of slots to and from every other rank. A thread moves messages
/// through these slots, in parts: [`send`](Carrier::send) and [`receive`](Carrier::receive) only leave it an order.
///
/// Dropping a carrier closes it ([`close`](Self::close)).
#[derive(Debug)]
pub struct RailCarrier {
    shared: Arc<Shared>,
    ends: Arc<dyn Ends>,
    thread: Mutex<Option<JoinHandle<()>>>,
    engine: String,
}

/// What callers and the thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The ranks in the numbering of the caller, by position on the rail.
    names: Vec<Rank>,
    own: usize,
    orders: Mutex<Orders>,
    pub(crate) closed: Arc<AtomicBool>,
    /// Set once the thread has started.
    thread: OnceLock<Thread>,
    /// The process that runs the thread. A forked child has a copy of this value but no thread.
    process: u32,
}

/// What callers want, and have not been told yet.
#[derive(Debug)]
pub(crate) struct Orders {
    pub(crate) new: Vec<Order>,
    /// By position: why nothing is exchanged with the rank any more.
    pub(crate) ended: Vec<Option<CarrierError>>,
}

/// A transfer with the rank at `position`.
#[derive(Debug)]
pub(crate) enum Order {
    Send { position: usize, lane: Lane, letter: Letter },
    Receive { position: usize, lane: Lane, capacity: usize, received: Promise<Vec<u8>> },
}

impl Shared {
    pub(crate) fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The position of another rank.
    fn position(&self, rank: Rank) -> Result<usize, CarrierError> {
        let found = self.names.iter().position(|&name| name == rank);
        found.filter(|&position| position != self.own).ok_or_else(|| {
            CarrierError::Failed(format!("rank {rank} is not another rank of this carrier; {:?}", self.names))
        })
    }

    /// Leaves an order for the thread.
    fn order(&self, position: usize, order: impl FnOnce() -> Order) -> Result<(), CarrierError> {
        // The child of a fork has no thread, and may have a lock that another thread held.
        if self.process != std::process::id() {
            let text = "a forked process cannot use the carrier of its parent";
            return Err(CarrierError::Failed(text.into()));
        }
        let mut orders = self.orders();
        if let Some(error) = &orders.ended[position] {
            return Err(error.clone());
        }
        if self.closed.load(Acquire) {
            return Err(CarrierError::Closed);
        }
        orders.new.push(order());
        drop(orders);
        self.wake();
        Ok(())
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Ends everything that is still to come, because the thread ends.
    pub(crate) fn stop(&self) {
        self.closed.store(true, Release);
        let mut orders = self.orders();
        orders.ended.iter_mut().for_each(|ended| _ = ended.get_or_insert(CarrierError::Closed));
        // Dropped promises end their waits.
        orders.new.clear();
    }
}

impl RailCarrier {
    /// Starts the thread of the rank at position `own` of `names`.
    pub(crate) fn start(
        names: &[Rank],
        own: usize,
        streams: Streams,
        engine: String,
        ends: Arc<dyn Ends>,
    ) -> Result<Self> {
        let orders = Mutex::new(Orders { new: Vec::new(), ended: vec![None; names.len()] });
        let (names, closed) = (names.to_vec(), Arc::new(AtomicBool::new(false)));
        let (thread, process) = (OnceLock::new(), std::process::id());
        let shared = Arc::new(Shared { names, own, orders, closed, thread, process });
        let pump = Pump::new(Arc::clone(&shared), streams, Arc::clone(&ends));
        let thread = std::thread::Builder::new()
            .name(format!("ep-carrier-{own}"))
            .spawn(move || pump.run())
            .map_err(|error| {
                let hint = "raise the limit of threads (ulimit -u)";
                EnvironmentError::new("starting the thread of a carrier", error, hint)
            })?;
        shared.thread.get_or_init(|| thread.thread().clone());
        Ok(Self { shared, ends, thread: Mutex::new(Some(thread)), engine })
    }

    /// The engine's name.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Closes all connections ([`abort`](Carrier::abort)), and waits until this rank's threads have ended, at most about a
    /// second. A second call does nothing.
    pub fn close(&self) {
        if self.shared.process != std::process::id() {
            return;
        }
        self.abort();
        let start = Instant::now();
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            while !thread.is_finished() && start.elapsed() < GRACE {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                // A thread that panicked has printed its message.
                let _ = thread.join();
            }
        }
        self.ends.finish();
    }

    /// Whether the thread has taken all orders.
    #[cfg(test)]
    pub(crate) fn has_taken_orders(&self) -> bool {
        self.shared.orders().new.is_empty()
    }

    /// Checks the names of `ranks` ranks.
    ///
    /// # Errors
    /// [`CallerError::Topology`] for another number of names, or a name that occurs twice.
    pub(crate) fn check_names(names: &[Rank], ranks: usize) -> Result<()> {
        let is_twice = |at: usize| names[..at].contains(&names[at]);
        let problem = if names.len() != ranks {
            format!("{} names for {ranks} ranks of a carrier", names.len())
        } else if let Some(at) = (0..ranks).find(|&at| is_twice(at)) {
            format!("two ranks of a carrier are called {}", names[at])
        } else {
            return Ok(());
        };
        Err(CallerError::Topology(problem).into())
    }
}

impl Carrier for RailCarrier {
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError> {
        let position = self.shared.position(to)?;
        let (sent, transfer) = Transfer::new(&self.shared.closed);
        let letter = Letter { message, sent };
        self.shared.order(position, || Order::Send { position, lane, letter })?;
        Ok(Box::new(transfer))
    }

    fn receive(&self, from: Rank, lane: Lane, capacity: usize) -> Result<Box<dyn Receiving>, CarrierError> {
        let position = self.shared.position(from)?;
        let (received, transfer) = Transfer::new(&self.shared.closed);
        self.shared.order(position, || Order::Receive { position, lane, capacity, received })?;
        Ok(Box::new(transfer))
    }

    fn abort(&self) {
        if self.shared.process == std::process::id() {
            self.shared.closed.store(true, Release);
            self.shared.wake();
        }
    }
}

impl Drop for RailCarrier {
    fn drop(&mut self) {
        self.close();
    }
}
