//! The choice of a NIC and of a traffic class, over the fake.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;
#[path = "common/fake.rs"]
mod fake;

use std::time::{Duration, Instant};

use common::{Access, Reorder, conform, ends, open_with, rail, signal_only};
use ep::conformance::{End, TRANSPORT_LIMITS, check_transport};
use ep::{Error, Posted, Rank, TrafficClass, Transport, TransportOptions};
use ep_fabric::{Options, nearest_nics};
use ep_fabric_fake::{Bus, Fake, Hardware, Network, Settings, sys};
use fake::Opens;

fn open_error(options: &Options) -> String {
    open_with(options, rail(2, 0), TRANSPORT_LIMITS).map(drop).unwrap_err().to_string()
}

/// The NIC on which an engine with these options opens its endpoint.
#[track_caller]
fn nic_of(fake: &Fake, options: &Options) -> String {
    let before = fake.report().endpoints;
    let opened = open_with(options, rail(2, 0), TRANSPORT_LIMITS).unwrap();
    let after = fake.report().endpoints;
    drop(opened);
    let mut new = after.into_iter().filter(|(nic, count)| before.get(nic).unwrap_or(&0) != count);
    let (nic, _) = new.next().unwrap();
    assert_eq!(new.next(), None);
    nic
}

#[test]
fn the_entry_that_fits_is_used_for_all_objects() {
    // What `fi_getinfo` lists before it: a provider layered over this one, and a NIC that lacks a capability. Both have
    // addresses of another format and other limits.
    let text = Settings { text_addresses: true, tx_size: 1, max_msg_size: 1, ..Settings::default() };
    let layered = Fake::new("several;layer", &text);
    let fake = Fake::new("several", &Settings { lacks: sys::WRITE, ..text });
    fake.offer("nic1", "", &Settings { mr_mode: sys::MR_VIRT_ADDR, ..Settings::default() });
    fake.offer("nic2", "", &text);
    assert_eq!(conform(&fake.options(), 3, Reorder::No), Ok(()));
    let report = fake.assert_clean("several");
    assert_eq!(report.endpoints.into_iter().collect::<Vec<_>>(), [("nic1".to_string(), 3)]);
    assert_eq!(layered.assert_clean("several;layer").endpoints.len(), 0);

    // The other way round, the addresses are texts.
    let layered = Fake::new("texts;layer", &Settings::default());
    let fake = Fake::new("texts", &Settings { text_addresses: true, ..Settings::default() });
    assert_eq!(conform(&fake.options(), 3, Reorder::No), Ok(()));
    assert_eq!(layered.assert_clean("texts;layer").endpoints.len(), 0);
    fake.assert_clean("texts");
}

/// A provider with the NICs `mlx5_0`, `mlx5_1` and `mlx5_2`.
fn three_nics(provider: &str) -> Fake {
    let fake = Fake::without_nics(provider);
    for nic in 0..3 {
        fake.offer(&format!("mlx5_{nic}"), &format!("198.51.100.{nic}"), &Settings::default());
    }
    fake
}

#[test]
fn each_local_rank_uses_its_nic_of_the_list() {
    for (list, expected) in [
        (&[][..], ["mlx5_0"; 4]),
        (&["mlx5_2"], ["mlx5_2"; 4]),
        (&["mlx5_1", "mlx5_0"], ["mlx5_1", "mlx5_0", "mlx5_1", "mlx5_0"]),
        (&["mlx5_2", "mlx5_1", "mlx5_0"], ["mlx5_2", "mlx5_1", "mlx5_0", "mlx5_2"]),
    ] {
        let fake = three_nics(&format!("three, {list:?}"));
        let mut transport = TransportOptions::default();
        transport.nics = list.iter().map(|&nic| vec![nic.into()]).collect();
        let used = [0, 1, 2, 3].map(|local_rank| {
            let domains = transport.nics_of(local_rank).to_vec();
            nic_of(&fake, &Options { domains, ..fake.options() })
        });
        assert_eq!(used, expected);
        fake.assert_clean("three NICs");
    }
}

