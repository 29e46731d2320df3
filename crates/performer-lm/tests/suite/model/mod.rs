//! These tests check the decoder: gradients reach every parameter of every variant, nothing leaks
//! from the future, and decoding computes what the whole model does.

mod gradients;

use anyhow::Result;
use candle_core::{D, Device, Tensor};
use performer_lm::{
    config::{AttentionConfig, FeedForwardKind, ModelConfig, NormKind, NormPosition, Positions},
    model::{Decoder, DecoderState, Dropout},
};

const ATTENTIONS: [&str; 29] = [
    "softmax",
    "favor:m=24",
    "favor:m=8,map=hyperbolic,projection=gaussian",
    "favor:m=16,map=relu,projection=hadamard",
    "favor:map=elu",
    "favor:map=taylor2",
    "favor:map=limit-2",
    "favor:m=64,map=hermite-tail,radii=sqrt",
    "favor:m=8,map=hedgehog",
    "favor:m=8,map=learned,window=4",
    "favor:m=16,gate",
    "favor:m=8,map=learned,window=4,gate",
    "softmax:gate",
    "softmax:window=4,gate",
    "softmax:window=4,sinks=2",
    "uniform:gate",
    "softmax:conv",
    "favor:m=16,conv",
    "favor:m=8,map=learned,window=4,gate,conv,output-gate,output-norm",
    "uniform:conv,output-gate",
    "none",
    "favor:m=16,gate+softmax/2",
    "uniform:gate+favor:m=8,map=learned,gate/first",
    "favor:m=8,map=hyperbolic,window=4,gate",
    "favor:map=elu,window=4,gate",
    "favor:m=8,map=optimal,window=4",
    "favor:map=taylor2,gate,conv,output-gate,output-norm,key-dim=4",
    "favor:m=16,key-dim=4+softmax:window=4,gate,key-dim=6/2",
    "favor:m=16|favor:m=8,map=learned,window=4,gate,conv",
];

fn base(attention: &str) -> ModelConfig {
    let config = ModelConfig {
        vocab_size: 50,
        hidden_size: 32,
        layers: 2,
        heads: 4,
        kv_heads: 4,
        head_dim: None,
        feed_forward_size: 48,
        context: 40,
        feed_forward: FeedForwardKind::Gelu,
        norm: NormKind::LayerNorm,
        norm_position: NormPosition::Pre,
        norm_eps: 1e-5,
        positions: Positions::Learned,
        tied_head: false,
        bias: true,
        qkv_bias: false,
        dropout: 0.0,
        attention: AttentionConfig::Softmax,
        attention_by_layer: Default::default(),
        borders: None,
        leak: false,
    };
    config.with_attention(&attention.parse().unwrap()).unwrap()
}

/// Returns all combinations of the choices in a configuration.
fn variants(attention: &str) -> Vec<ModelConfig> {
    let mut all = Vec::new();
    for feed_forward in [FeedForwardKind::Gelu, FeedForwardKind::GeluExact, FeedForwardKind::Swiglu] {
        for norm in [NormKind::LayerNorm, NormKind::RmsNorm] {
            for norm_position in [NormPosition::Pre, NormPosition::Post] {
                for positions in [Positions::Learned, Positions::Rotary { base: 10_000.0 }] {
                    for (tied_head, bias, kv_heads, head_dim) in [(false, true, 4, None), (true, false, 2, Some(6))] {
                        let base = base(attention);
                        let config = ModelConfig {
                            feed_forward,
                            norm,
                            norm_position,
                            positions,
                            tied_head,
                            bias,
                            qkv_bias: tied_head,
                            kv_heads,
                            head_dim,
                            ..base
                        };
                        all.push(config);
                    }
                }
            }
        }
    }
    all
}

fn ids(rows: usize, tokens: usize, shift: usize) -> Vec<u32> {
    (0..rows * tokens).map(|i| ((i * 17 + i / 7 + shift) % 50) as u32).collect()
}

fn tensor(ids: &[u32], rows: usize) -> Result<Tensor> {
    Ok(Tensor::from_slice(ids, (rows, ids.len() / rows), &Device::Cpu)?)
}

