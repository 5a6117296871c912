//! The program that runs the kernels on the CPU: how it is built by a C++ compiler, and how it is run on cases.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::{env, fmt, fs, thread};

use sha2::{Digest, Sha256};

/// One object file.
struct Unit {
    object: String,
    source: &'static str,
    /// Whether it is instrumented by ThreadSanitizer.
    seen: bool,
    defines: Vec<(&'static str, String)>,
}

/// The program, in one of its two builds.
pub(crate) struct Program {
    path: PathBuf,
}

/// The end of the name of a kernel that is compiled for a world of several domains.
pub(crate) const RAILS: &str = " rails";
/// The end of the name of a combine kernel with teams of one consumer.
pub(crate) const PAIRS: &str = " pairs";

/// Exit code of a run in which ThreadSanitizer has found a race.
const RACE: i32 = 66;

/// The outcome of a run, with the program's output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Every output equals the expected one. Runs with the same text have executed the same steps.
    Equal(String),
    /// An output differs, or a kernel has reported an unexpected fault.
    Different(String),
    /// Lanes have done something that is undefined on a GPU, or no lane can continue.
    Undefined(String),
    /// Two unordered accesses.
    Race(String),
    /// The program has crashed, for example because a rank has used an address of another rank.
    Crash(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, said) = match self {
            Self::Equal(said) => ("as it must be", said),
            Self::Different(said) => ("another result", said),
            Self::Undefined(said) => ("not defined on a GPU", said),
            Self::Race(said) => ("a race", said),
            Self::Crash(said) => ("the program failed", said),
        };
        write!(f, "{what}\n{said}")
    }
}

impl Program {
    /// The operators, which run cases; with `sanitize`, built with ThreadSanitizer.
    pub(crate) fn of_operators(sanitize: bool) -> Self {
        Self::build("roles", units(), sanitize)
    }

    /// `lane_copy` with a host, which has one case.
    pub(crate) fn of_lane_copies(sanitize: bool) -> Self {
        let test = unit("lane_copy", "lane_copy.cpp", true, Vec::new());
        Self::build("lane-copy", machine().into_iter().chain([test]).collect(), sanitize)
    }

    fn build(name: &str, units: Vec<Unit>, sanitize: bool) -> Self {
        let folder = if sanitize { format!("{name}-tsan") } else { name.into() };
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        copy_tree(&crate_folder.join("device"), &folder.join("device"));
        let sources = crate_folder.join("tests/roles/cpu");
        let state = state_of(&[&crate_folder.join("device"), &sources]);
        fs::copy(sources.join("ptx.cuh"), folder.join("device/common/ptx.cuh")).unwrap();

        let units = Mutex::new(units);
        let objects: Vec<String> = lock(&units).iter().map(|unit| unit.object.clone()).collect();
        let next = || lock(&units).pop();
        let compile = || {
            while let Some(unit) = next() {
                compile(&folder, &sources, &unit, sanitize, &state);
            }
        };
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(compile);
            }
        });
        let path = folder.join(name);
        let mut link = compiler();
        link.current_dir(&folder).args(&objects).arg("-o").arg(&path).arg("-pthread");
        if sanitize {
            link.arg("-fsanitize=thread");
        }
        finish(link);
        Self { path }
    }

    /// Runs a case with a seed; programs with one case ignore `case`. `change`: the order or wait to leave out.
    pub(crate) fn run(&self, case: &Path, seed: u64, change: Option<&str>) -> Outcome {
        let run = |command: &mut Command| {
            let options = format!("halt_on_error=1 exitcode={RACE} history_size=3 atexit_sleep_ms=0");
            command.arg(case).arg(seed.to_string()).args(change).env("TSAN_OPTIONS", options);
            command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
        };
        let mut output = run(&mut Command::new(&self.path));
        // Older sanitizers need a memory layout that newer kernels provide only without address randomisation.
        if text(&output).contains("unexpected memory mapping") {
            output = run(Command::new("setarch").arg("-R").arg(&self.path));
        }
        let text = text(&output);
        match output.status.code() {
            Some(0) => Outcome::Equal(text),
            Some(1) => Outcome::Different(text),
            Some(3) => Outcome::Undefined(text),
            Some(RACE) if text.contains("data race") => Outcome::Race(text),
            _ => Outcome::Crash(format!("{}\n{text}", output.status)),
        }
    }

    /// All places at which [`run`](Self::run) can leave out an order or a wait.
    pub(crate) fn sites(&self, case: &Path, seed: u64) -> Vec<String> {
        let output = Command::new(&self.path).arg(case).arg(seed.to_string()).arg("sites").output().unwrap();
        let all = text(&output);
        let mut sites: Vec<String> =
            all.lines().filter_map(|line| line.strip_prefix("site ")).map(str::to_owned).collect();
        sites.sort_unstable();
        sites.dedup();
        sites
    }
}

fn unit(name: &str, source: &'static str, seen: bool, defines: Vec<(&'static str, String)>) -> Unit {
    Unit { object: format!("{}.o", name.replace(' ', "-")), source, seen, defines }
}

