//! These tests check masks: whatever hidden keys and values hold, the outputs of real tokens do not
//! change; and inputs of length zero work.

use crate::common::{
    Layout, Problem, Random, all_kernels, assert_close, assert_tensor_close, conditioned_scale, is_positive,
    mask_tensor, values,
};
use candle_core::{DType, Device, Result, Tensor};
use performer_core::reference::Shape;
use performer_core::{Attention, FeatureMapKind, Inputs, Mask, Softmax, State};

const SHAPE: Shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 40, k_len: 40, head_dim: 5, value_dim: 3 };

/// Hides a third of the keys, the first of the first sequence among them.
fn padded_problem(map: Option<FeatureMapKind>, causal: bool) -> Problem {
    let mut problem = Problem::random(1, SHAPE, map, 8).scale_qk(conditioned_scale(map));
    problem.causal = causal;
    let mut mask = Random::new(2).mask(SHAPE.batch * SHAPE.k_len, 0.7);
    mask[..2].fill(false);
    problem.key_mask = Some(mask);
    problem
}

/// Sets every row of `(B, Hkv, Tk, width)` whose key is hidden.
fn fill_hidden(rows: &mut [f64], width: usize, mask: &[bool], value: impl Fn(usize) -> f64) {
    for (row, numbers) in rows.chunks_mut(width).enumerate() {
        let (batch, key) = (row / (SHAPE.kv_heads * SHAPE.k_len), row % SHAPE.k_len);
        if !mask[batch * SHAPE.k_len + key] {
            numbers.fill(value(row));
        }
    }
}

/// Not a bit of outputs and gradients changes, up to the largest numbers that padding may hold.
#[test]
fn hidden_keys_and_values_may_be_anything() -> Result<()> {
    for map in all_kernels() {
        for causal in [false, true] {
            let problem = padded_problem(map, causal);
            let Some(mask) = problem.key_mask.clone() else { unreachable!() };
            for dtype in [DType::F32, DType::F64] {
                let attention = problem.attention(dtype)?;
                let clean = problem.run(&*attention, dtype, Layout::Contiguous)?;
                for large in [0.0, 3.0, 1e4, 1e30, f64::from(f32::MAX)] {
                    let mut other = problem.clone();
                    let value = |row| if row % 2 == 0 { large } else { -large };
                    fill_hidden(&mut other.k, SHAPE.head_dim, &mask, value);
                    fill_hidden(&mut other.v, SHAPE.value_dim, &mask, value);
                    let outcome = other.run(&*attention, dtype, Layout::Contiguous)?;
                    let what = format!("{map:?} {dtype:?}, causal {causal}, padded with {large}");
                    problem.assert_outcome(&what, &outcome, &clean, 0.0);
                }
            }
        }
    }
    Ok(())
}

/// Hidden tokens whose gates forget by e^-10,000 each: that sum stands before every visible key of
/// a hidden query, cancels in its outputs, and may take no digit of them, nor of any gradient.
#[test]
fn gates_of_hidden_tokens_leave_the_digits_of_the_rest() -> Result<()> {
    let windows = [None, Some((7, 0)), Some((5, 3))];
    for (map, window) in all_kernels().flat_map(|map| windows.map(|window| (map, window))) {
        // A window is joined with features by their logarithms, which not every map has.
        if window.is_some() && (!is_positive(map) || map == Some(FeatureMapKind::Relu)) {
            continue;
        }
        let mut problem = padded_problem(map, true).gated(3);
        problem.window = window;
        let (mask, gates) = (problem.key_mask.as_mut().expect("a mask"), problem.gates.as_mut().expect("gates"));
        mask[SHAPE.k_len + 8..SHAPE.k_len + 25].fill(false);
        for (n, gate) in gates.iter_mut().enumerate() {
            let (batch, key) = (n / (SHAPE.kv_heads * SHAPE.k_len), n % SHAPE.k_len);
            if !mask[batch * SHAPE.k_len + key] {
                *gate = -1e4;
            }
        }
        let expected = problem.expected();
        for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-4)] {
            for (how, attention) in [("", problem.attention(dtype)?), (" composed", problem.composed(dtype)?)] {
                let actual = problem.run(&*attention, dtype, Layout::Contiguous)?;
                let what = format!("{map:?}, window {window:?}, {dtype:?}{how}");
                problem.assert_outcome(&what, &actual, &expected, tolerance);
            }
        }
    }
    Ok(())
}

