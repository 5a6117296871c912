//! Helpers to run the program and check its output.
#![allow(dead_code, reason = "every test file uses its part")]

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A benchmark that takes a moment.
pub(crate) const TINY: &[&str] = &[
    "bench",
    "--backend",
    "host",
    "--tokens",
    "24",
    "--hidden",
    "64",
    "--experts",
    "8",
    "--topk",
    "3",
    "--pad",
    "4",
    "--iters",
    "2",
];

/// Exit code and text of a finished run.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Checks that the run ended with this code and with one line on stderr that contains all `parts`.
    #[track_caller]
    pub(crate) fn refused(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("hybrid-ep: error: "), "{self:?}");
        for part in parts {
            assert!(self.stderr.contains(part), "no `{part}` in: {}", self.stderr);
        }
    }

    #[track_caller]
    pub(crate) fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }
}

/// The program, without the variables of this environment that it would read.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hybrid-ep"));
    for (key, _) in std::env::vars_os() {
        let name = key.to_string_lossy();
        if name.starts_with("HYBRID_EP_") || name.starts_with("SLURM_") {
            command.env_remove(&key);
        }
    }
    for key in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(key);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the program with these arguments.
pub(crate) fn run(arguments: &[&str]) -> Finished {
    Finished::of(program().args(arguments).output().unwrap())
}

/// Runs the tiny benchmark with more options, which override its own.
pub(crate) fn tiny(more: &[&str]) -> Finished {
    let given = |option: &str| more.contains(&option);
    let mut arguments = vec![TINY[0]];
    for pair in TINY[1..].chunks(2) {
        let replaced = given(pair[0])
            || given("--routing") && ["--tokens", "--experts", "--topk"].contains(&pair[0])
            || given("plain") && pair[0] == "--pad";
        if !replaced {
            arguments.extend(pair);
        }
    }
    arguments.extend(more);
    run(&arguments)
}

/// Waits for a run that must not hang.
#[track_caller]
pub(crate) fn finish_in_time(mut child: Child) -> Finished {
    let deadline = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it hangs: {:?}", finish(child));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    finish(child)
}

pub(crate) fn finish(child: Child) -> Finished {
    Finished::of(child.wait_with_output().unwrap())
}

/// A temporary directory of one test.
pub(crate) struct Directory(PathBuf);

impl Directory {
    pub(crate) fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("hybrid-ep-{test}-{}", std::process::id()));
        // An explicit mode, because the kernel cache refuses directories that other users can write to.
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// Names of all files in the directory.
    pub(crate) fn names(&self) -> Vec<String> {
        std::fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A recorded routing of two layers and two ranks with `tokens[rank]` tokens and top-2 of 8 experts. `spoil` may change
/// the indices of the last tensor.
pub(crate) fn trace(tokens: [usize; 2], spoil: impl Fn(&mut [i32])) -> Vec<u8> {
    let mut header = serde_json::json!({
        "__metadata__": {
            "format": "hybrid-ep-routing", "version": "1",
            "experts": "8", "topk": "2", "layers": "2", "ranks": "2",
        }
    });
    let mut data: Vec<u8> = Vec::new();
    for layer in 0..2 {
        for (rank, &tokens) in tokens.iter().enumerate() {
            let mut indices: Vec<i32> =
                (0..tokens as i32).flat_map(|t| [t % 8, (t + 1 + layer) % 8]).collect();
            if (layer, rank) == (1, 1) {
                spoil(&mut indices);
            }
            let weights = vec![0.5f32; indices.len()];
            let tensors: [(&str, &str, Vec<u8>); 2] = [
                ("topk_idx", "I32", indices.iter().flat_map(|index| index.to_le_bytes()).collect()),
                ("topk_weights", "F32", weights.iter().flat_map(|weight| weight.to_le_bytes()).collect()),
            ];
            for (name, dtype, bytes) in tensors {
                let start = data.len();
                data.extend(bytes);
                header[format!("layer{layer}.rank{rank}.{name}")] = serde_json::json!({
                    "dtype": dtype, "shape": [tokens, 2], "data_offsets": [start, data.len()],
                });
            }
        }
    }
    let mut header = header.to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}
