//! Streams of all codecs and saved states: any bytes decode or give an error, and encoded weights and gradients decode to
//! what the encoder says.

#![no_main]

use ep::Element;
use ep_codec::residual::{Encoder, Format, IndexFormat, Selection, ValueFormat, decode_add};
use ep_codec::{
    Content, GradientCodec, GradientEncoder, SharedExpert, StreamCodec, Weight, WeightCodec, WeightDecoder,
    WeightEncoder, add_gradient, inspect, reseal, reseal_state,
};
use libfuzzer_sys::{Corpus, fuzz_target};

/// More weights than one block, so that streams have several blocks.
const MOST: usize = (1 << 16) + 300;

fuzz_target!(
    init: {
        // Run the codec on this thread: waking other threads takes longer than decoding.
        rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global().expect("the first pool");
    },
    |data: &[u8]| -> Corpus { run(data) }
);

/// The first byte chooses: decode the bytes unchanged or with a valid header and checksum, encode them, or restore a state.
fn run(data: &[u8]) -> Corpus {
    let Some((&first, rest)) = data.split_first() else { return Corpus::Reject };
    match first % 8 {
        0 => {
            let _ = inspect(rest);
            decode::<f32>(rest);
            receive::<f32>(rest, false);
        }
        1 => sealed::<f32>(rest),
        2 => sealed::<u16>(rest),
        3 => round_trip(rest),
        4 => receive::<f32>(rest, true),
        5 => receive::<u16>(rest, true),
        6 => steps(rest),
        _ => restore(rest),
    }
    Corpus::Keep
}

/// Zeros to decode onto, as many as the stream states. None if the stream states too many: decoding refuses either.
fn shared<T: Weight>(elements: u64) -> SharedExpert<T> {
    let elements = if elements > MOST as u64 { 0 } else { elements as usize };
    SharedExpert::from_weights(vec![T::from_f32(0.0); elements]).expect("zeros are finite")
}

