//! Traces of requests, run through kvbaton's routing over engines that are a model in simulated time. Knows no
//! network, reads no clock, and gives the same figures for the same seed.

mod blocks;
mod engine;
mod fleet;
mod histogram;
mod plan;
mod report;
mod run;
mod synthetic;
mod trace;

pub use fleet::{EngineGroup, EngineSettings, Fleet, FleetError, LARGEST_FLEET};
pub use histogram::{Histogram, Percentiles};
pub use plan::{NotAPlan, Plan};
pub use report::{DecisionCount, EngineReport, Report, StageReport};
pub use run::{Goal, RunError, run};
pub use synthetic::{NotAWorkload, Synthetic};
pub use trace::{Request, Trace, TraceError, WrongLine};