/// Gates in f32 are computed with in f64 where the queries are f64, sums over hidden tokens too;
/// and a sum below the lowest gate is taken for the lowest.
#[test]
fn sums_over_hidden_tokens_have_the_digits_of_the_queries() -> Result<()> {
    let x = Tensor::rand(-1f64, 1.0, (1, 1, 6, 4), &Device::Cpu)?;
    let mask = Mask::causal().with_keys(&Tensor::new(&[[1u8, 0, 0, 0, 1, 1]], &Device::Cpu)?)?;
    let out = |gates: &[f32], dtype| {
        let gates = Tensor::from_slice(gates, (1, 1, 6), &Device::Cpu)?.to_dtype(dtype)?;
        Softmax::new().forward(Inputs::new(&x, &x, &x).with_gates(&gates), &mask)
    };
    let gates = [0.0, -0.7, -1.1, -0.3, -0.1, -0.2];
    assert_tensor_close("f32", &out(&gates, DType::F32)?, &values(&out(&gates, DType::F64)?)?, 1e-15);
    let lowest = [0.0, -1e30, -1e30, -1e30, -1e30, -0.2];
    let last = values(&out(&lowest, DType::F32)?.narrow(2, 4, 1)?)?;
    assert_close("lowest", &[4], &last, &values(&x.narrow(2, 4, 1)?)?, 1e-15);
    Ok(())
}

/// A key too small to count (features of e^0 beside e^-2000) must not set the scale when it is
/// hidden: what is seen would underflow.
#[test]
fn hidden_keys_do_not_set_the_scale() -> Result<()> {
    for map in all_kernels().filter(|&map| is_positive(map)) {
        for causal in [false, true] {
            let mut problem = padded_problem(map, causal).scale_qk(40.0);
            let Some(mask) = problem.key_mask.clone() else { unreachable!() };
            fill_hidden(&mut problem.k, SHAPE.head_dim, &mask, |_| 0.0);
            let problem = problem.rounded(DType::F32)?;
            let expected = problem.expected();
            let actual = problem.run(&*problem.attention(DType::F32)?, DType::F32, Layout::Contiguous)?;
            let what = format!("{map:?}, causal {causal}");
            assert_close(&what, &problem.output_dims(), &actual.output, &expected.output, 1e-3);
        }
    }
    Ok(())
}

