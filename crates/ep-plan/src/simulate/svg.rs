//! A timeline as a Gantt chart in SVG, without scripts or external resources. It is not drawn by `plotters`, whose SVG has no
//! `<title>` elements, which browsers show as tooltips of the rectangles.

use std::fmt::{self, Write};

use super::outcome::Phase;
use super::timeline::{Span, Timeline, Track};

/// The part of a timeline to draw, and the size of the picture.
#[derive(Debug, Clone, PartialEq)]
pub struct SvgOptions {
    /// Title above the chart.
    pub title: String,
    /// Width of the picture, pixels.
    pub width: f64,
    /// Height of one track, pixels.
    pub track_height: f64,
    /// Start and end of the time to draw, seconds. Default: the whole timeline.
    pub window: Option<(f64, f64)>,
}

impl Default for SvgOptions {
    fn default() -> Self {
        Self { title: "Simulated step".into(), width: 1280.0, track_height: 22.0, window: None }
    }
}

/// Left margin with the names of the tracks. This size and those below are in pixels.
const LEFT: f64 = 150.0;
const RIGHT: f64 = 20.0;
/// Top margin with title and legend.
const TOP: f64 = 58.0;
/// Bottom margin with the axis.
const BOTTOM: f64 = 34.0;
/// Gap between the tracks of two GPUs.
const GAP: f64 = 10.0;
/// Least width of a drawn span. Narrower spans are widened, or left out if they would cover one of the same phase.
const LEAST: f64 = 0.3;

impl Timeline {
    /// Draws the timeline: one line per track, one colour per phase, a tooltip per span.
    ///
    /// # Errors
    /// Returns the errors of `out`. Writing into a `String` causes no error.
    pub fn to_svg(&self, out: &mut impl Write, options: &SvgOptions) -> fmt::Result {
        Chart::new(self, options).draw(out)
    }
}

struct Chart<'a> {
    timeline: &'a Timeline,
    options: &'a SvgOptions,
    from: f64,
    until: f64,
    /// Top of each track.
    tops: Vec<f64>,
    height: f64,
}

impl<'a> Chart<'a> {
    fn new(timeline: &'a Timeline, options: &'a SvgOptions) -> Self {
        let (from, until) = options.window.unwrap_or((0.0, timeline.end().0));
        let mut top = TOP;
        let mut before: Option<usize> = None;
        let mut tops = Vec::with_capacity(timeline.tracks.len());
        for track in &timeline.tracks {
            if before.replace(track.gpu).is_some_and(|gpu| gpu != track.gpu) {
                top += GAP;
            }
            tops.push(top);
            top += options.track_height;
        }
        Self { timeline, options, from, until: until.max(from), tops, height: top + BOTTOM }
    }

