//! [`join`]: how a process becomes a rank of its world, on every backend. The ranks introduce themselves, are linked, and
//! then share memory as their backend does.

use std::fmt::Display;
use std::str::FromStr;

use super::link::Held;
use super::machines::unreadable;
use super::{Door, Invitation, Links, Machine, Machines, Member, Rendezvous};
use crate::config::Config;
use crate::error::{CallerError, Operator, Result};
use crate::topology::{Rank, World};

/// The version of introductions. A backend has a version of its own, in [`Introduction::backend`].
const VERSION: u32 = 1;

/// Makes this process one rank of `world`: the rank of `rendezvous`. `make` makes the rank's buffer; it calls
/// [`Joining::meet`], and then shares memory with the ranks that it has met. Collective.
///
/// When `make` fails, this function sends the reason to the other ranks. The links to them end only afterwards, even if
/// `make` has dropped them, because a peer reports a link that ends as a rank that died or left. In a job of several
/// machines, the error names the machine of the rank at fault.
///
/// # Errors
/// - [`CallerError::Topology`] when `world` and `rendezvous` differ in the number of ranks.
/// - The error of `make`, or one that names a rank which was lost earlier (see [`Rendezvous::abandon`]).
pub fn join<B>(
    world: &World,
    rendezvous: &mut dyn Rendezvous,
    config: &Config,
    make: impl FnOnce(&mut Joining<'_>) -> Result<B>,
) -> Result<B> {
    let (ranks, found) = (world.ranks(), rendezvous.ranks());
    if ranks != found {
        let problem = format!("the world has {ranks} ranks, the rendezvous {found}");
        return Err(CallerError::Topology(problem).into());
    }
    let own = rendezvous.rank();
    if own.index() >= ranks {
        let problem = format!("the rendezvous calls this rank {own}, and the world has {ranks} ranks");
        return Err(CallerError::Topology(problem).into());
    }
    let mut joining = Joining { world, config, rendezvous, machines: Machines::one(ranks), held: None };
    make(&mut joining).map_err(|error| {
        let Joining { rendezvous, machines, held, .. } = joining;
        let reported = rendezvous.abandon(machines.locate(error));
        drop(held);
        machines.locate(reported)
    })
}

/// The blobs of all ranks, in rank order. A program may implement [`Rendezvous`] itself, so the number of blobs is
/// checked.
pub(super) fn gathered(rendezvous: &mut dyn Rendezvous, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
    let blobs = rendezvous.all_gather(blob)?;
    let (found, ranks) = (blobs.len(), rendezvous.ranks());
    if found == ranks {
        return Ok(blobs);
    }
    let problem =
        format!("the rendezvous has gathered {found} blobs from {ranks} ranks; expected one of each");
    Err(CallerError::Topology(problem).into())
}

/// A rank that is joining its world, in [`join`].
pub struct Joining<'a> {
    world: &'a World,
    config: &'a Config,
    rendezvous: &'a mut dyn Rendezvous,
    machines: Machines,
    /// Keeps the links of this rank open.
    held: Option<Held>,
}

