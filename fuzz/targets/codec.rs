//! Streams of the expert codec: any bytes decode to weights or give an error, and encoded weights decode correctly.

#![no_main]

use ep::Element;
use ep_codec::residual::{Encoder, Format, IndexFormat, Selection, ValueFormat, decode_add};
use ep_codec::{SharedExpert, Weight, inspect, reseal};
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

/// The first byte chooses: decode the bytes unchanged, decode them with a valid header and checksum, or encode them.
fn run(data: &[u8]) -> Corpus {
    let Some((&first, rest)) = data.split_first() else { return Corpus::Reject };
    match first % 4 {
        0 => {
            let _ = inspect(rest);
            decode::<f32>(rest);
        }
        1 => sealed::<f32>(rest),
        2 => sealed::<u16>(rest),
        _ => round_trip(rest),
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
