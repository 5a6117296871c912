//! The arguments of an operator that must be equal on all ranks, and the error that names a difference.

use ep::{DispatchMode, Element, Operator, TokenFormat};

use crate::params::CALL_WORDS;

/// The words of a call that must be equal on all ranks: the number of the operator, then its [`fields`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) operator: Operator,
    pub(crate) words: [u64; CALL_WORDS],
}

/// The meaning of a word of a call.
#[derive(Debug, Clone, Copy)]
enum Field {
    Operator,
    Mode,
    Handle,
    Hidden,
    Format,
    Element(&'static str),
    YesNo(&'static str),
    Groups,
}

impl Call {
    fn new<const N: usize>(operator: Operator, fields: [u64; N]) -> Self {
        let mut words = [0; CALL_WORDS];
        words[0] = operator as u64;
        words[1..=N].copy_from_slice(&fields);
        Self { operator, words }
    }

    pub(crate) fn preprocess(mode: DispatchMode) -> Self {
        let pad_multiple = if mode == DispatchMode::Plain { 0 } else { mode.pad_multiple() as u64 };
        Self::new(Operator::Preprocess, [pad_multiple])
    }

    /// Ranks may differ in whether FP8 rows are given or quantised, because both have the same format on the wire, if both
    /// kernels send a row as one group of pieces. `division`: a [`DispatchShape::division`](crate::tuning::DispatchShape).
    pub(crate) fn dispatch(
        handle: u64,
        hidden: usize,
        format: TokenFormat,
        probs: bool,
        division: u64,
    ) -> Self {
        let words = [handle, format.link_code(), hidden as u64, probs.into(), division];
        Self::new(Operator::Dispatch, words)
    }

    pub(crate) fn combine(handle: u64, hidden: usize, element: Element, wire: Element, probs: bool) -> Self {
        let words = [handle, element.bytes() as u64, wire.bytes() as u64, hidden as u64, probs.into()];
        Self::new(Operator::Combine, words)
    }

    /// A checksum of the words (FNV-1a).
    pub(crate) fn signature(&self) -> u32 {
        let bytes = self.words.iter().flat_map(|word| word.to_le_bytes());
        bytes.fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
    }
}

/// The operators that have kernels.
const OPERATORS: [Operator; 3] = [Operator::Preprocess, Operator::Dispatch, Operator::Combine];

/// The operator of a number in a call or in a kernel's parameters; `Join` for an unknown number.
pub(crate) fn operator(number: u64) -> Operator {
    OPERATORS.into_iter().find(|&operator| operator as u64 == number).unwrap_or(Operator::Join)
}

/// The positions of the number of pieces and of the bytes of a piece in a division, in bits.
const DIVISION: [u32; 2] = [0, 32];

fn fields(operator: Operator) -> &'static [Field] {
    match operator {
        Operator::Preprocess => &[Field::Mode],
        Operator::Dispatch => {
            &[Field::Handle, Field::Format, Field::Hidden, Field::YesNo("weights or probs"), Field::Groups]
        }
        Operator::Combine => &[
            Field::Handle,
            Field::Element("type of rows"),
            Field::Element("type on the wire"),
            Field::Hidden,
            Field::YesNo("weights or probs"),
        ],
        _ => &[],
    }
}

impl Field {
    fn name(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Mode => "the dispatch mode",
            Self::Handle => "handle",
            Self::Hidden => "hidden",
            Self::Format => "format of tokens",
            Self::Element(name) | Self::YesNo(name) => name,
            Self::Groups => {
                "pieces of a row (from hidden, the shared memory of the rank's GPU, and whether FP8 rows are quantised)"
            }
        }
    }

    fn text(self, value: u64) -> String {
        match self {
            Self::Operator => operator(value).with_its_calls(),
            Self::Mode if value == 0 => "plain".into(),
            Self::Mode => format!("permuted with pad_multiple {value}"),
            Self::Handle => format!("the one of preprocess #{value}"),
            Self::Hidden => value.to_string(),
            Self::Groups => match DIVISION.map(|shift| value >> shift & 0xFFFF_FFFF) {
                [pieces, 0] => pieces.to_string(),
                [pieces, bytes] => format!("{} of {bytes} bytes", pieces & 0x7FFF_FFFF),
            },
            Self::Format => TokenFormat::link_name(value),
            Self::Element(_) => if value == Element::F32.bytes() as u64 { "f32" } else { "bf16" }.into(),
            Self::YesNo(_) => if value == 0 { "not given" } else { "given" }.into(),
        }
    }
}

