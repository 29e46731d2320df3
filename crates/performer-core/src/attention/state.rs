//! What decoding carries from token to token.

use std::{any::Any, fmt, path::Path};

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{Identity, inputs::Sizes, record::StateRecord};

/// What an attention remembers of the tokens so far: keys and values, sums, or whatever else an
/// implementation needs. A [`State`] owns it.
///
/// Implement it for a type of your own to write an [`Attention`](super::Attention) that decodes.
pub trait Memory: Any + fmt::Debug + Send + Sync {
    /// A name for this kind of memory, in words, such as `"keys and values"`. It is saved with a
    /// state and named when a state meets an attention that has another kind.
    fn kind() -> &'static str
    where
        Self: Sized;

    /// Bytes held.
    fn bytes(&self) -> usize;

    /// A copy that goes on independently of this one.
    fn duplicate(&self) -> Box<dyn Memory>;

    /// Everything that [`Self::load`] needs. Every tensor has the batch as its first dimension, so
    /// that rows of the batch can be selected and joined. A field named `batch`, or ending in
    /// `.batch`, then becomes the new number of rows.
    ///
    /// # Errors
    /// Whatever keeps the numbers from being read.
    fn save(&self) -> Result<StateRecord>;

    /// The memory that was saved, with the same bits.
    ///
    /// # Errors
    /// If a tensor or a field is missing or does not fit the others.
    fn load(record: &StateRecord) -> Result<Self>
    where
        Self: Sized;
}

/// The most tokens that a state counts, that a window has and that are sinks: far more than any
/// text has, and few enough that sums of positions, windows and sinks do not overflow a `usize`.
pub(super) const MOST_TOKENS: usize = usize::MAX >> 8;

/// Everything an [`Attention`](super::Attention) must remember of the tokens so far, for one layer
/// and one batch of sequences.
///
/// Exact softmax keeps every key and value; FAVOR keeps prefix sums of constant size. A clone is
/// independent: both go on from where they were. A state can be saved and loaded, and rows of its
/// batch selected, reordered and joined, all with the same bits.
///
/// # Example
/// The state of a prompt goes into a file, and two continuations start from it:
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use performer_core::{Attention, Favor, FavorConfig, Inputs, State};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = Device::Cpu;
/// let favor = Favor::new(&FavorConfig::default(), 16, 42, DType::F32, &device)?;
/// let prompt = Tensor::randn(0f32, 1.0, (1, 4, 100, 16), &device)?;
/// let mut state = State::new();
/// favor.extend(Inputs::new(&prompt, &prompt, &prompt), &mut state)?;
/// let path = std::env::temp_dir().join("prompt.safetensors");
/// state.save(&path)?;
///
/// let mut loaded = State::load(&path, &device)?;
/// assert_eq!(loaded.tokens(), 100);
/// let token = Tensor::randn(0f32, 1.0, (1, 4, 1, 16), &device)?;
/// let there = favor.extend(Inputs::new(&token, &token, &token), &mut loaded)?;
/// let here = favor.extend(Inputs::new(&token, &token, &token), &mut state.clone())?;
/// assert_eq!(there.flatten_all()?.to_vec1::<f32>()?, here.flatten_all()?.to_vec1::<f32>()?);
/// # std::fs::remove_file(&path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct State {
    tokens: usize,
    /// What the first tokens settled; `None` before any.
    origin: Option<Origin>,
    /// What the attention remembers.
    memory: Slot,
    /// What the layer around the attention remembers, if it remembers anything.
    layer: Slot,
}

/// What a state belongs to.
#[derive(Clone, Debug, PartialEq)]
struct Origin {
    identity: Identity,
    batch: usize,
    key_heads: usize,
    head_dim: usize,
    value_dim: usize,
    dtype: DType,
}

impl Origin {
    /// What tells it from others of the same batch, for messages.
    fn describe(&self) -> String {
        let Self { identity, key_heads, head_dim, value_dim, dtype, .. } = self;
        format!("{identity:?}, {dtype:?}, {key_heads} key heads of {head_dim} and values of {value_dim}")
    }
}

