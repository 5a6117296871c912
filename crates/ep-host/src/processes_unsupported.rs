//! Stands in for `processes` on systems other than Linux, where all ranks are threads.

use std::sync::Arc;

use ep::{EnvironmentError, Rank, Result};

use crate::segment::{Segment, SegmentName};

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

    pub(crate) fn dead(&self) -> impl Iterator<Item = Rank> {
        std::iter::empty()
    }
}

pub(crate) fn unsupported() -> ep::Error {
    let needs = "this needs Linux (memfd)";
    EnvironmentError::new("sharing memory between processes", needs, "use thread ranks").into()
}
