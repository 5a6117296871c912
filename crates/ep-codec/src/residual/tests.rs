//! Compares the codec with a slow implementation of its definition.

use ep::numeric::{bf16_to_f32, f32_to_bf16};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::content::{Content, StreamCodec};
use crate::stream::{Header, StreamInfo, inspect, seal};
use crate::{CallerError, Corruption, Error, HEADER_BYTES, Operand, Result, SharedExpert, Weight};

const HEADER: usize = HEADER_BYTES as usize;

fn formats() -> impl Iterator<Item = Format> {
    let indices = [IndexFormat::U32, IndexFormat::U16, IndexFormat::Rice];
    let values = [ValueFormat::F32, ValueFormat::Bf16, ValueFormat::Bf16Rice];
    indices.into_iter().flat_map(move |index| values.map(|value| Format { index, value }))
}

/// Bell-shaped random weights: shared weights of about 0.02, and an expert that differs from them by about 0.01.
fn weights<T: Weight>(length: usize, seed: u64) -> (SharedExpert<T>, Vec<T>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut bell = |scale: f32| scale * (0..6).map(|_| rng.random::<f32>() - 0.5).sum::<f32>();
    let shared: Vec<f32> = (0..length).map(|_| bell(0.03)).collect();
    let expert = shared.iter().map(|&weight| T::from_f32(weight + bell(0.015))).collect();
    (SharedExpert::from_weights(shared.into_iter().map(T::from_f32).collect()).unwrap(), expert)
}

fn exact(k: usize, format: Format) -> Encoder {
    Encoder { k, selection: Selection::Exact, format }
}

fn encode<T: Weight>(encoder: Encoder, expert: &[T], shared: &SharedExpert<T>) -> (Vec<u8>, Stats) {
    let mut bytes = Vec::new();
    let stats = encoder.encode(expert, shared, &mut bytes).unwrap();
    assert_eq!(stats.bytes, bytes.len());
    (bytes, stats)
}

fn decode<T: Weight>(bytes: &[u8], shared: &SharedExpert<T>) -> Result<Vec<T>> {
    let mut out = vec![T::from_f32(-7.0); shared.weights().len()];
    decode_add(bytes, shared, &mut out)?;
    Ok(out)
}

fn bits<T: Weight>(weights: &[T]) -> &[u8] {
    bytemuck::cast_slice(weights)
}

/// Indices in the order in which residuals are kept, by sorting.
fn order<T: Weight>(expert: &[T], shared: &[T]) -> Vec<usize> {
    let magnitude = |i: usize| (expert[i].to_f32() - shared[i].to_f32()).abs();
    let mut order: Vec<usize> = (0..expert.len()).collect();
    order.sort_by(|&a, &b| magnitude(b).total_cmp(&magnitude(a)).then(a.cmp(&b)));
    order
}

/// The decoded weights by definition.
fn expected<T: Weight>(expert: &[T], shared: &[T], kept: &[usize], value: ValueFormat) -> Vec<T> {
    let mut out = shared.to_vec();
    for &i in kept {
        let residual = expert[i].to_f32() - shared[i].to_f32();
        let residual = match value {
            ValueFormat::F32 => residual,
            ValueFormat::Bf16 | ValueFormat::Bf16Rice => bf16_to_f32(f32_to_bf16(residual)),
        };
        out[i] = T::from_f32(shared[i].to_f32() + residual);
    }
    out
}

