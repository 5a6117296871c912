//! A backend of one rank, made from the oracle, into which tests inject faults.

use std::cell::Cell;
use std::ops::{Deref, DerefMut, Range};

use crate::backend::*;
use crate::call::{Maker, MemoryFacts, check_memory};
use crate::config::Config;
use crate::device::{DeviceReport, DeviceRouting};
use crate::error::{CallerError, Result};
use crate::join::Rendezvous;
use crate::layout::{Counts, ReceiveShape};
use crate::numeric::f32_to_bf16;
use crate::oracle::{self, CombineSpec, ReceivedRows, Tokens};
use crate::routing::Routing;
use crate::size::Size;
use crate::topology::{Rank, World};
use crate::weight::{WeightGradients, WeightRows, WeightedRows};

/// The fault of a [`Fake`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    FlipsBit,
    FlipsBitAndFails,
    LeavesPadding,
    WritesBehind,
    WritesSpareRow,
    ForgetsRow,
    SwapsRows,
    WrongScale,
    WrongProb,
    WrongLocalExpert,
    WrongShape,
    WrongHandleShape,
    LeavesReport,
    LeavesOverflow,
    ForgetsFirstHandle,
    ForgetsOldHandles,
    SumsBackwards,
    AddsPadding,
    RoundsDown,
    LeavesUnchosenProbs,
    IgnoresProbStride,
    OnlyOnce,
    Fails,
    TakesAnyCapacity,
    BlamesEnvironment,
    SendsFirst,
    TruncatesWeighted,
    SkipsLastElement,
    LeavesDots,
    /// Accepts another buffer's memory for this argument.
    TakesForeign(&'static str),
}

/// Memory of a [`Fake`].
pub(super) struct FakeMemory {
    maker: Maker,
    bytes: Vec<u8>,
}

