//! Ranks as processes: starts them, waits for them, and ends all of them with the job.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Read as _;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ep::join::{Rendezvous as _, Secret, TcpRendezvous};
use ep::{Config, EnvironmentError};

use crate::common::failure::{Failure, Verdict, code};
use crate::common::invocation::Invocation;
use crate::common::threads;

/// Interval at which the launcher polls the ranks.
const POLL: Duration = Duration::from_millis(10);
/// How much longer than the library's bounds the ranks may take to end.
const GRACE: Duration = Duration::from_secs(5);

/// Why the thread of [`end_with_launcher`] could not be started.
static LIFELINE_REFUSED: Mutex<Option<EnvironmentError>> = Mutex::new(None);

/// Runs the same command line as `ranks` processes. Rank 0 writes to this process's stdout, and all ranks write to its
/// stderr.
pub(crate) fn run(invocation: &Invocation, ranks: usize, config: &Config) -> Result<Verdict, Failure> {
    Job::start(invocation, ranks, &[], Stdio::inherit())?.wait(config)
}

/// Runs this process's part of a job. If this part or [`end_with_launcher`] failed, sends the reason to the other ranks.
pub(crate) fn as_rank<T>(
    meet: &mut TcpRendezvous,
    part: impl FnOnce(&mut TcpRendezvous) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let refused = LIFELINE_REFUSED.lock().unwrap_or_else(PoisonError::into_inner).take();
    let outcome = refused.map_or_else(|| part(meet), |error| Err(error.into()));
    outcome.map_err(|failure| match failure {
        Failure::Library(error) => Failure::Library(meet.abandon(error)),
        failure => {
            // The other ranks get the reason; this rank returns its own error unchanged.
            let _ = meet.abandon(EnvironmentError::new("running its part", &failure, "").into());
            failure
        }
    })
}

/// The processes of one job. Dropping the job kills them.
#[derive(Debug)]
pub(crate) struct Job {
    ranks: Vec<Child>,
    /// The stdin pipes of the ranks. They close when this process ends for any reason, and the ranks then end.
    lifelines: Vec<ChildStdin>,
}

