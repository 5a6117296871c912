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
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep::Element;
use ep_codec::residual::{BLOCK, Entries};
use ep_codec::{Place, Result, Weight, copy_bytes};

use self::machine::{Gpu, HostMemory, Launch, Machine, Memory};
use crate::driver::DeviceAddress;
use crate::params::{
    CODEC_THREADS, EntriesParams, Int8DecodeParams, Int8EncodeParams, RESIDUAL_BIN_SHIFT, RESIDUAL_BINS,
    RESIDUAL_TILE, ResidualsParams, SumsParams,
};

/// The memory of a GPU. Clones are the same place.
///
/// The functions launch kernels in a stream of the place and wait for them. They do not wait for other streams by themselves:
/// [`follow`](Self::follow) says what comes before.
#[derive(Clone)]
pub struct GpuPlace {
    machine: Arc<dyn Machine>,
    /// `None` in tests on a CPU.
    gpu: Option<Arc<Gpu>>,
    scratch: Arc<Mutex<Scratch>>,
}

impl fmt::Debug for GpuPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GpuPlace").field(&self.machine).finish()
    }
}

/// Elements in the memory of a GPU that the caller lends for reading.
#[derive(Debug)]
pub struct GpuRef<'a, T> {
    address: DeviceAddress,
    len: usize,
    lent: PhantomData<&'a [T]>,
}

impl<T> Clone for GpuRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for GpuRef<'_, T> {}

/// Elements in the memory of a GPU that the caller lends for writing.
#[derive(Debug)]
pub struct GpuMut<'a, T> {
    address: DeviceAddress,
    len: usize,
    lent: PhantomData<&'a mut [T]>,
}

impl<'a, T> GpuRef<'a, T> {
    /// `len` elements.
    ///
    /// # Safety
    /// `address` points to `len` elements on the GPU of the place, is a multiple of their size, and is valid for `'a`. Work that
    /// writes them comes before, by [`GpuPlace::follow`], or after the calls that take this value.
    pub unsafe fn new(address: u64, len: usize) -> Self {
        Self { address, len, lent: PhantomData }
    }

    fn at(&self, index: usize) -> DeviceAddress {
        self.address + (index * size_of::<T>()) as DeviceAddress
    }
}

impl<'a, T> GpuMut<'a, T> {
    /// `len` elements.
    ///
    /// # Safety
    /// As for [`GpuRef::new`], and the same holds for work that reads them.
    pub unsafe fn new(address: u64, len: usize) -> Self {
        Self { address, len, lent: PhantomData }
    }
}

/// Elements that an encoder keeps in the memory of a GPU.
#[derive(Debug)]
pub struct GpuVec<T> {
    memory: Memory,
    len: usize,
    kept: PhantomData<T>,
}

/// Memory that calls use one after the other.
#[derive(Debug, Default)]
struct Scratch {
    /// Host memory for payloads, entries and residuals.
    staging: Option<HostMemory>,
    /// Memory of the GPU, by its bytes, in the place of which the sums with a carry are written.
    spare: HashMap<usize, Memory>,
    /// Memory of the GPU for [`WORDS`].
    words: Option<Memory>,
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
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

impl GpuPlace {
    /// The memory of GPU `ordinal`.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] if there is no such GPU.
    pub fn new(ordinal: usize) -> ep::Result<Self> {
        let gpu = Arc::new(Gpu::new(ordinal)?);
        Ok(Self { machine: gpu.clone(), gpu: Some(gpu), scratch: Arc::default() })
    }

    /// A place on a machine of the tests.
    #[cfg(test)]
    fn of(machine: Arc<dyn Machine>) -> Self {
        Self { machine, gpu: None, scratch: Arc::default() }
    }

    /// Makes later calls wait for the work so far of a stream, which has written the elements that they read, or read those that
    /// they write.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] if the driver refuses, for example because the stream is being captured in a CUDA graph.
    ///
    /// # Safety
    /// `stream` is a stream of the GPU's primary context.
    pub unsafe fn follow(&self, stream: *mut c_void) -> ep::Result<()> {
        // SAFETY: as for this function.
        self.gpu.as_ref().map_or(Ok(()), |gpu| unsafe { gpu.follow(stream) })
    }

