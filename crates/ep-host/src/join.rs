//! Joining: every rank makes a control block and a window, and maps those of the other ranks of its machine. `buffer`
//! calls this module. With process ranks, the ranks first meet ([`ep::join`]). For each rank on another machine, this
//! rank makes a mirror of that rank's control block.

use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
#[cfg(target_os = "linux")]
use std::time::Instant;

use ep::join::Machines;
#[cfg(target_os = "linux")]
use ep::join::{Introduction, Joining, Met};
use ep::{Config, Counts, Rank, Result, Size, World};
#[cfg(target_os = "linux")]
use ep::{PeerError, PeerFault};
use ep_rail::{Segment, WindowLayout};

use crate::control::Control;
use crate::directory::Directory;
use crate::preprocess;
use crate::processes::Processes;
#[cfg(target_os = "linux")]
use crate::published::SegmentName;

/// Numbers of a rank's first segments. 0 stands for "none" in control blocks; the arena's segments follow.
#[cfg(target_os = "linux")]
const CONTROL_SEGMENT: u64 = 1;
#[cfg(target_os = "linux")]
const WINDOW_SEGMENT: u64 = 2;
pub(crate) const FIRST_ARENA_SEGMENT: u64 = 3;
/// Bytes at the end of a control block's or window's segment that hold the job's stamp.
const STAMP_BYTES: usize = 64;
/// [`Introduction::backend`]. Change it with the format of statuses or shared memory.
#[cfg(target_os = "linux")]
const BACKEND: &str = "host 6";

/// The memory of a rank that all other ranks of its machine map when they join.
pub(crate) struct RankSegments {
    /// The control block; for a rank on another machine, its mirror.
    pub(crate) control: Control,
    /// `None` for a rank on another machine.
    pub(crate) window: Option<Arc<Segment>>,
}

impl RankSegments {
    /// Lengths of the two segments, bytes, stamps included.
    fn sizes(world: &World, config: &Config) -> Result<[usize; 2]> {
        let with_stamp = |bytes: usize| {
            (Size::new(bytes).next_multiple_of(STAMP_BYTES) + STAMP_BYTES).next_multiple_of(4096)
        };
        Ok([
            with_stamp(Control::bytes(world)?).bytes("control block")?,
            with_stamp(WindowLayout::new(world.topology().domains(), &config.host)?.bytes())
                .bytes("window")?,
        ])
    }

    /// Makes the segments of a rank that is a thread.
    fn of_thread(rank: Rank, world: &World, config: &Config) -> Result<Self> {
        let [control, window] = Self::sizes(world, config)?;
        Ok(Self {
            control: Control::new(rank, Arc::new(Segment::private(control)?), world)?,
            window: Some(Arc::new(Segment::private(window)?)),
        })
    }
}

/// Checks that the settings are valid and fit the world.
///
/// # Errors
/// [`ep::CallerError::Config`] that names the setting.
pub(crate) fn check_config(world: &World, config: &Config) -> Result<()> {
    config.check()?;
    if world.topology().domains() > 1 {
        preprocess::check_slot(Counts::words(world), config.host.slot_bytes)?;
    }
    Ok(())
}

/// The words of the stamp, in the last [`STAMP_BYTES`] bytes of a control block's or window's segment.
#[cfg(target_os = "linux")]
fn stamp_words(segment: &Segment) -> &[AtomicU64; 4] {
    // SAFETY: any bytes are valid atomics.
    unsafe { segment.view(segment.len() - STAMP_BYTES) }
}

/// Writes the stamp, which marks the segment as one of this job.
#[cfg(target_os = "linux")]
fn write_stamp(segment: &Segment, stamp: &[u8; 32]) {
    for (word, bytes) in stamp_words(segment).iter().zip(stamp.as_chunks().0) {
        word.store(u64::from_le_bytes(*bytes), Relaxed);
    }
}

/// Whether the segment has this stamp.
#[cfg(target_os = "linux")]
fn has_stamp(segment: &Segment, stamp: &[u8; 32]) -> bool {
    let words = stamp_words(segment).iter().zip(stamp.as_chunks().0);
    words.fold(true, |same, (word, bytes)| same & (word.load(Relaxed) == u64::from_le_bytes(*bytes)))
}

