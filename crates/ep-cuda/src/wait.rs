//! Waits of the host for the GPU, which the program's [`ep::Interrupt`] can end.

use std::hint;
use std::thread;
use std::time::{Duration, Instant};

use ep::{CallerError, Interrupt, Result};

use crate::buffer::CudaBuffer;

/// How long a wait polls the driver without a pause. Most operators finish within this time.
const BUSY: Duration = Duration::from_millis(1);
/// The pause between two polls after that.
const PAUSE: Duration = Duration::from_micros(50);

impl CudaBuffer {
    /// Waits until all work in the stream has finished.
    ///
    /// # Errors
    /// [`CallerError::Interrupted`] if the program interrupts the wait. The buffer is unusable then: its kernels may
    /// still wait for peers.
    pub(crate) fn wait(&mut self) -> Result<()> {
        if self.interrupt.is_set() && !self.stream.is_done()? {
            let done = || self.stream.is_done();
            if wait_unless(&self.interrupt, done)? == Ended::Interrupted {
                self.member.interrupt();
                let (operator, rank) = (self.operator, self.rank);
                let waited_for = format!("GPU {}", self.device.ordinal);
                let error = CallerError::Interrupted { operator, rank, waited_for };
                return Err(self.failed.insert(error.into()).clone());
            }
        }
        self.stream.synchronize()
    }
}

/// The end of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Done,
    Interrupted,
}

/// Waits until `done` returns true, and calls the interrupt from time to time.
fn wait_unless(interrupt: &Interrupt, mut done: impl FnMut() -> Result<bool>) -> Result<Ended> {
    let begin = Instant::now();
    let mut asked = begin;
    while !done()? {
        let now = Instant::now();
        if now.duration_since(asked) >= Interrupt::EVERY {
            asked = now;
            if interrupt.asked() {
                return Ok(Ended::Interrupted);
            }
        }
        if now.duration_since(begin) < BUSY { hint::spin_loop() } else { thread::sleep(PAUSE) }
    }
    Ok(Ended::Done)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    #[test]
    fn a_wait_ends_with_the_work_or_by_an_interrupt() {
        let asked = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&asked);
        // The second call interrupts.
        let interrupt = Interrupt::new(move || count.fetch_add(1, Relaxed) == 1);
        let mut left = 3;
        let done = || {
            left -= 1;
            Ok(left == 0)
        };
        assert_eq!(wait_unless(&interrupt, done).unwrap(), Ended::Done);
        assert_eq!(asked.load(Relaxed), 0, "a short wait does not call the interrupt");
        assert_eq!(wait_unless(&interrupt, || Ok(false)).unwrap(), Ended::Interrupted);
        assert_eq!(asked.load(Relaxed), 2);
    }
}
