//! Copies between lanes by a kernel of one block, which takes commands from host memory.
//!
//! A copy by the driver costs the proxy 6 to 12 us (docs/lab/044), which a put of a network card does not. Here the proxy
//! writes a command, and the kernel is launched only if it is not running. It ends by itself when no command has come for
//! [`PATIENCE`], because whoever waits for all work of the GPU waits for this kernel, too.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ep::Result;

use super::copies::{LaneCopier, Ranges};
use crate::device::KernelKey;
use crate::driver::{Device, DeviceAddress, HostWords as _, Kernel, Mapped, Relaxed, Stream};
use crate::kernels::Kernels;
use crate::params::{LANE_COMMAND_WORDS, LANE_COPY_THREADS, LaneCopyParams};

/// Commands in the ring. A power of two, so that a command keeps its slot when numbers wrap around.
const SLOTS: usize = 1024;
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

impl LaneCopier for ByKernel {
    fn begin(&mut self, stream: &Stream, &Ranges { number, from, to, bytes }: &Ranges) -> Result<()> {
        let words = command(from, to, bytes);
        let at = 2 * LANE_COMMAND_WORDS * (number as usize % SLOTS);
        for (word, place) in words.into_iter().zip((at..).step_by(2)) {
            self.commands.write_pair(place, word, number);
        }
        self.commanded = number;
        self.go_on(stream)
    }

    /// Launches the kernel if it has left while there are commands. It may leave just when a command is written, so the
    /// engine calls this until the copy has ended.
    fn go_on(&mut self, stream: &Stream) -> Result<()> {
        if self.left.read(0) != self.launched {
            return Ok(());
        }
        fence(Ordering::Acquire);
        let ended = self.ended.read(0);
        if ended == self.commanded {
            return Ok(());
        }
        let launch = self.launched.wrapping_add(1);
        let params = LaneCopyParams {
            commands: self.commands.address(),
            ended: self.ended.address(),
            left: self.left.address(),
            first: ended.wrapping_add(1),
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
