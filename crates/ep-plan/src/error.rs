//! What cannot be planned, and what could be instead.

use crate::units::Bytes;

/// What every fallible function of the crate returns.
pub type Result<T, E = PlanError> = std::result::Result<T, E>;

/// A description that no plan can serve. Every message ends with what would be possible.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A number outside the range in which the model means anything.
    #[error("{what} is {value}: it must be {needed}")]
    Quantity {
        /// Which number, with its unit.
        what: String,
        /// What was given.
        value: f64,
        /// What would be possible.
        needed: &'static str,
    },
    /// A domain that does not divide its level.
    #[error(
        "level {level}: a domain of {domain_size} does not divide its {scaling_factor} members; possible: {}",
        list(possible)
    )]
    DomainSize {
        /// The level, counted from the outermost.
        level: usize,
        /// What was given.
        domain_size: usize,
        /// Members of the level.
        scaling_factor: usize,
        /// The divisors of the scaling factor.
        possible: Vec<usize>,
    },
    /// A proportion of data that no domain size gives.
    #[error("a data proportion of {proportion} belongs to no domain size; possible: {}", list(possible))]
    Proportion {
        /// What was given.
        proportion: f64,
        /// The proportions of the divisors.
        possible: Vec<f64>,
    },
    /// As many entries as levels are needed.
    #[error("{what}: {found} given for {levels} levels; give exactly one per level, and at least one level")]
    Levels {
        /// What is counted.
        what: &'static str,
        /// How many were given.
        found: usize,
        /// How many levels there are.
        levels: usize,
    },
    /// A GPU or an expert that does not exist.
    #[error("{what} {index} does not exist: there are {count}, numbered from 0")]
    Index {
        /// What was indexed.
        what: &'static str,
        /// What was given.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// Experts that cannot be spread evenly.
    #[error(
        "{experts} experts cannot be spread evenly over {gpus} GPUs; possible numbers of GPUs: {} \
         (replicate the remaining GPUs by data or tensor parallelism, outside this plan)",
        list(possible)
    )]
    Experts {
        /// Routed experts of a layer.
        experts: usize,
        /// GPUs of the cluster.
        gpus: usize,
        /// Numbers of GPUs that would do.
        possible: Vec<usize>,
    },
    /// A top-k that the experts cannot serve.
    #[error(
        "top-{topk} of {experts} experts: a token chooses at least 1 and at most {experts} distinct experts"
    )]
    Topk {
        /// Experts that a token chooses.
        topk: usize,
        /// Routed experts of a layer.
        experts: usize,
    },
    /// A routing histogram that no routing can have produced.
    #[error("routing histogram: {0}")]
    Histogram(String),
    /// A GPU that cannot hold even its own experts.
    #[error(
        "a GPU has {available} for experts, and its own experts alone need {needed}; possible: {}more GPUs, or more \
         memory",
        pipeline_stages.map_or_else(String::new, |stages| format!("at least {stages} pipeline stages, or "))
    )]
    OwnExperts {
        /// What the device has left after the reserve.
        available: Bytes,
        /// What the GPU's own experts take.
        needed: Bytes,
        /// The smallest number of pipeline stages at which they fit, if any does.
        pipeline_stages: Option<usize>,
    },
    /// Domain sizes whose gathered experts do not fit.
    #[error(
        "domain sizes {domain_sizes:?} gather {needed} of experts onto each GPU, which may hold {cap}; \
         possible: at most {largest} GPUs in a domain"
    )]
    GatheredExperts {
        /// What was asked for.
        domain_sizes: Vec<usize>,
        /// What the gathered experts take.
        needed: Bytes,
        /// What may be used for them.
        cap: Bytes,
        /// The largest product of domain sizes that fits.
        largest: usize,
    },
}

/// Checks that a number is finite and above zero.
pub(crate) fn positive(what: impl Into<String>, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(PlanError::Quantity { what: what.into(), value, needed: "finite and above zero" })
}

/// Checks that a number is finite and not negative.
pub(crate) fn not_negative(what: impl Into<String>, value: f64) -> Result<f64> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(PlanError::Quantity { what: what.into(), value, needed: "finite and at least zero" })
}

/// Checks that a count is at least one.
pub(crate) fn at_least_one(what: impl Into<String>, value: usize) -> Result<usize> {
    if value > 0 {
        return Ok(value);
    }
    Err(PlanError::Quantity { what: what.into(), value: 0.0, needed: "at least one" })
}

fn list<T: ToString>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}
