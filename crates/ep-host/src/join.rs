//! Joining: every rank makes a control block and a window, and maps those of the other ranks. `buffer` calls this
//! module. With process ranks, the ranks first exchange an [`Introduction`] through the rendezvous.

use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::time::Instant;

#[cfg(target_os = "linux")]
use ep::join::{Door, Invitation, Member, Rendezvous};
#[cfg(target_os = "linux")]
use ep::{CallerError, EnvironmentError, Error, Operator, PeerError, PeerFault, Rank};
use ep::{Config, Counts, Result, Size, World};

use crate::control::Control;
use crate::preprocess;
#[cfg(target_os = "linux")]
use crate::processes::Processes;
use crate::rail::WindowLayout;
#[cfg(target_os = "linux")]
use crate::segment::{Directory, SegmentName};
use crate::segment::{STAMP_BYTES, Segment};

/// Numbers of a rank's first segments. 0 stands for "none" in control blocks; the arena's segments follow.
#[cfg(target_os = "linux")]
const CONTROL_SEGMENT: u64 = 1;
#[cfg(target_os = "linux")]
const WINDOW_SEGMENT: u64 = 2;
pub(crate) const FIRST_ARENA_SEGMENT: u64 = 3;
/// First line of an introduction. Change it with the format of introductions or of shared memory.
#[cfg(target_os = "linux")]
const INTRODUCTION: &str = "hybrid-ep host 2";

/// The two segments of a rank that all other ranks map when they join.
pub(crate) struct RankSegments {
    pub(crate) control: Arc<Segment>,
    pub(crate) window: Arc<Segment>,
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
    pub(crate) fn of_thread(world: &World, config: &Config) -> Result<Self> {
        let [control, window] = Self::sizes(world, config)?;
        Ok(Self {
            control: Arc::new(Segment::private(control)?),
            window: Arc::new(Segment::private(window)?),
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
    /// The machine's boot id.
    machine: String,
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
        // The boot id tells machines apart. Containers of one machine share it; whether they can connect shows later.
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self {
            machine: machine.trim().to_string(),
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
            machine: lines.next()?.to_string(),
            invitation: lines.next()?.parse().ok()?,
            agreed: lines.next()?.to_string(),
        })
    }

    /// Checks that a peer is on this machine and has the same world and settings.
    ///
    /// # Errors
    /// [`EnvironmentError`] or [`CallerError::Collective`] that names the peer.
    pub(crate) fn check(&self, rank: Rank, peer: Rank, theirs: &Self) -> Result<()> {
        if self.machine != theirs.machine {
            return Err(EnvironmentError::new(
                format!("sharing memory with rank {peer}"),
                "it runs on another machine",
                "the host backend spans one machine",
            )
            .into());
        }
        if self.agreed != theirs.agreed {
            return Err(CallerError::Collective {
                operator: Operator::Join,
                field: "the world",
                rank,
                mine: self.agreed.clone(),
                peer,
                theirs: theirs.agreed.clone(),
            }
            .into());
        }
        Ok(())
    }
}

/// The result of [`connect`].
#[cfg(target_os = "linux")]
pub(crate) struct Connected {
    pub(crate) directory: Directory,
    pub(crate) processes: Processes,
    /// By rank.
    pub(crate) segments: Vec<RankSegments>,
}

/// Connects this process with those of all other ranks and maps their control blocks and windows. Collective.
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
    let door = Door::open()?;
    let [control, window] = RankSegments::sizes(world, config)?;
    let (control, window) = (Segment::shared(control)?, Segment::shared(window)?);
    let mine = Introduction::new(world, config, &door);
    let all: Vec<Introduction> = rendezvous
        .all_gather(&mine.to_bytes())?
        .iter()
        .zip(world.topology().all_ranks())
        .map(|(bytes, peer)| Introduction::from_bytes(bytes).ok_or_else(|| unreadable(peer)))
        .collect::<Result<_>>()?;
    for (peer, theirs) in world.topology().all_ranks().zip(&all) {
        mine.check(rank, peer, theirs)?;
    }
    let invitations: Vec<Invitation> = all.into_iter().map(|intro| intro.invitation).collect();
    let mut member = Member::new(rank, world.ranks(), config.timeout);
    member.secret = rendezvous.secret().cloned();
    member.interrupt = config.interrupt.clone();
    let processes = Processes::connect(door, &member, &invitations, config.stall_bound())?;
    *held = processes.clone();

    let names = [
        SegmentName { id: CONTROL_SEGMENT, len: control.0.len() },
        SegmentName { id: WINDOW_SEGMENT, len: window.0.len() },
    ];
    for ((segment, file), name) in [&control, &window].into_iter().zip(names) {
        segment.stamp(&processes.stamp(rank, name.id));
        processes.announce(name, file)?;
    }
    let own = RankSegments { control: Arc::new(control.0), window: Arc::new(window.0) };
    let directory = Directory::of_processes(processes.clone());
    directory.adopt(rank, CONTROL_SEGMENT, &own.control);
    directory.adopt(rank, WINDOW_SEGMENT, &own.window);
    let find = |peer: Rank, name: SegmentName| -> Result<Arc<Segment>> {
        let start = Instant::now();
        // The worlds and settings are equal, so the peer's segments are as long as this rank's.
        let segment = directory.find(peer, name)?;
        if !segment.has_stamp(&processes.stamp(peer, name.id)) {
            let what = format!("segment {} of its memory, and received one of another job", name.id);
            return Err(PeerError::joining(rank, peer, PeerFault::Failed, what, start.elapsed()).into());
        }
        Ok(segment)
    };
    let segments = world
        .topology()
        .all_ranks()
        .map(|peer| Ok(RankSegments { control: find(peer, names[0])?, window: find(peer, names[1])? }))
        .collect::<Result<_>>()?;
    Ok(Connected { directory, processes, segments })
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
        let other = Introduction { machine: "another".into(), ..mine.clone() };
        let error = mine.check(Rank(0), Rank(1), &other).unwrap_err().to_string();
        assert!(error.contains("rank 1: it runs on another machine"), "{error}");
    }
}
