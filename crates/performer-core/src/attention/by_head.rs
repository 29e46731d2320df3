//! Heads in groups of equal size, each with an attention of its own: features where a head looks
//! far, and few or none where it looks near.

use candle_core::{Result, Tensor, bail};

use super::{Attention, Identity, Inputs, Mask, Memory, Path, Segment, State, StateRecord, Tensors, inputs::Sizes};
use crate::{ops, projection::derive_seed};

/// Attention whose heads are divided among several attentions, in order and equally: of 4 key heads
/// and 2 attentions, the first two heads have the first. Query heads go with the key head that they
/// read.
///
/// # Example
/// Of four heads, two see a window of 32 tokens, and two see everything through 128 features.
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use performer_core::attention::ByHead;
/// use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask, Softmax};
///
/// # fn main() -> candle_core::Result<()> {
/// let favor = Favor::new(&FavorConfig::default(), 16, 42, DType::F32, &Device::Cpu)?;
/// let attention = ByHead::new(vec![Box::new(Softmax::new().with_window(32)?), Box::new(favor)])?;
/// let x = Tensor::randn(0f32, 1.0, (1, 4, 100, 16), &Device::Cpu)?;
/// let out = attention.forward(Inputs::new(&x, &x, &x), &Mask::causal())?;
/// assert_eq!(out.dims(), [1, 4, 100, 16]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ByHead {
    groups: Vec<Box<dyn Attention>>,
    /// The groups' identities when they were built, loaded or redrawn, and the whole's of then.
    identity: (Vec<Identity>, Identity),
}

impl ByHead {
    /// Divides heads among these attentions. One of yours may be among them. If its `advance` fails
    /// for something else than its inputs, groups before it may have gone on, and the state cannot
    /// be used further.
    ///
    /// # Errors
    /// If there is none, or one has features that cannot be read.
    pub fn new(groups: Vec<Box<dyn Attention>>) -> Result<Self> {
        if groups.is_empty() {
            bail!("attention by head: there is no attention to divide heads among; give at least one");
        }
        let identity = Self::joined(groups.iter().map(|group| group.identity()).collect::<Result<_>>()?);
        Ok(Self { groups, identity })
    }

    /// The attentions, that of the first heads first.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &dyn Attention> {
        self.groups.iter().map(|group| &**group)
    }

    /// The identity of the whole, with those of the groups.
    fn joined(of_groups: Vec<Identity>) -> (Vec<Identity>, Identity) {
        let mut whole = Identity::new("attention by head").with("groups", of_groups.len());
        for (n, identity) in of_groups.iter().enumerate() {
            for (name, value) in identity.fields() {
                whole = whole.with(&format!("{n}.{name}"), value);
            }
        }
        (of_groups, whole)
    }

    /// Divides the heads of inputs among the groups.
    fn divide(&self, inputs: Inputs<'_>, sizes: Sizes) -> Result<Vec<Tensors>> {
        let n = self.groups.len();
        if !sizes.key_heads.is_multiple_of(n) {
            bail!(
                "attention by head: {} key heads cannot be divided equally among {n} attentions; their number must be \
                 a multiple of that",
                sizes.key_heads
            );
        }
        let part = |x: &Tensor, heads: usize, g: usize| ops::narrow(x, 1, g * (heads / n), heads / n);
        (0..n)
            .map(|g| {
                Ok(Tensors {
                    q: part(inputs.q, sizes.heads, g)?,
                    k: part(inputs.k, sizes.key_heads, g)?,
                    v: part(inputs.v, sizes.key_heads, g)?,
                    gates: inputs.gates.map(|gates| part(gates, sizes.key_heads, g)).transpose()?,
                })
            })
            .collect()
    }

    /// Puts the outputs `(B, H / n, T, Dv)` of the groups side by side.
    fn join(outs: &[Tensor]) -> Result<Tensor> {
        ops::cat(&outs.iter().collect::<Vec<_>>(), 1)
    }

    /// Lets every group go on from its own state, after all that one of them could refuse has been
    /// looked at: none goes on where another does not.
    fn extend_groups(&self, parts: &[Tensors], past: usize, states: &mut States) -> Result<Vec<Tensor>> {
        let counted: Vec<usize> = states.groups.iter().map(State::tokens).collect();
        if counted.len() != self.groups.len() || counted.iter().any(|&tokens| tokens != past) {
            bail!(
                "state: it counts {past} tokens for {} groups of heads, and holds groups of {counted:?}; the file it is \
                 from is damaged, or a call failed after some groups had gone on: begin again with a new state",
                self.groups.len()
            );
        }
        let groups = || self.groups.iter().zip(parts);
        let mut paths = Vec::new();
        for ((group, part), state) in groups().zip(&states.groups) {
            paths.push(group.path(part.inputs(), &Mask::causal())?);
            state.check(&group.identity()?, part.inputs().sizes()?, part.q.dtype())?;
        }
        // A group may refuse memory that another path made, after other groups have gone on. So the
        // states are copied first, unless every group takes the path that made its memory.
        let before = (past > 0 && paths != states.paths).then(|| states.groups.clone());
        let extended =
            groups().zip(&mut states.groups).map(|((group, part), state)| group.extend(part.inputs(), state));
        let outs = extended.collect::<Result<Vec<_>>>();
        match (&outs, before) {
            (Err(_), Some(before)) => states.groups = before,
            _ => states.paths = paths,
        }
        outs
    }

    /// The name of a group's buffer among those of all.
    fn name(group: usize, name: &str) -> String {
        format!("heads.{group}.{name}")
    }

    /// Keeps the identity that belongs to the groups'.
    fn set_identity(&mut self) -> Result<()> {
        self.identity = Self::joined(self.groups.iter().map(|group| group.identity()).collect::<Result<_>>()?);
        Ok(())
    }
}

