//! [`Interrupt`]: a callback by which a program stops a waiting operator.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A callback that an operator calls while it waits for other ranks, and that says whether to stop waiting.
///
/// The library calls it on the thread that called the operator, about every [`Interrupt::EVERY`]. If it returns `true`,
/// the operator ends with [`CallerError::Interrupted`](crate::CallerError::Interrupted), the buffer becomes unusable,
/// and the other ranks learn that this rank has failed. The Python package uses it for Ctrl-C.
#[derive(Clone, Default)]
pub struct Interrupt(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl Interrupt {
    /// The pause between two calls.
    pub const EVERY: Duration = Duration::from_millis(50);

    /// An interrupt that calls `question`, which must return quickly. The library may call `question` again after it has
    /// returned `true`.
    pub fn new(question: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(question)))
    }

    /// Whether there is a callback.
    pub fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// Calls the callback. Returns `false` without one.
    pub fn asked(&self) -> bool {
        self.0.as_ref().is_some_and(|question| question())
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { "Interrupt(set)" } else { "Interrupt(none)" })
    }
}

/// Two interrupts are equal when they share one callback, or have none.
impl PartialEq for Interrupt {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(two)) => Arc::ptr_eq(one, two),
            _ => false,
        }
    }
}

impl Eq for Interrupt {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    #[test]
    fn the_callback_says_whether_to_stop() {
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let interrupt = Interrupt::new(move || asked.load(Relaxed));
        assert!(interrupt.is_set() && !interrupt.asked());
        stop.store(true, Relaxed);
        assert!(interrupt.asked() && interrupt.clone().asked());
        assert_eq!(interrupt, interrupt.clone());
        assert_ne!(interrupt, Interrupt::default());
        assert!(!Interrupt::default().asked());
    }
}
