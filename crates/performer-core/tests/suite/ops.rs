//! The fused operations around attention are compared with the same formulas in Candle's own
//! operations on f64.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use performer_core::{
    Rotary,
    features::{Elu, FeatureMap, Features},
    ops,
};

/// Returns a fixed tensor without structure, with values in ±2.
pub(crate) fn numbers(shape: &[usize], salt: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| ((i + salt) as f64 * 12.9898).sin() * 2.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// Returns the output of `f` on variables of a type, and every gradient.
#[track_caller]
pub(crate) fn outcome(
    inputs: &[Tensor],
    dtype: DType,
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Vec<f64>>> {
    let vars = inputs.iter().map(|t| Var::from_tensor(&t.to_dtype(dtype)?)).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let out = f(&tensors)?;
    // Half types are too coarse for the sum.
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    // Every output has a weight of its own.
    let weights = numbers(out.dims(), 77)?.to_dtype(wide)?;
    let gradients = (out.to_dtype(wide)? * weights)?.sum_all()?.backward()?;
    let mut all = vec![out];
    all.extend(vars.iter().map(|v| gradients.get(v).expect("every input has a gradient").clone()));
    all.into_iter().map(|t| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1()).collect()
}

/// Fails where a tensor is further from what it should be than `tolerance` of the largest entry.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[Vec<f64>], want: &[Vec<f64>], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}: tensor {i}");
        let largest = want.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
        for (j, (g, w)) in got.iter().zip(want).enumerate() {
            assert!((g - w).abs() <= tolerance * largest, "{what}: tensor {i} has {g} at {j}, not {w}");
        }
    }
}

/// Runs `f` on f32 and f64 variables and compares its output and every gradient, to `tolerance` of
/// the largest entry.
#[track_caller]
pub(crate) fn assert_same(what: &str, inputs: &[Tensor], tolerance: f64, f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    assert_close(what, &outcome(inputs, DType::F32, &f).unwrap(), &outcome(inputs, DType::F64, &f).unwrap(), tolerance);
}

/// Compares the gradients of `f` in f64 with differences of its values.
#[track_caller]
pub(crate) fn assert_derivative(what: &str, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let run = || -> Result<()> {
        let value = |inputs: &[Tensor]| -> Result<f64> {
            let out = f(inputs)?;
            (&out * numbers(out.dims(), 77)?)?.sum_all()?.to_scalar()
        };
        let mut differences = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            let entry = |j: usize| -> Result<f64> {
                let moved = |step: f64| -> Result<f64> {
                    let mut values = input.flatten_all()?.to_vec1::<f64>()?;
                    values[j] += step;
                    let mut inputs = inputs.to_vec();
                    inputs[i] = Tensor::from_vec(values, input.shape(), &Device::Cpu)?;
                    value(&inputs)
                };
                Ok((moved(1e-5)? - moved(-1e-5)?) / 2e-5)
            };
            differences.push((0..input.elem_count()).map(entry).collect::<Result<Vec<f64>>>()?);
        }
        assert_close(what, &outcome(inputs, DType::F64, &f)?[1..], &differences, 1e-7);
        Ok(())
    };
    run().unwrap();
}

/// In f64 ε is what it was given: beside rows as small as these, ε as f32 rounds it would show.
#[test]
fn norms_of_f64_take_epsilon_in_f64() -> Result<()> {
    let x = Tensor::new(&[[1e-6f64, 0.0]], &Device::Cpu)?;
    let y = ops::rms_norm(&x, &Tensor::ones(2, DType::F64, &Device::Cpu)?, 1e-5)?.to_vec2::<f64>()?[0][0];
    let expected = 1e-6 / (0.5e-12f64 + 1e-5).sqrt();
    assert!((y / expected - 1.0).abs() < 1e-14, "{y} instead of {expected}");
    Ok(())
}

