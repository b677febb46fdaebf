//! Applies each message once.
