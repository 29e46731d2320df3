//! Ranks that are processes under MPI.
//!
//! Every call is one of MPI's that return at once, followed by a loop that asks whether it is done:
//! that is what gives each of them a deadline. MPI may write to the buffers of a call that is not
//! done, so a call has buffers of its own, and one that is given up leaves them to MPI for ever.

use std::{
    ffi::{c_char, c_int, c_void},
    fmt,
    mem::ManuallyDrop,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use mpi::{
    Threading,
    environment::Universe,
    ffi::{self, MPI_Comm, MPI_Request, MPI_Status},
    raw::AsRaw,
    topology::SimpleCommunicator,
};

use crate::{Error, Ranks, Reduction, Result};

/// Bytes of one message at most: MPI counts them in an `int`.
const PIECE: usize = 1 << 30;

/// How often MPI is asked without a pause whether a call is done: another process may be about to
/// answer.
const SPINS: u32 = 200;

/// The shortest and the longest pause between two questions. MPI moves large messages on while it
/// is asked, so the longest is short; but ranks may share a core, so there is one.
const PAUSES: (Duration, Duration) = (Duration::from_micros(10), Duration::from_micros(200));

/// The tag of all messages: their order tells them apart.
const TAG: c_int = 0;

/// `Mpi` is this process among those that an MPI launcher started.
pub struct Mpi {
    comm: Comm,
    rank: usize,
    size: usize,
    deadline: Mutex<Duration>,
    library: Arc<Library>,
}

/// A communicator: a number or a pointer, depending on the MPI library.
struct Comm(MPI_Comm);

// SAFETY: the handle is only passed to MPI: under the lock of `Library`, or by `abort`, which ends
// the process.
unsafe impl Send for Comm {}
// SAFETY: threads that share the handle also pass it to MPI under that lock alone.
unsafe impl Sync for Comm {}

/// MPI itself, which ends when the last ranks are dropped.
struct Library {
    universe: ManuallyDrop<Universe>,
    /// Whether a call has failed. Ranks are then out of step, and to end MPI, which is a collective
    /// call, could wait for ever.
    broken: AtomicBool,
    /// Held during a call: MPI was told that there is one at a time.
    turn: Mutex<()>,
}

impl Drop for Library {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The other ranks would wait for this one, and MPI's end would wait for them.
            // SAFETY: MPI runs; this call does not come back.
            unsafe { ffi::MPI_Abort(SimpleCommunicator::world().as_raw(), 1) };
        }
        if !*self.broken.get_mut() {
            // SAFETY: it is dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.universe) };
        }
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mpi {{ rank: {}, size: {} }}", self.rank, self.size)
    }
}

