//! Stands in for `processes` on systems other than Linux, where all ranks are threads.

use std::sync::Arc;
use std::time::Duration;

use ep::{EnvironmentError, PeerFault, Rank, Result};
use ep_rail::Segment;

use crate::control::Control;
use crate::published::SegmentName;

/// No peer is a process.
#[derive(Debug, Clone, Default)]
pub(crate) struct Processes;

impl Processes {
    pub(crate) fn is_empty(&self) -> bool {
        true
    }

    pub(crate) fn find(&self, rank: Rank, name: SegmentName) -> Result<Arc<Segment>> {
        let what = format!("finding segment {} of rank {rank}", name.id);
        Err(EnvironmentError::new(what, "it was never made", "").into())
    }

    pub(crate) fn lost(&self) -> impl Iterator<Item = (Rank, PeerFault)> {
        std::iter::empty()
    }

    pub(crate) fn is_remote(&self, _: Rank) -> bool {
        false
    }

    pub(crate) fn send_status(&self, _: &Control, _: bool) {}

    pub(crate) fn await_news(&self, _: Rank, _: Duration, _: impl Fn() -> bool) {}
}

pub(crate) fn unsupported() -> ep::Error {
    let needs = "this needs Linux (memfd)";
    EnvironmentError::new("sharing memory between processes", needs, "use thread ranks").into()
}
