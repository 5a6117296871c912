//! Bounds of every number that describes a problem.
//!
//! The bounds lie far beyond existing hardware, and far below the values at which sums lose precision, memory runs out
//! or a plan takes hours. A number outside them is most likely a typing error.

use std::fmt;

/// A range of whole numbers, both ends included. Displayed as "a whole number from 1 to 8".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// The smallest number of the range.
    pub least: usize,
    /// The largest number of the range.
    pub most: usize,
}

/// A range of numbers, both ends included. Displayed as "from 0 to 100".
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Number {
    /// The smallest number of the range.
    pub least: f64,
    /// The largest number of the range.
    pub most: f64,
}

impl Count {
    /// From `least` to `most`, both included.
    pub const fn new(least: usize, most: usize) -> Self {
        Self { least, most }
    }

    /// Whether the range contains the number.
    pub fn allows(self, count: usize) -> bool {
        (self.least..=self.most).contains(&count)
    }
}

impl Number {
    /// From `least` to `most`, both included.
    pub const fn new(least: f64, most: f64) -> Self {
        Self { least, most }
    }

    /// Whether the range contains the number. No range contains NaN.
    pub fn allows(self, number: f64) -> bool {
        (self.least..=self.most).contains(&number)
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number from {} to {}", self.least, self.most)
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from {} to {}", Shown(self.least), Shown(self.most))
    }
}

/// A number for messages. Magnitudes below 10⁻³ and of at least 10⁶ are displayed with an exponent, except 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shown(pub f64);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.0;
        let plain = number == 0.0 || !number.is_finite() || (1e-3..1e6).contains(&number.abs());
        if plain { write!(f, "{number}") } else { write!(f, "{number:e}") }
    }
}

/// Number of levels of a cluster.
pub const LEVELS: Count = Count::new(1, 8);
/// Members of one level: datacenters, nodes of a datacenter, GPUs of a node.
pub const MEMBERS: Count = Count::new(1, 65_536);
/// GPUs of a cluster, and GPUs that share a link.
pub const GPUS: Count = Count::new(1, 1 << 20);
/// Candidates that a planner prices: the number of ways to choose one divisor of each level's members.
pub const CANDIDATES: Count = Count::new(1, 1024);

/// Routed experts of a layer.
pub const EXPERTS: Count = Count::new(1, 65_536);
/// Routed experts that one token chooses.
pub const TOPK: Count = Count::new(1, 1024);
/// Shared experts of a layer, which every token uses.
pub const SHARED_EXPERTS: Count = Count::new(0, 1024);
/// Width of a token or an expert, elements.
pub const WIDTH: Count = Count::new(1, 1 << 20);
/// Matrices of an expert.
pub const MATRICES: Count = Count::new(1, 16);
/// Layers of a model, pipeline stages, and layers that are live at a time.
pub const LAYERS: Count = Count::new(1, 10_000);
/// Tokens of one GPU and micro-batch, and tokens of a sequence.
pub const TOKENS: Count = Count::new(1, 1_000_000_000);
/// Tokens of an optimizer step, over all GPUs.
pub const GLOBAL_BATCH: Count = Count::new(1, 1_000_000_000_000_000);
/// Parameters outside the layers with experts.
pub const OTHER_PARAMETERS: Number = Number::new(0.0, 1e15);
/// Steps between two exchanges of local steps.
pub const LOCAL_STEPS: Count = Count::new(1, 1_000_000);
/// Micro-batches of an optimizer step.
pub const MICRO_BATCHES: Count = Count::new(1, 1_000_000);
/// Optimizer steps between two refreshes of the codec's shared expert.
pub const REFRESH_STEPS: Count = Count::new(1, 1_000_000);
/// Chunks into which dispatch, expert compute and combine are divided to overlap.
pub const CHUNKS: Count = Count::new(1, 256);

/// Computations and exchanges of one GPU in a simulated step. The simulator holds all of them in memory.
pub const OPERATIONS: Count = Count::new(1, 1 << 20);
/// Computations and exchanges of a simulated step, summed over all GPUs that are simulated separately.
pub const EVENTS: Count = Count::new(1, 1 << 26);

/// Bandwidth of a link in one direction, Gbit/s.
pub const LINK_GBIT_PER_S: Number = Number::new(1e-6, 1e9);
/// Fraction of a link's bandwidth that transfers reach.
pub const EFFICIENCY: Number = Number::new(1e-3, 1.0);
/// Fraction of packets that are lost.
pub const LOSS: Number = Number::new(0.0, 0.5);
/// Flows over one link.
pub const FLOWS: Count = Count::new(1, 1_000_000);
/// Bandwidth of a GPU's memory, GB/s.
pub const MEMORY_GB_PER_S: Number = Number::new(1e-3, 1e9);
/// Memory of a GPU, GB.
pub const MEMORY_GB: Number = Number::new(1e-3, 1e9);
/// Fraction of a GPU's memory that experts may not use.
pub const RESERVED_MEMORY: Number = Number::new(0.0, 0.999);
/// Memory cap for gathered experts, GB.
pub const MEMORY_CAP_GB: Number = Number::new(0.0, 1e9);
/// A latency (`alpha`, `round_trip`), seconds.
pub const SECONDS: Number = Number::new(0.0, 1e6);
/// Sustained throughput of a GPU, TFLOP/s.
pub const TFLOPS: Number = Number::new(1e-6, 1e9);
/// Parameters of the attention projections of a layer.
pub const ATTENTION_PARAMETERS: Number = Number::new(0.0, 1e15);
/// Multiply-adds of attention per pair of tokens.
pub const SCORE_WIDTH: Number = Number::new(0.0, 1e12);
/// Exponent of the Zipf distribution of a routing.
pub const ZIPF: Number = Number::new(0.0, 100.0);
/// Selections of one expert in a histogram.
pub const SELECTIONS: Number = Number::new(0.0, 1e15);
/// Compression ratio of weights or gradients: uncompressed bytes over bytes sent.
pub const COMPRESSION: Number = Number::new(1.0, 1e6);
/// Jitter: relative standard deviation of the duration of a computation.
pub const JITTER: Number = Number::new(0.0, 10.0);
/// Slowdown of a straggler: its time over the normal time.
pub const SLOWDOWN: Number = Number::new(1.0, 1e6);
/// A fraction.
pub const PART: Number = Number::new(0.0, 1.0);

/// Largest size of an input file, bytes.
pub const FILE_BYTES: usize = 8 << 20;
/// Largest length of a name, characters.
pub const NAME: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_numbers_are_displayed_without_long_zeros() {
        assert_eq!(LAYERS.to_string(), "a whole number from 1 to 10000");
        assert_eq!(LINK_GBIT_PER_S.to_string(), "from 1e-6 to 1e9");
        assert_eq!(ZIPF.to_string(), "from 0 to 100");
        assert_eq!(COMPRESSION.to_string(), "from 1 to 1e6");
        let shown =
            [0.0, -0.005, 5e-324, 1e308, 123_456.0, f64::INFINITY].map(|number| Shown(number).to_string());
        assert_eq!(shown, ["0", "-0.005", "5e-324", "1e308", "123456", "inf"]);
        assert!(!ZIPF.allows(f64::NAN) && !ZIPF.allows(-0.1) && ZIPF.allows(0.0) && ZIPF.allows(100.0));
        assert!(!LAYERS.allows(0) && LAYERS.allows(10_000) && !LAYERS.allows(10_001));
    }
}
