//! The launches of FAVOR's kernels for one problem: the forward pass, the gradients, a decoding
//! step.
//!
//! ```text
//! forward:  favor_sums (a segment's sums) -> favor_combine (those before each segment)
//!           -> favor_forward -> out, logs
//! backward: favor_delta (e = −g·out, only where several slices share a row)
//!           -> favor_query_gradients -> dq, delta
//!           -> favor_sums, favor_combine over queries -> favor_key_gradients -> dk, dv
//!           -> favor_reduce (over slices and the query heads of a group)
//!           -> favor_gate_borders, favor_gate_gradients -> dgates (only with gates)
//! step:     favor_step -> out, sums after the token
//! ```
//!
//! The passes over segments are left out where a causal sequence is one segment. The kernels for
//! bf16 (`favor_bf16_*`) take the place of those of the same name where [`Blocks::teams`] says so.
//! Of these, the forward kernel may take products of warpgroups, see [`super::warpgroups`].

use std::{cell::OnceCell, sync::Arc};

use candle_core::{DType, Device, Layout, Result, backend::BackendStorage, bail};

use super::{
    CudaDevice, Kernel, Launch, Macro, Source, THREADS, View,
    buffer::{Buffer, Strides, address, address_of_output, optional, optional_output},
    favor_layout::{KeyForm, Problem, Tensors},
    favor_map::{Map, Packed, Packing},
    most_shared, shared_as_on_an_a100, source, storage, with_storages,
};
use crate::kernels::favor::blocks::{Blocks, MapKind, SharedBytes, StoredType, TEAM};

pub(super) const HEADERS: &[(&str, &str)] = &[
    ("warp.cuh", include_str!("warp.cuh")),
    ("tile.cuh", include_str!("tile.cuh")),
    ("favor.cuh", include_str!("favor.cuh")),
    ("team.cuh", include_str!("team.cuh")),
    ("favor_bf16.cuh", include_str!("favor_bf16.cuh")),
    ("warpgroup.cuh", include_str!("warpgroup.cuh")),
    ("favor_wgmma.cuh", include_str!("favor_wgmma.cuh")),
];

const SUMS: Source = source!("favor_sums.cu", HEADERS);
const FORWARD: Source = source!("favor_forward.cu", HEADERS);
const BACKWARD: Source = source!("favor_backward.cu", HEADERS);
const PARTS: Source = source!("favor_parts.cu", HEADERS);
const GATES: Source = source!("favor_gates.cu", HEADERS);
const STEP: Source = source!("favor_step.cu", HEADERS);
const TEAM_SUMS: Source = source!("favor_bf16_sums.cu", HEADERS);
const TEAM_FORWARD: Source = source!("favor_bf16_forward.cu", HEADERS);
const TEAM_BACKWARD: Source = source!("favor_bf16_backward.cu", HEADERS);

/// The warps of a thread block.
const WARPS: usize = THREADS / 32;

/// `Given` is what a problem may have besides queries, keys and values.
#[derive(Clone, Copy, Default)]
pub(super) struct Given<'a> {
    /// Which keys are visible, `(B, Tk)`, u8.
    pub(super) visible: Option<View<'a>>,
    /// Forget gates, `(B, Hkv, Tk)`, f32.
    pub(super) gates: Option<View<'a>>,
    /// Whether a backward pass may follow.
    pub(super) tracked: bool,
    /// Whether a backward pass is to return the gradients of log-features too, of which those of
    /// the map's parameters are made.
    pub(super) trained: bool,
    /// Whether a row of outputs has the logarithm of its denominator after its values.
    pub(super) logs: bool,
}

/// `Call` is one problem on one device.
pub(super) struct Call<'a> {
    pub(super) device: &'a CudaDevice,
    dtype: DType,
    pub(super) blocks: Blocks,
    map: &'a Map,
    causal: bool,
    pub(super) batch: usize,
    heads: usize,
    pub(super) key_heads: usize,
    pub(super) queries: usize,
    keys: usize,
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    given: Given<'a>,
    /// The packed map, once a kernel has asked for it; none where features come ready.
    packed: OnceCell<Option<Arc<Packed>>>,
    /// Whether the packed projection is exact in its first part; only kernels of teams ask.
    exact: bool,
    /// Whether the forward kernel takes products of warpgroups.
    warpgroups: bool,
}