/// A place for the memory of one owner.
#[derive(Debug, Default)]
enum Slot {
    /// Nothing yet.
    #[default]
    Empty,
    /// Memory in the form that its owner works with, and its kind.
    Live(&'static str, Box<dyn Memory>),
    /// Memory that was loaded, selected or joined, and its kind: its owner makes it live.
    Saved(String, StateRecord),
}

impl Clone for Slot {
    fn clone(&self) -> Self {
        match self {
            Self::Empty => Self::Empty,
            Self::Live(kind, memory) => Self::Live(kind, memory.duplicate()),
            Self::Saved(kind, record) => Self::Saved(kind.clone(), record.clone()),
        }
    }
}

impl Slot {
    /// The memory of a record that has it under a name.
    fn of(record: &StateRecord, name: &str) -> Self {
        match record.fields.get(name) {
            None => Self::Empty,
            Some(kind) => Self::Saved(kind.clone(), record.nested(name)),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::Live(_, memory) => memory.bytes(),
            Self::Saved(_, record) => record.tensors.values().map(bytes_of).sum(),
        }
    }

    /// Takes the memory out; memory of another kind stays, with an error.
    fn take<M: Memory>(&mut self) -> Result<Option<M>> {
        match std::mem::take(self) {
            Self::Empty => Ok(None),
            Self::Live(kind, memory) => {
                if (&*memory as &dyn Any).is::<M>() {
                    let memory: Box<dyn Any> = memory;
                    return Ok(memory.downcast::<M>().ok().map(|memory| *memory));
                }
                let error = other_kind::<M>(kind);
                *self = Self::Live(kind, memory);
                Err(error)
            }
            Self::Saved(kind, record) => {
                let loaded = if kind == M::kind() { M::load(&record) } else { Err(other_kind::<M>(&kind)) };
                if loaded.is_err() {
                    *self = Self::Saved(kind, record);
                }
                loaded.map(Some)
            }
        }
    }

    /// The kind of the memory and its record, if there is any.
    fn record(&self) -> Result<Option<(String, StateRecord)>> {
        Ok(match self {
            Self::Empty => None,
            Self::Live(kind, memory) => Some(((*kind).to_string(), memory.save()?)),
            Self::Saved(kind, record) => Some((kind.clone(), record.clone())),
        })
    }

    /// Returns the memory with every tensor replaced by `of(name, tensor)`, for `batch` sequences.
    /// States nested in it record the batch in a field of their own, which is updated too.
    fn with_rows(&self, batch: usize, of: impl Fn(&str, &Tensor) -> Result<Tensor>) -> Result<Self> {
        let Some((kind, mut record)) = self.record()? else { return Ok(Self::Empty) };
        for (name, tensor) in &mut record.tensors {
            *tensor = of(name, tensor)?;
        }
        for (name, value) in &mut record.fields {
            if is_batch(name) {
                *value = batch.to_string();
            }
        }
        Ok(Self::Saved(kind, record))
    }