impl Mpi {
    /// Starts MPI in this process.
    ///
    /// # Errors
    /// In words, if MPI was started before or does not allow calls from several threads in turn.
    pub fn start(deadline: Duration) -> std::result::Result<Self, String> {
        let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Serialized) else {
            return Err("MPI was started already in this process".into());
        };
        if threading < Threading::Serialized {
            return Err(format!("this MPI library allows threads only as {threading:?}, and Serialized is needed"));
        }
        let library =
            Library { universe: ManuallyDrop::new(universe), broken: AtomicBool::new(false), turn: Mutex::new(()) };
        let comm = Comm(SimpleCommunicator::world().as_raw());
        Ok(Self::of(comm, deadline, Arc::new(library)))
    }

    /// The ranks of a communicator.
    fn of(comm: Comm, deadline: Duration, library: Arc<Library>) -> Self {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the handle is that of a communicator, and MPI runs as long as `library` lives.
        unsafe {
            // Errors come back as codes, instead of ending the process.
            ffi::MPI_Comm_set_errhandler(comm.0, ffi::RSMPI_ERRORS_RETURN);
            ffi::MPI_Comm_rank(comm.0, &mut rank);
            ffi::MPI_Comm_size(comm.0, &mut size);
        }
        let (rank, size) = (rank as usize, size as usize);
        Self { comm, rank, size, deadline: Mutex::new(deadline), library }
    }

    fn failed(&self, call: &str, bytes: usize, cause: String) -> Error {
        self.library.broken.store(true, Ordering::Relaxed);
        Error { rank: self.rank, size: self.size, call: call.into(), bytes, cause }
    }

    /// Waits for its turn to call MPI.
    fn turn(&self, call: &str, bytes: usize) -> Result<MutexGuard<'_, ()>> {
        let turn = self.library.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.library.broken.load(Ordering::Relaxed) {
            return Err(self.failed(call, bytes, "a call before it failed".into()));
        }
        Ok(turn)
    }

    /// Makes a call that `begin` begins: it is given the buffers, and fills the requests. Returns
    /// the buffers when the requests are done, and what MPI says of each request.
    fn call<B, const N: usize>(
        &self,
        call: &str,
        bytes: usize,
        mut buffers: B,
        begin: impl FnOnce(&mut B, &mut [MPI_Request; N]) -> c_int,
    ) -> Result<(B, [MPI_Status; N])> {
        let _turn = self.turn(call, bytes)?;
        // SAFETY: this reads a constant of the library.
        let mut requests = [unsafe { ffi::RSMPI_REQUEST_NULL }; N];
        let begun = begin(&mut buffers, &mut requests);
        let done = self.check(call, bytes, begun).and_then(|()| self.wait(call, bytes, &mut requests));
        match done {
            Ok(statuses) => Ok((buffers, statuses)),
            Err(error) => {
                // MPI may still read and write them.
                std::mem::forget(buffers);
                Err(error)
            }
        }
    }

    fn wait<const N: usize>(
        &self,
        call: &str,
        bytes: usize,
        requests: &mut [MPI_Request; N],
    ) -> Result<[MPI_Status; N]> {
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        let (begun, mut spins, mut pause) = (Instant::now(), 0, PAUSES.0);
        // SAFETY: a status is a struct of integers in C, which MPI fills.
        let mut statuses: [MPI_Status; N] = unsafe { std::mem::zeroed() };
        for (request, status) in requests.iter_mut().zip(&mut statuses) {
            loop {
                let mut done = 0;
                // SAFETY: the request is one of MPI's, or its null.
                let code = unsafe { ffi::MPI_Test(request, &mut done, status) };
                self.check(call, bytes, code)?;
                if done != 0 {
                    break;
                }
                if begun.elapsed() > deadline {
                    let cause = format!("no answer within {} s: another rank is gone or stuck", deadline.as_secs_f64());
                    return Err(self.failed(call, bytes, cause));
                }
                spins += 1;
                if spins < SPINS {
                    std::thread::yield_now();
                } else {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(PAUSES.1);
                }
            }
        }
        Ok(statuses)
    }

    fn check(&self, call: &str, bytes: usize, code: c_int) -> Result<()> {
        if code == ffi::MPI_SUCCESS as c_int {
            return Ok(());
        }
        let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize];
        let mut length = 0;
        // SAFETY: the buffer has the size that MPI asks for.
        unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
        text.truncate(length as usize);
        Err(self.failed(call, bytes, format!("MPI says: {}", String::from_utf8_lossy(&text))))
    }
}

