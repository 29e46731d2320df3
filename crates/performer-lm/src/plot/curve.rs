//! This module draws a series in pixels: it chooses which points are drawn, and as which SVG
//! shapes.

use super::{Color, Series, Style};

/// A `Point` is a position in pixels.
pub(super) type Point = (f64, f64);

/// Lines with at most this many points show a symbol at each.
const FEW: usize = 32;

const PALETTE: [Color; 7] =
    [Color::Blue, Color::Vermillion, Color::Green, Color::Purple, Color::Orange, Color::Sky, Color::Black];

impl Color {
    fn hex(self) -> &'static str {
        match self {
            Self::Blue => "#0072B2",
            Self::Vermillion => "#D55E00",
            Self::Green => "#009E73",
            Self::Purple => "#CC79A7",
            Self::Orange => "#E69F00",
            Self::Sky => "#56B4E9",
            Self::Black => "#000000",
        }
    }
}

/// A `Symbol` marks the points of one series. The number of symbols and the number of colours have
/// no common factor, so that pairs repeat late.
#[derive(Debug, Clone, Copy)]
enum Symbol {
    Circle,
    Square,
    Triangle,
    Diamond,
    Nabla,
    Left,
    Right,
    Cross,
}

const SYMBOLS: [Symbol; 8] = [
    Symbol::Circle,
    Symbol::Square,
    Symbol::Triangle,
    Symbol::Diamond,
    Symbol::Nabla,
    Symbol::Cross,
    Symbol::Left,
    Symbol::Right,
];

/// `Look` is the appearance of a series, in the chart and in its legend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    color: &'static str,
    /// Value of `stroke-dasharray`; `None` if there is no line.
    dash: Option<&'static str>,
    symbol: Symbol,
    symbols: bool,
}

impl Look {
    /// Chooses the appearance of the series at `index` with `drawn` points.
    pub(super) fn new(series: &Series, index: usize, drawn: usize) -> Self {
        const DASHES: [&str; 4] = ["none", "9 4", "2 3.5", "9 3.5 2 3.5"];
        let round = if series.color.is_none() { index / PALETTE.len() } else { 0 };
        Self {
            color: series.color.unwrap_or(PALETTE[index % PALETTE.len()]).hex(),
            dash: match series.style {
                Style::Solid => Some(DASHES[round % DASHES.len()]),
                Style::Dashed => Some(DASHES[1]),
                Style::Dotted => Some(DASHES[2]),
                Style::Points => None,
            },
            symbol: SYMBOLS[index % SYMBOLS.len()],
            symbols: series.style == Style::Points || drawn <= FEW && !series.name.is_empty(),
        }
    }

