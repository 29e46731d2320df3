//! The tape's backward pass against Candle's: the same bits, for fewer additions.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use performer_core::{AttentionConfig, Inputs, LayerParts, Mask, MultiHeadAttention, MultiHeadConfig, Tape, ops};

fn random(shape: &[usize], seed: u64) -> Result<Tensor> {
    let count = shape.iter().product::<usize>() as u64;
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let numbers: Vec<f32> = (0..count)
        .map(|_| {
            x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        })
        .collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}

fn bits(t: &Tensor) -> Result<Vec<u32>> {
    // Candle turns a gradient of −0 into +0.
    Ok(t.flatten_all()?.to_vec1::<f32>()?.into_iter().map(|x| (x + 0.0).to_bits()).collect())
}

/// Compares the gradients of all variables, and says how many tensors the tape does not know.
fn compare(vars: &[Var], loss: impl Fn() -> Result<Tensor>) -> Result<usize> {
    let want = loss()?.backward()?;
    let tape = Tape::start();
    let loss = loss()?;
    let unrecorded = tape.unrecorded(&loss);
    let got = tape.backward(&loss)?;
    for (i, var) in vars.iter().enumerate() {
        let (want, got) = (want.get(var).map(bits).transpose()?, got.get(var).map(bits).transpose()?);
        assert!(want == got, "gradients of variable {i} differ");
    }
    Ok(unrecorded)
}

/// A gradient that is given goes back as that of a loss which has it, whether the tape knows all
/// operations or not; it stays as it is, and one that does not fit is refused.
#[test]
fn a_given_gradient_goes_back() -> Result<()> {
    let [x, w, given] = [(&[5, 8][..], 1), (&[6, 8], 2), (&[5, 6], 3)].map(|(shape, seed)| random(shape, seed));
    let (x, w, given) = (Var::from_tensor(&x?)?, Var::from_tensor(&w?)?, given?);
    let known = || ops::scale(&ops::linear(&x, &w, None)?, 1.5);
    let unknown = || known()?.affine(1.0, 2.0);
    for (out, unrecorded) in [(&known as &dyn Fn() -> Result<Tensor>, 0), (&unknown, 1)] {
        let want = (out()? * &given)?.sum_all()?.backward()?;
        let tape = Tape::start();
        let out = out()?;
        assert_eq!(tape.unrecorded(&out), unrecorded);
        let got = tape.backward_from(&out, &given)?;
        for var in [&x, &w] {
            let [want, got] = [&want, &got].map(|store| bits(store.get(var).expect("a gradient")));
            assert_eq!(want?, got?);
        }
    }
    assert_eq!(bits(&given)?, bits(&random(&[5, 6], 3)?)?);
    // A gradient is a constant, though it was computed from a variable itself.
    let computed = (ops::linear(&x, &w, None)? * 2.0)?;
    for out in [&known as &dyn Fn() -> Result<Tensor>, &unknown] {
        let tape = Tape::start();
        let out = out()?;
        let got = tape.backward_from(&out, &computed)?;
        let want = (&out * computed.detach())?.sum_all()?.backward()?;
        assert_eq!(bits(got.get(&x).expect("a gradient"))?, bits(want.get(&x).expect("a gradient"))?);
    }
    let tape = Tape::start();
    let error = tape.backward_from(&known()?, &x).expect_err("a gradient of another shape").to_string();
    assert!(error.contains("the gradient is F32 [5, 8]") && error.contains("F32 [5, 6]"), "{error}");
    // A variable's gradient is memory of its own.
    let tape = Tape::start();
    let own = tape.backward_from(&x, &given.zeros_like()?.pad_with_zeros(1, 0, 2)?)?;
    assert_eq!(own.get(&x).expect("a gradient").dims(), [5, 8]);
    Ok(())
}

