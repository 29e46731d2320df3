//! Whole numbers and orders drawn at random: the same on every machine and in every version, since
//! tasks that are made of them must stay the same.

use rand_chacha::{ChaCha8Rng, rand_core::Rng};

/// Draws a number below `n`; its bias, at most `n / 2³²`, is negligible.
pub(crate) fn below(rng: &mut ChaCha8Rng, n: usize) -> usize {
    ((u64::from(rng.next_u32()) * n as u64) >> 32) as usize
}

/// Puts `items` in a random order (Fisher and Yates).
pub(crate) fn shuffle<T>(items: &mut [T], rng: &mut ChaCha8Rng) {
    for last in (1..items.len()).rev() {
        items.swap(last, below(rng, last + 1));
    }
}
