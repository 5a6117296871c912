//! Tables V and VI: iteration times of whole systems, compared cell by cell with the exchanges that expert domains save.

use ep_plan::cluster::Level;
use ep_plan::input::preset::{self, Joined};
use ep_plan::units::Bytes;
use ep_plan::{Cluster, StreamInput, StreamModel};

use super::section::{Conclusion, Finding, Grid, Section, agreement};
use crate::common::failure::Failure;

/// The paper's slope: seconds by which an iteration of Tutel takes longer per MB of tokens, on cluster-M between 96 and 192
/// MB. The number of exchanges was inferred from this slope with the MB of the table read as MiB.
const TUTEL_SECONDS_PER_MIB: f64 = 0.0802;
/// Number of exchanges per iteration with which the computed slope agrees.
const ALL_TO_ALLS: f64 = 24.0;
/// Relative tolerance for a slope of measured times.
const TOLERANCE: f64 = 0.01;

/// Token data of Table V, MB (10^6 bytes).
const TOKEN_MB: [f64; 6] = [6.0, 12.0, 24.0, 48.0, 96.0, 192.0];

/// One cluster of Table V: seconds of an iteration by token data, with experts of 0.36 MB.
struct Measured {
    preset: &'static str,
    name: &'static str,
    tutel: [f64; 6],
    faster_moe: [f64; 6],
    smart_moe: [f64; 6],
    hybrid_ep: [f64; 6],
}

const TABLE_V: [Measured; 2] = [
    Measured {
        preset: "paper-m",
        name: "cluster-M",
        tutel: [2.52, 4.26, 5.82, 7.62, 12.65, 20.35],
        faster_moe: [2.58, 4.37, 5.90, 7.81, 12.80, 20.82],
        smart_moe: [2.59, 4.34, 5.97, 7.80, 12.68, 20.91],
        hybrid_ep: [2.48, 2.63, 2.74, 2.82, 3.01, 3.78],
    },
    Measured {
        preset: "paper-l",
        name: "cluster-L",
        tutel: [3.74, 7.30, 10.69, 13.54, 18.59, 28.46],
        faster_moe: [3.86, 7.50, 11.09, 13.88, 19.32, 29.43],
        smart_moe: [3.82, 7.46, 10.94, 14.08, 19.25, 29.53],
        hybrid_ep: [3.49, 3.53, 3.54, 3.85, 4.24, 5.20],
    },
];

/// Table VI: token and expert data in MB, cluster, seconds of an iteration with the partition alone and with migration.
const TABLE_VI: [(&str, &str, f64, f64); 6] = [
    ("24 & 8", "S", 0.76, 0.61),
    ("24 & 8", "M", 3.41, 2.54),
    ("24 & 8", "L", 6.12, 3.48),
    ("48 & 2", "S", 1.06, 0.74),
    ("48 & 2", "M", 6.21, 2.81),
    ("48 & 2", "L", 10.89, 3.86),
];

/// What expert domains save over plain expert parallelism, for each token size.
struct Saved {
    measured: &'static Measured,
    /// Mean of the three baselines minus HybridEP, s.
    paper: [f64; 6],
    /// The time of 24 all-to-alls between the datacenters, s.
    model: [f64; 6],
}

/// The range of measured over computed saving in which a cell counts as reproduced.
const CELL: std::ops::RangeInclusive<f64> = 0.8..=1.25;

/// The range of ratios that agree, for a caption.
fn bounds(ratios: &std::ops::RangeInclusive<f64>) -> String {
    format!("agrees: a ratio of saved to computed from {} to {}", ratios.start(), ratios.end())
}

fn saved(measured: &'static Measured) -> Result<Saved, Failure> {
    let per_mib = slope_of(measured.preset)?;
    let at = |index: usize| {
        let baselines = measured.tutel[index] + measured.faster_moe[index] + measured.smart_moe[index];
        baselines / 3.0 - measured.hybrid_ep[index]
    };
    let model = TOKEN_MB.map(|mb| per_mib * mb * 1e6 / f64::from(1 << 20));
    Ok(Saved { measured, paper: std::array::from_fn(at), model })
}

