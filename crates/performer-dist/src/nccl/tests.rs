//! Ranks are threads, cards are the memory of the processor, and functions of Rust stand in for
//! NCCL's: each waits for the others where NCCL's may.

use std::{
    collections::{HashMap, VecDeque},
    ffi::c_char,
    slice,
    sync::Condvar,
};

use super::library::Status;
use super::*;
use crate::threads;

/// A rank that receives so many bytes is told that its connection failed, and waits on.
const LOST: usize = 13;

struct Connected {
    id: u64,
    size: usize,
    rank: usize,
    lost: AtomicBool,
}

/// What is on the way, by the identifier of the ranks.
#[derive(Default)]
struct Between {
    identifiers: u64,
    here: HashMap<u64, usize>,
    messages: HashMap<(u64, usize, usize), VecDeque<Vec<u8>>>,
}

static BETWEEN: Mutex<Option<Between>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

/// Changes what is on the way, or waits until there is something to be had.
fn between<T>(mut change: impl FnMut(&mut Between) -> Option<T>) -> T {
    let mut between = BETWEEN.lock().unwrap();
    loop {
        if let Some(found) = change(between.get_or_insert_default()) {
            CHANGED.notify_all();
            return found;
        }
        between = CHANGED.wait(between).unwrap();
    }
}

fn of<'a>(handle: Handle) -> &'a Connected {
    // SAFETY: `init` made the handle, and nothing frees it.
    unsafe { &*handle.cast::<Connected>() }
}

fn post(from: &Connected, to: usize, bytes: &[u8]) {
    between(|between| {
        between.messages.entry((from.id, from.rank, to)).or_default().push_back(bytes.to_vec());
        Some(())
    });
}

fn fetch(at: &Connected, from: usize) -> Vec<u8> {
    between(|between| between.messages.get_mut(&(at.id, from, at.rank))?.pop_front())
}

// SAFETY: the caller gives a place for what is written, as to NCCL.
unsafe extern "C" fn unique_id(id: *mut UniqueId) -> Status {
    let number = between(|between| {
        between.identifiers += 1;
        Some(between.identifiers)
    });
    // SAFETY: the caller gives a place for an identifier, which nothing else uses meanwhile.
    unsafe { (&mut (*id).0)[..8].copy_from_slice(&number.to_le_bytes()) };
    0
}

// SAFETY: the caller gives a place for what is written, as to NCCL.
unsafe extern "C" fn init(handle: *mut Handle, size: c_int, id: UniqueId, rank: c_int) -> Status {
    let id = u64::from_le_bytes(id.0[..8].try_into().unwrap());
    between(|between| {
        *between.here.entry(id).or_default() += 1;
        Some(())
    });
    between(|between| (between.here[&id] == size as usize).then_some(()));
    let connected = Connected { id, size: size as usize, rank: rank as usize, lost: AtomicBool::new(false) };
    // SAFETY: the caller gives a place for a handle.
    unsafe { *handle = Box::into_raw(Box::new(connected)).cast() };
    0
}

// SAFETY: the caller gives a place for what is written, as to NCCL.
unsafe extern "C" fn async_error(handle: Handle, status: *mut Status) -> Status {
    // SAFETY: the caller gives a place for a status.
    unsafe { *status = if of(handle).lost.load(Ordering::Relaxed) { 6 } else { 0 } };
    0
}

// SAFETY: it touches no memory of the caller.
unsafe extern "C" fn error(status: Status) -> *const c_char {
    if status == 6 { c"remote process exited".as_ptr() } else { c"invalid usage".as_ptr() }
}

// SAFETY: it touches no memory of the caller.
unsafe extern "C" fn group() -> Status {
    0
}

