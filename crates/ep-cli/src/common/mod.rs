//! Helpers that several commands share. Modules here import nothing from the commands.

pub(crate) mod agree;
pub(crate) mod backend;
pub(crate) mod failure;
pub(crate) mod invocation;
pub(crate) mod launch;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod numbers;
pub(crate) mod output;
pub(crate) mod role;
pub(crate) mod streams;
pub(crate) mod table;
pub(crate) mod threads;
pub(crate) mod tuning;
pub(crate) mod units;
