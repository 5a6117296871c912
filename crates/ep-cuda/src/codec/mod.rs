//! [`GpuPlace`]: the memory of a GPU as a place of experts, whose codecs then run on the GPU.
//!
//! Kernels read and write payloads in pinned host memory, so encoding and decoding are one pass over the elements, and only encoded
//! bytes cross PCIe. The largest residuals are found in two passes: the first counts residuals by the upper bits of their magnitude,
//! and from the counts the host derives a floor. With weights of a normal distribution, k to 1.5 k residuals are above it. The second
//! pass collects these. The exact selection among them, and the entropy coding, are the CPU's.
//!
//! | what | accesses to GPU memory, in bytes for each element of N bytes |
//! |---|---|
//! | `int8`: encode, decode | N |
//! | `int8` with a carry | N + 8 |
//! | decode and add to an f32 sum | 8 |
//! | residuals of weights (`delta`) | 4 N |
//! | residuals of a gradient with a carry (`topk`) | N + 16 |
//!
//! A migration reads gradients once more, to check them before it changes anything.

mod machine;
mod staging;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep::Element;
use ep_codec::residual::{BLOCK, Entries};
use ep_codec::{Place, Result, Weight, copy_bytes};

use self::machine::{Gpu, Launch, Machine, Memory};
use self::staging::{Pool, Staging};
use crate::driver::DeviceAddress;
use crate::params::{
    CODEC_THREADS, EntriesParams, Int8DecodeParams, Int8EncodeParams, RESIDUAL_BIN_SHIFT, RESIDUAL_BINS,
    RESIDUAL_TILE, ResidualsParams, SumsParams,
};

/// The memory of a GPU. Clones are the same place.
///
/// The functions launch kernels in a stream of the place and wait for them. They wait for work of another stream only if
/// [`follow`](Self::follow) was called with that stream.
#[derive(Clone)]
pub struct GpuPlace {
    machine: Arc<dyn Machine>,
    scratch: Arc<Mutex<Scratch>>,
    staging: Arc<Pool>,
}

impl fmt::Debug for GpuPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GpuPlace").field(&self.machine).finish()
    }
}

/// Elements in the memory of a GPU that the caller lends for reading: [`GpuPlace::lend`].
#[derive(Debug)]
pub struct GpuRef<'a, T> {
    address: DeviceAddress,
    len: usize,
    /// The number of the GPU.
    gpu: usize,
    lent: PhantomData<&'a [T]>,
}

impl<T> Clone for GpuRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for GpuRef<'_, T> {}

/// Elements in the memory of a GPU that the caller lends for writing: [`GpuPlace::lend_mut`].
#[derive(Debug)]
pub struct GpuMut<'a, T> {
    address: DeviceAddress,
    len: usize,
    gpu: usize,
    lent: PhantomData<&'a mut [T]>,
}

/// Elements that an encoder keeps in the memory of a GPU.
#[derive(Debug)]
pub struct GpuVec<T> {
    memory: Memory,
    len: usize,
    gpu: usize,
    kept: PhantomData<T>,
}

/// Memory of the GPU that calls use one after the other.
#[derive(Debug, Default)]
struct Scratch {
    /// By its bytes: memory in which sums with a carry are written, and which then takes the place of the carry.
    spare: HashMap<usize, Memory>,
    /// The [`WORDS`].
    words: Option<Memory>,
}

/// Words of the GPU that kernels change: the counts of residuals, then the cursor, then the first index that is not finite.
const WORDS: usize = RESIDUAL_BINS + 2;
const CURSOR: usize = RESIDUAL_BINS;
const BAD: usize = RESIDUAL_BINS + 1;
/// Elements that share a scale of `int8`.
const SCALED: usize = 128;
/// The bits of infinity.
const INFINITE: u32 = 0x7F80_0000;
/// Parts of the staging memory begin at multiples of this number of bytes.
const ALIGNED: usize = 256;
/// The most elements of a launch that adds or checks: all experts of a rank may have more than a kernel can count.
const MOST_AT_ONCE: usize = 1 << 31;

impl GpuPlace {
    /// The memory of GPU `ordinal`.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] if there is no such GPU.
    pub fn new(ordinal: usize) -> ep::Result<Self> {
        Ok(Self::of(Arc::new(Gpu::new(ordinal)?)))
    }

