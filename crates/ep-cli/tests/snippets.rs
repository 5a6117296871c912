//! Checks the fenced blocks of the documentation: every block of every Markdown file must have a test, and every shell
//! command is run, parsed by the program, or listed here with the reason why not.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::common::{Directory, program};

mod common;

/// Shell commands that are neither run nor parsed here, by their first words, with the reason.
const NOT_RUN: &[(&str, &str)] = &[
    ("pip install", "it changes the environment; ci/test installs the package the same way"),
    ("torchrun", "it needs PyTorch: python/tests/test_examples.py runs the examples"),
    ("benches/peers/run", "it needs OpenMPI"),
    ("python -m hybrid_ep bench --compare", "it needs PyTorch: python/tests/test_compare.py runs it"),
    (
        "python -m hybrid_ep.run",
        "it stands for the reader's own program: python/tests/test_install.py runs others",
    ),
    ("export", "it is a line of a job's script for SLURM"),
    ("srun", "it needs SLURM"),
];

/// Commands that are quick enough to be run as written.
const QUICK: &[&str] = &["doctor", "plan", "reproduce", "simulate"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A fenced block of a Markdown file.
struct Block {
    place: String,
    language: String,
    text: String,
}

fn blocks() -> Vec<Block> {
    let mut files = Vec::new();
    find_markdown(&root(), &mut files);
    assert!(files.len() > 8, "{files:?}");
    files.sort();
    files.iter().flat_map(|file| blocks_of(file)).collect()
}

fn find_markdown(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if name == "target" || name.to_string_lossy().starts_with('.') {
            continue;
        }
        if entry.file_type().unwrap().is_dir() {
            find_markdown(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            files.push(path);
        }
    }
}

fn blocks_of(file: &Path) -> Vec<Block> {
    let text = std::fs::read_to_string(file).unwrap();
    let name = file.strip_prefix(root()).unwrap().display().to_string();
    let mut found: Vec<Block> = Vec::new();
    let mut inside = false;
    for (number, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), inside) {
            (Some(language), false) => {
                let place = format!("{name}:{}", number + 1);
                found.push(Block { place, language: language.into(), text: String::new() });
                inside = true;
            }
            (Some(_), true) => inside = false,
            (None, true) => {
                let block = found.last_mut().unwrap();
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, false) => {}
        }
    }
    assert!(!inside, "{name}: a fence is not closed");
    found
}

#[test]
fn every_block_has_a_test() {
    for Block { place, language, .. } in blocks() {
        let tested = match language.as_str() {
            // Diagrams and program output.
            "text" => true,
            // Tested below.
            "sh" => true,
            // In python/tests/test_snippets.py.
            "python" => true,
            // In crates/ep-host/tests/readme.rs.
            "rust" => place.starts_with("README.md:"),
            // In plan/documentation.rs beside this file.
            "toml" => place.starts_with("docs/planner.md:"),
            _ => false,
        };
        assert!(tested, "{place}: no test runs a block of `{language}` there");
    }
}

/// A line of a shell block without its comment.
fn command_of(line: &str) -> &str {
    match line.strip_prefix('#') {
        Some(_) => "",
        None => line.split_once(" #").map_or(line, |(command, _)| command).trim(),
    }
}

#[test]
fn every_shell_command_works() {
    let mut unused: Vec<&str> = NOT_RUN.iter().map(|(words, _)| *words).collect();
    let blocks = blocks();
    for Block { place, text, .. } in blocks.iter().filter(|block| block.language == "sh") {
        // All lines of a block share a directory, because later lines read files of earlier ones.
        let directory = Directory::new("snippets");
        // The planner's guide asks the reader to save its example under this name.
        let page = |place: &str| place.split(':').next().unwrap().to_owned();
        if let Some(file) = blocks.iter().find(|b| b.language == "toml" && page(&b.place) == page(place)) {
            std::fs::write(directory.path().join("plan.toml"), &file.text).unwrap();
        }
        for line in text.lines().map(command_of).filter(|line| !line.is_empty()) {
            let (settings, command) = split_settings(line);
            if let Some((words, _)) = NOT_RUN.iter().find(|(words, _)| command.starts_with(words)) {
                unused.retain(|unused| unused != words);
            } else if let Some(arguments) = own_arguments(command) {
                check_own(&directory, place, arguments);
            } else if let Some(script) = command.strip_prefix("ci/") {
                check_script(place, script, &settings);
            } else if let Some(arguments) = command.strip_prefix("cargo ") {
                check_cargo(place, arguments);
            } else {
                panic!("{place}: no test runs `{line}`, and it is not listed as one that is not run");
            }
        }
    }
    assert!(unused.is_empty(), "listed as not run, but not in the documentation: {unused:?}");
}

