//! This module asks which refinements are worth it: it compares each with plain FAVOR+ at equal
//! cost, and derives a verdict from the numbers.

use anyhow::Result;
use performer_core::{FeatureMapKind, ProjectionKind, Radii};
use serde_json::{Value, json};

use super::{
    Plan,
    charts::{self, change, number},
    estimator::Estimator,
    problem::Errors,
    set::Set,
    spread::Spread,
};
use crate::lab::{Section, Table};

/// Number of features of a variant, unless it needs more.
const FEATURES: usize = 128;

/// The most features of a variant. Maps that have products of a query's numbers have no more.
const MOST: usize = 1 << 14;

/// Number of draws that are averaged to measure redraws.
const REDRAWS: usize = 4;

/// The share of the error that a difference must reach to count; it must also exceed three standard
/// errors.
const NOTABLE: f64 = 0.05;

const BASELINE: Estimator = Estimator::orthogonal("positive, orthogonal, chi lengths", FeatureMapKind::Positive);

fn variants() -> Vec<Estimator> {
    use FeatureMapKind::{Dense, HermiteTail, Hyperbolic, Optimal, Positive};
    let positive = |name| Estimator::orthogonal(name, Positive);
    vec![
        positive("independent rows").drawn(ProjectionKind::Gaussian, Radii::Chi),
        positive("Hadamard rows").drawn(ProjectionKind::Hadamard, Radii::Chi),
        positive("QR without signs").unsigned(),
        positive("lengths √D").drawn(ProjectionKind::Orthogonal, Radii::Sqrt),
        positive("lengths by quantiles").drawn(ProjectionKind::Orthogonal, Radii::Quantile),
        Estimator::orthogonal("hyperbolic", Hyperbolic),
        positive("centring").fitted(true, false),
        Estimator::orthogonal("FAVOR++", Optimal).fitted(false, false),
        Estimator::orthogonal("FAVOR++ and centring", Optimal).fitted(true, false),
        Estimator::orthogonal("FAVOR#", Dense).fitted(false, false),
        Estimator::orthogonal("FAVOR# and centring", Dense).fitted(true, false),
        Estimator::orthogonal("FAVOR#, centring, balance", Dense).fitted(true, true),
        Estimator::orthogonal("FAVOR#, centring, lengths √D", Dense)
            .fitted(true, false)
            .drawn(ProjectionKind::Orthogonal, Radii::Sqrt),
        Estimator::orthogonal("Taylor-2 + random tail", HermiteTail),
    ]
}

/// `Compared` holds the change of errors from plain features to a variant of equal cost.
struct Compared {
    features: usize,
    rows: Change,
    output: Change,
}

/// A `Change` says how an error changed, measured by draws that share their seeds.
#[derive(Clone, Copy)]
struct Change {
    value: f64,
    /// The change relative to the baseline.
    relative: f64,
    /// Standard error of the relative change.
    error: f64,
}

impl Change {
    fn of(variant: &[Errors], baseline: &[Errors], part: fn(&Errors) -> f64) -> Self {
        let mean = |errors: &[Errors]| errors.iter().map(part).sum::<f64>() / errors.len() as f64;
        let base = mean(baseline);
        let differences = variant.iter().zip(baseline).map(|(v, b)| (part(v) - part(b)) / base);
        let difference = Spread::of(differences);
        Self { value: mean(variant), relative: difference.mean, error: difference.error() }
    }

    /// Returns −1 for better, 1 for worse, 0 for a difference that does not count.
    fn sign(self) -> i32 {
        let counts = self.relative.abs() >= NOTABLE && self.relative.abs() > 3.0 * self.error;
        if counts { self.relative.signum() as i32 } else { 0 }
    }

    fn cells(self) -> [String; 2] {
        [number(self.value), format!("{} ± {:.0}%", change(self.relative), 100.0 * self.error)]
    }

    fn json(self) -> Value {
        json!({ "mean": self.value, "change": self.relative, "standard_error": self.error })
    }
}

impl Compared {
    fn of(features: usize, variant: &[Errors], baseline: &[Errors]) -> Self {
        Self {
            features,
            rows: Change::of(variant, baseline, |e| e.rows),
            output: Change::of(variant, baseline, |e| e.output),
        }
    }

    fn verdict(&self) -> Verdict {
        let (rows, output) = (self.rows.sign(), self.output.sign());
        // One measure decides only if the other does not point the other way, even if uncertainly.
        let not_against = |sign: f64| [self.rows, self.output].iter().all(|c| sign * c.relative < NOTABLE);
        match rows + output {
            0 if rows == 0 && [self.rows, self.output].iter().all(|c| c.relative.abs() < NOTABLE) => Verdict::Same,
            0 if rows == 0 => Verdict::Uncertain,
            sum if sum < 0 && not_against(1.0) => Verdict::Better,
            sum if sum > 0 && not_against(-1.0) => Verdict::Worse,
            _ => Verdict::Mixed,
        }
    }

