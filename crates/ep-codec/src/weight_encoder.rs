//! The sending side of one expert's weights.

use crate::codec::{WeightCodec, kept};
use crate::content::{Content, StreamCodec};
use crate::error::{CallerError, Corruption, Operand, Result};
use crate::int8;
use crate::place::{Host, Place, in_main_memory};
use crate::residual::{Entries, Format, Selected, Selection, append, round_onto, select};
use crate::shared::{SharedExpert, check_indexable, check_length};
use crate::state::{Owner, State};
use crate::stream::{HEADER, Header, StreamInfo, seal};
use crate::weight::Weight;

/// Encodes one expert's weights, which are at a [`Place`], step after step.
///
/// Memory: the mirror for [`WeightCodec::Delta`], `elements` weights at the place; nothing for the other codecs. Streams have the
/// same bytes for all places, and for any number of threads.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightEncoder<T: Weight, P: Place = Host> {
    place: P,
    codec: WeightCodec,
    elements: usize,
    /// `Delta`: what receivers hold, and its fingerprint. `None` before the first stream.
    mirror: Option<(P::Vec<T>, u64)>,
    /// `Delta`: complete streams that are still to be written.
    complete: u32,
}

impl<T: Weight> WeightEncoder<T> {
    /// An encoder of an expert of `elements` weights in main memory.
    ///
    /// # Errors
    /// [`CallerError::TooLong`] when `elements` exceeds `u32::MAX`. [`CallerError::Density`] and
    /// [`CallerError::NoWarmUp`] when the codec's parameters are out of range.
    pub fn new(codec: WeightCodec, elements: usize) -> Result<Self> {
        Self::new_in(Host, codec, elements)
    }

    /// What receivers hold after the last stream, `[elements]`: with [`WeightCodec::Delta`], the mirror. `None` before
    /// the first stream, and for codecs that keep none.
    pub fn mirror(&self) -> Option<&[T]> {
        self.mirror.as_ref().map(|(mirror, _)| mirror.as_slice())
    }

    /// The encoder's state, for a checkpoint: 40 bytes and the mirror.
    pub fn save(&self) -> Vec<u8> {
        self.state().save(self.mirror().unwrap_or_default())
    }

    /// Like [`restore_in`](Self::restore_in), for an expert in main memory.
    ///
    /// # Errors
    /// Those of [`restore_in`](Self::restore_in).
    pub fn restore(codec: WeightCodec, elements: usize, bytes: &[u8]) -> Result<Self> {
        Self::restore_in(Host, codec, elements, bytes)
    }
}

impl<T: Weight, P: Place> WeightEncoder<T, P> {
    /// An encoder of an expert of `elements` weights at `place`.
    ///
    /// # Errors
    /// Those of [`new`](WeightEncoder::new).
    pub fn new_in(place: P, codec: WeightCodec, elements: usize) -> Result<Self> {
        codec.check()?;
        check_indexable(elements)?;
        let complete = match codec {
            WeightCodec::Delta { warm_up, .. } => warm_up,
            _ => 0,
        };
        Ok(Self { place, codec, elements, mirror: None, complete })
    }

    /// Appends one stream to `out`.
    ///
    /// `weights` has shape `[elements]`. `shared` is needed by [`WeightCodec::Shared`] and ignored by the other codecs.
    /// After an error `out` and the encoder are unchanged.
    ///
    /// # Errors
    /// [`CallerError::Length`] when a length differs from `elements`. [`CallerError::NoShared`] when `shared` is needed
    /// and `None`. [`CallerError::NotFinite`], for all codecs except [`WeightCodec::Exact`], when a weight is NaN or
    /// infinite, or when a residual or a decoded weight would overflow. [`Error::Place`](crate::Error::Place) when the place has
    /// failed.
    pub fn encode(
        &mut self,
        weights: P::Ref<'_, T>,
        shared: Option<&SharedExpert<T>>,
        out: &mut Vec<u8>,
    ) -> Result<StreamInfo> {
        check_length(Operand::Expert, self.elements, P::len(weights))?;
        match self.codec {
            WeightCodec::Exact => encode_exact(&self.place, Content::Weights, weights, out),
            WeightCodec::Int8 => encode_int8(&self.place, weights, out),
            WeightCodec::Shared { density } => {
                let shared = shared.ok_or(CallerError::NoShared)?;
                check_length(Operand::Shared, self.elements, shared.weights().len())?;
                let header = self.header(StreamCodec::Shared, Some(shared.fingerprint()));
                let k = kept(density, self.elements);
                let select = |weights: &[T]| select(weights, shared.weights(), k, Selection::Exact);
                let selected = in_main_memory(&self.place, weights, select)??;
                let entries = round_onto(&Host, &selected, shared.weights(), Format::SMALLEST)?;
                Ok(append(&entries, Format::SMALLEST, header, out))
            }
            WeightCodec::Delta { density, .. } if self.mirror.is_some() && self.complete == 0 => {
                self.encode_changes(weights, density, out)
            }
            WeightCodec::Delta { .. } => self.encode_complete(weights, out),
        }
    }