#[test]
fn plain_operations_have_candles_gradients() -> Result<()> {
    let vars = [(&[2, 3, 8][..], 1), (&[6, 8], 2), (&[6], 3), (&[2, 6, 2], 4)]
        .map(|(shape, seed)| Var::from_tensor(&random(shape, seed).unwrap()).unwrap());
    let [x, w, b, z] = &vars;
    let unrecorded = compare(&vars, || {
        let y = ops::linear(x, w, Some(b))?;
        // `y` is used three times, and so are the views of it.
        let swapped = ops::transpose(&y, 1, 2)?;
        let part = ops::narrow(&swapped, 2, 1, 2)?;
        let sum = ops::add(&ops::scale(&part, -1.5)?, z)?;
        let flat = ops::reshape(&sum, (4, 6))?;
        let wide = ops::reshape(&y, (6, 6))?;
        let other = ops::linear(&flat, &ops::reshape(&ops::narrow(&wide, 0, 2, 1)?, (1, 6))?, None)?;
        let gated = ops::swiglu(&y, &y)?;
        let norm = ops::rms_norm(&gated, b, 1e-5)?;
        let last = ops::linear(&norm, &ops::reshape(&ops::narrow(&wide, 0, 0, 1)?, (1, 6))?, None)?;
        ops::add(&ops::narrow(&ops::reshape(&last, 6)?, 0, 0, 4)?, &ops::reshape(&other, 4)?)
    })?;
    assert_eq!(unrecorded, 0);
    Ok(())
}

/// A mask of keys moves gates from token to token, which the tape records as well.
#[test]
fn gates_under_a_mask_have_candles_gradients() -> Result<()> {
    let [q, k, v] = [21, 22, 23].map(|seed| Var::from_tensor(&random(&[2, 2, 9, 4], seed).unwrap()).unwrap());
    let gates = Var::from_tensor(&(random(&[2, 2, 9], 24)? - 0.6)?)?;
    let visible = Tensor::new(&[[1u8, 1, 0, 0, 0, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1, 1, 1, 0]], &Device::Cpu)?;
    let mask = Mask::causal().with_keys(&visible)?;
    for attention in ["softmax", "favor:m=8", "favor:m=8,map=learned", "favor:m=8,window=3"] {
        let config: AttentionConfig = attention.parse().expect("an attention");
        let attention = config.build(4, 1, DType::F32, &Device::Cpu)?;
        let vars = [q.clone(), k.clone(), v.clone(), gates.clone()];
        let unrecorded = compare(&vars, || {
            ops::sum_all(&ops::sqr(&attention.forward(Inputs::new(&q, &k, &v).with_gates(&gates), &mask)?)?)
        })?;
        assert_eq!(unrecorded, 0, "{attention:?}");
    }
    Ok(())
}

/// No gradient passes through a product with 0, in Candle's backward pass and in the tape's.
#[test]
fn a_product_with_zero_has_no_gradient() -> Result<()> {
    let vars = [31, 32].map(|seed| Var::from_tensor(&random(&[2, 3], seed).unwrap()).unwrap());
    let [x, y] = &vars;
    let unrecorded = compare(&vars, || ops::sum_all(&ops::add(&ops::affine(x, 0.0, 2.0)?, &ops::sqr(y)?)?))?;
    assert_eq!(unrecorded, 0);
    Ok(())
}

#[test]
fn arithmetic_has_candles_gradients() -> Result<()> {
    let vars = [(&[2, 3, 5][..], 11), (&[2, 3, 5], 12), (&[3, 1], 13)]
        .map(|(shape, seed)| Var::from_tensor(&random(shape, seed).unwrap()).unwrap());
    let [x, y, row] = &vars;
    let constant = random(&[2, 3, 5], 14)?;
    let unrecorded = compare(&vars, || {
        // All are used several times, so that the order of additions counts.
        let row = ops::broadcast_as(row, (2, 3, 5))?;
        let weights = ops::exp(&ops::sub(x, &row)?)?;
        let quotient = ops::div(&ops::mul(y, &weights)?, &ops::affine(&ops::sqr(x)?, 0.5, 1.5)?)?;
        let sums = ops::broadcast_as(&ops::sum_last(&ops::mul(&quotient, &constant)?)?, (2, 3, 5))?;
        let gelu = ops::gelu_erf(&ops::add(&quotient, &row)?)?;
        ops::mul(&ops::sub(&sums, &gelu)?, &ops::div(&weights, &ops::affine(y, 0.5, 2.0)?)?)
    })?;
    assert_eq!(unrecorded, 0);
    Ok(())
}

#[test]
fn a_tensor_that_is_added_to_each_has_the_sum_of_their_gradients() -> Result<()> {
    let vars = [Var::from_tensor(&random(&[2, 3, 4], 1)?)?, Var::from_tensor(&random(&[3, 4], 2)?)?];
    let unrecorded = compare(&vars, || ops::add_to_each(&ops::sqr(&vars[0])?, &ops::sqr(&vars[1])?))?;
    assert_eq!(unrecorded, 0);
    // Candle would repeat these, and the gradients would have other shapes than they.
    for (a, b) in [(&[3, 4][..], &[1, 4][..]), (&[4], &[3, 4]), (&[2, 3, 4], &[2, 1, 1])] {
        let error = ops::add_to_each(&random(a, 1)?, &random(b, 2)?).expect_err("shapes that do not fit").to_string();
        assert!(error.contains(&format!("{a:?} and b {b:?}")), "{error}");
    }
    Ok(())
}

