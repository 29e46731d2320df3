//! What the state of decoding can do: it goes through a file into another process, is forked, and
//! has rows of its batch dropped, reordered and joined, always with the same bits.
//!
//! ```text
//! cargo run --release -p performer-core --example state
//! ```

use std::{path::Path, process::Command};

use candle_core::{DType, Device, Result, Tensor, bail};
use performer_core::{Attention, AttentionConfig, Inputs, State};

const HEADS: usize = 4;
const HEAD_DIM: usize = 32;
const PROMPT: usize = 200;

/// Returns numbers that are the same in every process: rows `(B, H, T, D)` of tokens `start..`.
fn tokens(batch: usize, start: usize, count: usize) -> Result<Tensor> {
    let number = |i: usize| (((i * 2_654_435_761) % 10_007) as f32 / 10_007.0 - 0.5) * 2.0;
    let row = |b: usize, h: usize, t: usize| (0..HEAD_DIM).map(move |d| number(((b * HEADS + h) * 9973 + t) * 64 + d));
    let values: Vec<f32> = (0..batch)
        .flat_map(|b| (0..HEADS).flat_map(move |h| (start..start + count).flat_map(move |t| row(b, h, t))))
        .collect();
    Tensor::from_vec(values, (batch, HEADS, count, HEAD_DIM), &Device::Cpu)
}

fn attention(spec: &str) -> Result<Box<dyn Attention>> {
    let config: AttentionConfig = spec.parse().map_err(candle_core::Error::msg)?;
    config.build(HEAD_DIM, 42, DType::F32, &Device::Cpu)
}

fn extend(attention: &dyn Attention, x: &Tensor, state: &mut State) -> Result<Vec<f32>> {
    attention.extend(Inputs::new(x, x, x), state)?.flatten_all()?.to_vec1()
}

/// Prints every bit of the next token's output, for another process to compare.
fn go_on(spec: &str, file: &Path) -> Result<()> {
    let mut state = State::load(file, &Device::Cpu)?;
    let out = extend(&*attention(spec)?, &tokens(2, PROMPT, 1)?, &mut state)?;
    println!("{}", out.iter().map(|x| format!("{:08x}", x.to_bits())).collect::<String>());
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, spec, file] = &arguments[..] {
        return go_on(spec, Path::new(file));
    }
    println!("{:<24} {:>12} {:>8}  file   fork   rows", "attention", "state, bytes", "tokens");
    for spec in ["softmax", "softmax:window=32", "favor:m=64", "favor:m=64,map=learned", "favor:m=64,window=32"] {
        let attention = attention(spec)?;
        let mut state = State::new();
        extend(&*attention, &tokens(2, 0, PROMPT)?, &mut state)?;

        // Into a file, and on in another process.
        let file = std::env::temp_dir().join(format!("performer-state-example-{}.safetensors", std::process::id()));
        state.save(&file)?;
        let there = Command::new(&arguments[0]).arg(spec).arg(&file).output()?;
        std::fs::remove_file(&file)?;
        // A fork goes on here; what it was forked from stays where it is.
        let here = extend(&*attention, &tokens(2, PROMPT, 1)?, &mut state.clone())?;
        let bits: String = here.iter().map(|x| format!("{:08x}", x.to_bits())).collect();
        let in_file = String::from_utf8_lossy(&there.stdout).trim() == bits;
        let forked = extend(&*attention, &tokens(2, PROMPT, 1)?, &mut state.clone())? == here;

        // The second sequence alone, and both again in the other order.
        let alone = state.select(&[1])?;
        let swapped = State::join(&[&alone, &state.select(&[0])?])?;
        let second = tokens(2, PROMPT, 1)?.narrow(0, 1, 1)?.contiguous()?;
        let both = Tensor::cat(&[&second, &tokens(1, PROMPT, 1)?], 0)?;
        let half = here.len() / 2;
        let rows = extend(&*attention, &second, &mut alone.clone())? == here[half..]
            && extend(&*attention, &both, &mut swapped.clone())? == [&here[half..], &here[..half]].concat();

        let word = |same: bool| if same { "same " } else { "OTHER" };
        println!(
            "{spec:<24} {:>12} {:>8}  {}  {}  {}",
            state.bytes(),
            state.tokens(),
            word(in_file),
            word(forked),
            word(rows)
        );
        if !(in_file && forked && rows) {
            bail!("{spec}: the state did not go on with the same bits");
        }
    }
    Ok(())
}
