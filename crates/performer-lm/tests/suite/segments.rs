//! Each sequence is cut over several ranks: losses and gradients are those of one process, up to
//! rounding, and what ranks send each other is counted. Ranks are threads here;
//! `scripts/mpi_check.py` does this with processes.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use performer_core::{Tape, attention::Segment, ops};
use performer_dist::{Counted, Ranks, threads};
use performer_lm::{
    config::{AttentionPattern, ModelConfig, TrainingConfig},
    data::Prepared,
    model::Decoder,
    train::{SharedSequence, Trainer},
};

use crate::ranks::{bytes, data, on_grid, options, recipe};

/// One of every attention and part that can be cut, in contexts of 16 tokens. A ReLU feature is
/// `relu(ω·x)/√M + ε`. Of 8 all may be ε alone for a query; its denominator is then tiny, and its
/// gradients magnify rounding beyond the tolerance of `compare`. So there are 32.
const ATTENTIONS: [&str; 8] = [
    "favor:m=8",
    "favor-gated:m=8,conv,output-gate,output-norm,mup-scale",
    "favor:m=32,map=relu",
    "favor-learned:m=8",
    "favor-window:m=8,window=5",
    "softmax:window=6,gate,conv",
    "softmax:gate",
    "favor-gated:m=8+softmax/2",
];

/// A model of two layers without dropout, and one step of training.
fn one_step(attention: &str) -> Result<(ModelConfig, TrainingConfig)> {
    let (model, training) = recipe("none")?;
    let training = TrainingConfig { max_steps: Some(1), batch_size: 6, max_train_tokens: Some(600), ..training };
    let pattern: AttentionPattern = attention.parse().map_err(anyhow::Error::msg)?;
    Ok((ModelConfig { dropout: 0.0, layers: 2, ..model }.with_attention(&pattern)?, training))
}

/// Numbers by name, such as the gradient of each parameter.
type Named = BTreeMap<String, Vec<f32>>;

/// Compares each entry with that of one process.
fn compare(what: &str, found: &Named, expected: &Named) {
    let largest = |numbers: &[f32]| numbers.iter().fold(0f32, |max, x| max.max(x.abs()));
    assert!(expected.len() > 10 && found.len() == expected.len());
    for (name, one) in expected {
        // A weight and its bias are one map. The gradients of the biases of keys nearly cancel:
        // added to all keys, a number changes softmax nothing, and FAVOR little.
        let weight = name.strip_suffix(".bias").and_then(|map| expected.get(&format!("{map}.weight")));
        let scale = weight.map_or(0.0, |weight| largest(weight)).max(largest(one));
        let error = largest(&found[name].iter().zip(one).map(|(a, b)| a - b).collect::<Vec<_>>());
        assert!(error <= 1e-5 * scale && scale > 0.0, "{what}: {name} is {error:e} off, of {scale:e}");
    }
}

/// Does something on so many ranks, whose calls are counted, and returns what each of them got.
fn on_counted<T: Send>(size: usize, work: impl Fn(Arc<Counted>) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let (ranks, work) = (threads(size, Duration::from_secs(300)).into_iter(), &work);
        let ranks: Vec<_> =
            ranks.map(|thread| scope.spawn(move || work(Arc::new(Counted::new(Arc::new(thread)))))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    })
}

