//! The providers of libfabric, which carry bytes between domains with `--transport`.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use serde::Serialize;

use super::{check::Check, fact::Fact};
use crate::common::threads;

/// Longest wait for the library, which looks for devices when it is loaded.
const PATIENCE: Duration = Duration::from_secs(30);

/// The providers over which the engine is tested. libfabric 1.17 calls the provider `net` that later versions call `tcp`.
const TESTED: [&str; 3] = ["net", "shm", "tcp"];

/// Providers for network cards, by the part of the name before a `;`.
const OF_CARDS: [&str; 12] =
    ["bgq", "cxi", "efa", "efa-direct", "gni", "mlx", "opx", "psm", "psm2", "psm3", "ucx", "verbs"];

/// A provider that can carry the bytes of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct FabricProvider {
    /// Its name, which `HYBRID_EP_TRANSPORT` takes.
    pub(crate) name: String,
    /// The names of its NICs (the domains of `fi_info`), which `HYBRID_EP_TRANSPORT_NIC` takes.
    pub(crate) nics: Vec<String>,
    /// Whether it offers to register the memory of GPUs (`FI_HMEM`), so that rails need no copy in host memory.
    pub(crate) gpu_memory: bool,
    /// Whether the engine is tested over it.
    pub(crate) state: ProviderState,
}

/// Whether the engine is tested over a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ProviderState {
    /// The project's tests run over it.
    Tested,
    /// It needs network cards, and was never run.
    NeverRun,
    /// It needs no network card, and no test runs over it.
    NotTested,
}

impl FabricProvider {
    pub(super) fn new(name: String, nics: Vec<String>, gpu_memory: bool) -> Self {
        let state = if TESTED.contains(&name.as_str()) {
            ProviderState::Tested
        } else if OF_CARDS.contains(&core_name(&name)) {
            ProviderState::NeverRun
        } else {
            ProviderState::NotTested
        };
        FabricProvider { name, nics, gpu_memory, state }
    }

    /// Whether it is the provider `core`, or layered over it.
    pub(super) fn is_over(&self, core: &str) -> bool {
        core_name(&self.name) == core
    }

    /// The name under which it lists an RDMA device: `verbs` uses the device's name, and `efa` appends `-rdm`.
    pub(super) fn nic_of(&self, device: &str) -> Option<&str> {
        let mut names = self.nics.iter().map(String::as_str);
        let exact = names.clone().find(|name| *name == device);
        let appended = |name: &&str| name.strip_prefix(device).is_some_and(|rest| rest.starts_with('-'));
        exact.or_else(|| names.find(appended))
    }

    fn check(&self) -> Check {
        // The note comes first: a long list is cut.
        let note = match self.state {
            ProviderState::Tested => "",
            ProviderState::NeverRun => "never run by us; ",
            ProviderState::NotTested => "not in our tests; ",
        };
        let memory = if self.gpu_memory { "offers GPU memory; " } else { "" };
        let nics = match self.nics.len() {
            0 => "no NIC".to_owned(),
            1 => format!("NIC {}", self.nics[0]),
            _ => format!("NICs {}", self.nics.join(", ")),
        };
        // The setting `tcp` selects the provider that version 1.17 calls `net`; its `tcp;ofi_rxm` is a different provider.
        let named = if self.name == "net" { " (HYBRID_EP_TRANSPORT=tcp)" } else { "" };
        Check::ok(format!("provider {}{named}", self.name), format!("{note}{memory}{nics}"))
    }
}

/// The provider at the bottom: `verbs` of `verbs;ofi_rxm`.
fn core_name(name: &str) -> &str {
    name.split(';').next().unwrap_or(name)
}

/// A finding for each provider.
pub(super) fn checks(providers: &Fact<Vec<FabricProvider>>) -> Vec<Check> {
    const NAME: &str = "libfabric providers";
    match providers {
        Fact::Known(all) if all.is_empty() => vec![Check::ok(NAME, "none")],
        Fact::Known(all) => all.iter().map(FabricProvider::check).collect(),
        // Without the library, the finding on the library has the advice.
        Fact::Absent => Vec::new(),
        Fact::Unknown(why) => vec![Check::absent(NAME, format!("unknown: {why}"))],
    }
}