/// The name of a setting, and its value as text without the separator `"; "`.
pub type Setting = (&'static str, String);

/// What a rank tells the other ranks about itself.
#[derive(Debug, Clone)]
pub struct Introduction<T> {
    /// The backend with the version of its formats: of `facts`, of messages over links, and of shared memory. Must
    /// be equal on all ranks.
    pub backend: &'static str,
    /// The settings that must be equal on all ranks, in the same order. If a value differs, the error names the setting.
    pub settings: Vec<Setting>,
    /// What only the backend understands. Its text form is one line.
    pub facts: T,
}

/// What a rank has once it has met the other ranks.
#[derive(Debug)]
pub struct Met<T> {
    /// Which ranks are on which machine.
    pub machines: Machines,
    /// [`Introduction::facts`] of all ranks, in rank order.
    pub facts: Vec<T>,
    /// The links to all other ranks.
    pub links: Links,
}

impl Joining<'_> {
    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rendezvous.rank()
    }

    /// Like [`Rendezvous::all_gather`]. Collective.
    ///
    /// # Errors
    /// Those of [`Rendezvous::all_gather`].
    pub fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        gathered(self.rendezvous, blob)
    }

    /// Exchanges introductions, checks that all ranks can work together, and links this rank with all others. Collective.
    ///
    /// `shares_between_machines` is called if this rank's NVLink domain has ranks on several machines. It returns `Ok` if the
    /// rank can share memory with other machines, else a hint for the user, which may be empty.
    ///
    /// # Errors
    /// - [`EnvironmentError`](crate::EnvironmentError) that names a rank of a different version or backend.
    /// - [`CallerError::Collective`] that names a rank with a different world or different settings.
    /// - For machines that do not fit the world and the engine: [`CallerError::Topology`], [`CallerError::Config`],
    ///   [`EnvironmentError`](crate::EnvironmentError).
    /// - [`PeerError`](crate::PeerError) that names a rank which is lost, late or unreachable.
    pub fn meet<T: Display + FromStr>(
        &mut self,
        introduction: Introduction<T>,
        shares_between_machines: impl FnOnce() -> Result<(), &'static str>,
    ) -> Result<Met<T>> {
        let Self { world, config, rendezvous, .. } = self;
        let Introduction { backend, settings, facts } = introduction;
        let first_line = format!("hybrid-ep {VERSION} {backend}");
        let mut door = Door::open()?;
        let settings = [world_settings(world), settings].concat();
        let mine = Introduced {
            machine: Machine::this(config.machine.as_deref()),
            invitation: door.invitation().clone(),
            facts,
            settings: values(&settings),
        };
        let blobs = gathered(*rendezvous, mine.to_text(&first_line).as_bytes())?;
        let (mut machines, mut invitations, mut facts) = (Vec::new(), Vec::new(), Vec::new());
        for (peer, blob) in world.topology().all_ranks().zip(&blobs) {
            let theirs = Introduced::from_bytes(&first_line, blob);
            let theirs: Introduced<T> = theirs.ok_or_else(|| unreadable(peer, "introduction"))?;
            check_same((rendezvous.rank(), &settings), (peer, &theirs.settings))?;
            machines.push(theirs.machine);
            invitations.push(theirs.invitation);
            facts.push(theirs.facts);
        }
        let (machines, invitations) = Machines::meet(
            world,
            *rendezvous,
            config,
            &mut door,
            &machines,
            invitations,
            shares_between_machines,
        )?;
        self.machines = machines.clone();
        let member = Member::of(*rendezvous, config);
        let links = Links::connect(door, &member, &invitations, || rendezvous.lost())?;
        self.held = Some(links.hold());
        Ok(Met { machines, facts, links })
    }
}

/// What a rank has told the others about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Introduced<T> {
    machine: Machine,
    invitation: Invitation,
    facts: T,
    /// The values that must be equal on all ranks.
    settings: String,
}

impl<T: Display + FromStr> Introduced<T> {
    pub(super) fn to_text(&self, first_line: &str) -> String {
        let Self { machine, invitation, facts, settings } = self;
        format!("{first_line}\n{machine}\n{invitation}\n{facts}\n{settings}")
    }

    pub(super) fn from_bytes(first_line: &str, bytes: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.splitn(5, '\n');
        lines.next().filter(|&first| first == first_line)?;
        Some(Self {
            machine: lines.next()?.parse().ok()?,
            invitation: lines.next()?.parse().ok()?,
            facts: lines.next()?.parse().ok()?,
            settings: lines.next()?.into(),
        })
    }
}

/// The settings of a world. Consecutive experts of one rank are one item.
fn world_settings(world: &World) -> Vec<Setting> {
    let owner = |expert| world.placement().owner_at(world.placement().position_of(expert));
    let mut runs: Vec<(u32, Rank)> = Vec::new();
    for expert in 0..world.experts() as u32 {
        match runs.last_mut() {
            Some((count, rank)) if *rank == owner(expert) => *count += 1,
            _ => runs.push((1, owner(expert))),
        }
    }
    let runs: Vec<String> = runs.iter().map(|(count, rank)| format!("{count} of rank {rank}")).collect();
    vec![
        ("the number of ranks", world.ranks().to_string()),
        ("the number of NVLink domains", world.topology().domains().to_string()),
        ("the number of experts", world.experts().to_string()),
        ("the order of experts", runs.join(", ")),
    ]
}

const SEPARATOR: &str = "; ";

fn values(settings: &[Setting]) -> String {
    settings.iter().map(|(_, value)| value.as_str()).collect::<Vec<_>>().join(SEPARATOR)
}