fn table_v_grid(saved: &Saved) -> Grid {
    let rows = (0..TOKEN_MB.len()).map(|index| {
        let measured = saved.measured;
        let ratio = saved.paper[index] / saved.model[index];
        let speedup = (saved.paper[index] + measured.hybrid_ep[index]) / measured.hybrid_ep[index];
        vec![
            format!("{} MB", TOKEN_MB[index]),
            format!("{:.2}", measured.tutel[index]),
            format!("{:.2}", measured.faster_moe[index]),
            format!("{:.2}", measured.smart_moe[index]),
            format!("{:.2}", measured.hybrid_ep[index]),
            format!("{speedup:.2}x"),
            format!("{:.2}", saved.paper[index]),
            format!("{:.2}", saved.model[index]),
            format!("{ratio:.2}"),
            agreement(CELL.contains(&ratio)),
        ]
    });
    Grid {
        caption: format!(
            "Table V, {}, seconds: the saving over the mean of three baselines, and 24 all-to-alls of the model; {}",
            saved.measured.name,
            bounds(&CELL)
        ),
        header: vec![
            "tokens",
            "Tutel",
            "FasterMoE",
            "SmartMoE",
            "HybridEP",
            "speedup",
            "saved",
            "computed",
            "ratio",
            "agrees",
        ],
        rows: rows.collect(),
    }
}

/// The rows of Table VI without token exchange (p = 0): every GPU gathers all experts. Cluster, its preset, datacenters,
/// expert data per GPU in MB, and the measured saving of migration, s.
const GATHERED: [(&str, &str, f64, f64, f64); 2] =
    [("M", "paper-m", 2.0, 2.0, 6.21 - 2.81), ("L", "paper-l", 4.0, 2.0, 10.89 - 3.86)];
/// GPUs of a datacenter, which share an uplink.
const GPUS: f64 = 8.0;
/// The range of measured over computed saving in which a way to gather agrees with Table VI. It is wider than [`CELL`], but
/// tells the two ways apart, because they differ by a factor of 8.
const GATHER: std::ops::RangeInclusive<f64> = 0.67..=1.5;

/// The time of 24 gathers on the uplink, s: flat, where each GPU of a datacenter receives each foreign expert by itself,
/// and hierarchical, where a datacenter receives each foreign expert once.
fn gathers(preset: &str, datacenters: f64, expert_mb: f64) -> Result<[f64; 2], Failure> {
    let uplink = uplink(preset)?.link_bandwidth.0;
    let once = ALL_TO_ALLS * (datacenters - 1.0) * GPUS * expert_mb * 1e6 / uplink;
    Ok([GPUS * once, once])
}

fn gather_grid() -> Result<(Grid, [[f64; 2]; 2]), Failure> {
    let mut ratios = [[0.0; 2]; 2];
    let mut rows = Vec::new();
    for ((cluster, preset, datacenters, expert_mb, saved), ratios) in GATHERED.into_iter().zip(&mut ratios) {
        let computed = gathers(preset, datacenters, expert_mb)?;
        *ratios = computed.map(|seconds| saved / seconds);
        let ways = ["flat", "hierarchical"].into_iter().zip(computed).zip(*ratios);
        rows.extend(ways.map(|((way, seconds), ratio)| {
            vec![
                cluster.to_owned(),
                way.to_owned(),
                format!("{saved:.2}"),
                format!("{seconds:.2}"),
                format!("{ratio:.2}"),
                agreement(GATHER.contains(&ratio)),
            ]
        }));
    }
    let grid = Grid {
        caption: format!(
            "Table VI, 48 & 2 MB (p = 0), seconds: the saving, and 24 gathers without compression; {}, bounds that tell \
             the two ways apart, because they differ by a factor of 8",
            bounds(&GATHER)
        ),
        header: vec!["cluster", "gather", "saved", "computed", "ratio", "agrees"],
        rows,
    };
    Ok((grid, ratios))
}

/// At p = 0 the saving of migration is the time of a flat gather.
fn gather_finding(ratios: &[[f64; 2]; 2]) -> Finding {
    let [[flat_m, once_m], [flat_l, once_l]] = ratios;
    let agrees = |way: usize| ratios.iter().all(|ratios| GATHER.contains(&ratios[way]));
    Finding {
        claim: "Table VI at p = 0, a flat gather".into(),
        found: Conclusion::of(agrees(0) && !agrees(1)),
        expected: Conclusion::Reproduces,
        why: format!(
            "measured over computed saving: {flat_m:.2} on cluster-M and {flat_l:.2} on cluster-L for a flat gather, \
             {once_m:.1} and {once_l:.1} for a hierarchical one, which sends an expert to a datacenter once"
        ),
    }
}

