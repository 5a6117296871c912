//! The paper's stream model (arXiv 2510.19470): the time of one layer over one level of `G` equal GPUs.
//!
//! Each GPU exchanges `D` bytes of tokens twice per layer, in dispatch and in combine. The GPUs form expert domains of
//! `S` GPUs. Each GPU first gathers the experts of its domain, `P_E` bytes from each of the `S − 1` other members;
//! only tokens for other domains then travel. The gather runs during the `L` seconds of compute before the experts.
//! Expert compute is hidden behind the transfers and costs nothing. With a bandwidth of `B` bytes per second and GPU,
//! the layer takes
//!
//! ```text
//! lat(S) = max(L, P_E (S − 1) / B) + 2 D (G − S) / (G B)        seconds
//! ```
//!
//! `S = 1` is plain expert parallelism; `S = G` moves experts only. The paper describes a choice by the proportion
//! sent as data, `p = (G − S) / (G − 1)`. This module stores `S`, because `S` must divide `G`, and converts to `p` for
//! display.
//!
//! ```
//! use ep_plan::units::{Bytes, BytesPerSecond, Seconds};
//! use ep_plan::{StreamInput, StreamModel};
//!
//! let model = StreamModel::new(StreamInput {
//!     gpus: 8,
//!     token_bytes: Bytes::from_mb(8.0),
//!     expert_bytes: Bytes::from_mb(2.35),
//!     bandwidth: BytesPerSecond::from_gb_per_s(128.0),
//!     pre_expert: Seconds::from_ms(0.049),
//! })?;
//! assert_eq!(model.best_domain_size(), 4);
//! assert!(model.latency(4)? < model.latency(1)?);
//! # Ok::<(), ep_plan::PlanError>(())
//! ```

use serde::{Deserialize, Serialize};

use crate::divisors::divisors;
use crate::error::{PlanError, Result, at_least_one, not_negative, positive};
use crate::units::{Bytes, BytesPerSecond, Seconds};

/// Latencies are treated as equal if their relative difference is below this value. The smaller domain then wins: it
/// holds fewer experts in memory.
pub(crate) const TIE: f64 = 1e-12;

/// The five parameters of the model, unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamInput {
    /// `G`: GPUs that exchange tokens.
    pub gpus: usize,
    /// `D`: bytes of tokens that one GPU contributes to one all-to-all, including those for its own experts.
    pub token_bytes: Bytes,
    /// `P_E`: bytes of one GPU's experts as they are sent, after compression if there is any.
    pub expert_bytes: Bytes,
    /// `B`: bandwidth of one GPU, in each direction.
    pub bandwidth: BytesPerSecond,
    /// `L`: compute time of a layer before its experts.
    pub pre_expert: Seconds,
}

/// The stream model for one checked set of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StreamModel {
    #[serde(flatten)]
    input: StreamInput,
}

/// The case of the model that determines its continuous optimum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Regime {
    /// `2 D ≥ G P_E`: each further member of a domain saves at least as many bytes of tokens as it adds bytes of experts.
    ExpertsAreLighter,
    /// `B L ≥ P_E (G − 1)`: even the gather of all experts hides behind compute. The paper omits this case.
    GatherHides,
    /// Neither: at the optimum the gather takes exactly as long as the compute before the experts.
    Interior,
}

/// The minimum of the latency over real, not only integer, domain sizes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ContinuousOptimum {
    /// `S*`: the best real domain size, from 1 to `G` GPUs.
    pub domain_size: f64,
    /// The case that determines `S*`.
    pub regime: Regime,
}

impl StreamModel {
    /// Checks the parameters and builds the model.
    ///
    /// # Errors
    /// [`PlanError::Quantity`] when there is no GPU, when the bandwidth is not above zero, or when a parameter is
    /// negative, infinite or NaN.
    pub fn new(input: StreamInput) -> Result<Self> {
        at_least_one("number of GPUs", input.gpus)?;
        not_negative("token bytes", input.token_bytes.0)?;
        not_negative("expert bytes", input.expert_bytes.0)?;
        positive("bandwidth in bytes per second", input.bandwidth.0)?;
        not_negative("pre-expert compute in seconds", input.pre_expert.0)?;
        Ok(Self { input })
    }

    /// The parameters of the model.
    pub fn input(&self) -> &StreamInput {
        &self.input
    }

