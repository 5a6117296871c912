//! What is known about one thing, and why not where it is not.

use serde::{Serialize, Serializer, ser::SerializeMap};

/// One thing that was looked for.
///
/// In JSON a known fact is its bare value, an absent one is `null`, and one that could not be
/// found out is `{"unknown": "why"}`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fact<T> {
    /// It was found, and this is it.
    Known(T),
    /// It was looked for and is not there.
    Absent,
    /// It could not be found out, for this reason.
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

    /// Goes on from the value, if there is one, with a step that may itself find nothing.
    pub(super) fn and_then<U>(self, f: impl FnOnce(T) -> Fact<U>) -> Fact<U> {
        match self {
            Fact::Known(value) => f(value),
            Fact::Absent => Fact::Absent,
            Fact::Unknown(why) => Fact::Unknown(why),
        }
    }

    /// Turns "not there" into "unknown", for things that every machine has: where the file that
    /// would tell is missing, the thing itself is not.
    pub(super) fn or_unknown(self, source: &str) -> Fact<T> {
        match self {
            Fact::Absent => Fact::Unknown(format!("{source} is not there")),
            other => other,
        }
    }

    /// Falls back to another way of finding out, unless this one did.
    pub(super) fn or_else(self, other: impl FnOnce() -> Fact<T>) -> Fact<T> {
        match self {
            Fact::Known(_) => self,
            // The first way is the better one, so its reason is the one worth telling.
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
    fn json_tells_the_three_cases_apart() {
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
