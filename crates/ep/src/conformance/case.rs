//! A case: everything that decides what is sent where, and nothing that does not.

use std::fmt;

use crate::backend::{DispatchMode, Element, TokenFormat, check_row_bytes};
use crate::error::{CallerError, Result};
use crate::topology::{ExpertPlacement, Rank, Topology, World};

/// One point of the space in which backends must equal the oracle.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// What the case is for.
    pub name: String,
    /// All random content follows from it.
    pub seed: u64,
    /// Ranks of the world.
    pub ranks: usize,
    /// NVLink domains of equal size.
    pub domains: usize,
    /// Experts of the world.
    pub experts: usize,
    /// The rank of each expert; `None` = contiguous.
    pub owners: Option<Vec<Rank>>,
    /// Tokens of each rank.
    pub tokens: Vec<usize>,
    /// Width of a token, elements.
    pub hidden: usize,
    /// Which experts the tokens choose.
    pub routing: RoutingKind,
    /// How dispatch arranges rows.
    pub mode: DispatchMode,
    /// Row capacity of each rank.
    pub capacity: Vec<CapacityKind>,
    /// What dispatch takes and delivers.
    pub format: TokenFormat,
    /// Type of expert outputs and of combined tokens.
    pub element: Element,
    /// Type of partial sums between ranks.
    pub wire: Element,
    /// Probabilities that travel with dispatch.
    pub probs: ProbsKind,
    /// Whether values include NaN, infinities, subnormals, negative zeros, and what overflows in a sum.
    pub special: bool,
    /// Dispatches and combines on the one handle, each with fresh content; at least 1.
    pub runs: usize,
}

/// Which experts tokens choose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RoutingKind {
    /// The same number of experts for every token, some experts more popular than others.
    TopK {
        /// Experts per token; all of them when there are fewer.
        k: usize,
        /// Zipf exponent of the experts' popularity.
        skew: f64,
    },
    /// A routing map: one row in five is all false, one is all true, the others are drawn. Some weights are zero.
    MultiHot {
        /// Probability of each entry of the rows that are drawn.
        density: f64,
    },
    /// Every token of every rank chooses the same expert, and no other.
    HotExpert,
    /// There are tokens, but none chooses an expert.
    Nothing,
}

/// The row capacity of a rank, relative to what it would receive without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapacityKind {
    /// None is given.
    Unbounded,
    /// Exactly what comes.
    Exact,
    /// About half of what comes, and less than it if anything comes.
    TooSmall,
    /// No row.
    Zero,
    /// More than what comes.
    Larger,
}

impl CapacityKind {
    /// The rows to give, for a rank that `wanted` rows want to come to.
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

/// Probabilities that travel with dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbsKind {
    /// None.
    Skip,
    /// The routing's weights.
    Routing,
    /// A dense matrix, filled where nothing is chosen too.
    Dense,
}

impl Case {
    /// A plain case to vary: unequal numbers of tokens, top-4, padded rows of 64 bf16, three runs.
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
            mode: DispatchMode::Permuted { pad_multiple: 16 },
            capacity: vec![CapacityKind::Unbounded; ranks],
            format: TokenFormat::Bf16,
            element: Element::Bf16,
            wire: Element::Bf16,
            probs: ProbsKind::Routing,
            special: false,
            runs: 3,
        }
    }

    /// The ranks and experts.
    ///
    /// # Errors
    /// [`CallerError`] for a world that cannot exist.
    pub fn world(&self) -> Result<World> {
        match &self.owners {
            None => World::new(self.ranks, self.domains, self.experts),
            Some(owners) => {
                check_len("owners", self.experts, owners.len(), "experts")?;
                let topology = Topology::new(self.ranks, self.domains)?;
                let placement = ExpertPlacement::table(owners, &topology)?;
                Ok(World { topology, placement })
            }
        }
    }

    /// Checks what [`world`](Self::world) does not: lengths of the per-rank lists, widths of rows.
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
    /// One line: all that decides the case's content.
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

/// A list; equal entries are said once.
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
