//! Scripted misbehaviour: what is armed, and the gates that hold requests at a stage.
//!
//! Faults decide nothing by themselves; the HTTP layer and the core ask here and act.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::watch;

/// Where a request can be held or stalled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The request has been read; nothing has been done with it.
    Arrival,
    /// The outcome is known; no byte of the answer has been sent.
    BeforeHead,
    /// The first piece of a streamed body has been sent.
    MidStream,
}

/// Which requests a fault concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leg {
    /// Every generation request.
    #[default]
    Any,
    /// Requests that ask for a hand-off.
    Prefill,
    /// Requests that bring a hand-off.
    Decode,
    /// Requests without transfer parameters.
    Plain,
}

/// Which KV bytes are falsified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Corrupt {
    /// Those that the prefill wrote.
    Written,
    /// Those that a pull brought.
    Pulled,
}

/// One misbehaviour.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Fault {
    /// Answer with this status and body and do nothing else.
    Refuse {
        /// HTTP status.
        status: u16,
        /// JSON body.
        #[serde(default)]
        body: Value,
    },
    /// Stay silent for ever at a stage.
    Stall {
        /// Where.
        stage: Stage,
    },
    /// Reset the connection once this many answer bytes (head included) have been sent.
    Reset {
        /// Answer bytes that still arrive.
        after_bytes: u64,
    },
    /// Falsify KV bytes.
    CorruptKv {
        /// Which ones.
        bytes: Corrupt,
    },
    /// Answer without `kv_transfer_params` although the blocks are kept.
    DropHandoff,
    /// Answer 200 with this text as JSON body.
    Garbage {
        /// The body.
        body: String,
    },
    /// Replace the `kv_transfer_params` of the answer.
    HandoffOverride {
        /// What is answered instead.
        params: Value,
    },
    /// Generate more tokens than the request allows.
    ExtraTokens {
        /// How many more.
        count: usize,
    },
    /// Wait before every streamed piece.
    SlowChunks {
        /// Milliseconds.
        millis: u64,
    },
    /// Announce and perform the end of the connection after the answer.
    ConnectionClose,
}

/// A fault with its scope.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ArmedFault {
    /// What happens.
    #[serde(flatten)]
    pub fault: Fault,
    /// To which requests.
    #[serde(default)]
    pub leg: Leg,
    /// Whether it stays armed after the first request that meets it.
    #[serde(default)]
    pub sticky: bool,
}

struct Hold {
    stage: Stage,
    leg: Leg,
    arrivals: watch::Sender<usize>,
    open: watch::Sender<bool>,
}

/// Holds requests at a stage until it is released or dropped.
pub struct Gate {
    hold: Arc<Hold>,
}

impl Gate {
    /// Waits until so many requests have come to the gate.
    pub async fn arrived(&self, count: usize) {
        let mut arrivals = self.hold.arrivals.subscribe();
        // The sender lives in `self`, so waiting can only end with the count reached.
        let _ = arrivals.wait_for(|seen| *seen >= count).await;
    }

    /// How many requests have come to the gate so far.
    pub fn arrivals(&self) -> usize {
        *self.hold.arrivals.borrow()
    }

    /// Lets every held and every later request pass.
    pub fn release(&self) {
        self.hold.open.send_replace(true);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.release();
    }
}

/// A gate that was set over HTTP, as shown to outside processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct HeldStage {
    pub(crate) stage: Stage,
    pub(crate) leg: Leg,
    pub(crate) arrivals: usize,
}

/// The faults of one engine; every method takes effect for the next request.
#[derive(Default)]
pub struct Faults {
    armed: Mutex<Vec<ArmedFault>>,
    holds: Mutex<Vec<Arc<Hold>>>,
    outside: Mutex<Vec<Gate>>,
}

impl Faults {
    /// Arms a fault for the next request.
    pub fn once(&self, fault: Fault) {
        self.arm(ArmedFault { fault, leg: Leg::Any, sticky: false });
    }

    /// Arms a fault for every request until cleared.
    pub fn always(&self, fault: Fault) {
        self.arm(ArmedFault { fault, leg: Leg::Any, sticky: true });
    }

    /// Arms a fault with its scope.
    pub fn arm(&self, fault: ArmedFault) {
        self.arm_all([fault]);
    }

    /// Arms several faults at once, so that no request meets only some of them.
    pub fn arm_all(&self, faults: impl IntoIterator<Item = ArmedFault>) {
        self.armed.lock().extend(faults);
    }

    /// Disarms everything and opens the gates that were set over HTTP.
    pub fn clear(&self) {
        self.armed.lock().clear();
        self.outside.lock().clear();
    }

    /// Holds every request of a leg at a stage until the gate is released or dropped.
    pub fn hold(&self, stage: Stage, leg: Leg) -> Gate {
        let hold =
            Arc::new(Hold { stage, leg, arrivals: watch::Sender::new(0), open: watch::Sender::new(false) });
        let mut holds = self.holds.lock();
        holds.retain(|other| !*other.open.borrow());
        holds.push(Arc::clone(&hold));
        Gate { hold }
    }

    /// What is armed now.
    pub fn armed(&self) -> Vec<ArmedFault> {
        self.armed.lock().clone()
    }

    pub(crate) fn hold_outside(&self, stage: Stage, leg: Leg) {
        let gate = self.hold(stage, leg);
        self.outside.lock().push(gate);
    }

    pub(crate) fn release_outside(&self, stage: Stage) {
        self.outside.lock().retain(|gate| gate.hold.stage != stage);
    }