    fn of(machine: Arc<dyn Machine>) -> Self {
        Self { machine, scratch: Arc::default(), staging: Arc::default() }
    }

    /// Makes later calls wait for the work so far of a stream, which has written the elements that they read, or read those that
    /// they write.
    ///
    /// # Errors
    /// [`ep::CallerError::Config`] if the stream is being captured in a CUDA graph: the calls wait for the GPU.
    ///
    /// # Safety
    /// `stream` is a stream of the GPU's primary context.
    pub unsafe fn follow(&self, stream: *mut c_void) -> ep::Result<()> {
        // SAFETY: as for this function.
        unsafe { self.machine.follow(stream) }
    }

    /// Lends `len` elements for reading.
    ///
    /// # Safety
    /// `address` points to `len` elements on this GPU, is a multiple of their size, and is valid for `'a`. All work that writes
    /// them either was queued in a stream before [`follow`](Self::follow) was called with that stream, or begins after the
    /// last call that takes this value has returned.
    pub unsafe fn lend<'a, T>(&self, address: u64, len: usize) -> GpuRef<'a, T> {
        GpuRef { address, len, gpu: self.machine.number(), lent: PhantomData }
    }

    /// Lends `len` elements for writing.
    ///
    /// # Safety
    /// As for [`lend`](Self::lend), and the same holds for work that reads them.
    pub unsafe fn lend_mut<'a, T>(&self, address: u64, len: usize) -> GpuMut<'a, T> {
        GpuMut { address, len, gpu: self.machine.number(), lent: PhantomData }
    }

