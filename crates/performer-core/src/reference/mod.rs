//! The reference: attention and its gradients in `f64`, from the formulas, with an explicit kernel
//! value for every query and key.
//!
//! With `x = D^-1/4 q`, `y = D^-1/4 k` and a kernel κ, over the keys j that query i may see,
//!
//! ```text
//! o_i = Σ_j κ(x_i, y_j) v_j / Σ_j κ(x_i, y_j)
//! ```
//!
//! where κ(x, y) is `e^{x·y}` for softmax attention and `φ(x)·φ(y)` for a feature map φ; fitted and
//! trained features have one map of queries and another of keys. With gates `g`, κ(x_i, y_j) is
//! multiplied by `e^{Σ_{j<s≤i} g_s}`. Keys before a window may have a kernel of their own, as where
//! an exact window stands before features. Time is quadratic in the number of tokens. With the fast
//! attention that it judges it shares the names of the maps and the constant of the ReLU map, and
//! nothing else: no tensors, no chunks, no running sums of keys, no ε of the denominators, and no
//! derivative of a feature map worked out by hand (derivatives come from dual numbers).
//!
//! The functions panic on slices that do not fit their shape, as an index out of bounds would.

mod convolution;
mod features;
mod kernel;
mod scalar;

pub use convolution::{short_convolution, short_convolution_backward};
pub use features::features;
pub use kernel::{FittedSide, Kernel};

use kernel::{Form, Side, add_scaled, dot};

/// The sizes of one attention problem.
///
/// Query head h attends to key and value head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// B.
    pub batch: usize,
    /// H, the query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Hkv, the key and value heads.
    pub kv_heads: usize,
    /// Tq, the number of queries.
    pub q_len: usize,
    /// Tk, the number of keys and values.
    pub k_len: usize,
    /// D, the size of a query and of a key.
    pub head_dim: usize,
    /// Dv, the size of a value.
    pub value_dim: usize,
}

impl Shape {
    /// The number of elements of the queries, `(B, H, Tq, D)`.
    pub fn q_count(&self) -> usize {
        self.batch * self.heads * self.q_len * self.head_dim
    }

    /// The number of elements of the keys, `(B, Hkv, Tk, D)`.
    pub fn k_count(&self) -> usize {
        self.batch * self.kv_heads * self.k_len * self.head_dim
    }

    /// The number of elements of the values, `(B, Hkv, Tk, Dv)`.
    pub fn v_count(&self) -> usize {
        self.batch * self.kv_heads * self.k_len * self.value_dim
    }

    /// The number of elements of the output, `(B, H, Tq, Dv)`.
    pub fn output_count(&self) -> usize {
        self.batch * self.heads * self.q_len * self.value_dim
    }
}

/// The inputs of one attention problem; all tensors are row-major.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The sizes of the slices below.
    pub shape: Shape,
    /// Queries `(B, H, Tq, D)`, not yet scaled.
    pub q: &'a [f64],
    /// Keys `(B, Hkv, Tk, D)`, not yet scaled.
    pub k: &'a [f64],
    /// Values `(B, Hkv, Tk, Dv)`.
    pub v: &'a [f64],
    /// Whether query i sees only the keys `j <= i + (Tk - Tq)`: the queries are the last Tq of Tk
    /// tokens, Tq <= Tk.
    pub causal: bool,
    /// Under `causal`, the number of latest keys, its own among them, that a query sees. If there
    /// is a kernel `before_window`, it sees the earlier keys too and weighs them by that one.
    pub window: Option<usize>,
    /// The kernel of the keys before the window that are no sinks; `None` hides them.
    pub before_window: Option<Kernel<'a>>,
    /// How many of the first keys every later query sees beside its window, the attention sinks of
    /// Xiao et al. 2023, <https://arxiv.org/abs/2309.17453>; without a window they change nothing.
    pub sinks: usize,
    /// `(B, Tk)`, true for the keys that may be seen; `None` if all may.
    pub key_mask: Option<&'a [bool]>,
    /// Logarithms `(B, Hkv, Tk)` of what each token multiplies the weights of all keys before it
    /// by; only under `causal`. The gate of a hidden key counts.
    pub gates: Option<&'a [f64]>,
}

