//! Where elements are: [`Place`], and main memory, [`Host`].

use std::fmt::Debug;
use std::ops::Range;

use crate::error::Result;
use crate::int8;
use crate::parallel::{IndexedParallelIterator, Parallel, ParallelIterator};
use crate::residual::{self, Entries, Selection, superset};
use crate::shared::first_not_finite;
use crate::weight::{Weight, Zero};

/// Elements that one thread works on at a time.
const PIECE: usize = 1 << 14;
/// Bytes that one thread copies at a time.
const COPIED: usize = 1 << 18;

/// The memory that the elements of experts are in, and the passes of the codecs over them.
///
/// Streams are in main memory. What reads or writes every element is a function of a place, so that the elements of a GPU
/// need not be copied to main memory first. [`Host`] is main memory. All places give the same bits, apart from those of NaN;
/// payloads and arithmetic are documented with the codecs.
///
/// A function returns when its results are complete. It panics if the lengths of its arguments do not agree, which encoders
/// and decoders have checked.
///
/// # Errors
/// A function of a place returns [`Error::Place`](crate::Error::Place) if the place has failed. Functions of [`Host`] return
/// no error.
pub trait Place: Debug + Clone + Send + Sync + 'static {
    /// Elements that the caller lends for reading.
    type Ref<'a, T: Weight>: Copy + Send + Sync;
    /// Elements that the caller lends for writing.
    type Mut<'a, T: Weight>: Send;
    /// Elements that an encoder keeps.
    type Vec<T: Weight>: Debug + Send + Sync;

    /// The number of elements.
    fn len<T: Weight>(elements: Self::Ref<'_, T>) -> usize;

    /// The number of elements.
    fn len_mut<T: Weight>(elements: &Self::Mut<'_, T>) -> usize;

    /// Some of the elements.
    fn part<'a, T: Weight>(elements: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T>;

    /// Some of the elements.
    fn part_mut<'a, T: Weight>(elements: &'a mut Self::Mut<'_, T>, range: Range<usize>) -> Self::Mut<'a, T>;

    /// Lends kept elements.
    fn kept<T: Weight>(elements: &Self::Vec<T>) -> Self::Ref<'_, T>;

    /// Lends kept elements.
    fn kept_mut<T: Weight>(elements: &mut Self::Vec<T>) -> Self::Mut<'_, T>;

    /// Lends elements for reading that were lent for writing.
    fn read_only<'a, T: Weight>(elements: &'a Self::Mut<'_, T>) -> Self::Ref<'a, T>;

    /// The elements, if this process can read them in main memory.
    fn as_slice<'a, T: Weight>(elements: Self::Ref<'a, T>) -> Option<&'a [T]>;

    /// Keeps a copy of elements of main memory.
    fn keep<T: Weight>(&self, elements: Vec<T>) -> Result<Self::Vec<T>>;

    /// Keeps `elements` zeros.
    fn zeros<T: Weight>(&self, elements: usize) -> Result<Self::Vec<T>>;

    /// Appends elements to bytes of main memory, as they are.
    fn append<T: Weight>(&self, from: Self::Ref<'_, T>, out: &mut Vec<u8>) -> Result<()>;

    /// Copies elements to main memory, as they are.
    fn read<T: Weight>(&self, from: Self::Ref<'_, T>, out: &mut [u8]) -> Result<()>;

    /// Copies elements from main memory, as they are.
    fn write<T: Weight>(&self, bytes: &[u8], to: Self::Mut<'_, T>) -> Result<()>;

    /// Writes elements of main memory, plus the entries of each block: one f32 addition each, rounded to `T`.
    fn write_sums<T: Weight>(&self, base: &[T], entries: &[Entries], to: Self::Mut<'_, T>) -> Result<()>;

    /// Sets elements to zero.
    fn clear<T: Weight>(&self, elements: Self::Mut<'_, T>) -> Result<()>;

    /// The index of the first element that is NaN or infinite.
    fn first_not_finite<T: Weight>(&self, elements: Self::Ref<'_, T>) -> Result<Option<usize>>;

    /// Writes the payload of an `int8` stream. Returns the first index of an element that is not finite, if any; the payload
    /// is then unspecified.
    fn encode_int8<T: Weight>(&self, elements: Self::Ref<'_, T>, payload: &mut [u8])
    -> Result<Option<usize>>;

    /// Like [`encode_int8`](Self::encode_int8) for the sums `gradient + carry`, and leaves in `carry` what the payload lacks. If
    /// a sum is not finite, returns its index and leaves `carry` unchanged.
    fn encode_int8_carrying<T: Weight>(
        &self,
        gradient: Self::Ref<'_, T>,
        carry: &mut Self::Vec<f32>,
        payload: &mut [u8],
    ) -> Result<Option<usize>>;

    /// Decodes the payload of an `int8` stream, whose scales have been checked.
    fn decode_int8<T: Weight>(&self, payload: &[u8], out: Self::Mut<'_, T>) -> Result<()>;

    /// Adds what the payload of an `int8` stream decodes to, whose scales have been checked.
    fn add_int8(&self, payload: &[u8], sum: Self::Mut<'_, f32>) -> Result<()>;

    /// Adds elements of main memory, as they are there: one f32 addition each.
    fn add_bytes<T: Weight>(&self, bytes: &[u8], sum: Self::Mut<'_, f32>) -> Result<()>;

    /// Adds elements: one f32 addition each.
    fn add<T: Weight>(&self, elements: Self::Ref<'_, T>, sum: Self::Mut<'_, f32>) -> Result<()>;

    /// Adds a gradient to a carry: one f32 addition each. If a sum is not finite, returns the index of the first one and leaves
    /// `carry` unchanged.
    fn carry_on<T: Weight>(
        &self,
        gradient: Self::Ref<'_, T>,
        carry: &mut Self::Vec<f32>,
    ) -> Result<Option<usize>>;

    /// The residuals `expert - base`, or `expert` without a base, one f32 subtraction each. Returns one [`Entries`] for each
    /// [`BLOCK`](residual::BLOCK) of elements. Together they have every residual whose magnitude is at least that of the
    /// k-th largest, every one that is not finite, and possibly others.
    fn residuals<T: Weight>(
        &self,
        expert: Self::Ref<'_, T>,
        base: Option<Self::Ref<'_, T>>,
        k: usize,
    ) -> Result<Vec<Entries>>;

    /// Adds the entries of each block: one f32 addition each, rounded to `T`.
    fn add_entries<T: Weight>(&self, entries: &[Entries], to: Self::Mut<'_, T>) -> Result<()>;

    /// Subtracts the entries of each block: one f32 subtraction each.
    fn subtract_entries(&self, entries: &[Entries], from: &mut Self::Vec<f32>) -> Result<()>;
}

/// Calls a function with elements in main memory, copying them there if they are elsewhere.
///
/// # Errors
/// That of the place, if it has failed.
pub fn in_main_memory<P: Place, T: Weight, R>(
    place: &P,
    elements: P::Ref<'_, T>,
    work: impl FnOnce(&[T]) -> R,
) -> Result<R> {
    if let Some(elements) = P::as_slice(elements) {
        return Ok(work(elements));
    }
    let mut copy = vec![T::from_f32(0.0); P::len(elements)];
    place.read(elements, bytemuck::cast_slice_mut(&mut copy))?;
    Ok(work(&copy))
}

/// Main memory. The functions run on the threads of the current rayon pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Host;

impl Place for Host {
    type Ref<'a, T: Weight> = &'a [T];
    type Mut<'a, T: Weight> = &'a mut [T];
    type Vec<T: Weight> = Vec<T>;

    fn len<T: Weight>(elements: &[T]) -> usize {
        elements.len()
    }

    fn len_mut<T: Weight>(elements: &&mut [T]) -> usize {
        elements.len()
    }

    fn part<'a, T: Weight>(elements: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T> {
        &elements[range]
    }

    fn part_mut<'a, T: Weight>(elements: &'a mut &mut [T], range: Range<usize>) -> &'a mut [T] {
        &mut elements[range]
    }

    fn kept<T: Weight>(elements: &Vec<T>) -> &[T] {
        elements
    }

    fn kept_mut<T: Weight>(elements: &mut Vec<T>) -> &mut [T] {
        elements
    }

    fn read_only<'a, T: Weight>(elements: &'a &mut [T]) -> &'a [T] {
        elements
    }

    fn as_slice<'a, T: Weight>(elements: Self::Ref<'a, T>) -> Option<&'a [T]> {
        Some(elements)
    }

    fn keep<T: Weight>(&self, elements: Vec<T>) -> Result<Vec<T>> {
        Ok(elements)
    }

    fn zeros<T: Weight>(&self, elements: usize) -> Result<Vec<T>> {
        Ok(vec![T::from_f32(0.0); elements])
    }

    fn append<T: Weight>(&self, from: &[T], out: &mut Vec<u8>) -> Result<()> {
        out.extend_from_slice(bytemuck::cast_slice(from));
        Ok(())
    }

    fn write_sums<T: Weight>(&self, base: &[T], entries: &[Entries], to: &mut [T]) -> Result<()> {
        residual::add_onto(entries, base, to);
        Ok(())
    }

    fn read<T: Weight>(&self, from: &[T], out: &mut [u8]) -> Result<()> {
        copy_bytes(bytemuck::cast_slice(from), out);
        Ok(())
    }

    fn write<T: Weight>(&self, bytes: &[u8], to: &mut [T]) -> Result<()> {
        copy_bytes(bytes, bytemuck::cast_slice_mut(to));
        Ok(())
    }

    fn clear<T: Weight>(&self, elements: &mut [T]) -> Result<()> {
        elements.fill(T::from_f32(0.0));
        Ok(())
    }

    fn first_not_finite<T: Weight>(&self, elements: &[T]) -> Result<Option<usize>> {
        let pieces = elements.par_chunks(PIECE).enumerate();
        let bad = pieces.filter_map(|(piece, elements)| Some(piece * PIECE + first_not_finite(elements)?));
        Ok(bad.min())
    }

    fn encode_int8<T: Weight>(&self, elements: &[T], payload: &mut [u8]) -> Result<Option<usize>> {
        Ok(int8::encode(elements, payload))
    }

    fn encode_int8_carrying<T: Weight>(
        &self,
        gradient: &[T],
        carry: &mut Vec<f32>,
        payload: &mut [u8],
    ) -> Result<Option<usize>> {
        let bad = first_sum_not_finite(gradient, carry);
        if bad.is_none() {
            int8::encode_carrying(gradient, carry, payload);
        }
        Ok(bad)
    }

    fn decode_int8<T: Weight>(&self, payload: &[u8], out: &mut [T]) -> Result<()> {
        int8::decode(payload, out);
        Ok(())
    }

    fn add_int8(&self, payload: &[u8], sum: &mut [f32]) -> Result<()> {
        int8::add(payload, sum);
        Ok(())
    }

    fn add_bytes<T: Weight>(&self, bytes: &[u8], sum: &mut [f32]) -> Result<()> {
        let width = size_of::<T>();
        sum.par_chunks_mut(PIECE).zip(bytes.par_chunks(PIECE * width)).for_each(|(sum, bytes)| {
            for (sum, element) in sum.iter_mut().zip(bytes.chunks_exact(width)) {
                *sum += bytemuck::pod_read_unaligned::<T>(element).to_f32();
            }
        });
        Ok(())
    }

    fn add<T: Weight>(&self, elements: &[T], sum: &mut [f32]) -> Result<()> {
        sum.par_chunks_mut(PIECE).zip(elements.par_chunks(PIECE)).for_each(|(sum, elements)| {
            sum.iter_mut().zip(elements).for_each(|(sum, element)| *sum += element.to_f32());
        });
        Ok(())
    }

    fn carry_on<T: Weight>(&self, gradient: &[T], carry: &mut Vec<f32>) -> Result<Option<usize>> {
        let bad = first_sum_not_finite(gradient, carry);
        if bad.is_none() {
            self.add(gradient, carry)?;
        }
        Ok(bad)
    }

    fn residuals<T: Weight>(&self, expert: &[T], base: Option<&[T]>, k: usize) -> Result<Vec<Entries>> {
        Ok(match base {
            Some(base) => superset(expert, base, k, Selection::Exact),
            // A slice of `Zero` takes no memory.
            None => superset(expert, &vec![Zero; expert.len()], k, Selection::Exact),
        })
    }

    fn add_entries<T: Weight>(&self, entries: &[Entries], to: &mut [T]) -> Result<()> {
        residual::add(entries, to);
        Ok(())
    }

    fn subtract_entries(&self, entries: &[Entries], from: &mut Vec<f32>) -> Result<()> {
        residual::subtract(entries, from);
        Ok(())
    }
}

/// Copies bytes on the threads of the current rayon pool. Both slices have the same length.
pub fn copy_bytes(from: &[u8], to: &mut [u8]) {
    let pieces = to.par_chunks_mut(COPIED).zip(from.par_chunks(COPIED));
    pieces.for_each(|(to, from)| to.copy_from_slice(from));
}

/// The first index at which `gradient + carry` is not finite.
fn first_sum_not_finite<T: Weight>(gradient: &[T], carry: &[f32]) -> Option<usize> {
    let pieces = gradient.par_chunks(PIECE).zip(carry.par_chunks(PIECE)).enumerate();
    let bad = pieces.filter_map(|(piece, (gradient, carry))| {
        let is_finite = |(gradient, carry): (&T, &f32)| (gradient.to_f32() + carry).is_finite();
        let pairs = || gradient.iter().zip(carry);
        // The fold has no early exit, so that it is vectorised. The search runs at most once per piece.
        let all = pairs().fold(true, |all, pair| all & is_finite(pair));
        if all { None } else { pairs().position(|pair| !is_finite(pair)).map(|at| piece * PIECE + at) }
    });
    bad.min()
}
