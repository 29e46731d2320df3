//! Exact softmax attention on CUDA, fused, with gradients: the attention with which FAVOR is
//! compared. The chain of shapes is in `softmax.cu`.

use std::sync::{Mutex, PoisonError};

use candle_core::{
    D, DType, Result, Shape, Tensor, backend::BackendStorage, bail, cuda_backend::cudarc::driver::DeviceRepr,
};

use super::super::{
    beside::{AttentionPasses, apply_beside},
    operation::{Operation, Stored, apply},
};
use super::{
    CudaDevice, CudaStorage, Kernel, Launch, Macro, Source, THREADS, View,
    buffer::{Buffer, Strides, address, optional, optional_output},
    most_shared, source, storage, with_storages,
};
use crate::kernels::favor::blocks::{MOST_WIDTH, TEAM};

const HEADERS: &[(&str, &str)] = &[
    ("warp.cuh", include_str!("warp.cuh")),
    ("tile.cuh", include_str!("tile.cuh")),
    ("team.cuh", include_str!("team.cuh")),
    ("softmax.cuh", include_str!("softmax.cuh")),
];

const GENERAL: Source = source!("softmax.cu", HEADERS);
const HALF: Source = source!("softmax_half.cu", HEADERS);
const DELTA: Source = source!("softmax_delta.cu", HEADERS);
const GATES: Source = source!("softmax_gates.cu", HEADERS);

/// Whether the kernels take queries `q` and values `v`.
pub(crate) fn takes(q: &Tensor, v: &Tensor) -> bool {
    let fits = |t: &Tensor| t.dims().last().is_some_and(|&width| (1..=MOST_WIDTH).contains(&width));
    super::attention_takes(q) && fits(q) && fits(v) && have_room(q, v).unwrap_or(false)
}

/// Whether thread blocks have room on the card of `q`.
fn have_room(q: &Tensor, v: &Tensor) -> Result<bool> {
    let sizes = Sizes { dtype: q.dtype(), dim: q.dim(D::Minus1)?, values: v.dim(D::Minus1)?, gated: true };
    let (forward, backward) = sizes.shared();
    Ok(forward.max(backward) <= most_shared(q.device().as_cuda_device()?)?)
}

/// `Sizes` are what the thread blocks of the kernels depend on.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    dtype: DType,
    dim: usize,
    values: usize,
    gated: bool,
}

impl Sizes {
    /// Whether the kernels for half types take it, which are for heads of up to 64 numbers.
    fn is_half(self) -> bool {
        self.dtype != DType::F32 && self.dim.max(self.values) <= 64
    }

    /// The threads and the rows of a thread block.
    fn block(self) -> (usize, usize) {
        match self.dtype {
            _ if self.is_half() => (TEAM, 128),
            DType::F32 => (128, 64),
            _ => (256, 128),
        }
    }

    /// The shared memory of a thread block in the forward and the backward pass, in bytes.
    fn shared(self) -> (usize, usize) {
        let rows = self.block().1;
        let (bytes, pad) = if self.dtype == DType::F32 { (4, 4) } else { (2, 8) };
        let (d, v) = (self.dim.next_multiple_of(16) + pad, self.values.next_multiple_of(16) + pad);
        // Each sum of gates has eight bytes.
        let gate = 8 * usize::from(self.gated);
        if self.is_half() {
            // The rows of the thread block, the columns of two steps, and the numbers that belong
            // to those columns.
            let forward = (rows * d + 2 * 64 * (d + v)) * bytes + (4 + gate) * 2 * 64;
            let backward = (rows * (d + v) + 2 * 32 * (d + v)) * bytes + (4 * 3 + gate) * 2 * 32;
            return (forward, backward);
        }
        let columns = rows / 2;
        let shared = (rows * (d + v + columns + pad) + columns * (d + v)) * bytes + 12 * rows + gate * (rows + columns);
        (shared, shared)
    }
}

/// `Seen` says which keys a query sees: those that are visible; with an offset, query `t` only sees
/// keys up to `offset + t`, and with a window, of these the last `window` and the first `sinks`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) offset: Option<usize>,
    pub(crate) window: Option<usize>,
    pub(crate) sinks: usize,
    /// Which keys are visible, `(B, Tk)`, u8, contiguous; all where it is `None`.
    pub(crate) visible: Option<Tensor>,
}

