//! The choice of a NIC and of a traffic class, over the fake.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;
#[path = "common/fake.rs"]
mod fake;

use common::{Access, Reorder, conform, open_with, rail};
use ep::conformance::{End, TRANSPORT_LIMITS, check_transport};
use ep::{Error, TrafficClass, TransportOptions};
use ep_fabric::Options;
use ep_fabric_fake::{Fake, Settings, sys};
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
        transport.nics = list.iter().map(|&nic| nic.into()).collect();
        let used = [0, 1, 2, 3].map(|local_rank| {
            let domain = transport.nic(local_rank).map(str::to_string);
            nic_of(&fake, &Options { domain, ..fake.options() })
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
            let options = Options { domain: Some(format!("mlx5_{own}")), ..fake.options() };
            open_with(&options, rail(3, own), TRANSPORT_LIMITS).unwrap()
        })
        .collect();
    let blobs: Vec<_> = opened.iter().map(|(engine, _)| engine.blob()).collect();
    std::thread::scope(|scope| {
        for (own, (engine, pages)) in opened.into_iter().enumerate() {
            let transport = engine.connect(&blobs).unwrap();
            let end = End { rail: rail(3, own), transport, window: Box::new(Access(pages)) };
            scope.spawn(|| check_transport(end, std::time::Duration::from_secs(60)).unwrap());
        }
    });
    let endpoints = fake.assert_clean("mixed").endpoints;
    assert_eq!(endpoints.into_values().collect::<Vec<_>>(), [1, 1, 1]);
}

#[test]
fn a_nic_that_is_not_there_is_named_with_those_that_are() {
    let fake = three_nics("missing nic");
    let text = open_error(&Options { domain: Some("mlx5_3".into()), ..fake.options() });
    for part in ["missing nic on NIC mlx5_3", "HYBRID_EP_TRANSPORT_NIC", "mlx5_0, mlx5_1, mlx5_2"] {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
    // An address and a NIC must agree.
    let at = |domain: &str| Options {
        domain: Some(domain.into()),
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
    assert_eq!(nic_of(&fake, &Options { domain: Some("eth0".into()), ..plain.clone() }), "eth0");
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
