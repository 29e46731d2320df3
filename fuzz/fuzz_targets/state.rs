//! A decoding state that was saved: it is loaded, divided and joined, and each of several
//! attentions tries to go on from it. The first byte says whether it is the file, or a header, a
//! line feed and data.

#![no_main]

use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Tensor};
use libfuzzer_sys::fuzz_target;
use performer_core::{Attention, AttentionConfig, Inputs, State};
use performer_fuzz::{choice, put, safetensors};

/// The attentions of which performer-lm's test `seeds` saves states.
const SPECS: [&str; 4] = ["favor:m=8", "favor:m=8,window=4,sinks=1", "softmax", "softmax:window=4"];

type Attentions = Vec<Box<dyn Attention>>;

static ATTENTIONS: LazyLock<Attentions> = LazyLock::new(|| {
    let build = |spec: &str| {
        let config: AttentionConfig = spec.parse().expect("the name of an attention");
        config.build(4, 3, DType::F32, &Device::Cpu).expect("an attention")
    };
    SPECS.into_iter().map(build).collect()
});

static INPUT: LazyLock<Tensor> = LazyLock::new(|| {
    let numbers = (0..2 * 7 * 4).map(|i| i as f32 * 0.03).collect();
    Tensor::from_vec(numbers, (1, 2, 7, 4), &Device::Cpu).expect("a tensor")
});

fn go_on(state: &State, attention: &dyn Attention) -> Result<()> {
    let inputs = Inputs::new(&INPUT, &INPUT, &INPUT);
    let before = state.tokens();
    let mut next = state.clone();
    attention.extend(inputs, &mut next)?;
    assert_eq!(next.tokens(), before + 7);
    next.record()?;
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let Some((how, file)) = choice(input, 2) else { return };
    let file = if how == 0 { file.to_vec() } else { safetensors(file) };
    let Ok(state) = State::load(put("state.safetensors", &file), &Device::Cpu) else { return };
    let _ = state.select(&[0]);
    let _ = state.select(&[0, 0, 0]).and_then(|three| State::join(&[&three, &three]));
    for attention in &*ATTENTIONS {
        let _ = go_on(&state, &**attention);
    }
});
