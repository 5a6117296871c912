//! Compares the codecs with slow implementations of their definitions.

use ep::Element;
use ep::numeric::{bf16_to_f32, f32_to_bf16};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::state::{Owner, State};
use super::*;

const HEADER: usize = HEADER_BYTES as usize;

/// Bell-shaped random numbers of about the given magnitude.
fn bell<T: Weight>(length: usize, scale: f32, seed: u64) -> Vec<T> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut one = || scale * (0..6).map(|_| rng.random::<f32>() - 0.5).sum::<f32>();
    (0..length).map(|_| T::from_f32(one())).collect()
}

/// Adds a small random change to each weight.
fn step<T: Weight>(weights: &mut [T], scale: f32, seed: u64) {
    let changes: Vec<f32> = bell(weights.len(), scale, seed);
    for (weight, change) in weights.iter_mut().zip(changes) {
        *weight = T::from_f32(weight.to_f32() + change);
    }
}

fn bits<T: Weight>(weights: &[T]) -> &[u8] {
    bytemuck::cast_slice(weights)
}

/// The values of int8 by definition, in f32, before rounding to a type.
fn int8_values(elements: &[f32], largest: f32) -> Vec<f32> {
    let block = |block: &[f32]| -> Vec<f32> {
        let absmax = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let scale = absmax / 127.0;
        // Nearly f32::MAX / 127, so that 127 * scale is finite.
        let scale = if scale < f32::MIN_POSITIVE { 0.0 } else { scale.min(2.679_388_4e36) };
        let product = |x: f32| if scale == 0.0 { 0.0 } else { x * (1.0 / scale) };
        let code = |x: f32| f32::from(product(x).round_ties_even() as i8);
        block.iter().map(|&x| (code(x) * scale).clamp(-largest, largest)).collect()
    };
    elements.chunks(128).flat_map(block).collect()
}

/// The indices of the k values of largest magnitude, by sorting; of equal ones the lower.
fn largest(values: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].abs().total_cmp(&values[a].abs()).then(a.cmp(&b)));
    order.truncate(k);
    order
}

fn to_f32<T: Weight>(weights: &[T]) -> Vec<f32> {
    weights.iter().map(|weight| weight.to_f32()).collect()
}

fn encode<T: Weight>(encoder: &mut WeightEncoder<T>, weights: &[T]) -> (Vec<u8>, StreamInfo) {
    let mut bytes = vec![9];
    let info = encoder.encode(weights, None, &mut bytes).unwrap();
    assert_eq!(bytes.remove(0), 9);
    assert_eq!((info.bytes, info), (bytes.len(), inspect(&bytes).unwrap()));
    (bytes, info)
}

fn delta(density: f64, warm_up: u32) -> WeightCodec {
    WeightCodec::Delta { density, warm_up }
}

#[test]
fn exact_restores_every_bit() {
    let weights: Vec<f32> = [f32::NAN, f32::INFINITY, -0.0, 1.5, f32::from_bits(1)].repeat(70_000);
    let mut encoder = WeightEncoder::new(WeightCodec::Exact, weights.len()).unwrap();
    let (bytes, info) = encode(&mut encoder, &weights);
    assert_eq!((info.codec, info.base, info.format), (StreamCodec::Exact, None, None));
    assert_eq!(bytes.len(), WeightCodec::Exact.max_bytes(f32::ELEMENT, weights.len()));
    assert_eq!(bytes.len(), HEADER + 4 * weights.len());
    let mut replica = vec![0.0; weights.len()];
    let mut decoder = WeightDecoder::new(weights.len());
    assert_eq!(decoder.decode(&bytes, None, &mut replica), Ok(info));
    assert!(bits(&replica) == bits(&weights));
    assert_eq!(decoder.fingerprint(), Some(info.fingerprint));
}

