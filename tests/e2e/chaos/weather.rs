//! What befalls the engines: deaths, stalls, resets, refusals and bad answers.
//! Left out is what nobody can mend: a prefill engine that keeps blocks and never says which, because its
//! answer is cut or altered after the prompt is computed.

use std::time::Duration;

use engine_sim::{ArmedFault, Engine, EngineConfig, Fault, Gate, Leg, Stage};
use serde_json::json;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::dice::Dice;
use crate::support::Cluster;

/// What is to be undone, and when.
pub(super) struct Weather {
    dice: Dice,
    gates: Vec<(Instant, Gate)>,
    down: Vec<(Instant, Down)>,
    pub(super) kills: usize,
}

struct Down {
    prefill: bool,
    addr: SocketAddr,
    config: EngineConfig,
}

impl Weather {
    pub(super) fn new(seed: u64) -> Self {
        Self { dice: Dice::new(seed, u64::MAX), gates: Vec::new(), down: Vec::new(), kills: 0 }
    }

    /// Something happens.
    pub(super) async fn turn(&mut self, cluster: &mut Cluster) {
        self.revive(cluster).await;
        let prefill = self.dice.one_in(2);
        if self.dice.one_in(8) {
            return self.kill(cluster, prefill).await;
        }
        let engines = if prefill { &cluster.prefill } else { &cluster.decode };
        let engine = self.dice.pick(engines);
        if self.dice.one_in(4) {
            let stages: &[Stage] = if prefill {
                &[Stage::Arrival, Stage::BeforeHead]
            } else {
                &[Stage::Arrival, Stage::BeforeHead, Stage::MidStream]
            };
            let leg = if prefill { Leg::Prefill } else { Leg::Decode };
            let gate = engine.faults().hold(*self.dice.pick(stages), leg);
            self.gates.push((Instant::now() + self.dice.moment(400), gate));
        } else if prefill {
            self.harm_prefill(engine);
        } else {
            self.harm_decode(engine);
        }
    }

    fn harm_prefill(&mut self, engine: &Engine) {
        let arm = |fault| engine.faults().arm(ArmedFault { fault, leg: Leg::Prefill, sticky: false });
        match self.dice.below(7) {
            0 | 1 => arm(refusal(503)),
            2 => arm(refusal(400)),
            3 => {
                // Together they end the connection before anything is computed.
                let reset = Fault::Reset { after_bytes: self.dice.below(80) as u64 };
                let both = [refusal(503), reset];
                engine.faults().arm_all(both.map(|fault| ArmedFault {
                    fault,
                    leg: Leg::Prefill,
                    sticky: false,
                }));
            }
            4 => arm(Fault::Garbage { body: "garbage".to_owned() }),
            5 => arm(Fault::Stall { stage: Stage::Arrival }),
            _ => arm(Fault::ConnectionClose),
        }
    }

    fn harm_decode(&mut self, engine: &Engine) {
        let arm = |fault| engine.faults().arm(ArmedFault { fault, leg: Leg::Decode, sticky: false });
        match self.dice.below(10) {
            0 | 1 => arm(refusal(503)),
            2 => arm(refusal(500)),
            3 => arm(refusal(400)),
            4 | 5 => arm(Fault::Reset { after_bytes: self.dice.below(700) as u64 }),
            6 => arm(Fault::Stall {
                stage: *self.dice.pick(&[Stage::Arrival, Stage::BeforeHead, Stage::MidStream]),
            }),
            7 => arm(Fault::SlowChunks { millis: 1 + self.dice.below(20) as u64 }),
            8 => engine.transport_faults().fail_next_transfers(1),
            _ => arm(Fault::ConnectionClose),
        }
    }

    /// One of a role dies, if another one is left.
    async fn kill(&mut self, cluster: &mut Cluster, prefill: bool) {
        let engines = if prefill { &mut cluster.prefill } else { &mut cluster.decode };
        if engines.len() < 2 {
            return;
        }
        let engine = engines.remove(self.dice.below(engines.len()));
        let down = Down { prefill, addr: engine.addr(), config: engine.config().clone() };
        engine.kill().await;
        self.kills += 1;
        self.down.push((Instant::now() + self.dice.moment(600), down));
    }

    /// Restarts engines whose core has died, as their supervisor would.
    pub(super) async fn revive(&mut self, cluster: &mut Cluster) {
        for engines in [&mut cluster.prefill, &mut cluster.decode] {
            while let Some(at) = engines.iter().position(|engine| engine.stats().dead) {
                let engine = engines.remove(at);
                let (addr, config) = (engine.addr(), engine.config().clone());
                engine.kill().await;
                let listener = TcpListener::bind(addr).await.unwrap();
                engines.push(engine_sim::spawn(config, listener).await.unwrap());
            }
        }
    }

    /// Waits until something is to be undone.
    pub(super) fn due(&self) -> impl Future<Output = ()> + use<> {
        let next = self.gates.iter().map(|gate| gate.0).chain(self.down.iter().map(|down| down.0)).min();
        async move {
            match next {
                Some(next) => tokio::time::sleep_until(next).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Undoes what is due.
    pub(super) async fn pass(&mut self, cluster: &mut Cluster) {
        self.undo(cluster, Instant::now()).await;
    }

    /// Undoes everything.
    pub(super) async fn calm(&mut self, cluster: &mut Cluster) {
        self.undo(cluster, Instant::now() + Duration::from_secs(3600)).await;
        self.revive(cluster).await;
        for engine in cluster.prefill.iter().chain(&cluster.decode) {
            engine.faults().clear();
        }
    }

    async fn undo(&mut self, cluster: &mut Cluster, until: Instant) {
        self.gates.retain(|(when, _)| *when > until);
        for (_, down) in self.down.extract_if(.., |(when, _)| *when <= until) {
            let listener = TcpListener::bind(down.addr).await.unwrap();
            let engine = engine_sim::spawn(down.config, listener).await.unwrap();
            if down.prefill { &mut cluster.prefill } else { &mut cluster.decode }.push(engine);
        }
    }
}

fn refusal(status: u16) -> Fault {
    let body =
        json!({"error": {"message": "an engine's own words", "type": "x", "param": null, "code": status}});
    Fault::Refuse { status, body }
}
