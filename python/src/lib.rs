//! `hybrid_ep._native`: the operators behind the Python package, as numbers in and DLPack capsules out.
//!
//! | module | what is there |
//! |---|---|
//! | `buffer` | the class `Buffer`: one rank, on either backend |
//! | `call` | its operators over tensors; `host` and `cuda` say what differs |
//! | `join` | how ranks meet: a callback into Python, the launcher's environment, or alone |
//! | `handle` | handles as tensors |
//! | `dlpack` | memory handed to a tensor library |
//! | `errors` | exceptions |
//! | `cli` | the program `hybrid-ep`, for `python -m hybrid_ep` |
//!
//! This module is private to the package. It trusts the addresses that it is given: `hybrid_ep.ops` has checked the
//! tensors that they belong to, and keeps those alive.

mod buffer;
mod call;
mod cli;
mod cuda;
mod dlpack;
mod errors;
mod handle;
mod host;
mod join;

#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::buffer::Buffer;

    #[pymodule_export]
    use super::cli::cli;

    #[pymodule_export]
    use super::join::timeout_of;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
