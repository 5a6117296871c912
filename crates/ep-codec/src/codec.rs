//! The choice of a codec: names, sizes of streams, and which codecs are lossless.

use std::fmt;
use std::str::FromStr;

use ep::Element;

use crate::error::{CallerError, Result};
use crate::int8;
use crate::residual::{BLOCK, Format};
use crate::stream::HEADER_BYTES;

/// The density of `delta`, `shared` and `topk` where none is given.
const DEFAULT_DENSITY: f64 = 0.01;
/// The number of complete streams of `delta` where none is given.
const DEFAULT_WARM_UP: u32 = 1;

/// The form in which an expert's weights travel.
///
/// Text: `exact`, `int8`, `delta:0.01`, `delta:0.01,warm_up=4` or `shared:0.01`. The density is 0.01 and `warm_up` is 1
/// where they are not given.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum WeightCodec {
    /// The weights as they are in memory, NaN and infinity too.
    Exact,
    /// 8 bits per weight, and one f32 scale per block of 128.
    Int8,
    /// The largest changes since the last stream, against the [mirror](crate::WeightEncoder::mirror).
    Delta {
        /// The part of the weights that a stream has: more than 0, at most 1. At least one weight is sent.
        density: f64,
        /// Number of complete (`Int8`) streams at the start, at least 1.
        warm_up: u32,
    },
    /// The largest differences from a [`SharedExpert`](crate::SharedExpert): SR compression.
    Shared {
        /// The part of the weights that a stream has: more than 0, at most 1. At least one weight is sent.
        density: f64,
    },
}

/// The form in which an expert's gradients travel. `Int8` and `TopK` have error feedback: see
/// [`GradientEncoder`](crate::GradientEncoder).
///
/// Text: `exact`, `int8` or `topk:0.01`. The density is 0.01 where it is not given.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum GradientCodec {
    /// The gradients as they are in memory, NaN and infinity too.
    Exact,
    /// 8 bits per element, and one f32 scale per block of 128.
    Int8,
    /// The largest gradients.
    TopK {
        /// The part of the elements that a stream has: more than 0, at most 1. At least one element is sent.
        density: f64,
    },
}

impl WeightCodec {
    /// Whether receivers get the sender's bits.
    pub fn is_lossless(self) -> bool {
        matches!(self, Self::Exact)
    }

    /// Whether all streams of an expert have the same size.
    pub fn is_fixed_size(self) -> bool {
        matches!(self, Self::Exact | Self::Int8)
    }

    /// The size in bytes, header included, that no stream of `elements` weights exceeds. It is the exact size if the
    /// codec [has a fixed size](Self::is_fixed_size).
    pub fn max_bytes(&self, element: Element, elements: usize) -> usize {
        match *self {
            Self::Exact => exact_bytes(element, elements),
            Self::Int8 => int8_bytes(elements),
            Self::Delta { density, .. } => sparse_bytes(density, elements).max(int8_bytes(elements)),
            Self::Shared { density } => sparse_bytes(density, elements),
        }
    }

    /// Like [`max_bytes`](Self::max_bytes), without the streams of [`Delta`](Self::Delta) that carry all weights: those
    /// of the warm-up and of a restart.
    pub fn regular_bytes(&self, element: Element, elements: usize) -> usize {
        match *self {
            Self::Delta { density, .. } => sparse_bytes(density, elements),
            _ => self.max_bytes(element, elements),
        }
    }

    /// The expected size in bytes, header included, of a stream of `elements` weights; with [`Delta`](Self::Delta), of
    /// a stream after the warm-up.
    pub fn expected_bytes(&self, element: Element, elements: usize) -> f64 {
        match *self {
            Self::Exact => exact_bytes(element, elements) as f64,
            Self::Int8 => int8_bytes(elements) as f64,
            Self::Delta { density, .. } | Self::Shared { density } => {
                expected_sparse_bytes(density, elements)
            }
        }
    }

    /// Checks the parameters of the codec.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            Self::Exact | Self::Int8 => Ok(()),
            Self::Delta { warm_up: 0, .. } => Err(CallerError::NoWarmUp.into()),
            Self::Delta { density, .. } | Self::Shared { density } => check_density(density),
        }
    }
}

