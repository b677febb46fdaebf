//! As much of the Postgres protocol as is needed to know which statement a request runs, and when it is done.

use std::{collections::HashMap, sync::Arc};

/// What is looked at of one message; the rest is counted only.
const MESSAGE_BYTES_MAX: usize = 64 * 1024;

const PROTOCOL_3_0: u32 = 0x0003_0000;
const PROTOCOL_3_2: u32 = 0x0003_0002;
const SSL_REQUEST: u32 = 80_877_103;
const GSS_REQUEST: u32 = 80_877_104;

/// The type byte and the length, which counts itself but not the type.
const HEADER_BYTES: usize = 5;
/// The length and the code of the first message, which has no type.
const FIRST_BYTES: usize = 8;

/// A statement whose execution a chunk asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Statement {
    /// Where in the chunk its message starts; 0 when that was in an earlier chunk.
    pub(super) start: usize,
    pub(super) sql: Arc<[u8]>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Before the start-up message.
    #[default]
    First,
    /// Inside the start-up message.
    StartUp,
    Messages,
    /// Another protocol, or TLS.
    Opaque,
}

/// Follows the client's bytes from the first one on.
#[derive(Debug, Default)]
pub(super) struct Frames {
    stage: Stage,
    /// The message so far, with its header.
    message: Vec<u8>,
    /// How much of it is still to come after the header.
    left: usize,
    /// Prepared statements by name.
    prepared: HashMap<Vec<u8>, Arc<[u8]>>,
    /// How many times the server has been asked to say that it is ready.
    asked: u64,
    /// The type of the last message.
    last: u8,
}

impl Frames {
    /// What shows that the server has answered everything it has been asked so far, or is being asked.
    pub(super) fn reply_end(&self) -> ReplyEnd {
        if self.stage != Stage::Messages {
            return ReplyEnd::FirstByte;
        }
        let complete = self.message.is_empty() && asks(self.last);
        ReplyEnd::Answers(self.asked + u64::from(!complete))
    }

    /// The statements whose message ends in this chunk.
    pub(super) fn read(&mut self, chunk: &[u8]) -> Vec<Statement> {
        let mut statements = Vec::new();
        let mut rest = chunk;
        let mut start = 0;
        while !rest.is_empty() {
            if self.message.is_empty() {
                start = chunk.len() - rest.len();
            }
            match self.stage {
                Stage::First => {
                    if self.fill(&mut rest, FIRST_BYTES) {
                        self.begin();
                    }
                }
                Stage::StartUp => {
                    self.take_body(&mut rest);
                    self.end_start_up();
                }
                Stage::Messages => {
                    if self.message.len() >= HEADER_BYTES {
                        self.take_body(&mut rest);
                    } else if self.fill(&mut rest, HEADER_BYTES) {
                        self.left = self.number(1).saturating_sub(4);
                    } else {
                        continue;
                    }
                    if self.left == 0 {
                        statements.extend(self.end().map(|sql| Statement { start, sql }));
                        self.message.clear();
                    }
                }
                Stage::Opaque => break,
            }
        }
        statements
    }

    /// Takes bytes until the message has `size`; whether it has.
    fn fill(&mut self, rest: &mut &[u8], size: usize) -> bool {
        let (taken, left) = rest.split_at(rest.len().min(size - self.message.len()));
        self.message.extend_from_slice(taken);
        *rest = left;
        self.message.len() == size
    }

    fn take_body(&mut self, rest: &mut &[u8]) {
        let (taken, left) = rest.split_at(rest.len().min(self.left));
        let room = MESSAGE_BYTES_MAX.saturating_sub(self.message.len());
        self.message
            .extend_from_slice(&taken[..taken.len().min(room)]);
        self.left -= taken.len();
        *rest = left;
    }