#[test]
fn one_pass_gives_losses_and_the_likeliest_tokens() -> Result<()> {
    let (rows, tokens) = (2, 9);
    let model = Decoder::new(&base("favor:m=16,gate+softmax/first"), 3, &Device::Cpu)?;
    let vocabulary = model.config().vocab_size as u32;
    let ids: Vec<u32> = (0..rows * tokens).map(|i| (i * i * 7 + 3) as u32 % vocabulary).collect();
    let targets: Vec<u32> = ids.iter().map(|id| (id + 5) % vocabulary).collect();
    let ids = Tensor::from_vec(ids, (rows, tokens), &Device::Cpu)?;
    let (losses, likeliest) = model.losses_and_likeliest(&ids, &targets)?;
    assert_eq!(losses.to_vec1::<f32>()?, model.losses(&ids, &targets, None)?.to_vec1::<f32>()?);
    let logits = model.forward(&ids, None)?.flatten(0, 1)?;
    assert_eq!(likeliest.to_vec1::<u32>()?, logits.argmax(D::Minus1)?.to_vec1::<u32>()?);
    Ok(())
}

/// Maps that are trained are parameters like all others of a new model and of one that is trained
/// further, and constants like all others of a frozen one.
#[test]
fn trained_maps_get_gradients_and_come_back_as_they_were() -> Result<()> {
    for attention in ["favor:m=8,map=learned", "favor:m=8,map=hedgehog", "favor:m=8,map=learned,window=4"] {
        let config = ModelConfig { kv_heads: 2, ..base(attention) };
        let model = Decoder::new(&config, 1, &Device::Cpu)?;
        let ids_ = tensor(&ids(2, 40, 0), 2)?;
        let logits =
            |model: &Decoder| -> Result<Vec<f32>> { Ok(model.forward(&ids_, None)?.flatten_all()?.to_vec1()?) };
        let before = logits(&model)?;
        let parameters = model.named_parameters();
        let trained: usize = (0..config.layers).map(|layer| model.attention(layer).trained_buffers().len()).sum();
        let maps = parameters.iter().filter(|(name, _)| name.contains(".feature_map."));
        assert!(trained > 0 && maps.count() == trained, "{attention}");
        let gradients = model.losses(&ids_, &ids(2, 40, 1), None)?.mean_all()?.backward()?;
        for (name, var) in &parameters {
            let Some(gradient) = gradients.get(var) else { panic!("{name} has no gradient with {attention}") };
            let size = gradient.abs()?.sum_all()?.to_scalar::<f32>()?;
            assert!(size > 1e-9, "{name} has gradient {size} with {attention}");
            // Each parameter gets another value, so that the test sees whether it comes back.
            var.set(&(var.as_detached_tensor() * 1.1)?)?;
        }
        let tensors = model.tensors();
        let further = Decoder::from_tensors(&config, &tensors, &Device::Cpu)?;
        let names = |model: &Decoder| -> Result<Vec<String>> {
            Ok(model.named_parameters().into_iter().map(|(name, _)| name).collect())
        };
        assert_eq!(names(&further)?, names(&model)?, "{attention}");
        let frozen = Decoder::frozen(&config, &tensors, &Device::Cpu)?;
        let over = Decoder::over_tensors(&config, &tensors, &Device::Cpu)?;
        for constant in [&frozen, &over] {
            assert!(constant.named_parameters().is_empty());
            let mut saved: Vec<String> = constant.tensors().into_keys().collect();
            let mut expected: Vec<String> = tensors.keys().cloned().collect();
            saved.sort();
            expected.sort();
            assert_eq!((saved, constant.parameter_count()), (expected, model.parameter_count()), "{attention}");
        }
        assert!(!frozen.forward(&ids_, None)?.track_op(), "nothing is kept for a backward pass");
        let now = logits(&model)?;
        assert_ne!(before, now);
        for (what, other) in
            [("further", logits(&further)?), ("frozen", logits(&frozen)?), ("over tensors", logits(&over)?)]
        {
            let error = now.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(error < 1e-4, "{attention}, {what}: {error}");
        }
    }
    Ok(())
}

