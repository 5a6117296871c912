//! What recorded GPUs and links did when, and how to look at it.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::outcome::Phase;
use crate::units::{Bytes, Seconds};

/// Spans of time on tracks.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Timeline {
    /// What there is to see: a GPU's streams and links.
    pub tracks: Vec<Track>,
    /// What happened, in the order in which it ended.
    pub spans: Vec<Span>,
}

/// A line of the timeline: something that does one thing at a time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Track {
    /// The GPU that it belongs to.
    pub gpu: usize,
    /// What of it.
    pub lane: Lane,
    /// For people: "compute", "wan link".
    pub name: String,
}

/// What of a GPU a track shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lane {
    /// Its computations.
    Compute,
    /// Its sending of tokens.
    Tokens,
    /// Its sending of experts.
    Experts,
    /// Its sending of gradients and shared experts.
    Gradients,
    /// Its uplink of a level: busy, whoever uses it.
    Link(usize),
}

/// Something that took time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Index of its track.
    pub track: usize,
    /// What it was; nothing for a link, which many may use.
    pub phase: Option<Phase>,
    /// When it began.
    pub start: Seconds,
    /// When it ended: for an exchange, when the last byte was sent.
    pub end: Seconds,
    /// What it sent.
    pub bytes: Bytes,
    /// The level that an exchange crossed.
    pub level: Option<usize>,
    /// The layer that it belongs to.
    pub layer: usize,
    /// The micro-batch that it belongs to.
    pub micro_batch: usize,
    /// Whether it belongs to the backward pass.
    pub backward: bool,
    /// The chunk of tokens that it belongs to.
    pub chunk: usize,
}

impl Timeline {
    /// Writes the trace-event JSON that Chrome and Perfetto open: a process per GPU, a thread per track, times in
    /// microseconds.
    ///
    /// # Errors
    /// What writing gives.
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
    /// What happened, for people.
    pub fn name(&self) -> String {
        let phase = self.phase.map_or("busy", Phase::name);
        let way = if self.backward { " backward" } else { "" };
        match self.phase {
            None => phase.to_owned(),
            Some(_) => format!("{phase}{way} {}", self.layer),
        }
    }
}

/// Writes one event after the other, so that a long trace is never in memory twice.
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
