//! This module inspects a softmax model: how far the logits of each head spread, and how well
//! features would approximate it.

use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use performer_core::{
    Attention, FavorConfig, Inputs, Mask, Softmax,
    features::{FeatureMap, fit::Moments},
    projection::{self, derive_seed},
};
use serde::{Deserialize, Serialize};

use super::{calibrate::moments, plan::require_softmax};
use crate::{
    data::{Prepared, TokenFile, eval_windows},
    feature_rows::{FeatureRows, normalised},
    model::{Decoder, fit::fitted_to},
};

/// About how many queries of each sequence are compared.
const SAMPLED_QUERIES: usize = 32;
/// Fewer tokens than this say nothing of how attention is divided.
const LEAST_TOKENS: usize = 16;

/// A `HeadReport` describes one head of a softmax model, and how well features would approximate
/// it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HeadReport {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Index of the query head, from 0.
    pub head: usize,
    /// Standard deviation of `q·k/√D`: above 2 or so, random features need very many rows.
    pub logit_deviation: f64,
    /// Total variation between the attention rows of softmax and of features: 0 if equal, 1 if
    /// disjoint.
    pub row_total_variation: f64,
    /// Total variation between softmax and uniform attention, which weighs all keys equally: an
    /// estimator with more carries no information.
    pub uniform_total_variation: f64,
    /// Relative error of the outputs, `‖o − ô‖/‖o‖`.
    pub output_error: f64,
    /// The smallest of a series of M with a total variation below 0.15, if any has.
    pub suggested_features: Option<usize>,
}

/// Reports on each head of `teacher` on held-out text, with features configured by `favor`;
/// features that can be fitted are fitted to moments over `calibrate_tokens` tokens.
///
/// # Errors
/// If a layer of the teacher is not softmax, if the training text does not fill a batch, if the
/// context or the held-out text has fewer than 16 tokens, if `calibrate_tokens` is 0, or if the
/// feature map of `favor` cannot be made for the teacher's head dimension or fitted to its queries
/// and keys.
pub fn inspect(
    teacher: &Decoder,
    data: &Prepared,
    favor: &FavorConfig,
    balance: bool,
    calibrate_tokens: usize,
    seed: u64,
) -> Result<Vec<HeadReport>> {
    require_softmax(teacher.config())?;
    let windows = held_out(&data.valid, teacher.config().context)?;
    let (moments, _) = moments(teacher, data, calibrate_tokens, seed)?;
    let deviations: Vec<Vec<f64>> = moments.iter().map(Moments::logit_deviation).collect::<candle_core::Result<_>>()?;
    let group = teacher.config().heads / teacher.config().kv_heads;
    let map_of = |layer: usize, m: usize| -> candle_core::Result<Box<dyn FeatureMap>> {
        let seed = derive_seed(seed, layer as u64);
        let favor = favor.clone().with_features(m);
        if favor.map.is_fitted() {
            return Ok(Box::new(fitted_to(&favor, &moments[layer], balance, seed, &Device::Cpu)?));
        }
        let d = moments[layer].head_dim();
        let projection = projection::draw_tensor(favor.projection, favor.radii, m, d, seed, DType::F32, &Device::Cpu)?;
        let offsets = match favor.map.has_offsets() {
            true => Some(Tensor::from_vec(projection::draw_offsets(m, seed)?, m, &Device::Cpu)?.to_dtype(DType::F32)?),
            false => None,
        };
        favor.map.build(d, Some(&performer_core::features::RandomParameters { projection, offsets }), &Device::Cpu)
    };
    let mut reports = Vec::new();
    let ids = windows.to_device(teacher.device())?;
    teacher.hidden_through(&ids, |layer, inputs| {
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(|x| x.detach().to_device(&Device::Cpu));
        let (q, k, v) = (q?, k?, v?);
        let mut heads = rows(&*map_of(layer, favor.features)?, &q, &k, &v)?;
        for (head, report) in heads.iter_mut().enumerate() {
            (report.layer, report.head) = (layer, head);
            report.logit_deviation = deviations[layer][head / group];
        }
        // A map without random rows has no number of them to look for.
        let tried: &[usize] = if favor.map.is_random() { &[32, 64, 128, 256, 512, 1024] } else { &[] };
        for &m in tried {
            if heads.iter().all(|h| h.suggested_features.is_some()) {
                break;
            }
            for (report, at) in heads.iter_mut().zip(rows(&*map_of(layer, m)?, &q, &k, &v)?) {
                if at.row_total_variation < 0.15 {
                    report.suggested_features.get_or_insert(m);
                }
            }
        }
        reports.extend(heads);
        let out = Softmax::new().forward(Inputs::new(&q, &k, &v), &Mask::causal());
        out?.to_device(teacher.device())
    })?;
    Ok(reports)
}

/// Returns one window of held-out text, shape `(1, T)`.
fn held_out(tokens: &TokenFile, context: usize) -> Result<Tensor> {
    let batch = eval_windows(tokens, context, 1)?.next();
    let batch = batch.context("there is no held-out text")?;
    ensure!(
        batch.context >= LEAST_TOKENS,
        "attention is compared in {} tokens, the shorter of the context and the held-out text; it takes \
         at least {LEAST_TOKENS} to say something",
        batch.context
    );
    batch.ids(&Device::Cpu)
}

