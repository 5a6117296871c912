//! Measures all codecs beside memcpy, in one process:
//!
//! ```text
//! cargo run --release -p ep-codec --example throughput -- [weights] [threads] [runs] [codec]
//! ```
//!
//! Prints GB/s of dense elements (bytes of the expert over time, best of all runs), the share of memcpy's speed, and bits
//! per element. The time is CPU time with one thread, else wall time. memcpy is timed before every measurement. The
//! data are Gaussian and the same in every run.

use std::error::Error;
use std::hint::black_box;

use ep_codec::{
    GradientCodec, GradientEncoder, SharedExpert, Weight, WeightCodec, WeightDecoder, WeightEncoder,
    add_gradient,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::time::{ClockId, clock_gettime};

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let only = std::env::args().nth(4);
    let mut numbers = std::env::args().skip(1).take(3).map(|text| text.parse::<usize>());
    let weights = numbers.next().transpose()?.unwrap_or(44_040_192);
    let threads = numbers.next().transpose()?.unwrap_or(1);
    let runs = numbers.next().transpose()?.unwrap_or(9);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    println!(
        "{weights} weights, {threads} threads, best of {runs}; GB/s of dense elements (share of memcpy)"
    );
    println!("element  codec          encode        decode        bits per element");
    pool.install(|| {
        let bench = Bench { runs, threads, only };
        bench.all::<f32>("f32", weights)?;
        bench.all::<u16>("bf16", weights)
    })
}

struct Bench {
    runs: usize,
    threads: usize,
    /// The codec to measure. `None`: all.
    only: Option<String>,
}

impl Bench {
    fn all<T: Weight>(&self, element: &str, length: usize) -> Result<(), Box<dyn Error + Send + Sync>> {
        let bytes = (length * size_of::<T>()) as f64;
        let weights = bell::<T>(length, 0.03, 1);
        let mut later = weights.clone();
        for (weight, change) in later.iter_mut().zip(bell::<f32>(length, 0.001, 2)) {
            *weight = T::from_f32(weight.to_f32() + change);
        }
        let shared = SharedExpert::from_weights(bell::<T>(length, 0.03, 3))?;
        let mut copy = weights.clone();
        let mut memcpy = || {
            copy.copy_from_slice(black_box(&weights));
            black_box(&mut copy);
            Ok(())
        };
        let print = |codec: &str, encode: Timed, decode: Timed, size: usize| {
            let show =
                |timed: Timed| format!("{:5.2} ({:.2})", bytes / timed.work / 1e9, timed.memcpy / timed.work);
            let bits = 8.0 * size as f64 / length as f64;
            println!("{element:<8} {codec:<14} {:<13} {:<13} {bits:.3}", show(encode), show(decode));
        };
        let copied = self.best(&mut memcpy, || Ok(()), |()| Ok(()))?;
        println!("{element:<8} {:<14} {:5.2}", "memcpy", bytes / copied.memcpy / 1e9);

        let mut out = Vec::new();
        let mut replica = weights.clone();
        for codec in ["exact", "int8", "shared", "delta:0.001", "delta", "delta:0.1"] {
            if !self.measures(codec) {
                continue;
            }
            let codec: WeightCodec = codec.parse()?;
            let mut encoder = WeightEncoder::new(codec, length)?;
            let mut decoder = WeightDecoder::new(length);
            if matches!(codec, WeightCodec::Delta { .. }) {
                out.clear();
                encoder.encode(&weights, Some(&shared), &mut out)?;
                decoder.decode(&out, Some(&shared), &mut replica)?;
            }
            let (before, held) = (encoder.clone(), decoder.clone());
            let encode = self.best(
                &mut memcpy,
                || Ok(before.clone()),
                |mut encoder| {
                    out.clear();
                    encoder.encode(&later, Some(&shared), &mut out)?;
                    Ok(())
                },
            )?;
            let size = out.len();
            let decode = self.best(
                &mut memcpy,
                || Ok(held.clone()),
                |mut decoder| {
                    decoder.decode(&out, Some(&shared), &mut replica)?;
                    Ok(())
                },
            )?;
            print(&codec.to_string(), encode, decode, size);
        }
        let mut sum = vec![0.0_f32; length];
        for codec in ["exact", "int8", "topk:0.001", "topk", "topk:0.1"] {
            if !self.measures(codec) {
                continue;
            }
            let codec: GradientCodec = codec.parse()?;
            let mut encoder = GradientEncoder::new(codec, length)?;
            let encode = self.best(
                &mut memcpy,
                || Ok(()),
                |()| {
                    out.clear();
                    encoder.encode(&weights, &mut out)?;
                    Ok(())
                },
            )?;
            let size = out.len();
            let decode = self.best(
                &mut memcpy,
                || Ok(()),
                |()| {
                    add_gradient(&out, &mut sum)?;
                    Ok(())
                },
            )?;
            print(&format!("g {codec}"), encode, decode, size);
        }
        Ok(())
    }

    fn measures(&self, codec: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only == codec)
    }

    /// The shortest times of memcpy and of the work, in seconds, measured alternately. `prepare` is not timed.
    fn best<S>(
        &self,
        memcpy: &mut impl FnMut() -> Result<(), Box<dyn Error + Send + Sync>>,
        mut prepare: impl FnMut() -> Result<S, Box<dyn Error + Send + Sync>>,
        mut work: impl FnMut(S) -> Result<(), Box<dyn Error + Send + Sync>>,
    ) -> Result<Timed, Box<dyn Error + Send + Sync>> {
        let mut best = Timed { memcpy: f64::INFINITY, work: f64::INFINITY };
        for _ in 0..self.runs {
            let start = now(self.threads);
            memcpy()?;
            best.memcpy = best.memcpy.min(now(self.threads) - start);
            let prepared = prepare()?;
            let start = now(self.threads);
            work(prepared)?;
            best.work = best.work.min(now(self.threads) - start);
        }
        Ok(best)
    }
}

#[derive(Clone, Copy)]
struct Timed {
    memcpy: f64,
    work: f64,
}

/// Gaussian random numbers with this standard deviation.
fn bell<T: Weight>(length: usize, deviation: f32, seed: u64) -> Vec<T> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut numbers = Vec::with_capacity(length + 1);
    while numbers.len() < length {
        // Box and Muller: two independent numbers. 1 - u is in (0, 1].
        let radius = deviation * (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
        let (sine, cosine) = (std::f32::consts::TAU * rng.random::<f32>()).sin_cos();
        numbers.extend([T::from_f32(radius * sine), T::from_f32(radius * cosine)]);
    }
    numbers.truncate(length);
    numbers
}

/// Seconds: CPU time of this thread if it does all the work, else wall time.
fn now(threads: usize) -> f64 {
    let clock = if threads == 1 { ClockId::ThreadCPUTime } else { ClockId::Monotonic };
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
