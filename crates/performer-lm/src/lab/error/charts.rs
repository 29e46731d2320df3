//! This module draws and formats errors in the same way for every section.

use super::spread::Spread;
use crate::plot::{Color, Series, Style};

/// Colours in the order of series.
pub(crate) const COLORS: [Color; 7] =
    [Color::Blue, Color::Vermillion, Color::Green, Color::Purple, Color::Orange, Color::Sky, Color::Black];

/// Draws medians as a line in a band from quartile to quartile, and means dashed in the same
/// colour.
pub(crate) fn curve(name: &str, color: Color, points: &[(f64, Spread)]) -> [Series; 2] {
    let medians = points.iter().map(|(x, spread)| (*x, spread.median));
    let means = points.iter().map(|(x, spread)| (*x, spread.mean));
    let band = points.iter().map(|(_, spread)| spread.quartiles).collect();
    [
        Series { color: Some(color), band: Some(band), ..Series::new(name, medians) },
        Series { color: Some(color), style: Style::Dashed, ..Series::new("", means) },
    ]
}

/// Describes what [`curve`] draws, for a subtitle.
pub(crate) fn legend(draws: usize) -> String {
    format!("lines: medians over {draws} draws, bands: quartiles, dashed: means")
}

/// Formats a number with about three digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if !(1e-3..1e4).contains(&size) => format!("{value:.2e}"),
        size if size < 0.1 => format!("{value:.4}"),
        size if size < 10.0 => format!("{value:.3}"),
        _ => format!("{value:.0}"),
    }
}

/// Formats a change as a signed percentage.
pub(crate) fn change(value: f64) -> String {
    let percent = (100.0 * value).round();
    if percent == 0.0 { "0%".into() } else { format!("{percent:+.0}%") }
}

/// Joins names: `a`, `a and b`, `a, b and c`.
pub(crate) fn list(names: &[String]) -> String {
    match names {
        [] => "none".into(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}
