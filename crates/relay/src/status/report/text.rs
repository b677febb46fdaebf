//! The status as lines, each of which begins with the name of what it is about.

use std::fmt::{self, Write};

use super::{
    CursorShown, GroupShown, Holder, MarkerShown, RedisLoss, Retention, Status, StreamShown,
};
use crate::dead_letters::printable;
use crate::status::outbox::rounded;

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        self.write(&mut out)?;
        f.write_str(out.trim_end())
    }
}

impl Status {
    fn write(&self, out: &mut String) -> fmt::Result {
        let none = "none: no relay runs, or none reaches both servers".to_owned();
        let leader = self.leader.as_ref().map_or(none, |leader| {
            let name = printable(&leader.name);
            format!("{name} (backend {})", leader.pid)
        });
        line(out, "leader", leader)?;
        line(out, "standbys", self.standbys)?;
        if let Some(pause) = &self.paused {
            line(out, "paused", pause)?;
        }
        match &self.checkpoint {
            Some(cursor) => line(out, "checkpoint", cursor)?,
            None => line(out, "checkpoint", "none: nothing was published yet")?,
        }
        line(out, "marker", &self.marker)?;
        if let Some(rate) = &self.published {
            let rate = format!(
                "{:.0} ids/s over {}",
                rate.ids_per_second,
                rounded(rate.over_seconds)
            );
            line(out, "published", rate)?;
        }
        self.write_backlog(out)?;
        line(out, "dead letters", self.dead_letters)?;
        line(out, "kept", &self.retention)?;
        for holder in &self.open_writers {
            line(out, "open writer", holder)?;
        }
        for blocked in &self.blocked {
            let (name, reason) = (printable(&blocked.name), printable(&blocked.reason));
            let blocked = format!("{name} since id {}: {reason}", blocked.since_id);
            line(out, "blocked stream", blocked)?;
        }
        match self.redis_losses.count {
            0 => line(out, "Redis losses", "none on record")?,
            count => line(
                out,
                "Redis losses",
                format!("{count} on record, the latest:"),
            )?,
        }
        for loss in &self.redis_losses.latest {
            writeln!(out, "  {loss}")?;
        }
        self.write_care(out)?;
        self.write_streams(out)
    }

    fn write_care(&self, out: &mut String) -> fmt::Result {
        match &self.redis_memory {
            Some(memory) => line(out, "Redis memory", memory)?,
            None => line(out, "Redis memory", "not known: this user may not ask")?,
        }
        let Some(caretaker) = &self.caretaker else {
            let why = "not known: no leader has said it within a minute";
            line(out, "memory ceiling", why)?;
            return line(out, "rows held", why);
        };
        line(out, "memory ceiling", caretaker.ceiling())?;
        if caretaker.holds.is_empty() {
            return line(out, "rows held", "for no group (--hold-until-acked)");
        }
        let floor = caretaker.hold_floor_id.unwrap_or_default();
        line(out, "rows held", format!("above id {floor}, for:"))?;
        let holds = &caretaker.holds;
        holds.iter().try_for_each(|hold| writeln!(out, "  {hold}"))
    }

    fn write_backlog(&self, out: &mut String) -> fmt::Result {
        let backlog = &self.backlog;
        let size = bytes(backlog.bytes.unsigned_abs());
        if backlog.is_complete {
            let text = format!("{} messages, {size}", backlog.messages);
            line(out, "backlog", text)?;
        } else {
            let text = format!(
                "at least {} messages, {size}; at most {} by their ids",
                backlog.messages, backlog.ids
            );
            line(out, "backlog", text)?;
        }
        match backlog.oldest_seconds {
            Some(age) => line(out, "oldest unpublished", rounded(age)),
            None => line(out, "oldest unpublished", "none"),
        }
    }

    fn write_streams(&self, out: &mut String) -> fmt::Result {
        let streams = &self.streams;
        if let Some(why) = &streams.not_shown {
            return line(out, "streams", format!("not shown: {why}"));
        }
        let shown = streams.streams.len();
        let text = if streams.is_complete {
            streams.found.to_string()
        } else {
            format!(
                "{} found within the time for it, the {shown} longest of these are shown",
                streams.found
            )
        };
        line(out, "streams", text)?;
        streams
            .streams
            .iter()
            .try_for_each(|stream| write!(out, "{stream}"))
    }
}

