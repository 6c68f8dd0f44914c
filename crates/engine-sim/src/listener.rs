//! The ZMQ side channel of an unmodified engine, as fragile as vLLM's: a request that its thread does
//! not expect ends it for good, though the engine runs on.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kv_connector::protocol::Generation;
use kv_connector::protocol::handshake::{HandshakeRequest, RequestError};
use kv_connector::side_channel::{SideChannelServer, reply_frames};
use tokio::time::Instant;

/// What became of an engine's side channel; clones share it.
#[derive(Debug, Clone, Default)]
pub struct ListenerState {
    dead: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
}

impl ListenerState {
    /// Whether a request has ended the listener.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Requests answered so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Acquire)
    }

    /// Serves the ranks' payloads until a request ends it.
    pub(crate) fn serve(
        &self,
        server: SideChannelServer,
        generation: Generation,
        payloads: &[Vec<u8>],
        started: Instant,
    ) -> impl Future<Output = ()> + use<> {
        let state = self.clone();
        let payloads: HashMap<u32, Vec<u8>> = (0..).zip(payloads.iter().cloned()).collect();
        server.serve_with(move |frames| {
            let reply = answer(generation, &payloads, frames, started);
            match reply {
                ControlFlow::Break(()) => state.dead.store(true, Ordering::Release),
                ControlFlow::Continue(Some(_)) => drop(state.answered.fetch_add(1, Ordering::AcqRel)),
                ControlFlow::Continue(None) => {}
            }
            reply
        })
    }
}

/// What vLLM's loop does with a message: nothing in it is guarded but the tag, which is only warned of.
fn answer(
    generation: Generation,
    payloads: &HashMap<u32, Vec<u8>>,
    frames: &[Vec<u8>],
    started: Instant,
) -> ControlFlow<(), Option<Vec<Vec<u8>>>> {
    let [_, request] = frames else { return ControlFlow::Break(()) };
    let rank = match HandshakeRequest::decode(generation, request) {
        Ok(HandshakeRequest { pp_rank: 0, tp_rank }) => tp_rank,
        // The real one would go on to a rank of whatever else the message says.
        Err(RequestError::UnknownMessage) => return ControlFlow::Continue(None),
        Ok(_) | Err(_) => return ControlFlow::Break(()),
    };
    match payloads.get(&rank) {
        None => ControlFlow::Break(()),
        Some(payload) => {
            let clock = started.elapsed().as_secs_f64();
            ControlFlow::Continue(Some(reply_frames(generation, payload.clone(), clock)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(generation: Generation, frames: &[&[u8]]) -> ControlFlow<(), usize> {
        let payloads = HashMap::from([(0, vec![1]), (1, vec![2])]);
        let frames: Vec<Vec<u8>> = frames.iter().map(|frame| frame.to_vec()).collect();
        let reply = answer(generation, &payloads, &frames, Instant::now());
        reply.map_continue(|reply| reply.map_or(0, |frames| frames.len()))
    }

    #[test]
    fn what_it_does_not_expect_ends_it() {
        let rank = |generation, pp_rank, tp_rank| HandshakeRequest { pp_rank, tp_rank }.encode(generation);
        for (generation, other, frames) in
            [(Generation::V14, Generation::V2, 2), (Generation::V2, Generation::V14, 1)]
        {
            let good = rank(generation, 0, 1);
            assert_eq!(asked(generation, &[b"", &good]), ControlFlow::Continue(frames));
            let another_tag = [&good[..3], b"xxx_meta_msg", &good[15..]].concat();
            assert_eq!(asked(generation, &[b"", &another_tag]), ControlFlow::Continue(0));
            let fatal = [rank(other, 0, 0), rank(generation, 0, 2), b"hello".to_vec(), Vec::new()];
            for request in fatal {
                assert_eq!(asked(generation, &[b"", &request]), ControlFlow::Break(()), "{request:?}");
            }
            assert_eq!(asked(generation, &[&good]), ControlFlow::Break(()));
            assert_eq!(asked(generation, &[b"", &good, b""]), ControlFlow::Break(()));
        }
        assert_eq!(asked(Generation::V14, &[b"", &rank(Generation::V14, 1, 0)]), ControlFlow::Break(()));
    }
}
