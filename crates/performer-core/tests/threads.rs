//! Bits do not depend on how the work is split: heads fewer than threads are cut into pieces, and must not tell.

mod common;

use candle_core::{DType, Result};
use common::{Layout, Outcome, Problem, Random, all_kernels, conditioned_scale};
use performer_core::reference::Shape;

/// More than most machines have threads, so that nothing is cut.
const MANY: usize = 64;

/// `batch` copies of a problem.
fn copies(one: &Problem, batch: usize) -> Problem {
    let of = |x: &Vec<f64>| x.repeat(batch);
    Problem {
        shape: Shape { batch, ..one.shape },
        q: of(&one.q),
        k: of(&one.k),
        v: of(&one.v),
        grad_output: of(&one.grad_output),
        key_mask: one.key_mask.as_ref().map(|mask| mask.repeat(batch)),
        ..one.clone()
    }
}

fn outcome(problem: &Problem) -> Result<Outcome> {
    let attention = problem.attention(DType::F32)?;
    problem.run(&*attention, DType::F32, Layout::Contiguous)
}

#[test]
fn one_head_alone_has_the_bits_it_has_among_many() -> Result<()> {
    // Two query heads that read one key head; several pieces and a part of one.
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 530, k_len: 530, head_dim: 4, value_dim: 3 };
    let mut random = Random::new(7);
    let visible = random.mask(shape.k_len, 0.8);
    for map in all_kernels() {
        for causal in [true, false] {
            for key_mask in [None, Some(visible.clone())] {
                let mut one = Problem::random(3, shape, map, 6).scale_qk(conditioned_scale(map));
                (one.causal, one.key_mask) = (causal, key_mask);
                let (alone, among) = (outcome(&one)?, outcome(&copies(&one, MANY))?);
                for (name, a, b) in [
                    ("output", &alone.output, &among.output),
                    ("q", &alone.q, &among.q),
                    ("k", &alone.k, &among.k),
                    ("v", &alone.v, &among.v),
                ] {
                    let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{map:?}, causal {causal}, masked {}: {name}", one.key_mask.is_some());
                }
            }
        }
    }
    Ok(())
}
