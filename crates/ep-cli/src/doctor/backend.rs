//! The backends and their states on this machine.

use serde::Serialize;

use super::check::{Check, Section};

/// The name of the backend that every machine can run; the verdict begins with it.
pub(super) const HOST: &str = "host";

/// A backend and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BackendReport {
    /// Its name.
    pub(crate) name: &'static str,
    /// Whether it can be used.
    #[serde(flatten)]
    pub(crate) state: BackendState,
}

/// Whether a backend can be used; if not, the first thing that is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum BackendState {
    /// The backend can be used.
    Ready {
        /// The hardware that it runs on.
        found: String,
    },
    /// This machine lacks something that the backend needs.
    Missing {
        /// What is missing.
        found: String,
        /// How to get it.
        how: &'static str,
    },
}

/// The findings on all backends.
pub(super) fn section(backends: &[BackendReport]) -> Section {
    let check = |backend: &BackendReport| match &backend.state {
        BackendState::Ready { found } => Check::ok(backend.name, found),
        BackendState::Missing { found, how } => {
            Check::absent(backend.name, found).advice("ranks on GPUs", *how)
        }
    };
    Section { title: "Backends", checks: backends.iter().map(check).collect() }
}
