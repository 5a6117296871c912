//! Files of results, and escaping of control characters.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::process::Stdio;

use common::{Directory, finish_in_time, program, run, trace};

/// The commands and their options that write a file.
const WRITERS: [(&[&str], &str); 6] = [
    (&["plan"], "--json"),
    (&["plan"], "--html"),
    (&["plan"], "--groups"),
    (&["simulate", "--layers", "1"], "--json"),
    (&["simulate", "--layers", "1"], "--svg"),
    (&["reproduce", "table7"], "--markdown"),
];

fn written(arguments: &[&str], option: &str, file: &str) {
    run(&[arguments, &[option, file]].concat()).succeeded();
}

#[test]
fn a_replaced_file_keeps_its_mode_and_a_new_file_follows_the_umask() {
    let directory = Directory::new("outputs-mode");
    for (number, (arguments, option)) in WRITERS.into_iter().enumerate() {
        let secret = directory.file(&format!("secret{number}"));
        fs::write(&secret, "old").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        written(arguments, option, &secret);
        assert_eq!(fs::metadata(&secret).unwrap().mode() & 0o7777, 0o600, "{arguments:?} {option}");
        assert_ne!(fs::read_to_string(&secret).unwrap(), "old");
    }
    let new = directory.file("new");
    let shell = format!("umask 027; exec \"$0\" plan --json {new}");
    let mut command = program();
    let binary = command.get_program().to_owned();
    command = {
        let mut shell_command = std::process::Command::new("sh");
        shell_command.arg("-c").arg(shell).arg(binary).stdout(Stdio::null());
        shell_command
    };
    assert!(command.status().unwrap().success());
    assert_eq!(fs::metadata(&new).unwrap().mode() & 0o7777, 0o640);
    // No temporary file remains.
    assert_eq!(directory.names().len(), WRITERS.len() + 1);
}

#[test]
fn a_log_is_appended_to() {
    let directory = Directory::new("outputs-log");
    let log = directory.file("log");
    for name in ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        fs::write(&log, "before\n").unwrap();
        let file = OpenOptions::new().append(true).open(&log).unwrap();
        let status = program().args(["plan", "--json", name]).stdout(file).stderr(Stdio::null()).status();
        assert!(status.unwrap().success());
        let text = fs::read_to_string(&log).unwrap();
        let json = text.strip_prefix("before\n").expect(name);
        assert!(serde_json::from_str::<serde_json::Value>(json).is_ok(), "{name}: {json}");
    }
}

#[test]
fn links_are_followed_and_never_replaced() {
    let directory = Directory::new("outputs-links");
    let [file, link, lost] = ["file", "link", "lost"].map(|name| directory.file(name));
    fs::write(&file, "old").unwrap();
    symlink("file", &link).unwrap();
    symlink("nowhere", &lost).unwrap();
    for (arguments, option) in WRITERS {
        written(arguments, option, &link);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        let refused = run(&[arguments, &[option, &lost]].concat());
        refused.refused(2, &[option, "lost", "is a link to", "nowhere"]);
        assert!(fs::symlink_metadata(&lost).unwrap().is_symlink());
    }
    assert_ne!(fs::read_to_string(&file).unwrap(), "old");
}

#[test]
fn a_pipe_is_written_to() {
    let directory = Directory::new("outputs-pipe");
    let pipe = directory.file("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let child = program().args(["plan", "--json", &pipe]).spawn().unwrap();
    let json = fs::read_to_string(&pipe).unwrap();
    finish_in_time(child).succeeded();
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{json}");
    assert_eq!(directory.names(), ["pipe"]);
}

#[test]
fn a_read_only_file_is_refused_and_stays() {
    let directory = Directory::new("outputs-readonly");
    let file = directory.file("file");
    fs::write(&file, "old").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o400)).unwrap();
    if OpenOptions::new().append(true).open(&file).is_ok() {
        // This user ignores file modes.
        return;
    }
    run(&["plan", "--json", &file]).refused(2, &["--json", "ermission denied"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "old");
}

#[test]
fn two_results_with_one_destination_are_refused() {
    let directory = Directory::new("outputs-twice");
    let file = directory.file("file");
    run(&["plan", "--json", &file, "--html", &file]).refused(2, &["--json and --html", "file"]);
    run(&["plan", "--json", "-", "--html", "/dev/stdout"]).refused(2, &["--json and --html"]);
}

