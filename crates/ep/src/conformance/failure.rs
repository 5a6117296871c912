//! The report of a failed case: the case, the operator, and the first value that differs.

use std::fmt;

use crate::backend::{Element, HandleShape};
use crate::error::Error;
use crate::layout::ReceiveShape;
use crate::numeric::{bf16_to_f32, e4m3_to_f32};
use crate::topology::Rank;

/// Outputs are filled with this byte before an operator, which shows the bytes that the operator did not write.
pub(super) const POISON: u8 = 0xA5;

/// The failure of a case on one rank.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{case}\n  rank {rank}, {operator}, run {run}: {problem}")]
pub struct Failure {
    /// The `Display` text of the case.
    pub case: String,
    /// The rank that found the failure.
    pub rank: Rank,
    /// The operator.
    pub operator: &'static str,
    /// The number of the run on the handle, from 0.
    pub run: usize,
    /// What is wrong.
    pub problem: Box<Problem>,
    /// Whether an error of the backend stopped the rank, at this failure or later. The backend cannot be used further.
    pub stopped: bool,
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The backend returned an error, or the case is invalid.
    #[error("{0}")]
    Error(Error),
    /// The backend belongs to another world.
    #[error("the backend's world differs from the world of the case")]
    World,
    /// The shape differs from the oracle's.
    #[error("expected {expected:?}, found {found:?}")]
    Shape {
        /// The oracle's shape.
        expected: ReceiveShape,
        /// The backend's shape.
        found: ReceiveShape,
    },
    /// The sizes of the handle differ from the oracle's.
    #[error("expected {expected:?}, found {found:?}")]
    HandleShape {
        /// The oracle's sizes.
        expected: HandleShape,
        /// The backend's sizes.
        found: HandleShape,
    },
    /// The bytes of an output differ from the oracle's.
    #[error("{0}")]
    Differs(Difference),
    /// A sum has a larger error than its roundings allow.
    #[error(
        "{what}, row {row} column {column}: {found:e} is further from the exact {exact:e} than {bound:e}"
    )]
    Rounding {
        /// The output.
        what: &'static str,
        /// The token or row.
        row: usize,
        /// The element of the row.
        column: usize,
        /// The backend's sum.
        found: f64,
        /// The sum in double precision.
        exact: f64,
        /// The largest allowed distance between the two.
        bound: f64,
    },
    /// The backend accepted an invalid call.
    #[error("{call}: must be refused with a caller's error, but was accepted")]
    Accepted {
        /// What is wrong with the call.
        call: &'static str,
    },
    /// The backend refused an invalid call with an error that is not the caller's.
    #[error("{call}: must be refused with a caller's error, but failed with: {error}")]
    WrongError {
        /// What is wrong with the call.
        call: &'static str,
        /// The backend's error.
        error: Error,
    },
    /// The backend sent bytes before it refused an invalid call.
    #[error("{call}: bytes were sent before it was refused")]
    Sent {
        /// What is wrong with the call.
        call: &'static str,
    },
}

/// The first value of an output that differs from the oracle's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The output.
    pub what: &'static str,
    /// The place of the value in the output.
    pub place: Place,
    /// The oracle's value, in hex and decimal.
    pub expected: String,
    /// The backend's value, in hex and decimal.
    pub found: String,
    /// Number of bytes that differ in the whole output.
    pub bytes: usize,
}

/// A place in an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In a row that the operator must write.
    Row {
        /// The row.
        row: usize,
        /// The element of the row.
        column: usize,
    },
    /// In an allocated row that the operator must leave unchanged.
    Spare {
        /// The row.
        row: usize,
        /// The byte of the row.
        byte: usize,
    },
    /// After the last allocated row.
    Behind {
        /// Offset from the end of the rows, in bytes.
        byte: usize,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, place, expected, found, bytes } = self;
        match place {
            Place::Row { row, column } => write!(f, "{what}, row {row} column {column}")?,
            Place::Spare { row, byte } => write!(f, "{what}, row {row} byte {byte}, in an unused row")?,
            Place::Behind { byte } => write!(f, "{what}, byte {byte} after the last row")?,
        }
        write!(f, ": expected {expected}, found {found} ({bytes} bytes differ)")
    }
}

