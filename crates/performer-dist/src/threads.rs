//! Ranks that are threads of one process: for tests, and for trying an exchange where there is no
//! MPI.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{Error, Ranks, Reduction, Result};

/// Makes `size` ranks for as many threads, which wait for each other no longer than `deadline`.
pub fn threads(size: usize, deadline: Duration) -> Vec<Thread> {
    let post = Arc::new(Post { boxes: Mutex::default(), arrived: Condvar::new() });
    let members: Arc<[usize]> = (0..size).collect();
    let thread = |rank| Thread {
        rank,
        members: Arc::clone(&members),
        group: Arc::from([]),
        splits: Mutex::new(0),
        deadline: Mutex::new(deadline),
        present: Arc::new(Present { number: rank, post: Arc::clone(&post) }),
    };
    (0..size).map(thread).collect()
}

/// One rank of [`threads`]. When it is dropped, whoever waits for it is told at once.
pub struct Thread {
    rank: usize,
    /// The numbers of all ranks among all threads.
    members: Arc<[usize]>,
    /// For each split that led to these ranks, its count among all splits of the same ranks,
    /// and the group that was named. It keeps the messages of different groups apart.
    group: Arc<[(usize, usize)]>,
    /// The number of times that these ranks were split.
    splits: Mutex<usize>,
    deadline: Mutex<Duration>,
    present: Arc<Present>,
}

impl fmt::Debug for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Thread {{ rank: {}, size: {} }}", self.rank, self.members.len())
    }
}

/// A thread that is there; the ranks of all groups that it belongs to share it.
struct Present {
    number: usize,
    post: Arc<Post>,
}

impl Drop for Present {
    fn drop(&mut self) {
        self.post.open().gone.push(self.number);
        self.post.arrived.notify_all();
    }
}

/// What is on the way between threads.
struct Post {
    boxes: Mutex<Boxes>,
    arrived: Condvar,
}

impl Post {
    fn open(&self) -> MutexGuard<'_, Boxes> {
        locked(&self.boxes)
    }
}

/// Locks a mutex even after a thread panicked with it: what it guards is never left half changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A message's group, sender and receiver.
type Address = (Arc<[(usize, usize)]>, usize, usize);

#[derive(Default)]
struct Boxes {
    messages: HashMap<Address, VecDeque<Vec<u8>>>,
    /// The threads that have ended.
    gone: Vec<usize>,
}

impl Thread {
    fn error(&self, call: String, bytes: usize, cause: String) -> Error {
        Error { rank: self.rank, size: self.size(), call, bytes, cause }
    }

    fn address(&self, from: usize, to: usize) -> Address {
        (Arc::clone(&self.group), from, to)
    }

    fn send(&self, to: usize, bytes: &[u8]) {
        let post = &self.present.post;
        post.open().messages.entry(self.address(self.rank, to)).or_default().push_back(bytes.to_vec());
        post.arrived.notify_all();
    }

    /// Receives `bytes` bytes from rank `from`. The deadline counts from `begun`, when the call
    /// began.
    fn receive(&self, from: usize, call: &str, bytes: usize, begun: Instant) -> Result<Vec<u8>> {
        let (post, address) = (&self.present.post, self.address(from, self.rank));
        let deadline = *locked(&self.deadline);
        let mut boxes = post.open();
        let failed = |cause| Err(self.error(format!("{call} with rank {from}"), bytes, cause));
        loop {
            if let Some(message) = boxes.messages.get_mut(&address).and_then(VecDeque::pop_front) {
                if message.len() != bytes {
                    return failed(format!("it sent {} bytes", message.len()));
                }
                return Ok(message);
            }
            if boxes.gone.contains(&self.members[from]) {
                return failed("it has ended".into());
            }
            let Some(left) = deadline.checked_sub(begun.elapsed()) else {
                return failed(format!("no answer within {} s", deadline.as_secs_f64()));
            };
            boxes = post.arrived.wait_timeout(boxes, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn gather(&self, part: &[u8], call: &str) -> Result<Vec<Vec<u8>>> {
        (0..self.size()).filter(|&to| to != self.rank).for_each(|to| self.send(to, part));
        let begun = Instant::now();
        let from =
            |from| if from == self.rank { Ok(part.to_vec()) } else { self.receive(from, call, part.len(), begun) };
        (0..self.size()).map(from).collect()
    }
}

impl Ranks for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn all_reduce(&self, numbers: &mut [f32], reduction: Reduction) -> Result<()> {
        let parts = self.gather(bytemuck::cast_slice(numbers), "all_reduce")?;
        for (rank, part) in parts.iter().enumerate() {
            let part: Vec<f32> = bytemuck::pod_collect_to_vec(part);
            for (sum, x) in numbers.iter_mut().zip(part) {
                *sum = match reduction {
                    _ if rank == 0 => x,
                    Reduction::Sum => *sum + x,
                    Reduction::Max => sum.max(x),
                };
            }
        }
        Ok(())
    }

    fn all_gather(&self, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather(part, "all_gather")
    }

    fn broadcast(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        if self.rank == from {
            (0..self.size()).filter(|&to| to != from).for_each(|to| self.send(to, bytes));
        } else {
            bytes.copy_from_slice(&self.receive(from, "broadcast", bytes.len(), Instant::now())?);
        }
        Ok(())
    }

    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>) -> Result<()> {
        if let Some((to, bytes)) = send {
            self.send(to, bytes);
        }
        if let Some((from, bytes)) = receive {
            bytes.copy_from_slice(&self.receive(from, "exchange", bytes.len(), Instant::now())?);
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.gather(&[], "barrier").map(drop)
    }

    fn split(&self, group: usize) -> Result<Arc<dyn Ranks>> {
        let groups = self.gather(&group.to_le_bytes(), "split")?;
        let of_group: Vec<usize> = (0..self.size()).filter(|&i| groups[i] == group.to_le_bytes()).collect();
        let mut splits = locked(&self.splits);
        *splits += 1;
        Ok(Arc::new(Self {
            rank: of_group.iter().position(|&i| i == self.rank).unwrap_or_default(),
            members: of_group.iter().map(|&i| self.members[i]).collect(),
            group: self.group.iter().copied().chain([(*splits, group)]).collect(),
            splits: Mutex::new(0),
            deadline: Mutex::new(*locked(&self.deadline)),
            present: Arc::clone(&self.present),
        }))
    }

    fn set_deadline(&self, deadline: Duration) {
        *locked(&self.deadline) = deadline;
    }

    fn abort(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is received in a call has the deadline of the call, not one of its own.
    #[test]
    fn a_message_is_waited_for_from_the_beginning_of_its_call() {
        let ranks = threads(2, Duration::from_secs(20));
        let Some(begun) = Instant::now().checked_sub(Duration::from_secs(21)) else { return };
        let asked = Instant::now();
        let error = ranks[0].receive(1, "barrier", 0, begun).unwrap_err();
        assert!(error.to_string().contains("no answer within 20 s"), "{error}");
        assert!(asked.elapsed() < Duration::from_secs(10), "it has waited once more");
    }
}
