//! What is compiled, how, and the key that says whether two compilations are the same.

use std::fmt;

use sha2::{Digest, Sha256};

use super::Arch;

/// One translation unit. Its includes come from `headers` and from nowhere else: no toolkit header is on a machine
/// that only runs kernels, and a file that happens to lie in the working directory must not get in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Its name in errors, logs and the cache: letters, digits, `-` and `_`.
    pub name: &'static str,
    /// The text of the kernels, each `extern "C"` so that it keeps its name.
    pub source: &'static str,
    /// What it may include: the name as the `#include` writes it, and the text.
    pub headers: &'static [(&'static str, &'static str)],
    /// Macros and their values.
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
            // Every backend computes the same bits: a product and a sum are fused where the source says so.
            "--fmad=false".into(),
            "--generate-line-info".into(),
            "--ptxas-options=-v".into(),
        ];
        options.extend(self.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
        options
    }

    /// What the compiler calls the source in its messages.
    pub(super) fn file_name(&self) -> String {
        format!("{}.cu", self.name)
    }
}

/// Names a compilation: equal inputs, equal keys. The compiler's version is not among the inputs, since a process
/// that finds everything it needs in the cache need not have one; a cache entry says which compiler made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key([u8; 32]);

impl Key {
    pub(super) fn of(program: &Program, arch: Arch) -> Self {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            // With its length before it, no text can pass for the end of another.
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
            // The same characters, divided otherwise.
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
