//! A prepared case: the inputs of every rank, and the outputs that the oracle expects.

use super::case::{CapacityKind, Case, ProbsKind};
use super::inputs::routings;
use crate::backend::{DispatchMode, Element};
use crate::error::Result;
use crate::oracle::{self, CombineSpec, Dispatched, ReceivedRows, Tokens};
use crate::routing::Routing;
use crate::topology::{Rank, World};

/// A case with the inputs of all ranks and their outputs according to the oracle.
#[derive(Debug)]
pub struct Prepared {
    pub(super) case: Case,
    pub(super) world: World,
    pub(super) routings: Vec<Routing>,
    pub(super) capacity: Vec<Option<usize>>,
    /// The rows that each rank receives.
    pub(super) received: Vec<ReceivedRows>,
    /// The routings of a second handle, made while the case's handle is in use, and the rows that each rank receives for them.
    pub(super) decoys: Vec<Routing>,
    pub(super) decoys_received: Vec<ReceivedRows>,
    /// Indexed by run, then by rank.
    pub(super) runs: Vec<Vec<Content>>,
}

/// The inputs and expected outputs of one rank in one run.
#[derive(Debug)]
pub(super) struct Content {
    /// Input of dispatch. `probs` is the dense matrix of the probabilities, even if they are the routing's weights.
    pub(super) input: Tokens,
    pub(super) dispatched: Dispatched,
    /// Input of combine: `[allocated rows, hidden]`.
    pub(super) expert_rows: Vec<u8>,
    /// Input of combine: `[allocated rows]` (permuted mode) or `[allocated rows, local experts]` (plain mode).
    pub(super) row_probs: Vec<f32>,
    pub(super) combined: Vec<u8>,
    pub(super) combined_probs: Vec<f32>,
    /// The sums in double precision; empty with special values.
    pub(super) exact: Vec<Exact>,
}

/// A sum in double precision.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exact {
    pub(super) sum: f64,
    /// The largest error that the roundings of the contract can cause.
    pub(super) bound: f64,
}

impl Case {
    /// Generates the inputs of all ranks, and computes their expected outputs with the oracle.
    ///
    /// # Errors
    /// [`crate::CallerError`] for an invalid case.
    pub fn prepare(&self) -> Result<Prepared> {
        self.prepare_in(self.world()?, 0)
    }

    /// Like [`prepare`](Self::prepare), in a world that the caller has made, with runs numbered from `first_run`. The
    /// number of a run determines its tokens, expert outputs and probabilities, but not the routing.
    pub(super) fn prepare_in(&self, world: World, first_run: usize) -> Result<Prepared> {
        self.check()?;
        let routings = routings(self, &world)?;
        let capacity = self.capacity_rows(&world, &routings);
        let received = oracle::rows(&world, &routings, self.mode, &capacity);
        let decoys: Vec<Routing> = world.topology().all_ranks().map(|rank| self.decoy_of(rank)).collect();
        let decoys_received = oracle::rows(&world, &decoys, self.mode, &vec![None; self.ranks]);
        let mut prepared = Prepared {
            case: self.clone(),
            world,
            routings,
            capacity,
            received,
            decoys,
            decoys_received,
            runs: Vec::new(),
        };
        prepared.runs = (first_run..first_run + self.runs.max(1)).map(|run| prepared.expect(run)).collect();
        Ok(prepared)
    }

    fn capacity_rows(&self, world: &World, routings: &[Routing]) -> Vec<Option<usize>> {
        if self.capacity.iter().all(|&kind| kind == CapacityKind::Unbounded) {
            return vec![None; self.ranks];
        }
        let wanted = oracle::rows(world, routings, self.mode, &vec![None; self.ranks]);
        let pad_multiple = self.mode.pad_multiple();
        self.capacity
            .iter()
            .zip(&wanted)
            .map(|(kind, wanted)| kind.rows(wanted.shape.rows, pad_multiple))
            .collect()
    }
}

impl Prepared {
    /// The case.
    pub fn case(&self) -> &Case {
        &self.case
    }

    /// The world whose ranks can [`check`](Self::check) the case.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Number of runs.
    pub(super) fn runs(&self) -> usize {
        self.runs.len()
    }

    /// The inputs and expected outputs of a rank in one run.
    pub(super) fn content(&self, run: usize, rank: Rank) -> &Content {
        &self.runs[run][rank.index()]
    }

