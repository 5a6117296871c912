//! Errors of planning and simulation. Every message says what is wrong and which values would be possible.

use crate::limits::{Count, Number, Shown};
use crate::units::Bytes;

/// The result type of the crate's fallible functions, except those of [`input`](crate::input).
pub type Result<T, E = PlanError> = std::result::Result<T, E>;

/// The caller's description cannot be planned or simulated. Every message says what would be possible.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A number is outside its range.
    #[error("{what} is {}: it must be {needed}", Shown(*value))]
    Quantity {
        /// Name of the number, with its unit.
        what: String,
        /// The value that was given.
        value: f64,
        /// The range that is possible, as text.
        needed: String,
    },
    /// A whole number is outside its range.
    #[error("{what} is {value}: it must be {range}")]
    Count {
        /// Name of the number, with its unit.
        what: String,
        /// The value that was given.
        value: usize,
        /// The range that is possible.
        range: Count,
    },
    /// Each number is possible by itself, but together they ask for more than the crate computes.
    #[error("{count} {what}: at most {most} can be computed; {hint}")]
    TooMany {
        /// The things that are counted.
        what: String,
        /// Their number. It is an `f64` because it may exceed every integer type.
        count: f64,
        /// The largest possible number.
        most: usize,
        /// What the caller should change.
        hint: &'static str,
    },
    /// A domain size does not divide the number of members of its level.
    #[error(
        "level {level}: a domain of {domain_size} does not divide its {scaling_factor} members; possible: {}",
        list(possible)
    )]
    DomainSize {
        /// The level, numbered from 0, outermost first.
        level: usize,
        /// The domain size that was given.
        domain_size: usize,
        /// Members of the level.
        scaling_factor: usize,
        /// The divisors of the number of members.
        possible: Vec<usize>,
    },
    /// No domain size gives this data proportion.
    #[error("no domain size gives a data proportion of {proportion}; possible: {}", list(possible))]
    Proportion {
        /// The proportion that was given.
        proportion: f64,
        /// The proportions that the divisors give.
        possible: Vec<f64>,
    },
    /// A list does not have one entry per level.
    #[error("{what}: {found} given for {levels} levels; give exactly one per level, and at least one level")]
    Levels {
        /// The entries that are counted.
        what: &'static str,
        /// The number of entries that were given.
        found: usize,
        /// The number of levels.
        levels: usize,
    },
    /// A level, a GPU or a link does not exist.
    #[error("{what} {index} does not exist: there are {count}, numbered from 0")]
    Index {
        /// The kind of thing that was indexed.
        what: &'static str,
        /// The index that was given.
        index: usize,
        /// The number of such things.
        count: usize,
    },
    /// The number of experts is not a multiple of the number of GPUs.
    #[error(
        "{experts} experts cannot be spread evenly over {gpus} GPUs; possible numbers of GPUs: {} \
         (use the remaining GPUs for data or tensor parallelism, outside this plan)",
        list(possible)
    )]
    Experts {
        /// Routed experts of a layer.
        experts: usize,
        /// GPUs of the cluster.
        gpus: usize,
        /// The numbers of GPUs that divide the number of experts.
        possible: Vec<usize>,
    },
    /// `topk` is zero or larger than the number of experts.
    #[error(
        "top-{topk} of {experts} experts: a token chooses at least 1 and at most {experts} distinct experts"
    )]
    Topk {
        /// Experts that a token chooses.
        topk: usize,
        /// Routed experts of a layer.
        experts: usize,
    },
    /// No routing can have produced this histogram. The text says why.
    #[error("routing histogram: {0}")]
    Histogram(String),
    /// A GPU cannot hold even its own experts.
    #[error(
        "a GPU has {available} for experts, and its own experts alone need {needed}; possible: {}more GPUs, or more \
         memory",
        pipeline_stages.map_or_else(String::new, |stages| format!("at least {stages} pipeline stages, or "))
    )]
    OwnExperts {
        /// Memory of the device after the reserve.
        available: Bytes,
        /// Memory that the GPU's own experts take.
        needed: Bytes,
        /// The smallest number of pipeline stages at which they fit, if there is one.
        pipeline_stages: Option<usize>,
    },
    /// All GPUs together cannot hold the model.
    #[error(
        "weights, gradients and Adam state of the model need {needed}, and the {gpus} GPUs have {available} together; \
         possible: more GPUs (at least {}), more memory (at least {} in each), or a smaller model",
        (*gpus as f64 * (needed.0 / available.0)).ceil(),
        Bytes(needed.0 / *gpus as f64)
    )]
    TotalMemory {
        /// Memory that one copy of the model needs.
        needed: Bytes,
        /// Memory of all GPUs.
        available: Bytes,
        /// GPUs of the cluster.
        gpus: usize,
    },
    /// No division of the GPUs into stages and groups fits into memory.
    #[error(
        "a GPU has {device}, and every layout{} needs at least {needed} for weights, gradients and Adam state, because a \
         GPU holds whole experts of whole layers; possible: more GPUs, more memory{}",
        if fixed.is_empty() { String::new() } else { format!(" with {fixed}") },
        if fixed.is_empty() { ", or a smaller model" } else { ", or another layout" }
    )]
    NoLayout {
        /// The least memory of a GPU that a layout needs.
        needed: Bytes,
        /// Memory of a GPU.
        device: Bytes,
        /// What the options fix of a layout, as text such as `pipeline_stages = 2`; empty if they fix nothing.
        fixed: String,
    },
    /// No layout has the value that an option fixes.
    #[error(
        "{key} is {value}, and no division of these GPUs and layers has that; possible: {}",
        list(possible)
    )]
    Division {
        /// The option: `pipeline_stages`, `expert_parallel` or `tensor_parallel`. Options before it in this order keep their
        /// values.
        key: &'static str,
        /// Its value.
        value: usize,
        /// The values for which a layout exists.
        possible: Vec<usize>,
    },
    /// Entries of a level do not fit each other, or a list with one entry per site does not fit the cluster.
    #[error("level '{level}' {what}; possible: {needed}")]
    Sites {
        /// Name of the level.
        level: String,
        /// What is wrong.
        what: String,
        /// What would be possible.
        needed: String,
    },
    /// A feature needs equal sites, and the sites are unequal.
    #[error(
        "{what} needs equal sites, and level '{level}' has {members} members in them; possible: {possible}"
    )]
    Unequal {
        /// What needs equal sites.
        what: &'static str,
        /// Name of the level with unequal numbers of members.
        level: String,
        /// Its members in each site, as text.
        members: String,
        /// What would be possible.
        possible: &'static str,
    },
    /// Forward passes alone have no optimizer step.
    #[error("forward passes have no optimizer step to compare; possible: work = training, setting = full")]
    Forward,
    /// The gathered experts of these domain sizes do not fit into memory.
    #[error(
        "domain sizes {domain_sizes:?} gather {needed} of experts onto each GPU, which may hold {cap}; \
         possible: at most {largest} GPUs in a domain"
    )]
    GatheredExperts {
        /// The domain sizes that were given, outermost level first.
        domain_sizes: Vec<usize>,
        /// Memory that the gathered experts take.
        needed: Bytes,
        /// Memory that gathered experts may take.
        cap: Bytes,
        /// The largest product of domain sizes that fits, GPUs.
        largest: usize,
    },
}

