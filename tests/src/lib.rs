//! Tests across all crates, in `end_to_end/`. The library itself only compiles the code of the README.

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
