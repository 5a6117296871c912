//! The sending side of one expert's weights.

use crate::codec::{WeightCodec, kept};
use crate::content::{Content, StreamCodec};
use crate::error::{CallerError, Corruption, Operand, Result};
use crate::int8;
use crate::residual::{self, Format, Selection, append, round_onto, select};
use crate::shared::{SharedExpert, check_indexable, check_length};
use crate::state::{Owner, State};
use crate::stream::{HEADER, Header, StreamInfo, seal};
use crate::weight::Weight;

/// Encodes one expert's weights step after step.
///
/// Memory: the mirror for [`WeightCodec::Delta`], `elements` weights; nothing for the other codecs. Functions run on
/// the threads of the current rayon pool, and streams have the same bytes for any number of threads.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightEncoder<T> {
    codec: WeightCodec,
    elements: usize,
    /// `Delta`: what receivers hold. Empty before the first stream.
    mirror: Vec<T>,
    /// `Delta`: the fingerprint of the mirror. `None` before the first stream.
    fingerprint: Option<u64>,
    /// `Delta`: complete streams that are still to be written.
    complete: u32,
}

impl<T: Weight> WeightEncoder<T> {
    /// An encoder of an expert of `elements` weights.
    ///
    /// # Errors
    /// [`CallerError::TooLong`] when `elements` exceeds `u32::MAX`. [`CallerError::Density`] and
    /// [`CallerError::NoWarmUp`] when the codec's parameters are out of range.
    pub fn new(codec: WeightCodec, elements: usize) -> Result<Self> {
        codec.check()?;
        check_indexable(elements)?;
        let complete = match codec {
            WeightCodec::Delta { warm_up, .. } => warm_up,
            _ => 0,
        };
        Ok(Self { codec, elements, mirror: Vec::new(), fingerprint: None, complete })
    }

