//! Entry points for the target in `fuzz/`: bytes that a peer could send, and saved states that a user could open.

use ep::{Element, Rank, Result};
use ep_codec::{Host, SharedExpert, reseal, reseal_state, xxh64};

use crate::bodies::Bodies;
use crate::header::{HEADER_BYTES, Header, Kind};
use crate::inbox::Message;
use crate::owned::{Owned, Returned};
use crate::replicas::{Decoded, Replicas, SharedExperts, Undecoded};
use crate::settings::{Domain, Settings, Shape};
use crate::state::Saved;

/// Weights of an expert.
const ELEMENTS: usize = 12;
const EXPERTS: usize = 2;
/// Bytes of a checksum, which ends a header and a state.
const CHECK: usize = 8;

/// Replaces the last bytes by the checksum of those before.
fn seal(bytes: &mut [u8]) {
    if let Some((body, check)) = bytes.split_last_chunk_mut::<CHECK>() {
        *check = xxh64(body, 0).to_le_bytes();
    }
}

/// Parses a header with these bytes after its magic and version, and with a correct checksum.
///
/// # Panics
/// When writing and parsing the header again changes it.
pub fn header(bytes: &[u8]) {
    let mut header = Header::bare(Kind::Left, Rank(0), 0).to_bytes();
    let given = &bytes[..bytes.len().min(HEADER_BYTES - CHECK - 5)];
    header[5..][..given.len()].copy_from_slice(given);
    seal(&mut header);
    if let Ok(header) = Header::parse(&header) {
        assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
    }
}

/// Decodes a message of weights. The first byte of the script chooses the number of streams of an expert, and whether
/// the part of a shared expert follows. Then each stream has a byte with its length, and its bytes, which get a correct
/// checksum.
///
/// # Panics
/// When a refused message changes the step of the replicas.
pub fn weights(script: &[u8]) {
    let Some((&choice, mut script)) = script.split_first() else { return };
    let mut shared = SharedExperts::<f32>::new(2);
    let zeros = SharedExpert::from_weights(vec![0.0; ELEMENTS]).expect("zeros are finite");
    let base = zeros.fingerprint();
    shared.learn(zeros);
    let mut body = Vec::new();
    while let Some((&length, rest)) = script.split_first() {
        let (stream, rest) = rest.split_at(usize::from(length).min(rest.len()));
        let start = body.len();
        body.extend(stream);
        reseal(&mut body[start..], base);
        script = rest;
    }
    let (streams, has_part) = (1 + u16::from(choice & 1), choice & 2 != 0);
    let header = Header { streams, step: 5, ..Header::bare(Kind::Weights, Rank(1), 0) };
    let mut replicas = Replicas::new(EXPERTS, ELEMENTS);
    let mut out = vec![0.0; EXPERTS * ELEMENTS];
    let decoded = replicas.decode(&Host, &Message { header, body }, has_part, &shared, &mut out);
    match decoded {
        Ok(Decoded::Done(part)) => {
            assert_eq!(part.map(|part| part.len()), has_part.then_some(ELEMENTS));
            assert_eq!(replicas.step, Some(5));
        }
        Ok(Decoded::LacksBase | Decoded::LacksShared) => assert_eq!(replicas.step, None),
        Err(Undecoded::Message(problem)) => assert!(!problem.is_empty() && replicas.step.is_none()),
        Err(Undecoded::Place(error)) => panic!("main memory does not fail: {error}"),
    }
}

/// The migration to which the states of [`state`] belong.
struct Fixed {
    domain: Domain,
    shape: Shape,
    settings: Settings,
}

