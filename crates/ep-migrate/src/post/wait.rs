//! The wait of a call for its peers, at most for the timeout.

use std::sync::PoisonError;
use std::time::Instant;

use ep::{CallerError, Interrupt, PeerFault, Result};

use super::{Post, State};
use crate::header::Kind;
use crate::inbox::Call;
use crate::question::{Patience, Question};

impl Post {
    /// Waits until `ready` returns a value, at most for the timeout. `peers` are those whose messages can make it
    /// ready.
    pub(super) fn wait<R>(
        &self,
        call: Call,
        waited_for: impl Fn() -> String,
        peers: &[usize],
        ready: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<R> {
        self.lock().waits.push(peers[0]);
        let ended = self.wait_until(call, waited_for, peers, ready);
        let mut state = self.lock();
        if let Some(at) = state.waits.iter().position(|&peer| peer == peers[0]) {
            state.waits.swap_remove(at);
        }
        if ended.is_ok() {
            // The question and its answer concern a wait that is over.
            state.peers[peers[0]].question = Question::default();
            state.is_asked = false;
        }
        ended
    }

    /// Makes every wait check again whether it is over.
    pub(crate) fn wake(&self) {
        // A wait holds the lock from its check until it sleeps, so it does not miss the notification.
        drop(self.lock());
        self.changed.notify_all();
    }

    fn wait_until<R>(
        &self,
        call: Call,
        waited_for: impl Fn() -> String,
        peers: &[usize],
        mut ready: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<R> {
        let started = Instant::now();
        let mut state = self.lock();
        loop {
            state.check_error()?;
            if let Some(found) = ready(&mut state) {
                return Ok(found);
            }
            let waited = started.elapsed();
            // A peer that has left sends nothing more, so there is no reason to wait for the timeout.
            let gone = peers.iter().find_map(|&peer| Some((peer, state.peers[peer].is_exhausted()?)));
            let left = self.setup.timeout.saturating_sub(waited);
            let is_late = left.is_zero() || state.is_asked;
            let patience = match is_late {
                false => Patience::For(left),
                true if !self.setup.asks => Patience::Over(PeerFault::Late),
                true => state.peers[peers[0]].question.patience(),
            };
            let late = match patience {
                Patience::Over(fault) => Some((peers[0], fault)),
                Patience::For(_) | Patience::Ask => None,
            };
            if let Some((peer, fault)) = gone.or(late) {
                drop(state);
                return Err(self.fail(self.wait_error(peer, fault, waited_for(), waited)));
            }
            let mut slice = match patience {
                Patience::For(time) => time,
                Patience::Ask | Patience::Over(_) => {
                    state.peers[peers[0]].question = Question::ask();
                    drop(state);
                    self.post_header(peers[0], self.bare(Kind::Ask))?;
                    state = self.lock();
                    continue;
                }
            };
            let asks = self.setup.interrupt.is_set();
            if asks {
                slice = slice.min(Interrupt::EVERY);
            }
            (state, _) = self.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner);
            if asks {
                // `asked` runs code of the program, which may call this library: the lock must be free.
                drop(state);
                if self.setup.interrupt.asked() {
                    let (operator, rank) = (call.operator, self.setup.rank);
                    let waited_for = waited_for();
                    return Err(self.fail(CallerError::Interrupted { operator, rank, waited_for }));
                }
                state = self.lock();
            }
        }
    }
}
