//! TCP connections between machines, and the network address of this machine.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::ifaddrs::getifaddrs;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};

use crate::error::{CallerError, Result};

/// The time between two probes of a connection on which nothing is sent. The system counts in seconds.
const PROBE: Duration = Duration::from_secs(1);

/// Makes the system end the connection with a timeout when the other machine acknowledges nothing for `timeout`. While this
/// end sends nothing, the system probes the other machine.
pub(super) fn watch(socket: impl AsFd, timeout: Duration) -> io::Result<()> {
    // The system stores the timeout in a signed number.
    let millis = timeout.as_millis().clamp(1, i32::MAX as u128) as u32;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, PROBE)?;
    sockopt::set_tcp_keepintvl(&socket, PROBE)?;
    Ok(sockopt::set_tcp_user_timeout(socket, millis)?)
}

/// Starts to connect to `address` without waiting. Reading and writing return `WouldBlock` until the connection exists or has
/// failed; if it has failed, they then return its error.
pub(super) fn start_connecting(address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    watch(&socket, timeout)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(error) => Err(error.into()),
    }
}

/// The address of this machine from which packets to `host` leave; `None` when the host cannot be resolved or reached.
/// Sends nothing.
pub fn address_towards(host: &str) -> Option<IpAddr> {
    // The port does not matter.
    (host, 9).to_socket_addrs().ok()?.find_map(|to| {
        let any: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip())
    })
}

/// The network address that a setting selects: an IP address, or the name of an interface of this machine. Prefers the
/// IPv4 addresses of an interface. Omits link-local IPv6 addresses, since connecting to them also requires an interface.
///
/// # Errors
/// [`CallerError::Config`] for any other text, and for an unspecified address such as `0.0.0.0`.
pub fn address_of(setting: &str) -> Result<IpAddr> {
    let refused = |problem: String| {
        CallerError::Config { key: "HYBRID_EP_TRANSPORT_ADDRESS", value: setting.into(), problem }.into()
    };
    match setting.parse() {
        Ok(address) if IpAddr::is_unspecified(&address) => {
            let problem = "stands for all addresses; other ranks need one to connect to";
            return Err(refused(problem.into()));
        }
        Ok(address) => return Ok(address),
        Err(_) => {}
    }
    let interfaces = getifaddrs().map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    let mut found: Vec<IpAddr> = interfaces
        .iter()
        .filter(|interface| interface.interface_name == setting)
        .filter_map(|interface| {
            let address = interface.address.as_ref()?;
            let v4 = address.as_sockaddr_in().map(|v4| v4.ip().into());
            let v6 = || address.as_sockaddr_in6().map(|v6| v6.ip()).filter(|ip| !ip.is_unicast_link_local());
            v4.or_else(|| v6().map(IpAddr::V6))
        })
        .collect();
    found.sort_by_key(IpAddr::is_ipv6);
    found.first().copied().ok_or_else(|| {
        let mut names: Vec<&str> = interfaces.iter().map(|i| i.interface_name.as_str()).collect();
        // An interface is listed once for each of its addresses.
        names.sort_unstable();
        names.dedup();
        refused(format!(
            "is neither an IP address nor an interface with one; this machine's interfaces: {}",
            names.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn an_address_is_an_ip_address_or_an_interface() {
        assert_eq!(address_of("10.1.2.3").unwrap(), IpAddr::from([10, 1, 2, 3]));
        assert_eq!(address_of("::1").unwrap(), IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]));
        assert_eq!(address_of("lo").unwrap(), IpAddr::from([127, 0, 0, 1]));
        let error = address_of("no-such-interface").unwrap_err().to_string();
        assert!(error.starts_with("HYBRID_EP_TRANSPORT_ADDRESS = no-such-interface: is neither"), "{error}");
        let (_, names) = error.rsplit_once(": ").unwrap();
        assert_eq!(names.split(", ").filter(|&name| name == "lo").count(), 1, "{error}");
        for any in ["0.0.0.0", "::"] {
            let error = address_of(any).unwrap_err().to_string();
            assert!(error.contains("stands for all addresses"), "{error}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_connection_can_be_watched_with_any_timeout() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        for timeout in [Duration::ZERO, Duration::from_secs(1 << 22), Duration::MAX] {
            watch(&socket, timeout).unwrap();
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn the_address_towards_this_machine_is_its_own() {
        assert_eq!(address_towards("127.0.0.1"), Some(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(address_towards("no such host"), None);
    }
}
