//! This module lays out a chart and renders it as SVG elements.

use anyhow::{Context, Result, ensure};

use super::curve::{Look, Point};
use super::reference::{self, Flag, Side};
use super::scale::{Ruler, Tick};
use super::text::{FAMILY, escape, fit, markup, width};
use super::{At, Chart, Series};

pub(super) const PAGE_WIDTH: f64 = 1000.0;
const PAGE_HEIGHT: f64 = 600.0;
/// The least height of the plot: a legend of many rows makes the chart taller instead.
const LEAST_PLOT: f64 = 260.0;
const MARGIN: f64 = 24.0;
/// The space that an axis label takes, across its direction.
const LABEL_ROOM: f64 = 26.0;

/// The length of a legend sample, and the distance from there to its name.
const SAMPLE: f64 = 30.0;
const SAMPLE_GAP: f64 = 8.0;
const LEGEND_ROW: f64 = 21.0;
const LEGEND_GAP: f64 = 26.0;

/// A `Type` is a kind of text.
#[derive(Clone, Copy)]
pub(super) struct Type {
    /// Font size in pixels.
    pub(super) size: f64,
    paint: &'static str,
}

impl Type {
    /// Returns the distance from the middle of a line of text down to its baseline.
    pub(super) fn drop(self) -> f64 {
        0.35 * self.size
    }
}

