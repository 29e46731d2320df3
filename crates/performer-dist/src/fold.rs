//! Sums over the parts of a batch that several ranks compute, with the bits that one rank gives.

use crate::{Ranks, Result};

/// Numbers that are on the way between two ranks at a time.
const BUCKET: usize = 1 << 20;

/// Adds vectors of `length` numbers in the order of ranks and, within a rank, in the order of
/// `parts`: `((a₀ + a₁) + b₀) + b₁`. Rank 0 has at least one, as [`share`](crate::share) gives it;
/// later ranks may have none. All ranks get the sum.
///
/// The order of additions is that in which one rank with all parts adds them, so the sum has the
/// same bits on any number of ranks. It goes along the ranks in buckets: a rank adds its parts to
/// one bucket of what the rank before it has summed while the next is on its way. Every rank but
/// the last sends `length` numbers to the next, and the sum goes back to all by a broadcast.
///
/// # Errors
/// If a rank does not take part before the deadline.
///
/// # Panics
/// If a part has another length.
pub fn sum_in_order(ranks: &dyn Ranks, length: usize, parts: &[Vec<f32>]) -> Result<Vec<f32>> {
    let (rank, last) = (ranks.rank(), ranks.size() - 1);
    let mut sum = vec![0f32; length];
    let starts = |bucket: usize| (bucket * BUCKET).min(length);
    for bucket in 0..=length.div_ceil(BUCKET) {
        // The bucket before is sent while this one is received.
        let (done, rest) = sum.split_at_mut(starts(bucket));
        let (sent, rest) =
            (&done[starts(bucket.saturating_sub(1))..], &mut rest[..starts(bucket + 1) - starts(bucket)]);
        let send = (rank < last && !sent.is_empty()).then(|| (rank + 1, bytemuck::cast_slice(sent)));
        let receive = (rank > 0 && !rest.is_empty()).then(|| (rank - 1, bytemuck::cast_slice_mut(rest)));
        ranks.exchange(send, receive)?;
        let own = starts(bucket)..starts(bucket + 1);
        for (i, part) in parts.iter().enumerate() {
            assert_eq!(part.len(), length, "numbers of a part");
            let (sum, part) = (&mut sum[own.clone()], &part[own.clone()]);
            // A sum of zero and a number would turn −0 into +0.
            match (rank, i) {
                (0, 0) => sum.copy_from_slice(part),
                _ => sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part),
            }
        }
    }
    if last > 0 {
        ranks.broadcast(last, bytemuck::cast_slice_mut(&mut sum))?;
    }
    Ok(sum)
}