    /// The first eight bytes tell the protocol.
    fn begin(&mut self) {
        let code = self.message[4..8].try_into().map(u32::from_be_bytes);
        match code {
            Ok(PROTOCOL_3_0 | PROTOCOL_3_2) => {
                self.stage = Stage::StartUp;
                self.left = self.number(0).saturating_sub(FIRST_BYTES);
                self.end_start_up();
            }
            // The start-up message follows, or TLS, which looks like no protocol at all.
            Ok(SSL_REQUEST | GSS_REQUEST) => self.message.clear(),
            _ => self.stage = Stage::Opaque,
        }
    }

    fn end_start_up(&mut self) {
        if self.left == 0 {
            self.message.clear();
            self.stage = Stage::Messages;
            self.asked = 1;
        }
    }

    /// A message is complete: what it runs, if anything.
    fn end(&mut self) -> Option<Arc<[u8]>> {
        let kind = self.message[0];
        self.asked += u64::from(asks(kind));
        // The Sync before the rows of a COPY is swallowed by it.
        if self.last == b'S' && matches!(kind, b'd' | b'c' | b'f') {
            self.asked -= 1;
        }
        self.last = kind;
        let mut fields = self.message[HEADER_BYTES..].split(|byte| *byte == 0);
        match kind {
            // Query: text.
            b'Q' => Some(fields.next()?.into()),
            // Parse: name, text.
            b'P' => {
                let name = fields.next()?.to_vec();
                self.prepared.insert(name, fields.next()?.into());
                None
            }
            // Bind: portal, name. The execution that follows is part of the same request.
            b'B' => self.prepared.get(fields.nth(1)?).cloned(),
            // Close: kind and name in one.
            b'C' => {
                if let Some((b'S', name)) = fields.next()?.split_first() {
                    self.prepared.remove(name);
                }
                None
            }
            _ => None,
        }
    }

    fn number(&self, at: usize) -> usize {
        number(&self.message, at)
    }
}

/// Whether the server says that it is ready after this message: Sync, Query or FunctionCall.
fn asks(kind: u8) -> bool {
    matches!(kind, b'S' | b'Q' | b'F')
}

/// What shows that the server has done what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyEnd {
    /// Anything: Redis answers after it has executed.
    FirstByte,
    /// So many ReadyForQuery since the connection began. Postgres sends it after the commit, and other things
    /// in between: notifications, or answers to earlier requests that the client did not wait for.
    Answers(u64),
}

/// Follows the server's bytes from the first one on, and counts how often it said that it is ready.
#[derive(Debug, Default)]
pub(super) struct Answers {
    count: u64,
    /// The server has begun to speak in messages; before that it answers requests for encryption by one byte.
    begun: bool,
    header: Vec<u8>,
    /// How much of the current message is still to come after its header.
    left: usize,
}

impl Answers {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn read(&mut self, mut bytes: &[u8]) {
        while let Some(first) = bytes.first() {
            if self.left > 0 {
                let taken = bytes.len().min(self.left);
                self.left -= taken;
                bytes = &bytes[taken..];
                continue;
            }
            if !self.begun && matches!(first, b'N' | b'S' | b'G') {
                bytes = &bytes[1..];
                continue;
            }
            self.begun = true;
            let taken = bytes.len().min(HEADER_BYTES - self.header.len());
            self.header.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if self.header.len() == HEADER_BYTES {
                self.count += u64::from(self.header[0] == b'Z');
                self.left = number(&self.header, 1).saturating_sub(4);
                self.header.clear();
            }
        }
    }
}