    fn scratch(&self) -> MutexGuard<'_, Scratch> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Host memory of `bytes` bytes that kernels access.
    fn staging(&self, bytes: usize) -> Result<Staging<'_>> {
        Ok(self.staging.take(&*self.machine, bytes)?)
    }

    /// The elements as kernels are told of them.
    fn elements<T: Weight>(&self, elements: GpuRef<'_, T>) -> Elements {
        let GpuRef { address, len, gpu, .. } = elements;
        assert_eq!(gpu, self.machine.number(), "elements of another GPU");
        Elements { address, count: len, f32: T::ELEMENT == Element::F32 }
    }

    fn elements_mut<T: Weight>(&self, elements: &GpuMut<'_, T>) -> Elements {
        self.elements(Self::read_only(elements))
    }

    /// Launches a kernel over `work` items, of which a block handles `of_block`, and waits for it.
    fn run(&self, launch: &Launch, work: usize, of_block: usize) -> Result<()> {
        let blocks = work.div_ceil(of_block).clamp(1, self.machine.blocks() as usize);
        // SAFETY: lent memory and staging memory stay until `finish` has returned; scratch is locked until then.
        unsafe { self.machine.launch(launch, blocks as u32) }?;
        Ok(self.machine.finish()?)
    }

    /// Writes what a payload decodes to, or adds it.
    fn decode(&self, payload: &[u8], out: Elements, adds: bool) -> Result<()> {
        assert_eq!(payload.len(), codes_at(out.count) + out.count, "bytes of the payload");
        if out.count == 0 {
            return Ok(());
        }
        let mut staging = self.staging(payload.len())?;
        copy_bytes(payload, staging.bytes());
        let params = Int8DecodeParams {
            scales: staging.address(),
            codes: staging.address() + codes_at(out.count) as DeviceAddress,
            out: out.address,
            count: count_of(out.count),
            f32: out.f32.into(),
            adds: adds.into(),
            unused: 0,
        };
        let _turn = self.scratch();
        self.run(&Launch::Int8Decode(params), out.count, CODEC_THREADS * SCALED)
    }

    /// Encodes elements, or their sums with a carry; then writes what the payload lacks to `left`. Returns the first index of a
    /// number that is not finite.
    fn encode(
        &self,
        scratch: &mut Scratch,
        elements: Elements,
        carry: DeviceAddress,
        left: DeviceAddress,
        staging: &mut Staging<'_>,
    ) -> Result<Option<usize>> {
        let Elements { address: elements, count, f32 } = elements;
        assert_eq!(staging.bytes().len(), codes_at(count) + count, "bytes of the payload");
        if count == 0 {
            return Ok(None);
        }
        let bad = scratch.clear_bad(&*self.machine)?;
        let scales = staging.address();
        let codes = scales + codes_at(count) as DeviceAddress;
        let (count_32, f32) = (count_of(count), f32.into());
        let params = Int8EncodeParams { elements, carry, left, scales, codes, bad, count: count_32, f32 };
        self.run(&Launch::Int8Encode(params), count, CODEC_THREADS * SCALED)?;
        scratch.bad(&*self.machine)
    }

    /// Adds elements, in memory of the GPU or in staging memory, to the numbers of `addend`, if it is not null, and writes the
    /// sums to `sums`, if that is not null. If `checks`, returns the first index of a sum that is not finite.
    fn sum(
        &self,
        scratch: &mut Scratch,
        elements: Elements,
        addend: DeviceAddress,
        sums: DeviceAddress,
        checks: bool,
    ) -> Result<Option<usize>> {
        let width = if elements.f32 { 4 } else { 2 };
        let moved = |address: DeviceAddress, bytes: usize| match address {
            0 => 0,
            address => address + bytes as DeviceAddress,
        };
        let mut start = 0;
        while start < elements.count {
            let count = (elements.count - start).min(MOST_AT_ONCE);
            let params = SumsParams {
                elements: moved(elements.address, start * width),
                addend: moved(addend, 4 * start),
                sums: moved(sums, 4 * start),
                bad: if checks { scratch.clear_bad(&*self.machine)? } else { 0 },
                count: count_of(count),
                f32: elements.f32.into(),
            };
            self.run(&Launch::Sums(params), count, CODEC_THREADS * 4)?;
            if checks && let Some(bad) = scratch.bad(&*self.machine)? {
                return Ok(Some(start + bad));
            }
            start += count;
        }
        Ok(None)
    }

    /// Calls `write` with the address of the carry and that of the memory for the new one, which takes its place if there is no
    /// bad index.
    fn replace(
        &self,
        carry: &mut GpuVec<f32>,
        write: impl FnOnce(&mut Scratch, DeviceAddress, DeviceAddress) -> Result<Option<usize>>,
    ) -> Result<Option<usize>> {
        assert_eq!(carry.gpu, self.machine.number(), "a carry of another GPU");
        let mut scratch = self.scratch();
        let bytes = carry.memory.bytes;
        let to = scratch.spare(&*self.machine, bytes)?.address;
        let bad = write(&mut scratch, carry.memory.address, to)?;
        if bad.is_none() {
            std::mem::swap(&mut carry.memory, scratch.spare(&*self.machine, bytes)?);
        }
        Ok(bad)
    }

    /// Adds entries to elements, or subtracts them.
    fn change(&self, entries: &[Entries], elements: Elements, subtracts: bool) -> Result<()> {
        let count: usize = entries.iter().map(|entries| entries.positions.len()).sum();
        if count == 0 {
            return Ok(());
        }
        let values_at = (4 * count).next_multiple_of(ALIGNED);
        let mut staging = self.staging(values_at + 4 * count)?;
        let (indices, values) = staging.bytes().split_at_mut(values_at);
        let indices: &mut [u32] = bytemuck::cast_slice_mut(&mut indices[..4 * count]);
        let mut start = 0;
        for (block, Entries { positions, values: of_block }) in entries.iter().enumerate() {
            assert_eq!(positions.len(), of_block.len(), "a value for each position");
            let last = positions.last().map_or(0, |&last| block * BLOCK + usize::from(last));
            assert!(
                positions.is_sorted_by(|a, b| a < b) && last < elements.count,
                "ascending positions of elements"
            );
            for (index, &position) in indices[start..].iter_mut().zip(positions) {
                *index = (block * BLOCK) as u32 + u32::from(position);
            }
            let bytes: &[u8] = bytemuck::cast_slice(of_block);
            values[4 * start..][..bytes.len()].copy_from_slice(bytes);
            start += positions.len();
        }
        let params = EntriesParams {
            indices: staging.address(),
            values: staging.address() + values_at as DeviceAddress,
            elements: elements.address,
            count: count_of(count),
            f32: elements.f32.into(),
            subtracts: subtracts.into(),
            unused: 0,
        };
        let _turn = self.scratch();
        self.run(&Launch::Entries(params), count, CODEC_THREADS)
    }

    /// The residuals at or above a floor that at least `k` reach. `base` may be null.
    fn largest(&self, expert: Elements, base: DeviceAddress, k: usize) -> Result<Vec<Entries>> {
        let Elements { address: expert, count, f32 } = expert;
        if count == 0 {
            return Ok(Vec::new());
        }
        let (machine, tiles) = (&*self.machine, count.div_ceil(RESIDUAL_TILE));
        let mut scratch = self.scratch();
        let words = scratch.words(machine)?;
        machine.zero(words, 4 * WORDS)?;
        let counting = ResidualsParams {
            expert,
            base,
            counts: words,
            positions: 0,
            values: 0,
            segments: 0,
            cursor: 0,
            floor: 0,
            count: count_of(count),
            capacity: 0,
            f32: f32.into(),
        };
        self.run(&Launch::Residuals(counting), tiles, 1)?;
        let mut counts = vec![0_u32; RESIDUAL_BINS];
        machine.download(words, bytemuck::cast_slice_mut(&mut counts))?;
        let (floor, capacity) = floor_of(&counts, k);

        let values_at = (8 * tiles).next_multiple_of(ALIGNED);
        let positions_at = values_at + (4 * capacity).next_multiple_of(ALIGNED);
        let mut staging = self.staging(positions_at + 2 * capacity)?;
        if capacity > 2 * k {
            // Many residuals are equal, such as zeros of an expert without tokens.
            staging.free_after_use();
        }
        let address = staging.address();
        let collecting = ResidualsParams {
            counts: 0,
            segments: address,
            values: address + values_at as DeviceAddress,
            positions: address + positions_at as DeviceAddress,
            cursor: words + 4 * CURSOR as DeviceAddress,
            floor,
            capacity: count_of(capacity),
            ..counting
        };
        self.run(&Launch::Residuals(collecting), tiles, 1)?;
        drop(scratch);
        let (segments, rest) = staging.bytes().split_at(values_at);
        let (values, positions) = rest.split_at(positions_at - values_at);
        let segments: &[[u32; 2]] = bytemuck::cast_slice(&segments[..8 * tiles]);
        let values: &[f32] = bytemuck::cast_slice(&values[..4 * capacity]);
        let positions: &[u16] = bytemuck::cast_slice(positions);
        let of_block = |segments: &[[u32; 2]]| {
            let mut entries = Entries::default();
            for &[start, length] in segments {
                // If the program has changed the elements between the passes, there may be more than were counted.
                let range = start as usize..(start as usize + length as usize).min(capacity);
                entries.positions.extend(positions.get(range.clone()).unwrap_or_default());
                entries.values.extend(values.get(range).unwrap_or_default());
            }
            entries
        };
        Ok(segments.chunks(BLOCK / RESIDUAL_TILE).map(of_block).collect())
    }
}

