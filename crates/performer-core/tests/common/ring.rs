//! Segments of a sequence that threads of one process hold.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use candle_core::{Result, Tensor, bail};
use performer_core::attention::Neighbours;

/// Longer than any exchange takes, so that it passes only where segments wait for ever.
const PATIENCE: Duration = Duration::from_secs(60);

/// A thread with a channel to and from each of the others.
#[derive(Debug)]
pub(crate) struct Thread {
    index: usize,
    to: Vec<mpsc::Sender<Tensor>>,
    from: Vec<Mutex<mpsc::Receiver<Tensor>>>,
}

impl Neighbours for Thread {
    fn index(&self) -> usize {
        self.index
    }

    fn count(&self) -> usize {
        self.to.len()
    }

    fn exchange(&self, x: &Tensor, to: Option<usize>, from: Option<usize>) -> Result<Option<Tensor>> {
        if let Some(to) = to {
            self.to[to].send(x.copy()?).map_err(candle_core::Error::wrap)?;
        }
        let Some(from) = from else { return Ok(None) };
        let received = self.from[from].lock().expect("one thread uses it").recv_timeout(PATIENCE);
        let received = received.map_err(candle_core::Error::wrap)?;
        if received.dims() != x.dims() || received.dtype() != x.dtype() {
            bail!("segment {} expected {:?} of segment {from}, not {:?}", self.index, x.dims(), received.dims());
        }
        Ok(Some(received))
    }
}

/// Does something on so many segments, and returns what each of them got.
pub(crate) fn on_segments<T: Send>(count: usize, work: impl Fn(Arc<Thread>) -> Result<T> + Sync) -> Result<Vec<T>> {
    let mut threads: Vec<_> = (0..count).map(|index| Thread { index, to: vec![], from: vec![] }).collect();
    for from in 0..count {
        for to in 0..count {
            let (sender, receiver) = mpsc::channel();
            threads[from].to.push(sender);
            threads[to].from.push(Mutex::new(receiver));
        }
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = threads.into_iter().map(|thread| scope.spawn(|| work(Arc::new(thread)))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a segment does not panic")).collect()
    })
}
