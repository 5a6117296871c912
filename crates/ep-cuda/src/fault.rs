//! Converts a kernel's fault report to an error that names the rank at fault.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ep::error::RoutingProblem;
use ep::join::Machines;
use ep::{CallerError, Config, Error, PeerError, PeerFault, Rank, Result};

use crate::beat::Hearts;
use crate::call;
use crate::driver::{Device, DeviceAddress, HostWords as _, Mapped};
use crate::params::{Fault, FaultKind, FaultRecord, FaultReport, NONE, REPORT_WORDS, WaitingFor};

/// The host memory to which the kernels of a rank report its first fault, and what is needed to describe the fault.
#[derive(Debug)]
pub(crate) struct Faults {
    report: Arc<Report>,
    words: Words,
    /// Heartbeats of the other ranks; `None` if ranks are threads.
    hearts: Option<Arc<Hearts>>,
}

/// The host memory of a [`FaultReport`].
#[derive(Debug)]
pub(crate) struct Report(Mapped);

impl Report {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        Mapped::new(device, REPORT_WORDS).map(Self)
    }

    /// What the rank's kernels have reported; `None` without a fault.
    pub(crate) fn read(&self) -> Option<FaultReport> {
        // The kind is the first word, and kernels write it last.
        if self.0.read(0) == FaultKind::None as u32 {
            return None;
        }
        fence(Ordering::Acquire);
        let words: Vec<u32> = (0..REPORT_WORDS).map(|at| self.0.read(at)).collect();
        Some(bytemuck::pod_read_unaligned(bytemuck::cast_slice(&words)))
    }
}

/// Facts for error texts that are not in the report.
#[derive(Debug)]
pub(crate) struct Words {
    experts: usize,
    machines: Machines,
    config: Config,
}

impl Faults {
    pub(crate) fn new(
        report: Arc<Report>,
        experts: usize,
        machines: Machines,
        config: &Config,
        hearts: Option<Arc<Hearts>>,
    ) -> Self {
        Self { report, words: Words::new(experts, machines, config), hearts }
    }

    /// The address of the [`FaultReport`], for kernels.
    pub(crate) fn address(&self) -> DeviceAddress {
        self.report.0.address()
    }

    /// The first fault of the rank, if there is one.
    pub(crate) fn read(&self) -> Option<Error> {
        let report = self.report.read()?;
        let quiet = self.hearts.as_ref().map_or_else(Vec::new, |hearts| hearts.quiet());
        self.words.error(&report, &quiet)
    }
}

impl Words {
    pub(crate) fn new(experts: usize, machines: Machines, config: &Config) -> Self {
        Self { experts, machines, config: config.clone() }
    }

    /// `quiet`: the ranks whose processes seem to be stopped.
    pub(crate) fn error(&self, FaultReport { own, theirs }: &FaultReport, quiet: &[Rank]) -> Option<Error> {
        let own = &stopped_instead(own, quiet);
        let kind = FaultKind::of(own.fault.kind)?;
        // If calls differ, all ranks report the difference, also those whose own call equals that of the reporting
        // rank.
        if kind == FaultKind::Aborted && theirs.fault.kind == FaultKind::Mismatch as u32 {
            return self.of_record(theirs);
        }
        let mut error = self.of_record(own)?;
        if let Error::Peer(error) = &mut error {
            if error.fault == PeerFault::Late && quiet.contains(&error.peer) {
                error.fault = PeerFault::Stalled;
            }
            if matches!(error.fault, PeerFault::Late | PeerFault::Stalled) {
                error.waited_for = format!("{}; {}", error.waited_for, self.config.bounds(error.fault));
            }
            if kind == FaultKind::Aborted && Rank(theirs.fault.rank) == error.peer {
                error.cause = self.of_record(theirs).map(|cause| cause.to_string());
            }
        }
        Some(error)
    }

