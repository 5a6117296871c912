//! The sending side of a layer: encoders of this rank's experts, and of the gradients of replicas.

use std::ops::Range;
use std::sync::Arc;

use ep::{CallerError, Result};
use ep_codec::{
    Error, GradientCodec, GradientEncoder, Host, Place, SharedExpert, Weight, WeightCodec, WeightEncoder,
};

use crate::bodies::Bodies;

/// Encodes the weights of this rank's experts of one layer, step after step.
pub(crate) struct Owned<T: Weight, P: Place = Host> {
    place: P,
    layer: usize,
    elements: usize,
    codec: WeightCodec,
    /// One for each of this rank's experts.
    encoders: Vec<WeightEncoder<T, P>>,
    /// Bytes of the streams of the last step.
    last_bytes: usize,
    /// Whether the receivers hold the weights in the mirrors of the encoders. False after [`restore`](Self::restore): the next
    /// message then begins with these weights.
    is_known: bool,
}

/// Encodes the gradients of the experts of one peer in one layer.
pub(crate) struct Returned<P: Place = Host> {
    place: P,
    layer: usize,
    elements: usize,
    /// One for each expert of the peer.
    encoders: Vec<GradientEncoder<P>>,
    /// Bytes of the last message.
    last_bytes: usize,
}

impl<T: Weight, P: Place> Owned<T, P> {
    pub(crate) fn new(
        place: P,
        layer: usize,
        codec: WeightCodec,
        experts: usize,
        elements: usize,
    ) -> Result<Self> {
        let encoder = |expert| {
            WeightEncoder::new_in(place.clone(), codec, elements)
                .map_err(|error| refused("weights", layer, expert, error))
        };
        let encoders = (0..experts).map(encoder).collect::<Result<_, _>>()?;
        Ok(Self { place, layer, elements, codec, encoders, last_bytes: 0, is_known: true })
    }

    /// Encodes all of this rank's experts. Returns the body of a message, and the number of streams that it has for
    /// each expert.
    pub(crate) fn encode(
        &mut self,
        weights: P::Ref<'_, T>,
        shared: Option<&SharedExpert<T>>,
        bodies: &Bodies,
    ) -> Result<(Vec<u8>, u16)> {
        let mut body = bodies.take(with_slack(self.last_bytes));
        let encoded = self.encode_all(weights, shared, &mut body);
        if encoded.is_err() {
            // Nothing is sent, so the receivers lack what some encoders have already encoded.
            self.start_over();
        }
        let streams = encoded?;
        self.last_bytes = body.len();
        Ok((body, streams))
    }

    /// Makes the next stream of each expert complete: a receiver needs no earlier stream to decode it.
    pub(crate) fn start_over(&mut self) {
        self.encoders.iter_mut().for_each(WeightEncoder::start_over);
    }

    fn encode_all(
        &mut self,
        weights: P::Ref<'_, T>,
        shared: Option<&SharedExpert<T>>,
        body: &mut Vec<u8>,
    ) -> Result<u16> {
        let has_mirrors = self.encoders.iter().all(WeightEncoder::has_mirror);
        let repeats = !self.is_known && has_mirrors;
        for (expert, encoder) in self.encoders.iter_mut().enumerate() {
            let weights = P::part(weights, nth(expert, self.elements));
            let refused = |error| refused("weights", self.layer, expert, error);
            if repeats {
                encoder.complete(body).map_err(refused)?;
            }
            if matches!(self.codec, WeightCodec::Shared { .. }) && shared.is_none() {
                // There is no shared expert yet.
                WeightEncoder::new_in(self.place.clone(), WeightCodec::Int8, self.elements)
                    .and_then(|mut complete| complete.encode(weights, None, body))
                    .map_err(refused)?;
            } else {
                encoder.encode(weights, shared, body).map_err(refused)?;
            }
        }
        self.is_known = true;
        Ok(1 + u16::from(repeats))
    }

    /// Appends this rank's part of the next shared expert, uncompressed.
    pub(crate) fn append_complete(&self, weights: &[T], body: &mut Vec<u8>) -> Result<()> {
        WeightEncoder::new(WeightCodec::Exact, self.elements)
            .and_then(|mut encoder| encoder.encode(weights, None, body))
            .map(drop)
            .map_err(|error| refused("the mean of the weights", self.layer, 0, error))
    }

