//! The operators of [`CudaBuffer`]: each checks its arguments, fills in the kernel's parameters and launches one
//! kernel.

use std::ops::Range;

use ep::call::{check_maker, check_routing, dispatched};
use ep::join::Rendezvous;
use ep::{
    Backend, CallerError, CombineInput, CombineOutput, Config, DeviceReport, DeviceRouting, DispatchInput,
    DispatchMode, DispatchOutput, Element, HandleShape, Probs, Rank, ReceiveShape, Result, Routing, Size,
    TokenFormat, Traffic, World,
};

use crate::buffer::{CudaBuffer, address, address_or, scale_code, views};
use crate::call::Call;
use crate::device::KernelKey;
use crate::handle::CudaHandle;
use crate::memory::CudaMemory;
use crate::params::{CombineParams, DispatchParams, ProbsOrigin};
use crate::routing::Lists;
use crate::tuning::{self, CombineLoad, CombineTeams, DispatchShape, SendLoad};

impl Backend for CudaBuffer {
    type Memory = CudaMemory;
    type Handle = CudaHandle;

    fn threads(world: &World, config: &Config) -> Result<Vec<Self>> {
        Self::make_threads(world, config)
    }

    fn join(world: &World, rendezvous: &mut dyn Rendezvous, config: &Config) -> Result<Self> {
        Self::join_on(Self::default_gpu(rendezvous.rank())?, world, rendezvous, config)
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn alloc(&mut self, bytes: usize) -> Result<CudaMemory> {
        // After a failed operator, slow peers may still write to its outputs, so that memory is not allocated again.
        self.check_usable()?;
        self.notice_capture()?;
        Ok(CudaMemory::registered(self.arena.alloc(bytes, false)?, bytes, self.id))
    }

    fn upload(&mut self, bytes: &[u8], memory: &mut CudaMemory) -> Result<()> {
        memory.check(self.id, "memory to upload to", Size::new(bytes.len()))?;
        if self.notice_capture()? {
            // A replay would read the host memory of the caller, who may have freed it.
            return Err(CallerError::Config {
                key: "stream",
                value: "a stream that captures a CUDA graph".into(),
                problem: "an upload from host memory cannot be captured: upload before the capture, and use \
                          preprocess_on_device for preprocess"
                    .into(),
            }
            .into());
        }
        self.stream.upload(bytes, memory.address())?;
        self.notice_work()
    }

    fn download(&mut self, memory: &CudaMemory, bytes: &mut [u8]) -> Result<()> {
        memory.check(self.id, "memory to download from", Size::new(bytes.len()))?;
        self.wait()?;
        self.stream.download(memory.address(), bytes)?;
        self.check_usable()
    }

    fn clear(&mut self, memory: &mut CudaMemory, bytes: Range<usize>) -> Result<()> {
        memory.check(self.id, "memory to clear", Size::new(bytes.end))?;
        self.notice_capture()?;
        self.stream.zero(memory.address() + bytes.start as u64, bytes.len())?;
        self.notice_work()
    }

    fn registered_bytes(&self) -> usize {
        self.arena.registered_bytes()
    }

    fn preprocess(
        &mut self,
        routing: &Routing,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> Result<CudaHandle> {
        self.check_usable()?;
        check_routing(&self.world, self.rank, routing)?;
        let mut place = |bytes: &[u8]| -> Result<CudaMemory> {
            let mut memory = self.alloc(bytes.len())?;
            self.upload(bytes, &mut memory)?;
            Ok(memory)
        };
        let begin = place(bytemuck::cast_slice(routing.row_begins()))?;
        let experts = place(bytemuck::cast_slice(routing.all_experts()))?;
        let weights = place(bytemuck::cast_slice(routing.all_weights()))?;
        let (tokens, entries) = (routing.tokens(), routing.copies());
        let rows = Lists::Rows { tokens, entries, begin: &begin, experts: &experts, weights: &weights };
        self.preprocess_lists(&rows, mode, capacity, DeviceReport::default())
    }

    fn preprocess_on_device(
        &mut self,
        routing: &DeviceRouting<'_, CudaMemory>,
        mode: DispatchMode,
        capacity: Option<usize>,
        report: DeviceReport<'_, CudaMemory>,
    ) -> Result<CudaHandle> {
        self.preprocess_lists(&Lists::Given(*routing), mode, capacity, report)
    }

    fn handle_shape(&self, handle: &CudaHandle) -> HandleShape {
        handle.shape_so_far()
    }

    fn receive_shape(&mut self, handle: &CudaHandle) -> Result<ReceiveShape> {
        check_maker(handle.buffer, self.id)?;
        if let Some(shape) = handle.shape.get() {
            return Ok(shape.clone());
        }
        let mut words = vec![0u32; handle.sizes.shape_words()];
        self.wait()?;
        self.stream.download(handle.view.shape, bytemuck::cast_slice_mut(&mut words))?;
        self.check_usable()?;
        self.learn(handle, &words);
        handle.shape.get().cloned().ok_or_else(|| CallerError::Handle("it has no shape".into()).into())
    }

    fn dispatch(
        &mut self,
        handle: &CudaHandle,
        input: DispatchInput<'_, CudaMemory>,
        output: DispatchOutput<'_, CudaMemory>,
    ) -> Result<()> {
        self.check_usable()?;
        check_maker(handle.buffer, self.id)?;
        self.notice_capture_with(handle)?;
        let facts = Self::facts(&self.world, self.rank, handle);
        let row = facts.check_dispatch(&input, &output, CudaMemory::facts)?;
        let DispatchInput { hidden, format, .. } = input;
        let quantize = matches!(format, TokenFormat::QuantizeFp8(_));
        let kernel = self.kernel(KernelKey::dispatch(quantize, self.rails.is_some()))?;
        let row_bytes_in = format.input_row_bytes(hidden);
        let cut = DispatchShape::new(quantize, views(&self.world), row_bytes_in, kernel.shared_bytes()?);
        if let Some(rails) = &self.rails {
            rails.bounds.check_lane(handle.sizes.tokens, row.tokens + row.scales, handle.sizes.copies)?;
        }

        let rows = facts.shape.rows;
        let keep_rest = handle.capacity.is_some();
        let DispatchOutput { tokens, scales, probs, local_experts, .. } = output;
        let outputs = [Some(&*tokens), scales.as_deref(), probs.as_deref(), local_experts.as_deref()];
        let bytes = [row.tokens, row.scales, row.probs, row.local_experts].map(|row| row * rows);
        let mut staged = Vec::with_capacity(outputs.len());
        for (memory, bytes) in outputs.into_iter().zip(bytes) {
            staged.push(self.stage(memory, bytes, keep_rest)?);
        }
        let place =
            |at: usize| staged[at].as_ref().map_or_else(|| address(outputs[at]), crate::arena::Part::address);
        let (probs_origin, dense) = match input.probs {
            Probs::Skip => (ProbsOrigin::Skip, 0),
            Probs::Routing => (ProbsOrigin::Routing, 0),
            Probs::Dense(memory) => (ProbsOrigin::Dense, memory.address()),
        };
        let asks_probs = !matches!(input.probs, Probs::Skip);
        let load = SendLoad {
            quantize,
            permuted: handle.view.permuted != 0,
            tokens: handle.sizes.tokens,
            copies: handle.sizes.copies,
            ranks: self.world.topology().domain_size(),
            domains: self.world.topology().domains(),
            blocks: self.blocks,
        };
        let shares = cut.shares(&load, row_bytes_in);
        let division = cut.division(quantize);
        let call = Call::dispatch(handle.id, hidden, format, asks_probs, division);
        let mut common = self.enter(&call, &handle.view);
        let [out_tokens, out_scales, out_probs, out_local_experts] = [0, 1, 2, 3].map(place);
        common.handshake.tokens = out_tokens;
        common.handshake.scales = out_scales;
        common.handshake.probs = out_probs;
        common.handshake.local_experts = out_local_experts;
        common.handshake.share_bits = shares.group_bits;
        let params = DispatchParams {
            common,
            handle: handle.view,
            tokens: input.tokens.address(),
            scales: address(input.scales),
            dense,
            out_tokens,
            out_scales,
            out_probs,
            out_local_experts,
            probs: probs_origin as u32,
            scale_format: scale_code(format),
            row_bytes_in: row_bytes_in as u32,
            row_bytes_out: row.tokens as u32,
            scale_row_bytes: row.scales as u32,
            pieces: shares.pieces,
            piece_bytes: shares.piece_bytes,
            long_rows: (cut.pieces > 1).into(),
            stages: cut.stages,
            stage_bytes: cut.stage_bytes(),
            senders: cut.senders(&load),
            unused: 0,
        };
        // SAFETY: the parameters are this kernel's; sizes were checked; memory stays until the stream has executed the
        // launch, by the contract of `Backend` and of borrowed memory.
        unsafe { kernel.launch(&self.stream, self.blocks, cut.threads, cut.shared_bytes, &params) }?;
        self.notice_work()?;
        for ((part, memory), bytes) in staged.iter().zip(outputs).zip(bytes) {
            if let (Some(part), Some(memory)) = (part, memory) {
                self.stream.copy(part.address(), memory.address(), bytes)?;
                self.notice_work()?;
            }
        }
        handle.dispatched.set(true);
        self.domain_bytes += u64::from(handle.remote_rows.get()) * (row.tokens + row.scales) as u64;
        Ok(())
    }

    fn combine(
        &mut self,
        handle: &CudaHandle,
        input: CombineInput<'_, CudaMemory>,
        output: CombineOutput<'_, CudaMemory>,
    ) -> Result<()> {
        self.check_usable()?;
        check_maker(handle.buffer, self.id)?;
        self.notice_capture_with(handle)?;
        dispatched(handle.dispatched.get().then_some(()))?;
        let facts = Self::facts(&self.world, self.rank, handle);
        facts.check_combine(&input, &output, CudaMemory::facts)?;
        let prob_stride = facts.prob_stride(&input) as u64;
        let CombineInput { hidden, element, wire, rows, probs, .. } = input;
        let (views, rails) = (views(&self.world), self.rails.is_some());
        let (rows_f32, wire_f32) = (element == Element::F32, wire == Element::F32);
        let load = CombineLoad {
            permuted: handle.view.permuted != 0,
            rails,
            bf16: !rows_f32 && !wire_f32,
            tokens: handle.sizes.tokens,
            blocks: self.blocks,
        };
        let teams = CombineTeams::of_launch(&load, views, self.device.shared_bytes);
        let kernel = self.kernel(KernelKey::Combine { rows_f32, wire_f32, teams, rails })?;
        let slot_bytes = hidden.next_multiple_of(8) * wire.bytes();
        let scratch = (Size::new(handle.sizes.sends()) * slot_bytes).bytes("partial sums")?;
        let partials = Self::scratch(&self.arena, &mut self.partials, scratch)?;
        let prob_scratch = match probs {
            Some(_) => Self::scratch(&self.arena, &mut self.prob_scratch, 4 * handle.sizes.copies)?,
            None => 0,
        };
        let (mut set_partials, mut set_prob_scratch) = (0, 0);
        if let Some(rails) = &self.rails {
            let bounds = rails.bounds;
            let scratch = (bounds.partials() * slot_bytes).bytes("partial sums of other domains")?;
            set_partials = Self::scratch(&self.arena, &mut self.set_partials, scratch)?;
            if probs.is_some() {
                set_prob_scratch =
                    Self::scratch(&self.arena, &mut self.set_prob_scratch, bounds.prob_bytes())?;
            }
        }
        let call = Call::combine(handle.id, hidden, element, wire, probs.is_some());
        let mut common = self.enter(&call, &handle.view);
        common.handshake.tokens = partials;
        common.handshake.probs = prob_scratch;
        common.handshake.share_bits = load.share_bits(hidden, (teams.teams * self.blocks) as usize);
        common.handshake.set_tokens = set_partials;
        common.handshake.set_probs = set_prob_scratch;
        let params = CombineParams {
            common,
            handle: handle.view,
            rows: rows.address(),
            row_probs: address_or(probs, common.own),
            prob_stride,
            out_tokens: output.tokens.address(),
            out_probs: address(output.probs.as_deref()),
            partials,
            prob_scratch,
            set_partials,
            set_prob_scratch,
            set_done: self.set_done.as_ref().map_or(0, crate::arena::Part::address),
            hidden: hidden as u32,
            slack: tuning::COMBINE_SLACK,
        };
        // SAFETY: as in `dispatch`.
        unsafe {
            kernel.launch(&self.stream, self.blocks, teams.threads(), teams.shared_bytes(views), &params)
        }?;
        self.notice_work()?;
        self.domain_bytes += u64::from(handle.remote_rows.get()) * (hidden * wire.bytes()) as u64;
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        let done = self.wait();
        self.check_usable()?;
        done
    }

    fn traffic(&self) -> Traffic {
        let mut traffic = Traffic::default();
        traffic.domain_bytes = self.domain_bytes;
        traffic.preprocess_bytes = self.preprocess_bytes;
        if let Some(rails) = &self.rails {
            (traffic.transport_bytes, traffic.transport_messages) = rails.sent();
        }
        traffic
    }
}