/// Returns the number if it is finite and above zero.
pub(crate) fn positive(what: impl Into<String>, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(PlanError::Quantity { what: what.into(), value, needed: "finite and above zero".into() })
}

/// Returns the number if it is finite and not negative.
pub(crate) fn not_negative(what: impl Into<String>, value: f64) -> Result<f64> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(PlanError::Quantity { what: what.into(), value, needed: "finite and at least zero".into() })
}

/// Returns the count if it is at least one.
pub(crate) fn at_least_one(what: impl Into<String>, value: usize) -> Result<usize> {
    if value > 0 {
        return Ok(value);
    }
    Err(PlanError::Quantity { what: what.into(), value: 0.0, needed: "at least one".into() })
}

/// Returns the whole number if its range contains it.
pub(crate) fn count(what: impl Into<String>, value: usize, range: Count) -> Result<usize> {
    if range.allows(value) {
        return Ok(value);
    }
    Err(PlanError::Count { what: what.into(), value, range })
}

/// Returns the number if its range contains it.
pub(crate) fn number(what: impl Into<String>, value: f64, range: Number) -> Result<f64> {
    if range.allows(value) {
        return Ok(value);
    }
    Err(PlanError::Quantity { what: what.into(), value, needed: range.to_string() })
}

fn list<T: ToString>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}
