//! How the two ends of a connection prove to each other that they are members of one job.
//!
//! ```text
//!  caller                                             listener
//!    │ offer:  version, role, rank of both ends, ranks,   │
//!    │         generation, nonce, code of the secret ────▶│  without the secret: no valid offer, no answer
//!    │◀─────── answer: nonce, code over both ─────────────│  proves that the listener knows the secret
//!    │ proof:  code over offer and answer ───────────────▶│  proves that the caller is not a replay
//! ```
//!
//! A replayed offer gets an answer, but the answer is useless without the secret: the proof must cover the answer's
//! fresh nonce. The two keys for the messages that follow, one for each direction, are derived from the secret, the
//! offer and the answer.

use std::time::Instant;

use super::channel::{Channel, Direction};
use super::secret::{Code, Key, random};
use super::wire::{Piece, Socket, Wire};
use crate::error::Result;
use crate::topology::Rank;

/// First bytes of an offer, with the version of the protocol.
const MAGIC: [u8; 8] = *b"hyb-ep03";
const OFFER: usize = 8 + 4 * 4 + 8 + 32 + 32;
const ANSWER: usize = 32 + 32;
const PROOF: usize = 32;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// From a rank to rank 0, for the rendezvous.
    Rendezvous = 1,
    /// From a rank to another rank: for descriptors of memory on one machine, for the status of ranks between machines.
    #[cfg(target_os = "linux")]
    Link = 2,
}

/// The identity that a caller states in its offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) ranks: u32,
    /// [`Member::generation`](super::Member::generation).
    pub(super) generation: u64,
}

fn offer(key: &Key, role: Role, claim: Claim, nonce: &[u8; 32]) -> Vec<u8> {
    let mut offer = MAGIC.to_vec();
    for word in [role as u32, claim.from.0, claim.to.0, claim.ranks] {
        offer.extend(word.to_le_bytes());
    }
    offer.extend(claim.generation.to_le_bytes());
    offer.extend(nonce);
    let code = key.code(b"offer", &[&offer]);
    offer.extend(code);
    offer
}

/// The claim of an offer; `None` if the offer is malformed, for another role, or made without the key.
fn read_offer(key: &Key, role: Role, bytes: &[u8]) -> Option<Claim> {
    let (said, code) = bytes.split_at_checked(OFFER - size_of::<Code>())?;
    let word = |at: usize| Some(u32::from_le_bytes(said.get(at..at + 4)?.try_into().ok()?));
    if !said.starts_with(&MAGIC) || word(8)? != role as u32 || !key.verify(b"offer", &[said], code) {
        return None;
    }
    let generation = u64::from_le_bytes(said.get(24..32)?.try_into().ok()?);
    Some(Claim { from: Rank(word(12)?), to: Rank(word(16)?), ranks: word(20)?, generation })
}

fn answer(key: &Key, offer: &[u8], nonce: &[u8; 32]) -> Vec<u8> {
    let code = key.code(b"answer", &[offer, nonce]);
    [&nonce[..], &code].concat()
}

fn answers(key: &Key, offer: &[u8], bytes: &[u8]) -> bool {
    bytes.split_at_checked(32).is_some_and(|(nonce, code)| key.verify(b"answer", &[offer, nonce], code))
}

/// The two directions of the connection with this offer and answer: from the caller, then from the listener.
fn directions(key: &Key, offer: &[u8], answer: &[u8]) -> [Direction; 2] {
    [&b"from the caller"[..], b"from the listener"]
        .map(|purpose| Direction::new(key.derive(purpose, &[offer, answer])))
}

/// The progress of a handshake.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "returned by value and taken apart at once")]
pub(super) enum Progress<T> {
    /// This end waits for more bytes.
    Waiting,
    /// The other end has proven that it knows the secret. (The listener may still reject this end's proof.)
    Done(T, Channel),
    /// The other end is gone, or does not know the secret.
    Unauthenticated,
}

/// The handshake of an incoming connection.
#[derive(Debug)]
pub(super) struct Inbound {
    wire: Option<Wire>,
    pub(super) since: Instant,
    /// The valid offer, the answer to it, and the offer's claim.
    offered: Option<(Vec<u8>, Vec<u8>, Claim)>,
}

impl Inbound {
    pub(super) fn new(socket: Socket) -> std::io::Result<Self> {
        Ok(Self { wire: Some(Wire::new(socket)?), since: Instant::now(), offered: None })
    }

    /// Whether the caller has sent a valid offer. (The offer may be a replay.)
    pub(super) fn is_known(&self) -> bool {
        self.offered.is_some()
    }

    pub(super) fn wire(&self) -> Option<&Wire> {
        self.wire.as_ref()
    }

