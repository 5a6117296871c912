//! `hybrid_ep._native`: the operators behind the Python package. Arguments are numbers or tensors; results are DLPack
//! capsules or tensors.
//!
//! | module | contents |
//! |---|---|
//! | `buffer` | the class `Buffer`: one rank, on either backend |
//! | `call` | the operators over tensors; `host` and `cuda` hold what differs by backend |
//! | `join` | rendezvous: by a callback into Python, by the launcher's environment, or of one rank |
//! | `handle` | handles as tensors |
//! | `dense` | conversion of a top-k routing to a map and dense probabilities |
//! | `tensors` | from the tensors of a call to its numbers, if that needs no copy |
//! | `dlpack` | export of memory to a tensor library, by capsules |
//! | `exchange` | tensors of PyTorch, read and made without calls of Python code |
//! | `delivered` | registered memory that tensors own |
//! | `interrupt` | Ctrl-C while an operator waits |
//! | `carrier` | carriers of messages between datacenters |
//! | `migration` | experts between datacenters |
//! | `reduction` | dense gradients between datacenters |
//! | `errors` | exceptions |
//! | `cli` | the program `hybrid-ep`, for `python -m hybrid_ep` |
//!
//! This module is private to the package and trusts the addresses that it receives: `hybrid_ep.ops` checks the tensors
//! that the addresses belong to, and keeps them alive. It checks tensors that it receives as such.

mod buffer;
mod call;
mod carrier;
mod cli;
mod cuda;
mod delivered;
mod dense;
mod dlpack;
mod errors;
mod exchange;
mod handle;
mod host;
mod interrupt;
mod join;
mod migration;
mod reduction;
mod tensors;

#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::buffer::{Buffer, check_row, finish};

    #[pymodule_export]
    use super::carrier::RailCarrier;

    #[pymodule_export]
    use super::cli::cli;

    #[pymodule_export]
    use super::cuda::check_cuda;

    #[pymodule_export]
    use super::delivered::is_registered;

    #[pymodule_export]
    use super::dense::dense_routing;

    #[pymodule_export]
    use super::exchange::adopt_tensors;

    #[pymodule_export]
    use super::join::timeout_of;

    #[pymodule_export]
    use super::migration::Migration;

    #[pymodule_export]
    use super::reduction::DenseReduction;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
