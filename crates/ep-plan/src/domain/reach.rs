//! The paths of tokens and experts in a partition. Tests use them to show that every token reaches a GPU that holds its
//! expert.

use serde::{Deserialize, Serialize};

use super::{Partition, check_index};
use crate::error::Result;

/// One hop of a token between two GPUs that exchange tokens at a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hop {
    /// The level whose links the token crosses.
    pub level: usize,
    /// The GPU that sends the token.
    pub from: usize,
    /// The GPU that receives the token.
    pub to: usize,
}

impl Partition {
    /// The path of a token from a GPU to a GPU that holds the experts of `owner`, outermost level first.
    ///
    /// At each level where `from` and `owner` are in different domains, the token goes to the GPU of the owner's domain
    /// that has the sender's offset. The path ends in the owner's expert domain, all of whose GPUs hold the owner's
    /// experts after the gathers. It never leaves the sender's dispatch group.
    ///
    /// # Errors
    /// [`PlanError::Index`](crate::PlanError::Index) when a GPU does not exist.
    pub fn token_path(&self, from: usize, owner: usize) -> Result<Vec<Hop>> {
        check_index("GPU", from, self.gpus)?;
        check_index("GPU", owner, self.gpus)?;
        let mut path = Vec::new();
        let mut at = from;
        for (index, level) in self.levels.iter().enumerate() {
            let (digit, target) = (level.digit(at), level.digit(owner));
            if digit / level.domain_size != target / level.domain_size {
                let landing = target / level.domain_size * level.domain_size + digit % level.domain_size;
                let to = at - digit * level.stride + landing * level.stride;
                path.push(Hop { level: index, from: at, to });
                at = to;
            }
        }
        Ok(path)
    }

    /// The GPU on which a token's path ends: the member of the sender's dispatch group that belongs to the owner's
    /// expert domain.
    ///
    /// # Errors
    /// [`PlanError::Index`](crate::PlanError::Index) when a GPU does not exist.
    pub fn holder(&self, from: usize, owner: usize) -> Result<usize> {
        Ok(self.token_path(from, owner)?.last().map_or(from, |hop| hop.to))
    }

    /// The GPUs whose experts `gpu` holds after the gathers, ascending: the members of its expert domain.
    ///
    /// # Errors
    /// [`PlanError::Index`](crate::PlanError::Index) when the GPU does not exist.
    pub fn gathered_owners(&self, gpu: usize) -> Result<Vec<usize>> {
        check_index("GPU", gpu, self.gpus)?;
        Ok(self.levels.iter().fold(vec![0], |prefixes, level| {
            let first = level.digit(gpu) / level.domain_size * level.domain_size;
            prefixes
                .iter()
                .flat_map(|prefix| {
                    (first..first + level.domain_size).map(move |digit| prefix + digit * level.stride)
                })
                .collect()
        }))
    }
}
