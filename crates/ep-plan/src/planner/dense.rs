//! The codec of dense gradients between datacenters, which is that of the runtime's `DenseSettings`.

use ep::Element;
use ep_codec::GradientCodec;

use super::compression::Compression;
use super::time::{decode_time, encode_time};
use crate::error::{PlanError, Result};
use crate::model::ElementType;
use crate::units::{Bytes, BytesPerSecond, Seconds};

/// Elements of a stream that is so long that every density above 10⁻⁷ keeps some of them.
const LONG: usize = 1 << 28;

/// `b_d`: bytes that travel for an element of a sum, without the headers of streams and messages.
///
/// 4 for `exact`, 1 + 4/128 for `int8`, and what [`GradientCodec::expected_bytes`] expects for `topk`.
pub(crate) fn element_bytes(codec: GradientCodec) -> f64 {
    // What a stream has once, such as its header, cancels out.
    let more = codec.expected_bytes(Element::F32, 2 * LONG) - codec.expected_bytes(Element::F32, LONG);
    more / LONG as f64
}

/// Time to encode a share of `share` bytes in f32, and to decode one stream per datacenter: a GPU adds only decoded
/// sums, including that of its own datacenter.
///
/// Like the `int8` codec of experts, `int8` reads its input and writes its output; for `topk` see [`encode_time`] and
/// [`decode_time`].
pub(crate) fn codec_time(
    codec: GradientCodec,
    share: Bytes,
    datacenters: f64,
    memory: BytesPerSecond,
) -> Seconds {
    let (encode, decode) = match codec {
        GradientCodec::Exact => return Seconds::ZERO,
        GradientCodec::Int8 => (
            Compression::Int8.encode_time(share, ElementType::F32, memory),
            Compression::Int8.decode_time(share, ElementType::F32, memory),
        ),
        _ => (encode_time(share, memory), decode_time(share, memory)),
    };
    encode + decode * datacenters
}

/// Checks the numbers of the codec. `what` names the option.
pub(super) fn check(codec: GradientCodec, what: &str) -> Result<()> {
    match codec {
        GradientCodec::TopK { density } if !(density > 0.0 && density <= 1.0) => Err(PlanError::Quantity {
            what: format!("density of {what}"),
            value: density,
            needed: "more than 0 and at most 1".into(),
        }),
        _ => Ok(()),
    }
}

/// The codec as text in JSON: `int8` or `topk:0.01`.
pub(crate) mod text {
    use ep_codec::GradientCodec;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(codec: &GradientCodec, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(codec)
    }

    pub(crate) fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<GradientCodec, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }

    /// For a codec that may be absent.
    pub(crate) mod optional {
        use super::{Deserialize, Deserializer, GradientCodec, Serialize, Serializer};

        #[derive(Serialize, Deserialize)]
        struct Text(#[serde(with = "super")] GradientCodec);

        pub(crate) fn serialize<S: Serializer>(
            codec: &Option<GradientCodec>,
            serializer: S,
        ) -> Result<S::Ok, S::Error> {
            codec.map(Text).serialize(serializer)
        }

        pub(crate) fn deserialize<'d, D: Deserializer<'d>>(
            deserializer: D,
        ) -> Result<Option<GradientCodec>, D::Error> {
            Ok(Option::<Text>::deserialize(deserializer)?.map(|Text(codec)| codec))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;

    #[test]
    fn bytes_of_an_element_are_those_of_long_streams() {
        assert_eq!(element_bytes(GradientCodec::Exact), 4.0);
        assert_eq!(element_bytes(GradientCodec::Int8), 1.0 + 4.0 / 128.0);
        // What `ep_codec` expects for Gaussian values; sums with error feedback take 0.016 and 0.15 bytes.
        for (density, bytes) in [(0.01, 0.0196), (0.1, 0.156)] {
            let found = element_bytes(GradientCodec::TopK { density });
            assert!((found / bytes - 1.0).abs() < 0.02, "{density}: {found}");
        }
        for density in [f64::MIN_POSITIVE, 1e-12, 1.0] {
            let found = element_bytes(GradientCodec::TopK { density });
            assert!(found > 0.0 && found < 2.0, "{density}: {found}");
        }
    }

    #[test]
    fn codecs_take_time_unless_they_are_exact() {
        let (share, memory) = (Bytes::from_gb(1.0), BytesPerSecond::from_gb_per_s(1.0));
        assert_eq!(codec_time(GradientCodec::Exact, share, 2.0, memory), Seconds::ZERO);
        // Encoded once, decoded once per datacenter.
        let int8 = codec_time(GradientCodec::Int8, share, 3.0, memory);
        assert!((int8.0 - 4.0 * (1.0 + 132.0 / 512.0)).abs() < 1e-12, "{int8}");
        assert_eq!(codec_time(GradientCodec::TopK { density: 0.1 }, share, 2.0, memory), Seconds(9.0));
    }

    #[test]
    fn a_codec_survives_json_and_a_wrong_one_is_named() {
        for (codec, text) in [
            (None, "null"),
            (Some(GradientCodec::Exact), "\"exact\""),
            (Some(GradientCodec::TopK { density: 0.25 }), "\"topk:0.25\""),
        ] {
            let json = format!("{{\"dense_gradient_compression\":{text}}}");
            let options: Options = serde_json::from_str(&json).unwrap();
            assert_eq!(options.dense_gradient_compression, codec);
            let again = serde_json::to_string(&options).unwrap();
            assert_eq!(again.contains(&json[1..json.len() - 1]), codec.is_some(), "{again}");
            assert_eq!(serde_json::from_str::<Options>(&again).unwrap(), options);
        }
        let wrong = |text: &str| {
            let json = format!("{{\"dense_gradient_compression\":{text}}}");
            serde_json::from_str::<Options>(&json).unwrap_err().to_string()
        };
        assert!(wrong("\"int4\"").contains("unknown codec `int4`"));
        assert!(wrong("\"topk:2\"").contains("more than 0 and at most 1"));
        assert!(wrong("4").contains("expected a string"));
    }
}
