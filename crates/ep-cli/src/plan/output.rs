//! Where results go: files that are checked before the work, and whole when they are there.

use std::path::Path;

use crate::failure::Failure;
use crate::output::JsonTarget;

/// A target under the name of its option.
#[derive(Debug)]
pub(crate) struct Target {
    option: &'static str,
    to: JsonTarget,
}

impl Target {
    pub(crate) fn resolve(option: &'static str, path: Option<&Path>) -> Result<Self, Failure> {
        let to = JsonTarget::resolve(path).map_err(|failure| named(option, &failure))?;
        Ok(Self { option, to })
    }

    /// Whether stdout is taken, so that text for people goes to stderr.
    pub(crate) fn is_stdout(&self) -> bool {
        self.to == JsonTarget::Stdout
    }

    pub(crate) fn write(&self, text: &str) -> Result<(), Failure> {
        self.to.write(text).map_err(|failure| named(self.option, &failure))
    }
}

/// The target of JSON names its own option; here there are several.
fn named(option: &str, failure: &Failure) -> Failure {
    Failure::request(failure.to_string().replacen("--json", option, 1))
}
