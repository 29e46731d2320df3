//! Ranks with cards, whose numbers go from card to card by NCCL.
//!
//! MPI starts the processes, carries all that lies in the memory of processors, and brings the
//! ranks together: rank 0 makes the identifier by which NCCL's ranks find each other, and
//! broadcasts it.
//!
//! NCCL has no deadlines, and each of its calls may wait for other ranks, its start most of all. So
//! a thread of their own makes the calls, and whoever asks for one waits for that thread as long as
//! the deadline allows. NCCL is never ended: that is another collective call, and the end of the
//! process gives everything back.

mod library;
#[cfg(test)]
mod tests;

use std::{
    ffi::{c_int, c_void},
    fmt, ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use library::{BYTES, F32, Functions, Handle, SUM, UniqueId};

use crate::{CardMemory, Cards, Error, Ranks, Reduction, Result, agree};

/// How often NCCL is asked whether a connection has failed.
const PAUSE: Duration = Duration::from_millis(100);

/// The card of this process, as the framework that computes on it knows it.
pub trait Card: fmt::Debug + Send + Sync {
    /// Makes this the card of the calling thread.
    ///
    /// # Errors
    /// In words, if CUDA refuses.
    fn bind(&self) -> std::result::Result<(), String>;

    /// The stream on which the framework queues its work, a `cudaStream_t`.
    fn stream(&self) -> u64;

    /// Waits until all work is done that the calling thread has queued on the stream.
    ///
    /// # Errors
    /// In words, if the card failed.
    fn wait(&self) -> std::result::Result<(), String>;
}

/// `Nccl` is this process among several that have a card each. What [`Ranks`] promises it does as
/// the ranks that it is made over; [`Ranks::cards`] are the calls on the cards' memory.
///
/// It has never run on a card: its tests call functions that stand in for NCCL's.
pub struct Nccl {
    host: Arc<dyn Ranks>,
    card: Arc<dyn Card>,
    functions: Functions,
    communicator: Communicator,
    jobs: Mutex<Sender<(Job, Sender<Outcome>)>>,
    deadline: Mutex<Duration>,
    /// Whether a call has failed: ranks are then out of step.
    broken: AtomicBool,
}

type Outcome = std::result::Result<(), String>;

/// A call of NCCL, made on the thread that makes them all.
type Job = Box<dyn FnOnce(&Functions, &Communicator) -> Outcome + Send>;

/// NCCL's handle.
#[derive(Clone, Copy)]
struct Communicator(Handle);

// SAFETY: one thread makes the calls; others only ask for errors, which NCCL allows at any time.
unsafe impl Send for Communicator {}
// SAFETY: threads that share it do no more than that.
unsafe impl Sync for Communicator {}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl {{ rank: {}, size: {}, card: {:?} }}", self.rank(), self.size(), self.card)
    }
}

impl Nccl {
    /// Connects the cards of `host`'s ranks, one each. All ranks call it, and all fail if one does.
    ///
    /// # Errors
    /// In words, if a rank finds no NCCL, two ranks have one card, or the cards are not connected
    /// before the deadline.
    pub fn over(host: Arc<dyn Ranks>, card: Arc<dyn Card>, deadline: Duration) -> std::result::Result<Self, String> {
        Self::with(Functions::open(), host, card, deadline)
    }

