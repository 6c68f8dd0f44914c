//! The threads that answer clients. Each has a runtime of its own, and a connection stays on the one that it
//! was given to, with the connections to engines that its requests use: nothing is woken across threads.
//! Owns no task: those are of whoever spawns them here.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// Running threads; they end, with what still runs on them, when this is dropped.
#[derive(Debug)]
pub struct Workers(Vec<Worker>);

#[derive(Debug)]
struct Worker {
    runtime: Handle,
    connections: Arc<AtomicUsize>,
    _stop: oneshot::Sender<()>,
}

/// One connection's share of a thread, until it is dropped.
#[derive(Debug)]
pub(crate) struct Busy(Arc<AtomicUsize>);

impl Workers {
    /// Starts so many threads; one for each core that there is with zero.
    ///
    /// # Errors
    /// The system gives no more threads or file descriptors.
    pub fn start(count: usize) -> io::Result<Self> {
        let count = if count == 0 { std::thread::available_parallelism()?.get() } else { count };
        (0..count).map(Worker::start).collect::<io::Result<_>>().map(Self)
    }

    /// The thread with the fewest connections; none if there are no threads.
    pub(crate) fn least_busy(&self) -> Option<(&Handle, Busy)> {
        let worker = self.0.iter().min_by_key(|worker| worker.connections.load(Ordering::Relaxed))?;
        worker.connections.fetch_add(1, Ordering::Relaxed);
        Some((&worker.runtime, Busy(Arc::clone(&worker.connections))))
    }
}

impl Worker {
    fn start(number: usize) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (handle, (stop, stopped)) = (runtime.handle().clone(), oneshot::channel::<()>());
        // It ends when the other half is dropped, whether anything was sent or not.
        let run = move || drop(runtime.block_on(stopped));
        std::thread::Builder::new().name(format!("clients-{number}")).spawn(run)?;
        Ok(Self { runtime: handle, connections: Arc::default(), _stop: stop })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_go_where_there_are_fewest_and_threads_end() {
        let workers = Workers::start(2).unwrap();
        let (first, second) = (workers.least_busy().unwrap(), workers.least_busy().unwrap());
        assert_ne!(first.0.id(), second.0.id());
        let of_second = second.0.id();
        drop(second.1);
        assert_eq!(workers.least_busy().unwrap().0.id(), of_second);
        let (held, ended) = oneshot::channel::<()>();
        drop(first.0.spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        }));
        drop(first.1);
        drop(workers);
        assert!(ended.blocking_recv().is_err(), "what still ran has ended");
    }

    #[test]
    fn zero_is_one_for_each_core() {
        let cores = std::thread::available_parallelism().unwrap().get();
        assert_eq!(Workers::start(0).unwrap().0.len(), cores);
    }
}
