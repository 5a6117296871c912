//! How much of this machine's memory a benchmark takes, before any of it is taken. What it takes of GPUs is not counted
//! here: their driver refuses what does not fit, with what there is.

use crate::backend::Chosen;
use crate::bench::plan::{Place, Plan, Scenario};
use crate::failure::Failure;
use crate::{machine, units};

/// One part of the memory, and the options that shrink it.
#[derive(Debug)]
struct Part {
    bytes: u64,
    shrink: &'static str,
}

/// Refuses a plan that does not fit the memory which is available now.
pub(crate) fn check(plan: &Plan) -> Result<(), Failure> {
    match machine::available_memory() {
        Some(available) => check_against(plan, available),
        // Where the system does not say, only what no machine has is refused.
        None => check_against(plan, u64::MAX),
    }
}

fn check_against(plan: &Plan, available: u64) -> Result<(), Failure> {
    for scenario in &plan.scenarios {
        let Some(parts) = parts(plan, scenario) else {
            return Err(Failure::request(format!(
                "--tokens, --topk, --hidden and --pad: together more bytes than 64 bits count ({} bytes are available); use smaller ones",
                units::bytes(available)
            )));
        };
        let needed = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
        if needed > available
            && let Some(largest) = parts.iter().max_by_key(|part| part.bytes)
        {
            return Err(Failure::request(format!(
                "this run needs about {} of memory and {} are available; most of it shrinks with a smaller {}",
                units::bytes(needed),
                units::bytes(available),
                largest.shrink
            )));
        }
    }
    Ok(())
}

/// What all ranks allocate together; they share this machine. `None` beyond 64 bits.
fn parts(plan: &Plan, scenario: &Scenario) -> Option<Vec<Part>> {
    match plan.backend {
        Chosen::Host => host_parts(plan, scenario),
        Chosen::Cuda => copies_of_gpus(plan, scenario),
    }
}

/// The operators' inputs and outputs, and what the backend needs.
fn host_parts(plan: &Plan, scenario: &Scenario) -> Option<Vec<Part>> {
    let ranks = plan.ranks();
    let domains = plan.world.topology.domains();
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
    // And two handles for each of its own.
    let bookkeeping = known(plan, copies)?.checked_add(copies.checked_mul(64)?)?;
    let windows = product(&[2 * ranks, domains - 1, plan.config.slots, plan.config.slot_bytes])?;
    // Every rank learns all counts, for each of two handles.
    let counts = product(&[2 * ranks, ranks, ep::Counts::words(&plan.world), size_of::<u32>()])?;
    let trace = scenario.layer.is_some();
    Some(vec![
        Part {
            // Input and combined tokens.
            bytes: product(&[tokens, 2, plan.bf16_row_bytes()])?,
            shrink: if trace { "--hidden" } else { "--tokens or --hidden" },
        },
        Part {
            bytes: copies.checked_mul(row)?.checked_add(bookkeeping)?,
            shrink: if trace { "--hidden" } else { "--tokens, --hidden or --topk" },
        },
        Part { bytes: padding.checked_mul(row)?, shrink: "--pad or --hidden" },
        Part { bytes: counts, shrink: "--ranks or --experts" },
        Part { bytes: windows, shrink: "HYBRID_EP_SLOT_BYTES or HYBRID_EP_SLOTS" },
    ])
}

/// Nothing is larger than a rank's received rows, copied here to be compared, or made here to be uploaded.
fn copies_of_gpus(plan: &Plan, scenario: &Scenario) -> Option<Vec<Part>> {
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
            shrink: if trace { "--hidden" } else { "--tokens, --hidden or --topk" },
        },
        Part { bytes: padding.checked_mul(row)?, shrink: "--pad or --hidden" },
        Part {
            // Combined tokens, and their probabilities for all experts.
            bytes: product(&[tokens, plan.bf16_row_bytes()])?.checked_add(product(&[
                tokens,
                plan.world.experts(),
                size_of::<f32>(),
            ])?)?,
            shrink: if trace { "--hidden" } else { "--tokens, --hidden or --experts" },
        },
    ])
}

/// Every rank knows every routing, to check what it received: processes keep one each, threads share one. The raw
/// lists, the routing, and the rows by their token.
fn known(plan: &Plan, copies: u64) -> Option<u64> {
    let knowers = if plan.place == Place::Threads { 1 } else { plan.ranks() };
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
        let plan = plan(&format!("--launched {options}"));
        check_against(&plan, available).err().map(|failure| failure.to_string())
    }

    #[test]
    fn both_numbers_and_the_option_are_said() {
        assert_eq!(message("", 8 << 30), None);
        let tokens = message("--tokens 4000000", 8 << 30).unwrap();
        assert!(tokens.contains("8.59 GB are available") && tokens.contains("--tokens"), "{tokens}");
        assert!(message("--pad 4000000", 8 << 30).unwrap().contains("--pad"));
        assert!(message("--tokens 9223372036854775807", u64::MAX).unwrap().contains("64 bits"));
        // FP8 rows are smaller, but the experts' outputs are another tensor.
        assert!(message("--dtype fp8", 900_000_000).is_some());
        assert_eq!(message("", 900_000_000), None);
    }
    #[test]
    fn on_gpus_only_what_is_copied_here_counts() {
        let needs = |options: &str, available| {
            let plan = Plan { backend: Chosen::Cuda, ..plan(&format!("--launched {options}")) };
            check_against(&plan, available).err().map(|failure| failure.to_string())
        };
        // 131,072 copies of 4,100 bytes, and what is known of each; without the tokens that stay on the GPUs.
        assert_eq!(needs("", 650_000_000), None);
        assert!(message("", 650_000_000).is_some());
        assert!(needs("", 537_000_000).unwrap().contains("--tokens"));
        // The bf16 outputs of FP8's experts are made here.
        assert!(needs("--dtype fp8", 537_000_000).is_some());
        assert!(needs("--pad 4000000", 8 << 30).unwrap().contains("--pad"));
        assert!(needs("--tokens 9223372036854775807", u64::MAX).unwrap().contains("64 bits"));
    }
}