    fn scratch(&self) -> MutexGuard<'_, Scratch> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches a kernel over `work` items, of which a block handles `of_block`, and waits for it.
    fn run(&self, launch: &Launch, work: usize, of_block: usize) -> Result<()> {
        let blocks = work.div_ceil(of_block).clamp(1, self.machine.blocks() as usize);
        // SAFETY: the callers of the place's functions lend memory until they return, and `finish` has returned by then. Scratch
        // is locked meanwhile.
        unsafe { self.machine.launch(launch, blocks as u32) }?;
        Ok(self.machine.finish()?)
    }

    /// Writes what a payload decodes to, or adds it.
    fn decode(&self, payload: &[u8], out: Elements, adds: bool) -> Result<()> {
        let Elements { address: out, count, f32 } = out;
        if count == 0 {
            return Ok(());
        }
        let mut scratch = self.scratch();
        let staging = scratch.staging(&*self.machine, payload.len())?;
        copy_bytes(payload, &mut staging.bytes()[..payload.len()]);
        let params = Int8DecodeParams {
            scales: staging.memory.address,
            codes: staging.memory.address + codes_at(count) as DeviceAddress,
            out,
            count: count as u32,
            f32: f32.into(),
            adds: adds.into(),
            unused: 0,
        };
        self.run(&Launch::Int8Decode(params), count, CODEC_THREADS * SCALED)
    }

    /// Encodes elements, or their sums with a carry; then writes what the payload lacks to `left`. Returns the first index of a
    /// number that is not finite.
    fn encode(
        &self,
        scratch: &mut Scratch,
        elements: Elements,
        carry: DeviceAddress,
        left: DeviceAddress,
        payload: &mut [u8],
    ) -> Result<Option<usize>> {
        let Elements { address: elements, count, f32 } = elements;
        if count == 0 {
            return Ok(None);
        }
        let bad = scratch.clear_bad(&*self.machine)?;
        let staging = scratch.staging(&*self.machine, payload.len())?;
        let scales = staging.memory.address;
        let codes = scales + codes_at(count) as DeviceAddress;
        let count_32 = count as u32;
        let params =
            Int8EncodeParams { elements, carry, left, scales, codes, bad, count: count_32, f32: f32.into() };
        self.run(&Launch::Int8Encode(params), count, CODEC_THREADS * SCALED)?;
        copy_bytes(&staging.bytes()[..payload.len()], payload);
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
        let Elements { address: elements, count, f32 } = elements;
        if count == 0 {
            return Ok(None);
        }
        let bad = if checks { scratch.clear_bad(&*self.machine)? } else { 0 };
        let params = SumsParams { elements, addend, sums, bad, count: count as u32, f32: f32.into() };
        self.run(&Launch::Sums(params), count, CODEC_THREADS * 4)?;
        if checks { scratch.bad(&*self.machine) } else { Ok(None) }
    }

    /// Calls `write` with the address of the carry and that of the memory for the new one, which takes its place if there is no
    /// bad index.
    fn replace(
        &self,
        carry: &mut GpuVec<f32>,
        write: impl FnOnce(&mut Scratch, DeviceAddress, DeviceAddress) -> Result<Option<usize>>,
    ) -> Result<Option<usize>> {
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
        let mut scratch = self.scratch();
        let staging = scratch.staging(&*self.machine, values_at + 4 * count)?;
        let (indices, values) = staging.bytes().split_at_mut(values_at);
        let indices: &mut [u32] = bytemuck::cast_slice_mut(&mut indices[..4 * count]);
        let mut start = 0;
        for (block, entries) in entries.iter().enumerate() {
            for (index, &position) in indices[start..].iter_mut().zip(&entries.positions) {
                *index = (block * BLOCK) as u32 + u32::from(position);
            }
            let bytes: &[u8] = bytemuck::cast_slice(&entries.values);
            values[4 * start..][..bytes.len()].copy_from_slice(bytes);
            start += entries.positions.len();
        }
        let params = EntriesParams {
            indices: staging.memory.address,
            values: staging.memory.address + values_at as DeviceAddress,
            elements: elements.address,
            count: count as u32,
            f32: elements.f32.into(),
            subtracts: subtracts.into(),
            unused: 0,
        };
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
            count: count as u32,
            capacity: 0,
            f32: f32.into(),
        };
        self.run(&Launch::Residuals(counting), tiles, 1)?;
        let mut counts = vec![0_u32; RESIDUAL_BINS];
        machine.download(words, bytemuck::cast_slice_mut(&mut counts))?;
        let (floor, capacity) = floor_of(&counts, k);