/// Returns the outputs of the groups. A group sees its own heads alone, so an error about a number
/// in them would name another head: what is wrong with the inputs of all is said first.
fn named_in(inputs: Inputs<'_>, outs: Result<Vec<Tensor>>) -> Result<Vec<Tensor>> {
    outs.or_else(|error| inputs.check_finite().and(Err(error)))
}

impl Attention for ByHead {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        let parts = self.divide(inputs, inputs.sizes_under(mask)?)?;
        let outs = self.groups.iter().zip(&parts).map(|(group, part)| group.forward(part.inputs(), mask));
        Self::join(&named_in(inputs, outs.collect())?)
    }

    fn forward_segment(&self, inputs: Inputs<'_>, segment: &Segment) -> Result<Tensor> {
        let parts = self.divide(inputs, inputs.sizes_under(&Mask::causal())?)?;
        let outs = self.groups.iter().zip(&parts).map(|(group, part)| group.forward_segment(part.inputs(), segment));
        Self::join(&named_in(inputs, outs.collect())?)
    }

    fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
        let sizes = inputs.sizes()?;
        let parts = self.divide(inputs, sizes)?;
        inputs.check_finite()?;
        if inputs.q.dim(2)? == 0 && state.tokens() == 0 {
            // No tokens leave a new state as it is, which any attention can still go on from.
            return self.forward(inputs, &Mask::causal());
        }
        let (n, past) = (self.groups.len(), state.tokens());
        let begin = || States { groups: vec![State::new(); n], paths: Vec::new() };
        let mut states = state.take::<States>()?.unwrap_or_else(begin);
        let outs = self.extend_groups(&parts, past, &mut states);
        // Before the first token there was nothing to put back.
        if outs.is_ok() || past > 0 {
            state.set(states);
        }
        Self::join(&outs?)
    }

    fn identity(&self) -> Result<Identity> {
        let now = self.groups.iter().map(|group| group.identity()).collect::<Result<Vec<_>>>()?;
        Ok(if now == self.identity.0 { self.identity.1.clone() } else { Self::joined(now).1 })
    }

    fn path(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Path> {
        let parts = self.divide(inputs, inputs.sizes_under(mask)?)?;
        let mut paths = self.groups.iter().zip(&parts).map(|(group, part)| group.path(part.inputs(), mask));
        let Some(first) = paths.next() else { bail!("attention by head: there is no attention") };
        paths.try_fold(first?, |slowest, path| Ok(slowest.slower(path?)))
    }

    fn buffers(&self) -> Vec<(String, Tensor)> {
        let named = |(n, group): (usize, &dyn Attention)| {
            group.buffers().into_iter().map(move |(name, tensor)| (Self::name(n, &name), tensor))
        };
        self.groups().enumerate().flat_map(named).collect()
    }

    fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        let before = self.buffers();
        let mut groups = self.groups.iter_mut().enumerate();
        let loaded = groups.try_for_each(|(n, group)| group.load_buffers(&|name| get(&Self::name(n, name))));
        if let Err(error) = loaded {
            // Groups before the one that refused its buffers take their own again.
            let own = |name: &str| before.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor.clone());
            for (n, group) in self.groups.iter_mut().enumerate() {
                group.load_buffers(&|name| own(&Self::name(n, name)))?;
            }
            return Err(error);
        }
        self.set_identity()
    }

    fn trained_buffers(&self) -> Vec<String> {
        let named = |(n, group): (usize, &dyn Attention)| {
            group.trained_buffers().into_iter().map(move |name| Self::name(n, &name))
        };
        self.groups().enumerate().flat_map(named).collect()
    }

    fn key_heads_of(&self, buffer: &str, key_heads: usize) -> usize {
        let of_group = key_heads / self.groups.len();
        let named = |(n, group): (usize, &dyn Attention)| {
            let name = buffer.strip_prefix(&Self::name(n, ""))?;
            Some(group.key_heads_of(name, of_group))
        };
        self.groups().enumerate().find_map(named).unwrap_or(of_group)
    }

    fn redraw(&mut self, seed: u64) -> Result<()> {
        for (n, group) in self.groups.iter_mut().enumerate() {
            group.redraw(derive_seed(seed, n as u64))?;
        }
        self.set_identity()
    }
}

/// The states of the groups.
#[derive(Clone, Debug)]
struct States {
    groups: Vec<State>,
    /// The paths by which the groups came here; empty before the first token and after loading.
    paths: Vec<Path>,
}

impl Memory for States {
    fn kind() -> &'static str {
        "a state for each group of heads"
    }

    fn bytes(&self) -> usize {
        self.groups.iter().map(State::bytes).sum()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        let record = StateRecord::new().with_field("groups", self.groups.len());
        self.groups
            .iter()
            .enumerate()
            .try_fold(record, |record, (n, state)| Ok(record.with_nested(&format!("heads{n}"), state.record()?)))
    }

    fn load(record: &StateRecord) -> Result<Self> {
        let groups: usize = record.field("groups")?;
        // A number from a damaged file may be absurd, and each group has fields of its own.
        if groups > record.fields.len() {
            bail!("saved state: it is of {groups} groups of heads, which it does not hold; the file is damaged");
        }
        let state = |n: usize| State::from_record(&record.nested(&format!("heads{n}")));
        Ok(Self { groups: (0..groups).map(state).collect::<Result<_>>()?, paths: Vec::new() })
    }
}