/// Computes `softmax(q·kᵀ/√D) v`: `q` `(B, H, Tq, D)`, `k` `(B, Hkv, Tk, D)`, `v`
/// `(B, Hkv, Tk, Dv)` → `(B, H, Tq, Dv)`. The last dimension of each is contiguous and nothing is
/// empty. A row that sees no key is zero. `gates` `(B, Hkv, Tk)`, f32 and contiguous, need an
/// offset.
pub(crate) fn softmax(qkv: [&Tensor; 3], gates: Option<&Tensor>, seen: Seen) -> Result<Tensor> {
    attend(qkv, gates, Softmax { seen, with_logs: false, logs: Mutex::new(None) })
}

/// Computes [`softmax`] in f32 and the logarithms of its denominators `Σ_j e^{q·k_j/√D}`, `−1e37`
/// where no key is seen, which stand after the values of each row, before room for up to three
/// numbers: `(B, H, Tq, ≥ Dv + 1)`.
///
/// # Errors
/// If the inputs are not f32.
pub(crate) fn softmax_with_logs(qkv: [&Tensor; 3], gates: Option<&Tensor>, seen: Seen) -> Result<Tensor> {
    let dtype = qkv[0].dtype();
    if dtype != DType::F32 {
        bail!("softmax with logarithms on CUDA: q is {dtype:?}; it must be f32");
    }
    attend(qkv, gates, Softmax { seen, with_logs: true, logs: Mutex::new(None) })
}

/// Applies the operation, or the one with gates.
fn attend(qkv: [&Tensor; 3], gates: Option<&Tensor>, softmax: Softmax) -> Result<Tensor> {
    let Some(gates) = gates else { return apply(softmax, qkv) };
    apply_beside(GatedSoftmax(softmax), qkv, &[gates])
}

/// `Softmax` is softmax attention as one differentiable operation on `(q, k, v)`.
struct Softmax {
    seen: Seen,
    /// Whether the logarithm of each row's denominator stands after its values.
    with_logs: bool,
    /// The logarithms of the denominators to base 2, `(B, H, Tq)`, kept for the backward pass.
    logs: Mutex<Option<Buffer>>,
}

/// `Problem` is the struct of that name in `softmax.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Problem {
    heads: i32,
    group: i32,
    queries: i32,
    keys: i32,
    offset: i32,
    window: i32,
    sinks: i32,
    width: i32,
    scale: f32,
    slope: f32,
    q: Strides,
    k: Strides,
    v: Strides,
    gates: u64,
}

assert_layout!(
    Problem, 120,
    heads: 0, group: 4, queries: 8, keys: 12, offset: 16, window: 20, sinks: 24, width: 28, scale: 32, slope: 36,
    q: 40, k: 64, v: 88, gates: 112
);

// SAFETY: it holds only numbers, laid out as in C.
unsafe impl DeviceRepr for Problem {}

/// `Call` is one problem on one device.
struct Call<'a> {
    views: [View<'a>; 3],
    visible: Option<View<'a>>,
    /// The sums of forget gates up to each key, as `softmax_gate_sums` returns them.
    gate_sums: Option<Buffer>,
    problem: Problem,
    dtype: DType,
    batch: usize,
    heads: usize,
    key_heads: usize,
    queries: usize,
    keys: usize,
    dim: usize,
    values: usize,
    /// The numbers of a row of outputs.
    width: usize,
}

/// The most tokens of a sequence, and a window that holds them all.
const MOST_TOKENS: usize = i32::MAX as usize / 2;

