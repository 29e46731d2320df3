//! The reference: attention and its gradients in `f64`, from the formulas, with an explicit kernel
//! value for every query and key.
//!
//! With `x = D^-1/4 q`, `y = D^-1/4 k` and a kernel κ, over the keys j that query i may see,
//!
//! ```text
//! o_i = Σ_j κ(x_i, y_j) v_j / Σ_j κ(x_i, y_j)
//! ```
//!
//! where κ(x, y) is `e^{x·y}` for softmax attention and `φ(x)·φ(y)` for a feature map φ. With gates
//! `g`, κ(x_i, y_j) is multiplied by `e^{Σ_{j<s≤i} g_s}`. Time is quadratic in the number of
//! tokens. Nothing here is shared with the fast attention that it judges: no tensors, no chunks, no
//! running sums, no ε, and no derivative of a feature map worked out by hand (derivatives come from
//! dual numbers).
//!
//! The functions panic on slices that do not fit their shape, as an index out of bounds would.

mod convolution;
mod features;
mod kernel;
mod scalar;

pub use convolution::{short_convolution, short_convolution_backward};
pub use features::features;
pub use kernel::Kernel;

use kernel::{Form, add_scaled, dot};

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
    /// How many keys a query sees at most under `causal`: the last so many, its own among them.
    pub window: Option<usize>,
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
/// If slices and shape do not fit, or a causal problem has more queries than keys.
pub fn attention(kernel: Kernel, inputs: Inputs) -> Vec<f64> {
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
/// As [`attention`].
pub fn attention_backward(kernel: Kernel, inputs: Inputs, grad_output: &[f64]) -> Gradients {
    inputs.check();
    let shape = inputs.shape;
    assert_eq!(grad_output.len(), shape.output_count(), "elements of grad_output");
    let (dim, value_dim) = (shape.head_dim, shape.value_dim);
    let form = kernel.form();
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
            let mut grad_key_codes: Vec<Vec<f64>> = head.key_codes.iter().map(|code| vec![0.0; code.len()]).collect();

            for i in 0..shape.q_len {
                let g = row(grad_output, head.q_rows + i, value_dim);
                let weights = head.weights(i);
                let output = head.output(&weights);
                let mut grad_query_code = vec![0.0; head.query_codes[i].len()];
                let mut grad_decay = vec![0.0; shape.k_len];
                for &(j, kernel_value) in &weights.kernel {
                    // With o = Σ_j κ_j v_j / Σ_j κ_j:
                    // ∂(g·o)/∂v_j = g κ_j / Σκ  and  ∂(g·o)/∂κ_j = (g·v_j − g·o) / Σκ.
                    let grad_v = row_mut(&mut grads.v, head.kv_rows + j, value_dim);
                    add_scaled(grad_v, kernel_value / weights.denominator, g);
                    let grad_kernel = (dot(g, head.values[j]) - dot(g, &output)) / weights.denominator;
                    form.combine_backward(
                        (&head.query_codes[i], &head.key_codes[j]),
                        weights.shift - head.decays[i][j],
                        grad_kernel,
                        (&mut grad_query_code, &mut grad_key_codes[j]),
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
                let grad_x = kernel.code_backward(&head.queries[i], &grad_query_code);
                add_scaled(row_mut(&mut grads.q, head.q_rows + i, dim), scale, &grad_x);
            }
            for (j, grad_key_code) in grad_key_codes.iter().enumerate() {
                let grad_y = kernel.code_backward(&head.keys[j], grad_key_code);
                let grad_k = row_mut(&mut grads.k, head.kv_rows + j, dim);
                add_scaled(grad_k, scale, &grad_y);
            }
        }
    }
    grads
}

/// `Head` is one head of one sequence: scaled rows, their codes, values, and which query sees which
/// key.
struct Head<'a> {
    form: Form,
    queries: Vec<Vec<f64>>,
    keys: Vec<Vec<f64>>,
    query_codes: Vec<Vec<f64>>,
    key_codes: Vec<Vec<f64>>,
    values: Vec<&'a [f64]>,
    value_dim: usize,
    visible: Vec<Vec<bool>>,
    /// The sum of the gates after key j, up to that of query i; 0 without gates.
    decays: Vec<Vec<f64>>,
    /// The number of query rows before this head's in `q`, and of key rows in `k` and `v`.
    q_rows: usize,
    kv_rows: usize,
}

/// `Weights` says how one query weighs the keys.
struct Weights {
    /// The keys j it sees, with `e^-shift κ(x, y_j)`.
    kernel: Vec<(usize, f64)>,
    shift: f64,
    /// `Σ_j e^-shift κ(x, y_j)`.
    denominator: f64,
}

impl<'a> Head<'a> {
    fn new(kernel: Kernel, inputs: &Inputs<'a>, batch: usize, head: usize) -> Self {
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
        let visible = |i, j| {
            let past = !inputs.causal || {
                let own = i + (shape.k_len - shape.q_len);
                j <= own && (j < inputs.sinks || inputs.window.is_none_or(|window| j + window > own))
            };
            past && inputs.key_mask.is_none_or(|mask| mask[batch * shape.k_len + j])
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
        Head {
            form: kernel.form(),
            query_codes: queries.iter().map(|x| kernel.code(x)).collect(),
            key_codes: keys.iter().map(|y| kernel.code(y)).collect(),
            queries,
            keys,
            values: (0..shape.k_len).map(|j| row(inputs.v, kv_rows + j, shape.value_dim)).collect(),
            value_dim: shape.value_dim,
            visible: (0..shape.q_len).map(|i| (0..shape.k_len).map(|j| visible(i, j)).collect()).collect(),
            decays: (0..shape.q_len).map(decays).collect(),
            q_rows,
            kv_rows,
        }
    }

    fn weights(&self, i: usize) -> Weights {
        let a = &self.query_codes[i];
        let seen: Vec<usize> = (0..self.keys.len()).filter(|&j| self.visible[i][j]).collect();
        let (decays, keys) = (&self.decays[i], &self.key_codes);
        let exponents = seen.iter().map(|&j| self.form.exponent(a, &keys[j]) + decays[j]);
        let shift = exponents.fold(f64::NEG_INFINITY, f64::max);
        let kernel: Vec<_> = seen.iter().map(|&j| (j, self.form.combine(a, &keys[j], shift - decays[j]))).collect();
        let denominator = kernel.iter().map(|(_, value)| value).sum();
        Weights { kernel, shift, denominator }
    }

    fn output(&self, weights: &Weights) -> Vec<f64> {
        let mut output = vec![0.0; self.value_dim];
        for &(j, kernel_value) in &weights.kernel {
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

fn row(values: &[f64], index: usize, size: usize) -> &[f64] {
    &values[index * size..(index + 1) * size]
}

fn row_mut(values: &mut [f64], index: usize, size: usize) -> &mut [f64] {
    &mut values[index * size..(index + 1) * size]
}
