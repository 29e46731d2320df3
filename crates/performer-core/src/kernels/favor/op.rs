//! FAVOR's forward and backward passes as a differentiable Candle operation.

use std::sync::OnceLock;

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, backend::BackendStorage, bail};

use super::{
    super::{
        for_heads,
        fresh::{Fresh, Part},
        gradient,
        operation::{Operation, Stored, apply},
        rows::{Heads, Rows},
        spare_threads, storage_of, with_storages,
    },
    Form, Inputs,
    beside::favor_beside,
    causal, causal_backward,
    exponential::LinearGradient,
    full,
};

/// Computes FAVOR attention: `q` `(B, H, Tq, ·)`, `k` `(B, Hkv, Tk, ·)`, `v` `(B, Hkv, Tk, Dv)` →
/// `(B, H, Tq, Dv)`, or `Dv + 1` with logarithms. The last dimension of `q` and `k` is what the map
/// takes. Gates are `(B, Hkv, Tk)`, f32 and contiguous, and need `causal`. The last dimension of
/// `q`, `k` and `v` is contiguous and nothing is empty. `visible` is `(B, Tk)`. A row that sees no
/// key is zero.
pub(crate) fn favor(
    form: Form,
    qkv: [&Tensor; 3],
    gates: Option<&Tensor>,
    visible: Option<Vec<bool>>,
    causal: bool,
) -> Result<Tensor> {
    match gates {
        None => apply(Favor(Passes::new(form, causal, visible, &qkv)), qkv),
        Some(gates) => favor_beside(form, None, Some(gates), qkv, visible, causal),
    }
}

/// `Favor` is FAVOR attention as one differentiable operation on `(q, k, v)`.
struct Favor(Passes);

/// `Passes` holds a forward pass and what its backward pass needs.
pub(super) struct Passes {
    form: Form,
    causal: bool,
    /// Which keys are visible, `(B, Tk)`.
    visible: Option<Vec<bool>>,
    /// Whether any input is tracked, so that a backward pass may follow.
    tracked: bool,
    /// What the forward pass keeps for the backward pass, one entry for each key head. This is no
    /// `Mutex`: while the thread of a backward pass waits for others, Rayon may begin a second
    /// backward pass over the same node on it, which would wait for the lock for ever.
    saved: OnceLock<Vec<Saved>>,
    /// The outputs of f16 and bf16 before rounding. Gradients contain differences from the output
    /// in which most of the number cancels: rounded outputs would put them 2% off.
    out: OnceLock<(CpuStorage, Layout)>,
}

/// `Saved` is what the forward pass keeps of one key head, causal or over all keys.
#[derive(Debug)]
enum Saved {
    Causal(causal::Saved),
    Full(full::Saved),
}

impl Passes {
    /// `of` are all tensors that may ask for a gradient: `q`, `k`, `v` and those beside them.
    pub(super) fn new(form: Form, causal: bool, visible: Option<Vec<bool>>, of: &[&Tensor]) -> Self {
        let tracked = of.iter().any(|tensor| tensor.track_op());
        Self { form, causal, visible, tracked, saved: OnceLock::new(), out: OnceLock::new() }
    }

