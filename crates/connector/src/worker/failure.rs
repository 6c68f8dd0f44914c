//! What a failed transfer leaves behind: statistics, a log line, and a mark on its receive.

use std::fmt;

use serde_json::{Map, Value, json};

use crate::scheduler::RecvRequest;
use crate::transport::{Transport, TransportError};

use super::Worker;

/// Block ids shown in a log line.
const SAMPLE: usize = 10;

/// What is known of a failure besides its kind.
#[derive(Debug, Default)]
pub(super) struct FailureContext<'a> {
    pub(super) request: Option<&'a str>,
    pub(super) recv: Option<&'a RecvRequest>,
    pub(super) remote_engine_id: Option<&'a str>,
    pub(super) remote_rank: Option<u32>,
}

impl<'a> FailureContext<'a> {
    pub(super) fn of_recv(request: &'a str, recv: &'a RecvRequest) -> Self {
        Self { request: Some(request), recv: Some(recv), ..Self::default() }
    }

    fn to_json(&self, failure_type: &str, engine_id: &str, error: Option<String>) -> Value {
        let mut context = Map::new();
        let mut put = |key: &str, value: Value| context.insert(key.to_owned(), value);
        put("failure_type", json!(failure_type));
        put("request_id", json!(self.request));
        put("engine_id", json!(engine_id));
        if let Some(recv) = self.recv {
            let first = recv.local_block_ids.first();
            let sample: Vec<u64> = first.into_iter().flatten().copied().take(SAMPLE).collect();
            put("remote_engine_id", json!(recv.remote.engine_id));
            put("remote_request_id", json!(recv.remote.request_id));
            put("remote_host", json!(recv.remote.host));
            put("remote_port", json!(recv.remote.port));
            put("num_local_blocks", json!(recv.local_block_ids.iter().map(Vec::len).sum::<usize>()));
            put("num_remote_blocks", json!(recv.remote.block_ids.total()));
            put("local_block_ids_sample", json!(sample));
        }
        if let Some(engine) = self.remote_engine_id {
            put("remote_engine_id", json!(engine));
        }
        if let Some(rank) = self.remote_rank {
            put("remote_rank", json!(rank));
        }
        if let Some(error) = error {
            put("error", json!(error));
        }
        Value::Object(context)
    }
}

impl<T: Transport> Worker<T> {
    pub(super) fn log_failure(
        &self,
        failure_type: &'static str,
        context: &FailureContext<'_>,
        error: Option<&dyn fmt::Display>,
    ) {
        let context = context.to_json(failure_type, &self.config.engine_id, error.map(ToString::to_string));
        tracing::error!(failure_type, "NIXL transfer failure: {failure_type} | Context: {context}");
    }

    /// As [`Self::log_failure`], with what is known of a receive in flight.
    pub(super) fn log_request_failure(
        &self,
        failure_type: &'static str,
        request: &str,
        error: Option<&dyn fmt::Display>,
    ) {
        let recv = self.recving.get(request);
        let context = FailureContext { request: Some(request), recv, ..FailureContext::default() };
        self.log_failure(failure_type, &context, error);
    }

    /// Counts a failed transfer and marks its receive as failed.
    pub(super) fn note_transfer_failure(
        &mut self,
        failure_type: &'static str,
        request: &str,
        error: Option<&TransportError>,
    ) {
        self.log_request_failure(failure_type, request, error.map(|error| error as &dyn fmt::Display));
        self.stats.num_failed_transfers.push(1);
        if let Some(recv) = self.recving.get(request) {
            self.failed_engines.insert(recv.remote.engine_id.clone());
        }
        self.recv_failures.insert(request.to_owned());
    }
}
