//! Charts as SVG: bars, lines, and squares for GPUs. The colours are fixed, so that a file needs no style sheet; a page
//! may replace them with its own style sheet.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::common::failure::Failure;

/// Text.
pub(crate) const INK: RGBColor = RGBColor(0x1B, 0x1F, 0x24);
/// Grid lines and frames.
pub(crate) const GRID: RGBColor = RGBColor(0xD0, 0xD7, 0xDE);
/// Data for comparison.
pub(crate) const MUTED: RGBColor = RGBColor(0x9A, 0xA4, 0xAF);
/// Colours of series: distinct for readers with red-green colour blindness, and on light and dark backgrounds.
pub(crate) const SERIES: [RGBColor; 8] = [
    RGBColor(0x2F, 0x81, 0xC7),
    RGBColor(0xE0, 0x8A, 0x1E),
    RGBColor(0x1F, 0x9E, 0x89),
    RGBColor(0xC4, 0x5A, 0x9B),
    RGBColor(0x7A, 0x6F, 0xD0),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0xD5, 0x5E, 0x3A),
    RGBColor(0x8C, 0x8C, 0x2E),
];

const WIDTH: u32 = 880;
const FONT: &str = "sans-serif";
const TEXT: u32 = 16;
const ROW: u32 = 36;
const LEGEND: u32 = 30;
const AXIS: u32 = 46;
/// Smallest size of a square, in pixels, in which a number is readable.
const READABLE: f64 = 15.0;
/// Width for the number beside a bar, in pixels.
const NOTE: u32 = 150;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A horizontal bar.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    pub(crate) label: String,
    /// Series and length of each part, from the left.
    pub(crate) parts: Vec<(usize, f64)>,
    /// Text beside the bar.
    pub(crate) note: String,
}

/// Name and colour of a series.
pub(crate) type Series<'a> = (&'a str, RGBColor);

/// Draws horizontal bars. On a logarithmic axis each bar must have one part.
pub(crate) fn bars(
    series: &[Series<'_>],
    bars: &[Bar],
    axis: &str,
    logarithmic: bool,
) -> Result<String, Failure> {
    let top = legend_height(series);
    let height = top + ROW * bars.len() as u32 + AXIS;
    let lengths = bars.iter().map(|bar| bar.parts.iter().map(|(_, length)| length).sum::<f64>());
    let longest = lengths.clone().fold(0.0, f64::max);
    let shortest = lengths.filter(|length| *length > 0.0).fold(longest, f64::min);
    let labels = bars.iter().map(|bar| text_width(&bar.label)).max().unwrap_or(0).min(330) + 14;
    draw(height, |root| {
        legend(root, series)?;
        let rows = 0.0..bars.len() as f64;
        let mut builder = ChartBuilder::on(root);
        builder.margin_top(top).margin_right(NOTE).x_label_area_size(AXIS).y_label_area_size(labels);
        if logarithmic && longest > 0.0 {
            let from = 10f64.powf((shortest.log10() - 0.3).floor());
            let chart = builder.build_cartesian_2d((from..longest).log_scale(), rows)?;
            bars_on(root, chart, series, bars, axis, from)
        } else {
            let to = if longest > 0.0 { longest } else { 1.0 };
            let chart = builder.build_cartesian_2d(0.0..to, rows)?;
            bars_on(root, chart, series, bars, axis, 0.0)
        }
    })
}

type Drawn<T = ()> = Result<T, DrawingAreaErrorKind<std::io::Error>>;

fn bars_on<'a, 'b, X>(
    root: &Area<'a>,
    mut chart: ChartContext<'b, SVGBackend<'a>, Cartesian2d<X, plotters::coord::types::RangedCoordf64>>,
    series: &[Series<'_>],
    bars: &[Bar],
    axis: &str,
    from: f64,
) -> Drawn
where
    X: plotters::coord::ranged1d::Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_labels(8)
        .x_label_formatter(&|value| number(*value))
        .x_desc(axis)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(GRID)
        .label_style(text(TEXT - 2))
        .axis_desc_style(text(TEXT - 2))
        .draw()?;
    for (index, bar) in bars.iter().enumerate() {
        let middle = bars.len() as f64 - index as f64 - 0.5;
        let mut at = from;
        for &(of, length) in &bar.parts {
            let to = if from > 0.0 { length.max(from) } else { at + length };
            if length > 0.0 {
                let colour = series.get(of).map_or(MUTED, |(_, colour)| *colour);
                let corners = [(at, middle - 0.32), (to, middle + 0.32)];
                chart.draw_series([Rectangle::new(corners, colour.filled())])?;
                at = to;
            }
        }
        let (left, y) = chart.backend_coord(&(from, middle));
        let (right, _) = chart.backend_coord(&(at, middle));
        write(root, &bar.label, (left - 10, y), HPos::Right, TEXT)?;
        write(root, &bar.note, (right + 8, y), HPos::Left, TEXT)?;
    }
    Ok(())
}

/// A line through points, some of which have a note. Notes of the first line stand below it, because the first line
/// is the lowest in comparisons; notes of other lines stand above them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) label: String,
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) notes: Vec<(usize, String)>,
}