        let values_at = (8 * tiles).next_multiple_of(ALIGNED);
        let positions_at = values_at + (4 * capacity).next_multiple_of(ALIGNED);
        let staging = scratch.staging(machine, positions_at + 2 * capacity)?;
        let address = staging.memory.address;
        let collecting = ResidualsParams {
            counts: 0,
            segments: address,
            values: address + values_at as DeviceAddress,
            positions: address + positions_at as DeviceAddress,
            cursor: words + 4 * CURSOR as DeviceAddress,
            floor,
            capacity: capacity as u32,
            ..counting
        };
        self.run(&Launch::Residuals(collecting), tiles, 1)?;
        let (segments, rest) = staging.bytes().split_at(values_at);
        let (values, positions) = rest.split_at(positions_at - values_at);
        let segments: &[[u32; 2]] = bytemuck::cast_slice(&segments[..8 * tiles]);
        let values: &[f32] = bytemuck::cast_slice(&values[..4 * capacity]);
        let positions: &[u16] = bytemuck::cast_slice(&positions[..2 * capacity]);
        let of_block = |segments: &[[u32; 2]]| {
            let mut entries = Entries::default();
            for &[start, length] in segments {
                // The elements may have changed between the passes if the program broke its promise.
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

/// Elements that a kernel reads or writes.
#[derive(Debug, Clone, Copy)]
struct Elements {
    address: DeviceAddress,
    /// At most `u32::MAX`: encoders and decoders refuse more.
    count: usize,
    f32: bool,
}

impl Elements {
    fn of<T: Weight>(address: DeviceAddress, count: usize) -> Self {
        Self { address, count, f32: T::ELEMENT == Element::F32 }
    }
}

impl<T: Weight> From<GpuRef<'_, T>> for Elements {
    fn from(elements: GpuRef<'_, T>) -> Self {
        Self::of::<T>(elements.address, elements.len)
    }
}

impl<T: Weight> From<GpuMut<'_, T>> for Elements {
    fn from(elements: GpuMut<'_, T>) -> Self {
        Self::of::<T>(elements.address, elements.len)
    }
}

impl HostMemory {
    /// The memory. No kernel uses it: every launch has been waited for.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: as many bytes were allocated; the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.memory.bytes) }
    }
}

impl Scratch {
    /// Host memory of at least `bytes` bytes.
    fn staging(&mut self, machine: &dyn Machine, bytes: usize) -> Result<&mut HostMemory> {
        if self.staging.as_ref().is_none_or(|staging| staging.memory.bytes < bytes) {
            // The old memory is given back first.
            self.staging = None;
            self.staging = Some(machine.pin(bytes.next_power_of_two())?);
        }
        Ok(self.staging.as_mut().expect("set above"))
    }

    /// The address of the words.
    fn words(&mut self, machine: &dyn Machine) -> Result<DeviceAddress> {
        if self.words.is_none() {
            self.words = Some(machine.allocate(4 * WORDS)?);
        }
        Ok(self.words.as_ref().expect("set above").address)
    }

    /// Says that no index is bad so far. Returns the address of the word.
    fn clear_bad(&mut self, machine: &dyn Machine) -> Result<DeviceAddress> {
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
    fn spare(&mut self, machine: &dyn Machine, bytes: usize) -> Result<&mut Memory> {
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
        GpuRef { address: elements.at(range.start), len: range.len(), lent: PhantomData }
    }

    fn part_mut<'a, T: Weight>(elements: &'a mut GpuMut<'_, T>, range: Range<usize>) -> Self::Mut<'a, T> {
        let part = Self::part(Self::read_only(elements), range);
        GpuMut { address: part.address, len: part.len, lent: PhantomData }
    }

    fn kept<T: Weight>(elements: &GpuVec<T>) -> Self::Ref<'_, T> {
        GpuRef { address: elements.memory.address, len: elements.len, lent: PhantomData }
    }

    fn kept_mut<T: Weight>(elements: &mut GpuVec<T>) -> Self::Mut<'_, T> {
        GpuMut { address: elements.memory.address, len: elements.len, lent: PhantomData }
    }

    fn read_only<'a, T: Weight>(elements: &'a GpuMut<'_, T>) -> Self::Ref<'a, T> {
        GpuRef { address: elements.address, len: elements.len, lent: PhantomData }
    }

