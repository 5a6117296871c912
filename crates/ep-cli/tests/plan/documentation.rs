//! These tests compare the planner's files and errors with `docs/planner.md`.

use serde_json::Value;

use crate::common::{Directory, run, trace};
use crate::{planned, written};

/// The keys in the first column of a table of the documentation. A key that begins with a dot belongs to the same object as
/// the key before it.
fn documented_keys(documentation: &str, section: &str) -> Vec<String> {
    let (_, rest) = documentation.split_once(section).unwrap();
    let mut keys: Vec<String> = Vec::new();
    for row in rest.split("\n#").next().unwrap().lines().filter(|line| line.starts_with("| `")) {
        for key in row.split(" | ").next().unwrap().split('`').skip(1).step_by(2) {
            let key = match key.strip_prefix('.') {
                Some(last) => format!("{}.{last}", keys.last().unwrap().rsplit_once('.').unwrap().0),
                None => key.to_owned(),
            };
            keys.push(key);
        }
    }
    keys.retain(|key| !key.starts_with("--"));
    keys
}

/// All values that a documented key names, in all entries of its lists.
fn found<'v>(value: &'v Value, key: &str) -> Vec<&'v Value> {
    key.split('.').fold(vec![value], |values, part| {
        let of = |value: &'v Value| match part.strip_suffix("[]") {
            Some(list) => value[list].as_array().map_or(Vec::new(), |list| list.iter().collect()),
            None => value.get(part).into_iter().collect(),
        };
        values.into_iter().flat_map(of).collect()
    })
}

/// Every key of the tables of the documentation is in the files, and every key at the top of the files is in a table.
#[test]
fn the_documented_keys_are_written() {
    let documentation = include_str!("../../../../docs/planner.md");
    let directory = Directory::new("plan-keys");
    let groups = directory.file("groups.json");
    let plan = planned(&[
        // Three datacenters, of which the middle one sends both ways over its uplink.
        "--datacenters=3",
        "--nodes=8",
        "--set=dense_gradient_compression=int8",
        "--sweep=bandwidth=1Gbit/s..10Gbit/s:2",
        "--routing",
        &written_trace(&directory),
        "--model=mixtral-8x7b",
        "--groups",
        &groups,
    ]);
    let paper = planned(&["--paper-model"]);
    // These lists may be empty.
    let empty = ["step.impossible[]", "step.without_layout[]"];
    let keys = documented_keys(documentation, "### The JSON of a plan\n");
    assert!(keys.len() > 60, "{keys:?}");
    for key in &keys {
        let list = key.strip_suffix("[]").filter(|_| empty.contains(&&**key));
        let key = list.unwrap_or(key);
        assert!(!found(&plan, key).is_empty() || !found(&paper, key).is_empty(), "no `{key}`");
    }
    let groups: Value = serde_json::from_str(&std::fs::read_to_string(groups).unwrap()).unwrap();
    let group_keys = documented_keys(documentation, "### The file of groups\n");
    for key in &group_keys {
        assert!(!found(&groups, key).is_empty(), "no `{key}`");
    }
    let documented = |keys: &[String], prefix: &str, key: &str| {
        let whole = format!("{prefix}{key}");
        keys.iter().any(|known| {
            known.strip_prefix(&*whole).is_some_and(|rest| {
                ["", ".", "["].iter().any(|next| match *next {
                    "" => rest.is_empty(),
                    next => rest.starts_with(next),
                })
            })
        })
    };
    let check = |value: &Value, keys: &[String], prefix: &str| {
        for key in value.as_object().unwrap().keys() {
            assert!(documented(keys, prefix, key), "`{prefix}{key}` is not documented");
        }
    };
    check(&plan, &keys, "");
    check(&paper, &keys, "");
    check(&plan["step"], &keys, "step.");
    plan["step"]["prices"].as_array().unwrap().iter().for_each(|price| check(price, &keys, "step.prices[]."));
    check(&plan["plan"], &keys, "plan.");
    check(&plan["plan"]["best"], &keys, "plan.best.");
    check(&groups, &group_keys, "");
}

fn written_trace(directory: &Directory) -> String {
    let file = directory.file("routing.safetensors");
    std::fs::write(&file, trace([24, 16], |_| {})).unwrap();
    file
}

/// The example file of the documentation can be planned, and the documented error is correct.
#[test]
fn the_documented_file_is_planned() {
    let documentation = include_str!("../../../../docs/planner.md");
    let block = |language: &str| {
        let start = format!("```{language}\n");
        documentation.split_once(&start).and_then(|(_, rest)| rest.split_once("```")).unwrap().0
    };
    let directory = Directory::new("plan-documented");
    let file = written(&directory, "plan.toml", block("toml"));
    let plan = planned(&["--cluster", &file]);
    assert_eq!(plan["problem"]["options"]["memory_cap_gb"], 24.0);
    let mut found = plan["step"]["prices"].as_array().unwrap().iter().map(|price| &price["strategy"]);
    assert_eq!(found.find(|strategy| *strategy != "local-steps").unwrap(), "pipeline");
    let typo = block("toml").replace("bandwidth = \"100", "bandwith = \"100");
    let error = block("text").trim().strip_suffix("...").unwrap().strip_prefix("plan.toml:").unwrap();
    run(&["plan", "--cluster", &written(&directory, "plan.toml", &typo)]).refused(2, &[error]);
}
