//! [`Machines`]: which ranks of a job are on which machine, and how ranks of other machines reach this one.

use std::net::IpAddr;

use crate::error::{Error, PeerError};
use crate::topology::Rank;

#[cfg(target_os = "linux")]
pub(super) use meet::unreadable;

/// The machines of a job, as one rank sees them.
#[derive(Debug, Clone)]
pub struct Machines {
    /// By rank: the name of its machine. Empty in a job of one machine.
    names: Vec<String>,
    /// By rank: whether it is on a different machine than this rank.
    remote: Vec<bool>,
    address: Option<IpAddr>,
}

impl Machines {
    /// One machine with all `ranks`.
    pub fn one(ranks: usize) -> Self {
        Self { names: Vec::new(), remote: vec![false; ranks], address: None }
    }

    /// Whether `rank` is on a different machine than this rank.
    pub fn is_remote(&self, rank: Rank) -> bool {
        self.remote[rank.index()]
    }

    /// Number of ranks on this rank's machine, this rank included.
    pub fn ranks_here(&self) -> usize {
        self.remote.iter().filter(|&&remote| !remote).count()
    }

    /// The network address of this machine that ranks of other machines use; `None` in a job of one machine.
    pub fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// The name of the machine of `rank`; `None` in a job of one machine.
    pub fn name_of(&self, rank: Rank) -> Option<&str> {
        self.names.get(rank.index()).map(String::as_str)
    }

    /// Adds the machine of the rank at fault to an error about a peer.
    pub fn locate(&self, error: Error) -> Error {
        match error {
            Error::Peer(error) => {
                let machine = self.name_of(error.peer).map(String::from);
                PeerError { machine, ..error }.into()
            }
            error => error,
        }
    }
}

#[cfg(target_os = "linux")]
mod meet {
    use std::net::SocketAddr;

    use super::super::joining::gathered;
    use super::super::{Door, Invitation, Machine, Rendezvous};
    use super::*;
    use crate::config::Config;
    use crate::error::{CallerError, EnvironmentError, Result};
    use crate::topology::World;

    impl Machines {
        /// Checks that the `machines` of all ranks fit the world and the engine. If there are several, opens this rank's
        /// `door` to the ranks of other machines and exchanges addresses. Collective. Returns the `invitations` of all ranks
        /// with an address where the rank is on another machine. Both arguments are in rank order.
        ///
        /// # Errors
        /// - [`CallerError::Topology`] that names two ranks of this rank's domain on different machines, if this rank cannot
        ///   share memory with other machines. Ranks of other domains learn of this error through the rendezvous.
        /// - [`CallerError::Config`] for an engine that carries bytes inside one machine only.
        /// - [`EnvironmentError`] for a machine without an address that the other machines can reach.
        /// - [`PeerError`], like [`Rendezvous::all_gather`].
        pub(in super::super) fn meet(
            world: &World,
            rendezvous: &mut dyn Rendezvous,
            config: &Config,
            door: &mut Door,
            machines: &[Machine],
            invitations: Vec<Invitation>,
            shares: impl FnOnce() -> Result<(), &'static str>,
        ) -> Result<(Self, Vec<Invitation>)> {
            let own = &machines[rendezvous.rank().index()];
            if !check_machines(world, config, rendezvous.rank(), machines, shares)? {
                return Ok((Self::one(world.ranks()), invitations));
            }
            let (address, addresses) = open_to_machines(rendezvous, config, door)?;
            check_addresses(machines, &addresses)?;
            let remote: Vec<bool> = machines.iter().map(|there| !there.shares_memory_with(own)).collect();
            let invitations = invitations.into_iter().zip(&remote).zip(addresses).map(
                |((invitation, &remote), address)| {
                    if remote { invitation.at(address) } else { invitation }
                },
            );
            let invitations = invitations.collect();
            let names = machines.iter().map(|machine| machine.name().to_string()).collect();
            Ok((Self { names, remote, address: Some(address) }, invitations))
        }
    }