#[test]
fn ranks_on_different_nics_reach_each_other() {
    let fake = three_nics("mixed");
    let opened: Vec<_> = (0..3)
        .map(|own| {
            let options = Options { domains: vec![format!("mlx5_{own}")], ..fake.options() };
            open_with(&options, rail(3, own), TRANSPORT_LIMITS).unwrap()
        })
        .collect();
    let blobs: Vec<_> = opened.iter().map(|(engine, _)| engine.blob()).collect();
    std::thread::scope(|scope| {
        for (own, (engine, pages)) in opened.into_iter().enumerate() {
            let transport = engine.connect(&blobs).unwrap();
            let end = End { rail: rail(3, own), transport, window: Box::new(Access(pages)) };
            scope.spawn(|| check_transport(end, Duration::from_secs(60)).unwrap());
        }
    });
    let endpoints = fake.assert_clean("mixed").endpoints;
    assert_eq!(endpoints.into_values().collect::<Vec<_>>(), [1, 1, 1]);
}

/// Options with these NICs for a rank.
fn on_nics(fake: &Fake, nics: &[usize]) -> Options {
    Options { domains: nics.iter().map(|nic| format!("mlx5_{nic}")).collect(), ..fake.options() }
}

/// Posts a put without bytes, again while the engine is busy.
#[track_caller]
fn post(engine: &dyn Transport, peer: Rank, signal: u32) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while engine.put(signal_only(peer, signal)).unwrap() == Posted::Full {
        assert!(Instant::now() < deadline, "the engine stays full");
    }
}

/// The next signals, sorted.
#[track_caller]
fn arrivals(end: &End, count: usize) -> Vec<(Rank, u32)> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut arrived = Vec::new();
    while arrived.len() < count {
        assert!(Instant::now() < deadline, "{arrived:?}");
        end.transport.poll(&mut |rank, signal| arrived.push((rank, signal.word()))).unwrap();
    }
    arrived.sort_unstable();
    arrived
}

#[test]
fn several_nics_of_a_rank_take_puts_by_turns() {
    let fake = three_nics("by turns");
    for (nics, reorder) in [(&[0, 1][..], Reorder::No), (&[2, 0, 1], Reorder::Yes)] {
        assert_eq!(conform(&on_nics(&fake, nics), 3, reorder), Ok(()), "{nics:?}");
    }
    assert_eq!(fake.assert_clean("by turns").endpoints.into_values().collect::<Vec<_>>(), [6, 6, 3]);

    let ends = ends(&on_nics(&fake, &[0, 1]), 2);
    let (own, peer) = (ends[0].rail.own(), ends[1].rail.own());
    let before = fake.report().puts;
    (0..6).for_each(|signal| post(&*ends[0].transport, peer, signal));
    assert_eq!(arrivals(&ends[1], 6), [0, 1, 2, 3, 4, 5].map(|signal| (own, signal)));
    let after = fake.report().puts;
    // Three each, unless the engine's thread holds one of them for long.
    assert!(["mlx5_0", "mlx5_1"].iter().all(|&nic| after[nic] > before[nic]), "{before:?} {after:?}");
    assert_eq!(ends[0].transport.name(), "by turns on 2 NICs");
}

#[test]
fn a_peer_that_is_gone_is_reported_once_although_a_rank_has_several_nics() {
    let fake = three_nics("gone");
    let mut three = ends(&on_nics(&fake, &[0, 1]), 3);
    let lost = three.remove(1).rail.own();
    let [own, other] = [0, 1].map(|end| three[end].rail.own());
    let engine = &three[0].transport;
    let deadline = Instant::now() + Duration::from_secs(60);
    // Puts to it on both NICs, as far as it is not noticed meanwhile. Again while the engine is busy: without a put that the
    // engine has taken, nothing is to be noticed.
    for signal in 0..4 {
        while engine.put(signal_only(lost, signal)) == Ok(Posted::Full) {
            assert!(Instant::now() < deadline, "the engine stays full");
        }
    }
    let error = loop {
        match engine.poll(&mut |_, _| {}) {
            Ok(()) => assert!(Instant::now() < deadline, "a closed endpoint is not noticed"),
            Err(error) => break error,
        }
    };
    let is_lost = |error: &Error| matches!(error, Error::Peer(error) if error.peer == lost);
    assert!(is_lost(&error), "{error}");
    for _ in 0..1000 {
        assert_eq!(engine.poll(&mut |_, _| {}), Ok(()), "a second report of one peer");
        let posted = engine.put(signal_only(lost, 3));
        assert!(posted == Ok(Posted::Full) || posted.is_err_and(|error| is_lost(&error)));
    }
    assert!(is_lost(&engine.drain(lost, deadline).unwrap_err()));
    // The other peer stays reachable, over both NICs.
    (4..8).for_each(|signal| post(&**engine, other, signal));
    assert_eq!(engine.drain(other, deadline), Ok(()));
    assert_eq!(arrivals(&three[1], 4), [4, 5, 6, 7].map(|signal| (own, signal)));
    drop(three);
    fake.assert_clean("gone");
}

