//! Causal FAVOR on Metal in one kernel, for inference: no gradient. `favor.metal` describes the
//! kernel and its chain of shapes; this file launches it.

use candle_core::{DType, Layout, Result, Storage, Tensor, bail};
use candle_metal_kernels::metal::{Buffer, ComputeCommandEncoder, ComputePipeline};
use objc2_metal::MTLSize;

use super::{Projection, compile};

/// The most features that the kernel takes. At the largest widths, the memory of a threadgroup has
/// room for 288.
const MOST_FEATURES: usize = 256;
/// The largest head and value dimension that the kernel takes.
const MOST_WIDTH: usize = 128;
/// The most values that a threadgroup takes: eight for each simdgroup, of which there are eight.
const MOST_SLICE: usize = 64;

/// `Strides` is the struct of that name in `favor.metal`.
#[repr(C)]
struct Strides {
    batch: i64,
    head: i64,
    token: i64,
}

impl Strides {
    fn of(layout: &Layout) -> Self {
        let s = layout.stride();
        Self { batch: s[0] as i64, head: s[1] as i64, token: s[2] as i64 }
    }
}

/// `Problem` is the struct of that name in `favor.metal`.
#[repr(C)]
struct Problem {
    q: Strides,
    k: Strides,
    v: Strides,
    heads: i32,
    group: i32,
    tokens: i32,
    masked: i32,
    resumes: i32,
    leaves: i32,
    offset_scale: f32,
    shift: f32,
}

assert_layout!(Strides, 24, batch: 0, head: 8, token: 16);
assert_layout!(
    Problem, 104,
    q: 0, k: 24, v: 48, heads: 72, group: 76, tokens: 80, masked: 84, resumes: 88, leaves: 92, offset_scale: 96, shift: 100
);

/// The value of the macro `STORAGE` for a type.
fn storage(dtype: DType) -> Option<usize> {
    [DType::F32, DType::F16, DType::BF16].iter().position(|&known| known == dtype)
}

/// Whether the kernel takes queries `q` and values `v` at this number of features, and can be
/// compiled for their device.
pub(crate) fn takes(q: &Tensor, v: &Tensor, features: usize) -> bool {
    let fits = |t: &Tensor| t.rank() == 4 && t.elem_count() > 0 && t.dims()[3] <= MOST_WIDTH;
    let fits = q.device().is_metal() && storage(q.dtype()).is_some() && fits(q) && fits(v) && features <= MOST_FEATURES;
    fits && compile::possible(|| pipeline(q, v, features))
}

/// The values of a slice, which one threadgroup takes, and the number of slices: equal ones, as few
/// as can be.
fn slices(values: usize) -> (usize, usize) {
    let splits = values.div_ceil(MOST_SLICE);
    (values.div_ceil(splits).next_multiple_of(8), splits)
}

/// The threads of a threadgroup: a simdgroup of 32 for each eight values.
fn threads(slice: usize) -> usize {
    4 * slice
}

/// The kernel for queries `q`, values `v` and `features` features.
fn pipeline(q: &Tensor, v: &Tensor, features: usize) -> Result<ComputePipeline> {
    let ((.., dim), (.., values)) = (q.dims4()?, v.dims4()?);
    let Some(storage) = storage(q.dtype()) else {
        bail!("favor on Metal: q is {:?}; it must be f32, f16 or bf16", q.dtype())
    };
    let (slice, _) = slices(values);
    let macros = [("STORAGE", storage), ("DIM", dim), ("FEATURES", features), ("VALUES", values), ("SLICE", slice)];
    let device = q.device().as_metal_device()?;
    compile::pipeline(device, include_str!("favor.metal"), "favor_forward", &macros, threads(slice))
}

/// Calls `set` with the buffer of a tensor and the offset in bytes at which the tensor begins.
fn with_buffer(t: &Tensor, set: impl FnOnce(Option<&Buffer>, usize)) -> Result<()> {
    let (storage, layout) = t.storage_and_layout();
    let Storage::Metal(storage) = &*storage else {
        bail!("favor on Metal: a tensor of shape {:?} is elsewhere", t.dims())
    };
    set(Some(storage.buffer()), layout.start_offset() * t.dtype().size_in_bytes());
    Ok(())
}