#[test]
fn norms_match_their_formulas() -> Result<()> {
    for (rows, e) in [(1, 1), (3, 7), (5, 16), (4, 64), (2, 100)] {
        let inputs = [numbers(&[2, rows, e], 0)?, numbers(&[e], 5)?, numbers(&[e], 9)?];
        let what = format!("{rows} rows of {e}");
        // With one number, the number minus its mean is 0, so its gradient is only rounding.
        if e > 1 {
            assert_same(&format!("layer norm, {what}"), &inputs, 2e-5, |t| ops::layer_norm(&t[0], &t[1], &t[2], 1e-5));
        }
        assert_same(&format!("rms norm, {what}"), &inputs[..2], 2e-5, |t| ops::rms_norm(&t[0], &t[1], 1e-5));
    }
    Ok(())
}

#[test]
fn norms_take_strided_rows() -> Result<()> {
    let inputs = [numbers(&[6, 3], 0)?, numbers(&[6], 5)?, numbers(&[6], 9)?];
    assert_same("transposed", &inputs, 1e-5, |t| ops::layer_norm(&t[0].t()?, &t[1], &t[2], 1e-5));
    Ok(())
}

type Function<'a> = Box<dyn Fn(&[Tensor]) -> Result<Tensor> + 'a>;

/// A `DropIn` is a function that stands in for one of Candle's, with Candle's function and a
/// composed form of it that has gradients.
struct DropIn<'a> {
    name: &'a str,
    inputs: Vec<Tensor>,
    ours: Function<'a>,
    fused: Function<'a>,
    composed: Function<'a>,
}