#[test]
fn the_future_does_not_leak() -> Result<()> {
    let positions = [NormPosition::Pre, NormPosition::Post];
    for (attention, norm_position) in ATTENTIONS.into_iter().flat_map(|a| positions.map(|position| (a, position))) {
        let model = Decoder::new(&ModelConfig { norm_position, ..base(attention) }, 2, &Device::Cpu)?;
        let first = ids(2, 40, 0);
        let before = model.forward(&tensor(&first, 2)?, None)?;
        for cut in [1, 15, 16, 33] {
            let mut changed = first.clone();
            for row in changed.chunks_exact_mut(40) {
                row[cut..].iter_mut().for_each(|id| *id = (*id * 3 + 5) % 50);
            }
            let after = model.forward(&tensor(&changed, 2)?, None)?;
            let part = |t: &Tensor| t.narrow(1, 0, cut)?.flatten_all()?.to_vec1::<f32>();
            assert_eq!(part(&before)?, part(&after)?, "{attention}, tokens from {cut} on changed");
        }
    }
    Ok(())
}

/// With norms after each part, a block is `norm(x + part(x))` twice, and nothing is normed at the
/// end. Attention returns zeros here, so that the formula is short.
#[test]
fn norms_after_each_part_are_their_formula() -> Result<()> {
    let config = ModelConfig {
        norm: NormKind::RmsNorm,
        norm_position: NormPosition::Post,
        feed_forward: FeedForwardKind::Swiglu,
        bias: false,
        ..base("none")
    };
    let model = Decoder::new(&config, 5, &Device::Cpu)?;
    let tensors = model.tensors();
    let of_layer = |layer: usize, name: &str| tensors[&format!("model.layers.{layer}.{name}.weight")].clone();
    let input = tensor(&ids(1, 9, 0), 1)?;
    let places = tensors["model.embed_positions.weight"].narrow(0, 0, 9)?;
    let mut x = (tensors["model.embed_tokens.weight"].embedding(&input.flatten_all()?)? + places)?;
    for layer in 0..config.layers {
        let norm = |x: &Tensor, name: &str| candle_nn::ops::rms_norm(x, &of_layer(layer, name), 1e-5);
        let linear = |x: &Tensor, name: &str| x.matmul(&of_layer(layer, name).t()?);
        x = norm(&x, "input_layernorm")?;
        let inner = (linear(&x, "mlp.gate_proj")?.silu()? * linear(&x, "mlp.up_proj")?)?;
        x = norm(&(&x + linear(&inner, "mlp.down_proj")?)?, "post_attention_layernorm")?;
    }
    let want = x.matmul(&tensors["lm_head.weight"].t()?)?.flatten_all()?.to_vec1::<f32>()?;
    let got = model.forward(&input, None)?.flatten_all()?.to_vec1::<f32>()?;
    let worst = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst < 1e-5, "off by {worst}");
    Ok(())
}

