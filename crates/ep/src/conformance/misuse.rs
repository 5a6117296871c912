//! Invalid calls that every backend must refuse, made on all ranks.

use super::case::{CapacityKind, Case, ProbsKind, RoutingKind, pad};
use super::check::{Check, CombineMemory, DispatchMemory, Outputs};
use super::failure::{Failure, Problem};
use super::prepared::Prepared;
use crate::backend::{Backend, DispatchMode, Element, TokenFormat, Traffic};
use crate::error::{CallerError, Error, Result as EpResult};
use crate::numeric::ScaleFormat;
use crate::routing::Routing;
use crate::topology::{Rank, World};
use crate::weight::{WeightGradients, WeightRows, WeightedRows};

/// Makes calls with invalid arguments. Each call must fail with [`Error::Caller`] on every rank before the backend
/// sends anything, and the backend must pass a valid case afterwards. Every rank of the backend's world must call this.
///
/// The check assumes that memory has the length that [`Backend::alloc`] was called with, even if the allocation was
/// rounded up.
///
/// `other` is a buffer of another world in this process, whose memory the backend must refuse. The check calls none of
/// its collective operators.
///
/// # Errors
/// The first [`Failure`] on this rank. The caller should then drop the backend.
pub fn check_misuse<B: WeightRows>(backend: &mut B, other: &mut B) -> Result<(), Failure> {
    for format in [
        TokenFormat::Bf16,
        TokenFormat::Fp8(ScaleFormat::F32Per128),
        TokenFormat::QuantizeFp8(ScaleFormat::Ue8m0Per32),
    ] {
        let prepared = prepare(backend, format, pad(4))?;
        prepared.check(backend)?;
        let mut check = Check::new(&prepared, backend);
        check.misuse_preprocess()?;
        let handle = check.preprocess()?;
        check.refused_combine(&handle, "a handle that was never dispatched", |_, _| ())?;
        check.misuse_dispatch(&handle)?;
        let mut memory = check.dispatch_memory()?;
        check.dispatch(&handle, &mut memory)?;
        check.synchronize("dispatch")?;
        check.misuse_combine(&handle)?;
        check.misuse_memory()?;
        check.foreign(&handle, other)?;
        drop(handle);
        prepared.check(backend)?;
    }
    // The map of local experts is an output of the plain mode only.
    let prepared = prepare(backend, TokenFormat::Bf16, DispatchMode::Plain)?;
    let mut check = Check::new(&prepared, backend);
    let handle = check.preprocess()?;
    let mut memory = check.dispatch_memory()?;
    check.dispatch(&handle, &mut memory)?;
    check.synchronize("dispatch")?;
    check.foreign(&handle, other)?;
    drop(handle);
    prepared.check(backend)
}

/// Describes a call that passes another buffer's memory for this argument.
macro_rules! foreign {
    ($argument:literal) => {
        concat!("another buffer's memory for ", $argument)
    };
}

/// A valid case in the backend's world, with tokens and output rows on every rank for any placement.
fn prepare<B: Backend>(backend: &B, format: TokenFormat, mode: DispatchMode) -> Result<Prepared, Failure> {
    let world: &World = backend.world();
    let (ranks, experts) = (world.ranks(), world.experts());
    let owner = |expert| world.placement().owner_at(world.placement().position_of(expert));
    let case = Case {
        owners: Some((0..experts as u32).map(owner).collect()),
        tokens: (0..ranks).map(|rank| 6 + rank % 2).collect(),
        hidden: 48,
        routing: RoutingKind::TopK { k: 2, skew: 0.0 },
        mode,
        capacity: vec![CapacityKind::Larger; ranks],
        format,
        runs: 2,
        ..Case::base("misuse", ranks, world.topology().domains(), experts)
    };
    case.prepare_in(world.clone(), 0).map_err(|error| Failure {
        case: case.to_string(),
        rank: backend.rank(),
        operator: "preparing",
        run: 0,
        problem: Box::new(Problem::Error(error)),
        stopped: false,
    })
}

/// Bytes and messages that were sent.
fn sent(traffic: Traffic) -> [u64; 3] {
    [traffic.domain_bytes, traffic.transport_bytes, traffic.transport_messages]
}

