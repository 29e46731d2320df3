//! This module measures the bias of kernel estimates that comes from a QR decomposition without its
//! sign correction.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use performer_core::{FeatureMapKind, projection::derive_seed};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::{
    Plan,
    charts::COLORS,
    estimator::Estimator,
    set::{gaussian, moments},
    spread::Spread,
};
use crate::{
    lab::{Section, Table},
    plot::{At, Axis, Chart, Marker, Scale, Series, Style},
};

/// The head dimensions that are measured.
const DIMS: [usize; 4] = [8, 16, 32, 64];

/// `‖x + y‖²/√D`, which is 2 on average for independent unit normal queries and keys. It is smaller
/// here, so that the draws suffice to measure the bias.
const LENGTH: f64 = 0.5;

/// Measures the relative bias of estimates by `D` rows for `x + y` in this direction: 1 for
/// `(1, …, 1)`, −1 for its opposite.
fn bias(plan: &Plan, estimator: &Estimator, d: usize, sign: f64) -> Result<Spread> {
    // Query and key are half of x + y each: relative to the kernel, an estimate by positive
    // features depends on x + y alone.
    let square = LENGTH * (d as f64).sqrt();
    let entry = 0.5 * sign * (square / d as f64).sqrt();
    let row = Tensor::full(entry, (1, d), &Device::Cpu)?.to_dtype(DType::F64)?;
    let [q, k, _] = gaussian(2, d, 0)?;
    let moments = moments(&q, &k)?;
    let one = |draw: usize| -> Result<f64> {
        let map = estimator.build(d, d, derive_seed(plan.seed, draw as u64), &moments)?;
        let kernel = map.kernel(&row, &row)?.flatten_all()?.to_vec1::<f64>()?[0];
        Ok(kernel / (0.25 * square).exp() - 1.0)
    };
    let draws = (plan.kernel_draws / 4).max(2);
    let all: Vec<f64> = (0..draws).into_par_iter().map(one).collect::<Result<_>>()?;
    Ok(Spread::of(all))
}

/// Measures the bias over the head dimension.
pub(super) fn unsigned(plan: &Plan) -> Result<(Section, Value)> {
    let estimators = [
        ("QR unsigned", Estimator::orthogonal("", FeatureMapKind::Positive).unsigned(), COLORS[1]),
        ("signs corrected", Estimator::orthogonal("", FeatureMapKind::Positive), COLORS[0]),
    ];
    let mut series = Vec::new();
    let mut table = Table::new(["rows, direction of x + y".to_string()]);
    table.header.extend(DIMS.map(|d| format!("D={d}")));
    let mut data = Vec::new();
    let mut largest = [(0.0f64, 0.0f64, 0); 2];
    for (at, (name, estimator, color)) in estimators.iter().enumerate() {
        for (direction, sign) in [("(1, …, 1)", 1.0), ("−(1, …, 1)", -1.0)] {
            let name = format!("{name}, {direction}");
            let spreads = DIMS.map(|d| bias(plan, estimator, d, sign));
            let mut cells = vec![name.clone()];
            let (mut points, mut band) = (Vec::new(), Vec::new());
            for (d, spread) in DIMS.into_iter().zip(spreads) {
                let spread = spread?;
                let (mean, error) = (spread.mean, spread.error());
                let largest = &mut largest[at];
                if mean.abs() > largest.0.abs() {
                    *largest = (mean, error, d);
                }
                cells.push(format!("{:+.1}% ± {:.1}%", 100.0 * mean, 100.0 * error));
                points.push((d as f64, 100.0 * mean));
                band.push((100.0 * (mean - 2.0 * error), 100.0 * (mean + 2.0 * error)));
                data.push(json!({ "rows": name, "head_dim": d, "bias": spread }));
            }
            table.push(cells);
            let style = if sign > 0.0 { Style::Solid } else { Style::Dashed };
            series.push(Series { band: Some(band), style, color: Some(*color), ..Series::new(name, points) });
        }
    }
    let [(biased, _, dim), (rest, error, rest_dim)] = largest;
    let text = vec![format!(
        "The usual implementations take orthogonal rows from a library's QR decomposition as they come. Its signs depend on the matrix: Q's \
         diagonal leans to one side, and estimates of e^(x·y) with it, for x + y along (1, …, 1) or against it, ‖x + y‖² = √D/2 and M = D rows \
         here. The largest bias is {:+.1}%, at D={dim}. With Q's columns multiplied by the signs of R's diagonal, which costs nothing, the largest \
         deviation is {:+.1}% (D={rest_dim}), {:.1} standard errors.",
        100.0 * biased,
        100.0 * rest,
        rest.abs() / error
    )];
    let chart = Chart {
        title: "QR without its sign correction: bias of the kernel estimate".into(),
        subtitle: Some("bands: two standard errors".into()),
        x: Axis::new("head dimension D", Scale::Log2),
        y: Axis::new("bias of the estimate of e^(x·y) (%)", Scale::Linear),
        series,
        lines: vec![Marker { at: At::Y(0.0), label: "unbiased".into() }],
    };
    let title = "Orthogonal rows need their signs corrected".to_string();
    Ok((Section { title, text, chart: Some(("unsigned".into(), chart)), table: Some(table) }, data.into()))
}
