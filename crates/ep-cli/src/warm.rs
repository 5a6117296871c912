//! `hybrid-ep warm`: compiles all kernels of the CUDA backend into the kernel cache, ahead of the first start.

use std::time::{Duration, Instant};

use clap::Args;
use ep::Config;
use ep_cuda::jit::{Arch, Origin};
use ep_cuda::warm::{Target, Warm, Warmed, warm};

use crate::common::failure::{Failure, Verdict};
use crate::common::{output, units};

/// The options of `warm`.
#[derive(Debug, Args)]
pub(crate) struct WarmArgs {
    /// Compile for these architectures instead of this machine's GPUs; needs no GPU
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',', value_parser = architecture)]
    arch: Vec<Arch>,
}

/// Reads the name of an architecture that the crate has kernels for.
fn architecture(text: &str) -> Result<Arch, String> {
    Arch::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = Arch::ALL.into_iter().map(Arch::name).collect();
        format!("no kernels for this architecture; possible: {}", names.join(", "))
    })
}

pub(crate) fn main(args: &WarmArgs) -> Result<Verdict, Failure> {
    let targets = match &args.arch[..] {
        [] => Target::found()?,
        archs => archs.iter().flat_map(|&arch| Target::of_arch(arch)).collect(),
    };
    let plain_copies = Config::from_env()?.cuda.plain_copies;
    let begin = Instant::now();
    let warm = warm(&targets, plain_copies, |kernel| {
        // If stdout cannot be written, the summary below returns the error.
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
        Origin::Disk | Origin::Memory => "found in the cache".into(),
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
    let mut how = format!("{new} compiled, {} found in the cache, in {}", all - new, units::time(elapsed));
    if let Some(first) = compiled.first() {
        let work: f64 = compiled.iter().map(|kernel| kernel.cubin.seconds).sum();
        how.push_str(&format!(" ({work:.1} s of NVRTC {})", first.cubin.nvrtc));
    }
    let place = warm.cache.dir.as_deref().map(|dir| dir.display().to_string()).unwrap_or_default();
    format!(
        "{} for {}: {how}\nkernel cache {place}: {}, {}",
        units::counted(all, "kernel"),
        archs.join(", "),
        units::counted(warm.cache.entries, "program"),
        units::bytes(warm.cache.bytes),
    )
}

fn is_new(warmed: &Warmed) -> bool {
    warmed.cubin.origin == Origin::Compiled
}