impl Ranks for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&self, numbers: &mut [f32], reduction: Reduction) -> Result<()> {
        for piece in numbers.chunks_mut(PIECE / size_of::<f32>()) {
            let buffers = (piece.to_vec(), vec![0f32; piece.len()]);
            let ((_, reduced), _) =
                self.call("all_reduce", size_of_val(piece), buffers, |(from, to), requests: &mut [_; 1]| {
                    // SAFETY: both buffers have `from.len()` numbers and live until the call is
                    // done.
                    unsafe {
                        let operation = match reduction {
                            Reduction::Sum => ffi::RSMPI_SUM,
                            Reduction::Max => ffi::RSMPI_MAX,
                        };
                        let (send, receive) = (from.as_ptr().cast::<c_void>(), to.as_mut_ptr().cast::<c_void>());
                        let (count, kind) = (from.len() as c_int, ffi::RSMPI_FLOAT);
                        ffi::MPI_Iallreduce(send, receive, count, kind, operation, self.comm.0, &mut requests[0])
                    }
                })?;
            piece.copy_from_slice(&reduced);
        }
        Ok(())
    }

    fn all_gather(&self, part: &[u8]) -> Result<Vec<Vec<u8>>> {
        let n = part.len();
        if n == 0 {
            // OpenMPI refuses to gather nothing.
            self.barrier()?;
            return Ok(vec![Vec::new(); self.size]);
        }
        if n > PIECE {
            return Err(self.failed("all_gather", n, format!("a part has at most {PIECE} bytes")));
        }
        let buffers = (part.to_vec(), vec![0u8; n * self.size]);
        let ((_, all), _) = self.call("all_gather", n, buffers, |(from, to), requests: &mut [_; 1]| {
            // SAFETY: the buffers have `n` bytes and `n` for each rank, and live until the call is
            // done.
            unsafe {
                let (send, receive) = (from.as_ptr().cast::<c_void>(), to.as_mut_ptr().cast::<c_void>());
                let (count, kind) = (n as c_int, ffi::RSMPI_UINT8_T);
                ffi::MPI_Iallgather(send, count, kind, receive, count, kind, self.comm.0, &mut requests[0])
            }
        })?;
        Ok((0..self.size).map(|rank| all[rank * n..(rank + 1) * n].to_vec()).collect())
    }

    fn broadcast(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        for piece in bytes.chunks_mut(PIECE) {
            let what = format!("broadcast from rank {from}");
            let (copied, _) = self.call(&what, piece.len(), piece.to_vec(), |buffer, requests: &mut [_; 1]| {
                // SAFETY: the buffer has `buffer.len()` bytes and lives until the call is done.
                unsafe {
                    let (numbers, count) = (buffer.as_mut_ptr().cast::<c_void>(), buffer.len() as c_int);
                    ffi::MPI_Ibcast(numbers, count, ffi::RSMPI_UINT8_T, from as c_int, self.comm.0, &mut requests[0])
                }
            })?;
            piece.copy_from_slice(&copied);
        }
        Ok(())
    }

    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>) -> Result<()> {
        let others = [send.map(|(to, _)| to), receive.as_ref().map(|(from, _)| *from)];
        let what = match others {
            [None, None] => return Ok(()),
            [Some(to), None] => format!("exchange (send to rank {to})"),
            [None, Some(from)] => format!("exchange (receive from rank {from})"),
            [Some(to), Some(from)] => format!("exchange (send to rank {to}, receive from rank {from})"),
        };
        let bytes = [send.map_or(0, |(_, b)| b.len()), receive.as_ref().map_or(0, |(_, b)| b.len())];
        let buffers = (send.map_or(Vec::new(), |(_, bytes)| bytes.to_vec()), vec![0u8; bytes[1]]);
        if bytes.iter().any(|&n| n > PIECE) {
            return Err(self.failed(&what, bytes[0].max(bytes[1]), format!("a message has at most {PIECE} bytes")));
        }
        let ((_, received), [status, _]) =
            self.call(&what, bytes[0].max(bytes[1]), buffers, |(out, into), requests: &mut [_; 2]| {
                let mut code = ffi::MPI_SUCCESS as c_int;
                let [receiving, sending] = requests;
                // SAFETY: the buffers have as many bytes as is said and live until the call is
                // done.
                unsafe {
                    let kind = ffi::RSMPI_UINT8_T;
                    if let Some(from) = others[1] {
                        let (to, count) = (into.as_mut_ptr().cast::<c_void>(), into.len() as c_int);
                        code = ffi::MPI_Irecv(to, count, kind, from as c_int, TAG, self.comm.0, receiving);
                    }
                    if let (Some(to), true) = (others[0], code == ffi::MPI_SUCCESS as c_int) {
                        let (from, count) = (out.as_ptr().cast::<c_void>(), out.len() as c_int);
                        code = ffi::MPI_Isend(from, count, kind, to as c_int, TAG, self.comm.0, sending);
                    }
                }
                code
            })?;
        if let Some((_, bytes)) = receive {
            // MPI takes a message that is shorter than its buffer for a good one.
            let mut sent = 0;
            // SAFETY: the status is that of the request that has received.
            let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut sent) };
            self.check(&what, bytes.len(), code)?;
            if sent as usize != bytes.len() {
                return Err(self.failed(&what, bytes.len(), format!("it sent {sent} bytes")));
            }
            bytes.copy_from_slice(&received);
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        let done = self.call("barrier", 0, (), |(), requests: &mut [_; 1]| {
            // SAFETY: there is no buffer.
            unsafe { ffi::MPI_Ibarrier(self.comm.0, &mut requests[0]) }
        });
        done.map(drop)
    }

    fn split(&self, group: usize) -> Result<Arc<dyn Ranks>> {
        let Ok(color) = c_int::try_from(group) else {
            return Err(self.failed(
                "split",
                0,
                format!("MPI numbers groups up to {}, and this one is {group}", c_int::MAX),
            ));
        };
        // MPI has no split with a deadline; after this all ranks are there.
        self.barrier()?;
        let _turn = self.turn("split", 0)?;
        // SAFETY: the handle that MPI writes is used after its code was checked.
        let comm = unsafe {
            let mut comm = ffi::RSMPI_COMM_NULL;
            let code = ffi::MPI_Comm_split(self.comm.0, color, self.rank as c_int, &mut comm);
            self.check("split", 0, code)?;
            comm
        };
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::new(Self::of(Comm(comm), deadline, Arc::clone(&self.library))))
    }

    fn set_deadline(&self, deadline: Duration) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
    }

    fn abort(&self) {
        // SAFETY: MPI runs; this call does not come back.
        unsafe { ffi::MPI_Abort(self.comm.0, 1) };
    }
}
