//! The buckets of a plan, and the state of their codec.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ep::{CallerError, Element, Rank, Result};
use ep_codec::{GradientCodec, GradientEncoder};

use super::shares::{Atom, Datacenters};
use super::{Parts, Turn, lock};
use crate::state::{Saved, damaged};

/// Gradients that are reduced together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// Number of elements.
    pub elements: usize,
    /// Type of the elements. Sums are computed in f32 for every type.
    pub element: Element,
}

pub(crate) struct BucketPlan {
    pub(crate) buckets: Vec<Held>,
}

/// A bucket, and this rank's share of it.
pub(crate) struct Held {
    pub(crate) elements: usize,
    pub(crate) element: Element,
    atoms: Vec<Atom>,
    /// One for each atom.
    encoders: Mutex<Vec<GradientEncoder>>,
}

impl BucketPlan {
    pub(crate) fn new(
        datacenters: &Datacenters,
        codec: GradientCodec,
        buckets: &[Bucket],
        saved: Option<&[u8]>,
    ) -> Result<Self> {
        let refused = |bucket, error: ep_codec::Error| -> ep::Error {
            CallerError::Dense { bucket, problem: error.to_string() }.into()
        };
        let mut held = Vec::new();
        for (at, bucket) in buckets.iter().enumerate() {
            let atoms = datacenters.atoms(bucket.elements);
            let encoders = atoms.iter().map(|atom| GradientEncoder::new(codec, atom.elements.len()));
            let encoders = encoders.collect::<Result<_, _>>().map_err(|error| refused(at, error))?;
            let Bucket { elements, element } = *bucket;
            held.push(Held { elements, element, atoms, encoders: Mutex::new(encoders) });
        }
        let plan = Self { buckets: held };
        let Some(saved) = saved else { return Ok(plan) };
        let saved = Saved::from_bytes(saved)?;
        saved.check_identity(&plan.identity(datacenters, codec))?;
        let fits = |(held, lists): (&Held, &[Vec<Vec<u8>>; 3])| held.atoms.len() == lists[0].len();
        if saved.layers().len() != buckets.len() || !plan.buckets.iter().zip(saved.layers()).all(fits) {
            return Err(damaged("it lacks buckets or shares"));
        }
        for (bucket, (held, [carries, ..])) in plan.buckets.iter().zip(saved.layers()).enumerate() {
            for (encoder, (atom, carry)) in
                lock(&held.encoders).iter_mut().zip(held.atoms.iter().zip(carries))
            {
                *encoder = GradientEncoder::restore(codec, atom.elements.len(), carry)
                    .map_err(|error| damaged(&format!("bucket {bucket}: {error}")))?;
            }
        }
        Ok(plan)
    }

    pub(crate) fn save(&self, datacenters: &Datacenters, codec: GradientCodec) -> Vec<u8> {
        let mut saved = Saved::of(self.identity(datacenters, codec), 0);
        for held in &self.buckets {
            saved.push_parts([
                lock(&held.encoders).iter().map(GradientEncoder::save).collect(),
                vec![],
                vec![],
            ]);
        }
        saved.to_bytes()
    }

    /// The rank, datacenters, codec and buckets of the state, as text that an error can quote.
    fn identity(&self, datacenters: &Datacenters, codec: GradientCodec) -> String {
        let ranks = |ranks: &Vec<Rank>| ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let members: Vec<String> = datacenters.members().iter().map(ranks).collect();
        let buckets: Vec<String> =
            self.buckets.iter().map(|held| format!("{} {:?}", held.elements, held.element)).collect();
        format!(
            "dense gradients of rank {} in the datacenters {}; codec {codec}; buckets {}",
            datacenters.rank(),
            members.join(" and "),
            buckets.join(", "),
        )
    }
}

impl Held {
    fn start(&self) -> usize {
        self.atoms.first().map_or(0, |atom| atom.elements.start)
    }

    /// Encodes the sum of this datacenter over this rank's share. Returns a stream for each atom.
    pub(crate) fn encode(&self, sum: &[f32], turn: Turn) -> Result<Parts> {
        let mut encoders = self.encoders.lock().unwrap_or_else(PoisonError::into_inner);
        let mut encoded = Vec::new();
        for (encoder, atom) in encoders.iter_mut().zip(&self.atoms) {
            let part = atom.elements.start - self.start()..atom.elements.end - self.start();
            let mut bytes = Vec::new();
            encoder.encode(&sum[part], &mut bytes).map_err(|error| {
                turn.refused(format!(
                    "the sum of this datacenter, from element {}: {error}",
                    atom.elements.start
                ))
            })?;
            encoded.push(bytes);
        }
        Ok(encoded)
    }

    /// The ranks of a datacenter that own parts of this rank's share, and the atoms that each of them owns.
    pub(crate) fn atoms_by_owner(&self, datacenter: usize) -> Vec<(Rank, Range<usize>)> {
        let mut found: Vec<(Rank, Range<usize>)> = Vec::new();
        for (at, atom) in self.atoms.iter().enumerate() {
            let owner = atom.owners[datacenter];
            match found.last_mut().filter(|(rank, _)| *rank == owner) {
                Some((_, atoms)) => atoms.end = at + 1,
                None => found.push((owner, at..at + 1)),
            }
        }
        found
    }

    /// The parts of `values`, which is this rank's share, that belong to these atoms.
    pub(crate) fn split<'v>(&self, mut values: &'v mut [f32], atoms: Range<usize>) -> Vec<&'v mut [f32]> {
        let first = self.atoms[atoms.start].elements.start - self.start();
        values = &mut values[first..];
        let mut parts = Vec::new();
        for atom in &self.atoms[atoms] {
            let (part, rest) = values.split_at_mut(atom.elements.len());
            parts.push(part);
            values = rest;
        }
        parts
    }
}
