//! A fact about the machine: known, absent, or unknown for a reason.

use serde::{Serialize, Serializer, ser::SerializeMap};

/// A fact about the machine.
///
/// In JSON a known fact is its bare value, an absent one is `null`, and an unknown one is `{"unknown": "why"}`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fact<T> {
    /// The value.
    Known(T),
    /// The machine does not have the thing.
    Absent,
    /// The fact could not be determined, for this reason.
    Unknown(String),
}

impl<T> Fact<T> {
    /// The value, if there is one.
    pub(super) fn known(&self) -> Option<&T> {
        match self {
            Fact::Known(value) => Some(value),
            Fact::Absent | Fact::Unknown(_) => None,
        }
    }

    /// Applies `f` to the value, if there is one.
    pub(super) fn map<U>(self, f: impl FnOnce(T) -> U) -> Fact<U> {
        self.and_then(|value| Fact::Known(f(value)))
    }

    /// Applies `f`, which may itself find nothing, to the value, if there is one.
    pub(super) fn and_then<U>(self, f: impl FnOnce(T) -> Fact<U>) -> Fact<U> {
        match self {
            Fact::Known(value) => f(value),
            Fact::Absent => Fact::Absent,
            Fact::Unknown(why) => Fact::Unknown(why),
        }
    }

    /// Turns absent into unknown, for things that every machine has: only the file that describes them is missing.
    pub(super) fn or_unknown(self, source: &str) -> Fact<T> {
        match self {
            Fact::Absent => Fact::Unknown(format!("{source} does not exist")),
            other => other,
        }
    }

    /// Falls back to another source unless the value is known.
    pub(super) fn or_else(self, other: impl FnOnce() -> Fact<T>) -> Fact<T> {
        match self {
            Fact::Known(_) => self,
            // The first source is the better one, so its reason is kept.
            Fact::Unknown(why) => match other() {
                Fact::Known(value) => Fact::Known(value),
                Fact::Absent | Fact::Unknown(_) => Fact::Unknown(why),
            },
            Fact::Absent => other(),
        }
    }
}

impl<T: Serialize> Serialize for Fact<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Fact::Known(value) => value.serialize(serializer),
            Fact::Absent => serializer.serialize_none(),
            Fact::Unknown(why) => {
                let mut map = serializer.serialize_map(Some(1))?;
                map.serialize_entry("unknown", why)?;
                map.end()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_distinguishes_the_three_cases() {
        let facts = [Fact::Known(3), Fact::Absent, Fact::Unknown("no permission".to_owned())];
        assert_eq!(serde_json::to_string(&facts).unwrap(), r#"[3,null,{"unknown":"no permission"}]"#);
    }

    #[test]
    fn a_failed_fallback_keeps_the_first_reason() {
        let first: Fact<u8> = Fact::Unknown("first".to_owned());
        assert_eq!(first.or_else(|| Fact::Unknown("second".to_owned())), Fact::Unknown("first".to_owned()));
        assert_eq!(Fact::Absent.or_else(|| Fact::Known(2)), Fact::Known(2));
    }
}
