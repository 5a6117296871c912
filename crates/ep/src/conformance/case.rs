//! A case: all parameters that determine what the ranks send and receive.

use std::fmt;
use std::num::NonZeroU32;

use crate::backend::{DispatchMode, Element, TokenFormat, check_row_bytes};
use crate::error::{CallerError, Result};
use crate::topology::{Rank, World};

/// One test case: all parameters of the operators' calls on all ranks. Vectors with one entry per rank are in rank
/// order.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The purpose of the case, for messages.
    pub name: String,
    /// Seed of all random content.
    pub seed: u64,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of NVLink domains.
    pub domains: usize,
    /// Number of experts.
    pub experts: usize,
    /// `[experts]`: the rank of each expert; `None` = contiguous placement.
    pub owners: Option<Vec<Rank>>,
    /// `[ranks]`: tokens of each rank.
    pub tokens: Vec<usize>,
    /// Width of a token, in elements.
    pub hidden: usize,
    /// Which experts the tokens choose.
    pub routing: RoutingKind,
    /// How dispatch arranges rows.
    pub mode: DispatchMode,
    /// `[ranks]`: row capacity of each rank.
    pub capacity: Vec<CapacityKind>,
    /// Element types of dispatch.
    pub format: TokenFormat,
    /// Element type of expert outputs and of combined tokens.
    pub element: Element,
    /// Element type of partial sums and domain sums that cross from rank to rank.
    pub wire: Element,
    /// Probabilities that dispatch sends with the tokens.
    pub probs: ProbsKind,
    /// Whether values include NaN, infinities, subnormals, negative zeros, and values whose sum overflows.
    pub special: bool,
    /// Number of runs on the same handle, at least 1: each dispatches and combines new content.
    pub runs: usize,
}

/// Which experts tokens choose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RoutingKind {
    /// Every token chooses the same number of experts; some experts are more popular than others.
    TopK {
        /// Experts per token; all experts of the world if it has fewer.
        k: usize,
        /// Zipf exponent of the experts' popularity.
        skew: f64,
    },
    /// A routing map. Of five rows one chooses no expert, one chooses all experts, and three are random. Some weights
    /// are zero.
    MultiHot {
        /// Probability of each entry of the random rows.
        density: f64,
    },
    /// Every token of every rank chooses the same single expert.
    HotExpert,
    /// No token chooses an expert.
    Nothing,
}

/// The row capacity of a rank, relative to the rows that it would receive without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapacityKind {
    /// No capacity.
    Unbounded,
    /// Exactly the number of rows without a capacity.
    Exact,
    /// About half the number of rows without a capacity; always less, unless that number is 0.
    TooSmall,
    /// 0 rows.
    Zero,
    /// More rows than without a capacity.
    Larger,
}

impl CapacityKind {
    /// The capacity of a rank that would receive `wanted` rows without one.
    pub(super) fn rows(self, wanted: usize, pad_multiple: usize) -> Option<usize> {
        match self {
            Self::Unbounded => None,
            Self::Exact => Some(wanted),
            Self::TooSmall => Some(wanted / pad_multiple / 2 * pad_multiple),
            Self::Zero => Some(0),
            Self::Larger => Some(wanted + 3 * pad_multiple),
        }
    }
}

impl fmt::Display for CapacityKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unbounded => "none",
            Self::Exact => "exact",
            Self::TooSmall => "too-small",
            Self::Zero => "zero",
            Self::Larger => "larger",
        })
    }
}

/// The probabilities that dispatch sends with the tokens ([`Probs`](crate::Probs)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbsKind {
    /// No probabilities.
    Skip,
    /// The routing's weights.
    Routing,
    /// A dense matrix, non-zero even where a token did not choose the expert.
    Dense,
}

/// The forms of a routing in memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Form {
    Narrow,
    Wide,
    Map,
}

impl Form {
    /// The form of the cases with this seed; `None` = a [`Routing`] on the host.
    pub(super) fn of(seed: u64) -> Option<Self> {
        [None, Some(Self::Narrow), Some(Self::Wide), Some(Self::Map)][(seed % 4) as usize]
    }
}

