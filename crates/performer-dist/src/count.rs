//! Counting what ranks send.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use crate::{Cards, Ranks, Reduction, Result};

/// What a rank has sent by one kind of call, such as `all_reduce`: what [`Counted::take`] returns
/// for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of calls.
    pub calls: usize,
    /// The bytes that this rank handed over for others, each counted as often as there are ranks
    /// that get it.
    pub bytes: usize,
}

/// `Counted` are ranks whose traffic is counted.
#[derive(Debug)]
pub struct Counted {
    inner: Arc<dyn Ranks>,
    traffic: Mutex<BTreeMap<&'static str, Traffic>>,
}

impl Counted {
    /// Counts what is sent through `ranks` from now on. What is sent through groups that they are
    /// split into, or from card to card, is not counted.
    pub fn new(ranks: Arc<dyn Ranks>) -> Self {
        Self { inner: ranks, traffic: Mutex::default() }
    }

    /// Returns what was sent since the last time, by the name of the call.
    pub fn take(&self) -> BTreeMap<&'static str, Traffic> {
        std::mem::take(&mut self.traffic.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, call: &'static str, bytes: usize) {
        let mut traffic = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        let of_call = traffic.entry(call).or_default();
        of_call.calls += 1;
        of_call.bytes += bytes;
    }

    fn others(&self) -> usize {
        self.inner.size() - 1
    }
}

impl Ranks for Counted {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn all_reduce(&self, numbers: &mut [f32], reduction: Reduction) -> Result<()> {
        self.add("all_reduce", self.others() * size_of_val(numbers));
        self.inner.all_reduce(numbers, reduction)
    }

    fn all_gather(&self, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.add("all_gather", self.others() * part.len());
        self.inner.all_gather(part)
    }

    fn broadcast(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        self.add("broadcast", if from == self.rank() { self.others() * bytes.len() } else { 0 });
        self.inner.broadcast(from, bytes)
    }

    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>) -> Result<()> {
        self.add("exchange", send.map_or(0, |(_, bytes)| bytes.len()));
        self.inner.exchange(send, receive)
    }

    fn barrier(&self) -> Result<()> {
        self.inner.barrier()
    }

    fn split(&self, group: usize) -> Result<Arc<dyn Ranks>> {
        self.inner.split(group)
    }

    fn set_deadline(&self, deadline: Duration) {
        self.inner.set_deadline(deadline);
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn cards(&self) -> Option<&dyn Cards> {
        self.inner.cards()
    }
}