    fn with(
        functions: std::result::Result<Functions, String>,
        host: Arc<dyn Ranks>,
        card: Arc<dyn Card>,
        deadline: Duration,
    ) -> std::result::Result<Self, String> {
        let mut id = UniqueId([0; 128]);
        let made = functions.and_then(|functions| {
            card.bind()?;
            if host.rank() == 0 {
                // SAFETY: NCCL writes the 128 bytes.
                functions.check(unsafe { (functions.unique_id)(&mut id) })?;
            }
            Ok(functions)
        });
        let failure = made.as_ref().err().map(String::as_str);
        let functions = match (agree(&*host, failure).map_err(|error| error.to_string())?, made) {
            (None, Ok(functions)) => functions,
            (Some(failed), _) => return Err(failed.to_string()),
            (None, Err(text)) => return Err(text),
        };
        host.broadcast(0, &mut id.0).map_err(|error| error.to_string())?;
        let (rank, size) = (host.rank(), host.size());
        let (started, communicator) = mpsc::channel();
        let (jobs, asked) = mpsc::channel();
        let of_thread = Arc::clone(&card);
        let work = move || serve(&functions, &*of_thread, id, [size, rank], &started, &asked);
        thread::Builder::new().name("nccl".into()).spawn(work).map_err(|error| error.to_string())?;
        // A rank that fails at once waits for the others below. The deadline must last until they
        // have given up here, or its cause would be lost.
        let patience = deadline / 2;
        let connected = communicator.recv_timeout(patience).unwrap_or_else(|_| {
            Err(format!(
                "the cards are not connected within {} s: another rank is gone or stuck",
                patience.as_secs_f64()
            ))
        });
        let failure = connected.as_ref().err().map(String::as_str);
        match (agree(&*host, failure).map_err(|error| error.to_string())?, connected) {
            (None, Ok(communicator)) => Ok(Self {
                host,
                card,
                functions,
                communicator,
                jobs: Mutex::new(jobs),
                deadline: Mutex::new(deadline),
                broken: AtomicBool::new(false),
            }),
            (Some(failed), _) => Err(format!("{failed}; each process needs a card of its own")),
            (None, Err(text)) => Err(text),
        }
    }

    fn failed(&self, call: &str, bytes: usize, cause: String) -> Error {
        self.broken.store(true, Ordering::Relaxed);
        Error { rank: self.rank(), size: self.size(), call: call.into(), bytes, cause }
    }

    /// Lets the thread make a call, and waits until the card has done it.
    fn call(&self, call: &str, bytes: usize, job: Job) -> Result<()> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if self.broken.load(Ordering::Relaxed) {
            return Err(self.failed(call, bytes, "a call before it failed".into()));
        }
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        // The handle of the stream may name another stream in each thread (CU_STREAM_PER_THREAD,
        // which Candle uses), and these do not wait for each other.
        self.card.wait().map_err(|cause| self.failed(call, bytes, cause))?;
        let (done, outcome) = mpsc::channel();
        let gone = "the thread that calls NCCL has ended";
        if jobs.send((job, done)).is_err() {
            return Err(self.failed(call, bytes, gone.into()));
        }
        let begun = Instant::now();
        loop {
            let Some(left) = deadline.checked_sub(begun.elapsed()) else {
                let cause = format!("no answer within {} s: another rank is gone or stuck", deadline.as_secs_f64());
                return Err(self.failed(call, bytes, cause));
            };
            match outcome.recv_timeout(left.min(PAUSE)) {
                Ok(outcome) => return outcome.map_err(|cause| self.failed(call, bytes, cause)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failed(call, bytes, gone.into())),
                Err(RecvTimeoutError::Timeout) => {
                    let mut status = 0;
                    // SAFETY: the handle is NCCL's, and this call may be made beside others.
                    let asked = unsafe { (self.functions.async_error)(self.communicator.0, &mut status) };
                    let outcome = self.functions.check(asked).and_then(|()| self.functions.check(status));
                    outcome.map_err(|cause| self.failed(call, bytes, cause))?;
                }
            }
        }
    }
}

/// Connects the cards, then makes the calls that it is asked for, until nobody can ask.
fn serve(
    functions: &Functions,
    card: &dyn Card,
    id: UniqueId,
    [size, rank]: [usize; 2],
    started: &Sender<std::result::Result<Communicator, String>>,
    asked: &Receiver<(Job, Sender<Outcome>)>,
) {
    let mut handle = ptr::null_mut();
    let connected = card.bind().and_then(|()| {
        // SAFETY: NCCL writes the handle, and the card is that of this thread.
        functions.check(unsafe { (functions.init)(&mut handle, size as c_int, id, rank as c_int) })
    });
    // A failure to send means that nobody waits for the outcome any more, here and below.
    let communicator = Communicator(handle);
    let _ = started.send(connected.map(|()| communicator));
    while let Ok((job, done)) = asked.recv() {
        let _ = done.send(job(functions, &communicator).and_then(|()| card.wait()));
    }
}

