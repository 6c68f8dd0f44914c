# Shortcuts; scripts/ holds the real ones.

# Everything that CI runs.
test *args:
    scripts/test {{args}}

# The router with its embedded fleet.
run *args:
    cargo run --release -- {{args}}

# One minute of each fuzz target (needs a nightly toolchain and cargo-fuzz).
fuzz seconds="60":
    scripts/fuzz {{seconds}}
