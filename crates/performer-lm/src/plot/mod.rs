//! This module draws line charts as SVG and PNG: loss curves, timings over sequence length, errors
//! over feature counts.
//!
//! A [`Chart`] is plain data; [`Chart::save`] writes it as `stem.svg` and `stem.png`. The PNG is a
//! rendering of that SVG with an embedded font (Latin, Greek and Cyrillic), so charts need no fonts
//! and no display on the machine that makes them, and look alike everywhere. Colours are those of
//! Okabe and Ito, which colour-blind readers can tell apart; dashes and point symbols distinguish
//! series without colour.
//!
//! ```
//! use performer_lm::plot::{Axis, Chart, Scale, Series};
//!
//! let chart = Chart {
//!     title: "Time per forward pass".into(),
//!     x: Axis::new("sequence length T (tokens)", Scale::Log2),
//!     y: Axis::new("time (ms)", Scale::Log10),
//!     series: vec![
//!         Series::new("softmax", [(512.0, 0.8), (1024.0, 2.9), (2048.0, 11.3)]),
//!         Series::new("favor M=128", [(512.0, 1.1), (1024.0, 2.2), (2048.0, 4.4)]),
//!     ],
//!     ..Chart::default()
//! };
//! assert!(chart.to_svg()?.contains("favor M=128"));
//! # anyhow::Ok(())
//! ```

mod curve;
mod reference;
mod scale;
mod svg;
mod text;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use resvg::tiny_skia::{Pixmap, Transform};

pub use scale::Scale;
pub(crate) use text::escape;

/// A `Chart` shows lines or points over two axes, on 1000 × 600 pixels (taller only when the legend
/// or the labels of vertical reference lines need it).
#[derive(Debug, Clone, Default)]
pub struct Chart {
    /// Heading; empty for none.
    pub title: String,
    /// A smaller line under the heading, such as dataset, model or number of seeds.
    pub subtitle: Option<String>,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The series, in legend order; later series are drawn over earlier ones.
    pub series: Vec<Series>,
    /// Reference lines.
    pub lines: Vec<Marker>,
}

/// An `Axis` is an axis of a [`Chart`].
#[derive(Debug, Clone, Default)]
pub struct Axis {
    /// Name of the quantity, with its unit: `"time (ms)"`. Superscript characters are drawn as
    /// superscripts.
    pub label: String,
    /// How values map to positions.
    pub scale: Scale,
    /// Low and high end; `None` fits the axis to the data (the y axis to the data within the x
    /// range).
    pub range: Option<(f64, f64)>,
}

impl Axis {
    /// Makes an axis that fits its data.
    pub fn new(label: impl Into<String>, scale: Scale) -> Self {
        Self { label: label.into(), scale, range: None }
    }
}

/// A `Series` is a named sequence of points.
///
/// Points that cannot be drawn (not finite, or not above zero on a log axis) are skipped and break
/// the line.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// Name in the legend. A series with an empty name is not in the legend and its line has no
    /// symbols; it accompanies another series.
    pub name: String,
    /// The points `(x, y)`, in drawing order.
    pub points: Vec<(f64, f64)>,
    /// `(low, high)` for each point, such as the spread over seeds: a shaded band along a line,
    /// error bars on [`Style::Points`]. On a log axis a low end of zero or below extends down to
    /// the axis.
    pub band: Option<Vec<(f64, f64)>>,
    /// How the points are drawn.
    pub style: Style,
    /// The colour. `None` takes the palette in turn, and dashes lines of [`Style::Solid`] once
    /// every colour is used. Give related series the same colour and different styles.
    pub color: Option<Color>,
}

impl Series {
    /// Makes a solid line in the next colour, without a band.
    pub fn new(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self { name: name.into(), points: points.into_iter().collect(), ..Self::default() }
    }

    /// Makes a line of the means of several curves, such as those of several seeds, at the x that
    /// all of them have, with a band from the smallest to the largest value. A single curve has no
    /// band.
    pub fn over_seeds(name: impl Into<String>, curves: &[Vec<(f64, f64)>]) -> Self {
        let at = |x: f64, curve: &Vec<(f64, f64)>| curve.iter().find(|point| point.0 == x).map(|point| point.1);
        let of_all = |x: f64| curves.iter().map(|curve| at(x, curve)).collect::<Option<Vec<f64>>>();
        let first = curves.first().into_iter().flatten();
        let shared: Vec<(f64, Vec<f64>)> = first.filter_map(|&(x, _)| Some((x, of_all(x)?))).collect();
        let range = |values: &[f64]| {
            let fold = |f: fn(f64, f64) -> f64, start| values.iter().copied().fold(start, f);
            (fold(f64::min, f64::INFINITY), fold(f64::max, f64::NEG_INFINITY))
        };
        let band = (curves.len() > 1).then(|| shared.iter().map(|(_, values)| range(values)).collect());
        let mean = |(x, values): &(f64, Vec<f64>)| (*x, values.iter().sum::<f64>() / values.len() as f64);
        Self { band, ..Self::new(name, shared.iter().map(mean)) }
    }
}