/// The name of the first argument in which two calls differ, and the text of both values.
pub(crate) fn difference(
    mine: &[u64; CALL_WORDS],
    theirs: &[u64; CALL_WORDS],
) -> (&'static str, String, String) {
    let all = std::iter::once(Field::Operator).chain(fields(operator(mine[0])).iter().copied());
    let differs = mine.iter().zip(theirs).zip(all).find(|((mine, theirs), _)| mine != theirs);
    match differs {
        Some(((&mine, &theirs), field)) => (field.name(), field.text(mine), field.text(theirs)),
        // The ranks run different versions.
        None => ("the call", format!("{mine:x?}"), format!("{theirs:x?}")),
    }
}

#[cfg(test)]
mod tests {
    use ep::ScaleFormat;

    use super::*;

    const BF16: TokenFormat = TokenFormat::Bf16;

    fn differ(mine: Call, theirs: Call) -> String {
        assert_ne!(mine.signature(), theirs.signature());
        let (field, mine, theirs) = difference(&mine.words, &theirs.words);
        format!("{field}: {mine} / {theirs}")
    }

    #[test]
    fn every_argument_is_named_with_both_values() {
        let preprocess = |mode| Call::preprocess(mode);
        let padded = |pad_multiple| DispatchMode::permuted(pad_multiple).unwrap();
        let fp8 = TokenFormat::Fp8(ScaleFormat::Ue8m0Per32);
        let dispatch = Call::dispatch(1, 128, BF16, true, 1);
        let (f32, bf16) = (Element::F32, Element::Bf16);
        let combine = Call::combine(1, 128, bf16, bf16, false);
        for (mine, theirs, said) in [
            (
                preprocess(DispatchMode::Plain),
                preprocess(padded(16)),
                "the dispatch mode: plain / permuted with pad_multiple 16",
            ),
            (
                dispatch,
                combine,
                "operator: dispatch (or the backward pass of a combine) / combine (or the backward pass of a dispatch)",
            ),
            (
                dispatch,
                Call::dispatch(4, 128, BF16, true, 1),
                "handle: the one of preprocess #1 / the one of preprocess #4",
            ),
            (
                dispatch,
                Call::dispatch(1, 128, fp8, true, 1),
                "format of tokens: bf16 / FP8 with a ue8m0 scale per 32 elements",
            ),
            (dispatch, Call::dispatch(1, 64, BF16, true, 1), "hidden: 128 / 64"),
            (dispatch, Call::dispatch(1, 128, BF16, false, 1), "weights or probs: given / not given"),
            (
                dispatch,
                Call::dispatch(1, 128, BF16, true, 8192 << 32 | 1 << 31 | 2),
                "pieces of a row (from hidden, the shared memory of the rank's GPU, and whether FP8 rows are quantised): 1 / \
                 2 of 8192 bytes",
            ),
            (combine, Call::combine(1, 128, f32, bf16, false), "type of rows: bf16 / f32"),
            (combine, Call::combine(1, 128, bf16, f32, false), "type on the wire: bf16 / f32"),
            (combine, Call::combine(1, 64, bf16, bf16, false), "hidden: 128 / 64"),
            (combine, Call::combine(1, 128, bf16, bf16, true), "weights or probs: not given / given"),
        ] {
            assert_eq!(differ(mine, theirs), said);
        }
        // If both type and hidden differ, the type is named.
        assert!(
            differ(Call::combine(1, 128, f32, f32, false), Call::combine(1, 64, bf16, bf16, false))
                .starts_with("type")
        );
    }

    #[test]
    fn every_operator_is_found_by_its_number_and_has_named_arguments() {
        for known in OPERATORS {
            assert_eq!(operator(known as u64), known);
            assert!(!fields(known).is_empty(), "{known}");
        }
    }
}