impl Job {
    /// Starts the invocation once per rank, with the additional arguments `more`. Only rank 0 gets a stdout.
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
        // The ranks inherit a secret that the user has set.
        let secret = match Secret::from_env()? {
            Some(_) => None,
            None => Some(Secret::random_text()?),
        };
        let mut job = Self { ranks: Vec::with_capacity(ranks), lifelines: Vec::with_capacity(ranks) };
        for rank in 0..ranks {
            let mut command = Command::new(&program);
            if let Some(secret) = &secret {
                command.env("HYBRID_EP_SECRET", secret);
            }
            let mut child = command
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
            // Take the pipe out of the child, because waiting for a child closes its stdin.
            job.lifelines.extend(child.stdin.take());
            job.ranks.push(child);
        }
        Ok(job)
    }

    /// The stdout of rank 0, if the job was started with a pipe.
    pub(crate) fn stdout(&mut self) -> Option<ChildStdout> {
        self.ranks.first_mut()?.stdout.take()
    }

    /// Waits for all ranks. After a rank has ended, the others have limited time and are then killed. After a failure,
    /// the limit is the stall bound, within which the others notice the failure; after a success, it is the entry bound,
    /// since all ranks end at about the same time. [`GRACE`] is added to both, and the earliest limit applies.
    pub(crate) fn wait(mut self, config: &Config) -> Result<Verdict, Failure> {
        let mut ends: Vec<Option<End>> = self.ranks.iter().map(|_| None).collect();
        let mut order = 0;
        let mut deadline: Option<Deadline> = None;
        loop {
            for (rank, (child, end)) in self.ranks.iter_mut().zip(&mut ends).enumerate() {
                if end.is_none()
                    && let Some(status) = child
                        .try_wait()
                        .map_err(|error| Failure::request(format!("waiting for rank {rank}: {error}")))?
                {
                    let by_launcher =
                        deadline.as_ref().filter(|deadline| deadline.done).map(Deadline::reason);
                    *end = Some(End { status, order, by_launcher });
                    order += 1;
                    let next = Deadline::after(rank, status.success(), config);
                    if deadline.as_ref().is_none_or(|now| !now.done && next.at < now.at) {
                        deadline = Some(next);
                    }
                }
            }
            if ends.iter().all(Option::is_some) {
                return judge(&ends.into_iter().flatten().collect::<Vec<_>>());
            }
            if let Some(deadline) =
                deadline.as_mut().filter(|deadline| !deadline.done && Instant::now() >= deadline.at)
            {
                deadline.done = true;
                self.end();
            }
            std::thread::sleep(POLL);
        }
    }

    fn end(&mut self) {
        for child in &mut self.ranks {
            // It is not an error if a rank has already ended, and other errors cannot be handled here.
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

/// Ends this process when its launcher ends, which closes its stdin.
///
/// If the thread for this cannot be started, [`as_rank`] returns the error, because it can send the reason to the other
/// ranks.
pub(crate) fn end_with_launcher() {
    let started = threads::spawn("the thread that ends this rank with its launcher", || {
        let mut stdin = std::io::stdin().lock();
        while !matches!(stdin.read(&mut [0; 64]), Ok(0) | Err(_)) {}
        std::process::exit(code::PEER.into());
    });
    *LIFELINE_REFUSED.lock().unwrap_or_else(PoisonError::into_inner) = started.err();
}

fn this_executable() -> Result<OsString, Failure> {
    std::env::current_exe()
        .map(Into::into)
        .map_err(|error| Failure::request(format!("finding this program to start its ranks: {error}")))
}

/// An address with a free port on this machine.
fn free_address() -> Result<String, Failure> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map(|address| address.to_string())
        .map_err(|error| Failure::request(format!("finding a free port on 127.0.0.1: {error}")))
}

/// When the launcher stops waiting, and why.
#[derive(Debug)]
struct Deadline {
    rank: usize,
    failed: bool,
    bound: Duration,
    at: Instant,
    /// Whether the launcher has killed the remaining ranks.
    done: bool,
}

impl Deadline {
    /// The deadline that follows from the end of this rank.
    fn after(rank: usize, well: bool, config: &Config) -> Self {
        let bound = GRACE + if well { config.timeout } else { config.stall_bound() };
        Self { rank, failed: !well, bound, at: Instant::now() + bound, done: false }
    }

    fn reason(&self) -> String {
        let how = if self.failed { "failed" } else { "ended" };
        format!(
            "killed by this launcher, {:.1} s after rank {} had {how}",
            self.bound.as_secs_f64(),
            self.rank
        )
    }
}

/// How a rank ended.
#[derive(Debug)]
struct End {
    status: ExitStatus,
    /// Number of ranks that ended before this one.
    order: usize,
    /// Why the launcher killed the rank, if it did.
    by_launcher: Option<String>,
}

impl End {
    fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Order in messages: ranks that failed themselves, then ranks that the launcher killed, then ranks that lost a
    /// peer.
    fn class(&self) -> u8 {
        match (&self.by_launcher, self.code()) {
            (Some(_), _) => 1,
            (None, Some(code)) if code == i32::from(code::PEER) => 2,
            (None, _) => 0,
        }
    }

    fn how(&self) -> (bool, String) {
        match (&self.by_launcher, self.status.signal(), self.code()) {
            (Some(reason), ..) => (true, reason.clone()),
            (None, Some(signal), _) => (true, format!("killed by signal {signal}")),
            (None, None, Some(code)) => (false, format!("exited with code {code}")),
            (None, None, None) => (false, self.status.to_string()),
        }
    }
}

/// The outcome of the job. Ranks have printed their own errors; this error says how the ranks ended.
fn judge(ends: &[End]) -> Result<Verdict, Failure> {
    if ends.iter().all(|end| end.status.success()) {
        return Ok(Verdict::Right);
    }
    // The signal of a rank that the launcher killed is not a result of the rank.
    let own: Vec<Option<i32>> = ends.iter().filter(|end| end.by_launcher.is_none()).map(End::code).collect();
    let exited_with = |code: u8| own.contains(&Some(code.into()));
    if own.len() == ends.len()
        && own.iter().all(|code| matches!(code, Some(0 | 1)))
        && exited_with(code::WRONG)
    {
        return Ok(Verdict::Wrong);
    }
    // The most serious code wins: a crash or a wrong result, then an invalid request, then the loss of a peer.
    let code = match () {
        () if !own.iter().all(|code| matches!(code, Some(0..=3))) || exited_with(code::WRONG) => code::WRONG,
        () if exited_with(code::CALLER) => code::CALLER,
        () => code::PEER,
    };
    Err(Failure::Ranks { what: describe(ends), code })
}

/// Describes how the failed ranks ended, the cause first.
fn describe(ends: &[End]) -> String {
    let mut failed: Vec<(usize, &End)> =
        ends.iter().enumerate().filter(|(_, end)| !end.status.success()).collect();
    failed.sort_by_key(|(_, end)| (end.class(), end.order));
    let mut groups: Vec<((bool, String), Vec<usize>)> = Vec::new();
    for (rank, end) in failed {
        let how = end.how();
        match groups.iter_mut().find(|(of, _)| *of == how) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((how, vec![rank])),
        }
    }
    let mut out = String::new();
    for ((passive, how), mut ranks) in groups {
        ranks.sort_unstable();
        let list = ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let (noun, was) = if ranks.len() == 1 { ("rank", "was ") } else { ("ranks", "were ") };
        let was = if passive { was } else { "" };
        let separator = if out.is_empty() { "" } else { "; " };
        // Writing to a string cannot fail.
        let _ = write!(out, "{separator}{noun} {list} {was}{how}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exited(code: i32) -> ExitStatus {
        ExitStatus::from_raw(code << 8)
    }

    fn killed() -> ExitStatus {
        ExitStatus::from_raw(9)
    }

    /// Ranks that ended with these statuses, in this order.
    fn ended(statuses: &[ExitStatus]) -> Vec<End> {
        let end = |(order, &status)| End { status, order, by_launcher: None };
        statuses.iter().enumerate().map(end).collect()
    }

    fn outcome(ends: &[End]) -> (u8, String) {
        let failure = judge(ends).unwrap_err();
        (failure.code(), failure.to_string())
    }

    #[test]
    fn the_cause_determines_the_exit_code() {
        assert_eq!(judge(&ended(&[exited(0), exited(0)])).unwrap(), Verdict::Right);
        assert_eq!(judge(&ended(&[exited(1), exited(0)])).unwrap(), Verdict::Wrong);
        assert_eq!(
            outcome(&ended(&[exited(3), exited(3), killed()])),
            (1, "rank 2 was killed by signal 9; ranks 0, 1 exited with code 3".into())
        );
        assert_eq!(outcome(&ended(&[exited(3), exited(2)])).0, 2);
        assert_eq!(outcome(&ended(&[exited(3), exited(3)])).0, 3);
        assert_eq!(outcome(&ended(&[exited(101), exited(3)])).0, 1);
    }

    #[test]
    fn the_first_failure_is_named_first_and_kills_by_the_launcher_are_marked() {
        let mut ends = ended(&[killed(), exited(3), exited(2)]);
        ends[2].order = 0;
        let reason =
            Deadline { rank: 2, failed: true, bound: Duration::from_secs(7), at: Instant::now(), done: true };
        ends[0].by_launcher = Some(reason.reason());
        assert_eq!(
            outcome(&ends),
            (
                2,
                "rank 2 exited with code 2; rank 0 was killed by this launcher, 7.0 s after rank 2 had failed; rank 1 exited with code 3"
                    .into()
            )
        );
        // The other rank succeeded, so no rank is at fault, but the job is incomplete.
        let mut ends = ended(&[killed(), exited(0)]);
        ends[0].by_launcher = Some(Deadline { rank: 1, failed: false, ..reason }.reason());
        assert_eq!(
            outcome(&ends),
            (3, "rank 0 was killed by this launcher, 7.0 s after rank 1 had ended".into())
        );
        let mut ends = ended(&[exited(2), exited(101)]);
        ends[0].order = 5;
        assert_eq!(outcome(&ends).1, "rank 1 exited with code 101; rank 0 exited with code 2");
    }

    #[test]
    fn a_free_address_can_be_bound() {
        TcpListener::bind(free_address().unwrap()).unwrap();
    }
}
