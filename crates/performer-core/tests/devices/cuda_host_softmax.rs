//! The CUDA kernels of exact softmax are compared with the reference, without a card, as those of
//! FAVOR are in `cuda_host.rs`.

use super::cuda_host::tolerance;
use crate::common::{
    Problem, Random, assert_close,
    emulated::{compile, execute, round, storage},
};
use candle_core::DType;
use performer_core::reference::{Kernel, Shape, attention, attention_backward};

/// Compares the outputs and gradients of the kernels of exact softmax with the reference.
fn check_softmax(dtype: DType, teams: bool, p: Problem) {
    check_softmax_window(dtype, teams, p, None, 0);
}

/// Compares them where a query sees the last `window` keys and the first `sinks`.
fn check_softmax_window(dtype: DType, teams: bool, mut p: Problem, window: Option<usize>, sinks: usize) {
    for x in [&mut p.q, &mut p.k, &mut p.v, &mut p.grad_output] {
        round(dtype, x);
    }
    let s = p.shape;
    let macros = [
        ("STORAGE", storage(dtype)),
        ("DIM", s.head_dim),
        ("VALUES", s.value_dim),
        ("TEAMS", usize::from(teams)),
        ("GATED", usize::from(p.gates.is_some())),
    ];
    let Some(program) = compile("cuda", "softmax", &macros) else { return };
    let offset = if p.causal { s.k_len - s.q_len } else { usize::MAX };
    let run = |descending: bool| {
        let masked = usize::from(p.key_mask.is_some());
        let limits = [offset, window.unwrap_or(1 << 30), sinks, s.value_dim, masked];
        let header =
            [&[s.batch, s.heads, s.kv_heads, s.q_len, s.k_len][..], &limits, &[usize::from(descending)]].concat();
        let gates = p.gates.as_deref().unwrap_or_default();
        execute(&program, &header, &[&p.q, &p.k, &p.v, &p.grad_output, gates], p.key_mask.as_deref())
    };
    let all = run(false);
    let what = format!("softmax, {dtype:?}, {s:?}, window {window:?}, {sinks} sinks");
    assert!(all == run(true), "{what}: the order of threads matters");
    let mut all = all.into_iter();
    let mut take = |n: usize| all.by_ref().take(n).collect::<Vec<_>>();
    let inputs = performer_core::reference::Inputs { window, sinks, ..p.inputs() };
    let expected = attention(Kernel::Softmax, inputs);
    let gradients = attention_backward(Kernel::Softmax, inputs, &p.grad_output);
    for (part, dims, expected) in [
        ("outputs", p.output_dims(), &expected),
        ("dq", p.q_dims(), &gradients.q),
        ("dk", p.k_dims(), &gradients.k),
        ("dv", p.v_dims(), &gradients.v),
        ("gradient of gates", p.gate_dims(), &gradients.gates),
    ] {
        assert_close(&format!("{part} of {what}"), &dims, &take(expected.len()), expected, tolerance(dtype));
    }
}

#[test]
fn exact_softmax() {
    for (dtype, teams, batch, [heads, kv_heads], q_len, k_len, head_dim, value_dim, causal) in [
        (DType::BF16, false, 1, [3, 1], 200, 200, 72, 64, true),
        (DType::F16, false, 1, [1, 1], 65, 300, 48, 72, true),
        (DType::F32, false, 2, [2, 1], 63, 130, 24, 40, false),
        (DType::F32, false, 1, [1, 1], 1, 70, 24, 40, true),
        (DType::BF16, true, 1, [3, 1], 200, 200, 64, 64, true),
        (DType::F16, true, 1, [1, 1], 65, 300, 48, 64, true),
        (DType::BF16, true, 2, [2, 1], 63, 130, 24, 30, false),
        (DType::BF16, true, 1, [1, 1], 1, 70, 24, 40, true),
    ] {
        let shape = Shape { batch, heads, kv_heads, q_len, k_len, head_dim, value_dim };
        let mut problem = Problem::random(13, shape, None, 0);
        problem.causal = causal;
        check_softmax(dtype, teams, problem.clone());
        if !causal || teams {
            problem.key_mask = Some(Random::new(14).mask(batch * k_len, 0.6));
            check_softmax(dtype, teams, problem);
        }
    }
}

