//! This module counts heap memory in the allocator.
//!
//! The memory that the system reports for a process lags behind, includes what the allocator keeps,
//! and is disturbed by everything else.

use std::{
    alloc::{GlobalAlloc, Layout},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// `Counting` is an allocator that counts the bytes it has handed out.
pub struct Counting<A>(pub A);

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    // The peak seldom moves; to write it each time would make threads wait for each other.
    if live > PEAK.load(Relaxed) {
        PEAK.fetch_max(live, Relaxed);
    }
}

fn shrink(bytes: usize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

// SAFETY: every request goes to the allocator inside, unchanged.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counting<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let place = unsafe { self.0.alloc(layout) };
        if !place.is_null() {
            grow(layout.size());
        }
        place
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let place = unsafe { self.0.alloc_zeroed(layout) };
        if !place.is_null() {
            grow(layout.size());
        }
        place
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        unsafe { self.0.dealloc(place, layout) };
        shrink(layout.size());
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let new = unsafe { self.0.realloc(place, layout, size) };
        if !new.is_null() {
            grow(size);
            shrink(layout.size());
        }
        new
    }
}

/// Runs `work` and returns, with its result, the most bytes in use at once beyond those in use
/// before; `None` where [`Counting`] is not the program's allocator. Allocations of other threads
/// count too.
pub fn extra<R>(work: impl FnOnce() -> R) -> (R, Option<u64>) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    (result, (before > 0).then(|| (PEAK.load(Relaxed) - before) as u64))
}

/// Returns the number of bytes in use; 0 where [`Counting`] is not the program's allocator.
pub fn live() -> u64 {
    LIVE.load(Relaxed) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::alloc::System;

    // There is one test only, because the counters belong to the process.
    #[test]
    fn counts_what_is_live_and_its_peak() {
        let heap = Counting(System);
        let layout = |size| Layout::from_size_align(size, 8).unwrap();
        // SAFETY: each allocation is freed once, with the layout it has.
        unsafe {
            let a = heap.alloc(layout(1000));
            assert_eq!(live(), 1000);
            let ((), peak) = extra(|| {
                let b = heap.alloc_zeroed(layout(500));
                let b = heap.realloc(b, layout(500), 300);
                heap.dealloc(b, layout(300));
                let c = heap.alloc(layout(600));
                heap.dealloc(c, layout(600));
            });
            // Old and new memory of a reallocation are counted together.
            assert_eq!((live(), peak), (1000, Some(800)));
            heap.dealloc(a, layout(1000));
            assert_eq!((live(), extra(|| ()).1), (0, None));
        }
    }
}