/// The most segments of a call: the most that the second dimension of a grid can have.
const MOST_SEGMENTS: usize = 65_535;

impl<'a> Call<'a> {
    pub(super) fn new(map: &'a Map, [q, k, v]: [View<'a>; 3], given: Given<'a>, causal: bool) -> Result<Self> {
        let device = q.0.device();
        let ((batch, heads, queries, dim), (_, key_heads, keys, values)) = (q.1.shape().dims4()?, v.1.shape().dims4()?);
        let dtype = q.0.dtype();
        if k.0.dtype() != dtype || v.0.dtype() != dtype {
            bail!("favor on CUDA: q is {dtype:?}, k {:?}, v {:?}; they must be one type", k.0.dtype(), v.0.dtype());
        }
        if !map.takes(dtype) {
            bail!("favor on CUDA: ready features are {dtype:?}; they must be F32, or BF16 where they are signed");
        }
        if queries.max(keys) > i32::MAX as usize / 2 || batch * heads > i32::MAX as usize / 64 {
            bail!(
                "favor on CUDA: {batch} sequences of {heads} heads with {queries} queries and {keys} keys are too many; at \
                 most {} heads of all sequences and {} tokens can be taken",
                i32::MAX as usize / 64,
                i32::MAX as usize / 2
            );
        }
        let most = shared_as_on_an_a100(device)?;
        let blocks = Blocks::choose(
            causal,
            given.gates.is_some(),
            storage(dtype)?,
            map.kind(),
            [dim, map.features(), values],
            most,
        );
        let (segments, _) = blocks.segments(batch * heads, queries.max(keys), given.tracked);
        if segments > MOST_SEGMENTS {
            bail!(
                "favor on CUDA: {queries} queries and {keys} keys make {segments} segments; at most {MOST_SEGMENTS} can \
                 be launched, so give fewer tokens, or compute without gradients"
            );
        }
        if map.numbers().is_some_and(|numbers| !numbers.device().same_device(&Device::Cuda(device.clone()))) {
            bail!("favor: q is on another device than the projection; build the attention on that of q");
        }
        let exact = blocks.teams && matches!(map, Map::Exponential(projection) if projection.is_exact());
        let warpgroups = exact && blocks.for_warpgroups() && super::warpgroups(device)?;
        Ok(Self {
            device,
            dtype,
            blocks,
            map,
            causal,
            batch,
            heads,
            key_heads,
            queries,
            keys,
            q,
            k,
            v,
            given,
            packed: OnceCell::new(),
            exact,
            warpgroups,
        })
    }

    /// The sizes and strides of the problem, with `tokens` divided into segments, and how many
    /// there are.
    fn problem(&self, tokens: usize) -> (Problem, usize) {
        let (segments, segment) = self.blocks.segments(self.batch * self.heads, tokens, self.given.tracked);
        let problem = Problem {
            heads: self.heads as i32,
            group: (self.heads / self.key_heads) as i32,
            queries: self.queries as i32,
            keys: self.keys as i32,
            segment: segment as i32,
            segments: segments as i32,
            q: Strides::of(self.q.1),
            k: Strides::of(self.k.1),
            v: Strides::of(self.v.1),
            offset_scale: (0.5 / (self.blocks.dim as f64).sqrt() * std::f64::consts::LOG2_E) as f32,
            gates: 0,
            form: KeyForm::default(),
        };
        (problem, segments)
    }

    /// What the kernels read of the map, packed at the first call; nothing where features come
    /// ready.
    fn packed(&self) -> Result<Option<&Packed>> {
        if let Some(packed) = self.packed.get() {
            return Ok(packed.as_deref());
        }
        let packing = match self.blocks.storage {
            StoredType::F32 => Packing::Single,
            _ if self.exact => Packing::Exact,
            _ => Packing::Parts,
        };
        let packed = self.map.packed(packing)?;
        Ok(self.packed.get_or_init(|| packed).as_deref())
    }

    /// Begins a launch with a problem, to which the addresses of the gates and of what keys have of
    /// their own are added.
    fn launch<'l>(&'l self, kernel: &'l Kernel, problem: Problem) -> Result<Launch<'l>> {
        let mut launch = kernel.launch();
        let gates = address(&mut launch, self.given.gates)?;
        let mut form = KeyForm::default();
        if let Some(keys) = self.packed()?.and_then(|packed| packed.keys.as_ref()) {
            let metric = |i: usize| keys.metric.as_ref().map(|metric| metric[i].view());
            form = KeyForm {
                projection: address(&mut launch, Some(keys.factors[0].view()))?,
                back: address(&mut launch, Some(keys.factors[1].view()))?,
                weights: address(&mut launch, Some(keys.weights.view()))?,
                metric: address(&mut launch, metric(0))?,
                square: address(&mut launch, metric(1))?,
                tables: keys.tables as i64,
            };
        }
        Ok(launch.value(Problem { gates, form, ..problem }))
    }

    /// The numbers of a row of outputs; with a logarithm each begins at a multiple of 16 bytes.
    fn width(&self) -> usize {
        let values = self.blocks.values;
        if self.given.logs { (values + 1).next_multiple_of(4) } else { values }
    }

    /// Returns `more`, with the macro `LOGS` where rows of outputs have logarithms.
    fn with_logs<'m>(&self, more: &[Macro<'m>]) -> Vec<Macro<'m>> {
        let logs: Option<Macro> = self.given.logs.then_some(("LOGS", &1));
        more.iter().copied().chain(logs).collect()
    }

    /// The kernel `entry`, compiled for the sizes of this problem.
    fn kernel(&self, source: Source, entry: &str, more: &[Macro], shared: usize) -> Result<Kernel> {
        let b = &self.blocks;
        let (causal, gated) = (u8::from(self.causal), u8::from(b.gated));
        let mut macros: Vec<Macro> = vec![
            ("STORAGE", &b.storage),
            ("MAP", &b.map),
            ("DIM", &b.dim),
            ("FEATURES", &b.features),
            ("VALUES", &b.values),
            ("SLICE", &b.slice),
            ("CHUNK", &b.chunk),
            ("CAUSAL", &causal),
            ("GATED", &gated),
        ];
        let metric = match self.map {
            Map::OwnKeys(map) => u8::from(map.metric.is_some()),
            _ => 0,
        };
        if self.blocks.map == MapKind::OwnKeys {
            macros.push(("METRIC", &metric));
        }
        macros.extend(more);
        source.kernel(self.device, entry, &macros, shared)
    }

    /// The kernel `favor_NAME` of `general` or `favor_bf16_NAME` of `team`, and the threads of its
    /// blocks.
    fn either(
        &self,
        [general, team]: [Source; 2],
        name: &str,
        more: &[Macro],
        shared: usize,
    ) -> Result<(Kernel, usize)> {
        Ok(match self.blocks.teams {
            true => {
                let exact = u8::from(self.exact);
                let more = [more, &[("EXACT", &exact as &dyn std::fmt::Display)]].concat();
                (self.kernel(team, &format!("favor_bf16_{name}"), &more, shared)?, TEAM)
            }
            false => (self.kernel(general, &format!("favor_{name}"), more, shared)?, THREADS),
        })
    }

    /// The shared memory of the kernels of each pass.
    fn shared(&self) -> SharedBytes {
        let b = &self.blocks;
        match self.blocks.teams {
            true => b.shared_of_teams(),
            false => SharedBytes { sums: b.shared_sums(), forward: b.shared_forward(), backward: b.shared_backward() },
        }
    }

    /// Adds the packed projection, if there is one, to the arguments of a launch.
    fn projection<'l>(&'l self, launch: Launch<'l>) -> Result<Launch<'l>> {
        optional(launch, self.packed()?.map(|packed| packed.queries[0].view()))
    }

    /// Computes the sums over keys, or over queries: a record for each segment of the sums before
    /// it (after it, for queries), or one record of all where all keys are seen. Returns nothing
    /// where a thread block sees every earlier token itself.
    fn sums(&self, of_queries: Option<&OfQueries>, initial: Option<View>) -> Result<Option<Buffer>> {
        let (heads, tokens) = match of_queries {
            Some(_) => (self.heads, self.queries),
            None => (self.key_heads, self.keys),
        };
        let (mut problem, segments) = self.problem(tokens);
        if self.causal && segments == 1 {
            return Ok(None);
        }
        (problem.heads, problem.queries) = (heads as i32, tokens as i32);
        if of_queries.is_none() {
            (problem.group, problem.q) = (1, problem.k);
        } else {
            problem.v = Strides::dense(self.heads, self.queries, self.width());
        }
        let (b, all) = (&self.blocks, self.batch * heads);
        let mut records = Buffer::new(self.device, segments * all * b.record())?;
        let mut decays = if b.gated { Some(Buffer::new(self.device, segments * all)?) } else { None };
        let shared = self.shared().sums;
        let more: [Macro; 2] = [("QUERIES", &u8::from(of_queries.is_some())), ("SHARED_SUMS", &shared)];
        let (kernel, threads) = self.either([SUMS, TEAM_SUMS], "sums", &more, shared)?;
        let launch = self.launch(&kernel, problem)?;
        let (x, y) = of_queries.map_or((self.k, self.v), |of| (self.q, of.grad));
        let launch = launch.input(x)?.input(y)?;
        let launch = optional(launch, self.given.visible.filter(|_| of_queries.is_none()))?;
        let launch = self.projection(launch)?;
        let launch = optional(launch, of_queries.map(|of| of.logs))?;
        let launch = optional(launch, of_queries.map(|of| of.delta))?;
        let launch = optional(launch, of_queries.and_then(|of| of.denominators))?;
        let launch = optional_output(launch.output(&mut records.storage)?, decays.as_mut())?;
        // Under a causal mask, no other segment sees the last of keys, or the first of queries.
        let seen = segments - usize::from(self.causal);
        // SAFETY: strides and sizes are those of the tensors, and there is a record for each
        // segment and head.
        unsafe { launch.run([all * b.splits(), seen, 1], threads) }?;

        let kernel = self.kernel(PARTS, "favor_combine", &[], 0)?;
        let launch = kernel.launch().value(all as i32).value(segments as i32).output(&mut records.storage)?;
        let launch = optional(optional(launch, decays.as_ref().map(Buffer::view))?, initial)?;
        let mut total = if self.causal { None } else { Some(Buffer::new(self.device, all * b.record())?) };
        let launch = optional_output(launch, total.as_mut())?;
        let launch = launch.value(i32::from(self.causal)).value(i32::from(of_queries.is_some()));
        // SAFETY: as many records as the kernel is told.
        unsafe { launch.run([(all * b.f()).div_ceil(WARPS), 1, 1], THREADS) }?;
        Ok(Some(total.unwrap_or(records)))
    }

    /// Computes the outputs, beginning with `initial` sums, if given; the sums after the last token
    /// are written to `after`, if given.
    pub(super) fn forward(&self, initial: Option<View>, after: Option<&mut Buffer>) -> Result<(Buffer, Saved)> {
        let b = &self.blocks;
        let sums = self.sums(None, initial)?;
        let before = sums.as_ref().map(Buffer::view).or(initial);
        let (problem, segments) = self.problem(self.queries);
        let rows = self.batch * self.heads * self.queries;
        let mut out = Buffer::of(self.device, (self.batch, self.heads, self.queries, self.width()), self.dtype)?;
        let mut logs = Buffer::new(self.device, rows)?;
        // Only with several slices do gradients need the outputs, and rounded outputs would show in
        // them.
        let split = b.splits() > 1 && self.dtype != DType::F32;
        let mut exact = if split { Some(Buffer::new(self.device, rows * b.values)?) } else { None };
        let mut denominators = if b.map == MapKind::Signed { Some(Buffer::new(self.device, rows)?) } else { None };
        let shared = if self.warpgroups { b.warpgroup_forward() } else { self.shared().forward };
        let mut more = self.with_logs(&[("SHARED_FORWARD", &shared)]);
        if self.warpgroups {
            more.push(("WGMMA", &1));
        }
        let (kernel, threads) = self.either([FORWARD, TEAM_FORWARD], "forward", &more, shared)?;
        let launch = self.launch(&kernel, problem)?;
        let launch = launch.input(self.q)?.input(self.k)?.input(self.v)?;
        let launch = self.projection(optional(launch, self.given.visible)?)?;
        let launch = optional(launch, before)?.output(&mut out.storage)?;
        let launch = optional_output(launch, exact.as_mut())?.output(&mut logs.storage)?;
        let launch = optional_output(optional_output(launch, denominators.as_mut())?, after)?;
        // SAFETY: strides and sizes are those of the tensors; every row of outputs is written.
        unsafe { launch.run([self.batch * self.heads * b.splits(), segments, 1], threads) }?;
        Ok((out, Saved { logs, exact, denominators, sums }))
    }

    /// Computes the gradients of the inputs.
    pub(super) fn backward(&self, out: View, grad: View, saved: &Saved) -> Result<Gradients> {
        let b = &self.blocks;
        let (splits, group) = (b.splits(), self.heads / self.key_heads);
        let rows = self.batch * self.heads * self.queries;
        let denominators = saved.denominators.as_ref().map(Buffer::view);
        let mut delta = Buffer::new(self.device, rows)?;
        let shared = self.shared().backward;
        let partial = u8::from(splits > 1 || group > 1);
        let more = self.with_logs(&[("PARTIAL", &partial), ("SHARED_BACKWARD", &shared)]);
        if splits > 1 {
            let kernel = self.kernel(BACKWARD, "favor_delta", &more, 0)?;
            let out = saved.exact.as_ref().map_or(out, Buffer::view);
            let launch = kernel.launch().value(rows as i64).input(out)?.input(grad)?;
            // SAFETY: as many rows as the kernel is told.
            unsafe {
                optional(launch, denominators)?.output(&mut delta.storage)?.run([rows.div_ceil(WARPS), 1, 1], THREADS)
            }?;
        }
        let made = if partial == 1 { DType::F32 } else { self.dtype };
        let width = if b.map.is_computed() { b.dim } else { b.features };
        let key_width = width + usize::from(b.map == MapKind::Signed);

        let of_features = |tokens: usize| -> Result<Option<Buffer>> {
            let shape = [splits, self.batch, self.heads, tokens, b.features];
            self.given.trained.then(|| Buffer::of(self.device, shape.as_slice(), DType::F32)).transpose()
        };
        let mut of_query_features = of_features(self.queries)?;
        let mut of_key_features = of_features(self.keys)?;

        // Queries come first: their kernel leaves `delta` to the others.
        let (problem, segments) = self.problem(self.queries);
        let grid = |segments: usize| [self.batch * self.heads * splits, segments, 1];
        let parts = |tokens: usize, width: usize, parts: usize| {
            Buffer::of(self.device, (parts, self.batch, self.heads, tokens * width), made)
        };
        let mut dq = parts(self.queries, width, splits)?;
        let (kernel, threads) = self.either([BACKWARD, TEAM_BACKWARD], "query_gradients", &more, shared)?;
        let mut launch = self.launch(&kernel, problem)?;
        let mut tensors = self.tensors(&mut launch, grad, saved)?;
        tensors.before = address(&mut launch, saved.sums.as_ref().map(Buffer::view))?;
        tensors.delta = launch.address_mut(&mut delta.storage)?;
        tensors.of_features = address_of_output(&mut launch, of_query_features.as_mut())?;
        // SAFETY: strides and sizes are those of the tensors; every row of the gradient is written.
        unsafe { launch.value(tensors).output(&mut dq.storage)?.run(grid(segments), threads) }?;

        let of = OfQueries { grad, logs: saved.logs.view(), delta: delta.view(), denominators };
        let later = self.sums(Some(&of), None)?;
        let (problem, segments) = self.problem(self.keys);
        let (mut dk, mut dv) = (parts(self.keys, key_width, splits)?, parts(self.keys, b.values, 1)?);
        let mut factors =
            if b.gated { Some(Buffer::new(self.device, splits * self.batch * self.heads * self.keys)?) } else { None };
        let (kernel, threads) = self.either([BACKWARD, TEAM_BACKWARD], "key_gradients", &more, shared)?;
        let mut launch = self.launch(&kernel, problem)?;
        let mut tensors = self.tensors(&mut launch, grad, saved)?;
        tensors.before = address(&mut launch, later.as_ref().map(Buffer::view))?;
        tensors.delta = launch.address(delta.view())?;
        tensors.factors = address_of_output(&mut launch, factors.as_mut())?;
        tensors.of_features = address_of_output(&mut launch, of_key_features.as_mut())?;
        let launch = launch.value(tensors);
        // SAFETY: strides and sizes are those of the tensors; every row of both gradients is
        // written.
        unsafe { launch.output(&mut dk.storage)?.output(&mut dv.storage)?.run(grid(segments), threads) }?;

        let reduce =
            |from: Buffer, heads: usize, group: usize, parts: usize, tokens: usize, width: usize| -> Result<Buffer> {
                let shape = (self.batch, heads, tokens, width);
                if partial == 0 {
                    return Ok(Buffer { storage: from.storage, layout: Layout::contiguous(shape) });
                }
                let mut to = Buffer::of(self.device, shape, self.dtype)?;
                let kernel = self.kernel(PARTS, "favor_reduce", &[], 0)?;
                let launch = kernel.launch().value((self.batch * self.heads) as i32).value(group as i32);
                let launch = launch.value(parts as i32).value((tokens * width) as i64).input(from.view())?;
                let blocks = (self.batch * heads * tokens * width).div_ceil(THREADS).min(4096);
                // SAFETY: `from` holds that many parts and heads.
                unsafe { launch.output(&mut to.storage)?.run([blocks, 1, 1], THREADS) }?;
                Ok(to)
            };
        let sums = [&saved.sums, &later].map(|sums| sums.as_ref().map(Buffer::view));
        let gates = factors.map(|factors| self.gate_gradients(problem, factors.view(), sums)).transpose()?;
        let qkv = [
            reduce(dq, self.heads, 1, splits, self.queries, width)?,
            reduce(dk, self.key_heads, group, splits, self.keys, key_width)?,
            reduce(dv, self.key_heads, group, 1, self.keys, b.values)?,
        ];
        Ok(Gradients { qkv, gates, features: of_query_features.zip(of_key_features).map(<[Buffer; 2]>::from) })
    }

    /// Computes the gradients of gates from the factors' and from both sums at the borders of
    /// segments, see `favor_gates.cu`.
    fn gate_gradients(&self, problem: Problem, factors: View, [before, later]: [Option<View>; 2]) -> Result<Buffer> {
        let (b, heads, segments) = (&self.blocks, self.batch * self.heads, problem.segments as usize);
        let mut borders = None;
        if let (Some(before), Some(later)) = (before, later) {
            let of_segments = borders.insert(Buffer::new(self.device, segments * heads)?);
            let kernel = self.kernel(GATES, "favor_gate_borders", &[], 4 * WARPS)?;
            let launch = self.launch(&kernel, problem)?.input(before)?.input(later)?;
            // SAFETY: both have a record for each segment and head, and so has the result a number.
            unsafe { launch.output(&mut of_segments.storage)?.run([heads, segments - 1, 1], THREADS) }?;
        }
        let mut gradients = Buffer::of(self.device, (self.batch, self.key_heads, self.keys), DType::F32)?;
        let kernel = self.kernel(GATES, "favor_gate_gradients", &[], 4 * THREADS)?;
        let launch = self.launch(&kernel, problem)?.value(heads as i32).value(b.splits() as i32);
        let launch = optional(launch.input(factors)?, borders.as_ref().map(Buffer::view))?;
        // SAFETY: as many factors as heads, slices and tokens, and every gradient is written: no
        // segment is longer than a thread block takes.
        unsafe { launch.output(&mut gradients.storage)?.run([self.batch * self.key_heads, segments, 1], THREADS) }?;
        Ok(gradients)
    }

    /// The addresses that are the same for both gradient kernels: all but `delta`, `before`,
    /// `factors` and `of_features`.
    fn tensors<'l>(&'l self, launch: &mut Launch<'l>, grad: View<'l>, saved: &'l Saved) -> Result<Tensors> {
        let packed = self.packed()?;
        let packed = |i: usize| packed.map(|packed| packed.queries[i].view());
        Ok(Tensors {
            q: launch.address(self.q)?,
            k: launch.address(self.k)?,
            v: launch.address(self.v)?,
            grad: launch.address(grad)?,
            visible: address(launch, self.given.visible)?,
            projection: address(launch, packed(0))?,
            back: address(launch, packed(1))?,
            logs: launch.address(saved.logs.view())?,
            denominators: address(launch, saved.denominators.as_ref().map(Buffer::view))?,
            ..Tensors::default()
        })
    }

    /// Whether a thread block of [`Self::step`] has room on this card.
    pub(super) fn step_fits(&self) -> Result<bool> {
        Ok(self.blocks.shared_step(self.heads / self.key_heads) <= most_shared(self.device)?)
    }

    /// Computes the outputs of one more token after the sums `before`, and writes the sums after it
    /// to `after`.
    pub(super) fn step(&self, before: View, after: &mut Buffer) -> Result<Buffer> {
        let b = &self.blocks;
        let group = self.heads / self.key_heads;
        let mut out = Buffer::of(self.device, (self.batch, self.heads, 1, self.width()), self.dtype)?;
        let shared = b.shared_step(group);
        let more = self.with_logs(&[("GROUP", &group), ("SHARED_STEP", &shared)]);
        let kernel = self.kernel(STEP, "favor_step", &more, shared)?;
        let grid = [self.batch * self.key_heads * b.splits(), 1, 1];
        let mut run = |omega: Option<View>, scale: f32, of_keys: Option<OwnNumbers>| {
            let mut launch = kernel.launch();
            let gates = address(&mut launch, self.given.gates)?;
            let form = of_keys.map_or(Ok(KeyForm::default()), |of_keys| of_keys.form(&mut launch))?;
            let launch = launch.value(Problem { gates, form, ..self.problem(1).0 });
            let launch = launch.input(self.q)?.input(self.k)?.input(self.v)?;
            let hyperbolic = i32::from(self.map.is_hyperbolic());
            let launch = optional(launch, omega)?.value(hyperbolic).value(scale);
            let launch = launch.input(before)?.output(&mut after.storage)?.output(&mut out.storage)?;
            // SAFETY: sizes are those of the tensors, and both sums have a record for each key
            // head.
            unsafe { launch.run(grid, THREADS) }
        };
        match self.map {
            Map::Exponential(projection) => {
                with_storages([&projection.omega], |[omega]| run(Some(omega), projection.scale(), None))?;
            }
            Map::OwnKeys(map) => {
                let metric = map.metric.as_ref().unwrap_or(&map.queries);
                let numbers = [&map.queries, &map.keys, &map.weights, metric];
                with_storages(numbers, |[queries, keys, weights, metric]| {
                    let metric = map.metric.as_ref().map(|_| metric);
                    let of_keys = OwnNumbers { keys, weights, metric, tables: map.heads() };
                    run(Some(queries), map.scale(), Some(of_keys))
                })?;
            }
            Map::Log { .. } | Map::Signed { .. } => run(None, 1.0, None)?,
        }
        Ok(out)
    }
}