fn check_int8<T: Weight>(weights: &[T]) {
    let mut encoder = WeightEncoder::new(WeightCodec::Int8, weights.len()).unwrap();
    let (bytes, _) = encode(&mut encoder, weights);
    assert_eq!(bytes.len(), HEADER + weights.len() + 4 * weights.len().div_ceil(128));
    assert_eq!(bytes.len(), WeightCodec::Int8.max_bytes(T::ELEMENT, weights.len()));
    let mut replica = vec![T::from_f32(7.0); weights.len()];
    WeightDecoder::new(weights.len()).decode(&bytes, None, &mut replica).unwrap();
    let expected: Vec<T> =
        int8_values(&to_f32(weights), T::LARGEST).into_iter().map(|value| T::from_f32(value)).collect();
    assert!(bits(&replica) == bits(&expected), "{} weights", weights.len());
    assert!(replica.iter().all(|weight| weight.to_f32().is_finite()));
}

#[test]
fn int8_decodes_to_the_definition() {
    for length in [0, 1, 127, 128, 129, 1000, 65_536, 65_537, 200_001] {
        check_int8(&bell::<f32>(length, 0.03, 1));
        check_int8(&bell::<u16>(length, 0.03, 2));
    }
}

#[test]
fn int8_of_zeros_subnormals_and_the_largest_numbers() {
    let unit = |units: u32| f32::from_bits(units);
    for block in [
        vec![0.0, -0.0],
        vec![unit(1), -unit(1), 0.0],
        (0..300).map(unit).collect(),
        vec![unit(63), unit(5)],
        vec![unit(64), unit(5)],
        vec![unit(190), -unit(190), unit(1)],
        vec![f32::MIN_POSITIVE, unit(1)],
        vec![f32::MAX, -f32::MAX, f32::MAX / 2.0, 1.0, 0.0],
        vec![1.0, 0.5 / 127.0, 1.5 / 127.0, 2.5 / 127.0],
    ] {
        check_int8(&block);
        let halves: Vec<u16> = block.iter().map(|&x| f32_to_bf16(x.clamp(-3.3e38, 3.3e38))).collect();
        check_int8(&halves);
    }
    // Every bf16 that is finite.
    let all: Vec<u16> = (0..=u16::MAX).filter(|&half| bf16_to_f32(half).is_finite()).collect();
    check_int8(&all);
    // Zeros are exactly zero.
    let mut encoder = WeightEncoder::new(WeightCodec::Int8, 3).unwrap();
    let (bytes, _) = encode(&mut encoder, &[0.0, 3.0, -0.0]);
    let mut replica = [1.0_f32; 3];
    WeightDecoder::new(3).decode(&bytes, None, &mut replica).unwrap();
    assert_eq!(replica.map(f32::to_bits), [0, 3.0_f32.to_bits(), 0]);
}

/// Steps a Delta encoder and a decoder, and compares both with the definition.
fn check_delta<T: Weight>(length: usize, density: f64, warm_up: u32, steps: u64, starts_over: u64) {
    let codec = delta(density, warm_up);
    let mut encoder = WeightEncoder::new(codec, length).unwrap();
    let mut decoder = WeightDecoder::new(length);
    let mut weights: Vec<T> = bell(length, 0.03, 3);
    let mut replica = vec![T::from_f32(-1.0); length];
    let mut mirror: Vec<f32> = Vec::new();
    assert_eq!(encoder.mirror(), None);
    for number in 0..steps {
        if number == starts_over {
            encoder.start_over();
        }
        let (bytes, info) = encode(&mut encoder, &weights);
        assert!(bytes.len() <= codec.max_bytes(T::ELEMENT, length));
        let is_complete = number < u64::from(warm_up) || number == starts_over;
        let weights32 = to_f32(&weights);
        if is_complete {
            assert_eq!((info.codec, info.base), (StreamCodec::Int8, None));
            mirror = int8_values(&weights32, T::LARGEST);
        } else {
            assert_eq!((info.codec, info.base), (StreamCodec::Delta, decoder.fingerprint()));
            let changes: Vec<f32> = weights32.iter().zip(&mirror).map(|(w, m)| w - m).collect();
            let k = ((density * length as f64).round() as usize).max(1);
            assert_eq!(info.kept, k);
            for at in largest(&changes, k) {
                mirror[at] += bf16_to_f32(f32_to_bf16(changes[at]));
            }
        }
        mirror.iter_mut().for_each(|weight| *weight = T::from_f32(*weight).to_f32());
        assert_eq!(decoder.decode(&bytes, None, &mut replica), Ok(info));
        assert_eq!(decoder.fingerprint(), Some(info.fingerprint));
        assert!(bits(&to_f32(&replica)) == bits(&mirror), "step {number}");
        assert!(bits(&replica) == bits(encoder.mirror().unwrap()), "step {number}");
        step(&mut weights, 0.003, 100 + number);
    }
}

