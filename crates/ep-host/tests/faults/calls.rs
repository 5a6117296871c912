//! These tests check the errors of ranks that make different calls, and of calls that a buffer refuses.

use ep::workload::Workload;
use ep::{
    Backend, BackendExt, CallerError, CombineInput, CombineOutput, DispatchInput, DispatchMode,
    DispatchOutput, Error, PeerFault, Probs, Rank, TokenFormat, World,
};
use ep_host::HostBuffer;

use crate::{EXPERTS, HIDDEN, WORLDS, config, on_threads, round};

#[test]
fn ranks_that_pass_different_arguments_get_an_error_that_says_so() {
    for (ranks, domains) in WORLDS {
        let odd = Rank(1);
        let results = on_threads(ranks, domains, |mut buffer| {
            let hidden = if buffer.rank() == odd { 2 * HIDDEN } else { HIDDEN };
            round(&mut buffer, 0, hidden)
        });
        let mut told = 0;
        for (rank, result) in results.into_iter().enumerate() {
            match result.unwrap() {
                Err(Error::Caller(CallerError::Collective { field, mine, theirs, peer, .. })) => {
                    assert_eq!(field, "hidden");
                    assert!([&mine, &theirs].contains(&&(2 * HIDDEN).to_string()));
                    assert!(rank == odd.index() || peer == odd);
                    told += 1;
                }
                Err(Error::Peer(error)) => assert_eq!(error.fault, PeerFault::Failed, "{error}"),
                other => panic!("rank {rank}: {other:?}"),
            }
        }
        assert!(told >= 1, "{ranks} ranks in {domains} domains");
    }
}

/// f32 tokens on one rank and bf16 tokens on another: the error names the types, not a width that follows from them.
#[test]
fn ranks_that_pass_different_types_get_an_error_that_names_the_types() {
    let results = on_threads(2, 1, |mut buffer| {
        let format = if buffer.rank() == Rank(1) { TokenFormat::F32 } else { TokenFormat::Bf16 };
        let routing =
            Workload { tokens: 4, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(buffer.rank());
        let handle = buffer.preprocess(&routing, DispatchMode::Plain, None)?;
        let tokens = buffer.alloc(4 * format.input_row_bytes(HIDDEN))?;
        let input = DispatchInput::new(&tokens, HIDDEN).format(format).probs(Probs::Skip);
        buffer.dispatch_new(&handle, input).map(|_| ())
    });
    let errors: Vec<String> = results.into_iter().map(|r| r.unwrap().unwrap_err().to_string()).collect();
    let says = |error: &String| {
        error.contains("the format of tokens is bf16 on rank 0 and f32 on rank 1")
            || error.contains("the format of tokens is f32 on rank 1 and bf16 on rank 0")
    };
    assert!(errors.iter().all(says), "{errors:?}");
}

#[test]
fn ranks_that_pad_differently_get_an_error_that_names_the_modes() {
    for (other, name) in [
        (DispatchMode::Plain, "plain"),
        (DispatchMode::permuted(16).unwrap(), "permuted with pad_multiple 16"),
    ] {
        let results = on_threads(2, 1, |mut buffer| {
            let mode = if buffer.rank() == Rank(1) { other } else { DispatchMode::permuted(4).unwrap() };
            let routing =
                Workload { tokens: 4, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(buffer.rank());
            buffer.preprocess(&routing, mode, None).map(|_| ())
        });
        let errors: Vec<String> = results.into_iter().map(|r| r.unwrap().unwrap_err().to_string()).collect();
        let (mine, theirs) = ("permuted with pad_multiple 4 on rank 0", format!("{name} on rank 1"));
        assert!(errors.iter().any(|error| error.contains(mine) && error.contains(&theirs)), "{errors:?}");
    }
}

#[test]
fn ranks_that_call_different_operators_get_an_error_that_says_so() {
    let results = on_threads(2, 1, |mut buffer| {
        let routing =
            Workload { tokens: 4, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(buffer.rank());
        let handle = buffer.preprocess(&routing, DispatchMode::Plain, None)?;
        if buffer.rank() == Rank(1) {
            return buffer.preprocess(&routing, DispatchMode::Plain, None).map(|_| ());
        }
        let rows = buffer.receive_shape(&handle)?.allocated_rows();
        let (tokens, mut out) = (buffer.alloc(4 * 2 * HIDDEN)?, buffer.alloc(rows * 2 * HIDDEN)?);
        buffer.dispatch(
            &handle,
            DispatchInput::new(&tokens, HIDDEN).probs(Probs::Skip),
            DispatchOutput::new(&mut out),
        )
    });
    let errors: Vec<String> = results.into_iter().map(|r| r.unwrap().unwrap_err().to_string()).collect();
    assert!(
        errors.iter().any(|e| e.contains("the operator is dispatch (or the backward pass of a combine) on rank 0 and preprocess (the first step")),
        "{errors:?}"
    );
}

#[test]
fn handles_of_another_buffer_are_refused() {
    let mut one =
        HostBuffer::threads(&World::builder().ranks(1).experts(EXPERTS).build().unwrap(), &config())
            .unwrap()
            .remove(0);
    let mut other =
        HostBuffer::threads(&World::builder().ranks(1).experts(EXPERTS).build().unwrap(), &config())
            .unwrap()
            .remove(0);
    let routing = Workload { tokens: 1, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(Rank(0));
    let handle = one.preprocess(&routing, DispatchMode::Plain, None).unwrap();
    let error = other.receive_shape(&handle).unwrap_err().to_string();
    assert!(error.starts_with("handle: it was made by another buffer, of rank 0"), "{error}");
    let rows = one.alloc(2 * HIDDEN).unwrap();
    let mut back = one.alloc(2 * HIDDEN).unwrap();
    let early = one.combine(&handle, CombineInput::new(&rows, HIDDEN), CombineOutput::new(&mut back));
    assert!(early.unwrap_err().to_string().contains("never dispatched"));
}
