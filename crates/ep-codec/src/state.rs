//! The bytes of a saved encoder or decoder. All numbers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | `EPCS` |
//! | 4 | 1 | version, 1 |
//! | 5 | 1 | kind: 1 encoder of weights, 2 decoder of weights, 3 encoder of gradients |
//! | 6 | 1 | element type: 0 none, 1 bf16, 2 f32 |
//! | 7 | 1 | 1 if there is a fingerprint, else 0 |
//! | 8 | 8 | P, the number of elements |
//! | 16 | 8 | fingerprint, or 0 |
//! | 24 | 4 | complete streams that are still to be written |
//! | 28 | 4 | zero |
//! | 32 | 8 | checksum: XXH64 of bytes 0 .. 32, seeded with the digest of the rest |
//! | 40 | | elements: the mirror or the carry; or nothing |

use ep::Element;

use crate::error::{CallerError, Corruption, Operand, Result};
use crate::hash::{digest, xxh64};
use crate::shared::{check_length, first_not_finite};
use crate::stream::{element, element_code};
use crate::weight::Weight;

const MAGIC: [u8; 4] = *b"EPCS";
const VERSION: u8 = 1;
const HEADER: usize = 40;
const CHECKED: usize = HEADER - 8;

/// The kind of object whose state is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    WeightEncoder,
    WeightDecoder,
    GradientEncoder,
}

impl Owner {
    fn of_code(code: u8) -> Result<Self, Corruption> {
        match code {
            1 => Ok(Self::WeightEncoder),
            2 => Ok(Self::WeightDecoder),
            3 => Ok(Self::GradientEncoder),
            _ => Err(Corruption::Code { field: "state", code }),
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::WeightEncoder => 1,
            Self::WeightDecoder => 2,
            Self::GradientEncoder => 3,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::WeightEncoder => "an encoder of weights",
            Self::WeightDecoder => "a decoder of weights",
            Self::GradientEncoder => "an encoder of gradients",
        }
    }
}

/// The fields of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) owner: Owner,
    pub(crate) element: Option<Element>,
    pub(crate) elements: usize,
    pub(crate) fingerprint: Option<u64>,
    pub(crate) complete: u32,
}

impl State {
    /// The bytes of the state, with the memory of `values` after the header.
    pub(crate) fn save<T: Weight>(self, values: &[T]) -> Vec<u8> {
        let values: &[u8] = bytemuck::cast_slice(values);
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&MAGIC);
        let element = self.element.map_or(0, element_code);
        header[4..8].copy_from_slice(&[
            VERSION,
            self.owner.code(),
            element,
            u8::from(self.fingerprint.is_some()),
        ]);
        header[8..16].copy_from_slice(&(self.elements as u64).to_le_bytes());
        header[16..24].copy_from_slice(&self.fingerprint.unwrap_or_default().to_le_bytes());
        header[24..28].copy_from_slice(&self.complete.to_le_bytes());
        let checksum = checksum(&header, values);
        header[CHECKED..].copy_from_slice(&checksum.to_le_bytes());
        [&header, values].concat()
    }

    /// Reads a state of this owner and number of elements. The returned values are empty or `[elements]`, and finite.
    pub(crate) fn restore<T: Weight>(bytes: &[u8], owner: Owner, elements: usize) -> Result<(Self, Vec<T>)> {
        let (state, values) = Self::open(bytes)?;
        if state.owner != owner {
            return Err(CallerError::OtherState { saved: state.owner.name(), expected: owner.name() }.into());
        }
        check_length(Operand::State, elements, state.elements)?;
        if values.is_empty() {
            return Ok((state, Vec::new()));
        }
        match state.element {
            Some(stream) if stream != T::ELEMENT => {
                return Err(CallerError::Element { stream, given: T::ELEMENT }.into());
            }
            Some(_) if Some(values.len()) == elements.checked_mul(size_of::<T>()) => {}
            _ => return Err(Corruption::Sections.into()),
        }
        let values: Vec<T> = bytemuck::pod_collect_to_vec(values);
        match first_not_finite(&values) {
            None => Ok((state, values)),
            Some(_) => Err(Corruption::State.into()),
        }
    }

    fn open(bytes: &[u8]) -> Result<(Self, &[u8]), Corruption> {
        let found = bytes.len() as u64;
        let truncated = Corruption::Truncated { needed: HEADER as u64, found };
        let (header, values) = bytes.split_first_chunk::<HEADER>().ok_or(truncated)?;
        let word = |at: usize| header[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        if header[..4] != MAGIC {
            return Err(Corruption::Magic);
        }
        if header[4] != VERSION {
            return Err(Corruption::Version(header[4]));
        }
        let (expected, found) = (word(CHECKED), checksum(header, values));
        if expected != found {
            return Err(Corruption::Checksum { expected, found });
        }
        let fingerprint = match header[7] {
            0 => None,
            1 => Some(word(16)),
            code => return Err(Corruption::Code { field: "fingerprint", code }),
        };
        let state = Self {
            owner: Owner::of_code(header[5])?,
            element: if header[6] == 0 { None } else { Some(element(header[6])?) },
            elements: usize::try_from(word(8)).map_err(|_| Corruption::Sections)?,
            fingerprint,
            complete: word(24) as u32,
        };
        Ok((state, values))
    }
}

fn checksum(header: &[u8; HEADER], values: &[u8]) -> u64 {
    xxh64(&header[..CHECKED], digest(values))
}

/// Makes damaged bytes pass the checks of the header, as [`reseal`](crate::reseal) does for a stream.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub fn reseal_state(state: &mut [u8]) {
    let Some((header, values)) = state.split_first_chunk_mut::<HEADER>() else { return };
    header[..4].copy_from_slice(&MAGIC);
    header[4] = VERSION;
    let checksum = checksum(header, values);
    header[CHECKED..].copy_from_slice(&checksum.to_le_bytes());
}
