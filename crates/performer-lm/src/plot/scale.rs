//! This module has the scales of axes: it computes where a value goes along an axis, and which
//! ticks and labels the axis has.

use anyhow::{Result, ensure};

use super::Axis;

/// `Scale` says how values map to positions along an axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences have equal lengths.
    #[default]
    Linear,
    /// Equal ratios have equal lengths; ticks are at powers of ten.
    Log10,
    /// Equal ratios have equal lengths; ticks are at powers of two, labelled 2ᵏ.
    Log2,
}

impl Scale {
    /// Whether `value` has a place on this scale: finite, above zero on a log scale, and so far
    /// from the limits of `f64` that the ends of an axis around such values are finite too.
    pub(super) fn accepts(self, value: f64) -> bool {
        let sized = value.abs() <= 1e250;
        sized && (self == Self::Linear || value >= 1e-250)
    }

    fn forward(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log10 => value.log10(),
            Self::Log2 => value.log2(),
        }
    }

    fn inverse(self, position: f64) -> f64 {
        match self {
            Self::Linear => position,
            Self::Log10 => 10f64.powf(position),
            Self::Log2 => position.exp2(),
        }
    }
}

/// A `Tick` is a tick of an axis; one without a label is a minor tick.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tick {
    pub(super) value: f64,
    pub(super) label: Option<String>,
}

/// A `Ruler` is a scale with its ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ruler {
    scale: Scale,
    /// Ends in scale units, which are values or their logarithms.
    low: f64,
    high: f64,
}

/// Tolerance, in scale units or steps, for a tick that rounding puts just outside the ends.
const SLACK: f64 = 1e-9;

impl Ruler {
    /// Takes the axis's own range, or one around `values` with `padding` (a fraction of the span)
    /// on both sides.
    pub(super) fn new(axis: &Axis, values: impl Iterator<Item = f64>, padding: f64) -> Result<Self> {
        let scale = axis.scale;
        if let Some((low, high)) = axis.range {
            ensure!(
                scale.accepts(low) && scale.accepts(high) && low < high,
                "the range ({low}, {high}) does not fit a {scale:?} scale; give finite ends, low < high{}",
                if scale == Scale::Linear { "" } else { ", both above zero" },
            );
            ensure!(distinct(low, high), "the ends of its range, both about {low}, are too close to tell apart",);
            let (low, high) = (scale.forward(low), scale.forward(high));
            return Ok(Self { scale, low, high });
        }
        let (mut low, mut high) = values
            .filter(|&v| scale.accepts(v))
            .map(|v| scale.forward(v))
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), u| (l.min(u), h.max(u)));
        if low > high {
            (low, high) = (0.0, 1.0);
        } else if !distinct(low, high) {
            let room = match scale {
                Scale::Linear if !distinct(0.0, low.abs()) => 1.0,
                Scale::Linear => 0.05 * low.abs(),
                Scale::Log10 => 0.5,
                Scale::Log2 => 1.0,
            };
            (low, high) = (low - room, high + room);
        }
        let pad = padding * (high - low);
        let (padded_low, padded_high) = (low - pad, high + pad);
        // Padding never takes a linear axis across zero: steps and times are not negative.
        let crosses = |end: f64, padded: f64| {
            scale == Scale::Linear && (end >= 0.0 && padded < 0.0 || end <= 0.0 && padded > 0.0)
        };
        Ok(Self {
            scale,
            low: if crosses(low, padded_low) { 0.0 } else { padded_low },
            high: if crosses(high, padded_high) { 0.0 } else { padded_high },
        })
    }

    /// Returns the position of `value` between the low end (0) and the high end (1). Values without
    /// a place on a log scale are far below the low end; all results are kept within ±1000 so that
    /// drawing coordinates stay small.
    pub(super) fn fraction(&self, value: f64) -> f64 {
        let position = self.scale.forward(value);
        if position.is_nan() {
            return -1e3;
        }
        ((position - self.low) / (self.high - self.low)).clamp(-1e3, 1e3)
    }

    /// Whether `value` is on the axis.
    pub(super) fn contains(&self, value: f64) -> bool {
        self.scale.accepts(value) && (-SLACK..=1.0 + SLACK).contains(&self.fraction(value))
    }

    /// Returns the ticks from low to high, about `target` of them labelled.
    pub(super) fn ticks(&self, target: usize) -> Vec<Tick> {
        let ticks = match self.scale {
            Scale::Linear => return linear_ticks(self.low, self.high, target),
            Scale::Log10 => self.decade_ticks(target),
            Scale::Log2 => self.octave_ticks(target),
        };
        // On less than about a decade or an octave, round numbers read better than the few powers
        // inside.
        let (low, high) = (self.scale.inverse(self.low), self.scale.inverse(self.high));
        // There are half as many: on a log scale, equal steps crowd towards the high end.
        ticks.unwrap_or_else(|| linear_ticks(low, high, target / 2))
    }

    fn octave_ticks(&self, target: usize) -> Option<Vec<Tick>> {
        let powers = (self.low - SLACK).ceil() as i32..=(self.high + SLACK).floor() as i32;
        let count = powers.clone().count();
        let stride = count.div_ceil(target + target / 2).max(1) as i32;
        (count >= 3).then(|| {
            powers
                .map(|k| Tick {
                    value: f64::from(k).exp2(),
                    label: (k % stride == 0).then(|| format!("2{}", superscript(k))),
                })
                .collect()
        })
    }

    fn decade_ticks(&self, target: usize) -> Option<Vec<Tick>> {
        // The marks are every m × 10^k on the axis, m = 1..9.
        let marks: Vec<(i32, i32)> = (self.low.floor() as i32..=self.high.floor() as i32)
            .flat_map(|k| (1..=9).map(move |m| (m, k)))
            .filter(|&(m, k)| {
                let position = f64::from(m).log10() + f64::from(k);
                (self.low - SLACK..=self.high + SLACK).contains(&position)
            })
            .collect();
        let count = |labelled: &[i32]| marks.iter().filter(|(m, _)| labelled.contains(m)).count();
        let labelled: &[i32] = if count(&[1]) >= 3 { &[1] } else { &[1, 2, 5] };
        if count(labelled) < 3 {
            return None;
        }
        let stride = count(&[1]).div_ceil(target + target / 2).max(1) as i32;
        let major = |m, k| labelled.contains(&m) && k % stride == 0;
        let plain = (marks.iter()).all(|&(m, k)| !major(m, k) || (-3..13).contains(&k));
        let label = |m, k| match m {
            _ if plain => decimal(i64::from(m), k),
            1 => format!("10{}", superscript(k)),
            _ => format!("{m}×10{}", superscript(k)),
        };
        let ticks = (marks.iter())
            .filter(|&&(m, _)| stride == 1 || m == 1)
            .map(|&(m, k)| Tick { value: f64::from(m) * 10f64.powi(k), label: major(m, k).then(|| label(m, k)) });
        Some(ticks.collect())
    }
}

