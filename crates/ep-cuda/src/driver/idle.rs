//! Polls whether work on a GPU has finished, without waiting for it.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use ep::Result;

use super::{Device, Event, Relaxed};

/// The pause after a poll that may have broken off a capture: polling again at once would break off its repetition,
/// too.
const CAPTURE_PAUSE: Duration = Duration::from_secs(1);

/// The state of work on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// The work has finished, or can never continue because the context has failed.
    Over,
    /// The work has not finished, or its state is unknown.
    Running,
    /// The driver and the context are not available: the process is ending, or is a forked child of their owner.
    Gone,
}

impl Look {
    pub(super) fn of(answer: sys::CUresult) -> Self {
        use sys::CUresult as Answer;
        match answer {
            Answer::CUDA_SUCCESS
            // After any of the following results the context executes no more work.
            | Answer::CUDA_ERROR_ILLEGAL_ADDRESS
            | Answer::CUDA_ERROR_LAUNCH_TIMEOUT
            | Answer::CUDA_ERROR_ASSERT
            | Answer::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Answer::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Answer::CUDA_ERROR_MISALIGNED_ADDRESS
            | Answer::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Answer::CUDA_ERROR_INVALID_PC
            | Answer::CUDA_ERROR_LAUNCH_FAILED
            | Answer::CUDA_ERROR_ECC_UNCORRECTABLE
            | Answer::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Answer::CUDA_ERROR_EXTERNAL_DEVICE
            | Answer::CUDA_ERROR_UNKNOWN => Self::Over,
            // `CUDA_ERROR_NOT_INITIALIZED` is the result in a forked child, whose parent has the context.
            Answer::CUDA_ERROR_DEINITIALIZED
            | Answer::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Answer::CUDA_ERROR_NOT_INITIALIZED => Self::Gone,
            _ => Self::Running,
        }
    }
}

/// All work that this process has put into any stream of a GPU up to the first poll.
#[derive(Debug)]
pub(crate) struct DeviceMark {
    device: Arc<Device>,
    /// Made in advance: the driver may be out of memory later.
    event: Event,
    state: State,
}

#[derive(Debug)]
enum State {
    Unmarked {
        /// Do not poll before this time.
        from: Option<Instant>,
    },
    Marked,
    /// A thread waits for the GPU and sends the driver's result.
    Awaited(Receiver<sys::CUresult>),
}

impl DeviceMark {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let event = Event::untimed(device)?;
        Ok(Self { device: Arc::clone(device), event, state: State::Unmarked { from: None } })
    }

    /// Polls the work. The first call determines which work that is.
    pub(crate) fn look(&mut self) -> Look {
        let _bound = match self.device.bind_to_look() {
            Ok(bound) => bound,
            Err(look) => return look,
        };
        if let State::Unmarked { from } = &self.state {
            if from.is_some_and(|from| Instant::now() < from) {
                return Look::Running;
            }
            match self.mark() {
                Ok(state) => self.state = state,
                Err(look) => {
                    self.state = State::Unmarked { from: Some(Instant::now() + CAPTURE_PAUSE) };
                    return look;
                }
            }
        }
        match &self.state {
            State::Marked => self.event.look(),
            State::Awaited(answer) => match answer.try_recv() {
                Ok(answer) => {
                    let look = Look::of(answer);
                    if look == Look::Running {
                        self.state = State::Unmarked { from: Some(Instant::now() + CAPTURE_PAUSE) };
                    }
                    look
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => Look::Running,
            },
            State::Unmarked { .. } => Look::Running,
        }
    }

    fn mark(&self) -> std::result::Result<State, Look> {
        use sys::CUresult as Answer;
        if let Some(record) = context_record_event() {
            // SAFETY: the function is `cuCtxRecordEvent`; the context is retained, and the event belongs to it.
            match unsafe { record(self.device.context(), self.event.raw()) } {
                Answer::CUDA_SUCCESS => return Ok(State::Marked),
                Answer::CUDA_ERROR_NOT_SUPPORTED => {}
                answer => return Err(Look::of(answer)),
            }
        }
        // Drivers before CUDA 12.5 can only wait for the context, without a bound: use a thread.
        let (said, answer) = channel();
        let device = Arc::clone(&self.device);
        let wait = move || {
            let _relaxed = Relaxed::new();
            // SAFETY: waits for the context that `bind` has made current.
            let answer = device.bind().map(|_bound| unsafe { sys::cuCtxSynchronize() });
            let _ = said.send(answer.unwrap_or(Answer::CUDA_ERROR_UNKNOWN));
        };
        let started = thread::Builder::new().name(format!("ep-idle-{}", self.device.ordinal)).spawn(wait);
        started.map(|_| State::Awaited(answer)).map_err(|_| Look::Running)
    }
}

type ContextRecordEvent = unsafe extern "C" fn(sys::CUcontext, sys::CUevent) -> sys::CUresult;

/// `cuCtxRecordEvent`, if the driver has it (CUDA 12.5 or later).
fn context_record_event() -> Option<ContextRecordEvent> {
    static FOUND: OnceLock<Option<ContextRecordEvent>> = OnceLock::new();
    // SAFETY: the type is that of the driver's documentation for this name. The driver's library is never unloaded.
    *FOUND.get_or_init(|| unsafe {
        let found = sys::culib().get::<ContextRecordEvent>(b"cuCtxRecordEvent\0").ok()?;
        Some(*found)
    })
}
