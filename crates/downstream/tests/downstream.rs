//! What an application does with an attention and a feature map of its own.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{AdamW, Embedding, Linear, Module, Optimizer, VarBuilder, VarMap, embedding, linear_no_bias, loss};
use downstream::{retention::Retention, squared::Squared};
use performer_core::{
    Attention, AttentionConfig, Favor, FavorConfig, FeatureMapKind, Inputs, Mask, MultiHeadAttention, MultiHeadConfig,
    Path, Rotary, Softmax, State,
};

const DEVICE: Device = Device::Cpu;
const HIDDEN: usize = 32;
const HEADS: usize = 4;
const HEAD_DIM: usize = 8;

fn random(dims: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, dims, &DEVICE)
}

fn largest_difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    (a - b)?.abs()?.max_all()?.to_scalar()
}

fn numbers(t: &Tensor) -> Result<Vec<f32>> {
    t.flatten_all()?.to_vec1()
}

fn layer(attention: Box<dyn Attention>, vb: VarBuilder) -> Result<MultiHeadAttention> {
    let rotary = Rotary::new(HEAD_DIM, 256, 1e4, &DEVICE)?;
    MultiHeadAttention::new(&MultiHeadConfig::new(HIDDEN, HEADS), attention, Some(rotary), vb)
}

fn squared() -> Result<Favor> {
    Favor::with_map(Box::new(Squared { dim: HEAD_DIM }))
}

fn ours() -> Result<Vec<Box<dyn Attention>>> {
    Ok(vec![Box::new(Retention::new(HEADS)), Box::new(squared()?)])
}

/// Retention by its definition, term by term.
#[test]
fn retention_is_its_formula() -> Result<()> {
    let (t, d) = (7, HEAD_DIM);
    let [q, k, v] = [random(&[1, HEADS, t, d])?, random(&[1, HEADS, t, d])?, random(&[1, HEADS, t, 3])?];
    let out = Retention::new(HEADS).forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
    let at = |x: &Tensor, h, i| -> Result<Vec<f32>> { x.get(0)?.get(h)?.get(i)?.to_vec1() };
    for h in 0..HEADS {
        let decay = 1.0 - 2f32.powi(-5 - h as i32);
        for i in 0..t {
            let mut expected = [0f32; 3];
            for j in 0..=i {
                let score: f32 = at(&q, h, i)?.iter().zip(at(&k, h, j)?).map(|(q, k)| q * k).sum();
                let weight = score / (d as f32).sqrt() * decay.powi((i - j) as i32);
                expected.iter_mut().zip(at(&v, h, j)?).for_each(|(e, v)| *e += weight * v);
            }
            for (o, e) in at(&out, h, i)?.iter().zip(expected) {
                assert!((o - e).abs() < 1e-4, "head {h}, token {i}: {o} should be {e}");
            }
        }
    }
    Ok(())
}

/// Rotary positions are where an attention that does not count its tokens goes wrong.
#[test]
fn decoding_in_a_layer_with_rotary_positions_is_one_pass() -> Result<()> {
    for attention in ours()? {
        let name = format!("{attention:?}");
        let layer = layer(attention, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &DEVICE))?;
        let x = random(&[2, 40, HIDDEN])?;
        let whole = layer.forward(&x, &Mask::causal())?;
        let mut state = State::new();
        let mut parts = vec![layer.extend(&x.narrow(1, 0, 25)?, &mut state)?];
        for t in 25..40 {
            assert_eq!(state.tokens(), t, "{name}");
            parts.push(layer.extend(&x.narrow(1, t, 1)?, &mut state)?);
        }
        let difference = largest_difference(&Tensor::cat(&parts, 1)?, &whole)?;
        assert!(difference < 1e-4, "{name}: decoding is off by {difference}");
    }
    Ok(())
}

/// A state of theirs goes through a file, forks, and is refused elsewhere, as ours do.
#[test]
fn their_states_are_saved_forked_and_refused() -> Result<()> {
    for (i, attention) in ours()?.into_iter().enumerate() {
        let x = random(&[2, HEADS, 30, HEAD_DIM])?;
        let part = |rows: (usize, usize), start, len| x.narrow(0, rows.0, rows.1)?.narrow(2, start, len)?.contiguous();
        let go_on = |state: &mut State, x: &Tensor| numbers(&attention.extend(Inputs::new(x, x, x), state)?);
        let mut state = State::new();
        go_on(&mut state, &part((0, 2), 0, 20)?)?;
        let path = std::env::temp_dir().join(format!("downstream-{}-{i}.safetensors", std::process::id()));
        state.save(&path)?;
        let mut loaded = State::load(&path, &DEVICE)?;
        std::fs::remove_file(&path)?;
        let (mut fork, next) = (state.clone(), part((0, 2), 20, 10)?);
        let expected = go_on(&mut state, &next)?;
        assert_eq!(go_on(&mut loaded, &next)?, expected);
        let second = go_on(&mut fork.select(&[1])?, &part((1, 1), 20, 10)?)?;
        assert_eq!(go_on(&mut fork, &next)?, expected);
        assert_eq!(second[..], expected[expected.len() / 2..]);
        let error = Softmax::new().extend(Inputs::new(&next, &next, &next), &mut fork).expect_err("a foreign state");
        assert!(error.to_string().contains("state: it was made by another attention"), "{error}");
        assert_eq!(fork.tokens(), 30);
    }
    Ok(())
}