#[test]
fn decoding_is_the_same_model() -> Result<()> {
    for attention in ATTENTIONS {
        for (positions, norm_position) in
            [(Positions::Learned, NormPosition::Pre), (Positions::Rotary { base: 10_000.0 }, NormPosition::Post)]
        {
            let config = ModelConfig { positions, norm_position, kv_heads: 2, ..base(attention) };
            let model = Decoder::new(&config, 3, &Device::Cpu)?;
            let text = ids(1, 40, 0);
            let whole = model.forward(&tensor(&text, 1)?, None)?.squeeze(0)?.to_vec2::<f32>()?;
            let mut state = model.new_state();
            let mut at = 0;
            for piece in [7, 1, 1, 20, 1, 10] {
                let logits =
                    model.extend(&tensor(&text[at..at + piece], 1)?, &mut state)?.squeeze(0)?.to_vec1::<f32>()?;
                at += piece;
                let worst = logits.iter().zip(&whole[at - 1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 1e-4, "{attention}: off by {worst} after {at} tokens");
            }
            assert_eq!(state.tokens(), 40);
        }
    }
    Ok(())
}

/// A state is kept in a file, and sequences leave and join a batch, without changing a bit.
#[test]
fn states_are_kept_and_divided() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("state.safetensors");
    for attention in ATTENTIONS {
        let model = Decoder::new(&base(attention), 3, &Device::Cpu)?;
        let mut state = model.new_state();
        model.extend(&tensor(&ids(2, 20, 0), 2)?, &mut state)?;
        state.save(&file)?;
        let mut loaded = DecoderState::load(&file, &Device::Cpu)?;
        let rows = [state.select(&[0])?, state.select(&[1])?];
        let mut joined = DecoderState::join(&[&rows[0], &rows[1]])?;
        let next = tensor(&ids(2, 3, 7), 2)?;
        let expected = model.extend(&next, &mut state)?.to_vec2::<f32>()?;
        for other in [&mut loaded, &mut joined] {
            assert_eq!((other.tokens(), other.bytes() > 0), (20, attention != "none"));
            assert_eq!(model.extend(&next, other)?.to_vec2::<f32>()?, expected, "{attention}");
        }
    }
    let model = Decoder::new(&base("softmax"), 3, &Device::Cpu)?;
    let deeper = Decoder::new(&ModelConfig { layers: 3, ..base("softmax") }, 3, &Device::Cpu)?;
    let mut state = model.new_state();
    model.extend(&tensor(&[1, 2], 1)?, &mut state)?;
    let refused = |result: Result<Tensor>| result.expect_err("another model").to_string();
    let error = refused(deeper.extend(&tensor(&[3], 1)?, &mut state.clone()));
    assert!(error.contains("2 layers, and this one has 3"), "{error}");
    assert!(DecoderState::join(&[&state, &deeper.new_state()]).is_err() && DecoderState::join(&[]).is_err());
    std::fs::write(&file, "nothing")?;
    assert!(DecoderState::load(&file, &Device::Cpu).unwrap_err().to_string().contains("state.safetensors"));
    performer_core::State::new().save(&file)?;
    let error = format!("{:#}", DecoderState::load(&file, &Device::Cpu).unwrap_err());
    assert!(error.contains("no state of a whole model") && error.contains("layers is missing"), "{error}");
    Ok(())
}

/// Trained maps are made for the key heads of their group; what cannot be is refused by name.
#[test]
fn heads_that_differ_are_trained_and_read_back() -> Result<()> {
    let config = base("favor:m=16|favor:m=8,map=learned,gate");
    let model = Decoder::new(&config, 3, &Device::Cpu)?;
    let of_maps: Vec<(String, Vec<usize>)> = (model.named_parameters().into_iter())
        .filter(|(name, _)| name.starts_with("model.layers.1") && name.contains("feature_map"))
        .map(|(name, var)| (name, var.dims().to_vec()))
        .collect();
    assert!(!of_maps.is_empty());
    for (name, dims) in &of_maps {
        assert!(name.starts_with("model.layers.1.self_attn.heads.1.feature_map."), "{name}");
        assert_eq!(dims[0], 2, "{name} {dims:?}");
    }
    let text = tensor(&ids(1, 40, 0), 1)?;
    let gradients = model.forward(&text, None)?.sqr()?.sum_all()?.backward()?;
    for (name, var) in model.named_parameters() {
        assert!(gradients.get(&var).is_some(), "{name}");
    }
    let read = Decoder::frozen(&config, &model.tensors(), &Device::Cpu)?;
    let numbers = |model: &Decoder| -> Result<Vec<f32>> { Ok(model.forward(&text, None)?.flatten_all()?.to_vec1()?) };
    assert_eq!(numbers(&read)?, numbers(&model)?);
    assert_eq!(read.parameter_count(), model.parameter_count());
    for (attention, words) in [
        ("softmax|favor|uniform", "4 key heads cannot be divided equally among the 3"),
        ("softmax|favor:map=dense", "cannot be fitted"),
    ] {
        let error = Decoder::new(&base(attention), 3, &Device::Cpu).err().expect(words).to_string();
        assert!(error.contains(words), "{error}");
    }
    // What no text says, but a file may.
    for of in [vec![AttentionConfig::Softmax], vec!["softmax|favor".parse().unwrap(), AttentionConfig::Softmax]] {
        let config = ModelConfig { attention: AttentionConfig::ByHead { of }, ..base("softmax") };
        assert!(config.validate().unwrap_err().to_string().contains("divided once"));
    }
    // Features behind a window that is as long as the context, of half of the heads.
    let idle = ModelConfig { context: 40, ..base("favor:m=8|favor:m=8,window=30,sinks=10") };
    assert_eq!(idle.idle_features(), Some(0));
    assert_eq!(base("favor:m=8|favor:m=8,window=30,sinks=9").idle_features(), None);
    Ok(())
}