/// The number of nodes of a cluster of Table VI, each of which is a datacenter, and the cluster's preset.
fn nodes(cluster: &str) -> (usize, &'static str) {
    match cluster {
        "S" => (1, "paper-s"),
        "M" => (2, "paper-m"),
        _ => (4, "paper-l"),
    }
}

/// The time of 24 flat gathers without compression, s, in domains of `inside` GPUs of each of `across` nodes. Every GPU
/// receives the experts of its domain's GPUs in other nodes over the uplink. In a domain inside one node, it receives the
/// experts of the other GPUs over the links of the node.
fn flat_gathers(cluster: &str, expert_mb: f64, (across, inside): (usize, usize)) -> Result<f64, Failure> {
    let level = uplink(nodes(cluster).1)?;
    // Cluster-S has one node, so its outermost level is the inside of a node.
    let between = if across > 1 { level } else { uplink("paper-s")? };
    let peers = if across > 1 { (across - 1) * inside } else { inside - 1 };
    Ok(ALL_TO_ALLS * peers as f64 * expert_mb * 1e6 / between.bandwidth_per_gpu().0)
}

/// Among all domains that the cluster can have, those whose gathers take closest to the time that was saved, and the time of
/// these gathers. If `all` (p = 0), only the domain of all GPUs is possible.
fn closest(cluster: &str, expert_mb: f64, saved: f64, all: bool) -> Result<((usize, usize), f64), Failure> {
    let (most, gpus) = (nodes(cluster).0, GPUS as usize);
    let sizes = |most: usize| (1..=most).filter(move |size| most.is_multiple_of(*size));
    let domains = sizes(most).flat_map(|across| sizes(gpus).map(move |inside| (across, inside)));
    let possible = domains.filter(|&domain| if all { domain == (most, gpus) } else { domain != (1, 1) });
    let timed = possible.map(|domain| Ok((domain, flat_gathers(cluster, expert_mb, domain)?)));
    let timed = timed.collect::<Result<Vec<_>, Failure>>()?;
    let distance = |seconds: f64| (saved / seconds).ln().abs();
    let found = timed.into_iter().min_by(|a, b| distance(a.1).total_cmp(&distance(b.1)));
    found.ok_or_else(|| Failure::request(format!("cluster-{cluster} has no domains")))
}

fn table_vi_grid() -> Result<Grid, Failure> {
    let row = |&(data, cluster, partition, migration): &(&str, &str, f64, f64)| {
        // p = 0 in the row with small experts: every GPU gathers all of them.
        let (expert_mb, all) = if data == "48 & 2" { (2.0, true) } else { (8.0, false) };
        let saved = partition - migration;
        let ((across, inside), computed) = closest(cluster, expert_mb, saved, all)?;
        let ratio = saved / computed;
        let agrees = CELL.contains(&ratio);
        // A domain that was chosen for its agreement confirms nothing.
        let chosen = if agrees && !all { format!(", with ({across}, {inside})") } else { String::new() };
        Ok(vec![
            data.to_owned(),
            cluster.to_owned(),
            format!("{partition:.2}"),
            format!("{migration:.2}"),
            format!("{saved:.2}"),
            format!("{computed:.2}"),
            format!("{ratio:.2}"),
            format!("{}{chosen}", agreement(agrees)),
        ])
    };
    Ok(Grid {
        caption: format!(
            "Table VI, seconds: the partition alone, with migration, and 24 flat gathers without compression. At 48 & 2 MB \
             (p = 0) GPUs gather all experts; at 24 & 8 MB the paper's text does not state the domains, and those that come \
             closest are taken; {}",
            bounds(&CELL)
        ),
        header: vec![
            "tokens & experts, MB",
            "cluster",
            "partition",
            "+ migration",
            "saved",
            "computed",
            "ratio",
            "agrees",
        ],
        rows: TABLE_VI.iter().map(row).collect::<Result<_, Failure>>()?,
    })
}

/// At 192 MB, where exchanges dominate, the saving is the time of 24 all-to-alls on both clusters.
fn saved_finding(table: &[Saved; 2]) -> Finding {
    let [m, l] = [&table[0], &table[1]].map(|saved| saved.paper[5] / saved.model[5]);
    Finding {
        claim: "Table V, the saving at 192 MB".into(),
        found: Conclusion::of(CELL.contains(&m) && CELL.contains(&l)),
        expected: Conclusion::Reproduces,
        why: format!("measured over computed: {m:.2} on cluster-M, {l:.2} on cluster-L"),
    }
}

