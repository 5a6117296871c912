//! The values of a problem by name, for `--set` and `--sweep`.

use ep_plan::cluster::ClusterDescription;
use ep_plan::input::Kind;
use ep_plan::model::ModelDescription;
use ep_plan::planner::{Batch, Compression, GradientCodec, Replicas, Work};
use ep_plan::{Options, Placement, Routing, limits};

use crate::common::numbers::{Count, Number};

/// The value that a key changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Bandwidth,
    RoundTrip,
    Alpha,
    Members,
    Efficiency,
    Loss,
    Flows,
    Throughput,
    Memory,
    MemoryCap,
    ReservedMemory,
    Tokens,
    Zipf,
    WeightCompression,
    GradientCompression,
    DenseGradientCompression,
    Accumulation,
    PipelineStages,
    ExpertParallel,
    TensorParallel,
    GlobalBatch,
    LocalSteps,
    LiveLayers,
    RefreshSteps,
    Chunks,
    Work,
    Replicas,
    Placement,
}

/// The notation of a key's value.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Quantity(Kind, Number),
    Count(Count),
    Number(Number),
    /// A ratio, `exact`, whose value is 1, or `int8`, whose value is [`INT8`].
    Compression,
    /// A codec of the training runtime. The value of `topk` is its density, that of the others [`INT8`] and [`EXACT`].
    Codec,
    Word(&'static [&'static str]),
}

/// The value that stands for the codec `int8`. It is outside the ranges of ratios and densities.
const INT8: f64 = 0.0;
/// The value that stands for the codec `exact`. It is outside the range of densities.
const EXACT: f64 = 2.0;

fn compression(value: f64) -> Compression {
    if value == INT8 { Compression::Int8 } else { Compression::By(value) }
}

fn codec(value: f64) -> GradientCodec {
    match value {
        INT8 => GradientCodec::Int8,
        EXACT => GradientCodec::Exact,
        density => GradientCodec::TopK { density },
    }
}

/// Name, value, notation, and whether the key belongs to a level.
const KEYS: [(&str, What, Form, bool); 28] = [
    ("bandwidth", What::Bandwidth, Form::Quantity(Kind::LinkRate, limits::LINK_GBIT_PER_S), true),
    ("round_trip", What::RoundTrip, Form::Quantity(Kind::Time, limits::SECONDS), true),
    ("alpha", What::Alpha, Form::Quantity(Kind::Time, limits::SECONDS), true),
    ("members", What::Members, Form::Count(limits::MEMBERS), true),
    ("efficiency", What::Efficiency, Form::Number(limits::EFFICIENCY), true),
    ("loss", What::Loss, Form::Number(limits::LOSS), true),
    ("flows", What::Flows, Form::Count(limits::FLOWS), true),
    ("throughput", What::Throughput, Form::Quantity(Kind::Arithmetic, limits::TFLOPS), false),
    ("memory", What::Memory, Form::Quantity(Kind::Memory, limits::MEMORY_GB), false),
    ("memory_cap", What::MemoryCap, Form::Quantity(Kind::Memory, limits::MEMORY_CAP_GB), false),
    ("reserved_memory", What::ReservedMemory, Form::Number(limits::RESERVED_MEMORY), false),
    ("tokens_per_gpu", What::Tokens, Form::Count(limits::TOKENS), false),
    ("zipf", What::Zipf, Form::Number(limits::ZIPF), false),
    ("weight_compression", What::WeightCompression, Form::Compression, false),
    ("gradient_compression", What::GradientCompression, Form::Compression, false),
    ("dense_gradient_compression", What::DenseGradientCompression, Form::Codec, false),
    ("gradient_accumulation", What::Accumulation, Form::Count(limits::MICRO_BATCHES), false),
    ("pipeline_stages", What::PipelineStages, Form::Count(limits::LAYERS), false),
    ("expert_parallel", What::ExpertParallel, Form::Count(limits::GPUS), false),
    ("tensor_parallel", What::TensorParallel, Form::Count(limits::GPUS), false),
    ("global_batch", What::GlobalBatch, Form::Count(limits::GLOBAL_BATCH), false),
    ("local_steps", What::LocalSteps, Form::Count(limits::LOCAL_STEPS), false),
    ("live_layers", What::LiveLayers, Form::Count(limits::LAYERS), false),
    ("shared_refresh_steps", What::RefreshSteps, Form::Count(limits::REFRESH_STEPS), false),
    ("overlap_chunks", What::Chunks, Form::Count(limits::CHUNKS), false),
    ("work", What::Work, Form::Word(&["training", "forward"]), false),
    ("replicas", What::Replicas, Form::Word(&["regather", "keep", "best"]), false),
    ("placement", What::Placement, Form::Word(&["in-order", "lpt"]), false),
];

