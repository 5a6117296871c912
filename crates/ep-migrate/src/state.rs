//! The state of a migration in a checkpoint.
//!
//! A saved state is a head and, for each layer, three lists of parts: encoders of this rank's experts, encoders of
//! gradients (peer by peer), shared experts. The head identifies the rank, domain, shape and codecs. All numbers are
//! little-endian:
//!
//! | bytes | contents |
//! |---|---|
//! | 4 | `EPMS` |
//! | 4 | version, 1 |
//! | 8 | step |
//! | 8 + n | the text that identifies rank, domain, shape and codecs, after its length |
//! | | for each layer and list: 8 bytes with the number of parts; for each part its length in 8 bytes, and its bytes |
//! | 8 | XXH64 of all bytes before |

use ep::{CallerError, Element, Result};
use ep_codec::{
    Error, GradientCodec, Place, SharedExpert, Weight, WeightCodec, WeightDecoder, WeightEncoder, xxh64,
};

use crate::owned::{Owned, Returned, of_place_or};
use crate::replicas::SharedExperts;
use crate::settings::{Domain, Settings, Shape};

const MAGIC: [u8; 4] = *b"EPMS";
const VERSION: u32 = 1;
/// No run has this many steps. A higher step could overflow as the run goes on.
const LAST_STEP: u64 = 1 << 48;

pub(crate) struct Saved {
    pub(crate) step: u64,
    /// Rank, domain, shape and codecs, as text that an error can quote.
    identity: String,
    layers: Vec<[Vec<Vec<u8>>; 3]>,
}

fn identity(domain: &Domain, shape: &Shape, settings: &Settings, element: Element) -> String {
    let ranks: Vec<String> = domain.ranks().iter().map(ToString::to_string).collect();
    format!(
        "rank {} of the domain {}; {} experts a rank of {:?} {:?} weights; weights {}, gradients {}, refresh {}",
        domain.rank(),
        ranks.join(","),
        shape.experts_per_rank,
        shape.expert_elements,
        element,
        settings.weights,
        settings.gradients,
        settings.shared_refresh,
    )
}

/// Appends a part after its length.
fn put(bytes: &mut Vec<u8>, part: &[u8]) {
    bytes.extend((part.len() as u64).to_le_bytes());
    bytes.extend(part);
}

pub(crate) fn damaged(problem: &str) -> ep::Error {
    let problem = format!("{problem}; pass the bytes that `save` returned");
    CallerError::Config { key: "saved state of a migration", value: "(bytes)".into(), problem }.into()
}

impl Saved {
    pub(crate) fn new(
        domain: &Domain,
        shape: &Shape,
        settings: &Settings,
        element: Element,
        step: u64,
    ) -> Self {
        Self::of(identity(domain, shape, settings, element), step)
    }

    /// A state without layers, for what `identity` names.
    pub(crate) fn of(identity: String, step: u64) -> Self {
        Self { step, identity, layers: Vec::new() }
    }

    /// Adds the parts of the next layer.
    pub(crate) fn push_parts(&mut self, parts: [Vec<Vec<u8>>; 3]) {
        self.layers.push(parts);
    }

    pub(crate) fn layers(&self) -> &[[Vec<Vec<u8>>; 3]] {
        &self.layers
    }