    /// Appends one stream to `out`.
    ///
    /// `weights` has shape `[elements]`. `shared` is needed by [`WeightCodec::Shared`] and ignored by the other codecs.
    /// After an error `out` and the encoder are unchanged.
    ///
    /// # Errors
    /// [`CallerError::Length`] when a length differs from `elements`. [`CallerError::NoShared`] when `shared` is needed
    /// and `None`. [`CallerError::NotFinite`], for all codecs except [`WeightCodec::Exact`], when a weight is NaN or
    /// infinite, or when a residual or a decoded weight would overflow.
    pub fn encode(
        &mut self,
        weights: &[T],
        shared: Option<&SharedExpert<T>>,
        out: &mut Vec<u8>,
    ) -> Result<StreamInfo> {
        check_length(Operand::Expert, self.elements, weights.len())?;
        match self.codec {
            WeightCodec::Exact => Ok(encode_exact(Content::Weights, weights, out)),
            WeightCodec::Int8 => encode_int8(weights, out),
            WeightCodec::Shared { density } => {
                let shared = shared.ok_or(CallerError::NoShared)?;
                check_length(Operand::Shared, self.elements, shared.weights().len())?;
                let header = self.header(StreamCodec::Shared, Some(shared.fingerprint()));
                let selected =
                    select(weights, shared.weights(), kept(density, self.elements), Selection::Exact)?;
                let entries = round_onto(&selected, shared.weights(), Format::SMALLEST)?;
                Ok(append(&entries, Format::SMALLEST, header, out))
            }
            WeightCodec::Delta { density, .. } => match self.fingerprint {
                Some(base) if self.complete == 0 => self.encode_changes(weights, density, base, out),
                _ => self.encode_complete(weights, out),
            },
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

    /// What receivers hold after the last stream, `[elements]`: with [`WeightCodec::Delta`], the mirror. `None` before
    /// the first stream, and for codecs that keep none.
    pub fn mirror(&self) -> Option<&[T]> {
        self.fingerprint.map(|_| self.mirror.as_slice())
    }

    /// Appends a stream of what receivers hold after the last stream, for a receiver that does not hold it. Later
    /// streams change these weights. Only with [`WeightCodec::Delta`], after the first stream.
    ///
    /// # Errors
    /// [`CallerError::NoMirror`] when there is no mirror.
    pub fn complete(&self, out: &mut Vec<u8>) -> Result<StreamInfo> {
        let fingerprint = self.fingerprint.ok_or(CallerError::NoMirror)?;
        let header = self.header(StreamCodec::Mirror, Some(fingerprint));
        Ok(append_whole(header, &self.mirror, out))
    }

    /// The encoder's state, for a checkpoint: 40 bytes and the mirror.
    pub fn save(&self) -> Vec<u8> {
        let (elements, fingerprint, complete) = (self.elements, self.fingerprint, self.complete);
        let owner = Owner::WeightEncoder;
        State { owner, element: Some(T::ELEMENT), elements, fingerprint, complete }.save(&self.mirror)
    }

    /// An encoder that continues where [`save`](Self::save) was called.
    ///
    /// `codec` may differ from that of the saved encoder. With [`WeightCodec::Delta`] and a state without mirror, the
    /// encoder warms up as a new one does; a mirror that the codec does not need is dropped.
    ///
    /// # Errors
    /// [`Corruption`] when `bytes` are not a state. [`CallerError::OtherState`],
    /// [`CallerError::Length`] and [`CallerError::Element`] when they are the state of something else. The errors of
    /// [`new`](Self::new).
    pub fn restore(codec: WeightCodec, elements: usize, bytes: &[u8]) -> Result<Self> {
        let new = Self::new(codec, elements)?;
        let (state, mirror) = State::restore::<T>(bytes, Owner::WeightEncoder, elements)?;
        let stream = state.element.ok_or(Corruption::State)?;
        if stream != T::ELEMENT {
            return Err(CallerError::Element { stream, given: T::ELEMENT }.into());
        }
        let expected = if state.fingerprint.is_some() { elements } else { 0 };
        if mirror.len() != expected {
            return Err(Corruption::State.into());
        }
        match codec {
            WeightCodec::Delta { .. } if state.fingerprint.is_some() => {
                Ok(Self { mirror, fingerprint: state.fingerprint, complete: state.complete, ..new })
            }
            _ => Ok(new),
        }
    }

    fn header(&self, codec: StreamCodec, base: Option<u64>) -> Header {
        let (content, element) = (Content::Weights, T::ELEMENT);
        Header { content, codec, element, elements: self.elements, kept: None, base }
    }

    fn encode_complete(&mut self, weights: &[T], out: &mut Vec<u8>) -> Result<StreamInfo> {
        let info = encode_int8(weights, out)?;
        self.mirror.resize(self.elements, T::from_f32(0.0));
        // The receiver decodes the same bytes with the same function.
        let payload = out.len() - (info.bytes - HEADER);
        int8::decode(&out[payload..], &mut self.mirror);
        self.fingerprint = Some(info.fingerprint);
        self.complete = self.complete.saturating_sub(1);
        Ok(info)
    }

    fn encode_changes(
        &mut self,
        weights: &[T],
        density: f64,
        base: u64,
        out: &mut Vec<u8>,
    ) -> Result<StreamInfo> {
        let selected = select(weights, &self.mirror, kept(density, self.elements), Selection::Exact)?;
        let entries = round_onto(&selected, &self.mirror, Format::SMALLEST)?;
        let header = self.header(StreamCodec::Delta, Some(base));
        let info = append(&entries, Format::SMALLEST, header, out);
        residual::add(&entries, &mut self.mirror);
        self.fingerprint = Some(info.fingerprint);
        Ok(info)
    }
}

/// Appends a stream of the elements as they are.
pub(crate) fn encode_exact<T: Weight>(content: Content, elements: &[T], out: &mut Vec<u8>) -> StreamInfo {
    append_whole(dense_header::<T>(content, StreamCodec::Exact, elements.len()), elements, out)
}

/// Appends elements as they are in memory.
fn append_whole<T: Weight>(header: Header, elements: &[T], out: &mut Vec<u8>) -> StreamInfo {
    let start = out.len();
    let bytes: &[u8] = bytemuck::cast_slice(elements);
    out.reserve(HEADER + bytes.len());
    out.resize(start + HEADER, 0);
    out.extend_from_slice(bytes);
    seal(&mut out[start..], header)
}

fn encode_int8<T: Weight>(weights: &[T], out: &mut Vec<u8>) -> Result<StreamInfo> {
    let start = out.len();
    out.resize(start + HEADER + int8::payload_bytes(weights.len()), 0);
    if let Some(index) = int8::encode(weights, &mut out[start + HEADER..]) {
        out.truncate(start);
        return Err(CallerError::NotFinite { what: Operand::Expert, index }.into());
    }
    let header = dense_header::<T>(Content::Weights, StreamCodec::Int8, weights.len());
    Ok(seal(&mut out[start..], header))
}

pub(crate) fn dense_header<T: Weight>(content: Content, codec: StreamCodec, elements: usize) -> Header {
    Header { content, codec, element: T::ELEMENT, elements, kept: None, base: None }
}
