//! The fused operations around attention are compared with the same formulas in Candle's own
//! operations on f64.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use performer_core::{Rotary, ops};

/// Returns a fixed tensor without structure, with values in ±2.
fn numbers(shape: &[usize], salt: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| ((i + salt) as f64 * 12.9898).sin() * 2.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// Runs `f` on f32 and f64 variables and compares its output and every gradient, to `tolerance` of
/// the largest entry.
#[track_caller]
fn assert_same(what: &str, inputs: &[Tensor], tolerance: f64, f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let run = |dtype| -> Result<Vec<Tensor>> {
        let vars = inputs.iter().map(|t| Var::from_tensor(&t.to_dtype(dtype)?)).collect::<Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let out = f(&tensors)?;
        // Every output gets a weight of its own.
        let weights = numbers(out.dims(), 77)?.to_dtype(dtype)?;
        let gradients = (&out * weights)?.sum_all()?.backward()?;
        let mut all = vec![out];
        all.extend(vars.iter().map(|v| gradients.get(v).expect("every input has a gradient").clone()));
        all.into_iter().map(|t| t.to_dtype(DType::F64)?.flatten_all()).collect()
    };
    let (got, want) = (run(DType::F32).unwrap(), run(DType::F64).unwrap());
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let (got, want) = (got.to_vec1::<f64>().unwrap(), want.to_vec1::<f64>().unwrap());
        let largest = want.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
        for (j, (g, w)) in got.iter().zip(&want).enumerate() {
            assert!((g - w).abs() <= tolerance * largest, "{what}: tensor {i} has {g} at {j}, not {w}");
        }
    }
}

#[test]
fn norms_match_their_formulas() -> Result<()> {
    for (rows, e) in [(1, 1), (3, 7), (5, 16), (4, 64), (2, 100)] {
        let inputs = [numbers(&[2, rows, e], 0)?, numbers(&[e], 5)?, numbers(&[e], 9)?];
        let what = format!("{rows} rows of {e}");
        // One number minus its mean is 0, so its gradient is only rounding.
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
fn cross_entropy_matches_its_formula() -> Result<()> {
    // There are more rows than a tile has, and more tokens.
    for (n, e, vocabulary) in [(1, 1, 1), (3, 7, 5), (130, 16, 33), (65, 20, 2100)] {
        let inputs = [numbers(&[n, e], 0)?, numbers(&[vocabulary, e], 5)?];
        let targets: Vec<u32> = (0..n).map(|i| (i * 31 % vocabulary) as u32).collect();
        assert_same(&format!("{n} of {e} over {vocabulary}"), &inputs, 2e-5, |t| {
            ops::linear_cross_entropy(&t[0], &t[1], &targets)
        });
        // This is the formula itself.
        let logits = inputs[0].matmul(&inputs[1].t()?)?;
        let index = Tensor::from_vec(targets.clone(), (n, 1), &Device::Cpu)?;
        let log_sum = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
        let want = (log_sum - logits.gather(&index, 1)?)?.squeeze(1)?.to_vec1::<f64>()?;
        let f32s = [inputs[0].to_dtype(DType::F32)?, inputs[1].to_dtype(DType::F32)?];
        let got = ops::linear_cross_entropy(&f32s[0], &f32s[1], &targets)?.to_vec1::<f32>()?;
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 2e-5 * want.abs().max(1.0), "{got} is not {want}");
        }
    }
    Ok(())
}

#[test]
fn cross_entropy_goes_back_without_what_it_kept() -> Result<()> {
    let (n, e, vocabulary) = (130, 16, 2100);
    // The largest logits come last, after the first tiles were scaled by less.
    let ramp = Tensor::arange(0f32, vocabulary as f32, &Device::Cpu)?.affine(0.003, 0.1)?.reshape((vocabulary, 1))?;
    let w = numbers(&[vocabulary, e], 5)?.to_dtype(DType::F32)?.broadcast_mul(&ramp)?;
    let (x, w) = (Var::from_tensor(&numbers(&[n, e], 0)?.to_dtype(DType::F32)?)?, Var::from_tensor(&w)?);
    let targets: Vec<u32> = (0..n).map(|i| (i * 31 % vocabulary) as u32).collect();
    let loss = ops::linear_cross_entropy(&x, &w, &targets)?.sum_all()?;
    // The first backward pass uses up the exponentials that the forward pass kept, the second
    // computes them again.
    let (first, second) = (loss.backward()?, loss.backward()?);
    for var in [&x, &w] {
        let [a, b] = [&first, &second].map(|g| g.get(var).expect("a gradient").flatten_all()?.to_vec1::<f32>());
        let (a, b) = (a?, b?);
        let largest = b.iter().fold(0f32, |m, x| m.max(x.abs()));
        assert!(largest > 0.1);
        for (a, b) in a.iter().zip(&b) {
            assert!((a - b).abs() <= 1e-5 * largest, "{a} is not {b}");
        }
    }
    Ok(())
}

