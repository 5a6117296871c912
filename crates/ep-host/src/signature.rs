//! The signature of an operator call: the arguments that must be equal on every rank, and their names in errors.
//!
//! `operators` fills in [`CollectiveArguments`]. `comm` publishes the signature in the control block and compares it
//! with those of peers; `message` puts it into the header of every message.

use ep::{Element, Operator, TokenFormat};

/// Words of a signature.
pub(crate) const SIGNATURE: usize = 7;

/// The arguments of an operator call that must be equal on every rank.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CollectiveArguments {
    /// The step of the preprocess that made the handle.
    pub(crate) handle: u64,
    /// In dispatch, [`TokenFormat::link_code`]; in combine, bytes of an element of the rows.
    pub(crate) format: u64,
    /// In combine, bytes of an element of a domain sum.
    pub(crate) wire: usize,
    pub(crate) hidden: usize,
    pub(crate) probs: bool,
    /// Tokens per chunk. It depends on settings, which may differ between ranks.
    pub(crate) chunk: usize,
}

/// The first word of a signature is the index of the operator in this list plus 1.
const OPERATORS: [Operator; 3] = [Operator::Preprocess, Operator::Dispatch, Operator::Combine];

impl CollectiveArguments {
    /// The words of the signature. Types come before `hidden`: where types differ, `hidden` may differ because of them,
    /// and errors name the first word that differs.
    pub(crate) fn signature(self, operator: Operator) -> [u64; SIGNATURE] {
        let operator = OPERATORS.iter().position(|&other| other == operator).map_or(0, |at| at as u64 + 1);
        let Self { handle, hidden, format, wire, probs, chunk } = self;
        [operator, handle, format, wire as u64, hidden as u64, probs.into(), chunk as u64]
    }
}

/// The name of word `at` of a signature, for errors.
pub(crate) fn field(operator: Operator, at: usize) -> &'static str {
    match at {
        0 => "the operator",
        1 => "the handle",
        2 if operator == Operator::Combine => "the type of rows",
        2 => "the format of tokens",
        3 => "the type on the wire",
        4 => "hidden",
        5 => "weights or probs",
        _ => "the chunk size",
    }
}

/// The value of word `at` of a signature, for errors. A peer may have written any word.
pub(crate) fn value(operator: Operator, at: usize, word: u64) -> String {
    let element = |bytes| match bytes {
        2 => "bf16".into(),
        bytes if bytes == Element::F32.bytes() as u64 => "f32".into(),
        bytes => format!("unknown ({bytes})"),
    };
    match at {
        0 => OPERATORS
            .get((word as usize).wrapping_sub(1))
            .map_or(word.to_string(), |operator| operator.with_its_calls()),
        1 => format!("the one of preprocess #{word}"),
        2 if operator == Operator::Combine => element(word),
        2 => TokenFormat::link_name(word),
        3 => element(word),
        5 => if word == 0 { "not given" } else { "given" }.into(),
        _ => word.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_field_that_differs_is_named_with_its_value() {
        let one = CollectiveArguments { handle: 1, format: 2, wire: 3, hidden: 4, probs: false, chunk: 6 };
        let differ = |other: CollectiveArguments, operator: Operator| {
            let (one, other) = (one.signature(operator), other.signature(operator));
            let at = (0..SIGNATURE).find(|&at| one[at] != other[at]).unwrap();
            (field(operator, at), value(operator, at, other[at]))
        };
        let dispatch = |other| differ(other, Operator::Dispatch);
        assert_eq!(
            dispatch(CollectiveArguments { handle: 7, ..one }),
            ("the handle", "the one of preprocess #7".into())
        );
        assert_eq!(
            dispatch(CollectiveArguments { format: 1, ..one }),
            ("the format of tokens", "f32".into())
        );
        assert_eq!(dispatch(CollectiveArguments { hidden: 9, ..one }), ("hidden", "9".into()));
        assert_eq!(
            dispatch(CollectiveArguments { probs: true, ..one }),
            ("weights or probs", "given".into())
        );
        assert_eq!(dispatch(CollectiveArguments { chunk: 9, ..one }), ("the chunk size", "9".into()));
        let combine = |other| differ(other, Operator::Combine);
        assert_eq!(combine(CollectiveArguments { format: 4, ..one }), ("the type of rows", "f32".into()));
        assert_eq!(combine(CollectiveArguments { wire: 2, ..one }), ("the type on the wire", "bf16".into()));
    }

    #[test]
    fn types_that_differ_are_named_before_hidden() {
        let bf16 = CollectiveArguments {
            format: TokenFormat::Bf16.link_code(),
            hidden: 64,
            ..CollectiveArguments::default()
        };
        let f32 = CollectiveArguments {
            format: TokenFormat::F32.link_code(),
            hidden: 128,
            ..CollectiveArguments::default()
        };
        let (one, other) = (bf16.signature(Operator::Dispatch), f32.signature(Operator::Dispatch));
        let at = (0..SIGNATURE).find(|&at| one[at] != other[at]).unwrap();
        assert_eq!(field(Operator::Dispatch, at), "the format of tokens");
    }
}
