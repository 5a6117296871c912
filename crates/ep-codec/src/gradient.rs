//! Gradients: encoding with error feedback, and addition of what was decoded.

use crate::codec::{GradientCodec, kept};
use crate::content::{Content, StreamCodec};
use crate::error::{CallerError, Corruption, Operand, Result};
use crate::int8;
use crate::parallel::{IndexedParallelIterator, Parallel, ParallelIterator};
use crate::residual::{self, Format, Selection, append, round_saturating, select};
use crate::shared::{check_indexable, check_length};
use crate::state::{Owner, State};
use crate::stream::{HEADER, Header, StreamInfo, open, seal};
use crate::weight::{Weight, Zero};
use crate::weight_encoder::{dense_header, encode_exact};

/// Elements that one thread works on at a time.
const PIECE: usize = 1 << 14;

/// Encodes the gradients of one expert, step after step, with error feedback: what a stream leaves out is added to the
/// next gradient.
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
/// Memory: the carry, `elements` f32. The functions run on the threads of the current rayon pool, and streams have the
/// same bytes for any number of threads.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientEncoder {
    codec: GradientCodec,
    elements: usize,
    carry: Vec<f32>,
}

impl GradientEncoder {
    /// An encoder of gradients of `elements` elements, with a carry of zeros.
    ///
    /// # Errors
    /// [`CallerError::TooLong`] when `elements` exceeds `u32::MAX`. [`CallerError::Density`] when the codec's density is
    /// out of range.
    pub fn new(codec: GradientCodec, elements: usize) -> Result<Self> {
        codec.check()?;
        check_indexable(elements)?;
        let carried = if codec.is_lossless() { 0 } else { elements };
        Ok(Self { codec, elements, carry: vec![0.0; carried] })
    }

    /// Appends one stream to `out`. `gradient` has shape `[elements]`. After an error `out` and the carry are unchanged.
    ///
    /// # Errors
    /// [`CallerError::Length`] when the gradient's length is not `elements`. [`CallerError::NotFinite`], for all codecs
    /// except [`GradientCodec::Exact`], when an element of the gradient is NaN or infinite, or its sum with the carry
    /// overflows.
    pub fn encode<T: Weight>(&mut self, gradient: &[T], out: &mut Vec<u8>) -> Result<StreamInfo> {
        check_length(Operand::Gradient, self.elements, gradient.len())?;
        match self.codec {
            GradientCodec::Exact => Ok(encode_exact(Content::Gradients, gradient, out)),
            GradientCodec::Int8 => {
                self.check_finite(gradient)?;
                let start = out.len();
                out.resize(start + HEADER + int8::payload_bytes(self.elements), 0);
                int8::encode_carrying(gradient, &mut self.carry, &mut out[start + HEADER..]);
                let header = dense_header::<T>(Content::Gradients, StreamCodec::Int8, self.elements);
                Ok(seal(&mut out[start..], header))
            }
            GradientCodec::TopK { density } => {
                self.check_finite(gradient)?;
                let pieces = self.carry.par_chunks_mut(PIECE).zip(gradient.par_chunks(PIECE));
                pieces.for_each(|(carry, gradient)| {
                    carry.iter_mut().zip(gradient).for_each(|(carry, gradient)| *carry += gradient.to_f32());
                });
                // The base of the residuals is zero: a residual is the sum itself.
                let zeros = vec![Zero; self.elements];
                let selected = select(&self.carry, &zeros, kept(density, self.elements), Selection::Exact)?;
                let entries = round_saturating(&selected);
                residual::subtract(&entries, &mut self.carry);
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

    /// What the streams so far have left out, `[elements]`. Empty for [`GradientCodec::Exact`].
    pub fn carry(&self) -> &[f32] {
        &self.carry
    }

    /// The encoder's state, for a checkpoint: 40 bytes and the carry.
    pub fn save(&self) -> Vec<u8> {
        let element = (!self.carry.is_empty()).then_some(f32::ELEMENT);
        let (owner, elements) = (Owner::GradientEncoder, self.elements);
        State { owner, element, elements, fingerprint: None, complete: 0 }.save(&self.carry)
    }

    /// An encoder that continues where [`save`](Self::save) was called.
    ///
    /// `codec` may differ from that of the saved encoder. A carry that the codec does not need is dropped; a missing
    /// carry is replaced by zeros.
    ///
    /// # Errors
    /// [`Corruption`] when `bytes` are not a state. [`CallerError::OtherState`] and [`CallerError::Length`] when they
    /// are the state of something else. The errors of [`new`](Self::new).
    pub fn restore(codec: GradientCodec, elements: usize, bytes: &[u8]) -> Result<Self> {
        let new = Self::new(codec, elements)?;
        let (_, carry) = State::restore::<f32>(bytes, Owner::GradientEncoder, elements)?;
        Ok(if carry.len() == new.carry.len() { Self { carry, ..new } } else { new })
    }

    fn check_finite<T: Weight>(&self, gradient: &[T]) -> Result<()> {
        let pieces = gradient.par_chunks(PIECE).zip(self.carry.par_chunks(PIECE)).enumerate();
        let bad = pieces.filter_map(|(piece, (gradient, carry))| {
            let is_finite = |(gradient, carry): (&T, &f32)| (gradient.to_f32() + carry).is_finite();
            let pairs = || gradient.iter().zip(carry);
            // The fold has no early exit, so that it is vectorised. The search runs at most once per piece.
            let all = pairs().fold(true, |all, pair| all & is_finite(pair));
            if all { None } else { pairs().position(|pair| !is_finite(pair)).map(|at| piece * PIECE + at) }
        });
        match bad.min() {
            None => Ok(()),
            Some(index) => {
                let is_gradient = !gradient[index].to_f32().is_finite();
                let what = if is_gradient { Operand::Gradient } else { Operand::Carried };
                Err(CallerError::NotFinite { what, index }.into())
            }
        }
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
    let (info, payload) = open(bytes)?;
    if info.content != Content::Gradients {
        return Err(CallerError::Content { stream: info.content, expected: Content::Gradients }.into());
    }
    check_length(Operand::Sum, info.elements, sum.len())?;
    match info.codec {
        StreamCodec::Exact => match info.element {
            ep::Element::F32 => add_exact(payload, sum, f32::from_le_bytes),
            ep::Element::Bf16 => add_exact(payload, sum, |bits| u16::from_le_bytes(bits).to_f32()),
        },
        StreamCodec::Int8 => {
            int8::check::<f32>(payload, info.elements)?;
            int8::add(payload, sum);
        }
        StreamCodec::TopK => residual::add(&residual::read(info, payload)?, sum),
        StreamCodec::Delta | StreamCodec::Shared | StreamCodec::Mirror => {
            return Err(Corruption::Sections.into());
        }
    }
    Ok(info)
}

fn add_exact<const N: usize>(payload: &[u8], sum: &mut [f32], value: impl Fn([u8; N]) -> f32 + Sync) {
    let (elements, _) = payload.as_chunks::<N>();
    sum.par_chunks_mut(PIECE).zip(elements.par_chunks(PIECE)).for_each(|(sum, elements)| {
        sum.iter_mut().zip(elements).for_each(|(sum, &element)| *sum += value(element));
    });
}