#[test]
fn delta_decodes_to_the_definition_over_many_steps() {
    check_delta::<f32>(1, 0.5, 1, 4, 9);
    check_delta::<f32>(1000, 0.05, 1, 8, 5);
    check_delta::<u16>(1000, 0.05, 3, 8, 6);
    check_delta::<u16>(70_000, 0.01, 2, 5, 9);
    check_delta::<f32>(70_000, 1.0, 1, 4, 9);
}

#[test]
fn delta_at_full_density_is_close_after_one_step() {
    let mut encoder = WeightEncoder::new(delta(1.0, 1), 500).unwrap();
    let mut weights: Vec<f32> = bell(500, 1.0, 4);
    encode(&mut encoder, &weights);
    step(&mut weights, 0.1, 5);
    encode(&mut encoder, &weights);
    let mirror = encoder.mirror().unwrap();
    let error = weights.iter().zip(mirror).map(|(w, m)| (w - m).abs()).fold(0.0, f32::max);
    assert!(error < 0.2 / 256.0, "{error}");
}

#[test]
fn a_stream_for_other_weights_is_refused_and_the_decoder_stays_usable() {
    let mut weights: Vec<u16> = bell(300, 1.0, 6);
    let mut encoder = WeightEncoder::new(delta(0.1, 1), 300).unwrap();
    let streams: Vec<(Vec<u8>, StreamInfo)> = (0..4)
        .map(|number| {
            step(&mut weights, 0.1, number);
            encode(&mut encoder, &weights)
        })
        .collect();
    let mut decoder = WeightDecoder::new(300);
    let mut replica = vec![5_u16; 300];
    let refused = |decoder: &mut WeightDecoder, replica: &mut [u16], number: usize| {
        let before = (decoder.clone(), replica.to_vec());
        let (stream, held) = (streams[number].1.base.unwrap(), decoder.fingerprint());
        let error = Error::Caller(CallerError::OtherBase { stream, held });
        assert_eq!(decoder.decode(&streams[number].0, None, replica), Err(error));
        assert_eq!((decoder.clone(), replica.to_vec()), before);
    };
    refused(&mut decoder, &mut replica, 1);
    decoder.decode(&streams[0].0, None, &mut replica).unwrap();
    refused(&mut decoder, &mut replica, 2);
    decoder.decode(&streams[1].0, None, &mut replica).unwrap();
    refused(&mut decoder, &mut replica, 1);
    refused(&mut decoder, &mut replica, 3);
    decoder.decode(&streams[2].0, None, &mut replica).unwrap();
    decoder.decode(&streams[3].0, None, &mut replica).unwrap();
    assert_eq!(replica, encoder.mirror().unwrap());
}