    /// The same model with a different bandwidth.
    ///
    /// # Errors
    /// [`PlanError::Quantity`] when the bandwidth is not above zero and finite.
    pub fn with_bandwidth(self, bandwidth: BytesPerSecond) -> Result<Self> {
        Self::new(StreamInput { bandwidth, ..self.input })
    }

    /// The possible domain sizes: the divisors of `G`, ascending.
    pub fn domain_sizes(&self) -> Vec<usize> {
        divisors(self.input.gpus)
    }

    /// Bytes that one GPU sends in one all-to-all: `D (G − S) / G`. A layer has two all-to-alls.
    ///
    /// # Errors
    /// [`PlanError::DomainSize`] when `domain_size` does not divide `G`.
    pub fn all_to_all_bytes(&self, domain_size: usize) -> Result<Bytes> {
        self.check(domain_size).map(|()| self.all_to_all_at(domain_size as f64))
    }

    /// Bytes that one GPU receives in the all-gather of its domain's experts: `P_E (S − 1)`.
    ///
    /// # Errors
    /// [`PlanError::DomainSize`] when `domain_size` does not divide `G`.
    pub fn all_gather_bytes(&self, domain_size: usize) -> Result<Bytes> {
        self.check(domain_size).map(|()| self.all_gather_at(domain_size as f64))
    }

    /// Time of one layer: `lat(S)`, by the formula in the [module documentation](self).
    ///
    /// # Errors
    /// [`PlanError::DomainSize`] when `domain_size` does not divide `G`.
    pub fn latency(&self, domain_size: usize) -> Result<Seconds> {
        self.check(domain_size).map(|()| self.latency_at(domain_size as f64))
    }

    /// Speedup of a layer over plain expert parallelism: `lat(1) / lat(S)`.
    ///
    /// # Errors
    /// [`PlanError::DomainSize`] when `domain_size` does not divide `G`.
    pub fn speedup(&self, domain_size: usize) -> Result<f64> {
        Ok(self.latency_at(1.0) / self.latency(domain_size)?)
    }

    /// The paper's `p = (G − S) / (G − 1)`: 1 for plain expert parallelism, 0 when only experts move (or `G` = 1).
    ///
    /// # Errors
    /// [`PlanError::DomainSize`] when `domain_size` does not divide `G`.
    pub fn data_proportion(&self, domain_size: usize) -> Result<f64> {
        self.check(domain_size)?;
        let others = self.input.gpus - 1;
        Ok(if others == 0 { 0.0 } else { (self.input.gpus - domain_size) as f64 / others as f64 })
    }

    /// The domain size that gives a data proportion `p`: `S = G − p (G − 1)`.
    ///
    /// # Errors
    /// [`PlanError::Proportion`] when `S` is not, up to rounding, a divisor of `G`.
    pub fn domain_size_of(&self, data_proportion: f64) -> Result<usize> {
        let gpus = self.input.gpus;
        let exact = gpus as f64 - data_proportion * (gpus as f64 - 1.0);
        let sizes = self.domain_sizes();
        sizes.iter().copied().find(|&size| (size as f64 - exact).abs() <= 1e-9 * gpus as f64).ok_or_else(
            || {
                let proportion = |size: &usize| (gpus - size) as f64 / (gpus as f64 - 1.0).max(1.0);
                PlanError::Proportion {
                    proportion: data_proportion,
                    possible: sizes.iter().map(proportion).collect(),
                }
            },
        )
    }

    /// The minimum of `lat` over real domain sizes from 1 to `G`.
    ///
    /// In the first two cases of [`Regime`] the minimum is at `G`. Otherwise `lat` falls while the gather hides behind
    /// `L` and rises afterwards, so the minimum is where both take equally long: `S* = 1 + B L / P_E`.
    pub fn continuous_optimum(&self) -> ContinuousOptimum {
        let StreamInput { gpus, token_bytes, expert_bytes, bandwidth, pre_expert } = self.input;
        let gpus = gpus as f64;
        let hidden = bandwidth * pre_expert;
        if token_bytes.0 * 2.0 >= expert_bytes.0 * gpus {
            ContinuousOptimum { domain_size: gpus, regime: Regime::ExpertsAreLighter }
        } else if hidden.0 >= expert_bytes.0 * (gpus - 1.0) {
            ContinuousOptimum { domain_size: gpus, regime: Regime::GatherHides }
        } else {
            ContinuousOptimum { domain_size: 1.0 + hidden / expert_bytes, regime: Regime::Interior }
        }
    }

