//! The receiving side of a layer: decoders of replicas, and the shared experts that streams refer to.

use std::collections::{BTreeMap, VecDeque};

use ep_codec::{CallerError, Error, Place, SharedExpert, StreamInfo, Weight, WeightDecoder};

use crate::inbox::Message;
use crate::owned::nth;

/// The replicas of one peer's experts in one layer.
#[derive(Debug)]
pub(crate) struct Replicas {
    elements: usize,
    /// One for each expert of the peer.
    decoders: Vec<WeightDecoder>,
    /// The step of the weights that the replicas hold.
    pub(crate) step: Option<u64>,
    /// A message that refers to a shared expert of which parts have not arrived.
    pub(crate) held: Option<Message>,
    /// Whether complete weights were asked for and have not arrived.
    pub(crate) asked: bool,
}

/// The result of decoding a message.
#[derive(Debug, PartialEq)]
pub(crate) enum Decoded<T> {
    /// The replicas are those of the message's step. Has the part of a shared expert, if the message had one.
    Done(Option<Vec<T>>),
    /// The message changes weights that the replicas do not hold.
    LacksBase,
    /// The message refers to a shared expert that is not known yet.
    LacksShared,
}

/// Why a message was not decoded.
#[derive(Debug)]
pub(crate) enum Undecoded {
    /// What is wrong with the message.
    Message(String),
    /// The place of the replicas has failed.
    Place(ep::Error),
}

impl From<Error> for Undecoded {
    fn from(error: Error) -> Self {
        match error {
            Error::Place(error) => Self::Place(error),
            error => Self::Message(error.to_string()),
        }
    }
}

impl Replicas {
    pub(crate) fn new(experts: usize, elements: usize) -> Self {
        let decoders = (0..experts).map(|_| WeightDecoder::new(elements)).collect();
        Self { elements, decoders, step: None, held: None, asked: false }
    }

    /// Decodes a message into the replicas `[experts, elements]`, which must hold what the last message left there.
    /// `has_part` says whether the message must end with a part of the next shared expert.
    ///
    /// # Errors
    /// What is wrong with the message, or the error of the place.
    pub(crate) fn decode<T: Weight, P: Place>(
        &mut self,
        place: &P,
        message: &Message,
        has_part: bool,
        shared: &SharedExperts<T>,
        mut out: P::Mut<'_, T>,
    ) -> Result<Decoded<T>, Undecoded> {
        let mut rest = &message.body[..];
        for (expert, decoder) in self.decoders.iter_mut().enumerate() {
            for _ in 0..message.header.streams {
                let replica = P::part_mut(&mut out, nth(expert, self.elements));
                match shared.decode(place, decoder, rest, replica) {
                    Ok(info) => rest = &rest[info.bytes..],
                    Err(Error::Caller(CallerError::OtherBase { .. })) => return Ok(Decoded::LacksBase),
                    Err(Error::Caller(CallerError::NoShared | CallerError::OtherShared { .. })) => {
                        return Ok(Decoded::LacksShared);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let part = if has_part {
            let mut part = vec![T::from_f32(0.0); self.elements];
            let decoded = WeightDecoder::new(self.elements).decode(rest, None, &mut part);
            let broken = |error| Undecoded::Message(format!("the mean of the sender's experts: {error}"));
            rest = &rest[decoded.map_err(broken)?.bytes..];
            Some(part)
        } else {
            None
        };
        if !rest.is_empty() {
            return Err(Undecoded::Message(format!("{} bytes too many", rest.len())));
        }
        self.step = Some(message.header.step);
        Ok(Decoded::Done(part))
    }
}

/// The shared experts of one layer, by the step in which their parts were sent.
#[derive(Debug)]
pub(crate) struct SharedExperts<T> {
    ranks: usize,
    /// Indexed by step, then by position in the domain: the mean of the experts of that rank.
    parts: BTreeMap<u64, Vec<Option<Vec<T>>>>,
    /// The newest last.
    known: VecDeque<SharedExpert<T>>,
}

impl<T: Weight> SharedExperts<T> {
    /// Number of shared experts that are kept: messages on the way may refer to one before the newest.
    const KEPT: usize = 3;

    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks, parts: BTreeMap::new(), known: VecDeque::new() }
    }

    pub(crate) fn newest(&self) -> Option<&SharedExpert<T>> {
        self.known.back()
    }

    /// Decodes a stream, with the shared expert that it refers to, if it refers to one.
    fn decode<P: Place>(
        &self,
        place: &P,
        decoder: &mut WeightDecoder,
        bytes: &[u8],
        mut out: P::Mut<'_, T>,
    ) -> Result<StreamInfo, Error> {
        let all = 0..P::len_mut(&out);
        let mut decoded = decoder.decode_in(place, bytes, self.newest(), P::part_mut(&mut out, all.clone()));
        for older in self.known.iter().rev().skip(1) {
            if !matches!(decoded, Err(Error::Caller(CallerError::OtherShared { .. }))) {
                break;
            }
            decoded = decoder.decode_in(place, bytes, Some(older), P::part_mut(&mut out, all.clone()));
        }
        decoded
    }

    /// Adds the part of one rank. When all parts of a step have arrived, their mean becomes the newest shared expert.
    ///
    /// # Errors
    /// If the mean is not finite.
    pub(crate) fn add(&mut self, step: u64, position: usize, part: Vec<T>) -> Result<(), Error> {
        let parts = self.parts.entry(step).or_insert_with(|| vec![None; self.ranks]);
        parts[position] = Some(part);
        let Some(all) = parts.iter().map(Option::as_deref).collect::<Option<Vec<&[T]>>>() else {
            return Ok(());
        };
        let mean = SharedExpert::mean_of(&all)?;
        self.parts.retain(|&other, _| other > step);
        self.learn(mean);
        Ok(())
    }

    /// Makes this shared expert the newest.
    pub(crate) fn learn(&mut self, shared: SharedExpert<T>) {
        self.known.push_back(shared);
        if self.known.len() > Self::KEPT {
            self.known.pop_front();
        }
    }

    /// The shared experts that messages may refer to, oldest first.
    pub(crate) fn known(&self) -> impl Iterator<Item = &SharedExpert<T>> {
        self.known.iter()
    }
}