    pub(crate) fn held_outside(&self) -> Vec<HeldStage> {
        let gates = self.outside.lock();
        gates
            .iter()
            .map(|gate| HeldStage { stage: gate.hold.stage, leg: gate.hold.leg, arrivals: gate.arrivals() })
            .collect()
    }

    /// Takes the faults that this request meets; the first of a kind wins.
    pub(crate) fn meet(&self, leg: Leg) -> Plan {
        let mut plan = Plan { leg, ..Plan::default() };
        self.armed.lock().retain(|armed| {
            if armed.leg != Leg::Any && armed.leg != leg {
                return true;
            }
            !plan.add(&armed.fault) || armed.sticky
        });
        plan
    }

    /// Waits at the gates of a stage; the caller may be dropped while it waits.
    pub(crate) async fn pass(&self, stage: Stage, leg: Leg) {
        let here: Vec<Arc<Hold>> = self
            .holds
            .lock()
            .iter()
            .filter(|hold| hold.stage == stage && (hold.leg == Leg::Any || hold.leg == leg))
            .map(Arc::clone)
            .collect();
        for hold in here {
            let mut open = hold.open.subscribe();
            hold.arrivals.send_modify(|count| *count += 1);
            // The sender lives in `hold`, so waiting can only end with the gate open.
            let _ = open.wait_for(|open| *open).await;
        }
    }
}

/// The faults that one request meets.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    pub(crate) leg: Leg,
    pub(crate) refuse: Option<(u16, Value)>,
    pub(crate) stall: Option<Stage>,
    pub(crate) reset_after: Option<u64>,
    pub(crate) corrupt: Option<Corrupt>,
    pub(crate) drop_handoff: bool,
    pub(crate) garbage: Option<String>,
    pub(crate) handoff: Option<Value>,
    pub(crate) extra_tokens: usize,
    pub(crate) chunk_delay_millis: u64,
    pub(crate) close: bool,
}

impl Plan {
    /// Takes a fault in; false when one of its kind is there already.
    fn add(&mut self, fault: &Fault) -> bool {
        match fault {
            Fault::Refuse { status, body } => fill(&mut self.refuse, (*status, body.clone())),
            Fault::Stall { stage } => fill(&mut self.stall, *stage),
            Fault::Reset { after_bytes } => fill(&mut self.reset_after, *after_bytes),
            Fault::CorruptKv { bytes } => fill(&mut self.corrupt, *bytes),
            Fault::DropHandoff => !std::mem::replace(&mut self.drop_handoff, true),
            Fault::Garbage { body } => fill(&mut self.garbage, body.clone()),
            Fault::HandoffOverride { params } => fill(&mut self.handoff, params.clone()),
            Fault::ExtraTokens { count } => fill_number(&mut self.extra_tokens, *count),
            Fault::SlowChunks { millis } => {
                let free = self.chunk_delay_millis == 0;
                if free {
                    self.chunk_delay_millis = *millis;
                }
                free
            }
            Fault::ConnectionClose => !std::mem::replace(&mut self.close, true),
        }
    }
}

fn fill<T>(slot: &mut Option<T>, value: T) -> bool {
    let free = slot.is_none();
    if free {
        *slot = Some(value);
    }
    free
}

fn fill_number(slot: &mut usize, value: usize) -> bool {
    let free = *slot == 0;
    if free {
        *slot = value;
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_shot_is_met_once_and_sticky_always() {
        let faults = Faults::default();
        faults.once(Fault::DropHandoff);
        faults.always(Fault::ConnectionClose);
        let first = faults.meet(Leg::Prefill);
        let second = faults.meet(Leg::Prefill);
        assert!(first.drop_handoff && first.close);
        assert!(!second.drop_handoff && second.close);
    }

    #[test]
    fn scope_is_respected() {
        let faults = Faults::default();
        faults.arm(ArmedFault { fault: Fault::DropHandoff, leg: Leg::Prefill, sticky: false });
        assert!(!faults.meet(Leg::Decode).drop_handoff);
        assert!(faults.meet(Leg::Prefill).drop_handoff);
    }

    #[test]
    fn two_of_a_kind_are_met_in_turn() {
        let faults = Faults::default();
        faults.once(Fault::Refuse { status: 503, body: Value::Null });
        faults.once(Fault::Refuse { status: 429, body: Value::Null });
        assert_eq!(faults.meet(Leg::Plain).refuse.map(|(status, _)| status), Some(503));
        assert_eq!(faults.meet(Leg::Plain).refuse.map(|(status, _)| status), Some(429));
    }

    #[tokio::test]
    async fn gate_reports_arrivals_and_releases() {
        let faults = Arc::new(Faults::default());
        let gate = faults.hold(Stage::Arrival, Leg::Any);
        let waiting = Arc::clone(&faults);
        let pass = async move { waiting.pass(Stage::Arrival, Leg::Decode).await };
        tokio::join!(pass, async {
            gate.arrived(1).await;
            gate.release();
        });
        assert_eq!(gate.arrivals(), 1);
    }

    #[test]
    fn json_form_is_flat() {
        let armed: ArmedFault =
            serde_json::from_value(json!({"kind":"refuse","status":503,"leg":"prefill","sticky":true}))
                .unwrap();
        assert_eq!(
            armed,
            ArmedFault {
                fault: Fault::Refuse { status: 503, body: Value::Null },
                leg: Leg::Prefill,
                sticky: true
            }
        );
    }
}
