//! What every implementation of `Ranks` promises, checked by the ranks themselves: run by tests on
//! threads, and by the example `check` on processes.

use std::{sync::Arc, time::Duration};

use performer_dist::{
    Counted, Disagreement, Grid, Ranks, Reduction, Traffic, agree, agree_on, gather, share, sum_in_order, threads,
};

/// Checks all calls; every rank calls it.
pub(crate) fn check(ranks: &Arc<dyn Ranks>) {
    collectives(&**ranks);
    exchanges(&**ranks);
    sums(&**ranks);
    agreement(&**ranks);
    splits(ranks);
    traffic(ranks);
}

fn collectives(ranks: &dyn Ranks) {
    let (rank, size) = (ranks.rank(), ranks.size());
    assert!(rank < size);
    let mut numbers = [rank as f32, -(rank as f32), 1.0];
    ranks.all_reduce(&mut numbers, Reduction::Sum).unwrap();
    let all = (size * (size - 1) / 2) as f32;
    assert_eq!(numbers, [all, -all, size as f32]);
    let mut numbers = [rank as f32, -(rank as f32)];
    ranks.all_reduce(&mut numbers, Reduction::Max).unwrap();
    assert_eq!(numbers, [(size - 1) as f32, 0.0]);

    let parts = ranks.all_gather(&[rank as u8, 7]).unwrap();
    assert_eq!(parts, (0..size).map(|rank| vec![rank as u8, 7]).collect::<Vec<_>>());
    let parts = gather(ranks, &vec![rank as u8; rank * 3]).unwrap();
    assert_eq!(parts, (0..size).map(|rank| vec![rank as u8; rank * 3]).collect::<Vec<_>>());
    for from in 0..size {
        // Large enough not to be sent before somebody asks for it.
        let mut bytes = vec![rank as u8; 3_000_000];
        ranks.broadcast(from, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == from as u8));
    }
    ranks.barrier().unwrap();
}

/// Messages go round in a ring, small and large.
fn exchanges(ranks: &dyn Ranks) {
    let (rank, size) = (ranks.rank(), ranks.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    for length in if size > 1 { vec![0, 1, 1000, 5_000_000] } else { vec![] } {
        let mut received = vec![0; length];
        ranks.exchange(Some((next, &vec![rank as u8 + 1; length])), Some((previous, &mut received))).unwrap();
        assert!(received.iter().all(|&byte| byte == previous as u8 + 1));
    }
    // One way, from the first to the last.
    let mut received = [0; 3];
    let own = [rank as u8; 3];
    let send = (rank + 1 < size).then_some((rank + 1, &own[..]));
    let receive = (rank > 0).then_some((previous, &mut received[..]));
    ranks.exchange(send, receive).unwrap();
    assert!(rank == 0 || received == [previous as u8; 3]);
}

/// Sums over ranks have the bits of a sum in one place, for lengths around the size of a bucket.
fn sums(ranks: &dyn Ranks) {
    for (length, parts) in [(0, 4), (1, 1), (1000, 7), ((1 << 20) + 3, 5), (3 << 20, 3)] {
        let part = |i: usize| -> Vec<f32> {
            let number = |j: usize| ((i * 7919 + j * 104_729) % 1000) as f32 / 7.0 - 70.0;
            (0..length).map(|j| if j == 0 { -0.0 } else { number(j) }).collect()
        };
        let own: Vec<Vec<f32>> = share(parts, ranks.rank(), ranks.size()).map(part).collect();
        let sum = sum_in_order(ranks, length, &own).unwrap();
        let mut expected = part(0);
        for part in (1..parts).map(part) {
            expected.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&sum) == bits(&expected), "{length} numbers, {parts} parts");
    }
}

fn agreement(ranks: &dyn Ranks) {
    let (rank, size) = (ranks.rank(), ranks.size());
    assert_eq!(agree(ranks, None).unwrap(), None);
    let last = size - 1;
    let failed = agree(ranks, (rank == last).then_some("no data")).unwrap();
    assert_eq!(failed, Some(Disagreement { rank: last, size, text: "no data".into() }));
    let differs = |first: &str, other: &str| format!("{other} and not {first}");
    assert_eq!(agree_on(ranks, "same", differs).unwrap(), None);
    let other = agree_on(ranks, if rank == 0 || rank < last { "a" } else { "bcd" }, differs).unwrap();
    let expected = Disagreement { rank: last, size, text: "bcd and not a".into() };
    assert_eq!(other, (size > 1).then_some(expected));
}