/// A value of a problem that can be changed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Key {
    what: What,
    form: Form,
    level: usize,
    /// The key in words: `bandwidth of 'wan'`.
    pub(crate) label: String,
}

impl Key {
    /// Finds a key such as `bandwidth` (of the outermost level) or `bandwidth.rail`.
    pub(crate) fn find(name: &str, cluster: &ClusterDescription) -> Result<Self, String> {
        let (base, level) = name.split_once('.').map_or((name, None), |(base, level)| (base, Some(level)));
        let Some(&(base, what, form, of_level)) = KEYS.iter().find(|(known, ..)| *known == base) else {
            let all: Vec<_> = KEYS.iter().map(|(known, ..)| *known).collect();
            return Err(format!("no key `{base}`; possible: {}", all.join(", ")));
        };
        let levels = &cluster.levels;
        let level = match (of_level, level) {
            (false, Some(level)) => {
                return Err(format!("`{base}` belongs to no level; leave out `.{level}`"));
            }
            (_, None) => 0,
            (true, Some(wanted)) => {
                levels.iter().position(|level| level.name == wanted).ok_or_else(|| {
                    let all: Vec<_> = levels.iter().map(|level| &*level.name).collect();
                    format!("no level `{wanted}`; possible: {}", all.join(", "))
                })?
            }
        };
        let name = levels.get(level).map_or("", |level| &level.name);
        let base = base.replace('_', " ");
        let label = if of_level { format!("{base} of '{name}'") } else { base };
        Ok(Self { what, form, level, label })
    }

