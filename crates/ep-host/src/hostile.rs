//! Tests with a peer that violates the protocol: this rank reports the violation, names the peer, and accesses no
//! memory outside of the segments.

#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use ep::workload::Workload;
use ep::{
    Backend, CombineInput, CombineOutput, Config, Counts, DispatchInput, DispatchMode, DispatchOutput, Error,
    Operator, PeerError, PeerFault, Probs, Rank, Result, TokenFormat, World,
};

use crate::buffer::HostBuffer;

use crate::comm::Op;
use crate::control::MEMORIES;
use crate::handle::HostHandle;
use crate::memory::HostMemory;
use crate::message::{Format, Header, Sections};
use crate::progress::Idle;
use crate::published::PublishedMemory;
use crate::signature::CollectiveArguments;

const HIDDEN: usize = 64;
const TOKENS: usize = 20;
const EXPERTS: usize = 4;
const CHUNK: usize = 8;

/// Runs `call` on rank 0 and `attack` on rank 1. Returns the error of rank 0, which must name rank 1.
fn reported(
    domains: usize,
    call: impl FnOnce(&mut HostBuffer) -> Result<()> + Send,
    attack: impl FnOnce(&mut HostBuffer),
) -> PeerError {
    let mut config = Config::default();
    config.host.workers = 1;
    config.chunk_tokens = CHUNK;
    let mut buffers = HostBuffer::threads(
        &World::builder().ranks(2).domains(domains).experts(EXPERTS).build().unwrap(),
        &config,
    )
    .unwrap();
    let (mut hostile, mut honest) = (buffers.pop().unwrap(), buffers.pop().unwrap());
    let result = std::thread::scope(|scope| {
        let called = scope.spawn(move || call(&mut honest));
        attack(&mut hostile);
        called.join().unwrap()
    });
    let Err(Error::Peer(error)) = result else { panic!("expected a peer's error, got {result:?}") };
    assert_eq!((error.peer, error.rank, error.fault), (Rank(1), Rank(0), PeerFault::Broken), "{error}");
    error
}

fn preprocess(buffer: &mut HostBuffer) -> Result<HostHandle> {
    let workload = Workload { tokens: TOKENS, experts: EXPERTS, topk: 3, skew: 0.0, seed: 2 };
    buffer.preprocess(&workload.routing(buffer.rank()), DispatchMode::permuted(4).unwrap(), None)
}

fn dispatch(buffer: &mut HostBuffer, handle: &HostHandle) -> Result<crate::HostMemory> {
    let rows = buffer.receive_shape(handle)?.allocated_rows();
    let tokens = buffer.alloc(TOKENS * 2 * HIDDEN)?;
    let mut out = buffer.alloc(rows * 2 * HIDDEN)?;
    let input = DispatchInput::new(&tokens, HIDDEN).probs(Probs::Skip);
    let output = DispatchOutput::new(&mut out);
    buffer.dispatch(handle, input, output)?;
    Ok(out)
}

fn combine(buffer: &mut HostBuffer, handle: &HostHandle, rows: &crate::HostMemory) -> Result<()> {
    let mut tokens = buffer.alloc(TOKENS * 2 * HIDDEN)?;
    let output = CombineOutput::new(&mut tokens);
    buffer.combine(handle, CombineInput::new(rows, HIDDEN), output)
}

fn all_operators(buffer: &mut HostBuffer) -> Result<()> {
    let handle = preprocess(buffer)?;
    let rows = dispatch(buffer, &handle)?;
    combine(buffer, &handle, &rows)
}

/// Calls the operators that precede a dispatch or combine. Returns the step of that operator.
fn call_those_before(buffer: &mut HostBuffer, operator: Operator) -> u64 {
    let handle = preprocess(buffer).unwrap();
    if operator == Operator::Dispatch {
        return 2;
    }
    dispatch(buffer, &handle).unwrap();
    3
}

/// The arguments that both ranks pass to their dispatch or combine.
fn arguments(operator: Operator) -> CollectiveArguments {
    let of_dispatch = operator == Operator::Dispatch;
    CollectiveArguments {
        handle: 1,
        hidden: HIDDEN,
        format: if of_dispatch { TokenFormat::Bf16.link_code() } else { 2 },
        wire: if of_dispatch { 0 } else { 2 },
        probs: false,
        chunk: CHUNK,
    }
}

/// Sends one message of an operator with these numbers in its header; `fill` writes its lists.
fn send(
    hostile: &HostBuffer,
    op: &Op<'_>,
    lists: bool,
    [chunk, tokens, copies]: [usize; 3],
    fill: impl FnOnce(&mut dyn FnMut(usize, &[u32]), &Sections),
) {
    let rails = &hostile.comm().rails;
    let claim = rails.claim_send(0, u64::MAX).expect("a free slot").1;
    let slot = rails.outgoing(claim);
    let format = Format { lists, probs: false, row_bytes: 2 * HIDDEN, scale_bytes: 0 };
    // SAFETY: only this thread writes a claimed slot, which is longer than a header and aligned.
    unsafe { Header::new(op, chunk, tokens, copies).write(slot) };
    if let Some(sections) = format.sections_within(tokens, copies, rails.slot_bytes()) {
        let mut put = |at: usize, words: &[u32]| {
            assert!(at + 4 * words.len() <= rails.slot_bytes());
            // SAFETY: as above, and inside the slot.
            unsafe { slot.add(at).cast::<u32>().copy_from_nonoverlapping(words.as_ptr(), words.len()) };
        };
        fill(&mut put, &sections);
    }
    op.post(&mut Idle::default(), claim, rails.slot_bytes()).unwrap();
}

