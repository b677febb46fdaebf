//! Writes messages inside the caller's transaction.
