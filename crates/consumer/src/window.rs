//! How long the inbox must remember: as long as a message can come again.

use std::time::Duration;

use crate::{Error, link::Link, survey::ask, trouble::Trouble};

/// What is added for clocks that differ and purges that are late.
const MARGIN: Duration = Duration::from_secs(24 * 60 * 60);

/// The settings of this group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) inbox_retention: Duration,
    pub(crate) dead_letter_retention: Duration,
}

/// How long the relay can publish a message again, and how long its entry stays; none before a relay has said so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Published {
    retention: Option<Duration>,
    stream_max_age: Option<Duration>,
}

impl Published {
    /// Reads the relay's marker.
    pub(crate) async fn read(link: &Link, stream_prefix: &str) -> Result<Self, Trouble> {
        let mut get = redis::cmd("HMGET");
        get.arg(format!("{stream_prefix}relay:marker"))
            .arg(&["retention_ms", "stream_max_age_ms"]);
        let [retention, stream_max_age]: [Option<String>; 2] = ask(link, &get).await?;
        let duration =
            |ms: Option<String>| ms.and_then(|ms| ms.parse().ok()).map(Duration::from_millis);
        Ok(Self {
            retention: duration(retention),
            stream_max_age: duration(stream_max_age),
        })
    }
}

impl Window {
    /// The least that the inbox must remember.
    fn needed(&self, published: Published) -> Duration {
        let again = published
            .retention
            .unwrap_or_default()
            .max(published.stream_max_age.unwrap_or_default());
        again
            .saturating_add(self.dead_letter_retention)
            .saturating_add(MARGIN)
    }

    /// Refuses an inbox that would forget a message that can still come.
    pub(crate) fn check(&self, published: Published) -> Result<(), Error> {
        let needed = self.needed(published);
        if self.inbox_retention >= needed {
            return Ok(());
        }
        let hours = |duration: Duration| duration.as_secs().div_ceil(3_600);
        Err(Error::Setting {
            field: "inbox_retention",
            problem: format!(
                "{} h is too short: it must cover the relay's --retention ({} h) or --stream-max-age ({} h), whichever is \
                 longer, dead_letter_retention ({} h) and a day, together {} h",
                hours(self.inbox_retention),
                hours(published.retention.unwrap_or_default()),
                hours(published.stream_max_age.unwrap_or_default()),
                hours(self.dead_letter_retention),
                hours(needed),
            ),
        })
    }

    /// How long keys are kept now. Where the relay's settings have grown while this consumer runs, longer than it was
    /// told to.
    pub(crate) fn keep(&self, published: Published) -> Duration {
        self.inbox_retention.max(self.needed(published))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    #[test]
    fn the_inbox_outlives_what_can_come_again() {
        let window = |days| Window {
            inbox_retention: days * DAY,
            dead_letter_retention: 7 * DAY,
        };
        let published = |retention, age: Option<u32>| Published {
            retention: Some(retention * DAY),
            stream_max_age: age.map(|age| age * DAY),
        };
        assert!(window(14).check(published(3, Some(3))).is_ok());
        assert!(window(11).check(published(3, None)).is_ok());
        assert!(window(10).check(published(3, None)).is_err());
        assert!(window(14).check(published(3, Some(7))).is_err());
        assert!(window(8).check(Published::default()).is_ok());
        let error = window(10)
            .check(published(3, None))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("setting inbox_retention: 240 h is too short"),
            "{error}"
        );
        assert_eq!(window(14).keep(published(30, None)), 38 * DAY);
        assert_eq!(window(14).keep(published(3, None)), 14 * DAY);
    }
}
