//! A rank's routing: which of its tokens goes to which experts, with what weight. The constructors validate it.

use crate::error::{CallerError, EnvironmentError, Result, RoutingProblem};
use crate::topology::{Rank, check_number};

/// The routing of one rank's tokens: the experts that each token chose, and their weights. Valid by construction.
///
/// Routings are stored in compressed rows with ascending experts. A token may have any number of experts, or none, so
/// this form holds both forms that routers produce: top-k indices and multi-hot maps.
///
/// # Examples
///
/// Two tokens on rank 0, four experts. The second token chose only one expert.
///
/// ```
/// use ep::{Rank, Routing};
///
/// let topk_idx = [3, 0, /* second token: */ 2, -1];
/// let topk_weights = [0.75, 0.25, /* second token: */ 1.0, 0.0];
/// let routing = Routing::from_topk(Rank(0), 4, 2, &topk_idx, &topk_weights)?;
/// assert_eq!((routing.tokens(), routing.copies()), (2, 3));
/// assert_eq!(routing.experts_of(0), [0, 3]);
/// assert_eq!(routing.weights_of(0), [0.25, 0.75]);
///
/// let error = Routing::from_topk(Rank(0), 4, 2, &[1, 1], &[0.5, 0.5]).unwrap_err();
/// assert_eq!(error.to_string(), "routing of rank 0, row 0: expert 1 appears twice");
/// # Ok::<(), ep::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    rank: Rank,
    experts: usize,
    /// `[tokens + 1]`: index of each token's first entry in `chosen` and `weights`, and the number of entries.
    offsets: Vec<u32>,
    chosen: Vec<u32>,
    weights: Vec<f32>,
}

impl Routing {
    /// The routing of a router's top-k choice: `topk_idx` and `topk_weights`, both `[tokens, k]` row-major. Index -1
    /// means no expert; the weight of such an entry is ignored.
    ///
    /// `rank` is the rank that holds the tokens, and `experts` the number of experts in the world.
    ///
    /// # Errors
    /// - [`CallerError::Shape`] when the length of `topk_idx` is not a multiple of `k`, or `topk_weights` has a
    ///   different length.
    /// - [`CallerError::Routing`] for the first row with an index out of range, a repeated expert, or a NaN weight.
    /// - [`CallerError::Placement`] when `experts` is 0 or more than [`MAX_EXPERTS`](crate::topology::MAX_EXPERTS).
    /// - [`CallerError::TooManyRows`] when the number of tokens or copies does not fit in 32 bits.
    pub fn from_topk(
        rank: Rank,
        experts: usize,
        k: usize,
        topk_idx: &[i32],
        topk_weights: &[f32],
    ) -> Result<Self> {
        let tokens = topk_idx.len().checked_div(k).unwrap_or(0);
        check_len("topk_idx", tokens * k, topk_idx.len())?;
        check_len("topk_weights", topk_idx.len(), topk_weights.len())?;
        let mut rows = Rows::new(rank, experts, tokens, k)?;
        let rows_of_k = topk_idx.chunks_exact(k.max(1)).zip(topk_weights.chunks_exact(k.max(1)));
        for (row, (indices, weights)) in rows_of_k.enumerate() {
            for (&index, &weight) in indices.iter().zip(weights) {
                if index == -1 {
                    continue;
                }
                // Negative indices become larger than any expert.
                let expert = index as u32;
                if expert as usize >= experts {
                    let problem = RoutingProblem::IndexOutOfRange { index: index.into(), experts };
                    return Err(CallerError::Routing { rank, row, problem }.into());
                }
                rows.add(row, expert, weight)?;
            }
            rows.end_row()?;
        }
        Ok(rows.finish())
    }

    /// The routing of a multi-hot map: `map` `[tokens, experts]`, non-zero where chosen, with the weights `probs`
    /// `[tokens, experts]`, both row-major. Weights of experts that are not chosen are ignored.
    ///
    /// # Errors
    /// Those of [`from_topk`](Self::from_topk), with rows of `experts` entries.
    pub fn from_map(rank: Rank, experts: usize, map: &[u8], probs: &[f32]) -> Result<Self> {
        let tokens = map.len().checked_div(experts).unwrap_or(0);
        check_len("routing_map", tokens * experts, map.len())?;
        check_len("probs", map.len(), probs.len())?;
        let mut rows = Rows::new(rank, experts, tokens, experts.min(8))?;
        let rows_of_map = map.chunks_exact(experts.max(1)).zip(probs.chunks_exact(experts.max(1)));
        for (row, (chosen, probs)) in rows_of_map.enumerate() {
            for (expert, (&on, &prob)) in chosen.iter().zip(probs).enumerate() {
                if on != 0 {
                    rows.add(row, expert as u32, prob)?;
                }
            }
            rows.end_row()?;
        }
        Ok(rows.finish())
    }

    /// The routing of a rank without tokens.
    pub fn empty(rank: Rank, experts: usize) -> Self {
        Self { rank, experts, offsets: vec![0], chosen: Vec::new(), weights: Vec::new() }
    }

