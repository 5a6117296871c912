//! News of other ranks that the host writes into this rank's control block, where its kernels read it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ep::Rank;

use crate::driver::{Device, DeviceAddress, Relaxed, Stream};
use crate::params::{ABORT_OFFSET, GoneWord, LEFT_OFFSET};

/// Maximum number of attempts to write a word, and the pause between two attempts. Other news waits meanwhile.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);

/// Writes words into this rank's control block.
#[derive(Debug)]
pub(crate) struct Notices {
    device: Arc<Device>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// This rank's control block; `None` once it may be freed.
    control: Option<DeviceAddress>,
    /// By rank: whether it is known to be gone.
    gone: Vec<bool>,
    aborted: bool,
}

impl State {
    /// Tries a few times, because the driver may lack memory for a moment. If all attempts fail, waits of kernels end at
    /// their bounds.
    fn write(&self, device: &Arc<Device>, offset: usize, word: u32) {
        let Some(control) = self.control else { return };
        let _relaxed = Relaxed::new();
        for _ in 0..ATTEMPTS {
            let written = Stream::new(device).and_then(|stream| {
                stream.upload(&word.to_le_bytes(), control + offset as DeviceAddress)?;
                stream.synchronize()
            });
            if written.is_ok() {
                break;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl Notices {
    pub(crate) fn new(device: &Arc<Device>, control: DeviceAddress, ranks: usize) -> Arc<Self> {
        let state = State { control: Some(control), gone: vec![false; ranks], aborted: false };
        Arc::new(Self { device: Arc::clone(device), state: Mutex::new(state) })
    }

    fn with(&self, with: impl FnOnce(&mut State)) {
        with(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Writes a word of `Control::left`, which says how a rank ended. The word is final: later words of this process for
    /// the same rank are ignored.
    pub(crate) fn gone(&self, peer: Rank, word: u32) {
        self.with(|state| {
            if !std::mem::replace(&mut state.gone[peer.index()], true) {
                state.write(&self.device, LEFT_OFFSET + 4 * peer.index(), word);
            }
        });
    }

    /// Writes whether a rank is silent.
    pub(crate) fn silent(&self, peer: Rank, silent: bool) {
        let word = if silent { GoneWord::Silent } else { GoneWord::Here };
        self.with(|state| {
            if !state.gone[peer.index()] {
                state.write(&self.device, LEFT_OFFSET + 4 * peer.index(), word as u32);
            }
        });
    }

    /// Writes the abort word of a rank on another machine, if it is the first one.
    pub(crate) fn abort(&self, word: u32) {
        self.with(|state| {
            if !std::mem::replace(&mut state.aborted, true) {
                state.write(&self.device, ABORT_OFFSET, word);
            }
        });
    }

    /// Called before the control block is freed.
    pub(crate) fn close(&self) {
        self.with(|state| state.control = None);
    }
}
