//! The status of a rank: the words of its control block that ranks on other machines need. The rank sends it over its
//! links, and the receiver stores it in its mirror of the rank's control block ([`crate::control::Control::mirror`]).
//!
//! A status is a snapshot. All its words only grow, or change once, so a lost status does no harm and a later one
//! replaces it.

/// The words by which a rank publishes its state, as they are in its control block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HealthWords {
    pub(crate) health: u32,
    pub(crate) at_fault: u32,
    pub(crate) fault: u32,
    pub(crate) operator: u32,
    pub(crate) failed_step: u64,
}

/// The status of a rank at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) entered: u64,
    pub(crate) finished: u64,
    pub(crate) pulse: u64,
    pub(crate) turns: u64,
    pub(crate) progress: u64,
    pub(crate) outside: u64,
    pub(crate) health: HealthWords,
    /// The text of the rank's error; empty without one.
    pub(crate) cause: String,
}

/// Bytes before the text.
const HEAD: usize = 7 * 8 + 4 * 4;

impl Status {
    /// The bytes of the status, little-endian: seven words of 8 bytes, four of 4 bytes, and the text.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let HealthWords { health, at_fault, fault, operator, failed_step } = self.health;
        let mut bytes = Vec::with_capacity(HEAD + self.cause.len());
        let Self { entered, finished, pulse, turns, progress, outside, .. } = *self;
        for word in [entered, finished, pulse, turns, progress, outside, failed_step] {
            bytes.extend(word.to_le_bytes());
        }
        for word in [health, at_fault, fault, operator] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.cause.as_bytes());
        bytes
    }

    /// The status with these bytes; `None` for bytes that are not a status. Any words are accepted: the control block
    /// bounds them when they are read.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (long, rest) = bytes.split_first_chunk::<{ 7 * 8 }>()?;
        let (short, cause) = rest.split_first_chunk::<{ 4 * 4 }>()?;
        let mut long = long.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut short = short.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        let (mut long, mut short) = (|| long.next(), || short.next());
        Some(Self {
            entered: long()?,
            finished: long()?,
            pulse: long()?,
            turns: long()?,
            progress: long()?,
            outside: long()?,
            health: HealthWords {
                failed_step: long()?,
                health: short()?,
                at_fault: short()?,
                fault: short()?,
                operator: short()?,
            },
            cause: std::str::from_utf8(cause).ok()?.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_survives_the_round_trip() {
        let health = HealthWords { health: 6, at_fault: 7, fault: 8, operator: 9, failed_step: 10 };
        for cause in ["", "hidden is 128 é"] {
            let (entered, finished, pulse, turns, progress, outside) = (1, 2, 3, 4, 5, 11);
            let cause = cause.into();
            let status = Status { entered, finished, pulse, turns, progress, outside, health, cause };
            let bytes = status.to_bytes();
            assert_eq!(Status::from_bytes(&bytes), Some(status));
            for wrong in [&bytes[..HEAD - 1], &[], &[&bytes[..], &[0xFF]].concat()] {
                assert_eq!(Status::from_bytes(wrong), None);
            }
        }
    }
}
