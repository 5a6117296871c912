//! Output of the program: text without control characters on stdout and stderr, numbers that are finite, and files that
//! are written completely or not at all.

mod finite;
mod streams;
mod target;
mod visible;

use indicatif::{ProgressBar, ProgressStyle};

use crate::common::failure::Failure;

pub(crate) use self::finite::{Checked, finite};
pub(crate) use self::streams::{error, to_stderr, to_stdout};
pub(crate) use self::target::{Target, check_apart};
pub(crate) use self::visible::one_line;

/// Prints a result as text: to stdout, or to stderr if one of the targets uses stdout.
pub(crate) fn print_beside(text: &Checked, targets: &[&Target]) -> Result<(), Failure> {
    match targets.iter().any(|target| target.is_stdout()) {
        true => to_stderr(text.as_str()),
        false => to_stdout(text.as_str()),
    }
}

/// A progress bar of `steps` steps on stderr; hidden if stderr is not a terminal.
pub(crate) fn progress(steps: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:<22} [{bar:40}] {pos}/{len}  {elapsed} (left {eta})");
    let bar = ProgressBar::new(steps);
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