/// A big-endian length; 0 when it is not there yet.
fn number(bytes: &[u8], at: usize) -> usize {
    let bytes = bytes
        .get(at..at + 4)
        .and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, |bytes| {
        usize::try_from(u32::from_be_bytes(bytes)).unwrap_or(usize::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let mut message = vec![kind];
        message.extend(u32::try_from(body.len() + 4).unwrap().to_be_bytes());
        message.extend(body);
        message
    }

    fn session() -> Vec<u8> {
        let mut bytes = vec![0, 0, 0, 8];
        bytes.extend(SSL_REQUEST.to_be_bytes());
        bytes.extend([0, 0, 0, 23]);
        bytes.extend(PROTOCOL_3_0.to_be_bytes());
        bytes.extend(b"user\0postgres\0\0");
        bytes
    }

    fn found(frames: &mut Frames, bytes: &[u8], chunk_bytes: usize) -> Vec<String> {
        let statements = bytes
            .chunks(chunk_bytes)
            .flat_map(|chunk| frames.read(chunk));
        statements
            .map(|found| String::from_utf8_lossy(&found.sql).into_owned())
            .collect()
    }

    #[test]
    fn statements_are_found_however_the_bytes_are_cut() {
        let mut bytes = session();
        bytes.extend(message(b'P', b"s1\0UPDATE t\0\0\0"));
        bytes.extend(message(b'S', b""));
        bytes.extend(message(b'B', b"\0s1\0\0\0\0\0\0\0"));
        bytes.extend(message(b'E', b"\0\0\0\0\0"));
        bytes.extend(message(b'S', b""));
        bytes.extend(message(b'd', &vec![b'Q'; MESSAGE_BYTES_MAX + 7]));
        bytes.extend(message(b'Q', b"COMMIT\0"));
        for chunk_bytes in [1, 2, 3, 5, 64, bytes.len()] {
            let mut frames = Frames::default();
            let found = found(&mut frames, &bytes, chunk_bytes);
            assert_eq!(found, ["UPDATE t", "COMMIT"], "chunks of {chunk_bytes}");
        }
    }

    #[test]
    fn a_closed_statement_is_forgotten() {
        let mut bytes = session();
        bytes.extend(message(b'P', b"s1\0UPDATE t\0\0\0"));
        bytes.extend(message(b'C', b"Ss1\0"));
        bytes.extend(message(b'B', b"\0s1\0\0\0\0\0\0\0"));
        let mut frames = Frames::default();
        assert_eq!(found(&mut frames, &bytes, 4096), Vec::<String>::new());
        assert_eq!(frames.reply_end(), ReplyEnd::Answers(2));
    }

    #[test]
    fn redis_is_not_taken_for_postgres() {
        let mut frames = Frames::default();
        assert_eq!(frames.read(b"*1\r\n$4\r\nPING\r\n"), []);
        assert_eq!(frames.reply_end(), ReplyEnd::FirstByte);
    }

    #[test]
    fn an_unfinished_request_is_answered_by_the_next_ready() {
        let mut frames = Frames::default();
        frames.read(&session());
        assert_eq!(frames.reply_end(), ReplyEnd::Answers(2));
        frames.read(&message(b'Q', b"BEGIN\0"));
        assert_eq!(frames.reply_end(), ReplyEnd::Answers(2));
        frames.read(&message(b'Q', b"COMMIT\0")[..7]);
        assert_eq!(frames.reply_end(), ReplyEnd::Answers(3));
        frames.read(&message(b'Q', b"COMMIT\0")[7..]);
        assert_eq!(frames.reply_end(), ReplyEnd::Answers(3));
    }

    #[test]
    fn a_copy_has_one_answer() {
        let mut frames = Frames::default();
        frames.read(&session());
        for kind in [b'B', b'E', b'S', b'd', b'd', b'c', b'S'] {
            frames.read(&message(kind, b""));
        }
        assert_eq!(frames.reply_end(), ReplyEnd::Answers(2));
    }

    #[test]
    fn only_ready_counts_as_an_answer() {
        let mut reply = b"N".to_vec();
        reply.extend(message(b'R', b"\0\0\0\0"));
        reply.extend(message(b'Z', b"I"));
        reply.extend(message(b'A', b"\0\0\0\x07outbox\0\0"));
        reply.extend(message(b'C', b"COMMIT\0"));
        reply.extend(message(b'Z', b"I"));
        for chunk_bytes in [1, 3, reply.len()] {
            let mut answers = Answers::default();
            reply
                .chunks(chunk_bytes)
                .for_each(|chunk| answers.read(chunk));
            assert_eq!(answers.count(), 2, "chunks of {chunk_bytes}");
        }
    }
}