/// A batch of sequences of unequal length, each padded at its end, gives what each gives alone.
#[test]
fn appended_padding_is_none() -> Result<()> {
    let device = Device::Cpu;
    for map in all_kernels() {
        for causal in [false, true] {
            for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-14)] {
                let problem = padded_problem(map, causal);
                let [q, k, v] = problem.tensors(dtype)?;
                let attention = problem.attention(dtype)?;
                let lengths = [40, 23];
                let mask: Vec<bool> = lengths.iter().flat_map(|&l| (0..SHAPE.k_len).map(move |t| t < l)).collect();
                let mask = mask_tensor(&mask, &[SHAPE.batch, SHAPE.k_len], &device)?;
                let kind = if causal { Mask::causal() } else { Mask::full() };
                let padded = attention.forward(Inputs::new(&q, &k, &v), &kind.clone().with_keys(&mask)?)?;
                for (b, length) in lengths.into_iter().enumerate() {
                    let alone = |t: &Tensor| t.narrow(0, b, 1)?.narrow(2, 0, length);
                    let expected = attention.forward(Inputs::new(&alone(&q)?, &alone(&k)?, &alone(&v)?), &kind)?;
                    let what = format!("{map:?} {dtype:?}, causal {causal}, sequence {b}");
                    assert_tensor_close(&what, &alone(&padded)?, &values(&expected)?, tolerance);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_row_that_sees_nothing_is_zero() -> Result<()> {
    for map in all_kernels() {
        for causal in [false, true] {
            // Every key of the second sequence is hidden, and the first two of the first.
            let mut problem = padded_problem(map, causal);
            problem.key_mask = Some((0..2 * SHAPE.k_len).map(|n| (2..SHAPE.k_len).contains(&n)).collect());
            let outcome = problem.run(&*problem.attention(DType::F32)?, DType::F32, Layout::Contiguous)?;
            for (row, numbers) in outcome.output.chunks(SHAPE.value_dim).enumerate() {
                let (batch, token) = (row / (SHAPE.heads * SHAPE.q_len), row % SHAPE.q_len);
                let blind = batch == 1 || (causal && token < 2);
                assert_eq!(
                    numbers.iter().all(|&o| o == 0.0),
                    blind,
                    "{map:?}, causal {causal}, row {row}: {numbers:?}"
                );
            }
            problem.assert_outcome("F32", &outcome, &problem.expected(), 1e-4);
        }
    }
    Ok(())
}

/// One hidden token is the shortest sequence that sees nothing.
#[test]
fn a_single_hidden_token_is_zero() -> Result<()> {
    let shape = Shape { q_len: 1, k_len: 1, ..SHAPE };
    for map in all_kernels() {
        for causal in [false, true] {
            let mut problem = Problem::random(3, shape, map, 8);
            problem.causal = causal;
            problem.key_mask = Some(vec![false, true]);
            let outcome = problem.run(&*problem.attention(DType::F64)?, DType::F64, Layout::Contiguous)?;
            problem.assert_outcome("F64", &outcome, &problem.expected(), 1e-12);
        }
    }
    Ok(())
}

#[test]
fn a_mask_of_ones_is_none() -> Result<()> {
    for map in all_kernels() {
        for causal in [false, true] {
            let mut problem = padded_problem(map, causal);
            problem.key_mask = None;
            let plain = values(&problem.forward(DType::F32)?)?;
            problem.key_mask = Some(vec![true; SHAPE.batch * SHAPE.k_len]);
            assert_tensor_close(&format!("{map:?}"), &problem.forward(DType::F32)?, &plain, 0.0);
        }
    }
    Ok(())
}

#[test]
fn masks_of_every_dtype_are_the_same() -> Result<()> {
    for map in [None, Some(FeatureMapKind::Positive), Some(FeatureMapKind::Relu)] {
        let problem = padded_problem(map, true);
        let expected = values(&problem.forward(DType::F32)?)?;
        let Some(mask) = &problem.key_mask else { unreachable!() };
        let mask = mask_tensor(mask, &[SHAPE.batch, SHAPE.k_len], &Device::Cpu)?;
        let [q, k, v] = problem.tensors(DType::F32)?;
        for dtype in
            [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64]
        {
            let mask = Mask::causal().with_keys(&mask.to_dtype(dtype)?)?;
            let output = problem.attention(DType::F32)?.forward(Inputs::new(&q, &k, &v), &mask)?;
            assert_tensor_close(&format!("{map:?}, mask of {dtype:?}"), &output, &expected, 0.0);
        }
    }
    Ok(())
}

/// An empty input gives an empty output, in the shape that the rest would have had.
#[test]
fn empty_inputs_give_empty_outputs() -> Result<()> {
    let device = Device::Cpu;
    for map in all_kernels() {
        let problem = Problem::random(4, Shape { q_len: 1, k_len: 1, ..SHAPE }, map, 8);
        let attention = problem.attention(DType::F32)?;
        for (b, tq, tk) in [(2, 0, 0), (0, 7, 7), (0, 0, 0), (2, 0, 7), (2, 7, 0), (0, 7, 3)] {
            let zeros = |heads, t, width| Tensor::zeros((b, heads, t, width), DType::F32, &device);
            let (q, k, v) = (zeros(4, tq, 5)?, zeros(2, tk, 5)?, zeros(2, tk, 3)?);
            let keys = Tensor::ones((b, tk), DType::U8, &device)?;
            let mut masks = vec![Mask::full(), Mask::full().with_keys(&keys)?];
            if tq == tk {
                masks.extend([Mask::causal(), Mask::causal().with_keys(&keys)?]);
            }
            for mask in masks {
                let output = attention.forward(Inputs::new(&q, &k, &v), &mask)?;
                assert_eq!(output.dims(), [b, 4, tq, 3], "{map:?}, {mask:?}");
                assert!(values(&output)?.iter().all(|&o| o == 0.0), "{map:?}, {mask:?}");
            }
            if tq == tk {
                let mut state = State::new();
                let output = attention.extend(Inputs::new(&q, &k, &v), &mut state)?;
                assert_eq!((output.dims(), state.tokens()), (&[b, 4, tq, 3][..], tq), "{map:?}");
                // A state that has seen no token is any attention's, and of any batch.
                assert_eq!(state.batch(), (tq > 0).then_some(b), "{map:?}");
                if b > 0 {
                    // An empty prompt before a token changes nothing.
                    let [q, k, v] = problem.tensors(DType::F32)?;
                    let output = attention.extend(Inputs::new(&q, &k, &v), &mut state)?;
                    let alone = values(&attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?)?;
                    assert_tensor_close(&format!("{map:?}"), &output, &alone, 1e-6);
                }
            }
        }
    }
    Ok(())
}

/// Masks act on the keys: with hidden values of zero but keys left visible, the normaliser would
/// still count them.
#[test]
fn hidden_keys_do_not_count_in_the_normaliser() -> Result<()> {
    for map in all_kernels() {
        for causal in [false, true] {
            let mut problem = padded_problem(map, causal);
            problem.v.fill(1.0);
            let output = values(&problem.forward(DType::F64)?)?;
            let right = |o: f64| o == 0.0 || (o - 1.0).abs() < 1e-12;
            assert!(output.iter().all(|&o| right(o)), "{map:?}, causal {causal}: an average of ones is not 1");
            // Only queries that see no key have zeros, and these are few.
            let zeros = output.iter().filter(|&&o| o == 0.0).count();
            assert!(zeros * 4 < output.len(), "{map:?}, causal {causal}: {zeros} zeros of {}", output.len());
        }
    }
    Ok(())
}

/// Additive masks hide a key where they are −∞, or the lowest number of their type, which Hugging
/// Face's models use; masks may be broadcast over heads and queries.
#[test]
fn masks_of_every_kind_and_shape_are_the_same() -> Result<()> {
    let device = Device::Cpu;
    for map in [None, Some(FeatureMapKind::Positive)] {
        let problem = padded_problem(map, true);
        let expected = values(&problem.forward(DType::F32)?)?;
        let Some(visible) = &problem.key_mask else { unreachable!() };
        let [q, k, v] = problem.tensors(DType::F32)?;
        let check = |what: &str, mask: &Tensor| -> Result<()> {
            let mask = Mask::causal().with_keys(mask)?;
            let output = problem.attention(DType::F32)?.forward(Inputs::new(&q, &k, &v), &mask)?;
            assert_tensor_close(&format!("{map:?}, {what}"), &output, &expected, 0.0);
            Ok(())
        };
        let dims = (SHAPE.batch, SHAPE.k_len);
        for (dtype, lowest) in [
            (DType::F32, f64::from(f32::MIN)),
            (DType::F64, f64::MIN),
            (DType::F16, -65504.0),
            (DType::BF16, -3.389_531_389_251_535e38),
        ] {
            for hidden in [f64::NEG_INFINITY, lowest] {
                let bias: Vec<f64> = visible.iter().map(|&visible| if visible { 0.0 } else { hidden }).collect();
                let bias = Tensor::from_vec(bias, dims, &device)?.to_dtype(dtype)?;
                check(&format!("additive {dtype:?} with {hidden}"), &bias)?;
                let mask = Mask::causal().with_key_bias(&bias)?;
                let output = problem.attention(DType::F32)?.forward(Inputs::new(&q, &k, &v), &mask)?;
                assert_tensor_close(&format!("{map:?}, bias {dtype:?} with {hidden}"), &output, &expected, 0.0);
                check("additive, (B, 1, 1, Tk)", &bias.reshape((SHAPE.batch, 1, 1, SHAPE.k_len))?)?;
            }
        }
        let mask = mask_tensor(visible, &[SHAPE.batch, SHAPE.k_len], &device)?;
        check("(B, 1, Tk)", &mask.reshape((SHAPE.batch, 1, SHAPE.k_len))?)?;
        check("a comparison", &mask.to_dtype(DType::F32)?.gt(0.5)?)?;

        // There is one row for all sequences.
        let row = mask.narrow(0, 0, 1)?;
        let both = values(
            &problem
                .attention(DType::F32)?
                .forward(Inputs::new(&q, &k, &v), &Mask::causal().with_keys(&row.expand(dims)?.contiguous()?)?)?,
        )?;
        for row in [row.clone(), row.squeeze(0)?] {
            let mask = Mask::causal().with_keys(&row)?;
            let output = problem.attention(DType::F32)?.forward(Inputs::new(&q, &k, &v), &mask)?;
            assert_tensor_close(&format!("{map:?}, {:?}", row.dims()), &output, &both, 0.0);
        }
    }
    Ok(())
}

/// What is not clearly one of the known kinds of mask is refused, and the message says where.
#[test]
fn masks_that_could_mean_two_things_are_refused() -> Result<()> {
    let device = Device::Cpu;
    let refused = |mask: &Tensor, part: &str| {
        let error = Mask::full().with_keys(mask).expect_err("a mask that should be refused").to_string();
        assert!(error.contains("key mask") && error.contains(part), "{error}");
    };
    refused(&Tensor::new(&[[1f32, 0.5]], &device)?, "0.5 at [0, 1]");
    refused(&Tensor::new(&[[0f32, -3.0]], &device)?, "-3 at [0, 1]");
    refused(&Tensor::new(&[[0u32, 2]], &device)?, "2 at [0, 1]");
    refused(&Tensor::new(&[[0i64, -1]], &device)?, "-1 at [0, 1]");
    refused(&Tensor::new(&[[1f32, f32::NEG_INFINITY]], &device)?, "both 1 and -inf");
    refused(&Tensor::new(&[[0f32, f32::NAN]], &device)?, "NaN at [0, 1]");
    refused(&Tensor::new(&[[0f32, 0.0]], &device)?, "0 everywhere");
    refused(&Tensor::ones((2, 3, 4), DType::U8, &device)?, "[2, 3, 4]");
    let bias = |numbers: &Tensor| Mask::causal().with_key_bias(numbers);
    for (numbers, part) in [
        (Tensor::new(&[[0f32, -3.0]], &device)?, "-3 at [0, 1]"),
        (Tensor::new(&[[0f32, 1.0]], &device)?, "holds 1"),
        (Tensor::new(&[[0u32, 0]], &device)?, "dtype U32"),
    ] {
        let error = bias(&numbers).expect_err("no bias").to_string();
        assert!(error.contains("key") && error.contains(part), "{error}");
    }
    // A batch without padding has a bias of zeros, which hides nothing.
    let shown = bias(&Tensor::new(&[[0f32, 0.0]], &device)?)?;
    assert_eq!(shown.visible().expect("a mask of keys").to_vec2::<u8>()?, [[1, 1]]);
    // As integers, zeros have one meaning only.
    assert!(Mask::full().with_keys(&Tensor::new(&[[0u32, 0]], &device)?).is_ok());
    Ok(())
}
