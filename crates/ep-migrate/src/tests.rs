//! Whole migrations of several ranks on threads, compared with a plain computation of the results.

mod conformance;
mod faults;
mod training;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ep::Rank;
use ep_codec::{GradientCodec, Weight, WeightCodec};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::{
    Carrier, CarrierError, Domain, Lane, LocalCarrier, LocalNetwork, Migration, Receiving, Sending, Settings,
    Shape,
};

/// Ranks of the tests' domain; the numbers have gaps, as those of an expert domain do.
fn ranks(count: usize) -> Vec<Rank> {
    (0..count).map(|rank| Rank(3 * rank as u32 + 1)).collect()
}

fn settings(weights: WeightCodec, gradients: GradientCodec) -> Settings {
    Settings { weights, gradients, timeout: Duration::from_secs(60), run: 0xE9, ..Settings::default() }
}

fn shape() -> Shape {
    Shape { experts_per_rank: 2, expert_elements: vec![300, 129, 300] }
}

fn start<T: Weight>(network: &LocalNetwork, rank: Rank, ranks: &[Rank], settings: &Settings) -> Migration<T> {
    let domain = Domain::new(rank, ranks).unwrap();
    Migration::new(domain, shape(), settings.clone(), Box::new(network.carrier(rank))).unwrap()
}

/// Runs `work` on a thread for each rank, and returns the results in their order.
pub(crate) fn on_threads<R: Send>(ranks: &[Rank], work: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|&rank| (rank, &work)).collect();
        let threads: Vec<_> =
            threads.into_iter().map(|(rank, work)| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers that depend on the arguments only.
pub(crate) fn numbers<T: Weight>(seed: [u64; 4], count: usize) -> Vec<T> {
    let seed = seed
        .iter()
        .fold(7u64, |hash, &word| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23));
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| T::from_f32(random.random_range(-1.0f32..1.0))).collect()
}

/// A carrier with a bug: it panics once, on the first thread whose name begins with `thread`.
#[derive(Debug, Clone)]
pub(crate) struct Panicking<C> {
    of: C,
    thread: &'static str,
    has_panicked: Arc<AtomicBool>,
}

impl Panicking<LocalCarrier> {
    pub(crate) fn new(of: LocalCarrier, thread: &'static str) -> Self {
        Self { of, thread, has_panicked: Arc::default() }
    }

    /// Something that lives as long as the carrier and its transfers.
    pub(crate) fn held(&self) -> Weak<AtomicBool> {
        Arc::downgrade(&self.has_panicked)
    }
}

impl<C> Panicking<C> {
    fn reach(&self) {
        let is_here = std::thread::current().name().is_some_and(|name| name.starts_with(self.thread));
        assert!(!is_here || self.has_panicked.swap(true, SeqCst), "a bug of the carrier");
    }

    fn wrap<D>(&self, of: D) -> Box<Panicking<D>> {
        Box::new(Panicking { of, thread: self.thread, has_panicked: self.has_panicked.clone() })
    }
}

impl Carrier for Panicking<LocalCarrier> {
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError> {
        self.reach();
        Ok(self.wrap(self.of.send(to, lane, message)?))
    }

    fn receive(&self, from: Rank, lane: Lane, bytes: usize) -> Result<Box<dyn Receiving>, CarrierError> {
        self.reach();
        Ok(self.wrap(self.of.receive(from, lane, bytes)?))
    }

    fn abort(&self) {
        self.of.abort();
    }
}

impl Sending for Panicking<Box<dyn Sending>> {
    fn wait(self: Box<Self>) -> Result<(), CarrierError> {
        self.reach();
        self.of.wait()
    }
}

impl Receiving for Panicking<Box<dyn Receiving>> {
    fn wait(self: Box<Self>, bytes: usize) -> Result<Vec<u8>, CarrierError> {
        self.reach();
        self.of.wait(bytes)
    }
}