/// Below 192 MB no cell agrees.
fn small_finding(table: &[Saved; 2]) -> Finding {
    let ratios = |cells: std::ops::Range<usize>| -> Vec<f64> {
        let cells = table.iter().flat_map(|saved| cells.clone().map(move |index| (saved, index)));
        cells.map(|(saved, index)| saved.paper[index] / saved.model[index]).collect()
    };
    let span = |ratios: Vec<f64>| {
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        format!("{least:.2} to {most:.2}")
    };
    Finding {
        claim: "Table V, 6 to 96 MB".into(),
        // If any cell agrees, the conclusion is "reproduces".
        found: Conclusion::of(ratios(0..5).iter().any(|ratio| CELL.contains(ratio))),
        expected: Conclusion::Differs,
        why: format!(
            "Tutel's times are not linear in the token data: at 6 MB the saving is {} times 24 exchanges, at 12 to 96 MB \
             {} times",
            span(ratios(0..1)),
            span(ratios(1..5))
        ),
    }
}

pub(super) fn section() -> Result<Section, Failure> {
    let ours = slope()?;
    let table_v = [saved(&TABLE_V[0])?, saved(&TABLE_V[1])?];
    let (gather_grid, gather_ratios) = gather_grid()?;
    let agrees = (ours / TUTEL_SECONDS_PER_MIB - 1.0).abs() < TOLERANCE;
    Ok(Section {
        title: "Tables V and VI: iteration times",
        about: format!(
            "{ALL_TO_ALLS} all-to-alls of plain expert parallelism between two datacenters. The eight GPUs of each \
             share 10 Gbit/s, and half of the tokens go to the other datacenter."
        ),
        grids: vec![
            table_v_grid(&table_v[0]),
            table_v_grid(&table_v[1]),
            table_vi_grid()?,
            gather_grid,
            Grid {
                caption: format!(
                    "Seconds per MiB of tokens, cluster-M, 96 to 192 MB; agrees: within {} %",
                    100.0 * TOLERANCE
                ),
                header: vec!["", "computed", "paper", "agrees"],
                rows: vec![vec![
                    "Tutel's slope".into(),
                    format!("{ours:.4}"),
                    format!("{TUTEL_SECONDS_PER_MIB:.4}"),
                    agreement(agrees),
                ]],
            },
        ],
        findings: vec![
            Finding {
                claim: "Tutel's slope on cluster-M".into(),
                found: Conclusion::of(agrees),
                expected: Conclusion::Reproduces,
                why: format!(
                    "within {:.1} %, for {ALL_TO_ALLS} exchanges and two datacenters, if the MB of the table are MiB; both \
                     numbers are inferred from the slope itself. With MB of 10^6 bytes, the computed slope is {:.0} % \
                     lower",
                    100.0 * (ours / TUTEL_SECONDS_PER_MIB - 1.0).abs(),
                    100.0 * (1.0 - ours * 1e6 / f64::from(1 << 20) / TUTEL_SECONDS_PER_MIB)
                ),
            },
            saved_finding(&table_v),
            small_finding(&table_v),
            gather_finding(&gather_ratios),
            Finding {
                claim: "Table VI, 24 & 8 MB".into(),
                found: Conclusion::CannotBeChecked,
                expected: Conclusion::CannotBeChecked,
                why:
                    "the paper's text states neither the domains of these cells nor the batch, sequence length and top-k from \
                     which they follow; on clusters S and M no domains agree within the bounds, and on cluster L the domains \
                     were chosen because they agree"
                        .into(),
            },
        ],
        charts: Vec::new(),
    })
}

/// The computed slope of cluster-M: seconds per MiB, by the stream model of its outermost level.
fn slope() -> Result<f64, Failure> {
    slope_of("paper-m")
}

/// Like [`slope`], for any preset cluster.
fn slope_of(preset: &str) -> Result<f64, Failure> {
    let between = uplink(preset)?;
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

/// The links between the datacenters of a preset cluster.
fn uplink(preset: &str) -> Result<Level, Failure> {
    let cluster = preset::cluster(preset, &Joined::default())
        .ok_or_else(|| Failure::request(format!("the preset {preset} is missing")))?;
    Ok(Cluster::try_from(cluster).map_err(Failure::request)?.levels()[0])
}