impl GradientCodec {
    /// Whether receivers get the sender's bits.
    pub fn is_lossless(self) -> bool {
        matches!(self, Self::Exact)
    }

    /// Whether all streams of an expert have the same size.
    pub fn is_fixed_size(self) -> bool {
        matches!(self, Self::Exact | Self::Int8)
    }

    /// The size in bytes, header included, that no stream of `elements` gradients exceeds. It is the exact size if the
    /// codec [has a fixed size](Self::is_fixed_size).
    pub fn max_bytes(&self, element: Element, elements: usize) -> usize {
        match *self {
            Self::Exact => exact_bytes(element, elements),
            Self::Int8 => int8_bytes(elements),
            Self::TopK { density } => sparse_bytes(density, elements),
        }
    }

    /// The expected size in bytes, header included, of a stream of `elements` gradients.
    pub fn expected_bytes(&self, element: Element, elements: usize) -> f64 {
        match *self {
            Self::Exact => exact_bytes(element, elements) as f64,
            Self::Int8 => int8_bytes(elements) as f64,
            Self::TopK { density } => expected_sparse_bytes(density, elements),
        }
    }

    /// Checks the parameters of the codec.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            Self::Exact | Self::Int8 => Ok(()),
            Self::TopK { density } => check_density(density),
        }
    }
}

/// The number of elements to keep: `density * elements`, rounded, and at least 1.
pub(crate) fn kept(density: f64, elements: usize) -> usize {
    ((density * elements as f64).round() as usize).max(1).min(elements)
}

fn exact_bytes(element: Element, elements: usize) -> usize {
    element.row_bytes(elements).saturating_add(HEADER_BYTES as usize)
}

fn int8_bytes(elements: usize) -> usize {
    int8::payload_bytes(elements).saturating_add(HEADER_BYTES as usize)
}

fn sparse_bytes(density: f64, elements: usize) -> usize {
    Format::SMALLEST.max_bytes(elements, kept(density, elements)).try_into().unwrap_or(usize::MAX)
}

/// Expected bits of a Rice-coded value. Values of Gaussian residuals take 7.2 bits at 1 % density and 7.9 at 10 %;
/// those of gradients with error feedback about 5, because most sums are near the smallest that is kept.
const VALUE_BITS: f64 = 7.5;

fn expected_sparse_bytes(density: f64, elements: usize) -> f64 {
    if elements == 0 {
        return (HEADER_BYTES + 4) as f64;
    }
    let kept = kept(density, elements) as f64;
    let blocks = elements.div_ceil(BLOCK) as f64;
    let index_bits = Format::SMALLEST.entry_bits(kept / elements as f64) - 16.0;
    // Per block 12 bytes of sizes, and on average half a byte of padding after the indices and after the values.
    HEADER_BYTES as f64 + 4.0 + 13.0 * blocks + kept * (index_bits + VALUE_BITS) / 8.0
}

fn check_density(density: f64) -> Result<()> {
    if is_density(density) { Ok(()) } else { Err(CallerError::Density { given: density.to_string() }.into()) }
}

fn is_density(density: f64) -> bool {
    density > 0.0 && density <= 1.0
}

/// A text that names no codec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecParseError {
    /// The name is not that of a codec.
    #[error("unknown codec `{given}`: the codecs are {possible}")]
    Name {
        /// The name that was given.
        given: String,
        /// The names that are possible.
        possible: &'static str,
    },
    /// The codec has no such parameter.
    #[error("unknown parameter `{given}` of the codec `{codec}`: write {possible}")]
    Parameter {
        /// The codec's name.
        codec: &'static str,
        /// The parameter that was given.
        given: String,
        /// The forms that are possible.
        possible: &'static str,
    },
    /// The density is not a number in its range.
    #[error("density `{given}` of the codec `{codec}`: it must be a number, more than 0 and at most 1")]
    Density {
        /// The codec's name.
        codec: &'static str,
        /// The text that was given.
        given: String,
    },
    /// The number of complete streams is not a number in its range.
    #[error("warm_up `{given}`: it must be a whole number from 1 to {max}", max = u32::MAX)]
    WarmUp {
        /// The text that was given.
        given: String,
    },
}

