//! Untrusted TOML files of the planner: refused with a place and a reason, or valid and unchanged by a round trip.

#![no_main]

use ep_plan::input::{cluster_to_toml, model_to_toml, options_to_toml, parse};
use ep_plan::{Cluster, Model};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let found = match parse("plan.toml", text) {
        Ok(found) => found,
        Err(error) => {
            let said = error.to_string();
            assert!(said.starts_with("plan.toml:"), "{said}");
            return;
        }
    };
    let parts = [
        found.cluster.as_ref().map(cluster_to_toml),
        found.model.as_ref().map(model_to_toml),
        found.options.as_ref().map(options_to_toml),
    ];
    let written = parts.into_iter().flatten().collect::<Vec<_>>().join("\n");
    let again = parse("again.toml", &written).unwrap_or_else(|error| panic!("{error}\n{written}"));
    assert_eq!(again, found, "{written}");
    if let Some(cluster) = found.cluster {
        Cluster::try_from(cluster).expect("each part that was read is valid in itself");
    }
    if let Some(model) = found.model {
        Model::try_from(model).expect("each part that was read is valid in itself");
    }
});
