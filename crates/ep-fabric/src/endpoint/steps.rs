//! The errors of opening an endpoint.

use ep::{EnvironmentError, Error, GpuPart, Limits, Result};

use super::objects::{Object, opened};
use crate::info::LOG_HINT;
use crate::library::Library;
use crate::sys;

/// The step that registers the memory of a GPU, as errors name it.
pub(super) const REGISTER_GPU: &str = "fi_mr_regattr of GPU memory";

/// Turns the library's answers to the steps of opening into errors.
pub(super) struct Steps<'a> {
    pub(super) library: &'a Library,
    /// What is being opened.
    pub(super) what: &'a str,
    pub(super) limits: Limits,
}

impl Steps<'_> {
    pub(super) fn failed(&self, step: &str, answer: isize) -> Error {
        let advice = self.limits.advice;
        let hint = match step {
            "fi_mr_reg" => format!("raise the limit of locked memory (ulimit -l), or {advice}"),
            REGISTER_GPU => GpuPart::HINT.to_owned(),
            "fi_cq_open" => advice.to_owned(),
            _ => LOG_HINT.to_owned(),
        };
        EnvironmentError::new(self.what, format!("{step}: {}", self.library.text(answer)), hint).into()
    }

    /// The error of a library without the function of a step.
    pub(super) fn missing(&self, step: &str) -> Error {
        self.failed(step, -sys::ENOSYS)
    }

    pub(super) fn ok(&self, step: &str, answer: isize) -> Result<()> {
        if answer == 0 { Ok(()) } else { Err(self.failed(step, answer)) }
    }

    pub(super) fn opened(&self, step: &str, answer: isize, object: Option<Object>) -> Result<Object> {
        opened(answer, object).map_err(|answer| self.failed(step, answer))
    }
}
