//! Copies between lanes by a kernel of one block, which takes commands from host memory.
//!
//! A copy by the driver costs the proxy 6 to 12 us (docs/lab/044), which a put of a network card does not. Here the proxy
//! writes a command, and the kernel is launched only if it is not running. It ends by itself when no command has come for
//! [`PATIENCE`], because whoever waits for all work of the GPU waits for this kernel, too.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ep::{CallerError, Result};

use super::copies::{LaneCopier, Ranges};
use crate::device::KernelKey;
use crate::driver::{Device, DeviceAddress, HostWords as _, Kernel, Mapped, Relaxed, Stream};
use crate::kernels::Kernels;
use crate::params::{LANE_COMMAND_WORDS, LANE_COPY_THREADS, LaneCopyParams};

/// Commands in the ring. A power of two, so that a command keeps its slot when numbers wrap around.
const SLOTS: usize = 1024;
/// Maximum number of bytes of a command: the kernel counts in 32 bits, with steps beyond the end.
const MOST_BYTES: u32 = 1 << 31;
/// How long the kernel waits for a command before it ends.
const PATIENCE: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct ByKernel {
    kernel: Arc<Kernel>,
    commands: Mapped,
    ended: Arc<Mapped>,
    /// One word: the number of the last launch that takes no further commands.
    left: Mapped,
    /// The number of the last launch.
    launched: u32,
    /// The number of the last command.
    commanded: u32,
}

impl ByKernel {
    pub(super) fn new(device: &Arc<Device>, ended: &Arc<Mapped>) -> Result<Self> {
        Ok(Self {
            kernel: Kernels::get().load(device, KernelKey::LaneCopy, false)?,
            commands: Mapped::new(device, 2 * LANE_COMMAND_WORDS * SLOTS)?,
            ended: Arc::clone(ended),
            left: Mapped::new(device, 1)?,
            launched: 0,
            commanded: 0,
        })
    }
}

/// What the host has read of the kernel's words, and what it has commanded.
#[derive(Debug, Clone, Copy)]
struct State {
    /// The number of the last launch, and of the last one that takes no further commands.
    launched: u32,
    left: u32,
    /// The number of the last command, and of the last copy that has ended.
    commanded: u32,
    ended: u32,
}

impl State {
    /// The number of the next launch and of its first command, if one is needed: the kernel has left, and not all copies have
    /// ended. The kernel may leave just when a command is written.
    fn next_launch(self) -> Option<(u32, u32)> {
        let is_needed = self.left == self.launched && self.ended != self.commanded;
        is_needed.then(|| (self.launched.wrapping_add(1), self.ended.wrapping_add(1)))
    }
}

impl LaneCopier for ByKernel {
    fn begin(&mut self, stream: &Stream, &Ranges { number, from, to, bytes }: &Ranges) -> Result<()> {
        let bytes = u32::try_from(bytes).ok().filter(|&bytes| bytes <= MOST_BYTES).ok_or_else(|| {
            let (what, expected) = ("a put that a kernel copies", MOST_BYTES as usize);
            CallerError::Shape { what, expected, found: bytes, unit: "bytes" }
        })?;
        let at = 2 * LANE_COMMAND_WORDS * (number as usize % SLOTS);
        for (word, place) in command(from, to, bytes).into_iter().zip((at..).step_by(2)) {
            self.commands.write_pair(place, word, number);
        }
        self.commanded = number;
        self.go_on(stream)
    }

    fn go_on(&mut self, stream: &Stream) -> Result<()> {
        let left = self.left.read(0);
        // The kernel writes the number of its last copy before it says that it has left.
        fence(Ordering::Acquire);
        let Self { launched, commanded, .. } = *self;
        let state = State { launched, left, commanded, ended: self.ended.read(0) };
        let Some((launch, first)) = state.next_launch() else { return Ok(()) };
        let params = LaneCopyParams {
            commands: self.commands.address(),
            ended: self.ended.address(),
            left: self.left.address(),
            first,
            launch,
            slots: SLOTS as u32,
            patience_ns: PATIENCE.as_nanos() as u32,
        };
        // Another thread may be capturing a graph.
        let _relaxed = Relaxed::new();
        // SAFETY: the parameters are this kernel's. The memory that they name, and that commands name, stays until the
        // stream has executed the launch: `Copying` frees it after that.
        unsafe { self.kernel.launch(stream, 1, LANE_COPY_THREADS as u32, 0, &params) }?;
        self.launched = launch;
        Ok(())
    }

    fn most(&self) -> usize {
        SLOTS
    }
}

/// The data of a command's words.
fn command(from: DeviceAddress, to: DeviceAddress, bytes: u32) -> [u32; 5] {
    [from as u32, (from >> 32) as u32, to as u32, (to >> 32) as u32, bytes]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_launched_where_it_has_left_and_copies_have_not_ended() {
        let state = |launched, left, commanded, ended| State { launched, left, commanded, ended };
        for (state, expected) in [
            (state(0, 0, 0, 0), None),
            (state(0, 0, 1, 0), Some((1, 1))),
            (state(1, 0, 5, 2), None),
            (state(1, 1, 5, 2), Some((2, 3))),
            (state(1, 1, 5, 5), None),
            // Numbers wrap around.
            (state(u32::MAX, u32::MAX, 1, u32::MAX), Some((0, 0))),
            (state(0, u32::MAX, 1, u32::MAX), None),
        ] {
            assert_eq!(state.next_launch(), expected, "{state:?}");
        }
    }

    #[test]
    fn a_command_has_the_words_that_the_kernel_reads() {
        let words = command(0x1234_5678_9ABC_DEF0, 0xFEDC_BA98_7654_3210, 77);
        assert_eq!(words, [0x9ABC_DEF0, 0x1234_5678, 0x7654_3210, 0xFEDC_BA98, 77]);
        assert!(words.len() <= LANE_COMMAND_WORDS && SLOTS.is_power_of_two());
    }
}
