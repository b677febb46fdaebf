//! Finds entries that came after one of their ordering key with a higher id.

use std::collections::HashMap;

use super::range::IdRange;
use super::spill::{Kind, PARTS, Record, Spill};
use super::{LOADED_MAX, stripe};
use crate::error::Result;

/// Reads the spill by ordering key, and writes what came late into the spill by id: only there it is known
/// whether the entry is the first of its message or a copy, which disorders nothing.
///
/// A part holds all entries of an ordering key, in the order of the stream, so the highest id so far tells all. A part
/// with too many keys for memory is gone through several times.
pub(super) fn find_late(by_key: &mut Spill, by_id: &mut Spill, range: IdRange) -> Result<()> {
    for part in 0..PARTS {
        let passes = by_key.records(part).div_ceil(LOADED_MAX);
        for pass in 0..passes {
            let mut stream = None;
            let mut highest: HashMap<[u64; 2], i64> = HashMap::new();
            by_key.each(part, |record| {
                if stream != Some(record.stream) {
                    stream = Some(record.stream);
                    highest.clear();
                }
                if stripe(record.hash[1], passes) != pass {
                    return Ok(());
                }
                let high = highest.entry(record.hash).or_insert(record.id);
                if record.id >= *high {
                    *high = record.id;
                    return Ok(());
                }
                let after = u64::try_from(*high).unwrap_or(0);
                let late = Record {
                    kind: Kind::Late,
                    hash: [after, 0],
                    ..record
                };
                by_id.put(range.part(record.id), &late)
            })?;
        }
        by_key.forget(part);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::EntryId;
    use super::super::spill::Given;
    use super::*;

    #[test]
    fn an_entry_is_late_after_a_higher_id_of_its_key_and_stream() -> Result<()> {
        let range = IdRange { from: 1, to: 100 };
        let (mut by_key, mut by_id) = (Spill::new(), Spill::new());
        // Stream, key, id; in the order of the streams.
        let entries = [
            (0, 7, 1),
            (0, 7, 5),
            (0, 8, 3),
            (0, 7, 4),
            (0, 7, 6),
            (1, 7, 2),
            (1, 7, 2),
        ];
        for (place, (stream, key, id)) in (0..).zip(entries) {
            let record = Record {
                id,
                kind: Kind::Entry,
                hash: [key, key],
                entry: EntryId(place, 0),
                stream,
                given: Given::NotAsked,
            };
            by_key.put(0, &record)?;
        }
        find_late(&mut by_key, &mut by_id, range)?;
        let mut late = Vec::new();
        for part in 0..PARTS {
            by_id.each(part, |record| {
                late.push((record.id, record.entry, record.hash[0]));
                Ok(())
            })?;
        }
        assert_eq!(late, [(4, EntryId(3, 0), 5)]);
        Ok(())
    }
}