/// Draws lines over a logarithmic or linear x axis. The y axis is logarithmic if the values span a factor of 10.
pub(crate) fn lines(lines: &[Line], axes: [&str; 2], logarithmic: bool) -> Result<String, Failure> {
    let xs = || lines.iter().flat_map(|line| line.points.iter().map(|point| point.0));
    let ys = || lines.iter().flat_map(|line| line.points.iter().map(|point| point.1));
    let (left, right) = (xs().fold(f64::INFINITY, f64::min), xs().fold(0.0, f64::max));
    let (low, high) = (ys().fold(f64::INFINITY, f64::min), ys().fold(0.0, f64::max));
    if !(left < right && low <= high) {
        return Err(Failure::request("a chart needs two points"));
    }
    let series: Vec<Series<'_>> =
        lines.iter().zip(SERIES).map(|(line, colour)| (&*line.label, colour)).collect();
    draw(440, |root| {
        legend(root, &series)?;
        let mut builder = ChartBuilder::on(root);
        builder
            .margin_top(legend_height(&series) + 4)
            .margin_right(26)
            .x_label_area_size(AXIS)
            .y_label_area_size(74);
        // Leaves room for notes above and below.
        let tall = high / low >= 10.0;
        let (from, to) = if tall { (low / 1.8, high * 1.8) } else { (0.0, high * 1.12) };
        match (logarithmic && left > 0.0, tall) {
            (true, true) => lines_on(
                builder.build_cartesian_2d((left..right).log_scale(), (from..to).log_scale())?,
                lines,
                axes,
            ),
            (true, false) => {
                lines_on(builder.build_cartesian_2d((left..right).log_scale(), from..to)?, lines, axes)
            }
            (false, true) => {
                lines_on(builder.build_cartesian_2d(left..right, (from..to).log_scale())?, lines, axes)
            }
            (false, false) => lines_on(builder.build_cartesian_2d(left..right, from..to)?, lines, axes),
        }
    })
}

fn lines_on<'a, 'b, X, Y>(
    mut chart: ChartContext<'b, SVGBackend<'a>, Cartesian2d<X, Y>>,
    lines: &[Line],
    [x_axis, y_axis]: [&str; 2],
) -> Drawn
where
    X: plotters::coord::ranged1d::Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
    Y: plotters::coord::ranged1d::Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .x_label_formatter(&|value| number(*value))
        .y_label_formatter(&|value| number(*value))
        .x_labels(8)
        .y_labels(7)
        .x_desc(x_axis)
        .y_desc(y_axis)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(GRID)
        .label_style(text(TEXT - 2))
        .axis_desc_style(text(TEXT - 2))
        .draw()?;
    // The first line is the subject. It is wide and drawn first, so that a line with the same values is visible on top of it.
    for (index, (line, colour)) in lines.iter().zip(SERIES).enumerate() {
        let width = if index == 0 { 6 } else { 2 };
        chart.draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(width)))?;
        for point in &line.points {
            chart.draw_series([Circle::new(*point, width + 1, colour.filled())])?;
        }
        for (at, note) in &line.notes {
            let Some(point) = line.points.get(*at) else { continue };
            // The note of the last point goes to its left, to stay inside the chart.
            let side = if at + 1 == line.points.len() { HPos::Right } else { HPos::Left };
            let (beside, away) = if index == 0 { (VPos::Top, 8) } else { (VPos::Bottom, -8) };
            let style = text(TEXT - 1).pos(Pos::new(side, beside));
            chart.draw_series([EmptyElement::at(*point) + Text::new(note.clone(), (0, away), style)])?;
        }
    }
    Ok(())
}

/// The square of a GPU: its position in units of a square's width, and the group that determines its colour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Square {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) group: usize,
}

/// A frame around squares with a name at its top.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Frame {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
    pub(crate) name: String,
}

