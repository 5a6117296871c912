//! The codecs by which experts and gradients travel, as the planner prices them.

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result};
use crate::limits;
use crate::model::ElementType;
use crate::units::{Bytes, BytesPerSecond, Seconds};

use super::time::{decode_time, encode_time};

/// Elements that share a scale of 4 bytes in the codec `int8`.
const INT8_BLOCK: f64 = 128.0;

/// How weights or gradients are compressed. As text: `int8`, or a number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(into = "Written", try_from = "Written")]
pub enum Compression {
    /// 8 bits per element and an f32 scale per 128 elements: 1.94x for bf16, 3.88x for f32.
    Int8,
    /// A ratio: uncompressed bytes over bytes sent. With 1, values are sent exactly. Above 1, weights are sent as a
    /// shared expert and the largest differences from it, and gradients as their largest elements.
    By(f64),
}

/// The form of a compression in JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Ratio(f64),
    Name(String),
}

impl From<Compression> for Written {
    fn from(compression: Compression) -> Self {
        match compression {
            Compression::Int8 => Self::Name("int8".into()),
            Compression::By(ratio) => Self::Ratio(ratio),
        }
    }
}

impl TryFrom<Written> for Compression {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Ratio(ratio) => Ok(Self::By(ratio)),
            Written::Name(name) if name == "int8" => Ok(Self::Int8),
            Written::Name(name) => Err(format!("unknown codec `{name}`: write `int8` or a ratio")),
        }
    }
}

impl From<f64> for Compression {
    fn from(ratio: f64) -> Self {
        Self::By(ratio)
    }
}

/// Writes `int8` or `50x`.
impl std::fmt::Display for Compression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Int8 => f.write_str("int8"),
            Self::By(ratio) => write!(f, "{ratio}x"),
        }
    }
}

impl Compression {
    /// No compression.
    pub const EXACT: Self = Self::By(1.0);

    /// Bytes of elements of this type over bytes sent for them.
    pub fn ratio(self, element: ElementType) -> f64 {
        match self {
            Self::Int8 => element.bytes() * INT8_BLOCK / (INT8_BLOCK + 4.0),
            Self::By(ratio) => ratio,
        }
    }

    /// Whether receivers get the sender's values.
    pub fn is_exact(self) -> bool {
        matches!(self, Self::By(ratio) if ratio <= 1.0)
    }

    /// Whether the codec of weights has a shared expert.
    pub fn has_shared_expert(self) -> bool {
        matches!(self, Self::By(ratio) if ratio > 1.0)
    }

    /// Time to encode `bytes` of elements of this type. `int8` reads them and writes the stream; for a ratio see
    /// [`encode_time`].
    pub fn encode_time(self, bytes: Bytes, element: ElementType, memory: BytesPerSecond) -> Seconds {
        match self {
            _ if self.is_exact() => Seconds::ZERO,
            Self::Int8 => bytes * (1.0 + 1.0 / self.ratio(element)) / memory,
            Self::By(_) => encode_time(bytes, memory),
        }
    }

    /// Time to decode `bytes` of elements of this type. `int8` reads the stream and writes them; for a ratio see
    /// [`decode_time`].
    pub fn decode_time(self, bytes: Bytes, element: ElementType, memory: BytesPerSecond) -> Seconds {
        match self {
            _ if self.is_exact() => Seconds::ZERO,
            Self::Int8 => bytes * (1.0 + 1.0 / self.ratio(element)) / memory,
            Self::By(_) => decode_time(bytes, memory),
        }
    }

    /// Checks the range of the ratio. `what` names the option.
    pub(super) fn check(self, what: &str) -> Result<()> {
        match self {
            Self::By(value) if !limits::COMPRESSION.allows(value) => {
                let needed = format!("{}; 1 means no compression", limits::COMPRESSION);
                Err(PlanError::Quantity { what: what.into(), value, needed })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_has_a_scale_per_block() {
        assert_eq!(Compression::Int8.ratio(ElementType::F32), 512.0 / 132.0);
        assert_eq!(Compression::Int8.ratio(ElementType::Bf16), 256.0 / 132.0);
        assert_eq!(Compression::By(50.0).ratio(ElementType::Bf16), 50.0);
        let memory = BytesPerSecond::from_gb_per_s(1.0);
        let encode = Compression::Int8.encode_time(Bytes::from_gb(1.0), ElementType::F32, memory);
        assert!((encode.0 - (1.0 + 132.0 / 512.0)).abs() < 1e-12, "{encode}");
        assert_eq!(
            Compression::EXACT.encode_time(Bytes::from_gb(1.0), ElementType::F32, memory),
            Seconds::ZERO
        );
        assert!(Compression::EXACT.is_exact() && !Compression::Int8.is_exact());
        assert!(Compression::By(2.0).has_shared_expert() && !Compression::Int8.has_shared_expert());
    }

    #[test]
    fn compressions_survive_json() {
        for (compression, text) in [(Compression::Int8, "\"int8\""), (Compression::By(50.0), "50.0")] {
            assert_eq!(serde_json::to_string(&compression).unwrap(), text);
            assert_eq!(serde_json::from_str::<Compression>(text).unwrap(), compression);
        }
        let wrong = serde_json::from_str::<Compression>("\"int4\"").unwrap_err().to_string();
        assert!(wrong.contains("unknown codec `int4`"), "{wrong}");
    }
}