    /// The unit of the values; empty for counts and ratios.
    pub(crate) fn unit(&self) -> &'static str {
        match self.form {
            Form::Quantity(kind, _) => kind.unit(),
            _ => "",
        }
    }

    /// Whether the value is a whole number.
    pub(crate) fn is_count(&self) -> bool {
        matches!(self.form, Form::Count(_))
    }

    /// Parses a value. The value of a word is its index.
    pub(crate) fn parse(&self, text: &str) -> Result<f64, String> {
        let text = text.trim();
        let not = |needed: &str| format!("\"{text}\" is not {needed}");
        match self.form {
            Form::Quantity(kind, range) => kind.parse(text, range),
            Form::Count(range) => {
                // As in a TOML file, digits may be grouped: 62_914_560.
                let count = text.replace('_', "").parse().ok().filter(|&count| range.allows(count));
                count.map(|count: usize| count as f64).ok_or_else(|| not(&range.to_string()))
            }
            Form::Number(range) => {
                let number = text.parse().ok().filter(|&number| range.allows(number));
                number.ok_or_else(|| not(&format!("a number {range}")))
            }
            Form::Compression if text == "int8" => Ok(INT8),
            Form::Compression if text == "exact" => Ok(1.0),
            Form::Compression => {
                let range = limits::COMPRESSION;
                let number = text.parse().ok().filter(|&number| range.allows(number));
                number.ok_or_else(|| not(&format!("exact, int8 or a number {range}")))
            }
            Form::Codec => match text.parse() {
                Ok(GradientCodec::Exact) => Ok(EXACT),
                Ok(GradientCodec::Int8) => Ok(INT8),
                Ok(GradientCodec::TopK { density }) => Ok(density),
                Ok(_) => Err(not("a codec that can be priced")),
                Err(error) => Err(error.to_string()),
            },
            Form::Word(words) => words
                .iter()
                .position(|word| *word == text)
                .map(|index| index as f64)
                .ok_or_else(|| not(&format!("one of {}", words.join(", ")))),
        }
    }

    /// The level whose number of members the key changes.
    pub(crate) fn members_of(&self) -> Option<usize> {
        (self.what == What::Members).then_some(self.level)
    }

    /// Whether the value is a number, not a word or the name of a codec.
    pub(crate) fn is_number(&self) -> bool {
        !matches!(self.form, Form::Word(_) | Form::Codec)
    }

    /// Sets the value. Values that do not fit together are refused later, when the planner checks the problem.
    pub(crate) fn apply(
        &self,
        cluster: &mut ClusterDescription,
        model: &mut ModelDescription,
        options: &mut Options,
        value: f64,
    ) {
        let count = value as usize;
        if let Some(level) = cluster.levels.get_mut(self.level) {
            match self.what {
                // One value holds for all sites.
                What::Bandwidth => level.set_bandwidths(&[value]),
                What::RoundTrip => level.round_trip_s = value,
                What::Alpha => level.alpha_s = value,
                What::Members => level.set_members(&[count]),
                What::Efficiency => level.efficiency = value,
                What::Loss => level.loss = value,
                What::Flows => level.flows = count,
                _ => {}
            }
        }
        match self.what {
            What::Throughput => cluster.gpu.sustained_tflops = value,
            What::Memory => cluster.gpu.memory_gb = value,
            What::Tokens => model.tokens_per_gpu = count,
            What::GlobalBatch => {
                model.global_batch = Some(count);
                options.batch = Batch::Model;
            }
            What::Zipf => model.routing = Routing::Zipf { exponent: value, shuffle_seed: 0 },
            _ => self.apply_option(options, value),
        }
    }

    fn apply_option(&self, options: &mut Options, value: f64) {
        let count = value as usize;
        match self.what {
            What::MemoryCap => options.memory_cap_gb = Some(value),
            What::ReservedMemory => options.reserved_memory = value,
            What::WeightCompression => options.weight_compression = compression(value),
            What::GradientCompression => options.gradient_compression = compression(value),
            What::DenseGradientCompression => options.dense_gradient_compression = Some(codec(value)),
            What::Accumulation => {
                options.micro_batches = count;
                options.batch = Batch::MicroBatches;
            }
            What::PipelineStages => options.pipeline_stages = Some(count),
            What::ExpertParallel => options.expert_parallel = Some(count),
            What::TensorParallel => options.tensor_parallel = Some(count),
            What::LocalSteps => options.local_steps = count,
            What::LiveLayers => options.live_layers = count,
            What::RefreshSteps => options.shared_refresh_steps = count,
            What::Chunks => options.overlap_chunks = count,
            What::Work => options.work = [Work::Training, Work::Forward][count],
            What::Replicas => options.replicas = [Replicas::Regather, Replicas::Keep, Replicas::Best][count],
            What::Placement => options.placement = [Placement::InOrder, Placement::Lpt][count],
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use ep_plan::presets;

    use super::*;

    /// A value of each key that differs from the value of the default problem.
    const VALUES: [(&str, &str); 28] = [
        ("bandwidth", "7 Gbit/s"),
        ("round_trip", "77 ms"),
        ("alpha", "7 ms"),
        ("members", "3"),
        ("efficiency", "0.7"),
        ("loss", "0.007"),
        ("flows", "7"),
        ("throughput", "70 TFLOP/s"),
        ("memory", "70 GB"),
        ("memory_cap", "7 GB"),
        ("reserved_memory", "0.07"),
        ("tokens_per_gpu", "77"),
        ("zipf", "0.7"),
        ("weight_compression", "7"),
        ("gradient_compression", "70"),
        ("dense_gradient_compression", "int8"),
        ("gradient_accumulation", "7"),
        ("pipeline_stages", "4"),
        ("expert_parallel", "5"),
        ("tensor_parallel", "6"),
        ("global_batch", "77777"),
        ("local_steps", "8"),
        ("live_layers", "9"),
        ("shared_refresh_steps", "10"),
        ("overlap_chunks", "11"),
        ("work", "forward"),
        ("replicas", "keep"),
        ("placement", "lpt"),
    ];

    #[test]
    fn every_key_changes_a_value_of_its_own() {
        let cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8));
        let described = |set: Option<(&str, &str)>| {
            let (mut cluster, mut model, mut options) =
                (cluster.clone(), presets::deepseek_v3(), Options::default());
            if let Some((name, text)) = set {
                let key = Key::find(name, &cluster).unwrap();
                key.apply(&mut cluster, &mut model, &mut options, key.parse(text).unwrap());
            }
            format!("{cluster:?}\n{model:?}\n{options:?}")
        };
        assert_eq!(VALUES.map(|(name, _)| name), KEYS.map(|(name, ..)| name));
        let mut all: Vec<_> = VALUES.into_iter().map(|set| described(Some(set))).collect();
        all.push(described(None));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), KEYS.len() + 1, "a key changes nothing, or the value of another key");
    }

    #[test]
    fn values_with_a_unit_have_it() {
        let cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8));
        let unit = |name: &str| Key::find(name, &cluster).unwrap().unit();
        assert_eq!(["bandwidth", "memory", "flows", "work"].map(unit), ["Gbit/s", "GB", "", ""]);
    }
}
