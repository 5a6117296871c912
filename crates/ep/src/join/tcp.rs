//! [`TcpRendezvous`], the rendezvous of processes: rank 0 listens, and the other ranks connect to it.

use std::net::{IpAddr, TcpListener};
use std::time::{Duration, Instant};

use super::hub::Hub;
use super::secret::Secret;
use super::spoke::Spoke;
use super::store::{Listener, Store};
use super::{MAX_BLOB, Rendezvous, Watch};
use crate::config::{Config, LaunchEnv};
use crate::error::{CallerError, EnvironmentError, Error, Result};
use crate::interrupt::Interrupt;
use crate::topology::{MAX_RANKS, Rank};

/// How long a rank tries to resolve the name of rank 0's machine. A longer time would delay the error for a wrong name.
const RESOLVE: Duration = Duration::from_secs(60);

/// The default of [`Member::network_timeout`], unless [`Member::timeout`] is shorter.
const NETWORK_TIMEOUT: Duration = Duration::from_secs(20);

/// The identity and settings with which a process joins a job.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Member {
    /// This process's rank.
    pub rank: Rank,
    /// Number of ranks.
    pub ranks: usize,
    /// The job secret. Without a secret the ranks must be processes of one user on one machine, in one network
    /// namespace, and any such process may join.
    pub secret: Option<Secret>,
    /// The bound for joining and for each exchange.
    pub timeout: Duration,
    /// Which start of the job this process belongs to: rank 0 refuses a process of a different generation, which is left
    /// over from an earlier start. Default 0.
    pub generation: u64,
    /// How long the machine of a peer may acknowledge nothing before the peer counts as unreachable.
    pub network_timeout: Duration,
    /// Lets the program stop a wait of this process.
    pub interrupt: Interrupt,
}

impl Member {
    /// A member without a secret.
    pub fn new(rank: Rank, ranks: usize, timeout: Duration) -> Self {
        let (network_timeout, interrupt) = (timeout.min(NETWORK_TIMEOUT), Interrupt::default());
        Self { rank, ranks, secret: None, timeout, generation: 0, network_timeout, interrupt }
    }

    /// The member that the launcher's environment describes, with the secret of [`Secret::from_env`].
    ///
    /// # Errors
    /// Those of [`Secret::from_env`].
    pub fn launched(env: &LaunchEnv, config: &Config) -> Result<Self> {
        let member = Self::new(Rank(env.rank), env.world_size as usize, config.timeout);
        let (secret, interrupt) = (Secret::from_env()?, config.interrupt.clone());
        let (generation, network_timeout) = (env.generation, config.network_timeout());
        Ok(Self { secret, generation, network_timeout, interrupt, ..member })
    }

    /// The member that has met the others at `rendezvous`, with its secret.
    pub fn of(rendezvous: &dyn Rendezvous, config: &Config) -> Self {
        let member = Self::new(rendezvous.rank(), rendezvous.ranks(), config.timeout);
        let (secret, interrupt) = (rendezvous.secret().cloned(), config.interrupt.clone());
        Self { secret, network_timeout: config.network_timeout(), interrupt, ..member }
    }

    /// The same member with `secret` as its secret.
    #[must_use]
    pub fn with_secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    fn check(&self) -> Result<()> {
        if self.ranks > MAX_RANKS {
            let problem = format!("a job of {} ranks: at most {MAX_RANKS} are possible", self.ranks);
            return Err(CallerError::Topology(problem).into());
        }
        if self.rank.index() < self.ranks {
            return Ok(());
        }
        let problem = format!(
            "rank {} of a job of {} ranks; the rank must be below the number of ranks",
            self.rank, self.ranks
        );
        Err(CallerError::Topology(problem).into())
    }
}

/// The rendezvous of processes: rank 0 listens, and the other ranks connect to it.
///
/// With a secret, the ranks use TCP. Only processes that prove that they know the secret take part; other connections
/// can neither send messages to the job nor delay it. Messages are authenticated, not encrypted. Without a secret, the
/// ranks use a local socket that only processes of the same user can connect to.
#[derive(Debug)]
pub struct TcpRendezvous {
    rank: Rank,
    ranks: usize,
    secret: Option<Secret>,
    /// The network address of this machine from which this rank reaches the store.
    address: Option<IpAddr>,
    end: End,
    /// The process that joined. A forked child must not send a leave message.
    process: u32,
}

#[derive(Debug)]
enum End {
    Alone,
    Hub(Hub),
    Spoke(Spoke),
}