impl Deref for FakeMemory {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for FakeMemory {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

/// A backend of one rank that computes its results with the oracle.
pub(super) struct Fake {
    maker: Maker,
    world: World,
    fault: Fault,
    newest: u32,
    dispatches: u32,
    sent: u64,
}

pub(super) struct FakeHandle {
    number: u32,
    routing: Routing,
    mode: DispatchMode,
    received: Vec<ReceivedRows>,
    dispatched: Cell<bool>,
}

impl FakeHandle {
    fn shape(&self) -> &ReceiveShape {
        &self.received[0].shape
    }
}

fn need(expected: usize, found: usize) -> Result<()> {
    if found >= expected {
        return Ok(());
    }
    Err(CallerError::Shape { what: "memory", expected, found, unit: "bytes" }.into())
}

fn both_or_none(wanted: bool, given: bool) -> Result<()> {
    need(given.into(), wanted.into()).and(need(wanted.into(), given.into()))
}

fn fill(memory: &mut [u8], bytes: &[u8]) {
    memory[..bytes.len()].copy_from_slice(bytes);
}

impl Fake {
    pub(super) fn new(world: &World, fault: Fault) -> Self {
        assert_eq!(world.ranks(), 1);
        let maker = Maker::new(Rank(0));
        Self { maker, world: world.clone(), fault, newest: 0, dispatches: 0, sent: 0 }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    fn check_own(&self, what: &'static str, memory: Option<&FakeMemory>) -> Result<()> {
        let Some(memory) = memory.filter(|_| !self.is(Fault::TakesForeign(what))) else { return Ok(()) };
        let facts = MemoryFacts { bytes: memory.len(), maker: Some(memory.maker) };
        check_memory(self.maker, what, Size::new(0), facts)
    }

    fn check_dispatch(
        &self,
        handle: &FakeHandle,
        input: &DispatchInput<'_, FakeMemory>,
        output: &DispatchOutput<'_, FakeMemory>,
    ) -> Result<()> {
        let dense = if let Probs::Dense(dense) = input.probs { Some(dense) } else { None };
        for (what, memory) in [
            ("tokens", Some(input.tokens)),
            ("scales", input.scales),
            ("dense probs", dense),
            ("received tokens", Some(&*output.tokens)),
            ("received scales", output.scales.as_deref()),
            ("received probs", output.probs.as_deref()),
            ("local experts", output.local_experts.as_deref()),
        ] {
            self.check_own(what, memory)?;
        }
        let DispatchInput { hidden, format, .. } = *input;
        let (tokens, rows) = (handle.routing.tokens(), handle.shape().allocated_rows());
        check_row_bytes(hidden, format.input_row_bytes(hidden))?;
        check_row_bytes(hidden, format.output_row_bytes(hidden))?;
        need(tokens * format.input_row_bytes(hidden), input.tokens.len())?;
        need(rows * format.output_row_bytes(hidden), output.tokens.len())?;
        both_or_none(matches!(format, TokenFormat::Fp8(_)), input.scales.is_some())?;
        both_or_none(format.scales().is_some(), output.scales.is_some())?;
        if let Some(scales) = &input.scales {
            need(tokens * format.scale_row_bytes(hidden), scales.len())?;
        }
        if let Some(scales) = &output.scales {
            need(rows * format.scale_row_bytes(hidden), scales.len())?;
        }
        if let Probs::Dense(dense) = input.probs {
            need(4 * tokens * self.world.experts(), dense.len())?;
        }
        both_or_none(!matches!(input.probs, Probs::Skip), output.probs.is_some())?;
        if let Some(probs) = &output.probs {
            need(4 * rows * self.probs_per_row(handle.mode), probs.len())?;
        }
        need(output.local_experts.is_some().into(), (handle.mode == DispatchMode::Plain).into())
    }

    fn check_combine(
        &self,
        handle: &FakeHandle,
        input: &CombineInput<'_, FakeMemory>,
        output: &CombineOutput<'_, FakeMemory>,
    ) -> Result<()> {
        if !handle.dispatched.get() {
            return Err(CallerError::Handle("never dispatched".into()).into());
        }
        for (what, memory) in [
            ("expert rows", Some(input.rows)),
            ("probs", input.probs),
            ("combined tokens", Some(&*output.tokens)),
            ("gathered probs", output.probs.as_deref()),
        ] {
            self.check_own(what, memory)?;
        }
        let row_bytes = input.hidden * input.element.bytes();
        let (tokens, rows) = (handle.routing.tokens(), handle.shape().rows);
        check_row_bytes(input.hidden, row_bytes)?;
        need(rows * row_bytes, input.rows.len())?;
        need(tokens * row_bytes, output.tokens.len())?;
        both_or_none(input.probs.is_some(), output.probs.is_some())?;
        let width = self.probs_per_row(handle.mode);
        let stride = input.prob_stride.unwrap_or(width);
        need(width, stride)?;
        let elements =
            rows.checked_sub(1).map_or(0, |before| before.saturating_mul(stride).saturating_add(width));
        need(elements.saturating_mul(4), input.probs.map_or(usize::MAX, |probs| probs.len()))?;
        let out_probs = output.probs.as_ref().map_or(usize::MAX, |probs| probs.len());
        need(4 * tokens * self.world.experts(), out_probs)
    }

    fn probs_per_row(&self, mode: DispatchMode) -> usize {
        if mode == DispatchMode::Plain { self.world.experts() } else { 1 }
    }

    fn spoil_dispatch(
        &self,
        handle: &FakeHandle,
        row_bytes: usize,
        mut before: Vec<u8>,
        out: &mut DispatchOutput<'_, FakeMemory>,
    ) {
        let rows = handle.shape().rows;
        let flip = |memory: &mut Vec<u8>, at: usize| {
            if let Some(byte) = memory.get_mut(at) {
                *byte ^= 1;
            }
        };
        match self.fault {
            Fault::FlipsBit | Fault::FlipsBitAndFails if rows > 0 => flip(out.tokens, rows * row_bytes - 1),
            Fault::WritesBehind => {
                let end = handle.shape().allocated_rows() * row_bytes;
                if let Some(byte) = out.tokens.get_mut(end) {
                    *byte = 0;
                }
            }
            Fault::WritesSpareRow if handle.shape().allocated_rows() > rows => {
                out.tokens[rows * row_bytes] = 0;
            }
            Fault::LeavesPadding => {
                for range in handle.shape().padding() {
                    let range = range.start * row_bytes..range.end * row_bytes;
                    out.tokens[range.clone()].copy_from_slice(&before[range]);
                }
            }
            Fault::ForgetsRow if rows > 1 => {
                out.tokens[row_bytes..2 * row_bytes].swap_with_slice(&mut before[row_bytes..2 * row_bytes])
            }
            Fault::SwapsRows if rows > 1 => out.tokens[..2 * row_bytes].rotate_left(row_bytes),
            Fault::WrongScale => out.scales.iter_mut().for_each(|scales| flip(scales, 0)),
            Fault::WrongProb => out.probs.iter_mut().for_each(|probs| flip(probs, 0)),
            Fault::WrongLocalExpert => out.local_experts.iter_mut().for_each(|experts| flip(experts, 0)),
            _ => {}
        }
    }
}

impl Backend for Fake {
    type Memory = FakeMemory;
    type Handle = FakeHandle;

    fn threads(world: &World, _: &Config) -> Result<Vec<Self>> {
        Ok(vec![Self::new(world, Fault::None)])
    }

    fn join(world: &World, _: &mut dyn Rendezvous, _: &Config) -> Result<Self> {
        Ok(Self::new(world, Fault::None))
    }

