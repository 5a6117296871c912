//! What cannot be done is refused before it begins: exit code 2, one line on stderr, nothing left behind.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{Directory, program, run, tiny, trace};

#[test]
fn numbers_that_do_not_fit_together() {
    for (options, culprits) in [
        (&["--ranks", "0"][..], &["--ranks 0"][..]),
        (&["--ranks", "5000"], &["--ranks 5000"]),
        (&["--ranks", "4", "--domains", "3"], &["4 ranks", "3 NVLink domains"]),
        (&["--domains", "0"], &["domains"]),
        (&["--ranks", "3"], &["--experts 8", "3 ranks"]),
        (&["--experts", "0"], &["--experts 0"]),
        (&["--topk", "9"], &["--topk 9", "8"]),
        (&["--topk", "0"], &["--topk 0"]),
        (&["--tokens", "1,2,3"], &["--tokens", "3 numbers for 4 ranks"]),
        (&["--hidden", "63"], &["--hidden", "126 bytes", "multiple of 16"]),
        (&["--hidden", "8", "--dtype", "fp8"], &["--hidden", "8 bytes", "multiple of 16"]),
        (&["--hidden", "0"], &["--hidden"]),
        (&["--pad", "0"], &["--pad"]),
        (&["--iters", "0"], &["--iters 0"]),
        (&["--skew", "inf"], &["--skew inf"]),
    ] {
        tiny(options).refused(2, culprits);
    }
}

#[test]
fn more_memory_than_there_is() {
    tiny(&["--tokens", "4000000000"]).refused(2, &["memory", "available", "--tokens"]);
    tiny(&["--hidden", "16000000000"]).refused(2, &["memory", "available", "--hidden"]);
    tiny(&["--pad", "4000000000"]).refused(2, &["memory", "available", "--pad"]);
}

#[test]
fn sizes_beyond_64_bits() {
    tiny(&["--tokens", "18446744073709551615"]).refused(2, &["--tokens", "64 bits"]);
    tiny(&["--hidden", "18446744073709551600"]).refused(2, &["--hidden", "64 bits"]);
}

#[test]
fn usage_errors_of_the_parser_have_the_same_code() {
    for arguments in [&["bench", "--tokens", "many"][..], &["bench", "--layer", "1"], &["bnch"], &[]] {
        assert_eq!(run(arguments).code, Some(2), "{arguments:?}");
    }
}

#[test]
fn recorded_routings_that_cannot_be_used() {
    let directory = Directory::new("refuse-trace");
    let write = |name: &str, bytes: &[u8]| {
        let file = directory.file(name);
        std::fs::write(&file, bytes).unwrap();
        file
    };
    let good = trace([5, 4], |_| {});

    tiny(&["--routing", &directory.file("missing")]).refused(2, &["missing"]);
    let cut = write("cut.safetensors", &good[..good.len() - 7]);
    tiny(&["--routing", &cut]).refused(2, &["cut.safetensors", "truncated"]);
    let range = write("range.safetensors", &trace([5, 4], |indices| indices[3] = 8));
    let culprits = ["range.safetensors", "layer 1", "rank 1, row 1", "expert index 8"];
    tiny(&["--routing", &range]).refused(2, &culprits);
    let whole = write("whole.safetensors", &good);
    tiny(&["--routing", &whole, "--layer", "2"]).refused(2, &["--layer 2", "layers 0 to 1"]);
    tiny(&["--routing", &whole, "--ranks", "3"]).refused(2, &["whole.safetensors", "8 experts", "3 ranks"]);
}

#[test]
fn results_that_could_not_be_written() {
    let directory = Directory::new("refuse-json");
    let nowhere = directory.file("no/such/result.json");
    // A size that would take long: the refusal comes before the run.
    tiny(&["--json", &nowhere, "--iters", "100000000"]).refused(2, &["--json", "no/such"]);
    tiny(&["--json", &directory.path().display().to_string()]).refused(2, &["--json", "is a directory"]);
    assert_eq!(directory.names(), [""; 0]);
}

#[test]
fn settings_and_launchers_that_make_no_sense() {
    let with = |key: &str, value: &str, options: &[&str]| {
        let output = program().arg("bench").args(options).env(key, value).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, line) = with("HYBRID_EP_SLOTS", "0", &[]);
    assert!(code == Some(2) && line.contains("HYBRID_EP_SLOTS = 0") && line.lines().count() == 1, "{line}");
    let verify = program()
        .args(["verify", "--backend", "host", "--processes"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "1")])
        .output()
        .unwrap();
    let line = String::from_utf8(verify.stderr).unwrap();
    assert!(
        verify.status.code() == Some(2) && line.contains("--seed") && line.lines().count() == 1,
        "{line}"
    );
    let (code, line) = with("RANK", "1", &["--processes"]);
    assert!(code == Some(2) && line.contains("WORLD_SIZE") && line.lines().count() == 1, "{line}");
}

#[test]
fn gpus_are_asked_for_where_there_are_none() {
    // Where there is one, all of this would run.
    let Err(missing) = ep_cuda::check_available() else { return };
    // One line says the same as the library does, with its cause and what to do.
    let missing = missing.to_string();
    tiny(&["--backend", "cuda"]).refused(2, &[&missing]);
    tiny(&["--backend", "cuda", "--processes"]).refused(2, &[&missing]);
    tiny(&["--wire", "340"]).refused(2, &["--wire 340", "--backend cuda"]);
}

#[test]
fn gpus_serve_one_domain() {
    tiny(&["--backend", "cuda", "--domains", "2"]).refused(2, &["--domains 2", "--backend host"]);
}

#[test]
fn the_launcher_refuses_before_it_starts_ranks() {
    // One line from one process, not one from each rank.
    tiny(&["--processes", "--topk", "9"]).refused(2, &["--topk 9"]);
}

#[test]
fn verify_has_limits_too() {
    run(&["verify", "--ranks", "0"]).refused(2, &["--ranks 0"]);
    run(&["verify", "--suite-only", "--case", "1000000"]).refused(2, &["--case 1000000"]);
}