/// Whether ticks between `low` and `high` have different labels of a few digits.
fn distinct(low: f64, high: f64) -> bool {
    high - low > (1e-9 * low.abs().max(high.abs())).max(1e-290)
}

fn linear_ticks(low: f64, high: f64, target: usize) -> Vec<Tick> {
    let rough = (high - low) / target as f64;
    let mut k = rough.log10().floor() as i32;
    let m = match rough / 10f64.powi(k) {
        r if r < 1.4 => 1,
        r if r < 3.2 => 2,
        r if r < 7.1 => 5,
        _ => {
            k += 1;
            1
        }
    };
    let step = f64::from(m) * 10f64.powi(k);
    let (first, last) = ((low / step - SLACK).ceil() as i64, (high / step + SLACK).floor() as i64);
    // Ticks are n × 10^k with whole n, so that labels are exact.
    let marks: Vec<i64> = (first..=last).map(|i| i * m as i64).collect();
    let largest = marks.iter().map(|n| n.abs()).max().unwrap_or(0);
    // The exponent of the leading digit: very large or small numbers share one power of ten.
    let lead = k + largest.checked_ilog10().unwrap_or(0) as i32;
    let label = |n: i64| match n {
        0 => "0".to_owned(),
        _ if (-3..15).contains(&lead) => decimal(n, k),
        _ => format!("{}×10{}", decimal(n, k - lead), superscript(lead)),
    };
    marks.into_iter().map(|n| Tick { value: n as f64 * 10f64.powi(k), label: Some(label(n)) }).collect()
}

/// Writes n × 10^k in decimal notation with the digits that `k` calls for; from a thousand up in k,
/// M, G or T where that leaves at most two digits after the point.
fn decimal(n: i64, k: i32) -> String {
    let magnitude = n.unsigned_abs() as f64 * 10f64.powi(k);
    let sign = if n < 0 { "−" } else { "" };
    let suffixes = [(12, "T"), (9, "G"), (6, "M"), (3, "k")];
    if let Some((unit, suffix)) = suffixes.into_iter().find(|&(e, _)| magnitude >= 0.999_999 * 10f64.powi(e))
        && unit - k <= 2
    {
        let digits = (unit - k).max(0) as usize;
        let number = format!("{:.digits$}", magnitude / 10f64.powi(unit));
        let number = if digits > 0 { number.trim_end_matches('0').trim_end_matches('.') } else { &number };
        return format!("{sign}{number}{suffix}");
    }
    let digits = (-k).max(0) as usize;
    format!("{sign}{magnitude:.digits$}")
}

