//! Losses of a linear head, from hidden states and from logits, with targets of every kind and with
//! a teacher, are compared with their formulas in Candle's own operations on f64.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use performer_core::ops::{self, Targets};

use crate::ops::{assert_close, assert_derivative, assert_same, numbers, outcome};

#[test]
fn cross_entropy_matches_its_formula() -> Result<()> {
    // There are more rows than a tile has, and more tokens.
    for (n, e, vocabulary) in [(1, 1, 1), (3, 7, 5), (130, 16, 33), (65, 20, 2100)] {
        let inputs = [numbers(&[n, e], 0)?, numbers(&[vocabulary, e], 5)?];
        let targets: Vec<u32> = (0..n).map(|i| (i * 31 % vocabulary) as u32).collect();
        assert_same(&format!("{n} of {e} over {vocabulary}"), &inputs, 2e-5, |t| {
            ops::linear_cross_entropy(&t[0], &t[1], &targets[..].into())
        });
        // This is the formula itself.
        let logits = inputs[0].matmul(&inputs[1].t()?)?;
        let index = Tensor::from_vec(targets.clone(), (n, 1), &Device::Cpu)?;
        let log_sum = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
        let want = (log_sum - logits.gather(&index, 1)?)?.squeeze(1)?.to_vec1::<f64>()?;
        let f32s = [inputs[0].to_dtype(DType::F32)?, inputs[1].to_dtype(DType::F32)?];
        let got = ops::linear_cross_entropy(&f32s[0], &f32s[1], &targets[..].into())?.to_vec1::<f32>()?;
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
    let loss = ops::linear_cross_entropy(&x, &w, &targets[..].into())?.sum_all()?;
    // The first uses up the exponentials of the forward pass, the second makes them again.
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
    assert_eq!(ops::linear_cross_entropy(&x, &w, &[0, 0][..].into())?.to_vec1::<f32>()?, [0.0, 600.0]);
    Ok(())
}

#[test]
fn distillation_matches_its_formula() -> Result<()> {
    // By themselves, a teacher and a student of such different widths would be cut into different
    // tiles. Heads are scaled, so that the logits of wide states are not so large that f32 has few
    // digits left for their differences.
    let wide = [(9, 20, 300, 1500, 0.1), (9, 300, 20, 1500, 0.1)];
    let sizes = [(1, 3, 5, 2, 1.0), (70, 20, 9, 1500, 1.0), (130, 16, 16, 40, 1.0)];
    for (n, e, theirs, vocabulary, scale) in sizes.into_iter().chain(wide) {
        let inputs = [numbers(&[n, e], 0)?, (numbers(&[vocabulary, e], 5)? * scale)?];
        let teacher = [numbers(&[n, theirs], 3)?, (numbers(&[vocabulary, theirs], 8)? * scale)?];
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
        for share in [-0.5, 1.5, f64::NAN] {
            let error = ops::linear_distillation(&x, &w, &targets, (&x, &w), share).expect_err("no share").to_string();
            assert!(error.contains("from 0 to 1"), "{error}");
        }
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
        let message = ops::linear_cross_entropy(&x, w, &targets.into()).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
    Ok(())
}

/// A `Loss` is cross-entropy from logits or from hidden states; the second tensor is the output
/// head.
type Loss = fn(&Tensor, &Tensor, &Targets) -> Result<Tensor>;

const LOSSES: [(&str, Loss); 2] = [
    ("head", ops::linear_cross_entropy),
    ("logits", |x, w, targets| ops::cross_entropy(&ops::linear(x, w, None)?, targets)),
];

#[test]
fn losses_take_tensors_of_targets_and_leave_positions_out() -> Result<()> {
    let (b, t, e, vocabulary) = (2, 5, 7, 11);
    let inputs = [numbers(&[b, t, e], 0)?, numbers(&[vocabulary, e], 5)?];
    let ids: Vec<i64> = vec![3, -100, 10, 0, 0, -100, -100, 7, 1, -100];
    let labels = Tensor::from_vec(ids.clone(), (b, t), &Device::Cpu)?;
    let counted: Vec<u32> = (0..10).filter(|&i| ids[i as usize] != -100).collect();
    let kept: Vec<u32> = counted.iter().map(|&i| ids[i as usize] as u32).collect();
    let places = Tensor::from_slice(&counted, counted.len(), &Device::Cpu)?;
    let some = Targets::new(&labels, Some(-100))?;
    assert_eq!(some.counted(), 6);
    // The formula is computed for the positions that count.
    let formula = |t: &[Tensor]| -> Result<Tensor> {
        let logits = t[0].flatten_to(1)?.index_select(&places, 0)?.matmul(&t[1].t()?)?;
        let index = Tensor::from_slice(&kept, (kept.len(), 1), &Device::Cpu)?;
        (logits.exp()?.sum_keepdim(1)?.log()? - logits.gather(&index, 1)?)?.mean_all()
    };
    for (name, loss) in LOSSES {
        let mean = |t: &[Tensor]| some.mean(&loss(&t[0], &t[1], &some)?);
        assert_derivative(name, &inputs, mean);
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::F16, 1e-2), (DType::BF16, 5e-2)] {
            let rounded = inputs.iter().map(|t| t.to_dtype(dtype)).collect::<Result<Vec<_>>>()?;
            let what = format!("{name} of {dtype:?}");
            assert_close(&what, &outcome(&rounded, dtype, mean)?, &outcome(&rounded, DType::F64, formula)?, tolerance);
        }
        // Shapes and types of targets change nothing, and neither does the slice of them.
        let [x, w] = inputs.each_ref().map(|t| t.to_dtype(DType::F32));
        let (x, w) = (x?, w?);
        let all: Vec<u32> = ids.iter().map(|&id| id.max(0) as u32).collect();
        let slice = loss(&x.flatten_to(1)?, &w, &all[..].into())?.to_vec1::<f32>()?;
        let tensor = Tensor::from_slice(&all, (b, t), &Device::Cpu)?;
        for labels in [tensor.clone(), tensor.to_dtype(DType::I64)?, tensor.t()?.contiguous()?.t()?] {
            let losses = loss(&x, &w, &Targets::new(&labels, None)?)?;
            assert_eq!(
                (losses.dims(), losses.flatten_all()?.to_vec1::<f32>()?),
                (&[b, t][..], slice.clone()),
                "{name}"
            );
        }
        // Class 0 of u32 targets is left out.
        let losses = loss(&x, &w, &Targets::new(&tensor, Some(0))?)?.flatten_all()?.to_vec1::<f32>()?;
        for ((left, whole), id) in losses.iter().zip(&slice).zip(&all) {
            let want = if *id == 0 { 0.0 } else { *whole };
            assert!((left - want).abs() < 1e-5, "{name}: {left} is not {want}");
        }
    }
    Ok(())
}

