//! Table VII: messages of one all-to-all and one all-gather.

use ep_plan::paper::TABLE_VII;
use ep_plan::{Partition, TopologyRule};

use super::section::{Conclusion, Finding, Grid, Section, agreement};
use crate::common::failure::Failure;
use crate::planner::chart::{self, Line};

/// An example with two levels, which the table does not have: `SF = [4, 4]`, `S = [2, 4]`.
const TWO_LEVELS: ([usize; 2], [usize; 2]) = ([4, 4], [2, 4]);

pub(super) fn section() -> Result<Section, Failure> {
    let mut rows = Vec::new();
    let mut agreeing = 0;
    for cell in TABLE_VII {
        let found = messages(&[cell.gpus], &[cell.domain_size], 0, TopologyRule::Corrected)?;
        agreeing += usize::from(found.0 == cell.all_to_all) + usize::from(found.1 == cell.all_gather);
        rows.push(vec![
            format!("EP {}", cell.gpus),
            cell.domain_size.to_string(),
            found.0.to_string(),
            cell.all_to_all.to_string(),
            found.1.to_string(),
            cell.all_gather.to_string(),
            agreement(found == (cell.all_to_all, cell.all_gather)),
        ]);
    }
    let cells = 2 * TABLE_VII.len();
    let (members, sizes) = TWO_LEVELS;
    let inner = |rule| Ok::<_, Failure>(messages(&members, &sizes, 1, rule)?.1);
    let (corrected, literal) = (inner(TopologyRule::Corrected)?, inner(TopologyRule::Literal)?);
    Ok(Section {
        title: "Table VII: messages",
        about: "Counted peer by peer on the partition. The closed forms are G (G/S - 1) and G (S - 1)."
            .into(),
        grids: vec![Grid {
            caption: "Messages of one all-to-all (A2A) and of the all-gather (AG)".into(),
            header: vec!["", "S", "A2A, computed", "paper", "AG, computed", "paper", "agrees"],
            rows,
        }],
        findings: vec![
            Finding {
                claim: format!("its {cells} cells"),
                found: Conclusion::of(agreeing == cells),
                expected: Conclusion::Reproduces,
                why: format!("{agreeing} of {cells} agree"),
            },
            Finding {
                claim: "Algorithm 1 to the letter, at two levels".into(),
                found: Conclusion::of(literal == corrected),
                expected: Conclusion::Differs,
                why: format!(
                    "its line 8 compares only the inner digits, so it also pairs GPUs of different datacenters: \
                     {literal} messages of the inner all-gather for SF = {members:?}, S = {sizes:?} instead of \
                     {corrected}; this program compares the outer digits too"
                ),
            },
        ],
        charts: vec![("table7.svg", picture()?)],
    })
}

/// Messages of the all-to-all and of the all-gather of a level.
fn messages(
    members: &[usize],
    sizes: &[usize],
    level: usize,
    rule: TopologyRule,
) -> Result<(usize, usize), Failure> {
    let partition = Partition::new(members, sizes).map_err(Failure::request)?;
    let (mut all_to_all, mut all_gather) = (0, 0);
    for gpu in 0..partition.gpus() {
        let peers = partition.peers(gpu, level, rule).map_err(Failure::request)?;
        all_to_all += peers.all_to_all.len();
        all_gather += peers.all_gather.len();
    }
    Ok((all_to_all, all_gather))
}

fn picture() -> Result<String, Failure> {
    let line = |label: &str, count: fn(&ep_plan::paper::TableViiCell) -> usize| Line {
        label: label.into(),
        points: TABLE_VII
            .iter()
            .filter(|cell| cell.gpus == 32)
            .map(|cell| (cell.domain_size as f64, count(cell) as f64))
            .filter(|(_, count)| *count > 0.0)
            .collect(),
        notes: Vec::new(),
    };
    let lines = [
        line("all-to-all, EP 32", |cell| cell.all_to_all),
        line("all-gather, EP 32", |cell| cell.all_gather),
    ];
    chart::lines(&lines, ["domain size S", "messages"], true)
}
