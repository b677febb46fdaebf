//! A stream entry as Redis has it.

use std::fmt;

use redis::{RedisWrite, ToRedisArgs, Value};

/// Where an entry stands in its stream: its id as the two numbers that it consists of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    milliseconds: u64,
    sequence: u64,
}

impl Place {
    /// None if it is no id of an entry. An id without a sequence has the sequence 0.
    pub(crate) fn parse(id: &str) -> Option<Self> {
        let (milliseconds, sequence) = id.split_once('-').unwrap_or((id, "0"));
        Some(Self {
            milliseconds: milliseconds.parse().ok()?,
            sequence: sequence.parse().ok()?,
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.milliseconds, self.sequence)
    }
}

impl ToRedisArgs for Place {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        out.write_arg_fmt(self);
    }
}

/// An entry with all its fields.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) place: Place,
    /// Names and values by turns, each a bulk string: as the reply has them, since most of them become a part of the
    /// message without being copied.
    fields: Vec<Value>,
}

impl Entry {
    /// None if one of the fields is no string. A name without a value is left out.
    pub(crate) fn new(id: String, place: Place, fields: Vec<Value>) -> Option<Self> {
        let all_strings = fields
            .iter()
            .all(|field| matches!(field, Value::BulkString(_)));
        all_strings.then_some(Self { id, place, fields })
    }

    /// Names and values, in their order.
    pub(crate) fn fields(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.fields
            .chunks_exact(2)
            .map(|pair| (bytes(&pair[0]), bytes(&pair[1])))
    }

    /// The first field of that name.
    pub(crate) fn field(&self, name: &str) -> Option<&[u8]> {
        self.fields()
            .find(|(field, _)| *field == name.as_bytes())
            .map(|(_, value)| value)
    }

    /// The same, and leaves an empty value in its place.
    pub(crate) fn take(&mut self, name: &str) -> Option<Vec<u8>> {
        let mut pairs = self.fields.chunks_exact_mut(2);
        let pair = pairs.find(|pair| bytes(&pair[0]) == name.as_bytes())?;
        match &mut pair[1] {
            Value::BulkString(value) => Some(std::mem::take(value)),
            _ => None,
        }
    }
}

/// The bytes of a field, which are a bulk string's.
fn bytes(field: &Value) -> &[u8] {
    match field {
        Value::BulkString(bytes) => bytes,
        _ => &[],
    }
}

#[cfg(test)]
impl Entry {
    pub(crate) fn of(id: &str, fields: &[(&str, &[u8])]) -> Self {
        let fields = fields
            .iter()
            .flat_map(|(name, value)| [name.as_bytes(), *value])
            .map(|bytes| Value::BulkString(bytes.to_vec()));
        Self::new(id.to_owned(), Place::parse(id).unwrap(), fields.collect()).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_compared_as_numbers_and_written_as_ids() {
        let place = |id: &str| Place::parse(id).unwrap();
        assert!(place("9-2") > place("9-1") && place("10-0") > place("9-18446744073709551615"));
        assert_eq!(place("1526919030474-55").to_string(), "1526919030474-55");
        assert_eq!(place("7"), place("7-0"));
        for id in ["", "-", "a-0", "1-", "1-2-3"] {
            assert_eq!(Place::parse(id), None, "{id}");
        }
    }

    #[test]
    fn of_fields_with_one_name_the_first_counts() {
        let mut entry = Entry::of("1-0", &[("a", b"1"), ("b", b"2"), ("a", b"3")]);
        assert_eq!(entry.field("a"), Some(b"1".as_slice()));
        assert_eq!(entry.take("a"), Some(b"1".to_vec()));
        assert_eq!(entry.field("a"), Some(b"".as_slice()));
        assert_eq!(entry.take("c"), None);
    }
}
