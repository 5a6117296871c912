//! Damaged and misplaced bytes: every decoder refuses them, and changes nothing that the caller holds.

use proptest::prelude::*;

use super::stream::reseal;
use super::*;

const LENGTH: usize = (1 << 16) + 300;

/// Numbers that are cheap to compute, of both signs.
fn numbers<T: Weight>(length: usize, seed: u32) -> Vec<T> {
    let mixed = |i: usize| (i as u32 ^ seed).wrapping_mul(2_654_435_761) >> 8;
    (0..length).map(|i| T::from_f32(mixed(i) as f32 / 16_777_216.0 - 0.5)).collect()
}

/// The receiving side of one expert: a decoder with a replica, a shared expert, and a sum of gradients.
#[derive(Clone, PartialEq, Debug)]
struct Receiver {
    decoder: WeightDecoder,
    replica: Vec<f32>,
    shared: SharedExpert<f32>,
    sum: Vec<f32>,
}

impl Receiver {
    /// Streams of all codecs, and a receiver that can decode each of them.
    fn with_streams(length: usize) -> (Self, Vec<Vec<u8>>) {
        let weights: Vec<f32> = numbers(length, 1);
        let shared = SharedExpert::from_weights(numbers(length, 2)).unwrap();
        let mut receiver = Self {
            decoder: WeightDecoder::new(length),
            replica: vec![3.0; length],
            shared,
            sum: numbers(length, 3),
        };
        let mut streams = Vec::new();
        for codec in ["exact", "int8", "shared:0.001", "delta:0.001"] {
            let mut encoder = WeightEncoder::new(codec.parse().unwrap(), length).unwrap();
            let mut bytes = Vec::new();
            encoder.encode(&weights, Some(&receiver.shared), &mut bytes).unwrap();
            if codec.starts_with("delta") {
                receiver.decoder.decode::<f32>(&bytes, None, &mut receiver.replica).unwrap();
                bytes.clear();
                encoder.encode(&numbers(length, 4), None, &mut bytes).unwrap();
            }
            streams.push(bytes);
        }
        for codec in ["exact", "int8", "topk:0.001"] {
            let mut encoder = GradientEncoder::new(codec.parse().unwrap(), length).unwrap();
            let mut bytes = Vec::new();
            encoder.encode::<u16>(&numbers(length, 5), &mut bytes).unwrap();
            streams.push(bytes);
        }
        (receiver, streams)
    }

    fn decode(&mut self, bytes: &[u8]) -> Result<StreamInfo> {
        match inspect(bytes)?.content {
            Content::Weights => self.decoder.decode(bytes, Some(&self.shared), &mut self.replica),
            Content::Gradients => add_gradient(bytes, &mut self.sum),
        }
    }

    /// Decodes bytes that may be damaged. After an error nothing has changed, after success all weights are finite.
    fn decode_damaged(&mut self, bytes: &[u8]) -> Result<StreamInfo> {
        let before = self.clone();
        let result = self.decode(bytes);
        match &result {
            Err(_) => assert!(*self == before),
            Ok(StreamInfo { codec: StreamCodec::Exact, .. }) => {}
            Ok(_) => assert!(self.replica.iter().chain(&self.sum).all(|number| number.is_finite())),
        }
        result
    }
}

#[test]
fn streams_decode_with_bytes_after_them() {
    let (mut receiver, streams) = Receiver::with_streams(LENGTH);
    // The stream of changes goes first, because the others replace the replica.
    let order = [3, 0, 1, 2, 4, 5, 6];
    let message: Vec<u8> = order.iter().flat_map(|&number| streams[number].clone()).collect();
    let mut rest = &message[..];
    for number in order {
        let info = receiver.decode(rest).unwrap();
        assert_eq!(info.bytes, streams[number].len());
        rest = &rest[info.bytes..];
    }
    assert!(rest.is_empty());
}

#[test]
fn truncated_or_changed_streams_are_refused() {
    let (receiver, streams) = Receiver::with_streams(200);
    for stream in &streams {
        let refused = |bytes: &[u8]| {
            let result = receiver.clone().decode_damaged(bytes);
            assert!(matches!(result, Err(Error::Corrupted(_))), "{result:?}");
        };
        (0..stream.len()).for_each(|length| refused(&stream[..length]));
        for bit in 0..8 * stream.len() {
            let mut bytes = stream.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            refused(&bytes);
        }
    }
}

#[test]
fn payloads_of_another_length_are_refused() {
    let (receiver, streams) = Receiver::with_streams(200);
    for stream in &streams {
        let base = u64::from_le_bytes(*stream[24..].first_chunk().unwrap());
        for length in (40..stream.len()).chain([stream.len() + 1]) {
            let mut bytes = stream.clone();
            bytes.resize(length, 0);
            reseal(&mut bytes, base);
            let result = receiver.clone().decode_damaged(&bytes);
            assert!(matches!(result, Err(Error::Corrupted(_))), "{result:?}");
        }
    }
}

