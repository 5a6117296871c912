//! Checks that the constants of `docs/tuning.md` are in the files that it names.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;
use std::path::Path;

/// The sections with a table of constants, and the folder that their paths begin at.
const SECTIONS: [(&str, &str); 3] = [
    ("## GPU kernels", "crates/ep-cuda"),
    ("## Host backend", "crates/ep-host"),
    ("## Waiting, heartbeats and joining", "crates"),
];

/// The parts of a text that stand in backticks.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Whether a source contains a name as a whole word.
fn has(source: &str, name: &str) -> bool {
    let identifier = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    source.match_indices(name).any(|(at, _)| {
        let (before, after) = (&source[..at], &source[at + name.len()..]);
        !before.bytes().next_back().is_some_and(identifier) && !after.bytes().next().is_some_and(identifier)
    })
}

#[test]
fn every_constant_of_the_guide_is_in_the_file_that_it_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let guide = fs::read_to_string(root.join("docs/tuning.md")).unwrap();
    let mut wrong = Vec::new();
    for (heading, folder) in SECTIONS {
        let (_, section) = guide.split_once(heading).unwrap_or_else(|| panic!("no section {heading}"));
        let section = section.split("\n## ").next().unwrap();
        let mut files: Vec<&str> = Vec::new();
        let mut checked = 0;
        for row in section.lines().filter(|line| line.starts_with("| ")) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let [_, names, _, place, ..] = cells[..] else { panic!("{heading}: {row}") };
            if place == "where" {
                continue;
            }
            if place != "the same" {
                files = code(place).collect();
            }
            let sources: Vec<String> =
                files.iter().map(|file| fs::read_to_string(root.join(folder).join(file)).unwrap()).collect();
            assert!(!sources.is_empty(), "{heading}: no file: {row}");
            for name in code(names).map(|name| name.rsplit("::").next().unwrap()) {
                checked += 1;
                if !sources.iter().any(|source| has(source, name)) {
                    wrong.push(format!("`{name}` is not in {folder}: {files:?}"));
                }
            }
        }
        assert!(checked > 4, "{heading}: {checked} constants");
    }
    assert!(wrong.is_empty(), "docs/tuning.md:\n{}", wrong.join("\n"));
}
