//! Findings as they are shown: one fact a line, with what to do about it.

use serde::Serialize;

use super::fact::Fact;

/// How a finding stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mark {
    /// There, and as it should be.
    Ok,
    /// Not there or not known, and nothing that this build runs needs it.
    Absent,
    /// Something to put right.
    Problem,
}

impl Mark {
    /// The two characters that stand for it on a terminal.
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
    /// How it stands.
    pub(crate) mark: Mark,
    /// What was looked for.
    pub(crate) name: String,
    /// What was found.
    pub(crate) found: String,
    /// What the missing thing would enable, or what is wrong without it.
    pub(crate) enables: Option<String>,
    /// How to get it.
    pub(crate) how: Option<String>,
}

impl Check {
    /// Something that is as it should be.
    pub(super) fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Check { mark: Mark::Ok, name: name.into(), found: found.into(), enables: None, how: None }
    }

    /// Something that is not there, and need not be.
    pub(super) fn absent(name: impl Into<String>, found: impl Into<String>) -> Self {
        Check { mark: Mark::Absent, ..Check::ok(name, found) }
    }

    /// Something that stands in the way.
    pub(super) fn problem(name: impl Into<String>, found: impl Into<String>) -> Self {
        Check { mark: Mark::Problem, ..Check::ok(name, found) }
    }

    /// Adds what it would enable and how to get it.
    pub(super) fn advice(self, enables: impl Into<String>, how: impl Into<String>) -> Self {
        Check { enables: Some(enables.into()), how: Some(how.into()), ..self }
    }

    /// A finding from a fact that every machine has: shown as it is, or as unknown.
    pub(super) fn of<T>(name: &str, fact: &Fact<T>, show: impl FnOnce(&T) -> String) -> Self {
        Check::of_optional(
            name,
            fact,
            |value| Check::ok(name, show(value)),
            || Check::absent(name, "not there"),
        )
    }

    /// A finding from a fact, with the caller's say about the thing being there and not.
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
    /// The findings, in the order they are shown.
    pub(crate) checks: Vec<Check>,
}