    /// The error of a record, which may be that of another rank.
    fn of_record(&self, FaultRecord { fault, call, peer_call }: &FaultRecord) -> Option<Error> {
        let (rank, peer) = (Rank(fault.rank), Rank(fault.peer));
        let operator = call::operator(fault.operation.into());
        let (row, expert) = (fault.index as usize, fault.seen);
        let routing = |problem| CallerError::Routing { rank, row, problem }.into();
        let kind = match FaultKind::of(fault.kind)? {
            FaultKind::None => return None,
            FaultKind::Mismatch => {
                let (field, mine, theirs) = call::difference(call, peer_call);
                return Some(CallerError::Collective { operator, field, rank, mine, peer, theirs }.into());
            }
            FaultKind::Index => {
                let index = i64::from(expert as i32);
                return Some(routing(RoutingProblem::IndexOutOfRange { index, experts: self.experts }));
            }
            FaultKind::Duplicate => return Some(routing(RoutingProblem::DuplicateExpert(expert))),
            FaultKind::Nan => return Some(routing(RoutingProblem::NanWeight(expert))),
            FaultKind::TooManyRows => {
                let (rank, rows, experts) = (peer, fault.index, fault.expected.into());
                let problem = if experts == 0 {
                    CallerError::TooManyRows { rank, rows }
                } else {
                    CallerError::TooManyWeights { rank, rows, experts }
                };
                return Some(problem.into());
            }
            FaultKind::TooManyCopies => {
                let (expected, found) = (fault.expected as usize, fault.index as usize);
                return Some(
                    CallerError::Shape { what: "routing", expected, found, unit: "choices at most" }.into(),
                );
            }
            FaultKind::ShortLane => {
                let problem = format!(
                    "the domain sums that rank {rank} sends to another NVLink domain need {} bytes; raise it on any rank (in \
                     Python: `max_hidden`), or use fewer tokens or a smaller hidden",
                    fault.index
                );
                let (key, value) = ("HYBRID_EP_CUDA_LANE_BYTES", self.config.cuda.lane_bytes.to_string());
                return Some(CallerError::Config { key, value, problem }.into());
            }
            FaultKind::RailCopies => {
                let problem = format!(
                    "the tokens of rank {rank} have {} choices of experts in another NVLink domain, and {} are possible; \
                     raise the setting on any rank, or use fewer tokens",
                    fault.index, fault.expected
                );
                let (key, value) = ("HYBRID_EP_CUDA_RAIL_CHOICES", self.config.cuda.rail_choices.to_string());
                return Some(CallerError::Config { key, value, problem }.into());
            }
            FaultKind::Aborted => FaultKind::of(fault.cause).unwrap_or(FaultKind::Aborted),
            kind => kind,
        };
        Some(Error::Peer(PeerError {
            machine: self.machines.name_of(peer).map(String::from),
            peer,
            fault: became(kind),
            operator,
            step: fault.step.into(),
            rank,
            waited_for: self.waited_for(fault, kind, operator),
            waited: Duration::from_nanos(fault.waited_ns),
            cause: None,
        }))
    }

    fn waited_for(&self, fault: &Fault, kind: FaultKind, operator: ep::Operator) -> String {
        let &Fault { peer, awaited, expected, seen, index, .. } = fault;
        if awaited == NONE {
            return "nothing: another rank had reported the fault before".into();
        }
        let of = if awaited == peer { "its".into() } else { format!("rank {awaited}'s") };
        let it = if awaited == peer { "it".into() } else { format!("rank {awaited}") };
        let what = match WaitingFor::of(fault.waiting_for) {
            Some(WaitingFor::Handshake) => {
                format!("{of} handshake (expected #{expected}, seen #{seen})")
            }
            Some(WaitingFor::Chunk) => {
                format!("{of} chunk {index} (expected #{expected}, seen #{seen})")
            }
            Some(WaitingFor::Rail) => {
                format!("{of} rows along the rail, chunk {index} (expected #{expected}, seen #{seen})")
            }
            Some(WaitingFor::Foreign) => {
                format!(
                    "what {it} sends once it has the other NVLink domains' data (expected #{expected}, seen #{seen})"
                )
            }
            _ => format!("the blocks of its own kernel ({seen} of {expected} arrived)"),
        };
        match kind {
            FaultKind::Late => format!("{what}; rank {peer} has not entered {operator} #{}", fault.step),
            FaultKind::Silent => format!("{what}; rank {peer} has no heartbeat"),
            _ => what,
        }
    }
}

