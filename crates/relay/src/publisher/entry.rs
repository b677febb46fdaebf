//! Messages as stream entries: the public contract of the fields and their order.

use redis::Cmd;
use time::OffsetDateTime;

use crate::postgres::MessageRow;

/// Arguments of the longest XADD of ours.
const ARGUMENTS_MAX: usize = 19;

/// Bytes of an entry besides its values: names of fields, id and time.
const FIXED_BYTES: usize = 160;

/// The entries of a page, encoded as the commands that add them.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    /// The streams that they go to.
    pub(super) streams: Vec<String>,
    /// For each entry the index of its stream.
    pub(super) stream_of: Vec<usize>,
    /// For each entry its XADD. They are gone once the page is on its way.
    pub(super) adds: Vec<Cmd>,
    /// Bytes of payloads, headers and ordering keys.
    pub(super) bytes: i64,
    /// Those whose publishing gets a span.
    #[cfg(feature = "otlp")]
    pub(super) traced: Vec<crate::traces::Traced>,
    /// When the first message was written, in microseconds since 1970.
    pub(super) first_created_us: Option<i64>,
}

impl Entries {
    /// A stream of this page, by the index that [`Entries::add`] wants.
    pub(crate) fn stream(&mut self, name: String) -> usize {
        self.streams.push(name);
        self.streams.len() - 1
    }

    /// Adds a message to one of the streams.
    pub(crate) fn add(&mut self, stream: usize, row: &MessageRow) {
        self.adds.push(xadd(&self.streams[stream], row));
        self.stream_of.push(stream);
        self.bytes += row.bytes();
        #[cfg(feature = "otlp")]
        self.traced.extend(crate::traces::traced(row));
        self.first_created_us
            .get_or_insert_with(|| row.created_at_us());
    }
}

fn xadd(stream: &str, row: &MessageRow) -> Cmd {
    let (message_key, payload) = (row.message_key().as_bytes(), row.payload());
    let ordering_key = row.ordering_key().map(str::as_bytes);
    let event_type = row.event_type().map(str::as_bytes);
    let content_type = row.content_type().map(str::as_bytes);
    let headers = row.headers();
    let mut bytes = FIXED_BYTES + stream.len() + message_key.len() + payload.len();
    for value in [ordering_key, event_type, content_type, headers] {
        bytes += value.map_or(0, <[u8]>::len);
    }
    // Its whole size at once: growing step by step takes longer than everything else here.
    let mut xadd = Cmd::with_capacity(ARGUMENTS_MAX, bytes);
    let mut digits = [0; 20];
    xadd.arg("XADD").arg(stream).arg("*");
    xadd.arg("id").arg(decimal(row.id(), &mut digits));
    xadd.arg("message_key").arg(message_key);
    let mut field = |name: &str, value: Option<&[u8]>| {
        if let Some(value) = value {
            xadd.arg(name).arg(value);
        }
    };
    field("ordering_key", ordering_key);
    field("event_type", event_type);
    field("created_at", Some(&created_at(row.created_at_us())));
    field("content_type", content_type);
    field("headers", headers);
    field("payload", Some(payload));
    xadd
}

fn decimal(id: i64, digits: &mut [u8; 20]) -> &[u8] {
    let (mut rest, mut at) = (id.unsigned_abs(), digits.len());
    loop {
        at -= 1;
        digits[at] = digit(rest);
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if id < 0 {
        at -= 1;
        digits[at] = b'-';
    }
    &digits[at..]
}

/// The last decimal digit.
fn digit(value: u64) -> u8 {
    b'0' + u8::try_from(value % 10).unwrap_or(0)
}

/// RFC 3339 in UTC with microseconds. The table's check keeps the year within four digits.
pub(super) fn created_at(us: i64) -> [u8; 27] {
    let at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(us) * 1_000)
        .expect("outbox.messages checks that the year has four digits");
    let mut text = *b"0000-00-00T00:00:00.000000Z";
    let year = at.year().unsigned_abs();
    let mut write = |first: usize, width: usize, mut value: u32| {
        for place in (first..first + width).rev() {
            text[place] = digit(u64::from(value));
            value /= 10;
        }
    };
    write(0, 4, year);
    write(5, 2, u8::from(at.month()).into());
    write(8, 2, at.day().into());
    write(11, 2, at.hour().into());
    write(14, 2, at.minute().into());
    write(17, 2, at.second().into());
    write(20, 6, at.microsecond());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_with_microseconds() {
        let text = |us| String::from_utf8(created_at(us).to_vec()).unwrap();
        assert_eq!(text(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(text(1_764_408_896_000_001), "2025-11-29T09:34:56.000001Z");
        assert_eq!(text(-62_135_596_800_000_000), "0001-01-01T00:00:00.000000Z");
        assert_eq!(text(253_402_300_799_999_999), "9999-12-31T23:59:59.999999Z");
    }

    #[test]
    fn ids_are_decimal() {
        for id in [0, 7, 10, 1_234_567_890, i64::MAX, i64::MIN, -1] {
            assert_eq!(decimal(id, &mut [0; 20]), id.to_string().as_bytes());
        }
    }
}
