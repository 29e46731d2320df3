//! The keys and values that attention with a window remembers as they are: those of the sinks, and
//! those of the last tokens.
//!
//! While single tokens are decoded, each is written behind the others in place, into buffers with
//! room for as many again. Where there is no more room, the tokens that are remembered move to new
//! buffers. So a token is copied about twice, however long the window is.

use std::sync::Arc;

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
    /// forgotten by; `None` if no token is missing, or there are no gates or no sinks.
    forgotten: Option<Tensor>,
    /// The buffers that `keys` and `values` are a part of, if there is room for more tokens.
    room: Option<Room>,
}

/// `Room` is a pair of buffers of which other tensors show a part. Only the numbers behind `end` are
/// ever written, so what was shown before stays as it was.
#[derive(Clone, Debug)]
struct Room {
    /// `(B, Hkv, C, D)`, contiguous, for `C` tokens.
    keys: Tensor,
    /// `(B, Hkv, C, Dv)`, contiguous.
    values: Tensor,
    /// The place behind the last token.
    end: usize,
    /// Counts who holds the buffers: whoever shares them does not write.
    holders: Arc<()>,
}

impl Room {
    /// Buffers that begin with these tokens, and have room for as many again.
    fn beginning_with(keys: &Tensor, values: &Tensor) -> Result<Self> {
        let twice = |x: &Tensor| -> Result<Tensor> {
            let (b, heads, tokens, width) = x.dims4()?;
            let buffer = Tensor::zeros((b, heads, 2 * tokens, width), x.dtype(), x.device())?;
            buffer.slice_set(&x.contiguous()?, 2, 0)?;
            Ok(buffer)
        };
        Ok(Self { keys: twice(keys)?, values: twice(values)?, end: keys.dim(2)?, holders: Arc::default() })
    }

    /// Writes tokens behind the others.
    fn write(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.keys.slice_set(keys, 2, self.end)?;
        self.values.slice_set(values, 2, self.end)?;
        self.end += keys.dim(2)?;
        Ok(())
    }

    /// Shows the last `count` keys and values.
    fn last(&self, count: usize) -> Result<(Tensor, Tensor)> {
        let last = |buffer: &Tensor| buffer.narrow(2, self.end - count, count);
        Ok((last(&self.keys)?, last(&self.values)?))
    }
}

impl Exact {
    /// The keys, values and gates of `past`, followed by those of `inputs`.
    pub(super) fn append(past: Option<&Self>, inputs: Inputs<'_>) -> Result<Self> {
        let (keys, values) = (inputs.k.contiguous()?, inputs.v.contiguous()?);
        let kept = past.map_or(Ok(0), Self::len)?;
        let gates = gates::append(past.and_then(|past| past.gates.as_ref()), kept, inputs.gates, &keys)?;
        let Some(past) = past else { return Ok(Self { keys, values, gates, forgotten: None, room: None }) };
        let forgotten = past.forgotten.clone();
        // Longer pieces are rare, and gradients go through copies alone.
        let is_tracked = [&past.keys, &past.values, &keys, &values].into_iter().any(Tensor::track_op);
        if keys.dim(2)? > kept || is_tracked {
            let (keys, values) = (Tensor::cat(&[&past.keys, &keys], 2)?, Tensor::cat(&[&past.values, &values], 2)?);
            return Ok(Self { keys, values, gates, forgotten, room: None });
        }
        let count = kept + keys.dim(2)?;
        let mut room = match &past.room {
            Some(room) if Arc::strong_count(&room.holders) == 1 && room.end + keys.dim(2)? <= room.keys.dim(2)? => {
                room.clone()
            }
            _ => Room::beginning_with(&past.keys, &past.values)?,
        };
        room.write(&keys, &values)?;
        let (keys, values) = room.last(count)?;
        Ok(Self { keys, values, gates, forgotten, room: Some(room) })
    }

