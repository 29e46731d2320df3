//! This module summarises the runs of each attention over their seeds.

use serde::{Deserialize, Serialize};

use crate::{
    seeds::{deviation, mean},
    train::{Control, Report, TestLoss},
};

/// A `Summary` describes the runs of one attention over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The attention, as the command line takes it.
    pub attention_spec: String,
    /// The seeds run.
    pub seeds: Vec<u64>,
    /// Peak learning rate of these runs; `None` in results of versions that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Number of trained parameters.
    #[serde(default)]
    pub params: usize,
    /// Bytes of decoding state of one sequence of the model's context, in all layers.
    #[serde(default)]
    pub state_bytes: usize,
    /// Whether that state grows with every token.
    #[serde(default)]
    pub state_grows: bool,
    /// Mean validation loss, in nats per token.
    pub val_loss: f64,
    /// Standard deviation of the validation loss over the seeds; 0 for one seed.
    pub val_loss_std: f64,
    /// Mean perplexity.
    pub perplexity: f64,
    /// Mean bits per byte.
    pub bits_per_byte: f64,
    /// The trained models with their features off, means over the seeds; `None` if they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features_off: Option<Control>,
    /// The test split, by which nothing was chosen; `None` if the data has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test: Option<TestSummary>,
    /// Mean perplexity divided by that of the first attention, minus 1, over the seeds that both
    /// have; on the test split where there is one. `None` if they have no seed in common.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity_gap: Option<f64>,
    /// Seconds that a whole epoch of training takes at the median speed.
    pub epoch_seconds: f64,
    /// Tokens per second, the median over the runs.
    pub tokens_per_second: f64,
}

/// A `TestSummary` describes the runs of one attention over all seeds on the test split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TestSummary {
    /// Mean loss, in nats per token.
    pub loss: f64,
    /// Standard deviation of the loss over the seeds; 0 for one seed.
    pub loss_std: f64,
    /// Mean perplexity.
    pub perplexity: f64,
    /// Mean bits per byte.
    pub bits_per_byte: f64,
    /// Mean loss with the features off, in nats per token; `None` if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features_off: Option<f64>,
}

/// Summarises runs by attention, in the order in which attentions first occur. `rates` has the
/// learning rate of each run.
pub(super) fn summarise(runs: &[Report], rates: &[f64], epoch_tokens: usize) -> Vec<Summary> {
    let mut specs: Vec<&str> = Vec::new();
    for run in runs {
        if !specs.contains(&run.attention_spec.as_str()) {
            specs.push(&run.attention_spec);
        }
    }
    let first: Vec<&Report> = specs.first().map_or_else(Vec::new, |spec| of_attention(runs, spec));
    specs
        .into_iter()
        .map(|spec| {
            let own = of_attention(runs, spec);
            let rate = runs.iter().zip(rates).find(|(run, _)| run.attention_spec == spec).map(|(_, &rate)| rate);
            summarise_one(&own, &first, rate, epoch_tokens)
        })
        .collect()
}

fn of_attention<'a>(runs: &'a [Report], spec: &str) -> Vec<&'a Report> {
    runs.iter().filter(|run| run.attention_spec == spec).collect()
}

/// Summarises the runs of one attention, of which there is at least one, beside those of the first.
fn summarise_one(runs: &[&Report], first: &[&Report], learning_rate: Option<f64>, epoch_tokens: usize) -> Summary {
    let of = |f: fn(&Report) -> f64| -> Vec<f64> { runs.iter().map(|run| f(run)).collect() };
    let losses = of(|run| run.val_loss);
    let controls: Vec<&Control> = runs.iter().filter_map(|run| run.features_off.as_ref()).collect();
    let of_controls = |f: fn(&Control) -> f64| mean(&controls.iter().map(|c| f(c)).collect::<Vec<_>>());
    let tests: Vec<&TestLoss> = runs.iter().filter_map(|run| run.test.as_ref()).collect();
    let reported = |run: &Report| run.test.as_ref().map_or(run.perplexity, |test| test.perplexity);
    let pairs: Vec<(f64, f64)> = runs
        .iter()
        .filter_map(|run| Some((reported(run), reported(first.iter().find(|other| other.seed == run.seed)?))))
        .collect();
    let ratio = pairs.iter().map(|p| p.0).sum::<f64>() / pairs.iter().map(|p| p.1).sum::<f64>();
    let tokens_per_second = median(of(|run| run.tokens_per_second));
    Summary {
        attention_spec: runs[0].attention_spec.clone(),
        learning_rate,
        params: runs[0].params,
        state_bytes: runs[0].state_bytes,
        state_grows: runs[0].state_grows,
        features_off: controls.first().map(|control| Control {
            attention_spec: control.attention_spec.clone(),
            val_loss: of_controls(|c| c.val_loss),
            perplexity: finite(of_controls(|c| c.perplexity)),
            bits_per_byte: of_controls(|c| c.bits_per_byte),
        }),
        seeds: runs.iter().map(|run| run.seed).collect(),
        val_loss: mean(&losses),
        val_loss_std: deviation(&losses),
        perplexity: finite(mean(&of(|run| run.perplexity))),
        bits_per_byte: mean(&of(|run| run.bits_per_byte)),
        test: (tests.len() == runs.len()).then(|| summarise_tests(&tests)),
        perplexity_gap: (!pairs.is_empty()).then_some(ratio - 1.0).filter(|gap| gap.is_finite()),
        epoch_seconds: epoch_tokens as f64 / tokens_per_second,
        tokens_per_second,
    }
}