    /// Adds the next layer.
    ///
    /// # Errors
    /// That of the place of the encoders, if it has failed.
    pub(crate) fn push<T: Weight, P: Place>(
        &mut self,
        owned: &Owned<T, P>,
        returned: &[Returned<P>],
        shared: &SharedExperts<T>,
    ) -> Result<(), Error> {
        let gradients: Vec<_> = returned.iter().map(Returned::save).collect::<Result<_, _>>()?;
        self.layers.push([owned.save()?, gradients.concat(), shared.save()]);
        Ok(())
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.step.to_le_bytes());
        put(&mut bytes, self.identity.as_bytes());
        for list in self.layers.iter().flatten() {
            bytes.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|part| put(&mut bytes, part));
        }
        let check = xxh64(&bytes, 0);
        bytes.extend(check.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let cut = || damaged("it ends too early");
        let (body, check) = bytes.split_last_chunk::<8>().ok_or_else(cut)?;
        let mut rest = body.strip_prefix(&MAGIC).ok_or_else(|| damaged("it does not begin with EPMS"))?;
        if u64::from_le_bytes(*check) != xxh64(body, 0) {
            return Err(damaged("its checksum is wrong"));
        }
        let version = rest.split_off(..4).ok_or_else(cut)?;
        if version != VERSION.to_le_bytes() {
            return Err(damaged("another version of this library saved it"));
        }
        let number = |rest: &mut &[u8]| -> Result<u64> {
            let bytes = rest.split_off(..8).ok_or_else(cut)?;
            Ok(u64::from_le_bytes(std::array::from_fn(|at| bytes[at])))
        };
        let part = |rest: &mut &[u8]| -> Result<Vec<u8>> {
            let length = usize::try_from(number(rest)?).map_err(|_| cut())?;
            rest.split_off(..length).map(<[u8]>::to_vec).ok_or_else(cut)
        };
        let step = number(&mut rest)?;
        if step > LAST_STEP {
            return Err(damaged(&format!(
                "it is of step {step}, and {LAST_STEP} is the last that is possible"
            )));
        }
        let identity = String::from_utf8(part(&mut rest)?).map_err(|_| damaged("its head is not text"))?;
        let mut layers = Vec::new();
        while !rest.is_empty() {
            let mut lists = [Vec::new(), Vec::new(), Vec::new()];
            for list in &mut lists {
                for _ in 0..number(&mut rest)? {
                    list.push(part(&mut rest)?);
                }
            }
            layers.push(lists);
        }
        Ok(Self { step, identity, layers })
    }

    /// Checks that this is the state of a migration with these parameters.
    pub(crate) fn check(
        &self,
        domain: &Domain,
        shape: &Shape,
        settings: &Settings,
        element: Element,
    ) -> Result<()> {
        self.check_identity(&identity(domain, shape, settings, element))?;
        let (experts, peers) = (shape.experts_per_rank, domain.peers().len());
        let fits = |lists: &[Vec<Vec<u8>>; 3]| lists[0].len() == experts && lists[1].len() == experts * peers;
        if self.layers.len() != shape.expert_elements.len() || !self.layers.iter().all(fits) {
            return Err(damaged("it lacks layers or experts"));
        }
        Ok(())
    }

    /// Checks that this is the state of what `own` names.
    pub(crate) fn check_identity(&self, own: &str) -> Result<()> {
        if self.identity == own {
            return Ok(());
        }
        Err(damaged(&format!("it is of {}, but this is {own}", self.identity)))
    }

    /// Restores the encoders of a layer. The state must have passed [`check`](Self::check).
    pub(crate) fn restore<T: Weight, P: Place>(
        &self,
        layer: usize,
        owned: &mut Owned<T, P>,
        returned: &mut [Returned<P>],
        gradients: GradientCodec,
        shared: &mut SharedExperts<T>,
    ) -> Result<()> {
        let failed = |error| of_place_or(error, |error| damaged(&format!("layer {layer}: {error}")));
        let [weights, carried, means] = &self.layers[layer];
        owned.restore(weights).map_err(failed)?;
        for (returned, carried) in returned.iter_mut().zip(carried.chunks(weights.len())) {
            returned.restore(gradients, carried).map_err(failed)?;
        }
        shared.restore(means, owned.elements()).map_err(failed)
    }
}

impl<T: Weight> SharedExperts<T> {
    /// The shared experts that streams may refer to, oldest first, as complete streams.
    fn save(&self) -> Vec<Vec<u8>> {
        self.known().map(|shared| complete(shared.weights())).collect()
    }

    /// `elements` is the number of weights of an expert of the layer.
    fn restore(&mut self, saved: &[Vec<u8>], elements: usize) -> Result<(), Error> {
        for bytes in saved {
            // Allocates the expected length, not the length that the stream states: decoding refuses any other length.
            let mut weights = vec![T::from_f32(0.0); elements];
            WeightDecoder::new(elements).decode(bytes, None, &mut weights)?;
            self.learn(SharedExpert::from_weights(weights)?);
        }
        Ok(())
    }
}

/// A stream of the weights, uncompressed.
fn complete<T: Weight>(weights: &[T]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let encoded = WeightEncoder::new(WeightCodec::Exact, weights.len())
        .and_then(|mut encoder| encoder.encode(weights, None, &mut bytes));
    encoded.expect("the exact codec refuses no length that `SharedExpert` accepts");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_expert_of_another_length_is_refused() {
        let mut shared = SharedExperts::<f32>::new(2);
        assert_eq!(shared.restore(&[complete(&[0.5_f32; 4])], 4), Ok(()));
        let error = shared.restore(&[complete(&[0.5_f32; 5])], 4).unwrap_err();
        assert!(error.to_string().contains('5'), "{error}");
        assert_eq!(shared.known().count(), 1);
    }
}