    /// The last `count` tokens before a segment, fewer near the beginning, and those of `inputs`
    /// after them. Gradients go to where they are from.
    pub(super) fn in_segment(inputs: Inputs<'_>, segment: &Segment, count: usize) -> Result<Self> {
        let with_earlier = |x: &Tensor| match segment.tokens_before(x, 2, count)? {
            Some(before) => ops::cat(&[&before, x], 2),
            None => Ok(x.clone()),
        };
        let (keys, values) = (with_earlier(inputs.k)?, with_earlier(inputs.v)?);
        Ok(Self { keys, values, gates: inputs.gates.map(with_earlier).transpose()?, forgotten: None, room: None })
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
        // Sinks must stand before the last tokens, so there they are copied.
        let room = self.room.clone().filter(|_| missing == 0 || sinks == 0);
        let keep_of = |t: &Tensor, in_room: bool| -> Result<Tensor> {
            if missing == 0 || sinks == 0 {
                let kept = t.narrow(2, missing, all - missing)?;
                // A view of the caller's tensor would change with it, and hold all of its memory.
                // But a GPU refuses memory for no numbers, so there nothing is copied where nothing
                // is kept.
                let no_copy = in_room || (missing == all && !t.device().is_cpu());
                return if no_copy { Ok(kept) } else { kept.force_contiguous() };
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
        let gates = self.gates.as_ref().map(|gates| keep_of(gates, false)).transpose()?;
        let keep = |t: &Tensor| keep_of(t, room.is_some());
        Ok(Self { keys: keep(&self.keys)?, values: keep(&self.values)?, gates, forgotten, room })
    }

    /// The bytes of what is remembered; buffers have room for at most as much again.
    pub(super) fn bytes(&self) -> usize {
        let gates = self.gates.iter().chain(&self.forgotten).map(bytes_of).sum::<usize>();
        bytes_of(&self.keys) + bytes_of(&self.values) + gates
    }

    pub(super) fn save(&self) -> Result<StateRecord> {
        // What is made contiguous so does not hold whole buffers, as a copy of a view does.
        let record = StateRecord::new().with_tensor("keys", self.keys.force_contiguous()?);
        let record = record.with_tensor("values", self.values.force_contiguous()?).with_gates(self.gates.as_ref());
        Ok(match &self.forgotten {
            Some(forgotten) => record.with_tensor("forgotten", forgotten.clone()),
            None => record,
        })
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
        Ok(Self { gates: record.gates(&keys)?, keys, values, forgotten, room: None })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// Tokens `from..to` of one head, each a key and a value of its own number.
    fn tokens(from: usize, to: usize) -> Result<Tensor> {
        Tensor::arange(from as f32, to as f32, &Device::Cpu)?.reshape((1, 1, to - from, 1))
    }

    /// Of a window of one token nothing is kept, and no view of the caller's tensors either.
    #[test]
    fn nothing_that_is_kept_holds_no_memory() -> Result<()> {
        let kept = append(None, &tokens(0, 5000)?)?.keep(0, 0)?;
        for t in [&kept.keys, &kept.values] {
            let (storage, _) = t.storage_and_layout();
            let candle_core::Storage::Cpu(storage) = &*storage else { panic!("on the CPU") };
            assert_eq!((t.elem_count(), storage.as_slice::<f32>()?.len()), (0, 0));
        }
        Ok(())
    }

    fn append(past: Option<&Exact>, x: &Tensor) -> Result<Exact> {
        Exact::append(past, Inputs::new(x, x, x))
    }

    fn numbers(x: &Tensor) -> Result<Vec<f32>> {
        x.flatten_all()?.to_vec1()
    }

    /// Single tokens go into buffers as long as there is room, and nobody else holds them. What is
    /// shown is what copies would hold.
    #[test]
    fn tokens_are_written_in_place() -> Result<()> {
        let mut exact = append(None, &tokens(0, 8)?)?;
        let (mut moves, mut buffers) = (0, None);
        for t in 8..100 {
            let seen = append(Some(&exact), &tokens(t, t + 1)?)?;
            assert_eq!(numbers(&seen.keys)?, numbers(&tokens(t - 8, t + 1)?)?);
            exact = seen.keep(0, 8)?;
            assert_eq!(numbers(&exact.values)?, numbers(&tokens(t - 7, t + 1)?)?);
            assert_eq!(exact.bytes(), 2 * 8 * 4);
            let now = exact.room.as_ref().map(|room| Arc::as_ptr(&room.holders));
            moves += usize::from(now != buffers);
            buffers = now;
        }
        // There is room for 8 tokens behind 8, so the buffers are new once in 8 tokens.
        assert_eq!(moves, (100usize - 8).div_ceil(8));
        Ok(())
    }

    /// Two that share buffers go on apart, and what was shown before stays as it was.
    #[test]
    fn shared_buffers_are_not_written() -> Result<()> {
        let exact = append(Some(&append(None, &tokens(0, 8)?)?), &tokens(8, 9)?)?;
        let copy = exact.clone();
        let one = append(Some(&exact), &tokens(50, 51)?)?;
        let other = append(Some(&copy), &tokens(70, 72)?)?;
        drop(exact);
        // The copy is now the only one that holds the first buffers.
        let last = append(Some(&copy), &tokens(90, 91)?)?;
        for (exact, from, to) in [(&one, 50, 51), (&other, 70, 72), (&last, 90, 91)] {
            let expected = Tensor::cat(&[tokens(0, 9)?, tokens(from, to)?], 2)?;
            assert_eq!(numbers(&exact.keys)?, numbers(&expected)?);
            assert_eq!(numbers(&exact.values)?, numbers(&expected)?);
        }
        assert_eq!(numbers(&copy.keys)?, numbers(&tokens(0, 9)?)?);
        Ok(())
    }

    /// A long piece, and one that gradients go through, are copied behind the others.
    #[test]
    fn other_pieces_are_copied() -> Result<()> {
        let exact = append(None, &tokens(0, 4)?)?;
        assert!(append(Some(&exact), &tokens(4, 9)?)?.room.is_none());
        let token = Var::from_tensor(&tokens(4, 5)?)?;
        let seen = append(Some(&exact), token.as_tensor())?;
        assert!(seen.room.is_none());
        let gradients = seen.keys.sum_all()?.backward()?;
        assert_eq!(gradients.get(&token).map(numbers).transpose()?, Some(vec![1.0]));
        Ok(())
    }
}