    /// The forward pass: the outputs `(B, H, Tq, Dv)`, or `Dv + 1` with logarithms. `gates` are
    /// `(B, Hkv, Tk)`, of causal attention only.
    pub(super) fn forward(
        &self,
        [q, k, v]: [Stored<'_, CpuStorage>; 3],
        gates: Option<&[f32]>,
    ) -> Result<(CpuStorage, Shape)> {
        let inputs = Inputs::new(&self.form, [q, k, v], self.visible.as_deref(), gates)?;
        let (b, h, t, _) = q.1.shape().dims4()?;
        let dv = v.1.dims()[3];
        let width = dv + usize::from(self.form.logs);
        let mut out = Fresh::new(b * h * t * width);
        let mut saved: Vec<Saved> = (0..b * inputs.key_heads)
            .map(|_| match self.causal {
                true if self.tracked => Saved::Causal(causal::Saved::for_backward()),
                true => Saved::Causal(causal::Saved::default()),
                false => Saved::Full(full::Saved::default()),
            })
            .collect();
        let spare = spare_threads(saved.len());
        inputs.check(|| {
            let work = out.parts(inputs.group * t * width).into_iter().zip(&mut saved).enumerate().collect();
            for_heads(work, |(n, (out, saved))| {
                let head = inputs.head(n);
                let mut sums = self.form.fresh(dv);
                match saved {
                    Saved::Causal(saved) => causal::forward(&head, &mut sums, out, saved, spare),
                    Saved::Full(saved) => full::forward(&head, sums, out.take(), saved, spare),
                }
            })
        })?;
        let (out, dtype, shape) = (out.finish(), q.0.dtype(), Shape::from((b, h, t, width)));
        if self.tracked {
            // Candle calls the forward pass of an operation once, so these are empty until now. A
            // second call would keep what the first has left.
            self.saved.get_or_init(|| saved);
            if dtype != DType::F32 {
                self.out.get_or_init(|| (CpuStorage::F32(out.clone()), Layout::contiguous(&shape)));
            }
        }
        Ok((storage_of(out, dtype)?, shape))
    }

    /// The backward pass: the gradients of `q`, `k` and `v`. The gradients of a trained map, for
    /// queries and for keys, are added to `linear`, one pair for each key head; it is empty where
    /// the map is not trained. With gates, `dgates` receives theirs, `(B, Hkv, Tk)`; it is empty
    /// without.
    pub(super) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        out: &Tensor,
        grad: &Tensor,
        linear: &mut [[LinearGradient; 2]],
        (gates, dgates): (Option<&[f32]>, &mut [f32]),
    ) -> Result<[Vec<f32>; 3]> {
        let grad = grad.contiguous()?;
        let (t, group, dv) = (q.dim(2)?, q.dim(1)? / k.dim(1)?, v.dim(3)?);
        let mut gradients = [q, k, v].map(|x| Fresh::new(x.elem_count()));
        let Some(saved) = self.saved.get() else {
            bail!("favor: the backward pass needs a forward pass on the CPU before it");
        };
        with_storages([q, k, v, out, &grad], |[q, k, v, out, grad]| {
            let inputs = Inputs::new(&self.form, [q, k, v], self.visible.as_deref(), gates)?;
            let out = self.out.get().map_or(out, |(out, layout)| (out, layout));
            let (out, grad) = (Heads::new(out)?, Heads::new(grad)?);
            let [dq, dk, dv_] = &mut gradients;
            let keys = inputs.keys;
            let spare = spare_threads(saved.len());
            let mut linear = linear.iter_mut();
            let mut dgates = dgates.chunks_exact_mut(keys);
            let work = dq
                .parts(group * t * inputs.q.width)
                .into_iter()
                .zip(dk.parts(keys * inputs.k.width))
                .zip(dv_.parts(keys * dv))
                .zip(saved.iter())
                .map(|of_head| (of_head, linear.next(), dgates.next()))
                .enumerate()
                .collect();
            for_heads(work, |(n, ((((dq, dk), dv), saved), linear, mut dgates))| {
                let head = &inputs.head(n);
                let (out, grad) = (&out.heads(n * group, group)[..], &grad.heads(n * group, group)[..]);
                match saved {
                    Saved::Causal(saved) => {
                        let given = causal_backward::Given { head, saved, out, grad };
                        let dlog = dgates.as_deref_mut();
                        let gradients = causal_backward::Gradients { dq, dk, dv, dlog, linear };
                        causal_backward::backward(given, gradients, spare);
                        if let Some(dgates) = dgates {
                            gate_gradients(dgates, grad, self.form.logs);
                        }
                    }
                    Saved::Full(saved) => {
                        let [dq, dk, dv] = [dq, dk, dv].map(Part::take);
                        full::backward(full::Gradients { head, saved, out, grad, dq, dk, dv, linear }, spare);
                    }
                }
            });
            Ok(())
        })?;
        Ok(gradients.map(Fresh::finish))
    }
}

/// Turns `dlog` `(T)`, the gradients of the log-weights of a head's keys, into those of its gates,
/// in place. With `c_t` the sum of the gates up to `t`, the log-weight of key `t` contains `−c_t`,
/// and the logarithm of the denominator of query `t` contains `c_t`. So `dc_t = h_t − dlog[t]` and
/// `dg_t = Σ_{j≥t} dc_j`. Here `h_t` is the gradient of that logarithm, summed over the query
/// heads: the last number of a row of `grad` if there are `logs`, else 0.
fn gate_gradients(dlog: &mut [f32], grad: &[Rows], logs: bool) {
    // The sum is f64, since most of its terms cancel over all keys.
    let mut sum = 0f64;
    for (t, dlog) in dlog.iter_mut().enumerate().rev() {
        let of_logs: f64 = if logs { grad.iter().map(|g| f64::from(g.number(t, g.width - 1))).sum() } else { 0.0 };
        sum += of_logs - f64::from(*dlog);
        *dlog = sum as f32;
    }
}

impl Operation<3> for Favor {
    fn name(&self) -> &'static str {
        "favor"
    }

    fn cpu(&self, qkv: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        self.0.forward(qkv, None)
    }

    fn backward(&self, [q, k, v]: [&Tensor; 3], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let [dq, dk, dv] = self.0.backward([q, k, v], out, grad, &mut [], (None, &mut []))?;
        Ok([Some(gradient(dq, q)?), Some(gradient(dk, k)?), Some(gradient(dv, v)?)])
    }
}