/// Splits `NAME=value ... command`.
fn split_settings(line: &str) -> (Vec<&str>, &str) {
    let (mut settings, mut rest) = (Vec::new(), line);
    while let Some((word, after)) = rest.split_once(' ') {
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        match word.split_once('=') {
            Some((name, _)) if is_name(name) => settings.push(name),
            _ => break,
        }
        rest = after;
    }
    (settings, rest)
}

/// The arguments of a command that starts `hybrid-ep`, if it does.
fn own_arguments(command: &str) -> Option<&str> {
    ["hybrid-ep ", "cargo run --release -- "].iter().find_map(|start| command.strip_prefix(start))
}

/// Runs a quick command in `directory`, its redirection included, and has the program parse any other.
fn check_own(directory: &Directory, place: &str, arguments: &str) {
    let arguments = arguments.trim_end_matches(" &");
    let (arguments, output) = match arguments.split_once(" > ") {
        Some((arguments, output)) => (arguments, Some(output)),
        None => (arguments, None),
    };
    let mut words: Vec<&str> = arguments.split_whitespace().collect();
    let is_quick = QUICK.contains(&words[0]);
    if !is_quick {
        // With --help the program parses all arguments and runs nothing.
        words.push("--help");
        // Files, not rates such as 100Mbit/s.
        for word in words.iter().filter(|word| word.contains('/') && !word.ends_with("/s")) {
            assert!(root().join(word).exists(), "{place}: there is no {word}");
        }
    }
    let mut command = program();
    command.args(&words).current_dir(directory.path());
    if let Some(output) = output {
        command.stdout(std::fs::File::create(directory.path().join(output)).unwrap());
    } else {
        command.stdout(Stdio::piped());
    }
    let done = command.output().unwrap();
    // `doctor` may end with 1.
    let is_right = done.status.code() == Some(0) || words[0] == "doctor" && done.status.code() == Some(1);
    assert!(is_right, "{place}: hybrid-ep {arguments}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Checks that a script of `ci/` exists and reads the variables that are set before it.
fn check_script(place: &str, script: &str, settings: &[&str]) {
    let name = script.split_whitespace().next().unwrap();
    let text = std::fs::read_to_string(root().join("ci").join(name))
        .unwrap_or_else(|error| panic!("{place}: ci/{name}: {error}"));
    for setting in settings {
        assert!(text.contains(setting), "{place}: ci/{name} does not read {setting}");
    }
}

/// Checks that the packages and tests of a cargo command exist.
fn check_cargo(place: &str, arguments: &str) {
    let words: Vec<&str> = arguments.split_whitespace().collect();
    let after = |option: &str| words.iter().position(|word| *word == option).map(|at| words[at + 1]);
    let exists = |path: &str| assert!(root().join(path).exists(), "{place}: there is no {path}");
    match words[0] {
        "install" => exists(&format!("{}/Cargo.toml", after("--path").unwrap())),
        "test" => {
            let package = after("-p").unwrap();
            exists(&format!("crates/{package}/Cargo.toml"));
            if let Some(test) = after("--test") {
                let path = format!("crates/{package}/tests/{test}");
                assert!(
                    root().join(format!("{path}.rs")).exists() || root().join(&path).join("main.rs").exists(),
                    "{place}: there is no {path}"
                );
            }
        }
        other => panic!("{place}: no test runs `cargo {other}`"),
    }
}
