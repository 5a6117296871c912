//! How the ranks of a carrier meet: as threads of one process, or as processes.

use std::sync::Arc;

use ep::{Config, Rail, Rank, Result, Transport, World};
use ep_rail::{RankPlace, Segment, Streams, WindowLayout, open_streams};

use crate::carrier::RailCarrier;
use crate::ends::{Ends, ThreadEnds};

impl RailCarrier {
    /// Carriers between the threads of one process, one for each of `names`, in their order. `config` selects engine and
    /// slots (`config.host`).
    ///
    /// # Errors
    /// [`CallerError`](ep::CallerError) for a name that occurs twice and for invalid settings; the errors of the engine.
    pub fn threads(names: &[Rank], config: &Config) -> Result<Vec<Self>> {
        config.check()?;
        Self::check_names(names, names.len())?;
        let bytes = WindowLayout::new(names.len(), &config.host)?.bytes();
        let window = |_| Segment::private(bytes.max(1)).map(Arc::new);
        let windows = (0..names.len()).map(window).collect::<Result<Vec<_>>>()?;
        let mut opened = Vec::new();
        for own in 0..names.len() {
            let of = |peer: Rank| Ok(Arc::clone(&windows[peer.index()]));
            let place = RankPlace { local_rank: own, ..RankPlace::default() };
            // SAFETY: one `Streams` is made of the engine below.
            opened.push(unsafe { open_streams(rail(names.len(), own)?, &place, &config.host, of)? });
        }
        let blobs: Vec<Vec<u8>> = opened.iter().map(|engine| engine.blob()).collect();
        let mut carriers = Vec::new();
        let ends = ThreadEnds::of(names.len());
        for (own, ((engine, window), ends)) in opened.into_iter().zip(windows).zip(ends).enumerate() {
            let transport = engine.connect(&blobs)?;
            carriers.push(Self::over(names, own, window, config, transport, Arc::new(ends))?);
        }
        Ok(carriers)
    }

    /// The carrier of the rank at position `own` over a connected engine.
    fn over(
        names: &[Rank],
        own: usize,
        window: Arc<Segment>,
        config: &Config,
        transport: Box<dyn Transport>,
        ends: Arc<dyn Ends>,
    ) -> Result<Self> {
        let engine = transport.name().to_string();
        let streams = Streams::new(&rail(names.len(), own)?, window, &config.host, transport)?;
        Self::start(names, own, streams, engine, ends)
    }
}

/// The rail of all ranks: each is a domain of its own.
fn rail(ranks: usize, own: usize) -> Result<Rail> {
    Rail::new((0..ranks as u32).map(Rank).collect(), own)
}

/// The world of the ranks of a carrier, in which each rank is a domain of its own.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "processes need Linux"))]
fn world(ranks: usize) -> Result<World> {
    World::builder().ranks(ranks).domains(ranks).experts(ranks).build()
}

#[cfg(target_os = "linux")]
mod processes {
    use std::io::ErrorKind;
    use std::os::fd::{AsFd as _, OwnedFd};
    use std::time::Instant;

    use ep::join::{Introduction, Joining, LinkEvent, Links, Met, Rendezvous};
    use ep::{EnvironmentError, HostConfig, PeerError, PeerFault};
    use ep_rail::needs_blobs;

    use super::*;
    use crate::links::LinkEnds;

    /// [`Introduction::backend`]. Change it with the format of parts or the messages of links.
    const BACKEND: &str = "carrier 1";

    impl RailCarrier {
        /// Makes this process one rank of a carrier: the one that `rendezvous` says. `names` are the ranks in the
        /// numbering of the migration, in the order of the rendezvous. Collective.
        ///
        /// All ranks have the same engine and slots (`config.host`). The engine must connect all machines: `tcp`, for
        /// example. `loopback` and emulated links connect processes of one machine.
        ///
        /// # Errors
        /// Those of [`ep::join::join`] and [`Joining::meet`], whose rank numbers are those of the rendezvous;
        /// [`CallerError`](ep::CallerError) for invalid settings; the errors of the engine.
        pub fn join(rendezvous: &mut dyn Rendezvous, names: &[Rank], config: &Config) -> Result<Self> {
            config.check()?;
            Self::check_names(names, rendezvous.ranks())?;
            let world = super::world(rendezvous.ranks())?;
            ep::join::join(&world, rendezvous, config, |joining| Self::meet(joining, &world, names, config))
        }

