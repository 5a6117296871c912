//! The receiving side of one expert's weights.

use ep::Element;

use crate::content::{Content, StreamCodec};
use crate::error::{CallerError, Corruption, Error, Operand, Result};
use crate::int8;
use crate::place::{Host, Place};
use crate::residual::{check_element, read_onto, read_onto_shared};
use crate::shared::{SharedExpert, check_length};
use crate::state::{Owner, State};
use crate::stream::{StreamInfo, open};
use crate::weight::Weight;

/// Decodes one expert's streams of weights, of any codec, into a replica in memory of the caller.
///
/// The decoder holds the fingerprint of what the replica holds, not the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightDecoder {
    elements: usize,
    /// The fingerprint and the type of what the replica holds. `None` before the first stream.
    held: Option<(u64, Element)>,
}

impl WeightDecoder {
    /// A decoder of an expert of `elements` weights. The replica may hold anything: the first stream must be complete.
    pub fn new(elements: usize) -> Self {
        Self { elements, held: None }
    }

    /// Decodes the stream at the start of `bytes` into `replica`. More bytes may follow the stream, after
    /// [`StreamInfo::bytes`] bytes.
    ///
    /// `replica` has shape `[elements]` and must hold what the last call left there. `shared` is needed by streams of
    /// [`StreamCodec::Shared`] and ignored by others. After an error, `replica` and the decoder are unchanged and can
    /// decode another stream. The function runs on the threads of the current rayon pool.
    ///
    /// # Errors
    /// [`Corruption`] when `bytes` do not start with a whole stream, or when it does not decode to finite weights (except
    /// [`StreamCodec::Exact`]). [`CallerError::OtherBase`] when the stream changes weights other than those that the
    /// replica holds. [`CallerError::Content`], [`CallerError::Element`], [`CallerError::Length`],
    /// [`CallerError::NoShared`] and [`CallerError::OtherShared`] when the stream does not match the arguments.
    pub fn decode<T: Weight>(
        &mut self,
        bytes: &[u8],
        shared: Option<&SharedExpert<T>>,
        replica: &mut [T],
    ) -> Result<StreamInfo> {
        self.decode_in(&Host, bytes, shared, replica)
    }

    /// Like [`decode`](Self::decode), for a replica at `place`.
    ///
    /// # Errors
    /// Those of [`decode`](Self::decode), and [`Error::Place`](crate::Error::Place) when the place has failed: the replica is
    /// then unspecified, and the next stream must be complete.
    pub fn decode_in<P: Place, T: Weight>(
        &mut self,
        place: &P,
        bytes: &[u8],
        shared: Option<&SharedExpert<T>>,
        replica: P::Mut<'_, T>,
    ) -> Result<StreamInfo> {
        let decoded = self.decode_into(place, bytes, shared, replica);
        if matches!(decoded, Err(Error::Place(_))) {
            self.held = None;
        }
        decoded
    }

    fn decode_into<P: Place, T: Weight>(
        &mut self,
        place: &P,
        bytes: &[u8],
        shared: Option<&SharedExpert<T>>,
        replica: P::Mut<'_, T>,
    ) -> Result<StreamInfo> {
        let (info, payload) = open(bytes)?;
        if info.content != Content::Weights {
            return Err(CallerError::Content { stream: info.content, expected: Content::Weights }.into());
        }
        check_element::<T>(info)?;
        check_length(Operand::Expert, self.elements, info.elements)?;
        check_length(Operand::Replica, self.elements, P::len_mut(&replica))?;
        match info.codec {
            StreamCodec::Exact | StreamCodec::Mirror => place.write(payload, replica)?,
            StreamCodec::Int8 => {
                int8::check::<T>(payload, info.elements)?;
                place.decode_int8(payload, replica)?;
            }
            StreamCodec::Shared => {
                let shared = shared.ok_or(CallerError::NoShared)?;
                let entries = read_onto_shared(info, payload, shared)?;
                place.write_sums(shared.weights(), &entries, replica)?;
            }
            StreamCodec::Delta => {
                self.check_base(info)?;
                let entries = read_onto(place, info, payload, P::read_only(&replica))?;
                place.add_entries(&entries, replica)?;
            }
            StreamCodec::TopK => return Err(Corruption::Sections.into()),
        }
        self.held = Some((info.fingerprint, info.element));
        Ok(info)
    }

    /// The fingerprint of what the replica holds: that of the last stream. `None` before the first.
    pub fn fingerprint(&self) -> Option<u64> {
        self.held.map(|(fingerprint, _)| fingerprint)
    }

    /// The decoder's state, for a checkpoint: 40 bytes. The caller saves the replica.
    pub fn save(&self) -> Vec<u8> {
        let (owner, element) = (Owner::WeightDecoder, self.held.map(|(_, element)| element));
        State { owner, element, elements: self.elements, fingerprint: self.fingerprint(), complete: 0 }
            .save::<f32>(&[])
    }

    /// A decoder that continues where [`save`](Self::save) was called, with the replica of that time.
    ///
    /// # Errors
    /// [`Corruption`] when `bytes` are not a state. [`CallerError::OtherState`] and [`CallerError::Length`] when they
    /// are the state of something else.
    pub fn restore(elements: usize, bytes: &[u8]) -> Result<Self> {
        let (state, values) = State::restore::<f32>(bytes, Owner::WeightDecoder, elements)?;
        if !values.is_empty() || state.element.is_some() != state.fingerprint.is_some() {
            return Err(Corruption::State.into());
        }
        Ok(Self { elements, held: state.fingerprint.zip(state.element) })
    }

    fn check_base(&self, info: StreamInfo) -> Result<()> {
        let stream = info.base.unwrap_or_default();
        match self.held {
            Some((held, element)) if held == stream && element == info.element => Ok(()),
            held => Err(CallerError::OtherBase { stream, held: held.map(|(held, _)| held) }.into()),
        }
    }
}
