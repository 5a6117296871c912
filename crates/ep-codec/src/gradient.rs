//! Gradients: encoding with error feedback, and addition of what was decoded.

use crate::codec::{GradientCodec, kept};
use crate::content::{Content, StreamCodec};
use crate::error::{CallerError, Corruption, Operand, Result};
use crate::int8;
use crate::place::{Host, Place, in_main_memory};
use crate::residual::{self, Format, Selected, append, round_saturating};
use crate::shared::{check_indexable, check_length};
use crate::state::{Owner, State};
use crate::stream::{HEADER, Header, StreamInfo, open, seal};
use crate::weight::Weight;
use crate::weight_encoder::{dense_header, element, encode_exact};

/// Encodes the gradients of one expert, which are at a [`Place`], step after step, with error feedback: what a stream leaves
/// out is added to the next gradient.
///
/// For each element, in f32, each operation rounded to nearest, ties to even:
///
/// ```text
///  x     = gradient + carry          carry is 0 before the first stream
///  value = what the stream decodes to for x; 0 where it has no value
///  carry = x - value
/// ```
///
/// [`GradientCodec::TopK`] rounds the k largest x to bf16; an x beyond the largest finite bf16 is rounded to it, and
/// the difference stays in the carry. [`GradientCodec::Exact`] has no carry.
///
/// Memory: the carry, `elements` f32 at the place. Streams have the same bytes for all places, and for any number of threads.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientEncoder<P: Place = Host> {
    place: P,
    codec: GradientCodec,
    elements: usize,
    carry: P::Vec<f32>,
}

impl GradientEncoder {
    /// An encoder of gradients of `elements` elements in main memory, with a carry of zeros.
    ///
    /// # Errors
    /// [`CallerError::TooLong`] when `elements` exceeds `u32::MAX`. [`CallerError::Density`] when the codec's density is
    /// out of range.
    pub fn new(codec: GradientCodec, elements: usize) -> Result<Self> {
        Self::new_in(Host, codec, elements)
    }

    /// What the streams so far have left out, `[elements]`. Empty for [`GradientCodec::Exact`].
    pub fn carry(&self) -> &[f32] {
        &self.carry
    }

    /// The encoder's state, for a checkpoint: 40 bytes and the carry.
    pub fn save(&self) -> Vec<u8> {
        self.state().save(&self.carry)
    }

    /// Like [`restore_in`](Self::restore_in), for gradients in main memory.
    ///
    /// # Errors
    /// Those of [`restore_in`](Self::restore_in).
    pub fn restore(codec: GradientCodec, elements: usize, bytes: &[u8]) -> Result<Self> {
        Self::restore_in(Host, codec, elements, bytes)
    }
}

impl<P: Place> GradientEncoder<P> {
    /// An encoder of gradients of `elements` elements at `place`, with a carry of zeros.
    ///
    /// # Errors
    /// Those of [`new`](GradientEncoder::new), and [`Error::Place`](crate::Error::Place) when the place has failed.
    pub fn new_in(place: P, codec: GradientCodec, elements: usize) -> Result<Self> {
        codec.check()?;
        check_indexable(elements)?;
        let carry = place.zeros(if codec.is_lossless() { 0 } else { elements })?;
        Ok(Self { place, codec, elements, carry })
    }

    /// Appends one stream to `out`. `gradient` has shape `[elements]`. After an error `out` is unchanged, and so is the carry, unless the
    /// place has failed: the encoder must not be used again then.
    ///
    /// # Errors
    /// [`CallerError::Length`] when the gradient's length is not `elements`. [`CallerError::NotFinite`], for all codecs
    /// except [`GradientCodec::Exact`], when an element of the gradient is NaN or infinite, or its sum with the carry
    /// overflows. [`Error::Place`](crate::Error::Place) when the place has failed.
    pub fn encode<T: Weight>(&mut self, gradient: P::Ref<'_, T>, out: &mut Vec<u8>) -> Result<StreamInfo> {
        check_length(Operand::Gradient, self.elements, P::len(gradient))?;
        match self.codec {
            GradientCodec::Exact => encode_exact(&self.place, Content::Gradients, gradient, out),
            GradientCodec::Int8 => {
                let start = out.len();
                out.resize(start + HEADER + int8::payload_bytes(self.elements), 0);
                let payload = &mut out[start + HEADER..];
                let encoded = self.place.encode_int8_carrying(gradient, &mut self.carry, payload);
                let checked = encoded.and_then(|bad| self.check_finite(gradient, bad));
                checked.inspect_err(|_| out.truncate(start))?;
                let header = dense_header::<T>(Content::Gradients, StreamCodec::Int8, self.elements);
                Ok(seal(&mut out[start..], header))
            }
            GradientCodec::TopK { density } => {
                let bad = self.place.carry_on(gradient, &mut self.carry)?;
                self.check_finite(gradient, bad)?;
                // The base of the residuals is zero: a residual is the sum itself.
                let (sums, k) = (P::kept(&self.carry), kept(density, self.elements));
                let candidates = self.place.residuals(sums, None, k)?;
                let selected = Selected::of(candidates, k, |index| element(&self.place, sums, index))?;
                let entries = round_saturating(&selected);
                self.place.subtract_entries(&entries, &mut self.carry)?;
                let header = Header {
                    content: Content::Gradients,
                    codec: StreamCodec::TopK,
                    element: T::ELEMENT,
                    elements: self.elements,
                    kept: None,
                    base: None,
                };
                Ok(append(&entries, Format::SMALLEST, header, out))
            }
        }
    }