        fn meet(joining: &mut Joining<'_>, world: &World, names: &[Rank], config: &Config) -> Result<Self> {
            let own = joining.rank();
            let bytes = WindowLayout::new(world.ranks(), &config.host)?.bytes().max(1);
            let exchanges_blobs = needs_blobs(world.ranks(), &config.host);
            let (window, file) = match exchanges_blobs {
                true => (Segment::private(bytes)?, None),
                false => Segment::shared(bytes).map(|(window, file)| (window, Some(file)))?,
            };
            let window = Arc::new(window);
            let Met { machines, mut links, .. } = joining.meet(introduction(&config.host), || Err(""))?;
            let mapped = match &file {
                Some(file) => exchange_windows(own, &window, file, &mut links, config)?,
                None => Vec::new(),
            };
            // `open_streams` asks for the windows of peers only if the engine maps them.
            let of = |peer: Rank| match peer == own {
                true => Ok(Arc::clone(&window)),
                false => Ok(Arc::clone(&mapped[peer.index() - usize::from(peer > own)])),
            };
            // Ranks of one machine share its NICs in turn.
            let before = (0..own.0).map(Rank).filter(|&peer| !machines.is_remote(peer)).count();
            let place = RankPlace { local_rank: before, gpu: None, address: machines.address() };
            // SAFETY: one `Streams` is made of the engine below.
            let opened =
                unsafe { open_streams(rail(world.ranks(), own.index())?, &place, &config.host, of)? };
            let blobs = match exchanges_blobs {
                true => joining.all_gather(&opened.blob())?,
                false => vec![Vec::new(); world.ranks()],
            };
            // All ranks are on one rail.
            let transport = opened.connect(&blobs)?;
            let ends = Arc::new(LinkEnds::watch(own.index(), links.links)?);
            let carrier = Self::over(names, own.index(), window, config, transport, ends)?;
            // Barrier: no rank may leave before all others have connected.
            joining.all_gather(&[])?;
            Ok(carrier)
        }
    }

    fn introduction(config: &HostConfig) -> Introduction<String> {
        let settings = vec![
            ("slot_bytes", config.slot_bytes.to_string()),
            ("slots", config.slots.to_string()),
            ("the transport", config.transport.engine.clone()),
            ("the number of NICs of a rank", config.transport.nics_per_rank().to_string()),
        ];
        Introduction { backend: BACKEND, settings, facts: String::new() }
    }

    /// Sends the descriptor of this rank's window to all other ranks, and maps theirs. Returns them in rank order, without
    /// this rank's. All ranks are on one machine.
    fn exchange_windows(
        own: Rank,
        window: &Segment,
        file: &OwnedFd,
        links: &mut Links,
        config: &Config,
    ) -> Result<Vec<Arc<Segment>>> {
        const WHAT: &str = "the descriptor of its window";
        let (start, bound) = (Instant::now(), config.stall_bound());
        let lost = |peer, fault, what: String| -> ep::Error {
            PeerError::joining(own, peer, fault, what, start.elapsed()).into()
        };
        let linked = std::mem::take(&mut links.links);
        let mut split = Vec::new();
        let mut windows = Vec::new();
        for (peer, mut link) in linked {
            match link.send(&[], Some(file.as_fd()), bound).map_err(|error| (error.kind(), error)) {
                // Of a peer that has left or died, the wait below says which.
                Ok(()) | Err((ErrorKind::BrokenPipe, _)) => {}
                Err((ErrorKind::TimedOut, _)) => {
                    let what = "it to accept a descriptor of memory".into();
                    return Err(lost(peer, PeerFault::Stalled, what));
                }
                Err((_, error)) => {
                    let what = format!("sending a descriptor of memory to rank {peer}");
                    let hint = "raise the limit of open files (ulimit -n), or free memory";
                    return Err(EnvironmentError::new(what, error, hint).into());
                }
            }
            split.push((peer, link));
        }
        for (peer, link) in &mut split {
            let found = match link.wait(bound.saturating_sub(start.elapsed())) {
                Some(LinkEvent::Message(_, Some(file))) => Segment::received(&file, window.len())
                    .map_err(|problem| lost(*peer, PeerFault::Failed, format!("its window: {problem}"))),
                Some(LinkEvent::Message(_, None)) => Err(lost(
                    *peer,
                    PeerFault::Failed,
                    "its window, whose message has no descriptor; raise the limit of open files (ulimit -n)"
                        .into(),
                )),
                Some(LinkEvent::Left) => Err(lost(*peer, PeerFault::Left, WHAT.into())),
                Some(_) => Err(lost(*peer, PeerFault::Died, WHAT.into())),
                None => Err(lost(*peer, PeerFault::Stalled, WHAT.into())),
            };
            windows.push(Arc::new(found?));
        }
        links.links = split;
        Ok(windows)
    }
}