    fn cells(&self) -> [String; 4] {
        let ([rows, rows_change], [output, output_change]) = (self.rows.cells(), self.output.cells());
        [rows, rows_change, output, output_change]
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Verdict {
    Better,
    Same,
    Worse,
    Mixed,
    /// A large difference that the draws do not make certain.
    Uncertain,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Better => "worth it",
            Self::Same => "no difference",
            Self::Worse => "worse",
            Self::Mixed => "mixed",
            Self::Uncertain => "too noisy to tell",
        }
    }
}

/// A `Row` is a row of the table, with a comparison on each set.
struct Row {
    name: String,
    compared: Vec<Option<Compared>>,
}

fn measure(plan: &Plan, sets: &[&Set]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let baseline = |set: &Set, m| set.errors(&BASELINE, m, plan.draws, plan.seed);
    for estimator in variants() {
        let compared = sets.iter().map(|set| {
            let d = set.head_dim();
            let Some((features, m)) = features_of(&estimator, d) else { return Ok(None) };
            let variant = set.errors(&estimator, m, plan.draws, plan.seed)?;
            Ok(Some(Compared::of(features, &variant, &baseline(set, features)?)))
        });
        rows.push(Row { name: estimator.name.into(), compared: compared.collect::<Result<_>>()? });
    }
    let redraws = sets.iter().map(|set| {
        // The comparison is at equal cost: the baseline has as many features at once.
        let averaged = set.averaged(&BASELINE, FEATURES, REDRAWS, plan.draws, plan.seed)?;
        let averaged: Vec<Errors> = averaged.iter().map(|draw| Errors::mean(draw)).collect();
        Ok(Some(Compared::of(REDRAWS * FEATURES, &averaged, &baseline(set, REDRAWS * FEATURES)?)))
    });
    rows.push(Row {
        name: format!("mean of {REDRAWS} redraws of {FEATURES}"),
        compared: redraws.collect::<Result<_>>()?,
    });
    Ok(rows)
}

/// Returns the features and the rows of Ω of a variant for heads of dimension `d`: the usual number
/// of features, or the next power of two that leaves its random part at least half as many. `None`
/// if that is more than [`MOST`].
fn features_of(estimator: &Estimator, d: usize) -> Option<(usize, usize)> {
    if let Some(m) = estimator.rows_for(FEATURES, d) {
        return Some((FEATURES, m));
    }
    let mut numbers = (FEATURES..=MOST).filter(|features| features.is_power_of_two());
    numbers.find_map(|features| Some((features, estimator.rows_for(features, d).filter(|&rows| rows >= FEATURES / 2)?)))
}

/// Returns what another draw of Ω would change: the share of the squared output error that is
/// variance over draws, and the standard deviation over draws of the row total variation, relative
/// to its mean.
fn redraw_variance(plan: &Plan, set: &Set) -> Result<(f64, f64)> {
    let single = set.all(&BASELINE, FEATURES, plan.draws, plan.seed)?;
    let pair = set.averaged(&BASELINE, FEATURES, 2, plan.draws, plan.seed)?;
    let square = |draws: &[Vec<Errors>]| draws.iter().flatten().map(|e| e.output * e.output).sum::<f64>();
    // The variance follows from E single² = bias² + variance and E pair² = bias² + variance/2. Of
    // few draws the estimate can lie outside 0 to 1.
    let (single_square, pair_square) = (square(&single), square(&pair));
    let rows = Spread::of(single.iter().map(|draw| Errors::mean(draw).rows));
    Ok(((2.0 * (1.0 - pair_square / single_square)).clamp(0.0, 1.0), rows.deviation / rows.mean))
}