/// The lower border of the highest bin at or above which there are at least `k` residuals, at most infinity, and the number of
/// residuals at or above it.
fn floor_of(counts: &[u32], k: usize) -> (u32, usize) {
    let infinite = INFINITE as usize >> RESIDUAL_BIN_SHIFT;
    let mut reached: usize = counts[infinite..].iter().map(|&count| count as usize).sum();
    let mut bin = infinite;
    while bin > 0 && reached < k {
        bin -= 1;
        reached += counts[bin] as usize;
    }
    ((bin as u32) << RESIDUAL_BIN_SHIFT, reached)
}

/// Bytes of the scales of a payload.
fn codes_at(elements: usize) -> usize {
    4 * elements.div_ceil(SCALED)
}

fn count_of(elements: usize) -> u32 {
    u32::try_from(elements).expect("encoders and decoders refuse longer experts")
}

/// Elements that a kernel reads or writes.
#[derive(Debug, Clone, Copy)]
struct Elements {
    address: DeviceAddress,
    count: usize,
    f32: bool,
}

impl Scratch {
    /// The address of the words.
    fn words(&mut self, machine: &dyn Machine) -> ep::Result<DeviceAddress> {
        if self.words.is_none() {
            self.words = Some(machine.allocate(4 * WORDS)?);
        }
        Ok(self.words.as_ref().expect("set above").address)
    }

    /// Says that no index is bad so far. Returns the address of the word.
    fn clear_bad(&mut self, machine: &dyn Machine) -> ep::Result<DeviceAddress> {
        let bad = self.words(machine)? + 4 * BAD as DeviceAddress;
        machine.upload(&u32::MAX.to_le_bytes(), bad)?;
        Ok(bad)
    }

