//! The order shop.
fn main() {}
