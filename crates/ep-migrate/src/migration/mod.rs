//! The migration of one rank: its own experts, the replicas that it holds, and the calls of a training step.

mod gradients;
mod starting;
mod weights;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ep::{CallerError, Operator, Result};
use ep_codec::{Host, Place, Weight};

use crate::bodies::Bodies;
use crate::carrier::Carrier;
use crate::inbox::{Call, Traffic};
use crate::owned::{Owned, Returned, refused};
use crate::post::Post;
use crate::replicas::{Replicas, SharedExperts};
use crate::settings::{Domain, Settings, Shape};
use crate::state::Saved;
use crate::threads::{GRACE, join_within_grace};

/// One rank's part in the migration of experts. [The crate's documentation](crate) describes a step.
///
/// Calls may come from any thread. The calls of one layer must have this order in each step: [`publish`](Self::publish),
/// [`gather`](Self::gather), [`send_gradients`](Self::send_gradients), [`reduce_gradients`](Self::reduce_gradients).
/// The last two may be left out, if all ranks leave them out.
///
/// Weights, replicas and gradients are at a [`Place`]: in main memory, or in the memory of a GPU.
///
/// After a [`Peer`](ep::Error::Peer) error, and after an error of the place, every later call returns the same error. Dropping
/// the value [closes](Self::close) it.
pub struct Migration<T: Weight, P: Place = Host> {
    place: P,
    domain: Domain,
    shape: Shape,
    settings: Settings,
    post: Arc<Post>,
    bodies: Bodies,
    layers: Vec<Layer<T, P>>,
    owned: Arc<Vec<Mutex<Publisher<T, P>>>>,
    /// The step after the newest step of which a layer was gathered.
    gathered: AtomicU64,
    threads: Mutex<Vec<JoinHandle<()>>>,
    clocks: Clocks,
}

/// The encoders of this rank's experts of a layer, and the number of steps that were published.
struct Publisher<T: Weight, P: Place> {
    owned: Owned<T, P>,
    published: u64,
}

struct Layer<T, P: Place> {
    /// One for each peer.
    replicas: Mutex<Vec<Replicas>>,
    /// One for each peer.
    returned: Mutex<Vec<Returned<P>>>,
    shared: Mutex<SharedExperts<T>>,
    progress: Mutex<Progress>,
}

/// The last steps whose gradients were sent and reduced.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    sent: Option<u64>,
    reduced: Option<u64>,
}

/// Nanoseconds.
#[derive(Default)]
struct Clocks {
    encode: AtomicU64,
    decode: AtomicU64,
    gather: AtomicU64,
    reduce: AtomicU64,
}

/// What a migration moved, and where its calls spent time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of messages.
    pub traffic: Traffic,
    /// Time in encoders.
    pub encoding: Duration,
    /// Time in decoders.
    pub decoding: Duration,
    /// Time in which [`gather`](Migration::gather) waited for messages.
    pub gather_waits: Duration,
    /// Time in which [`reduce_gradients`](Migration::reduce_gradients) waited for messages.
    pub reduce_waits: Duration,
}

fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Weight> Migration<T> {
    /// Starts a migration of weights in main memory.
    ///
    /// # Errors
    /// [`CallerError`] if the shape or a setting is out of range. [`EnvironmentError`](ep::EnvironmentError) if a thread
    /// cannot start.
    pub fn new(domain: Domain, shape: Shape, settings: Settings, carrier: Box<dyn Carrier>) -> Result<Self> {
        Self::new_in(Host, domain, shape, settings, carrier)
    }

    /// Like [`resume_in`](Self::resume_in), for weights in main memory.
    ///
    /// # Errors
    /// Those of [`resume_in`](Self::resume_in).
    pub fn resume(
        domain: Domain,
        shape: Shape,
        settings: Settings,
        carrier: Box<dyn Carrier>,
        saved: &[u8],
    ) -> Result<Self> {
        Self::resume_in(Host, domain, shape, settings, carrier, saved)
    }
}

impl<T: Weight, P: Place> Migration<T, P> {
    /// Starts a migration of weights at `place`.
    ///
    /// # Errors
    /// Those of [`new`](Migration::new), and that of the place, if it has failed.
    pub fn new_in(
        place: P,
        domain: Domain,
        shape: Shape,
        settings: Settings,
        carrier: Box<dyn Carrier>,
    ) -> Result<Self> {
        Self::start(place, domain, shape, settings, carrier, None)
    }

    /// Continues a migration whose state was [saved](Self::save). All ranks must resume together. The next call for
    /// each layer is [`publish`](Self::publish), whose messages are then complete. The place may be another one.
    ///
    /// # Errors
    /// Those of [`new_in`](Self::new_in), and [`CallerError`] if the state is damaged, or was saved by another rank or with
    /// another domain, shape or codec.
    pub fn resume_in(
        place: P,
        domain: Domain,
        shape: Shape,
        settings: Settings,
        carrier: Box<dyn Carrier>,
        saved: &[u8],
    ) -> Result<Self> {
        let saved = Saved::from_bytes(saved)?;
        saved.check(&domain, &shape, &settings, T::ELEMENT)?;
        Self::start(place, domain, shape, settings, carrier, Some(&saved))
    }