    /// The divisor of `G` with the least latency, by the closed form. Of equal latencies, the smaller domain wins.
    ///
    /// `lat` is convex, so the best divisor is one of the two neighbours of `S*`. The function compares both: rounding
    /// `S*` to the nearer one is wrong in about one case in twenty.
    pub fn best_domain_size(&self) -> usize {
        let StreamInput { gpus, token_bytes, expert_bytes, bandwidth, pre_expert } = self.input;
        if token_bytes == Bytes::ZERO {
            return 1; // there are no tokens to save
        }
        if token_bytes.0 * 2.0 > expert_bytes.0 * gpus as f64 * (1.0 + TIE) {
            return gpus;
        }
        // With equal slopes (2 D = G P_E), lat is flat beyond this point, and the smallest domain there wins the tie.
        let kink = 1.0 + bandwidth * pre_expert / expert_bytes;
        if kink >= gpus as f64 {
            return gpus;
        }
        let sizes = self.domain_sizes();
        let above = sizes.partition_point(|&size| (size as f64) < kink);
        self.least(&sizes[above.saturating_sub(1)..sizes.len().min(above + 1)])
    }

    /// The divisor of `G` with the least latency, by trying every divisor. Of equal latencies, the smaller domain wins.
    /// Tests compare [`best_domain_size`](Self::best_domain_size) with this function.
    pub fn best_domain_size_by_search(&self) -> usize {
        self.least(&self.domain_sizes())
    }

    fn least(&self, sizes: &[usize]) -> usize {
        let latency = |size: usize| self.latency_at(size as f64).0;
        let least = sizes.iter().map(|&size| latency(size)).fold(f64::INFINITY, f64::min);
        sizes.iter().copied().find(|&size| latency(size) <= least * (1.0 + TIE)).unwrap_or(1)
    }

    fn latency_at(&self, domain_size: f64) -> Seconds {
        let gather = self.all_gather_at(domain_size) / self.input.bandwidth;
        let exchange = self.all_to_all_at(domain_size) / self.input.bandwidth;
        self.input.pre_expert.max(gather) + exchange * 2.0
    }

    fn all_to_all_at(&self, domain_size: f64) -> Bytes {
        let gpus = self.input.gpus as f64;
        self.input.token_bytes * ((gpus - domain_size) / gpus)
    }

    fn all_gather_at(&self, domain_size: f64) -> Bytes {
        self.input.expert_bytes * (domain_size - 1.0)
    }

    fn check(&self, domain_size: usize) -> Result<()> {
        check_domain_size(0, domain_size, self.input.gpus)
    }
}