fn check_every_format<T: Weight>(shared: &SharedExpert<T>, expert: &[T], ks: &[usize]) {
    let order = order(expert, shared.weights());
    let length = expert.len();
    for (format, &k) in formats().flat_map(|format| ks.iter().map(move |k| (format, k))) {
        let (bytes, stats) = encode(exact(k, format), expert, shared);
        assert_eq!(stats.kept, k);
        let last = k.checked_sub(1).map(|last| order[last]);
        assert_eq!(stats.smallest, last.map(|i| (expert[i].to_f32() - shared.weights()[i].to_f32()).abs()));
        let most = format.max_bytes(length, k);
        let size = bytes.len() as u64;
        assert!(if format.is_fixed_size() { size == most } else { size <= most }, "{format:?} {size} {most}");
        let info = inspect(&bytes).unwrap();
        let expected_info = StreamInfo {
            content: Content::Weights,
            codec: StreamCodec::Shared,
            element: T::ELEMENT,
            format: Some(format),
            elements: length,
            kept: k,
            bytes: bytes.len(),
            base: Some(shared.fingerprint()),
            fingerprint: info.fingerprint,
        };
        assert_eq!(info, expected_info);
        let decoded = decode(&bytes, shared).unwrap();
        let expected = expected(expert, shared.weights(), &order[..k], format.value);
        assert!(bits(&decoded) == bits(&expected), "{format:?}, P = {length}, k = {k}");
    }
}

#[test]
fn every_format_decodes_to_the_definition() {
    for length in [0, 1, 31, 32, 33, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77] {
        let mut ks = vec![0, 1, length / 100, length / 3, length.saturating_sub(1), length];
        ks.retain(|&k| k <= length);
        let (shared, expert) = weights::<u16>(length, 1);
        check_every_format(&shared, &expert, &ks);
        let (shared, expert) = weights::<f32>(length, 2);
        check_every_format(&shared, &expert, &ks);
    }
}

#[test]
fn the_error_is_the_dropped_residual() {
    // Differences of these bf16 weights are exact in f32, and so are their sums: kept weights are restored exactly.
    let (shared, expert) = weights::<u16>(100_000, 3);
    let residual = |i: usize| f64::from(bf16_to_f32(expert[i]) - bf16_to_f32(shared.weights()[i]));
    let order = order(&expert, shared.weights());
    for k in [0, 1, 1000, 50_000, 100_000] {
        let mut dropped = order[k..].to_vec();
        dropped.sort_unstable();
        let dropped: f64 =
            dropped.into_iter().map(|i| residual(i).powi(2)).fold(0.0, |sum, square| sum + square);
        for index in [IndexFormat::U32, IndexFormat::U16, IndexFormat::Rice] {
            let (bytes, _) = encode(exact(k, Format { index, value: ValueFormat::F32 }), &expert, &shared);
            let decoded = decode(&bytes, &shared).unwrap();
            assert!(order[..k].iter().all(|&i| decoded[i] == expert[i]));
            let pairs = expert.iter().zip(&decoded);
            let squares = pairs.map(|(&e, &d)| f64::from(bf16_to_f32(e) - bf16_to_f32(d)).powi(2));
            let error = squares.fold(0.0, |sum: f64, square| sum + square);
            assert_eq!(error.to_bits(), dropped.to_bits());
        }
    }
}

#[test]
fn streams_have_the_sizes_of_the_formulas() {
    // Residuals that are cheap to compute: their values do not matter here.
    let mixed = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 9;
    let format = Format { index: IndexFormat::U32, value: ValueFormat::F32 };
    let expert: Vec<f32> = (0..4_718_592).map(|i| mixed(i) as f32).collect();
    let shared = SharedExpert::from_weights(vec![0.0; expert.len()]).unwrap();
    assert_eq!(encode(exact(47_185, format), &expert, &shared).0.len(), HEADER + 377_484);

    let format = Format { index: IndexFormat::U32, value: ValueFormat::Bf16 };
    let expert: Vec<u16> = (0..44_040_192).map(|i| mixed(i) as u16 & 0xBFFF).collect();
    let shared = SharedExpert::from_weights(vec![0; expert.len()]).unwrap();
    assert_eq!(encode(exact(293_601, format), &expert, &shared).0.len(), HEADER + 1_761_610);
}

