//! The parts of a layout that the options fix.

use std::fmt;

use super::layout::Layout;
use crate::divisors::divisors;
use crate::planner::Options;

/// A part of a layout that the options can fix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Stages,
    ExpertParallel,
    TensorParallel,
}

impl Part {
    pub(super) const ALL: [Self; 3] = [Self::Stages, Self::ExpertParallel, Self::TensorParallel];

    /// The name of the option.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Stages => "pipeline_stages",
            Self::ExpertParallel => "expert_parallel",
            Self::TensorParallel => "tensor_parallel",
        }
    }

    /// The values of this part that a layout has or can still get: tensor parallelism is chosen after the other parts.
    pub(super) fn values_of(self, layout: &Layout) -> Vec<usize> {
        match self {
            Self::Stages => vec![layout.stages()],
            Self::ExpertParallel => vec![layout.group_gpus()],
            Self::TensorParallel => divisors(layout.most_tensor_parallel()),
        }
    }
}

/// The parts that are fixed, in the order of [`Part::ALL`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Fixed([Option<usize>; 3]);

impl Fixed {
    pub(super) fn by(options: &Options) -> Self {
        Self([options.pipeline_stages, options.expert_parallel, options.tensor_parallel])
    }

    pub(super) fn get(&self, part: Part) -> Option<usize> {
        self.0[part as usize]
    }

    pub(super) fn with(&self, part: Part, value: usize) -> Self {
        let mut with = self.clone();
        with.0[part as usize] = Some(value);
        with
    }

    pub(super) fn stages(&self) -> Option<usize> {
        self.get(Part::Stages)
    }

    /// Whether a layout has or can still get all fixed values.
    pub(super) fn allows(&self, layout: &Layout) -> bool {
        let allows = |part: Part| self.get(part).is_none_or(|value| part.values_of(layout).contains(&value));
        Part::ALL.into_iter().all(allows)
    }
}

/// Displayed as `pipeline_stages = 2, tensor_parallel = 1`, and as an empty text if nothing is fixed.
impl fmt::Display for Fixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fixed = Part::ALL.into_iter().filter_map(|part| Some((part.name(), self.get(part)?)));
        for (at, (name, value)) in fixed.enumerate() {
            write!(f, "{}{name} = {value}", if at == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