impl<'a> Call<'a> {
    fn new(
        views: [View<'a>; 3],
        gates: Option<View<'_>>,
        visible: Option<View<'a>>,
        seen: &Seen,
        with_logs: bool,
    ) -> Result<Self> {
        let [q, k, v] = views;
        let dtype = q.0.dtype();
        if k.0.dtype() != dtype || v.0.dtype() != dtype {
            bail!("softmax on CUDA: q is {dtype:?}, k {:?}, v {:?}; they must be one type", k.0.dtype(), v.0.dtype());
        }
        let ((batch, heads, queries, dim), (_, key_heads, keys, values)) = (q.1.shape().dims4()?, v.1.shape().dims4()?);
        if queries.max(keys) > MOST_TOKENS || queries.max(keys).div_ceil(64) > 65_535 {
            bail!(
                "softmax on CUDA: {queries} queries over {keys} keys are too many; at most {} of each can be taken",
                MOST_TOKENS.min(65_535 * 64)
            );
        }
        let slope = (dim as f64).sqrt().recip();
        // Rows with logarithms are padded, so that each begins at a multiple of 16 bytes.
        let width = if with_logs { (values + 1).next_multiple_of(4) } else { values };
        let problem = Problem {
            heads: heads as i32,
            group: (heads / key_heads) as i32,
            queries: queries as i32,
            keys: keys as i32,
            offset: seen.offset.map_or(-1, |offset| offset.min(keys) as i32),
            window: seen.window.map_or(MOST_TOKENS, |window| window.min(MOST_TOKENS)) as i32,
            sinks: if seen.window.is_some() { seen.sinks.min(keys) as i32 } else { 0 },
            width: width as i32,
            scale: (slope * std::f64::consts::LOG2_E) as f32,
            slope: slope as f32,
            q: Strides::of(q.1),
            k: Strides::of(k.1),
            v: Strides::of(v.1),
            gates: 0,
        };
        let gate_sums = gates.map(|gates| sums_of_gates(gates, batch * key_heads, keys)).transpose()?;
        Ok(Self {
            views,
            visible,
            gate_sums,
            problem,
            dtype,
            batch,
            heads,
            key_heads,
            queries,
            keys,
            dim,
            values,
            width,
        })
    }

    fn sizes(&self) -> Sizes {
        Sizes { dtype: self.dtype, dim: self.dim, values: self.values, gated: self.gate_sums.is_some() }
    }

    /// Whether the kernels for half types take it.
    fn is_half(&self) -> bool {
        self.sizes().is_half()
    }

    /// The threads and the rows of a thread block.
    fn block(&self) -> (usize, usize) {
        self.sizes().block()
    }

    /// The kernel `softmax_NAME`, or `softmax_half_NAME`.
    fn kernel(&self, name: &str) -> Result<Kernel> {
        let device = self.views[0].0.device();
        let storage = storage(self.dtype)?;
        let gated = usize::from(self.gate_sums.is_some());
        let (forward, backward) = self.sizes().shared();
        let shape: [Macro; 4] =
            [("STORAGE", &storage), ("DIM", &self.dim), ("VALUES", &self.values), ("GATED", &gated)];
        if self.is_half() {
            let sizes: [Macro; 2] = [("SHARED_FORWARD", &forward), ("SHARED_BACKWARD", &backward)];
            let shared = if name == "forward" { forward } else { backward };
            return HALF.kernel(device, &format!("softmax_half_{name}"), &[&shape[..], &sizes].concat(), shared);
        }
        let sizes: [Macro; 1] = [("SHARED", &forward)];
        GENERAL.kernel(device, &format!("softmax_{name}"), &[&shape[..], &sizes].concat(), forward)
    }

    /// Begins a launch with the arguments that all kernels on tiles begin with.
    fn begin<'l>(&'l self, kernel: &'l Kernel) -> Result<Launch<'l>> {
        let mut launch = kernel.launch();
        let gates = address(&mut launch, self.gate_sums.as_ref().map(|sums| (&sums.storage, &sums.layout)))?;
        launch = launch.value(Problem { gates, ..self.problem });
        for view in self.views {
            launch = launch.input(view)?;
        }
        optional(launch, self.visible)
    }

    /// Computes the outputs and the logarithms of the denominators.
    fn forward(&self) -> Result<(Buffer, Buffer)> {
        let device = self.views[0].0.device();
        let mut out = Buffer::of(device, (self.batch, self.heads, self.queries, self.width), self.dtype)?;
        let mut logs = Buffer::new(device, self.batch * self.heads * self.queries)?;
        let kernel = self.kernel("forward")?;
        let launch = self.begin(&kernel)?.output(&mut out.storage)?.output(&mut logs.storage)?;
        let (threads, rows) = self.block();
        // SAFETY: strides and sizes are those of the tensors; every row is written.
        unsafe { launch.run([self.batch * self.heads, self.queries.div_ceil(rows), 1], threads) }?;
        Ok((out, logs))
    }

    /// Computes the gradients of queries, keys and values, and of gates if there are some.
    fn backward(&self, out: View, grad: View, logs: &Buffer) -> Result<([Buffer; 3], Option<Buffer>)> {
        let device = self.views[0].0.device();
        let (threads, rows) = self.block();
        let count = self.batch * self.heads * self.queries;
        let mut delta = Buffer::new(device, count)?;
        let shape: [Macro; 3] = [("STORAGE", &storage(self.dtype)?), ("DIM", &self.dim), ("VALUES", &self.values)];
        let kernel = DELTA.kernel(device, "softmax_delta", &shape, 0)?;
        let launch = kernel.launch().value(count as i64).value(self.width as i32);
        let launch = launch.input(out)?.input(grad)?;
        // SAFETY: as many rows as the kernel is told.
        unsafe { launch.output(&mut delta.storage)?.run([count.div_ceil(THREADS / 32), 1, 1], THREADS) }?;

        let like = |heads: usize, tokens: usize, width: usize| {
            Buffer::of(device, (self.batch, heads, tokens, width), self.dtype)
        };
        // The sums of the scores' gradients over keys, and over queries.
        let sums = |count: usize| self.gate_sums.as_ref().map(|_| Buffer::new(device, count)).transpose();
        let (mut of_queries, mut of_keys) = (sums(count)?, sums(self.batch * self.key_heads * self.keys)?);
        let mut dq = like(self.heads, self.queries, self.dim)?;
        let kernel = self.kernel("query_gradients")?;
        let launch = self.begin(&kernel)?.input(grad)?.input(logs.view())?;
        let launch = launch.input(delta.view())?.output(&mut dq.storage)?;
        let launch = optional_output(launch, of_queries.as_mut())?;
        // SAFETY: strides and sizes are those of the tensors; every row is written.
        unsafe { launch.run([self.batch * self.heads, self.queries.div_ceil(rows), 1], threads) }?;

        let (mut dk, mut dv) =
            (like(self.key_heads, self.keys, self.dim)?, like(self.key_heads, self.keys, self.values)?);
        let kernel = self.kernel("key_gradients")?;
        let launch = self.begin(&kernel)?.input(grad)?.input(logs.view())?;
        let launch = launch.input(delta.view())?.output(&mut dk.storage)?.output(&mut dv.storage)?;
        let launch = optional_output(launch, of_keys.as_mut())?;
        // SAFETY: strides and sizes are those of the tensors; every row of both gradients is
        // written.
        unsafe { launch.run([self.batch * self.key_heads, self.keys.div_ceil(rows), 1], threads) }?;
        let gates = match (of_queries, of_keys) {
            (Some(of_queries), Some(of_keys)) => Some(self.gate_gradients(&of_queries, &of_keys)?),
            _ => None,
        };
        Ok(([dq, dk, dv], gates))
    }

    /// Computes the gradients of gates from the sums of the scores' gradients.
    fn gate_gradients(&self, of_queries: &Buffer, of_keys: &Buffer) -> Result<Buffer> {
        let device = self.views[0].0.device();
        let mut gradients = Buffer::of(device, (self.batch, self.key_heads, self.keys), DType::F32)?;
        let kernel = gate_kernel(device, "softmax_gate_gradients")?;
        let problem = self.problem;
        let launch = kernel.launch().value(problem.keys).value(problem.queries).value(problem.offset);
        let launch = launch.value(problem.group).input(of_queries.view())?;
        let launch = launch.input(of_keys.view())?.output(&mut gradients.storage)?;
        // SAFETY: as many key heads and tokens as the kernel is told; every gate is written.
        unsafe { launch.run([self.batch * self.key_heads, 1, 1], THREADS) }?;
        Ok(gradients)
    }
}

/// Returns a kernel of `softmax_gates.cu`. Its kernels depend on no size and no stored type, but
/// `softmax.cuh`, which they include, needs these macros; any values do.
fn gate_kernel(device: &CudaDevice, name: &str) -> Result<Kernel> {
    let shape: [Macro; 3] = [("STORAGE", &2), ("DIM", &16), ("VALUES", &16)];
    GATES.kernel(device, name, &shape, 8 * THREADS)
}

/// Sums gates `(B, Hkv, Tk)` from the first token up to each. Every sum is two numbers of f32, a
/// high and a low part (`GateSum` in `softmax.cuh`), so that differences of long sums keep their
/// digits.
fn sums_of_gates(gates: View<'_>, heads: usize, keys: usize) -> Result<Buffer> {
    let device = gates.0.device();
    let mut sums = Buffer::new(device, 2 * heads * keys)?;
    let kernel = gate_kernel(device, "softmax_gate_sums")?;
    let launch = kernel.launch().value(keys as i32).input(gates)?.output(&mut sums.storage)?;
    // SAFETY: as many heads and tokens as the kernel is told; every sum is written.
    unsafe { launch.run([heads, 1, 1], THREADS) }?;
    Ok(sums)
}

impl Softmax {
    /// Calls `work` with the problem of these tensors.
    fn with_call<R>(&self, views: [View; 3], gates: Option<View>, work: impl FnOnce(&Call) -> Result<R>) -> Result<R> {
        let (seen, logs) = (&self.seen, self.with_logs);
        match &seen.visible {
            None => work(&Call::new(views, gates, None, seen, logs)?),
            Some(visible) => {
                with_storages([visible], |[visible]| work(&Call::new(views, gates, Some(visible), seen, logs)?))
            }
        }
    }

