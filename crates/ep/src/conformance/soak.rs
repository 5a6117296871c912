//! A soak: an endless sequence of cases in one world on one backend. Some cases reuse handles of earlier ones.

use std::collections::BTreeMap;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::case::Case;
use super::failure::Failure;
use super::prepared::Prepared;
use super::random::{RandomWorld, Size};
use crate::error::Result;
use crate::topology::World;
use crate::weight::WeightRows;

/// One of this many iterations makes a handle that is kept.
const KEEP_EVERY: u64 = 5;
/// Number of handles that are kept.
const KEPT: u64 = 8;
/// Maximum number of runs of an iteration.
const MOST_RUNS: usize = 2;

/// A sequence of iterations in one world, determined by the seed and the size of the world. Each iteration can be
/// prepared without the earlier ones.
#[derive(Debug, Clone)]
pub struct Soak {
    seed: u64,
    drawn: RandomWorld,
    world: World,
}

/// One prepared iteration.
#[derive(Debug)]
pub struct Iteration {
    number: u64,
    /// The iteration that makes the handle.
    maker: u64,
    prepared: Prepared,
}

/// One rank's state in a soak: the handles that it keeps.
#[derive(Debug)]
pub struct Soaking<H> {
    /// The handles, by the number of the iteration that made them.
    handles: BTreeMap<u64, H>,
}

impl Soak {
    /// A soak with this number of ranks and NVLink domains. The experts and their placement are random.
    ///
    /// # Errors
    /// [`crate::CallerError::Topology`] for an invalid topology.
    pub fn new(seed: u64, ranks: usize, domains: usize) -> Result<Self> {
        // Check the topology, with one expert per rank: `draw` needs a valid one.
        World::builder().ranks(ranks).domains(domains).experts(ranks).build()?;
        let drawn = RandomWorld::draw(&mut ChaCha8Rng::seed_from_u64(seed), ranks, domains);
        // All cases of `drawn` have the same world.
        let world = draw(&drawn, seed).world()?;
        Ok(Self { seed, drawn, world })
    }

    /// The world of all iterations.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Generates the inputs of iteration `number`, and computes the expected results with the oracle.
    ///
    /// # Errors
    /// [`crate::CallerError`] for an invalid case, which [`new`](Self::new) rules out.
    pub fn prepare(&self, number: u64) -> Result<Iteration> {
        let maker = self.maker_of(number);
        let case = self.case(number, maker);
        // Content must differ from that of earlier iterations on the handle. Equal content would hide stale data.
        let first_run = (number - maker) as usize * MOST_RUNS;
        Ok(Iteration { number, maker, prepared: case.prepare_in(self.world.clone(), first_run)? })
    }

    /// The number of the iteration that made the handle of iteration `number`: `number` itself, or an iteration whose
    /// handle is still kept.
    fn maker_of(&self, number: u64) -> u64 {
        let mut rng = ChaCha8Rng::seed_from_u64(!self.seed_of(number));
        let newest = number / KEEP_EVERY;
        if number.is_multiple_of(KEEP_EVERY) || rng.random_bool(0.6) {
            return number;
        }
        KEEP_EVERY * rng.random_range(newest.saturating_sub(KEPT - 1)..=newest)
    }

    /// The case of an iteration. On the handle of another iteration, it has the routing, mode and capacities of that
    /// iteration.
    fn case(&self, number: u64, maker: u64) -> Case {
        let own = draw(&self.drawn, self.seed_of(number));
        if maker == number {
            return Case { name: format!("iteration {number}"), ..own };
        }
        let Case { hidden, format, element, wire, probs, special, runs, .. } = own;
        let name = format!("iteration {number} on the handle of {maker}");
        let made = draw(&self.drawn, self.seed_of(maker));
        Case { name, hidden: hidden.min(widest(&made)), format, element, wire, probs, special, runs, ..made }
    }