/// Distributes the same total of features over the layers, where they help most, and compares that
/// with an equal number for each layer. `layers[problem]` is the layer of each problem. Returns the
/// comparison and the numbers, or `None` if there are fewer than two layers.
fn layer_wise(plan: &Plan, set: &Set, layers: &[usize]) -> Result<Option<(Compared, Vec<usize>)>> {
    const STEPS: [usize; 7] = [16, 32, 64, 128, 256, 512, 1024];
    let count = layers.iter().max().map_or(0, |last| last + 1);
    if count < 2 {
        return Ok(None);
    }
    // Some draws choose the numbers, and others judge them.
    let judge = |m: usize| set.all(&BASELINE, m, plan.draws, plan.seed);
    let choose: Vec<Vec<Vec<Errors>>> =
        STEPS.iter().map(|&m| set.all(&BASELINE, m, plan.draws, plan.seed ^ 1)).collect::<Result<_>>()?;
    let of_layer = |all: &[Vec<Errors>], layer: usize| -> Vec<Errors> {
        let own = |draw: &Vec<Errors>| -> Vec<Errors> {
            draw.iter().zip(layers).filter(|(_, l)| **l == layer).map(|(e, _)| *e).collect()
        };
        all.iter().map(|draw| Errors::mean(&own(draw))).collect()
    };
    let error = |step: usize, layer: usize| {
        let draws = of_layer(&choose[step], layer);
        draws.iter().map(|e| e.rows).sum::<f64>() / draws.len() as f64
    };
    let mut steps = vec![0; count];
    loop {
        // The next step doubles the number of features of the layer whose error falls most for each
        // feature added, among the layers for which the budget allows it.
        let spent: usize = steps.iter().map(|&s| STEPS[s]).sum();
        let gain = |layer: usize| {
            let step: usize = steps[layer];
            let cost = STEPS.get(step + 1)? - STEPS[step];
            let fits = spent + cost <= FEATURES * count;
            fits.then(|| (layer, (error(step, layer) - error(step + 1, layer)) / cost as f64))
        };
        let best = (0..count).filter_map(gain).max_by(|a, b| a.1.total_cmp(&b.1));
        match best {
            Some((layer, gain)) if gain > 0.0 => steps[layer] += 1,
            _ => break,
        }
    }
    let chosen: Vec<usize> = steps.iter().map(|&s| STEPS[s]).collect();
    let mut own = vec![Errors::default(); plan.draws];
    for (layer, &m) in chosen.iter().enumerate() {
        let share = layers.iter().filter(|l| **l == layer).count() as f64 / layers.len() as f64;
        for (sum, errors) in own.iter_mut().zip(of_layer(&judge(m)?, layer)) {
            sum.rows += share * errors.rows;
            sum.output += share * errors.output;
        }
    }
    let equal: Vec<Errors> = judge(FEATURES)?.iter().map(|draw| Errors::mean(draw)).collect();
    Ok(Some((Compared::of(FEATURES, &own, &equal), chosen)))
}