    /// Checks that the ranks of the domain of rank `own` are on one machine, or that rank `own` `shares` memory with other
    /// machines. Also checks that the engine connects machines if the ranks of a rail are on several machines. `machines` are
    /// those of all ranks, in rank order. Returns whether there are several machines.
    fn check_machines(
        world: &World,
        config: &Config,
        own: Rank,
        machines: &[Machine],
        shares: impl FnOnce() -> Result<(), &'static str>,
    ) -> Result<bool> {
        let topology = world.topology();
        // Finds a rank that is on a different machine than the rank that `first_of` returns for it. Returns this one first.
        let apart = |first_of: &dyn Fn(Rank) -> Rank| {
            let mut pairs = topology.all_ranks().map(|rank| (first_of(rank), rank));
            pairs.find(|(first, rank)| !machines[rank.index()].shares_memory_with(&machines[first.index()]))
        };
        let place = |rank: Rank| format!("{rank} on {}", machines[rank.index()].name());
        let first = topology.rank_at(topology.domain_of(own), 0);
        let is_near = |rank| topology.domain_of(rank) == topology.domain_of(own);
        let in_domain = apart(&|rank| if is_near(rank) { first } else { rank });
        if let Some((first, rank)) = in_domain
            && let Err(remedy) = shares()
        {
            return Err(CallerError::Topology(format!(
                "ranks {} and {} are in one NVLink domain, and rank {own} cannot share memory with other machines; choose \
                 the number of domains so that each domain is on one machine, and number the ranks of a machine \
                 consecutively{remedy}",
                place(first),
                place(rank)
            ))
            .into());
        }
        let on_rail = apart(&|rank| topology.rank_at(0, topology.local_rank_of(rank)));
        let engine = &config.host.transport.engine;
        let stays = config.host.transport.maps_windows() || engine == "shm";
        if let Some((here, there)) = on_rail.filter(|_| stays) {
            let problem = format!(
                "carries bytes inside one machine only, and rank {} sends to rank {}; choose tcp, or the provider of your network card",
                place(here),
                place(there)
            );
            let (key, value) = ("HYBRID_EP_TRANSPORT", engine.clone());
            return Err(CallerError::Config { key, value, problem }.into());
        }
        Ok(apart(&|_| Rank(0)).is_some())
    }

    /// Opens this rank's door to ranks of other machines and exchanges addresses. Collective. Returns this rank's address,
    /// and the addresses of all doors in rank order.
    fn open_to_machines(
        rendezvous: &mut dyn Rendezvous,
        config: &Config,
        door: &mut Door,
    ) -> Result<(IpAddr, Vec<SocketAddr>)> {
        let own = config.host.transport.network_address(rendezvous)?.ok_or_else(|| {
            EnvironmentError::new(
                "finding the network address of this rank",
                "the ranks are on several machines, and their rendezvous has no network address",
                "set HYBRID_EP_TRANSPORT_ADDRESS to an address or an interface of this machine, or HYBRID_EP_SECRET on all ranks",
            )
        })?;
        let address = door.open_to(own)?;
        let blobs = gathered(rendezvous, address.to_string().as_bytes())?;
        let addresses = (0..).map(Rank).zip(blobs).map(|(peer, blob)| {
            let address = std::str::from_utf8(&blob).ok().and_then(|text| text.parse().ok());
            address.ok_or_else(|| unreadable(peer, "address"))
        });
        Ok((own, addresses.collect::<Result<_>>()?))
    }

    /// The error for the `part` of joining that `peer` has sent, if it cannot be read.
    pub(in super::super) fn unreadable(peer: Rank, part: &str) -> Error {
        let hint = "run the same version and the same backend on all ranks";
        let problem = format!("its {part} cannot be read");
        EnvironmentError::new(format!("joining rank {peer}"), problem, hint).into()
    }

