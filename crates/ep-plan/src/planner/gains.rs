//! The gain of expert domains at several compressions of the weights.

use serde::{Deserialize, Serialize};

use super::compression::Compression;
use super::memory::before_gathering;
use super::options::{Options, Setting, Work};
use super::{Planner, TokenPath};
use crate::error::Result;

/// The codecs of weights that a report shows side by side. Only a ratio of 1 is exact.
pub const COMPRESSIONS: [Compression; 4] =
    [Compression::EXACT, Compression::Int8, Compression::By(5.0), Compression::By(50.0)];

/// The gain of the best domain sizes over hierarchical expert parallelism, for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CompressionGain {
    /// The codec of weights.
    pub weight_compression: Compression,
    /// Layer time without domains over layer time with domains, forward and backward. `None` if the planner plans
    /// forward passes and its GPUs have too little memory to train: their own experts with gradients and Adam state do
    /// not fit.
    pub training: Option<f64>,
    /// The same for the forward pass alone.
    pub forward: f64,
}

impl Planner {
    /// The gains at [`COMPRESSIONS`] and at the compression of the options, with all other options unchanged.
    ///
    /// # Errors
    /// The errors of [`Planner::new`]. A planner that exists has passed the same checks, so none of them occurs.
    pub fn compression_gains(&self) -> Result<Vec<CompressionGain>> {
        let mut ratios = COMPRESSIONS.to_vec();
        if !ratios.contains(&self.options.weight_compression) {
            ratios.push(self.options.weight_compression);
            let ratio = |codec: &Compression| codec.ratio(self.model.description().precision.weights);
            ratios.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
        }
        let gain = |weight_compression: Compression, work: Work| {
            let options =
                Options { weight_compression, work, setting: Setting::Full, ..self.options.clone() };
            // Without gradients and optimizer state, a forward pass leaves more memory for gathered experts.
            let memory = match work == self.options.work {
                true => Ok(self.memory),
                false => before_gathering(&self.cluster, &self.model, &options, self.experts_per_gpu),
            };
            let memory = match (memory, work) {
                (Err(_), Work::Training) => return Ok(None),
                (memory, _) => memory.unwrap_or(self.memory),
            };
            let planner = Self::with_memory(self.cluster.clone(), &self.model, options, memory)?;
            let without = planner.scheme(Some(TokenPath::Deduplicated)).map(|found| found.layer_time);
            let with = planner.scheme(None).map(|found| found.layer_time);
            Ok(Some(without.zip(with).map_or(1.0, |(without, with)| without / with)))
        };
        let both = |weight_compression: Compression| {
            Ok(CompressionGain {
                weight_compression,
                training: gain(weight_compression, Work::Training)?,
                forward: gain(weight_compression, Work::Forward)?.unwrap_or(1.0),
            })
        };
        ratios.into_iter().map(both).collect()
    }
}
