//! The reduction of dense gradients: `ep_migrate::DenseReduction`.

use ep::{CallerError, PeerFault, Rank};
use ep_migrate::{Bucket, Datacenters, DenseSettings, Turn};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::call::{Span, element};
use crate::carrier::{carrier_of, seconds};
use crate::errors::Failure;
use crate::interrupt::Signals;

/// The settings of a reduction, read from a Python dict.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    rank: u32,
    /// The ranks of each datacenter, ascending.
    datacenters: Vec<Vec<u32>>,
    codec: String,
    regular_elements: usize,
    /// Seconds.
    timeout: f64,
    run: u64,
}

/// Plan, bucket, round, step.
type TurnOf = (usize, usize, u64, u64);

fn turn((plan, bucket, round, step): TurnOf) -> Turn {
    Turn { plan, bucket, round, step }
}

/// One rank's part in the reduction of dense gradients.
///
/// Every method releases Python's lock first: the threads of the reduction take that lock inside their own.
#[pyclass(frozen)]
pub(crate) struct DenseReduction {
    of: ep_migrate::DenseReduction,
    signals: Signals,
}

#[pymethods]
impl DenseReduction {
    #[new]
    fn new(py: Python<'_>, settings: Settings, carrier: Py<PyAny>) -> Result<Self, Failure> {
        let signals = Signals::default();
        let ranks = |ranks: &Vec<u32>| ranks.iter().copied().map(Rank).collect();
        let members: Vec<Vec<Rank>> = settings.datacenters.iter().map(ranks).collect();
        let datacenters = Datacenters::new(Rank(settings.rank), &members)?;
        let codec = settings.codec.parse().map_err(|error| CallerError::Config {
            key: "dense_gradients",
            value: settings.codec.clone(),
            problem: format!("{error}"),
        })?;
        let timeout = seconds(settings.timeout)?;
        let interrupt = signals.interrupt();
        let regular_elements = settings.regular_elements;
        let parsed = DenseSettings { codec, regular_elements, timeout, run: settings.run, interrupt };
        let carrier = carrier_of(py, carrier, &signals);
        Ok(Self { of: ep_migrate::DenseReduction::new(datacenters, parsed, carrier)?, signals })
    }

    /// Each of `buckets` is its number of elements, and whether they are f32 instead of bf16.
    fn add_plan(
        &self,
        py: Python<'_>,
        buckets: Vec<(usize, bool)>,
        saved: Option<&Bound<'_, PyBytes>>,
    ) -> Result<usize, Failure> {
        let bucket = |(elements, wide)| Bucket { elements, element: element(wide) };
        let buckets: Vec<Bucket> = buckets.into_iter().map(bucket).collect();
        let saved = saved.map(|bytes| bytes.as_bytes());
        Ok(py.detach(|| self.of.add_plan(&buckets, saved))?)
    }

    fn begin(&self, py: Python<'_>, of: TurnOf, wide: bool, gradients: Span) -> Result<(), Failure> {
        let result = py.detach(|| match wide {
            // SAFETY: Python has checked the type of the tensor, and keeps it for this call.
            true => self.of.begin(turn(of), unsafe { gradients.elements::<f32>() }),
            // SAFETY: as above.
            false => self.of.begin(turn(of), unsafe { gradients.elements::<u16>() }),
        });
        self.signals.settle(result.map_err(Failure::from))
    }

    fn finish(&self, py: Python<'_>, of: TurnOf, wide: bool, sums: Span) -> Result<(), Failure> {
        let result = py.detach(|| match wide {
            // SAFETY: Python has made the tensor with this type, keeps it for this call, and lets nothing else use it.
            true => self.of.finish(turn(of), unsafe { sums.elements_mut::<f32>() }),
            // SAFETY: as above.
            false => self.of.finish(turn(of), unsafe { sums.elements_mut::<u16>() }),
        });
        self.signals.settle(result.map_err(Failure::from))
    }

    fn abandon(&self, py: Python<'_>, round: u64) {
        py.detach(|| self.of.abandon(round));
    }

    /// `fault` is the text of a fault, as `PeerError.fault` has it.
    fn blame(&self, py: Python<'_>, rank: u32, fault: &str) {
        let named = PeerFault::ALL.into_iter().find(|named| named.to_string() == fault);
        py.detach(|| self.of.blame(Rank(rank), named.unwrap_or(PeerFault::Failed)));
    }

    fn check(&self, py: Python<'_>) -> Result<(), Failure> {
        Ok(py.detach(|| self.of.check())?)
    }

    fn save<'py>(&self, py: Python<'py>, plan: usize) -> Result<Bound<'py, PyBytes>, Failure> {
        let saved = py.detach(|| self.of.save(plan))?;
        Ok(PyBytes::new(py, &saved))
    }

    /// Bytes by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let traffic = py.detach(|| self.of.traffic());
        let dict = PyDict::new(py);
        dict.set_item("dense_link_sent", traffic.link_sent)?;
        dict.set_item("dense_link_received", traffic.link_received)?;
        dict.set_item("dense_inside_sent", traffic.inside_sent)?;
        dict.set_item("dense_inside_received", traffic.inside_received)?;
        Ok(dict)
    }

    /// With `at_once`, waits at most a second for the peers.
    fn close(&self, py: Python<'_>, at_once: bool) {
        py.detach(|| if at_once { self.of.close_at_once() } else { self.of.close() });
    }
}

impl Drop for DenseReduction {
    /// Releases Python's lock, which is held while Python drops an object: the threads that the close waits for need
    /// it.
    fn drop(&mut self) {
        Python::try_attach(|py| py.detach(|| self.of.close_at_once()));
    }
}
