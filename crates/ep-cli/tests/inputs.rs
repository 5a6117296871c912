//! Extreme numbers and files. Each is either refused within seconds by one line that names it and the possible values,
//! or accepted, and then all results are finite.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Directory, Finished, finish_in_time, program, run, tiny};

/// Extreme and invalid whole numbers: 0, negative, beyond 30, 32, 63 and 64 bits, and not whole.
const COUNTS: &[&str] =
    &["0", "-1", "1000000007", "1000000000000", "9223372036854775807", "18446744073709551616", "1.5", "nan"];
const NUMBERS: &[&str] = &["-1", "-0.0", "5e-324", "1e308", "-inf", "inf", "nan", "1e999", "x"];

/// Runs the program, which must end in time.
fn ended(arguments: &[&str]) -> Finished {
    finish_in_time(program().args(arguments).spawn().unwrap())
}

/// Checks that the run succeeded with finite numbers, or was refused by one line that contains one of `names`.
#[track_caller]
fn sound(finished: &Finished, context: &str, names: &[&str]) {
    match finished.code {
        Some(0) => {
            let figure = |word: &str| ["NaN", "inf", "NaNx", "infx"].contains(&word);
            let odd =
                finished.stdout.split(|letter: char| !letter.is_alphanumeric()).find(|word| figure(word));
            assert_eq!(odd, None, "{context}: {}", finished.stdout);
        }
        Some(2) => {
            let line = &finished.stderr;
            assert_eq!(line.lines().count(), 1, "{context}: {line}");
            assert!(line.starts_with("hybrid-ep: error: "), "{context}: {line}");
            assert!(names.iter().any(|name| line.contains(name)), "{context}: none of {names:?} in {line}");
        }
        _ => panic!("{context}: {finished:?}"),
    }
}

/// Runs `check` on all items, on two threads per core.
fn all<T: Sync>(items: &[T], check: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 * std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(item);
                }
            });
        }
    });
}

/// A problem file with all keys, one per line.
fn every_key() -> String {
    let printed = run(&["plan", "--print-toml"]).succeeded().stdout;
    let replaced = [
        ("# memory_cap", "memory_cap"),
        ("# pipeline_stages", "pipeline_stages"),
        ("# dense_gradient_compression", "dense_gradient_compression"),
        ("# gradient_accumulation", "gradient_accumulation"),
        (
            "attention = { parameters = 187105280, score_width = 40960 }",
            "attention.parameters = 187105280\nattention.score_width = 40960",
        ),
        ("routing = \"even\"", "routing.zipf = 1\nrouting.shuffle_seed = 7"),
    ];
    let text = replaced.iter().fold(printed, |text, (from, to)| {
        assert_eq!(text.matches(from).count(), 1, "{from}");
        text.replace(from, to)
    });
    let bare = |line: &str| line.split(" #").next().unwrap_or_default().trim_end().to_owned();
    text.lines().map(bare).collect::<Vec<_>>().join("\n")
}

/// Extreme values to put in place of the value of a key.
fn instead(key: &str, value: &str) -> Vec<String> {
    let Some(text) = value.strip_prefix('"').and_then(|text| text.strip_suffix('"')) else {
        // For both counts and numbers, extreme values of both kinds are tried.
        return COUNTS.iter().chain(&NUMBERS[..7]).map(|text| (*text).to_owned()).collect();
    };
    match text.split_once(' ') {
        Some((number, unit)) if key != "name" && number.parse::<f64>().is_ok() => NUMBERS
            .iter()
            .chain(&["0", "1000000000000"])
            .map(|number| format!("\"{number} {unit}\""))
            .chain(["\"1\"".into(), "1".into(), "[]".into()])
            .collect(),
        _ => vec!["\"\"".into(), "1".into(), format!("\"{}\"", "x".repeat(5000)), "\"\\u0000\"".into()],
    }
}

#[test]
fn every_key_of_a_file_has_its_bounds() {
    let directory = Directory::new("inputs-keys");
    let good = every_key();
    let lines: Vec<&str> = good.lines().collect();
    let mut cases = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let Some((key, value)) = line.split_once(" = ") else { continue };
        for value in instead(key, value) {
            cases.push((number, key, value));
        }
    }
    // Every case has a file of its own.
    cases.sort();
    cases.dedup();
    assert!(cases.len() > 300, "{}", cases.len());
    let whole = directory.file("good.toml");
    std::fs::write(&whole, &good).unwrap();
    for command in ["plan", "simulate"] {
        run(&[command, "--cluster", &whole]).succeeded();
    }
    all(&cases, |(number, key, value)| {
        let context = format!("{key} = {value}");
        let mut changed = lines.clone();
        changed[*number] = &context;
        let file = directory.file(&format!("{number}-{:016x}.toml", hash(&context)));
        std::fs::write(&file, changed.join("\n")).unwrap();
        // If the value is valid by itself, the error may name another key with which it does not fit.
        let last = key.rsplit('.').next().unwrap();
        let together = ["experts", "topk", "pipeline stages", "attention", "overlap_chunks", "Adam state"];
        let names: Vec<&str> = [last].into_iter().chain(together).collect();
        sound(&ended(&["plan", "--cluster", &file]), &context, &names);
        sound(&ended(&["simulate", "--layers", "2", "--cluster", &file]), &context, &names);
        std::fs::remove_file(&file).unwrap();
    });
}

