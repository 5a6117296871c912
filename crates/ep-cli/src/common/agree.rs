//! Compares the options of all ranks of a job before it starts. Ranks with different seeds or sizes would find each
//! other's results wrong.

use ep::join::Rendezvous;
use serde::{Deserialize, Serialize};

use crate::common::failure::Failure;
use crate::common::output::one_line;

/// Maximum number of characters of a value in a message.
const SHOWN: usize = 80;

/// The options of one rank that must be equal on all ranks, in the order in which they are compared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobOptions(Vec<(String, String)>);

impl JobOptions {
    /// The options of this command. The command's name is the first value compared.
    pub(crate) fn of(command: &str) -> Self {
        Self::default().with("command", command)
    }

    /// Adds an option and its value.
    #[must_use]
    pub(crate) fn with(mut self, option: &str, value: impl ToString) -> Self {
        self.0.push((option.to_owned(), value.to_string()));
        self
    }

    /// Compares the options with those of all ranks. All ranks report the same difference. Collective.
    ///
    /// # Errors
    /// The first difference, or an error of the rendezvous.
    pub(crate) fn check(&self, meet: &mut dyn Rendezvous) -> Result<(), Failure> {
        let mine = serde_json::to_vec(self).map_err(Failure::request)?;
        let all: Vec<Option<Self>> =
            meet.all_gather(&mine)?.iter().map(|blob| serde_json::from_slice(blob).ok()).collect();
        let Some(first) = all.first() else { return Ok(()) };
        let differing = all.iter().enumerate().find(|(_, asked)| *asked != first);
        differing.map_or(Ok(()), |(rank, other)| Err(difference(first.as_ref(), other.as_ref(), rank)))
    }
}

/// Describes the first difference between rank 0 and `rank`.
fn difference(first: Option<&JobOptions>, other: Option<&JobOptions>, rank: usize) -> Failure {
    let pairs = first
        .zip(other)
        .map(|(first, other)| first.0.iter().zip(&other.0).find(|(first, other)| first != other));
    match pairs {
        Some(Some((first, other))) if first.0 == other.0 => Failure::request(format!(
            "{} is {} on rank 0 and {} on rank {rank}; every rank must be given the same",
            first.0,
            shown(&first.1),
            shown(&other.1)
        )),
        _ => Failure::request(format!(
            "rank 0 and rank {rank} run different versions of this program; every rank must run the same version"
        )),
    }
}

fn shown(value: &str) -> String {
    let line = one_line(value);
    match line.char_indices().nth(SHOWN) {
        None => line,
        Some((end, _)) => format!("{}...", &line[..end]),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ep::join::ThreadRendezvous;

    use super::*;

    fn outcomes(asked: [JobOptions; 3]) -> Vec<Result<(), String>> {
        std::thread::scope(|scope| {
            let meets = ThreadRendezvous::new(3, Duration::from_secs(60));
            let ranks = meets.into_iter().zip(&asked).map(|(mut meet, asked)| {
                scope.spawn(move || asked.check(&mut meet).map_err(|failure| failure.to_string()))
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_report_the_first_difference() {
        let asked = |seed: u64| JobOptions::of("bench").with("--tokens", 3).with("--seed", seed);
        assert_eq!(outcomes([asked(1), asked(1), asked(1)]), vec![Ok(()); 3]);
        let message = "--seed is 1 on rank 0 and 2 on rank 2; every rank must be given the same";
        assert_eq!(outcomes([asked(1), asked(1), asked(2)]), vec![Err(message.to_owned()); 3]);
        let verify = JobOptions::of("verify");
        let message = outcomes([asked(1), verify, asked(1)])[2].clone().unwrap_err();
        assert!(message.starts_with("command is bench on rank 0 and verify on rank 1"), "{message}");
        let more = asked(1).with("--new", 1);
        let message = outcomes([asked(1), asked(1), more])[0].clone().unwrap_err();
        assert!(message.contains("different versions"), "{message}");
    }
}
