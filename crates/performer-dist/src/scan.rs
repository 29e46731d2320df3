//! The exclusive scan: what lies before a rank, merged into one.

use crate::{Ranks, Result};

/// Merges what the ranks before this one have: rank `r` gets `own₀ ⊕ own₁ ⊕ … ⊕ own_{r−1}`, and the
/// first rank `None`. `merge(before, after)` computes `⊕`, which must be associative and keep the
/// number of bytes; it need not commute.
///
/// In round `k` a rank sends what it has merged so far to the rank `2^k` places on. So a rank sends
/// `⌈log₂ P⌉` messages of the size of its own part, where gathering the parts of all ranks would
/// take `P − 1`. (MPI has such a call, `MPI_Exscan`, but its operation would be a function of C
/// that knows nothing of shapes; NCCL has none.)
///
/// # Errors
/// If a rank does not take part before the deadline.
pub fn exclusive_scan(
    ranks: &dyn Ranks,
    own: Vec<u8>,
    mut merge: impl FnMut(&[u8], &[u8]) -> Vec<u8>,
) -> Result<Option<Vec<u8>>> {
    let (rank, size) = (ranks.rank(), ranks.size());
    let (mut sum, mut before) = (own, None::<Vec<u8>>);
    let mut reach = 1;
    while reach < size {
        let send = (rank + reach < size).then_some((rank + reach, &sum[..]));
        let mut received = vec![0; if rank >= reach { sum.len() } else { 0 }];
        let receive = (rank >= reach).then_some((rank.wrapping_sub(reach), &mut received[..]));
        ranks.exchange(send, receive)?;
        if rank >= reach {
            sum = merge(&received, &sum);
            before = Some(match before {
                None => received,
                Some(before) => merge(&received, &before),
            });
        }
        reach *= 2;
    }
    Ok(before)
}
