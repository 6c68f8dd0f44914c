//! What clients call models and what engines call them: aliases, the default, canaries, and how many engines of
//! each stage a model uses. Looks at names only; sends nothing and changes no body.

mod naming;
mod ratio;
mod settings;
mod table;
mod turns;

pub(crate) use ratio::{Candidate, divide};
pub use settings::{AnswerName, ModelSettings, ModelTarget, PdRatio};
pub(crate) use table::{Key, ModelTable};

#[cfg(test)]
mod tests;