/// Forget gates that forget at every pace, with all keys seen and with windows and sinks.
#[test]
fn softmax_with_forget_gates() {
    for (dtype, teams, [heads, kv_heads], q_len, k_len, window, sinks) in [
        (DType::F32, false, [3, 1], 200, 200, None, 0),
        (DType::F32, false, [2, 2], 90, 300, Some(40), 3),
        (DType::BF16, false, [1, 1], 150, 150, Some(70), 0),
        (DType::BF16, true, [3, 1], 300, 300, None, 0),
        (DType::F16, true, [2, 2], 200, 330, Some(66), 5),
        (DType::BF16, true, [1, 1], 1, 70, Some(33), 2),
    ] {
        let dims = if teams { [24, 40] } else { [72, 24] };
        let shape = Shape { batch: 2, heads, kv_heads, q_len, k_len, head_dim: dims[0], value_dim: dims[1] };
        let mut problem = Problem::random(35, shape, None, 0).gated(36);
        round(DType::F32, problem.gates.as_mut().expect("gates"));
        check_softmax_window(dtype, teams, problem, window, sinks);
    }
}

/// A gate of −1e30 is allowed. What comes after it is forgotten at its own pace.
#[test]
fn softmax_after_a_gate_that_forgets_everything() {
    for (dtype, window) in [(DType::F32, None), (DType::F32, Some(30)), (DType::BF16, None)] {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 90, k_len: 90, head_dim: 24, value_dim: 16 };
        let mut problem = Problem::random(35, shape, None, 0).gated(36);
        let gates = problem.gates.as_mut().expect("gates");
        round(DType::F32, gates);
        gates[40] = -1e30;
        check_softmax_window(dtype, false, problem, window, 0);
    }
}

/// Windows that end inside steps and at their borders, that are longer than a block and longer than
/// the sequence, with and without sinks and keys that are hidden.
#[test]
fn softmax_over_a_window() {
    for (dtype, teams, [heads, kv_heads], q_len, k_len, window, sinks, masked) in [
        (DType::F32, false, [3, 1], 200, 200, 32, 0, false),
        (DType::F32, false, [1, 1], 150, 210, 7, 5, true),
        (DType::F32, false, [1, 1], 90, 90, 500, 0, false),
        (DType::F32, false, [1, 1], 1, 70, 33, 2, false),
        (DType::BF16, false, [1, 1], 300, 300, 70, 40, false),
        (DType::BF16, true, [3, 1], 300, 300, 66, 0, false),
        (DType::F16, true, [1, 1], 200, 330, 1, 3, true),
        (DType::BF16, true, [1, 1], 1, 70, 33, 2, false),
    ] {
        let dims = if teams { [24, 40] } else { [72, 24] };
        let shape = Shape { batch: 1, heads, kv_heads, q_len, k_len, head_dim: dims[0], value_dim: dims[1] };
        let mut problem = Problem::random(31, shape, None, 0);
        problem.causal = true;
        problem.key_mask = masked.then(|| Random::new(14).mask(k_len, 0.6));
        check_softmax_window(dtype, teams, problem, Some(window), sinks);
    }
}