    /// The first bad index.
    fn bad(&mut self, machine: &dyn Machine) -> Result<Option<usize>> {
        let mut bad = [0; 4];
        machine.download(self.words(machine)? + 4 * BAD as DeviceAddress, &mut bad)?;
        let bad = u32::from_le_bytes(bad);
        Ok((bad != u32::MAX).then_some(bad as usize))
    }

    /// Memory of the GPU of so many bytes.
    fn spare(&mut self, machine: &dyn Machine, bytes: usize) -> ep::Result<&mut Memory> {
        let spare = match self.spare.remove(&bytes) {
            Some(spare) => spare,
            None => machine.allocate(bytes)?,
        };
        Ok(self.spare.entry(bytes).or_insert(spare))
    }
}

impl Place for GpuPlace {
    type Ref<'a, T: Weight> = GpuRef<'a, T>;
    type Mut<'a, T: Weight> = GpuMut<'a, T>;
    type Vec<T: Weight> = GpuVec<T>;

    fn len<T: Weight>(elements: GpuRef<'_, T>) -> usize {
        elements.len
    }

    fn len_mut<T: Weight>(elements: &GpuMut<'_, T>) -> usize {
        elements.len
    }

    fn part<'a, T: Weight>(elements: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T> {
        assert!(range.start <= range.end && range.end <= elements.len, "a part of the elements");
        let address = elements.address + (range.start * size_of::<T>()) as DeviceAddress;
        GpuRef { address, len: range.len(), ..elements }
    }

    fn part_mut<'a, T: Weight>(elements: &'a mut GpuMut<'_, T>, range: Range<usize>) -> Self::Mut<'a, T> {
        let GpuRef { address, len, gpu, .. } = Self::part(Self::read_only(elements), range);
        GpuMut { address, len, gpu, lent: PhantomData }
    }

    fn kept<T: Weight>(elements: &GpuVec<T>) -> Self::Ref<'_, T> {
        let &GpuVec { ref memory, len, gpu, .. } = elements;
        GpuRef { address: memory.address, len, gpu, lent: PhantomData }
    }

    fn kept_mut<T: Weight>(elements: &mut GpuVec<T>) -> Self::Mut<'_, T> {
        let &mut GpuVec { ref memory, len, gpu, .. } = elements;
        GpuMut { address: memory.address, len, gpu, lent: PhantomData }
    }

    fn read_only<'a, T: Weight>(elements: &'a GpuMut<'_, T>) -> Self::Ref<'a, T> {
        let &GpuMut { address, len, gpu, .. } = elements;
        GpuRef { address, len, gpu, lent: PhantomData }
    }

    fn as_slice<'a, T: Weight>(_: Self::Ref<'a, T>) -> Option<&'a [T]> {
        None
    }

    fn keep<T: Weight>(&self, elements: Vec<T>) -> Result<GpuVec<T>> {
        let memory = self.machine.allocate(size_of_val(&elements[..]))?;
        self.machine.upload(bytemuck::cast_slice(&elements), memory.address)?;
        self.machine.finish()?;
        Ok(GpuVec { memory, len: elements.len(), gpu: self.machine.number(), kept: PhantomData })
    }

    fn zeros<T: Weight>(&self, elements: usize) -> Result<GpuVec<T>> {
        let memory = self.machine.allocate(elements * size_of::<T>())?;
        self.machine.zero(memory.address, memory.bytes)?;
        self.machine.finish()?;
        Ok(GpuVec { memory, len: elements, gpu: self.machine.number(), kept: PhantomData })
    }

    fn append<T: Weight>(&self, from: GpuRef<'_, T>, out: &mut Vec<u8>) -> Result<()> {
        let start = out.len();
        out.resize(start + from.len * size_of::<T>(), 0);
        self.read(from, &mut out[start..])
    }

    fn read<T: Weight>(&self, from: GpuRef<'_, T>, out: &mut [u8]) -> Result<()> {
        assert_eq!(out.len(), from.len * size_of::<T>(), "bytes of the elements");
        Ok(self.machine.download(self.elements(from).address, out)?)
    }

    fn write<T: Weight>(&self, bytes: &[u8], to: GpuMut<'_, T>) -> Result<()> {
        assert_eq!(bytes.len(), to.len * size_of::<T>(), "bytes of the elements");
        self.machine.upload(bytes, self.elements_mut(&to).address)?;
        Ok(self.machine.finish()?)
    }

    fn write_sums<T: Weight>(&self, base: &[T], entries: &[Entries], mut to: GpuMut<'_, T>) -> Result<()> {
        let all = 0..to.len;
        self.write(bytemuck::cast_slice(base), Self::part_mut(&mut to, all))?;
        self.add_entries(entries, to)
    }

    fn clear<T: Weight>(&self, elements: GpuMut<'_, T>) -> Result<()> {
        let bytes = elements.len * size_of::<T>();
        self.machine.zero(self.elements_mut(&elements).address, bytes)?;
        Ok(self.machine.finish()?)
    }

    fn first_not_finite<T: Weight>(&self, elements: GpuRef<'_, T>) -> Result<Option<usize>> {
        self.sum(&mut self.scratch(), self.elements(elements), 0, 0, true)
    }

    fn encode_int8<T: Weight>(&self, elements: GpuRef<'_, T>, payload: &mut [u8]) -> Result<Option<usize>> {
        let mut staging = self.staging(payload.len())?;
        let bad = self.encode(&mut self.scratch(), self.elements(elements), 0, 0, &mut staging)?;
        copy_bytes(staging.bytes(), payload);
        Ok(bad)
    }

    fn encode_int8_carrying<T: Weight>(
        &self,
        gradient: GpuRef<'_, T>,
        carry: &mut GpuVec<f32>,
        payload: &mut [u8],
    ) -> Result<Option<usize>> {
        assert_eq!(gradient.len, carry.len, "a number carried for each element");
        let mut staging = self.staging(payload.len())?;
        let gradient = self.elements(gradient);
        let bad =
            self.replace(carry, |scratch, from, to| self.encode(scratch, gradient, from, to, &mut staging))?;
        copy_bytes(staging.bytes(), payload);
        Ok(bad)
    }

    fn decode_int8<T: Weight>(&self, payload: &[u8], out: GpuMut<'_, T>) -> Result<()> {
        self.decode(payload, self.elements_mut(&out), false)
    }

    fn add_int8(&self, payload: &[u8], sum: GpuMut<'_, f32>) -> Result<()> {
        self.decode(payload, self.elements_mut(&sum), true)
    }

    fn add_bytes<T: Weight>(&self, bytes: &[u8], sum: GpuMut<'_, f32>) -> Result<()> {
        assert_eq!(bytes.len(), sum.len * size_of::<T>(), "bytes of the elements");
        let mut staging = self.staging(bytes.len())?;
        copy_bytes(bytes, staging.bytes());
        let sum = self.elements_mut(&sum);
        let elements = Elements { address: staging.address(), f32: T::ELEMENT == Element::F32, ..sum };
        self.sum(&mut self.scratch(), elements, sum.address, sum.address, false).map(drop)
    }

    fn add<T: Weight>(&self, elements: GpuRef<'_, T>, sum: GpuMut<'_, f32>) -> Result<()> {
        assert_eq!(elements.len, sum.len, "a sum for each element");
        let (elements, sum) = (self.elements(elements), self.elements_mut(&sum).address);
        self.sum(&mut self.scratch(), elements, sum, sum, false).map(drop)
    }

    fn carry_on<T: Weight>(&self, gradient: GpuRef<'_, T>, carry: &mut GpuVec<f32>) -> Result<Option<usize>> {
        assert_eq!(gradient.len, carry.len, "a number carried for each element");
        let gradient = self.elements(gradient);
        self.replace(carry, |scratch, from, to| self.sum(scratch, gradient, from, to, true))
    }

    fn residuals<T: Weight>(
        &self,
        expert: GpuRef<'_, T>,
        base: Option<GpuRef<'_, T>>,
        k: usize,
    ) -> Result<Vec<Entries>> {
        assert!(base.is_none_or(|base| base.len == expert.len), "an element of the base for each");
        let base = base.map_or(0, |base| self.elements(base).address);
        self.largest(self.elements(expert), base, k)
    }

    fn add_entries<T: Weight>(&self, entries: &[Entries], to: GpuMut<'_, T>) -> Result<()> {
        self.change(entries, self.elements_mut(&to), false)
    }

    fn subtract_entries(&self, entries: &[Entries], from: &mut GpuVec<f32>) -> Result<()> {
        let from = self.elements(Self::kept(from));
        self.change(entries, from, true)
    }
}