#[test]
fn learned_positions_end_with_a_clear_error() -> Result<()> {
    let model = Decoder::new(&base("favor:m=8"), 4, &Device::Cpu)?;
    let mut state = model.new_state();
    model.extend(&tensor(&ids(1, 40, 0), 1)?, &mut state)?;
    assert_eq!(model.positions_left(&state), 0);
    let error = model.extend(&tensor(&[1], 1)?, &mut state).unwrap_err().to_string();
    assert!(error.contains("40") && error.contains("learned"), "{error}");
    Ok(())
}

#[test]
fn favor_state_is_constant_and_softmax_cache_grows() -> Result<()> {
    let rotary = |attention: &str| ModelConfig { positions: Positions::Rotary { base: 10_000.0 }, ..base(attention) };
    for (attention, constant) in [("favor:m=16", true), ("softmax", false)] {
        let model = Decoder::new(&rotary(attention), 5, &Device::Cpu)?;
        let mut state = model.new_state();
        model.extend(&tensor(&ids(1, 20, 0), 1)?, &mut state)?;
        let early = state.bytes();
        for _ in 0..30 {
            model.extend(&tensor(&ids(1, 20, 0), 1)?, &mut state)?;
        }
        assert_eq!(state.bytes() == early, constant, "{attention}: {early} then {} bytes", state.bytes());
    }
    Ok(())
}

/// A hybrid's state grows by what its layers of softmax keep of a token, and no faster.
#[test]
fn the_state_of_a_hybrid_grows_by_its_layers_of_softmax() -> Result<()> {
    let rotary = |attention: &str| {
        ModelConfig { layers: 5, positions: Positions::Rotary { base: 10_000.0 }, ..base("softmax") }
            .with_attention(&attention.parse().unwrap())
    };
    // Keys and values of 4 heads of 8 numbers, in f32.
    let token = 4 * 2 * 4 * 8;
    for (attention, layers, constant) in
        [("favor:m=16+softmax/2", 2, true), ("softmax+favor:m=16/5", 4, true), ("softmax", 5, false)]
    {
        let config = rotary(attention)?;
        assert_eq!(config.growing_layers(), layers, "{attention}");
        let bytes = |context| Decoder::new(&ModelConfig { context, ..config.clone() }, 5, &Device::Cpu)?.state_bytes();
        let (short, long) = (bytes(30)?, bytes(90)?);
        assert_eq!(long - short, layers * token * 60, "{attention}");
        assert_eq!(short > layers * token * 30, constant, "{attention}: {short} bytes");
    }
    let config = rotary("softmax:window=8,sinks=2")?;
    assert_eq!((config.growing_layers(), Decoder::new(&config, 5, &Device::Cpu)?.state_bytes()?), (0, 5 * token * 9));
    // A window that sequences never fill is no bound.
    for (window, layers) in [(config.context, 0), (config.context + 1, 5)] {
        assert_eq!(rotary(&format!("softmax:window={window}"))?.growing_layers(), layers, "{window}");
    }
    Ok(())
}

/// With its features off, a model has its weights and computes what the control would: the window
/// alone, and all that it computed anyway as long as the window holds all.
#[test]
fn features_off_keeps_the_weights_and_the_window() -> Result<()> {
    let ids = |tokens| tensor(&ids(2, tokens, 0), 2);
    let numbers = |model: &Decoder, tokens| -> Result<Vec<f32>> {
        Ok(model.forward(&ids(tokens)?, None)?.flatten_all()?.to_vec1()?)
    };
    for (attention, control) in [
        ("favor:m=8,map=learned,window=6,sinks=2,gate", "softmax:window=6,sinks=2,gate"),
        ("favor:m=8,window=6", "softmax:window=6"),
        ("favor:m=8,window=6+softmax/2", "softmax:window=6+softmax/2"),
        ("favor:m=8,gate", "uniform:gate"),
        ("favor:m=8|softmax:window=6,gate", "uniform|softmax:window=6,gate"),
    ] {
        let model = Decoder::new(&base(attention), 8, &Device::Cpu)?;
        let off = model.features_off()?.expect("a control");
        assert_eq!(off.config().pattern().to_string(), control);
        // Weights depend on the seed and their names, so this is the control with the same weights.
        assert_eq!(numbers(&off, 40)?, numbers(&Decoder::new(&base(control), 8, &Device::Cpu)?, 40)?, "{attention}");
        assert_ne!(numbers(&off, 40)?, numbers(&model, 40)?, "{attention}");
        if attention.contains("m=8,window") || attention.contains("learned,window") {
            let pairs = numbers(&off, 6)?.into_iter().zip(numbers(&model, 6)?);
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-5, "{attention}: {worst}");
        }
    }
    assert!(Decoder::new(&base("softmax:window=6"), 8, &Device::Cpu)?.features_off()?.is_none());
    Ok(())
}

