//! Where the reader is in each stream, and which ones it leaves alone for a while.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::Instant;
use tracing::error;

use super::Reader;
use crate::{decision::Fault, entry::Place, message::Source, recovery::Search, trouble::Trouble};

/// How long a stream that refuses is left alone.
const REFUSED_PAUSE: Duration = Duration::from_secs(3);

/// Where the reader is in one term of a stream.
pub(super) struct Progress {
    pub(super) source: Arc<Source>,
    pub(super) search: Search,
    /// Read for the first time, but left in Redis because older entries had to be claimed first.
    pub(super) first: HashSet<Place>,
    pub(super) refused_until: Option<Instant>,
    refusals: u64,
}

impl Reader {
    /// The streams to look at now. What is known of others is forgotten.
    pub(super) fn sources(&mut self) -> Vec<Arc<Source>> {
        let now = Instant::now();
        let all = self.queue.readable();
        self.progress.retain(|_, progress| {
            all.iter()
                .any(|source| Arc::ptr_eq(source, &progress.source))
        });
        let interval = self.claim_after / 2;
        all.into_iter()
            .filter(|source| {
                let progress = self
                    .progress
                    .entry(source.stream.clone())
                    .or_insert_with(|| Progress {
                        source: Arc::clone(source),
                        search: Search::new(source.epoch.is_some(), interval),
                        first: HashSet::new(),
                        refused_until: None,
                        refusals: 0,
                    });
                if self.queue.has_refused(source) {
                    progress.refused_until = Some(now + REFUSED_PAUSE);
                    progress.search.restart();
                }
                if progress.refused_until.is_some_and(|until| until <= now) {
                    progress.refused_until = None;
                }
                progress.refused_until.is_none()
            })
            .collect()
    }

    /// Leaves a stream alone that refuses, so that the others go on.
    pub(super) fn unless_refused<T>(
        &mut self,
        source: &Source,
        result: Result<T, Trouble>,
    ) -> Result<Option<T>, Trouble> {
        let Some(progress) = self.progress.get_mut(&source.stream) else {
            return result.map(Some);
        };
        match result {
            Ok(value) => {
                progress.refusals = 0;
                Ok(Some(value))
            }
            Err(trouble) if trouble.fault == Fault::RedisForbids => {
                progress.refused_until = Some(Instant::now() + REFUSED_PAUSE);
                progress.refusals += 1;
                progress.search.restart();
                if progress.refusals.is_power_of_two() {
                    error!(stream = source.stream, tries = progress.refusals, error = %trouble, "stream refused; the others go on");
                }
                Ok(None)
            }
            Err(trouble) => Err(trouble),
        }
    }
}