/// Computes the attention output, `(B, H, Tq, Dv)`. A query that sees no key gives zeros.
///
/// # Panics
///
/// If slices and shape do not fit, `kv_heads` does not divide `heads`, a causal problem has more
/// queries than keys, there is a kernel for the keys before a window and no window, or there are
/// gates without `causal`.
pub fn attention<'a>(kernel: Kernel<'a>, inputs: Inputs<'a>) -> Vec<f64> {
    inputs.check();
    let shape = inputs.shape;
    let mut output = Vec::with_capacity(shape.output_count());
    for batch in 0..shape.batch {
        for head in 0..shape.heads {
            let head = Head::new(kernel, &inputs, batch, head);
            for i in 0..shape.q_len {
                output.extend(head.output(&head.weights(i)));
            }
        }
    }
    output
}

/// The gradients of a loss, each in the layout of its input.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// `(B, H, Tq, D)`.
    pub q: Vec<f64>,
    /// `(B, Hkv, Tk, D)`.
    pub k: Vec<f64>,
    /// `(B, Hkv, Tk, Dv)`.
    pub v: Vec<f64>,
    /// `(B, Hkv, Tk)`; empty without gates.
    pub gates: Vec<f64>,
}

/// Computes the gradients of a loss whose gradient with respect to [`attention`]'s output is
/// `grad_output`, `(B, H, Tq, Dv)`.
///
/// # Panics
///
/// Where [`attention`] does, and if `grad_output` has not as many numbers as the output.
pub fn attention_backward<'a>(kernel: Kernel<'a>, inputs: Inputs<'a>, grad_output: &[f64]) -> Gradients {
    inputs.check();
    let shape = inputs.shape;
    assert_eq!(grad_output.len(), shape.output_count(), "elements of grad_output");
    let (dim, value_dim) = (shape.head_dim, shape.value_dim);
    let scale = scale(dim);
    let mut grads = Gradients {
        q: vec![0.0; shape.q_count()],
        k: vec![0.0; shape.k_count()],
        v: vec![0.0; shape.v_count()],
        gates: vec![0.0; inputs.gates.map_or(0, <[f64]>::len)],
    };
    for batch in 0..shape.batch {
        for head in 0..shape.heads {
            let head = Head::new(kernel, &inputs, batch, head);
            let mut grad_key_codes: Vec<Vec<Vec<f64>>> = head.codes.iter().map(|codes| zeros(&codes.keys)).collect();

            for i in 0..shape.q_len {
                let g = row(grad_output, head.q_rows + i, value_dim);
                let weights = head.weights(i);
                let output = head.output(&weights);
                let mut grad_query_codes: Vec<Vec<f64>> =
                    head.codes.iter().map(|codes| vec![0.0; codes.queries[i].len()]).collect();
                let mut grad_decay = vec![0.0; shape.k_len];
                for &(j, of, kernel_value) in &weights.kernel {
                    // With o = Σ_j κ_j v_j / Σ_j κ_j:
                    // ∂(g·o)/∂v_j = g κ_j / Σκ  and  ∂(g·o)/∂κ_j = (g·v_j − g·o) / Σκ.
                    let grad_v = row_mut(&mut grads.v, head.kv_rows + j, value_dim);
                    add_scaled(grad_v, kernel_value / weights.denominator, g);
                    let grad_kernel = (dot(g, head.values[j]) - dot(g, &output)) / weights.denominator;
                    let codes = &head.codes[of];
                    codes.form.combine_backward(
                        (&codes.queries[i], &codes.keys[j]),
                        weights.shift - head.decays[i][j],
                        grad_kernel,
                        (&mut grad_query_codes[of], &mut grad_key_codes[of][j]),
                    );
                    grad_decay[j] = grad_kernel * kernel_value;
                }
                if inputs.gates.is_some() {
                    // The gate of token s is part of the weights of all keys before s.
                    let grad_gates = row_mut(&mut grads.gates, head.kv_rows / shape.k_len, shape.k_len);
                    let own = i + (shape.k_len - shape.q_len);
                    let mut before = 0.0;
                    for s in 1..=own {
                        before += grad_decay[s - 1];
                        grad_gates[s] += before;
                    }
                }
                for (codes, grad_query_code) in head.codes.iter().zip(&grad_query_codes) {
                    let grad_x = codes.kernel.code_backward(Side::Query, &head.queries[i], grad_query_code);
                    add_scaled(row_mut(&mut grads.q, head.q_rows + i, dim), scale, &grad_x);
                }
            }
            for (codes, grad_key_codes) in head.codes.iter().zip(&grad_key_codes) {
                for (j, grad_key_code) in grad_key_codes.iter().enumerate() {
                    let grad_y = codes.kernel.code_backward(Side::Key, &head.keys[j], grad_key_code);
                    let grad_k = row_mut(&mut grads.k, head.kv_rows + j, dim);
                    add_scaled(grad_k, scale, &grad_y);
                }
            }
        }
    }
    grads
}

