//! Ranks as processes: starting them, waiting for them, and never leaving one behind.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Read as _;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::Invocation;
use crate::failure::{Failure, Verdict, code};

/// Pause between looks at the ranks.
const LOOK: Duration = Duration::from_millis(10);
/// How much longer than the library's timeout the surviving ranks may take to end.
const GRACE: Duration = Duration::from_secs(5);

/// Runs this same command line as `ranks` processes, which write to this process's stdout and stderr.
pub(crate) fn run(invocation: &Invocation, ranks: usize, timeout: Duration) -> Result<Verdict, Failure> {
    Job::start(invocation, ranks, &[], Stdio::inherit())?.wait(timeout)
}

/// The processes of one job; dropped, they end.
#[derive(Debug)]
pub(crate) struct Job {
    ranks: Vec<Child>,
    /// The children watch the other ends of these: they see when this process is gone, however it went.
    lifelines: Vec<ChildStdin>,
}

impl Job {
    /// Starts the same once per rank, with its own arguments and `more`. Only rank 0 has a stdout.
    pub(crate) fn start(
        invocation: &Invocation,
        ranks: usize,
        more: &[OsString],
        mut stdout: Stdio,
    ) -> Result<Self, Failure> {
        let (program, first) = match invocation.command.split_first() {
            Some((program, first)) => (program.clone(), first),
            None => (this_executable()?, &[][..]),
        };
        let store = free_address()?;
        let mut job = Self { ranks: Vec::with_capacity(ranks), lifelines: Vec::with_capacity(ranks) };
        for rank in 0..ranks {
            let mut child = Command::new(&program)
                .args(first)
                .args(&invocation.arguments)
                .args(more)
                .arg("--launched")
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("HYBRID_EP_STORE", &store)
                .stdin(Stdio::piped())
                .stdout(std::mem::replace(&mut stdout, Stdio::null()))
                .spawn()
                .map_err(|error| {
                    Failure::request(format!("starting rank {rank} of {ranks}: {error}; use fewer --ranks"))
                })?;
            // Taken out, since waiting for a child closes the stdin that it holds.
            job.lifelines.extend(child.stdin.take());
            job.ranks.push(child);
        }
        Ok(job)
    }

    /// What rank 0 writes, when it was started with a pipe.
    pub(crate) fn stdout(&mut self) -> Option<ChildStdout> {
        self.ranks.first_mut()?.stdout.take()
    }

    /// Waits for all ranks. When one fails, the others end by themselves: the library tells them within `timeout`.
    pub(crate) fn wait(mut self, timeout: Duration) -> Result<Verdict, Failure> {
        let mut ends: Vec<Option<ExitStatus>> = vec![None; self.ranks.len()];
        let mut give_up: Option<Instant> = None;
        while ends.iter().any(Option::is_none) {
            for (rank, (child, end)) in self.ranks.iter_mut().zip(&mut ends).enumerate() {
                if end.is_none() {
                    *end = child
                        .try_wait()
                        .map_err(|error| Failure::request(format!("waiting for rank {rank}: {error}")))?;
                }
            }
            if ends.iter().flatten().any(|end| !end.success()) {
                let give_up = *give_up.get_or_insert_with(|| Instant::now() + timeout + GRACE);
                if Instant::now() >= give_up {
                    self.end();
                }
            }
            std::thread::sleep(LOOK);
        }
        judge(&ends.into_iter().flatten().collect::<Vec<_>>())
    }

    fn end(&mut self) {
        for child in &mut self.ranks {
            // One that has ended already is no error, and there is nobody to tell of another.
            let _ = child.kill();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.lifelines.clear();
        self.end();
        for child in &mut self.ranks {
            let _ = child.wait();
        }
    }
}

/// A rank that a launcher of ours started ends when that launcher does: its stdin then ends.
pub(crate) fn end_with_launcher() {
    std::thread::spawn(|| {
        let mut stdin = std::io::stdin().lock();
        while !matches!(stdin.read(&mut [0; 64]), Ok(0) | Err(_)) {}
        std::process::exit(code::PEER.into());
    });
}

fn this_executable() -> Result<OsString, Failure> {
    std::env::current_exe()
        .map(Into::into)
        .map_err(|error| Failure::request(format!("finding this program to start its ranks: {error}")))
}

/// An address on this machine that nothing listens at.
fn free_address() -> Result<String, Failure> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map(|address| address.to_string())
        .map_err(|error| Failure::request(format!("finding a free port on 127.0.0.1: {error}")))
}

/// The job's outcome. What a rank could say itself it has said; how ranks ended is said here.
fn judge(ends: &[ExitStatus]) -> Result<Verdict, Failure> {
    if ends.iter().all(ExitStatus::success) {
        return Ok(Verdict::Right);
    }
    let exited_with = |code: u8| ends.iter().any(|end| end.code() == Some(code.into()));
    let told = |end: &ExitStatus| matches!(end.code(), Some(0 | 1));
    if ends.iter().all(told) && exited_with(code::WRONG) {
        return Ok(Verdict::Wrong);
    }
    // Whoever met a dead peer, or a failed one, is not the cause: the first of these that is there is.
    let own_codes = |end: &ExitStatus| matches!(end.code(), Some(0..=3));
    let code = match () {
        () if !ends.iter().all(own_codes) || exited_with(code::WRONG) => code::WRONG,
        () if exited_with(code::CALLER) => code::CALLER,
        () => code::PEER,
    };
    Err(Failure::Ranks { what: describe(ends), code })
}

/// How the ranks ended that did not end well, those killed first.
fn describe(ends: &[ExitStatus]) -> String {
    let mut groups: Vec<(ExitStatus, Vec<usize>)> = Vec::new();
    for (rank, &end) in ends.iter().enumerate().filter(|(_, end)| !end.success()) {
        match groups.iter_mut().find(|(of, _)| *of == end) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((end, vec![rank])),
        }
    }
    groups.sort_by_key(|(end, _)| end.signal().is_none());
    let mut out = String::new();
    for (end, ranks) in groups {
        let list = ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let (noun, was) = if ranks.len() == 1 { ("rank", "was") } else { ("ranks", "were") };
        let how = match (end.signal(), end.code()) {
            (Some(signal), _) => format!("{was} killed by signal {signal}"),
            (None, Some(code)) => format!("exited with code {code}"),
            (None, None) => end.to_string(),
        };
        let separator = if out.is_empty() { "" } else { "; " };
        // Writing to a string cannot fail.
        let _ = write!(out, "{separator}{noun} {list} {how}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exited(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    fn outcome(ends: &[ExitStatus]) -> (u8, String) {
        let failure = judge(ends).unwrap_err();
        (failure.code(), failure.to_string())
    }

    #[test]
    fn the_cause_gives_the_code() {
        let killed = ExitStatus::from_raw(9);
        assert_eq!(judge(&[exited(0), exited(0)]).unwrap(), Verdict::Right);
        assert_eq!(judge(&[exited(1), exited(0)]).unwrap(), Verdict::Wrong);
        assert_eq!(
            outcome(&[exited(3), exited(3), killed]),
            (1, "rank 2 was killed by signal 9; ranks 0, 1 exited with code 3".into())
        );
        assert_eq!(outcome(&[exited(3), exited(2)]).0, 2);
        assert_eq!(outcome(&[exited(3), exited(3)]).0, 3);
        assert_eq!(outcome(&[exited(101), exited(3)]).0, 1);
    }

    #[test]
    fn a_free_address_can_be_bound() {
        TcpListener::bind(free_address().unwrap()).unwrap();
    }
}
