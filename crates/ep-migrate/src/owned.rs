//! The sending side of a layer: encoders of this rank's experts, and of the gradients of replicas.

use std::sync::Arc;

use ep::{CallerError, Result};
use ep_codec::{GradientCodec, GradientEncoder, SharedExpert, Weight, WeightCodec, WeightEncoder};

/// Encodes the weights of this rank's experts of one layer, step after step.
pub(crate) struct Owned<T> {
    layer: usize,
    elements: usize,
    codec: WeightCodec,
    /// One for each of this rank's experts.
    encoders: Vec<WeightEncoder<T>>,
    /// Whether the receivers hold the weights in the mirrors of the encoders. False after [`restore`](Self::restore): the next
    /// message then begins with these weights.
    is_known: bool,
}

/// Encodes the gradients of the experts of one peer in one layer.
pub(crate) struct Returned {
    layer: usize,
    elements: usize,
    /// One for each expert of the peer.
    encoders: Vec<GradientEncoder>,
}

impl<T: Weight> Owned<T> {
    pub(crate) fn new(layer: usize, codec: WeightCodec, experts: usize, elements: usize) -> Result<Self> {
        let encoder = |expert| {
            WeightEncoder::new(codec, elements).map_err(|error| refused("weights", layer, expert, &error))
        };
        let encoders = (0..experts).map(encoder).collect::<Result<_, _>>()?;
        Ok(Self { layer, elements, codec, encoders, is_known: true })
    }

    /// Encodes all of this rank's experts. Returns the body of a message, and the number of streams that it has for
    /// each expert.
    pub(crate) fn encode(
        &mut self,
        weights: &[T],
        shared: Option<&SharedExpert<T>>,
    ) -> Result<(Vec<u8>, u16)> {
        let mut body = Vec::new();
        let encoded = self.encode_all(weights, shared, &mut body);
        if encoded.is_err() {
            // Nothing is sent, so the receivers lack what some encoders have already encoded.
            self.start_over();
        }
        encoded.map(|streams| (body, streams))
    }

    /// Makes the next stream of each expert complete: a receiver needs no earlier stream to decode it.
    pub(crate) fn start_over(&mut self) {
        self.encoders.iter_mut().for_each(WeightEncoder::start_over);
    }

    fn encode_all(
        &mut self,
        weights: &[T],
        shared: Option<&SharedExpert<T>>,
        body: &mut Vec<u8>,
    ) -> Result<u16> {
        let has_mirrors = self.encoders.iter().all(|encoder| encoder.mirror().is_some());
        let repeats = !self.is_known && has_mirrors;
        for (expert, (encoder, weights)) in
            self.encoders.iter_mut().zip(weights.chunks_exact(self.elements)).enumerate()
        {
            let refused = |error| refused("weights", self.layer, expert, &error);
            if repeats {
                encoder.complete(body).map_err(refused)?;
            }
            if matches!(self.codec, WeightCodec::Shared { .. }) && shared.is_none() {
                // There is no shared expert yet.
                WeightEncoder::new(WeightCodec::Int8, self.elements)
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
            .map_err(|error| refused("the mean of the weights", self.layer, 0, &error))
    }

    /// Encodes the weights that the receivers hold as complete streams, for a receiver that lacks them. `None` if the
    /// receivers hold nothing yet, or if the codec needs no base.
    pub(crate) fn complete(&self) -> Result<Option<Vec<u8>>> {
        let mut body = Vec::new();
        for (expert, encoder) in self.encoders.iter().enumerate() {
            if encoder.mirror().is_none() {
                return Ok(None);
            }
            encoder.complete(&mut body).map_err(|error| refused("weights", self.layer, expert, &error))?;
        }
        Ok(Some(body))
    }

    /// Number of weights of an expert.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    #[cfg(test)]
    pub(crate) fn mirrors(&self) -> Vec<T> {
        self.encoders.iter().flat_map(|encoder| encoder.mirror().unwrap_or_default().to_vec()).collect()
    }

    pub(crate) fn save(&self) -> Vec<Vec<u8>> {
        self.encoders.iter().map(WeightEncoder::save).collect()
    }

    pub(crate) fn restore(&mut self, saved: &[Vec<u8>]) -> std::result::Result<(), ep_codec::Error> {
        for (encoder, saved) in self.encoders.iter_mut().zip(saved) {
            *encoder = WeightEncoder::restore(self.codec, self.elements, saved)?;
        }
        self.is_known = false;
        Ok(())
    }
}

impl Returned {
    pub(crate) fn new(layer: usize, codec: GradientCodec, experts: usize, elements: usize) -> Result<Self> {
        let encoder = |expert| {
            GradientEncoder::new(codec, elements).map_err(|error| refused("gradients", layer, expert, &error))
        };
        let encoders = (0..experts).map(encoder).collect::<Result<_, _>>()?;
        Ok(Self { layer, elements, encoders })
    }

    /// Encodes the gradients of all experts of the peer.
    pub(crate) fn encode<T: Weight>(&mut self, gradients: &[T]) -> Result<Arc<Vec<u8>>> {
        let mut body = Vec::new();
        for (expert, (encoder, gradient)) in
            self.encoders.iter_mut().zip(gradients.chunks_exact(self.elements)).enumerate()
        {
            encoder
                .encode(gradient, &mut body)
                .map_err(|error| refused("gradients", self.layer, expert, &error))?;
        }
        Ok(Arc::new(body))
    }

    pub(crate) fn save(&self) -> Vec<Vec<u8>> {
        self.encoders.iter().map(GradientEncoder::save).collect()
    }

    pub(crate) fn restore(
        &mut self,
        codec: GradientCodec,
        saved: &[Vec<u8>],
    ) -> std::result::Result<(), ep_codec::Error> {
        for (encoder, saved) in self.encoders.iter_mut().zip(saved) {
            *encoder = GradientEncoder::restore(codec, self.elements, saved)?;
        }
        Ok(())
    }
}

/// The error for weights or gradients of the caller that cannot be encoded.
pub(crate) fn refused(what: &'static str, layer: usize, expert: usize, error: &ep_codec::Error) -> ep::Error {
    CallerError::Expert { what, layer, expert, problem: error.to_string() }.into()
}
