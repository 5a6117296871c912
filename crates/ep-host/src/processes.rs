//! Whether the processes of other ranks live.

use ep::{EnvironmentError, Rank, Result};

/// The peers' processes; empty when ranks are threads.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    #[cfg(target_os = "linux")]
    handles: Vec<(Rank, rustix::fd::OwnedFd)>,
}

impl Processes {
    /// Watches the processes of `peers`.
    #[cfg(target_os = "linux")]
    pub(crate) fn watch(peers: impl Iterator<Item = (Rank, u32)>) -> Result<Self> {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        let open = |(rank, pid): (Rank, u32)| -> Result<_> {
            let handle = Pid::from_raw(pid as i32)
                .ok_or(rustix::io::Errno::SRCH)
                .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()))
                .map_err(|error| {
                    EnvironmentError::new(
                        format!("watching process {pid} of rank {rank}"),
                        error,
                        "all ranks must run in one PID namespace; pidfd needs Linux 5.3",
                    )
                })?;
            Ok((rank, handle))
        };
        Ok(Self { handles: peers.map(open).collect::<Result<_>>()? })
    }

    /// Watches the processes of `peers`.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn watch(_peers: impl Iterator<Item = (Rank, u32)>) -> Result<Self> {
        Err(EnvironmentError::new(
            "watching the processes of other ranks",
            "this needs Linux (pidfd)",
            "use thread ranks",
        )
        .into())
    }

    /// Whether there is no other process: ranks are threads.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_empty(&self) -> bool {
        self.handles.is_empty()
    }

    /// Whether there is no other process: ranks are threads.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn is_empty(&self) -> bool {
        true
    }

    /// Ranks whose process is gone.
    #[cfg(target_os = "linux")]
    pub(crate) fn dead(&self) -> impl Iterator<Item = Rank> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds: Vec<PollFd<'_>> =
            self.handles.iter().map(|(_, handle)| PollFd::new(handle, PollFlags::IN)).collect();
        if !fds.is_empty() {
            // A failed poll leaves all events empty: nobody is taken for dead, and the next look asks again.
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        }
        let gone: Vec<bool> = fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect();
        self.handles.iter().zip(gone).filter_map(|((rank, _), gone)| gone.then_some(*rank))
    }

    /// Ranks whose process is gone.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn dead(&self) -> impl Iterator<Item = Rank> {
        std::iter::empty()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_dead_are_told_from_the_living() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let peers = [(Rank(0), std::process::id()), (Rank(1), child.id())];
        let processes = Processes::watch(peers.into_iter()).unwrap();
        assert_eq!(processes.dead().count(), 0);
        child.kill().unwrap();
        while processes.dead().count() == 0 {
            std::thread::yield_now();
        }
        // Gone for its peers already as a zombie.
        assert_eq!(processes.dead().collect::<Vec<_>>(), [Rank(1)]);
        child.wait().unwrap();
        assert_eq!(processes.dead().collect::<Vec<_>>(), [Rank(1)]);
    }
}
