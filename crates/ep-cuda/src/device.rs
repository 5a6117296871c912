//! The sources of the kernels and their variants.

use crate::jit::{Arch, Program};
use crate::params::MAX_RANKS;
use crate::tuning::{self, CombineTeams, MOST_BLOCKS_OF_PAIRS};

/// A kernel and its compile-time parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum KernelKey {
    Preprocess {
        rails: bool,
    },
    /// Occupies a stream, for benchmarks.
    Spin,
    Dispatch {
        quantize: bool,
        /// Maximum number of warps of a block.
        warps: u32,
        /// For a world of several NVLink domains.
        rails: bool,
    },
    Combine {
        rows_f32: bool,
        wire_f32: bool,
        teams: CombineTeams,
        rails: bool,
    },
    /// Multiplies experts' outputs by their weights.
    WeightRows,
    /// Converts a top-k routing to a map and dense probabilities.
    Dense,
    /// Copies the bytes of an emulated link.
    LaneCopy,
    /// A pass of codecs over the elements of an expert.
    Codec(CodecKernel),
}

/// The kernels of codecs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum CodecKernel {
    Int8Encode,
    Int8Decode,
    Residuals,
    Entries,
    Sums,
}

impl CodecKernel {
    pub(crate) const ALL: [Self; 5] =
        [Self::Int8Encode, Self::Int8Decode, Self::Residuals, Self::Entries, Self::Sums];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Int8Encode => "int8_encode",
            Self::Int8Decode => "int8_decode",
            Self::Residuals => "residuals",
            Self::Entries => "entries",
            Self::Sums => "sums",
        }
    }
}

macro_rules! headers {
    ($($path:literal),+ $(,)?) => {
        &[$((base_name($path), include_str!(concat!("../device/", $path)))),+]
    };
}

const HEADERS: &[(&str, &str)] = headers![
    "common/types.cuh",
    "common/lists.cuh",
    "common/ptx.cuh",
    "common/bf16.cuh",
    "common/params.cuh",
    "common/handle.cuh",
    "common/sync.cuh",
    "common/worker.cuh",
    "common/ring.cuh",
    "common/rails.cuh",
    "common/copy_bulk.cuh",
    "common/copy_plain.cuh",
    "preprocess/tile.cuh",
    "preprocess/bases.cuh",
    "preprocess/emit.cuh",
    "preprocess/routing.cuh",
    "dispatch/feed.cuh",
    "dispatch/arrivals.cuh",
    "dispatch/payload.cuh",
    "dispatch/payload_copy.cuh",
    "dispatch/payload_quantize.cuh",
    "dispatch/e4m3_cvt.cuh",
    "dispatch/e4m3_soft.cuh",
    "dispatch/send.cuh",
    "dispatch/duplicate.cuh",
    "dispatch/forward.cuh",
    "combine/sum.cuh",
    "combine/steps.cuh",
    "combine/push.cuh",
    "combine/reduce.cuh",
    "codec/weights.cuh",
    "codec/int8.cuh",
];

/// The file name of a path: sources include each other by file name.
const fn base_name(path: &str) -> &str {
    let bytes = path.as_bytes();
    let mut at = bytes.len();
    while at > 0 && bytes[at - 1] != b'/' {
        at -= 1;
    }
    path.split_at(at).1
}

/// Whether the bulk copy engine copies rows; otherwise lanes do.
fn copies_in_bulk(arch: Arch, plain_copies: bool) -> bool {
    arch.copies_in_bulk() && !plain_copies
}