#[test]
fn scales_and_values_that_overflow_are_refused() {
    let (receiver, streams) = Receiver::with_streams(200);
    for number in [1, 5] {
        for scale in [f32::NAN, f32::INFINITY, -1.0, f32::MAX / 127.0 * 1.01] {
            let mut bytes = streams[number].clone();
            bytes[44..48].copy_from_slice(&scale.to_le_bytes());
            reseal(&mut bytes, 0);
            let result = receiver.clone().decode_damaged(&bytes);
            assert_eq!(result, Err(Corruption::Values { block: 1 }.into()), "{scale}");
        }
        // A code that no encoder writes, with the largest scale, decodes to the largest number.
        let mut bytes = streams[number].clone();
        bytes[44..48].copy_from_slice(&(f32::MAX / 127.0).next_down().to_le_bytes());
        bytes[48 + 150] = 0x80;
        reseal(&mut bytes, 0);
        receiver.clone().decode_damaged(&bytes).unwrap();
    }
}

#[test]
fn a_change_that_overflows_is_refused() {
    let mut decoder = WeightDecoder::new(2);
    let mut replica = [0.0_f32; 2];
    let mut bytes = Vec::new();
    let mut encoder = WeightEncoder::new("delta:1".parse().unwrap(), 2).unwrap();
    encoder.encode(&[3e38_f32, 0.0], None, &mut bytes).unwrap();
    let info = decoder.decode(&bytes, None, &mut replica).unwrap();
    // A change by +3e38, of a mirror that began at zero.
    let mut other = WeightEncoder::new("delta:1".parse().unwrap(), 2).unwrap();
    other.encode(&[0.0_f32; 2], None, &mut Vec::new()).unwrap();
    let mut change = Vec::new();
    other.encode(&[3e38_f32, 0.0], None, &mut change).unwrap();
    reseal(&mut change, info.fingerprint);
    let before = (decoder.clone(), replica);
    assert_eq!(decoder.decode(&change, None, &mut replica), Err(Corruption::Values { block: 0 }.into()));
    assert_eq!((decoder, replica), before);
}

#[test]
fn streams_of_other_content_type_or_length_are_errors_of_the_caller() {
    let (receiver, streams) = Receiver::with_streams(200);
    let Receiver { mut decoder, mut replica, mut sum, .. } = receiver;
    let content = |stream, expected| Err(Error::Caller(CallerError::Content { stream, expected }));
    let result = add_gradient(&streams[1], &mut sum);
    let text = result.as_ref().unwrap_err().to_string();
    assert!(text.contains("weights") && text.contains("gradients"), "{text}");
    assert_eq!(result, content(Content::Weights, Content::Gradients));
    let result = decoder.decode(&streams[5], None, &mut replica);
    assert_eq!(result, content(Content::Gradients, Content::Weights));
    let length = |what, expected, found| Err(Error::Caller(CallerError::Length { what, expected, found }));
    assert_eq!(add_gradient(&streams[5], &mut sum[1..]), length(Operand::Sum, 200, 199));
    assert_eq!(decoder.decode(&streams[1], None, &mut replica[1..]), length(Operand::Replica, 200, 199));
    let result = WeightDecoder::new(201).decode(&streams[1], None, &mut replica);
    assert_eq!(result, length(Operand::Expert, 201, 200));
    let element = CallerError::Element { stream: f32::ELEMENT, given: u16::ELEMENT };
    assert_eq!(decoder.decode(&streams[1], None, &mut [0_u16; 200]), Err(element.into()));
    let info = inspect(&streams[1]).unwrap();
    let other_codec = CallerError::OtherCodec { found: info.codec };
    let shared = SharedExpert::from_weights(replica.clone()).unwrap();
    assert_eq!(residual::decode_add(&streams[1], &shared, &mut replica), Err(other_codec.into()));
    assert!(WeightEncoder::<f32>::new(WeightCodec::Int8, u32::MAX as usize + 1).is_err());
    assert!(GradientEncoder::new(GradientCodec::Exact, u32::MAX as usize + 1).is_err());
}

#[test]
fn threads_do_not_change_bytes_or_results() {
    let in_pool = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let (mut receiver, streams) = Receiver::with_streams(3 * LENGTH);
            for number in [3, 1, 2, 4, 5, 6] {
                receiver.decode(&streams[number]).unwrap();
            }
            (receiver, streams)
        })
    };
    let one = in_pool(1);
    for threads in [2, 5] {
        assert!(in_pool(threads) == one, "{threads} threads");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_damage_under_a_right_checksum_is_refused_or_decoded(
        number in 0..7_usize, damage in prop::collection::vec((any::<u16>(), any::<u8>()), 1..6),
    ) {
        let (mut receiver, streams) = Receiver::with_streams(700);
        let mut bytes = streams[number].clone();
        let base = u64::from_le_bytes(*bytes[24..].first_chunk().unwrap());
        for (at, byte) in damage {
            // Codes in the header, and the payload.
            let at = usize::from(at) % (bytes.len() - 37);
            bytes[if at < 3 { 5 + at } else { 37 + at }] = byte;
        }
        reseal(&mut bytes, base);
        let _ = receiver.decode_damaged(&bytes);
    }

    #[test]
    fn any_bytes_are_no_stream_and_no_state(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(inspect(&bytes).is_err());
        prop_assert!(WeightDecoder::restore(3, &bytes).is_err());
        prop_assert!(GradientEncoder::restore(GradientCodec::Int8, 3, &bytes).is_err());
    }
}
