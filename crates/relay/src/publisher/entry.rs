//! One message as a stream entry: the public contract of the fields and their order.
//!
//! Entries go to the page script packed, many in one argument. As arguments of their own, fifteen for each message, they cost
//! Redis more time than the entries themselves: each is parsed, allocated and copied into Lua by itself.

use time::OffsetDateTime;

use crate::postgres::MessageRow;

/// Entries are packed together up to so many bytes. An argument is thus far from Redis' limit (`proto-max-bulk-len`),
/// unless a single message is not.
const PARCEL_BYTES_MAX: usize = 256 << 10;

/// The entries of a page, packed.
#[derive(Debug, Default)]
pub(super) struct Parcels {
    packed: Vec<u8>,
    /// Of each parcel: how many entries it has, and where it ends.
    ends: Vec<(usize, usize)>,
}

impl Parcels {
    /// Adds an entry to the stream at `key` of the script's KEYS.
    ///
    /// MessagePack: the index, the number of arguments that follow, and those: fields and values in the contract's
    /// order.
    pub(super) fn add(&mut self, key: usize, row: &MessageRow) {
        let before = self.packed.len();
        put(&mut self.packed, key, row);
        let begun = self.ends.iter().rev().nth(1).map_or(0, |(_, end)| *end);
        let after = self.packed.len();
        match self.ends.last_mut() {
            Some((entries, end)) if after - begun <= PARCEL_BYTES_MAX => {
                *entries += 1;
                *end = after;
            }
            _ => {
                debug_assert_eq!(before, self.ends.last().map_or(0, |(_, end)| *end));
                self.ends.push((1, after));
            }
        }
    }

    /// The parcels, each with the number of its entries.
    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = (usize, &[u8])> {
        let mut begin = 0;
        self.ends.iter().map(move |(entries, end)| {
            let parcel = &self.packed[begin..*end];
            begin = *end;
            (*entries, parcel)
        })
    }
}

fn put(to: &mut Vec<u8>, key: usize, row: &MessageRow) {
    let (ordering_key, event_type) = (row.ordering_key(), row.event_type());
    let (content_type, headers) = (row.content_type(), row.headers());
    let fields = 4
        + usize::from(ordering_key.is_some())
        + usize::from(event_type.is_some())
        + usize::from(content_type.is_some())
        + usize::from(headers.is_some());
    number(to, key);
    number(to, 2 * fields);
    let mut digits = [0; 20];
    field(to, "id", decimal(row.id(), &mut digits));
    field(to, "message_key", row.message_key().as_bytes());
    if let Some(ordering_key) = ordering_key {
        field(to, "ordering_key", ordering_key.as_bytes());
    }
    if let Some(event_type) = event_type {
        field(to, "event_type", event_type.as_bytes());
    }
    field(to, "created_at", &created_at(row.created_at_us()));
    if let Some(content_type) = content_type {
        field(to, "content_type", content_type.as_bytes());
    }
    if let Some(headers) = headers {
        field(to, "headers", headers);
    }
    field(to, "payload", row.payload());
}

fn field(to: &mut Vec<u8>, name: &str, value: &[u8]) {
    bytes(to, name.as_bytes());
    bytes(to, value);
}

/// A MessagePack string, which may hold any bytes in Lua.
fn bytes(to: &mut Vec<u8>, value: &[u8]) {
    let length = u32::try_from(value.len()).expect("Postgres has no value of 4 GB");
    match length.to_be_bytes() {
        [0, 0, 0, short @ ..=31] => to.push(0xa0 | short),
        [0, 0, 0, byte] => to.extend_from_slice(&[0xd9, byte]),
        [0, 0, high, low] => to.extend_from_slice(&[0xda, high, low]),
        [a, b, c, d] => to.extend_from_slice(&[0xdb, a, b, c, d]),
    }
    to.extend_from_slice(value);
}

/// A MessagePack number: an index of KEYS, or a number of arguments.
fn number(to: &mut Vec<u8>, value: usize) {
    let value = u32::try_from(value).expect("a page has at most 10,000 streams");
    match value.to_be_bytes() {
        [0, 0, 0, small @ ..=127] => to.push(small),
        [a, b, c, d] => to.extend_from_slice(&[0xce, a, b, c, d]),
    }
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
    fn strings_are_packed_with_the_shortest_head_that_holds_their_length() {
        for (length, head) in [
            (0, &[0xa0][..]),
            (31, &[0xbf]),
            (32, &[0xd9, 32]),
            (255, &[0xd9, 255]),
            (256, &[0xda, 1, 0]),
            (65_535, &[0xda, 255, 255]),
            (65_536, &[0xdb, 0, 1, 0, 0]),
        ] {
            let mut packed = Vec::new();
            bytes(&mut packed, &vec![b'x'; length]);
            assert_eq!(
                (&packed[..head.len()], packed.len()),
                (head, head.len() + length)
            );
        }
    }

    #[test]
    fn numbers_are_packed_small_where_they_are() {
        for (value, expected) in [
            (3, &[3][..]),
            (127, &[127]),
            (128, &[0xce, 0, 0, 0, 128]),
            (10_002, &[0xce, 0, 0, 39, 18]),
        ] {
            let mut packed = Vec::new();
            number(&mut packed, value);
            assert_eq!(packed, expected);
        }
    }

    #[test]
    fn ids_are_decimal() {
        for id in [0, 7, 10, 1_234_567_890, i64::MAX, i64::MIN, -1] {
            assert_eq!(decimal(id, &mut [0; 20]), id.to_string().as_bytes());
        }
    }
}
