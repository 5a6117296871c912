//! The opening of an engine over libfabric, from the settings of a backend.

use std::net::IpAddr;
use std::sync::Arc;

use ep::{Limits, Rail, Result, TransportOptions, Unconnected};

use crate::Segment;

/// Opens the engine over libfabric that `options` name, with `window` as this rank's window.
///
/// `local_rank` is the index of this rank in its domain, which selects its NICs among those of `options`. `address` is
/// the network address of this machine that ranks on other machines use, or `None` when all ranks are on one machine.
/// The provider `tcp` listens there if `options` have neither an address nor NICs; other providers choose an interface
/// themselves.
///
/// The engine keeps the window until no peer can access it any more. The whole segment is the window: an offset of a put
/// is an offset of the segment.
///
/// # Errors
/// [`CallerError::Config`](ep::CallerError::Config) for an address that is neither an IP address nor an interface of
/// this machine, for other invalid options, and in a build without the feature `fabric`.
/// [`EnvironmentError`](ep::EnvironmentError) when the library cannot be loaded, or does not offer the provider; the
/// engine `loopback` is none of its providers.
pub fn open_fabric(
    rail: Rail,
    local_rank: usize,
    window: Arc<Segment>,
    options: &TransportOptions,
    limits: Limits,
    address: Option<IpAddr>,
) -> Result<Box<dyn Unconnected>> {
    open(rail, local_rank, window, options, limits, address)
}

#[cfg(feature = "fabric")]
fn open(
    rail: Rail,
    local_rank: usize,
    window: Arc<Segment>,
    options: &TransportOptions,
    limits: Limits,
    address: Option<IpAddr>,
) -> Result<Box<dyn Unconnected>> {
    let options = fabric_options(options, local_rank, address)?;
    // SAFETY: a segment is mapped, with an unchanging length, until it is dropped. Other ranks may write to it at any
    // time: only pointers and atomics access it.
    unsafe { ep_fabric::open(&options, rail, window as Arc<dyn ep::Window>, limits) }
}

#[cfg(not(feature = "fabric"))]
fn open(
    _: Rail,
    _: usize,
    _: Arc<Segment>,
    options: &TransportOptions,
    _: Limits,
    _: Option<IpAddr>,
) -> Result<Box<dyn Unconnected>> {
    let (key, value) = ("HYBRID_EP_TRANSPORT", options.engine.clone());
    let problem = "this build has only `loopback`; enable the feature `fabric` of the backend's crate".into();
    Err(ep::CallerError::Config { key, value, problem }.into())
}

/// The options of the engine of the rank with this local rank.
#[cfg(feature = "fabric")]
fn fabric_options(
    options: &TransportOptions,
    local_rank: usize,
    address: Option<IpAddr>,
) -> Result<ep_fabric::Options> {
    let domains = options.nics_of(local_rank).to_vec();
    let TransportOptions { engine: provider, address: setting, traffic_class, libfabric: library, .. } =
        options.clone();
    let setting = setting.map(|setting| ip_address(&setting)).transpose()?;
    // A NIC that is named has an address. Other providers choose an interface if there is no setting.
    let address = setting
        .or(address.filter(|_| provider == "tcp" && domains.is_empty()).map(|address| address.to_string()));
    Ok(ep_fabric::Options { provider, address, domains, traffic_class, library })
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
        match open_fabric(rail, 0, window, options, limits, None).map(drop) {
            Err(Error::Caller(CallerError::Config { key, problem, .. })) => (key, problem),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    #[cfg(feature = "fabric")]
    fn the_setting_comes_before_the_address_of_the_machine() {
        let machine = Some(IpAddr::from([10, 0, 0, 1]));
        for (options, expected) in [
            (options("tcp", None, &[]), Some("10.0.0.1")),
            (options("tcp", Some("10.0.0.2"), &[]), Some("10.0.0.2")),
            (options("tcp", Some("10.0.0.2"), &["nic"]), Some("10.0.0.2")),
            (options("tcp", None, &["nic"]), None),
            (options("efa", None, &[]), None),
            (options("efa", Some("10.0.0.2"), &[]), Some("10.0.0.2")),
        ] {
            let found = fabric_options(&options, 0, machine).unwrap();
            assert_eq!(found.address.as_deref(), expected, "{options:?}");
            assert_eq!(found.provider, options.engine);
        }
        assert_eq!(fabric_options(&options("tcp", None, &[]), 0, None).unwrap().address, None);
    }

    #[test]
    #[cfg(feature = "fabric")]
    fn the_local_rank_selects_the_nic() {
        let options = options("verbs", None, &["a", "b"]);
        let nics = |local_rank| fabric_options(&options, local_rank, None).unwrap().domains;
        assert_eq!([0, 1, 2].map(nics), ["a", "b", "a"].map(|nic| vec![nic.to_string()]));
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