/// The type of an output's elements, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Byte,
    Bf16,
    F32,
    E4m3,
}

impl Unit {
    pub(super) fn of(element: Element) -> Self {
        match element {
            Element::Bf16 => Self::Bf16,
            Element::F32 => Self::F32,
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Byte | Self::E4m3 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// The value of the first bytes, in hex and decimal.
    fn show(self, bytes: &[u8]) -> String {
        match (self, bytes) {
            (Self::Byte, &[byte, ..]) => format!("{byte:#04x} ({byte})"),
            (Self::E4m3, &[code, ..]) => format!("{code:#04x} ({})", e4m3_to_f32(code)),
            (Self::Bf16, &[a, b, ..]) => {
                let bits = u16::from_le_bytes([a, b]);
                format!("{bits:#06x} ({:e})", bf16_to_f32(bits))
            }
            (Self::F32, &[a, b, c, d, ..]) => {
                let bits = u32::from_le_bytes([a, b, c, d]);
                format!("{bits:#010x} ({:e})", f32::from_bits(bits))
            }
            _ => "nothing".into(),
        }
    }

    /// Like [`show`](Self::show), and says whether the operator left the value unwritten.
    fn show_found(self, bytes: &[u8]) -> String {
        let unwritten = bytes.iter().take(self.bytes()).all(|&byte| byte == POISON);
        self.show(bytes) + if unwritten { ", as before the call" } else { "" }
    }
}

/// The expected content of a memory after an operator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    /// The memory's name.
    pub(super) what: &'static str,
    pub(super) unit: Unit,
    /// Bytes of one row.
    pub(super) row_bytes: usize,
    /// The rows that the operator writes.
    pub(super) rows: &'a [u8],
    /// Number of rows of the memory. The operator must leave the rows after `rows` unchanged.
    pub(super) allocated_rows: usize,
    /// Bytes after the allocated rows, which must stay unchanged.
    pub(super) guard: usize,
}

impl Expected<'_> {
    /// Bytes that the operator may require.
    pub(super) fn needed(&self) -> usize {
        self.allocated_rows * self.row_bytes
    }

    /// Bytes of the memory.
    pub(super) fn bytes(&self) -> usize {
        self.needed() + self.guard
    }

    /// Compares a memory of [`bytes`](Self::bytes) bytes: the written rows, then [`POISON`] to the end.
    pub(super) fn difference(&self, found: &[u8]) -> Option<Difference> {
        let (rows, rest) = found.split_at(self.rows.len());
        if rows == self.rows && rest.iter().all(|&byte| byte == POISON) {
            return None;
        }
        let image = || self.rows.iter().copied().chain(std::iter::repeat(POISON));
        let differs = || image().zip(found).enumerate().filter(|&(_, (expected, &found))| expected != found);
        let (at, (expected, &byte)) = differs().next()?;
        let (row, byte_in_row) = (at / self.row_bytes.max(1), at % self.row_bytes.max(1));
        let (place, expected, found) = if at < self.rows.len() {
            let start = at - byte_in_row % self.unit.bytes();
            let place = Place::Row { row, column: byte_in_row / self.unit.bytes() };
            (place, self.unit.show(&self.rows[start..]), self.unit.show_found(&found[start..]))
        } else {
            let place = if at < self.needed() {
                Place::Spare { row, byte: byte_in_row }
            } else {
                Place::Behind { byte: at - self.needed() }
            };
            (place, Unit::Byte.show(&[expected]), Unit::Byte.show(&[byte]))
        };
        Some(Difference { what: self.what, place, expected, found, bytes: differs().count() })
    }
}