impl FromStr for WeightCodec {
    type Err = CodecParseError;

    fn from_str(text: &str) -> Result<Self, CodecParseError> {
        let parts = Parts::of(text);
        match parts.name {
            "exact" => parts.alone("exact").map(|()| Self::Exact),
            "int8" => parts.alone("int8").map(|()| Self::Int8),
            "delta" => {
                let warm_up = match parts.parameter {
                    None => DEFAULT_WARM_UP,
                    Some(parameter) => {
                        let given = parameter.strip_prefix("warm_up=").ok_or_else(|| {
                            let possible = "`delta:DENSITY,warm_up=STREAMS`";
                            CodecParseError::Parameter {
                                codec: "delta",
                                given: parameter.to_owned(),
                                possible,
                            }
                        })?;
                        let warm_up = given.parse().ok().filter(|&warm_up| warm_up > 0);
                        warm_up.ok_or_else(|| CodecParseError::WarmUp { given: given.to_owned() })?
                    }
                };
                Ok(Self::Delta { density: parts.density("delta")?, warm_up })
            }
            "shared" => {
                parts.only_density("shared", "`shared:DENSITY`").map(|density| Self::Shared { density })
            }
            given => {
                let possible = "`exact`, `int8`, `delta` and `shared`";
                Err(CodecParseError::Name { given: given.to_owned(), possible })
            }
        }
    }
}

impl FromStr for GradientCodec {
    type Err = CodecParseError;

    fn from_str(text: &str) -> Result<Self, CodecParseError> {
        let parts = Parts::of(text);
        match parts.name {
            "exact" => parts.alone("exact").map(|()| Self::Exact),
            "int8" => parts.alone("int8").map(|()| Self::Int8),
            "topk" => parts.only_density("topk", "`topk:DENSITY`").map(|density| Self::TopK { density }),
            given => {
                let possible = "`exact`, `int8` and `topk`";
                Err(CodecParseError::Name { given: given.to_owned(), possible })
            }
        }
    }
}

/// A text of the form `name:density,parameter`, where density and parameter are optional.
#[derive(Debug)]
struct Parts<'a> {
    name: &'a str,
    density: Option<&'a str>,
    parameter: Option<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(text: &'a str) -> Self {
        let (text, parameter) = match text.split_once(',') {
            Some((text, parameter)) => (text, Some(parameter)),
            None => (text, None),
        };
        match text.split_once(':') {
            Some((name, density)) => Self { name, density: Some(density), parameter },
            None => Self { name: text, density: None, parameter },
        }
    }

    fn alone(&self, codec: &'static str) -> Result<(), CodecParseError> {
        match self.density.or(self.parameter) {
            None => Ok(()),
            Some(given) => {
                let possible = "the name alone";
                Err(CodecParseError::Parameter { codec, given: given.to_owned(), possible })
            }
        }
    }

    fn only_density(&self, codec: &'static str, possible: &'static str) -> Result<f64, CodecParseError> {
        match self.parameter {
            None => self.density(codec),
            Some(given) => Err(CodecParseError::Parameter { codec, given: given.to_owned(), possible }),
        }
    }

    fn density(&self, codec: &'static str) -> Result<f64, CodecParseError> {
        let Some(given) = self.density else { return Ok(DEFAULT_DENSITY) };
        let density = given.parse().ok().filter(|&density| is_density(density));
        density.ok_or_else(|| CodecParseError::Density { codec, given: given.to_owned() })
    }
}

/// Writes the text that [`FromStr`] reads.
impl fmt::Display for WeightCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Int8 => f.write_str("int8"),
            Self::Delta { density, warm_up: DEFAULT_WARM_UP } => write!(f, "delta:{density}"),
            Self::Delta { density, warm_up } => write!(f, "delta:{density},warm_up={warm_up}"),
            Self::Shared { density } => write!(f, "shared:{density}"),
        }
    }
}

