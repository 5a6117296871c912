//! Messages from one peer: parts are put together, and complete messages go to their receives.

use std::collections::VecDeque;

use ep_migrate::{CarrierError, Lane};

use crate::part::LANES;
use crate::transfer::Promise;

/// The messages from one peer.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    lanes: [Arrivals; LANES],
}

#[derive(Debug, Default)]
struct Arrivals {
    /// Receives that no message has completed, with the number of bytes that each has room for.
    receives: VecDeque<(usize, Promise<Vec<u8>>)>,
    /// The message of which not all parts have arrived.
    message: Option<Unfinished>,
}

#[derive(Debug)]
struct Unfinished {
    /// As long as the message.
    bytes: Vec<u8>,
    /// Bytes that have arrived.
    arrived: usize,
}

impl Incoming {
    /// Adds a receive with room for `capacity` bytes.
    pub(crate) fn post(&mut self, lane: Lane, capacity: usize, received: Promise<Vec<u8>>) {
        self.lanes[lane as usize].receives.push_back((capacity, received));
    }

    /// Takes a part of `bytes` bytes of a message of `length` bytes. `copy` copies the part into memory of that length.
    ///
    /// # Errors
    /// What no correct peer sends.
    pub(crate) fn take(
        &mut self,
        lane: Lane,
        bytes: usize,
        length: u64,
        copy: impl FnOnce(&mut [u8]),
    ) -> Result<(), String> {
        let arrivals = &mut self.lanes[lane as usize];
        let Some(&(capacity, _)) = arrivals.receives.front() else {
            return Err(format!("a message of {length} bytes without a receive"));
        };
        let mut message = match arrivals.message.take() {
            Some(message) if message.bytes.len() as u64 != length => {
                let before = message.bytes.len();
                return Err(format!("a part of a message of {length} bytes inside one of {before}"));
            }
            Some(message) => message,
            None if length > capacity as u64 => {
                return Err(format!("a message of {length} bytes for a receive of {capacity}"));
            }
            // The system's zeroed pages cost nothing until a part is copied there.
            None => Unfinished { bytes: vec![0; length as usize], arrived: 0 },
        };
        let end = message.arrived + bytes;
        if end as u64 > length || (bytes == 0 && length > 0) {
            let before = message.arrived;
            return Err(format!("a part of {bytes} bytes after {before} of a message of {length}"));
        }
        copy(&mut message.bytes[message.arrived..end]);
        message.arrived = end;
        if end as u64 == length {
            let (_, received) = arrivals.receives.pop_front().expect("the front was found above");
            received.complete(Ok(message.bytes));
        } else {
            arrivals.message = Some(message);
        }
        Ok(())
    }

    /// Ends all receives with an error.
    pub(crate) fn fail(&mut self, error: &CarrierError) {
        for (_, received) in self.lanes.iter_mut().flat_map(|lane| lane.receives.drain(..)) {
            received.complete(Err(error.clone()));
        }
    }
}
