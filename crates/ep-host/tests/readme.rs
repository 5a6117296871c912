//! The Rust code in README.md: the program below contains every line of it, in order, and runs.

#![allow(clippy::unwrap_used)]

use ep::{Backend, BackendExt, CombineInput, Config, DispatchInput, DispatchMode, Result, Routing, World};
use ep_host::HostBuffer;

/// Tokens of every rank. Every element of token `t` is `t % 8`, and every token goes to 8 experts.
const TOKENS: usize = 20;

fn program() -> Result<()> {
    // 4 ranks, 2 domains, 64 experts:
    let world = World::builder().ranks(4).domains(2).experts(64).build()?;
    let buffers = HostBuffer::threads(&world, &Config::from_env()?)?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(|| one_rank(buffer))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    })
}

fn one_rank(mut buffer: HostBuffer) -> Result<()> {
    let hidden = 16;
    let value = |token: usize, times: f32| (times * (token % 8) as f32).to_bits().to_le_bytes();
    let rows = |times: f32| -> Vec<u8> {
        (0..TOKENS).flat_map(|token| value(token, times)[2..].repeat(hidden)).collect()
    };
    let topk_idx: Vec<i32> = (0..8 * TOKENS as i32).map(|at| (at / 8 + 7 * (at % 8)) % 64).collect();
    let topk_weights = vec![0.125; topk_idx.len()];
    let mut tokens = buffer.alloc(2 * hidden * TOKENS)?;
    buffer.upload(&rows(1.0), &mut tokens)?;

    // on each rank's thread:
    let routing = Routing::from_topk(buffer.rank(), 64, 8, &topk_idx, &topk_weights)?;
    let handle = buffer.preprocess(&routing, DispatchMode::permuted(16)?, None)?;
    let received = buffer.dispatch_new(&handle, DispatchInput::new(&tokens, hidden))?;
    // ... experts: received.tokens -> outputs ...
    let outputs = received.tokens;
    let combined = buffer.combine_new(&handle, CombineInput::new(&outputs, hidden))?;

    // The experts are the identity, so each token's result is 8 times the token.
    assert_eq!(combined.tokens.as_bytes(), rows(8.0));
    Ok(())
}

#[test]
fn the_rust_of_the_readme_runs() {
    program().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "compares text only, which is slow under Miri")]
fn the_rust_of_the_readme_is_a_part_of_this_program() {
    let readme = include_str!("../../../README.md");
    let mut blocks = readme.split("```rust\n").skip(1).map(|rest| rest.split_once("```").unwrap().0);
    let shown = blocks.next().unwrap();
    assert_eq!(blocks.next(), None, "README.md has more Rust, which no test runs");
    let mut program = include_str!("readme.rs").lines().map(str::trim);
    for line in shown.lines().map(str::trim).filter(|line| !line.is_empty()) {
        assert!(program.any(|ours| ours == line), "not in this program, or out of order: {line}");
    }
}
