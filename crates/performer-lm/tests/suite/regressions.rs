//! Tests that would notice: a quality that got worse, an attention that is not learned through,
//! memory that grows with the square of the length, and weights that depend on the number of
//! threads.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use performer_core::{Attention, AttentionConfig, Favor, FavorConfig, Inputs, Mask, Softmax, Windowed};
use performer_lm::{
    config::{ModelConfig, Preset, TrainingConfig},
    data::{Corpus, DataSpec, Prepared, TokenFile, Tokenizer},
    listener::Silent,
    train::{RunOptions, Trainer},
};

use super::heap::peak;

/// Trains a small model, and returns its loss on the held-out tokens.
fn train(attention: &str, data: &Prepared, context: usize, training: TrainingConfig) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    let (model, _) = Preset::Seed.load()?;
    let model = ModelConfig {
        attention: attention.parse().map_err(anyhow::Error::msg)?,
        hidden_size: 32,
        heads: 2,
        kv_heads: 2,
        feed_forward_size: 64,
        context,
        dropout: 0.0,
        ..model
    };
    let options = RunOptions { threads: 2, ..RunOptions::new(dir.path()) };
    let report = Trainer::new(&model, &training, data, options)?.run()?.context("nobody stopped the run")?;
    Ok(report.val_loss)
}

fn recipe(steps: usize, batch_size: usize) -> Result<TrainingConfig> {
    let (_, training) = Preset::Seed.load()?;
    Ok(TrainingConfig {
        epochs: 1000,
        max_steps: Some(steps),
        max_train_tokens: None,
        batch_size,
        micro_batch: batch_size,
        learning_rate: 1e-2,
        eval_every: 0,
        save_every: 0,
        seed: 1,
        ..training
    })
}

/// A fixed training of a few seconds ends where it ended when this was written. The bands are wide
/// enough for other processors, whose sums round otherwise, and narrow beside what a mistake costs.
#[test]
fn a_short_training_is_as_good_as_it_was() -> Result<()> {
    let corpus = Corpus::load(&DataSpec::Sample, &Silent)?;
    let tokenizer = Tokenizer::train(&corpus.train, 300)?;
    let tokens = |stories: usize, of: &performer_lm::data::Documents| -> Result<TokenFile> {
        let (mut tokens, mut bytes) = (Vec::new(), 0);
        for story in of.iter().take(stories) {
            tokens.extend(tokenizer.encode(story)?);
            tokens.push(tokenizer.eot());
            bytes += story.len() as u64;
        }
        TokenFile::from_tokens(&tokens, bytes)
    };
    let data = Prepared {
        corpus_name: "stories".into(),
        description: "the first stories of the sample".into(),
        train: tokens(200, &corpus.train)?.into(),
        valid: tokens(8, &corpus.valid)?.into(),
        test: None,
        cache: None,
        tokenizer: tokenizer.clone(),
    };
    let mut found = Vec::new();
    for (attention, band) in [("softmax", 2.74..2.84), ("favor:m=32", 2.74..2.85), ("favor-gated:m=32", 2.42..2.53)] {
        let loss = train(attention, &data, 64, recipe(150, 8)?)?;
        println!("{attention}: {loss:.4}");
        if !band.contains(&loss) {
            found.push(format!("{attention}: the loss is {loss:.4}, where it was in {band:?}"));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    Ok(())
}

/// Every sixteen tokens are eight random ones and the same again: the second half can be known by
/// who looks back eight tokens, and by nobody else.
#[test]
fn what_only_attention_can_know_is_learned() -> Result<()> {
    const WORDS: u64 = 20;
    let json = {
        let words: Vec<String> = (1..=WORDS).map(|i| format!("\"<w{i}>\": {i}")).collect();
        format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{{"id":0,"content":"<|endoftext|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{{"type":"WordLevel","vocab":{{"<|endoftext|>":0,{}}},"unk_token":"<w1>"}}}}"#,
            words.join(",")
        )
    };
    let mut seed = 1u64;
    let mut tokens = |blocks: usize| -> Result<TokenFile> {
        let mut all = Vec::new();
        for _ in 0..blocks {
            let block: Vec<u32> = (0..8)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    ((seed >> 33) % WORDS) as u32 + 1
                })
                .collect();
            all.extend(block.repeat(2));
        }
        // The last target of the last sequence.
        all.push(1);
        TokenFile::from_tokens(&all, all.len() as u64)
    };
    let data = Prepared {
        corpus_name: "echo".into(),
        description: "blocks and their echoes".into(),
        tokenizer: Tokenizer::from_bytes(json.into_bytes())?,
        train: tokens(4000)?.into(),
        valid: tokens(100)?.into(),
        test: None,
        cache: None,
    };
    let loss = |attention: &str| train(attention, &data, 16, recipe(300, 32)?);
    // Eight of sixteen targets are known, and the others are one of twenty words: ln 20 / 2 = 1.5.
    let blind = loss("none")?;
    println!("none: {blind:.4}");
    assert!(blind > 2.9, "without attention, the loss is {blind:.4}: the echo can be known otherwise");
    for attention in [
        "softmax",
        "softmax:gate",
        "favor:m=64",
        "favor:m=64,gate,conv,output-gate,output-norm",
        "favor:m=16,map=learned",
        "favor:m=16,window=4",
    ] {
        let loss = loss(attention)?;
        println!("{attention}: {loss:.4}");
        assert!(loss < 2.2, "{attention}: the loss is {loss:.4}; {blind:.4} is that of no attention");
    }
    Ok(())
}

/// The most bytes that a forward and a backward pass hold at once.
fn bytes_of_pass(attention: &dyn Attention, tokens: usize) -> Result<usize> {
    let rows = |seed: usize| -> Result<Var> {
        let count = 2 * tokens * 32;
        let numbers: Vec<f32> = (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1000) as f32 / 500.0 - 1.0).collect();
        Ok(Var::from_tensor(&Tensor::from_vec(numbers, (1, 2, tokens, 32), &Device::Cpu)?)?)
    };
    let (q, k, v) = (rows(1)?, rows(2)?, rows(3)?);
    let pass = || -> Result<usize> {
        let out = attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
        Ok(out.sqr()?.sum_all()?.backward()?.get_ids().count())
    };
    let (gradients, bytes) = peak(pass);
    anyhow::ensure!(gradients? >= 3, "a gradient is missing");
    Ok(bytes)
}

