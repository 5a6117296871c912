//! Gradients: from replicas to messages, and from messages to the owner's sum.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ep::{CallerError, Operator, Result};
use ep_codec::{Place, Weight, add_gradient_in};

use super::{Migration, Progress, lock, order};
use crate::header::Kind;
use crate::inbox::{Call, GRADIENTS};
use crate::owned::{nth, of_place_or, refused};

impl<T: Weight, P: Place> Migration<T, P> {
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
                let gradients = P::part(gradients, nth(peer, each));
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
            let sum = P::part_mut(&mut sum, nth(expert, elements));
            let added = add_gradient_in(&self.place, rest, sum)
                .map_err(|error| of_place_or(error, |error| broken(error.to_string())));
            rest = &rest[added?.bytes..];
        }
        self.clocks.decode.fetch_add(clock.elapsed().as_nanos() as u64, Relaxed);
        if rest.is_empty() { Ok(()) } else { Err(broken(format!("{} bytes too many", rest.len()))) }
    }
}