#[test]
fn positions_left_out_have_no_part_in_anything() -> Result<()> {
    let labels = Tensor::new(&[[1i64, -100], [-100, 2]], &Device::Cpu)?;
    let targets = Targets::new(&labels, Some(-100))?;
    // What a position that is left out holds must not reach the loss or a gradient, whatever it is.
    let mut states = numbers(&[2, 2, 4], 0)?.to_dtype(DType::F32)?.to_vec3::<f32>()?;
    states[0][1] = vec![f32::NAN; 4];
    states[1][0] = vec![f32::INFINITY; 4];
    let w = Var::from_tensor(&numbers(&[3, 4], 5)?.to_dtype(DType::F32)?)?;
    let x = Var::new(states, &Device::Cpu)?;
    // The rows are hidden states of the head, or logits of four classes.
    for (name, losses) in
        [("head", ops::linear_cross_entropy(&x, &w, &targets)?), ("logits", ops::cross_entropy(&x, &targets)?)]
    {
        let values = losses.to_vec2::<f32>()?;
        assert_eq!([values[0][1], values[1][0]], [0.0, 0.0], "{name}");
        assert!(values[0][0] > 0.0 && values[1][1] > 0.0, "{name}");
        let gradients = targets.mean(&losses)?.backward()?;
        let of_x = gradients.get(&x).expect("a gradient").to_vec3::<f32>()?;
        assert_eq!([&of_x[0][1], &of_x[1][0]], [&[0.0; 4], &[0.0; 4]], "{name}");
        assert!(of_x[0][0].iter().chain(&of_x[1][1]).all(|g| g.is_finite() && *g != 0.0), "{name}");
        if let Some(of_w) = gradients.get(&w) {
            assert!(of_w.abs()?.sum_all()?.to_scalar::<f32>()?.is_finite(), "{name}");
        }
    }
    let none = Targets::new(&Tensor::new(&[-1i64, -1], &Device::Cpu)?, Some(-1))?;
    let x = x.get(0)?;
    for (name, loss) in LOSSES {
        let losses = loss(&x, &w, &none)?;
        assert_eq!(losses.to_vec1::<f32>()?, [0.0, 0.0], "{name}");
        let message = none.mean(&losses).unwrap_err().to_string();
        assert!(message.contains("none of the targets"), "{message}");
    }
    Ok(())
}

