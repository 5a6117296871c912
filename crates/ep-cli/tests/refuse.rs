//! Invalid requests are refused before the run: exit code 2, one line on stderr, no files left behind.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{Directory, program, run, tiny, trace};

#[test]
fn numbers_that_do_not_fit_together_are_refused() {
    for (options, parts) in [
        (&["--ranks", "0"][..], &["--ranks 0"][..]),
        (&["--ranks", "5000"], &["--ranks 5000"]),
        (&["--ranks", "4", "--domains", "3"], &["4 ranks", "3 NVLink domains"]),
        (&["--domains", "0"], &["domains"]),
        (&["--ranks", "3"], &["--experts 8", "3 ranks"]),
        (&["--experts", "0"], &["--experts 0"]),
        (&["--topk", "9"], &["--topk 9", "8"]),
        (&["--topk", "0"], &["--topk 0"]),
        (&["--tokens", "1+2+3"], &["--tokens 1+2+3", "3 numbers for 4 ranks"]),
        (&["--tokens", "5,1+2+3"], &["--tokens 1+2+3", "3 numbers for 4 ranks"]),
        (&["--mode", "plain", "--pad", "4"], &["--pad 4", "plain mode", "leave --pad out"]),
        (&["--sms", "8,16"], &["--sms = 8,16", "host backend", "--backend cuda"]),
        (&["--hidden", "63"], &["--hidden", "126 bytes", "multiple of 16"]),
        (&["--hidden", "8", "--dtype", "fp8"], &["--hidden", "8 bytes", "multiple of 16"]),
        (&["--hidden", "0"], &["--hidden"]),
        (&["--pad", "0"], &["--pad"]),
        (&["--iters", "0"], &["--iters 0"]),
        (&["--skew", "inf"], &["--skew inf"]),
    ] {
        tiny(options).refused(2, parts);
    }
}

#[test]
fn a_run_that_needs_too_much_memory_is_refused() {
    tiny(&["--tokens", "4000000000"]).refused(2, &["memory", "available", "--tokens"]);
    tiny(&["--hidden", "512000000"]).refused(2, &["memory", "available", "--hidden"]);
    tiny(&["--pad", "4000000000"]).refused(2, &["memory", "available", "--pad"]);
}

#[test]
fn sizes_beyond_64_bits_are_refused() {
    tiny(&["--tokens", "18446744073709551615"]).refused(2, &["--tokens", "64 bits"]);
    tiny(&["--hidden", "18446744073709551600"]).refused(2, &["--hidden", "64 bits"]);
}

#[test]
fn usage_errors_of_the_parser_have_the_same_code() {
    for (arguments, parts) in [
        (
            &["bench", "--tokens", "many"][..],
            &["'many'", "--tokens", "a whole number", "`hybrid-ep bench --help`"][..],
        ),
        (&["bench", "--tokens", "1,2+"], &["'2+'", "--tokens", "a whole number"]),
        (&["bench", "--mode", "both"], &["both", "--mode", "possible values: plain, permuted"]),
        (&["bench", "--sms", "8,0"], &["0", "--sms", "1..=1024"]),
        (&["bench", "--layer", "1"], &["--routing", "not provided", "`hybrid-ep bench --help`"]),
        (&["bench", "--tokns", "1"], &["--tokns", "--tokens", "`hybrid-ep bench --help`"]),
        (&["bench", "--backend", "tpu"], &["tpu", "--backend", "possible values: auto, host, cuda"]),
        (&["bench", "--routing", "x", "--tokens", "5"], &["--routing", "--tokens", "cannot be used"]),
        (&["plan", "--print-toml", "--html", "x"], &["--print-toml", "--html"]),
        (&["bnch"], &["bnch", "bench", "`hybrid-ep --help`"]),
        (&["--no-such"], &["--no-such", "`hybrid-ep --help`"]),
        (&[], &["no command", "`hybrid-ep --help`"]),
    ] {
        run(arguments).refused(2, parts);
    }
    // Help and version are no errors and go to stdout.
    for arguments in [&["--help"][..], &["bench", "--help"], &["--version"], &["help", "plan"]] {
        let help = run(arguments).succeeded();
        assert!(help.stderr.is_empty() && !help.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn invalid_recorded_routings_are_refused() {
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
    let parts = ["range.safetensors", "layer 1", "rank 1, row 1", "expert index 8"];
    tiny(&["--routing", &range]).refused(2, &parts);
    let whole = write("whole.safetensors", &good);
    tiny(&["--routing", &whole, "--layer", "2"]).refused(2, &["--layer 2", "layers 0 to 1"]);
    tiny(&["--routing", &whole, "--ranks", "3"]).refused(2, &["whole.safetensors", "8 experts", "3 ranks"]);
}

#[test]
fn destinations_that_cannot_be_written_are_refused() {
    let directory = Directory::new("refuse-json");
    let nowhere = directory.file("no/such/result.json");
    // This run would take long; it must be refused before it starts.
    tiny(&["--json", &nowhere, "--iters", "100000000"]).refused(2, &["--json", "no/such"]);
    tiny(&["--json", &directory.path().display().to_string()]).refused(2, &["--json", "is a directory"]);
    assert_eq!(directory.names(), [""; 0]);
}

#[test]
fn invalid_settings_and_launcher_variables_are_refused() {
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
fn the_cuda_backend_is_refused_without_gpus() {
    // With a GPU, all of this would run.
    let Err(missing) = ep_cuda::check_available() else { return };
    // The line has the library's error with its cause and advice.
    let missing = missing.to_string();
    tiny(&["--backend", "cuda"]).refused(2, &[&missing]);
    tiny(&["--backend", "cuda", "--processes"]).refused(2, &[&missing]);
    tiny(&["--wire", "340"]).refused(2, &["--wire 340", "--backend cuda"]);
}

#[test]
fn the_launcher_refuses_before_it_starts_ranks() {
    // One line of the launcher, not one line per rank.
    tiny(&["--processes", "--topk", "9"]).refused(2, &["--topk 9"]);
}

#[test]
fn commands_that_measure_one_number_of_sms_refuse_several() {
    for command in [
        &["verify", "--backend", "host", "--cases", "1"][..],
        &["verify", "--backend", "host", "--soak", "1"],
        &["rail"],
        &["calibrate"],
    ] {
        run(&[command, &["--sms", "8,16"]].concat()).refused(2, &["--sms = 8,16", "one number", "bench"]);
    }
    tiny(&["--sms", "8"]).succeeded();
}

#[test]
fn numbers_out_of_range_are_refused_by_verify() {
    run(&["verify", "--ranks", "0"]).refused(2, &["--ranks 0"]);
    run(&["verify", "--suite-only", "--case", "1000000"]).refused(2, &["--case 1000000"]);
}
