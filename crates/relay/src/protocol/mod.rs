//! What decides, without I/O: which ids are published, which gaps are dead, where to continue from,
//! and what an error means. The rest of the crate only carries these decisions out.
//!
//! Reading order: [`ranges`], [`cursor`] (what has been published), [`place`] (a cursor with its place in time),
//! [`log`] (what a reader may take next), [`start`] (what to continue from), [`layout`] (which stream), [`failure`]
//! (what an error means).

pub mod cursor;
pub mod failure;
pub mod layout;
pub mod log;
pub mod place;
pub mod ranges;
pub mod start;