    /// Advances the handshake with the bytes that have arrived.
    pub(super) fn advance(&mut self, key: &Key, role: Role) -> Result<Progress<Claim>> {
        let Some(wire) = &mut self.wire else { return Ok(Progress::Unauthenticated) };
        if self.offered.is_none() {
            let Some(offer) = wire.take(OFFER) else {
                return Ok(if wire.ended() { Progress::Unauthenticated } else { Progress::Waiting });
            };
            let Some(claim) = read_offer(key, role, &offer) else { return Ok(Progress::Unauthenticated) };
            let answer = answer(key, &offer, &random()?);
            wire.send(Piece::Own(answer.clone()));
            self.offered = Some((offer, answer, claim));
        }
        wire.flush();
        let Some((offer, answer, claim)) = &self.offered else { return Ok(Progress::Waiting) };
        let Some(proof) = wire.take(PROOF) else {
            return Ok(if wire.ended() { Progress::Unauthenticated } else { Progress::Waiting });
        };
        if !key.verify(b"proof", &[offer, answer], &proof) {
            return Ok(Progress::Unauthenticated);
        }
        let [inward, outward] = directions(key, offer, answer);
        let claim = *claim;
        let wire = self.wire.take();
        Ok(wire.map_or(Progress::Unauthenticated, |wire| {
            Progress::Done(claim, Channel::new(wire, inward, outward))
        }))
    }
}

/// The handshake of an outgoing connection.
#[derive(Debug)]
pub(super) struct Outbound {
    wire: Option<Wire>,
    offer: Vec<u8>,
    pub(super) since: Instant,
}

impl Outbound {
    pub(super) fn new(socket: Socket, key: &Key, role: Role, claim: Claim) -> Result<Option<Self>> {
        let offer = offer(key, role, claim, &random()?);
        let Ok(mut wire) = Wire::new(socket) else { return Ok(None) };
        wire.send(Piece::Own(offer.clone()));
        wire.flush();
        Ok(Some(Self { wire: Some(wire), offer, since: Instant::now() }))
    }

    pub(super) fn wire(&self) -> Option<&Wire> {
        self.wire.as_ref()
    }

    /// Advances the handshake with the bytes that have arrived.
    pub(super) fn advance(&mut self, key: &Key) -> Progress<()> {
        let Some(wire) = &mut self.wire else { return Progress::Unauthenticated };
        wire.flush();
        let Some(answer) = wire.take(ANSWER) else {
            return if wire.ended() { Progress::Unauthenticated } else { Progress::Waiting };
        };
        if !answers(key, &self.offer, &answer) {
            return Progress::Unauthenticated;
        }
        let [outward, inward] = directions(key, &self.offer, &answer);
        wire.send(Piece::Own(key.code(b"proof", &[&self.offer, &answer]).to_vec()));
        wire.flush();
        let wire = self.wire.take();
        wire.map_or(Progress::Unauthenticated, |wire| Progress::Done((), Channel::new(wire, inward, outward)))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    const CLAIM: Claim = Claim { from: Rank(1), to: Rank(0), ranks: 2, generation: 0 };

    /// A caller and a listener with their keys.
    fn ends(caller: &Key) -> (Outbound, Inbound) {
        let (one, other) = UnixStream::pair().expect("a pair of sockets");
        let outbound = Outbound::new(Socket::Unix(one), caller, Role::Rendezvous, CLAIM);
        let outbound = outbound.expect("random bytes").expect("a wire over a socket");
        (outbound, Inbound::new(Socket::Unix(other)).expect("a wire over a socket"))
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn both_ends_prove_the_secret() {
        let key = Key::of(b"test", b"");
        let (mut outbound, mut inbound) = ends(&key);
        assert!(!inbound.is_known() && inbound.wire().is_some());
        assert!(matches!(inbound.advance(&key, Role::Rendezvous).unwrap(), Progress::Waiting));
        assert!(inbound.is_known(), "the offer is valid");
        assert!(matches!(outbound.advance(&key), Progress::Done((), _)));
        let Progress::Done(claim, _) = inbound.advance(&key, Role::Rendezvous).unwrap() else {
            panic!("the proof is valid")
        };
        assert_eq!(claim, CLAIM);
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_listener_drops_an_offer_that_it_cannot_verify() {
        let (own, foreign) = (Key::of(b"test", b""), Key::of(b"other", b""));
        for (key, role) in [(&foreign, Role::Rendezvous), (&own, Role::Link)] {
            let (_outbound, mut inbound) = ends(&own);
            assert!(matches!(inbound.advance(key, role).unwrap(), Progress::Unauthenticated));
            assert!(!inbound.is_known());
        }
    }

    /// A listener without the secret answers, for example with an answer that it has overheard.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_caller_refuses_an_answer_to_another_offer_or_without_the_secret() {
        let (own, foreign) = (Key::of(b"test", b""), Key::of(b"other", b""));
        for (key, same_offer, accepted) in [(&own, true, true), (&own, false, false), (&foreign, true, false)]
        {
            let (one, other) = UnixStream::pair().unwrap();
            let mut outbound =
                Outbound::new(Socket::Unix(one), &own, Role::Rendezvous, CLAIM).unwrap().unwrap();
            let mut listener = Wire::new(Socket::Unix(other)).unwrap();
            let offered = listener.take(OFFER).unwrap();
            let offered = if same_offer { offered } else { offer(&own, Role::Rendezvous, CLAIM, &[7; 32]) };
            listener.send(Piece::Own(answer(key, &offered, &[9; 32])));
            listener.flush();
            assert_eq!(matches!(outbound.advance(&own), Progress::Done(..)), accepted);
        }
    }
}