/// `OwnNumbers` is what keys have of their own, as it is: a decoding step reads it so.
struct OwnNumbers<'a> {
    keys: View<'a>,
    weights: View<'a>,
    metric: Option<View<'a>>,
    tables: usize,
}

impl<'a> OwnNumbers<'a> {
    fn form(self, launch: &mut Launch<'a>) -> Result<KeyForm> {
        Ok(KeyForm {
            projection: address(launch, Some(self.keys))?,
            weights: address(launch, Some(self.weights))?,
            metric: address(launch, self.metric)?,
            tables: self.tables as i64,
            ..KeyForm::default()
        })
    }
}

/// `Gradients` is what a backward pass returns.
#[derive(Debug)]
pub(super) struct Gradients {
    /// Of queries, keys and values.
    pub(super) qkv: [Buffer; 3],
    /// Of gates, if there are some.
    pub(super) gates: Option<Buffer>,
    /// Of the log-features of queries and keys, `(S, B, H, T, F)`, if they were asked for: in
    /// parts, of `S` slices of the values and of query heads.
    pub(super) features: Option<[Buffer; 2]>,
}

/// `OfQueries` is what sums over queries are made of, besides the queries.
struct OfQueries<'a> {
    grad: View<'a>,
    logs: View<'a>,
    delta: View<'a>,
    denominators: Option<View<'a>>,
}

/// `Saved` is what the forward pass keeps for the backward pass.
#[derive(Debug)]
pub(super) struct Saved {
    /// The logarithms of the denominators to base 2, one for each query.
    logs: Buffer,
    /// The outputs of half types before rounding, where several thread blocks share a row.
    exact: Option<Buffer>,
    /// The reciprocal denominators, where features are signed.
    denominators: Option<Buffer>,
    /// The sums over keys, where the kernels read some.
    sums: Option<Buffer>,
}
