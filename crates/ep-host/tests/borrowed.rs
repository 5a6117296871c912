//! A program that writes to memory which it has lent to a combine, after the combine has failed on its rank.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use ep::workload::Workload;
use ep::{
    Backend as _, CombineInput, CombineOutput, Config, DispatchInput, DispatchMode, DispatchOutput, Error,
    Interrupt, PeerFault, Rank, Result, World,
};
use ep_host::{HostBuffer, HostMemory};

const HIDDEN: usize = 64;
const TOKENS: usize = 40;

/// Whether a rank blocks when its operator asks whether to stop, and whether it is blocked.
static BLOCK: [AtomicBool; 4] = [const { AtomicBool::new(false) }; 4];
static BLOCKED: [AtomicBool; 4] = [const { AtomicBool::new(false) }; 4];

thread_local! {
    /// The rank of this thread, if it may block.
    static RANK: Cell<Option<usize>> = const { Cell::new(None) };
}

fn until(flag: &AtomicBool, value: bool) {
    while flag.load(SeqCst) != value {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn block() -> bool {
    if let Some(rank) = RANK.get()
        && BLOCK[rank].load(SeqCst)
    {
        BLOCKED[rank].store(true, SeqCst);
        until(&BLOCK[rank], false);
    }
    false
}

fn config() -> Config {
    let mut config = Config::default();
    config.host.workers = 1;
    config.timeout = Duration::from_secs(60);
    config.stall_timeout = Duration::from_secs(2);
    config.chunk_tokens = 8;
    config.interrupt = Interrupt::new(block);
    config
}

/// Rank 0 is blocked. Rank 1 sends its domain sums, gives up on rank 0, and changes its own expert rows. Rank 0 then
/// continues, and must not send domain sums of the changed rows to rank 2 of the other domain, which does not see the
/// rows.
#[test]
fn no_domain_sum_of_changed_rows_reaches_another_domain() {
    let world = World::builder().ranks(4).domains(2).experts(4).build().unwrap();
    BLOCK[0].store(true, SeqCst);
    let buffers = HostBuffer::threads(&world, &config()).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(|| on_rank(buffer))).collect();
        for rank in ranks {
            rank.join().unwrap();
        }
    });
}

fn on_rank(mut buffer: HostBuffer) {
    let rank = buffer.rank().index();
    let workload = Workload { tokens: TOKENS, experts: 4, topk: 2, skew: 0.0, seed: 1 };
    let mode = DispatchMode::permuted(4).unwrap();
    let handle = buffer.preprocess(&workload.routing(buffer.rank()), mode, None).unwrap();
    let bytes = buffer.receive_shape(&handle).unwrap().allocated_rows() * 2 * HIDDEN;
    let tokens = buffer.alloc(TOKENS * 2 * HIDDEN).unwrap();
    let mut received = buffer.alloc(bytes).unwrap();
    let output = DispatchOutput::new(&mut received);
    buffer.dispatch(&handle, DispatchInput::new(&tokens, HIDDEN).probs(ep::Probs::Skip), output).unwrap();
    received.as_bytes_mut().fill(0x40);
    // Like a tensor of another library in registered memory: the buffer does not see that the program writes to it.
    let start = received.as_bytes_mut().as_mut_ptr();
    // SAFETY: `received` outlives the memory, and only this test writes to it.
    let rows = unsafe { HostMemory::borrowed(start, bytes) };
    let mut out = buffer.alloc(TOKENS * 2 * HIDDEN).unwrap();
    let mut combine = || -> Result<Vec<u8>> {
        buffer.combine(&handle, CombineInput::new(&rows, HIDDEN), CombineOutput::new(&mut out))?;
        Ok(out.as_bytes().to_vec())
    };
    let right = combine().unwrap();

    if rank == 1 {
        // Rank 0 waits for this rank to enter. Ranks 2 and 3 have sent their domain sums when they block.
        until(&BLOCKED[0], true);
        std::thread::sleep(Duration::from_millis(300));
        for other in [2, 3] {
            BLOCK[other].store(true, SeqCst);
            until(&BLOCKED[other], true);
        }
        let Err(Error::Peer(error)) = combine() else { panic!("rank 0 is blocked") };
        assert_eq!((error.peer, error.fault), (Rank(0), PeerFault::Stalled), "{error}");
        // SAFETY: inside `received`. Rank 0 may read it meanwhile, which this test is about.
        unsafe { start.write_bytes(0x3F, bytes) };
        BLOCK[0].store(false, SeqCst);
        return;
    }
    RANK.set(Some(rank));
    let result = combine();
    if rank == 0 {
        BLOCK[2].store(false, SeqCst);
        BLOCK[3].store(false, SeqCst);
    }
    match result {
        Ok(sums) => assert!(rank != 0 && sums == right, "rank {rank} has sums of changed rows"),
        Err(error) => assert!(matches!(error, Error::Peer(_)), "rank {rank}: {error}"),
    }
}