/// The sum of the losses of three sequences, and all gradients, with each cut over so many ranks.
fn of_model(config: &ModelConfig, segments: usize) -> Result<Named> {
    let tokens = config.context / segments;
    let of_ranks = on_counted(segments, |ranks| {
        let model = Decoder::new(config, 1, &Device::Cpu)?;
        let parameters = model.named_parameters();
        let id = |row: usize, column: usize| ((row * 97 + column * 31) % 300) as u32;
        let start = ranks.rank() * tokens;
        let part = |shift: usize| -> Vec<u32> {
            (0..3).flat_map(|row| (0..tokens).map(move |i| id(row, start + i + shift))).collect()
        };
        let (ids, targets) = (Tensor::from_vec(part(0), (3, tokens), &Device::Cpu)?, part(1));
        let tape = Tape::start();
        let segment = Segment::new(Arc::new(SharedSequence::new(ranks)));
        let losses = match segments {
            1 => model.losses(&ids, &targets, None)?,
            _ => model.losses_of_segment(&ids, &targets, None, &segment)?,
        };
        let loss = segment.close(&ops::sum_all(&losses)?)?;
        let gradients = tape.backward(&loss)?;
        let mut named = Named::from([("loss".into(), vec![loss.to_scalar()?])]);
        for (name, var) in parameters {
            // The loss of a segment may not depend on what is far from no token of it.
            let zeros = || var.zeros_like();
            let gradient = gradients.get(&var).map_or_else(zeros, |gradient| Ok(gradient.clone()))?;
            named.insert(name, gradient.flatten_all()?.to_vec1()?);
        }
        Ok(named)
    })?;
    let mut sum = Named::new();
    for (name, numbers) in of_ranks.into_iter().flatten() {
        match sum.get_mut(&name) {
            Some(sum) => sum.iter_mut().zip(numbers).for_each(|(sum, x)| *sum += x),
            None => drop(sum.insert(name, numbers)),
        }
    }
    Ok(sum)
}

#[test]
fn a_model_in_segments_has_the_gradients_of_one_process() -> Result<()> {
    for attention in ATTENTIONS {
        let (config, _) = one_step(attention)?;
        let expected = of_model(&config, 1)?;
        for segments in [2, 4] {
            compare(&format!("{attention}, {segments} segments"), &of_model(&config, segments)?, &expected);
        }
    }
    Ok(())
}

/// Trains for a step, and returns its loss and the optimiser's first moments: gradients, but for a
/// factor.
fn trained(size: usize, segments: usize, attention: &str, data: &Prepared, out: &Path) -> Result<Named> {
    let stop = AtomicBool::new(false);
    let (model, training) = one_step(attention)?;
    let train = |ranks| Trainer::new(&model, &training, data, options(out, &stop, ranks))?.run();
    on_grid(size, segments, train).into_iter().collect::<Result<Vec<_>>>()?;
    let log = String::from_utf8(bytes(out, "metrics.jsonl"))?;
    let first: serde_json::Value = serde_json::from_str(log.lines().next().context("a step")?)?;
    let mut named = Named::from([("loss".into(), vec![first["train_loss"].as_f64().context("a loss")? as f32])]);
    for (name, tensor) in candle_core::safetensors::load(out.join("optimizer.safetensors"), &Device::Cpu)? {
        if name.starts_with("m.") {
            named.insert(name, tensor.flatten_all()?.to_vec1()?);
        }
    }
    Ok(named)
}

/// The batch is divided over groups of ranks, and each sequence over the ranks of a group. On the
/// first rank, the window of this attention leaves nothing to the features, which get no gradient
/// there.
#[test]
fn training_in_segments_has_the_gradients_of_one_process() -> Result<()> {
    let (data, folder, attention) = (data()?, tempfile::tempdir()?, "favor-window:m=8,window=5,gate");
    let expected = trained(1, 1, attention, &data, &folder.path().join("one"))?;
    for (size, segments) in [(4, 2), (4, 4)] {
        let out = folder.path().join(segments.to_string());
        let found = trained(size, segments, attention, &data, &out)?;
        compare(&format!("{segments} segments on {size} ranks"), &found, &expected);
    }
    Ok(())
}

#[test]
fn what_cannot_be_cut_is_refused_before_a_model_is_saved() -> Result<()> {
    let (folder, stop, data) = (tempfile::tempdir()?, AtomicBool::new(false), data()?);
    for (attention, segments, leak, words) in [
        ("favor:m=8", 3, false, "context of 16 tokens cannot be cut into 3"),
        ("favor:m=8,map=trigonometric", 2, false, "logarithms of features"),
        ("softmax:window=4,sinks=2", 2, false, "leave the sinks out"),
        ("favor:m=8+softmax:window=4,sinks=1/2", 2, false, "layer 1"),
        ("favor:m=8", 2, true, "leak"),
    ] {
        let (model, training) = one_step(attention)?;
        let model = ModelConfig { leak, ..model };
        let out = folder.path().join("out");
        let outcomes = on_grid(segments, segments, |ranks| {
            Trainer::new(&model, &training, &data, options(&out, &stop, ranks)).map(drop)
        });
        for outcome in outcomes {
            let error = format!("{:#}", outcome.expect_err("it cannot be cut"));
            assert!(error.contains(words), "{attention}: {error}");
        }
        assert!(!out.join("model.safetensors").exists());
    }
    Ok(())
}