/// Draws squares in frames, as large as the width allows.
pub(crate) fn squares(
    squares: &[Square],
    frames: &[Frame],
    groups: usize,
    [width, height]: [f64; 2],
) -> Result<String, Failure> {
    let scale = (f64::from(WIDTH - 4) / width).min(34.0);
    let pixel = |at: f64| (at * scale).round() as i32 + 2;
    draw((height * scale).ceil() as u32 + 4, |root| {
        for frame in frames {
            let corners = [
                (pixel(frame.x), pixel(frame.y)),
                (pixel(frame.x + frame.width), pixel(frame.y + frame.height)),
            ];
            root.draw(&Rectangle::new(corners, GRID.stroke_width(1)))?;
            let size = (scale * 0.62).clamp(8.0, 15.0) as u32;
            let style = text(size).pos(Pos::new(HPos::Left, VPos::Top));
            root.draw(&Text::new(frame.name.clone(), (corners[0].0 + 4, corners[0].1 + 3), style))?;
        }
        for square in squares {
            let corners = [
                (pixel(square.x + 0.06), pixel(square.y + 0.06)),
                (pixel(square.x + 0.94), pixel(square.y + 0.94)),
            ];
            root.draw(&Rectangle::new(corners, group_colour(square.group, groups).filled()))?;
            // Numbers, because colours alone do not distinguish many groups, or any groups for colour-blind readers.
            if scale >= READABLE {
                let style = text((scale * 0.5) as u32).pos(Pos::new(HPos::Center, VPos::Center));
                let middle = (pixel(square.x + 0.5), pixel(square.y + 0.5));
                root.draw(&Text::new(square.group.to_string(), middle, style))?;
            }
        }
        Ok(())
    })
}

/// The colour of a group: from [`SERIES`] if there are few groups, else spread over all hues.
fn group_colour(group: usize, groups: usize) -> RGBColor {
    if groups <= SERIES.len() {
        return SERIES[group % SERIES.len()];
    }
    // Steps of the golden ratio make the hues of neighbouring groups differ most.
    let hue = (group as f64 * 0.618_033_988_75).fract();
    let lightness = if group.is_multiple_of(2) { 0.52 } else { 0.62 };
    let (red, green, blue) = HSLColor(hue, 0.55, lightness).rgb();
    RGBColor(red, green, blue)
}

/// Adds a white background, for a picture outside of a page.
pub(crate) fn on_white(svg: &str) -> String {
    match svg.find('>') {
        Some(end) => {
            let (head, rest) = svg.split_at(end + 1);
            format!("{head}\n<rect width=\"100%\" height=\"100%\" fill=\"#FFFFFF\"/>{rest}")
        }
        None => svg.to_owned(),
    }
}

fn draw(height: u32, content: impl FnOnce(&Area<'_>) -> Drawn) -> Result<String, Failure> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        content(&root)
            .and_then(|()| root.present())
            .map_err(|error| Failure::request(format!("drawing a chart: {error}")))?;
    }
    Ok(svg)
}

/// Positions of the entries of a legend, row by row.
fn legend_places(series: &[Series<'_>]) -> Vec<(i32, i32)> {
    let (mut x, mut y) = (6, 14);
    let mut places = Vec::with_capacity(series.len());
    for (name, _) in series {
        let width = 19 + text_width(name) as i32 + 16;
        if x + width > WIDTH as i32 && x > 6 {
            (x, y) = (6, y + LEGEND as i32 - 6);
        }
        places.push((x, y));
        x += width;
    }
    places
}

/// Height of a legend; a single series has none.
fn legend_height(series: &[Series<'_>]) -> u32 {
    match legend_places(series).last() {
        Some(&(_, y)) if series.len() > 1 => y as u32 + LEGEND - 14,
        _ => 6,
    }
}

/// Draws the names of the series with their colours at the top.
fn legend(root: &Area<'_>, series: &[Series<'_>]) -> Drawn {
    if series.len() < 2 {
        return Ok(());
    }
    for ((name, colour), (x, y)) in series.iter().zip(legend_places(series)) {
        root.draw(&Rectangle::new([(x, y - 7), (x + 13, y + 6)], colour.filled()))?;
        write(root, name, (x + 19, y), HPos::Left, TEXT - 1)?;
    }
    Ok(())
}

fn write(root: &Area<'_>, what: &str, at: (i32, i32), side: HPos, size: u32) -> Drawn {
    root.draw(&Text::new(what.to_owned(), at, text(size).pos(Pos::new(side, VPos::Center))))
}

fn text(size: u32) -> TextStyle<'static> {
    (FONT, size).into_font().color(&INK)
}

