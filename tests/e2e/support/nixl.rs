//! Where NIXL is for the tests that need it.

use std::path::PathBuf;

/// The folder of the wheel that scripts/nixl-setup installed; none, and said so, where there is none
/// and nobody insists on it.
#[expect(clippy::print_stderr, reason = "a skipped test says so")]
pub(crate) fn nixl_installed() -> Option<PathBuf> {
    let home = std::env::var_os("KVBATON_NIXL_HOME").map(PathBuf::from).unwrap_or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
        cache.unwrap_or_default().join("kvbaton/nixl-1.5.1")
    });
    if home.join("complete").exists() {
        return Some(home.join("python"));
    }
    assert!(std::env::var_os("KVBATON_REQUIRE_NIXL").is_none(), "NIXL is required but not installed");
    eprintln!("skipped: NIXL is not installed (scripts/nixl-setup installs it)");
    None
}
