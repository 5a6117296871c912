//! Keeps a library from changing what this process does on signals when the library is loaded.

use std::mem::MaybeUninit;
use std::ptr;

/// The actions of all signals that can be handled, to be restored.
///
/// A constructor of Debian's libfabric, from the library `libinfinipath` of an old network card, handles SIGINT, SIGTERM,
/// SIGSEGV, SIGBUS, SIGABRT and SIGILL: it writes a file into the working directory and ends the process. Then Ctrl-C
/// raises no `KeyboardInterrupt` in Python, and a program's own handlers never run.
pub(crate) struct Actions(Vec<(i32, libc::sigaction)>);

impl Actions {
    pub(crate) fn of_this_process() -> Self {
        Self((1..32).filter_map(|signal| Some((signal, action(signal)?))).collect())
    }

    /// Restores the actions that have changed.
    pub(crate) fn restore(&self) {
        for (signal, before) in &self.0 {
            if action(*signal).is_some_and(|now| now.sa_sigaction != before.sa_sigaction) {
                // SAFETY: an action that this process had for this signal.
                unsafe { libc::sigaction(*signal, before, ptr::null_mut()) };
            }
        }
    }
}

/// What happens on a signal; `None` for numbers without a signal.
fn action(signal: i32) -> Option<libc::sigaction> {
    let mut found = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action, the call only stores the present one.
    let answer = unsafe { libc::sigaction(signal, ptr::null(), found.as_mut_ptr()) };
    // SAFETY: zeros are a valid value of this C structure, and the call has stored one over them.
    (answer == 0).then(|| unsafe { found.assume_init() })
}