/// Makes the table with its interpretation, and a short version of it for each set. `heads` come
/// with the layer of each problem.
pub(super) fn table(
    plan: &Plan,
    gaussian: &Set,
    heads: Option<(&Set, &[usize])>,
) -> Result<(Section, Vec<String>, Value)> {
    let mut sets = vec![gaussian];
    sets.extend(heads.map(|(set, _)| set));
    let mut rows = measure(plan, &sets)?;
    let mut notes = Vec::new();
    if let Some((set, layers)) = heads
        && let Some((compared, chosen)) = layer_wise(plan, set, layers)?
    {
        let chosen: Vec<String> = chosen.iter().map(ToString::to_string).collect();
        notes.push(format!(
            "Layer by layer, {FEATURES} features a layer on average went as {} to layers 0, 1, …: {} in row total variation, {} in output error.",
            chosen.join(", "),
            change(compared.rows.relative),
            change(compared.output.relative)
        ));
        rows.push(Row { name: "layer-wise M, same total".into(), compared: vec![None, Some(compared)] });
    }
    let mut header = vec!["instead of plain FAVOR+ at the same F".to_string()];
    for set in &sets {
        header.extend([
            format!("{}: F", set.name),
            "row TV".into(),
            "change".into(),
            "output error".into(),
            "change".into(),
            "verdict".into(),
        ]);
    }
    let mut table = Table { header, rows: Vec::new() };
    for row in &rows {
        let mut cells = vec![row.name.clone()];
        for compared in &row.compared {
            match compared {
                Some(c) => {
                    cells.push(c.features.to_string());
                    cells.extend(c.cells());
                    cells.push(c.verdict().word().into());
                }
                None => cells.extend(std::iter::repeat_n("–".to_string(), 6)),
            }
        }
        table.push(cells);
    }
    let mut text = vec![format!(
        "Each row is one change to positive features of orthogonal rows, chi-distributed lengths and F={FEATURES} (more where the variant needs \
         more; the comparison has as many), {} draws that share their seeds. A verdict needs a difference of {:.0}% and of three standard errors in one measure, and none against it in the other.",
        plan.draws,
        100.0 * NOTABLE
    )];
    let mut short = Vec::new();
    for (i, set) in sets.iter().enumerate() {
        let named = |verdict: Verdict| -> Vec<String> {
            let mut found: Vec<(&str, &Compared)> = rows
                .iter()
                .filter_map(|row| Some((row.name.as_str(), row.compared[i].as_ref()?)))
                .filter(|(_, compared)| compared.verdict() == verdict)
                .collect();
            found.sort_by(|a, b| a.1.rows.relative.total_cmp(&b.1.rows.relative));
            let told = |(name, c): (&str, &Compared)| {
                format!("{name} ({} rows, {} output)", change(c.rows.relative), change(c.output.relative))
            };
            found.into_iter().map(told).collect()
        };
        let [better, same, worse, mixed, uncertain] =
            [Verdict::Better, Verdict::Same, Verdict::Worse, Verdict::Mixed, Verdict::Uncertain].map(named);
        text.push(format!(
            "On {}: worth it: {}. No difference: {}. Worse: {}. Better by one \
             measure and not by the other: {}. Too noisy to tell: {}.",
            set.name,
            charts::list(&better),
            charts::list(&same),
            charts::list(&worse),
            charts::list(&mixed),
            charts::list(&uncertain)
        ));
        short.push(format!(
            "On {}, most worth it at equal cost: {}. Worse than plain FAVOR+: {}. No difference that \
             counts: {} of {} refinements. Too noisy to tell: {}.",
            set.name,
            charts::list(&better[..better.len().min(3)]),
            charts::list(&worse),
            same.len(),
            better.len() + same.len() + worse.len() + mixed.len() + uncertain.len(),
            uncertain.len()
        ));
        let (share, deviation) = redraw_variance(plan, set)?;
        notes.push(format!(
            "Redrawing on {}: {:.0}% of the squared output error is variance that another draw changes, the rest is common to all draws; one \
             draw's row total variation differs from another's by {:.1}% (standard deviation).",
            set.name,
            100.0 * share,
            100.0 * deviation
        ));
    }
    text.extend(notes);
    let json_row = |row: &Row| {
        let on: Vec<Value> = row
            .compared
            .iter()
            .zip(&sets)
            .filter_map(|(compared, set)| {
                let c = compared.as_ref()?;
                Some(json!({
                    "input": set.name, "features": c.features, "rows": c.rows.json(), "output": c.output.json(),
                    "verdict": c.verdict().word(),
                }))
            })
            .collect();
        json!({ "variant": row.name, "on": on })
    };
    let data = rows.iter().map(json_row).collect();
    let title = "What is worth it".to_string();
    Ok((Section { title, text, chart: None, table: Some(table) }, short, data))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use performer_core::{Favor, FavorConfig};

    use super::*;

    /// A number of features that a variant is measured with is one that its map can be built with.
    #[test]
    fn variants_have_features_that_can_be_built() {
        for d in [16, 64, 128, 180, 181, 256] {
            for estimator in variants() {
                let Some((features, m)) = features_of(&estimator, d) else { continue };
                assert!(features <= MOST && m > 0, "{}", estimator.name);
                let config = FavorConfig::default().with_map(estimator.map).with_features(m);
                Favor::new(&config, d, 1, DType::F32, &Device::Cpu).unwrap();
            }
        }
        let found = |d| variants().iter().filter(|estimator| features_of(estimator, d).is_some()).count();
        assert!(found(256) < found(64) && found(64) == variants().len());
    }

    fn errors(rows: &[f64]) -> Vec<Errors> {
        rows.iter().map(|&rows| Errors { rows, output: rows }).collect()
    }

    #[test]
    fn verdicts_need_size_and_certainty() {
        let baseline = errors(&[1.0, 1.1, 0.9, 1.0]);
        let verdict = |variant: &[f64]| Compared::of(1, &errors(variant), &baseline).verdict();
        assert!(verdict(&[0.8, 0.9, 0.7, 0.8]) == Verdict::Better);
        assert!(verdict(&[1.2, 1.3, 1.1, 1.2]) == Verdict::Worse);
        assert!(verdict(&[0.99, 1.09, 0.89, 0.99]) == Verdict::Same);
        assert!(verdict(&[0.1, 1.9, 0.2, 1.4]) == Verdict::Uncertain);
        assert!(verdict(&[1.0, 27.0, 9.0, 70.0]) == Verdict::Uncertain, "2,500% more is not no difference");
        let two = |rows: f64, output: f64| [1.0, 1.1, 0.9].map(|x| Errors { rows: x * rows, output: x * output });
        let of = |rows, output| Compared::of(1, &two(rows, output), &two(1.0, 1.0)).verdict();
        assert!(of(0.8, 1.0) == Verdict::Better && of(1.2, 1.02) == Verdict::Worse && of(0.8, 1.2) == Verdict::Mixed);
    }
}
