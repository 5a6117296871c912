//! The CPU backend over a fake libfabric, whose provider makes every demand, and whose machine has several NICs.
#![cfg(feature = "fabric")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::collections::BTreeMap;

use ep::conformance::{Prepared, suite};
use ep::{Backend, Config, TrafficClass};
use ep_fabric_fake::{Fake, Settings, sys};
use ep_host::HostBuffer;

/// All demands at once.
fn demanding(seed: u64) -> Settings {
    Settings {
        mr_mode: sys::MR_LOCAL | sys::MR_PROV_KEY | sys::MR_VIRT_ADDR | sys::MR_ALLOCATED | sys::MR_ENDPOINT,
        mode: sys::CONTEXT | sys::CONTEXT2 | sys::RX_CQ_DATA,
        traffic_class: sys::TC_LOW_LATENCY,
        key_size: 4,
        data_size: 4,
        tx_size: 5,
        rx_size: 3,
        seed,
        reorder: true,
        part: 5000,
        late: 20,
        again: 20,
        ..Settings::default()
    }
}

fn config(fake: &Fake, nics: &[&str]) -> Config {
    let mut config = Config::default();
    config.host.workers = 2;
    config.host.slots = 3;
    config.host.transport.engine = fake.provider().into();
    config.host.transport.libfabric = Some(fake.path().into());
    let of_rank = |names: &&str| names.split('+').map(str::to_string).collect();
    config.host.transport.nics = nics.iter().map(of_rank).collect();
    config.host.transport.traffic_class = Some(TrafficClass::LowLatency);
    config
}

fn prepared() -> impl Iterator<Item = Prepared> {
    suite().into_iter().map(|case| case.prepare().unwrap()).filter(|one| one.world().topology().domains() > 1)
}

#[test]
fn suite_over_a_provider_with_all_demands() {
    let fake = Fake::without_nics("demanding");
    fake.offer("nic0", "", &demanding(3));
    fake.offer("nic1", "", &demanding(0));
    let mut cases = 0;
    // One NIC for each rank, then two NICs for each rank.
    let lists = [&["nic0", "nic1"][..], &["nic0+nic1"]];
    for (prepared, nics) in lists.into_iter().flat_map(|nics| prepared().map(move |one| (one, nics))) {
        let buffers = HostBuffer::threads(prepared.world(), &config(&fake, nics)).unwrap();
        std::thread::scope(|scope| {
            for mut buffer in buffers {
                let prepared = &prepared;
                scope
                    .spawn(move || prepared.check(&mut buffer).unwrap_or_else(|failure| panic!("{failure}")));
            }
        });
        fake.assert_clean("a case of the suite");
        cases += 1;
    }
    assert!(cases > 1);
}

#[test]
fn each_local_rank_opens_its_nic_of_the_list_with_the_traffic_class() {
    let case = prepared().find(|one| one.world().topology().domain_size() > 1);
    let prepared = case.expect("a case with several ranks in each of several domains");
    let topology = prepared.world().topology();
    for nics in [&["b"][..], &["b", "c"], &["c", "a", "b"]] {
        let fake = Fake::without_nics(&format!("nics {nics:?}"));
        for nic in ["a", "b", "c"] {
            fake.offer(nic, "", &demanding(1));
        }
        let buffers = HostBuffer::threads(prepared.world(), &config(&fake, nics)).unwrap();
        let mut expected = BTreeMap::new();
        for local_rank in 0..topology.domain_size() {
            *expected.entry(nics[local_rank % nics.len()].to_string()).or_insert(0) +=
                topology.domains() as u64;
        }
        let report = fake.report();
        assert_eq!(report.endpoints, expected);
        assert_eq!(report.classes, BTreeMap::from([(sys::TC_LOW_LATENCY, topology.ranks() as u64)]));
        drop(buffers);
        fake.assert_clean("dropped");
    }
}
