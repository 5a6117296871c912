//! The overlap of the phases of a layer: one function per formula.

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, BytesPerSecond, Seconds};

/// `chain(a, e) = max(a, e) + min(a, e) / c`: the time of an exchange `a` and a computation `e` in a pipeline of `c`
/// chunks.
///
/// The longer of the two runs without a gap. Only the first or last chunk of the shorter one does not overlap with it.
pub fn chain(exchange: Seconds, compute: Seconds, chunks: usize) -> Seconds {
    exchange.max(compute) + exchange.min(compute) / chunks as f64
}

/// Time to decode gathered experts of `gathered` bytes: `2 gathered / memory`. Decoding reads the shared expert and
/// writes the expert; the few elements of the residual are neglected.
pub fn decode_time(gathered: Bytes, memory: BytesPerSecond) -> Seconds {
    gathered * 2.0 / memory
}

/// Time to encode the GPU's own experts of `own` bytes: `5 own / memory`. Encoding reads the expert and the shared
/// expert, writes the residual, reads it to find the threshold, and reads it again to collect the kept entries.
pub fn encode_time(own: Bytes, memory: BytesPerSecond) -> Seconds {
    own * 5.0 / memory
}

/// The times of one pass (forward or backward) through one layer: of each phase alone, and of the whole pass. With
/// several micro-batches they are means over the micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PassTimes {
    /// `PE`: compute before the routed experts.
    pub pre_expert: Seconds,
    /// `AG`: all-gather of experts, summed over the levels.
    pub all_gather: Seconds,
    /// `2A`: dispatch and combine, summed over the levels.
    pub all_to_all: Seconds,
    /// `E`: expert compute of the busiest GPU.
    pub expert: Seconds,
    /// `dec`: decoding of gathered experts, and of gradients if they are compressed.
    pub decode: Seconds,
    /// `enc`: encoding of own experts, and of gradients if they are compressed.
    pub encode: Seconds,
    /// `RS`: reduce-scatter of the gradients of migrated experts to their owners, summed over the levels.
    pub gradients: Seconds,
    /// `AR`: refresh of the codec's shared expert, divided by the steps between two refreshes.
    pub shared_refresh: Seconds,
    /// Time of the pass with its phases overlapped.
    pub total: Seconds,
}

/// The longer of the two chains of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// [`PassTimes::compute_chain`]: compute before the experts, then experts and token exchange in a pipeline.
    Compute,
    /// [`PassTimes::link_chain`]: all transfers, one after the other.
    Links,
}

impl PassTimes {
    /// `PE + chain(2A, E + dec + enc)`. Tokens leave after the compute that produces them, and experts and codec share
    /// the GPU.
    pub fn compute_chain(&self, chunks: usize) -> Seconds {
        self.pre_expert + chain(self.all_to_all, self.expert + self.decode + self.encode, chunks)
    }

    /// `AG + RS + AR + 2A`. The links carry one transfer at a time. The gather hides behind the compute before the
    /// experts only while the links are free.
    pub fn link_chain(&self) -> Seconds {
        self.all_gather + self.gradients + self.shared_refresh + self.all_to_all
    }

    /// Which chain is the longer one.
    pub fn bound(&self, chunks: usize) -> Bound {
        if self.compute_chain(chunks) >= self.link_chain() { Bound::Compute } else { Bound::Links }
    }

    /// The same phases with `total` set to the longer chain: `fwd = max(PE + chain(2A, E + dec), AG + 2A)` and
    /// `bwd = max(2 PE + chain(2A, 2 E + dec + enc), AG + RS + AR + 2A)`.
    #[must_use]
    pub fn overlapped(self, chunks: usize) -> Self {
        Self { total: self.compute_chain(chunks).max(self.link_chain()), ..self }
    }

    /// The mean over `heavy` passes like `self` and `light` passes like `other`.
    ///
    /// The mean of the totals differs from the total of the mean phases: a gather that only one micro-batch waits for
    /// hides behind the compute of that micro-batch, not behind that of all.
    #[must_use]
    pub fn mean(self, heavy: usize, other: Self, light: usize) -> Self {
        let mix = |a: Seconds, b: Seconds| (a * heavy as f64 + b * light as f64) / (heavy + light) as f64;
        Self {
            pre_expert: mix(self.pre_expert, other.pre_expert),
            all_gather: mix(self.all_gather, other.all_gather),
            all_to_all: mix(self.all_to_all, other.all_to_all),
            expert: mix(self.expert, other.expert),
            decode: mix(self.decode, other.decode),
            encode: mix(self.encode, other.encode),
            gradients: mix(self.gradients, other.gradients),
            shared_refresh: mix(self.shared_refresh, other.shared_refresh),
            total: mix(self.total, other.total),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The time of a pipeline of two stages. A stage processes its chunks in order; a chunk starts its second stage
    /// after its first stage and after the previous chunk's second stage.
    fn pipeline(first: f64, second: f64, chunks: usize) -> f64 {
        let (mut first_done, mut second_done) = (0.0f64, 0.0f64);
        for _ in 0..chunks {
            first_done += first / chunks as f64;
            second_done = second_done.max(first_done) + second / chunks as f64;
        }
        second_done
    }

    proptest! {
        #[test]
        fn a_chain_is_a_pipeline_of_two_stages(a in 0.0..10.0f64, e in 0.0..10.0f64, chunks in 1..20usize) {
            let formula = chain(Seconds(a), Seconds(e), chunks).0;
            prop_assert!((formula - pipeline(a, e, chunks)).abs() < 1e-9);
            prop_assert!((formula - pipeline(e, a, chunks)).abs() < 1e-9);
        }

        #[test]
        fn a_pass_takes_as_long_as_its_longer_chain(phases in prop::collection::vec(0.0..10.0f64, 8)) {
            let phase = |index: usize| Seconds(phases[index]);
            let pass = PassTimes {
                pre_expert: phase(0), all_gather: phase(1), all_to_all: phase(2), expert: phase(3),
                decode: phase(4), encode: phase(5), gradients: phase(6), shared_refresh: phase(7),
                total: Seconds::ZERO,
            }.overlapped(4);
            let links: f64 = [1, 2, 6, 7].iter().map(|&index| phases[index]).sum();
            let gpu: f64 = [0, 3, 4, 5].iter().map(|&index| phases[index]).sum();
            prop_assert!(pass.total.0 + 1e-9 >= links.max(gpu));
            prop_assert!(pass.total.0 <= links.max(gpu + phases[2]) + 1e-9);
            prop_assert_eq!(pass.total == pass.link_chain(), pass.bound(4) == Bound::Links);
            prop_assert!((pass.mean(3, pass, 2).total.0 - pass.total.0).abs() < 1e-9);
        }
    }

    #[test]
    fn the_codec_moves_two_and_five_bytes_per_byte() {
        let memory = BytesPerSecond::from_gb_per_s(1000.0);
        assert_eq!(decode_time(Bytes::from_gb(1.0), memory), Seconds::from_ms(2.0));
        assert_eq!(encode_time(Bytes::from_gb(1.0), memory), Seconds::from_ms(5.0));
    }
}