    /// Probabilities per received row.
    pub(super) fn probs_per_row(&self, rank: Rank) -> usize {
        match self.case.mode {
            DispatchMode::Plain => self.world.placement().local_experts(rank),
            DispatchMode::Permuted { .. } => 1,
        }
    }

    /// The width and element types of the case's combines.
    fn spec(&self) -> CombineSpec {
        CombineSpec { hidden: self.case.hidden, element: self.case.element, wire: self.case.wire }
    }

    /// The content of all ranks in one run.
    fn expect(&self, run: usize) -> Vec<Content> {
        let Self { case, world, routings, received, .. } = self;
        let ranks = || world.topology().all_ranks();
        let inputs: Vec<Tokens> = ranks()
            .map(|rank| {
                let (data, scales) = case.tokens_of(rank, run);
                let probs = match case.probs {
                    ProbsKind::Dense => case.dense_of(rank, run),
                    ProbsKind::Skip | ProbsKind::Routing => routings[rank.index()].dense_probs(),
                };
                Tokens { data, scales, probs }
            })
            .collect();
        let dispatched = oracle::dispatch(world, received, case.mode, case.format, case.hidden, &inputs);
        let expert_rows: Vec<Vec<u8>> =
            ranks().map(|rank| case.expert_rows_of(rank, run, &received[rank.index()])).collect();
        let row_probs: Vec<Vec<f32>> = ranks()
            .map(|rank| {
                let rows = received[rank.index()].shape.allocated_rows();
                case.row_probs_of(rank, run, rows * self.probs_per_row(rank))
            })
            .collect();
        let combined = oracle::combine(world, routings, received, self.spec(), &expert_rows);
        let combined_probs = oracle::combine_probs(world, routings, received, case.mode, &row_probs);
        let exact = self.exact_sums(&expert_rows);

        let mut given = inputs.into_iter().zip(dispatched).zip(expert_rows).zip(row_probs);
        let got = combined.into_iter().zip(combined_probs).zip(exact);
        let of_rank = |((combined, combined_probs), exact)| {
            let (((input, dispatched), expert_rows), row_probs) = given.next()?;
            Some(Content { input, dispatched, expert_rows, row_probs, combined, combined_probs, exact })
        };
        got.map_while(of_rank).collect()
    }

    fn exact_sums(&self, expert_rows: &[Vec<u8>]) -> Vec<Vec<Exact>> {
        if self.case.special {
            return vec![Vec::new(); self.case.ranks];
        }
        let sums = oracle::combine_f64(&self.routings, &self.received, self.spec(), expert_rows);
        let of_rank = |(routing, sums): (&Routing, Vec<(f64, f64)>)| {
            let tokens = sums.chunks_exact(self.case.hidden).enumerate();
            let of_token = |(token, sums): (usize, &[(f64, f64)])| {
                let relative = self.relative_bound(routing.experts_of(token).len());
                sums.iter().map(|&(sum, size)| Exact { sum, bound: relative * size }).collect::<Vec<_>>()
            };
            tokens.flat_map(of_token).collect()
        };
        self.routings.iter().zip(sums).map(of_rank).collect()
    }

    /// The largest error of a sum of `summands`, relative to the sum of their magnitudes.
    ///
    /// A rounding has a relative error of at most `u`, half a unit in the last place, and `d` successive roundings have
    /// at most `(1 + u)^d - 1`. A summand is part of at most one f32 addition per summand, per rank of the domain and per
    /// domain, and is rounded at most once to the wire type between ranks, once between domains, and once to the type of the
    /// result.
    fn relative_bound(&self, summands: usize) -> f64 {
        const HALF_ULP_BF16: f64 = 1.0 / 256.0;
        const HALF_ULP_F32: f64 = 1.0 / 16_777_216.0;
        let topology = self.world.topology();
        let additions = summands + topology.domain_size() + topology.domains();
        let crossings = usize::from(topology.domain_size() > 1) + usize::from(topology.domains() > 1);
        let on_wire = if self.case.wire == Element::Bf16 { crossings } else { 0 };
        let to_bf16 = on_wire + usize::from(self.case.element == Element::Bf16);
        (1.0 + HALF_ULP_F32).powi(additions as i32) * (1.0 + HALF_ULP_BF16).powi(to_bf16 as i32) - 1.0
    }
}
