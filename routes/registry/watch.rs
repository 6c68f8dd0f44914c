//! The registry's changes as server-sent events; `id` is the revision to resume after.
//! Holds no more than one batch: a watcher that does not read falls behind and is cut off.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::Extension;
use axum::extract::State as Shared;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use kvbaton_proxy::{EngineSummary, Proxy, Registry, RegistrySnapshot, Sight, Watched, Watcher, Writer};
use serde::{Deserialize, Serialize};

use crate::error::RouteError;
use crate::extract::Params;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Silence after which a comment is sent, so that neither end takes the other for gone.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Where to begin.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Since {
    /// The last revision that the watcher knows.
    since: Option<u64>,
}

/// Everything as it is at one revision.
#[derive(Serialize)]
struct Reset {
    revision: u64,
    engines: Vec<EngineSummary>,
}

struct Feed {
    watcher: Watcher,
    reader: Writer,
    registry: Registry,
    pending: VecDeque<Event>,
}

pub(crate) async fn watch(
    Shared(proxy): Shared<Proxy>,
    Extension(reader): Extension<Writer>,
    Params(Since { since }): Params<Since>,
    headers: HeaderMap,
) -> Result<Response, RouteError> {
    // A client that reconnects repeats its URL and adds where it was; text that is no revision
    // was not ours, and 0 is no revision either.
    let resumed = headers
        .get(LAST_EVENT_ID)
        .map(|value| value.to_str().ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0));
    let watcher = proxy.registry().watch(resumed.or(since))?;
    let registry = proxy.registry().clone();
    let feed = Feed { watcher, reader, registry, pending: VecDeque::new() };
    let events = stream::unfold(feed, |mut feed| async {
        let event = feed.next().await?;
        Some((Ok::<_, Infallible>(event), feed))
    });
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    response.headers_mut().insert(X_ACCEL_BUFFERING, HeaderValue::from_static("no"));
    Ok(response)
}

impl Feed {
    async fn next(&mut self) -> Option<Event> {
        while self.pending.is_empty() {
            match self.watcher.next().await? {
                Watched::Reset(snapshot) => self.pending.push_back(reset(&self.reader, &snapshot)?),
                Watched::Changes(changes) => {
                    for change in &changes {
                        match self.reader.sees_change(change) {
                            Sight::Hidden => {}
                            Sight::Shown => {
                                let kind = change.kind.label();
                                self.pending.push_back(event(kind, change.revision, &**change)?);
                            }
                            // How it left is not the reader's to know: what is left tells enough.
                            Sight::Lost => {
                                let mut now = RegistrySnapshot::clone(&self.registry.snapshot());
                                now.revision = change.revision;
                                self.pending.push_back(reset(&self.reader, &now)?);
                            }
                        }
                    }
                }
            }
        }
        self.pending.pop_front()
    }
}

fn reset(reader: &Writer, snapshot: &RegistrySnapshot) -> Option<Event> {
    let engines = snapshot
        .engines
        .values()
        .filter(|engine| reader.sees_engine(engine))
        .map(|engine| engine.summary())
        .collect();
    event("reset", snapshot.revision, &Reset { revision: snapshot.revision, engines })
}

fn event(kind: &str, revision: u64, data: &impl Serialize) -> Option<Event> {
    let event = Event::default().event(kind).id(revision.to_string()).json_data(data);
    event.inspect_err(|error| tracing::error!(%error, "a change cannot be written")).ok()
}
