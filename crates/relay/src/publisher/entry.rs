//! One message as a stream entry: the public contract of the fields and their order.

use redis::Cmd;
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use crate::postgres::MessageRow;

const CREATED_AT: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");

/// Adds the number of arguments that follow, and those: fields and values in the contract's order.
pub(super) fn put(script: &mut Cmd, row: &MessageRow, scratch: &mut String) {
    use std::fmt::Write;

    let (ordering_key, event_type) = (row.ordering_key(), row.event_type());
    let (content_type, headers) = (row.content_type(), row.headers());
    let fields = 4
        + usize::from(ordering_key.is_some())
        + usize::from(event_type.is_some())
        + usize::from(content_type.is_some())
        + usize::from(headers.is_some());
    script.arg(2 * fields);
    script.arg("id").arg(row.id());
    script.arg("message_key").arg(row.message_key());
    if let Some(ordering_key) = ordering_key {
        script.arg("ordering_key").arg(ordering_key);
    }
    if let Some(event_type) = event_type {
        script.arg("event_type").arg(event_type);
    }
    scratch.clear();
    write!(scratch, "{}", created_at(row.created_at_us()))
        .expect("writing to a String cannot fail");
    script.arg("created_at").arg(scratch.as_str());
    if let Some(content_type) = content_type {
        script.arg("content_type").arg(content_type);
    }
    if let Some(headers) = headers {
        script.arg("headers").arg(headers);
    }
    script.arg("payload").arg(row.payload());
}

/// RFC 3339 in UTC with microseconds. The table's check keeps the year within four digits.
fn created_at(us: i64) -> String {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(us) * 1_000)
        .ok()
        .and_then(|at| at.format(CREATED_AT).ok())
        .expect("outbox.messages checks that the year has four digits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_with_microseconds() {
        assert_eq!(created_at(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(
            created_at(1_764_408_896_000_001),
            "2025-11-29T09:34:56.000001Z"
        );
        assert_eq!(
            created_at(-62_135_596_800_000_000),
            "0001-01-01T00:00:00.000000Z"
        );
        assert_eq!(
            created_at(253_402_300_799_999_999),
            "9999-12-31T23:59:59.999999Z"
        );
    }
}
