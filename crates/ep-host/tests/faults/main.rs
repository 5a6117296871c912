//! These tests check faults: when a rank leaves, stalls, dies, or makes a different call from the others, every other
//! rank gets a typed error that names it within the bounds, and no resource outlives the processes.

#![allow(clippy::unwrap_used)]

mod calls;
mod late;
#[cfg(target_os = "linux")]
#[path = "../leftovers/mod.rs"]
mod leftovers;
mod lost;
#[cfg(target_os = "linux")]
mod processes;

use std::time::Duration;

use ep::workload::Workload;
use ep::{
    Backend, CombineInput, CombineOutput, Config, DispatchInput, DispatchMode, DispatchOutput, Error,
    PeerError, Probs, Result, World,
};
use ep_host::HostBuffer;

const TIMEOUT: Duration = Duration::from_millis(1500);
/// Far beyond the timeout, even on a busy machine. A test that takes longer counts as hung.
const HANGS: Duration = Duration::from_secs(30);
const EXPERTS: usize = 8;
const TOKENS: usize = 100;
const HIDDEN: usize = 64;

fn config() -> Config {
    let mut config = Config::default();
    config.timeout = TIMEOUT;
    config.chunk_tokens = 8;
    config.host.slots = 2;
    config
}

/// One round: preprocess, dispatch and combine, with this width.
fn round(buffer: &mut HostBuffer, seed: u64, hidden: usize) -> Result<()> {
    let routing =
        Workload { tokens: TOKENS, experts: EXPERTS, topk: 3, skew: 0.5, seed }.routing(buffer.rank());
    let handle = buffer.preprocess(&routing, DispatchMode::permuted(4).unwrap(), None)?;
    let rows = buffer.receive_shape(&handle)?.allocated_rows();
    let tokens = buffer.alloc(TOKENS * 2 * hidden)?;
    let mut out = buffer.alloc(rows * 2 * hidden)?;
    buffer.dispatch(
        &handle,
        DispatchInput::new(&tokens, hidden).probs(Probs::Skip),
        DispatchOutput::new(&mut out),
    )?;
    let mut back = buffer.alloc(TOKENS * 2 * hidden)?;
    buffer.combine(&handle, CombineInput::new(&out, hidden), CombineOutput::new(&mut back))
}

/// Runs `body` on one thread per rank and returns the results, by rank.
fn on_threads<T: Send>(
    ranks: usize,
    domains: usize,
    body: impl Fn(HostBuffer) -> T + Sync,
) -> Vec<std::thread::Result<T>> {
    let buffers = HostBuffer::threads(
        &World::builder().ranks(ranks).domains(domains).experts(EXPERTS).build().unwrap(),
        &config(),
    )
    .unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(|| body(buffer))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    })
}

fn peer_error(result: Result<()>) -> PeerError {
    match result {
        Err(Error::Peer(error)) => error,
        other => panic!("expected a peer error, got {other:?}"),
    }
}

/// Runs rounds until the first error.
fn until_error(buffer: &mut HostBuffer) -> Result<()> {
    (0..).try_for_each(|seed| round(buffer, seed, HIDDEN))
}

const WORLDS: [(usize, usize); 4] = [(2, 1), (4, 1), (4, 2), (4, 4)];