    /// The routing of `tokens` tokens that chose no expert.
    ///
    /// # Errors
    /// [`CallerError::TooManyRows`] for more than `u32::MAX` tokens; [`CallerError::Placement`] for too many experts;
    /// [`EnvironmentError`] when there is not enough memory.
    pub fn without_copies(rank: Rank, experts: usize, tokens: usize) -> Result<Self> {
        let mut rows = Rows::new(rank, experts, tokens, 0)?;
        rows.routing.offsets.resize(tokens + 1, 0);
        Ok(rows.finish())
    }

    /// The rank that holds the tokens.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of tokens; may be 0.
    pub fn tokens(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Number of experts in the world.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Number of copies: (token, expert) pairs.
    pub fn copies(&self) -> usize {
        self.chosen.len()
    }

    /// `[tokens + 1]`: index of each token's first entry in [`all_experts`](Self::all_experts) and
    /// [`all_weights`](Self::all_weights), and the number of entries.
    pub fn row_begins(&self) -> &[u32] {
        &self.offsets
    }

    /// `[copies]`: the experts of all tokens, ordered by token and then by expert.
    pub fn all_experts(&self) -> &[u32] {
        &self.chosen
    }

    /// `[copies]`: the weights, in the order of [`all_experts`](Self::all_experts).
    pub fn all_weights(&self) -> &[f32] {
        &self.weights
    }

    /// For each token its experts, ascending, and their weights.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = (&[u32], &[f32])> {
        self.offsets.windows(2).map(|ends| {
            let row = ends[0] as usize..ends[1] as usize;
            (&self.chosen[row.clone()], &self.weights[row])
        })
    }

    /// A token's experts, ascending.
    pub fn experts_of(&self, token: usize) -> &[u32] {
        &self.chosen[self.range(token)]
    }

    /// The weights of a token's experts, in the order of [`experts_of`](Self::experts_of).
    pub fn weights_of(&self, token: usize) -> &[f32] {
        &self.weights[self.range(token)]
    }

    /// The weights as a dense row-major `[tokens, experts]` matrix, zero where the token did not choose the expert.
    pub fn dense_probs(&self) -> Vec<f32> {
        let mut dense = vec![0.0; self.tokens() * self.experts];
        for (token, row) in dense.chunks_exact_mut(self.experts.max(1)).enumerate() {
            for (&expert, &weight) in self.experts_of(token).iter().zip(self.weights_of(token)) {
                row[expert as usize] = weight;
            }
        }
        dense
    }

    fn range(&self, token: usize) -> std::ops::Range<usize> {
        self.offsets[token] as usize..self.offsets[token + 1] as usize
    }
}

fn check_len(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        Ok(())
    } else {
        Err(CallerError::Shape { what, expected, found, unit: "elements" }.into())
    }
}

/// A routing under construction.
///
/// Routers give experts in any order. The current row is a bit set, which sorts the experts and finds duplicates
/// without branches that the CPU would mispredict.
struct Rows {
    routing: Routing,
    /// `[experts]` bits: whether the current row has the expert.
    row: Vec<u64>,
    /// `[experts]`: weights of the experts in the current row.
    weight: Vec<f32>,
}