    /// Makes the next stream complete: a receiver needs no earlier stream to decode it.
    ///
    /// Streams of all codecs except [`WeightCodec::Delta`] are independent of earlier ones, with and without this call.
    pub fn start_over(&mut self) {
        if matches!(self.codec, WeightCodec::Delta { .. }) {
            self.complete = self.complete.max(1);
        }
    }

    /// Whether there is a [mirror](WeightEncoder::mirror).
    pub fn has_mirror(&self) -> bool {
        self.mirror.is_some()
    }

    /// Appends a stream of what receivers hold after the last stream, for a receiver that does not hold it. Later
    /// streams change these weights. Only with [`WeightCodec::Delta`], after the first stream.
    ///
    /// # Errors
    /// [`CallerError::NoMirror`] when there is no mirror.
    pub fn complete(&self, out: &mut Vec<u8>) -> Result<StreamInfo> {
        let (mirror, fingerprint) = self.mirror.as_ref().ok_or(CallerError::NoMirror)?;
        let header = self.header(StreamCodec::Mirror, Some(*fingerprint));
        append_whole(&self.place, header, P::kept(mirror), out)
    }

    /// The encoder's state, for a checkpoint: 40 bytes and the mirror.
    ///
    /// # Errors
    /// [`Error::Place`](crate::Error::Place) when the place has failed.
    pub fn save_from(&self) -> Result<Vec<u8>> {
        match &self.mirror {
            None => Ok(self.state().save::<T>(&[])),
            Some((mirror, _)) => in_main_memory(&self.place, P::kept(mirror), |all| self.state().save(all)),
        }
    }

    fn state(&self) -> State {
        let (elements, complete, owner) = (self.elements, self.complete, Owner::WeightEncoder);
        let fingerprint = self.mirror.as_ref().map(|&(_, fingerprint)| fingerprint);
        State { owner, element: Some(T::ELEMENT), elements, fingerprint, complete }
    }

    /// An encoder that continues where [`save_from`](Self::save_from) was called.
    ///
    /// `codec` may differ from that of the saved encoder. With [`WeightCodec::Delta`] and a state without mirror, the
    /// encoder warms up as a new one does; a mirror that the codec does not need is dropped.
    ///
    /// # Errors
    /// [`Corruption`] when `bytes` are not a state. [`CallerError::OtherState`],
    /// [`CallerError::Length`] and [`CallerError::Element`] when they are the state of something else. The errors of
    /// [`new`](WeightEncoder::new).
    pub fn restore_in(place: P, codec: WeightCodec, elements: usize, bytes: &[u8]) -> Result<Self> {
        let new = Self::new_in(place, codec, elements)?;
        let (state, mirror) = State::restore::<T>(bytes, Owner::WeightEncoder, elements)?;
        let stream = state.element.ok_or(Corruption::State)?;
        if stream != T::ELEMENT {
            return Err(CallerError::Element { stream, given: T::ELEMENT }.into());
        }
        let expected = if state.fingerprint.is_some() { elements } else { 0 };
        if mirror.len() != expected {
            return Err(Corruption::State.into());
        }
        match (codec, state.fingerprint) {
            (WeightCodec::Delta { .. }, Some(fingerprint)) => {
                let mirror = new.place.keep(mirror)?;
                Ok(Self { mirror: Some((mirror, fingerprint)), complete: state.complete, ..new })
            }
            _ => Ok(new),
        }
    }

    fn header(&self, codec: StreamCodec, base: Option<u64>) -> Header {
        let (content, element) = (Content::Weights, T::ELEMENT);
        Header { content, codec, element, elements: self.elements, kept: None, base }
    }

