//! The connections that wait for their next exchange, apart for each runtime: what is read on a thread is
//! then answered there. Closes those that have been idle for too long or that their engine has ended.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Waker};
use std::time::Duration;

use arc_swap::ArcSwap;
use foldhash::fast::RandomState;
use parking_lot::Mutex;
use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::runtime;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::{Link, Place};

/// How often idle connections are looked at, at the most.
const LOOK: Duration = Duration::from_secs(1);

/// All connections that are kept.
#[derive(Debug)]
pub(super) struct Kept {
    of_runtimes: ArcSwap<Vec<(runtime::Id, Arc<Shelves>)>>,
    adding: Mutex<()>,
    lasts: Duration,
    tasks: TaskTracker,
    gone: CancellationToken,
    _ends: DropGuard,
}

/// Those of one runtime.
#[derive(Debug, Default)]
struct Shelves(Mutex<HashMap<Place, Arc<Shelf>, RandomState>>);

/// Those to one address.
#[derive(Debug)]
pub(super) struct Shelf {
    links: Mutex<Links>,
    returned: Notify,
    lasts: Duration,
}

#[derive(Debug, Default)]
struct Links {
    /// The one that was used last comes last.
    idle: Vec<(Instant, Link)>,
    waiting: usize,
}

impl Kept {
    pub(super) fn new(lasts: Duration, tasks: TaskTracker) -> Self {
        let gone = CancellationToken::new();
        let ends = gone.clone().drop_guard();
        Self { of_runtimes: ArcSwap::default(), adding: Mutex::default(), lasts, tasks, gone, _ends: ends }
    }

    /// The connections of the present runtime to an address.
    pub(super) fn shelf(&self, place: &Place) -> Arc<Shelf> {
        let shelves = self.shelves();
        let mut all = shelves.0.lock();
        if let Some(shelf) = all.get(place) {
            return Arc::clone(shelf);
        }
        let shelf = Arc::new(Shelf { links: Mutex::default(), returned: Notify::new(), lasts: self.lasts });
        all.insert(place.clone(), Arc::clone(&shelf));
        shelf
    }

    fn shelves(&self) -> Arc<Shelves> {
        let id = runtime::Handle::current().id();
        let find =
            || self.of_runtimes.load().iter().find(|(of, _)| *of == id).map(|(_, all)| Arc::clone(all));
        if let Some(found) = find() {
            return found;
        }
        let _adding = self.adding.lock();
        if let Some(found) = find() {
            return found;
        }
        let shelves = Arc::new(Shelves::default());
        let mut all = Vec::clone(&self.of_runtimes.load());
        all.push((id, Arc::clone(&shelves)));
        self.of_runtimes.store(Arc::new(all));
        let (watched, gone) = (Arc::downgrade(&shelves), self.gone.clone());
        let pause = LOOK.min(self.lasts / 2).max(Duration::from_millis(10));
        self.tasks.spawn(async move { gone.run_until_cancelled(look_after(watched, pause)).await });
        shelves
    }
}

/// Closes connections that will not be used again.
async fn look_after(shelves: Weak<Shelves>, pause: Duration) {
    loop {
        tokio::time::sleep(pause).await;
        let Some(shelves) = shelves.upgrade() else { return };
        shelves.0.lock().retain(|_, shelf| shelf.is_needed() | (Arc::strong_count(shelf) > 1));
    }
}

impl Shelf {
    /// The connection that was used last, if it is still good.
    pub(super) fn take(&self) -> Option<Link> {
        let mut links = self.links.lock();
        while let Some((since, mut link)) = links.idle.pop() {
            if since.elapsed() >= self.lasts {
                links.idle.clear();
                return None;
            }
            if link.is_quiet() {
                return Some(link);
            }
        }
        None
    }

    /// Keeps a connection for the next exchange.
    pub(super) fn give_back(&self, link: Link) {
        let mut links = self.links.lock();
        links.idle.push((Instant::now(), link));
        let waited_for = links.waiting > 0;
        drop(links);
        if waited_for {
            self.returned.notify_one();
        }
    }

    /// Says that one is waited for, until that is dropped.
    pub(super) fn wait(self: &Arc<Self>) -> Waiting {
        self.links.lock().waiting += 1;
        Waiting(Arc::clone(self))
    }

    /// Whether any connection is left of those that are still good.
    pub(super) fn is_needed(&self) -> bool {
        let mut links = self.links.lock();
        links.idle.retain_mut(|(since, link)| since.elapsed() < self.lasts && link.is_quiet());
        !links.idle.is_empty()
    }
}

impl Link {
    /// Whether nothing has come since the last exchange, neither bytes nor the end.
    fn is_quiet(&mut self) -> bool {
        let mut space = [0; 1];
        let mut buffer = ReadBuf::new(&mut space);
        let mut context = Context::from_waker(Waker::noop());
        Pin::new(&mut self.stream).poll_read(&mut context, &mut buffer).is_pending()
    }
}

/// One who waits for a connection.
#[derive(Debug)]
pub(super) struct Waiting(Arc<Shelf>);

impl Waiting {
    /// A connection that another exchange has given back.
    pub(super) async fn returned(&self) -> Link {
        loop {
            self.0.returned.notified().await;
            if let Some(link) = self.0.take() {
                return link;
            }
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.links.lock().waiting -= 1;
    }
}