/// A machine with two PCIe switches: the GPUs `0000:11:00.0` and `0000:12:00.0` on the first, `0000:21:00.0` and
/// `0000:22:00.0` on the second, and NICs at the buses 0x10, 0x13, 0x14 and 0x23. It is removed on drop.
struct Machine(std::path::PathBuf);

impl Machine {
    fn new(name: &str) -> Self {
        let sysfs = std::env::temp_dir().join(format!("ep-fabric-{}-{name}", std::process::id()));
        let machine = Self(sysfs);
        std::fs::create_dir_all(machine.0.join("bus/pci/devices")).unwrap();
        for bus in [0x11, 0x12, 0x21, 0x22] {
            machine.device(bus, "0x10de", "0x030200");
        }
        // A function of a GPU that is none, and the NICs.
        machine.device(0x16, "0x10de", "0x040300");
        for bus in [0x10, 0x13, 0x14, 0x23] {
            machine.device(bus, "0x15b3", "0x020700");
        }
        machine
    }

    fn device(&self, bus: u8, vendor: &str, class: &str) {
        let root = bus & 0xf0;
        let switch = format!("devices/pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{root:02x}:02.0");
        let address = format!("0000:{bus:02x}:00.0");
        let path = self.0.join(switch).join(&address);
        std::fs::create_dir_all(&path).unwrap();
        for (file, text) in [("vendor", vendor), ("class", class), ("numa_node", "-1")] {
            std::fs::write(path.join(file), format!("{text}\n")).unwrap();
        }
        std::os::unix::fs::symlink(&path, self.0.join("bus/pci/devices").join(address)).unwrap();
    }