fn hash(text: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

#[test]
fn every_number_of_the_command_line_has_its_bounds() {
    let tiny_bench =
        ["bench", "--backend=host", "--tokens=24", "--hidden=64", "--experts=8", "--topk=3", "--iters=2"];
    let verify = ["verify", "--backend=host", "--cases=1", "--seed=1"];
    let mut cases: Vec<(Vec<String>, &str)> = Vec::new();
    let mut add = |base: &[&str], flags: &[&'static str], values: &[&str]| {
        for flag in flags {
            for value in values {
                let kept = base.iter().filter(|given| !given.starts_with(&format!("{flag}=")));
                let changed = kept.map(|given| (*given).to_owned()).chain([format!("{flag}={value}")]);
                cases.push((changed.collect(), flag));
            }
        }
    };
    let sizes = ["--ranks", "--domains", "--tokens", "--hidden", "--experts", "--topk", "--pad", "--iters"];
    add(&tiny_bench, &sizes, COUNTS);
    add(
        &tiny_bench,
        &["--seed", "--timeout-ms", "--stall-timeout-ms", "--workers", "--sms"],
        &["-1", "1e9", "18446744073709551616"],
    );
    add(&tiny_bench, &["--timeout-ms", "--stall-timeout-ms"], &["0", "86400001"]);
    add(&tiny_bench, &["--skew", "--wire"], NUMBERS);
    add(&["verify", "--backend=host", "--suite-only", "--ranks=1"], &["--case"], COUNTS);
    add(&verify, &["--ranks", "--domains"], &["0", "-1", "1000000000000", "18446744073709551616", "x"]);
    add(&verify, &["--cases"], &["-1", "4294967295", "18446744073709551615", "18446744073709551616", "x"]);
    add(&["verify", "--backend=host"], &["--case", "--soak"], &["-1", "18446744073709551615", "1e3"]);
    add(&["plan"], &["--datacenters", "--nodes", "--gpus-per-node"], COUNTS);
    let rates =
        ["0", "1", "0 Gbit/s", "-1 Gbit/s", "5e-324 Gbit/s", "1e308 Gbit/s", "nan Gbit/s", "inf Gbit/s"];
    add(&["plan"], &["--uplink"], &rates);
    add(&["plan"], &["--round-trip"], &["-1 s", "1e308 s", "5e-324 s", "nan s", "5"]);
    for key in [
        "members",
        "members.nvlink",
        "tokens_per_gpu",
        "gradient_accumulation",
        "pipeline_stages",
        "live_layers",
        "shared_refresh_steps",
        "global_batch",
        "local_steps",
        "flows",
    ] {
        let values: Vec<String> = COUNTS.iter().map(|count| format!("{key}={count}")).collect();
        add(&["plan"], &["--set"], &values.iter().map(String::as_str).collect::<Vec<_>>());
    }
    for key in
        ["zipf", "weight_compression", "gradient_compression", "bandwidth", "memory", "efficiency", "loss"]
    {
        let values: Vec<String> = NUMBERS.iter().map(|number| format!("{key}={number}")).collect();
        add(&["plan"], &["--set"], &values.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let codecs = [
        "",
        "0",
        "50",
        "int4",
        "int8:1",
        "topk:",
        "topk:0",
        "topk:-1",
        "topk:1.5",
        "topk:nan",
        "topk:inf",
        "topk:1e-308",
        "topk:5e-324",
        "topk:1",
    ];
    let values = codecs.map(|codec| format!("dense_gradient_compression={codec}"));
    add(&["plan"], &["--set"], &values.each_ref().map(String::as_str));
    add(
        &["plan"],
        &["--sweep"],
        &[
            "bandwidth=5e-324Gbit/s..1Gbit/s",
            "bandwidth=1Gbit/s..1e308Gbit/s",
            "zipf=0..nan",
            "members=1..1000000000000",
            "zipf=0..2:4294967296",
        ],
    );
    add(&["simulate"], &["--layers"], COUNTS);
    add(&["simulate", "--layers=1"], &["--domains"], &["0", "1,1", "1000000007,1,1", "18446744073709551616"]);
    add(&["simulate", "--layers=1"], &["--jitter"], NUMBERS);
    add(
        &["simulate", "--layers=1"],
        &["--stragglers"],
        &[
            "gpu:0=nan",
            "gpu:0=inf",
            "gpu:0=1e308",
            "gpu:18446744073709551615=2",
            "link:wan:0=0",
            "random:nan=2",
            "random:1=5e-324",
            "gpu:0=1e6,gpu:0=1e6",
        ],
    );
    assert!(cases.len() > 200, "{}", cases.len());
    all(&cases, |(arguments, flag)| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let context = arguments.join(" ");
        let finished = ended(&arguments);
        // The error may name a related option instead.
        sound(&finished, &context, &[*flag, "straggl", "choices of domain sizes"]);
    });
}

#[test]
fn endless_and_huge_files_are_refused() {
    for file in ["/dev/zero", "/dev/urandom", "/dev/full"] {
        tiny(&["--routing", file]).refused(2, &[file, "not a regular file"]);
        ended(&["plan", "--routing", file]).refused(2, &["--routing", file, "not a regular file"]);
        ended(&["plan", "--cluster", file]).refused(2, &["--cluster", file, "neither a file nor a pipe"]);
        ended(&["plan", "--model", file]).refused(2, &["--model", file, "neither a file nor a pipe"]);
    }
    let directory = Directory::new("inputs-files");
    let write = |name: &str, text: &[u8]| {
        let file = directory.file(name);
        std::fs::write(&file, text).unwrap();
        file
    };
    let huge = directory.file("huge.toml");
    std::fs::File::create(&huge).unwrap().set_len(1 << 40).unwrap();
    ended(&["plan", "--cluster", &huge]).refused(2, &["huge.toml", "more than 8388608 bytes"]);
    tiny(&["--routing", &huge]).refused(2, &["huge.toml", "more than 1073741824 bytes"]);
    let pipe = directory.file("pipe");
    if std::process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success()) {
        tiny(&["--routing", &pipe]).refused(2, &["pipe", "not a regular file"]);
    }
    for (name, text) in [
        ("arrays", format!("x = {}", "[".repeat(4 << 20))),
        ("tables", format!("x = {}", "{a=".repeat(1 << 20))),
        ("dots", format!("[cluster]\n{}x = 1", "a.".repeat(2 << 20))),
        ("headers", format!("[{}x]", "a.".repeat(2 << 20))),
        ("closed", format!("x = {}{}", "[".repeat(1 << 20), "]".repeat(1 << 20))),
        (
            "histogram",
            format!("[model]\npreset = \"deepseek-v3\"\nrouting.histogram = [{}]", "1,".repeat(3 << 20)),
        ),
        ("keys", (0..400_000).map(|key| format!("k{key} = 1\n")).collect()),
        ("levels", "[[cluster.level]]\nname = \"a\"\nmembers = 1\nbandwidth = \"1 GB/s\"\n".repeat(100_000)),
        ("string", format!("[cluster]\nname = \"{}\"", "x".repeat(6 << 20))),
    ] {
        let finished = ended(&["plan", "--cluster", &write(name, text.as_bytes())]);
        finished
            .refused(2, &["--cluster", name].map(|part| if part == "--cluster" { "error: " } else { part }));
        assert!(finished.stderr.len() < 5000, "{}", finished.stderr.len());
    }
    ended(&["plan", "--cluster", &write("binary", &[0xff, 0xfe, 0])]).refused(2, &["binary"]);
}

#[test]
fn a_simulation_too_large_for_memory_is_refused() {
    let many = "gradient_accumulation=1000000";
    let parts = ["operations", "1000000 micro-batches", "at most 1048576", "gradient_accumulation"];
    ended(&["simulate", "--set", many]).refused(2, &parts);
    // The planner needs no memory per micro-batch.
    assert_eq!(ended(&["plan", "--set", many]).code, Some(0));
    let jitter = ["simulate", "--set", "gradient_accumulation=200", "--jitter", "0.1"];
    ended(&jitter).refused(2, &["on 128 GPUs", "fewer layers"]);
}

#[test]
fn the_largest_allowed_problem_is_planned() {
    let directory = Directory::new("inputs-large");
    let text = every_key()
        .replace("pipeline_stages = 2\n", "")
        .replacen("members = 2", "members = 65536", 1)
        .replacen("members = 8", "members = 1", 2)
        .replace("experts = 256", "experts = 65536")
        .replace("topk = 8", "topk = 1024")
        .replace("placement = \"in-order\"", "placement = \"lpt\"");
    let file = directory.file("large.toml");
    std::fs::write(&file, text).unwrap();
    let finished = ended(&["plan", "--cluster", &file]);
    sound(&finished, "65536 GPUs", &["nothing is refused"]);
    assert_eq!(finished.code, Some(0));
}
