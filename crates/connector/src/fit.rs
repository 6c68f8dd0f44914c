//! Whether two engines would agree to exchange KV, worked out from what they publish.
//!
//! Pure: shakes no hands and chooses nothing; what is unknown stays unknown.

mod traits;

pub use traits::EngineTraits;