    /// The NICs of the ranks with these GPUs, by the numbers of their buses.
    fn nics(&self, options: &Options, gpus: [u8; 4]) -> [String; 4] {
        gpus.map(|bus| nearest_nics(options, &format!("0000:{bus:02X}:00.0"), &self.0).unwrap().join("+"))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A NIC at this bus whose link is up.
fn up(bus: u8) -> Hardware {
    Hardware { bus: Bus::Pci(bus), speed: 400_000_000_000, is_down: false, network: Network::InfiniBand }
}

#[test]
fn each_gpu_has_the_nics_of_its_switch() {
    let machine = Machine::new("switches");
    let gpus = [0x11, 0x12, 0x21, 0x22];
    let offer = |fake: &Fake, nic: &str, hardware| {
        fake.offer(nic, "", &Settings { hardware, ..Settings::default() });
    };
    let fake = Fake::without_nics("switches");
    for (nic, bus) in [("far", 0x23), ("b", 0x14), ("a", 0x13)] {
        offer(&fake, nic, up(bus));
    }
    assert_eq!(machine.nics(&fake.options(), gpus), ["a", "b", "far", "far"]);
    // Bus 0x10 comes first, so one of these would be chosen if it counted. Not chosen: another network, a slow link, a link that is down, a NIC whose place is not told, one that is elsewhere.
    offer(&fake, "ethernet", Hardware { network: Network::Ethernet, ..up(0x10) });
    offer(&fake, "slow", Hardware { speed: 100_000_000_000, ..up(0x10) });
    offer(&fake, "down", Hardware { is_down: true, ..up(0x10) });
    offer(&fake, "untold", Hardware { bus: Bus::Untold, ..up(0x10) });
    offer(&fake, "other", Hardware { bus: Bus::Other, ..up(0x10) });
    assert_eq!(machine.nics(&fake.options(), gpus), ["a", "b", "far", "far"]);
    // A GPU that the machine does not show, and a function that is none.
    for address in ["0000:31:00.0", "0000:16:00.0", ""] {
        assert_eq!(nearest_nics(&fake.options(), address, &machine.0), Ok(Vec::new()), "{address}");
    }
    let nics = nearest_nics(&fake.options(), "0000:12:00.0", &machine.0).unwrap();
    assert_eq!(nic_of(&fake, &Options { domains: nics, ..fake.options() }), "b");
    fake.assert_clean("switches");

    // Only Ethernet: its NICs. A state and a speed that are unknown are no reason against a NIC.
    let fake = Fake::without_nics("ethernet");
    let ethernet = |bus| Hardware { network: Network::Ethernet, bus: Bus::Pci(bus), ..Hardware::default() };
    for (nic, bus) in [("c", 0x13), ("d", 0x23)] {
        offer(&fake, nic, ethernet(bus));
    }
    assert_eq!(machine.nics(&fake.options(), gpus), ["c", "c", "d", "d"]);
    fake.assert_clean("ethernet");

    // Providers that tell nothing.
    let fake = three_nics("untold");
    assert_eq!(machine.nics(&fake.options(), gpus), [""; 4]);
    fake.assert_clean("untold");
}

#[test]
#[cfg(target_os = "linux")]
fn an_engine_knows_the_cpus_near_its_nics() {
    // A device that most machines have, among them virtual ones.
    let devices = std::path::Path::new("/sys/bus/pci/devices");
    let list = std::fs::read_to_string(devices.join("0000:00:00.0/local_cpulist")).unwrap_or_default();
    let fake = Fake::without_nics("cpus");
    for (nic, bus) in [("near", 0), ("elsewhere", 0xee)] {
        fake.offer(nic, "", &Settings { hardware: up(bus), ..Settings::default() });
    }
    let near = |nics: &[&str]| {
        let domains = nics.iter().map(|&nic| nic.into()).collect();
        let ends = ends(&Options { domains, ..fake.options() }, 2);
        ends[0].transport.near_cpus().to_vec()
    };
    let first = list.trim().split([',', '-']).next().and_then(|cpu| cpu.parse().ok());
    assert_eq!(near(&["near"]).first().copied(), first, "{list}");
    assert_eq!(near(&["elsewhere", "near"]).first().copied(), first);
    assert_eq!(near(&["elsewhere"]), Vec::<usize>::new());
    fake.assert_clean("cpus");
}

#[test]
fn gpus_have_several_nics_if_there_are_as_many_for_all() {
    let machine = Machine::new("several");
    for bus in [0x15, 0x17, 0x24, 0x25, 0x26] {
        machine.device(bus, "0x15b3", "0x020700");
    }
    let fake = Fake::without_nics("many");
    for bus in [0x26, 0x25, 0x24, 0x23, 0x17, 0x15, 0x14, 0x13] {
        fake.offer(&format!("nic{bus:x}"), "", &Settings { hardware: up(bus), ..Settings::default() });
    }
    let expected = ["nic15+nic13", "nic17+nic14", "nic25+nic23", "nic26+nic24"];
    assert_eq!(machine.nics(&fake.options(), [0x11, 0x12, 0x21, 0x22]), expected);
    fake.assert_clean("many");
}

#[test]
fn ranks_with_different_numbers_of_nics_are_refused() {
    let fake = three_nics("numbers");
    let open =
        |own, nics: &[usize]| open_with(&on_nics(&fake, nics), rail(2, own), TRANSPORT_LIMITS).unwrap();
    for (mine, theirs) in [(&[0, 1][..], &[2][..]), (&[0, 1], &[0, 1, 2]), (&[0], &[1, 2])] {
        let numbers = format!("{} NICs for a rank, but this rank has {}", theirs.len(), mine.len());
        let ((own, _own), (peer, _peer)) = (open(0, mine), open(1, theirs));
        let blobs = [own.blob(), peer.blob()];
        let Err(Error::Peer(error)) = own.connect(&blobs).map(drop) else { panic!("{mine:?} {theirs:?}") };
        assert_eq!(error.peer, rail(2, 0).ranks()[1]);
        assert!(error.to_string().contains(&numbers), "{error}");
    }
}

#[test]
fn a_nic_that_is_not_there_is_named_with_those_that_are() {
    let fake = three_nics("missing nic");
    let text = open_error(&Options { domains: vec!["mlx5_3".into()], ..fake.options() });
    for part in ["missing nic on NIC mlx5_3", "HYBRID_EP_TRANSPORT_NIC", "mlx5_0, mlx5_1, mlx5_2"] {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
    // An address and a NIC must agree.
    let at = |domain: &str| Options {
        domains: vec![domain.into()],
        address: Some("198.51.100.1".into()),
        ..fake.options()
    };
    assert_eq!(nic_of(&fake, &at("mlx5_1")), "mlx5_1");
    let text = open_error(&at("mlx5_0"));
    assert!(
        text.contains("on NIC mlx5_0 at address 198.51.100.1") && text.contains("out of: mlx5_1"),
        "{text}"
    );
    let text = open_error(&Options { address: Some("203.0.113.9".into()), ..fake.options() });
    assert!(text.contains("203.0.113.9") && text.contains("HYBRID_EP_TRANSPORT_ADDRESS"), "{text}");
    fake.assert_clean("missing nic");
}

#[test]
fn tcp_listens_on_this_machine_only_unless_an_address_or_a_nic_is_named() {
    let fake = Fake::without_nics("tcp");
    fake.offer("eth0", "198.51.100.7", &Settings::default());
    fake.offer("lo", "127.0.0.1", &Settings::default());
    let plain = fake.options();
    assert_eq!(nic_of(&fake, &plain), "lo");
    assert_eq!(nic_of(&fake, &Options { domains: vec!["eth0".into()], ..plain.clone() }), "eth0");
    assert_eq!(nic_of(&fake, &Options { address: Some("198.51.100.7".into()), ..plain }), "eth0");
}

#[test]
fn a_traffic_class_is_passed_on_or_refused() {
    let class = |class| Some(class);
    let fake = Fake::without_nics("classes");
    fake.offer("plain", "", &Settings::default());
    fake.offer("ignorant", "", &Settings { ignores_class: true, ..Settings::default() });
    fake.offer("dscp", "", &Settings { traffic_class: sys::TC_DSCP | 46, ..Settings::default() });
    fake.offer("fast", "", &Settings { traffic_class: sys::TC_LOW_LATENCY, ..Settings::default() });
    let with = |traffic_class| Options { traffic_class, ..fake.options() };
    assert_eq!(nic_of(&fake, &with(None)), "plain");
    assert_eq!(nic_of(&fake, &with(class(TrafficClass::Dscp(46)))), "dscp");
    assert_eq!(nic_of(&fake, &with(class(TrafficClass::LowLatency))), "fast");
    let classes = fake.report().classes;
    let expected = [(0, 1), (sys::TC_DSCP | 46, 1), (sys::TC_LOW_LATENCY, 1)];
    assert_eq!(classes.into_iter().collect::<Vec<_>>(), expected);

    let text = open_error(&with(class(TrafficClass::Scavenger)));
    assert!(text.contains("classes") && text.contains("HYBRID_EP_TRANSPORT_TRAFFIC_CLASS"), "{text}");
    let code = with(class(TrafficClass::Dscp(64)));
    let error = open_with(&code, rail(2, 0), TRANSPORT_LIMITS).map(drop).unwrap_err();
    assert!(matches!(error, Error::Caller(_)) && error.to_string().contains("below 64"), "{error}");
    fake.assert_clean("classes");
}

#[test]
fn the_providers_are_listed_with_their_nics() {
    let fake = three_nics("listed");
    fake.offer("no rma", "", &Settings { lacks: sys::RMA, ..Settings::default() });
    let (version, providers) = ep_fabric::providers(fake.options().library.as_deref()).unwrap();
    let listed = providers.iter().find(|provider| provider.name == "listed").unwrap();
    assert_eq!((version.as_str(), &*listed.domains.join(" ")), ("1.17", "mlx5_0 mlx5_1 mlx5_2"));
}
