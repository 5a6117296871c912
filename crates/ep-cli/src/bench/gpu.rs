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

/// Whether several ranks use the same GPU. `gpus` has one entry per rank.
pub(super) fn shared(gpus: &[RankGpu]) -> bool {
    let mut ids: Vec<&str> = gpus.iter().map(|gpu| gpu.pci_bus_id.as_str()).collect();
    ids.sort_unstable();
    ids.windows(2).any(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_distinguished_by_pci_bus_id() {
        let gpu = |id: &str| RankGpu { name: "G".into(), pci_bus_id: id.into(), sms: 1, registered_bytes: 2 };
        assert!(!shared(&[]) && !shared(&[gpu("a")]) && !shared(&[gpu("a"), gpu("c"), gpu("b")]));
        assert!(shared(&[gpu("a"), gpu("b"), gpu("a")]));
    }
}