/// Writes the text that [`FromStr`] reads.
impl fmt::Display for GradientCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Int8 => f.write_str("int8"),
            Self::TopK { density } => write!(f, "topk:{density}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GradientEncoder, SharedExpert, WeightEncoder};
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn texts_name_codecs_and_survive_the_round_trip() {
        let delta = |density, warm_up| WeightCodec::Delta { density, warm_up };
        for (text, codec, shown) in [
            ("exact", WeightCodec::Exact, "exact"),
            ("int8", WeightCodec::Int8, "int8"),
            ("delta", delta(0.01, 1), "delta:0.01"),
            ("delta:0.25", delta(0.25, 1), "delta:0.25"),
            ("delta,warm_up=2", delta(0.01, 2), "delta:0.01,warm_up=2"),
            ("delta:1e-3,warm_up=4", delta(0.001, 4), "delta:0.001,warm_up=4"),
            ("shared", WeightCodec::Shared { density: 0.01 }, "shared:0.01"),
            ("shared:1", WeightCodec::Shared { density: 1.0 }, "shared:1"),
        ] {
            assert_eq!(text.parse(), Ok(codec));
            assert_eq!(codec.to_string(), shown);
            assert_eq!(shown.parse(), Ok(codec));
        }
        for (text, codec, shown) in [
            ("exact", GradientCodec::Exact, "exact"),
            ("int8", GradientCodec::Int8, "int8"),
            ("topk", GradientCodec::TopK { density: 0.01 }, "topk:0.01"),
            ("topk:0.5", GradientCodec::TopK { density: 0.5 }, "topk:0.5"),
        ] {
            assert_eq!(text.parse(), Ok(codec));
            assert_eq!(codec.to_string(), shown);
        }
    }

    #[test]
    fn errors_of_texts_say_what_is_possible() {
        let weights = |text: &str| text.parse::<WeightCodec>().unwrap_err().to_string();
        let gradients = |text: &str| text.parse::<GradientCodec>().unwrap_err().to_string();
        assert_eq!(
            weights("topk"),
            "unknown codec `topk`: the codecs are `exact`, `int8`, `delta` and `shared`"
        );
        assert_eq!(gradients(""), "unknown codec ``: the codecs are `exact`, `int8` and `topk`");
        assert_eq!(weights("int8:0.5"), "unknown parameter `0.5` of the codec `int8`: write the name alone");
        assert_eq!(
            weights("delta:0.5,steps=3"),
            "unknown parameter `steps=3` of the codec `delta`: write `delta:DENSITY,warm_up=STREAMS`"
        );
        assert!(weights("shared:0.1,warm_up=1").contains("`shared:DENSITY`"));
        for density in ["0", "-0.1", "1.01", "nan", "inf", "x", ""] {
            let expected = "it must be a number, more than 0 and at most 1";
            assert!(weights(&format!("delta:{density}")).contains(expected), "{density}");
            assert!(gradients(&format!("topk:{density}")).contains(expected), "{density}");
        }
        for warm_up in ["0", "-1", "x", "4294967296"] {
            let text = weights(&format!("delta:0.1,warm_up={warm_up}"));
            assert_eq!(text, format!("warm_up `{warm_up}`: it must be a whole number from 1 to 4294967295"));
        }
    }

    #[test]
    fn the_expected_bytes_of_whole_blocks_add_up() {
        for codec in ["delta:0.25", "shared:0.5"] {
            let codec: WeightCodec = codec.parse().unwrap();
            let of = |blocks: usize| codec.expected_bytes(Element::F32, blocks * BLOCK);
            let one = of(2) - of(1);
            assert!(((of(65) - of(1)) / one - 64.0).abs() < 0.01, "{codec}: {one} bytes a block");
        }
    }

    #[test]
    fn only_codecs_without_a_selection_have_streams_of_one_size() {
        let fixed = |text: &str| text.parse::<WeightCodec>().unwrap().is_fixed_size();
        assert_eq!(["exact", "int8", "delta", "shared"].map(fixed), [true, true, false, false]);
    }

    #[test]
    fn encoders_refuse_numbers_out_of_range() {
        for density in [0.0, -1.0, 1.5, f64::NAN] {
            let error = CallerError::Density { given: density.to_string() };
            let new = |codec| WeightEncoder::<f32>::new(codec, 10).unwrap_err();
            assert_eq!(new(WeightCodec::Delta { density, warm_up: 1 }), error.clone().into());
            assert_eq!(new(WeightCodec::Shared { density }), error.clone().into());
            assert_eq!(GradientEncoder::new(GradientCodec::TopK { density }, 10).unwrap_err(), error.into());
        }
        let codec = WeightCodec::Delta { density: 0.1, warm_up: 0 };
        assert_eq!(WeightEncoder::<f32>::new(codec, 10).unwrap_err(), CallerError::NoWarmUp.into());
    }

    #[test]
    fn at_least_one_element_is_kept() {
        for (density, elements, expected) in
            [(0.01, 1, 1), (0.01, 149, 1), (0.01, 151, 2), (1.0, 7, 7), (0.07, 100, 7), (0.5, 0, 0)]
        {
            assert_eq!(kept(density, elements), expected, "{density} of {elements}");
        }
    }

    #[test]
    fn sizes_of_impossible_experts_saturate() {
        for text in ["exact", "int8", "delta:1", "shared:1"] {
            let codec: WeightCodec = text.parse().unwrap();
            assert_eq!(codec.max_bytes(Element::F32, usize::MAX), usize::MAX, "{text}");
            codec.regular_bytes(Element::F32, usize::MAX);
            codec.expected_bytes(Element::F32, usize::MAX);
        }
        for text in ["exact", "int8", "topk:1", "topk:0.01"] {
            let codec: GradientCodec = text.parse().unwrap();
            assert!(codec.max_bytes(Element::F32, usize::MAX) > 1 << 56, "{text}");
            codec.expected_bytes(Element::F32, usize::MAX);
        }
    }

    #[test]
    fn only_exact_is_lossless() {
        for text in ["exact", "int8", "delta", "shared"] {
            assert_eq!(text.parse::<WeightCodec>().unwrap().is_lossless(), text == "exact", "{text}");
        }
        for text in ["exact", "int8", "topk"] {
            assert_eq!(text.parse::<GradientCodec>().unwrap().is_lossless(), text == "exact", "{text}");
        }
    }

    #[test]
    fn streams_are_about_as_large_as_expected() {
        // Sums of uniform numbers are bell-shaped.
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let elements = 400_000;
        let mut bell = || (0..12).map(|_| rng.random::<f32>() - 0.5).sum::<f32>();
        let weights: Vec<f32> = (0..elements).map(|_| bell()).collect();
        let shared = SharedExpert::from_weights(vec![0.0; elements]).unwrap();
        for codec in ["exact", "int8", "shared:0.001", "shared:0.01", "shared:0.1"] {
            let codec: WeightCodec = codec.parse().unwrap();
            let mut bytes = Vec::new();
            WeightEncoder::new(codec, elements).unwrap().encode(&weights, Some(&shared), &mut bytes).unwrap();
            let (size, expected) = (bytes.len() as f64, codec.expected_bytes(Element::F32, elements));
            let bound = if codec.is_fixed_size() { 0.0 } else { 0.1 };
            assert!((size / expected - 1.0).abs() <= bound, "{codec}: {size} {expected}");
            assert!(bytes.len() <= codec.max_bytes(Element::F32, elements));
        }
        for codec in ["exact", "int8", "topk:0.001", "topk:0.01", "topk:0.1"] {
            let codec: GradientCodec = codec.parse().unwrap();
            let mut bytes = Vec::new();
            GradientEncoder::new(codec, elements).unwrap().encode(&weights, &mut bytes).unwrap();
            let (size, expected) = (bytes.len() as f64, codec.expected_bytes(Element::F32, elements));
            let bound = if codec.is_fixed_size() { 0.0 } else { 0.1 };
            assert!((size / expected - 1.0).abs() <= bound, "{codec}: {size} {expected}");
        }
        for elements in [0, 1] {
            let codec = WeightCodec::Shared { density: 1.0 };
            let expected = codec.expected_bytes(Element::F32, elements);
            assert!(
                expected.is_finite() && expected <= codec.max_bytes(Element::F32, elements) as f64,
                "{expected}"
            );
        }
    }
}