// SAFETY: the caller gives memory for as many numbers as it names, as to NCCL.
unsafe extern "C" fn all_reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    operation: c_int,
    handle: Handle,
    stream: *mut c_void,
) -> Status {
    if (kind, operation, stream as u64) != (7, 0, 99) {
        return 5;
    }
    // SAFETY: the caller's `from` holds `count` numbers of four bytes, and stays as it is.
    let own = unsafe { slice::from_raw_parts(from.cast::<u8>(), 4 * count) };
    let at = of(handle);
    (0..at.size).for_each(|to| post(at, to, own));
    // SAFETY: the caller's `to` has room for `count` numbers. It may be `from`, of which all was
    // copied into messages before.
    let sums = unsafe { slice::from_raw_parts_mut(to.cast::<f32>(), count) };
    sums.fill(0.0);
    for from in 0..at.size {
        let part: Vec<f32> = bytemuck::pod_collect_to_vec(&fetch(at, from));
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    0
}

// SAFETY: the caller gives memory for as many numbers as it names, as to NCCL.
unsafe extern "C" fn send(
    from: *const c_void,
    count: usize,
    kind: c_int,
    to: c_int,
    handle: Handle,
    stream: *mut c_void,
) -> Status {
    if (kind, stream as u64) != (1, 99) {
        return 5;
    }
    // SAFETY: the caller's `from` holds `count` bytes, and stays as it is.
    let bytes = unsafe { slice::from_raw_parts(from.cast::<u8>(), count) };
    post(of(handle), to as usize, bytes);
    0
}

// SAFETY: the caller gives memory for as many numbers as it names, as to NCCL.
unsafe extern "C" fn receive(
    to: *mut c_void,
    count: usize,
    kind: c_int,
    from: c_int,
    handle: Handle,
    stream: *mut c_void,
) -> Status {
    if (kind, stream as u64) != (1, 99) {
        return 5;
    }
    let at = of(handle);
    at.lost.store(count == LOST, Ordering::Relaxed);
    let bytes = fetch(at, from as usize);
    if bytes.len() != count {
        return 5;
    }
    // SAFETY: the caller's `to` has room for `count` bytes, which nothing else uses meanwhile.
    unsafe { slice::from_raw_parts_mut(to.cast::<u8>(), count) }.copy_from_slice(&bytes);
    0
}

const FUNCTIONS: Functions =
    Functions { unique_id, init, async_error, error, group_start: group, group_end: group, all_reduce, send, receive };

/// The card of a rank: one that cannot be bound, or one that fails when NCCL's thread waits for it.
/// Each thread has a stream of its own, on which nothing happens until the thread waits for it.
#[derive(Debug, Default)]
struct Memory {
    unbound: bool,
    broken: bool,
    /// A number that the thread which made the card has queued, and the address it is written to.
    queued: Mutex<Option<(u64, f32)>>,
}

fn is_of_nccl() -> bool {
    thread::current().name() == Some("nccl")
}

impl Card for Memory {
    fn bind(&self) -> Outcome {
        if self.unbound { Err("there is no card 1".into()) } else { Ok(()) }
    }

    fn stream(&self) -> u64 {
        99
    }

    fn wait(&self) -> Outcome {
        if is_of_nccl() {
            return if self.broken { Err("CUDA_ERROR_ECC_UNCORRECTABLE".into()) } else { Ok(()) };
        }
        if let Some((address, number)) = self.queued.lock().unwrap().take() {
            // SAFETY: the thread that waits has queued it, for memory of its own.
            unsafe { (address as *mut f32).write(number) };
        }
        Ok(())
    }
}

const LONG: Duration = Duration::from_secs(60);

fn on_cards<T: Send>(
    size: usize,
    card: impl Fn(usize) -> Memory + Sync,
    work: impl Fn(std::result::Result<Nccl, String>) -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let rank = |ranks: crate::Thread| {
            let (card, work) = (Arc::new(card(ranks.rank())), &work);
            scope.spawn(move || work(Nccl::with(Ok(FUNCTIONS), Arc::new(ranks), card, LONG)))
        };
        let spawned: Vec<_> = threads(size, LONG).into_iter().map(rank).collect();
        spawned.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn memory<T>(numbers: &mut [T]) -> CardMemory {
    CardMemory { address: numbers.as_mut_ptr() as u64, bytes: size_of_val(numbers) }
}

#[test]
fn cards_sum_and_exchange_in_groups_too() {
    for size in [1, 2, 4] {
        on_cards(
            size,
            |_| Memory::default(),
            |nccl| {
                let ranks: Arc<dyn Ranks> = Arc::new(nccl.unwrap());
                let groups = [Arc::clone(&ranks), ranks.split(ranks.rank() % 2).unwrap()];
                for group in groups {
                    let (rank, size) = (group.rank(), group.size());
                    let cards = group.cards().unwrap();
                    let mut numbers = [1.0, rank as f32, -0.5];
                    // SAFETY: the memory is this thread's.
                    unsafe { cards.sum(memory(&mut numbers)) }.unwrap();
                    assert_eq!(numbers, [size as f32, (size * (size - 1) / 2) as f32, -0.5 * size as f32]);
                    // From each rank to the next, none to the first.
                    let (mut own, mut received) = ([rank as u16; 5], [77u16; 5]);
                    let to = (rank + 1 < size).then(|| (rank + 1, memory(&mut own)));
                    let from = (rank > 0).then(|| (rank - 1, memory(&mut received)));
                    // SAFETY: the memory is this thread's.
                    unsafe { cards.exchange(to, from) }.unwrap();
                    assert_eq!(received, [rank.checked_sub(1).map_or(77, |from| from as u16); 5]);
                    assert_eq!(group.all_gather(&[rank as u8]).unwrap().len(), size);
                }
            },
        );
    }
}

/// What the caller has queued is done before NCCL's thread reads the memory.
#[test]
fn a_call_comes_after_what_its_thread_has_queued() {
    thread::scope(|scope| {
        for ranks in threads(2, LONG) {
            scope.spawn(move || {
                let card = Arc::new(Memory::default());
                let nccl =
                    Nccl::with(Ok(FUNCTIONS), Arc::new(ranks), Arc::clone(&card) as Arc<dyn Card>, LONG).unwrap();
                let mut number = [0f32];
                let memory = memory(&mut number);
                *card.queued.lock().unwrap() = Some((memory.address, nccl.rank() as f32 + 1.0));
                // SAFETY: the memory is this thread's.
                unsafe { nccl.sum(memory) }.unwrap();
                assert_eq!(number, [3.0]);
            });
        }
    });
}

#[test]
fn all_ranks_fail_where_one_has_no_card_or_no_nccl() {
    let outcomes = on_cards(3, |rank| Memory { unbound: rank == 1, ..Memory::default() }, |nccl| nccl.map(drop));
    assert!(
        outcomes.iter().all(|outcome| outcome.as_ref().is_err_and(|text| text == "rank 1 of 3: there is no card 1"))
    );
    let text = Functions::load(&["libnccl-of-nowhere.so"]).err().unwrap();
    assert!(text.contains("NCCL cannot be opened: install it") && text.contains("libnccl-of-nowhere.so"), "{text}");
}

#[test]
fn errors_name_the_rank_the_call_and_the_size() {
    let said = |error: Error, words: &str| assert!(error.to_string().contains(words), "{error}");
    on_cards(
        2,
        |rank| Memory { broken: rank == 1, ..Memory::default() },
        |nccl| {
            let nccl = nccl.unwrap();
            // SAFETY: the memory is this thread's.
            let outcome = unsafe { nccl.sum(memory(&mut [0f32; 3])) };
            if nccl.rank() == 1 {
                said(outcome.unwrap_err(), "rank 1 of 2: sum on cards of 12 bytes: CUDA_ERROR_ECC");
                // SAFETY: the memory is this thread's.
                said(unsafe { nccl.sum(memory(&mut [0f32; 3])) }.unwrap_err(), "a call before it failed");
                return;
            }
            outcome.unwrap();
            // Its memory may be written to for as long as the process lives.
            let received = Box::leak(Box::new([0u8; LOST]));
            // SAFETY: the memory is there as long as the process.
            let outcome = unsafe { nccl.exchange_on_cards(1, memory(received)) };
            said(outcome.unwrap_err(), "receive from rank 1) of 13 bytes: NCCL says: remote process exited");
        },
    );
}

#[test]
fn a_rank_that_is_stuck_is_waited_for_until_the_deadline() {
    on_cards(
        2,
        |_| Memory::default(),
        |nccl| {
            let nccl = nccl.unwrap();
            if nccl.rank() == 0 {
                nccl.set_deadline(Duration::from_millis(20));
                let received = Box::leak(Box::new([0u8; 8]));
                // SAFETY: the memory is there as long as the process.
                let error = unsafe { nccl.exchange_on_cards(1, memory(received)) }.unwrap_err().to_string();
                assert!(error.contains("rank 0 of 2") && error.contains("no answer within 0.02 s"), "{error}");
            }
            nccl.barrier().unwrap();
        },
    );
}

impl Nccl {
    /// Receives from a rank; the name of the call is one of both traits.
    ///
    /// # Safety
    /// That of [`Cards::exchange`].
    unsafe fn exchange_on_cards(&self, from: usize, memory: CardMemory) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { Cards::exchange(self, None, Some((from, memory))) }
    }
}
