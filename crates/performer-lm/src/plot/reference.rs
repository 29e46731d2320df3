//! This module draws reference lines, with labels outside the plot so that no label covers data.

use super::scale::Ruler;
use super::svg::{Frame, NOTE, PAGE_WIDTH, crisp, text};
use super::text::{fit, width};
use super::{At, Marker};

/// Labels of more pixels than this are shortened.
const WIDEST: f64 = 240.0;
/// Height of a row of labels above vertical lines.
const FLAG_ROW: f64 = 17.0;
/// The least distance between labels beside horizontal lines.
const SIDE_ROW: f64 = 15.0;
/// The distance between a line and its label.
const GAP: f64 = 4.0;

/// A `Flag` is the label of a vertical line: to the right of the line's top or, if there is no
/// room, to the left.
pub(super) struct Flag {
    x: f64,
    /// Left and right end of the label.
    span: (f64, f64),
    /// Row, counted upwards from the lowest.
    row: usize,
    label: String,
}

impl Flag {
    /// Arranges the labels of the vertical lines that `px` places, in rows such that no label
    /// covers another, or a line that reaches up through its row.
    pub(super) fn arrange(lines: &[Marker], px: impl Fn(f64) -> Option<f64>) -> Vec<Self> {
        let mut placed: Vec<(f64, String)> = (lines.iter())
            .filter_map(|line| match line.at {
                At::X(x) => Some((px(x)?, fit(&line.label, NOTE.size, WIDEST))),
                At::Y(_) => None,
            })
            .collect();
        placed.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut flags: Vec<Self> = Vec::with_capacity(placed.len());
        for (x, label) in placed {
            let reach = width(&label, NOTE.size) + 2.0 * GAP;
            let fits = x + reach < PAGE_WIDTH;
            let span = if fits { (x, x + reach) } else { (x - reach, x) };
            let meets = |flag: &&Self| flag.span.0 < span.1 && span.0 < flag.span.1;
            let row = flags.iter().filter(meets).map(|flag| flag.row + 1).max().unwrap_or(0);
            flags.push(Self { x, span, row, label });
        }
        flags
    }

    /// Returns the height of the rows that `flags` take.
    pub(super) fn height(flags: &[Self]) -> f64 {
        let rows = flags.iter().map(|flag| flag.row + 1).max().unwrap_or(0);
        FLAG_ROW * rows as f64
    }
}

/// A `Side` is the label beside a horizontal line at `y`.
pub(super) struct Side {
    y: f64,
    label: String,
}

impl Side {
    /// Collects the labels of the horizontal lines on the axis.
    pub(super) fn collect(lines: &[Marker], axis: &Ruler) -> Vec<Self> {
        let side = |line: &Marker| match line.at {
            At::Y(y) if axis.contains(y) => Some(Self { y, label: fit(&line.label, NOTE.size, WIDEST) }),
            _ => None,
        };
        let mut sides: Vec<Self> = lines.iter().filter_map(side).collect();
        sides.sort_by(|a, b| b.y.total_cmp(&a.y));
        sides
    }

    /// Returns the width of the margin that `sides` need beyond the plot.
    pub(super) fn width(sides: &[Self]) -> f64 {
        let widths = sides.iter().map(|side| width(&side.label, NOTE.size) + 2.0 * GAP);
        widths.fold(0.0, f64::max)
    }
}

/// Draws the lines and their labels.
pub(super) fn draw(out: &mut Vec<String>, frame: &Frame, flags: &[Flag], sides: &[Side]) {
    let &Frame { left, right, top, bottom, .. } = frame;
    let mut lines = String::new();
    for Flag { x, span, row, label } in flags {
        let y = top - 7.0 - *row as f64 * FLAG_ROW;
        lines += &format!("M{} {bottom}V{:.2}", crisp(*x), y - 9.0);
        out.push(if span.0 < *x {
            text((x - GAP, y), NOTE, "end", label)
        } else {
            text((x + GAP, y), NOTE, "start", label)
        });
    }
    let mut baseline = f64::NEG_INFINITY;
    for Side { y, label } in sides {
        let y = crisp(frame.py(*y));
        lines += &format!("M{left} {y}H{right:.2}");
        baseline = (y + NOTE.drop()).max(baseline + SIDE_ROW);
        out.push(text((right + 2.0 * GAP, baseline), NOTE, "start", label));
    }
    if !lines.is_empty() {
        out.push(format!(
            r##"<path d="{lines}" fill="none" stroke="#777" stroke-width="1.2" stroke-dasharray="5 3"/>"##
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_leave_each_other_room() {
        let at = [100.0, 130.0, 135.0, 300.0, 940.0, 990.0];
        let lines = at.map(|x| Marker { at: At::X(x), label: format!("parity at {x}") });
        let flags = Flag::arrange(&lines, Some);
        assert_eq!(flags.len(), at.len());
        for (i, a) in flags.iter().enumerate() {
            assert!(a.span.0 >= 0.0 && a.span.1 <= PAGE_WIDTH);
            for b in &flags[..i] {
                let apart = a.span.1 <= b.span.0 || b.span.1 <= a.span.0;
                assert!(apart || a.row != b.row, "labels at {} and {}", a.x, b.x);
                // A line rises through all rows below its own label.
                let crosses = a.span.0 < b.x && b.x < a.span.1 && b.row >= a.row;
                assert!(!crosses, "the line at {} through the label at {}", b.x, a.x);
            }
        }
        let lone = flags.iter().find(|flag| flag.x == 300.0).unwrap();
        assert_eq!(lone.row, 0);
        let rows = flags.iter().map(|flag| flag.row).max().unwrap() + 1;
        assert_eq!(Flag::height(&flags), rows as f64 * FLAG_ROW);
    }
}