#[test]
fn logits_of_any_size_do_not_overflow() -> Result<()> {
    let x = Tensor::new(&[[300f32, 0.0], [-300.0, 1.0]], &Device::Cpu)?;
    let w = Tensor::new(&[[1f32, 0.0], [-1.0, 0.0], [0.0, 1.0]], &Device::Cpu)?;
    assert_eq!(ops::linear_cross_entropy(&x, &w, &[0, 0])?.to_vec1::<f32>()?, [0.0, 600.0]);
    Ok(())
}

#[test]
fn distillation_matches_its_formula() -> Result<()> {
    for (n, e, theirs, vocabulary) in [(1, 3, 5, 2), (70, 20, 9, 1500), (130, 16, 16, 40)] {
        let inputs = [numbers(&[n, e], 0)?, numbers(&[vocabulary, e], 5)?];
        let teacher = [numbers(&[n, theirs], 3)?, numbers(&[vocabulary, theirs], 8)?];
        let targets: Vec<u32> = (0..n).map(|i| (i * 31 % vocabulary) as u32).collect();
        for share in [0.0, 0.3, 1.0] {
            assert_same(&format!("{n} of {e} over {vocabulary}, share {share}"), &inputs, 2e-5, |t| {
                let [states, head] = [0, 1].map(|i| teacher[i].to_dtype(t[0].dtype()));
                ops::linear_distillation(&t[0], &t[1], &targets, (&states?, &head?), share)
            });
        }
        // A teacher equal to the student gives the student's own distribution: of its share only
        // entropy remains.
        let [x, w] = inputs.each_ref().map(|t| Var::from_tensor(&t.to_dtype(DType::F32)?));
        let (x, w) = (x?, w?);
        let same = ops::linear_distillation(&x, &w, &targets, (&x, &w), 1.0)?;
        let gradients = same.sum_all()?.backward()?;
        for var in [&x, &w] {
            let largest = gradients.get(var).expect("a gradient").abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(largest < 1e-4, "{largest}");
        }
        let fewer = w.narrow(0, 0, vocabulary - 1)?;
        let error = ops::linear_distillation(&x, &w, &vec![0; n], (&x, &fewer), 0.5).expect_err("another vocabulary");
        assert!(error.to_string().contains("the teacher has a vocabulary"), "{error}");
    }
    Ok(())
}

#[test]
fn cross_entropy_refuses_what_does_not_fit() -> Result<()> {
    let x = Tensor::zeros((2, 4), DType::F32, &Device::Cpu)?;
    let w = Tensor::zeros((5, 4), DType::F32, &Device::Cpu)?;
    for (w, targets, word) in
        [(&w, &[0][..], "one each"), (&w, &[0, 5], "vocabulary of 5"), (&w.t()?, &[0, 1], "hidden states")]
    {
        let message = ops::linear_cross_entropy(&x, w, targets).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
    Ok(())
}

#[test]
fn half_types_meet_f32_weights() -> Result<()> {
    let f32s = |shape: &[usize], salt| numbers(shape, salt)?.to_dtype(DType::F32);
    let (x, w, b) = (f32s(&[3, 8], 0)?, f32s(&[5, 8], 5)?, f32s(&[5], 9)?);
    let gain = f32s(&[8], 3)?;
    type Op<'a> = (&'a str, Box<dyn Fn(&Tensor, &Var) -> Result<Tensor> + 'a>);
    let ops: [Op; 5] = [
        ("linear", Box::new(|x, w| ops::linear(x, w, Some(&b)))),
        ("layer norm", Box::new(|x, w| ops::layer_norm(x, &w.get(0)?, &gain, 1e-5))),
        ("rms norm", Box::new(|x, w| ops::rms_norm(x, &w.get(0)?, 1e-5))),
        ("cross-entropy", Box::new(|x, w| ops::linear_cross_entropy(x, w, &[0, 4, 2]))),
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