/// Asks the library that the host backend would use. Absent where it cannot be loaded.
pub(super) fn providers() -> Fact<Vec<FabricProvider>> {
    let library = match ep::Config::from_env() {
        Ok(config) => config.host.transport.libfabric,
        Err(error) => return Fact::Unknown(error.to_string()),
    };
    let (sender, answer) = mpsc::channel();
    // The receiver is gone if the answer comes too late.
    let query = move || drop(sender.send(ep_fabric::providers(library.as_deref())));
    if let Err(error) = threads::spawn("the thread that queries libfabric", query) {
        return Fact::Unknown(error.to_string());
    }
    match answer.recv_timeout(PATIENCE) {
        Ok(Ok((_, providers))) => {
            let all = providers.into_iter().map(|found: ep_fabric::Provider| {
                FabricProvider::new(found.name, found.domains, found.gpu_memory)
            });
            Fact::Known(all.collect())
        }
        Ok(Err(_)) => Fact::Absent,
        Err(RecvTimeoutError::Timeout) => {
            Fact::Unknown(format!("libfabric has not answered within {} s", PATIENCE.as_secs()))
        }
        Err(RecvTimeoutError::Disconnected) => Fact::Unknown("the query to libfabric failed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(name: &str, nics: &[&str]) -> FabricProvider {
        FabricProvider::new(name.to_owned(), nics.iter().map(|&nic| nic.to_owned()).collect(), false)
    }

    #[test]
    fn a_query_without_a_thread_is_an_unknown_fact() {
        let Fact::Unknown(why) = threads::quota::of(0, providers) else { panic!("no thread, but an answer") };
        assert!(
            why.contains("starting the thread that queries libfabric") && why.contains("ulimit -u"),
            "{why}"
        );
    }

    #[test]
    fn providers_of_network_cards_were_never_run() {
        for (name, state) in [
            ("net", ProviderState::Tested),
            ("tcp", ProviderState::Tested),
            ("shm", ProviderState::Tested),
            ("tcp;ofi_rxm", ProviderState::NotTested),
            ("sockets", ProviderState::NotTested),
            ("verbs;ofi_rxm", ProviderState::NeverRun),
            ("efa", ProviderState::NeverRun),
        ] {
            assert_eq!(provider(name, &[]).state, state, "{name}");
        }
        let verbs = FabricProvider { gpu_memory: true, ..provider("verbs;ofi_rxm", &["mlx5_0", "mlx5_1"]) };
        let all = vec![verbs, provider("net", &["eth0"])];
        let found: Vec<_> =
            checks(&Fact::Known(all)).into_iter().map(|check| (check.name, check.found)).collect();
        let expected = [
            ("provider verbs;ofi_rxm", "never run by us; offers GPU memory; NICs mlx5_0, mlx5_1"),
            ("provider net (HYBRID_EP_TRANSPORT=tcp)", "NIC eth0"),
        ];
        assert_eq!(found, expected.map(|(name, found)| (name.to_owned(), found.to_owned())));
        assert_eq!(checks(&Fact::Known(Vec::new()))[0].found, "none");
        assert!(checks(&Fact::Absent).is_empty());
    }

    #[test]
    fn a_device_has_the_name_that_the_provider_gives_it() {
        let efa = provider("efa", &["rdmap16s27-rdm", "rdmap32s27-rdm"]);
        assert_eq!(efa.nic_of("rdmap32s27"), Some("rdmap32s27-rdm"));
        assert_eq!(efa.nic_of("rdmap32s2"), None);
        let verbs = provider("verbs;ofi_rxm", &["mlx5_1-xrc", "mlx5_10", "mlx5_1"]);
        assert_eq!(verbs.nic_of("mlx5_1"), Some("mlx5_1"));
    }
}