impl TcpRendezvous {
    /// Joins the other ranks at `store` (`host:port`), where rank 0 listens. Returns when all ranks have joined.
    ///
    /// # Errors
    /// - [`EnvironmentError`] when the address cannot be resolved or bound, when the ranks disagree about the number of
    ///   ranks, or when this rank has already joined.
    /// - [`CallerError::Config`] for a store on another machine without a secret.
    /// - [`PeerError`](crate::PeerError) with [`PeerFault::Absent`](crate::PeerFault::Absent) after the timeout. On
    ///   every rank that has joined, the error names the first missing rank.
    /// - [`PeerError`](crate::PeerError) that names a rank which was lost in the meantime.
    /// - [`CallerError::Interrupted`] when the program stopped the wait.
    pub fn join(store: &str, member: Member) -> Result<Self> {
        member.check()?;
        let Member { rank, ranks, .. } = member;
        let process = std::process::id();
        if ranks == 1 {
            return Ok(Self { rank, ranks, secret: member.secret, address: None, end: End::Alone, process });
        }
        if rank == Rank(0) {
            let store = Store::new(store, member.secret.as_ref())?;
            return Self::listen(&store.listen()?, &store, member);
        }
        // The name of rank 0's machine may be published after this rank has started.
        let watch = Watch { rank, interrupt: member.interrupt.clone() };
        let until = Instant::now() + member.timeout.min(RESOLVE);
        let store = Store::find(store, member.secret.as_ref(), until, &watch)?;
        let secret = member.secret.clone();
        let spoke = Spoke::open(&store, member)?;
        let (address, end) = (spoke.network_address(), End::Spoke(spoke));
        Ok(Self { rank, ranks, secret, address, end, process })
    }

    /// Like [`join`](Self::join), with the store and the member that the launcher's environment describes.
    ///
    /// # Errors
    /// Those of [`join`](Self::join) and [`Secret::from_env`].
    pub fn launched(env: &LaunchEnv, config: &Config) -> Result<Self> {
        Self::join(&env.store, Member::launched(env, config)?)
    }

    /// Like [`join`](Self::join) on rank 0, with a listener that the caller has bound, for example to port 0.
    ///
    /// Without a secret, the ranks use the listener's port number only, as the name of their local socket.
    ///
    /// # Errors
    /// Those of [`join`](Self::join).
    pub fn host(listener: &TcpListener, member: Member) -> Result<Self> {
        member.check()?;
        let failed = |error| EnvironmentError::new("listening for ranks", error, "");
        let address = listener.local_addr().map_err(failed)?;
        let store = Store::new(&address.to_string(), member.secret.as_ref())?;
        // Without a secret the ranks do not use TCP.
        if member.secret.is_none() {
            return Self::listen(&store.listen()?, &store, member);
        }
        let listener =
            listener.try_clone().map(Listener::Tcp).and_then(Listener::prepared).map_err(failed)?;
        Self::listen(&listener, &store, member)
    }

    fn listen(listener: &Listener, store: &Store, member: Member) -> Result<Self> {
        let (rank, ranks, secret) = (member.rank, member.ranks, member.secret.clone());
        let (end, process) = (End::Hub(Hub::open(listener, store, member)?), std::process::id());
        let address = listener.network_address().or_else(|| store.facing_address());
        Ok(Self { rank, ranks, secret, address, end, process })
    }
}

impl Rendezvous for TcpRendezvous {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        if blob.len() > MAX_BLOB {
            let (what, unit) = ("blob of a rendezvous", "bytes at most");
            return Err(CallerError::Shape { what, expected: MAX_BLOB, found: blob.len(), unit }.into());
        }
        match &mut self.end {
            End::Alone => Ok(vec![blob.to_vec()]),
            End::Hub(hub) => hub.exchange(blob),
            End::Spoke(spoke) => spoke.exchange(blob),
        }
    }

    fn lost(&mut self) -> Option<Error> {
        match &mut self.end {
            End::Alone => None,
            End::Hub(hub) => hub.lost(),
            End::Spoke(spoke) => spoke.learn(),
        }
    }

    fn abandon(&mut self, error: Error) -> Error {
        match &mut self.end {
            End::Alone => error,
            End::Hub(hub) => hub.abandon(error),
            End::Spoke(spoke) => spoke.abandon(error),
        }
    }

    fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }

    fn network_address(&self) -> Option<IpAddr> {
        self.address
    }
}

impl Drop for TcpRendezvous {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(std::mem::replace(&mut self.end, End::Alone));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_below_the_number_of_ranks() {
        let member = |rank| Member::new(Rank(rank), 2, Duration::from_secs(1));
        assert!(member(1).check().is_ok());
        for rank in [2, 3] {
            let error = member(rank).check().unwrap_err();
            assert!(error.to_string().contains("must be below the number of ranks"), "{error}");
        }
        let of_job = |ranks| Member::new(Rank(0), ranks, Duration::from_secs(1)).check();
        assert!(of_job(MAX_RANKS).is_ok());
        for ranks in [MAX_RANKS + 1, usize::MAX] {
            let error = of_job(ranks).unwrap_err();
            assert!(error.to_string().contains("at most 1048576 are possible"), "{error}");
        }
    }
}
