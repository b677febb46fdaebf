//! The replies of Redis' stream commands, under either version of its protocol.

use redis::Value;

use crate::{
    decision::{Fault, Origin},
    entry::{Entry, Place},
    trouble::Trouble,
};

/// The entries of one stream, and the ids of those that are pending but no longer exist.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delivered {
    pub(crate) entries: Vec<Entry>,
    pub(crate) lost: Vec<String>,
}

/// The reply of XREADGROUP: what each stream gave. Nil, when the wait was over, is no stream.
pub(crate) fn read_group(reply: Value) -> Result<Vec<(String, Delivered)>, Trouble> {
    let streams = match reply {
        Value::Nil => return Ok(Vec::new()),
        Value::Map(streams) => streams,
        Value::Array(streams) => streams.into_iter().map(pair).collect::<Result<_, _>>()?,
        other => return Err(unexpected("XREADGROUP", &other)),
    };
    streams
        .into_iter()
        .map(|(stream, entries)| Ok((text(stream)?, delivered(entries)?)))
        .collect()
}

/// The reply of XAUTOCLAIM: the cursor to go on from (`0-0` when it has wrapped) and what was claimed.
pub(crate) fn auto_claim(reply: Value) -> Result<(String, Delivered), Trouble> {
    let Value::Array(parts) = reply else {
        return Err(unexpected("XAUTOCLAIM", &reply));
    };
    let mut parts = parts.into_iter();
    let (Some(cursor), Some(entries)) = (parts.next(), parts.next()) else {
        return Err(unexpected("XAUTOCLAIM", &Value::Nil));
    };
    let cursor = text(cursor)?;
    let mut delivered = delivered(entries)?;
    if let Some(Value::Array(deleted)) = parts.next() {
        for id in deleted {
            delivered.lost.push(text(id)?);
        }
    }
    Ok((cursor, delivered))
}

/// The reply of XPENDING without a range: how many entries each member of the group holds.
pub(crate) fn pending_by_member(reply: Value) -> Result<Vec<(String, usize)>, Trouble> {
    let Value::Array(parts) = reply else {
        return Err(unexpected("XPENDING", &reply));
    };
    match parts.into_iter().nth(3) {
        Some(Value::Array(members)) => members
            .into_iter()
            .map(|member| {
                let (name, count) = pair(member)?;
                let count = match count {
                    Value::Int(count) => usize::try_from(count).unwrap_or(0),
                    count => text(count)?.parse().unwrap_or(0),
                };
                Ok((text(name)?, count))
            })
            .collect(),
        _ => Ok(Vec::new()),
    }
}

fn delivered(entries: Value) -> Result<Delivered, Trouble> {
    let mut delivered = Delivered::default();
    let entries = match entries {
        Value::Nil => return Ok(delivered),
        Value::Array(entries) => entries,
        other => return Err(unexpected("a stream command", &other)),
    };
    delivered.entries.reserve_exact(entries.len());
    for entry in entries {
        let (id, fields) = pair(entry)?;
        let id = text(id)?;
        match fields {
            Value::Nil => delivered.lost.push(id),
            fields => delivered.entries.push(whole(id, fields)?),
        }
    }
    Ok(delivered)
}

fn whole(id: String, fields: Value) -> Result<Entry, Trouble> {
    let fields = match fields {
        Value::Array(fields) => fields,
        Value::Map(pairs) => pairs
            .into_iter()
            .flat_map(|(name, value)| [name, value])
            .collect(),
        other => return Err(unexpected("a stream command", &other)),
    };
    let place = Place::parse(&id);
    place
        .and_then(|place| Entry::new(id, place, fields))
        .ok_or_else(|| unexpected("a stream command", &Value::Array(Vec::new())))
}

fn pair(value: Value) -> Result<(Value, Value), Trouble> {
    match value {
        Value::Array(items) => match <[Value; 2]>::try_from(items) {
            Ok([first, second]) => Ok((first, second)),
            Err(items) => Err(unexpected("a stream command", &Value::Array(items))),
        },
        other => Err(unexpected("a stream command", &other)),
    }
}

fn text(value: Value) -> Result<String, Trouble> {
    let text = match value {
        Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text),
        other => return Err(unexpected("a stream command", &other)),
    };
    text.ok_or_else(|| unexpected("a stream command", &Value::Nil))
}

fn unexpected(command: &str, value: &Value) -> Trouble {
    let kind = match value {
        Value::Nil => "nil",
        Value::Int(_) => "a number",
        Value::BulkString(_)
        | Value::SimpleString(_)
        | Value::Okay
        | Value::VerbatimString { .. } => "a string",
        Value::Array(_) | Value::Set(_) => "a list",
        Value::Map(_) => "a map",
        _ => "a value of another kind",
    };
    Trouble::new(
        Origin::Library,
        Fault::OtherRedis,
        format!("unexpected reply to {command}: {kind}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn entry(id: &str) -> Value {
        Value::Array(vec![bulk(id), Value::Array(vec![bulk("a"), bulk("1")])])
    }

    fn gone(id: &str) -> Value {
        Value::Array(vec![bulk(id), Value::Nil])
    }

    #[test]
    fn a_read_is_understood_in_both_protocols() {
        let entries = || Value::Array(vec![entry("1-0"), gone("2-0")]);
        let resp2 = Value::Array(vec![Value::Array(vec![bulk("s"), entries()])]);
        let resp3 = Value::Map(vec![(bulk("s"), entries())]);
        for reply in [resp2, resp3] {
            let streams = read_group(reply).unwrap();
            assert_eq!(streams.len(), 1);
            let (stream, delivered) = &streams[0];
            assert_eq!(stream, "s");
            assert_eq!(delivered.entries[0].field("a"), Some(b"1".as_slice()));
            assert_eq!(delivered.lost, ["2-0"]);
        }
        assert!(read_group(Value::Nil).unwrap().is_empty());
    }

    #[test]
    fn a_claim_reports_the_cursor_and_the_lost() {
        let reply = Value::Array(vec![
            bulk("7-0"),
            Value::Array(vec![entry("1-0")]),
            Value::Array(vec![bulk("2-0")]),
        ]);
        let (cursor, delivered) = auto_claim(reply).unwrap();
        assert_eq!(cursor, "7-0");
        assert_eq!(delivered.entries.len(), 1);
        assert_eq!(delivered.lost, ["2-0"]);
    }

    #[test]
    fn the_holders_of_pending_entries_are_listed() {
        let member = |name, count| Value::Array(vec![bulk(name), bulk(count)]);
        let members = Value::Array(vec![member("a", "2"), member("b", "1")]);
        let reply = Value::Array(vec![Value::Int(3), bulk("1-0"), bulk("3-0"), members]);
        let holders = pending_by_member(reply).unwrap();
        assert_eq!(holders, [("a".to_owned(), 2), ("b".to_owned(), 1)]);
        let none = Value::Array(vec![Value::Int(0), Value::Nil, Value::Nil, Value::Nil]);
        assert!(pending_by_member(none).unwrap().is_empty());
    }

    #[test]
    fn a_reply_of_another_shape_is_an_outage() {
        for reply in [Value::Int(1), Value::Array(vec![Value::Int(1)])] {
            assert_eq!(
                read_group(reply.clone()).unwrap_err().fault,
                Fault::OtherRedis
            );
            assert_eq!(auto_claim(reply).unwrap_err().fault, Fault::OtherRedis);
        }
    }
}