/// Approximate width of a text in pixels. The exact width depends on the viewer's font.
fn text_width(text: &str) -> u32 {
    text.chars().count() as u32 * TEXT * 46 / 100
}

/// Formats a number on an axis.
fn number(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 1e6 {
        format!("{value:.0e}")
    } else if magnitude >= 1e3 {
        format!("{value:.0}")
    } else if value == 0.0 {
        "0".into()
    } else {
        // Ten decimals without trailing zeros, so that rounding errors (0.30000000000000004) do not show.
        format!("{value:.10}").trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The numbers x, y, width and height of the rectangles of this colour, or of all rectangles if it is `None`.
    fn rectangles(svg: &str, colour: Option<RGBColor>) -> Vec<[f64; 4]> {
        let of = |element: &str, name: &str| -> f64 {
            let from = element.find(&format!(" {name}=\"")).unwrap() + name.len() + 3;
            element[from..].split('"').next().unwrap().parse().unwrap()
        };
        let wanted =
            colour.map(|RGBColor(red, green, blue)| format!("fill=\"#{red:02X}{green:02X}{blue:02X}\""));
        svg.split("<rect")
            .skip(1)
            .map(|rest| rest.split("/>").next().unwrap())
            .filter(|element| wanted.as_ref().is_none_or(|fill| element.contains(fill)))
            .map(|element| ["x", "y", "width", "height"].map(|name| of(element, name)))
            .collect()
    }

    fn bar(parts: &[(usize, f64)]) -> Bar {
        Bar { label: "bar".into(), parts: parts.to_vec(), note: "note".into() }
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let series = [("first", SERIES[0]), ("second", SERIES[1])];
        let svg = bars(&series, &[bar(&[(0, 100.0), (1, 300.0)]), bar(&[(0, 200.0), (1, 0.0)])], "s", false)
            .unwrap();
        // The legend has the first rectangle of each colour.
        let (first, second) = (rectangles(&svg, Some(SERIES[0])), rectangles(&svg, Some(SERIES[1])));
        let &[_, [x, y, short, _], [below_x, below, long, _]] = &first[..] else { panic!("{first:?}") };
        let &[_, [after, same, longest, _]] = &second[..] else { panic!("{second:?}") };
        assert!((long - 2.0 * short).abs() <= 2.0 && (longest - 3.0 * short).abs() <= 3.0, "{svg}");
        assert!(x == below_x && y < below && same == y && (after - x - short).abs() <= 1.0, "{svg}");
        // The bars fill the width between the labels and the notes.
        assert!((after + longest - f64::from(WIDTH - NOTE)).abs() <= 2.0, "{svg}");
        // Without any value there is an axis and no bar.
        assert_eq!(
            rectangles(&bars(&series, &[bar(&[(0, 0.0)])], "s", false).unwrap(), Some(SERIES[0])).len(),
            1
        );
    }

    #[test]
    fn a_logarithmic_axis_is_for_values_that_span_a_factor_of_ten() {
        let line = |ys: [f64; 2]| Line {
            label: "l".into(),
            points: vec![(1.0, ys[0]), (2.0, ys[1])],
            notes: vec![],
        };
        let has_zero = |ys| lines(&[line(ys)], ["x", "y"], false).unwrap().contains("\n0\n");
        assert!(has_zero([100.0, 200.0]) && has_zero([1.0, 9.9]));
        assert!(!has_zero([1.0, 10.0]) && !has_zero([0.01, 200.0]));
    }

    #[test]
    fn frames_enclose_their_squares() {
        let squares_of = |x| (0..2).map(move |y| Square { x, y: f64::from(y) + 1.0, group: 3 });
        let all: Vec<_> = squares_of(0.0).chain(squares_of(4.0)).collect();
        let frame = |x| Frame { x, y: 0.0, width: 3.0, height: 3.0, name: "rack".into() };
        let svg = squares(&all, &[frame(0.0), frame(4.0)], 4, [7.0, 3.0]).unwrap();
        let found = rectangles(&svg, None);
        let [frames, boxes] = [&found[..2], &found[2..]];
        assert_eq!(boxes.len(), 4, "{svg}");
        for (index, &[x, y, width, height]) in boxes.iter().enumerate() {
            let [left, top, wide, tall] = frames[index / 2];
            assert!(left < x && top < y && x + width < left + wide && y + height < top + tall, "{svg}");
        }
        assert_eq!(frames[0][0] + 4.0 * 34.0, frames[1][0], "{svg}");
        assert_eq!(svg.matches("rack").count(), 2);
    }
}