/// This rank's introduction. It has no facts: the segments of all ranks are alike.
#[cfg(target_os = "linux")]
fn introduction(config: &Config) -> Introduction<String> {
    let ep::HostConfig { slot_bytes, slots, transport, .. } = &config.host;
    let (chunk_tokens, engine) = (config.chunk_tokens, &transport.engine);
    let settings = vec![
        ("chunk_tokens", chunk_tokens.to_string()),
        ("slot_bytes", slot_bytes.to_string()),
        ("slots", slots.to_string()),
        ("the transport", engine.to_string()),
        ("the number of NICs of a rank", transport.nics_per_rank().to_string()),
    ];
    Introduction { backend: BACKEND, settings, facts: String::new() }
}

/// What the ranks of a world share, as one rank sees it.
pub(crate) struct Connected {
    pub(crate) directory: Directory,
    /// Empty with thread ranks.
    pub(crate) processes: Processes,
    pub(crate) machines: Machines,
    /// By rank.
    pub(crate) segments: Vec<RankSegments>,
}

impl Connected {
    /// What ranks that are threads share.
    pub(crate) fn of_threads(world: &World, config: &Config) -> Result<Self> {
        let segments = world.topology().all_ranks().map(|rank| RankSegments::of_thread(rank, world, config));
        Ok(Self {
            directory: Directory::of_threads(),
            processes: Processes::default(),
            machines: Machines::one(world.ranks()),
            segments: segments.collect::<Result<_>>()?,
        })
    }
}

/// Connects this process with the processes of all other ranks, and maps the control blocks and windows of the ranks on
/// this machine. Collective.
///
/// # Errors
/// Those of [`Joining::meet`]; [`PeerError`] that names a rank that dies or fails; [`ep::EnvironmentError`].
#[cfg(target_os = "linux")]
pub(crate) fn connect(world: &World, joining: &mut Joining<'_>, config: &Config) -> Result<Connected> {
    let rank = joining.rank();
    let [control_bytes, window_bytes] = RankSegments::sizes(world, config)?;
    let (control, window) = (Segment::shared(control_bytes)?, Segment::shared(window_bytes)?);
    let Met { machines, links, .. } = joining.meet(introduction(config), || Err(""))?;
    let mirrors = world
        .topology()
        .all_ranks()
        .map(|peer| match machines.is_remote(peer) {
            false => Ok(None),
            true => Control::new(peer, Arc::new(Segment::private(control_bytes)?), world).map(Some),
        })
        .collect::<Result<Vec<Option<Control>>>>()?;
    let mirror_of =
        |peer: Rank| mirrors[peer.index()].clone().expect("a rank with a remote link has a mirror");
    let processes = Processes::new(rank, links, config.stall_bound(), mirror_of)?;

    let names = [
        SegmentName { id: CONTROL_SEGMENT, len: control.0.len() },
        SegmentName { id: WINDOW_SEGMENT, len: window.0.len() },
    ];
    for ((segment, file), name) in [&control, &window].into_iter().zip(names) {
        write_stamp(segment, &processes.stamp(rank, name.id));
        processes.announce(name, file)?;
    }
    let (control, window) = (Arc::new(control.0), Arc::new(window.0));
    let directory = Directory::of_processes(processes.clone());
    directory.adopt(rank, CONTROL_SEGMENT, &control);
    directory.adopt(rank, WINDOW_SEGMENT, &window);
    let find = |peer: Rank, name: SegmentName| -> Result<Arc<Segment>> {
        let start = Instant::now();
        // The worlds and settings are equal, so the peer's segments are as long as this rank's.
        let segment = directory.find(peer, name)?;
        if !has_stamp(&segment, &processes.stamp(peer, name.id)) {
            let what = format!("segment {} of its memory, and received one of another job", name.id);
            return Err(PeerError::joining(rank, peer, PeerFault::Failed, what, start.elapsed()).into());
        }
        Ok(segment)
    };
    let segments = world
        .topology()
        .all_ranks()
        .zip(&mirrors)
        .map(|(peer, mirror)| match mirror {
            Some(mirror) => Ok(RankSegments { control: mirror.clone(), window: None }),
            None => {
                let control = Control::new(peer, find(peer, names[0])?, world)?;
                Ok(RankSegments { control, window: Some(find(peer, names[1])?) })
            }
        })
        .collect::<Result<_>>()?;
    Ok(Connected { directory, processes, machines, segments })
}
