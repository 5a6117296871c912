//! `hybrid-ep warm`: every kernel that the CUDA backend may need, compiled and kept before anybody waits for it.

use std::time::{Duration, Instant};

use ep::Config;
use ep_cuda::jit::{Arch, Origin};
use ep_cuda::warm::{Target, Warm, Warmed, warm};

use crate::args::WarmArgs;
use crate::failure::{Failure, Verdict};
use crate::{output, units};

pub(crate) fn main(args: &WarmArgs) -> Result<Verdict, Failure> {
    let targets = match &args.arch[..] {
        [] => Target::found()?,
        archs => archs.iter().flat_map(|&arch| Target::of_arch(arch)).collect(),
    };
    let plain_copies = Config::from_env()?.plain_copies;
    let begin = Instant::now();
    let warm = warm(&targets, plain_copies, |kernel| {
        // Where stdout is gone, the summary says so.
        let _ = output::to_stdout(&line(kernel));
    })?;
    for warning in &warm.warnings {
        output::to_stderr(&format!("note: {warning}"))?;
    }
    output::to_stdout(&summary(&warm, begin.elapsed()))?;
    Ok(Verdict::Right)
}

fn line(warmed: &Warmed) -> String {
    let Warmed { kernel, variant, arch, cubin } = warmed;
    let how = match cubin.origin {
        Origin::Compiled => format!("compiled in {:.2} s", cubin.seconds),
        Origin::Disk | Origin::Memory => "found".into(),
    };
    format!("  {kernel:<10}  {variant:<31}  {arch:<7}  {how}")
}

fn summary(warm: &Warm, elapsed: Duration) -> String {
    let compiled: Vec<&Warmed> = warm.kernels.iter().filter(|kernel| is_new(kernel)).collect();
    let mut archs: Vec<Arch> = warm.kernels.iter().map(|kernel| kernel.arch).collect();
    archs.sort_unstable();
    archs.dedup();
    let archs: Vec<&str> = archs.into_iter().map(Arch::name).collect();
    let (all, new) = (warm.kernels.len(), compiled.len());
    let mut how = format!("{new} compiled, {} found, in {}", all - new, units::time(elapsed));
    if let Some(first) = compiled.first() {
        let work: f64 = compiled.iter().map(|kernel| kernel.cubin.seconds).sum();
        how.push_str(&format!(" ({work:.1} s of NVRTC {})", first.cubin.nvrtc));
    }
    let place = warm.cache.dir.as_deref().map(|dir| dir.display().to_string()).unwrap_or_default();
    format!(
        "{} for {}: {how}\nkept in {place}: {}, {}",
        units::counted(all, "kernel"),
        archs.join(", "),
        units::counted(warm.cache.entries, "program"),
        units::bytes(warm.cache.bytes),
    )
}

fn is_new(warmed: &Warmed) -> bool {
    warmed.cubin.origin == Origin::Compiled
}
