//! The short convolution and its gradients in `f64`, tap by tap.

/// Computes `y_t = Σ_j w_j x_{t−3+j}` for each channel: `x` `(B, T, C)` and `weight` `(C, 4)`, both
/// row-major, → `(B, T, C)`. Rows before the first are zeros.
///
/// # Panics
///
/// If slices and `shape`, `(B, T, C)`, do not fit.
pub fn short_convolution(x: &[f64], weight: &[f64], shape: [usize; 3]) -> Vec<f64> {
    let mut out = vec![0.0; x.len()];
    for_taps(x, weight, shape, |to, from, tap| out[to] += weight[tap] * x[from]);
    out
}

/// Computes the gradients of `x` and of `weight`, of a loss whose gradient with respect to
/// [`short_convolution`]'s result is `grad`, `(B, T, C)`.
///
/// # Panics
///
/// Where [`short_convolution`] does, and if `grad` has not as many numbers as `x`.
pub fn short_convolution_backward(x: &[f64], weight: &[f64], shape: [usize; 3], grad: &[f64]) -> [Vec<f64>; 2] {
    assert_eq!(grad.len(), x.len(), "elements of grad");
    let (mut of_x, mut of_weight) = (vec![0.0; x.len()], vec![0.0; weight.len()]);
    for_taps(x, weight, shape, |to, from, tap| {
        of_x[from] += grad[to] * weight[tap];
        of_weight[tap] += grad[to] * x[from];
    });
    [of_x, of_weight]
}

/// Calls `visit` with the index of each result, of a number that it depends on, and of the tap
/// between them.
fn for_taps(
    x: &[f64],
    weight: &[f64],
    [batch, tokens, channels]: [usize; 3],
    mut visit: impl FnMut(usize, usize, usize),
) {
    assert_eq!(x.len(), batch * tokens * channels, "elements of x");
    assert_eq!(weight.len(), 4 * channels, "elements of weight");
    for n in 0..batch {
        for t in 0..tokens {
            for c in 0..channels {
                for j in 0..4 {
                    if t + j >= 3 {
                        let at = |t| (n * tokens + t) * channels + c;
                        visit(at(t), at(t + j - 3), 4 * c + j);
                    }
                }
            }
        }
    }
}
