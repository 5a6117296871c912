//! What a rank reports: the case, the operator, and the first value that differs.

use std::fmt;

use crate::backend::Element;
use crate::error::Error;
use crate::layout::ReceiveShape;
use crate::numeric::{bf16_to_f32, e4m3_to_f32};
use crate::topology::Rank;

/// What output memories hold before an operator: a byte that survives was not written.
pub(super) const POISON: u8 = 0xA5;

/// A case that a backend did not pass, on one rank.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{case}\n  rank {rank}, {operator}, run {run}: {problem}")]
pub struct Failure {
    /// The case, as its `Display` says.
    pub case: String,
    /// The rank that found it.
    pub rank: Rank,
    /// What was called.
    pub operator: &'static str,
    /// Which use of the handle it was, from 0.
    pub run: usize,
    /// What is wrong.
    pub problem: Box<Problem>,
    /// Whether an error of the backend stopped the rank there or later: it then cannot go on.
    pub stopped: bool,
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The backend returned an error, or the case cannot be prepared.
    #[error("{0}")]
    Error(Error),
    /// The backend is a rank of another world.
    #[error("the backend's world is not the case's")]
    World,
    /// A shape other than the oracle's.
    #[error("expected {expected:?}, found {found:?}")]
    Shape {
        /// The oracle's.
        expected: ReceiveShape,
        /// The backend's.
        found: ReceiveShape,
    },
    /// Bytes other than expected.
    #[error("{0}")]
    Differs(Difference),
    /// A sum further from the exact one than its roundings can bring it.
    #[error(
        "{what}, row {row} column {column}: {found:e} is further from the exact {exact:e} than {bound:e}"
    )]
    Rounding {
        /// The memory.
        what: &'static str,
        /// The token, or the row.
        row: usize,
        /// The element.
        column: usize,
        /// The backend's sum.
        found: f64,
        /// The sum in double precision.
        exact: f64,
        /// How far apart they may be.
        bound: f64,
    },
    /// A call that had to be refused was served.
    #[error("{call}: must be refused with a caller's error, but was served")]
    Served {
        /// What is wrong with the call.
        call: &'static str,
    },
    /// A call that had to be refused as the caller's mistake failed otherwise.
    #[error("{call}: must be refused with a caller's error, but failed with: {error}")]
    WrongError {
        /// What is wrong with the call.
        call: &'static str,
        /// The backend's error.
        error: Error,
    },
    /// A call that had to be refused before anything was sent did send.
    #[error("{call}: bytes were sent before it was refused")]
    Sent {
        /// What is wrong with the call.
        call: &'static str,
    },
}

/// The first value of a memory that is not the oracle's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The memory.
    pub what: &'static str,
    /// Where in it.
    pub place: Place,
    /// The oracle's value, in hex and decimal.
    pub expected: String,
    /// The backend's value, in hex and decimal.
    pub found: String,
    /// Bytes that differ in the whole memory.
    pub bytes: usize,
}

/// Where in a memory of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In a row that the oracle fills.
    Row {
        /// The row.
        row: usize,
        /// The element in it.
        column: usize,
    },
    /// In a row that the caller allocated and that must stay as it was.
    Spare {
        /// The row.
        row: usize,
        /// The byte in it.
        byte: usize,
    },
    /// Behind all rows.
    Behind {
        /// Bytes between the end of the rows and the place.
        byte: usize,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, place, expected, found, bytes } = self;
        match place {
            Place::Row { row, column } => write!(f, "{what}, row {row} column {column}")?,
            Place::Spare { row, byte } => write!(f, "{what}, row {row} byte {byte}, which no row reaches")?,
            Place::Behind { byte } => write!(f, "{what}, byte {byte} behind the last row")?,
        }
        write!(f, ": expected {expected}, found {found} ({bytes} bytes differ)")
    }
}

/// How a memory's bytes are read to say what they are.
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

    /// As [`show`](Self::show), and whether it is what was there before the operator.
    fn show_found(self, bytes: &[u8]) -> String {
        let unwritten = bytes.iter().take(self.bytes()).all(|&byte| byte == POISON);
        self.show(bytes) + if unwritten { ", as before the call" } else { "" }
    }
}

/// What a memory must hold after an operator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    /// The memory's name.
    pub(super) what: &'static str,
    pub(super) unit: Unit,
    /// Bytes of one row.
    pub(super) row_bytes: usize,
    /// All rows that are filled.
    pub(super) rows: &'a [u8],
    /// Rows of the memory: those that are filled, and those that must stay as they were.
    pub(super) allocated_rows: usize,
    /// Bytes behind the rows that must stay as they were.
    pub(super) guard: usize,
}

impl Expected<'_> {
    /// Bytes that the operator may ask for.
    pub(super) fn needed(&self) -> usize {
        self.allocated_rows * self.row_bytes
    }

    /// Bytes of the memory.
    pub(super) fn bytes(&self) -> usize {
        self.needed() + self.guard
    }

    /// Compares a memory of [`bytes`](Self::bytes) bytes: the rows, then poison to its end.
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