/// `Style` says how a [`Series`] is drawn. Lines of few points (at most 32) also show symbols,
/// another one for each series.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Style {
    /// A continuous line.
    #[default]
    Solid,
    /// A line of dashes.
    Dashed,
    /// A line of dots.
    Dotted,
    /// Symbols without a line.
    Points,
}

/// `Color` has the colours of Okabe and Ito ("Color Universal Design", 2008) that are visible on
/// white.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Color {
    /// `#0072B2`
    Blue,
    /// `#D55E00`
    Vermillion,
    /// `#009E73`
    Green,
    /// `#CC79A7`
    Purple,
    /// `#E69F00`
    Orange,
    /// `#56B4E9`
    Sky,
    /// `#000000`
    Black,
}

/// A `Marker` is a reference line across the chart. An axis that fits its data includes it; it is
/// left out where a given range does not contain it or the scale has no place for it.
#[derive(Debug, Clone)]
pub struct Marker {
    /// Position of the line.
    pub at: At,
    /// Label, written outside the plot at the line's end.
    pub label: String,
}

/// `At` is the position and direction of a [`Marker`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum At {
    /// A vertical line at this x.
    X(f64),
    /// A horizontal line at this y.
    Y(f64),
}

/// Number of PNG pixels per SVG pixel, in each direction.
const PNG_SCALE: f32 = 2.0;

/// Refuses a stem at which [`Chart::save`] would replace what is no chart of this program.
///
/// # Errors
/// If there is such a file, the folder cannot be written to, or `stem` ends in no name; the message
/// says which.
#[cfg(feature = "cli")]
pub(crate) fn require_own(stem: &Path) -> Result<()> {
    let name = stem.file_name().with_context(|| format!("no file name for the chart in {:?}", stem.display()))?;
    let folder = stem.parent().filter(|folder| !folder.as_os_str().is_empty());
    crate::files::require_writable(folder.unwrap_or(Path::new(".")))?;
    let [svg, png] = paths(stem, name);
    let foreign = match std::fs::read(&svg) {
        Ok(found) => (!svg::is_own(&found)).then_some(svg),
        // A chart's SVG is written before its PNG.
        Err(_) => [svg, png].into_iter().find(|path| path.exists()),
    };
    match foreign {
        Some(path) => anyhow::bail!(
            "{} is no chart of this program, and would be replaced: choose another place for the chart, or remove the file first",
            path.display()
        ),
        None => Ok(()),
    }
}

/// Returns the paths of the two files of a chart. The extension is appended and replaces nothing:
/// "favor-0.5" keeps its ".5".
fn paths(stem: &Path, name: &OsStr) -> [PathBuf; 2] {
    [".svg", ".png"].map(|extension| {
        let mut name = name.to_owned();
        name.push(extension);
        stem.with_file_name(name)
    })
}

impl Chart {
    /// Returns the chart as an SVG document.
    ///
    /// # Errors
    /// If a given axis range is empty, not finite or not above zero on a log scale, or if a band
    /// does not have one pair per point.
    pub fn to_svg(&self) -> Result<String> {
        svg::render(self).with_context(|| format!("cannot draw the chart {:?}", self.title))
    }

    /// Returns the chart as a PNG image: [`to_svg`](Self::to_svg) rendered at twice its size.
    ///
    /// # Errors
    /// As [`to_svg`](Self::to_svg).
    pub fn to_png(&self) -> Result<Vec<u8>> {
        rasterise(&self.to_svg()?, PNG_SCALE)
    }

    /// Writes `stem.svg` and `stem.png`, creating the folder if need be, and returns their paths. A
    /// file appears under its name only when it is complete.
    ///
    /// # Errors
    /// As [`to_svg`](Self::to_svg), if `stem` ends in no name, or if a file cannot be written.
    pub fn save(&self, stem: &Path) -> Result<[PathBuf; 2]> {
        self.save_at(stem, PNG_SCALE)
    }