/// The feature map runs in the fused kernels, as ready features.
#[test]
fn a_feature_map_of_theirs_is_attention() -> Result<()> {
    let favor = squared()?;
    let [q, k, v] = [random(&[1, 2, 50, HEAD_DIM])?, random(&[1, 2, 50, HEAD_DIM])?, random(&[1, 2, 50, 5])?];
    let inputs = Inputs::new(&q, &k, &v);
    assert_eq!(favor.path(inputs, &Mask::causal())?, Path::Fused { device: "CPU" });
    // The dense form: φ(q)·φ(k) over the keys up to each query.
    let scale = (HEAD_DIM as f64).powf(-0.25);
    let features = |x: &Tensor| (x * scale)?.sqr()? + 0.25;
    let seen = Tensor::tril2(50, DType::F32, &DEVICE)?;
    let weights = features(&q)?.matmul(&features(&k)?.t()?.contiguous()?)?.broadcast_mul(&seen)?;
    let expected = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?.matmul(&v)?;
    let difference = largest_difference(&favor.forward(inputs, &Mask::causal())?, &expected)?;
    assert!(difference < 1e-5, "off by {difference}");
    Ok(())
}

/// A model of one block over 12 tokens.
struct Model {
    tokens: Embedding,
    attention: MultiHeadAttention,
    head: Linear,
}

impl Model {
    fn new(attention: Box<dyn Attention>, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            tokens: embedding(12, HIDDEN, vb.pp("tokens"))?,
            attention: layer(attention, vb.pp("attention"))?,
            head: linear_no_bias(HIDDEN, 12, vb.pp("head"))?,
        })
    }

    fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.tokens.forward(ids)?;
        self.head.forward(&(self.attention.forward(&x, &Mask::causal())? + x)?)
    }
}

/// Sequences whose second half repeats the first: only attention can tell what comes next.
fn repeated(batch: usize, half: usize) -> Result<Tensor> {
    let first = Tensor::rand(0f32, 12.0, (batch, half), &DEVICE)?.to_dtype(DType::U32)?;
    Tensor::cat(&[&first, &first], 1)
}

fn train(attention: Box<dyn Attention>, vars: &VarMap, steps: usize) -> Result<(f32, f32)> {
    let model = Model::new(attention, VarBuilder::from_varmap(vars, DType::F32, &DEVICE))?;
    let mut optimizer = AdamW::new_lr(vars.all_vars(), 1e-2)?;
    let mut losses = Vec::new();
    for _ in 0..steps {
        let ids = repeated(16, 10)?;
        let logits = model.logits(&ids.narrow(1, 0, 19)?)?;
        // The tokens of the second half.
        let logits = logits.narrow(1, 9, 10)?.flatten_to(1)?;
        let loss = loss::cross_entropy(&logits, &ids.narrow(1, 10, 10)?.contiguous()?.flatten_all()?)?;
        optimizer.backward_step(&loss)?;
        losses.push(loss.to_scalar()?);
    }
    Ok((losses[0], losses[steps - 1]))
}

/// Candle's optimiser, over everything in the map of variables.
#[test]
fn both_train_with_candle_s_adamw() -> Result<()> {
    for attention in ours()? {
        let name = format!("{attention:?}");
        let (first, last) = train(attention, &VarMap::new(), 60)?;
        assert!(last < first - 0.3, "{name}: the loss went from {first} to {last}");
    }
    Ok(())
}

/// A learned map is trained by whoever trains all variables, and random features are left alone.
#[test]
fn learned_maps_are_trained_and_random_features_are_not() -> Result<()> {
    for (map, trained) in [(FeatureMapKind::Learned, true), (FeatureMapKind::Positive, false)] {
        let config = FavorConfig::default().with_map(map).with_features(16);
        let favor = || Favor::new(&config, HEAD_DIM, 1, DType::F32, &DEVICE);
        let vars = VarMap::new();
        train(Box::new(favor()?), &vars, 5)?;
        let fresh = favor()?.buffers();
        let data = vars.data().lock().unwrap();
        let mut found = 0;
        for (name, before) in &fresh {
            let after = data[&format!("attention.{name}")].as_tensor();
            let changed = numbers(&before.broadcast_as(after.shape())?.contiguous()?)? != numbers(after)?;
            found += usize::from(changed);
            assert!(trained || !changed, "{name} is random and was changed");
        }
        assert!(!trained || found > 0, "nothing of the learned map was trained");
    }
    Ok(())
}

/// The settings of a command line make any of the crate's own.
#[test]
fn attentions_by_name() -> Result<()> {
    for text in ["softmax", "favor:m=16", "favor:m=16,map=learned", "favor:m=16,window=4"] {
        let config: AttentionConfig = text.parse().map_err(candle_core::Error::msg)?;
        let attention = config.build(HEAD_DIM, 1, DType::F32, &DEVICE)?;
        let x = random(&[1, 2, 9, HEAD_DIM])?;
        assert_eq!(attention.forward(Inputs::new(&x, &x, &x), &Mask::causal())?.dims(), x.dims(), "{text}");
    }
    Ok(())
}
