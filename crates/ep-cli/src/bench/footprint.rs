//! Estimates the main memory that a benchmark needs, before it allocates any. GPU memory is not counted: the CUDA
//! backend reports an allocation that fails, with the free memory.

use crate::bench::plan::{BenchPlan, Scenario};
use crate::common::backend::BackendKind;
use crate::common::failure::Failure;
use crate::common::role::ProcessRole;
use crate::common::{machine, units};

/// One part of the memory, and the options that reduce it.
#[derive(Debug)]
struct Part {
    bytes: u64,
    reduce: &'static str,
}

/// Refuses a benchmark that needs more memory than is available now.
pub(crate) fn check(plan: &BenchPlan) -> Result<(), Failure> {
    match machine::available_memory() {
        Some(available) => check_against(plan, available),
        // If the available memory is unknown, only sizes beyond 64 bits are refused.
        None => check_against(plan, u64::MAX),
    }
}

fn check_against(plan: &BenchPlan, available: u64) -> Result<(), Failure> {
    for scenario in &plan.scenarios {
        let Some(parts) = parts(plan, scenario) else {
            return Err(Failure::request(format!(
                "--tokens, --topk, --hidden and --pad together need more bytes than 64 bits can count ({} are \
                 available); use smaller values",
                units::bytes(available)
            )));
        };
        let needed = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
        if needed > available
            && let Some(largest) = parts.iter().max_by_key(|part| part.bytes)
        {
            return Err(Failure::request(format!(
                "this run needs about {} of memory, but {} are available; a smaller {} reduces the largest part",
                units::bytes(needed),
                units::bytes(available),
                largest.reduce
            )));
        }
    }
    Ok(())
}

/// The memory that all ranks on this machine allocate together; `None` beyond 64 bits.
fn parts(plan: &BenchPlan, scenario: &Scenario) -> Option<Vec<Part>> {
    match plan.backend {
        BackendKind::Host => host_parts(plan, scenario),
        BackendKind::Cuda => copies_of_gpus(plan, scenario),
    }
}

/// Inputs and outputs of the operators, and the buffers of the host backend.
fn host_parts(plan: &BenchPlan, scenario: &Scenario) -> Option<Vec<Part>> {
    let ranks = plan.ranks();
    let domains = plan.world.topology().domains();
    let tokens = scenario.tokens().into_iter().try_fold(0usize, usize::checked_add)?;
    let copies = scenario.copies()?;
    let padding = product(&[plan.world.experts(), plan.mode.pad_multiple() - 1])?;
    let format = plan.format();
    let expert_rows = if format.output_row_bytes(1) == 2 { 0 } else { plan.bf16_row_bytes() };
    let row = format
        .output_row_bytes(plan.hidden)
        .checked_add(format.scale_row_bytes(plan.hidden))?
        .checked_add(expert_rows)?
        .checked_add(size_of::<f32>())? as u64;
    // 64 bytes per copy: two handles.
    let bookkeeping = known(plan, copies)?.checked_add(copies.checked_mul(64)?)?;
    let windows = product(&[2 * ranks, domains - 1, plan.config.host.slots, plan.config.host.slot_bytes])?;
    // Every rank receives the counts of all ranks, for each of two handles.
    let counts = product(&[2 * ranks, ranks, ep::Counts::words(&plan.world), size_of::<u32>()])?;
    let trace = scenario.layer.is_some();
    Some(vec![
        Part {
            // Input and combined tokens.
            bytes: product(&[tokens, 2, plan.bf16_row_bytes()])?,
            reduce: if trace { "--hidden" } else { "--tokens or --hidden" },
        },
        Part {
            bytes: copies.checked_mul(row)?.checked_add(bookkeeping)?,
            reduce: if trace { "--hidden" } else { "--tokens, --hidden or --topk" },
        },
        Part { bytes: padding.checked_mul(row)?, reduce: "--pad or --hidden" },
        Part { bytes: counts, reduce: "--ranks or --experts" },
        Part { bytes: windows, reduce: "HYBRID_EP_SLOT_BYTES or HYBRID_EP_SLOTS" },
    ])
}