/// The logarithms of denominators that stand after the values of each row, and what their gradients
/// add to those of queries and keys.
#[test]
fn softmax_with_logarithms_of_denominators() {
    let (tokens, window, dim, width) = (130, 40, 16, 20);
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: tokens, k_len: tokens, head_dim: dim, value_dim: dim };
    let mut p = Problem::random(32, shape, None, 0);
    p.causal = true;
    for x in [&mut p.q, &mut p.k, &mut p.v, &mut p.grad_output] {
        round(DType::F32, x);
    }
    let macros = [("STORAGE", 0), ("DIM", dim), ("VALUES", dim), ("TEAMS", 0)];
    let Some(program) = compile("cuda", "softmax", &macros) else { return };
    let of_logs = Random::new(33).normal(tokens, 1.0);
    let mut grad = Vec::new();
    for (row, of_log) in p.grad_output.chunks_exact(dim).zip(&of_logs) {
        grad.extend(row);
        grad.extend([f64::from(*of_log as f32), 0.0, 0.0, 0.0]);
    }
    let header = [1, 1, 1, tokens, tokens, 0, window, 0, width, 0, 0];
    let mut all = execute(&program, &header, &[&p.q, &p.k, &p.v, &grad], None).into_iter();
    let mut take = |n: usize| all.by_ref().take(n).collect::<Vec<_>>();
    let (out, dq, dk) = (take(tokens * width), take(tokens * dim), take(tokens * dim));

    // By the formulas: log_i = ln Σ_j e^{s_ij}, whose gradient by s_ij is p_ij.
    let inputs = performer_core::reference::Inputs { window: Some(window), ..p.inputs() };
    let values = attention(Kernel::Softmax, inputs);
    let gradients = attention_backward(Kernel::Softmax, inputs, &p.grad_output);
    let (mut want_q, mut want_k, mut logs) = (gradients.q, gradients.k, Vec::new());
    let slope = (dim as f64).sqrt().recip();
    for i in 0..tokens {
        let seen = (i + 1).saturating_sub(window)..=i;
        let row = |x: &[f64], t: usize| x[t * dim..(t + 1) * dim].to_vec();
        let q = row(&p.q, i);
        let score = |j: usize| row(&p.k, j).iter().zip(&q).map(|(k, q)| k * q).sum::<f64>() * slope;
        let sum: f64 = seen.clone().map(|j| score(j).exp()).sum();
        logs.push(sum.ln());
        for j in seen {
            let weight = score(j).exp() / sum * of_logs[i] * slope;
            let k = row(&p.k, j);
            for d in 0..dim {
                want_q[i * dim + d] += weight * k[d];
                want_k[j * dim + d] += weight * q[d];
            }
        }
    }
    let (mut got_values, mut got_logs) = (Vec::new(), Vec::new());
    for row in out.chunks_exact(width) {
        got_values.extend(&row[..dim]);
        got_logs.push(row[dim]);
        assert_eq!(row[dim + 1..], [0.0; 3], "what a row is padded with");
    }
    assert_close("values", &[tokens, dim], &got_values, &values, 1e-5);
    assert_close("logarithms", &[tokens], &got_logs, &logs, 1e-5);
    assert_close("dq", &[tokens, dim], &dq, &want_q, 1e-4);
    assert_close("dk", &[tokens, dim], &dk, &want_k, 1e-4);
}

fn check_long_sums_of_softmax(tokens: usize) {
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: tokens, k_len: tokens, head_dim: 16, value_dim: 16 };
    let mut problem = Problem::random(28, shape, None, 0);
    problem.causal = true;
    problem.v.iter_mut().for_each(|v| *v += 3.0);
    for x in [&mut problem.q, &mut problem.k, &mut problem.v, &mut problem.grad_output] {
        round(DType::F32, x);
    }
    let macros = [("STORAGE", 0), ("DIM", 16), ("VALUES", 16), ("TEAMS", 0)];
    let Some(program) = compile("cuda", "softmax", &macros) else { return };
    let header = [1, 1, 1, tokens, tokens, 0, 1 << 30, 0, 16, 0, 2];
    let numbers = [&problem.q[..], &problem.k, &problem.v, &problem.grad_output];
    let mut all = execute(&program, &header, &numbers, None).into_iter();
    let mut take = || all.by_ref().take(tokens * 16).collect::<Vec<_>>();
    let (out, _, _, dv) = (take(), take(), take(), take());
    assert_close("outputs", &problem.output_dims(), &out, &attention(Kernel::Softmax, problem.inputs()), 3e-6);
    let gradients = attention_backward(Kernel::Softmax, problem.inputs(), &problem.grad_output);
    assert_close("dv", &problem.v_dims(), &dv, &gradients.v, 3e-6);
}

#[test]
fn long_sums_of_f32_softmax_leave_the_tensor_cores() {
    check_long_sums_of_softmax(1000);
}

#[test]
#[ignore = "takes half a minute"]
fn longer_sums_of_f32_softmax_leave_the_tensor_cores() {
    check_long_sums_of_softmax(3000);
}
