//! How ranks find each other: the segments by which a rank is found, and what processes tell each other.

use std::sync::Arc;

use ep::{CallerError, Config, Counts, EnvironmentError, Error, Operator, Rank, Result, World};

use crate::control::Control;
use crate::preprocess;
use crate::rail::WindowLayout;
use crate::segment::{Directory, Segment, SegmentName};

/// Numbers of a rank's first segments; those of its arena follow. 0 stands for "none" in control blocks.
const CONTROL_SEGMENT: u64 = 1;
const WINDOW_SEGMENT: u64 = 2;
pub(crate) const FIRST_ARENA_SEGMENT: u64 = 3;

/// The segments by which a rank is found.
pub(crate) struct Home {
    pub(crate) control: (SegmentName, Arc<Segment>),
    pub(crate) window: (SegmentName, Arc<Segment>),
}

impl Home {
    pub(crate) fn create(directory: &Directory, rank: Rank, world: &World, config: &Config) -> Result<Self> {
        let make = |id, len: usize| -> Result<_> {
            let segment = directory.create(rank, id, len.next_multiple_of(4096))?;
            Ok((SegmentName { id, fd: segment.fd(), len: segment.len() }, segment))
        };
        Ok(Self {
            control: make(CONTROL_SEGMENT, Control::bytes(world))?,
            window: make(WINDOW_SEGMENT, WindowLayout::new(world, config).bytes())?,
        })
    }
}

pub(crate) fn check_config(world: &World, config: &Config) -> Result<()> {
    config.check()?;
    if world.topology.domains() > 1 {
        preprocess::check_slot(Counts::words(world), config.slot_bytes)?;
    }
    Ok(())
}

pub(crate) fn unintelligible(peer: Rank) -> Error {
    EnvironmentError::new(
        format!("meeting rank {peer}"),
        "its introduction cannot be read",
        "all ranks must run the same version of the library",
    )
    .into()
}

/// What a process tells the others when it joins: where it is, and what it was told about the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Introduction {
    pub(crate) machine: String,
    pub(crate) pid: u32,
    pub(crate) control: SegmentName,
    pub(crate) window: SegmentName,
    /// Everything that must be the same everywhere, as text.
    agreed: String,
}

impl Introduction {
    pub(crate) fn new(world: &World, config: &Config, home: &Home) -> Self {
        let Config { chunk_tokens, slot_bytes, slots, .. } = config;
        let owners: Vec<u32> = (0..world.experts() as u32)
            .map(|e| world.placement.owner_at(world.placement.position_of(e)).0)
            .collect();
        // The boot id tells machines apart; two containers of one machine share it, and the segments open or not.
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self {
            machine: machine.trim().to_string(),
            pid: std::process::id(),
            control: home.control.0,
            window: home.window.0,
            agreed: format!(
                "{} ranks in {} domains, chunk_tokens {chunk_tokens}, slot_bytes {slot_bytes}, slots {slots}, experts on ranks {owners:?}",
                world.ranks(),
                world.topology.domains(),
            ),
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let name = |name: SegmentName| format!("{} {} {}", name.id, name.fd, name.len);
        let Self { machine, pid, control, window, agreed } = self;
        format!("{machine}\n{pid}\n{}\n{}\n{agreed}", name(*control), name(*window)).into_bytes()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut lines = text.splitn(5, '\n');
        let name = |line: &str| {
            let mut words = line.split(' ');
            Some(SegmentName {
                id: words.next()?.parse().ok()?,
                fd: words.next()?.parse().ok()?,
                len: words.next()?.parse().ok()?,
            })
        };
        Some(Self {
            machine: lines.next()?.to_string(),
            pid: lines.next()?.parse().ok()?,
            control: name(lines.next()?)?,
            window: name(lines.next()?)?,
            agreed: lines.next()?.to_string(),
        })
    }

    /// Checks that a peer is on this machine and was told the same.
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
