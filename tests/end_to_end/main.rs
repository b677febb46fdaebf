//! From the producer's transaction over the relay's binary to the consumer's effect, on real servers.
//!
//! `world.rs` is what each test starts with. `crashes.rs` kills what is between the two ends, `windows.rs` is about
//! the two moments at which a dual write goes wrong, `backlog.rs` about consumers that come late, `failovers.rs` about a
//! primary that another server takes the place of, `sentinels.rs` about certificates and logins on the way there, `replays.rs` about what is published again, `refusals.rs` about a
//! Redis that is there and refuses, `traces.rs` about a trace that goes all the way. `documents.rs` holds README and ARCHITECTURE against
//! what they describe, `settings.rs` all documents against flags, variables and rights, `deployments.rs` image, compose file and
//! manifests.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of a test fail like the test"
)]

mod backlog;
mod crashes;
mod deployments;
mod documents;
mod estate;
mod failovers;
mod least_privilege;
mod other_languages;
mod refusals;
mod replays;
mod sentinels;
mod settings;
mod traces;
mod windows;
mod world;
