//! Helpers that the planner's commands share: `plan`, `simulate` and `reproduce`.

pub(crate) mod args;
pub(crate) mod chart;
pub(crate) mod key;
pub(crate) mod problem;
pub(crate) mod text;