impl Rows {
    /// Begins a routing of `tokens` tokens. Reserves memory for `per_token` copies of each token, a number that the
    /// caller has bounded.
    fn new(rank: Rank, experts: usize, tokens: usize, per_token: usize) -> Result<Self> {
        check_number(experts)?;
        if u32::try_from(tokens).is_err() {
            return Err(CallerError::TooManyRows { rank, rows: tokens as u64 }.into());
        }
        let copies = tokens.saturating_mul(per_token);
        let (mut offsets, mut chosen, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        offsets
            .try_reserve_exact(tokens + 1)
            .and_then(|()| chosen.try_reserve_exact(copies))
            .and_then(|()| weights.try_reserve_exact(copies))
            .map_err(|error| {
                let what = format!("reserving memory for the routing of {tokens} tokens");
                EnvironmentError::new(what, error, "free memory of this machine, or pass fewer tokens")
            })?;
        offsets.push(0);
        Ok(Self {
            routing: Routing { rank, experts, offsets, chosen, weights },
            row: vec![0; experts.div_ceil(64)],
            weight: vec![0.0; experts],
        })
    }

    /// Adds an expert, which must be in range, to the current row, number `row`.
    fn add(&mut self, row: usize, expert: u32, weight: f32) -> Result<()> {
        let (word, bit) = (&mut self.row[expert as usize / 64], 1 << (expert % 64));
        let problem = if *word & bit != 0 {
            RoutingProblem::DuplicateExpert(expert)
        } else if weight.is_nan() {
            RoutingProblem::NanWeight(expert)
        } else {
            *word |= bit;
            self.weight[expert as usize] = weight;
            return Ok(());
        };
        Err(CallerError::Routing { rank: self.routing.rank, row, problem }.into())
    }

    fn end_row(&mut self) -> Result<()> {
        let Routing { rank, offsets, chosen, weights, .. } = &mut self.routing;
        for (word, first) in self.row.iter_mut().zip((0..).step_by(64)) {
            let mut bits = std::mem::take(word);
            while bits != 0 {
                let expert = first + bits.trailing_zeros();
                chosen.push(expert);
                weights.push(self.weight[expert as usize]);
                bits &= bits - 1;
            }
        }
        let end = u32::try_from(chosen.len())
            .map_err(|_| CallerError::TooManyRows { rank: *rank, rows: chosen.len() as u64 })?;
        offsets.push(end);
        Ok(())
    }

    fn finish(self) -> Routing {
        self.routing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::MAX_EXPERTS;

    #[test]
    fn topk_and_map_agree() {
        let topk = Routing::from_topk(
            Rank(1),
            5,
            3,
            &[4, -1, 0, -1, -1, -1, 2, 3, 1],
            &[0.4, f32::NAN, 0.1, 0., 0., 0., 2., 3., 1.],
        )
        .unwrap();
        #[rustfmt::skip]
        let map = [1, 0, 0, 0, 1,
                   0, 0, 0, 0, 0,
                   0, 1, 1, 1, 0];
        let dense = topk.dense_probs();
        assert_eq!(Routing::from_map(Rank(1), 5, &map, &dense).unwrap(), topk);
        assert_eq!(topk.experts_of(0), [0, 4]);
        assert_eq!(topk.weights_of(0), [0.1, 0.4]);
        assert!(topk.experts_of(1).is_empty());
        assert_eq!((topk.tokens(), topk.copies()), (3, 5));
    }

    #[test]
    fn rows_of_any_length_are_sorted() {
        for len in [0, 1, 2, 7, 8, 15, 16, 17, 40] {
            let indices: Vec<i32> = (0..len).map(|i| (i * 29 + 5) % 41).collect();
            let weights: Vec<f32> = indices.iter().map(|&i| i as f32).collect();
            if let Ok(routing) = Routing::from_topk(Rank(0), 41, len as usize, &indices, &weights)
                && routing.tokens() == 1
            {
                let mut sorted = indices.clone();
                sorted.sort();
                assert!(routing.experts_of(0).iter().map(|&e| e as i32).eq(sorted.iter().copied()));
                assert!(routing.weights_of(0).iter().map(|&w| w as i32).eq(sorted));
            }
        }
        let twice: Vec<i32> = (0..20).chain([7]).collect();
        let error = Routing::from_topk(Rank(0), 41, 21, &twice, &[1.0; 21]).unwrap_err();
        assert!(error.to_string().contains("expert 7 appears twice"));
    }

    #[test]
    fn a_routing_may_have_no_tokens() {
        let empty = Routing::from_topk(Rank(0), 4, 2, &[], &[]).unwrap();
        assert_eq!(empty, Routing::empty(Rank(0), 4));
        assert_eq!(Routing::from_map(Rank(0), 4, &[], &[]).unwrap(), empty);
    }

    #[test]
    fn experts_beyond_the_bounds_are_refused_before_memory_is_allocated() {
        for experts in [0, MAX_EXPERTS + 1, 1 << 40, usize::MAX] {
            for routing in [
                Routing::from_topk(Rank(0), experts, 1, &[0], &[1.0]),
                Routing::from_topk(Rank(0), experts, usize::MAX, &[], &[]),
                Routing::from_map(Rank(0), experts, &[], &[]),
            ] {
                let error = routing.unwrap_err().to_string();
                assert!(error.contains(&format!("{experts} experts: at least 1 and at most")), "{error}");
            }
        }
        // Miri takes minutes to fill a table of so many experts.
        if !cfg!(miri) {
            Routing::from_topk(Rank(0), MAX_EXPERTS, 1, &[MAX_EXPERTS as i32 - 1], &[1.0]).unwrap();
        }
    }

    #[test]
    fn bad_rows_are_named() {
        let message = |indices: &[i32], weights: &[f32]| {
            Routing::from_topk(Rank(3), 4, 2, indices, weights).unwrap_err().to_string()
        };
        assert_eq!(message(&[0, 1, 2, 2], &[0.5; 4]), "routing of rank 3, row 1: expert 2 appears twice");
        assert_eq!(
            message(&[0, 4], &[0.5; 2]),
            "routing of rank 3, row 0: expert index 4 is out of range: must be -1 (none) or 0 to 3"
        );
        assert!(message(&[0, -2], &[0.5; 2]).contains("-2 is out of range"));
        assert_eq!(
            message(&[3, 1], &[f32::NAN, 0.5]),
            "routing of rank 3, row 0: the weight of expert 3 is NaN"
        );
        assert!(message(&[0, 1, 2], &[0.5; 3]).contains("topk_idx: expected 2 elements, found 3"));
        assert!(message(&[0, 1], &[0.5; 3]).contains("topk_weights: expected 2 elements, found 3"));
    }
}