fn line(out: &mut String, name: &str, value: impl fmt::Display) -> fmt::Result {
    writeln!(out, "{name:<20}{value}")
}

impl fmt::Display for CursorShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (high, epoch, page) = (self.high, self.epoch, self.page);
        write!(f, "high {high}, epoch {epoch}, page {page}")?;
        match (self.first_gap, self.gap_ranges) {
            (None, _) => f.write_str(", no gaps"),
            (Some(first), 1) => write!(f, ", 1 gap at id {first}"),
            (Some(first), ranges) => write!(f, ", {ranges} gaps from id {first}"),
        }
    }
}

impl fmt::Display for MarkerShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MarkerShown::Present(cursor) => cursor.fmt(f),
            MarkerShown::Missing => f.write_str("none in this Redis under this prefix"),
            MarkerShown::Foreign { what } => {
                write!(f, "the key holds something else: {}", printable(what))
            }
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.prepared, self.pid) {
            (Some(name), _) => write!(f, "prepared transaction {name:?}")?,
            (None, Some(pid)) => write!(f, "backend {pid} ({})", printable(&self.application))?,
            (None, None) => f.write_str("a prepared transaction")?,
        }
        write!(f, ", for {}", rounded(self.age_seconds))?;
        match self.query.as_str() {
            "" => Ok(()),
            query => write!(f, ": {}", printable(&query.replace('\n', " "))),
        }
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.oldest_id, self.oldest_seconds) {
            (Some(id), Some(age)) => write!(f, "from id {id} on, {} old", rounded(age))?,
            _ => f.write_str("nothing")?,
        }
        write!(f, "; purged up to id {}", self.purged_to)?;
        if let Some(seconds) = self.seconds {
            write!(f, "; retention {}", rounded(seconds))?;
        }
        write!(f, ", {} ids to purge", self.purgeable_ids)
    }
}

impl fmt::Display for RedisLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.lost.as_str() {
            "tail" => "its latest entries",
            "marker" => "only the marker",
            _ => "everything",
        };
        write!(f, "{} {what}: ", self.found_at)?;
        match self.marker_high {
            Some(high) => write!(f, "marker at id {high}")?,
            None => f.write_str("no marker")?,
        }
        write!(
            f,
            ", checkpoint at id {}, epoch {}",
            self.checkpoint_high, self.epoch
        )?;
        match (self.purged_from, self.purged_to) {
            (Some(from), Some(to)) => write!(f, "; ids {from} to {to} were purged already"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for StreamShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.memory_bytes.map_or("memory unknown".to_owned(), bytes);
        let name = printable(&self.stream);
        write!(f, "  {name}: {} entries, {memory}", self.entries)?;
        match self.oldest_entry_seconds {
            Some(age) => writeln!(f, ", the oldest of {} ago", rounded(age))?,
            None => writeln!(f)?,
        }
        if let Some(trimming) = &self.trimming {
            writeln!(f, "    trimming: {trimming}")?;
        }
        for group in &self.groups {
            writeln!(f, "    {group}")?;
        }
        match self.groups_not_shown {
            0 => Ok(()),
            more => writeln!(f, "    and {more} more groups"),
        }
    }
}

impl fmt::Display for GroupShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lag = self.lag.map_or("unknown".to_owned(), |lag| lag.to_string());
        let (group, pending) = (printable(&self.group), self.pending);
        write!(f, "group {group}: lag {lag}, pending {pending}")?;
        if let Some(age) = self.oldest_pending_seconds {
            write!(f, ", the oldest published {} ago", rounded(age))?;
        }
        write!(
            f,
            ", {} consumers, last given {}",
            self.consumers, self.last_delivered
        )
    }
}

/// A size for people.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let (mut size, mut unit) = (count as f64, 0);
    while size >= 1_024.0 && unit + 1 < UNITS.len() {
        size /= 1_024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} bytes"),
        _ => format!("{size:.1} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_unit_that_keeps_them_short() {
        for (count, text) in [
            (0, "0 bytes"),
            (1_023, "1023 bytes"),
            (1_536, "1.5 KiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }
}