#[test]
fn a_mirror_brings_a_new_receiver_to_where_the_others_are() {
    let mut weights: Vec<f32> = bell(1000, 1.0, 5);
    let mut encoder = WeightEncoder::new(delta(0.05, 1), 1000).unwrap();
    let (mut old, mut new) = (WeightDecoder::new(1000), WeightDecoder::new(1000));
    let (mut held, mut fresh) = (vec![0.0; 1000], vec![f32::NAN; 1000]);
    assert_eq!(encoder.complete(&mut Vec::new()), Err(CallerError::NoMirror.into()));
    for seed in 0..5 {
        step(&mut weights, 0.1, seed);
        let (bytes, info) = encode(&mut encoder, &weights);
        old.decode(&bytes, None, &mut held).unwrap();
        if seed == 2 {
            let mut mirror = Vec::new();
            let sent = encoder.complete(&mut mirror).unwrap();
            assert_eq!(new.decode(&mirror, None, &mut fresh), Ok(sent));
            assert_eq!((sent.codec, sent.fingerprint), (StreamCodec::Mirror, info.fingerprint));
            assert_eq!(inspect(&mirror), Ok(sent));
        } else if seed > 2 {
            new.decode(&bytes, None, &mut fresh).unwrap();
        }
    }
    assert_eq!(bits(&fresh), bits(&held));
    assert_eq!(new.fingerprint(), old.fingerprint());
    let encoder = WeightEncoder::<f32>::new(WeightCodec::Int8, 1000).unwrap();
    assert_eq!(encoder.complete(&mut Vec::new()), Err(CallerError::NoMirror.into()));
}

#[test]
fn shared_streams_need_their_shared_expert() {
    let weights: Vec<f32> = bell(1000, 1.0, 7);
    let shared = SharedExpert::from_weights(bell(1000, 1.0, 8)).unwrap();
    let other = SharedExpert::from_weights(bell(1000, 1.0, 9)).unwrap();
    let mut encoder = WeightEncoder::new(WeightCodec::Shared { density: 0.1 }, 1000).unwrap();
    let mut bytes = Vec::new();
    assert_eq!(encoder.encode(&weights, None, &mut bytes), Err(CallerError::NoShared.into()));
    let info = encoder.encode(&weights, Some(&shared), &mut bytes).unwrap();
    assert_eq!((info.codec, info.kept, info.base), (StreamCodec::Shared, 100, Some(shared.fingerprint())));
    assert!(bytes.len() <= WeightCodec::Shared { density: 0.1 }.max_bytes(f32::ELEMENT, 1000));

    let mut decoder = WeightDecoder::new(1000);
    let mut replica = vec![0.0; 1000];
    assert_eq!(decoder.decode(&bytes, None, &mut replica), Err(CallerError::NoShared.into()));
    let (stream, given) = (shared.fingerprint(), other.fingerprint());
    let error = CallerError::OtherShared { stream, given };
    assert_eq!(decoder.decode(&bytes, Some(&other), &mut replica), Err(error.into()));
    assert_eq!(replica, vec![0.0; 1000]);
    assert_eq!(decoder.decode(&bytes, Some(&shared), &mut replica), Ok(info));
    let mut expected = vec![0.0; 1000];
    residual::decode_add(&bytes, &shared, &mut expected).unwrap();
    assert_eq!(replica, expected);
    assert_ne!(replica, shared.weights());
}

/// The values of a gradient codec for x by definition: zeros where the stream has no value.
fn gradient_values(codec: GradientCodec, x: &[f32]) -> Vec<f32> {
    match codec {
        GradientCodec::Exact => x.to_vec(),
        GradientCodec::Int8 => int8_values(x, f32::MAX),
        GradientCodec::TopK { density } => {
            let mut values = vec![0.0; x.len()];
            let limit = bf16_to_f32(0x7F7F);
            let k = ((density * x.len() as f64).round() as usize).max(1);
            for at in largest(x, k.min(x.len())) {
                values[at] = bf16_to_f32(f32_to_bf16(x[at])).clamp(-limit, limit);
            }
            values
        }
    }
}

