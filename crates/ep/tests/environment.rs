//! Tests of reading the environment. Each test starts processes with its own environment variables.

#![allow(clippy::unwrap_used)]

use std::process::Command;

use ep::config::LaunchEnv;
use ep::{Config, CudaEnv};

/// Not a test: the processes that the tests below start run this function.
#[test]
fn reader() {
    if std::env::var_os("TEST_READS").is_none() {
        return;
    }
    let text = |result: Result<String, String>| result.unwrap_or_else(|error| error);
    println!("\n<config>{}", text(Config::from_env().map(|c| format!("{c:?}")).map_err(|e| e.to_string())));
    println!("<launch>{}", text(LaunchEnv::from_env().map(|l| format!("{l:?}")).map_err(|e| e.to_string())));
    println!("<cuda>{:?}", CudaEnv::from_env());
}

/// The settings that a process with given variables reads.
struct Read {
    config: String,
    launch: String,
    cuda: String,
}

fn read(variables: &[(&str, &str)]) -> Read {
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "reader", "--nocapture"])
        .env_clear()
        .env("TEST_READS", "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8(done.stdout).unwrap();
    let after = |tag: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(tag))
            .unwrap_or_else(|| panic!("{tag}: {text}"))
            .to_owned()
    };
    Read { config: after("<config>"), launch: after("<launch>"), cuda: after("<cuda>") }
}

#[test]
fn without_variables_all_settings_are_defaults() {
    let found = read(&[]);
    assert_eq!(found.config, format!("{:?}", Config::default()));
    assert_eq!(found.launch, "None");
    assert!(found.cuda.contains("cache_dir: None"), "{}", found.cuda);
}

/// A variable, the field that it sets, and its range.
const SETTINGS: &[(&str, &str, usize, usize)] = &[
    ("HYBRID_EP_WORKERS", "workers", 0, 256),
    ("HYBRID_EP_CHUNK_TOKENS", "chunk_tokens", 1, 65_536),
    ("HYBRID_EP_SLOT_BYTES", "slot_bytes", 4096, 1 << 30),
    ("HYBRID_EP_SLOTS", "slots", 1, 1024),
    ("HYBRID_EP_STREAMING_BYTES", "streaming_bytes", 0, usize::MAX),
    ("HYBRID_EP_SMS", "sms", 0, 1024),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "device_connections", 1, 32),
];

#[test]
fn every_number_reaches_its_field_between_its_bounds() {
    for &(variable, field, least, most) in SETTINGS {
        for value in [least, most] {
            let config = read(&[(variable, &value.to_string())]).config;
            assert!(
                config.contains(&format!(" {field}: {value},"))
                    || config.contains(&format!(" {field}: {value} }}")),
                "{variable}: {config}"
            );
        }
        let outside = [least.checked_sub(1), most.checked_add(1)];
        for value in
            outside.iter().flatten().map(usize::to_string).chain(["".into(), "-1".into(), "x".into()])
        {
            let error = read(&[(variable, &value)]).config;
            let range = format!("{variable} = {value}: must be a whole number from {least} to {most}");
            assert!(error.contains(&range), "{error}");
        }
    }
    // Slots are rounded up to a multiple of a cache line.
    assert!(read(&[("HYBRID_EP_SLOT_BYTES", "5000")]).config.contains("slot_bytes: 5056"));
}

#[test]
fn switches_are_0_or_1() {
    for (variable, field) in [("HYBRID_EP_LEND", "lend"), ("HYBRID_EP_PLAIN_COPIES", "plain_copies")] {
        for (value, is_on) in [("0", false), ("1", true)] {
            let config = read(&[(variable, value)]).config;
            assert!(config.contains(&format!(" {field}: {is_on},")), "{config}");
        }
        let error = read(&[(variable, "2")]).config;
        assert!(error.contains(&format!("{variable} = 2: must be a whole number from 0 to 1")), "{error}");
    }
}

#[test]
fn times_are_milliseconds() {
    for (variable, field) in
        [("HYBRID_EP_TIMEOUT_MS", "timeout"), ("HYBRID_EP_STALL_TIMEOUT_MS", "stall_timeout")]
    {
        for (value, duration) in [("1", "1ms"), ("1500", "1.5s"), ("86400000", "86400s")] {
            let config = read(&[(variable, value)]).config;
            assert!(config.contains(&format!(" {field}: {duration},")), "{config}");
        }
        for value in ["0", "86400001"] {
            let error = read(&[(variable, value)]).config;
            assert!(error.contains("must be a whole number from 1 to 86400000"), "{error}");
        }
    }
}

#[test]
fn variables_of_launchers_give_rank_world_size_and_store() {
    let torchrun = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "head"), ("MASTER_PORT", "29500")];
    let launch = read(&torchrun).launch;
    for part in ["rank: 1", "world_size: 2", "head:29501"] {
        assert!(launch.contains(part), "{launch}");
    }
    let with = |key: &str, value: &str| {
        let mut variables: Vec<_> = torchrun.iter().filter(|(other, _)| *other != key).copied().collect();
        variables.push((key, value));
        read(&variables).launch
    };
    assert!(with("MASTER_PORT", "65534").contains("head:65535"));
    assert!(with("MASTER_PORT", "65535").contains(
        "MASTER_PORT = 65535: must be a whole number up to 65534, because the ranks meet at the port after it"
    ));
    assert!(with("WORLD_SIZE", "1048576").contains("world_size: 1048576"));
    assert!(
        with("WORLD_SIZE", "1048577").contains("WORLD_SIZE = 1048577: must be a whole number up to 1048576")
    );
    assert!(with("RANK", "2").contains("RANK = 2: must be below WORLD_SIZE = 2"));
    // The message fits the launcher, torchrun or SLURM.
    let missing = read(&torchrun[..2]).launch;
    assert!(missing.contains("MASTER_PORT = (not set): is needed with RANK"), "{missing}");
    let slurm = read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")]).launch;
    assert!(slurm.contains("SLURM does not set it"), "{slurm}");
}

#[test]
fn compilers_and_caches_are_named() {
    let cuda =
        read(&[("HYBRID_EP_NVRTC", "/n.so"), ("HYBRID_EP_KERNEL_CACHE", "/k"), ("CUDA_HOME", "/c")]).cuda;
    for part in ["\"/n.so\"", "\"/k\"", "\"/c\""] {
        assert!(cuda.contains(part), "{cuda}");
    }
}

#[test]
fn the_stall_bound_is_never_longer_than_the_timeout() {
    use std::time::Duration;
    let mut config = Config::default();
    assert_eq!(config.stall_bound(), config.stall_timeout);
    assert!(config.stall_bound() > Duration::ZERO);
    config.timeout = config.stall_timeout / 2;
    assert_eq!(config.stall_bound(), config.timeout);
}
