//! Clusters, models and options as TOML: text in, checked descriptions out, and back.
//!
//! A file has any of the tables `cluster`, `model` and `options`. Quantities carry their unit, in the value
//! (`bandwidth = "100 Gbit/s"`) or in the key (`bandwidth_gbit_per_s = 100`); a bare number is refused, and so is a
//! unit that leaves open whether it counts bits or bytes. An unknown key, a wrong type, a missing key and an
//! impossible value are an [`InputError`] that knows the line and the key, and says what would be possible.
//!
//! ```
//! # fn main() -> Result<(), ep_plan::input::InputError> {
//! let text = ep_plan::input::to_toml(
//!     &ep_plan::presets::datacenters(2, 100.0, 0.005, ep_plan::presets::dgx_h200(8)),
//!     &ep_plan::presets::deepseek_v3(),
//!     &ep_plan::Options::default(),
//! );
//! let found = ep_plan::input::parse("plan.toml", &text)?;
//! assert_eq!(found.model, Some(ep_plan::presets::deepseek_v3()));
//!
//! let wrong = ep_plan::input::parse("plan.toml", "[options]\nmemory_cap = 24").unwrap_err();
//! assert!(wrong.to_string().starts_with("plan.toml:2:14: options.memory_cap: is a number without a unit"));
//! # Ok(())
//! # }
//! ```

mod error;
pub mod preset;
mod quantity;
mod reader;
mod schema;
mod write;

use toml::de::DeTable;

pub use error::InputError;
pub use quantity::Kind;
pub use write::{cluster_to_toml, model_to_toml, options_to_toml, to_toml};

use crate::cluster::ClusterDescription;
use crate::model::ModelDescription;
use crate::planner::Options;
use error::Source;
use reader::Table;

type Result<T, E = InputError> = std::result::Result<T, E>;

/// What a file says. Each part that is there is valid in itself.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Document {
    /// `[cluster]`.
    pub cluster: Option<ClusterDescription>,
    /// `[model]`.
    pub model: Option<ModelDescription>,
    /// `[options]`.
    pub options: Option<Options>,
}

/// Reads a TOML text; `file` is what errors call it.
///
/// # Errors
/// [`InputError`] for the first thing that is wrong.
pub fn parse(file: &str, text: &str) -> Result<Document> {
    let source = Source { file, text };
    let document = DeTable::parse(text).map_err(|error| schema::syntax(source, &error))?;
    // The whole file is the span of what is missing at its top.
    let table = Table::new(source, String::new(), 0..0, document.get_ref(), schema::DOCUMENT)?;
    Ok(Document {
        cluster: table.get("cluster").map(schema::cluster).transpose()?,
        model: table.get("model").map(schema::model).transpose()?,
        options: table.get("options").map(schema::options).transpose()?,
    })
}

#[cfg(test)]
mod tests;