    /// The expert domain.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// What this rank moves.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the error of this migration, if it has one. Its threads notice a lost peer even while no call waits for
    /// that peer.
    ///
    /// # Errors
    /// The error that every later call returns.
    pub fn check(&self) -> Result<()> {
        self.post.check_error()
    }

    /// The state of this rank that a later [`resume`](Self::resume) needs. Save it after the optimizer step and before
    /// the next [`publish`](Self::publish), together with the weights of this rank's experts.
    ///
    /// # Errors
    /// [`CallerError`] if layers are in different steps. That of the place, if it has failed.
    pub fn save(&self) -> Result<Vec<u8>> {
        let publishers: Vec<_> = self.owned.iter().map(lock).collect();
        let step = publishers[0].published;
        if let Some(layer) = publishers.iter().position(|publisher| publisher.published != step) {
            let call = Call { operator: Operator::Publish, step: publishers[layer].published, layer };
            return Err(order(call, "layer 0 is in another step; save when all layers are in the same step"));
        }
        let mut saved = Saved::new(&self.domain, &self.shape, &self.settings, T::ELEMENT, step);
        for (layer, publisher) in self.layers.iter().zip(&publishers) {
            let pushed = saved.push(&publisher.owned, &lock(&layer.returned), &lock(&layer.shared));
            pushed.map_err(|error| refused("the state of codecs", 0, 0, error))?;
        }
        Ok(saved.to_bytes())
    }

    /// What this rank has moved so far, and where time went.
    pub fn stats(&self) -> Stats {
        let time = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Relaxed));
        Stats {
            traffic: self.post.traffic(),
            encoding: time(&self.clocks.encode),
            decoding: time(&self.clocks.decode),
            gather_waits: time(&self.clocks.gather),
            reduce_waits: time(&self.clocks.reduce),
        }
    }

    /// Tells the peers that this rank needs nothing more, waits until they say the same, and closes the connections. The
    /// wait is at most the timeout, or a second after an error. Calls after this one return an error.
    pub fn close(&self) {
        self.close_within(self.post.timeout());
    }

    /// Like [`close`](Self::close), but waits at most a second for the peers. For a program that ends because of an
    /// error.
    pub fn close_at_once(&self) {
        self.close_within(GRACE);
    }

    fn close_within(&self, patience: Duration) {
        if !self.post.is_of_this_process() {
            return;
        }
        self.post.close(patience);
        join_within_grace(lock(&self.threads).drain(..));
    }

    /// Ends the migration, for the peers, too, if the place of the elements has failed in a call: what encoders keep and decoders
    /// have taken is unknown then.
    fn ended<R>(&self, result: Result<R>) -> Result<R> {
        result.map_err(|error| match error {
            error @ ep::Error::Environment(_) => self.post.fail(error),
            error => error,
        })
    }

    /// The step of a call that belongs to the last published step.
    fn call(&self, operator: Operator, layer: usize) -> Result<Call> {
        let published = lock(&self.owned[layer]).published;
        let call = Call { operator, step: published.saturating_sub(1), layer };
        if published == 0 { Err(order(call, "publish the layer first")) } else { Ok(call) }
    }

    fn check_length(&self, what: &'static str, layer: usize, found: usize, ranks: usize) -> Result<()> {
        let layers = self.layers.len();
        if layer >= layers {
            return Err(CallerError::Shape {
                what: "layer",
                expected: layers - 1,
                found: layer,
                unit: "at most",
            }
            .into());
        }
        let expected = ranks * self.shape.experts_per_rank * self.shape.expert_elements[layer];
        if found == expected {
            Ok(())
        } else {
            Err(CallerError::Shape { what, expected, found, unit: "elements" }.into())
        }
    }

    fn position(&self, rank: ep::Rank) -> usize {
        self.domain.ranks().partition_point(|&other| other < rank)
    }
}

#[cfg(test)]
impl<T: Weight> Migration<T> {
    /// The weights of this rank's experts that the peers hold, according to the encoders.
    pub(crate) fn own_mirrors(&self, layer: usize) -> Vec<T> {
        lock(&self.owned[layer]).owned.mirrors()
    }

    /// Replaces what this rank knows of the replicas of its first peer.
    pub(crate) fn replace_replicas(&self, layer: usize, replicas: Replicas) {
        lock(&self.layers[layer].replicas)[0] = replicas;
    }
}

impl<T: Weight, P: Place> Drop for Migration<T, P> {
    fn drop(&mut self) {
        self.close();
    }
}

fn order(call: Call, problem: &'static str) -> ep::Error {
    let Call { operator, step, layer } = call;
    CallerError::Order { operator, layer, step, problem }.into()
}