#[test]
fn counts_of_no_valid_routing_are_reported() {
    let error = reported(
        1,
        |honest| preprocess(honest).map(drop),
        |hostile| {
            // 3 copies for one expert, but no token.
            let mut words = vec![0; Counts::words(&hostile.comm().world)];
            words[1] = 4;
            words[4] = 3;
            hostile.comm().control().publish_counts(0, 1, &words);
        },
    );
    assert!(error.to_string().contains("counts of no valid routing: 0 of 0 tokens for rank 0"), "{error}");
    assert_eq!((error.operator, error.step), (Operator::Preprocess, 1));
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes minutes for the operators of each case")]
fn memory_outside_of_its_segment_is_reported() {
    // Offsets relative to the end of the segment, and lengths.
    let ranges = [[0, 8], [usize::MAX, 8], [4, 0], [usize::MAX - 7, 16], [usize::MAX - 4097, 4096]];
    for range in ranges {
        for operator in [Operator::Dispatch, Operator::Combine] {
            let error = reported(1, all_operators, |hostile| {
                let step = call_those_before(hostile, operator);
                let real = hostile.alloc(4096).unwrap().published_for_writing().unwrap();
                let (offset, len) = (range[0].wrapping_add(real.segment.len), range[1]);
                let published = [Some(PublishedMemory { offset, len, ..real }), None, None, None];
                Op::enter(&hostile.comm, operator, step, arguments(operator), published);
            });
            assert!(error.to_string().contains("published memory of"), "{range:?}: {error}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes minutes for the operators of each case")]
fn memory_that_is_too_short_or_missing_is_reported() {
    for bytes in [0, 2 * HIDDEN - 1] {
        for operator in [Operator::Dispatch, Operator::Combine] {
            // The hostile rank keeps its memory while the other rank runs.
            let kept: Mutex<Option<HostMemory>> = Mutex::new(None);
            let error = reported(1, all_operators, |hostile| {
                let step = call_those_before(hostile, operator);
                let memory = hostile.alloc(bytes).unwrap();
                let published = [memory.published_for_writing().filter(|_| bytes > 0), None, None, None];
                Op::enter(&hostile.comm, operator, step, arguments(operator), published);
                *kept.lock().unwrap() = Some(memory);
            });
            assert!(error.to_string().contains("no element"), "{bytes}: {error}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes minutes for the operators of each case")]
fn invalid_messages_of_a_dispatch_are_reported() {
    type Fill = fn(&mut dyn FnMut(usize, &[u32]), &Sections);
    let nothing: Fill = |_, _| {};
    let one: Fill = |put, sections| {
        put(sections.index, &[0]);
        put(sections.ends, &[1]);
        put(sections.copies, &[0, u32::MAX]);
    };
    let cases: [([usize; 3], Fill, &str); 7] = [
        ([5, 0, 0], nothing, "a message of chunk 5 where chunk 0 is due"),
        ([0, u32::MAX as usize, 1], nothing, "more than a slot of"),
        ([0, 1, u32::MAX as usize], nothing, "more than a slot of"),
        ([0, 1, 1], nothing, "copies 0..0 of a token"),
        ([0, 1, 1], one, "no element 4294967295"),
        (
            [0, 1, 1],
            |put, sections| {
                put(sections.index, &[CHUNK as u32]);
                put(sections.ends, &[1]);
            },
            "token 8 in a message, where one of 0..8 is due",
        ),
        (
            [0, 1, 1],
            |put, sections| {
                put(sections.ends, &[1]);
                // An expert of rank 1's own domain.
                put(sections.copies, &[2, 0]);
            },
            "expert position 2, where one of 0..2 is due",
        ),
    ];
    for (numbers, fill, text) in cases {
        let error = reported(
            2,
            |honest| {
                let handle = preprocess(honest)?;
                dispatch(honest, &handle).map(drop)
            },
            |hostile| {
                preprocess(hostile).unwrap();
                let op = Op::enter(
                    &hostile.comm,
                    Operator::Dispatch,
                    2,
                    arguments(Operator::Dispatch),
                    [None; MEMORIES],
                );
                send(hostile, &op, true, numbers, fill);
            },
        );
        assert!(error.to_string().contains(text), "{numbers:?}: {error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes minutes for the operators of each case")]
fn messages_that_do_not_match_the_handle_are_reported() {
    for (operator, numbers) in [
        (Operator::Dispatch, [0, 1, 1]),
        (Operator::Dispatch, [0, 0, 0]),
        (Operator::Dispatch, [1, CHUNK, 3 * CHUNK]),
        (Operator::Combine, [0, 0, 0]),
        (Operator::Combine, [0, 1, 1]),
        (Operator::Combine, [1, CHUNK, 3 * CHUNK]),
        (Operator::Combine, [0, u32::MAX as usize, 0]),
    ] {
        let error = reported(
            2,
            |honest| {
                let handle = preprocess(honest)?;
                let rows = dispatch(honest, &handle)?;
                match operator {
                    Operator::Dispatch => dispatch(honest, &handle).map(drop),
                    _ => combine(honest, &handle, &rows),
                }
            },
            |hostile| {
                let handle = preprocess(hostile).unwrap();
                dispatch(hostile, &handle).unwrap();
                let op = Op::enter(&hostile.comm, operator, 3, arguments(operator), [None; MEMORIES]);
                send(hostile, &op, false, numbers, |_, _| {});
            },
        );
        assert_eq!((error.operator, error.step), (operator, 3), "{error}");
    }
}
