//! Input files: clusters, models and options as TOML. [`parse`] reads and checks them, [`to_toml`] writes them.
//!
//! A file may have the tables `cluster`, `model` and `options`. A quantity has its unit in the value
//! (`bandwidth = "100 Gbit/s"`) or in the key (`bandwidth_gbit_per_s = 100`). A number without a unit is refused, and
//! so is a unit that does not say whether it counts bits or bytes. An unknown key, a missing key, a wrong type and a
//! value out of range each give an [`InputError`], which has the line and the key and says what would be possible.
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
use crate::limits;
use crate::model::ModelDescription;
use crate::planner::Options;
use error::{Problem, Source};
use reader::Table;

type Result<T, E = InputError> = std::result::Result<T, E>;

/// The contents of an input file. Each part that is present is valid by itself.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Document {
    /// The table `[cluster]`.
    pub cluster: Option<ClusterDescription>,
    /// The table `[model]`.
    pub model: Option<ModelDescription>,
    /// The table `[options]`.
    pub options: Option<Options>,
}

/// Parses and checks a TOML text. `file` is the name of the text in errors.
///
/// # Errors
/// [`InputError`] for the first mistake in the text.
pub fn parse(file: &str, text: &str) -> Result<Document> {
    let source = Source { file, text };
    if text.len() > limits::FILE_BYTES {
        let problem = format!("the file has {} bytes", text.len());
        let possible = format!("at most {} bytes", limits::FILE_BYTES);
        return Err(source.error(&(0..0), "", Problem::new(problem, possible)));
    }
    let document = DeTable::parse(text).map_err(|error| schema::syntax(source, &error))?;
    // An error about the whole document points to its start.
    let table = Table::new(source, String::new(), 0..0, document.get_ref(), schema::DOCUMENT)?;
    Ok(Document {
        cluster: table.get("cluster").map(schema::cluster).transpose()?,
        model: table.get("model").map(schema::model).transpose()?,
        options: table.get("options").map(schema::options).transpose()?,
    })
}

#[cfg(test)]
mod tests;
