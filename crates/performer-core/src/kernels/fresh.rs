//! Memory for the outputs of a kernel, handed out in parts. Each part is cleared by the thread that
//! writes it, just before it does: memory cleared all at once would leave the caches and have to
//! come back.

use std::{
    mem::MaybeUninit,
    sync::atomic::{AtomicUsize, Ordering},
};

/// `Fresh` is memory for `len` numbers, handed out in parts that threads fill side by side.
pub(super) struct Fresh {
    values: Vec<f32>,
    len: usize,
    cleared: AtomicUsize,
    is_divided: bool,
}

impl Fresh {
    pub(super) fn new(len: usize) -> Self {
        Self { values: Vec::with_capacity(len), len, cleared: AtomicUsize::new(0), is_divided: false }
    }

    /// Divides the memory into parts of `size` numbers, the last of which may have fewer.
    ///
    /// # Panics
    /// If it was divided before: a part that is taken twice would count for one that is left out.
    pub(super) fn parts(&mut self, size: usize) -> Vec<Part<'_>> {
        assert!(!std::mem::replace(&mut self.is_divided, true), "the outputs of a kernel were divided twice");
        let Self { values, len, cleared, .. } = self;
        Part { rest: &mut values.spare_capacity_mut()[..*len], cleared }.parts(size)
    }

    /// Returns the numbers, once every part was taken.
    pub(super) fn finish(mut self) -> Vec<f32> {
        assert_eq!(self.cleared.into_inner(), self.len, "a kernel left a part of its outputs out");
        // SAFETY: the memory was divided once, into parts that do not overlap; the numbers taken
        // from one are initialised and leave it, and as many numbers were taken as there are.
        unsafe { self.values.set_len(self.len) };
        self.values
    }
}

/// `Part` is a part of the memory, taken as zeros.
pub(super) struct Part<'a> {
    rest: &'a mut [MaybeUninit<f32>],
    cleared: &'a AtomicUsize,
}

impl<'a> Part<'a> {
    /// The number of numbers not yet taken.
    pub(super) fn len(&self) -> usize {
        self.rest.len()
    }

    /// Divides the part into parts of `size` numbers, the last of which may have fewer.
    pub(super) fn parts(mut self, size: usize) -> Vec<Self> {
        let mut parts = Vec::with_capacity(self.len().div_ceil(size));
        while self.len() > 0 {
            parts.push(self.split(size.min(self.len())));
        }
        parts
    }

    /// Splits the first `n` numbers off.
    pub(super) fn split(&mut self, n: usize) -> Self {
        let first = self.rest.split_off_mut(..n).expect("no more numbers than there are");
        Self { rest: first, cleared: self.cleared }
    }

    /// Takes all of it.
    pub(super) fn take(mut self) -> &'a mut [f32] {
        self.take_last(self.len())
    }

    /// Takes the last `n` numbers.
    pub(super) fn take_last(&mut self, n: usize) -> &'a mut [f32] {
        let at = self.len().checked_sub(n).expect("no more numbers than there are");
        let last = self.rest.split_off_mut(at..).expect("within the part");
        last.fill(MaybeUninit::new(0.0));
        self.cleared.fetch_add(n, Ordering::Relaxed);
        // SAFETY: these numbers have just been initialised.
        unsafe { &mut *(std::ptr::from_mut(last) as *mut [f32]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_cleared_once() {
        // This memory has been used before.
        drop(vec![f32::NAN; 10]);
        let mut fresh = Fresh::new(10);
        let [mut a, b, c] = fresh.parts(4).try_into().unwrap_or_else(|_| panic!("three parts"));
        assert_eq!([a.len(), b.len(), c.len()], [4, 4, 2]);
        let first = a.split(1);
        for (part, number) in [(first.take(), 1.0), (a.take_last(1), 4.0), (b.take(), 5.0), (a.take(), 2.0)] {
            assert!(part.iter().all(|x| *x == 0.0));
            part.fill(number);
        }
        assert_eq!(c.take(), [0.0; 2]);
        assert_eq!(fresh.finish(), [1.0, 2.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0, 0.0, 0.0]);
        assert!(Fresh::new(0).finish().is_empty());
    }

    #[test]
    #[should_panic(expected = "divided twice")]
    fn no_part_is_taken_twice() {
        let mut fresh = Fresh::new(10);
        fresh.parts(5).swap_remove(0).take();
        fresh.parts(5).swap_remove(0).take();
    }

    #[test]
    #[should_panic(expected = "left a part of its outputs out")]
    fn what_was_not_taken_is_not_handed_out() {
        let mut fresh = Fresh::new(3);
        fresh.parts(3)[0].take_last(2);
        fresh.finish();
    }
}
