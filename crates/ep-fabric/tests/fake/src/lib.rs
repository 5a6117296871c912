//! A libfabric for the tests of `ep-fabric`: a shared library with the functions and tables that the engine calls.
//!
//! Ranks are threads of one process. A test names a provider, offers its NICs ([`Offer`]) with [`Settings`], and loads
//! the library as an engine loads `libfabric.so.1`. The settings say what the provider demands and how it misbehaves;
//! the seed decides all that is random. The fake checks every call against what libfabric's manual pages allow, and
//! records what is wrong. [`Report`] has these records and the objects that are not closed.
//!
//! | module | contents |
//! |---|---|
//! | `control` | how tests load and control the fake |
//! | `settings` | what a provider demands, and how it misbehaves |
//! | `exports` | the exported functions: those of libfabric, and those by which tests control the fake |
//! | `tables` | the functions of the objects' tables |
//! | `info` | lists of `fi_info` |
//! | `world` | all objects, by address: opening, binding, closing |
//! | `wire` | puts in flight: delivery, completions, errors |
//! | `sys` | the declarations of `ep-fabric`, which a test of that crate compares with libfabric's headers |

mod control;
mod exports;
mod info;
mod settings;
#[path = "../../../src/sys.rs"]
#[allow(dead_code, missing_docs)]
pub mod sys;
mod tables;
mod wire;
mod world;

pub use control::{Fake, Report, path};
pub use exports::{fake_offer, fake_report, fake_set_copy, fake_set_gpu_memory, fake_set_version};
pub use settings::{Bus, Gone, Hardware, Network, Offer, Settings, Step};
pub use world::Copy;