    /// The encoder's state, for a checkpoint: 40 bytes and the carry.
    ///
    /// # Errors
    /// [`Error::Place`](crate::Error::Place) when the place has failed.
    pub fn save_from(&self) -> Result<Vec<u8>> {
        in_main_memory(&self.place, P::kept(&self.carry), |carry| self.state().save(carry))
    }

    fn state(&self) -> State {
        let element = (P::len(P::kept(&self.carry)) > 0).then_some(f32::ELEMENT);
        let (owner, elements) = (Owner::GradientEncoder, self.elements);
        State { owner, element, elements, fingerprint: None, complete: 0 }
    }

    /// An encoder that continues where [`save_from`](Self::save_from) was called.
    ///
    /// `codec` may differ from that of the saved encoder. A carry that the codec does not need is dropped; a missing
    /// carry is replaced by zeros.
    ///
    /// # Errors
    /// [`Corruption`] when `bytes` are not a state. [`CallerError::OtherState`] and [`CallerError::Length`] when they
    /// are the state of something else. The errors of [`new_in`](Self::new_in).
    pub fn restore_in(place: P, codec: GradientCodec, elements: usize, bytes: &[u8]) -> Result<Self> {
        let new = Self::new_in(place, codec, elements)?;
        let (_, carry) = State::restore::<f32>(bytes, Owner::GradientEncoder, elements)?;
        if carry.len() != P::len(P::kept(&new.carry)) {
            return Ok(new);
        }
        Ok(Self { carry: new.place.keep(carry)?, ..new })
    }

    /// The error for the index of a sum that is not finite.
    fn check_finite<T: Weight>(&self, gradient: P::Ref<'_, T>, bad: Option<usize>) -> Result<()> {
        let Some(index) = bad else { return Ok(()) };
        let is_gradient = !element(&self.place, gradient, index)?.to_f32().is_finite();
        let what = if is_gradient { Operand::Gradient } else { Operand::Carried };
        Err(CallerError::NotFinite { what, index }.into())
    }
}

/// Adds the gradient of the stream at the start of `bytes` to `sum`: one f32 addition per element, `sum[i] + value`;
/// elements without a value are unchanged. More bytes may follow the stream, after [`StreamInfo::bytes`] bytes.
///
/// `sum` has shape `[P]`. bf16 elements are converted to f32, without rounding. After an error `sum` is unchanged. The
/// function runs on the threads of the current rayon pool.
///
/// # Errors
/// [`Corruption`] when `bytes` do not start with a whole stream. [`CallerError::Content`] when it is a stream of weights.
/// [`CallerError::Length`] when `sum` does not have P elements.
pub fn add_gradient(bytes: &[u8], sum: &mut [f32]) -> Result<StreamInfo> {
    add_gradient_in(&Host, bytes, sum)
}

/// Like [`add_gradient`], for a sum at `place`.
///
/// # Errors
/// Those of [`add_gradient`], and [`Error::Place`](crate::Error::Place) when the place has failed.
pub fn add_gradient_in<P: Place>(place: &P, bytes: &[u8], sum: P::Mut<'_, f32>) -> Result<StreamInfo> {
    let (info, payload) = open(bytes)?;
    if info.content != Content::Gradients {
        return Err(CallerError::Content { stream: info.content, expected: Content::Gradients }.into());
    }
    check_length(Operand::Sum, info.elements, P::len_mut(&sum))?;
    match info.codec {
        StreamCodec::Exact => match info.element {
            ep::Element::F32 => place.add_bytes::<f32>(payload, sum)?,
            ep::Element::Bf16 => place.add_bytes::<u16>(payload, sum)?,
        },
        StreamCodec::Int8 => {
            int8::check::<f32>(payload, info.elements)?;
            place.add_int8(payload, sum)?;
        }
        StreamCodec::TopK => place.add_entries(&residual::read(info, payload)?, sum)?,
        StreamCodec::Delta | StreamCodec::Shared | StreamCodec::Mirror => {
            return Err(Corruption::Sections.into());
        }
    }
    Ok(info)
}
