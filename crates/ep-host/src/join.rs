//! Joining: every rank makes a control block and a window, and maps those of the other ranks of its machine. `buffer`
//! calls this module. With process ranks, the ranks first exchange an [`Introduction`] through the rendezvous. For each
//! rank on another machine, this rank makes a mirror of its control block.

use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
#[cfg(target_os = "linux")]
use std::time::Instant;

#[cfg(target_os = "linux")]
use ep::call::check_same_world;
use ep::join::Machines;
#[cfg(target_os = "linux")]
use ep::join::{Door, Introduced, Invitation, Machine, Member, Rendezvous};
use ep::{Config, Counts, Rank, Result, Size, World};
#[cfg(target_os = "linux")]
use ep::{EnvironmentError, Error, PeerError, PeerFault};
use ep_rail::Segment;

use crate::control::Control;
use crate::directory::Directory;
#[cfg(target_os = "linux")]
use crate::directory::SegmentName;
use crate::preprocess;
use crate::processes::Processes;
use crate::rail::WindowLayout;

/// Numbers of a rank's first segments. 0 stands for "none" in control blocks; the arena's segments follow.
#[cfg(target_os = "linux")]
const CONTROL_SEGMENT: u64 = 1;
#[cfg(target_os = "linux")]
const WINDOW_SEGMENT: u64 = 2;
pub(crate) const FIRST_ARENA_SEGMENT: u64 = 3;
/// Bytes at the end of a control block's or window's segment that hold the job's stamp.
const STAMP_BYTES: usize = 64;
/// First line of an introduction. Change it with the format of introductions, statuses or shared memory.
#[cfg(target_os = "linux")]
const INTRODUCTION: &str = "hybrid-ep host 5";

/// What all other ranks of a rank's machine map when they join.
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
            with_stamp(WindowLayout::new(world, config)?.bytes()).bytes("window")?,
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

#[cfg(target_os = "linux")]
fn unreadable(peer: Rank) -> Error {
    EnvironmentError::new(
        format!("joining rank {peer}"),
        "its introduction cannot be read",
        "run the same version of the library on all ranks",
    )
    .into()
}

/// What a process tells the others when it joins: its machine, its invitation, and its world and settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg(target_os = "linux")]
pub(crate) struct Introduction {
    machine: Machine,
    invitation: Invitation,
    /// The world and the settings that must be equal on all ranks, as text.
    agreed: String,
}

#[cfg(target_os = "linux")]
impl Introduction {
    pub(crate) fn new(world: &World, config: &Config, door: &Door) -> Self {
        let (chunk_tokens, ep::HostConfig { slot_bytes, slots, transport, .. }) =
            (config.chunk_tokens, &config.host);
        let owners: Vec<u32> = (0..world.experts() as u32)
            .map(|e| world.placement().owner_at(world.placement().position_of(e)).0)
            .collect();
        Self {
            machine: Machine::this(config.machine.as_deref()),
            invitation: door.invitation().clone(),
            agreed: format!(
                "{} ranks in {} domains, chunk_tokens {chunk_tokens}, slot_bytes {slot_bytes}, slots {slots}, transport {}, experts on ranks {owners:?}",
                world.ranks(),
                world.topology().domains(),
                transport.engine,
            ),
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let Self { machine, invitation, agreed } = self;
        format!("{INTRODUCTION}\n{machine}\n{invitation}\n{agreed}").into_bytes()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut lines = text.splitn(4, '\n');
        lines.next().filter(|&first| first == INTRODUCTION)?;
        Some(Self {
            machine: lines.next()?.parse().ok()?,
            invitation: lines.next()?.parse().ok()?,
            agreed: lines.next()?.to_string(),
        })
    }
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

/// Connects this process with those of all other ranks and maps the control blocks and windows of those on this machine.
/// Collective.
///
/// Stores the links in `held` as soon as this rank has them. After an error the caller must report the error to the
/// other ranks first and drop `held` then: a peer takes a link that closes early for a death.
///
/// # Errors
/// [`PeerError`] that names a rank that does not join, dies or fails; [`EnvironmentError`]; [`CallerError`].
#[cfg(target_os = "linux")]
pub(crate) fn connect(
    world: &World,
    rendezvous: &mut dyn Rendezvous,
    config: &Config,
    held: &mut Processes,
) -> Result<Connected> {
    let rank = rendezvous.rank();
    let mut door = Door::open()?;
    let [control_bytes, window_bytes] = RankSegments::sizes(world, config)?;
    let (control, window) = (Segment::shared(control_bytes)?, Segment::shared(window_bytes)?);
    let mine = Introduction::new(world, config, &door);
    let all: Vec<Introduction> = rendezvous
        .all_gather(&mine.to_bytes())?
        .iter()
        .zip(world.topology().all_ranks())
        .map(|(bytes, peer)| Introduction::from_bytes(bytes).ok_or_else(|| unreadable(peer)))
        .collect::<Result<_>>()?;
    for (peer, theirs) in world.topology().all_ranks().zip(&all) {
        check_same_world((rank, &mine.agreed), (peer, &theirs.agreed))?;
    }
    let introduced =
        all.into_iter().map(|Introduction { machine, invitation, .. }| Introduced { machine, invitation });
    let (machines, invitations) = Machines::meet(world, rendezvous, config, &mut door, introduced.collect())?;
    let mirrors = world
        .topology()
        .all_ranks()
        .map(|peer| match machines.is_remote(peer) {
            false => Ok(None),
            true => Control::new(peer, Arc::new(Segment::private(control_bytes)?), world).map(Some),
        })
        .collect::<Result<Vec<Option<Control>>>>()?;

    let member = Member::of(rendezvous, config);
    let mirror_of =
        |peer: Rank| mirrors[peer.index()].clone().expect("a rank with a remote link has a mirror");
    let processes = Processes::connect(door, &member, &invitations, config.stall_bound(), mirror_of, || {
        rendezvous.lost()
    })
    .map_err(|error| machines.locate(error))?;
    *held = processes.clone();

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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn introductions_round_trip_through_bytes() {
        let world = World::builder().ranks(4).domains(2).experts(8).build().unwrap();
        let mine = Introduction::new(&world, &Config::default(), &Door::open().unwrap());
        let bytes = mine.to_bytes();
        assert_eq!(Introduction::from_bytes(&bytes), Some(mine.clone()));
        for wrong in [&b""[..], b"\xFF", &bytes[1..], &bytes[..60]] {
            assert_eq!(Introduction::from_bytes(wrong), None);
        }
        let other = Introduction { agreed: "another".into(), ..mine.clone() };
        let error =
            check_same_world((Rank(0), &mine.agreed), (Rank(1), &other.agreed)).unwrap_err().to_string();
        assert!(error.contains("the world") && error.contains("another on rank 1"), "{error}");
    }
}
