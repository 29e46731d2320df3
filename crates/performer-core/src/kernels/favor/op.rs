//! The passes as differentiable operations.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, backend::BackendStorage, bail};

use super::{
    super::{
        for_heads,
        fresh::{Fresh, Part},
        narrow,
        rows::Heads,
        spare_threads, with_storages,
    },
    Form, Inputs, Stored, causal, causal_backward,
    exponential::LinearGradient,
    full,
};

/// FAVOR attention: `q` `(B, H, Tq, ·)`, `k` `(B, Hkv, Tk, ·)`, `v` `(B, Hkv, Tk, Dv)` → `(B, H, Tq, Dv)`, or `Dv + 1` with logarithms. The
/// last dimension of each is contiguous and nothing is empty. `visible` is `(B, Tk)`. A row that sees no key is zero.
pub(crate) fn favor(
    form: &Form,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    visible: Option<Vec<bool>>,
    causal: bool,
) -> Result<Tensor> {
    q.apply_op3(k, v, Favor(Passes::new(form.clone(), causal, visible, [q, k, v])))
}

/// FAVOR attention as one differentiable operation on `(q, k, v)`, `q` and `k` being what the map takes.
struct Favor(Passes);

/// A forward pass and the backward pass that belongs to it.
pub(super) struct Passes {
    form: Form,
    causal: bool,
    /// Visible keys, `(B, Tk)`.
    visible: Option<Vec<bool>>,
    /// Whether there may be a backward pass.
    tracked: bool,
    /// What the forward pass leaves to the backward pass, by key head.
    saved: Mutex<Vec<Saved>>,
    /// Outputs of half types before they were rounded: gradients cancel what belongs to them, and rounded ones put those 2% off.
    out: Mutex<Option<(CpuStorage, Layout)>>,
}

#[derive(Debug)]
enum Saved {
    Causal(causal::Saved),
    Full(full::Saved),
}

impl Passes {
    /// `of`: what the operation takes, of which one may ask for a gradient.
    pub(super) fn new(form: Form, causal: bool, visible: Option<Vec<bool>>, of: [&Tensor; 3]) -> Self {
        let tracked = of.iter().any(|tensor| tensor.track_op());
        Self { form, causal, visible, tracked, saved: Mutex::new(Vec::new()), out: Mutex::new(None) }
    }

    pub(super) fn forward(&self, [q, k, v]: [Stored; 3]) -> Result<(CpuStorage, Shape)> {
        let inputs = Inputs::new(&self.form, q, k, v, self.visible.as_deref())?;
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
            *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = saved;
            let exact = (dtype != DType::F32).then(|| (CpuStorage::F32(out.clone()), Layout::contiguous(&shape)));
            *self.out.lock().unwrap_or_else(PoisonError::into_inner) = exact;
        }
        Ok((narrow(out, dtype)?, shape))
    }

    /// Gradients of `q`, `k` and `v`. `linear`: those of the map for queries and for keys, one pair a key head, to be added to; empty where it
    /// is not trained.
    pub(super) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        out: &Tensor,
        grad: &Tensor,
        linear: &mut [[LinearGradient; 2]],
    ) -> Result<[Tensor; 3]> {
        let grad = grad.contiguous()?;
        let (t, group, dv) = (q.dim(2)?, q.dim(1)? / k.dim(1)?, v.dim(3)?);
        let mut gradients = [q, k, v].map(|x| Fresh::new(x.elem_count()));
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        if saved.is_empty() {
            bail!("favor: the backward pass needs a forward pass on the CPU before it");
        }
        with_storages([q, k, v, out, &grad], |[q, k, v, out, grad]| {
            let inputs = Inputs::new(&self.form, q, k, v, self.visible.as_deref())?;
            let exact = self.out.lock().unwrap_or_else(PoisonError::into_inner);
            let out = exact.as_ref().map_or(out, |(out, layout)| (out, layout));
            let (out, grad) = (Heads::new(out.0, out.1)?, Heads::new(grad.0, grad.1)?);
            let [dq, dk, dv_] = &mut gradients;
            let keys = inputs.keys;
            let spare = spare_threads(saved.len());
            let mut linear = linear.iter_mut();
            let work = dq
                .parts(group * t * inputs.q.width)
                .into_iter()
                .zip(dk.parts(keys * inputs.k.width))
                .zip(dv_.parts(keys * dv))
                .zip(saved.iter())
                .map(|of_head| (of_head, linear.next()))
                .enumerate()
                .collect();
            for_heads(work, |(n, ((((dq, dk), dv), saved), linear))| {
                let head = &inputs.head(n);
                let (out, grad) = (&out.heads(n * group, group)[..], &grad.heads(n * group, group)[..]);
                match saved {
                    Saved::Causal(saved) => {
                        let given = causal_backward::Given { head, saved, out, grad };
                        causal_backward::backward(given, causal_backward::Gradients { dq, dk, dv, linear }, spare);
                    }
                    Saved::Full(saved) => {
                        let [dq, dk, dv] = [dq, dk, dv].map(Part::take);
                        full::backward(full::Gradients { head, saved, out, grad, dq, dk, dv, linear }, spare);
                    }
                }
            });
            Ok(())
        })?;
        let [dq, dk, dv] = gradients.map(Fresh::finish);
        let tensor =
            |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device())?.to_dtype(like.dtype());
        Ok([tensor(dq, q)?, tensor(dk, k)?, tensor(dv, v)?])
    }
}

impl CustomOp3 for Favor {
    fn name(&self) -> &'static str {
        "favor"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.forward([(s1, l1), (s2, l2), (s3, l3)])
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = self.0.backward([q, k, v], out, grad, &mut [])?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
