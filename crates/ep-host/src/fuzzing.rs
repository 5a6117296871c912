//! Entry points for the targets in `fuzz/`: they pass bytes that a peer could write to the code that reads them.

use std::ops::Range;
use std::sync::Arc;

use ep::layout::TokenCopy;
use ep::{HostConfig, Rail, Rank, World};
use ep_rail::{Loopback, Segment, Streams, WindowLayout};

use crate::control::Control;
use crate::message::{Format, Header, Message, Source};
use crate::status::Status;

/// What the receiver of a message knows before it reads the message.
#[derive(Debug, Clone)]
pub struct Expected {
    /// Whether the message lists its tokens and copies.
    pub lists: bool,
    /// Whether the message has a probability per copy.
    pub probs: bool,
    /// Bytes of a token's row.
    pub row_bytes: usize,
    /// Bytes of a token's scales.
    pub scale_bytes: usize,
    /// The chunk that is due.
    pub chunk: usize,
    /// The sender's tokens in the chunk.
    pub tokens: Range<usize>,
    /// Expert positions of this domain.
    pub positions: Range<usize>,
}

impl Expected {
    fn format(&self) -> Format {
        let Self { lists, probs, row_bytes, scale_bytes, .. } = *self;
        Format { lists, probs, row_bytes, scale_bytes }
    }
}

/// Stores the status with these bytes in a mirror and reads every word of it.
///
/// # Panics
/// When a word of the mirror is out of bounds.
pub fn mirror_status(bytes: &[u8]) {
    let Some(status) = Status::from_bytes(bytes) else { return };
    let world = World::builder().ranks(2).domains(2).experts(2).build().expect("a valid world");
    let segment = Segment::private(Control::bytes(&world).expect("a small world")).expect("memory");
    let mirror = Control::new(Rank(1), Arc::new(segment), &world).expect("long enough");
    mirror.mirror(&status);
    if let crate::control::Health::Failed { at_fault, .. } = mirror.health() {
        assert!(at_fault.index() < world.ranks());
    }
    assert!(mirror.cause().is_none_or(|cause| !cause.contains(char::is_control)));
    assert_eq!(mirror.entered(), status.entered);
}

/// A cache line. Slots made of lines are aligned as real slots are, and end at their last line, so that a sanitizer
/// reports reads beyond them.
#[repr(C, align(64))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Line([u8; 64]);

/// Reads every part of a slot with these bytes, as dispatch and combine do. Returns the numbers of tokens and copies.
///
/// # Errors
/// A text that says why the message is refused.
///
/// # Panics
/// When an accepted message violates the protocol.
pub fn read_slot(bytes: &[u8], expected: &Expected) -> Result<(usize, usize), String> {
    let mut lines = vec![Line([0; 64]); bytes.len().max(size_of::<Header>()).div_ceil(64)];
    let slot: &mut [u8] = bytemuck::cast_slice_mut(&mut lines);
    slot[..bytes.len()].copy_from_slice(bytes);
    let header = bytemuck::pod_read_unaligned(&slot[..size_of::<Header>()]);
    let message = Message::of(header, slot.as_ptr(), slot.len(), expected.format(), expected.chunk)?;
    // Without lists the receiver knows both numbers from its handle and refuses others. Here only their bounds are
    // known.
    let most = (expected.tokens.len(), expected.tokens.len() * expected.positions.len());
    if !expected.lists && (message.tokens > most.0 || message.copies > most.1) {
        return Err(format!("{} tokens and {} copies, of {most:?}", message.tokens, message.copies));
    }
    let mut sum = 0u64;
    for token in 0..message.tokens {
        let parts = [(message.row(token), expected.row_bytes), (message.scales(token), expected.scale_bytes)];
        for (start, len) in parts {
            // SAFETY: this is the property under test: rows and scales of an accepted message lie inside its slot.
            let part = unsafe { std::slice::from_raw_parts(start, len) };
            sum += part.iter().map(|&byte| u64::from(byte)).sum::<u64>();
        }
    }
    // Keeps the compiler from removing the reads.
    std::hint::black_box(sum);
    for copy in 0..message.copies {
        std::hint::black_box(message.prob(copy));
    }
    if expected.lists {
        let source = Source { tokens: expected.tokens.clone(), positions: expected.positions.clone() };
        let list = message.lists(&source)?;
        let entries = list.entries(expected.tokens.clone());
        assert_eq!(entries, 0..message.tokens, "every token is one of the chunk");
        assert_eq!(list.copies_in(entries.clone()), message.copies);
        for entry in entries {
            let copies = list.copies(entry);
            assert!(!copies.is_empty() && copies.is_sorted_by(|a, b| a.position < b.position));
            assert!(copies.iter().all(|copy| expected.positions.contains(&(copy.position as usize))));
        }
    }
    Ok((message.tokens, message.copies))
}