    /// The memory of the sequences of several, one after the other.
    fn join(slots: &[&Self], batch: usize) -> Result<Self> {
        let records = slots.iter().map(|slot| slot.record()).collect::<Result<Vec<_>>>()?;
        let kind = |record: &Option<(String, StateRecord)>| {
            record.as_ref().map_or_else(|| "nothing".to_string(), |(kind, _)| kind.clone())
        };
        if let Some(other) = records.iter().find(|record| kind(record) != kind(&records[0])) {
            bail!("state: one of {} cannot be joined with one of {}", kind(&records[0]), kind(other));
        }
        let names = |record: &Option<(String, StateRecord)>| -> Vec<String> {
            record.iter().flat_map(|(_, record)| record.tensors.keys().cloned()).collect()
        };
        if let Some(other) = records.iter().find(|record| names(record) != names(&records[0])) {
            bail!(
                "state: one that remembers {:?} cannot be joined with one that remembers {:?}; if gates are what \
                 differs, give forget gates to all of them or to none",
                names(&records[0]),
                names(other)
            );
        }
        // What is nested in a record has its kind among the fields.
        let fields = |record: &Option<(String, StateRecord)>| -> Vec<(String, String)> {
            let all = record.iter().flat_map(|(_, record)| record.fields.clone());
            all.filter(|(name, _)| !is_batch(name)).collect()
        };
        if let Some(other) = records.iter().find(|record| fields(record) != fields(&records[0])) {
            bail!("state: one of {:?} cannot be joined with one of {:?}", fields(&records[0]), fields(other));
        }
        // Some kinds of memory are saved from a card to the host, and others stay there.
        slots[0].with_rows(batch, |name, first| {
            let parts = records.iter().flatten().map(|(_, record)| record.tensor(name)?.to_device(first.device()));
            Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)
        })
    }

    /// Refuses saved memory whose tensors are not of this batch.
    fn check_rows(&self, batch: usize) -> Result<()> {
        let Self::Saved(_, record) = self else { return Ok(()) };
        for (name, tensor) in &record.tensors {
            if tensor.dims().first() != Some(&batch) {
                bail!(
                    "saved state: tensor {name} has shape {:?}, but its first dimension must be the batch, {batch}",
                    tensor.dims()
                );
            }
        }
        Ok(())
    }
}

impl State {
    /// The state before the first token.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tokens seen so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Sequences side by side, which is `None` before the first token.
    pub fn batch(&self) -> Option<usize> {
        self.origin.as_ref().map(|origin| origin.batch)
    }

    /// Bytes of what is remembered: constant in the number of tokens for FAVOR, linear for softmax
    /// (whose cache is allocated in larger pieces).
    pub fn bytes(&self) -> usize {
        self.memory.bytes() + self.layer.bytes()
    }

    /// Goes on from the memory: `advance` is given what there is of it, nothing before the first
    /// token, and returns an output and the memory after it, which is put in its place. After an
    /// error the memory is what it was.
    ///
    /// # Errors
    /// As [`Self::take`], and those of `advance`.
    pub fn advance_with<M: Memory, T>(&mut self, advance: impl FnOnce(Option<&M>) -> Result<(T, M)>) -> Result<T> {
        let before = self.take::<M>()?;
        match advance(before.as_ref()) {
            Ok((output, after)) => {
                self.set(after);
                Ok(output)
            }
            Err(error) => {
                before.into_iter().for_each(|before| self.set(before));
                Err(error)
            }
        }
    }

    /// Takes the memory out, for an attention that changes it in place; `None` before the first
    /// token. Put it back with [`Self::set`], after an error too ([`Self::advance_with`] does).
    ///
    /// # Errors
    /// If it is memory of another kind, which stays in the state, or was loaded and is damaged.
    pub fn take<M: Memory>(&mut self) -> Result<Option<M>> {
        self.memory.take()
    }

    /// Refuses a state that counts tokens and remembers nothing of them, for attention that always
    /// remembers something.
    pub(super) fn require_memory(&self) -> Result<()> {
        if self.tokens > 0 && matches!(self.memory, Slot::Empty) {
            bail!(
                "state: it counts {} tokens and remembers nothing of them; the file it is from is damaged",
                self.tokens
            );
        }
        Ok(())
    }

    /// Puts memory in.
    pub fn set<M: Memory>(&mut self, memory: M) {
        self.memory = Slot::Live(M::kind(), Box::new(memory));
    }

    /// Takes out what the layer around the attention remembers, as [`Self::take`] does for the
    /// attention.
    pub(crate) fn take_of_layer<M: Memory>(&mut self) -> Result<Option<M>> {
        self.layer.take()
    }

    /// Puts in what the layer around the attention remembers.
    pub(crate) fn set_of_layer<M: Memory>(&mut self, memory: M) {
        self.layer = Slot::Live(M::kind(), Box::new(memory));
    }