#[test]
fn codes_are_as_small_as_expected() {
    let length = 8 * BLOCK;
    let k = length / 100;
    let (shared, expert) = weights::<u16>(length, 4);
    let entry_bits = |value| {
        let format = Format { index: IndexFormat::Rice, value };
        (8.0 * encode(exact(k, format), &expert, &shared).0.len() as f64 / k as f64, format.entry_bits(0.01))
    };
    // In addition to the codes: 40 + 4 bytes, 6 bytes per block, and on average half a byte of padding per block.
    let (bits, expected) = entry_bits(ValueFormat::Bf16);
    assert!((bits - expected - (44.0 + 8.0 * 6.5) * 8.0 / k as f64).abs() < 0.03, "{bits} {expected}");
    let (bits, expected) = entry_bits(ValueFormat::Bf16Rice);
    assert!(bits < expected - 7.0, "{bits} {expected}");
}

#[test]
fn threads_do_not_change_the_bytes() {
    let (shared, expert) = weights::<u16>(9 * BLOCK + 1234, 5);
    let slices = [&expert[..], shared.weights(), &expert];
    let in_pool = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mean = SharedExpert::mean_of(&slices).unwrap();
            let mut bytes = Vec::new();
            for selection in [Selection::Exact, Selection::Approximate] {
                for format in formats() {
                    let encoder = Encoder { k: 6000, selection, format };
                    encoder.encode(&expert, &shared, &mut bytes).unwrap();
                }
            }
            let decoded = decode(&bytes[..inspect(&bytes).unwrap().bytes], &shared).unwrap();
            (mean, bytes, decoded)
        })
    };
    let one = in_pool(1);
    for threads in [2, 3, 8] {
        assert!(in_pool(threads) == one, "{threads} threads");
    }
}

#[test]
fn approximate_keeps_the_largest_and_at_most_k() {
    let (shared, expert) = weights::<f32>(5 * BLOCK + 99, 6);
    for k in [0, 1, 50, 3000, 30_000, 300_000, expert.len()] {
        let encoder = Encoder { k, selection: Selection::Approximate, format: Format::SMALLEST };
        let (bytes, stats) = encode(encoder, &expert, &shared);
        assert!(stats.kept <= k);
        // With k = 1 and 50 too few of the sample are kept for an estimate, and the selection is exact.
        assert_eq!(stats.kept < k, k >= 3000, "{} of {k}", stats.kept);
        // The selection aims at k (1 - 2 s); 5 s below that is far out. The sample is always the same.
        let s = (expert.len() as f64 / (262_144.0 * k.max(1) as f64)).sqrt();
        assert!(stats.kept as f64 >= k as f64 * (1.0 - 7.0 * s), "{} of {k}", stats.kept);
        assert_eq!(bytes, encode(exact(stats.kept, Format::SMALLEST), &expert, &shared).0);
    }
    // If all residuals are equal, all pass the threshold, and the first k are kept.
    let shared = SharedExpert::from_weights(vec![1.0; expert.len()]).unwrap();
    let encoder = Encoder { k: 3000, selection: Selection::Approximate, format: Format::SMALLEST };
    assert_eq!(encode(encoder, &vec![2.0; expert.len()], &shared).1.kept, 3000);
}

#[test]
fn zeros_subnormals_and_equal_values() {
    let tiny = |bits| f32::from_bits(bits);
    let experts = [
        vec![0.0; 100],
        vec![-0.0; 100],
        vec![1.0; 100],
        vec![-1.0; 100],
        [tiny(1), tiny(0x8000_0001), tiny(0x007F_FFFF), -0.0, 0.0, f32::MIN_POSITIVE].repeat(20),
        [f32::MAX / 2.0, f32::MIN / 2.0, 1.0, tiny(3)].repeat(20),
    ];
    for expert in experts {
        let zeros = SharedExpert::from_weights(vec![-0.0; expert.len()]).unwrap();
        let itself = SharedExpert::mean_of(&[&expert[..]]).unwrap();
        let smaller = SharedExpert::from_weights(expert.iter().map(|weight| weight / 3.0).collect()).unwrap();
        for shared in [zeros, itself, smaller] {
            check_every_format(&shared, &expert, &[0, 1, 50, expert.len()]);
        }
    }
    // Of equal magnitudes, the lower indices are kept, across blocks and signs.
    let expert: Vec<f32> = (0..2 * BLOCK).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
    let shared = SharedExpert::from_weights(vec![0.0; expert.len()]).unwrap();
    let (bytes, _) = encode(exact(BLOCK + 3, Format::SMALLEST), &expert, &shared);
    let decoded = decode(&bytes, &shared).unwrap();
    assert_eq!(decoded[..BLOCK + 3], expert[..BLOCK + 3]);
    assert!(decoded[BLOCK + 3..].iter().all(|&weight| weight == 0.0));
}

