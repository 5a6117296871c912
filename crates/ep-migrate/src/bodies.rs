//! The memory of messages, which later messages use again.

use std::sync::{Arc, Mutex, PoisonError};

/// Memory of messages. New memory costs a page fault for each page, which takes longer than encoding into it.
#[derive(Debug, Default)]
pub(crate) struct Bodies(Mutex<Vec<Arc<Vec<u8>>>>);

impl Bodies {
    /// Empty memory, with room for `bytes` bytes: that of a message that has left, if one had as many. If none had, the largest
    /// of them is freed, so that there is never more memory than once was under way.
    pub(crate) fn take(&self, bytes: usize) -> Vec<u8> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let have_left = (0..all.len()).filter(|&at| Arc::strong_count(&all[at]) == 1);
        let best = have_left.min_by_key(|&at| match all[at].capacity() {
            fits if fits >= bytes => (false, fits),
            short => (true, usize::MAX - short),
        });
        let taken = best.and_then(|at| Arc::into_inner(all.swap_remove(at)));
        let mut body = taken.filter(|body| body.capacity() >= bytes).unwrap_or_default();
        body.clear();
        body.reserve_exact(bytes);
        body
    }

    /// Makes a message that is complete ready to be sent, and keeps its memory.
    pub(crate) fn keep(&self, body: Vec<u8>) -> Arc<Vec<u8>> {
        let body = Arc::new(body);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(body.clone());
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_message_that_has_left_is_used_again() {
        let bodies = Bodies::default();
        let mut body = bodies.take(100);
        body.extend([7; 100]);
        let message = bodies.keep(body);
        assert_eq!(bodies.take(50).capacity(), 50, "the message is on its way");
        drop(message);
        let again = bodies.take(50);
        assert_eq!((again.capacity(), again.len()), (100, 0));
        assert_eq!(bodies.take(50).capacity(), 50, "it is taken");
    }

    #[test]
    fn the_smallest_that_is_large_enough_is_taken() {
        let bodies = Bodies::default();
        let kept = [300, 100, 200].map(|bytes| bodies.keep(bodies.take(bytes)));
        drop(kept);
        assert_eq!(bodies.take(150).capacity(), 200);
        assert_eq!(bodies.take(150).capacity(), 300);
        assert_eq!(bodies.take(150).capacity(), 150);
    }

    #[test]
    fn messages_that_grow_leave_no_memory_behind() {
        let bodies = Bodies::default();
        for bytes in 100..1000 {
            let under_way = [0; 3].map(|_| bodies.keep(bodies.take(bytes)));
            assert!(under_way.iter().all(|body| body.capacity() >= bytes));
            assert_eq!(bodies.0.lock().unwrap().len(), 3);
        }
    }
}