impl Case {
    /// A simple case to vary: different numbers of tokens, top-4, permuted rows of 64 bf16, three runs.
    pub(super) fn base(name: impl Into<String>, ranks: usize, domains: usize, experts: usize) -> Self {
        Self {
            name: name.into(),
            seed: 1,
            ranks,
            domains,
            experts,
            owners: None,
            tokens: (0..ranks).map(|rank| 4 + rank * 5 % 7).collect(),
            hidden: 64,
            routing: RoutingKind::TopK { k: 4, skew: 0.5 },
            mode: pad(16),
            capacity: vec![CapacityKind::Unbounded; ranks],
            format: TokenFormat::Bf16,
            element: Element::Bf16,
            wire: Element::Bf16,
            probs: ProbsKind::Routing,
            special: false,
            runs: 3,
        }
    }

    /// The world of the case.
    ///
    /// # Errors
    /// [`CallerError`] when the parameters give no valid world.
    pub fn world(&self) -> Result<World> {
        let world = World::builder().ranks(self.ranks).domains(self.domains);
        match &self.owners {
            None => world.experts(self.experts).build(),
            Some(owners) => {
                check_len("owners", self.experts, owners.len(), "experts")?;
                world.placement(owners).build()
            }
        }
    }

    /// Checks the parameters that [`world`](Self::world) does not check: lengths of per-rank vectors, sizes of rows.
    pub(super) fn check(&self) -> Result<()> {
        check_len("tokens", self.ranks, self.tokens.len(), "ranks")?;
        check_len("capacity", self.ranks, self.capacity.len(), "ranks")?;
        check_row_bytes(self.hidden, self.format.input_row_bytes(self.hidden))?;
        check_row_bytes(self.hidden, self.format.output_row_bytes(self.hidden))?;
        check_row_bytes(self.hidden, self.hidden * self.element.bytes())
    }
}

fn check_len(what: &'static str, expected: usize, found: usize, unit: &'static str) -> Result<()> {
    if expected == found { Ok(()) } else { Err(CallerError::Shape { what, expected, found, unit }.into()) }
}

impl fmt::Display for Case {
    /// One line with all parameters.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, seed, ranks, domains, experts, hidden, .. } = self;
        write!(f, "{name}: seed {seed}, {ranks} ranks in {domains} domains, {experts} experts")?;
        if let Some(owners) = &self.owners {
            write!(f, " on ranks ")?;
            list(f, owners)?;
        }
        write!(f, ", tokens ")?;
        list(f, &self.tokens)?;
        write!(f, " of {hidden}, ")?;
        match self.routing {
            RoutingKind::TopK { k, skew } => write!(f, "top-{k} skew {skew}")?,
            RoutingKind::MultiHot { density } => write!(f, "multi-hot {density}")?,
            RoutingKind::HotExpert => write!(f, "one hot expert")?,
            RoutingKind::Nothing => write!(f, "nothing chosen")?,
        }
        match self.mode {
            DispatchMode::Plain => write!(f, ", plain")?,
            DispatchMode::Permuted { pad_multiple } => write!(f, ", permuted pad {pad_multiple}")?,
        }
        write!(f, ", capacity ")?;
        list(f, &self.capacity)?;
        let Self { format, element, wire, probs, runs, .. } = self;
        let special = if self.special { ", special values" } else { "" };
        write!(f, ", {format:?}, combine {element:?} over {wire:?}, probs {probs:?}{special}, {runs} runs")
    }
}

/// Formats a list. If all entries are equal, the text has the entry once.
fn list<T: PartialEq + fmt::Display>(f: &mut fmt::Formatter<'_>, all: &[T]) -> fmt::Result {
    match all {
        [first, rest @ ..] if !rest.is_empty() && rest.iter().all(|other| other == first) => {
            write!(f, "{first} each")
        }
        _ => {
            let entries: Vec<String> = all.iter().map(T::to_string).collect();
            write!(f, "[{}]", entries.join(" "))
        }
    }
}

pub(super) const fn pad(pad_multiple: u32) -> DispatchMode {
    match NonZeroU32::new(pad_multiple) {
        Some(pad_multiple) => DispatchMode::Permuted { pad_multiple },
        None => panic!("a case pads to a multiple of at least 1"),
    }
}