fn summarise_tests(tests: &[&TestLoss]) -> TestSummary {
    let of = |f: fn(&TestLoss) -> f64| -> Vec<f64> { tests.iter().map(|test| f(test)).collect() };
    let losses = of(|test| test.loss);
    let off: Vec<f64> = tests.iter().filter_map(|test| test.features_off).collect();
    TestSummary {
        loss: mean(&losses),
        loss_std: deviation(&losses),
        perplexity: finite(mean(&of(|test| test.perplexity))),
        bits_per_byte: mean(&of(|test| test.bits_per_byte)),
        features_off: (!off.is_empty()).then(|| mean(&off)),
    }
}

/// Returns a mean of perplexities as a number that JSON has: the sum of several that are the
/// largest number there is would be infinite.
fn finite(mean: f64) -> f64 {
    mean.min(f64::MAX)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::compare) fn report(spec: &str, seed: u64, val_loss: f64) -> Report {
        Report {
            ranks: 1,
            attention: "favor".into(),
            attention_spec: spec.into(),
            seed,
            params: 1,
            state_bytes: 100,
            state_grows: spec == "softmax",
            features_off: spec.starts_with("favor").then(|| Control {
                attention_spec: "uniform".into(),
                val_loss: val_loss + 1.0,
                perplexity: (val_loss + 1.0).exp(),
                bits_per_byte: (val_loss + 1.0) / 3.0,
            }),
            test: None,
            loss_by_position: Vec::new(),
            val_loss,
            perplexity: val_loss.exp(),
            bits_per_byte: val_loss / 3.0,
            epoch_seconds: vec![seed as f64, 10.0],
            tokens_per_second: 100.0 * seed as f64,
            corpus: "test".into(),
            steps: 1,
            tokens: 1,
            threads: 1,
            dtype: crate::config::Precision::F32,
            device: "cpu".into(),
            revision: String::new(),
            key: None,
            earlier_legs: Vec::new(),
        }
    }

    /// JSON has no infinity: a summary that holds one could not be read again.
    #[test]
    fn the_largest_perplexities_have_a_finite_mean() {
        let worst = |spec, seed| Report { perplexity: f64::MAX, ..report(spec, seed, 700.0) };
        let runs = [worst("softmax", 1), worst("favor:m=8", 1), worst("softmax", 2), worst("favor:m=8", 2)];
        for summary in summarise(&runs, &[1e-3; 4], 1500) {
            assert_eq!((summary.perplexity, summary.perplexity_gap), (f64::MAX, None));
            let text = serde_json::to_string(&summary).unwrap();
            assert_eq!(serde_json::from_str::<Summary>(&text).unwrap(), summary);
        }
    }

    #[test]
    fn summary_is_by_attention_against_the_first() {
        let runs = [
            report("softmax", 1, 3.0),
            report("favor:m=8", 1, 3.1),
            report("softmax", 2, 3.2),
            report("favor:m=8", 2, 3.1),
        ];
        let summary = summarise(&runs, &[1e-3, 2e-3, 1e-3, 2e-3], 1500);
        assert_eq!(summary.iter().map(|s| s.attention_spec.as_str()).collect::<Vec<_>>(), ["softmax", "favor:m=8"]);
        assert!((summary[0].val_loss - 3.1).abs() < 1e-12);
        assert!((summary[0].val_loss_std - 0.02f64.sqrt()).abs() < 1e-12);
        assert_eq!(summary[1].val_loss_std, 0.0);
        assert_eq!(summary[0].epoch_seconds, 10.0);
        assert_eq!(summary[0].tokens_per_second, 150.0);
        assert_eq!((summary[0].state_grows, summary[1].state_grows, summary[1].state_bytes), (true, false, 100));
        assert_eq!(summary[0].features_off, None);
        let control = summary[1].features_off.as_ref().unwrap();
        assert_eq!(control.attention_spec, "uniform");
        assert!((control.val_loss - 4.1).abs() < 1e-12);
        assert_eq!((summary[0].learning_rate, summary[1].learning_rate), (Some(1e-3), Some(2e-3)));
        assert_eq!(summary[0].test, None);
        let expected = 3.1f64.exp() / ((3.0f64.exp() + 3.2f64.exp()) / 2.0) - 1.0;
        assert!((summary[1].perplexity_gap.unwrap() - expected).abs() < 1e-12);
    }
    #[test]
    fn the_gap_is_that_of_the_test_split() {
        let tested = |spec: &str, val_loss: f64, loss: f64| Report {
            test: Some(TestLoss {
                loss,
                perplexity: loss.exp(),
                bits_per_byte: loss / 3.0,
                features_off: spec.starts_with("favor").then_some(loss + 0.5),
            }),
            ..report(spec, 1, val_loss)
        };
        let summary = summarise(&[tested("softmax", 3.0, 3.5), tested("favor:m=8", 3.0, 3.6)], &[1e-3, 1e-3], 1);
        assert!((summary[1].perplexity_gap.unwrap() - (0.1f64.exp() - 1.0)).abs() < 1e-12);
        // Runs without a common seed cannot be set against each other.
        let apart = [report("softmax", 1, 3.0), report("favor:m=8", 2, 3.1)];
        assert_eq!(summarise(&apart, &[1e-3, 1e-3], 1)[1].perplexity_gap, None);
        let test = summary[1].test.as_ref().unwrap();
        assert_eq!((test.loss, test.loss_std, test.features_off), (3.6, 0.0, Some(4.1)));
        assert_eq!(summary[0].test.as_ref().unwrap().features_off, None);
    }
}