/// Host copies of GPU memory: the largest are the received rows, downloaded to be checked, and the experts' outputs,
/// made here to be uploaded.
fn copies_of_gpus(plan: &BenchPlan, scenario: &Scenario) -> Option<Vec<Part>> {
    let tokens = scenario.tokens().into_iter().try_fold(0usize, usize::checked_add)?;
    let copies = scenario.copies()?;
    let padding = product(&[plan.world.experts(), plan.mode.pad_multiple() - 1])?;
    let format = plan.format();
    let delivered = format
        .output_row_bytes(plan.hidden)
        .checked_add(format.scale_row_bytes(plan.hidden))?
        .checked_add(size_of::<f32>())?;
    let row = delivered.max(plan.bf16_row_bytes()) as u64;
    let trace = scenario.layer.is_some();
    Some(vec![
        Part {
            bytes: copies.checked_mul(row)?.checked_add(known(plan, copies)?)?,
            reduce: if trace { "--hidden" } else { "--tokens, --hidden or --topk" },
        },
        Part { bytes: padding.checked_mul(row)?, reduce: "--pad or --hidden" },
        Part {
            // Combined tokens, and their probabilities for all experts.
            bytes: product(&[tokens, plan.bf16_row_bytes()])?.checked_add(product(&[
                tokens,
                plan.world.experts(),
                size_of::<f32>(),
            ])?)?,
            reduce: if trace { "--hidden" } else { "--tokens, --hidden or --experts" },
        },
    ])
}

/// Bytes of the routings of all ranks, which every rank needs to check its rows: the router's lists, the routing, and
/// the token of each row. Threads share one copy; every process has its own.
fn known(plan: &BenchPlan, copies: u64) -> Option<u64> {
    let knowers = if plan.role == ProcessRole::Threads { 1 } else { plan.ranks() };
    copies.checked_mul(80)?.checked_mul(knowers as u64)
}

fn product(factors: &[usize]) -> Option<u64> {
    factors.iter().try_fold(1u64, |product, &factor| product.checked_mul(u64::try_from(factor).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plan::tests::plan;

    fn message(options: &str, available: u64) -> Option<String> {
        let plan = plan(options);
        check_against(&plan, available).err().map(|failure| failure.to_string())
    }

    #[test]
    fn a_refusal_names_both_sizes_and_the_option() {
        assert_eq!(message("", 8 << 30), None);
        let tokens = message("--tokens 4000000", 8 << 30).unwrap();
        assert!(tokens.contains("8.59 GB are available") && tokens.contains("--tokens"), "{tokens}");
        assert!(message("--pad 4000000", 8 << 30).unwrap().contains("--pad"));
        assert!(message("--tokens 9223372036854775807", u64::MAX).unwrap().contains("64 bits"));
        // FP8 rows are smaller, but the experts' bf16 outputs need another tensor.
        assert!(message("--dtype fp8", 900_000_000).is_some());
        assert_eq!(message("", 900_000_000), None);
    }

    #[test]
    fn on_gpus_only_host_copies_count() {
        let needs = |options: &str, available| {
            let plan = BenchPlan { backend: BackendKind::Cuda, ..plan(options) };
            check_against(&plan, available).err().map(|failure| failure.to_string())
        };
        // 131,072 copies of 4,100 bytes and their routing; the tokens on the GPUs do not count.
        assert_eq!(needs("", 650_000_000), None);
        assert!(message("", 650_000_000).is_some());
        assert!(needs("", 537_000_000).unwrap().contains("--tokens"));
        // With FP8, the experts' bf16 outputs are made on the host.
        assert!(needs("--dtype fp8", 537_000_000).is_some());
        assert!(needs("--pad 4000000", 8 << 30).unwrap().contains("--pad"));
        assert!(needs("--tokens 9223372036854775807", u64::MAX).unwrap().contains("64 bits"));
    }
}
