//! The engine over a fake libfabric whose providers make every demand that the engine meets: the conformance suite, with
//! ranks that are threads. After each run, all objects must be closed and all calls must have been allowed.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;
#[path = "common/fake.rs"]
mod fake;

use common::{Reorder, conform};
use ep_fabric_fake::{Fake, Gone, Settings, sys};
use fake::Opens;

/// Settings of a provider, with a name for messages.
type Demand = (&'static str, fn(&mut Settings));

/// Each demand, and each misbehaviour, alone.
const DEMANDS: &[Demand] = &[
    ("nothing", |_| {}),
    ("local descriptors", |s| s.mr_mode |= sys::MR_LOCAL),
    ("keys of the provider", |s| s.mr_mode |= sys::MR_PROV_KEY),
    ("absolute addresses", |s| s.mr_mode |= sys::MR_VIRT_ADDR),
    ("allocated memory", |s| s.mr_mode |= sys::MR_ALLOCATED),
    ("regions of an endpoint", |s| s.mr_mode |= sys::MR_ENDPOINT),
    ("contexts", |s| s.mode |= sys::CONTEXT | sys::CONTEXT2),
    ("posted receives", |s| s.mode |= sys::RX_CQ_DATA),
    ("few posted receives", |s| {
        s.mode |= sys::RX_CQ_DATA;
        s.rx_size = 1;
    }),
    ("keys of 4 bytes", |s| s.key_size = 4),
    ("keys of 1 byte", |s| s.key_size = 1),
    ("short keys of the provider", |s| {
        s.mr_mode |= sys::MR_PROV_KEY;
        s.key_size = 2;
    }),
    ("immediates of 4 bytes", |s| s.data_size = 4),
    ("one put in flight", |s| s.tx_size = 1),
    ("three puts in flight", |s| s.tx_size = 3),
    ("addresses that are strings", |s| s.text_addresses = true),
    ("only tables of addresses", |s| s.av_type = sys::AV_TABLE),
    ("only maps of addresses", |s| s.av_type = sys::AV_MAP),
    ("completion when the bytes have left", |s| s.completes = sys::TRANSMIT_COMPLETE),
    ("completion of the lowest level", |s| s.completes = 0),
    ("the longest put that just fits", |s| {
        s.max_msg_size = ep::conformance::TRANSPORT_LIMITS.put_bytes;
    }),
    ("any order", |s| s.reorder = true),
    ("parts", |s| s.part = 1000),
    ("parts in any order", |s| {
        s.part = 777;
        s.reorder = true;
    }),
    ("late", |s| s.late = 80),
    ("again", |s| s.again = 50),
    ("puts to a closed endpoint are never accepted", |s| s.gone = Gone::Again),
    ("puts to a closed endpoint are lost", |s| s.gone = Gone::Silent),
];

/// All demands that a provider can make at once, with the worst behaviour.
fn all(seed: u64) -> Settings {
    Settings {
        mr_mode: sys::MR_LOCAL | sys::MR_PROV_KEY | sys::MR_VIRT_ADDR | sys::MR_ALLOCATED | sys::MR_ENDPOINT,
        mode: sys::CONTEXT | sys::CONTEXT2 | sys::RX_CQ_DATA,
        completes: [0, sys::TRANSMIT_COMPLETE, sys::DELIVERY_COMPLETE][seed as usize % 3],
        key_size: 1 + seed as usize % 8,
        data_size: 4,
        tx_size: 1 + seed as usize * 3 % 17,
        rx_size: 1 + seed as usize * 5 % 23,
        av_type: [sys::AV_MAP, sys::AV_TABLE][seed as usize % 2],
        text_addresses: seed.is_multiple_of(3),
        seed,
        reorder: true,
        part: 1500,
        late: 30,
        again: 30,
        gone: [Gone::Error, Gone::Again, Gone::Silent][seed as usize / 2 % 3],
        ..Settings::default()
    }
}

/// Runs the suite over a provider of this name.
fn check(name: &str, settings: &Settings, ranks: usize, reorder: Reorder) -> ep_fabric_fake::Report {
    let fake = Fake::new(name, settings);
    let result = conform(&fake.options(), ranks, reorder);
    assert_eq!(result, Ok(()), "{ranks} ranks over {name}: {:?}", fake.report());
    let report = fake.assert_clean(name);
    assert_eq!(report.endpoints["nic0"], ranks as u64, "{name}");
    report
}

#[test]
fn the_conformance_suite_passes_with_each_demand_alone() {
    for (name, demand) in DEMANDS {
        let mut settings = Settings::default();
        demand(&mut settings);
        for ranks in [2, 3] {
            check(&format!("{name}, {ranks} ranks"), &settings, ranks, Reorder::No);
        }
    }
}

#[test]
fn the_conformance_suite_passes_with_all_demands_together() {
    for seed in 0..12 {
        for ranks in [1, 2, 4] {
            check(&format!("all, seed {seed}, {ranks} ranks"), &all(seed), ranks, Reorder::No);
        }
    }
}

#[test]
fn the_conformance_suite_passes_when_the_layer_above_sees_another_order_too() {
    for seed in 20..23 {
        check(&format!("all, seed {seed}, reordered"), &all(seed), 3, Reorder::Yes);
    }
}

/// `verbs` demands local descriptors and posted receives (fi_verbs(7)), with basic registration (fi_mr(3)).
#[test]
fn the_conformance_suite_passes_with_the_demands_of_verbs() {
    let basic = sys::MR_VIRT_ADDR | sys::MR_ALLOCATED | sys::MR_PROV_KEY;
    for seed in 0..4 {
        let settings = Settings {
            mr_mode: sys::MR_LOCAL | basic,
            mode: sys::RX_CQ_DATA,
            key_size: 4,
            data_size: 4,
            seed,
            reorder: seed > 0,
            part: 4096,
            ..Settings::default()
        };
        check(&format!("like verbs, seed {seed}"), &settings, 3, Reorder::No);
    }
}

/// A receive for every immediate in flight: no sender waits for the receiver.
#[test]
fn a_receive_is_posted_for_every_immediate_where_the_queue_has_room() {
    let settings = Settings { mode: sys::RX_CQ_DATA, rnr_retries: 0, ..Settings::default() };
    let report = check("receives", &settings, 4, Reorder::No);
    assert_eq!(report.waits, 0);
    // The fake does make senders wait where the queue is too short for that.
    let settings = Settings { mode: sys::RX_CQ_DATA, rx_size: 1, late: 50, ..Settings::default() };
    assert!(check("one receive", &settings, 4, Reorder::No).waits > 0);
}
