//! The hardware resources of kernels, parsed from the assembler's log.

/// The hardware resources of one kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources {
    /// The kernel's name.
    pub kernel: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of spill stores and spill loads in the code of the kernel and of the functions that it calls. Each
    /// instruction counts once, however often it is executed.
    pub spill_bytes: u32,
    /// Static shared memory of a block, in bytes.
    pub static_shared_bytes: u32,
    /// Local memory of a thread, including that of the functions that the kernel calls, in bytes.
    pub stack_bytes: u32,
}

/// Parses the kernels of a log written with `--ptxas-options=-v`, in the order of the log:
///
/// ```text
/// ptxas info    : Compiling entry function 'copy' for 'sm_90a'
/// ptxas info    : Function properties for copy
/// ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
/// ptxas info    : Used 10 registers, used 1 barriers, 256 bytes smem
/// ptxas info    : Function properties for a_function_that_it_calls
/// ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
/// ```
pub(super) fn parse(log: &str) -> Vec<Resources> {
    let mut kernels: Vec<Resources> = Vec::new();
    for line in log.lines().filter(|line| line.starts_with("ptxas")) {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(Resources { kernel, ..Resources::default() });
            continue;
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        kernel.registers = number_before(line, " registers").unwrap_or(kernel.registers);
        kernel.static_shared_bytes = number_before(line, " bytes smem").unwrap_or(kernel.static_shared_bytes);
        kernel.spill_bytes += number_before(line, " bytes spill stores").unwrap_or(0);
        kernel.spill_bytes += number_before(line, " bytes spill loads").unwrap_or(0);
        // The stack frame is that of one function; the cumulative size, if given, includes the functions that it calls.
        for unit in [" bytes stack frame", " bytes cumulative stack size"] {
            kernel.stack_bytes = kernel.stack_bytes.max(number_before(line, unit).unwrap_or(0));
        }
    }
    kernels
}

/// The number directly before the first `unit` in a line.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    let before = &line[..line.find(unit)?];
    let digits = before.len() - before.bytes().rev().take_while(u8::is_ascii_digit).count();
    before[digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(name: &str, numbers: [u32; 4]) -> Resources {
        let [registers, spill_bytes, static_shared_bytes, stack_bytes] = numbers;
        Resources { kernel: name.into(), registers, spill_bytes, static_shared_bytes, stack_bytes }
    }

    #[test]
    fn a_log_of_nvrtc_13_5() {
        let log = "\
h.cuh(1): warning #177-D: variable \"x\" was declared but never referenced
  __device__ int unused(){int x;return 3;}
                              ^

Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'heavy' for 'sm_90a'
ptxas info    : Function properties for heavy
ptxas         .     168 bytes stack frame, 204 bytes spill stores, 208 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 168 bytes cumulative stack size
ptxas info    : Compile time = 30.576 ms
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compile time = 1.779 ms
";
        assert_eq!(parse(log), [kernel("heavy", [32, 412, 0, 168]), kernel("k", [10, 0, 256, 0])]);
    }

    #[test]
    fn resources_of_called_functions_count_for_the_kernel() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'uses2' for 'sm_80'
ptxas info    : Function properties for uses2
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 56 registers, used 1 barriers, 16 bytes smem, 364 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 21.155 ms
ptxas info    : Function properties for _Z6helperPfi
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'uses' for 'sm_80'
ptxas info    : Function properties for uses
ptxas         .     168 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 168 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Compile time = 19.164 ms
ptxas info    : Function properties for _Z6helperPfi
ptxas         .     0 bytes stack frame, 212 bytes spill stores, 212 bytes spill loads
";
        assert_eq!(parse(log), [kernel("uses2", [56, 0, 16, 0]), kernel("uses", [32, 428, 0, 168])]);
    }

    #[test]
    fn other_texts_contain_no_kernels() {
        assert_eq!(parse(""), []);
        assert_eq!(parse("ptxas info    : Used 5 registers\nUsed 3 registers"), []);
        assert_eq!(number_before("99999999999 registers", " registers"), None);
        assert_eq!(number_before("x registers", " registers"), None);
    }
}