fn elements(stream: &[u8]) -> u64 {
    stream.get(8..16).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn decode<T: Weight>(stream: &[u8]) {
    let shared = shared::<T>(elements(stream));
    let mut out = shared.weights().to_vec();
    if let Ok(info) = decode_add(stream, &shared, &mut out) {
        assert_eq!(info.bytes, stream.len());
        assert!(info.kept <= info.elements);
        let changed = out.iter().filter(|weight| weight.to_f32() != 0.0).count();
        assert!(changed <= info.kept, "{changed} of {} kept", info.kept);
        // A finite f32 value may round to an infinite bf16. Only encoders guarantee that this does not happen.
        assert!(T::ELEMENT == Element::Bf16 || out.iter().all(|weight| weight.to_f32().is_finite()));
    }
}

/// Decodes the stream with a valid checksum, which random bytes never have.
fn sealed<T: Weight>(stream: &[u8]) {
    let mut stream = stream.to_vec();
    let shared = shared::<T>(elements(&stream));
    reseal(&mut stream, shared.fingerprint());
    decode::<T>(&stream);
}

fn round_trip(data: &[u8]) {
    let Some((&[index, value, kept, selection], weights)) = data.split_first_chunk() else { return };
    let format = Format {
        index: [IndexFormat::U32, IndexFormat::U16, IndexFormat::Rice][usize::from(index) % 3],
        value: [ValueFormat::F32, ValueFormat::Bf16, ValueFormat::Bf16Rice][usize::from(value) % 3],
    };
    let weights: Vec<f32> = weights.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let k = usize::from(kept).min(weights.len());
    let selection = if selection % 2 == 0 { Selection::Exact } else { Selection::Approximate };
    let shared = shared::<f32>(weights.len() as u64);
    if weights.len() != shared.weights().len() {
        return;
    }
    let mut stream = Vec::new();
    let Ok(stats) = (Encoder { k, selection, format }).encode(&weights, &shared, &mut stream) else { return };
    assert!(stream.len() as u64 <= format.max_bytes(weights.len(), k), "{format:?}");
    let mut out = vec![0.0; weights.len()];
    let info = decode_add(&stream, &shared, &mut out).expect("what was encoded decodes");
    assert_eq!((info.kept, info.bytes), (stats.kept, stats.bytes));
    let all_that_is_dropped_is_smaller = selection == Selection::Exact && format.value == ValueFormat::F32;
    for (at, (&weight, &decoded)) in weights.iter().zip(&out).enumerate() {
        // Half a unit in the last of bf16's 8 mantissa bits; for subnormals, half of the smallest one.
        let rounding = match format.value {
            ValueFormat::F32 => 0.0,
            _ => weight.abs() / 256.0 + f32::from_bits(1 << 15),
        };
        let close = (weight - decoded).abs() <= rounding;
        assert!(decoded == 0.0 || close, "weight {at} is {weight}, decoded {decoded}");
        if decoded == 0.0 && all_that_is_dropped_is_smaller {
            assert!(weight.abs() <= stats.smallest.unwrap_or(f32::MAX), "weight {at} is {weight}: {stats:?}");
        }
    }
}

/// Decodes a stream of any codec as a receiver that holds what the stream changes. With `seal`, its checksum is made right.
fn receive<T: Weight>(stream: &[u8], seal: bool) {
    let length = usize::try_from(elements(stream)).ok().filter(|&elements| elements <= MOST).unwrap_or(300);
    let ones = vec![T::from_f32(1.0); length];
    let shared = SharedExpert::from_weights(ones.clone()).expect("ones are finite");
    let mut encoder = WeightEncoder::new(WeightCodec::Int8, length).expect("a length in range");
    let mut first = Vec::new();
    let held = encoder.encode(&ones, None, &mut first).expect("ones are finite").fingerprint;
    for base in [held, shared.fingerprint()] {
        let mut stream = stream.to_vec();
        if seal {
            reseal(&mut stream, base);
        }
        let Ok(info) = inspect(&stream) else { continue };
        match info.content {
            Content::Gradients => {
                let mut sum = vec![0.0; length];
                match add_gradient(&stream, &mut sum) {
                    Err(_) => assert!(sum.iter().all(|&sum| sum == 0.0)),
                    Ok(info) => {
                        assert!(info.codec == StreamCodec::Exact || sum.iter().all(|sum| sum.is_finite()))
                    }
                }
            }
            _ => {
                let mut decoder = WeightDecoder::new(length);
                let mut replica = vec![T::from_f32(0.0); length];
                decoder.decode(&first, None, &mut replica).expect("what was encoded decodes");
                let before = (decoder.clone(), replica.clone());
                match decoder.decode(&stream, Some(&shared), &mut replica) {
                    Err(_) => assert!((decoder, replica) == before),
                    Ok(info) => {
                        assert_eq!(decoder.fingerprint(), Some(info.fingerprint));
                        let finite = replica.iter().all(|weight| weight.to_f32().is_finite());
                        assert!(info.codec == StreamCodec::Exact || finite);
                    }
                }
            }
        }
    }
}

/// Steps of an encoder of changes and of an encoder of gradients, with the numbers in `data`.
fn steps(data: &[u8]) {
    let Some((&[density, warm_up, length], numbers)) = data.split_first_chunk() else { return };
    let (density, warm_up) = ((f64::from(density) + 1.0) / 256.0, u32::from(warm_up % 3) + 1);
    let length = usize::from(length).max(1);
    let numbers: Vec<f32> = numbers.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let codec = WeightCodec::Delta { density, warm_up };
    let mut encoder = WeightEncoder::new(codec, length).expect("a density in range");
    let mut decoder = WeightDecoder::new(length);
    let mut replica = vec![0.0; length];
    let codecs = [GradientCodec::Int8, GradientCodec::TopK { density }];
    let mut gradients = codecs.map(|codec| GradientEncoder::new(codec, length).expect("a density in range"));
    for step in numbers.chunks_exact(length) {
        let mut stream = Vec::new();
        if encoder.encode(step, None, &mut stream).is_ok() {
            assert!(stream.len() <= codec.max_bytes(f32::ELEMENT, length));
            decoder.decode(&stream, None, &mut replica).expect("what was encoded decodes");
            let mirror = encoder.mirror().expect("a stream was encoded");
            assert!(mirror.iter().map(|w| w.to_bits()).eq(replica.iter().map(|w| w.to_bits())));
        }
        for (encoder, codec) in gradients.iter_mut().zip(codecs) {
            let carried: Vec<f32> = encoder.carry().iter().zip(step).map(|(carry, g)| g + carry).collect();
            let (mut stream, mut sum) = (Vec::new(), vec![0.0; length]);
            if encoder.encode(step, &mut stream).is_ok() {
                assert!(stream.len() <= codec.max_bytes(f32::ELEMENT, length));
                add_gradient(&stream, &mut sum).expect("what was encoded decodes");
                let left = carried.iter().zip(&sum).map(|(carried, value)| carried - value);
                assert!(left.eq(encoder.carry().iter().copied()));
            }
        }
    }
}

/// Restores a state with a right checksum. What was restored is saved as the same state.
fn restore(data: &[u8]) {
    let mut state = data.to_vec();
    reseal_state(&mut state);
    let length = usize::try_from(elements(&state)).ok().filter(|&elements| elements <= MOST).unwrap_or(3);
    let codec = WeightCodec::Delta { density: 0.1, warm_up: 1 };
    if let Ok(mut encoder) = WeightEncoder::<f32>::restore(codec, length, &state) {
        let _ = encoder.encode(&vec![1.0; length], None, &mut Vec::new());
        let saved = encoder.save();
        assert_eq!(WeightEncoder::restore(codec, length, &saved).as_ref(), Ok(&encoder));
    }
    if let Ok(decoder) = WeightDecoder::restore(length, &state) {
        assert_eq!(WeightDecoder::restore(length, &decoder.save()), Ok(decoder));
    }
    if let Ok(mut encoder) = GradientEncoder::restore(GradientCodec::Int8, length, &state) {
        let _ = encoder.encode(&vec![1.0_f32; length], &mut Vec::new());
        assert_eq!(GradientEncoder::restore(GradientCodec::Int8, length, &encoder.save()), Ok(encoder));
    }
}