/// `Codes` are the rows of one head as one kernel reads them.
struct Codes<'a> {
    kernel: Kernel<'a>,
    form: Form,
    queries: Vec<Vec<f64>>,
    keys: Vec<Vec<f64>>,
}

impl<'a> Codes<'a> {
    fn new(kernel: Kernel<'a>, queries: &[Vec<f64>], keys: &[Vec<f64>]) -> Self {
        let codes = |side, rows: &[Vec<f64>]| rows.iter().map(|row| kernel.code(side, row)).collect();
        Codes { kernel, form: kernel.form(), queries: codes(Side::Query, queries), keys: codes(Side::Key, keys) }
    }
}

/// `Head` is one head of one sequence: scaled rows, their codes, values, and which query sees which
/// key.
struct Head<'a> {
    queries: Vec<Vec<f64>>,
    keys: Vec<Vec<f64>>,
    /// The codes of the kernel, and of that before the window if there is one.
    codes: Vec<Codes<'a>>,
    values: Vec<&'a [f64]>,
    value_dim: usize,
    /// Which of `codes` query i weighs key j by; `None` where it does not see the key.
    seen_by: Vec<Vec<Option<usize>>>,
    /// The sum of the gates after key j, up to that of query i; 0 without gates.
    decays: Vec<Vec<f64>>,
    /// The number of query rows before this head's in `q`, and of key rows in `k` and `v`.
    q_rows: usize,
    kv_rows: usize,
}

/// `Weights` says how one query weighs the keys.
struct Weights {
    /// The keys j it sees, with the number of their codes and `e^-shift κ(x, y_j)`.
    kernel: Vec<(usize, usize, f64)>,
    shift: f64,
    /// `Σ_j e^-shift κ(x, y_j)`.
    denominator: f64,
}

impl<'a> Head<'a> {
    fn new(kernel: Kernel<'a>, inputs: &Inputs<'a>, batch: usize, head: usize) -> Self {
        let shape = inputs.shape;
        let q_rows = (batch * shape.heads + head) * shape.q_len;
        let kv_head = head / (shape.heads / shape.kv_heads);
        let kv_rows = (batch * shape.kv_heads + kv_head) * shape.k_len;
        let scaled = |values, index| -> Vec<f64> {
            let row = row(values, index, shape.head_dim);
            row.iter().map(|value| scale(shape.head_dim) * value).collect()
        };
        let queries: Vec<_> = (0..shape.q_len).map(|i| scaled(inputs.q, q_rows + i)).collect();
        let keys: Vec<_> = (0..shape.k_len).map(|j| scaled(inputs.k, kv_rows + j)).collect();
        let seen_by = |i: usize, j: usize| {
            if inputs.key_mask.is_some_and(|mask| !mask[batch * shape.k_len + j]) {
                return None;
            }
            if !inputs.causal {
                return Some(0);
            }
            let own = i + (shape.k_len - shape.q_len);
            if j > own {
                return None;
            }
            let near = j < inputs.sinks || inputs.window.is_none_or(|window| j + window > own);
            if near { Some(0) } else { inputs.before_window.map(|_| 1) }
        };
        let decays = |i| {
            let mut decays = vec![0.0; shape.k_len];
            if let Some(gates) = inputs.gates {
                let own = i + (shape.k_len - shape.q_len);
                for j in (0..own).rev() {
                    decays[j] = decays[j + 1] + gates[kv_rows + j + 1];
                }
            }
            decays
        };
        let kernels = [Some(kernel), inputs.before_window].into_iter().flatten();
        Head {
            codes: kernels.map(|kernel| Codes::new(kernel, &queries, &keys)).collect(),
            queries,
            keys,
            values: (0..shape.k_len).map(|j| row(inputs.v, kv_rows + j, shape.value_dim)).collect(),
            value_dim: shape.value_dim,
            seen_by: (0..shape.q_len).map(|i| (0..shape.k_len).map(|j| seen_by(i, j)).collect()).collect(),
            decays: (0..shape.q_len).map(decays).collect(),
            q_rows,
            kv_rows,
        }
    }

