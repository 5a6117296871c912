//! The timeline of recorded GPUs and links, and its export as a Chrome trace.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::outcome::Phase;
use crate::units::{Bytes, Seconds};

/// Spans of activity on tracks.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Timeline {
    /// The tracks: streams and uplinks of the recorded GPUs.
    pub tracks: Vec<Track>,
    /// The spans, in the order in which they ended.
    pub spans: Vec<Span>,
}

/// A track of the timeline: a stream or a link. Its spans do not overlap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Track {
    /// The GPU that the track belongs to.
    pub gpu: usize,
    /// The stream or link of the GPU.
    pub lane: Lane,
    /// Display name: "compute", "wan link".
    pub name: String,
}

/// The stream or link of a GPU that a track shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lane {
    /// The stream of computations.
    Compute,
    /// The stream that sends tokens.
    Tokens,
    /// The stream that sends experts.
    Experts,
    /// The stream that sends gradients and the shared expert.
    Gradients,
    /// The uplink of the GPU at this level. It is busy while any GPU uses it.
    Link(usize),
}

/// One activity: a part of a computation, an exchange, or a busy time of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Index of the track in [`Timeline::tracks`].
    pub track: usize,
    /// The phase. `None` for a link, which several phases may use at once.
    pub phase: Option<Phase>,
    /// Start, from the start of the step.
    pub start: Seconds,
    /// End, from the start of the step. The span of an exchange ends when its last byte is sent.
    pub end: Seconds,
    /// Bytes that the GPU sent; zero for computations and links.
    pub bytes: Bytes,
    /// The level of an exchange or a link.
    pub level: Option<usize>,
    /// The layer, numbered from 0.
    pub layer: usize,
    /// The micro-batch, numbered from 0.
    pub micro_batch: usize,
    /// Whether the span belongs to a backward pass.
    pub backward: bool,
    /// The chunk of tokens, numbered from 0.
    pub chunk: usize,
}

impl Timeline {
    /// Writes trace-event JSON for Chrome and Perfetto: one process per GPU, one thread per track, times in
    /// microseconds.
    ///
    /// # Errors
    /// Returns the errors of `out`.
    pub fn to_chrome_trace(&self, out: &mut impl Write) -> io::Result<()> {
        #[derive(Serialize)]
        struct Trace<'a> {
            #[serde(rename = "displayTimeUnit")]
            unit: &'static str,
            #[serde(rename = "traceEvents")]
            events: Events<'a>,
        }
        let trace = Trace { unit: "ms", events: Events(self) };
        serde_json::to_writer(out, &trace).map_err(io::Error::from)
    }

    /// The end of the last span.
    pub fn end(&self) -> Seconds {
        self.spans.iter().fold(Seconds::ZERO, |end, span| end.max(span.end))
    }
}

impl Span {
    /// Display name of the span.
    pub fn name(&self) -> String {
        let phase = self.phase.map_or("busy", Phase::name);
        let way = if self.backward { " backward" } else { "" };
        match self.phase {
            None => phase.to_owned(),
            Some(_) => format!("{phase}{way} {}", self.layer),
        }
    }
}

/// Serializes one event at a time, so that a long trace is not held in memory a second time.
struct Events<'a>(&'a Timeline);

impl Serialize for Events<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Timeline { tracks, spans } = self.0;
        let names = tracks.iter().enumerate().flat_map(|(number, track)| {
            let label = |kind: &str, name: String| {
                serde_json::json!({
                    "ph": "M", "name": kind, "pid": track.gpu, "tid": number, "args": {"name": name},
                })
            };
            [label("process_name", format!("GPU {}", track.gpu)), label("thread_name", track.name.clone())]
        });
        let spans = spans.iter().map(|span| {
            serde_json::json!({
                "ph": "X", "name": span.name(), "cat": span.phase.map_or("link", Phase::name),
                "pid": tracks[span.track].gpu, "tid": span.track,
                "ts": span.start.0 * 1e6, "dur": (span.end - span.start).0 * 1e6,
                "args": {
                    "bytes": span.bytes.0, "level": span.level, "layer": span.layer, "chunk": span.chunk,
                    "micro_batch": span.micro_batch, "backward": span.backward,
                },
            })
        });
        serializer.collect_seq(names.chain(spans))
    }
}
