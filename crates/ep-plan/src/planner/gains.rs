//! The gain of expert domains at several compressions of the weights.

use serde::{Deserialize, Serialize};

use super::memory::before_gathering;
use super::options::{Options, Setting, Work};
use super::{Planner, TokenPath};
use crate::error::Result;

/// The compressions that a report shows side by side. The codec is exact at 1 only.
pub const COMPRESSIONS: [f64; 3] = [1.0, 5.0, 50.0];

/// The gain of the best domain sizes over hierarchical expert parallelism, for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CompressionGain {
    /// `CR_w`.
    pub weight_compression: f64,
    /// Layer time without domains over layer time with them, forward and backward.
    pub training: f64,
    /// The same for the forward pass alone.
    pub forward: f64,
}

impl Planner {
    /// The gains at [`COMPRESSIONS`] and at the compression of the options, with all other options unchanged.
    ///
    /// # Errors
    /// None that a planner which exists can cause; the type is that of the constructor.
    pub fn compression_gains(&self) -> Result<Vec<CompressionGain>> {
        let mut ratios = COMPRESSIONS.to_vec();
        if !ratios.contains(&self.options.weight_compression) {
            ratios.push(self.options.weight_compression);
            ratios.sort_by(f64::total_cmp);
        }
        let gain = |weight_compression: f64, work: Work| {
            let options =
                Options { weight_compression, work, setting: Setting::Full, ..self.options.clone() };
            // Without gradients and optimizer state, a forward pass leaves more memory for gathered experts.
            let memory = match work {
                Work::Training => self.memory,
                Work::Forward => before_gathering(&self.cluster, &self.model, &options, self.experts_per_gpu)
                    .unwrap_or(self.memory),
            };
            let planner = Self::with_memory(self.cluster.clone(), &self.model, options, memory)?;
            let without = planner.scheme(Some(TokenPath::Deduplicated)).map(|found| found.layer_time);
            let with = planner.scheme(None).map(|found| found.layer_time);
            Ok(without.zip(with).map_or(1.0, |(without, with)| without / with))
        };
        let both = |weight_compression: f64| {
            Ok(CompressionGain {
                weight_compression,
                training: gain(weight_compression, Work::Training)?,
                forward: gain(weight_compression, Work::Forward)?,
            })
        };
        ratios.into_iter().map(both).collect()
    }
}