    fn weights(&self, i: usize) -> Weights {
        let decays = &self.decays[i];
        let seen = (0..self.keys.len()).filter_map(|j| Some((j, self.seen_by[i][j]?)));
        let exponent = |(j, of): (usize, usize)| {
            let codes = &self.codes[of];
            codes.form.exponent(&codes.queries[i], &codes.keys[j]) + decays[j]
        };
        let shift = seen.clone().map(exponent).fold(f64::NEG_INFINITY, f64::max);
        let weigh = |(j, of): (usize, usize)| {
            let codes = &self.codes[of];
            (j, of, codes.form.combine(&codes.queries[i], &codes.keys[j], shift - decays[j]))
        };
        let kernel: Vec<_> = seen.map(weigh).collect();
        let denominator = kernel.iter().map(|(_, _, value)| value).sum();
        Weights { kernel, shift, denominator }
    }

    fn output(&self, weights: &Weights) -> Vec<f64> {
        let mut output = vec![0.0; self.value_dim];
        for &(j, _, kernel_value) in &weights.kernel {
            add_scaled(&mut output, kernel_value / weights.denominator, self.values[j]);
        }
        output
    }
}

impl Inputs<'_> {
    fn check(&self) {
        let shape = self.shape;
        assert!(
            shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
            "{} query heads cannot share {} key heads evenly",
            shape.heads,
            shape.kv_heads
        );
        assert!(
            !self.causal || shape.q_len <= shape.k_len,
            "causal attention of {} queries needs as many keys, not {}",
            shape.q_len,
            shape.k_len
        );
        assert_eq!(self.q.len(), shape.q_count(), "elements of q");
        assert_eq!(self.k.len(), shape.k_count(), "elements of k");
        assert_eq!(self.v.len(), shape.v_count(), "elements of v");
        if let Some(mask) = self.key_mask {
            assert_eq!(mask.len(), shape.batch * shape.k_len, "elements of key_mask");
        }
        assert!(
            self.before_window.is_none() || self.window.is_some(),
            "a kernel of the keys before a window needs a window"
        );
        if let Some(gates) = self.gates {
            assert!(self.causal, "gates need a causal mask");
            assert_eq!(gates.len(), shape.batch * shape.kv_heads * shape.k_len, "elements of gates");
        }
    }
}

/// `D^-1/4`: on both sides of the product it makes the 1/√D of softmax attention.
fn scale(head_dim: usize) -> f64 {
    (head_dim as f64).powf(-0.25)
}

/// Makes rows of zeros as long as those of `rows`.
fn zeros(rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    rows.iter().map(|row| vec![0.0; row.len()]).collect()
}

fn row(values: &[f64], index: usize, size: usize) -> &[f64] {
    &values[index * size..(index + 1) * size]
}

fn row_mut(values: &mut [f64], index: usize, size: usize) -> &mut [f64] {
    &mut values[index * size..(index + 1) * size]
}