fn check_gradients<T: Weight>(codec: GradientCodec, gradients: &[Vec<T>]) {
    let length = gradients[0].len();
    let mut encoder = GradientEncoder::new(codec, length).unwrap();
    let mut carry = vec![0.0_f32; length];
    let mut sum: Vec<f32> = bell(length, 1.0, 10);
    let mut expected_sum = sum.clone();
    for gradient in gradients {
        let mut bytes = Vec::new();
        let info = encoder.encode(gradient, &mut bytes).unwrap();
        assert_eq!((info.content, info.element, info.bytes), (Content::Gradients, T::ELEMENT, bytes.len()));
        let most = codec.max_bytes(T::ELEMENT, length);
        assert!(if codec.is_fixed_size() { bytes.len() == most } else { bytes.len() <= most });
        let x: Vec<f32> = gradient.iter().zip(&carry).map(|(g, c)| g.to_f32() + c).collect();
        let values = gradient_values(codec, &x);
        carry = x.iter().zip(&values).map(|(x, value)| x - value).collect();
        expected_sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += value);
        assert_eq!(add_gradient(&bytes, &mut sum), Ok(info));
        assert!(bits(&sum) == bits(&expected_sum), "{codec}");
        let expected_carry: &[f32] = if codec == GradientCodec::Exact { &[] } else { &carry };
        // Adding zero where the stream has no value changes -0 to +0 in the oracle only.
        assert_eq!(encoder.carry(), expected_carry, "{codec}");
    }
}

const GRADIENT_CODECS: [GradientCodec; 4] = [
    GradientCodec::Exact,
    GradientCodec::Int8,
    GradientCodec::TopK { density: 0.02 },
    GradientCodec::TopK { density: 1.0 },
];

#[test]
fn gradients_decode_to_the_definition_with_error_feedback() {
    for codec in GRADIENT_CODECS {
        for length in [1, 128, 1000, 70_000] {
            check_gradients(codec, &(0..4).map(|seed| bell::<f32>(length, 0.01, seed)).collect::<Vec<_>>());
            check_gradients(codec, &(0..4).map(|seed| bell::<u16>(length, 0.01, seed)).collect::<Vec<_>>());
        }
        check_gradients(
            codec,
            &[vec![f32::MAX, -3.39e38, 1.0, f32::from_bits(3)], vec![-1.0, 2.0, 0.0, 3.0]],
        );
    }
}

#[test]
fn what_gradients_leave_out_arrives_later() {
    // Multiples of 1/64 of small integers: all sums and differences are exact in f32, so nothing is rounded away.
    let length = 400;
    for codec in &GRADIENT_CODECS[2..] {
        let mut encoder = GradientEncoder::new(*codec, length).unwrap();
        let mut decoded = vec![0.0; length];
        let mut total = vec![0.0; length];
        for seed in 0..30 {
            let gradient: Vec<f32> =
                bell::<f32>(length, 2.0, seed).into_iter().map(|x| (x * 64.0).round() / 64.0).collect();
            total.iter_mut().zip(&gradient).for_each(|(total, g)| *total += g);
            let mut bytes = Vec::new();
            encoder.encode(&gradient, &mut bytes).unwrap();
            add_gradient(&bytes, &mut decoded).unwrap();
            let sums = decoded.iter().zip(encoder.carry()).map(|(decoded, carry)| decoded + carry);
            assert!(sums.eq(total.iter().copied()), "{codec}");
        }
    }
}

#[test]
fn a_state_with_another_number_of_values_is_refused() {
    for count in [1, 2, 4] {
        let owner = Owner::WeightEncoder;
        let state = State { owner, element: Some(Element::F32), elements: 3, fingerprint: None, complete: 0 };
        let refused = State::restore::<f32>(&state.save(&vec![1.0_f32; count]), owner, 3);
        assert!(matches!(refused, Err(Error::Corrupted(Corruption::Sections))), "{count}: {refused:?}");
    }
}

#[test]
fn a_state_of_a_decoder_that_contradicts_itself_is_refused() {
    let restore = |element, fingerprint, values: &[f32]| {
        let state = State { owner: Owner::WeightDecoder, element, elements: 3, fingerprint, complete: 0 };
        WeightDecoder::restore(3, &state.save(values))
    };
    assert!(restore(None, None, &[]).is_ok() && restore(Some(Element::F32), Some(7), &[]).is_ok());
    for (element, fingerprint, values) in [
        (Some(Element::F32), None, &[][..]),
        (None, Some(7), &[]),
        (Some(Element::F32), Some(7), &[1.0, 2.0, 3.0]),
        (Some(Element::F32), None, &[1.0, 2.0, 3.0]),
    ] {
        let refused = restore(element, fingerprint, values);
        assert!(matches!(refused, Err(Error::Corrupted(Corruption::State))), "{refused:?}");
    }
}