    fn encode_complete(&mut self, weights: P::Ref<'_, T>, out: &mut Vec<u8>) -> Result<StreamInfo> {
        let start = out.len();
        let info = encode_int8(&self.place, weights, out)?;
        let mirrored = self.mirror_complete(&out[start + HEADER..], info.fingerprint);
        mirrored.inspect_err(|_| out.truncate(start))?;
        self.complete = self.complete.saturating_sub(1);
        Ok(info)
    }

    /// Sets the mirror to what the payload of a complete stream decodes to.
    fn mirror_complete(&mut self, payload: &[u8], fingerprint: u64) -> Result<()> {
        // After an error the mirror would be unknown. Without one, the next stream is complete.
        let mut mirror = match self.mirror.take() {
            Some((mirror, _)) => mirror,
            None => self.place.zeros(self.elements)?,
        };
        // The receiver decodes the same bytes.
        self.place.decode_int8(payload, P::kept_mut(&mut mirror))?;
        self.mirror = Some((mirror, fingerprint));
        Ok(())
    }

    fn encode_changes(
        &mut self,
        weights: P::Ref<'_, T>,
        density: f64,
        out: &mut Vec<u8>,
    ) -> Result<StreamInfo> {
        let (mirror, fingerprint) = self.mirror.as_ref().ok_or(CallerError::NoMirror)?;
        let (place, base, k) = (&self.place, P::kept(mirror), kept(density, self.elements));
        let candidates = place.residuals(weights, Some(base), k)?;
        let selected = Selected::of(candidates, k, |index| element(place, weights, index))?;
        let entries = round_onto(place, &selected, base, Format::SMALLEST)?;
        let header = self.header(StreamCodec::Delta, Some(*fingerprint));
        let start = out.len();
        let info = append(&entries, Format::SMALLEST, header, out);
        let changed = self.change_mirror(&entries, info.fingerprint);
        changed.inspect_err(|_| out.truncate(start))?;
        Ok(info)
    }

    fn change_mirror(&mut self, entries: &[Entries], fingerprint: u64) -> Result<()> {
        if let Some((mut mirror, _)) = self.mirror.take() {
            self.place.add_entries(entries, P::kept_mut(&mut mirror))?;
            self.mirror = Some((mirror, fingerprint));
        }
        Ok(())
    }
}

/// One element, in main memory.
pub(crate) fn element<P: Place, T: Weight>(place: &P, elements: P::Ref<'_, T>, index: usize) -> Result<T> {
    in_main_memory(place, P::part(elements, index..index + 1), |one| one[0])
}

/// Appends a stream of the elements as they are.
pub(crate) fn encode_exact<P: Place, T: Weight>(
    place: &P,
    content: Content,
    elements: P::Ref<'_, T>,
    out: &mut Vec<u8>,
) -> Result<StreamInfo> {
    let header = dense_header::<T>(content, StreamCodec::Exact, P::len(elements));
    append_whole(place, header, elements, out)
}

/// Appends elements as they are in memory.
fn append_whole<P: Place, T: Weight>(
    place: &P,
    header: Header,
    elements: P::Ref<'_, T>,
    out: &mut Vec<u8>,
) -> Result<StreamInfo> {
    let start = out.len();
    out.reserve(HEADER + P::len(elements) * size_of::<T>());
    out.resize(start + HEADER, 0);
    place.append(elements, out).inspect_err(|_| out.truncate(start))?;
    Ok(seal(&mut out[start..], header))
}

fn encode_int8<P: Place, T: Weight>(
    place: &P,
    weights: P::Ref<'_, T>,
    out: &mut Vec<u8>,
) -> Result<StreamInfo> {
    let (start, elements) = (out.len(), P::len(weights));
    out.resize(start + HEADER + int8::payload_bytes(elements), 0);
    let encoded = place.encode_int8(weights, &mut out[start + HEADER..]);
    if let Some(index) = encoded.inspect_err(|_| out.truncate(start))? {
        out.truncate(start);
        return Err(CallerError::NotFinite { what: Operand::Expert, index }.into());
    }
    Ok(seal(&mut out[start..], dense_header::<T>(Content::Weights, StreamCodec::Int8, elements)))
}

pub(crate) fn dense_header<T: Weight>(content: Content, codec: StreamCodec, elements: usize) -> Header {
    Header { content, codec, element: T::ELEMENT, elements, kept: None, base: None }
}
