//! Network interfaces and their addresses.

use std::net::IpAddr;

use serde::Serialize;

use super::{
    check::Check,
    fact::Fact,
    probe::{InterfaceAddress, Probe},
};

const NET_DIR: &str = "/sys/class/net";
const LOOPBACK: &str = "lo";

/// One network interface.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Interface {
    /// Its name, such as `eth0`.
    pub(crate) name: String,
    /// Its state, such as `up` or `down`.
    pub(crate) state: Fact<String>,
    /// Its speed in 10^6 bits per second; absent if the driver reports none.
    pub(crate) speed_mbit_per_s: Fact<u32>,
    /// Whether the interface has no hardware on this machine.
    pub(crate) is_virtual: bool,
    /// Its addresses, IPv4 first; absent on an operating system on which they are not determined.
    pub(crate) addresses: Fact<Vec<IpAddr>>,
}

impl Interface {
    pub(super) fn check(&self) -> Check {
        let mut found = match &self.state {
            Fact::Known(state) => state.clone(),
            Fact::Absent => "state not reported".to_owned(),
            Fact::Unknown(why) => format!("state unknown: {why}"),
        };
        match self.speed_mbit_per_s {
            Fact::Known(mbit) if mbit >= 1000 => {
                found.push_str(&format!(", {} Gbit/s", f64::from(mbit) / 1000.0));
            }
            Fact::Known(mbit) => found.push_str(&format!(", {mbit} Mbit/s")),
            Fact::Absent | Fact::Unknown(_) => found.push_str(", speed not reported"),
        }
        if self.is_virtual {
            found.push_str(", virtual");
        }
        if let Some(addresses) = self.addresses.known() {
            let usable: Vec<String> = usable(addresses).map(IpAddr::to_string).collect();
            found.push_str(", ");
            found.push_str(&match (usable.is_empty(), addresses.is_empty()) {
                (false, _) => usable.join(", "),
                (true, false) => "only a link-local address".to_owned(),
                (true, true) => "no address".to_owned(),
            });
        }
        match self.state.known().map(String::as_str) {
            // Tunnels and some drivers never report "up".
            Some("up" | "unknown") => Check::ok(&self.name, found),
            _ => Check::absent(&self.name, found),
        }
    }
}

/// The addresses that `HYBRID_EP_TRANSPORT_ADDRESS` can select. Link-local ones are left out, since they need an
/// interface too.
fn usable(addresses: &[IpAddr]) -> impl Iterator<Item = &IpAddr> {
    addresses.iter().filter(|address| match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(v6) => !v6.is_unicast_link_local(),
    })
}

/// The interfaces, except loopback. A virtual one is left out unless it has an address or, if all are virtual, is up.
pub(super) fn interfaces(probe: &Probe) -> Fact<Vec<Interface>> {
    let in_files = probe.names(NET_DIR).map(|names| {
        let all = names
            .into_iter()
            // Some files here are not interfaces (`bonding_masters`).
            .filter(|name| name != LOOPBACK && probe.exists(&format!("{NET_DIR}/{name}/operstate")))
            .map(|name| interface(probe, name));
        let (mut inner, mut outer): (Vec<_>, Vec<_>) = all.partition(|it| it.is_virtual);
        let has_address =
            |it: &Interface| it.addresses.known().is_some_and(|all| usable(all).next().is_some());
        if outer.is_empty() {
            // A container may have only virtual interfaces.
            inner.retain(|it| it.state == Fact::Known("up".to_owned()) || has_address(it));
        } else {
            inner.retain(has_address);
        }
        outer.extend(inner);
        outer
    });
    // Some sandboxes hide the files, but not the addresses.
    in_files.or_else(|| without_files(&probe.process.addresses))
}

/// The interfaces that have an address; absent if none has.
fn without_files(addresses: &Fact<Vec<InterfaceAddress>>) -> Fact<Vec<Interface>> {
    addresses.clone().and_then(|all| {
        let mut found: Vec<Interface> = Vec::new();
        for entry in all.iter().filter(|entry| entry.interface != LOOPBACK) {
            if found.iter().all(|it| it.name != entry.interface) {
                found.push(Interface {
                    name: entry.interface.clone(),
                    state: Fact::Known(if entry.up { "up" } else { "down" }.to_owned()),
                    speed_mbit_per_s: Fact::Absent,
                    is_virtual: false,
                    addresses: Fact::Known(addresses_of(&all, &entry.interface)),
                });
            }
        }
        if found.is_empty() { Fact::Absent } else { Fact::Known(found) }
    })
}

/// The addresses of an interface, IPv4 first, since `HYBRID_EP_TRANSPORT_ADDRESS` prefers IPv4.
fn addresses_of(all: &[InterfaceAddress], interface: &str) -> Vec<IpAddr> {
    let own = all.iter().filter(|entry| entry.interface == interface);
    let mut own: Vec<IpAddr> = own.map(|entry| entry.address).collect();
    own.sort_by_key(IpAddr::is_ipv6);
    own
}

fn interface(probe: &Probe, name: String) -> Interface {
    let dir = format!("{NET_DIR}/{name}");
    // Reading the speed of a link that is down fails, and a device without a speed reports -1.
    let speed = probe.value(&format!("{dir}/speed"), |text| text.parse::<i64>().ok());
    let speed_mbit_per_s = speed.and_then(|mbit| match u32::try_from(mbit) {
        Ok(0 | u32::MAX) | Err(_) => Fact::Absent,
        Ok(mbit) => Fact::Known(mbit),
    });
    let behind_it = ["device", "bonding"].map(|file| probe.exists(&format!("{dir}/{file}")));
    Interface {
        state: probe.line(&format!("{dir}/operstate")),
        speed_mbit_per_s,
        is_virtual: !behind_it.contains(&true),
        addresses: probe.process.addresses.clone().map(|all| addresses_of(&all, &name)),
        name,
    }
}
