//! One link: its two directions, which different threads use, and [`Hold`], which keeps the links of a joining rank open.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::channel::{Channel, End, Incoming};
use super::note::{Clock, kind};
use super::wire::wait;

/// How long sending the leave message waits for a peer that has not read earlier messages.
const FINAL_SEND: Duration = Duration::from_millis(500);

/// Kind of a message on a link, besides `kind::LEFT`, `kind::LOST` and the kinds of `links`.
pub(super) const MESSAGE: u8 = 17;

/// A socket to another rank. Dropping it sends a leave message.
#[derive(Debug)]
pub struct Link {
    sender: LinkSender,
    receiver: LinkReceiver,
    process: Option<u32>,
    is_remote: bool,
}

impl Link {
    pub(super) fn new(channel: Channel, process: Option<u32>, is_remote: bool, hold: Arc<Hold>) -> Self {
        let (sender, receiver) = channel.split();
        let sender = LinkSender { channel: sender, has_left: false, process: std::process::id(), hold };
        Self { sender, receiver: LinkReceiver { channel: receiver }, process, is_remote }
    }

    /// Whether the other end is on another machine: such a link carries no descriptors.
    pub fn is_remote(&self) -> bool {
        self.is_remote
    }

    /// The process ID of the other end, from the system; `None` on another machine, and if that process is not visible in
    /// this PID namespace.
    pub fn process(&self) -> Option<u32> {
        self.process
    }