impl KernelKey {
    /// Every kernel that may be launched on a GPU whose blocks have `shared_bytes` of shared memory.
    pub(crate) fn all(shared_bytes: usize) -> Vec<Self> {
        // Emulated links and codecs need these; a world does not load them ahead.
        let mut keys = vec![Self::LaneCopy];
        keys.extend(CodecKernel::ALL.map(Self::Codec));
        let worlds = (1..=MAX_RANKS).flat_map(|ranks| [(ranks, false), (ranks, true)]);
        for key in worlds.flat_map(|(views, rails)| Self::of_world(views, rails, shared_bytes)) {
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        keys
    }

    /// Like [`all`](Self::all), for one world. `views`: the peers that a block has views of; with many of them or little
    /// shared memory, combine has fewer warps.
    pub(crate) fn of_world(views: usize, rails: bool, shared_bytes: usize) -> Vec<Self> {
        let mut keys = vec![Self::Preprocess { rails }];
        keys.extend([false, true].map(|quantize| Self::dispatch(quantize, rails)));
        let teams = CombineTeams::new(2, views, shared_bytes);
        for (rows_f32, wire_f32) in [(false, false), (false, true), (true, false), (true, true)] {
            keys.push(Self::Combine { rows_f32, wire_f32, teams, rails });
        }
        if !rails {
            keys.push(Self::pairs(views, shared_bytes));
        }
        keys.extend([Self::WeightRows, Self::Dense, Self::Spin]);
        keys
    }

    /// The kernels for bf16 tokens, in the order of their use, on `sms` SMs.
    pub(crate) fn usual(views: usize, rails: bool, shared_bytes: usize, sms: u32) -> Vec<Self> {
        let teams = CombineTeams::new(2, views, shared_bytes);
        let combine = Self::Combine { rows_f32: false, wire_f32: false, teams, rails };
        let mut keys = vec![Self::Preprocess { rails }, Self::dispatch(false, rails), combine];
        if !rails && sms <= MOST_BLOCKS_OF_PAIRS {
            keys.push(Self::pairs(views, shared_bytes));
        }
        keys
    }

    /// The combine kernel with teams of one consumer.
    fn pairs(views: usize, shared_bytes: usize) -> Self {
        let teams = CombineTeams::new(1, views, shared_bytes);
        Self::Combine { rows_f32: false, wire_f32: false, teams, rails: false }
    }

    /// The dispatch kernel that sends rows unchanged or quantises them.
    pub(crate) fn dispatch(quantize: bool, rails: bool) -> Self {
        Self::Dispatch { quantize, warps: tuning::dispatch_warps(quantize), rails }
    }

    /// Whether the kernel is compiled for a world of several NVLink domains.
    fn rails(self) -> bool {
        match self {
            Self::Preprocess { rails } | Self::Dispatch { rails, .. } | Self::Combine { rails, .. } => rails,
            Self::WeightRows | Self::Dense | Self::Spin | Self::LaneCopy | Self::Codec(_) => false,
        }
    }

    /// Distinguishes kernels of the same name; `-` if there is only one.
    pub(crate) fn variant(self) -> String {
        let element = |f32| if f32 { "f32" } else { "bf16" };
        let rails = if self.rails() { ",rails" } else { "" };
        match self {
            Self::Preprocess { rails: true } => "rails".into(),
            Self::Preprocess { rails: false }
            | Self::WeightRows
            | Self::Dense
            | Self::Spin
            | Self::LaneCopy
            | Self::Codec(_) => "-".into(),
            Self::Dispatch { quantize, warps, .. } => {
                format!("{},{warps} warps{rails}", if quantize { "quantize" } else { "copy" })
            }
            Self::Combine { rows_f32, wire_f32, teams: CombineTeams { teams, consumers }, .. } => {
                let warps = 1 + consumers;
                format!(
                    "rows {},wire {},{teams} x {warps} warps{rails}",
                    element(rows_f32),
                    element(wire_f32)
                )
            }
        }
    }

    /// The name of the kernel's entry point and of its program.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Preprocess { .. } => "preprocess",
            Self::Spin => "spin",
            Self::Dispatch { .. } => "dispatch",
            Self::Combine { .. } => "combine",
            Self::WeightRows => "weight_rows",
            Self::Dense => "dense",
            Self::LaneCopy => "lane_copy",
            Self::Codec(kernel) => kernel.name(),
        }
    }

    /// The program to compile. `plain_copies`: lanes copy rows, as on GPUs without the bulk copy engine.
    pub(crate) fn program(self, arch: Arch, plain_copies: bool) -> Program {
        let quoted = |file: &str| format!("\"{file}\"");
        let copy = if copies_in_bulk(arch, plain_copies) { "copy_bulk.cuh" } else { "copy_plain.cuh" };
        let mut defines =
            vec![("COPY_VARIANT", quoted(copy)), ("RAILS", u32::from(self.rails()).to_string())];
        let source = match self {
            Self::Preprocess { .. } => include_str!("../device/preprocess/kernel.cu"),
            Self::Spin => include_str!("../device/spin.cu"),
            Self::WeightRows => include_str!("../device/weight_rows.cu"),
            Self::Dense => include_str!("../device/dense.cu"),
            Self::LaneCopy => include_str!("../device/lane_copy.cu"),
            Self::Codec(CodecKernel::Int8Encode) => include_str!("../device/codec/int8_encode.cu"),
            Self::Codec(CodecKernel::Int8Decode) => include_str!("../device/codec/int8_decode.cu"),
            Self::Codec(CodecKernel::Residuals) => include_str!("../device/codec/residuals.cu"),
            Self::Codec(CodecKernel::Entries) => include_str!("../device/codec/entries.cu"),
            Self::Codec(CodecKernel::Sums) => include_str!("../device/codec/sums.cu"),
            Self::Dispatch { quantize, warps, .. } => {
                let payload = if quantize { "payload_quantize.cuh" } else { "payload_copy.cuh" };
                let e4m3 = if arch.converts_to_e4m3() { "e4m3_cvt.cuh" } else { "e4m3_soft.cuh" };
                defines.extend([
                    ("PAYLOAD_VARIANT", quoted(payload)),
                    ("E4M3_VARIANT", quoted(e4m3)),
                    ("WARPS", warps.to_string()),
                ]);
                include_str!("../device/dispatch/kernel.cu")
            }
            Self::Combine { rows_f32, wire_f32, teams, .. } => {
                defines.extend([
                    ("ROWS_F32", u32::from(rows_f32).to_string()),
                    ("WIRE_F32", u32::from(wire_f32).to_string()),
                    ("TEAMS", teams.teams.to_string()),
                    ("CONSUMERS", teams.consumers.to_string()),
                ]);
                include_str!("../device/combine/kernel.cu")
            }
        };
        Program { name: self.name(), source, headers: HEADERS, defines }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::{self, Write as _};
    use std::path::Path;
    use std::{env, fs, thread};

    use ep::CudaEnv;

    use super::*;
    use crate::jit::{Compiler, Jit, Resources};
    use crate::params::{
        CODEC_THREADS, DENSE_THREADS, LANE_COPY_THREADS, PREPROCESS_RAIL_THREADS, PREPROCESS_THREADS,
        WEIGHT_ROWS_THREADS,
    };

    /// Registers of a multiprocessor.
    const REGISTERS: u32 = 64 << 10;
    /// Maximum static shared memory of a kernel, in bytes.
    const STATIC_SHARED: u32 = 48 << 10;
    /// More shared memory than any kernel needs, in bytes.
    const AMPLE: usize = 1 << 20;
    /// The recorded resources of the kernels.
    const TABLE: &str = "device/resources.tsv";

    /// A kernel and the architecture that it is compiled for.
    #[derive(Clone, Copy)]
    struct Row {
        key: KernelKey,
        arch: Arch,
        plain_copies: bool,
    }

    impl KernelKey {
        /// Threads of a block.
        fn threads(self) -> u32 {
            match self {
                Self::Preprocess { rails: false } => PREPROCESS_THREADS as u32,
                Self::Preprocess { rails: true } => PREPROCESS_RAIL_THREADS as u32,
                Self::Spin => 1,
                Self::WeightRows => WEIGHT_ROWS_THREADS as u32,
                Self::Dense => DENSE_THREADS as u32,
                Self::LaneCopy => LANE_COPY_THREADS as u32,
                Self::Codec(_) => CODEC_THREADS as u32,
                Self::Dispatch { warps, .. } => 32 * warps,
                Self::Combine { teams, .. } => teams.threads(),
            }
        }

        /// Whether the kernel copies rows, and so has a plain and a bulk variant.
        fn copies(self) -> bool {
            matches!(self, Self::Dispatch { .. } | Self::Combine { .. })
        }
    }

    impl Row {
        /// Every kernel that may be launched on a GPU of some architecture, including those with plain copies on sm_90a
        /// (`HYBRID_EP_PLAIN_COPIES=1`).
        fn all() -> Vec<Self> {
            let both = [false, true];
            let ways = both.iter().flat_map(|&plain_copies| Arch::ALL.map(|arch| (arch, plain_copies)));
            ways.flat_map(|(arch, plain_copies)| {
                let mut keys: Vec<KernelKey> = Vec::new();
                for key in arch.shared_bytes().iter().flat_map(|&bytes| KernelKey::all(bytes)) {
                    if !keys.contains(&key) {
                        keys.push(key);
                    }
                }
                keys.into_iter().map(move |key| Self { key, arch, plain_copies })
            })
            .filter(|row| !row.plain_copies || row.key.copies() && row.arch == Arch::Sm90a)
            .collect()
        }

        /// The resources of the kernel, by machine code of `compiler`, which `kept` has from an earlier run of the test if
        /// neither sources nor compiler have changed since.
        fn compile(self, compiler: &Compiler, kept: &Jit) -> Resources {
            let program = self.key.program(self.arch, self.plain_copies);
            let cubin = kept.cubin(&program, self.arch).unwrap();
            let resources = if cubin.nvrtc == compiler.version() {
                cubin.resources.to_vec()
            } else {
                compiler.compile(&program, self.arch).unwrap().resources
            };
            let [kernel] = &resources[..] else { panic!("one kernel, not: {resources:?}") };
            assert_eq!(kernel.kernel, self.key.name());
            kernel.clone()
        }

        /// The defect of a kernel that must not occur with any compiler, if there is one.
        fn fault(self, found: &Resources) -> Option<String> {
            // Registers are allocated in units of 8 per thread.
            let registers = found.registers.next_multiple_of(8) * self.key.threads();
            // Values in local memory, spilled or because their address is taken, stall the thread.
            let in_memory = found.spill_bytes > 0 || found.stack_bytes > 0;
            (in_memory || registers > REGISTERS || found.static_shared_bytes > STATIC_SHARED).then(|| {
                format!(
                    "{}: {registers} registers of a block, {} bytes of stack",
                    self.line(found),
                    found.stack_bytes
                )
            })
        }

        fn line(self, found: &Resources) -> String {
            let copies = if copies_in_bulk(self.arch, self.plain_copies) { "bulk" } else { "plain" };
            let copies = if self.key.copies() { copies } else { "-" };
            let Resources { registers, static_shared_bytes, spill_bytes, .. } = found;
            let (name, variant, arch) = (self.key.name(), self.key.variant(), self.arch);
            format!("{name}\t{variant}\t{arch}\t{copies}\t{registers}\t{static_shared_bytes}\t{spill_bytes}")
        }
    }

    /// The compiler; `None` if there is none and the environment does not require one.
    fn compiler() -> Option<Compiler> {
        match Compiler::find(&CudaEnv::from_env()) {
            Ok(compiler) => Some(compiler),
            Err(error) if env::var("HYBRID_EP_REQUIRE_NVRTC").as_deref() == Ok("1") => panic!("{error}"),
            Err(error) => {
                // Directly to stderr: the test harness captures the output of tests that pass.
                let _ = writeln!(io::stderr(), "skipped: no NVRTC ({error})");
                None
            }
        }
    }

    /// Compiles all kernels, on two threads. Machine code is kept beside the build's other files.
    fn compile_all(compiler: &Compiler) -> Vec<(Row, Resources)> {
        let program = env::current_exe().unwrap();
        let cache_dir = program.ancestors().nth(2).map(|build| build.join("kernels"));
        let kept = Jit::new(CudaEnv { cache_dir, ..CudaEnv::from_env() });
        let rows: Vec<Row> =
            Row::all().into_iter().filter(|row| row.arch.oldest_nvrtc() <= compiler.version()).collect();
        let part =
            |part: &[Row]| part.iter().map(|&row| (row, row.compile(compiler, &kept))).collect::<Vec<_>>();
        let (first, second) = rows.split_at(rows.len() / 2);
        thread::scope(|scope| {
            let second = scope.spawn(|| part(second));
            let mut compiled = part(first);
            compiled.extend(second.join().unwrap());
            compiled
        })
    }

    fn table(heading: &str, compiled: &[(Row, Resources)]) -> String {
        let mut table = format!(
            "{heading}\nkernel\tvariant\tarch\tcopies\tregisters\tstatic shared bytes\tspill bytes\n"
        );
        for (row, found) in compiled {
            let _ = writeln!(table, "{}", row.line(found));
        }
        table
    }

    #[test]
    fn every_kernel_compiles_for_every_gpu_with_the_recorded_resources() {
        let Some(compiler) = compiler() else { return };
        let compiled = compile_all(&compiler);
        let faults: Vec<_> = compiled.iter().filter_map(|(row, found)| row.fault(found)).collect();
        assert!(
            faults.is_empty(),
            "spills or has a stack, or is too large for a GPU:\n{}",
            faults.join("\n")
        );

        let heading = format!("# NVRTC {}", compiler.version());
        let found = table(&heading, &compiled);
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(TABLE);
        if env::var("HYBRID_EP_UPDATE_RESOURCES").as_deref() == Ok("1") {
            fs::write(&file, &found).unwrap();
        }
        let kept = fs::read_to_string(&file).unwrap();
        // Other compiler versions allocate registers differently: only the limits above apply.
        if kept.lines().next() != Some(heading.as_str()) {
            let _ =
                writeln!(io::stderr(), "only limits checked: {TABLE} is not of NVRTC {}", compiler.version());
            return;
        }
        let differences: Vec<String> =
            (kept.lines().filter(|line| !found.lines().any(|other| other == *line)))
                .map(|line| format!("- {line}"))
                .chain(
                    (found.lines().filter(|line| !kept.lines().any(|other| other == *line)))
                        .map(|line| format!("+ {line}")),
                )
                .collect();
        assert!(
            differences.is_empty(),
            "resources of kernels differ from {TABLE} (-: recorded, +: found):\n{}\nif the change is intended, run \
             HYBRID_EP_UPDATE_RESOURCES=1 cargo test -p ep-cuda --lib every_kernel and commit the table",
            differences.join("\n")
        );
    }

    #[test]
    fn all_contains_the_kernels_of_every_number_of_ranks() {
        assert_eq!(KernelKey::all(AMPLE).len(), 24);
        for shared_bytes in Arch::ALL.into_iter().flat_map(Arch::shared_bytes).copied() {
            let all = KernelKey::all(shared_bytes);
            let twice = |key| all.iter().filter(|&other| other == key).count() > 1;
            assert!(!all.iter().any(twice), "{all:?}");
            for (ranks, rails) in
                [1, 2, 8, 33, MAX_RANKS].into_iter().flat_map(|ranks| [(ranks, false), (ranks, true)])
            {
                let of_one = |key: &KernelKey| match key {
                    KernelKey::WeightRows | KernelKey::Dense | KernelKey::Spin => true,
                    KernelKey::LaneCopy | KernelKey::Codec(_) => false,
                    _ => key.rails() == rails,
                };
                let mut launched: Vec<_> = KernelKey::all(AMPLE).into_iter().filter(of_one).collect();
                for key in &mut launched {
                    if let KernelKey::Combine { teams, .. } = key {
                        *teams = CombineTeams::new(teams.consumers, ranks, shared_bytes);
                    }
                }
                let of_world = KernelKey::of_world(ranks, rails, shared_bytes);
                let same =
                    launched.len() == of_world.len() && launched.iter().all(|key| of_world.contains(key));
                assert!(same, "{of_world:?} of {ranks} ranks");
                assert!(
                    of_world.iter().all(|key| all.contains(key)),
                    "{of_world:?} of {ranks} ranks, of {all:?}"
                );
            }
        }
    }

    #[test]
    fn spills_stacks_and_large_blocks_are_reported() {
        let row = Row { key: KernelKey::Preprocess { rails: false }, arch: Arch::Sm80, plain_copies: false };
        let good = Resources { registers: 64, ..Resources::default() };
        assert_eq!(row.fault(&good), None);
        for bad in [
            Resources { spill_bytes: 4, ..good.clone() },
            Resources { stack_bytes: 8, ..good.clone() },
            Resources { registers: 65, ..good.clone() },
            Resources { static_shared_bytes: STATIC_SHARED + 1, ..good },
        ] {
            assert!(row.fault(&bad).is_some(), "{bad:?}");
        }
    }
}