    fn as_slice<'a, T: Weight>(_: Self::Ref<'a, T>) -> Option<&'a [T]> {
        None
    }

    fn keep<T: Weight>(&self, elements: Vec<T>) -> Result<GpuVec<T>> {
        let memory = self.machine.allocate(size_of_val(&elements[..]))?;
        self.machine.upload(bytemuck::cast_slice(&elements), memory.address)?;
        self.machine.finish()?;
        Ok(GpuVec { memory, len: elements.len(), kept: PhantomData })
    }

    fn zeros<T: Weight>(&self, elements: usize) -> Result<GpuVec<T>> {
        let memory = self.machine.allocate(elements * size_of::<T>())?;
        self.machine.zero(memory.address, memory.bytes)?;
        self.machine.finish()?;
        Ok(GpuVec { memory, len: elements, kept: PhantomData })
    }

    fn read<T: Weight>(&self, from: GpuRef<'_, T>, out: &mut [u8]) -> Result<()> {
        Ok(self.machine.download(from.address, out)?)
    }

    fn write<T: Weight>(&self, bytes: &[u8], to: GpuMut<'_, T>) -> Result<()> {
        self.machine.upload(bytes, to.address)?;
        Ok(self.machine.finish()?)
    }

    fn clear<T: Weight>(&self, elements: GpuMut<'_, T>) -> Result<()> {
        self.machine.zero(elements.address, elements.len * size_of::<T>())?;
        Ok(self.machine.finish()?)
    }

    fn first_not_finite<T: Weight>(&self, elements: GpuRef<'_, T>) -> Result<Option<usize>> {
        self.sum(&mut self.scratch(), elements.into(), 0, 0, true)
    }

    fn encode_int8<T: Weight>(&self, elements: GpuRef<'_, T>, payload: &mut [u8]) -> Result<Option<usize>> {
        self.encode(&mut self.scratch(), elements.into(), 0, 0, payload)
    }

    fn encode_int8_carrying<T: Weight>(
        &self,
        gradient: GpuRef<'_, T>,
        carry: &mut GpuVec<f32>,
        payload: &mut [u8],
    ) -> Result<Option<usize>> {
        self.replace(carry, |scratch, from, to| self.encode(scratch, gradient.into(), from, to, payload))
    }

    fn decode_int8<T: Weight>(&self, payload: &[u8], out: GpuMut<'_, T>) -> Result<()> {
        self.decode(payload, out.into(), false)
    }

    fn add_int8(&self, payload: &[u8], sum: GpuMut<'_, f32>) -> Result<()> {
        self.decode(payload, sum.into(), true)
    }

    fn add_bytes<T: Weight>(&self, bytes: &[u8], sum: GpuMut<'_, f32>) -> Result<()> {
        let mut scratch = self.scratch();
        let staging = scratch.staging(&*self.machine, bytes.len())?;
        copy_bytes(bytes, &mut staging.bytes()[..bytes.len()]);
        let elements = Elements::of::<T>(staging.memory.address, sum.len);
        self.sum(&mut scratch, elements, sum.address, sum.address, false).map(drop)
    }

    fn add<T: Weight>(&self, elements: GpuRef<'_, T>, sum: GpuMut<'_, f32>) -> Result<()> {
        self.sum(&mut self.scratch(), elements.into(), sum.address, sum.address, false).map(drop)
    }

    fn carry_on<T: Weight>(&self, gradient: GpuRef<'_, T>, carry: &mut GpuVec<f32>) -> Result<Option<usize>> {
        self.replace(carry, |scratch, from, to| self.sum(scratch, gradient.into(), from, to, true))
    }

    fn residuals<T: Weight>(
        &self,
        expert: GpuRef<'_, T>,
        base: Option<GpuRef<'_, T>>,
        k: usize,
    ) -> Result<Vec<Entries>> {
        self.largest(expert.into(), base.map_or(0, |base| base.address), k)
    }

    fn add_entries<T: Weight>(&self, entries: &[Entries], to: GpuMut<'_, T>) -> Result<()> {
        self.change(entries, to.into(), false)
    }

    fn subtract_entries(&self, entries: &[Entries], from: &mut GpuVec<f32>) -> Result<()> {
        self.change(entries, Self::kept_mut(from).into(), true)
    }
}
