//! Compiles `device/dense.cu` as C++ for the CPU, runs its lanes one after the other, and compares with the definition.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// The lanes do not communicate, so they can run one after the other.
const PROGRAM: &str = r#"
#include <cstdio>
#include <vector>
#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__
struct Index { unsigned x; };
static Index blockIdx, threadIdx, blockDim, gridDim;
static unsigned __umulhi(unsigned a, unsigned b) { return (static_cast<unsigned long long>(a) * b) >> 32; }
#include "dense.cu"

// Deterministic numbers: choices from -2 to two past the last expert, some of them twice in a row of the routing.
static u32 state = 1;
static u32 draw(u32 below) { return (state = state * 1664525u + 1013904223u) / 65536 % below; }

template <typename Index_>
static bool right(u32 tokens, u32 k, u32 experts, bool weighted, bool mapped, bool dense_wanted) {
    std::vector<Index_> indices(tokens * k);
    std::vector<float> weights(tokens * k);
    for (auto& index : indices) index = static_cast<Index_>(draw(experts + 4)) - 2;
    for (auto& weight : weights) weight = 1 + draw(64);
    // Elements that are not written keep a wrong value.
    std::vector<u8> map(tokens * experts, 7);
    std::vector<float> probs(tokens * experts, -1.0f);
    const DenseParams p{reinterpret_cast<const u8*>(indices.data()), weighted ? weights.data() : nullptr,
                        mapped ? map.data() : nullptr, dense_wanted ? probs.data() : nullptr,
                        tokens, k, experts, sizeof(Index_) == 8};
    gridDim = {3}, blockDim = {64};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) dense(p);
    for (u32 token = 0; token < tokens; token++)
        for (u32 expert = 0; expert < experts; expert++) {
            u8 chosen = 0;
            float sum = 0;
            for (u32 at = token * k; at < (token + 1) * k; at++)
                if (indices[at] == static_cast<Index_>(expert)) chosen = 1, sum += weighted ? weights[at] : 0;
            const u32 place = token * experts + expert;
            if (map[place] != (mapped ? chosen : 7) || probs[place] != (dense_wanted ? sum : -1.0f)) return false;
        }
    return true;
}

int main() {
    for (u32 tokens : {0u, 1u, 7u, 50u})
        for (u32 k : {0u, 1u, 8u, 33u})
            for (u32 experts : {1u, 8u, 33u, 256u})
                for (u32 given = 0; given < 8; given++) {
                    const bool weighted = given & 1, mapped = given & 2, dense_wanted = given & 4;
                    if (right<i32>(tokens, k, experts, weighted, mapped, dense_wanted) &&
                        right<i64>(tokens, k, experts, weighted, mapped, dense_wanted)) continue;
                    std::printf("wrong: %u tokens, k = %u, %u experts, given %u\n", tokens, k, experts, given);
                    return 1;
                }
    return 0;
}
"#;

#[test]
fn every_element_is_written_with_the_right_value() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dense");
    fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join("main.cpp"), folder.join("dense"));
    fs::write(&source, PROGRAM).unwrap();
    let device = Path::new(env!("CARGO_MANIFEST_DIR")).join("device");
    let compiler = env::var_os("CXX").unwrap_or_else(|| "g++".into());
    let mut compile = Command::new(compiler);
    compile.args(["-std=c++17", "-O1", "-fsanitize=address,undefined", "-x", "c++"]);
    compile.arg("-I").arg(&device).arg("-I").arg(device.join("common")).arg(&source).arg("-o").arg(&program);
    let compiled = compile.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let run = Command::new(&program).output().unwrap();
    assert!(
        run.status.success(),
        "{}{}",
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr)
    );
}