#[test]
fn targets_that_do_not_fit_are_refused() -> Result<()> {
    let of = |ids: &[[i64; 2]; 2]| Tensor::new(ids, &Device::Cpu);
    let message = Targets::new(&of(&[[0, 1], [-100, 2]])?, Some(-1)).unwrap_err().to_string();
    assert!(["-100", "[1, 0]", "Some(-100)"].iter().all(|part| message.contains(part)), "{message}");
    let message = Targets::new(&of(&[[0, 1], [1 << 32, 2]])?, None).unwrap_err().to_string();
    assert!(message.contains("4294967296"), "{message}");
    let message = Targets::new(&of(&[[0, 1], [1, 2]])?.to_dtype(DType::F32)?, None).unwrap_err().to_string();
    assert!(message.contains("F32") && message.contains("u32 or i64"), "{message}");
    let (x, w) = (numbers(&[2, 2, 3], 0)?, numbers(&[5, 3], 1)?);
    for (name, loss) in LOSSES {
        // The first position is left out, so that the second counted one is the bad one.
        let beyond = Targets::new(&of(&[[-100, 4], [5, 0]])?, Some(-100))?;
        let message = loss(&x, &w, &beyond).unwrap_err().to_string();
        assert!(["target 5", "[1, 0]", "vocabulary of 5"].iter().all(|part| message.contains(part)), "{message}");
        let message = loss(&x.flatten_to(1)?, &w, &Targets::new(&of(&[[0, 1], [2, 3]])?, None)?);
        let message = message.unwrap_err().to_string();
        assert!(["[4, ", "[2, 2]", "one each"].iter().all(|part| message.contains(part)), "{name}: {message}");
        let empty = Targets::new(&Tensor::zeros((0, 2), DType::U32, &Device::Cpu)?, None)?;
        assert_eq!(loss(&x.narrow(0, 0, 0)?, &w, &empty)?.dims(), [0, 2], "{name}");
        let message = beyond.mean(&Tensor::zeros(4, DType::F32, &Device::Cpu)?).unwrap_err().to_string();
        assert!(message.contains("[4]") && message.contains("[2, 2]"), "{message}");
    }
    Ok(())
}

/// Logits may be a transposed view, also where some targets are left out.
#[test]
fn logits_may_have_any_strides() -> Result<()> {
    let logits = Tensor::arange(0f32, 12.0, &Device::Cpu)?.sin()?.reshape((4, 3))?;
    let targets = Targets::new(&Tensor::new(&[2i64, -100, 0], &Device::Cpu)?, Some(-100))?;
    let strided = ops::cross_entropy(&logits.t()?, &targets)?;
    let expected = ops::cross_entropy(&logits.t()?.contiguous()?, &targets)?;
    assert_eq!(strided.to_vec1::<f32>()?, expected.to_vec1::<f32>()?);
    assert_eq!(strided.to_vec1::<f32>()?[1], 0.0);
    Ok(())
}
