//! The least a client can do: bytes made beforehand out, replies counted in. What Redis can take is measured with it.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::Error;

/// A connection that sends XADDs.
pub(crate) struct BareRedis {
    socket: TcpStream,
    buffer: Vec<u8>,
    /// Lines of replies that were received and not asked for yet.
    lines: usize,
    /// The last byte that was received.
    last: u8,
}

/// Whether one of these replies is an error. Ids have the same character, but not at the start of a line.
fn has_error(last: u8, received: &[u8]) -> bool {
    last == b'\n' && received.first() == Some(&b'-')
        || received.windows(2).any(|pair| pair == b"\n-")
}

impl BareRedis {
    pub(crate) async fn connect(port: u16) -> Result<Self, Error> {
        let socket = TcpStream::connect(("127.0.0.1", port)).await?;
        socket.set_nodelay(true)?;
        Ok(Self {
            socket,
            buffer: vec![0; 256 << 10],
            lines: 0,
            last: b'\n',
        })
    }

    /// Sends requests.
    pub(crate) async fn send(&mut self, requests: &[u8]) -> Result<(), Error> {
        Ok(self.socket.write_all(requests).await?)
    }

    /// Waits for the replies of `count` XADDs: entry ids, each of two lines.
    pub(crate) async fn added(&mut self, count: usize) -> Result<(), Error> {
        while self.lines < 2 * count {
            let read = self.socket.read(&mut self.buffer).await?;
            let received = &self.buffer[..read];
            if read == 0 || has_error(self.last, received) {
                return Err(format!("Redis refuses: {}", String::from_utf8_lossy(received)).into());
            }
            self.last = received[read - 1];
            self.lines += received.iter().filter(|byte| **byte == b'\n').count();
        }
        self.lines -= 2 * count;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_is_cut_at_its_dash_is_no_error() {
        assert!(!has_error(b'9', b"-0\r\n$15\r\n1764408896000-1\r\n"));
        assert!(has_error(b'\n', b"-OOM command not allowed\r\n"));
        assert!(has_error(
            b'\n',
            b"$15\r\n1764408896000-1\r\n-OOM command not allowed\r\n"
        ));
    }
}