/// Ranks over which the sequences are cut whose traffic is counted.
const RANKS: usize = 4;

/// Bytes that all ranks together send in one layer, forward and backward, for a sequence of so many
/// tokens: f32, two heads of 16 numbers.
fn bytes_sent(attention: &str, context: usize) -> Result<usize> {
    let (model, _) = recipe(attention)?;
    let config = ModelConfig { hidden_size: 32, layers: 1, dropout: 0.0, vocab_size: 300, context, ..model };
    let model = Decoder::new(&config, 1, &Device::Cpu)?;
    let of_rank = |ranks: Arc<Counted>| -> Result<usize> {
        let segment = Segment::new(Arc::new(SharedSequence::new(ranks.clone())));
        let tokens: Vec<u32> = (0..context / RANKS).map(|i| (i * 7 % 300) as u32).collect();
        let ids = Tensor::from_slice(&tokens, (1, tokens.len()), &Device::Cpu)?;
        let tape = Tape::start();
        let loss = segment.close(&ops::sum_all(&model.losses_of_segment(&ids, &tokens, None, &segment)?)?)?;
        tape.backward(&loss)?;
        Ok(ranks.take().values().map(|traffic| traffic.bytes).sum())
    };
    Ok(on_counted(RANKS, of_rank)?.into_iter().sum())
}

/// What FAVOR and windows send does not depend on the length of the sequence, and is what can be
/// counted by hand; what softmax sends grows with it. The table stands in the book.
#[test]
fn what_favor_sends_is_constant_and_what_softmax_sends_is_linear() -> Result<()> {
    let contexts = [256, 512, 1024];
    let (heads, dim, features, window) = (2, 16, 64, 32);
    // Every rank sends keys and values to all after it, there and back; in the rounds of a scan,
    // all send but the last, and then all but the last two.
    let (to_all, to_next) = (2 * RANKS * (RANKS - 1) / 2, 2 * (RANKS - 1));
    let of_scan = 2 * ((RANKS - 1) + (RANKS - 2));
    let sums = |gated: usize| of_scan * heads * (features * (dim + 2) + gated) * 4;
    let keys_and_values = |tokens: usize, gated: usize| heads * tokens * (2 * dim + gated) * 4;
    let convolutions = to_next * 3 * (3 * heads * dim) * 4;
    let rows = [
        ("favor:m=64", sums(0)),
        ("favor-gated:m=64", sums(1)),
        ("favor-gated:m=64,conv", sums(1) + convolutions),
        ("favor-window:m=64,window=32", sums(0) + to_next * keys_and_values(window, 0)),
        ("softmax:window=32", to_next * keys_and_values(window - 1, 0)),
    ];
    let mut table = String::new();
    for (attention, expected) in rows {
        let sent = contexts.map(|context| bytes_sent(attention, context));
        let sent = sent.into_iter().collect::<Result<Vec<_>>>()?;
        assert_eq!(sent, [expected; 3], "{attention}");
        table += &line(attention, &sent);
    }
    let sent = contexts.map(|context| bytes_sent("softmax", context)).into_iter().collect::<Result<Vec<_>>>()?;
    let expected = contexts.map(|context| to_all * keys_and_values(context / RANKS, 0));
    assert_eq!(sent, expected, "softmax");
    table += &line("softmax", &sent);
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../book/src/tutorials/several-machines.md");
    assert!(std::fs::read_to_string(book)?.contains(&table), "the book has another table than this:\n{table}");
    Ok(())
}

fn line(attention: &str, bytes: &[usize]) -> String {
    let grouped = |n: &usize| match n / 1000 {
        0 => n.to_string(),
        thousands => format!("{thousands},{:03}", n % 1000),
    };
    format!("| `{attention}` | {} |\n", bytes.iter().map(grouped).collect::<Vec<_>>().join(" | "))
}
