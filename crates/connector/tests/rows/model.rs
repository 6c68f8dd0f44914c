//! Lease and transfer bookkeeping against a model: random interleavings of everything that can
//! happen between several engines, one call at a time.
//!
//! A failing run prints its seed; `KVBATON_MODEL_SEED` runs that seed again.

mod hosts;
mod world;

use world::World;

/// Steps over all runs; issue-level demand of the crate's test suite.
const STEPS: u64 = 1_000_000;
/// Steps of one world; a fresh one starts from nothing.
const STEPS_PER_WORLD: u64 = 5_000;

fn seed() -> u64 {
    match std::env::var("KVBATON_MODEL_SEED") {
        Ok(text) => text.parse().expect("KVBATON_MODEL_SEED is a number"),
        Err(_) => rand::random(),
    }
}

#[test]
fn random_interleavings_keep_the_invariants() {
    let first = seed();
    println!("KVBATON_MODEL_SEED={first}");
    let threads: u64 = 2;
    let per_thread = STEPS / STEPS_PER_WORLD / threads;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for index in 0..per_thread {
                    let seed = first.wrapping_add(thread * per_thread + index);
                    World::new(seed).run(STEPS_PER_WORLD);
                }
            });
        }
    });
}
