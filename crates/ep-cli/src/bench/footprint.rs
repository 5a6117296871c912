//! Estimates the main memory that a benchmark needs, before it allocates any. GPU memory is not counted: the CUDA
//! backend reports an allocation that fails, with the free memory.

use crate::bench::plan::BenchPlan;
use crate::bench::scenario::Scenario;
use crate::common::backend::BackendKind;
use crate::common::failure::Failure;
use crate::common::role::ProcessRole;
use crate::common::units;

/// One part of the memory, and the options that reduce it.
#[derive(Debug)]
struct Part {
    bytes: u64,
    reduce: &'static str,
}

/// Refuses a benchmark that needs more memory than is available now.
pub(crate) fn check(plan: &BenchPlan) -> Result<(), Failure> {
    match ep::available_memory() {
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
    let (tokens, copies) = (scenario.source.all_tokens()?, scenario.source.copies()?);
    let format = plan.format();
    let expert_rows = if format.output_row_bytes(1) == 2 { 0 } else { plan.bf16_row_bytes() };
    let row = format
        .output_row_bytes(plan.hidden)
        .checked_add(format.scale_row_bytes(plan.hidden))?
        .checked_add(expert_rows)? as u64;
    // Two handles use 64 bytes per copy.
    let bookkeeping = known(plan, copies)?.checked_add(copies.checked_mul(64)?)?;
    let windows = product(&[2 * ranks, domains - 1, plan.config.host.slots, plan.config.host.slot_bytes])?;
    // Every rank receives the counts of all ranks, for each of two handles.
    let counts = product(&[2 * ranks, ranks, ep::Counts::words(&plan.world), size_of::<u32>()])?;
    let recorded = scenario.source.layer.is_some();
    let [rows, probs, padding] = received(plan, scenario, row, bookkeeping)?;
    Some(vec![
        Part {
            // Input and combined tokens.
            bytes: tokens.checked_mul(product(&[2, plan.bf16_row_bytes()])?)?,
            reduce: if recorded { "--hidden" } else { "--tokens or --hidden" },
        },
        rows,
        probs,
        padding,
        Part { bytes: counts, reduce: "--ranks or --experts" },
        Part { bytes: windows, reduce: "HYBRID_EP_SLOT_BYTES or HYBRID_EP_SLOTS" },
    ])
}

/// The copies of GPU memory that the host holds. The largest is the received rows, which it downloads for the check, or
/// the experts' outputs, which it generates and uploads: it holds one of them at a time.
fn copies_of_gpus(plan: &BenchPlan, scenario: &Scenario) -> Option<Vec<Part>> {
    let tokens = scenario.source.all_tokens()?;
    let format = plan.format();
    let delivered = format.output_row_bytes(plan.hidden).checked_add(format.scale_row_bytes(plan.hidden))?;
    let row = delivered.max(plan.bf16_row_bytes()) as u64;
    let recorded = scenario.source.layer.is_some();
    let [rows, probs, padding] = received(plan, scenario, row, known(plan, scenario.source.copies()?)?)?;
    // Combined tokens, and their probabilities for all experts.
    let token = plan.bf16_row_bytes().checked_add(plan.world.experts().checked_mul(size_of::<f32>())?)?;
    Some(vec![
        rows,
        probs,
        padding,
        Part {
            bytes: tokens.checked_mul(token as u64)?,
            reduce: if recorded { "--hidden" } else { "--tokens, --hidden or --experts" },
        },
    ])
}

/// The memory of the received rows with `bookkeeping` bytes about them, of their probabilities, and of the padding rows.
/// A row has `row` bytes.
fn received(plan: &BenchPlan, scenario: &Scenario, row: u64, bookkeeping: u64) -> Option<[Part; 3]> {
    let rows = scenario.most_rows(&plan.world)?;
    let recorded = scenario.source.layer.is_some();
    let padding = product(&[plan.world.experts(), scenario.mode.pad_multiple() - 1])?;
    Some([
        Part {
            bytes: rows.checked_mul(row)?.checked_add(bookkeeping)?,
            reduce: if recorded { "--hidden" } else { "--tokens, --hidden or --topk" },
        },
        Part {
            bytes: rows.checked_mul(product(&[size_of::<f32>(), scenario.probs_per_row(&plan.world)])?)?,
            reduce: if recorded { "--hidden" } else { "--tokens or --experts" },
        },
        Part { bytes: padding.checked_mul(row)?, reduce: "--pad or --hidden" },
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
        // FP8 rows are smaller, but the experts' bf16 outputs need a tensor of their own.
        assert!(message("--dtype fp8", 900_000_000).is_some());
        assert_eq!(message("", 900_000_000), None);
    }

    #[test]
    fn the_largest_run_counts() {
        assert_eq!(message("--tokens 1,16", 900_000_000), None);
        for tokens in ["4096,4000000,1", "1,0+0+0+16000000"] {
            assert!(
                message(&format!("--tokens {tokens}"), 8 << 30).unwrap().contains("--tokens"),
                "{tokens}"
            );
        }
    }

    #[test]
    fn plain_mode_has_fewer_rows_but_more_probabilities() {
        // In plain mode, a token with 8 copies has at most 4 rows on 4 ranks.
        assert!(message("", 650_000_000).is_some());
        assert_eq!(message("--mode plain", 650_000_000), None);
        assert!(message("--mode plain,permuted", 650_000_000).is_some());
        // 65,536 rows with probabilities of 16,384 local experts.
        let experts = "--mode plain --experts 65536 --hidden 64";
        let needed = message(experts, 4 << 30).unwrap();
        assert!(needed.contains("--tokens or --experts"), "{needed}");
        assert_eq!(message(&experts.replace("plain", "permuted"), 4 << 30), None);
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