/// A valid message. `tokens` are, per token, its index in the chunk and the expert positions of its copies.
pub fn slot_of(expected: &Expected, tokens: &[(u32, &[u32])]) -> Option<Vec<u8>> {
    let copies: usize = tokens.iter().map(|(_, positions)| positions.len()).sum();
    let sections = expected.format().sections_within(tokens.len(), copies, 1 << 20)?;
    let mut slot = vec![0; sections.end.max(size_of::<Header>())];
    let header = Header::of_counts(expected.chunk, tokens.len(), copies);
    slot[..size_of::<Header>()].copy_from_slice(bytemuck::bytes_of(&header));
    let mut put = |at: usize, bytes: &[u8]| slot[at..at + bytes.len()].copy_from_slice(bytes);
    let mut copy = 0;
    for (at, (index, positions)) in tokens.iter().enumerate().filter(|_| expected.lists) {
        put(sections.index + 4 * at, &index.to_le_bytes());
        put(sections.ends + 4 * at, &((copy + positions.len()) as u32).to_le_bytes());
        for &position in *positions {
            let entry = TokenCopy { position, row: copy as u32 };
            put(sections.copies + size_of::<TokenCopy>() * copy, bytemuck::bytes_of(&entry));
            copy += 1;
        }
    }
    Some(slot)
}

/// Runs a script on rank 0 of a world of three domains: calls of rank 0, and writes of its peers into shared memory.
/// Ends at the first error, as an operator does.
///
/// # Panics
/// When a call of rank 0 panics, or returns an error that names no peer.
pub fn drive_rails(script: &[u8]) {
    let mut config = HostConfig::default();
    (config.slots, config.slot_bytes) = (2, 64);
    let layout = WindowLayout::new(3, &config).expect("a small window");
    let window = || Arc::new(Segment::private(layout.bytes()).expect("a little memory"));
    let windows: Vec<_> = (0..3).map(|_| window()).collect();
    let rings = Loopback::reserved(3, WindowLayout::signals(config.slots)).checked().expect("a small window");
    let rail = Rail::new((0..3).map(Rank).collect(), 0).expect("a rail");
    // SAFETY: only this thread uses the windows.
    let loopback =
        unsafe { Loopback::new(rail.clone(), windows.clone(), WindowLayout::signals(config.slots)) };
    let loopback = loopback.expect("windows with room for the rings");
    let own = Arc::clone(&windows[0]);
    let rails = Streams::new(&rail, own, &config, Box::new(loopback)).expect("a small window");

    let mut steps = script.iter().copied();
    while let Some(step) = steps.next() {
        let mut next = || steps.next().unwrap_or(0);
        let domain = 1 + usize::from(step >> 6 & 1);
        let done = match step & 7 {
            // A peer writes a word at the front of a window, its own or that of rank 0. Small numbers are the most
            // likely to be valid.
            0 | 1 => {
                let at = usize::from(u16::from_le_bytes([next(), next()])) * 4 % rings;
                let value =
                    u32::from_le_bytes([next(), next(), next(), if step & 8 == 0 { 0 } else { next() }]);
                let window = &windows[usize::from(step >> 4 & 3) % 3];
                // SAFETY: `at` checks the bounds; a multiple of 4, so aligned; only this thread uses the window.
                unsafe { window.at(at, 4).cast::<u32>().write(value) };
                Ok(())
            }
            2 => rails.poll(),
            3 => match rails.claim_send(domain, u64::from(next())) {
                // SAFETY: the slot is claimed, and only this thread uses the windows.
                Some((_, claim)) => unsafe { rails.post(claim, usize::from(next()) % 65) }.map(drop),
                None => Ok(()),
            },
            4 => match rails.claim_receive(domain, u64::from(next())) {
                Some((_, claim)) => {
                    // SAFETY: a claimed slot has 64 bytes, and only this thread uses it.
                    std::hint::black_box(unsafe { rails.incoming(claim).add(63).read() });
                    // SAFETY: as above.
                    unsafe { rails.release(claim) }.map(drop)
                }
                None => Ok(()),
            },
            5 => {
                std::hint::black_box((rails.can_send(domain), rails.can_receive(domain)));
                Ok(())
            }
            _ => {
                let (sent, received) = rails.position(domain);
                assert!(sent <= 255 && received <= 255, "more messages are claimed than were requested");
                Ok(())
            }
        };
        if let Err(error) = done {
            assert!(matches!(error, ep::Error::Peer(_)), "an error of a peer does not name a peer: {error}");
            return;
        }
    }
}
