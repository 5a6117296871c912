//! Weights: from this rank's experts to messages, and from messages to replicas.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ep::{Operator, Result};
use ep_codec::{Place, SharedExpert, Weight, WeightCodec, in_main_memory};

use super::{Migration, lock, order};
use crate::header::Kind;
use crate::inbox::{Call, Message, WEIGHTS};
use crate::owned::{nth, refused};
use crate::replicas::{Decoded, Replicas, Undecoded};

impl<T: Weight, P: Place> Migration<T, P> {
    /// Encodes this rank's experts of a layer and queues them for all peers. Begins the next step of the layer.
    ///
    /// `weights` has the shape `[experts_per_rank, expert_elements[layer]]`.
    ///
    /// # Errors
    /// [`CallerError`](ep::CallerError) if the shape does not fit, a weight is not finite, or `2 (2 + staleness)` steps were published and none
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
    /// the step of each peer's weights, in the order of [`Domain::peers`](crate::Domain::peers).
    ///
    /// `replicas` has the shape `[peers, experts_per_rank, expert_elements[layer]]`. It must hold what the last call for this layer
    /// left there, because a message may contain changes only. After an error, some replicas may already be those of
    /// the new step.
    ///
    /// # Errors
    /// [`CallerError`](ep::CallerError) if the shape does not fit, or if the layer was not published.
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
                    let out = P::part_mut(&mut replicas, nth(peer, each));
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
            let out = P::part_mut(&mut replicas, nth(peer, each));
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
}