/// The machine that simulates GPUs.
fn machine() -> [Unit; 2] {
    [("machine", "machine.cpp"), ("engine", "engine.cpp")]
        .map(|(name, source)| unit(name, source, false, Vec::new()))
}

/// The machine, and every operator in every variant that runs on a CPU: all except those that convert to FP8 by the
/// instruction.
fn units() -> Vec<Unit> {
    let quoted = |text: &str| format!("\"{text}\"");
    let mut units = Vec::from(machine());
    units.push(unit("main", "main.cpp", true, Vec::new()));
    let mut kernel = |name: String, source, defines: Vec<(&'static str, String)>| {
        // Kernels are `extern "C"`, so each variant needs its own name.
        let (operator, _) = name.split_once(' ').unwrap_or((&name, ""));
        let names = [("NAME", quoted(&name)), (entry(operator), name.replace(' ', "_"))];
        units.push(unit(&name, source, true, [names.to_vec(), defines].concat()));
    };
    for (rails, suffix) in [("0", ""), ("1", RAILS)] {
        let copies = ("COPY_VARIANT", quoted("copy_plain.cuh"));
        kernel(format!("preprocess{suffix}"), "preprocess.cpp", vec![copies, ("RAILS", rails.into())]);
    }
    let ways = ["bulk", "plain"].into_iter().flat_map(|copies| [(copies, "0", ""), (copies, "1", RAILS)]);
    for (copies, rails, suffix) in ways {
        let common = || {
            let copies = ("COPY_VARIANT", quoted(&format!("copy_{copies}.cuh")));
            vec![copies, ("RAILS", rails.into())]
        };
        for payload in ["copy", "quantize"] {
            let more = [
                ("PAYLOAD_VARIANT", quoted(&format!("payload_{payload}.cuh"))),
                ("E4M3_VARIANT", quoted("e4m3_soft.cuh")),
                ("WARPS", "2".into()),
            ];
            let defines = [common(), more.to_vec()].concat();
            kernel(format!("dispatch {payload} {copies}{suffix}"), "dispatch.cpp", defines);
        }
        for rows in ["bf16", "f32"] {
            for wire in ["bf16", "f32"] {
                let is_f32 = |element: &str| u32::from(element == "f32").to_string();
                let more = [("ROWS_F32", is_f32(rows)), ("WIRE_F32", is_f32(wire)), ("TEAMS", "1".into())];
                let teams = [("2", ""), ("1", PAIRS)];
                let has_pairs = (rows, wire, rails) == ("bf16", "bf16", "0");
                for (consumers, pairs) in &teams[..if has_pairs { 2 } else { 1 }] {
                    let consumers = vec![("CONSUMERS", consumers.to_string())];
                    let defines = [common(), more.to_vec(), consumers].concat();
                    kernel(format!("combine {rows} {wire} {copies}{suffix}{pairs}"), "combine.cpp", defines);
                }
            }
        }
    }
    units
}

fn entry(operator: &str) -> &'static str {
    ["preprocess", "dispatch", "combine"].into_iter().find(|&name| name == operator).unwrap()
}

fn compiler() -> Command {
    Command::new(env::var_os("CXX").unwrap_or_else(|| "g++".into()))
}

/// Compiles a unit, unless an earlier run of the tests has compiled it by the same command from the same `state`.
fn compile(folder: &Path, sources: &Path, unit: &Unit, sanitize: bool, state: &str) {
    let mut command = compiler();
    command.current_dir(folder).args(["-std=c++20", "-O1", "-g1", "-ffp-contract=off"]);
    command.args(["-Idevice", "-Idevice/common"]);
    if sanitize {
        command.arg(if unit.seen { "-fsanitize=thread" } else { "-DTHREAD_SANITIZER" });
    }
    command.args(unit.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    command.arg("-c").arg(sources.join(unit.source)).arg("-o").arg(&unit.object);
    let (object, record) = (folder.join(&unit.object), folder.join(format!("{}.made", unit.object)));
    let made_by = format!("{state}\n{command:?}\n");
    if object.exists() && fs::read_to_string(&record).is_ok_and(|made| made == made_by) {
        return;
    }
    // Without a record, an object of an interrupted run is not used.
    let _ = fs::remove_file(&record);
    finish(command);
    fs::write(record, made_by).unwrap();
}

/// Runs a compiler; panics with its output if it fails.
fn finish(mut command: Command) {
    let output = command.output().unwrap_or_else(|error| {
        panic!(
            "{:?}: {error}\nthis test compiles the kernels for the CPU: install g++ 12 or later, or let CXX name it",
            command.get_program()
        )
    });
    assert!(output.status.success(), "{command:?}\n{}", text(&output));
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// A hash of the compiler's version and of all files in these folders.
fn state_of(folders: &[&Path]) -> String {
    let mut hash = Sha256::new();
    hash.update(compiler().arg("--version").output().map(|output| output.stdout).unwrap_or_default());
    let mut pending: Vec<PathBuf> = folders.iter().map(|&folder| folder.into()).collect();
    let mut files = Vec::new();
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { pending.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    for file in files {
        hash.update(file.as_os_str().as_encoded_bytes());
        hash.update(fs::read(&file).unwrap());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