    /// Does what [`save`](Self::save) does, with a PNG of `scale` pixels per SVG pixel: 1 where
    /// many charts are kept together.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_at(&self, stem: &Path, scale: f32) -> Result<[PathBuf; 2]> {
        let name = stem.file_name().with_context(|| format!("no file name for the chart in {:?}", stem.display()))?;
        let svg = self.to_svg()?;
        let png = rasterise(&svg, scale)?;
        let paths = paths(stem, name);
        for (path, bytes) in paths.iter().zip([svg.as_bytes(), &png]) {
            crate::files::write(path, bytes)
                .with_context(|| format!("cannot write the chart to {}", path.display()))?;
        }
        Ok(paths)
    }
}

fn rasterise(svg: &str, scale: f32) -> Result<Vec<u8>> {
    let tree = text::parse(svg).context("the chart is not a readable SVG document")?;
    let size = tree.size().to_int_size().scale_by(scale).context("the chart has no size")?;
    let mut pixmap = Pixmap::new(size.width(), size.height())
        .with_context(|| format!("no image of {} × {} pixels", size.width(), size.height()))?;
    resvg::render(&tree, Transform::from_scale(scale, scale), &mut pixmap.as_mut());
    pixmap.encode_png().context("cannot encode the chart as PNG")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Series>) -> Chart {
        Chart {
            title: "Title".into(),
            x: Axis::new("step", Scale::Linear),
            y: Axis::new("loss (nats/token)", Scale::Linear),
            series,
            ..Chart::default()
        }
    }

    /// Returns the SVG, after a check that it is a readable document of finite numbers.
    fn svg(chart: &Chart) -> String {
        let svg = chart.to_svg().unwrap();
        text::parse(&svg).unwrap();
        assert!(!svg.contains("NaN") && !svg.contains("inf,") && !svg.contains(",inf"), "{svg}");
        svg
    }

    /// A run that lost the beginning of its log is averaged with others where both have points.
    #[test]
    fn curves_of_seeds_meet_where_all_have_a_point() {
        let curves = [vec![(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)], vec![(2.0, 2.0), (3.0, 1.0), (4.0, 0.0)]];
        let joined = Series::over_seeds("both", &curves);
        assert_eq!(joined.points, [(2.0, 3.0), (3.0, 2.0)]);
        assert_eq!(joined.band, Some(vec![(2.0, 4.0), (1.0, 3.0)]));
        let alone = Series::over_seeds("one", &curves[..1]);
        assert_eq!((alone.points, alone.band), (curves[0].clone(), None));
        assert!(Series::over_seeds("none", &[]).points.is_empty());
    }

    #[test]
    fn names_and_draws_every_series() {
        let names = ["softmax", "favor M=64", "favor M=128"];
        let series = names.map(|name| Series::new(name, [(0.0, 3.0), (1.0, 2.0)]));
        let mut chart = chart(series.to_vec());
        chart.series[2].band = Some(vec![(2.9, 3.1), (1.9, 2.1)]);
        chart.lines = vec![
            Marker { at: At::X(0.5), label: "warm-up".into() },
            Marker { at: At::Y(7.0), label: "uniform".into() },
        ];
        let svg = svg(&chart);
        for name in names.iter().chain(&["Title", "loss (nats/token)", "warm-up", "uniform"]) {
            assert!(svg.contains(&format!(">{name}</text>")), "{name}");
        }
        // Every line is in the legend and in the plot, and so is the band.
        assert_eq!(svg.matches("<polyline").count(), 6);
        assert_eq!(svg.matches("fill-opacity").count(), 2);
        assert!(svg.contains(">7</text>"), "the axis reaches the reference line");
    }

    #[test]
    fn png_is_the_svg_at_twice_its_size() {
        let png = chart(vec![Series::new("a", [(0.0, 1.0), (1.0, 1.0)])]).to_png().unwrap();
        assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!([&png[16..20], &png[20..24]], [2000u32, 1200].map(u32::to_be_bytes));
        let image = Pixmap::decode_png(&png).unwrap();
        let count = |rows: std::ops::Range<u32>, wanted: &dyn Fn(u8, u8, u8) -> bool| {
            let pixels = &image.pixels()[(rows.start * 2000) as usize..(rows.end * 2000) as usize];
            pixels.iter().filter(|p| wanted(p.red(), p.green(), p.blue())).count()
        };
        let blue = count(200..1100, &|r, g, b| (r, g, b) == (0x00, 0x72, 0xB2));
        assert!(blue > 3000, "a line across the plot, not {blue} pixels");
        let ink = count(40..90, &|r, g, b| r.max(g).max(b) < 0x60);
        assert!(ink > 200, "the title in the embedded font, not {ink} pixels");
    }

    #[test]
    fn escapes_user_text() {
        let name = "a<b> & \"c\" 'd' \u{1b}[0m \0";
        let mut chart = chart(vec![Series::new(name, [(0.0, 1.0)])]);
        chart.title = name.into();
        chart.subtitle = Some(name.into());
        chart.x.label = name.into();
        chart.lines = vec![Marker { at: At::X(0.0), label: name.into() }];
        let svg = svg(&chart);
        assert!(svg.contains("a&lt;b&gt; &amp; &quot;c&quot; &apos;d&apos; \u{FFFD}[0m \u{FFFD}"));
        assert!(!svg.contains("<b>"));
    }

    #[test]
    fn points_without_a_place_break_the_line() {
        let points = [1.0, 2.0, f64::NAN, 3.0, 4.0, f64::INFINITY, 5.0, 0.0, -1.0, f64::MAX];
        let points = points.iter().enumerate().map(|(i, &y)| (i as f64, y));
        let mut chart = chart(vec![Series::new("a", points)]);
        // The lines are the legend's sample, two stretches of points, and the stretch 5, 0, −1;
        // `f64::MAX` is beyond every scale.
        assert_eq!(svg(&chart).matches("<polyline").count(), 4);
        chart.y.scale = Scale::Log10;
        let log = svg(&chart);
        assert_eq!(log.matches("<polyline").count(), 3);
        assert_eq!(log.matches(r#"r="4.5""#).count(), 1 + 5, "a symbol for each of 1, 2, 3, 4, 5");
        assert!(!log.contains("no data"));
    }

    #[test]
    fn bands_skip_gaps_and_reach_below_a_log_axis() {
        let mut series = Series::new("a", (1..=7).map(|i| (f64::from(i), 1.0)));
        let mut band = vec![(0.5, 2.0); 7];
        (band[1].0, band[2].0, band[5].1) = (-0.1, f64::NAN, f64::INFINITY);
        series.band = Some(band);
        let mut chart = chart(vec![series]);
        chart.y.scale = Scale::Log10;
        let svg = svg(&chart);
        assert_eq!(svg.matches("fill-opacity").count(), 3, "legend, 1 to 2, 4 to 5");
        assert_eq!(svg.matches(r#"stroke-width="1.2""#).count(), 1, "7, alone: an error bar");
    }

    #[test]
    fn empty_charts_say_so() {
        assert!(svg(&Chart::default()).contains(">no data</text>"));
        let mut chart = chart(vec![Series::new("a", []), Series::new("b", [(0.0, -1.0)])]);
        let svg_ = svg(&chart);
        assert!(svg_.contains(">a (no data)</text>") && !svg_.contains(">no data</text>"));
        chart.y.scale = Scale::Log2;
        assert!(svg(&chart).contains(">no data</text>"));
    }

    #[test]
    fn errors_name_the_culprit() {
        let mut chart = chart(vec![Series::new("favor", [(0.0, 1.0), (1.0, 2.0)])]);
        chart.series[0].band = Some(vec![(0.0, 1.0)]);
        let error = format!("{:#}", chart.to_svg().unwrap_err());
        assert!(error.contains("\"Title\"") && error.contains("\"favor\" has 2 points"), "{error}");
        chart.series[0].band = None;
        for (scale, range) in
            [(Scale::Linear, (1.0, 1.0)), (Scale::Linear, (0.0, f64::NAN)), (Scale::Log10, (0.0, 1.0))]
        {
            chart.y = Axis { label: String::new(), scale, range: Some(range) };
            let error = format!("{:#}", chart.to_svg().unwrap_err());
            assert!(error.contains("y axis: the range ("), "{error}");
        }
    }

    #[test]
    fn a_long_legend_grows_the_chart() {
        let series = |i| Series::new(format!("a rather long series name {i}"), [(0.0, 1.0)]);
        let svg = svg(&chart((0..100).map(series).collect()));
        assert!(svg.contains(">a rather long series name 99</text>"));
        let size = text::parse(&svg).unwrap().size();
        assert!(size.width() == 1000.0 && size.height() > 700.0, "{size:?}");
    }

    #[test]
    fn saves_both_files_whole() {
        let folder = tempfile::tempdir().unwrap();
        let mut chart = chart(vec![Series::new("a", [(0.0, 1.0)])]);
        let stem = folder.path().join("new/favor-0.5");
        chart.save(&stem).unwrap();
        chart.title = "Second".into();
        let [svg, png] = chart.save(&stem).unwrap();
        assert_eq!(svg, folder.path().join("new/favor-0.5.svg"));
        assert_eq!(std::fs::read_to_string(svg).unwrap(), chart.to_svg().unwrap());
        assert_eq!(std::fs::read(png).unwrap(), chart.to_png().unwrap());
        assert_eq!(std::fs::read_dir(folder.path().join("new")).unwrap().count(), 2);
        assert!(chart.save(Path::new("..")).is_err());
    }
}
