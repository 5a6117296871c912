//! Opens an engine over libfabric, from the settings of a backend.

use std::net::IpAddr;
#[cfg(feature = "fabric")]
use std::path::Path;
use std::sync::Arc;

use ep::{GpuPart, Limits, Rail, Result, TransportOptions, Unconnected, Window};

use crate::Segment;

/// Where a rank runs.
#[derive(Debug, Clone, Default)]
pub struct RankPlace {
    /// The index of the rank in its domain, which selects its NICs among those of the settings.
    pub local_rank: usize,
    /// The PCI address of the rank's GPU, such as `0000:18:00.0`; `None` for a rank without a GPU.
    pub gpu: Option<String>,
    /// The network address of this machine that ranks on other machines use; `None` when all ranks are on one machine.
    pub address: Option<IpAddr>,
}

/// Opens the engine over libfabric that `options` name, with `window` as the window of the rank at `place`.
///
/// If `options` have neither an address nor NICs, the provider `tcp` listens at the address of the place. A provider of
/// RDMA NICs gets those that are nearest to the rank's GPU ([`ep_fabric::nearest_nics`]). Other providers choose an
/// interface themselves, and so does every provider if the place is unknown.
///
/// The engine keeps the window until no peer can access it any more. The whole segment is the window: an offset of a put
/// is an offset of the segment.
///
/// # Errors
/// [`CallerError::Config`](ep::CallerError::Config) for an address that is neither an IP address nor an interface of
/// this machine, for other invalid options, and in a build without the feature `fabric`.
/// [`EnvironmentError`](ep::EnvironmentError) when the library cannot be loaded, or does not offer the provider;
/// `loopback` is not a provider of the library.
pub fn open_fabric(
    rail: Rail,
    place: &RankPlace,
    window: Arc<Segment>,
    options: &TransportOptions,
    limits: Limits,
) -> Result<Box<dyn Unconnected>> {
    // SAFETY: a segment is mapped, with an unchanging length, until it is dropped. Other ranks may write to it at any
    // time: only pointers and atomics access it.
    unsafe { open_fabric_over(rail, place, window, options, limits) }
}

/// Like [`open_fabric`], with any window: one with a part in the memory of a GPU, for example.
///
/// # Safety
/// The memory that `window` describes must be mapped, with these addresses and lengths, until the window is dropped, and valid
/// for reads and writes from outside of the process at any time.
///
/// # Errors
/// As for [`open_fabric`]; in addition [`EnvironmentError`](ep::EnvironmentError) when the provider does not register the
/// window's memory.
pub unsafe fn open_fabric_over(
    rail: Rail,
    place: &RankPlace,
    window: Arc<dyn Window>,
    options: &TransportOptions,
    limits: Limits,
) -> Result<Box<dyn Unconnected>> {
    // SAFETY: guaranteed by the caller.
    unsafe { open(rail, place, window, options, limits) }
}

/// Whether the engine over libfabric that `options` name registers this memory of the GPU of the rank at this place; otherwise,
/// the reason.
///
/// # Safety
/// The memory must stay mapped during the call.
///
/// # Errors
/// As for [`open_fabric`].
pub unsafe fn registers_gpu_memory(
    place: &RankPlace,
    options: &TransportOptions,
    part: GpuPart,
) -> Result<std::result::Result<(), String>> {
    // SAFETY: guaranteed by the caller.
    unsafe { registers(place, options, part) }
}

#[cfg(feature = "fabric")]
unsafe fn registers(
    place: &RankPlace,
    options: &TransportOptions,
    part: GpuPart,
) -> Result<std::result::Result<(), String>> {
    let options = fabric_options(options, place, Path::new(ep_fabric::SYSFS))?;
    // SAFETY: guaranteed by the caller.
    unsafe { ep_fabric::registers_gpu_memory(&options, part) }
}

#[cfg(not(feature = "fabric"))]
unsafe fn registers(
    _: &RankPlace,
    options: &TransportOptions,
    _: GpuPart,
) -> Result<std::result::Result<(), String>> {
    Err(without_fabric(options))
}

#[cfg(feature = "fabric")]
unsafe fn open(
    rail: Rail,
    place: &RankPlace,
    window: Arc<dyn Window>,
    options: &TransportOptions,
    limits: Limits,
) -> Result<Box<dyn Unconnected>> {
    let options = fabric_options(options, place, Path::new(ep_fabric::SYSFS))?;
    // SAFETY: guaranteed by the caller.
    unsafe { ep_fabric::open(&options, rail, window, limits) }
}

#[cfg(not(feature = "fabric"))]
unsafe fn open(
    _: Rail,
    _: &RankPlace,
    _: Arc<dyn Window>,
    options: &TransportOptions,
    _: Limits,
) -> Result<Box<dyn Unconnected>> {
    Err(without_fabric(options))
}

#[cfg(not(feature = "fabric"))]
fn without_fabric(options: &TransportOptions) -> ep::Error {
    let (key, value) = ("HYBRID_EP_TRANSPORT", options.engine.clone());
    let problem = "this build has only `loopback`; enable the feature `fabric` of the backend's crate".into();
    ep::CallerError::Config { key, value, problem }.into()
}

/// The providers that have no NICs to choose from: `shm`, and those that listen at a network address.
#[cfg(feature = "fabric")]
const WITHOUT_NICS: [&str; 3] = ["tcp", "net", "shm"];

