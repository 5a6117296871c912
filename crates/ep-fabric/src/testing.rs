//! For tests over the installed libfabric, in this crate and in crates that use it. Needs the feature `testing`.

use std::path::PathBuf;

/// The library that `HYBRID_EP_LIBFABRIC` names, or the system's, as in [`Options::library`](crate::Options). `None`,
/// with a message on standard error, where it cannot be loaded: the test is then to be skipped.
///
/// # Panics
/// Where it cannot be loaded and `HYBRID_EP_REQUIRE_LIBFABRIC` is 1.
#[allow(clippy::print_stderr, reason = "a test that is skipped says so")]
pub fn installed() -> Option<Option<PathBuf>> {
    let path = std::env::var_os("HYBRID_EP_LIBFABRIC").map(PathBuf::from);
    let Err(error) = crate::providers(path.as_deref()) else { return Some(path) };
    assert_ne!(std::env::var("HYBRID_EP_REQUIRE_LIBFABRIC").as_deref(), Ok("1"), "{error}");
    eprintln!("SKIPPED: {error}");
    None
}