    /// Whether the layer around the attention remembers something.
    pub(crate) fn has_memory_of_layer(&self) -> bool {
        !matches!(self.layer, Slot::Empty)
    }

    /// Refuses inputs that do not belong to the tokens so far.
    pub(super) fn check(&self, identity: &Identity, sizes: Sizes, dtype: DType) -> Result<()> {
        let Some(origin) = &self.origin else { return Ok(()) };
        origin.identity.check(identity)?;
        let sizes = [
            ("batch", origin.batch, sizes.batch),
            ("key heads", origin.key_heads, sizes.key_heads),
            ("head dim", origin.head_dim, sizes.head_dim),
            ("value dim", origin.value_dim, sizes.value_dim),
        ];
        for (name, had, has) in sizes {
            if had != has {
                bail!(
                    "state: it was made with a {name} of {had}, but these inputs have {has}; a state belongs to one \
                     layer and one batch"
                );
            }
        }
        if origin.dtype != dtype {
            bail!(
                "state: it was made from inputs of dtype {:?}, but these have {dtype:?}; convert the inputs",
                origin.dtype
            );
        }
        Ok(())
    }

    /// Counts `sizes.queries` tokens after the first `before`.
    pub(super) fn count(&mut self, before: usize, identity: Identity, sizes: Sizes, dtype: DType) {
        self.tokens = before + sizes.queries;
        if self.tokens > 0 {
            let Sizes { batch, key_heads, head_dim, value_dim, .. } = sizes;
            self.origin = Some(Origin { identity, batch, key_heads, head_dim, value_dim, dtype });
        }
    }

    /// The state as named tensors and text, to be saved by other means than [`Self::save`].
    ///
    /// # Errors
    /// Whatever keeps its numbers from being read.
    pub fn record(&self) -> Result<StateRecord> {
        let mut record = StateRecord::new().with_field("tokens", self.tokens);
        if let Some(origin) = &self.origin {
            record = record
                .with_field("batch", origin.batch)
                .with_field("key_heads", origin.key_heads)
                .with_field("head_dim", origin.head_dim)
                .with_field("value_dim", origin.value_dim)
                .with_field("dtype", origin.dtype.as_str());
            for (name, value) in origin.identity.fields() {
                record = record.with_field(&format!("attention.{name}"), value);
            }
        }
        for (name, slot) in [("memory", &self.memory), ("layer", &self.layer)] {
            if let Some((kind, inner)) = slot.record()? {
                record = record.with_field(name, kind).with_nested(name, inner);
            }
        }
        Ok(record)
    }

    /// The state of a record. The attention that goes on from it checks that it is its own.
    ///
    /// # Errors
    /// If the record is incomplete.
    pub fn from_record(record: &StateRecord) -> Result<Self> {
        let tokens = record.field("tokens")?;
        let origin = match record.fields.contains_key("batch") {
            false => None,
            true => Some(Origin {
                identity: Identity::from_fields(record.nested("attention").fields),
                batch: record.field("batch")?,
                key_heads: record.field("key_heads")?,
                head_dim: record.field("head_dim")?,
                value_dim: record.field("value_dim")?,
                dtype: record.field("dtype")?,
            }),
        };
        if tokens > MOST_TOKENS {
            bail!("saved state: it counts {tokens} tokens, which no text has; the file is damaged");
        }
        let state = Self { tokens, origin, memory: Slot::of(record, "memory"), layer: Slot::of(record, "layer") };
        if state.origin.is_none() && tokens > 0 {
            bail!("saved state: it has {tokens} tokens but no batch; the file is damaged or holds something else");
        }
        state.check_rows()?;
        Ok(state)
    }