/// Compares attention rows of softmax and of a feature map at some queries of every head.
fn rows(map: &dyn FeatureMap, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Vec<HeadReport>> {
    let (_, h, t, d) = q.dims4()?;
    let hkv = k.dim(1)?;
    let scale = (d as f64).powf(-0.25);
    let x = (q.to_dtype(DType::F64)? * scale)?;
    let y = (k.to_dtype(DType::F64)? * scale)?;
    let group = h / hkv;
    // Feature maps take queries and keys grouped by key head.
    let queries = map.features(&x.contiguous()?.reshape((hkv, group * t, d))?)?;
    let keys = map.key_features(&y.contiguous()?.reshape((hkv, t, d))?)?;
    let features = FeatureRows::new(queries, keys)?;
    let step = t.div_ceil(SAMPLED_QUERIES);
    let mut reports = Vec::new();
    for head in 0..h {
        let kv = head / group;
        let (x, y) = (x.get(0)?.get(head)?, y.get(0)?.get(kv)?);
        let v = v.get(0)?.get(kv)?.to_dtype(DType::F64)?;
        let (mut variation, mut uniform, mut errors, mut count) = (0.0, 0.0, 0.0, 0.0);
        for i in (0..t).step_by(step).skip(1) {
            let logits = x.narrow(0, i, 1)?.matmul(&y.narrow(0, 0, i + 1)?.t()?.contiguous()?)?;
            let exact = candle_nn::ops::softmax(&logits, D::Minus1)?;
            let query = features.queries.get(kv)?.narrow(0, (head % group) * t + i, 1)?;
            let keys = features.keys.get(kv)?.narrow(0, 0, i + 1)?;
            let estimated = normalised(&query.matmul(&keys.t()?)?)?;
            let sum = |t: Tensor| t.abs()?.sum_all()?.to_scalar::<f64>();
            variation += 0.5 * sum((&exact - &estimated)?)?;
            uniform += 0.5 * sum(exact.affine(1.0, -1.0 / (i + 1) as f64)?)?;
            let v = v.narrow(0, 0, i + 1)?;
            let (o, e) = (exact.matmul(&v)?, (&exact - &estimated)?.matmul(&v)?);
            let norm = |t: Tensor| -> candle_core::Result<f64> { Ok(t.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt()) };
            errors += norm(e)? / norm(o)?.max(1e-30);
            count += 1.0;
        }
        let count = f64::max(count, 1.0);
        reports.push(HeadReport {
            layer: 0,
            head,
            logit_deviation: 0.0,
            row_total_variation: variation / count,
            uniform_total_variation: uniform / count,
            output_error: errors / count,
            suggested_features: None,
        });
    }
    Ok(reports)
}

#[cfg(test)]
mod tests {
    use super::*;
    use performer_core::features::FeatureMapKind;

    fn random(heads: usize, seed: u64) -> Tensor {
        let drawn = projection::draw_tensor(
            projection::ProjectionKind::Gaussian,
            projection::Radii::Chi,
            heads * 40,
            4,
            seed,
            DType::F32,
            &Device::Cpu,
        );
        drawn.unwrap().reshape((1, heads, 40, 4)).unwrap()
    }

    fn map(kind: FeatureMapKind, features: usize) -> Box<dyn FeatureMap> {
        let projection = FavorConfig::default();
        let rows =
            projection::draw_tensor(projection.projection, projection.radii, features, 4, 5, DType::F32, &Device::Cpu);
        let drawn = performer_core::features::RandomParameters { projection: rows.unwrap(), offsets: None };
        kind.build(4, Some(&drawn), &Device::Cpu).unwrap()
    }

    /// Very many features come near to softmax, few do not, and keys that are all alike are
    /// attended to uniformly.
    #[test]
    fn rows_are_compared_with_those_of_softmax() {
        let (q, k, v) = (random(4, 1), random(2, 2), random(2, 3));
        let many = rows(&*map(FeatureMapKind::Positive, 4096), &q, &k, &v).unwrap();
        let few = rows(&*map(FeatureMapKind::Positive, 4), &q, &k, &v).unwrap();
        assert_eq!((many.len(), few.len()), (4, 4));
        for (head, (many, few)) in many.iter().zip(&few).enumerate() {
            assert_eq!(many.head, head);
            assert!(many.row_total_variation < 0.1 && many.output_error < 0.2, "{many:?}");
            assert!(few.row_total_variation > 2.0 * many.row_total_variation, "{few:?} and {many:?}");
            assert!(few.output_error > 2.0 * many.output_error, "{few:?} and {many:?}");
            assert_eq!(many.uniform_total_variation, few.uniform_total_variation);
            assert!(many.uniform_total_variation > many.row_total_variation, "{many:?}");
        }
        // Features that have signs are compared as they are, not by their logarithms.
        let signed = rows(&*map(FeatureMapKind::Trigonometric, 4096), &q, &k, &v).unwrap();
        assert!(signed.iter().all(|head| head.row_total_variation < 0.1), "{signed:?}");
        let alike = k.zeros_like().unwrap();
        for report in rows(&*map(FeatureMapKind::Positive, 4), &q, &alike, &v).unwrap() {
            assert!(report.uniform_total_variation < 1e-6 && report.row_total_variation < 1e-6, "{report:?}");
        }
    }
}