    fn rank(&self) -> Rank {
        Rank(0)
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn alloc(&mut self, bytes: usize) -> Result<FakeMemory> {
        Ok(FakeMemory { maker: self.maker, bytes: vec![0; bytes] })
    }

    fn upload(&mut self, bytes: &[u8], memory: &mut FakeMemory) -> Result<()> {
        self.check_own("upload", Some(memory))?;
        need(bytes.len(), memory.len())?;
        fill(memory, bytes);
        Ok(())
    }

    fn download(&mut self, memory: &FakeMemory, bytes: &mut [u8]) -> Result<()> {
        self.check_own("download", Some(memory))?;
        need(bytes.len(), memory.len())?;
        bytes.copy_from_slice(&memory[..bytes.len()]);
        Ok(())
    }

    fn clear(&mut self, memory: &mut FakeMemory, bytes: Range<usize>) -> Result<()> {
        self.check_own("clear", Some(memory))?;
        memory[bytes].fill(0);
        Ok(())
    }

    fn registered_bytes(&self) -> usize {
        0
    }

    fn preprocess(
        &mut self,
        routing: &Routing,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> Result<FakeHandle> {
        if !self.is(Fault::TakesAnyCapacity) || capacity.is_none() {
            Counts::of(&self.world, routing, mode, capacity)?;
        }
        self.newest += 1;
        let received = oracle::rows(&self.world, std::slice::from_ref(routing), mode, &[capacity]);
        let routing = routing.clone();
        Ok(FakeHandle { number: self.newest, routing, mode, received, dispatched: Cell::new(false) })
    }

    fn preprocess_on_device(
        &mut self,
        routing: &DeviceRouting<'_, FakeMemory>,
        mode: DispatchMode,
        capacity: Option<usize>,
        mut report: DeviceReport<'_, FakeMemory>,
    ) -> Result<FakeHandle> {
        let routing = routing.read(self)?;
        let handle = self.preprocess(&routing, mode, capacity)?;
        let shape = self.receive_shape(&handle)?;
        match self.fault {
            Fault::LeavesReport => report = DeviceReport::default(),
            Fault::LeavesOverflow => report.overflow = None,
            _ => {}
        }
        report.write(self, &shape)?;
        Ok(handle)
    }

    fn handle_shape(&self, handle: &FakeHandle) -> HandleShape {
        let shape = handle.shape();
        HandleShape {
            mode: handle.mode,
            tokens: handle.routing.tokens(),
            rows: shape.allocated_rows() + usize::from(self.is(Fault::WrongHandleShape)),
            capacity: shape.capacity,
            received_rows: Some(shape.rows),
        }
    }

    fn receive_shape(&mut self, handle: &FakeHandle) -> Result<ReceiveShape> {
        let mut shape = handle.shape().clone();
        shape.wanted_rows += usize::from(self.is(Fault::WrongShape));
        Ok(shape)
    }

    fn dispatch(
        &mut self,
        handle: &FakeHandle,
        input: DispatchInput<'_, FakeMemory>,
        mut output: DispatchOutput<'_, FakeMemory>,
    ) -> Result<()> {
        self.sent += 1;
        self.check_dispatch(handle, &input, &output).map_err(|error| {
            if self.is(Fault::BlamesEnvironment) {
                return crate::EnvironmentError::new("dispatch", error, "").into();
            }
            error
        })?;
        handle.dispatched.set(true);
        self.dispatches += 1;
        if self.is(Fault::OnlyOnce) && self.dispatches > 1 {
            return Ok(());
        }
        if matches!(self.fault, Fault::Fails | Fault::FlipsBitAndFails) && self.dispatches > 2 {
            return Err(crate::EnvironmentError::new("dispatch", "no more", "").into());
        }
        let DispatchInput { hidden, format, .. } = input;
        let tokens = handle.routing.tokens();
        let tokens = Tokens {
            data: input.tokens[..tokens * format.input_row_bytes(hidden)].to_vec(),
            scales: input
                .scales
                .map_or(Vec::new(), |scales| scales[..tokens * format.scale_row_bytes(hidden)].to_vec()),
            probs: match input.probs {
                Probs::Dense(dense) => {
                    bytemuck::pod_collect_to_vec(&dense[..4 * tokens * self.world.experts()])
                }
                _ => handle.routing.dense_probs(),
            },
        };
        let out = &oracle::dispatch(&self.world, &handle.received, handle.mode, format, hidden, &[tokens])[0];
        let before = output.tokens.bytes.clone();
        fill(output.tokens, &out.tokens);
        if let Some(scales) = &mut output.scales {
            fill(scales, &out.scales);
        }
        if let Some(probs) = &mut output.probs {
            fill(probs, bytemuck::cast_slice(&out.probs));
        }
        if let Some(experts) = &mut output.local_experts {
            fill(experts, &out.local_experts);
        }
        self.spoil_dispatch(handle, format.output_row_bytes(hidden), before, &mut output);
        Ok(())
    }

    fn combine(
        &mut self,
        handle: &FakeHandle,
        input: CombineInput<'_, FakeMemory>,
        output: CombineOutput<'_, FakeMemory>,
    ) -> Result<()> {
        self.check_combine(handle, &input, &output)?;
        let spec = CombineSpec { hidden: input.hidden, element: input.element, wire: input.wire };
        let row_bytes = spec.hidden * spec.element.bytes();
        let rows = &handle.received[0].rows;
        for (token, out) in
            output.tokens.chunks_exact_mut(row_bytes).take(handle.routing.tokens()).enumerate()
        {
            let is_summand = |row: usize| match &rows[row] {
                Some(source) => source.token == token,
                None => self.is(Fault::AddsPadding),
            };
            let mut summands: Vec<&[u8]> = (0..rows.len())
                .filter(|&row| is_summand(row))
                .map(|row| &input.rows[row * row_bytes..][..row_bytes])
                .collect();
            if self.is(Fault::SumsBackwards) {
                summands.reverse();
            }
            let since = self.newest - handle.number;
            let forgotten = self.is(Fault::ForgetsFirstHandle) && since > 0
                || self.is(Fault::ForgetsOldHandles) && since > 3;
            if forgotten {
                summands.clear();
            }
            out.copy_from_slice(&oracle::combine_token(&self.world, Rank(0), spec, |_| summands.clone()));
            if self.is(Fault::RoundsDown) {
                out[0] &= 0xFC;
            }
        }
        if let (Some(from), Some(to)) = (input.probs, output.probs) {
            let with_gaps: Vec<f32> = bytemuck::pod_collect_to_vec(&from[..from.len() / 4 * 4]);
            let width = self.probs_per_row(handle.mode);
            let given = input.prob_stride.filter(|_| !self.is(Fault::IgnoresProbStride));
            let row_probs: Vec<f32> =
                with_gaps.chunks(given.unwrap_or(width)).flat_map(|row| &row[..width]).copied().collect();
            let routings = std::slice::from_ref(&handle.routing);
            let dense =
                &oracle::combine_probs(&self.world, routings, &handle.received, handle.mode, &[row_probs])[0];
            for (bytes, &prob) in to.chunks_exact_mut(4).zip(dense) {
                if prob != 0.0 || !self.is(Fault::LeavesUnchosenProbs) {
                    bytes.copy_from_slice(&prob.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        let domain_bytes = if self.is(Fault::SendsFirst) { self.sent } else { 0 };
        Traffic { domain_bytes, ..Traffic::default() }
    }
}

impl WeightRows for Fake {
    fn weight_rows(
        &mut self,
        input: &WeightedRows<'_, FakeMemory>,
        element: Element,
        out: &mut FakeMemory,
        backward: Option<WeightGradients<'_, FakeMemory>>,
    ) -> Result<()> {
        let facts = |memory: &FakeMemory| MemoryFacts { bytes: memory.len(), maker: None };
        input.check(self.maker, element, out, backward.as_ref(), facts)?;
        for (what, memory) in [
            ("rows to be weighted", Some(input.values)),
            ("weights", Some(input.weights)),
            ("weighted rows", Some(&*out)),
            ("rows that were weighted", backward.as_ref().map(|backward| backward.rows)),
            ("gradients of weights", backward.as_ref().map(|backward| &*backward.weights)),
        ] {
            self.check_own(what, memory)?;
        }
        for at in 0..input.rows * input.hidden {
            let weight = oracle::value(Element::F32, input.weights, at / input.hidden);
            let product = oracle::value(input.element, input.values, at) * weight;
            match element {
                Element::Bf16 if self.is(Fault::TruncatesWeighted) => {
                    let upper = (product.to_bits() >> 16) as u16;
                    fill(&mut out[2 * at..], &upper.to_le_bytes());
                }
                Element::Bf16 => fill(&mut out[2 * at..], &f32_to_bf16(product).to_le_bytes()),
                Element::F32 => fill(&mut out[4 * at..], &product.to_le_bytes()),
            }
        }
        let Some(WeightGradients { rows, weights }) = backward else { return Ok(()) };
        let summed = input.hidden - usize::from(self.is(Fault::SkipsLastElement));
        for row in 0..input.rows {
            let product = |column: usize| {
                let at = row * input.hidden + column;
                oracle::value(input.element, input.values, at) * oracle::value(element, rows, at)
            };
            let dot: f32 = (0..summed).map(product).sum();
            if !self.is(Fault::LeavesDots) {
                fill(&mut weights[4 * row..], &dot.to_le_bytes());
            }
        }
        Ok(())
    }
}
