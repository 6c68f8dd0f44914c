//! The program as it is built by default: NIXL is no part of it, and it says how to get it.

use crate::support::process::run;

#[test]
fn an_engine_over_nixl_is_refused_with_the_way_to_one() {
    let args = ["engine", "--role", "both", "--transport", "nixl", "--nixl-library", "/nowhere"];
    let out = run(&args, &[]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{said}");
    for word in ["--features nixl", "libclang", "scripts/nixl-setup"] {
        assert!(said.contains(word), "{word} is not in {said}");
    }
}
