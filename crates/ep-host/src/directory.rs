//! Finds the segments of other ranks: in a shared map with thread ranks, through `processes` with process ranks.
//!
//! `join` finds control blocks and windows through the [`Directory`], `comm` the memories that peers publish. `memory`
//! makes the segments of the arena with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ep::{Rank, Result};
use ep_rail::Segment;

use crate::processes::Processes;
use crate::published::SegmentName;

/// Segments by owner and the owner's number.
type Known = HashMap<(Rank, u64), Arc<Segment>>;

/// Finds the segments of the ranks of one world.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    /// With thread ranks, all segments; with process ranks, those that this process has made or found.
    known: Arc<Mutex<Known>>,
    /// Empty with thread ranks.
    processes: Processes,
}

impl Directory {
    /// A directory for ranks that are threads; all of them must use clones of one value.
    pub(crate) fn of_threads() -> Self {
        Self::of_processes(Processes::default())
    }

    /// A directory for ranks that are processes.
    pub(crate) fn of_processes(processes: Processes) -> Self {
        Self { known: Arc::default(), processes }
    }

    /// Makes a segment of `rank` and announces it to the peers.
    pub(crate) fn create(&self, rank: Rank, id: u64, len: usize) -> Result<Arc<Segment>> {
        let segment = if self.processes.is_empty() {
            Segment::private(len)?
        } else {
            #[cfg(not(target_os = "linux"))]
            return Err(crate::processes::unsupported());
            #[cfg(target_os = "linux")]
            {
                let (segment, file) = Segment::shared(len)?;
                self.processes.announce(SegmentName { id, len }, &file)?;
                segment
            }
        };
        let segment = Arc::new(segment);
        self.adopt(rank, id, &segment);
        Ok(segment)
    }

    /// Adds a segment of `rank`.
    pub(crate) fn adopt(&self, rank: Rank, id: u64, segment: &Arc<Segment>) {
        self.lock().insert((rank, id), Arc::clone(segment));
    }

    /// The segment `name` of `rank`. Waits, within the stall bound, for a segment of a process to arrive.
    ///
    /// # Errors
    /// [`ep::PeerError`] when the segment does not arrive or is not what was announced; with thread ranks,
    /// [`ep::EnvironmentError`] when it was never made.
    pub(crate) fn find(&self, rank: Rank, name: SegmentName) -> Result<Arc<Segment>> {
        if let Some(segment) = self.lock().get(&(rank, name.id)) {
            return Ok(Arc::clone(segment));
        }
        let segment = self.processes.find(rank, name)?;
        self.adopt(rank, name.id, &segment);
        Ok(segment)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_one_segment() {
        let directory = Directory::of_threads();
        let mine = directory.create(Rank(0), 3, 4096).unwrap();
        let name = SegmentName { id: 3, len: 4096 };
        assert_eq!(directory.clone().find(Rank(0), name).unwrap().at(0, 1), mine.at(0, 1));
        assert!(directory.find(Rank(1), name).unwrap_err().to_string().contains("segment 3 of rank 1"));
    }
}