    /// Saves the state in a safetensors file.
    ///
    /// # Errors
    /// Whatever keeps the file from being written; an earlier file of this name is intact then.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.record()?.save(path.as_ref())
    }

    /// Loads a state that [`Self::save`] wrote, with the same bits. Sums of FAVOR go on only on the
    /// kind of device on which they began: a CPU and a card keep them in different forms.
    ///
    /// # Errors
    /// If the file cannot be read or holds something else.
    pub fn load(path: impl AsRef<Path>, device: &Device) -> Result<Self> {
        let path = path.as_ref();
        Self::from_record(&StateRecord::load(path, device)?)
            .map_err(|e| candle_core::Error::Msg(format!("cannot load {}: {e}", path.display())))
    }

    /// A state of some of the batch's rows, by number and in this order: to drop sequences that
    /// have ended, to reorder them, or to repeat one (beam search).
    ///
    /// # Errors
    /// If a row lies beyond the batch, or nothing was seen yet.
    pub fn select(&self, rows: &[usize]) -> Result<Self> {
        let Some(origin) = &self.origin else { bail!("state: it has seen no token, so there are no rows to select") };
        if let Some(&row) = rows.iter().find(|&&row| row >= origin.batch) {
            bail!("state: row {row} was asked for, but the batch has {} of them", origin.batch);
        }
        let index: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let select = |t: &Tensor| {
            let index = Tensor::from_slice(&index, index.len(), t.device())?;
            t.contiguous()?.index_select(&index, 0)
        };
        let of = |slot: &Slot| slot.with_rows(rows.len(), |_, tensor| select(tensor));
        self.with_rows(rows.len(), of(&self.memory)?, of(&self.layer)?)
    }

    /// One state of the sequences of several, one after the other: they must come from the same
    /// attention and have seen the same number of tokens.
    ///
    /// # Errors
    /// If there is none, or they do not fit each other.
    pub fn join(states: &[&Self]) -> Result<Self> {
        let Some((first, others)) = states.split_first() else { bail!("state: there is no state to join") };
        let Some(origin) = &first.origin else { bail!("state: it has seen no token, so there are no rows to join") };
        for other in others {
            let Some(of_other) = &other.origin else {
                bail!("state: it cannot be joined with one that has seen no token")
            };
            if (Origin { batch: origin.batch, ..of_other.clone() }) != *origin {
                bail!(
                    "state: it cannot be joined with one of another attention, type or size: {}, and {}",
                    origin.describe(),
                    of_other.describe()
                );
            }
            if other.tokens != first.tokens {
                bail!(
                    "state: it has seen {} tokens and cannot be joined with one that has seen {}; \
                     texts of different lengths are decoded with a state each",
                    first.tokens,
                    other.tokens
                );
            }
        }
        let batch = states.iter().filter_map(|state| state.batch()).sum();
        let of =
            |slot: fn(&Self) -> &Slot| Slot::join(&states.iter().map(|state| slot(state)).collect::<Vec<_>>(), batch);
        first.with_rows(batch, of(|state| &state.memory)?, of(|state| &state.layer)?)
    }

    /// This state with other rows, whose memory is given.
    fn with_rows(&self, batch: usize, memory: Slot, layer: Slot) -> Result<Self> {
        let origin = self.origin.clone().map(|origin| Origin { batch, ..origin });
        let state = Self { tokens: self.tokens, origin, memory, layer };
        state.check_rows()?;
        Ok(state)
    }

    /// Refuses saved memory whose tensors are not of this batch.
    fn check_rows(&self) -> Result<()> {
        let Some(origin) = &self.origin else { return Ok(()) };
        self.memory.check_rows(origin.batch)?;
        self.layer.check_rows(origin.batch)
    }
}

/// Whether a field of a record, or of one nested in it, is the number of sequences.
fn is_batch(field: &str) -> bool {
    field == "batch" || field.ends_with(".batch")
}

/// The error where memory is of `kind` and an attention needs an `M`.
fn other_kind<M: Memory>(kind: &str) -> candle_core::Error {
    candle_core::Error::Msg(format!(
        "state: it holds {kind}, made by another attention, on another kind of device or on \
         another path, and this one needs {}",
        M::kind()
    ))
}

/// Bytes of a tensor's numbers.
pub(super) fn bytes_of(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}