#[test]
fn values_that_are_not_finite_are_reported_and_the_output_is_unchanged() {
    let length = 2 * BLOCK;
    let refused = |expert: &[f32], shared: &SharedExpert<f32>, k, value, what, index| {
        let mut out = vec![1, 2, 3];
        let result = exact(k, Format { index: IndexFormat::Rice, value }).encode(expert, shared, &mut out);
        assert_eq!(result, Err(CallerError::NotFinite { what, index }.into()));
        assert_eq!(out, [1, 2, 3]);
    };
    let (shared, mut expert) = weights::<f32>(length, 7);
    expert[length - 1] = f32::NAN;
    refused(&expert, &shared, 0, ValueFormat::F32, Operand::Expert, length - 1);
    expert[BLOCK + 5] = f32::NEG_INFINITY;
    for k in [0, 1, 100, length] {
        refused(&expert, &shared, k, ValueFormat::F32, Operand::Expert, BLOCK + 5);
    }
    // Finite weights whose difference, or whose rounded residual, is not finite.
    let shared = SharedExpert::from_weights(vec![-f32::MAX; 10]).unwrap();
    let mut expert = vec![-1.0; 10];
    expert[7] = f32::MAX;
    refused(&expert, &shared, 0, ValueFormat::F32, Operand::Residual, 7);
    let shared = SharedExpert::from_weights(vec![0.0; 10]).unwrap();
    refused(&expert, &shared, 1, ValueFormat::Bf16, Operand::Rounded, 7);
    refused(&expert, &shared, 1, ValueFormat::Bf16Rice, Operand::Rounded, 7);
    check_every_format_of_f32_values(&shared, &expert);
    // In the second block.
    let shared = SharedExpert::from_weights(vec![0.0; length]).unwrap();
    let mut expert = vec![0.0; length];
    expert[BLOCK + 7] = f32::MAX;
    refused(&expert, &shared, 1, ValueFormat::Bf16, Operand::Rounded, BLOCK + 7);
}

fn check_every_format_of_f32_values(shared: &SharedExpert<f32>, expert: &[f32]) {
    for format in formats().filter(|format| format.value == ValueFormat::F32) {
        let (bytes, _) = encode(exact(expert.len(), format), expert, shared);
        assert_eq!(decode(&bytes, shared).unwrap(), expert);
    }
}

#[test]
fn wrong_arguments_are_errors_of_the_caller() {
    let (shared, expert) = weights::<f32>(100, 8);
    let (other, _) = weights::<f32>(100, 9);
    let (longer, _) = weights::<f32>(101, 8);
    let (bytes, _) = encode(exact(5, Format::SMALLEST), &expert, &shared);
    let error = |error: CallerError| Error::Caller(error);

    let length = |what, expected, found| error(CallerError::Length { what, expected, found });
    assert_eq!(decode(&bytes, &longer), Err(length(Operand::Shared, 100, 101)));
    assert_eq!(decode_add(&bytes, &shared, &mut [0.0; 99]), Err(length(Operand::Output, 100, 99)));
    let mut out = Vec::new();
    let result = exact(5, Format::SMALLEST).encode(&expert[1..], &shared, &mut out);
    assert_eq!(result, Err(length(Operand::Expert, 100, 99)));
    let result = exact(101, Format::SMALLEST).encode(&expert, &shared, &mut out);
    assert_eq!(result, Err(error(CallerError::TooManyKept { k: 101, elements: 100 })));

    let (stream, given) = (shared.fingerprint(), other.fingerprint());
    assert_eq!(decode(&bytes, &other), Err(error(CallerError::OtherShared { stream, given })));
    let (halves, _) = weights::<u16>(100, 8);
    assert!(matches!(decode(&bytes, &halves), Err(Error::Caller(CallerError::Element { .. }))));
}

