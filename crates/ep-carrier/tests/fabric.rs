//! The suite of carriers over a fake libfabric whose provider makes every demand.
#![cfg(feature = "fabric")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::time::Duration;

use ep::{Config, Rank};
use ep_carrier::RailCarrier;
use ep_fabric_fake::{Fake, Settings, sys};
use ep_migrate::conformance::check_carrier;

#[test]
fn a_provider_with_all_demands_passes_the_suite() {
    let fake = Fake::without_nics("carrier");
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
    fake.offer("nic0", "", &settings);
    let mut config = Config::default();
    (config.host.slots, config.host.slot_bytes) = (3, 4096);
    config.host.transport.engine = fake.provider().into();
    config.host.transport.libfabric = Some(fake.path().into());
    let names = [Rank(1), Rank(4), Rank(5)];
    let carriers = RailCarrier::threads(&names, &config).unwrap();
    std::thread::scope(|scope| {
        for (name, carrier) in names.iter().zip(&carriers) {
            scope.spawn(|| {
                check_carrier(*name, &names, carrier, Duration::from_secs(60))
                    .unwrap_or_else(|failure| panic!("{failure}"));
            });
        }
    });
    drop(carriers);
    fake.assert_clean("the suite of carriers");
}