/// The options of the engine of the rank at this place. `sysfs` is the machine's directory `/sys`.
#[cfg(feature = "fabric")]
fn fabric_options(options: &TransportOptions, place: &RankPlace, sysfs: &Path) -> Result<ep_fabric::Options> {
    let domains = options.nics_of(place.local_rank).to_vec();
    let TransportOptions { engine: provider, address, traffic_class, libfabric: library, .. } =
        options.clone();
    let address = address.map(|setting| ip_address(&setting)).transpose()?;
    let is_chosen = address.is_some() || !domains.is_empty();
    let mut options = ep_fabric::Options { provider, address, domains, traffic_class, library };
    if !is_chosen && options.provider == "tcp" {
        options.address = place.address.map(|address| address.to_string());
    }
    if let (Some(gpu), false) = (&place.gpu, is_chosen || WITHOUT_NICS.contains(&options.provider.as_str())) {
        options.domains = ep_fabric::nearest_nics(&options, gpu, sysfs)?;
    }
    Ok(options)
}

/// The IP address that the setting `HYBRID_EP_TRANSPORT_ADDRESS` selects, as text.
#[cfg(all(feature = "fabric", target_os = "linux"))]
fn ip_address(setting: &str) -> Result<String> {
    Ok(ep::join::address_of(setting)?.to_string())
}

#[cfg(all(feature = "fabric", not(target_os = "linux")))]
fn ip_address(setting: &str) -> Result<String> {
    Ok(setting.to_string())
}

#[cfg(test)]
mod tests {
    use ep::{CallerError, Error, Rank};

    use super::*;

    fn options(engine: &str, address: Option<&str>, nics: &[&str]) -> TransportOptions {
        let mut options = TransportOptions::default();
        options.engine = engine.into();
        options.address = address.map(Into::into);
        options.nics = nics.iter().map(|&nic| vec![nic.into()]).collect();
        options
    }

    /// The setting that `open_fabric` refuses, and why.
    fn refused(options: &TransportOptions) -> (&'static str, String) {
        let rail = Rail::new(vec![Rank(0), Rank(1)], 0).unwrap();
        let window = Arc::new(Segment::private(4096).unwrap());
        let limits = Limits { signals: 1, put_bytes: 64, advice: "" };
        match open_fabric(rail, &RankPlace::default(), window, options, limits).map(drop) {
            Err(Error::Caller(CallerError::Config { key, problem, .. })) => (key, problem),
            other => panic!("{other:?}"),
        }
    }

    #[cfg(feature = "fabric")]
    fn fabric(options: &TransportOptions, place: &RankPlace) -> ep_fabric::Options {
        fabric_options(options, place, Path::new("/nowhere")).unwrap()
    }

    #[test]
    #[cfg(feature = "fabric")]
    fn the_setting_comes_before_the_address_of_the_machine() {
        let machine = RankPlace { address: Some(IpAddr::from([10, 0, 0, 1])), ..RankPlace::default() };
        for (options, expected) in [
            (options("tcp", None, &[]), Some("10.0.0.1")),
            (options("tcp", Some("10.0.0.2"), &[]), Some("10.0.0.2")),
            (options("tcp", Some("10.0.0.2"), &["nic"]), Some("10.0.0.2")),
            (options("tcp", None, &["nic"]), None),
            (options("efa", None, &[]), None),
            (options("efa", Some("10.0.0.2"), &[]), Some("10.0.0.2")),
        ] {
            let found = fabric(&options, &machine);
            assert_eq!(found.address.as_deref(), expected, "{options:?}");
            assert_eq!(found.provider, options.engine);
        }
        assert_eq!(fabric(&options("tcp", None, &[]), &RankPlace::default()).address, None);
    }

    #[test]
    #[cfg(feature = "fabric")]
    fn the_local_rank_selects_the_nic() {
        let options = options("verbs", None, &["a", "b"]);
        // A setting comes before the GPU.
        let place = |local_rank| RankPlace { local_rank, gpu: Some("0000:18:00.0".into()), address: None };
        let nics = |local_rank| fabric(&options, &place(local_rank)).domains;
        assert_eq!([0, 1, 2].map(nics), ["a", "b", "a"].map(|nic| vec![nic.to_string()]));
    }

    #[test]
    #[cfg(feature = "fabric")]
    fn a_gpu_whose_place_is_unknown_leaves_the_choice_to_the_provider() {
        let place = RankPlace { gpu: Some("0000:18:00.0".into()), ..RankPlace::default() };
        for provider in ["verbs;ofi_rxm", "efa", "tcp", "shm"] {
            assert_eq!(fabric(&options(provider, None, &[]), &place).domains, [""; 0]);
        }
    }

    #[test]
    #[cfg(feature = "fabric")]
    #[cfg_attr(not(target_os = "linux"), ignore = "the setting is not checked there")]
    #[cfg_attr(miri, ignore = "reads the interfaces")]
    fn an_address_that_is_not_one_of_this_machine_is_refused() {
        let (key, problem) = refused(&options("tcp", Some("no-such-interface"), &[]));
        assert_eq!(key, "HYBRID_EP_TRANSPORT_ADDRESS", "{problem}");
    }

    #[test]
    #[cfg(not(feature = "fabric"))]
    fn a_build_without_the_feature_refuses_providers() {
        let (key, problem) = refused(&options("tcp", None, &[]));
        assert_eq!(key, "HYBRID_EP_TRANSPORT");
        assert!(problem.contains("feature `fabric`"), "{problem}");
    }
}
