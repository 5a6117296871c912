//! Findings as they are shown: one fact per line, with advice.

use serde::Serialize;

use super::fact::Fact;

/// The status of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mark {
    /// Present and in order.
    Ok,
    /// Absent or unknown, and not required.
    Absent,
    /// A problem to fix.
    Problem,
}

impl Mark {
    /// The two characters that represent the mark in text.
    pub(super) fn symbol(self) -> &'static str {
        match self {
            Mark::Ok => "ok",
            Mark::Absent => "--",
            Mark::Problem => "!!",
        }
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Check {
    /// The status.
    pub(crate) mark: Mark,
    /// The subject.
    pub(crate) name: String,
    /// What was found.
    pub(crate) found: String,
    /// What the missing thing is good for.
    pub(crate) enables: Option<String>,
    /// How to get the missing thing.
    pub(crate) how: Option<String>,
}

impl Check {
    /// Something that is in order.
    pub(super) fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Check { mark: Mark::Ok, name: name.into(), found: found.into(), enables: None, how: None }
    }

    /// Something that is absent and not required.
    pub(super) fn absent(name: impl Into<String>, found: impl Into<String>) -> Self {
        Check { mark: Mark::Absent, ..Check::ok(name, found) }
    }

    /// Something that must be fixed.
    pub(super) fn problem(name: impl Into<String>, found: impl Into<String>) -> Self {
        Check { mark: Mark::Problem, ..Check::ok(name, found) }
    }

    /// Adds what the thing is good for and how to get it.
    pub(super) fn advice(self, enables: impl Into<String>, how: impl Into<String>) -> Self {
        Check { enables: Some(enables.into()), how: Some(how.into()), ..self }
    }

    /// A finding from a fact whose value is always in order.
    pub(super) fn of<T>(name: &str, fact: &Fact<T>, show: impl FnOnce(&T) -> String) -> Self {
        Check::of_optional(
            name,
            fact,
            |value| Check::ok(name, show(value)),
            || Check::absent(name, "not found"),
        )
    }

    /// A finding from a fact; the caller decides what a known and an absent fact mean.
    pub(super) fn of_optional<T>(
        name: &str,
        fact: &Fact<T>,
        known: impl FnOnce(&T) -> Check,
        absent: impl FnOnce() -> Check,
    ) -> Self {
        match fact {
            Fact::Known(value) => known(value),
            Fact::Absent => absent(),
            Fact::Unknown(why) => Check::absent(name, format!("unknown: {why}")),
        }
    }
}

/// The findings on one subject.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Section {
    /// The subject.
    pub(crate) title: &'static str,
    /// The findings, in the order in which they are shown.
    pub(crate) checks: Vec<Check>,
}