#[test]
fn streams_follow_each_other() {
    let (shared, first) = weights::<u16>(5000, 10);
    let (_, second) = weights::<u16>(5000, 11);
    let encoder = exact(100, Format::SMALLEST);
    let mut bytes = Vec::new();
    encoder.encode(&first, &shared, &mut bytes).unwrap();
    encoder.encode(&second, &shared, &mut bytes).unwrap();
    let (one, other) = bytes.split_at(inspect(&bytes).unwrap().bytes);
    assert_eq!(one, encode(encoder, &first, &shared).0);
    assert_eq!(other, encode(encoder, &second, &shared).0);
    let (expected, found) = (one.len() as u64, bytes.len() as u64);
    assert_eq!(decode(&bytes, &shared), Err(Corruption::TrailingBytes { expected, found }.into()));
}

#[test]
fn truncated_or_changed_streams_are_refused() {
    let (shared, expert) = weights::<u16>(BLOCK + 100, 12);
    for format in formats() {
        let (bytes, _) = encode(exact(20, format), &expert, &shared);
        let untouched = vec![u16::from_f32(-7.0); expert.len()];
        let refused = |bytes: &[u8]| {
            let mut out = untouched.clone();
            let result = decode_add(bytes, &shared, &mut out);
            assert!(matches!(result, Err(Error::Corrupted(_))), "{result:?}");
            assert!(out == untouched);
        };
        for length in 0..bytes.len() {
            refused(&bytes[..length]);
        }
        for bit in 0..8 * bytes.len() {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            refused(&bytes);
        }
    }
}

/// Decodes a payload under a matching header, so that only defects of the payload itself can cause an error.
fn decode_sealed(mut stream: Vec<u8>, format: Format, shared: &SharedExpert<f32>) -> Result<Vec<f32>> {
    let header = Header {
        content: Content::Weights,
        codec: StreamCodec::Shared,
        element: f32::ELEMENT,
        elements: shared.weights().len(),
        kept: Some((0, format)),
        base: Some(shared.fingerprint()),
    };
    seal(&mut stream, header);
    let decoded = decode(&stream, shared);
    assert!(!matches!(decoded, Err(Error::Caller(_))), "{decoded:?}");
    if let Ok(decoded) = &decoded {
        assert!(decoded.iter().all(|weight| weight.is_finite()));
    }
    decoded
}