/// Added one by one, ones of bf16 stop growing at 256, and those of f16 at 2048.
#[test]
fn gradients_of_half_types_are_added_in_f32() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let var = Var::zeros((1, 1), dtype, &Device::Cpu)?;
        let all = Tensor::zeros((4096, 1, 1), dtype, &Device::Cpu)?;
        let tape = Tape::start();
        let gradients = tape.backward(&ops::add_to_each(&all, &var)?)?;
        assert_eq!(gradients.get(&var).unwrap().to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?, [4096.0]);
        let tape = Tape::start();
        let gradients = tape.backward(&ops::broadcast_as(&var, (4096, 1, 1))?)?;
        assert_eq!(gradients.get(&var).unwrap().to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?, [4096.0]);
        let ids = Tensor::zeros(4096, DType::U32, &Device::Cpu)?;
        let tape = Tape::start();
        let gradients = tape.backward(&ops::index_select(&var, &ids)?)?;
        assert_eq!(gradients.get(&var).unwrap().to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?, [4096.0]);
    }
    Ok(())
}

#[test]
fn an_operation_that_is_not_recorded_makes_it_candles_backward_pass() -> Result<()> {
    let vars = [Var::from_tensor(&random(&[3, 4], 5)?)?, Var::from_tensor(&random(&[2, 4], 6)?)?];
    let unrecorded = compare(&vars, || {
        let y = ops::linear(&vars[0], &vars[1], None)?;
        ops::scale(&y.tanh()?, 0.5)
    })?;
    assert_eq!(unrecorded, 1);
    Ok(())
}

/// Whoever gets gradients may write to them, so no two variables share memory.
#[test]
fn gradients_of_variables_are_memory_of_their_own() -> Result<()> {
    let (a, b) = (Var::from_tensor(&random(&[4], 7)?)?, Var::from_tensor(&random(&[4], 8)?)?);
    let tape = Tape::start();
    let gradients = tape.backward(&ops::add(&a, &ops::reshape(&b, 4)?)?)?;
    let address = |var: &Var| -> Result<*const f32> {
        let (storage, _) = gradients.get(var).unwrap().storage_and_layout();
        match &*storage {
            candle_core::Storage::Cpu(storage) => Ok(storage.as_slice::<f32>()?.as_ptr()),
            _ => unreachable!("on the CPU"),
        }
    };
    assert_ne!(address(&a)?, address(&b)?);
    // The gradients of both sums and of both residuals are the one that comes from the loss.
    let vars = [(&[3, 4][..], 1), (&[2, 4], 2), (&[3, 2], 3), (&[3, 2], 4)]
        .map(|(shape, seed)| Var::from_tensor(&random(shape, seed).unwrap()).unwrap());
    let [x, weight, first, second] = &vars;
    let tape = Tape::start();
    let with = |residual: &Var| ops::linear_residual(x, weight, None, residual);
    let gradients = tape.backward(&ops::add(&with(first)?, &with(second)?)?)?;
    let address = |var: &Var| -> Result<*const f32> {
        let (storage, _) = gradients.get(var).unwrap().storage_and_layout();
        match &*storage {
            candle_core::Storage::Cpu(storage) => Ok(storage.as_slice::<f32>()?.as_ptr()),
            _ => unreachable!("on the CPU"),
        }
    };
    assert_ne!(address(first)?, address(second)?);
    Ok(())
}

/// The gradients of a norm's weight and bias come as two halves of one tensor.
#[test]
fn gradients_of_variables_begin_where_their_memory_begins() -> Result<()> {
    let vars = [(&[6, 8][..], 1), (&[8], 2), (&[8], 3)]
        .map(|(shape, seed)| Var::from_tensor(&random(shape, seed).unwrap()).unwrap());
    let tape = Tape::start();
    let gradients = tape.backward(&ops::sum_all(&ops::layer_norm(&vars[0], &vars[1], &vars[2], 1e-5)?)?)?;
    for var in &vars {
        let gradient = gradients.get(var).unwrap();
        let (storage, layout) = gradient.storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*storage else { unreachable!("on the CPU") };
        assert_eq!((layout.start_offset(), storage.as_slice::<f32>()?.len()), (0, gradient.elem_count()));
    }
    Ok(())
}