    /// Encodes the weights that the receivers hold as complete streams, for a receiver that lacks them. `None` if the
    /// receivers hold nothing yet, or if the codec needs no base.
    pub(crate) fn complete(&self) -> Result<Option<Vec<u8>>> {
        let mut body = Vec::new();
        for (expert, encoder) in self.encoders.iter().enumerate() {
            if !encoder.has_mirror() {
                return Ok(None);
            }
            encoder.complete(&mut body).map_err(|error| refused("weights", self.layer, expert, error))?;
        }
        Ok(Some(body))
    }

    /// Number of weights of an expert.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    pub(crate) fn save(&self) -> Result<Vec<Vec<u8>>, Error> {
        self.encoders.iter().map(WeightEncoder::save_from).collect()
    }

    pub(crate) fn restore(&mut self, saved: &[Vec<u8>]) -> Result<(), Error> {
        for (encoder, saved) in self.encoders.iter_mut().zip(saved) {
            *encoder = WeightEncoder::restore_in(self.place.clone(), self.codec, self.elements, saved)?;
        }
        self.is_known = false;
        Ok(())
    }
}

#[cfg(test)]
impl<T: Weight> Owned<T> {
    pub(crate) fn mirrors(&self) -> Vec<T> {
        self.encoders.iter().flat_map(|encoder| encoder.mirror().unwrap_or_default().to_vec()).collect()
    }
}

impl<P: Place> Returned<P> {
    pub(crate) fn new(
        place: P,
        layer: usize,
        codec: GradientCodec,
        experts: usize,
        elements: usize,
    ) -> Result<Self> {
        let encoder = |expert| {
            GradientEncoder::new_in(place.clone(), codec, elements)
                .map_err(|error| refused("gradients", layer, expert, error))
        };
        let encoders = (0..experts).map(encoder).collect::<Result<_, _>>()?;
        Ok(Self { place, layer, elements, encoders, last_bytes: 0 })
    }

    /// Encodes the gradients of all experts of the peer.
    pub(crate) fn encode<T: Weight>(
        &mut self,
        gradients: P::Ref<'_, T>,
        bodies: &Bodies,
    ) -> Result<Arc<Vec<u8>>> {
        let mut body = bodies.take(with_slack(self.last_bytes));
        for (expert, encoder) in self.encoders.iter_mut().enumerate() {
            encoder
                .encode(P::part(gradients, nth(expert, self.elements)), &mut body)
                .map_err(|error| refused("gradients", self.layer, expert, error))?;
        }
        self.last_bytes = body.len();
        Ok(bodies.keep(body))
    }

    pub(crate) fn save(&self) -> Result<Vec<Vec<u8>>, Error> {
        self.encoders.iter().map(GradientEncoder::save_from).collect()
    }

    pub(crate) fn restore(&mut self, codec: GradientCodec, saved: &[Vec<u8>]) -> Result<(), Error> {
        for (encoder, saved) in self.encoders.iter_mut().zip(saved) {
            *encoder = GradientEncoder::restore_in(self.place.clone(), codec, self.elements, saved)?;
        }
        Ok(())
    }
}

/// Room for a message that is a little longer than the last one: the streams of sparse codecs vary.
fn with_slack(bytes: usize) -> usize {
    bytes + bytes / 16
}

/// The place of one of several parts of equal length, which follow each other.
pub(crate) fn nth(at: usize, length: usize) -> Range<usize> {
    at * length..(at + 1) * length
}

/// The error of the place of the elements, if it has failed; else what `other` makes of the codec's error.
pub(crate) fn of_place_or(error: Error, other: impl FnOnce(Error) -> ep::Error) -> ep::Error {
    match error {
        Error::Place(error) => error,
        error => other(error),
    }
}

/// The error for weights or gradients of the caller that cannot be encoded; that of the place, if it has failed.
pub(crate) fn refused(what: &'static str, layer: usize, expert: usize, error: Error) -> ep::Error {
    of_place_or(error, |error| CallerError::Expert { what, layer, expert, problem: error.to_string() }.into())
}