impl<B: WeightRows> Check<'_, B> {
    /// Makes a call that must be refused.
    fn refused<T>(
        &mut self,
        operator: &'static str,
        call: &'static str,
        make: impl FnOnce(&mut B) -> EpResult<T>,
    ) -> Result<(), Failure> {
        self.refused_as(operator, call, |_| true, make)
    }

    /// Makes a call that must be refused with an error for which `is_right` returns true.
    fn refused_as<T>(
        &mut self,
        operator: &'static str,
        call: &'static str,
        is_right: impl Fn(&CallerError) -> bool,
        make: impl FnOnce(&mut B) -> EpResult<T>,
    ) -> Result<(), Failure> {
        let before = sent(self.backend.traffic());
        let result = make(self.backend);
        let problem = match result {
            Err(Error::Caller(error)) if is_right(&error) => {
                if sent(self.backend.traffic()) == before {
                    return Ok(());
                }
                Problem::Sent { call }
            }
            Err(error) => Problem::WrongError { call, error },
            Ok(_) => Problem::Accepted { call },
        };
        Err(self.failure(operator, problem))
    }

    fn misuse_preprocess(&mut self) -> Result<(), Failure> {
        const OPERATOR: &str = "preprocess";
        let Case { mode, experts, ranks, .. } = *self.case_of();
        let (rank, good) = (self.rank, self.prepared.routings[self.rank.index()].clone());
        self.refused(OPERATOR, "a routing for a different number of experts", |backend| {
            backend.preprocess(&Routing::empty(rank, experts + 1), mode, None)
        })?;
        self.refused(OPERATOR, "a capacity that is not a multiple of pad_multiple", |backend| {
            backend.preprocess(&good, mode, Some(mode.pad_multiple() + 1))
        })?;
        if ranks > 1 {
            let other = Rank((rank.0 + 1) % ranks as u32);
            self.refused(OPERATOR, "the routing of another rank", |backend| {
                backend.preprocess(&Routing::empty(other, experts), mode, None)
            })?;
        }
        Ok(())
    }

    fn misuse_dispatch(&mut self, handle: &B::Handle) -> Result<(), Failure> {
        let Outputs { tokens, probs, .. } = self.dispatched();
        self.refused_dispatch(handle, "rows that are not a multiple of 16 bytes", |case, _| {
            case.hidden -= 1
        })?;
        self.refused_dispatch(handle, "empty rows", |case, _| case.hidden = 0)?;

        let case = self.case_of();
        let short = self.memory(self.given_rows() * case.format.input_row_bytes(case.hidden) - 1)?;
        self.refused_dispatch(handle, "too little memory of tokens", |_, memory| memory.tokens = short)?;
        let short = self.memory(tokens.needed() - 1)?;
        self.refused_dispatch(handle, "too little memory for tokens", |_, memory| memory.out_tokens = short)?;

        self.refused_dispatch(handle, "no memory for probs", |_, memory| memory.out_probs = None)?;
        let short = self.memory(probs.map_or(0, |probs| probs.needed()) - 1)?;
        self.refused_dispatch(handle, "too little memory for probs", |_, memory| {
            memory.out_probs = Some(short);
        })?;
        let short = self.memory(4 * self.case_of().experts - 1)?;
        self.refused_dispatch(handle, "too little memory of dense probs", |case, memory| {
            case.probs = ProbsKind::Dense;
            memory.dense = Some(short);
        })?;
        self.refused_dispatch(handle, "memory for probs that are not sent", |case, _| {
            case.probs = ProbsKind::Skip;
        })?;
        let spare = self.memory(1 << 12)?;
        self.refused_dispatch(handle, "memory for local experts of permuted rows", |_, memory| {
            memory.out_local_experts = Some(spare);
        })?;
        match self.case_of().format {
            TokenFormat::Bf16 | TokenFormat::F32 => {
                let spare = self.memory(1 << 12)?;
                self.refused_dispatch(handle, "memory for scales of tokens that have none", |_, memory| {
                    memory.out_scales = Some(spare);
                })?;
                self.superfluous_scales(handle)
            }
            TokenFormat::Fp8(_) => {
                self.wrong_out_scales(handle)?;
                self.missing_scales(handle)
            }
            TokenFormat::QuantizeFp8(_) => {
                self.refused_dispatch(
                    handle,
                    "received rows that are not a multiple of 16 bytes",
                    |case, _| {
                        case.hidden -= 8;
                    },
                )?;
                self.wrong_out_scales(handle)?;
                self.superfluous_scales(handle)
            }
        }
    }

    fn superfluous_scales(&mut self, handle: &B::Handle) -> Result<(), Failure> {
        let scales = self.memory(1 << 12)?;
        self.refused_dispatch(handle, "scales of tokens that have none", |_, memory| {
            memory.scales = Some(scales);
        })
    }

    fn missing_scales(&mut self, handle: &B::Handle) -> Result<(), Failure> {
        self.refused_dispatch(handle, "no scales", |_, memory| memory.scales = None)?;
        let case = self.case_of();
        let short = self.memory(self.given_rows() * case.format.scale_row_bytes(case.hidden) - 1)?;
        self.refused_dispatch(handle, "too little memory of scales", |_, memory| {
            memory.scales = Some(short);
        })
    }

    fn wrong_out_scales(&mut self, handle: &B::Handle) -> Result<(), Failure> {
        self.refused_dispatch(handle, "no memory for scales", |_, memory| memory.out_scales = None)?;
        let needed = self.dispatched().scales.map_or(0, |scales| scales.needed());
        let short = self.memory(needed - 1)?;
        self.refused_dispatch(handle, "too little memory for scales", |_, memory| {
            memory.out_scales = Some(short);
        })
    }

    fn misuse_combine(&mut self, handle: &B::Handle) -> Result<(), Failure> {
        let (tokens, probs) = self.combined();
        self.refused_combine(handle, "rows that are not a multiple of 16 bytes", |case, _| case.hidden -= 1)?;
        self.refused_combine(handle, "empty rows", |case, _| case.hidden = 0)?;
        let short = self.memory(tokens.needed() - 1)?;
        self.refused_combine(handle, "too little memory for tokens", |_, memory| memory.out_tokens = short)?;

        self.refused_combine(handle, "probs, but no memory for them", |_, memory| memory.out_probs = None)?;
        self.refused_combine(handle, "no probs, but memory for them", |_, memory| memory.probs = None)?;
        let short = self.memory(probs.needed() - 1)?;
        self.refused_combine(handle, "too little memory for probs", |_, memory| {
            memory.out_probs = Some(short);
        })?;

        // A rank without rows accepts memory of any size. It would enter the operator while its peers refuse the call.
        let received = &self.prepared.received;
        if received.iter().any(|received| received.shape.rows == 0) {
            return Ok(());
        }
        let rows = received[self.rank.index()].shape.rows;
        let short = self.memory(rows * tokens.row_bytes - 1)?;
        self.refused_combine(handle, "too little memory of expert rows", |_, memory| memory.rows = short)?;
        let short = self.memory(4 * rows - 1)?;
        self.refused_combine(handle, "too little memory of probs", |_, memory| memory.probs = Some(short))?;
        let width = self.prepared.probs_per_row(self.rank);
        self.refused_combine(handle, "a stride of probs below their width", |_, memory| {
            memory.prob_stride = Some(width - 1);
        })?;
        // The stride of a single row has no effect.
        if received.iter().any(|received| received.shape.rows == 1) {
            return Ok(());
        }
        self.refused_combine(handle, "too little memory for the stride of probs", |_, memory| {
            memory.prob_stride = Some(usize::MAX / 4);
        })
    }

    fn misuse_memory(&mut self) -> Result<(), Failure> {
        let mut memory = self.memory(64)?;
        self.refused("upload", "more bytes than the memory has", |backend| {
            backend.upload(&[0; 65], &mut memory)
        })?;
        self.refused("download", "more bytes than the memory has", |backend| {
            backend.download(&memory, &mut [0; 65])
        })
    }

    /// Makes calls that are valid except for one argument, which is memory of `other`.
    fn foreign(&mut self, handle: &B::Handle, other: &mut B) -> Result<(), Failure> {
        // Larger than any argument of the calls, so that only the wrong buffer can be the reason for the error.
        let mut foreign = || other.alloc(1 << 20);
        let mut give = |check: &Self| foreign().map_err(|error| check.error("alloc", error));
        let Outputs { scales, probs, local_experts, .. } = self.dispatched();
        let given_scales = matches!(self.case_of().format, TokenFormat::Fp8(_));

        let memory = give(self)?;
        self.foreign_dispatch(handle, foreign!("tokens"), |_, arguments| arguments.tokens = memory)?;
        if given_scales {
            let memory = give(self)?;
            self.foreign_dispatch(handle, foreign!("scales"), |_, arguments| {
                arguments.scales = Some(memory)
            })?;
        }
        let memory = give(self)?;
        self.foreign_dispatch(handle, foreign!("dense probs"), |case, arguments| {
            case.probs = ProbsKind::Dense;
            arguments.dense = Some(memory);
        })?;
        let memory = give(self)?;
        self.foreign_dispatch(handle, foreign!("received tokens"), |_, arguments| {
            arguments.out_tokens = memory
        })?;
        if scales.is_some() {
            let memory = give(self)?;
            self.foreign_dispatch(handle, foreign!("received scales"), |_, arguments| {
                arguments.out_scales = Some(memory);
            })?;
        }
        if probs.is_some() {
            let memory = give(self)?;
            self.foreign_dispatch(handle, foreign!("received probs"), |_, arguments| {
                arguments.out_probs = Some(memory);
            })?;
        }
        if local_experts.is_some() {
            let memory = give(self)?;
            self.foreign_dispatch(handle, foreign!("local experts"), |_, arguments| {
                arguments.out_local_experts = Some(memory);
            })?;
        }

        let memory = give(self)?;
        self.foreign_combine(handle, foreign!("expert rows"), |arguments| arguments.rows = memory)?;
        let memory = give(self)?;
        self.foreign_combine(handle, foreign!("probs"), |arguments| arguments.probs = Some(memory))?;
        let memory = give(self)?;
        self.foreign_combine(handle, foreign!("combined tokens"), |arguments| arguments.out_tokens = memory)?;
        let memory = give(self)?;
        self.foreign_combine(handle, foreign!("gathered probs"), |arguments| {
            arguments.out_probs = Some(memory)
        })?;

        let mut memory = give(self)?;
        self.refused_foreign("upload", foreign!("upload"), |backend| backend.upload(&[0; 16], &mut memory))?;
        self.refused_foreign("download", foreign!("download"), |backend| {
            backend.download(&memory, &mut [0; 16])
        })?;
        self.foreign_weights(&mut give)
    }

    fn foreign_weights(
        &mut self,
        give: &mut impl FnMut(&Self) -> Result<B::Memory, Failure>,
    ) -> Result<(), Failure> {
        const CALLS: [&str; 5] = [
            foreign!("rows to be weighted"),
            foreign!("weights"),
            foreign!("weighted rows"),
            foreign!("rows that were weighted"),
            foreign!("gradients of weights"),
        ];
        for (at, call) in CALLS.into_iter().enumerate() {
            let mut memories = Vec::new();
            for argument in 0..CALLS.len() {
                memories.push(if argument == at { give(self)? } else { self.memory(1 << 12)? });
            }
            let [values, weights, out, rows, dots] = &mut memories[..] else {
                unreachable!("five arguments")
            };
            let input = WeightedRows::new(values, [4, 48], weights);
            let backward = WeightGradients::new(rows, dots);
            self.refused_foreign("weight_rows", call, |backend| {
                backend.weight_rows(&input, Element::Bf16, out, Some(backward))
            })?;
        }
        Ok(())
    }

    fn foreign_dispatch(
        &mut self,
        handle: &B::Handle,
        call: &'static str,
        give: impl FnOnce(&mut Case, &mut DispatchMemory<B::Memory>),
    ) -> Result<(), Failure> {
        let mut memory = self.dispatch_memory()?;
        let mut case = self.case_of().clone();
        give(&mut case, &mut memory);
        let (input, output) = memory.arguments(&case);
        self.refused_foreign("dispatch", call, |backend| backend.dispatch(handle, input, output))
    }

    fn foreign_combine(
        &mut self,
        handle: &B::Handle,
        call: &'static str,
        give: impl FnOnce(&mut CombineMemory<B::Memory>),
    ) -> Result<(), Failure> {
        let mut memory = self.combine_memory(true)?;
        give(&mut memory);
        let (input, output) = memory.arguments(self.case_of());
        self.refused_foreign("combine", call, |backend| backend.combine(handle, input, output))
    }

    /// Makes a call that must be refused because an argument is memory of another buffer.
    fn refused_foreign<T>(
        &mut self,
        operator: &'static str,
        call: &'static str,
        make: impl FnOnce(&mut B) -> EpResult<T>,
    ) -> Result<(), Failure> {
        let rank = self.rank;
        let is_right =
            |error: &CallerError| matches!(error, CallerError::Memory { rank: named, .. } if *named == rank);
        self.refused_as(operator, call, is_right, make)
    }

    /// Makes a dispatch that is valid except for the change that `spoil` makes to its arguments.
    fn refused_dispatch(
        &mut self,
        handle: &B::Handle,
        call: &'static str,
        spoil: impl FnOnce(&mut Case, &mut DispatchMemory<B::Memory>),
    ) -> Result<(), Failure> {
        let mut memory = self.dispatch_memory()?;
        let mut case = self.case_of().clone();
        spoil(&mut case, &mut memory);
        let (input, output) = memory.arguments(&case);
        self.refused("dispatch", call, |backend| backend.dispatch(handle, input, output))
    }

    /// Makes a combine that is valid except for the change that `spoil` makes to its arguments.
    fn refused_combine(
        &mut self,
        handle: &B::Handle,
        call: &'static str,
        spoil: impl FnOnce(&mut Case, &mut CombineMemory<B::Memory>),
    ) -> Result<(), Failure> {
        let mut memory = self.combine_memory(true)?;
        let mut case = self.case_of().clone();
        spoil(&mut case, &mut memory);
        let (input, output) = memory.arguments(&case);
        self.refused("combine", call, |backend| backend.combine(handle, input, output))
    }

    fn memory(&mut self, bytes: usize) -> Result<B::Memory, Failure> {
        self.backend.alloc(bytes).map_err(|error| self.error("alloc", error))
    }

    /// Tokens of this rank.
    fn given_rows(&self) -> usize {
        self.case_of().tokens[self.rank.index()]
    }
}