#[test]
fn tapes_may_lie_in_each_other_and_end() -> Result<()> {
    let x = Var::from_tensor(&random(&[2, 2], 9)?)?;
    let outer = Tape::start();
    let first = ops::scale(&x, 2.0)?;
    {
        let inner = Tape::start();
        let second = ops::scale(&x, 3.0)?;
        assert_eq!((inner.unrecorded(&second), inner.unrecorded(&first)), (0, 1));
    }
    assert_eq!(outer.unrecorded(&first), 0);
    assert_eq!(outer.unrecorded(&ops::to_dtype(&first, DType::F64)?), 0);
    drop(outer);
    assert_eq!(Tape::start().unrecorded(&first), 1);
    // Tapes may end in the order in which they began. The later one records until it ends, and
    // each has its own records whether or not it is the last.
    let earlier = Tape::start();
    let first = ops::scale(&x, 2.0)?;
    let later = Tape::start();
    let second = ops::scale(&x, 3.0)?;
    assert_eq!(bits(earlier.backward(&first)?.get(&x).expect("a gradient"))?, vec![2f32.to_bits(); 4]);
    drop(earlier);
    assert_eq!(later.unrecorded(&second), 0);
    drop(later);
    // Nothing records any more.
    let third = ops::scale(&x, 4.0)?;
    assert_eq!(Tape::start().unrecorded(&third), 1);
    // A tensor that no variable made has no gradients.
    let constant = random(&[2], 1)?;
    let tape = Tape::start();
    assert!(tape.backward(&ops::scale(&constant, 2.0)?)?.get(&x).is_none());
    Ok(())
}

#[test]
fn layers_have_candles_gradients_and_nothing_in_them_is_unknown() -> Result<()> {
    // Windows that are shorter than the text, as long, and longer; values are one number wide in
    // the last layer.
    for (name, gate, head_dim) in [
        ("softmax", false, 8),
        ("favor:m=16", false, 8),
        ("favor:m=16,window=9", false, 8),
        ("favor:m=16,window=70", false, 8),
        ("favor:m=16,window=71", false, 8),
        ("favor:m=16,window=9,map=hyperbolic", true, 8),
        ("favor:m=16,window=9,map=learned", false, 8),
        ("favor:m=16,window=9,map=learned", true, 8),
        ("favor:map=exp,window=9", false, 8),
        ("favor:m=16,window=9", true, 1),
        ("favor:m=16|softmax:window=9", true, 8),
        // A map that is trained has parameters for the one key head of its group.
        ("favor:m=16,map=learned|softmax:window=9", true, 8),
    ] {
        let attention: AttentionConfig = name.parse().map_err(candle_core::Error::msg)?;
        let attention = attention.build(head_dim, 3, DType::F32, &Device::Cpu)?;
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let config = MultiHeadConfig::new(32, 4)
            .with_head_dim(head_dim)
            .with_kv_heads(2)
            .with_parts(LayerParts::default().with_gate(gate));
        let layer = MultiHeadAttention::new(&config, attention, None, vb)?;
        let x = Var::from_tensor(&random(&[2, 70, 32], 10)?)?;
        let vars: Vec<Var> = map.all_vars().into_iter().chain([x.clone()]).collect();
        let ones = Tensor::ones((1, 32), DType::F32, &Device::Cpu)?;
        let loss = || ops::linear(&layer.forward(&x, &Mask::causal())?, &ones, None);
        assert_eq!(loss()?.dim(D::Minus1)?, 1);
        let unrecorded = compare(&vars, loss)?;
        assert_eq!(unrecorded, 0, "{name}");
    }
    Ok(())
}

/// Integers have no gradient, neither by Candle nor by the tape.
#[test]
fn no_gradient_goes_through_integers() -> Result<()> {
    let x = Var::from_tensor(&(random(&[3, 4], 5)? * 100.0)?)?;
    let through = |x: &Tensor| ops::to_dtype(&ops::to_dtype(x, DType::I64)?, DType::F32);
    let loss = || ops::sum_all(&ops::add(&ops::sqr(&through(&x)?)?, &ops::scale(&x, 2.0)?)?);
    assert_eq!(compare(std::slice::from_ref(&x), loss)?, 0);
    Ok(())
}