#[test]
fn numbers_that_are_not_finite_are_refused_and_nothing_changes() {
    for codec in [WeightCodec::Int8, delta(0.1, 1), WeightCodec::Shared { density: 0.1 }] {
        let shared = SharedExpert::from_weights(vec![0.5_f32; 70_000]).unwrap();
        let mut encoder = WeightEncoder::new(codec, 70_000).unwrap();
        let mut weights: Vec<f32> = bell(70_000, 1.0, 11);
        for _ in 0..2 {
            let before = encoder.clone();
            for index in [69_999, 65_536, 300, 129, 3] {
                weights[index] = [f32::NAN, f32::INFINITY][index % 2];
                let mut out = vec![1, 2];
                let error = CallerError::NotFinite { what: Operand::Expert, index };
                assert_eq!(encoder.encode(&weights, Some(&shared), &mut out), Err(error.into()));
                assert_eq!((out, &encoder), (vec![1, 2], &before));
            }
            weights = bell(70_000, 1.0, 12);
            encoder.encode(&weights, Some(&shared), &mut Vec::new()).unwrap();
        }
    }
    // An odd length, so that the last piece that is checked at once has an odd length, too.
    for codec in &GRADIENT_CODECS[1..] {
        let mut encoder = GradientEncoder::new(*codec, 20_001).unwrap();
        let mut gradient: Vec<f32> = bell(20_001, 1.0, 13);
        gradient[17_000] = f32::MAX;
        encoder.encode(&gradient, &mut Vec::new()).unwrap();
        let before = encoder.clone();
        let mut refused = |gradient: &[f32], what, index| {
            let mut out = vec![1, 2];
            let result = encoder.encode(gradient, &mut out);
            assert_eq!(result, Err(CallerError::NotFinite { what, index }.into()));
            assert_eq!((out, &encoder), (vec![1, 2], &before));
        };
        gradient[17_000] = f32::NAN;
        refused(&gradient, Operand::Gradient, 17_000);
        gradient[40] = f32::NEG_INFINITY;
        refused(&gradient, Operand::Gradient, 40);
        // The carry of f32::MAX rounded to bf16 is 2^119, and f32::MAX plus that overflows.
        if matches!(codec, GradientCodec::TopK { .. }) {
            gradient[40] = 0.0;
            gradient[17_000] = f32::MAX;
            refused(&gradient, Operand::Carried, 17_000);
        }
    }
}