impl Fixed {
    fn new(shared: bool) -> Self {
        let (weights, gradients) = if shared { ("shared:0.2", "topk:0.2") } else { ("delta:0.2", "int8") };
        let weights = weights.parse().expect("a codec");
        let gradients = gradients.parse().expect("a codec");
        Self {
            domain: Domain::new(Rank(0), &[Rank(0), Rank(1)]).expect("ascending ranks"),
            shape: Shape { experts_per_rank: EXPERTS, expert_elements: vec![ELEMENTS] },
            settings: Settings { weights, gradients, ..Settings::default() },
        }
    }

    fn layer(&self) -> (Owned<f32>, Vec<Returned>, SharedExperts<f32>) {
        let Settings { weights, gradients, .. } = self.settings;
        let owned = Owned::new(Host, 0, weights, EXPERTS, ELEMENTS).expect("a density in range");
        let returned = Returned::new(Host, 0, gradients, EXPERTS, ELEMENTS).expect("a density in range");
        (owned, vec![returned], SharedExperts::new(2))
    }

    /// A state without layers.
    fn saved(&self, step: u64) -> Saved {
        Saved::new(&self.domain, &self.shape, &self.settings, Element::F32, step)
    }

    fn restore(&self, saved: &Saved) -> Result<()> {
        saved.check(&self.domain, &self.shape, &self.settings, Element::F32)?;
        let (mut owned, mut returned, mut shared) = self.layer();
        saved.restore(0, &mut owned, &mut returned, self.settings.gradients, &mut shared)?;
        assert!(shared.known().all(|shared| shared.weights().len() == ELEMENTS));
        let bodies = Bodies::default();
        let _ = owned.encode(&[1.0; EXPERTS * ELEMENTS], shared.newest(), &bodies);
        let _ = returned[0].encode(&[1.0_f32; EXPERTS * ELEMENTS], &bodies);
        Ok(())
    }
}

/// Restores a state with these bytes as its layers: first with a correct head and checksum, then also with correct
/// checksums of its parts. The first byte chooses the codecs.
///
/// # Panics
/// When writing the state again changes it, or when a shared expert of a different length is restored.
pub fn state(bytes: &[u8]) {
    let Some((&choice, layers)) = bytes.split_first() else { return };
    let fixed = Fixed::new(choice & 1 != 0);
    let mut sealed = fixed.saved(3).to_bytes();
    sealed.truncate(sealed.len() - CHECK);
    sealed.extend(layers);
    sealed.extend([0; CHECK]);
    seal(&mut sealed);
    let Ok(saved) = Saved::from_bytes(&sealed) else { return };
    assert_eq!(saved.to_bytes(), sealed);
    let _ = fixed.restore(&saved);
    let mut resealed = fixed.saved(3);
    for [mut weights, mut gradients, mut shared] in saved.layers().iter().cloned() {
        weights.iter_mut().chain(&mut gradients).for_each(|part| reseal_state(part));
        shared.iter_mut().for_each(|part| reseal(part, 0));
        resealed.push_parts([weights, gradients, shared]);
    }
    let _ = fixed.restore(&resealed);
}

/// An input of [`state`] that can be restored.
///
/// # Errors
/// Those of the codecs.
pub fn state_of(shared: bool) -> Result<Vec<u8>> {
    let fixed = Fixed::new(shared);
    let (mut owned, mut returned, mut all) = fixed.layer();
    if shared {
        all.learn(SharedExpert::from_weights(vec![0.5; ELEMENTS]).expect("finite weights"));
    }
    let numbers: Vec<f32> = (0..EXPERTS * ELEMENTS).map(|at| at as f32 / 8.0).collect();
    let bodies = Bodies::default();
    owned.encode(&numbers, all.newest(), &bodies)?;
    returned[0].encode(&numbers, &bodies)?;
    let mut saved = fixed.saved(3);
    let head = saved.to_bytes().len() - CHECK;
    saved.push(&owned, &returned, &all).expect("main memory does not fail");
    let bytes = saved.to_bytes();
    let input = [&[shared.into()], &bytes[head..bytes.len() - CHECK]].concat();
    fixed.restore(&saved).map(|()| input)
}