/// Checks that a text has no control characters except line ends and tabs, and none that change the direction of
/// writing.
#[track_caller]
fn harmless(text: &str) {
    let obeyed = |letter: &char| {
        letter.is_control() && !['\n', '\t'].contains(letter)
            || ('\u{202a}'..='\u{202e}').contains(letter)
            || ('\u{2066}'..='\u{2069}').contains(letter)
    };
    assert_eq!(text.chars().find(obeyed), None, "{text:?}");
}

const ATTACK: &str = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}31m\u{202e}cod\u{2066}x\r";

#[test]
fn escape_sequences_do_not_reach_the_terminal() {
    let directory = Directory::new("outputs-escape");
    let toml = |name: &str, text: &str| {
        let file = directory.file(name);
        fs::write(&file, text).unwrap();
        file
    };
    let problem = run(&["plan", "--print-toml"]).succeeded().stdout;
    let named = |name: &str| problem.replacen("name = \"", &format!("name = \"{name}"), 1);
    let files = [
        toml("raw", &named(ATTACK)),
        toml("escaped", &named("\\u001B[2J\\u009B31m\\r\\n")),
        toml("bidi", &named("\u{202e}abc\u{2066}")),
        toml("key", &format!("[cluster]\n\"\\u001B]0;owned\\u0007\" = 1\n{ATTACK}")),
        toml("value", "[options]\nwork = \"\\u001B[31m\\u202E\"\n"),
        toml("syntax", &format!("[cluster\n{ATTACK}")),
        toml(&format!("path{}", ATTACK.replace('\r', "")), "[cluster]\n"),
        directory.file(&format!("missing{ATTACK}\n")),
    ];
    let outputs: Vec<_> = files.iter().map(|file| run(&["plan", "--cluster", file])).collect();
    for finished in &outputs {
        harmless(&finished.stdout);
        harmless(&finished.stderr);
        assert!(finished.code == Some(0) || finished.stderr.lines().count() == 1, "{finished:?}");
    }
    // The third file is a valid problem whose name is written from right to left.
    assert!(outputs[2].code == Some(0) && outputs[2].stdout.contains("\\u{202e}abc"), "{:?}", outputs[2]);
    let json = run(&["plan", "--cluster", &files[2], "--json", "-"]).succeeded().stdout;
    harmless(&json);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json["problem"]["cluster"]["name"].as_str().unwrap().starts_with("\u{202e}abc"));

    for arguments in [
        &["bench", "--tokens", ATTACK][..],
        &["bench", ATTACK],
        &[ATTACK],
        &["plan", "--set", ATTACK],
        &["plan", "--set", &format!("work={ATTACK}")],
        &["plan", "--stream", ATTACK],
        &["plan", "--model", ATTACK],
        &["plan", "--uplink", ATTACK],
        &["plan", "--sweep", ATTACK],
        &["plan", "--json", &format!("/nowhere/{ATTACK}")],
        &["simulate", "--stragglers", ATTACK],
        &["bench", "--backend", "host", "--routing", ATTACK],
        &["reproduce", ATTACK],
        &["warm", "--arch", ATTACK],
    ] {
        let finished = run(arguments);
        harmless(&finished.stderr);
        finished.refused(2, &[]);
    }
}

#[test]
fn the_metadata_of_a_recorded_routing_is_escaped() {
    let directory = Directory::new("outputs-trace");
    let good = String::from_utf8_lossy(&trace([5, 4], |_| {})).into_owned();
    assert!(good.contains("hybrid-ep-routing"));
    let mut bytes = trace([5, 4], |_| {});
    let wanted = b"hybrid-ep-routing";
    let at = bytes.windows(wanted.len()).position(|window| window == wanted).unwrap();
    // Escaped as in JSON, and of the same length.
    bytes[at..at + wanted.len()].copy_from_slice(b"\\u001b[2J\\u202e\x20\x20");
    let file = directory.file("bad.safetensors");
    fs::write(&file, bytes).unwrap();
    let finished = run(&["bench", "--backend", "host", "--routing", &file]);
    harmless(&finished.stderr);
    finished.refused(2, &["metadata `format`", "\\u{1b}[2J"]);
}