/// Checks that the domain size divides the number of members of its level.
pub(crate) fn check_domain_size(level: usize, domain_size: usize, scaling_factor: usize) -> Result<()> {
    if domain_size > 0 && scaling_factor.is_multiple_of(domain_size) {
        return Ok(());
    }
    Err(PlanError::DomainSize { level, domain_size, scaling_factor, possible: divisors(scaling_factor) })
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn model(
        gpus: usize,
        tokens_mb: f64,
        experts_mb: f64,
        gbyte_per_s: f64,
        pre_expert_ms: f64,
    ) -> StreamModel {
        StreamModel::new(StreamInput {
            gpus,
            token_bytes: Bytes::from_mb(tokens_mb),
            expert_bytes: Bytes::from_mb(experts_mb),
            bandwidth: BytesPerSecond::from_gb_per_s(gbyte_per_s),
            pre_expert: Seconds::from_ms(pre_expert_ms),
        })
        .unwrap()
    }

    /// Parameters spread over decades, so that every regime occurs.
    fn random_model(rng: &mut ChaCha8Rng) -> StreamModel {
        let mut decades = |low: f64, high: f64| 10f64.powf(rng.random_range(low..high));
        let (tokens, experts) = (decades(-2.0, 3.0), decades(-4.0, 3.0));
        let (bandwidth, pre_expert) = (decades(-2.0, 2.0), decades(-2.0, 2.0));
        model(rng.random_range(1..=1024), tokens, experts, bandwidth, pre_expert)
    }

    #[test]
    fn the_closed_form_is_the_argmin_on_100_000_random_models() {
        let mut rng = ChaCha8Rng::seed_from_u64(2510);
        let mut regimes = [0; 3];
        for _ in 0..100_000 {
            let model = random_model(&mut rng);
            regimes[model.continuous_optimum().regime as usize] += 1;
            assert_eq!(model.best_domain_size(), model.best_domain_size_by_search(), "{model:?}");
        }
        assert!(regimes.iter().all(|&count| count > 1000), "a regime occurred too rarely: {regimes:?}");
    }

    #[test]
    fn the_latency_is_convex_over_the_divisors() {
        let mut rng = ChaCha8Rng::seed_from_u64(19470);
        for _ in 0..2_000 {
            let model = random_model(&mut rng);
            let points: Vec<(f64, f64)> = model
                .domain_sizes()
                .iter()
                .map(|&size| (size as f64, model.latency(size).unwrap().0))
                .collect();
            for window in points.windows(3) {
                let slope = |a: (f64, f64), b: (f64, f64)| (b.1 - a.1) / (b.0 - a.0);
                let (left, right) = (slope(window[0], window[1]), slope(window[1], window[2]));
                assert!(left <= right + 1e-12 * window[0].1, "{model:?}: {window:?}");
            }
        }
    }

    #[test]
    fn the_best_divisor_is_next_to_the_continuous_optimum() {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        for _ in 0..10_000 {
            let model = random_model(&mut rng);
            let target = model.continuous_optimum().domain_size;
            let best = model.best_domain_size_by_search() as f64;
            let between = model
                .domain_sizes()
                .iter()
                .any(|&size| (size as f64 - best) * (target - size as f64) > 0.0 && size as f64 != best);
            assert!(!between, "{model:?}: a divisor lies between {best} and {target}");
        }
    }

    #[test]
    fn ties_go_to_the_smaller_domain() {
        // Equal slopes (2 D = G P_E) and nothing to hide behind: the latency is the same for every domain.
        let flat = model(8, 4.0, 1.0, 16.0, 0.0);
        assert_eq!((flat.best_domain_size(), flat.best_domain_size_by_search()), (1, 1));
        // Flat only beyond the point where the gather fills the compute: S = 1 + 16 GB/s x 0.1875 ms / 1 MB = 4.
        let flat_from_four = model(8, 4.0, 1.0, 16.0, 0.1875);
        assert_eq!((flat_from_four.best_domain_size(), flat_from_four.best_domain_size_by_search()), (4, 4));
        // Without tokens, no domain saves anything.
        let idle = model(8, 0.0, 0.0, 16.0, 1.0);
        assert_eq!((idle.best_domain_size(), idle.best_domain_size_by_search()), (1, 1));
    }

    #[test]
    fn proportions_and_domain_sizes_are_inverse() {
        let model = model(1000, 2.0, 0.002, 1.25, 15.0);
        for size in model.domain_sizes() {
            assert_eq!(model.domain_size_of(model.data_proportion(size).unwrap()).unwrap(), size);
        }
        assert_eq!(model.data_proportion(1).unwrap(), 1.0);
        assert_eq!(model.data_proportion(1000).unwrap(), 0.0);
        assert!(matches!(model.domain_size_of(0.3), Err(PlanError::Proportion { .. })));
        assert!(model.domain_size_of(f64::NAN).is_err());
        // Each of the possible proportions that the error names gives its domain size.
        let Err(PlanError::Proportion { possible, .. }) = model.domain_size_of(0.3) else {
            panic!("0.3 is none")
        };
        let sizes: Vec<_> = possible.iter().map(|&p| model.domain_size_of(p).unwrap()).collect();
        assert_eq!(sizes, model.domain_sizes());
    }

    #[test]
    fn impossible_numbers_say_what_would_be_possible() {
        let good = *model(8, 8.0, 4.7, 16.0, 0.049).input();
        let error = |input| StreamModel::new(input).unwrap_err().to_string();
        assert_eq!(
            error(StreamInput { bandwidth: BytesPerSecond::ZERO, ..good }),
            "bandwidth in bytes per second is 0: it must be finite and above zero"
        );
        assert!(error(StreamInput { gpus: 0, ..good }).contains("at least one"));
        assert!(error(StreamInput { token_bytes: Bytes(f64::NAN), ..good }).contains("token bytes is NaN"));
        assert!(error(StreamInput { pre_expert: Seconds(-1.0), ..good }).contains("at least zero"));
        assert_eq!(
            StreamModel::new(good).unwrap().latency(3).unwrap_err().to_string(),
            "level 0: a domain of 3 does not divide its 8 members; possible: 1, 2, 4, 8"
        );
        assert!(StreamModel::new(good).unwrap().latency(0).is_err());
    }
}