    /// Like [`LinkSender::send`].
    ///
    /// # Errors
    /// Those of [`LinkSender::send`].
    pub fn send(
        &mut self,
        body: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> io::Result<()> {
        self.sender.send(body, descriptor, timeout)
    }

    /// Like [`LinkReceiver::wait`].
    pub fn wait(&mut self, timeout: Duration) -> Option<LinkEvent> {
        self.receiver.wait(timeout)
    }

    /// A descriptor of the process at the other end (pidfd), readable when the process has ended. `None` where
    /// [`process`](Self::process) is.
    pub fn process_handle(&self) -> Option<OwnedFd> {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        let process = Pid::from_raw(i32::try_from(self.process?).ok()?)?;
        pidfd_open(process, PidfdFlags::empty()).ok()
    }

    /// Splits the link into its sending and its receiving direction, for use by different threads. Both share one
    /// descriptor, which closes when both are dropped.
    pub fn split(self) -> (LinkSender, LinkReceiver) {
        (self.sender, self.receiver)
    }
}

/// Whether the links of a rank may end. A peer that sees a link end reports that the rank has died or left. If a rank
/// fails while it joins, its links must not end before it has sent the reason to the other ranks: otherwise the peer's report
/// of a death or of a leave message could come first.
#[derive(Debug, Default)]
pub(super) struct Hold(Mutex<Option<Vec<Channel>>>);

impl Hold {
    /// While the rank joins: the links that it has dropped. Else `None`.
    fn dropped(&self) -> MutexGuard<'_, Option<Vec<Channel>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While this value exists, the links of a [`Hold`] do not end. Dropping it ends the links that the rank has
/// dropped, with a leave message.
#[derive(Debug)]
pub(super) struct Held(Arc<Hold>);

impl Held {
    pub(super) fn new(hold: &Arc<Hold>) -> Self {
        *hold.dropped() = Some(Vec::new());
        Self(Arc::clone(hold))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let dropped = self.0.dropped().take();
        // `finish` reads what the peer still sends. A thread of this rank that receives on such a link misses these bytes and
        // treats the link as ended. This is harmless because the rank has dropped its end.
        dropped.into_iter().flatten().for_each(Channel::finish);
    }
}

/// The sending direction of a [`Link`]. Dropping it sends a leave message.
#[derive(Debug)]
pub struct LinkSender {
    channel: Channel,
    /// Whether the leave message was sent.
    has_left: bool,
    /// The process that joined. A forked child must not send a leave message.
    process: u32,
    hold: Arc<Hold>,
}

impl LinkSender {
    /// Sends a message with or without a descriptor. Waits at most `timeout` for the peer to read.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the peer does not read in time, [`ErrorKind::BrokenPipe`] when the peer has closed
    /// the link, or an error of the system when it cannot duplicate the descriptor.
    pub fn send(
        &mut self,
        body: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> io::Result<()> {
        if self.has_left {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let (channel, clock) = (&mut self.channel, Clock::new(timeout));
        match descriptor {
            Some(descriptor) => {
                channel.send_descriptor(MESSAGE, body, descriptor.try_clone_to_owned()?);
            }
            None => channel.send(MESSAGE, body),
        }
        let wire = channel.wire_mut();
        // Waits rarely and briefly, because a thread of the peer reads descriptors as they arrive.
        wire.flush_until(clock.deadline);
        match (wire.is_unwritable(), wire.has_unsent()) {
            (true, _) => Err(ErrorKind::BrokenPipe.into()),
            (false, true) => Err(wire.take_shortage().unwrap_or_else(|| ErrorKind::TimedOut.into())),
            (false, false) => Ok(()),
        }
    }

    /// Sends a message if the socket has room for it now, else drops it. No error if the peer has closed the link.
    pub fn try_send(&mut self, body: &[u8]) {
        if self.has_room() {
            self.queue(body);
        }
    }

    /// Whether the socket has taken all earlier messages.
    pub fn has_room(&mut self) -> bool {
        self.channel.wire_mut().flush();
        !self.channel.wire().has_unsent()
    }

    /// Sends a message. If the socket has room for only a part, the rest follows with the next message, or when this value is
    /// dropped. No error if the peer has closed the link.
    pub fn queue(&mut self, body: &[u8]) {
        if !self.has_left {
            self.channel.send(MESSAGE, body);
            self.channel.wire_mut().flush();
        }
    }

    /// Sends a leave message, and no message after it. Waits up to 0.5 s if the peer has not read earlier messages. While
    /// the rank joins, the message waits until the rank has joined or failed.
    pub fn leave(&mut self) {
        if !std::mem::replace(&mut self.has_left, true) && self.process == std::process::id() {
            self.channel.send(kind::LEFT, &[]);
            if let Some(dropped) = &mut *self.hold.dropped() {
                dropped.push(self.channel.take_sending());
                return;
            }
            self.channel.wire_mut().flush_until(Instant::now() + FINAL_SEND);
            self.channel.wire().socket().shut_down();
        }
    }
}

impl AsFd for LinkSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.wire().socket().as_fd()
    }
}

impl Drop for LinkSender {
    fn drop(&mut self) {
        self.leave();
    }
}

/// What a [`LinkReceiver`] received.
#[derive(Debug)]
#[non_exhaustive]
pub enum LinkEvent {
    /// A message of the peer's [`LinkSender`], with its descriptor.
    Message(Vec<u8>, Option<OwnedFd>),
    /// The peer's leave message. No event follows.
    Left,
    /// The peer's process has died, or it sent a malformed message. No event follows.
    Died,
    /// The network does not reach the peer. No event follows.
    Unreachable,
}

/// The receiving direction of a [`Link`].
#[derive(Debug)]
pub struct LinkReceiver {
    channel: Channel,
}

impl LinkReceiver {
    /// The next event, if it has arrived.
    pub fn receive(&mut self) -> Option<LinkEvent> {
        Some(match self.channel.receive()? {
            Incoming::Message(mut message) => match message[0] {
                MESSAGE => {
                    message.drain(..1);
                    LinkEvent::Message(message, self.channel.descriptor())
                }
                kind::LEFT | kind::LOST => LinkEvent::Left,
                // An unknown kind, for example of a later version: an empty message, which the caller can ignore.
                _ => LinkEvent::Message(Vec::new(), self.channel.descriptor()),
            },
            Incoming::End(End::Unreachable) => LinkEvent::Unreachable,
            Incoming::End(_) => LinkEvent::Died,
        })
    }

    /// The next event; `None` if none arrives within `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Option<LinkEvent> {
        let clock = Clock::new(timeout);
        loop {
            match self.receive() {
                None if clock.is_over() => return None,
                None => wait(&mut [self.channel.wire().interest()], clock.deadline),
                received => return received,
            }
        }
    }
}

impl AsFd for LinkReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.wire().socket().as_fd()
    }
}
