//! How much memory a benchmark takes, before any of it is taken.

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
    // Every rank knows every routing, to check what it received: processes keep one each, threads share one. The
    // raw lists, the routing, the rows by their token, and two handles for each of its own.
    let knowers = if plan.place == Place::Threads { 1 } else { ranks };
    let bookkeeping =
        copies.checked_mul(80)?.checked_mul(knowers as u64)?.checked_add(copies.checked_mul(64)?)?;
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

fn product(factors: &[usize]) -> Option<u64> {
    factors.iter().try_fold(1u64, |product, &factor| product.checked_mul(u64::try_from(factor).ok()?))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Command, CommandLine};

    fn message(options: &str, available: u64) -> Option<String> {
        let line = format!("hybrid-ep bench --launched {options}");
        let Command::Bench(args) = CommandLine::parse_from(line.split_whitespace()).command else {
            panic!("not a benchmark: {line}")
        };
        let plan = Plan::resolve(&args).unwrap();
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
}