impl Cards for Nccl {
    // SAFETY: the caller keeps the contract of `Cards::sum`, which this passes on to NCCL.
    unsafe fn sum(&self, numbers: CardMemory) -> Result<()> {
        let CardMemory { address, bytes } = numbers;
        let (stream, count) = (self.card.stream(), bytes / size_of::<f32>());
        let job = move |functions: &Functions, communicator: &Communicator| {
            let (at, stream) = (address as *mut c_void, stream as *mut c_void);
            // SAFETY: the caller says that the memory is there and nothing else uses it; NCCL sums
            // in place where both addresses are one.
            functions.check(unsafe { (functions.all_reduce)(at, at, count, F32, SUM, communicator.0, stream) })
        };
        self.call("sum on cards", bytes, Box::new(job))
    }

    // SAFETY: the caller keeps the contract of `Cards::exchange`, which this passes on to NCCL.
    unsafe fn exchange(&self, send: Option<(usize, CardMemory)>, receive: Option<(usize, CardMemory)>) -> Result<()> {
        let others = [send.map(|(to, _)| to), receive.map(|(from, _)| from)];
        let what = match others {
            [None, None] => return Ok(()),
            [Some(to), None] => format!("exchange on cards (send to rank {to})"),
            [None, Some(from)] => format!("exchange on cards (receive from rank {from})"),
            [Some(to), Some(from)] => format!("exchange on cards (send to rank {to}, receive from rank {from})"),
        };
        let bytes = send.map_or(0, |(_, memory)| memory.bytes).max(receive.map_or(0, |(_, memory)| memory.bytes));
        let stream = self.card.stream();
        let job = move |functions: &Functions, communicator: &Communicator| {
            let stream = stream as *mut c_void;
            // SAFETY: the caller says that the memory is there and nothing else uses it. A group
            // that was started is ended, whatever happened in it.
            unsafe {
                functions.check((functions.group_start)())?;
                let sent = send.map_or(0, |(to, CardMemory { address, bytes })| {
                    (functions.send)(address as *const c_void, bytes, BYTES, to as c_int, communicator.0, stream)
                });
                let received = receive.map_or(0, |(from, CardMemory { address, bytes })| {
                    (functions.receive)(address as *mut c_void, bytes, BYTES, from as c_int, communicator.0, stream)
                });
                let ended = (functions.group_end)();
                [sent, received, ended].into_iter().try_for_each(|status| functions.check(status))
            }
        };
        self.call(&what, bytes, Box::new(job))
    }
}

impl Ranks for Nccl {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    fn all_reduce(&self, numbers: &mut [f32], reduction: Reduction) -> Result<()> {
        self.host.all_reduce(numbers, reduction)
    }

    fn all_gather(&self, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.host.all_gather(part)
    }

    fn broadcast(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        self.host.broadcast(from, bytes)
    }

    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>) -> Result<()> {
        self.host.exchange(send, receive)
    }

    fn barrier(&self) -> Result<()> {
        self.host.barrier()
    }

    fn split(&self, group: usize) -> Result<Arc<dyn Ranks>> {
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        let host = self.host.split(group)?;
        let split = Self::with(Ok(self.functions), host, Arc::clone(&self.card), deadline);
        Ok(Arc::new(split.map_err(|cause| self.failed("split", 0, cause))?))
    }

    fn set_deadline(&self, deadline: Duration) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
        self.host.set_deadline(deadline);
    }

    fn abort(&self) {
        self.host.abort();
    }

    fn cards(&self) -> Option<&dyn Cards> {
        Some(self)
    }
}
