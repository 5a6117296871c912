//! The kernels' sources and the variants they come in.

use crate::jit::{Arch, Program};

/// A kernel with everything that is fixed when it is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum KernelKey {
    Preprocess,
    /// A pause, for benchmarks.
    Spin,
    Dispatch {
        quantize: bool,
        warps: u32,
    },
    Combine {
        rows_f32: bool,
        wire_f32: bool,
        warps: u32,
    },
}

macro_rules! headers {
    ($($path:literal),+ $(,)?) => {
        &[$((base_name($path), include_str!(concat!("../device/", $path)))),+]
    };
}

const HEADERS: &[(&str, &str)] = headers![
    "common/types.cuh",
    "common/ptx.cuh",
    "common/params.cuh",
    "common/handle.cuh",
    "common/sync.cuh",
    "common/worker.cuh",
    "common/arrivals.cuh",
    "common/copy_bulk.cuh",
    "common/copy_plain.cuh",
    "preprocess/tile.cuh",
    "preprocess/bases.cuh",
    "preprocess/emit.cuh",
    "dispatch/payload.cuh",
    "dispatch/payload_copy.cuh",
    "dispatch/payload_quantize.cuh",
    "dispatch/e4m3_cvt.cuh",
    "dispatch/e4m3_soft.cuh",
    "dispatch/send.cuh",
    "dispatch/duplicate.cuh",
    "combine/sum.cuh",
    "combine/push.cuh",
    "combine/reduce.cuh",
];

/// Sources name each other by file name alone.
const fn base_name(path: &str) -> &str {
    let bytes = path.as_bytes();
    let mut at = bytes.len();
    while at > 0 && bytes[at - 1] != b'/' {
        at -= 1;
    }
    path.split_at(at).1
}

impl KernelKey {
    /// The name of the kernel's entry, and of its program.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Preprocess => "preprocess",
            Self::Spin => "spin",
            Self::Dispatch { .. } => "dispatch",
            Self::Combine { .. } => "combine",
        }
    }

    /// What is compiled. `plain_copies`: threads copy rows themselves, as on GPUs without the bulk copy engine.
    pub(crate) fn program(self, arch: Arch, plain_copies: bool) -> Program {
        let old = arch == Arch::Sm80;
        let quoted = |file: &str| format!("\"{file}\"");
        let copy = if plain_copies || old { "copy_plain.cuh" } else { "copy_bulk.cuh" };
        let mut defines = vec![("COPY_VARIANT", quoted(copy))];
        let source = match self {
            Self::Preprocess => include_str!("../device/preprocess/kernel.cu"),
            Self::Spin => include_str!("../device/spin.cu"),
            Self::Dispatch { quantize, warps } => {
                let payload = if quantize { "payload_quantize.cuh" } else { "payload_copy.cuh" };
                defines.extend([
                    ("PAYLOAD_VARIANT", quoted(payload)),
                    ("E4M3_VARIANT", quoted(if old { "e4m3_soft.cuh" } else { "e4m3_cvt.cuh" })),
                    ("WARPS", warps.to_string()),
                ]);
                include_str!("../device/dispatch/kernel.cu")
            }
            Self::Combine { rows_f32, wire_f32, warps } => {
                defines.extend([
                    ("ROWS_F32", u32::from(rows_f32).to_string()),
                    ("WIRE_F32", u32::from(wire_f32).to_string()),
                    ("WARPS", warps.to_string()),
                ]);
                include_str!("../device/combine/kernel.cu")
            }
        };
        Program { name: self.name(), source, headers: HEADERS, defines }
    }
}