    /// Computes the outputs, and keeps the logarithms for the backward pass.
    fn forward(&self, views: [View; 3], gates: Option<View>) -> Result<(CudaStorage, Shape)> {
        let (out, logs) = self.with_call(views, gates, |call| call.forward())?;
        *self.logs.lock().unwrap_or_else(PoisonError::into_inner) = Some(logs);
        let shape = out.layout.shape().clone();
        Ok((out.storage, shape))
    }

    /// Computes the gradients of queries, keys and values, and of gates if there are some.
    fn gradients(
        &self,
        views: [View; 3],
        gates: Option<View>,
        out: View,
        grad: View,
    ) -> Result<([Buffer; 3], Option<Buffer>)> {
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(logs) = &*logs else { bail!("softmax attention: the backward pass needs a forward pass before it") };
        self.with_call(views, gates, |call| call.backward(out, grad, logs))
    }
}

impl Operation<3> for Softmax {
    fn name(&self) -> &'static str {
        "softmax-attention"
    }

    fn cuda(&self, [q, k, v]: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        self.forward([q, k, v], None)
    }

    fn backward(&self, [q, k, v]: [&Tensor; 3], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let (gradients, _) = with_storages([q, k, v, out, &grad.contiguous()?], |[q, k, v, out, grad]| {
            self.gradients([q, k, v], None, out, grad)
        })?;
        Ok(gradients.map(|gradient| Some(gradient.tensor())))
    }
}

/// `GatedSoftmax` has the passes of softmax attention with gates.
struct GatedSoftmax(Softmax);

impl AttentionPasses for GatedSoftmax {
    fn name(&self) -> &'static str {
        "gated-softmax-attention"
    }

    fn cuda(&self, qkv: [View; 3], beside: &[View]) -> Result<(CudaStorage, Shape)> {
        self.0.forward(qkv, Some(beside[0]))
    }

    fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        beside: &[&Tensor],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<([Tensor; 3], Vec<Tensor>)> {
        let tensors = [q, k, v, beside[0], out, &grad.contiguous()?];
        let (of_qkv, of_gates) =
            with_storages(tensors, |[q, k, v, gates, out, grad]| self.0.gradients([q, k, v], Some(gates), out, grad))?;
        Ok((of_qkv.map(Buffer::tensor), of_gates.map(Buffer::tensor).into_iter().collect()))
    }
}