#[test]
fn encoders_and_decoders_continue_from_a_checkpoint() {
    let mut weights: Vec<u16> = bell(500, 1.0, 14);
    let codec = delta(0.1, 3);
    let mut encoder = WeightEncoder::new(codec, 500).unwrap();
    let mut decoder = WeightDecoder::new(500);
    let mut replica = vec![0; 500];
    for number in 0..6 {
        encoder = WeightEncoder::restore(codec, 500, &encoder.save()).unwrap();
        decoder = WeightDecoder::restore(500, &decoder.save()).unwrap();
        let (bytes, info) = encode(&mut encoder, &weights);
        assert_eq!(info.codec == StreamCodec::Int8, number < 3, "{number}");
        decoder.decode(&bytes, None, &mut replica).unwrap();
        assert_eq!(encoder.mirror(), Some(&replica[..]));
        step(&mut weights, 0.1, number);
    }
    let sparser = WeightEncoder::<u16>::restore(delta(0.01, 1), 500, &encoder.save()).unwrap();
    assert_eq!(sparser.mirror(), encoder.mirror());
    let int8 = WeightEncoder::<u16>::restore(WeightCodec::Int8, 500, &encoder.save()).unwrap();
    assert_eq!(int8, WeightEncoder::new(WeightCodec::Int8, 500).unwrap());
    let plain = WeightEncoder::<u16>::new(WeightCodec::Exact, 500).unwrap().save();
    assert_eq!(WeightEncoder::<u16>::restore(codec, 500, &plain), WeightEncoder::new(codec, 500));

    let gradient_codec = GradientCodec::TopK { density: 0.1 };
    let mut gradients = GradientEncoder::new(gradient_codec, 500).unwrap();
    gradients.encode(&weights, &mut Vec::new()).unwrap();
    assert_eq!(GradientEncoder::restore(gradient_codec, 500, &gradients.save()), Ok(gradients.clone()));

    fn caller<T>(error: CallerError) -> Result<T> {
        Err(error.into())
    }
    let length = CallerError::Length { what: Operand::State, expected: 501, found: 500 };
    assert_eq!(WeightEncoder::<u16>::restore(codec, 501, &encoder.save()), caller(length.clone()));
    assert_eq!(GradientEncoder::restore(gradient_codec, 501, &gradients.save()), caller(length));
    let element = CallerError::Element { stream: u16::ELEMENT, given: f32::ELEMENT };
    assert_eq!(WeightEncoder::<f32>::restore(codec, 500, &encoder.save()), caller(element));
    let (saved, expected) = ("a decoder of weights", "an encoder of gradients");
    let other = CallerError::OtherState { saved, expected };
    assert_eq!(GradientEncoder::restore(gradient_codec, 500, &decoder.save()), caller(other));

    for state in [encoder.save(), decoder.save(), gradients.save()] {
        for bit in 0..8 * state.len().min(60) {
            let mut damaged = state.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(WeightEncoder::<u16>::restore(codec, 500, &damaged), Err(Error::Corrupted(_))));
            assert!(matches!(WeightDecoder::restore(500, &damaged), Err(Error::Corrupted(_))));
            assert!(matches!(
                GradientEncoder::restore(gradient_codec, 500, &damaged),
                Err(Error::Corrupted(_))
            ));
        }
        for length in [0, 39, 40, state.len() - 1] {
            assert!(length == state.len() || WeightDecoder::restore(500, &state[..length]).is_err());
        }
    }
}

fn finite() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |value| value.is_finite())
}

/// Encodes random steps of any finite weights, and compares replica and mirror after each of them.
fn mirror_and_replica_agree<T: Weight>(steps: &[Vec<T>], density: f64, warm_up: u32) {
    let length = steps[0].len();
    let mut encoder = WeightEncoder::new(delta(density, warm_up), length).unwrap();
    let mut decoder = WeightDecoder::new(length);
    let mut replica = vec![T::from_f32(1.0); length];
    for weights in steps {
        let mut bytes = Vec::new();
        match encoder.encode(weights, None, &mut bytes) {
            Ok(info) => assert_eq!(decoder.decode(&bytes, None, &mut replica), Ok(info)),
            // Weights of the largest magnitude: the difference from the mirror overflows.
            Err(error) => {
                let is_overflow = |what| matches!(what, Operand::Residual | Operand::Rounded);
                assert!(
                    matches!(error, Error::Caller(CallerError::NotFinite { what, .. }) if is_overflow(what))
                );
                assert!(bytes.is_empty());
            }
        }
        assert!(encoder.mirror().is_none_or(|mirror| bits(mirror) == bits(&replica)));
        assert!(encoder.mirror().is_some());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn mirror_and_replica_have_the_same_bits(
        steps in (1..300_usize).prop_flat_map(|length| {
            prop::collection::vec(prop::collection::vec(finite(), length), 1..6)
        }),
        density in 0.001..=1.0_f64, warm_up in 1..4_u32,
    ) {
        mirror_and_replica_agree(&steps, density, warm_up);
        let halves: Vec<Vec<u16>> = steps
            .iter()
            .map(|weights| weights.iter().map(|&w| f32_to_bf16(w.clamp(-3.3e38, 3.3e38))).collect())
            .collect();
        mirror_and_replica_agree(&halves, density, warm_up);
    }

    #[test]
    fn int8_of_any_weights_decodes_to_the_definition(weights in prop::collection::vec(finite(), 0..400)) {
        check_int8(&weights);
        check_int8(&weights.iter().map(|&w| f32_to_bf16(w.clamp(-3.3e38, 3.3e38))).collect::<Vec<_>>());
    }
}