/// `Sums` are the sums over keys of all key heads: their log-scales `(N, 1, F)` and the sums
/// `(N, F, Dv + 1)`, in the layout of composed prefix sums; contiguous f32.
pub(crate) type Sums = [Tensor; 2];

/// Computes causal FAVOR attention: `q` `(B, H, T, D)`, `k` `(B, Hkv, T, D)`, `v` `(B, Hkv, T, Dv)`
/// → `(B, H, T, Dv)`. The last dimension of each is contiguous and nothing is empty. `visible` is
/// `(B, T)`, u8, contiguous; a row that sees no key is zero. It begins with the sums `before`, if
/// given, and if `leaves` is set, returns the sums after the last token.
pub(crate) fn favor(
    projection: &Projection,
    [q, k, v]: [&Tensor; 3],
    visible: Option<&Tensor>,
    before: Option<&Sums>,
    leaves: bool,
) -> Result<(Tensor, Option<Sums>)> {
    let ((batch, heads, tokens, _), (_, key_heads, _, values)) = (q.dims4()?, v.dims4()?);
    let (dtype, features) = (q.dtype(), projection.features);
    if k.dtype() != dtype || v.dtype() != dtype {
        bail!("favor on Metal: q is {dtype:?}, k {:?}, v {:?}; they must be one type", k.dtype(), v.dtype());
    }
    let (slice, splits) = slices(values);
    if tokens > i32::MAX as usize / 2 || batch * heads * splits > i32::MAX as usize {
        bail!(
            "favor on Metal: {batch} sequences of {heads} heads with {tokens} tokens are too many; at most {} heads of all \
             sequences and {} tokens can be taken",
            i32::MAX as usize / splits,
            i32::MAX as usize / 2
        );
    }
    let strides = |t: &Tensor| Strides::of(t.layout());
    let problem = Problem {
        q: strides(q),
        k: strides(k),
        v: strides(v),
        heads: heads as i32,
        group: (heads / key_heads) as i32,
        tokens: tokens as i32,
        masked: visible.is_some().into(),
        resumes: before.is_some().into(),
        leaves: leaves.into(),
        offset_scale: projection.offset_scale(),
        shift: projection.shift(),
    };
    // SAFETY: the kernel writes all of it.
    let empty = |shape: &[usize], dtype: DType| unsafe { Tensor::empty(shape, dtype, q.device()) };
    let out = empty(&[batch, heads, tokens, values], dtype)?;
    let after = if leaves {
        let n = batch * key_heads;
        Some([empty(&[n, 1, features], DType::F32)?, empty(&[n, features, values + 1], DType::F32)?])
    } else {
        None
    };
    // The kernel does not touch a tensor that is missing, but every argument needs a buffer.
    let [scales_before, sums_before] = before.map_or([q, q], |sums| [&sums[0], &sums[1]]);
    let [scales_after, sums_after] = after.as_ref().map_or([&out, &out], |sums| [&sums[0], &sums[1]]);
    let columns = &projection.columns;
    let inputs =
        [(1, q), (2, k), (3, v), (4, visible.unwrap_or(q)), (5, columns), (7, scales_before), (8, sums_before)];
    let outputs = [(6, &out), (9, scales_after), (10, sums_after)];
    if let Some((_, t)) = inputs.iter().find(|(_, t)| !t.device().same_device(q.device())) {
        bail!(
            "favor: a tensor of shape {:?} is on another device than q; build the attention and its inputs on one device",
            t.dims()
        );
    }
    let device = q.device().as_metal_device()?;
    let pipeline = pipeline(q, v, features)?;

    let commands = device.command_encoder()?;
    commands.set_compute_pipeline_state(&pipeline);
    let encoder: &ComputeCommandEncoder = commands.as_ref();
    encoder.set_bytes(0, &problem);
    for (index, t) in inputs {
        with_buffer(t, |buffer, offset| encoder.set_input_buffer(index, buffer, offset))?;
    }
    for (index, t) in outputs {
        with_buffer(t, |buffer, offset| encoder.set_output_buffer(index, buffer, offset))?;
    }
    let groups = MTLSize { width: batch * heads * splits, height: 1, depth: 1 };
    encoder.dispatch_thread_groups(groups, MTLSize { width: threads(slice), height: 1, depth: 1 });
    Ok((out, after))
}
