//! Bits do not depend on how the work is divided: where heads are fewer than threads they are cut
//! into pieces, and the results are the same.

use crate::common::{Layout, Outcome, Problem, Random, all_kernels, conditioned_scale};
use std::{sync::mpsc, thread, time::Duration};

use candle_core::{DType, Device, Result, Tensor, Var};
use performer_core::{
    Attention, Favor, FavorConfig, FeatureMapKind, Inputs, Mask, Softmax, Windowed, reference::Shape,
};

/// The threads of the pool in which both run, and so a number of heads of which nothing is cut.
const MANY: usize = 4;

/// Returns `batch` copies of a problem.
fn copies(one: &Problem, batch: usize) -> Problem {
    let of = |x: &Vec<f64>| x.repeat(batch);
    Problem {
        shape: Shape { batch, ..one.shape },
        q: of(&one.q),
        k: of(&one.k),
        v: of(&one.v),
        grad_output: of(&one.grad_output),
        gates: one.gates.as_ref().map(of),
        key_mask: one.key_mask.as_ref().map(|mask| mask.repeat(batch)),
        ..one.clone()
    }
}

fn outcome(problem: &Problem, attention: &dyn Attention) -> Result<Outcome> {
    problem.run(attention, DType::F32, Layout::Contiguous)
}

#[test]
fn one_head_alone_has_the_bits_it_has_among_many() -> Result<()> {
    // Two query heads read one key head; there are several pieces and a partial one.
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 530, k_len: 530, head_dim: 4, value_dim: 3 };
    let mut random = Random::new(7);
    let visible = random.mask(shape.k_len, 0.8);
    for map in all_kernels() {
        for causal in [true, false] {
            for key_mask in [None, Some(visible.clone())] {
                let mut one = Problem::random(3, shape, map, 6).scale_qk(conditioned_scale(map));
                (one.causal, one.key_mask) = (causal, key_mask);
                same_bits(&one, &format!("{map:?}, causal {causal}, masked {}", one.key_mask.is_some()))?;
                if causal && one.key_mask.is_none() {
                    same_bits(&one.gated(4), &format!("{map:?}, gated"))?;
                }
            }
        }
    }
    Ok(())
}

/// Chunks end after a key or two, and there are several segments of 16 of them.
#[test]
fn many_small_chunks_have_the_same_bits() -> Result<()> {
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 90, k_len: 90, head_dim: 4, value_dim: 3 };
    let mut one = Problem::random(5, shape, Some(FeatureMapKind::Positive), 6);
    one.causal = true;
    for (t, key) in one.k.chunks_exact_mut(shape.head_dim).take(60).enumerate() {
        // Half of the squared norm lowers a key's features, by 50 less from each key to the next.
        let norm = key.iter().map(|x| x * x).sum::<f64>().sqrt();
        let wanted = (2.0 * 50.0 * (60 - t) as f64).sqrt() * (shape.head_dim as f64).powf(0.25);
        key.iter_mut().for_each(|x| *x *= wanted / norm);
    }
    same_bits(&one, "falling norms")?;
    same_bits(&one.gated(6), "falling norms, gated")
}

/// Pieces begin within the sinks, between sinks and window, and in the window.
#[test]
fn a_window_with_sinks_has_the_same_bits() -> Result<()> {
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 800, k_len: 800, head_dim: 4, value_dim: 3 };
    let mut one = Problem::random(8, shape, None, 1);
    one.causal = true;
    for (window, sinks) in [(9, 3), (200, 300)] {
        let softmax = Softmax::new().with_window(window)?.with_sinks(sinks)?;
        for one in [one.clone(), one.clone().gated(9)] {
            same_bits_of(&one, &softmax, &format!("window of {window}, {sinks} sinks, gated {}", one.gates.is_some()))?;
        }
    }
    Ok(())
}

/// The window leaves the logarithms of its denominators for FAVOR's sums.
#[test]
fn a_window_before_favor_has_the_same_bits() -> Result<()> {
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 500, k_len: 500, head_dim: 4, value_dim: 3 };
    let mut one = Problem::random(8, shape, Some(FeatureMapKind::Positive), 6);
    one.causal = true;
    let windowed = Windowed::new(9, one.favor(DType::F32)?)?;
    for one in [one.clone(), one.gated(9)] {
        same_bits_of(&one, &windowed, &format!("window before FAVOR, gated {}", one.gates.is_some()))?;
    }
    Ok(())
}

fn same_bits(one: &Problem, name: &str) -> Result<()> {
    same_bits_of(one, &*one.attention(DType::F32)?, name)
}

fn same_bits_of(one: &Problem, attention: &dyn Attention, name: &str) -> Result<()> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(MANY).build().map_err(candle_core::Error::wrap)?;
    let (alone, among) = pool.install(|| (outcome(one, attention), outcome(&copies(one, MANY), attention)));
    let (alone, among) = (alone?, among?);
    for (what, a, b) in [
        ("output", &alone.output, &among.output),
        ("q", &alone.q, &among.q),
        ("k", &alone.k, &among.k),
        ("v", &alone.v, &among.v),
        ("gates", &alone.gates, &among.gates),
    ] {
        assert!(a.iter().all(|x| x.is_finite()), "{name}: {what}");
        let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{name}: {what}");
    }
    Ok(())
}

/// While a thread waits within a backward pass, Rayon may begin another one over the same graph on
/// it. If the first held a lock that the second needs, both would wait forever. Nor may they mix
/// their gradients.
#[test]
fn backward_passes_over_one_graph_do_not_wait_for_each_other() -> Result<()> {
    let x = Var::randn(0f32, 1.0, (2, 4, 300, 16), &Device::Cpu)?;
    let gates = Tensor::full(-0.1f32, (2, 4, 300), &Device::Cpu)?;
    let favor = Favor::new(&FavorConfig::default(), 16, 42, DType::F32, &Device::Cpu)?;
    let mut losses = Vec::new();
    for attention in [&favor as &dyn Attention, &Softmax::new()] {
        for inputs in [Inputs::new(&x, &x, &x), Inputs::new(&x, &x, &x).with_gates(&gates)] {
            losses.push(attention.forward(inputs, &Mask::causal())?.sqr()?.mean_all()?);
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().map_err(candle_core::Error::wrap)?;
    let gradient = move |loss: &Tensor| -> Result<Vec<f32>> {
        loss.backward()?.get(&x).expect("x is a variable").flatten_all()?.to_vec1()
    };
    let (done, all_done) = mpsc::channel();
    // A thread of its own, so that the test fails where the passes never end.
    thread::spawn(move || {
        let alone = losses.iter().map(&gradient).collect::<Result<Vec<_>>>().expect("gradients");
        let (gradient, alone) = (&gradient, &alone);
        pool.scope(|scope| {
            for _ in 0..32 {
                for (loss, alone) in losses.iter().zip(alone) {
                    scope.spawn(move |_| assert_eq!(&gradient(loss).expect("a gradient"), alone));
                }
            }
        });
        done.send(()).expect("the test waits for it");
    });
    let ended = all_done.recv_timeout(Duration::from_secs(120));
    assert_eq!(ended, Ok(()), "backward passes wait for each other, or failed (printed above)");
    Ok(())
}
