//! The suite of carriers, and whole migrations, over engines that need no library.
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::time::Duration;

use ep::{Config, Rank};
use ep_carrier::RailCarrier;
use ep_codec::{GradientCodec, WeightCodec};
use ep_migrate::conformance::check_carrier;
use ep_migrate::{Carrier, Domain, LocalNetwork, Migration, Settings, Shape};

/// Slots so small that messages have several parts, and so few that they wait for credits.
fn config(engine: &str, lend: bool) -> Config {
    let mut config = Config::default();
    (config.host.slots, config.host.slot_bytes, config.host.lend) = (3, 4096, lend);
    config.host.transport.engine = engine.into();
    config
}

fn names(count: u32) -> Vec<Rank> {
    (0..count).map(|rank| Rank(3 * rank + 1)).collect()
}

/// Runs `work` on a thread for each carrier.
fn on_threads<C: Send, R: Send>(carriers: Vec<C>, work: impl Fn(usize, C) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = carriers
            .into_iter()
            .enumerate()
            .map(|(at, carrier)| {
                let work = &work;
                scope.spawn(move || work(at, carrier))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn engines_pass_the_suite() {
    for (engine, lend) in [("loopback", true), ("loopback", false), ("paced:1GB/s,100us", false)] {
        for count in [2, 3] {
            let names = names(count);
            let carriers = RailCarrier::threads(&names, &config(engine, lend)).unwrap();
            // Returned, because other ranks may still need the carrier.
            let _carriers = on_threads(carriers, |at, carrier| {
                check_carrier(names[at], &names, &carrier, Duration::from_secs(60))
                    .unwrap_or_else(|failure| panic!("{engine}: {failure}"));
                carrier
            });
        }
    }
}

/// Two steps of two layers. Returns what this rank has decoded and summed.
fn train(own: Rank, names: &[Rank], carrier: Box<dyn Carrier>) -> Vec<f32> {
    let shape = Shape { experts_per_rank: 2, expert_elements: vec![3000, 129] };
    let settings = Settings {
        weights: WeightCodec::Delta { density: 0.05, warm_up: 1 },
        gradients: GradientCodec::Int8,
        ..Settings::default()
    };
    let domain = Domain::new(own, names).unwrap();
    let migration = Migration::<f32>::new(domain, shape.clone(), settings, carrier).unwrap();
    let peers = names.len() - 1;
    let value = |of: u32, layer: usize, step: usize, at: usize| {
        ((of as usize * 7 + layer * 5 + step * 3 + at) % 97) as f32 / 97.0
    };
    let mut results = Vec::new();
    for step in 0..2 {
        let elements = |layer: usize| 2 * shape.expert_elements[layer];
        for layer in 0..2 {
            let own: Vec<f32> = (0..elements(layer)).map(|at| value(own.0, layer, step, at)).collect();
            migration.publish(layer, &own).unwrap();
        }
        for layer in 0..2 {
            let mut replicas = vec![0.0; peers * elements(layer)];
            migration.gather(layer, &mut replicas).unwrap();
            migration.send_gradients(layer, &replicas).unwrap();
            let mut sum = vec![0.0; elements(layer)];
            migration.reduce_gradients(layer, &vec![0.5; elements(layer)], &mut sum).unwrap();
            results.extend(replicas);
            results.extend(sum);
        }
    }
    migration.close();
    results
}

#[test]
fn a_migration_has_the_same_bits_over_every_carrier() {
    let names = names(3);
    let network = LocalNetwork::new();
    let local: Vec<_> = names.iter().map(|&name| network.carrier(name)).collect();
    let expected = on_threads(local, |at, carrier| train(names[at], &names, Box::new(carrier)));
    for (engine, lend) in [("loopback", true), ("paced:1GB/s,100us", false)] {
        let carriers = RailCarrier::threads(&names, &config(engine, lend)).unwrap();
        let found = on_threads(carriers, |at, carrier| train(names[at], &names, Box::new(carrier)));
        assert!(found == expected, "{engine}");
    }
}

/// Joins ranks as processes do, each on a thread.
#[cfg(target_os = "linux")]
fn joined(names: &[Rank], config: &Config) -> Vec<ep::Result<RailCarrier>> {
    let ends = ep::join::ThreadRendezvous::new(names.len(), Duration::from_secs(20));
    on_threads(ends, |_, mut end| RailCarrier::join(&mut end, names, config))
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_that_join_over_descriptors_of_their_windows_pass_the_suite() {
    let names = names(3);
    let carriers: Vec<_> =
        joined(&names, &config("loopback", true)).into_iter().map(Result::unwrap).collect();
    let carriers = on_threads(carriers, |at, carrier| {
        check_carrier(names[at], &names, &carrier, Duration::from_secs(60))
            .unwrap_or_else(|failure| panic!("{failure}"));
        carrier
    });
    // The first rank has closed. One that is dropped has left, and the last one learns of it.
    let [_, second, third] = carriers.try_into().expect("three carriers");
    let receive = third.receive(names[1], ep_migrate::Lane::Headers, 1).unwrap();
    drop(second);
    assert_eq!(receive.wait(1), Err(ep_migrate::CarrierError::Closed));
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_that_differ_do_not_join() {
    let names = names(2);
    let ends = ep::join::ThreadRendezvous::new(2, Duration::from_secs(20));
    let errors = on_threads(ends, |at, mut end| {
        let mut config = config("loopback", true);
        config.host.slots += at;
        RailCarrier::join(&mut end, &names, &config).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("slots")), "{errors:?}");
    let error = joined(&names, &config("no-such-engine", true)).remove(0).unwrap_err().to_string();
    assert!(error.contains("no-such-engine") || error.contains("libfabric"), "{error}");
}
