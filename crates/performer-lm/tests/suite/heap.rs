//! This module is the allocator of these tests: it counts the bytes that a thread holds, so that a
//! test sees what its own work takes while others run beside it.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

/// `Watched` is the system's allocator with a count for each thread.
pub(crate) struct Watched;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Counts bytes taken, or given back. A thread that ends has no counters any more.
fn count(bytes: isize) {
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        PEAK.try_with(|peak| peak.set(peak.get().max(live.get())))
    });
}

// SAFETY: every request goes to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize);
        count(-(layout.size() as isize));
        unsafe { System.realloc(place, layout, size) }
    }
}

/// Runs `work` and returns, with its result, the most bytes that this thread held at once beyond
/// those that it held before.
pub(crate) fn peak<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before) as usize)
}

#[test]
fn the_peak_is_of_this_thread() {
    let ((), bytes) = peak(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| std::hint::black_box(vec![1u8; 1 << 24]));
        });
        std::hint::black_box(vec![1u8; 1 << 20]);
        std::hint::black_box(vec![1u8; 1 << 20]);
    });
    assert!((1 << 20..1 << 21).contains(&bytes), "{bytes}");
}