#[test]
fn weights_are_a_function_of_the_seed_and_not_of_the_attention() -> Result<()> {
    let values = |attention: &str, seed: u64| -> Result<Vec<(String, Vec<f32>)>> {
        let model = Decoder::new(&base(attention), seed, &Device::Cpu)?;
        let read = |(name, var): (String, candle_core::Var)| Ok((name, var.flatten_all()?.to_vec1::<f32>()?));
        model.named_parameters().into_iter().map(read).collect()
    };
    assert_eq!(values("softmax", 1)?, values("favor:m=8", 1)?);
    let mut learned = values("favor:m=8,map=learned", 1)?;
    learned.retain(|(name, _)| !name.contains(".feature_map."));
    assert_eq!(values("softmax", 1)?, learned);
    assert_ne!(values("softmax", 1)?, values("softmax", 2)?);
    Ok(())
}

#[test]
fn saved_tensors_give_the_same_model_with_its_features() -> Result<()> {
    for attention in ["favor:m=24", "favor:m=8,map=phase", "softmax"] {
        let config = base(attention);
        let mut model = Decoder::new(&config, 6, &Device::Cpu)?;
        let before = model.forward(&tensor(&ids(1, 40, 0), 1)?, None)?.flatten_all()?.to_vec1::<f32>()?;
        model.redraw(6, 3)?;
        let after = model.forward(&tensor(&ids(1, 40, 0), 1)?, None)?.flatten_all()?.to_vec1::<f32>()?;
        assert_eq!(before == after, attention == "softmax", "{attention}: other features give other logits");
        let copy = Decoder::from_tensors(&config, &model.tensors(), &Device::Cpu)?;
        let input = tensor(&ids(1, 40, 0), 1)?;
        let logits =
            |m: &Decoder| m.forward(&input, None)?.flatten_all()?.to_vec1::<f32>().map_err(anyhow::Error::from);
        assert_eq!(logits(&model)?, logits(&copy)?);
    }
    let mut tensors = Decoder::new(&base("favor:m=24"), 6, &Device::Cpu)?.tensors();
    tensors.remove("model.layers.1.self_attn.projection");
    let error = Decoder::from_tensors(&base("favor:m=24"), &tensors, &Device::Cpu).err().unwrap();
    assert!(format!("{error:#}").contains("layer 1") && format!("{error:#}").contains("projection"), "{error:#}");
    let wide = ModelConfig { hidden_size: 64, ..base("softmax") };
    let error = Decoder::from_tensors(&wide, &Decoder::new(&base("softmax"), 6, &Device::Cpu)?.tensors(), &Device::Cpu);
    assert!(error.err().unwrap().to_string().contains("shape"));
    Ok(())
}

#[test]
fn dropout_follows_its_seed_and_is_off_without_it() -> Result<()> {
    let model = Decoder::new(&base("favor:m=8"), 7, &Device::Cpu)?;
    let input = tensor(&ids(1, 40, 0), 1)?;
    let run = |dropout: Option<Dropout>| -> Result<Vec<f32>> {
        Ok(model.forward(&input, dropout.as_ref())?.flatten_all()?.to_vec1()?)
    };
    assert_eq!(run(Some(Dropout::new(0.3, 1)))?, run(Some(Dropout::new(0.3, 1)))?);
    assert_ne!(run(Some(Dropout::new(0.3, 1)))?, run(Some(Dropout::new(0.3, 2)))?);
    assert_ne!(run(Some(Dropout::new(0.3, 1)))?, run(None)?);
    assert_eq!(run(Some(Dropout::new(0.0, 1)))?, run(None)?);
    Ok(())
}

