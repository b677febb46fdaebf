//! Failure injection across all crates.