#[test]
fn drop_ins_have_the_numbers_of_candle_and_gradients() -> Result<()> {
    use candle_nn::{ops as candle, rotary_emb};
    // Candle's norms take ε in f32, which holds this number exactly.
    const EPS: f32 = 1.0 / 1024.0;
    for [b, h, t, d] in [[1, 1, 1, 4], [2, 3, 5, 6], [1, 2, 7, 34]] {
        let x = numbers(&[b, h, t, d], 0)?;
        let (weight, bias, angles) = (numbers(&[d], 5)?, numbers(&[d], 9)?, numbers(&[t, d / 2], 3)?);
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        // Candle's functions need tables of the type of the rows.
        let of = |table: &Tensor, x: &Tensor| table.to_dtype(x.dtype());
        let cases = [
            DropIn {
                name: "layer norm",
                inputs: vec![x.clone(), weight.clone(), bias.clone()],
                ours: Box::new(|t| ops::layer_norm(&t[0], &t[1], &t[2], EPS.into())),
                fused: Box::new(|t| candle::layer_norm(&t[0], &t[1], &t[2], EPS)),
                composed: Box::new(|t| candle::layer_norm_slow(&t[0], &t[1], &t[2], EPS)),
            },
            DropIn {
                name: "rms norm",
                inputs: vec![x.clone(), weight.clone()],
                ours: Box::new(|t| ops::rms_norm(&t[0], &t[1], EPS.into())),
                fused: Box::new(|t| candle::rms_norm(&t[0], &t[1], EPS)),
                composed: Box::new(|t| candle::rms_norm_slow(&t[0], &t[1], EPS)),
            },
            DropIn {
                name: "softmax",
                inputs: vec![x.clone()],
                ours: Box::new(|t| ops::softmax(&t[0])),
                fused: Box::new(|t| candle::softmax_last_dim(&t[0])),
                composed: Box::new(|t| t[0].exp()?.broadcast_div(&t[0].exp()?.sum_keepdim(D::Minus1)?)),
            },
            DropIn {
                name: "rotary",
                inputs: vec![x.clone()],
                ours: Box::new(|t| ops::rotary(&t[0], &cos, &sin)),
                fused: Box::new(|t| rotary_emb::rope(&t[0], &of(&cos, &t[0])?, &of(&sin, &t[0])?)),
                composed: Box::new(|t| rotary_emb::rope_slow(&t[0], &of(&cos, &t[0])?, &of(&sin, &t[0])?)),
            },
            DropIn {
                name: "rotary, interleaved",
                inputs: vec![x.clone()],
                ours: Box::new(|t| ops::rotary_interleaved(&t[0], &cos, &sin)),
                fused: Box::new(|t| rotary_emb::rope_i(&t[0], &of(&cos, &t[0])?, &of(&sin, &t[0])?)),
                composed: Box::new(|t| rotary_emb::rope_i_slow(&t[0], &of(&cos, &t[0])?, &of(&sin, &t[0])?)),
            },
        ];
        for DropIn { name, inputs, ours, fused, composed } in &cases {
            assert_derivative(name, inputs, ours);
            for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::F16, 5e-3), (DType::BF16, 4e-2)]
            {
                let what = format!("{name} of {dtype:?}, {b}x{h}x{t}x{d}");
                let rounded = inputs.iter().map(|t| t.to_dtype(dtype)).collect::<Result<Vec<_>>>()?;
                let got = outcome(&rounded, dtype, ours)?;
                assert_close(&what, &got, &outcome(&rounded, DType::F64, composed)?, tolerance);
                // Candle's fused norms take no f64.
                if dtype != DType::F64 || !name.contains("norm") {
                    let candle = fused(&rounded)?;
                    assert_eq!((ours(&rounded)?.dims(), candle.dtype()), (candle.dims(), dtype), "{what}");
                    let candle = candle.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
                    assert_close(&format!("{what}, fused"), &got[..1], &[candle], tolerance);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn drop_ins_take_strided_and_empty_rows() -> Result<()> {
    let vector = |salt| numbers(&[6], salt);
    let x = numbers(&[2, 6, 5], 0)?;
    assert_same("rms norm", &[x.clone(), vector(5)?], 2e-5, |t| ops::rms_norm(&t[0].transpose(1, 2)?, &t[1], 1e-5));
    assert_same("softmax", &[x], 1e-5, |t| ops::softmax(&t[0].transpose(1, 2)?));
    let (cos, sin) = (numbers(&[5, 3], 1)?, numbers(&[5, 3], 2)?);
    for (name, rotary) in ROTARIES {
        for (from, [one, other]) in [([2, 5, 3, 6], [1, 2]), ([2, 3, 6, 5], [2, 3])] {
            assert_same(name, &[numbers(&from, 0)?], 1e-6, |t| rotary(&t[0].transpose(one, other)?, &cos, &sin));
        }
    }
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let of = |dims: &[usize]| Tensor::zeros(dims, dtype, &Device::Cpu);
        for dims in [[0, 3, 5, 6], [2, 3, 0, 6], [2, 3, 5, 0]] {
            let (x, d, t) = (of(&dims)?, dims[3], dims[2]);
            let (w, table) = (of(&[d])?, of(&[t, d / 2])?);
            let mut all = vec![ops::layer_norm(&x, &w, &w, 1e-5)?, ops::rms_norm(&x, &w, 1e-5)?, ops::softmax(&x)?];
            for (_, rotary) in ROTARIES {
                all.push(rotary(&x, &table, &table)?);
            }
            assert!(all.iter().all(|y| y.dims() == dims && y.dtype() == dtype), "{dtype:?} {dims:?}");
        }
    }
    Ok(())
}

type Turn = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

const ROTARIES: [(&str, Turn); 2] = [("halves", ops::rotary), ("neighbours", ops::rotary_interleaved)];

#[test]
fn rotary_tables_may_be_longer_of_each_sequence_and_trained() -> Result<()> {
    let (x, angles) = (numbers(&[3, 2, 4, 6], 0)?, numbers(&[3, 4, 3], 1)?);
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    for (name, rotary) in ROTARIES {
        // With a table for each sequence, each sequence is turned as if it were alone.
        let alone = |i: usize| rotary(&x.narrow(0, i, 1)?, &cos.get(i)?, &sin.get(i)?);
        let want = Tensor::cat(&[alone(0)?, alone(1)?, alone(2)?], 0)?;
        let difference = |y: &Tensor| (y - &want)?.abs()?.max_all()?.to_scalar::<f64>();
        assert_eq!(difference(&rotary(&x, &cos, &sin)?)?, 0.0, "{name}");
        let fused = rotary(&x.to_dtype(DType::F32)?, &cos, &sin)?.to_dtype(DType::F64)?;
        assert!(difference(&fused)? < 1e-6, "{name}, fused");
        // What a table has beyond the tokens changes nothing.
        let longer = |t: &Tensor| t.pad_with_same(1, 0, 2);
        assert_eq!(difference(&rotary(&x, &longer(&cos)?, &longer(&sin)?)?)?, 0.0, "{name}");
        assert_same(name, std::slice::from_ref(&x), 1e-6, |t| rotary(&t[0], &longer(&cos)?, &longer(&sin)?));
        // The angles are trained, so there are gradients of all three.
        let inputs = [x.clone(), cos.clone(), sin.clone()];
        assert_derivative(name, &inputs, |t| rotary(&t[0], &t[1], &t[2]));
        assert_same(name, &inputs, 1e-6, |t| rotary(&t[0], &t[1], &t[2]));
        let flat = [x.clone(), cos.get(0)?, sin.get(0)?];
        assert_same(name, &flat, 1e-5, |t| rotary(&t[0], &t[1], &t[2]));

        for (cos, sin) in [
            (cos.narrow(1, 0, 3)?, sin.narrow(1, 0, 3)?),
            (cos.narrow(0, 0, 2)?, sin.narrow(0, 0, 2)?),
            (cos.narrow(2, 0, 2)?, sin.narrow(2, 0, 2)?),
            (cos.clone(), sin.get(0)?),
            (cos.get(0)?.get(0)?, sin.get(0)?.get(0)?),
        ] {
            let message = rotary(&x, &cos, &sin).unwrap_err().to_string();
            assert!(message.contains("[3, 2, 4, 6]") && message.contains(&format!("{:?}", sin.dims())), "{message}");
        }
        let message = rotary(&x.get(0)?, &cos, &sin).unwrap_err().to_string();
        assert!(message.contains("(batch, heads, tokens, head dim)"), "{message}");
    }
    Ok(())
}

#[test]
fn linear_maps_match_their_formula() -> Result<()> {
    for (rows, k, n) in [(1, 1, 1), (5, 3, 17), (4, 64, 32)] {
        let inputs = [numbers(&[2, rows, k], 0)?, numbers(&[n, k], 5)?, numbers(&[n], 9)?];
        assert_same(&format!("{rows}x{k}x{n}"), &inputs, 1e-5, |t| ops::linear(&t[0], &t[1], Some(&t[2])));
    }
    let empty = Tensor::zeros((2, 0, 3), DType::F32, &Device::Cpu)?;
    let (weight, bias) = (numbers(&[4, 3], 0)?.to_dtype(DType::F32)?, numbers(&[4], 0)?.to_dtype(DType::F32)?);
    assert_eq!(ops::linear(&empty, &weight, Some(&bias))?.dims(), [2, 0, 4]);
    let message = ops::linear(&weight, &weight.t()?, None).unwrap_err().to_string();
    assert!(message.contains("last dimension must be 4"), "{message}");
    let message = ops::linear(&numbers(&[1, 3], 0)?.to_dtype(DType::F32)?, &weight, Some(&bias.narrow(0, 0, 2)?))
        .unwrap_err()
        .to_string();
    assert!(message.contains("it must be [4]"), "{message}");
    Ok(())
}

#[test]
fn swiglu_matches_its_formula() -> Result<()> {
    for shape in [[1, 1], [3, 17], [5, 64]] {
        let inputs = [(numbers(&shape, 0)? * 10.0)?, numbers(&shape, 5)?];
        assert_same(&format!("{shape:?}"), &inputs, 1e-5, |t| ops::swiglu(&t[0], &t[1]));
    }
    for (shape, dtype) in [([2, 3], DType::F32), ([3, 2], DType::F16)] {
        let error = ops::swiglu(&numbers(&[3, 2], 0)?.to_dtype(DType::F32)?, &numbers(&shape, 5)?.to_dtype(dtype)?);
        let error = error.expect_err("they do not fit").to_string();
        assert!(error.contains("one type and shape") && error.contains("[3, 2]"), "{error}");
    }
    let inputs = [numbers(&[6, 3], 0)?, numbers(&[3, 6], 5)?];
    assert_same("a strided gate", &inputs, 1e-5, |t| ops::swiglu(&t[0].t()?, &t[1]));
    assert_same("gates beyond e^88", &[(numbers(&[4, 4], 0)? * 100.0)?, numbers(&[4, 4], 5)?], 1e-5, |t| {
        ops::swiglu(&t[0], &t[1])
    });
    Ok(())
}

#[test]
fn gated_maps_are_their_parts_in_one() -> Result<()> {
    let separate = |t: &[Tensor]| ops::swiglu(&ops::linear(&t[0], &t[1], None)?, &ops::linear(&t[0], &t[2], None)?);
    let one = |t: &[Tensor]| ops::swiglu_linear(&t[0], &t[1], &t[2]);
    for (rows, k, n) in [(1, 1, 1), (5, 3, 17), (4, 64, 32)] {
        let inputs = [numbers(&[2, rows, k], 0)?, numbers(&[n, k], 5)?, numbers(&[n, k], 9)?];
        assert_same(&format!("{rows}x{k}x{n}"), &inputs, 1e-5, one);
        // There are two gradients of the rows, whose sum does not depend on their order.
        assert_eq!(outcome(&inputs, DType::F32, one)?, outcome(&inputs, DType::F32, separate)?);
    }
    let strided = [numbers(&[4, 3, 2], 0)?, numbers(&[5, 4], 5)?, numbers(&[5, 4], 9)?];
    assert_same("strided", &strided, 1e-5, |t| ops::swiglu_linear(&t[0].transpose(0, 2)?, &t[1], &t[2]));
    let f32s = |shape: &[usize]| numbers(shape, 0)?.to_dtype(DType::F32);
    assert_eq!(ops::swiglu_linear(&f32s(&[2, 0, 3])?, &f32s(&[4, 3])?, &f32s(&[4, 3])?)?.dims(), [2, 0, 4]);
    for (gate, up, part) in [([4, 3], [5, 3], "[5, 3]"), ([4, 2], [4, 2], "last dimension must be 2")] {
        let error = ops::swiglu_linear(&f32s(&[2, 3])?, &f32s(&gate)?, &f32s(&up)?).expect_err("they do not fit");
        assert!(error.to_string().contains(part), "{error}");
    }
    // The backward pass may run again, and weights that are fixed get nothing.
    let [x, gate, up] =
        [Var::from_tensor(&f32s(&[2, 3])?)?, Var::from_tensor(&f32s(&[4, 3])?)?, Var::from_tensor(&f32s(&[4, 3])?)?];
    let loss = ops::swiglu_linear(&x, &gate.detach(), &up)?.sqr()?.sum_all()?;
    let gradient = || -> Result<Vec<Vec<f32>>> {
        let gradients = loss.backward()?;
        assert!(gradients.get(&gate).is_none() && gradients.get(&up).is_some());
        gradients.get(&x).expect("rows have a gradient").to_vec2()
    };
    assert_eq!(gradient()?, gradient()?);
    Ok(())
}

#[test]
fn linear_maps_add_to_residuals() -> Result<()> {
    for with_bias in [false, true] {
        let bias = |t: &[Tensor]| with_bias.then(|| t[2].clone());
        let one = |t: &[Tensor]| ops::linear_residual(&t[0], &t[1], bias(t).as_ref(), &t[t.len() - 1]);
        let separate = |t: &[Tensor]| &t[t.len() - 1] + ops::linear(&t[0], &t[1], bias(t).as_ref())?;
        for (rows, k, n) in [(1, 1, 1), (5, 3, 17), (4, 64, 32)] {
            let mut inputs = vec![numbers(&[2, rows, k], 0)?, numbers(&[n, k], 5)?];
            inputs.extend(with_bias.then(|| numbers(&[n], 9)).transpose()?);
            inputs.push(numbers(&[2, rows, n], 3)?);
            assert_same(&format!("{rows}x{k}x{n}"), &inputs, 1e-5, one);
            assert_eq!(outcome(&inputs, DType::F32, one)?, outcome(&inputs, DType::F32, separate)?);
        }
    }
    let inputs = [numbers(&[3, 2], 0)?, numbers(&[5, 2], 5)?, numbers(&[5, 3], 3)?];
    assert_same("strided", &inputs, 1e-5, |t| ops::linear_residual(&t[0], &t[1], None, &t[2].t()?));
    let f32s = |shape: &[usize]| numbers(shape, 0)?.to_dtype(DType::F32);
    let empty = ops::linear_residual(&f32s(&[2, 0, 3])?, &f32s(&[4, 3])?, None, &f32s(&[2, 0, 4])?)?;
    assert_eq!(empty.dims(), [2, 0, 4]);
    let nothing = ops::linear_residual(&f32s(&[2, 0])?, &f32s(&[4, 0])?, None, &f32s(&[2, 4])?)?;
    assert_eq!(nothing.to_vec2::<f32>()?, f32s(&[2, 4])?.to_vec2::<f32>()?);
    for residual in [f32s(&[1, 4])?, f32s(&[2, 4])?.to_dtype(DType::F64)?] {
        let error =
            ops::linear_residual(&f32s(&[2, 3])?, &f32s(&[4, 3])?, None, &residual).expect_err("it does not fit");
        assert!(error.to_string().contains("cannot be added"), "{error}");
    }
    Ok(())
}

#[test]
fn rotary_positions_match_their_formula() -> Result<()> {
    for [b, h, t, d] in [[1, 1, 1, 2], [2, 3, 5, 6], [1, 2, 63, 64]] {
        let rotary = Rotary::new(d, 100, 1e4, &Device::Cpu)?;
        assert_same("rows", &[numbers(&[b, h, t, d], 0)?], 1e-6, |x| rotary.apply(&x[0], 30));
        // The heads lie inside tokens, as in a layer.
        assert_same("heads", &[numbers(&[b, t, h, d], 0)?], 1e-6, |x| rotary.apply(&x[0].transpose(1, 2)?, 30));
        assert_same("strided rows", &[numbers(&[b, h, d, t], 0)?], 1e-6, |x| rotary.apply(&x[0].t()?, 30));
    }
    Ok(())
}

#[test]
fn half_types_meet_f32_weights() -> Result<()> {
    let f32s = |shape: &[usize], salt| numbers(shape, salt)?.to_dtype(DType::F32);
    let (x, w, b) = (f32s(&[3, 8], 0)?, f32s(&[5, 8], 5)?, f32s(&[5], 9)?);
    let gain = f32s(&[8], 3)?;
    type Op<'a> = (&'a str, Box<dyn Fn(&Tensor, &Var) -> Result<Tensor> + 'a>);
    let ops: [Op; 7] = [
        ("linear", Box::new(|x, w| ops::linear(x, w, Some(&b)))),
        ("layer norm", Box::new(|x, w| ops::layer_norm(x, &w.get(0)?, &gain, 1e-5))),
        ("rms norm", Box::new(|x, w| ops::rms_norm(x, &w.get(0)?, 1e-5))),
        ("cross-entropy", Box::new(|x, w| ops::linear_cross_entropy(x, w, &[0, 4, 2][..].into()))),
        ("linear with residual", Box::new(|x, w| ops::linear_residual(x, w, None, &x.narrow(1, 0, 5)?))),
        ("gated maps", Box::new(|x, w| ops::swiglu_linear(x, w, &(w.as_tensor() * 0.5)?))),
        ("swiglu", Box::new(|x, w| ops::swiglu(x, &w.narrow(0, 0, 3)?.to_dtype(x.dtype())?))),
    ];
    for (name, op) in ops {
        let run = |dtype| -> Result<[Tensor; 3]> {
            let (x, w) = (Var::from_tensor(&x.to_dtype(dtype)?)?, Var::from_tensor(&w)?);
            let out = op(&x, &w)?;
            let gradients = out.to_dtype(DType::F32)?.sqr()?.sum_all()?.backward()?;
            let of = |v: &Var| gradients.get(v).cloned().expect("every input has a gradient");
            assert_eq!([of(&x).dtype(), of(&w).dtype()], [dtype, DType::F32], "{name}");
            Ok([out, of(&x), of(&w)])
        };
        for dtype in [DType::BF16, DType::F16] {
            for (got, want) in run(dtype)?.iter().zip(&run(DType::F32)?) {
                let largest = want.abs()?.max_all()?.to_scalar::<f32>()?.max(1.0);
                let error = (got.to_dtype(DType::F32)? - want)?.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(error < 0.03 * largest, "{name} of {dtype:?}: {error} of {largest}");
            }
        }
    }
    Ok(())
}

#[test]
fn linear_maps_take_strided_rows_and_spare_what_is_fixed() -> Result<()> {
    let inputs = [numbers(&[3, 7, 2], 0)?, numbers(&[5, 3], 5)?];
    assert_same("strided", &inputs, 1e-5, |t| ops::linear(&t[0].transpose(0, 2)?, &t[1], None));
    let (x, w) = (Var::from_tensor(&inputs[0].t()?.contiguous()?)?, Var::from_tensor(&numbers(&[5, 7], 5)?)?);
    let gradients = |x: &Tensor, w: &Tensor| ops::linear(x, w, None)?.sqr()?.sum_all()?.backward();
    let all = gradients(&x, &w)?;
    for (of, fixed, some) in [(&x, &w, gradients(&x, &w.detach())?), (&w, &x, gradients(&x.detach(), &w)?)] {
        let (got, want) = (some.get(of).unwrap(), all.get(of).unwrap());
        assert_eq!(got.flatten_all()?.to_vec1::<f64>()?, want.flatten_all()?.to_vec1::<f64>()?);
        assert!(some.get(fixed).is_none());
    }
    Ok(())
}

#[test]
fn embeddings_are_rows_of_the_table() -> Result<()> {
    let table = Var::from_tensor(&numbers(&[4, 3], 0)?.to_dtype(DType::F32)?)?;
    let ids = Tensor::new(&[[2u32, 0], [2, 3]], &Device::Cpu)?;
    let rows = ops::embedding(&table, &ids)?;
    assert_eq!(rows.dims(), [2, 2, 3]);
    assert_eq!(rows.get(1)?.get(0)?.to_vec1::<f32>()?, table.get(2)?.to_vec1::<f32>()?);
    let gradients = rows.sum_all()?.backward()?;
    let counts = gradients.get(&table).map(|g| g.sum(1)).transpose()?.map(|g| g.to_vec1::<f32>()).transpose()?;
    assert_eq!(counts, Some(vec![3.0, 0.0, 6.0, 3.0]));
    Ok(())
}

/// The derivative of GELU is 1 or 0 far from 0, and so is what is computed, however far.
#[test]
fn gelu_has_a_gradient_far_from_zero() -> Result<()> {
    let x = Var::from_tensor(&Tensor::new(&[-3e38f32, -1e20, -50.0, 50.0, 1e20, 3e38], &Device::Cpu)?)?;
    let gradient = ops::gelu(&x)?.sum_all()?.backward()?.get(&x).expect("a gradient").to_vec1::<f32>()?;
    assert_eq!(gradient, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    Ok(())
}

/// Both sides of the map `elu` have the derivative 1 at 0.
#[test]
fn elu_has_the_gradient_one_at_zero() -> Result<()> {
    let x = Var::zeros((1, 3), DType::F64, &Device::Cpu)?;
    let Features::Log(log) = Elu::new(3).features(&x)? else { panic!("logarithms") };
    assert_eq!(log.sum_all()?.backward()?.get(&x).expect("a gradient").to_vec2::<f64>()?, [[1.0; 3]]);
    Ok(())
}

/// The largest number of a type is an id like others, which Candle takes for a missing row; a table
/// may be a transposed view.
#[test]
fn the_largest_id_is_a_row_or_refused() -> Result<()> {
    let table = Tensor::arange(0f32, 512.0, &Device::Cpu)?.reshape((2, 256))?.t()?;
    let rows = ops::embedding(&table, &Tensor::new(&[255u8, 0], &Device::Cpu)?)?;
    assert_eq!(rows.to_vec2::<f32>()?, [[255.0, 511.0], [0.0, 256.0]]);
    for ids in [[u32::MAX, 0], [1, 256]] {
        assert!(ops::embedding(&table, &Tensor::new(&ids, &Device::Cpu)?).is_err(), "{ids:?}");
    }
    assert!(ops::embedding(&table, &Tensor::new(&[i64::MAX], &Device::Cpu)?).is_err());
    Ok(())
}