/// Groups that are split off call each other, and not the others.
fn splits(ranks: &Arc<dyn Ranks>) {
    let (rank, size) = (ranks.rank(), ranks.size());
    let group = ranks.split(rank % 2).unwrap();
    assert_eq!((group.rank(), group.size()), (rank / 2, (size - rank % 2).div_ceil(2)));
    let members = group.all_gather(&[rank as u8]).unwrap();
    assert_eq!(members.concat(), (0..size).filter(|i| i % 2 == rank % 2).map(|i| i as u8).collect::<Vec<_>>());
    if size.is_multiple_of(2) {
        let grid = Grid::new(Arc::clone(ranks), 2).unwrap();
        assert_eq!((grid.sequence().rank(), grid.sequence().size()), (rank % 2, 2));
        let neighbours = grid.sequence().all_gather(&[rank as u8]).unwrap().concat();
        assert_eq!(neighbours, [(rank / 2 * 2) as u8, (rank / 2 * 2 + 1) as u8]);
        assert_eq!(grid.share(10), share(10, rank / 2, size / 2));
    }
    ranks.barrier().unwrap();
}

fn traffic(ranks: &Arc<dyn Ranks>) {
    let counted = Counted::new(Arc::clone(ranks));
    let others = ranks.size() - 1;
    counted.all_gather(&[0; 10]).unwrap();
    counted.all_gather(&[0; 5]).unwrap();
    let traffic = counted.take();
    assert_eq!(traffic["all_gather"], Traffic { calls: 2, bytes: 15 * others });
    assert!(counted.take().is_empty());
}

fn on_threads(size: usize, deadline: Duration, work: impl Fn(Arc<dyn Ranks>) + Sync) {
    std::thread::scope(|scope| {
        for thread in threads(size, deadline) {
            let work = &work;
            scope.spawn(move || work(Arc::new(thread)));
        }
    });
}

#[test]
fn threads_are_ranks() {
    for size in [1, 2, 3, 4, 7] {
        on_threads(size, Duration::from_secs(60), |ranks| check(&ranks));
    }
}

#[test]
fn one_process_is_a_rank() {
    check(&(Arc::new(performer_dist::One) as Arc<dyn Ranks>));
}

/// Whoever waits for a rank that has ended is told so at once, with its number.
#[test]
fn a_rank_that_ends_is_missed_at_once() {
    on_threads(3, Duration::from_secs(600), |ranks| {
        if ranks.rank() == 1 {
            return;
        }
        let error = ranks.all_gather(&[0; 8]).unwrap_err();
        assert_eq!((error.rank, error.size, error.bytes), (ranks.rank(), 3, 8));
        assert!(error.to_string().contains("all_gather with rank 1 of 8 bytes: it has ended"), "{error}");
    });
}

/// A rank that is there and does not take part is waited for until the deadline.
#[test]
fn a_rank_that_is_stuck_is_waited_for_until_the_deadline() {
    let stuck = std::sync::Barrier::new(2);
    on_threads(2, Duration::from_secs(600), |ranks| {
        if ranks.rank() == 0 {
            ranks.set_deadline(Duration::from_millis(20));
            let error = ranks.barrier().unwrap_err().to_string();
            assert!(error.contains("rank 0 of 2: barrier") && error.contains("no answer within 0.02 s"), "{error}");
        }
        stuck.wait();
    });
}

/// The deadline of a grid is that of all its ranks and of those that share a sequence.
#[test]
fn a_grid_sets_the_deadline_of_its_groups() {
    let stuck = std::sync::Barrier::new(2);
    on_threads(2, Duration::from_secs(600), |ranks| {
        let grid = Grid::new(ranks, 2).unwrap();
        let mut outcomes = Vec::new();
        if grid.world().rank() == 0 {
            grid.set_deadline(Duration::from_millis(20));
            outcomes = vec![grid.world().barrier(), grid.sequence().barrier()];
        }
        // The other rank waits for this one, whatever came of it.
        stuck.wait();
        for outcome in outcomes {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("no answer within 0.02 s"), "{error}");
        }
    });
}

/// A message of another length than the buffer is an error of whoever receives it.
#[test]
fn a_message_of_another_length_is_refused() {
    on_threads(2, Duration::from_secs(60), |ranks| {
        if ranks.rank() == 0 {
            ranks.exchange(Some((1, &[1, 2, 3])), None).unwrap();
        } else {
            let error = ranks.exchange(None, Some((0, &mut [0; 4]))).unwrap_err().to_string();
            assert!(error.contains("it sent 3 bytes"), "{error}");
        }
    });
}

#[test]
fn shares_cover_everything_in_order() {
    for (parts, all) in [(0, 3), (1, 3), (7, 3), (12, 4), (5, 1)] {
        let shares: Vec<_> = (0..all).map(|index| share(parts, index, all)).collect();
        assert_eq!(shares.iter().cloned().flatten().collect::<Vec<_>>(), (0..parts).collect::<Vec<_>>());
        assert!(shares.iter().all(|share| share.len().abs_diff(parts / all) <= 1));
    }
}
