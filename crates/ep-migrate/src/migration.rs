//! The migration of one rank: its own experts, the replicas that it holds, and the calls of a training step.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::{CallerError, Operator, Result};
use ep_codec::{Error, Host, Place, SharedExpert, Weight, WeightCodec, add_gradient_in, in_main_memory};

use crate::bodies::Bodies;
use crate::carrier::Carrier;
use crate::header::Kind;
use crate::inbox::{Call, GRADIENTS, Message, Traffic, WEIGHTS, Window};
use crate::owned::{Owned, Returned, refused};
use crate::post::{Post, Resend, Setup};
use crate::replicas::{Decoded, Replicas, SharedExperts, Undecoded};
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

    fn start(
        place: P,
        domain: Domain,
        shape: Shape,
        settings: Settings,
        carrier: Box<dyn Carrier>,
        saved: Option<&Saved>,
    ) -> Result<Self> {
        shape.check()?;
        settings.check()?;
        let (experts, peers) = (shape.experts_per_rank, domain.peers());
        let step = saved.map_or(0, |saved| saved.step);
        let (mut layers, mut owned) = (Vec::new(), Vec::new());
        for (layer, &elements) in shape.expert_elements.iter().enumerate() {
            let encoders = Owned::new(place.clone(), layer, settings.weights, experts, elements)?;
            let mut publisher = Publisher { owned: encoders, published: step };
            let mut returned: Vec<Returned<P>> = peers
                .iter()
                .map(|_| Returned::new(place.clone(), layer, settings.gradients, experts, elements))
                .collect::<Result<_>>()?;
            let mut shared = SharedExperts::new(domain.ranks().len());
            if let Some(saved) = saved {
                saved.restore(layer, &mut publisher.owned, &mut returned, settings.gradients, &mut shared)?;
            }
            owned.push(Mutex::new(publisher));
            layers.push(Layer {
                replicas: Mutex::new(peers.iter().map(|_| Replicas::new(experts, elements)).collect()),
                returned: Mutex::new(returned),
                shared: Mutex::new(shared),
                progress: Mutex::default(),
            });
        }

        let owned = Arc::new(owned);
        let publishers = owned.clone();
        let resend: Resend =
            Arc::new(move |post, peer, layer| publishers_resend(&publishers, post, peer, layer));
        let longest = |bytes: &dyn Fn(usize) -> usize| -> Vec<u64> {
            shape.expert_elements.iter().map(|&elements| (experts * bytes(elements)) as u64).collect()
        };
        let element = T::ELEMENT;
        // In a step, each layer has one body of a kind.
        let posted = settings.depth.min(layers.len());
        let most = |bytes: &dyn Fn(usize) -> usize| longest(bytes).into_iter().max().unwrap_or(0);
        // A message may have complete weights besides the streams of the codec, and the part of a shared expert.
        let complete = |elements| WeightCodec::Exact.max_bytes(element, elements);
        let setup = Setup {
            rank: domain.rank(),
            peers,
            run: settings.run,
            first_step: step,
            longest: [
                longest(&|elements| settings.weights.max_bytes(element, elements) + 2 * complete(elements)),
                longest(&|elements| settings.gradients.max_bytes(element, elements)),
            ],
            windows: [
                Window {
                    regular: most(&|elements| settings.weights.regular_bytes(element, elements)),
                    // With staleness, a step may leave messages to the next one, so their number has no bound here.
                    bodies: if settings.staleness == 0 { settings.depth } else { usize::MAX },
                    posted,
                },
                Window {
                    regular: most(&|elements| settings.gradients.max_bytes(element, elements)),
                    bodies: usize::MAX,
                    posted,
                },
            ],
            // A step has two messages of each layer, in two parts each, to a peer that may lag `staleness` steps behind.
            most_sent: (4 * layers.len()).saturating_mul((settings.staleness as usize).saturating_add(2)),
            timeout: settings.timeout,
            asks: false,
            interrupt: settings.interrupt.clone(),
        };
        let (post, threads) = Post::start(setup, carrier, &resend)?;
        let (threads, clocks) = (Mutex::new(threads), Clocks::default());
        let gathered = AtomicU64::new(step);
        let bodies = Bodies::default();
        Ok(Self { place, domain, shape, settings, post, bodies, layers, owned, gathered, threads, clocks })
    }

    /// The expert domain.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// What this rank moves.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Encodes this rank's experts of a layer and queues them for all peers. Begins the next step of the layer.
    ///
    /// `weights` has the shape `[experts_per_rank, expert_elements[layer]]`.
    ///
    /// # Errors
    /// [`CallerError`] if the shape does not fit, a weight is not finite, or `2 (2 + staleness)` steps were published and none
    /// was gathered: nothing is sent then, and the step has not begun. [`PeerError`](ep::PeerError) if a peer is lost.
    pub fn publish(&self, layer: usize, weights: P::Ref<'_, T>) -> Result<()> {
        self.ended(self.publish_now(layer, weights))
    }

    fn publish_now(&self, layer: usize, weights: P::Ref<'_, T>) -> Result<()> {
        self.check_length("weights of this rank's experts", layer, P::len(weights), 1)?;
        let mut publisher = lock(&self.owned[layer]);
        let step = publisher.published;
        let call = Call { operator: Operator::Publish, step, layer };
        // Peers that also publish take no messages. Once they have no room for more, this call would wait until the
        // timeout.
        let ahead = step.saturating_sub(self.gathered.load(Relaxed));
        if ahead >= 2 * (2 + self.settings.staleness) {
            return Err(order(
                call,
                "too many steps were published without a forward pass, which gathers them",
            ));
        }
        self.post.enter(call)?;

        let clock = Instant::now();
        let mut shared = lock(&self.layers[layer].shared);
        let part = self.part(layer, step, weights)?;
        let (mut body, streams) = publisher.owned.encode(weights, shared.newest(), &self.bodies)?;
        if let Some(part) = part {
            publisher.owned.append_complete(part.weights(), &mut body)?;
            let position = self.position(self.domain.rank());
            let added = shared.add(step, position, part.weights().to_vec());
            added.map_err(|error| refused("weights", layer, 0, error))?;
        }
        drop(shared);
        self.clocks.encode.fetch_add(clock.elapsed().as_nanos() as u64, Relaxed);

        publisher.published += 1;
        let body = self.bodies.keep(body);
        (0..self.domain.peers().len())
            .try_for_each(|peer| self.post.send(peer, call, Kind::Weights, streams, body.clone()))
    }

    /// Whether messages with the weights of a step contain a part of the next shared expert.
    fn has_part(&self, step: u64) -> bool {
        matches!(self.settings.weights, WeightCodec::Shared { .. })
            && step.is_multiple_of(self.settings.shared_refresh)
    }

    /// This rank's part of the next shared expert, in the steps in which there is one.
    fn part(&self, layer: usize, step: u64, weights: P::Ref<'_, T>) -> Result<Option<SharedExpert<T>>> {
        if !self.has_part(step) {
            return Ok(None);
        }
        let mean = in_main_memory(&self.place, weights, |weights| {
            let experts: Vec<&[T]> = weights.chunks_exact(self.shape.expert_elements[layer]).collect();
            SharedExpert::mean_of(&experts)
        });
        mean.flatten().map(Some).map_err(|error| refused("weights", layer, 0, error))
    }

    /// Makes the next messages of all layers complete: replicas then equal this rank's experts, apart from the rounding of
    /// `int8`. Needed with [`WeightCodec::Delta`] only, when replicas lag too far behind; the messages of other codecs are
    /// always complete.
    ///
    /// A rank may call this alone, because each message says whether it is complete.
    pub fn start_over(&self) {
        for publisher in self.owned.iter() {
            lock(publisher).owned.start_over();
        }
    }

    /// Waits until the peers' weights of a layer are at most `staleness` steps old, and decodes them into `replicas`. Returns
    /// the step of each peer's weights, in the order of [`Domain::peers`].
    ///
    /// `replicas` has the shape `[peers, experts_per_rank, expert_elements[layer]]`. It must hold what the last call for this layer
    /// left there, because a message may contain changes only. After an error, some replicas may already be those of
    /// the new step.
    ///
    /// # Errors
    /// [`CallerError`] if the shape does not fit, or if the layer was not published.
    /// [`PeerError`](ep::PeerError) if a peer is lost, late, or sends what cannot be decoded.
    pub fn gather(&self, layer: usize, replicas: P::Mut<'_, T>) -> Result<Vec<u64>> {
        self.ended(self.gather_now(layer, replicas))
    }

    fn gather_now(&self, layer: usize, mut replicas: P::Mut<'_, T>) -> Result<Vec<u64>> {
        let peers = self.domain.peers();
        self.check_length("replicas", layer, P::len_mut(&replicas), peers.len())?;
        let call = self.call(Operator::Gather, layer)?;
        self.post.enter(call)?;
        let oldest = call.step.saturating_sub(self.settings.staleness);
        let each = self.shape.experts_per_rank * self.shape.expert_elements[layer];
        let mut all = lock(&self.layers[layer].replicas);
        loop {
            for (peer, held) in all.iter_mut().enumerate() {
                while let Some(message) = self.available(call, peer, held)? {
                    let out = P::part_mut(&mut replicas, peer * each..(peer + 1) * each);
                    self.decode(call, peer, held, message, out)?;
                    if held.held.is_some() {
                        break;
                    }
                }
            }
            let behind = |held: &Replicas| held.step.is_none_or(|step| step < oldest);
            let waiting: Vec<usize> = (0..all.len()).filter(|&peer| behind(&all[peer])).collect();
            if waiting.is_empty() {
                self.gathered.fetch_max(call.step + 1, Relaxed);
                return Ok(all.iter().map(|held| held.step.unwrap_or(0)).collect());
            }
            // A message that lacks a shared expert waits for the parts of other peers.
            let mut from: Vec<usize> =
                waiting.iter().copied().filter(|&peer| all[peer].held.is_none()).collect();
            if from.is_empty() {
                from = (0..all.len()).filter(|&peer| all[peer].held.is_none()).collect();
            }
            if from.is_empty() {
                let found = "weights that refer to a shared expert of which no rank sent its part";
                return Err(self.post.undecodable(waiting[0], found));
            }
            let clock = Instant::now();
            let next = self.post.next(call, WEIGHTS, &from);
            self.clocks.gather.fetch_add(clock.elapsed().as_nanos() as u64, Relaxed);
            let (peer, message) = next?;
            let out = P::part_mut(&mut replicas, peer * each..(peer + 1) * each);
            self.decode(call, peer, &mut all[peer], message, out)?;
        }
    }

    /// The next message for these replicas, if it has arrived.
    fn available(&self, call: Call, peer: usize, held: &mut Replicas) -> Result<Option<Message>> {
        match held.held.take() {
            Some(message) => Ok(Some(message)),
            None => self.post.try_next(call, WEIGHTS, peer),
        }
    }

    fn decode(
        &self,
        call: Call,
        peer: usize,
        held: &mut Replicas,
        message: Message,
        out: P::Mut<'_, T>,
    ) -> Result<()> {
        let clock = Instant::now();
        let mut shared = lock(&self.layers[call.layer].shared);
        let has_part = message.header.kind == Kind::Weights && self.has_part(message.header.step);
        let decoded = held.decode(&self.place, &message, has_part, &shared, out);
        self.clocks.decode.fetch_add(clock.elapsed().as_nanos() as u64, Relaxed);
        let broken = |problem: String| {
            let found = format!("weights of layer {}, step {}: {problem}", call.layer, message.header.step);
            self.post.undecodable(peer, found)
        };
        let decoded = decoded.map_err(|why| match why {
            Undecoded::Message(problem) => broken(problem),
            Undecoded::Place(error) => error,
        });
        match decoded? {
            Decoded::Done(part) => {
                held.asked = false;
                if let Some(part) = part {
                    let position = self.position(self.domain.peers()[peer]);
                    let added = shared.add(message.header.step, position, part);
                    added.map_err(|error| broken(error.to_string()))?;
                }
            }
            Decoded::LacksShared => held.held = Some(message),
            Decoded::LacksBase if held.asked => {}
            Decoded::LacksBase => {
                drop(shared);
                held.asked = true;
                self.post.request(peer, call)?;
            }
        }
        Ok(())
    }

    /// Encodes the gradients of the replicas of a layer and queues them for the owners.
    ///
    /// `gradients` has the shape of the replicas in [`gather`](Self::gather).
    ///
    /// # Errors
    /// [`CallerError`] if the shape does not fit, a gradient is not finite, or the gradients of this step were sent: nothing is
    /// sent then. [`PeerError`](ep::PeerError) if a peer is lost.
    pub fn send_gradients(&self, layer: usize, gradients: P::Ref<'_, T>) -> Result<()> {
        self.ended(self.send_gradients_now(layer, gradients))
    }

    fn send_gradients_now(&self, layer: usize, gradients: P::Ref<'_, T>) -> Result<()> {
        let peers = self.domain.peers().len();
        self.check_length("gradients of replicas", layer, P::len(gradients), peers)?;
        let call = self.call(Operator::Reduce, layer)?;
        self.post.enter(call)?;
        let mut progress = lock(&self.layers[layer].progress);
        if progress.sent == Some(call.step) {
            return Err(order(call, "the gradients of this step were sent before; publish first"));
        }
        let clock = Instant::now();
        let each = self.shape.experts_per_rank * self.shape.expert_elements[layer];
        // An encoder refuses such a number too, but only after other encoders have encoded their gradients.
        let first_bad = || self.place.first_not_finite(gradients);
        if !self.settings.gradients.is_lossless()
            && let Some(at) = first_bad().map_err(|error| refused("gradients", layer, 0, error))?
        {
            let elements = self.shape.expert_elements[layer];
            let expert = at / elements % self.shape.experts_per_rank;
            let owner = self.domain.peers()[at / each];
            let problem =
                format!("element {} for rank {owner} is not finite; nothing was sent", at % elements);
            return Err(CallerError::Expert { what: "gradients", layer, expert, problem }.into());
        }
        let mut returned = lock(&self.layers[layer].returned);
        let bodies = returned
            .iter_mut()
            .enumerate()
            .map(|(peer, returned)| {
                let gradients = P::part(gradients, peer * each..(peer + 1) * each);
                returned.encode::<T>(gradients, &self.bodies)
            })
            .collect::<Result<Vec<_>>>()?;
        self.clocks.encode.fetch_add(clock.elapsed().as_nanos() as u64, Relaxed);
        progress.sent = Some(call.step);
        bodies
            .into_iter()
            .enumerate()
            .try_for_each(|(peer, body)| self.post.send(peer, call, Kind::Gradients, 1, body))
    }

    /// Waits for the peers' gradients of this rank's experts of a layer, and sums them.
    ///
    /// `own` has the shape `[experts_per_rank, expert_elements[layer]]`, and so has `sum`, which is overwritten. For each element,
    /// in f32: `sum = 0`, then `sum += gradient` for each rank of the domain, ascending, including this rank.
    ///
    /// # Errors
    /// [`CallerError`] if a shape does not fit, or if [`send_gradients`](Self::send_gradients) was not called in this step.
    /// [`PeerError`](ep::PeerError) if a peer is lost, late, or sends what cannot be decoded.
    pub fn reduce_gradients(&self, layer: usize, own: P::Ref<'_, T>, sum: P::Mut<'_, f32>) -> Result<()> {
        self.ended(self.reduce_gradients_now(layer, own, sum))
    }

    fn reduce_gradients_now(&self, layer: usize, own: P::Ref<'_, T>, mut sum: P::Mut<'_, f32>) -> Result<()> {
        self.check_length("gradients of this rank's experts", layer, P::len(own), 1)?;
        let elements = P::len_mut(&sum);
        self.check_length("sum of gradients", layer, elements, 1)?;
        let call = self.call(Operator::Reduce, layer)?;
        self.post.enter(call)?;
        let mut progress = lock(&self.layers[layer].progress);
        match *progress {
            Progress { sent, .. } if sent != Some(call.step) => {
                return Err(order(call, "call send_gradients first"));
            }
            Progress { reduced, .. } if reduced == Some(call.step) => {
                return Err(order(call, "the gradients of this step were reduced before; publish first"));
            }
            _ => progress.reduced = Some(call.step),
        }
        let failed = |error| refused("gradients", layer, 0, error);
        self.place.clear(P::part_mut(&mut sum, 0..elements)).map_err(failed)?;
        let peers = self.domain.peers();
        for &rank in self.domain.ranks() {
            let sum = P::part_mut(&mut sum, 0..elements);
            match peers.iter().position(|&peer| peer == rank) {
                Some(peer) => self.add_gradients_of(peer, call, sum)?,
                None => self.place.add(own, sum).map_err(failed)?,
            }
        }
        Ok(())
    }

    fn add_gradients_of(&self, peer: usize, call: Call, mut sum: P::Mut<'_, f32>) -> Result<()> {
        let message = loop {
            let clock = Instant::now();
            let next = self.post.next(call, GRADIENTS, &[peer]);
            self.clocks.reduce.fetch_add(clock.elapsed().as_nanos() as u64, Relaxed);
            let (_, message) = next?;
            // Skips gradients of a step that this rank did not reduce.
            if message.header.step >= call.step {
                break message;
            }
        };
        let broken = |what: String| {
            let Call { layer, step, .. } = call;
            self.post.undecodable(peer, format!("gradients of layer {layer}, step {step}: {what}"))
        };
        if message.header.step > call.step {
            return Err(broken(format!("a message of step {} instead", message.header.step)));
        }
        let clock = Instant::now();
        let mut rest = &message.body[..];
        let elements = self.shape.expert_elements[call.layer];
        for expert in 0..self.shape.experts_per_rank {
            let sum = P::part_mut(&mut sum, expert * elements..(expert + 1) * elements);
            let added = add_gradient_in(&self.place, rest, sum).map_err(|error| match error {
                Error::Place(error) => error,
                error => broken(error.to_string()),
            });
            rest = &rest[added?.bytes..];
        }
        self.clocks.decode.fetch_add(clock.elapsed().as_nanos() as u64, Relaxed);
        if rest.is_empty() { Ok(()) } else { Err(broken(format!("{} bytes too many", rest.len()))) }
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

/// Sends a peer the weights that its replicas should hold.
fn publishers_resend<T: Weight, P: Place>(
    publishers: &[Mutex<Publisher<T, P>>],
    post: &Post,
    peer: usize,
    layer: usize,
) -> Result<()> {
    let publisher = lock(&publishers[layer]);
    match (publisher.owned.complete()?, publisher.published.checked_sub(1)) {
        (Some(body), Some(step)) => {
            let call = Call { operator: Operator::Publish, step, layer };
            post.send(peer, call, Kind::Resent, 1, Arc::new(body))
        }
        _ => Err(post.undecodable(
            peer,
            format!("a request for complete weights of layer {layer}, which have no base"),
        )),
    }
}