/// Names a stopped rank in place of a late or stalled rank whose process runs: the latter only waits for the stopped rank.
fn stopped_instead(record: &FaultRecord, quiet: &[Rank]) -> FaultRecord {
    let fault = record.fault;
    let told = fault.kind == FaultKind::Aborted as u32;
    let found = if told { fault.cause } else { fault.kind };
    let slow = found == FaultKind::Late as u32 || found == FaultKind::Stalled as u32;
    match quiet.first() {
        Some(stopped) if slow && !quiet.contains(&Rank(fault.peer)) => {
            let stalled = FaultKind::Stalled as u32;
            let (kind, cause) = if told { (fault.kind, stalled) } else { (stalled, fault.cause) };
            FaultRecord { fault: Fault { kind, cause, peer: stopped.0, ..fault }, ..*record }
        }
        _ => *record,
    }
}

/// The fault of a peer, from the kind that the waiting rank has recorded.
fn became(kind: FaultKind) -> PeerFault {
    match kind {
        FaultKind::Stalled | FaultKind::Silent => PeerFault::Stalled,
        FaultKind::Late => PeerFault::Late,
        FaultKind::Left => PeerFault::Left,
        FaultKind::Died => PeerFault::Died,
        FaultKind::Unreachable => PeerFault::Unreachable,
        _ => PeerFault::Failed,
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;
    use ep::{Element, Operator};

    use super::*;
    use crate::call::Call;

    fn said(own: FaultRecord, theirs: FaultRecord, quiet: &[Rank]) -> String {
        let words = Words::new(8, Machines::one(3), &Config::default());
        words.error(&FaultReport { own, theirs }, quiet).unwrap().to_string()
    }

    fn alone(fault: Fault) -> String {
        said(record(fault), FaultRecord::zeroed(), &[])
    }

    fn record(fault: Fault) -> FaultRecord {
        FaultRecord { fault, ..FaultRecord::zeroed() }
    }

    /// Rank 0 waited for a chunk of rank 2 in its 7th operator.
    fn waited(kind: FaultKind) -> Fault {
        Fault {
            kind: kind as u32,
            peer: 2,
            waiting_for: WaitingFor::Chunk as u32,
            step: 7,
            expected: 7,
            seen: 6,
            index: 17,
            waited_ns: 1_500_000_000,
            operation: Operator::Combine as u32,
            awaited: 2,
            cause: 0,
            rank: 0,
        }
    }

    fn bounds(fault: PeerFault) -> String {
        Config::default().bounds(fault)
    }

    #[test]
    fn the_rank_at_fault_and_the_awaited_rank_may_differ() {
        assert_eq!(
            alone(waited(FaultKind::Stalled)),
            format!(
                "rank 2 stalled (combine #7): rank 0 waited 1.500 s for its chunk 17 (expected #7, seen #6); {}",
                bounds(PeerFault::Stalled)
            )
        );
        // Rank 2 is gone, so rank 1 gave up, whose chunk this rank needs.
        let gone = Fault { awaited: 1, cause: FaultKind::Died as u32, ..waited(FaultKind::Aborted) };
        assert_eq!(
            alone(gone),
            "rank 2 died (combine #7): rank 0 waited 1.500 s for rank 1's chunk 17 (expected #7, seen #6); its process \
             crashed or was killed: see its output and the system's log"
        );
        let told = Fault { awaited: NONE, cause: FaultKind::Aborted as u32, waited_ns: 0, ..gone };
        assert_eq!(
            alone(told),
            "rank 2 failed (combine #7): rank 0 was waiting for nothing: another rank had reported the fault before"
        );
        let words = Words::new(8, Machines::one(3), &Config::default());
        assert_eq!(words.error(&FaultReport::zeroed(), &[]), None);
    }

    #[test]
    fn what_cannot_be_numbered_is_named() {
        let many = |expected| Fault { expected, index: 1 << 33, ..waited(FaultKind::TooManyRows) };
        let rows = "rank 2 would receive 8589934592 rows";
        assert_eq!(alone(many(0)), format!("{rows}; at most 4294967295 can be numbered; use fewer tokens"));
        let weights = "at most 4294967295 weights can be numbered; use fewer tokens, or the permuted mode";
        assert_eq!(alone(many(6)), format!("{rows} of 6 weights each; {weights}"));
    }

    #[test]
    fn a_late_rank_is_not_a_stalled_one() {
        let late = Fault { waiting_for: WaitingFor::Handshake as u32, ..waited(FaultKind::Late) };
        let handshake = "rank 0 waited 1.500 s for its handshake (expected #7, seen #6)";
        assert_eq!(
            alone(late),
            format!(
                "rank 2 is late (combine #7): {handshake}; rank 2 has not entered combine #7; {}",
                bounds(PeerFault::Late)
            )
        );
        let silent = Fault { kind: FaultKind::Silent as u32, ..late };
        assert_eq!(
            alone(silent),
            format!(
                "rank 2 stalled (combine #7): {handshake}; rank 2 has no heartbeat; {}",
                bounds(PeerFault::Stalled)
            )
        );
        // If both bounds are equal, the kernel may give up shortly before the host notices the silence.
        let text = said(record(late), FaultRecord::zeroed(), &[Rank(2)]);
        assert!(text.starts_with("rank 2 stalled (combine #7): "), "{text}");
        // Other ranks report the cause that the waiting rank has found.
        let told = Fault { awaited: 1, cause: FaultKind::Late as u32, ..waited(FaultKind::Aborted) };
        assert!(alone(told).starts_with("rank 2 is late (combine #7): "), "{}", alone(told));
    }

    /// Rank 1 is stopped. Rank 2, for whose chunk this rank waits, waits for rank 1.
    #[test]
    fn a_stopped_rank_is_named_instead_of_one_that_waits_for_it() {
        let stalled = waited(FaultKind::Stalled);
        let expected = format!(
            "rank 1 stalled (combine #7): rank 0 waited 1.500 s for rank 2's chunk 17 (expected #7, seen #6); {}",
            bounds(PeerFault::Stalled)
        );
        assert_eq!(said(record(stalled), FaultRecord::zeroed(), &[Rank(1)]), expected);
        let late = Fault { waiting_for: WaitingFor::Handshake as u32, ..waited(FaultKind::Late) };
        let text = said(record(late), FaultRecord::zeroed(), &[Rank(1)]);
        assert!(
            text.starts_with("rank 1 stalled (combine #7): rank 0 waited 1.500 s for rank 2's handshake"),
            "{text}"
        );
        assert!(!text.contains("has not entered"), "{text}");
        let told = Fault { cause: FaultKind::Late as u32, ..waited(FaultKind::Aborted) };
        let text = said(record(told), FaultRecord::zeroed(), &[Rank(1)]);
        assert!(text.starts_with("rank 1 stalled (combine #7): "), "{text}");
        // Two ranks are stopped, and one of them was named; a rank that died or failed remains the cause.
        assert!(
            said(record(stalled), FaultRecord::zeroed(), &[Rank(1), Rank(2)]).starts_with("rank 2 stalled")
        );
        for kind in [FaultKind::Died, FaultKind::Left, FaultKind::Nan] {
            let fault = Fault { cause: kind as u32, ..waited(FaultKind::Aborted) };
            assert!(said(record(fault), FaultRecord::zeroed(), &[Rank(1)]).starts_with("rank 2 "));
        }
    }

    #[test]
    fn the_error_of_a_rank_that_failed_is_quoted() {
        let told = Fault { cause: FaultKind::Aborted as u32, ..waited(FaultKind::Aborted) };
        let theirs = Fault { rank: 2, peer: 2, seen: 3, index: 5, ..waited(FaultKind::Nan) };
        let text = said(record(told), record(theirs), &[]);
        let end = "; its error: routing of rank 2, row 5: the weight of expert 3 is NaN";
        assert!(
            text.starts_with("rank 2 failed (combine #7): rank 0 waited 1.500 s for its chunk 17"),
            "{text}"
        );
        assert!(text.ends_with(end), "{text}");
        // The record of a third rank is not the error of the rank at fault.
        let text = said(record(told), record(Fault { rank: 1, ..waited(FaultKind::Stalled) }), &[]);
        assert!(!text.contains("its error"), "{text}");
    }

    #[test]
    fn all_ranks_report_the_argument_that_differs() {
        let [mine, other] = [Element::Bf16, Element::F32];
        let call = |element| Call::combine(1, 64, element, Element::Bf16, false).words;
        let fault = Fault { rank: 1, ..waited(FaultKind::Mismatch) };
        let mismatch = FaultRecord { fault, call: call(mine), peer_call: call(other) };
        let expected = "operator combine: type of rows is bf16 on rank 1 and f32 on rank 2; it must be the same on every rank";
        assert_eq!(said(mismatch, FaultRecord::zeroed(), &[]), expected);
        let told = Fault { cause: FaultKind::Aborted as u32, ..waited(FaultKind::Aborted) };
        assert_eq!(said(record(told), mismatch, &[]), expected);
    }
}