/// Checks that a peer has this rank's settings. `other` has the peer's settings as a text of values.
fn check_same(own: (Rank, &[Setting]), other: (Rank, &str)) -> Result<()> {
    let ((rank, settings), (peer, theirs)) = (own, other);
    let mine = values(settings);
    if mine == theirs {
        return Ok(());
    }
    // Name the first setting that differs. Later ones often differ for the same reason, or are values of other settings.
    let mut pairs = settings.iter().zip(theirs.split(SEPARATOR));
    let (field, mine, theirs) = match pairs.find(|((_, mine), theirs)| mine != theirs) {
        Some((&(name, ref mine), theirs)) => (name, mine.clone(), theirs),
        None => ("the list of settings", mine, theirs),
    };
    let operator = Operator::Join;
    Err(CallerError::Collective { operator, field, rank, mine, peer, theirs: theirs.into() }.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::super::hub::GRACE_PERIOD;
    use super::super::{LinkEvent, Secret, TcpRendezvous, ThreadRendezvous};
    use super::*;
    use crate::error::{EnvironmentError, Error, PeerError, PeerFault};

    const LONG: Duration = Duration::from_secs(60);
    const FIRST_LINE: &str = "hybrid-ep 1 test 1";

    fn world(ranks: usize) -> World {
        World::builder().ranks(ranks).experts(2 * ranks).build().unwrap()
    }

    fn introduced(world: &World) -> Introduced<u64> {
        let invitation = Door::open().unwrap().invitation().clone();
        let machine = Machine::this(Some("node-a"));
        Introduced { machine, invitation, facts: 7, settings: values(&world_settings(world)) }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn introductions_survive_the_round_trip() {
        let mine = introduced(&world(4));
        let text = mine.to_text(FIRST_LINE);
        assert_eq!(Introduced::from_bytes(FIRST_LINE, text.as_bytes()), Some(mine));
        let read = |first_line: &str, bytes: &[u8]| Introduced::<u64>::from_bytes(first_line, bytes);
        assert_eq!(read("hybrid-ep 1 test 2", text.as_bytes()), None);
        let other_facts = text.replace("\n7\n", "\nseven\n");
        for wrong in
            [&b""[..], b"\xFF", &text.as_bytes()[1..], &text.as_bytes()[..60], other_facts.as_bytes()]
        {
            assert_eq!(read(FIRST_LINE, wrong), None);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn ranks_with_different_worlds_say_what_differs() {
        let mine = [world_settings(&world(2)), vec![("slots", "3".into())]].concat();
        let told = |settings: &[Setting]| check_same((Rank(0), &mine), (Rank(1), &values(settings)));
        let differs = |settings: &[Setting]| told(settings).unwrap_err().to_string();
        assert_eq!(told(&mine), Ok(()));
        let other = World::builder().ranks(2).placement(&[0, 1, 1, 0].map(Rank)).build().unwrap();
        assert_eq!(
            differs(&world_settings(&other)),
            "operator join: the order of experts is 2 of rank 0, 2 of rank 1 on rank 0 and 1 of rank 0, 2 of rank 1, \
             1 of rank 0 on rank 1; it must be the same on every rank"
        );
        let more = World::builder().ranks(2).experts(8).build().unwrap();
        assert_eq!(
            differs(&[world_settings(&more), vec![("slots", "4".into())]].concat()),
            "operator join: the number of experts is 4 on rank 0 and 8 on rank 1; it must be the same on every rank"
        );
        let domains = World::builder().ranks(2).domains(2).experts(4).build().unwrap();
        assert!(
            differs(&world_settings(&domains)).contains("the number of NVLink domains is 1 on rank 0 and 2")
        );
        let other_slots = [&mine[..4], &[("slots", "4".into())]].concat();
        assert!(differs(&other_slots).contains("slots is 3 on rank 0 and 4 on rank 1"));
        assert!(differs(&mine[..4]).contains("the list of settings is 2; 1; 4; "));
    }

    /// Joins ranks that are threads; `make` makes what each of them returns.
    fn join_all<B: Send>(
        ranks: usize,
        make: impl Fn(&mut Joining<'_>) -> Result<B> + Sync,
    ) -> Vec<Result<B>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = listener.local_addr().unwrap().to_string();
        let (world, config) = (world(ranks), Config::default());
        let member = |rank: usize| {
            let member = Member::new(Rank(rank as u32), ranks, LONG);
            member.with_secret(Secret::new(b"a secret of the tests").unwrap())
        };
        let join = |mut met: TcpRendezvous| join(&world, &mut met, &config, &make);
        let (join, store, member) = (&join, &store, &member);
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| join(TcpRendezvous::host(&listener, member(0)).unwrap()));
            let others = (1..ranks)
                .map(|rank| scope.spawn(move || join(TcpRendezvous::join(store, member(rank)).unwrap())));
            let threads: Vec<_> = std::iter::once(zero).chain(others).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn introduction(joining: &Joining<'_>) -> Introduction<u32> {
        let (settings, facts) = (Vec::new(), joining.rank().0);
        Introduction { backend: "test 1", settings, facts }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn ranks_that_have_joined_know_the_facts_of_all_and_see_which_rank_leaves() {
        let mut all: Vec<Met<u32>> = join_all(3, |joining| joining.meet(introduction(joining), || Err("")))
            .into_iter()
            .map(Result::unwrap)
            .collect();
        assert!(all.iter().all(|met| met.facts == [0, 1, 2] && met.machines.ranks_here() == 3));
        drop(all.remove(1));
        for mut met in all {
            let link = met.links.links.iter().position(|(peer, _)| *peer == Rank(1)).unwrap();
            let (_, mut receiver) = met.links.links.remove(link).1.split();
            assert!(matches!(receiver.wait(LONG), Some(LinkEvent::Left)));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn the_cause_of_a_failure_reaches_the_peers_before_the_links_end() {
        for splits in [false, true] {
            let results = join_all(3, |joining| -> Result<()> {
                let rank = joining.rank();
                let mut links = joining.meet(introduction(joining), || Err(""))?.links.links;
                if rank == Rank(1) {
                    let ends: Vec<_> = links.into_iter().map(|(_, link)| link).collect();
                    if splits {
                        ends.into_iter().map(|link| link.split()).for_each(|(mut sender, _)| sender.leave());
                    }
                    // Give the others time to report the end of a link, if they see one.
                    std::thread::sleep(4 * GRACE_PERIOD);
                    return Err(EnvironmentError::new("starting a thread", "no more threads", "").into());
                }
                let link = links.iter().position(|(peer, _)| *peer == Rank(1)).unwrap();
                let (_sender, mut receiver) = links.remove(link).1.split();
                let fault = match receiver.wait(LONG) {
                    Some(LinkEvent::Left) => PeerFault::Left,
                    _ => PeerFault::Died,
                };
                Err(PeerError::joining(rank, Rank(1), fault, "its memory", Duration::ZERO).into())
            });
            for (rank, result) in results.into_iter().enumerate() {
                match result.unwrap_err() {
                    Error::Peer(error) if rank != 1 => {
                        assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Failed), "{error}");
                        assert_eq!(error.cause.as_deref(), Some("starting a thread: no more threads"));
                    }
                    error => assert_eq!(
                        (rank, error.to_string().as_str()),
                        (1, "starting a thread: no more threads")
                    ),
                }
            }
        }
    }

    /// A rendezvous whose rank and number of blobs a test chooses.
    struct Lying {
        rank: Rank,
        blobs: usize,
    }

    impl Rendezvous for Lying {
        fn rank(&self) -> Rank {
            self.rank
        }

        fn ranks(&self) -> usize {
            2
        }

        fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
            Ok(vec![blob.to_vec(); self.blobs])
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_rendezvous_with_impossible_ranks_or_blobs_is_refused() {
        let world = World::builder().ranks(2).experts(2).build().unwrap();
        for (rank, blobs, expected) in [
            (2, 2, "the rendezvous calls this rank 2, and the world has 2 ranks"),
            (0, 1, "has gathered 1 blobs from 2 ranks"),
            (1, 0, "has gathered 0 blobs from 2 ranks"),
            (0, 3, "has gathered 3 blobs from 2 ranks"),
        ] {
            let mut rendezvous = Lying { rank: Rank(rank), blobs };
            let make = |joining: &mut Joining<'_>| joining.meet(introduction(joining), || Err("")).map(drop);
            let error = join(&world, &mut rendezvous, &Config::default(), make).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn an_error_of_joining_names_the_machine_of_the_rank_at_fault() {
        let world = World::builder().ranks(2).domains(2).experts(2).build().unwrap();
        let join = |mut rendezvous: ThreadRendezvous| {
            let machine = Some(format!("node-{}", rendezvous.rank()));
            let mut config = Config { machine, ..Config::default() };
            config.host.transport.engine = "tcp".into();
            config.host.transport.address = Some("127.0.0.1".into());
            let make = |joining: &mut Joining<'_>| -> Result<()> {
                joining.meet(introduction(joining), || Err(""))?;
                // The peer has its links, too, before this rank fails.
                joining.all_gather(b"met")?;
                let (rank, peer) = (joining.rank(), Rank(1 - joining.rank().0));
                Err(PeerError::joining(rank, peer, PeerFault::Stalled, "it", Duration::ZERO).into())
            };
            join(&world, &mut rendezvous, &config, make).unwrap_err().to_string()
        };
        let join = &join;
        let errors = std::thread::scope(|scope| {
            let ends = ThreadRendezvous::new(2, LONG).into_iter();
            let threads: Vec<_> = ends.map(|end| scope.spawn(move || join(end))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(errors[0].starts_with("rank 1 on node-1 stalled"), "{}", errors[0]);
        assert!(errors[1].starts_with("rank 0 on node-0 stalled"), "{}", errors[1]);
    }

    #[test]
    fn a_world_of_another_number_of_ranks_is_refused() {
        let mut alone = ThreadRendezvous::new(1, LONG).remove(0);
        let never = |_: &mut Joining<'_>| -> Result<()> { unreachable!("the world does not fit") };
        let error = join(&world(2), &mut alone, &Config::default(), never).unwrap_err();
        assert_eq!(error.to_string(), "topology: the world has 2 ranks, the rendezvous 1");
    }
}