    fn draw(&self, out: &mut impl Write) -> fmt::Result {
        let (width, height) = (self.options.width, self.height);
        writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">"
        )?;
        writeln!(out, "<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>")?;
        let title = escaped(&self.options.title);
        writeln!(out, "<text x=\"10\" y=\"20\" font-size=\"15\" font-weight=\"bold\">{title}</text>")?;
        self.legend(out)?;
        self.axis(out)?;
        for (track, &top) in self.timeline.tracks.iter().zip(&self.tops) {
            self.label(out, track, top)?;
        }
        self.spans(out)?;
        writeln!(out, "</svg>")
    }

    fn legend(&self, out: &mut impl Write) -> fmt::Result {
        let present = |phase: &Phase| self.timeline.spans.iter().any(|span| span.phase == Some(*phase));
        let mut x = 10.0;
        for phase in Phase::ALL.into_iter().filter(present) {
            writeln!(
                out,
                "<rect x=\"{x}\" y=\"32\" width=\"12\" height=\"12\" fill=\"{}\"/>",
                colour(Some(phase))
            )?;
            writeln!(out, "<text x=\"{}\" y=\"42\">{}</text>", x + 16.0, phase.name())?;
            x += 30.0 + 7.0 * phase.name().len() as f64;
        }
        Ok(())
    }

    fn axis(&self, out: &mut impl Write) -> fmt::Result {
        let bottom = self.height - BOTTOM;
        let step = tick((self.until - self.from) / 8.0);
        let mut number = (self.from / step).ceil();
        while number * step <= self.until * (1.0 + 1e-12) && step > 0.0 {
            let at = number * step;
            let x = self.x(at);
            writeln!(
                out,
                "<line x1=\"{x:.2}\" y1=\"{TOP}\" x2=\"{x:.2}\" y2=\"{bottom}\" stroke=\"#dddddd\" stroke-width=\"1\"/>"
            )?;
            let label = crate::units::Seconds(at).to_string();
            let y = bottom + 16.0;
            writeln!(
                out,
                "<text x=\"{x:.2}\" y=\"{y}\" text-anchor=\"middle\" fill=\"#555555\">{label}</text>"
            )?;
            number += 1.0;
        }
        Ok(())
    }

    fn label(&self, out: &mut impl Write, track: &Track, top: f64) -> fmt::Result {
        let y = top + self.options.track_height * 0.7;
        let name = escaped(&format!("GPU {} {}", track.gpu, track.name));
        writeln!(out, "<text x=\"{}\" y=\"{y:.2}\" text-anchor=\"end\">{name}</text>", LEFT - 8.0)?;
        let line = top + self.options.track_height;
        let right = self.options.width - RIGHT;
        writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{line:.2}\" x2=\"{right}\" y2=\"{line:.2}\" stroke=\"#eeeeee\" stroke-width=\"1\"/>"
        )
    }

    fn spans(&self, out: &mut impl Write) -> fmt::Result {
        // Draw a very narrow span only if no span of the same phase is drawn at its place, because it would not be visible.
        let mut drawn: Vec<Option<(f64, Option<Phase>)>> = vec![None; self.tops.len()];
        for span in &self.timeline.spans {
            let (start, end) = (span.start.0.max(self.from), span.end.0.min(self.until));
            if end < start || (end == start && span.end > span.start) {
                continue;
            }
            let (x, right) = (self.x(start), self.x(end));
            let width = right - x;
            if width < LEAST {
                if drawn[span.track].is_some_and(|(last, phase)| x < last && phase == span.phase) {
                    continue;
                }
                drawn[span.track] = Some((x + LEAST, span.phase));
            }
            self.span(out, span, x, width.max(LEAST))?;
        }
        Ok(())
    }

    fn span(&self, out: &mut impl Write, span: &Span, x: f64, width: f64) -> fmt::Result {
        let (y, height) = (self.tops[span.track] + 2.0, self.options.track_height - 4.0);
        let took = span.end - span.start;
        let level = span.level.map_or(String::new(), |level| format!(", level {level}"));
        let about = escaped(&format!("{}{level}: {took} from {}", span.name(), span.start));
        writeln!(
            out,
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{}\"><title>{about}</title></rect>",
            colour(span.phase)
        )
    }

    fn x(&self, at: f64) -> f64 {
        let length = (self.until - self.from).max(f64::MIN_POSITIVE);
        LEFT + (at - self.from) / length * (self.options.width - LEFT - RIGHT)
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `least`.
fn tick(least: f64) -> f64 {
    if least.is_nan() || least <= 0.0 {
        return 1.0;
    }
    let decade = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * decade);
    steps.into_iter().find(|&step| step >= least).unwrap_or(10.0 * decade)
}

/// Computations have warm colours, transfers cold ones. The palette is suitable for colour-blind readers.
fn colour(phase: Option<Phase>) -> &'static str {
    match phase {
        Some(Phase::PreExpert) => "#e69f00",
        Some(Phase::Expert) => "#d55e00",
        Some(Phase::Decode) => "#f0c674",
        Some(Phase::Encode) => "#a0522d",
        Some(Phase::AllGather) => "#009e73",
        Some(Phase::Dispatch) => "#0072b2",
        Some(Phase::Combine) => "#56b4e9",
        Some(Phase::Gradients) => "#cc79a7",
        Some(Phase::SharedRefresh) => "#7a5195",
        None => "#999999",
    }
}

fn escaped(text: &str) -> String {
    // XML allows no control characters, not even escaped.
    let visible = text.chars().filter(|&character| !character.is_control());
    visible.fold(String::with_capacity(text.len()), |mut out, character| {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            other => out.push(other),
        }
        out
    })
}