    /// Checks that ranks of other machines can reach the address of each rank. All ranks check all addresses, so that all
    /// report the same rank at once, and none waits for a rank that gave up.
    ///
    /// # Errors
    /// [`EnvironmentError`] that names the first rank whose address only its own machine reaches.
    fn check_addresses(machines: &[Machine], addresses: &[SocketAddr]) -> Result<()> {
        for ((peer, there), address) in (0..).map(Rank).zip(machines).zip(addresses) {
            let is_needed_elsewhere = || machines.iter().any(|other| !other.shares_network_with(there));
            if address.ip().is_loopback() && is_needed_elsewhere() {
                let (ip, name) = (address.ip(), there.name());
                return Err(EnvironmentError::new(
                    format!("connecting to rank {peer} on {name}"),
                    format!("its address is {ip}, which other machines cannot reach"),
                    format!("set MASTER_ADDR to a network address of rank 0's machine, or HYBRID_EP_TRANSPORT_ADDRESS on {name}"),
                )
                .into());
            }
        }
        Ok(())
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        #[cfg_attr(miri, ignore = "reads /proc")]
        fn a_domain_is_on_one_machine_and_an_engine_that_stays_on_a_machine_is_refused_for_several() {
            let world = World::builder().ranks(4).domains(2).experts(8).build().unwrap();
            let [a, b] = ["node-a", "node-b"].map(|name| Machine::this(Some(name)));
            let mut config = Config::default();
            let check_of =
                |own, config: &Config, machines: [&Machine; 4], shares: Result<(), &'static str>| {
                    let machines = machines.map(Clone::clone);
                    check_machines(&world, config, Rank(own), &machines, || shares)
                        .map_err(|error| error.to_string())
                };
            let check = |config: &Config, machines| check_of(0, config, machines, Err(", or buy a cable"));
            let check_spanning = |config: &Config, machines| check_of(0, config, machines, Ok(()));
            assert_eq!(check(&config, [&a; 4]), Ok(false));
            let crossing = check(&config, [&a, &b, &b, &b]).unwrap_err();
            assert!(
                crossing.contains("ranks 0 on node-a and 1 on node-b are in one NVLink domain"),
                "{crossing}"
            );
            for engine in ["loopback", "shm"] {
                config.host.transport.engine = engine.into();
                let refused = check(&config, [&a, &a, &b, &b]).unwrap_err();
                assert!(refused.starts_with(&format!("HYBRID_EP_TRANSPORT = {engine}: ")), "{refused}");
                assert!(refused.contains("rank 0 on node-a sends to rank 2 on node-b"), "{refused}");
                // Every rail stays on a machine, although the domains do not.
                assert_eq!(check_spanning(&config, [&a, &b, &a, &b]), Ok(true));
                assert!(check_spanning(&config, [&a, &b, &b, &b]).is_err());
            }
            config.host.transport.engine = "tcp".into();
            assert_eq!(check(&config, [&a, &a, &b, &b]), Ok(true));
            assert_eq!(check_spanning(&config, [&a, &b, &b, &b]), Ok(true));
            assert!(check(&config, [&a, &b, &a, &b]).is_err());
            // `shares` is called only on ranks of a domain that spans machines.
            let unasked = [&a, &a, &b, &a].map(Clone::clone);
            let asked = check_machines(&world, &config, Rank(0), &unasked, || panic!("rank 0 is asked"));
            assert_eq!(asked, Ok(true));
            assert_eq!(
                check_of(3, &config, [&a, &a, &b, &a], Err(", or buy a cable")).unwrap_err(),
                "topology: ranks 2 on node-b and 3 on node-a are in one NVLink domain, and rank 3 cannot share memory with \
                 other machines; choose the number of domains so that each domain is on one machine, and number the ranks \
                 of a machine consecutively, or buy a cable"
            );
        }

        #[test]
        fn every_rank_refuses_a_loopback_address_that_another_machine_needs() {
            let [a, b, labelled]: [Machine; 3] =
                ["1 net:[1]  node-a", "2 net:[1]  node-b", "1 net:[1] x node-a"]
                    .map(|text| text.parse().unwrap());
            let [public, loopback] = ["10.0.0.1:7", "127.0.0.1:7"].map(|text| text.parse().unwrap());
            let two = [a.clone(), b];
            let refused = check_addresses(&two, &[public, loopback]).unwrap_err().to_string();
            assert!(
                refused.starts_with("connecting to rank 1 on node-b: its address is 127.0.0.1"),
                "{refused}"
            );
            check_addresses(&two, &[public, public]).unwrap();
            // Ranks of one network namespace reach each other's loopback address.
            check_addresses(&[a, labelled], &[loopback, loopback]).unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::PeerFault;

    #[test]
    fn an_error_names_the_machine_where_there_are_several() {
        let lost = || PeerError::joining(Rank(0), Rank(1), PeerFault::Died, "it", Duration::ZERO).into();
        let one = Machines::one(2);
        assert_eq!((one.ranks_here(), one.is_remote(Rank(1)), one.address()), (2, false, None));
        assert!(one.locate(lost()).to_string().starts_with("rank 1 died"));
        let names = ["node-a", "node-b"].map(String::from).to_vec();
        let two = Machines { names, remote: vec![false, true], address: None };
        assert_eq!((two.ranks_here(), two.is_remote(Rank(1))), (1, true));
        assert!(two.locate(lost()).to_string().starts_with("rank 1 on node-b died"));
    }
}