    /// The seed of an iteration. The large odd factor keeps the seeds of nearby iterations and soaks apart.
    fn seed_of(&self, number: u64) -> u64 {
        self.seed.wrapping_add((number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }
}

impl Iteration {
    /// The number of the iteration in the soak, from 0.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The case of the iteration. Its name says which handle it uses.
    pub fn case(&self) -> &Case {
        self.prepared.case()
    }
}

impl<H> Default for Soaking<H> {
    fn default() -> Self {
        Self { handles: BTreeMap::new() }
    }
}

impl<H> Soaking<H> {
    /// Runs the next iteration on this rank. Every rank must call this for all iterations in order, starting at 0, with the
    /// same backend. Ranks need not synchronise between iterations.
    ///
    /// # Errors
    /// The first [`Failure`] of the iteration. Drop the backend if it [`stopped`](Failure::stopped); otherwise the
    /// caller may continue with the next iteration.
    ///
    /// # Panics
    /// When the caller skipped an iteration.
    pub fn check<B: WeightRows<Handle = H>>(
        &mut self,
        backend: &mut B,
        iteration: &Iteration,
    ) -> Result<(), Failure> {
        let Iteration { number, maker, prepared } = iteration;
        let mut handle = self.handles.remove(maker);
        assert!(handle.is_some() == (number != maker), "iterations must be checked in order, without gaps");
        let checked = prepared.check_on(backend, &mut handle);
        if let Some(handle) = handle.filter(|_| maker.is_multiple_of(KEEP_EVERY)) {
            self.handles.insert(*maker, handle);
        }
        let newest = number / KEEP_EVERY;
        self.handles.retain(|made, _| made / KEEP_EVERY + KEPT > newest);
        checked
    }
}

fn draw(drawn: &RandomWorld, seed: u64) -> Case {
    drawn.clone().case(seed, &mut ChaCha8Rng::seed_from_u64(seed), size, MOST_RUNS)
}

/// The size of an iteration: mostly small, sometimes with many tokens, wide tokens, or both.
fn size(rng: &mut ChaCha8Rng, step: usize) -> Size {
    let (most_tokens, widest) = match rng.random_range(0..400) {
        0 => (200, 512),
        1..10 => (200, 64),
        10..20 => (4, 512),
        20..40 => (60, 128),
        _ => (12, 160),
    };
    Size { most_tokens, hidden: step * rng.random_range(1..=widest / step) }
}

/// Maximum number of elements of a token when the handle of `case` is reused. Bounds the size of cases with many tokens.
fn widest(case: &Case) -> usize {
    let most = case.tokens.iter().copied().max().unwrap_or(0);
    if most > 60 { 64 } else { 512 }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::backend::DispatchMode;

    #[test]
    fn an_iteration_follows_from_the_seed_and_its_number() {
        let soak = Soak::new(5, 4, 2).unwrap();
        let again = Soak::new(5, 4, 2).unwrap();
        let said = |soak: &Soak, number| soak.prepare(number).unwrap().case().to_string();
        let cases: Vec<String> = (0..200).map(|number| said(&soak, number)).collect();
        assert_eq!(cases[150], said(&again, 150));
        assert_eq!(cases.iter().collect::<HashSet<_>>().len(), 200);
        assert_ne!(cases[0], said(&Soak::new(6, 4, 2).unwrap(), 0));
        assert!(Soak::new(5, 4, 3).is_err() && Soak::new(5, 0, 1).is_err());
    }

    #[test]
    fn iterations_differ_in_everything_but_the_world() {
        let soak = Soak::new(3, 4, 2).unwrap();
        let cases: Vec<Case> = (0..300).map(|number| soak.case(number, soak.maker_of(number))).collect();
        let distinct = |of: &dyn Fn(&Case) -> String| cases.iter().map(of).collect::<HashSet<_>>().len();
        assert_eq!(distinct(&|case| format!("{} {:?} {}", case.experts, case.owners, case.domains)), 1);
        assert_eq!(distinct(&|case| format!("{:?}", case.format)), 8);
        assert_eq!(distinct(&|case| format!("{:?} {:?}", case.element, case.wire)), 4);
        assert_eq!(distinct(&|case| format!("{:?}", case.probs)), 3);
        assert!(distinct(&|case| format!("{:?}", case.capacity)) > 50);
        assert!(cases.iter().any(|case| case.mode == DispatchMode::Plain));
        assert!(cases.iter().any(|case| case.tokens.iter().any(|&tokens| tokens > 60)));
        assert!(cases.iter().any(|case| case.hidden > 256));
    }

    #[test]
    fn every_iteration_can_be_prepared() {
        for seed in 0..4 {
            let soak = Soak::new(seed, 2, 1 + seed as usize % 2).unwrap();
            (0..300).for_each(|number| drop(soak.prepare(number).unwrap()));
        }
    }

    #[test]
    fn kept_handles_are_used_with_other_content() {
        let soak = Soak::new(1, 2, 1).unwrap();
        let mut distances = HashSet::new();
        for number in 0..500 {
            let maker = soak.maker_of(number);
            assert!(maker <= number && (maker == number || maker.is_multiple_of(KEEP_EVERY)));
            if maker < number {
                distances.insert(number / KEEP_EVERY - maker / KEEP_EVERY);
                let (case, made) = (soak.case(number, maker), soak.case(maker, maker));
                assert_eq!((&case.tokens, case.seed, case.mode), (&made.tokens, made.seed, made.mode));
                assert_eq!(case.name, format!("iteration {number} on the handle of {maker}"));
            }
        }
        assert_eq!(distances.len() as u64, KEPT, "{distances:?}");
    }
}
