//! Measures what the CPUs of one machine reach: in the codec, in matrix products, and in copying memory.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ep_codec::{WeightCodec, WeightDecoder, WeightEncoder};
use ndarray::Array2;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::common::failure::Failure;
use crate::common::machine::{self, Machine};
use crate::common::memory::MemoryBandwidth;
use crate::common::threads;

/// Weights of the expert that the codec encodes: 16 MiB of f32.
const WEIGHTS: usize = 4 << 20;
/// Rows and columns of the matrices of a product.
const MATRIX: usize = 512;
/// Bytes that a copy of the memory measurement moves, half read and half written: more than most caches hold.
const MEMORY: u64 = 256 << 20;

/// The figures of one rank's machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Host {
    pub(super) rank: u32,
    pub(super) name: String,
    pub(super) cpu_model: String,
    pub(super) cores: usize,
    /// Memory of the machine.
    pub(super) memory_gb: f64,
    /// Bytes read and written per second while copying.
    pub(super) memory_gb_per_s: f64,
    /// Rates at which the codec `int8` encodes and decodes f32 weights on all cores, counted in bytes of weights.
    pub(super) encode_gb_per_s: f64,
    pub(super) decode_gb_per_s: f64,
    /// Rate of products of f32 matrices, one on each core at a time.
    pub(super) gflop_per_s: f64,
}

/// Measures this machine, each figure for about `duration`.
pub(super) fn measure(rank: u32, duration: Duration) -> Result<Host, Failure> {
    let Machine { cpu_model, cores } = Machine::here();
    let pool = threads::pool()?;
    let (encode_gb_per_s, decode_gb_per_s) = pool.install(|| codec(duration))?;
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    Ok(Host {
        rank,
        name: name.trim().to_owned(),
        cpu_model,
        cores,
        memory_gb: machine::total_memory().map_or(0.0, |bytes| bytes as f64 / 1e9),
        memory_gb_per_s: MemoryBandwidth::measure(MEMORY, duration).traffic() / 1e9,
        encode_gb_per_s,
        decode_gb_per_s,
        gflop_per_s: pool.install(|| matrix_products(cores, duration)),
    })
}

/// The least time of a repeated call, in seconds.
fn least<E>(duration: Duration, mut call: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let begun = Instant::now();
    let mut best = f64::INFINITY;
    while best.is_infinite() || begun.elapsed() < duration {
        let start = Instant::now();
        call()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// GB/s of encoding and of decoding.
fn codec(duration: Duration) -> Result<(f64, f64), Failure> {
    let refused = |error: ep_codec::Error| Failure::request(format!("measuring the codec: {error}"));
    // The sum of three sawtooth waves of different periods: its values are distributed enough like a bell curve.
    let weight = |at: usize| {
        let saw = |period: usize| (at % period) as f32 / period as f32 - 0.5;
        0.02 * (saw(7) + saw(131) + saw(4099))
    };
    let weights: Vec<f32> = (0..WEIGHTS).map(weight).collect();
    let mut replica = vec![0.0f32; WEIGHTS];
    let mut encoder = WeightEncoder::new(WeightCodec::Int8, WEIGHTS).map_err(refused)?;
    let mut decoder = WeightDecoder::new(WEIGHTS);
    let mut stream = Vec::new();
    let encoded = least(duration, || {
        stream.clear();
        encoder.encode(&weights, None, &mut stream).map(|_| ())
    });
    let encoded = encoded.map_err(refused)?;
    let decoded = least(duration, || decoder.decode(&stream, None, &mut replica).map(|_| ()));
    let decoded = decoded.map_err(refused)?;
    let gigabytes = (WEIGHTS * size_of::<f32>()) as f64 / 1e9;
    Ok((gigabytes / encoded, gigabytes / decoded))
}

/// GFLOP/s of all cores, each of which multiplies matrices of its own.
fn matrix_products(cores: usize, duration: Duration) -> f64 {
    let operations = 2.0 * (MATRIX as f64).powi(3);
    let rates = (0..cores).into_par_iter().map(|core| {
        let matrix = Array2::from_shape_fn((MATRIX, MATRIX), |(row, column)| {
            ((row * 31 + column * 17 + core) % 97) as f32 / 97.0
        });
        let best = least(duration, || {
            black_box(black_box(&matrix).dot(&matrix));
            Ok::<(), std::convert::Infallible>(())
        });
        best.map_or(0.0, |seconds| operations / seconds / 1e9)
    });
    rates.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_measured() {
        let host = measure(3, Duration::from_millis(1)).unwrap();
        let figures = [
            host.memory_gb,
            host.memory_gb_per_s,
            host.encode_gb_per_s,
            host.decode_gb_per_s,
            host.gflop_per_s,
        ];
        assert!(figures.iter().all(|figure| figure.is_finite() && *figure > 0.0), "{host:?}");
        assert_eq!((host.rank, host.cores), (3, machine::cores()));
        assert!(!host.name.is_empty());
    }
}
