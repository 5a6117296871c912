//! The numbers of a problem by name, for `--set` and `--sweep`.

use ep_plan::input::Kind;
use ep_plan::planner::{Replicas, Work};
use ep_plan::{Options, Placement, Routing};

use super::problem::Problem;

/// What a key changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Bandwidth,
    RoundTrip,
    Alpha,
    Members,
    Throughput,
    Memory,
    MemoryCap,
    Tokens,
    Zipf,
    WeightCompression,
    GradientCompression,
    Accumulation,
    PipelineStages,
    LiveLayers,
    RefreshSteps,
    Work,
    Replicas,
    Placement,
}

/// How a key's value is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Quantity(Kind),
    Count,
    Number,
    Word(&'static [&'static str]),
}

/// Name, meaning, form, and whether it belongs to a level.
const KEYS: [(&str, What, Form, bool); 18] = [
    ("bandwidth", What::Bandwidth, Form::Quantity(Kind::LinkRate), true),
    ("round_trip", What::RoundTrip, Form::Quantity(Kind::Time), true),
    ("alpha", What::Alpha, Form::Quantity(Kind::Time), true),
    ("members", What::Members, Form::Count, true),
    ("throughput", What::Throughput, Form::Quantity(Kind::Arithmetic), false),
    ("memory", What::Memory, Form::Quantity(Kind::Memory), false),
    ("memory_cap", What::MemoryCap, Form::Quantity(Kind::Memory), false),
    ("tokens_per_gpu", What::Tokens, Form::Count, false),
    ("zipf", What::Zipf, Form::Number, false),
    ("weight_compression", What::WeightCompression, Form::Number, false),
    ("gradient_compression", What::GradientCompression, Form::Number, false),
    ("gradient_accumulation", What::Accumulation, Form::Count, false),
    ("pipeline_stages", What::PipelineStages, Form::Count, false),
    ("live_layers", What::LiveLayers, Form::Count, false),
    ("shared_refresh_steps", What::RefreshSteps, Form::Count, false),
    ("work", What::Work, Form::Word(&["training", "forward"]), false),
    ("replicas", What::Replicas, Form::Word(&["regather", "keep", "best"]), false),
    ("placement", What::Placement, Form::Word(&["in-order", "lpt"]), false),
];

/// A number of a problem that may be changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    what: What,
    form: Form,
    level: usize,
    /// As people read it: `bandwidth of 'wan'`.
    pub(crate) label: String,
}

impl Key {
    /// Finds `bandwidth` (of the outermost level) or `bandwidth.rail`.
    pub(crate) fn find(name: &str, problem: &Problem) -> Result<Self, String> {
        let (base, level) = name.split_once('.').map_or((name, None), |(base, level)| (base, Some(level)));
        let Some(&(base, what, form, of_level)) = KEYS.iter().find(|(known, ..)| *known == base) else {
            let all: Vec<_> = KEYS.iter().map(|(known, ..)| *known).collect();
            return Err(format!("no key `{base}`; possible: {}", all.join(", ")));
        };
        let levels = &problem.cluster.levels;
        let level = match (of_level, level) {
            (false, Some(level)) => return Err(format!("`{base}` has no level `{level}`; leave it out")),
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

    /// The unit in which values are held; empty for counts and ratios.
    pub(crate) fn unit(&self) -> &'static str {
        match self.form {
            Form::Quantity(kind) => kind.unit(),
            _ => "",
        }
    }

    /// Whether only whole numbers mean anything.
    pub(crate) fn is_count(&self) -> bool {
        self.form == Form::Count
    }

    /// Reads one value: of a word, its index.
    pub(crate) fn parse(&self, text: &str) -> Result<f64, String> {
        let text = text.trim();
        let not = |needed: &str| format!("\"{text}\" is not {needed}");
        match self.form {
            Form::Quantity(kind) => kind.parse(text),
            Form::Count => match text.parse::<u32>() {
                Ok(count) if count > 0 => Ok(f64::from(count)),
                _ => Err(not("a whole number, at least 1")),
            },
            Form::Number => {
                text.parse().ok().filter(|number: &f64| number.is_finite()).ok_or_else(|| not("a number"))
            }
            Form::Word(words) => words
                .iter()
                .position(|word| *word == text)
                .map(|index| index as f64)
                .ok_or_else(|| not(&format!("one of {}", words.join(", ")))),
        }
    }

    /// Whether values lie between others.
    pub(crate) fn is_number(&self) -> bool {
        !matches!(self.form, Form::Word(_))
    }

    /// Changes the problem; what is out of range is found when it is checked.
    pub(crate) fn apply(&self, problem: &mut Problem, value: f64) {
        let count = value as usize;
        let Problem { cluster, model, options, .. } = problem;
        if let Some(level) = cluster.levels.get_mut(self.level) {
            match self.what {
                What::Bandwidth => level.bandwidth_gbit_per_s = value,
                What::RoundTrip => level.round_trip_s = value,
                What::Alpha => level.alpha_s = value,
                What::Members => level.scaling_factor = count,
                _ => {}
            }
        }
        match self.what {
            What::Throughput => cluster.gpu.sustained_tflops = value,
            What::Memory => cluster.gpu.memory_gb = value,
            What::Tokens => model.tokens_per_gpu = count,
            What::Zipf => model.routing = Routing::Zipf { exponent: value, shuffle_seed: 0 },
            _ => self.apply_option(options, value),
        }
    }

    fn apply_option(&self, options: &mut Options, value: f64) {
        let count = value as usize;
        match self.what {
            What::MemoryCap => options.memory_cap_gb = Some(value),
            What::WeightCompression => options.weight_compression = value,
            What::GradientCompression => options.gradient_compression = value,
            What::Accumulation => options.micro_batches = count,
            What::PipelineStages => options.pipeline_stages = count,
            What::LiveLayers => options.live_layers = count,
            What::RefreshSteps => options.shared_refresh_steps = count,
            What::Work => options.work = [Work::Training, Work::Forward][count],
            What::Replicas => options.replicas = [Replicas::Regather, Replicas::Keep, Replicas::Best][count],
            What::Placement => options.placement = [Placement::InOrder, Placement::Lpt][count],
            _ => {}
        }
    }
}