// The embedded font is light: a thin stroke makes a heading heavier, in every viewer.
const TITLE: Type = Type { size: 20.0, paint: r##"fill="#222" stroke="#222" stroke-width="0.5""## };
const LABEL: Type = Type { size: 14.0, paint: r##"fill="#222""## };
const NAME: Type = Type { size: 13.0, paint: r##"fill="#222""## };
pub(super) const NOTE: Type = Type { size: 13.0, paint: r##"fill="#444""## };

/// A `Frame` is the plotting area in pixels, with its axes.
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
    x: Ruler,
    y: Ruler,
}

impl Frame {
    fn px(&self, x: f64) -> f64 {
        self.left + self.x.fraction(x) * (self.right - self.left)
    }

    pub(super) fn py(&self, y: f64) -> f64 {
        self.bottom - self.y.fraction(y) * (self.bottom - self.top)
    }

    fn place(&self, (x, y): Point) -> Point {
        (self.px(x), self.py(y))
    }

    fn contains(&self, (x, y): Point) -> bool {
        self.x.contains(x) && self.y.contains(y)
    }
}

/// A `Curve` is a series and its appearance.
struct Curve<'a> {
    series: &'a Series,
    look: Look,
    empty: bool,
}

pub(super) fn render(chart: &Chart) -> Result<String> {
    for Series { name, points, band, .. } in &chart.series {
        let (points, pairs) = (points.len(), band.as_ref().map_or(points.len(), Vec::len));
        ensure!(
            points == pairs,
            "series {name:?} has {points} points and a band of {pairs}; give one (low, high) pair per point",
        );
    }
    let (x, y) = rulers(chart)?;
    let (x_ticks, y_ticks) = (x.ticks(8), y.ticks(6));
    let curves: Vec<Curve> = (chart.series.iter().enumerate())
        .map(|(i, series)| {
            let drawn = series.points.iter().filter(|p| drawable(chart, **p)).count();
            Curve { series, look: Look::new(series, i, drawn), empty: drawn == 0 }
        })
        .collect();

    // The layout goes from the outside in: what is left and right of the plot, then above, then
    // below.
    let label_room = |label: &str| if label.is_empty() { 0.0 } else { LABEL_ROOM };
    let y_labels = y_ticks.iter().filter_map(|tick| tick.label.as_deref());
    let widest = y_labels.map(|label| width(label, NOTE.size)).fold(0.0, f64::max);
    let left = crisp(MARGIN + label_room(&chart.y.label) + widest + 9.0);
    let sides = Side::collect(&chart.lines, &y);
    let right = PAGE_WIDTH - MARGIN - Side::width(&sides);

    let mut out = Vec::new();
    let header = heading(&mut out, chart, left);
    let header = legend(&mut out, &curves, left, header);
    let px = |value| x.contains(value).then(|| left + x.fraction(value) * (right - left));
    let flags = Flag::arrange(&chart.lines, px);
    let top = (header + Flag::height(&flags) + 12.0).round();

    let below = MARGIN + 18.0 + label_room(&chart.x.label);
    let height = PAGE_HEIGHT.max(top + LEAST_PLOT + below);
    let frame = Frame { left, right, top, bottom: crisp(height - below), x, y };

    axes(&mut out, chart, &frame, &x_ticks, &y_ticks);
    reference::draw(&mut out, &frame, &flags, &sides);
    data(&mut out, chart, &frame, &curves);
    if curves.iter().all(|curve| curve.empty) {
        let middle = ((left + right) / 2.0, (top + frame.bottom) / 2.0);
        out.push(text(middle, TITLE, "middle", "no data"));
    }
    Ok(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{PAGE_WIDTH}" height="{height}" viewBox="0 0 {PAGE_WIDTH} {height}" role="img" font-family="{FAMILY}" font-weight="300">
<title>{}</title>
<rect width="100%" height="100%" fill="#fff"/>
{}
</svg>
"##,
        escape(&chart.title),
        out.join("\n"),
    ))
}

/// Whether a document is a chart as [`render`] writes it.
#[cfg(feature = "cli")]
pub(super) fn is_own(document: &[u8]) -> bool {
    let first = document.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let page = format!(r#"<svg xmlns="http://www.w3.org/2000/svg" width="{PAGE_WIDTH}" height=""#);
    let font = format!(r#" role="img" font-family="{FAMILY}" font-weight="300">"#);
    first.starts_with(page.as_bytes()) && first.ends_with(font.as_bytes())
}

/// Whether a point has a place on the chart's scales, inside the frame or not.
fn drawable(chart: &Chart, (x, y): Point) -> bool {
    chart.x.scale.accepts(x) && chart.y.scale.accepts(y)
}

/// Returns the axes with their ends: as given, or around the points, bands and reference lines.
fn rulers(chart: &Chart) -> Result<(Ruler, Ruler)> {
    let points = chart.series.iter().flat_map(|series| &series.points);
    let xs = points.filter(|point| drawable(chart, **point)).map(|point| point.0);
    let lines = chart.lines.iter().filter_map(|line| match line.at {
        At::X(x) => Some(x),
        At::Y(_) => None,
    });
    let x = Ruler::new(&chart.x, xs.chain(lines), 0.02).context("x axis")?;

    let mut ys = Vec::new();
    for Series { points, band, .. } in &chart.series {
        for (i, point) in points.iter().enumerate() {
            if drawable(chart, *point) && x.contains(point.0) {
                ys.push(point.1);
                ys.extend(band.iter().flat_map(|band| [band[i].0, band[i].1]));
            }
        }
    }
    ys.extend(chart.lines.iter().filter_map(|line| match line.at {
        At::Y(y) => Some(y),
        At::X(_) => None,
    }));
    let y = Ruler::new(&chart.y, ys.into_iter(), 0.05).context("y axis")?;
    Ok((x, y))
}

/// Draws title and subtitle, and returns where they end.
fn heading(out: &mut Vec<String>, chart: &Chart, left: f64) -> f64 {
    let room = PAGE_WIDTH - MARGIN - left;
    let mut bottom = 20.0;
    if !chart.title.is_empty() {
        let title = fit(&chart.title, TITLE.size, room);
        out.push(text((left, bottom + 20.0), TITLE, "start", &title));
        bottom += 29.0;
    }
    if let Some(subtitle) = &chart.subtitle {
        let subtitle = fit(subtitle, NOTE.size, room);
        out.push(text((left, bottom + 14.0), NOTE, "start", &subtitle));
        bottom += 22.0;
    }
    bottom
}

/// Draws samples and names in columns below `top`, and returns where they end.
fn legend(out: &mut Vec<String>, curves: &[Curve], left: f64, top: f64) -> f64 {
    let room = PAGE_WIDTH - MARGIN - left;
    let entries: Vec<(&Curve, String)> = (curves.iter())
        .filter(|curve| !curve.series.name.is_empty())
        .map(|curve| {
            let remark = if curve.empty { " (no data)" } else { "" };
            let name = format!("{}{remark}", curve.series.name);
            (curve, fit(&name, NAME.size, room - SAMPLE - SAMPLE_GAP))
        })
        .collect();
    if entries.is_empty() {
        return top;
    }
    // Viewers without the embedded font may draw names wider; some slack keeps columns apart.
    let longest = entries.iter().map(|(_, name)| width(name, NAME.size)).fold(0.0, f64::max);
    let column = SAMPLE + SAMPLE_GAP + 1.05 * longest + LEGEND_GAP;
    let most = (((room + LEGEND_GAP) / column) as usize).max(1);
    let rows = entries.len().div_ceil(most);
    let columns = entries.len().div_ceil(rows);
    let top = top + 6.0;
    for (i, (curve, name)) in entries.iter().enumerate() {
        let x = left + (i % columns) as f64 * column;
        let y = top + ((i / columns) as f64 + 0.5) * LEGEND_ROW;
        curve.look.sample(out, (x, y), SAMPLE, curve.series.band.is_some());
        out.push(text((x + SAMPLE + SAMPLE_GAP, y + NAME.drop()), NAME, "start", name));
    }
    top + rows as f64 * LEGEND_ROW
}

/// Draws the grid, the axis lines with their ticks, and all their labels.
fn axes(out: &mut Vec<String>, chart: &Chart, frame: &Frame, x_ticks: &[Tick], y_ticks: &[Tick]) {
    let &Frame { left, right, top, bottom, .. } = frame;
    let (mut grid, mut marks) = (String::new(), String::new());
    for Tick { value, label } in x_ticks {
        let x = crisp(frame.px(*value));
        marks += &format!("M{x} {bottom}v{}", if label.is_some() { 5 } else { 3 });
        if let Some(label) = label {
            grid += &format!("M{x} {top}V{bottom}");
            out.push(text((x, bottom + 19.0), NOTE, "middle", label));
        }
    }
    for Tick { value, label } in y_ticks {
        let y = crisp(frame.py(*value));
        marks += &format!("M{left} {y}h-{}", if label.is_some() { 5 } else { 3 });
        if let Some(label) = label {
            grid += &format!("M{left} {y}H{right:.2}");
            out.push(text((left - 9.0, y + NOTE.drop()), NOTE, "end", label));
        }
    }
    marks += &format!("M{left} {top}V{bottom}H{right:.2}");
    out.push(format!(r##"<path d="{grid}" fill="none" stroke="#e6e6e6"/>"##));
    out.push(format!(r##"<path d="{marks}" fill="none" stroke="#444"/>"##));

    let label = fit(&chart.x.label, LABEL.size, right - left);
    out.push(text(((left + right) / 2.0, bottom + 45.0), LABEL, "middle", &label));
    let label = fit(&chart.y.label, LABEL.size, bottom - top + MARGIN);
    let (x, y) = (MARGIN + 10.0, (top + bottom) / 2.0);
    let label = text((0.0, 0.0), LABEL, "middle", &label);
    out.push(format!(r#"<g transform="translate({x} {y}) rotate(-90)">{label}</g>"#));
}

/// Draws bands, then lines, then symbols, so that no series hides another's values under its band.
fn data(out: &mut Vec<String>, chart: &Chart, frame: &Frame, curves: &[Curve]) {
    let &Frame { left, right, top, bottom, .. } = frame;
    let area = format!(r#"{left} {top} {:.2} {}"#, right - left, bottom - top);
    // A nested viewport clips, and needs no id that could clash with another chart's on the same
    // page.
    out.push(format!(
        r#"<svg x="{left}" y="{top}" width="{:.2}" height="{}" viewBox="{area}">"#,
        right - left,
        bottom - top,
    ));
    for curve in curves {
        for (low, high) in bands(chart, frame, curve.series) {
            curve.look.band(out, &low, &high);
        }
    }
    for Curve { series, look, .. } in curves {
        out.push(format!("<g><title>{}</title>", escape(&series.name)));
        let runs = series.points.chunk_by(|a, b| drawable(chart, *a) && drawable(chart, *b));
        for run in runs.filter(|run| drawable(chart, run[0])) {
            let run: Vec<Point> = run.iter().map(|point| frame.place(*point)).collect();
            look.line(out, &run);
        }
        out.push("</g>".to_owned());
    }
    out.push("</svg>".to_owned());
    // Symbols on the edge of the plot are drawn whole, hence outside the viewport.
    for Curve { series, look, .. } in curves {
        let inside = series.points.iter().filter(|point| frame.contains(**point));
        look.symbols(out, inside.map(|point| frame.place(*point)));
    }
}

/// Returns the lower and upper edge of the series' band, in pixels, for each stretch of points that
/// has both.
fn bands(chart: &Chart, frame: &Frame, series: &Series) -> Vec<(Vec<Point>, Vec<Point>)> {
    let edges: Vec<(Point, Point)> = (series.points.iter())
        .zip(series.band.iter().flatten())
        .map(|(&(x, _), &(low, high))| ((x, low), (x, high)))
        .collect();
    // The low end may lie below a log axis.
    let drawn = |(low, high): &(Point, Point)| low.1.is_finite() && drawable(chart, *high);
    let stretches = edges.chunk_by(|a, b| drawn(a) && drawn(b)).filter(|edges| drawn(&edges[0]));
    let place = |(low, high): &(Point, Point)| (frame.place(*low), frame.place(*high));
    stretches.map(|stretch| stretch.iter().map(place).unzip()).collect()
}

/// Returns the middle of the pixel, where a line of width one is sharp.
pub(super) fn crisp(position: f64) -> f64 {
    position.floor() + 0.5
}

/// Returns a text element with its baseline at the given point; `anchor` is the part of the text
/// that is placed there.
pub(super) fn text((x, y): Point, style: Type, anchor: &str, content: &str) -> String {
    let Type { size, paint } = style;
    let content = markup(content, size);
    format!(r#"<text x="{x:.2}" y="{y:.2}" font-size="{size}" text-anchor="{anchor}" {paint}>{content}</text>"#)
}
