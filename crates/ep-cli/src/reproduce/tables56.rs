//! Tables V and VI: iteration times of whole systems, of which this program records one slope.

use ep_plan::input::preset::{self, Joined};
use ep_plan::units::Bytes;
use ep_plan::{Cluster, StreamInput, StreamModel};

use super::section::{Conclusion, Finding, Grid, Section, agreement};
use crate::common::failure::Failure;

/// The paper's slope: seconds that an iteration of Tutel takes longer per MiB of tokens, on cluster-M from 96 to 192
/// MB.
const TUTEL_SECONDS_PER_MIB: f64 = 0.0802;
/// Exchanges per iteration for which the computed slope agrees.
const ALL_TO_ALLS: f64 = 24.0;
/// Relative tolerance for a slope of measured times.
const TOLERANCE: f64 = 0.01;

pub(super) fn section() -> Result<Section, Failure> {
    let ours = slope()?;
    let agrees = (ours / TUTEL_SECONDS_PER_MIB - 1.0).abs() < TOLERANCE;
    Ok(Section {
        title: "Tables V and VI: iteration times of Tutel",
        about: format!(
            "{ALL_TO_ALLS} all-to-alls of plain expert parallelism between two datacenters. The eight GPUs of each \
             share 10 Gbit/s, and half of the tokens go to the other datacenter."
        ),
        grids: vec![Grid {
            caption: "Seconds per MiB of tokens, cluster-M, 96 to 192 MB".into(),
            header: vec!["", "computed", "paper", "agrees"],
            rows: vec![vec![
                "Tutel's slope".into(),
                format!("{ours:.4}"),
                format!("{TUTEL_SECONDS_PER_MIB:.4}"),
                agreement(agrees),
            ]],
        }],
        findings: vec![
            Finding {
                claim: "Tutel's slope on cluster-M".into(),
                found: Conclusion::of(agrees),
                expected: Conclusion::Reproduces,
                why: format!(
                    "within {:.1} %, for {ALL_TO_ALLS} exchanges and two datacenters; both numbers are inferred from \
                     the slope itself",
                    100.0 * (ours / TUTEL_SECONDS_PER_MIB - 1.0).abs()
                ),
            },
            Finding {
                claim: "the other cells".into(),
                found: Conclusion::CannotBeChecked,
                expected: Conclusion::CannotBeChecked,
                why: "they were measured on clusters and models whose sizes are not recorded here; of cluster-L only \
                      the 4 datacenters of 8 GPUs are known"
                    .into(),
            },
        ],
        charts: Vec::new(),
    })
}

/// Seconds per MiB by the stream model of the outermost level.
fn slope() -> Result<f64, Failure> {
    let cluster = preset::cluster("paper-m", &Joined::default())
        .ok_or_else(|| Failure::request("the preset paper-m is missing"))?;
    let cluster = Cluster::try_from(cluster).map_err(Failure::request)?;
    let between = cluster.levels()[0];
    let model = StreamModel::new(StreamInput {
        gpus: between.scaling_factor,
        token_bytes: Bytes(f64::from(1 << 20)),
        expert_bytes: Bytes::ZERO,
        bandwidth: between.bandwidth_per_gpu(),
        pre_expert: ep_plan::Seconds::ZERO,
    })
    .map_err(Failure::request)?;
    let exchange = model.all_to_all_bytes(1).map_err(Failure::request)? / between.bandwidth_per_gpu();
    Ok(exchange.0 * ALL_TO_ALLS)
}
