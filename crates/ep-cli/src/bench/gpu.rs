//! The GPUs of the ranks, for the report.

use serde::{Deserialize, Serialize};

/// The GPU of a rank, and the resources that the rank uses on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RankGpu {
    pub(super) name: String,
    pub(super) pci_bus_id: String,
    /// SMs that dispatch and combine used.
    pub(super) sms: u32,
    pub(super) registered_bytes: u64,
}

/// Which ranks use the same GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Each rank has a GPU of its own.
    None,
    /// Ranks of different domains share GPUs, ranks of one domain do not.
    BetweenDomains,
    /// Ranks of one domain share GPUs: bytes between them cross no link.
    InsideDomains,
}

impl Sharing {
    /// `gpus` has one entry per rank. A domain has `domain_size` consecutive ranks.
    pub(super) fn of(gpus: &[RankGpu], domain_size: usize) -> Self {
        let shared = |gpus: &[RankGpu]| {
            let mut ids: Vec<&str> = gpus.iter().map(|gpu| gpu.pci_bus_id.as_str()).collect();
            ids.sort_unstable();
            ids.windows(2).any(|pair| pair[0] == pair[1])
        };
        if gpus.chunks(domain_size).any(shared) {
            Self::InsideDomains
        } else if shared(gpus) {
            Self::BetweenDomains
        } else {
            Self::None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_distinguished_by_pci_bus_id() {
        let gpu = |id: &str| RankGpu { name: "G".into(), pci_bus_id: id.into(), sms: 1, registered_bytes: 2 };
        let of = |ids: &[&str], domain_size| {
            Sharing::of(&ids.iter().map(|id| gpu(id)).collect::<Vec<_>>(), domain_size)
        };
        assert_eq!([of(&[], 1), of(&["a"], 1), of(&["a", "c", "b"], 3)], [Sharing::None; 3]);
        assert_eq!([of(&["a", "b", "a"], 3), of(&["a", "a", "b", "b"], 2)], [Sharing::InsideDomains; 2]);
        assert_eq!([of(&["a", "b", "a", "b"], 2), of(&["a", "a"], 1)], [Sharing::BetweenDomains; 2]);
    }
}
