//! Publishes committed messages.
