//! The messages of every arm: made from their number alone, so that all arms carry the same bytes.

use std::{fmt::Write as _, sync::LazyLock};

use time::{OffsetDateTime, macros::format_description};

/// Bytes of each payload.
pub(crate) const PAYLOAD_BYTES: usize = 203;

/// Every message was created in the second in which the benchmark began, in the microsecond of its number. A consumer
/// looks twice at messages that are older than its inbox.
static CREATED_AT: LazyLock<String> = LazyLock::new(|| {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]");
    let now = OffsetDateTime::now_utc();
    now.format(format)
        .expect("a time of today has a year of four digits")
});

/// How messages are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spread {
    pub(crate) topics: u64,
    pub(crate) ordering_keys: u64,
}

/// One topic, a thousand keys.
pub(crate) const ONE_TOPIC: Spread = Spread {
    topics: 1,
    ordering_keys: 1_000,
};

/// Many of both.
pub(crate) const MANY_TOPICS: Spread = Spread {
    topics: 100,
    ordering_keys: 100_000,
};

/// One message with every field that a JSON message has. `content_type` is for binary payloads only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) topic: String,
    pub(crate) ordering_key: String,
    pub(crate) message_key: String,
    pub(crate) event_type: &'static str,
    pub(crate) created_at: String,
    pub(crate) headers: String,
    pub(crate) payload: String,
}

/// The topic of number `topic`.
pub(crate) fn topic(topic: u64) -> String {
    format!("orders-{topic:02}")
}

/// The stream of a topic, under the relay's default prefix.
pub(crate) fn stream(topic: &str) -> String {
    format!("outbox:{topic}")
}

/// The message of a number, from 1.
///
/// Keys and payloads are as different as real ones are. Redis' Lua keeps every string in one table, by a hash of some of
/// its bytes; texts that differ in a counter only would meet in few places of it.
pub(crate) fn row(number: u64, spread: Spread) -> Row {
    let random = scattered(number);
    let customer = random % spread.ordering_keys;
    let mut payload = format!(
        r#"{{"order":{number},"customer":{customer},"cents":{},"currency":"EUR","lines":[{{"sku":"{:08x}","count":{}}}],"voucher":"{random:016x}","note":""#,
        500 + random % 9_500,
        random >> 32,
        1 + random % 5,
    );
    while payload.len() < PAYLOAD_BYTES - 2 {
        payload.push('x');
    }
    payload.push_str("\"}");
    let trace = (scattered(random), scattered(!random));
    Row {
        topic: topic(number % spread.topics),
        ordering_key: format!("customer-{customer}"),
        message_key: message_key(number),
        event_type: "order.placed",
        created_at: format!("{}.{:06}Z", *CREATED_AT, number % 1_000_000),
        headers: format!(
            r#"{{"traceparent":"00-{:016x}{random:016x}-{:016x}-01"}}"#,
            trace.0, trace.1
        ),
        payload,
    }
}

/// The key of the message of a number: as long as a UUID, and as those of version 7 ascending in front and random behind.
pub(crate) fn message_key(number: u64) -> String {
    let random = scattered(number);
    format!(
        "{number:08x}-7d10-7{:03x}-{:04x}-{:012x}",
        random & 0xfff,
        0x8000 | (random >> 12) & 0x3fff,
        random >> 16
    )
}

/// A number without any pattern, always the same for the same number (splitmix64).
fn scattered(number: u64) -> u64 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The number of a message that was found somewhere.
pub(crate) fn number_of(message_key: &str) -> Option<u64> {
    u64::from_str_radix(message_key.split('-').next()?, 16).ok()
}

impl Row {
    /// A line of COPY in text format: topic, ordering key, message key, event type, created at, headers, payload.
    pub(crate) fn copy_line(&self, to: &mut String) {
        let fields = [
            &self.topic,
            &self.ordering_key,
            &self.message_key,
            self.event_type,
            &self.created_at,
            &self.headers,
            &self.payload,
        ];
        // None of them has a tab, a backslash or a line end.
        let line = fields.join("\t");
        let _ = writeln!(to, "{line}");
    }

    /// Adds the XADD of this message in Redis' protocol, with the fields of the relay's entries in their order.
    pub(crate) fn xadd(&self, id: u64, to: &mut Vec<u8>) {
        let (stream, id) = (stream(&self.topic), id.to_string());
        xadd(
            to,
            &stream,
            &[
                ("id", &id),
                ("message_key", &self.message_key),
                ("ordering_key", &self.ordering_key),
                ("event_type", self.event_type),
                ("created_at", &self.created_at),
                ("headers", &self.headers),
                ("payload", &self.payload),
            ],
        );
    }
}

/// Adds an XADD in Redis' protocol.
pub(crate) fn xadd(to: &mut Vec<u8>, stream: &str, fields: &[(&str, &str)]) {
    let head = format!("*{}\r\n$4\r\nXADD\r\n", 3 + 2 * fields.len());
    to.extend_from_slice(head.as_bytes());
    bulk(to, stream);
    to.extend_from_slice(b"$1\r\n*\r\n");
    for (name, value) in fields {
        bulk(to, name);
        bulk(to, value);
    }
}

fn bulk(to: &mut Vec<u8>, text: &str) {
    // Not `format!`: this is the reference's hot path too.
    let mut digits = [0_u8; 20];
    let (mut at, mut rest) = (digits.len(), text.len());
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    to.push(b'$');
    to.extend_from_slice(&digits[at..]);
    to.extend_from_slice(b"\r\n");
    to.extend_from_slice(text.as_bytes());
    to.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_json_of_the_same_length() {
        for number in [1, 999, 20_000_000] {
            let row = row(number, MANY_TOPICS);
            assert_eq!(row.payload.len(), PAYLOAD_BYTES);
            let json: serde_json::Value = serde_json::from_str(&row.payload).unwrap();
            assert_eq!(json["order"], number);
            serde_json::from_str::<serde_json::Value>(&row.headers).unwrap();
            assert_eq!(row.message_key.len(), 36);
            assert_eq!(number_of(&row.message_key), Some(number));
        }
    }

    #[test]
    fn an_xadd_is_an_array_of_bulk_strings() {
        let mut bytes = Vec::new();
        xadd(&mut bytes, "s", &[("name", "a value of 16 ch")]);
        assert_eq!(
            String::from_utf8(bytes).unwrap(),
            "*5\r\n$4\r\nXADD\r\n$1\r\ns\r\n$1\r\n*\r\n$4\r\nname\r\n$16\r\na value of 16 ch\r\n"
        );
    }
}
