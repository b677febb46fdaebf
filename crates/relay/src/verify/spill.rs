//! What was read of the streams, in compact records on disk, so that memory does not grow with the streams.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{BufReader, Read, Seek, SeekFrom, Write};

use super::EntryId;
use crate::error::{Error, Result};

/// Parts of a spill. A run over 25 million entries still loads each part in one go, see [`super::LOADED_MAX`].
pub(super) const PARTS: usize = 64;

/// What is gathered before it is written; a short run never touches the disk.
const BUFFER_BYTES: usize = 32 << 10;

const RECORD_BYTES: usize = 46;

/// How far a consumer group has got with an entry, as it was when the entry was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Given {
    /// No group was asked about, or it does not read this stream.
    NotAsked,
    /// The group has not come to it yet.
    NotYet,
    /// Given to a member and not acknowledged.
    Pending,
    /// Acknowledged, or skipped.
    Acknowledged,
}

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// An entry; `hash` is that of its message key, or in the spill by ordering key of that.
    Entry,
    /// An entry that came after one of its ordering key with a higher id, which is in `hash`.
    Late,
}

/// An entry in 46 bytes. Sorted by id, entries before what is said about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Record {
    pub(super) id: i64,
    pub(super) kind: Kind,
    pub(super) hash: [u64; 2],
    pub(super) entry: EntryId,
    /// Index of the stream.
    pub(super) stream: u32,
    pub(super) given: Given,
}

impl Record {
    fn write(&self, to: &mut Vec<u8>) {
        to.extend(self.id.to_le_bytes());
        to.extend(self.hash[0].to_le_bytes());
        to.extend(self.hash[1].to_le_bytes());
        to.extend(self.entry.0.to_le_bytes());
        to.extend(self.entry.1.to_le_bytes());
        to.extend(self.stream.to_le_bytes());
        to.push(match self.kind {
            Kind::Entry => 0,
            Kind::Late => 1,
        });
        to.push(match self.given {
            Given::NotAsked => 0,
            Given::NotYet => 1,
            Given::Pending => 2,
            Given::Acknowledged => 3,
        });
    }

    fn read(from: &[u8; RECORD_BYTES]) -> Record {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&from[at..at + 8]);
            bytes
        };
        let mut stream = [0; 4];
        stream.copy_from_slice(&from[40..44]);
        Record {
            id: i64::from_le_bytes(word(0)),
            hash: [u64::from_le_bytes(word(8)), u64::from_le_bytes(word(16))],
            entry: EntryId(u64::from_le_bytes(word(24)), u64::from_le_bytes(word(32))),
            stream: u32::from_le_bytes(stream),
            kind: if from[44] == 0 {
                Kind::Entry
            } else {
                Kind::Late
            },
            given: match from[45] {
                0 => Given::NotAsked,
                1 => Given::NotYet,
                2 => Given::Pending,
                _ => Given::Acknowledged,
            },
        }
    }
}

/// Hashes of keys: 128 bits, of functions drawn anew in each run, so that nobody can prepare two equal ones.
#[derive(Default)]
pub(super) struct Hashes(RandomState, RandomState);

impl Hashes {
    pub(super) fn of(&self, key: &[u8]) -> [u64; 2] {
        [self.0.hash_one(key), self.1.hash_one(key)]
    }
}

/// Records in parts, each in the order in which they were put. The files have no name, and go with the process.
#[derive(Default)]
pub(super) struct Spill {
    parts: Vec<Part>,
}

#[derive(Default)]
struct Part {
    buffer: Vec<u8>,
    file: Option<File>,
    records: usize,
}

impl Spill {
    pub(super) fn new() -> Self {
        let mut parts = Vec::new();
        parts.resize_with(PARTS, Part::default);
        Spill { parts }
    }

    pub(super) fn put(&mut self, part: usize, record: &Record) -> Result<()> {
        let part = &mut self.parts[part];
        record.write(&mut part.buffer);
        part.records += 1;
        if part.buffer.len() >= BUFFER_BYTES {
            part.flush().map_err(no_room)?;
        }
        Ok(())
    }

    /// How many records a part has.
    pub(super) fn records(&self, part: usize) -> usize {
        self.parts[part].records
    }

    /// All records of a part.
    pub(super) fn each(
        &mut self,
        part: usize,
        mut take: impl FnMut(Record) -> Result<()>,
    ) -> Result<()> {
        let part = &mut self.parts[part];
        if part.file.is_some() {
            part.flush().map_err(no_room)?;
        }
        let mut bytes = [0; RECORD_BYTES];
        if let Some(file) = &mut part.file {
            file.seek(SeekFrom::Start(0)).map_err(no_room)?;
            let mut reader = BufReader::with_capacity(BUFFER_BYTES, file);
            for _ in 0..part.records {
                reader.read_exact(&mut bytes).map_err(no_room)?;
                take(Record::read(&bytes))?;
            }
            return Ok(());
        }
        for chunk in part.buffer.chunks_exact(RECORD_BYTES) {
            bytes.copy_from_slice(chunk);
            take(Record::read(&bytes))?;
        }
        Ok(())
    }

    /// Gives a part's room back.
    pub(super) fn forget(&mut self, part: usize) {
        self.parts[part] = Part::default();
    }
}

impl Part {
    fn flush(&mut self) -> std::io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(tempfile::tempfile()?),
        };
        // A part that was read stands at its end.
        file.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

fn no_room(error: std::io::Error) -> Error {
    Error::Setup {
        problem: format!(
            "cannot use a temporary file in {}: {error}",
            std::env::temp_dir().display()
        ),
        remedy:
            "make room there, 100 bytes for each stream entry, or name another directory in TMPDIR"
                .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(n: u64) -> Record {
        Record {
            id: -1 - i64::try_from(n).unwrap_or(0),
            kind: if n.is_multiple_of(2) {
                Kind::Entry
            } else {
                Kind::Late
            },
            hash: [n << 40, n],
            entry: EntryId(n, u64::MAX - n),
            stream: u32::MAX,
            given: [
                Given::NotAsked,
                Given::NotYet,
                Given::Pending,
                Given::Acknowledged,
            ][usize::try_from(n % 4).unwrap_or(0)],
        }
    }

    #[test]
    fn records_come_back_in_their_order_from_memory_and_from_disk() -> Result<()> {
        for count in [0, 3, 5_000] {
            let mut spill = Spill::new();
            for n in 0..count {
                spill.put(7, &record(n))?;
            }
            // Also after more was put behind what was read.
            for total in [count, count + 1] {
                let mut seen = 0;
                spill.each(7, |found| {
                    assert_eq!(found, record(seen));
                    seen += 1;
                    Ok(())
                })?;
                assert_eq!(seen, total);
                spill.put(7, &record(total))?;
            }
            spill.each(6, |_| panic!("another part is empty"))?;
        }
        Ok(())
    }

    #[test]
    fn keys_have_their_own_hashes() {
        let hashes = Hashes::default();
        assert_eq!(hashes.of(b"a"), hashes.of(b"a"));
        assert_ne!(hashes.of(b"a"), hashes.of(b"b"));
        assert_ne!(hashes.of(b"a")[0], hashes.of(b"a")[1]);
    }
}