fn superscript(exponent: i32) -> String {
    const DIGITS: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    let raised = |c: char| c.to_digit(10).map_or('⁻', |d| DIGITS[d as usize]);
    exponent.to_string().chars().map(raised).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale, range: (f64, f64)) -> Vec<String> {
        let axis = Axis { label: String::new(), scale, range: Some(range) };
        let ticks = Ruler::new(&axis, std::iter::empty(), 0.0).unwrap().ticks(6);
        ticks.into_iter().filter_map(|tick| tick.label).collect()
    }

    fn fitted(scale: Scale, values: &[f64]) -> Ruler {
        let axis = Axis { scale, ..Axis::default() };
        Ruler::new(&axis, values.iter().copied(), 0.05).unwrap()
    }

    #[test]
    fn labels_are_short_and_exact() {
        use Scale::*;
        for (scale, range, expected) in [
            (Linear, (0.0, 2500.0), "0 500 1k 1.5k 2k 2.5k"),
            (Linear, (0.0, 1.2e6), "0 200k 400k 600k 800k 1M 1.2M"),
            (Linear, (2.94, 3.11), "2.94 2.96 2.98 3.00 3.02 3.04 3.06 3.08 3.10"),
            (Linear, (-1.0, 1.0), "−1.0 −0.5 0 0.5 1.0"),
            (Linear, (1000.0, 1001.0), "1000.0 1000.2 1000.4 1000.6 1000.8 1001.0"),
            (Linear, (0.0, 3e-5), "0 0.5×10⁻⁵ 1.0×10⁻⁵ 1.5×10⁻⁵ 2.0×10⁻⁵ 2.5×10⁻⁵ 3.0×10⁻⁵"),
            (Log10, (0.01, 1e4), "0.01 0.1 1 10 100 1k 10k"),
            (Log10, (1e-5, 1.0), "10⁻⁵ 10⁻⁴ 10⁻³ 10⁻² 10⁻¹ 10⁰"),
            (Log10, (3.0, 60.0), "5 10 20 50"),
            (Log10, (2e-6, 3e-5), "2×10⁻⁶ 5×10⁻⁶ 10⁻⁵ 2×10⁻⁵"),
            (Log10, (2.9, 3.6), "3.0 3.2 3.4 3.6"),
            (Log10, (1e-12, 1e12), "10⁻¹² 10⁻⁹ 10⁻⁶ 10⁻³ 10⁰ 10³ 10⁶ 10⁹ 10¹²"),
            (Log2, (256.0, 4096.0), "2⁸ 2⁹ 2¹⁰ 2¹¹ 2¹²"),
            (Log2, (0.125, 1.0), "2⁻³ 2⁻² 2⁻¹ 2⁰"),
            (Log2, (60.0, 130.0), "60 80 100 120"),
        ] {
            assert_eq!(labels(scale, range).join(" "), expected, "{scale:?} {range:?}");
        }
    }

    #[test]
    fn fraction_runs_from_end_to_end() {
        let axis = Axis { scale: Scale::Log10, range: Some((1.0, 100.0)), ..Axis::default() };
        let ruler = Ruler::new(&axis, std::iter::empty(), 0.0).unwrap();
        assert_eq!([1.0, 10.0, 100.0].map(|v| ruler.fraction(v)), [0.0, 0.5, 1.0]);
        assert_eq!([0.0, -1.0].map(|v| ruler.fraction(v)), [-1000.0; 2]);
        assert!(ruler.contains(100.0) && !ruler.contains(101.0) && !ruler.contains(0.0));
    }

    #[test]
    fn padding_does_not_cross_zero() {
        let ruler = fitted(Scale::Linear, &[0.0, 10.0]);
        assert_eq!((ruler.low, ruler.high), (0.0, 10.5));
        assert_eq!(fitted(Scale::Linear, &[0.1, 10.0]).low, 0.0);
        assert_eq!(fitted(Scale::Linear, &[-10.0, 0.0]).high, 0.0);
        assert!(fitted(Scale::Linear, &[-1.0, 1.0]).low < -1.0);
    }

    #[test]
    fn any_data_give_a_few_ticks() {
        let extremes = [0.0, 1.0, 1.0 + 1e-15, -3.0, 2.978, 5e-324, 1e-250, 1e250, -1e250, f64::MAX, f64::NAN];
        for scale in [Scale::Linear, Scale::Log10, Scale::Log2] {
            for a in extremes {
                for b in extremes {
                    let ruler = fitted(scale, &[a, b]);
                    assert!(ruler.low < ruler.high, "{scale:?} {a} {b}");
                    let ticks = ruler.ticks(6);
                    let labelled = ticks.iter().filter(|tick| tick.label.is_some());
                    assert!((2..=13).contains(&labelled.count()), "{scale:?} {a} {b}: {ticks:?}");
                    let inside = |tick: &Tick| (-1e-6..=1.0 + 1e-6).contains(&ruler.fraction(tick.value));
                    assert!(ticks.iter().all(inside), "{ticks:?}");
                }
            }
        }
    }
}
