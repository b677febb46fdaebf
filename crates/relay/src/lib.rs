//! Publishes committed messages.
pub mod protocol;