#[test]
fn wrong_payloads_with_a_right_checksum_are_refused() {
    let (shared, expert) = weights::<f32>(2 * BLOCK - 10, 13);
    for format in formats() {
        let (bytes, _) = encode(exact(30, format), &expert, &shared);
        assert_eq!(decode_sealed(bytes.clone(), format, &shared), decode(&bytes, &shared));
        for length in HEADER..bytes.len() {
            assert!(matches!(
                decode_sealed(bytes[..length].to_vec(), format, &shared),
                Err(Error::Corrupted(_))
            ));
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(matches!(decode_sealed(longer, format, &shared), Err(Error::Corrupted(_))));
    }
}

/// The formats that do not code indices: 4 bytes per index in the expert, or 2 bytes per position in the block.
#[test]
fn indices_that_repeat_descend_or_lie_outside_are_refused() {
    // The second block is short. Its entries are the last three.
    let (shared, mut expert) = weights::<f32>(BLOCK + 100, 14);
    let length = expert.len();
    expert.copy_from_slice(shared.weights());
    for index in [length - 30, length - 20, length - 10] {
        expert[index] += 1.0;
    }
    for value in [ValueFormat::F32, ValueFormat::Bf16, ValueFormat::Bf16Rice] {
        for (index, bytes, first) in [(IndexFormat::U32, 4, 0), (IndexFormat::U16, 2, BLOCK)] {
            let format = Format { index, value };
            let (stream, _) = encode(exact(3, format), &expert, &shared);
            // The bytes of these indices in the stream.
            let of = |indices: [usize; 3]| -> Vec<u8> {
                indices.iter().flat_map(|index| (index - first).to_le_bytes()[..bytes].to_vec()).collect()
            };
            let right = [length - 30, length - 20, length - 10];
            let places: Vec<usize> =
                (HEADER..stream.len()).filter(|&at| stream[at..].starts_with(&of(right))).collect();
            let &[place] = &places[..] else { panic!("{format:?}: {places:?}") };
            let decoded = |indices| {
                let mut stream = stream.clone();
                stream[place..place + 3 * bytes].copy_from_slice(&of(indices));
                decode_sealed(stream, format, &shared)
            };
            assert!(decoded([length - 31, length - 20, length - 1]).is_ok(), "{format:?}");
            for wrong in [
                [length - 30, length - 30, length - 10],
                [length - 20, length - 30, length - 10],
                [length - 30, length - 20, length],
            ] {
                assert!(matches!(decoded(wrong), Err(Error::Corrupted(_))), "{format:?} {wrong:?}");
            }
        }
    }
}

fn finite() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |value| value.is_finite())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_weights_decode_to_the_definition(
        pairs in prop::collection::vec((finite(), finite()), 0..200), part in 0.0..=1.0_f64,
    ) {
        let (expert, shared): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
        let k = (part * expert.len() as f64) as usize;
        let shared = SharedExpert::from_weights(shared).unwrap();
        let order = order(&expert, shared.weights());
        for format in formats() {
            let expected = expected(&expert, shared.weights(), &order[..k], format.value);
            let mut bytes = Vec::new();
            match exact(k, format).encode(&expert, &shared, &mut bytes) {
                Ok(_) => prop_assert!(bits(&decode(&bytes, &shared).unwrap()) == bits(&expected)),
                Err(Error::Caller(CallerError::NotFinite { what, index })) => {
                    let residual = expert[index] - shared.weights()[index];
                    let is_right = match what {
                        Operand::Residual => !residual.is_finite(),
                        Operand::Rounded => residual.is_finite() && !expected[index].is_finite(),
                        _ => false,
                    };
                    prop_assert!(is_right, "{:?} at {}", what, index);
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    #[test]
    fn any_damage_is_refused_or_decoded(
        number in 0..9_usize, k in 0..60_usize, damage in prop::collection::vec((any::<u16>(), any::<u8>()), 1..6),
    ) {
        let (shared, expert) = weights::<f32>(BLOCK + 40, 14);
        let format = formats().nth(number).unwrap();
        let (mut bytes, _) = encode(exact(k, format), &expert, &shared);
        let payload = bytes.len() - HEADER;
        for (at, byte) in damage {
            bytes[HEADER + usize::from(at) % payload] = byte;
        }
        let _ = decode_sealed(bytes, format, &shared);
    }

    #[test]
    fn any_payload_is_refused_or_decoded(
        number in 0..9_usize, payload in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let (shared, _) = weights::<f32>(300, 15);
        let stream = [&[0; HEADER], &payload[..]].concat();
        let _ = decode_sealed(stream, formats().nth(number).unwrap(), &shared);
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let (shared, _) = weights::<u16>(300, 16);
        prop_assert!(matches!(decode(&bytes, &shared), Err(Error::Corrupted(_))));
    }
}