#[test]
fn an_invalid_config_is_named() {
    let bad = [
        (ModelConfig { heads: 5, ..base("softmax") }, "hidden_size 32"),
        (ModelConfig { kv_heads: 3, ..base("softmax") }, "kv_heads 3"),
        (ModelConfig { layers: 0, ..base("softmax") }, "layers"),
        (ModelConfig { dropout: 1.0, ..base("softmax") }, "dropout"),
    ];
    for (config, word) in bad {
        let error = Decoder::new(&config, 0, &Device::Cpu).err().unwrap().to_string();
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(AttentionConfig::Softmax.kind(), "softmax");
}

/// Parts begin with weights of their own, and leave those of everything else alone. Convolutions
/// and output gates change nothing at first.
#[test]
fn parts_are_counted_and_begin_without_drawn_numbers() -> Result<()> {
    let model = |attention: &str| Decoder::new(&ModelConfig { kv_heads: 2, ..base(attention) }, 1, &Device::Cpu);
    let plain = model("favor:m=8")?;
    let logits = |model: &Decoder| -> Result<Vec<f32>> {
        Ok(model.forward(&tensor(&ids(2, 40, 0), 2)?, None)?.flatten_all()?.to_vec1()?)
    };
    // Two layers of 32 channels, 2 key heads of 8 dimensions each.
    let (filters, gates) = (2 * 4 * (32 + 16 + 16), 2 * 32 * 32);
    for (parts, more) in
        [("conv", filters), ("output-gate", gates), ("output-norm", 2 * 8), ("gate", 2 * 2 * 33), ("mup-scale", 0)]
    {
        let with = model(&format!("favor:m=8,{parts}"))?;
        assert_eq!(with.parameter_count(), plain.parameter_count() + more, "{parts}");
        let weights = |model: &Decoder| -> Result<Vec<(String, Vec<f32>)>> {
            let own = plain.named_parameters();
            let shared = model.named_parameters().into_iter().filter(|(name, _)| own.iter().any(|(n, _)| n == name));
            shared.map(|(name, var)| Ok((name, var.flatten_all()?.to_vec1()?))).collect()
        };
        assert_eq!(weights(&with)?, weights(&plain)?, "{parts}");
        assert_eq!(logits(&with)? == logits(&plain)?, ["conv", "output-gate"].contains(&parts), "{parts}");
    }
    // Queries of 4 heads and keys of 2, with 4 dimensions each in place of 8, and their biases.
    let fewer = 2 * (4 + 2) * 4 * (32 + 1);
    assert_eq!(model("favor:m=8,key-dim=4")?.parameter_count(), plain.parameter_count() - fewer);
    let odd = ModelConfig { positions: Positions::Rotary { base: 1e4 }, ..base("favor:m=8,key-dim=5") };
    let error = Decoder::new(&odd, 1, &Device::Cpu).err().expect("an odd dimension").to_string();
    assert!(error.contains("even dimension of queries and keys; it is 5"), "{error}");
    Ok(())
}

/// A linear model with rotary positions goes on where its training context and the table of angles
/// (32,768 positions) end: what it says there is what it says of the whole text.
#[test]
fn a_text_may_be_far_longer_than_the_context_of_training() -> Result<()> {
    let config = ModelConfig {
        positions: Positions::Rotary { base: 10_000.0 },
        hidden_size: 8,
        heads: 1,
        kv_heads: 1,
        layers: 1,
        feed_forward_size: 8,
        ..base("favor:m=4,gate")
    };
    let model = Decoder::new(&config, 3, &Device::Cpu)?;
    let ids: Vec<u32> = (0..32_780).map(|i| i * i % 47).collect();
    let ids = Tensor::from_vec(ids, (1, 32_780), &Device::Cpu)?;
    let whole = model.extend(&ids, &mut model.new_state())?;
    let mut state = model.new_state();
    model.extend(&ids.narrow(1, 0, 32_760)?, &mut state)?;
    assert!(model.positions_left(&state) > 1_000_000);
    let mut last = None;
    for t in 32_760..32_780 {
        last = Some(model.extend(&ids.narrow(1, t, 1)?, &mut state)?);
    }
    let error = (whole - last.expect("tokens"))?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(error < 1e-5, "{error}");
    Ok(())
}
