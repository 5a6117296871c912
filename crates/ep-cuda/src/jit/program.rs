//! A compilation unit, its compiler options, and the key that identifies a compilation.

use std::fmt;

use sha2::{Digest, Sha256};

use super::Arch;

/// One translation unit. Includes are resolved from `headers` only: a machine that only runs kernels has no toolkit
/// headers, and files in the working directory must not be included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The name in errors, logs and the cache: letters, digits, `-` and `_`.
    pub name: &'static str,
    /// The source text. Kernels are `extern "C"`, so that their names are not mangled.
    pub source: &'static str,
    /// The headers: the name in the `#include`, and the text.
    pub headers: &'static [(&'static str, &'static str)],
    /// The macros and their values.
    pub defines: Vec<(&'static str, String)>,
}

impl Program {
    /// The compiler's options.
    pub(super) fn options(&self, arch: Arch) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={arch}"),
            "--std=c++17".into(),
            "--device-as-default-execution-space".into(),
            "--no-source-include".into(),
            // All backends compute the same bits, so a product and a sum are fused only where the source says so.
            "--fmad=false".into(),
            "--generate-line-info".into(),
            "--ptxas-options=-v".into(),
        ];
        options.extend(self.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
        options
    }

    /// The file name in the compiler's messages.
    pub(super) fn file_name(&self) -> String {
        format!("{}.cu", self.name)
    }
}

/// Identifies a compilation: equal inputs have equal keys. The compiler's version is not an input, because a process
/// that finds all programs in the cache needs no compiler; a cache entry records the version.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key([u8; 32]);

impl Key {
    pub(super) fn of(program: &Program, arch: Arch) -> Self {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            // Hash the length, too: otherwise two texts could be divided differently and have the same hash.
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(env!("CARGO_PKG_VERSION"));
        add(program.name);
        add(program.source);
        add(&program.headers.len().to_string());
        for (name, text) in program.headers {
            add(name);
            add(text);
        }
        program.options(arch).iter().for_each(|option| add(option));
        Self(hash.finalize().into())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn program() -> Program {
        Program {
            name: "copy",
            source: "text",
            headers: &[("a.cuh", "1"), ("b.cuh", "2")],
            defines: vec![("N", "3".into())],
        }
    }

    #[test]
    fn a_key_changes_with_every_input() {
        let defines = |defines: &[(&'static str, &str)]| Program {
            defines: defines.iter().map(|&(name, value)| (name, value.into())).collect(),
            ..program()
        };
        let programs = [
            program(),
            Program { name: "copy2", ..program() },
            Program { source: "text ", ..program() },
            Program { headers: &[("a.cuh", "1"), ("b.cuh", "3")], ..program() },
            Program { headers: &[("a.cuh", "1"), ("c.cuh", "2")], ..program() },
            Program { headers: &[("a.cuh", "1")], ..program() },
            // The same characters, divided differently.
            Program { headers: &[("a.cuh", "1b.cuh"), ("", "2")], ..program() },
            Program { headers: &[("a.cuh1", ""), ("b.cuh", "2")], ..program() },
            Program { headers: &[], ..program() },
            defines(&[]),
            defines(&[("N", "4")]),
            defines(&[("M", "3")]),
            defines(&[("N", "3"), ("M", "3")]),
        ];
        let keys = programs.iter().flat_map(|program| Arch::ALL.map(|arch| Key::of(program, arch).0));
        assert_eq!(keys.collect::<BTreeSet<_>>().len(), programs.len() * Arch::ALL.len());
        assert_eq!(Key::of(&program(), Arch::Sm80), Key::of(&program(), Arch::Sm80));
    }
}