    /// Draws a line through `run`, or a dot if it is a single point.
    pub(super) fn line(&self, out: &mut Vec<String>, run: &[Point]) {
        let (color, Some(dash)) = (self.color, self.dash) else {
            return;
        };
        if let [(x, y)] = run {
            out.push(format!(r#"<circle cx="{x:.2}" cy="{y:.2}" r="1.5" fill="{color}"/>"#));
            return;
        }
        let points = coordinates(&thin(run));
        out.push(format!(
            r#"<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8" stroke-dasharray="{dash}" stroke-linejoin="round"/>"#
));
    }

    /// Draws the area between two edges with the same x values, or an error bar at each of their
    /// points.
    pub(super) fn band(&self, out: &mut Vec<String>, low: &[Point], high: &[Point]) {
        let color = self.color;
        if self.dash.is_some() && low.len() > 1 {
            let mut edge = thin(high);
            edge.extend(thin(low).into_iter().rev());
            let points = coordinates(&edge);
            out.push(format!(r#"<polygon points="{points}" fill="{color}" fill-opacity="0.16"/>"#));
            return;
        }
        for (&(x, bottom), &(_, top)) in low.iter().zip(high) {
            let (left, right) = (x - 3.5, x + 3.5);
            out.push(format!(
                r#"<path d="M{left:.2} {top:.2}H{right:.2}M{x:.2} {top:.2}V{bottom:.2}M{left:.2} {bottom:.2}H{right:.2}" fill="none" stroke="{color}" stroke-width="1.2"/>"#
));
        }
    }

    /// Draws the symbol of the series at each point, if the series shows symbols.
    pub(super) fn symbols(&self, out: &mut Vec<String>, points: impl IntoIterator<Item = Point>) {
        if !self.symbols {
            return;
        }
        // A white outline separates symbols where they overlap.
        let paint = format!(r##"fill="{}" stroke="#fff" stroke-width="1""##, self.color);
        for (x, y) in points {
            let corners: &[Point] = match self.symbol {
                Symbol::Circle => {
                    out.push(format!(r#"<circle cx="{x:.2}" cy="{y:.2}" r="4.5" {paint}/>"#));
                    continue;
                }
                Symbol::Square => &[(-4.0, -4.0), (4.0, -4.0), (4.0, 4.0), (-4.0, 4.0)],
                Symbol::Triangle => &[(0.0, -5.5), (5.0, 3.5), (-5.0, 3.5)],
                Symbol::Diamond => &[(0.0, -5.8), (5.0, 0.0), (0.0, 5.8), (-5.0, 0.0)],
                Symbol::Nabla => &[(0.0, 5.5), (5.0, -3.5), (-5.0, -3.5)],
                Symbol::Left => &[(-5.5, 0.0), (3.5, 5.0), (3.5, -5.0)],
                Symbol::Right => &[(5.5, 0.0), (-3.5, 5.0), (-3.5, -5.0)],
                Symbol::Cross => &[
                    (-1.7, -5.2),
                    (1.7, -5.2),
                    (1.7, -1.7),
                    (5.2, -1.7),
                    (5.2, 1.7),
                    (1.7, 1.7),
                    (1.7, 5.2),
                    (-1.7, 5.2),
                    (-1.7, 1.7),
                    (-5.2, 1.7),
                    (-5.2, -1.7),
                    (-1.7, -1.7),
                ],
            };
            let corners: Vec<Point> = corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect();
            let points = coordinates(&corners);
            out.push(format!(r#"<polygon points="{points}" {paint} stroke-linejoin="round"/>"#));
        }
    }

    /// Draws a legend sample whose left end is the given point.
    pub(super) fn sample(&self, out: &mut Vec<String>, (x, y): Point, width: f64, banded: bool) {
        let (right, middle) = (x + width, x + width / 2.0);
        if banded && self.dash.is_some() {
            self.band(out, &[(x, y + 6.0), (right, y + 6.0)], &[(x, y - 6.0), (right, y - 6.0)]);
        } else if banded {
            self.band(out, &[(middle, y + 8.0)], &[(middle, y - 8.0)]);
        }
        self.line(out, &[(x, y), (right, y)]);
        self.symbols(out, [(middle, y)]);
    }
}

/// Keeps, of a long run from left to right, the first, lowest, highest and last point of every half
/// pixel, which look the same as all points (M4 aggregation, Jugel et al., VLDB 2014).
fn thin(run: &[Point]) -> Vec<Point> {
    if run.len() < 4096 || !run.is_sorted_by(|a, b| a.0 <= b.0) {
        return run.to_vec();
    }
    let column = |point: &Point| (2.0 * point.0).floor();
    run.chunk_by(|a, b| column(a) == column(b))
        .flat_map(|points| {
            let rank = |i: &usize, j: &usize| points[*i].1.total_cmp(&points[*j].1);
            let low = (0..points.len()).min_by(rank).unwrap_or(0);
            let high = (0..points.len()).max_by(rank).unwrap_or(0);
            let mut kept = vec![0, low, high, points.len() - 1];
            kept.sort_unstable();
            kept.dedup();
            kept.into_iter().map(|i| points[i])
        })
        .collect()
}

fn coordinates(points: &[Point]) -> String {
    let pairs: Vec<String> = points.iter().map(|(x, y)| format!("{x:.2},{y:.2}")).collect();
    pairs.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_outline() {
        let point = |i: usize| (i as f64 / 100.0, ((i * 7919) % 1000) as f64);
        let run: Vec<Point> = (0..10_000).map(point).collect();
        let thinned = thin(&run);
        assert!(thinned.len() <= 4 * 200, "{}", thinned.len());
        assert_eq!((thinned[0], thinned.last()), (run[0], run.last()));
        for half in 0..200 {
            let ys = |run: &[Point]| {
                let column = run.iter().filter(|p| (2.0 * p.0) as usize == half);
                column.fold((f64::MAX, f64::MIN), |(l, h), p| (l.min(p.1), h.max(p.1)))
            };
            assert_eq!(ys(&thinned), ys(&run));
        }
        let backwards: Vec<Point> = run.iter().rev().copied().collect();
        assert_eq!(thin(&backwards), backwards);
    }

    #[test]
    fn many_series_all_look_different() {
        let looks: Vec<String> = (0..28)
            .map(|i| {
                let mut out = Vec::new();
                Look::new(&Series::default(), i, 1000).line(&mut out, &[(0.0, 0.0), (1.0, 1.0)]);
                out.concat()
            })
            .collect();
        let distinct: std::collections::HashSet<&String> = looks.iter().collect();
        assert_eq!(distinct.len(), looks.len());
    }
}