/// At four times the length, a pass takes four times the memory, and not sixteen times, as the
/// weights of composed softmax do.
#[test]
fn memory_grows_with_the_length_and_not_with_its_square() -> Result<()> {
    let favor = |map: &str| -> Result<Favor> {
        let config: AttentionConfig = format!("favor:m=64,map={map}").parse().map_err(anyhow::Error::msg)?;
        let config: &FavorConfig = config.favor().context("it is FAVOR")?;
        Ok(Favor::new(config, 32, 1, DType::F32, &Device::Cpu)?)
    };
    let all: [(&str, Box<dyn Attention>); 5] = [
        ("favor", Box::new(favor("positive")?)),
        ("favor, composed", Box::new(favor("positive")?.composed())),
        ("relu", Box::new(favor("relu")?)),
        ("window", Box::new(Windowed::new(32, favor("positive")?)?)),
        ("softmax", Box::new(Softmax::new())),
    ];
    for (name, attention) in all {
        let (short, long) = (bytes_of_pass(&*attention, 512)?, bytes_of_pass(&*attention, 2048)?);
        println!("{name}: {short} bytes at 512 tokens, {long} at 2,048");
        assert!(2 * long < 9 * short, "{name}: {short} bytes at 512 tokens, {long} at 2,048");
    }
    let softmax = Softmax::new().composed();
    let (short, long) = (bytes_of_pass(&softmax, 512)?, bytes_of_pass(&softmax, 2048)?);
    assert!(long > 12 * short, "composed softmax has a matrix of all weights: {short} and {long} bytes");
    Ok(())
}

/// The same seed gives the same weights to the bit on one, two and four threads, each in a process
/// of its own: whether a step has a pass for each of them, or one pass that all of them work on.
/// `STEPS=200` takes as many steps (`just attack-threads` does).
#[cfg(feature = "cli")]
#[test]
fn weights_do_not_depend_on_the_number_of_threads() -> Result<()> {
    let steps = std::env::var("STEPS").unwrap_or_else(|_| "12".into());
    // Only random features are drawn anew, so only they take the option.
    let attentions: [(&str, &str, &[&str]); 4] = [
        ("softmax", "2", &[]),
        ("favor:m=16,gate,conv", "8", &["--redraw-every", "5"]),
        ("favor:m=16,gate,conv", "2", &["--redraw-every", "5"]),
        ("favor:m=16,map=learned,window=6", "4", &[]),
    ];
    for (attention, micro, redrawn) in attentions {
        let dir = tempfile::tempdir()?;
        let mut models = Vec::new();
        for threads in ["1", "2", "4"] {
            let train = ["train", "--data", "sample", "--context", "24", "--batch-size", "8", "--micro-batch", micro];
            let more = ["--vocab-size", "300", "--max-steps", &steps, "--attention", attention];
            let own = ["--threads", threads, "--out", threads];
            let all = [&train[..], &more, &own, redrawn].concat();
            let done = super::program::performer(dir.path(), &all);
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let file = |name: &str| std::fs::read(dir.path().join(threads).join(name));
            models.push((file("model.safetensors")?, file("optimizer.safetensors")?));
        }
        assert!(models[0] == models[1] && models[1] == models[2], "{attention}: the weights differ");
    }
    Ok(())
}
