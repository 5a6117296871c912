//! The suite of carriers over a fake libfabric whose provider makes every demand.
#![cfg(feature = "fabric")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::time::Duration;

use ep::{Config, Rank};
use ep_carrier::RailCarrier;
use ep_fabric_fake::{Fake, Settings, sys};
use ep_migrate::Carrier as _;
use ep_migrate::conformance::check_carrier;

/// A provider that makes every demand, and the settings that select it. Messages have several parts.
fn demanding(name: &str, address: &str) -> (Fake, Config) {
    let fake = Fake::without_nics(name);
    let settings = Settings {
        mr_mode: sys::MR_LOCAL | sys::MR_PROV_KEY | sys::MR_VIRT_ADDR | sys::MR_ALLOCATED | sys::MR_ENDPOINT,
        mode: sys::CONTEXT | sys::CONTEXT2 | sys::RX_CQ_DATA,
        key_size: 4,
        data_size: 4,
        tx_size: 5,
        rx_size: 3,
        seed: 11,
        reorder: true,
        part: 1500,
        late: 20,
        again: 20,
        ..Settings::default()
    };
    fake.offer("nic0", address, &settings);
    let mut config = Config::default();
    (config.host.slots, config.host.slot_bytes) = (3, 4096);
    config.host.transport.engine = fake.provider().into();
    config.host.transport.libfabric = Some(fake.path().into());
    (fake, config)
}

const NAMES: [Rank; 3] = [Rank(1), Rank(4), Rank(5)];

fn check(carriers: &[RailCarrier]) {
    std::thread::scope(|scope| {
        for (name, carrier) in NAMES.iter().zip(carriers) {
            scope.spawn(|| {
                check_carrier(*name, &NAMES, carrier, Duration::from_secs(60))
                    .unwrap_or_else(|failure| panic!("{failure}"));
            });
        }
    });
}

#[test]
fn a_provider_with_all_demands_passes_the_suite() {
    let (fake, config) = demanding("carrier", "");
    let carriers = RailCarrier::threads(&NAMES, &config).unwrap();
    check(&carriers);
    drop(carriers);
    fake.assert_clean("the suite of carriers");
}

/// Ranks that call themselves machines are linked as over a network.
#[test]
#[cfg(target_os = "linux")]
fn ranks_of_several_machines_pass_the_suite() {
    let (fake, mut config) = demanding("machines", "127.0.0.1");
    config.host.transport.address = Some("127.0.0.1".into());
    let mut ends = ep::join::ThreadRendezvous::new(3, Duration::from_secs(20)).into_iter();
    let carriers: Vec<RailCarrier> = std::thread::scope(|scope| {
        let threads: Vec<_> = ["node-a", "node-b", "node-c"]
            .map(|machine| {
                let (mut config, mut end) = (config.clone(), ends.next().unwrap());
                config.machine = Some(machine.into());
                scope.spawn(move || RailCarrier::join(&mut end, &NAMES, &config).unwrap())
            })
            .into();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    check(&carriers);
    let [_, second, third] = carriers.try_into().expect("three carriers");
    let receive = third.receive(NAMES[1], ep_migrate::Lane::Headers, 1).unwrap();
    drop(second);
    assert_eq!(receive.wait(1), Err(ep_migrate::CarrierError::Closed));
    drop(third);
    fake.assert_clean("ranks of several machines");
}
