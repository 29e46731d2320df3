//! The keys and values that attention with a window remembers as they are: those of the sinks, and
//! those of the last tokens.

use candle_core::{Result, Tensor, bail};

use super::{
    Inputs, Segment, StateRecord, gates,
    state::{MOST_TOKENS, bytes_of},
};
use crate::ops;

/// Refuses a window without tokens, and one that no text fills.
pub(super) fn check_window(window: usize) -> Result<()> {
    if window == 0 {
        bail!("window is 0; it must be at least 1, the query's own token");
    }
    if window > MOST_TOKENS {
        bail!("window is {window}; it must be at most {MOST_TOKENS}, which no text has");
    }
    Ok(())
}

/// Refuses more sinks than any text has tokens.
pub(super) fn check_sinks(sinks: usize) -> Result<()> {
    if sinks > MOST_TOKENS {
        bail!("sinks are {sinks}; they must be at most {MOST_TOKENS}, which no text has");
    }
    Ok(())
}

/// `Exact` holds keys and values that later queries see exactly. Sinks, the first tokens of a
/// sequence, come first; tokens between them and the last ones may be missing, which leaves the
/// positions within a window as they were.
#[derive(Clone, Debug)]
pub(super) struct Exact {
    /// `(B, Hkv, T, D)`.
    pub(super) keys: Tensor,
    /// `(B, Hkv, T, Dv)`.
    pub(super) values: Tensor,
    /// `(B, Hkv, T)`; `None` if no token had a gate.
    pub(super) gates: Option<Tensor>,
    /// The sum of the gates of the tokens that are missing, `(B, Hkv, 1)`, which the sinks are
    /// forgotten by; `None` if there are no gates or no sinks.
    forgotten: Option<Tensor>,
}

impl Exact {
    /// These keys, values and gates of `inputs`, after those of `past`.
    pub(super) fn append(past: Option<&Self>, inputs: Inputs<'_>) -> Result<Self> {
        let (mut keys, mut values) = (inputs.k.contiguous()?, inputs.v.contiguous()?);
        let kept = past.map_or(Ok(0), Self::len)?;
        let gates = gates::append(past.and_then(|past| past.gates.as_ref()), kept, inputs.gates, &keys)?;
        if let Some(past) = past {
            keys = Tensor::cat(&[&past.keys, &keys], 2)?;
            values = Tensor::cat(&[&past.values, &values], 2)?;
        }
        Ok(Self { keys, values, gates, forgotten: past.and_then(|past| past.forgotten.clone()) })
    }

    /// The last `count` tokens before a segment, fewer near the beginning, and those of `inputs`
    /// after them. Gradients go to where they are from.
    pub(super) fn in_segment(inputs: Inputs<'_>, segment: &Segment, count: usize) -> Result<Self> {
        let with_earlier = |x: &Tensor| match segment.tokens_before(x, 2, count)? {
            Some(before) => ops::cat(&[&before, x], 2),
            None => Ok(x.clone()),
        };
        let (keys, values) = (with_earlier(inputs.k)?, with_earlier(inputs.v)?);
        Ok(Self { keys, values, gates: inputs.gates.map(with_earlier).transpose()?, forgotten: None })
    }

    /// How many tokens there are.
    pub(super) fn len(&self) -> Result<usize> {
        self.keys.dim(2)
    }

    /// Returns the gates of the held tokens, with the sum of the gates of the missing tokens added
    /// to the first gate after the sinks. Sums of these gates from a sink up to a later token are
    /// then what they would be if no token were missing.
    pub(super) fn gates_with_missing(&self, sinks: usize) -> Result<Option<Tensor>> {
        let (Some(gates), Some(forgotten)) = (&self.gates, &self.forgotten) else { return Ok(self.gates.clone()) };
        let first = (gates.narrow(2, sinks, 1)? + forgotten)?.maximum(gates::LOWEST)?;
        let after = gates.narrow(2, sinks + 1, self.len()? - sinks - 1)?;
        Tensor::cat(&[&gates.narrow(2, 0, sinks)?, &first, &after], 2).map(Some)
    }

    /// Refuses more than `most` tokens, which only a file that was damaged makes an attention
    /// remember.
    pub(super) fn require_at_most(&self, most: usize) -> Result<()> {
        let held = self.len()?;
        if held > most {
            bail!("saved state: it holds the keys of {held} tokens, where the window and sinks have {most} tokens");
        }
        Ok(())
    }

    /// Keeps the first `sinks` tokens, and the last `last` of the others.
    pub(super) fn keep(&self, sinks: usize, last: usize) -> Result<Self> {
        let all = self.len()?;
        let missing = all.saturating_sub(sinks + last);
        let keep = |t: &Tensor| -> Result<Tensor> {
            if missing == 0 || sinks == 0 {
                let kept = t.narrow(2, missing, all - missing)?;
                // A GPU refuses memory for no numbers, so nothing is copied where nothing is kept.
                return if missing == all { Ok(kept) } else { kept.contiguous() };
            }
            Tensor::cat(&[&t.narrow(2, 0, sinks)?, &t.narrow(2, all - last, last)?], 2)
        };
        let mut forgotten = self.forgotten.clone();
        if let (Some(gates), 1.., 1..) = (&self.gates, sinks, missing) {
            let sum = gates.narrow(2, sinks, missing)?.sum_keepdim(2)?;
            forgotten = Some(match forgotten {
                Some(before) => (before + sum)?,
                None => sum,
            });
        }
        let gates = self.gates.as_ref().map(keep).transpose()?;
        Ok(Self { keys: keep(&self.keys)?, values: keep(&self.values)?, gates, forgotten })
    }

    pub(super) fn bytes(&self) -> usize {
        let gates = self.gates.iter().chain(&self.forgotten).map(bytes_of).sum::<usize>();
        bytes_of(&self.keys) + bytes_of(&self.values) + gates
    }

    pub(super) fn save(&self) -> StateRecord {
        let record = StateRecord::new().with_tensor("keys", self.keys.clone());
        let record = record.with_tensor("values", self.values.clone()).with_gates(self.gates.as_ref());
        match &self.forgotten {
            Some(forgotten) => record.with_tensor("forgotten", forgotten.clone()),
            None => record,
        }
    }

    pub(super) fn load(record: &StateRecord) -> Result<Self> {
        let (keys, values) = (record.tensor("keys")?.clone(), record.tensor("values")?.clone());
        let ((b, h, w, _), (vb, vh, vw, _)) = (keys.dims4()?, values.dims4()?);
        if (b, h, w) != (vb, vh, vw) {
            bail!("saved state: keys {:?} and values {:?} do not belong together", keys.dims(), values.dims());
        }
        let forgotten = record.tensors.get("forgotten").cloned();
        if let Some(forgotten) = &forgotten
            && forgotten.dims() != [b, h, 1]
        {
            bail!(
                "saved state: keys {:?} and sums of gates {:?} do not belong together",
                keys.dims(),
                forgotten.dims()
            );
        }
        Ok(Self { gates: record.gates(&keys)?, keys, values, forgotten })
    }
}
