//! One connection through the proxy: two pumps, and what can stop them.

use std::{
    io,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::watch,
};

use super::{
    Control, Direction, Shared,
    frames::{Answers, ReplyEnd},
    hold::{HoldState, Scanner},
};

/// Read in one go. A large request passes in several chunks.
const CHUNK_BYTES: usize = 16 * 1024;

/// A held reply is read ahead up to this much; beyond that the kernel's buffers have to do.
const HELD_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Both sockets are to be reset.
#[derive(Debug)]
pub(super) struct Reset;

/// What the pump of requests tells the pump of replies: hold what comes next, and what shows that the server
/// has answered.
type ReplyHold = Mutex<Option<(Arc<HoldState>, ReplyEnd)>>;

/// Forwards until both sides have ended or the connection is reset.
pub(super) async fn run(
    mut client: TcpStream,
    control: watch::Receiver<Control>,
    shared: &Shared,
    id: u64,
) {
    let Ok(mut server) = connect(control.clone(), shared).await else {
        reset(&client);
        return;
    };
    // Small requests must not wait for each other. Failing that, they are only slower.
    let _ = client
        .set_nodelay(true)
        .and_then(|()| server.set_nodelay(true));
    let reply_hold = ReplyHold::default();
    let ended = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let requests = Requests {
            source: Source::new(from_client, control.clone()),
            to: to_server,
            scanner: Scanner::default(),
            shared,
            id,
            reply_hold: &reply_hold,
        };
        let replies = Replies {
            source: Source::new(from_server, control.clone()),
            to: to_client,
            answers: Answers::default(),
            reply_hold: &reply_hold,
        };
        let mut control = control;
        tokio::select! {
            biased;
            _ = until(&mut control, |control| control.reset) => Err(Reset),
            ended = async { tokio::try_join!(requests.pump(), replies.pump()) } => ended.map(drop),
        }
    };
    if ended.is_err() {
        reset(&client);
        reset(&server);
    }
}

/// Connects to the current target. A frozen connection waits with that until it is thawed.
async fn connect(
    mut control: watch::Receiver<Control>,
    shared: &Shared,
) -> Result<TcpStream, Reset> {
    until(&mut control, |control| control.reset || !control.frozen).await?;
    if control.borrow().reset {
        return Err(Reset);
    }
    let target = shared.lock().target;
    TcpStream::connect((Ipv4Addr::LOCALHOST, target))
        .await
        .map_err(|_| Reset)
}

/// Makes the close that follows send RST.
fn reset(socket: &TcpStream) {
    // It fails on a socket that is closed already.
    let _ = socket.set_zero_linger();
}

/// Waits until the control says so; [`Reset`] when the proxy is gone.
async fn until(
    control: &mut watch::Receiver<Control>,
    condition: impl Fn(&Control) -> bool,
) -> Result<(), Reset> {
    control
        .wait_for(|control| condition(control))
        .await
        .map(drop)
        .map_err(|_| Reset)
}

/// One side's bytes, which stand still while the connection is frozen.
struct Source<'a> {
    from: ReadHalf<'a>,
    control: watch::Receiver<Control>,
}

impl<'a> Source<'a> {
    fn new(from: ReadHalf<'a>, control: watch::Receiver<Control>) -> Self {
        Self { from, control }
    }

    async fn read(&mut self, buffer: &mut [u8]) -> Result<io::Result<usize>, Reset> {
        loop {
            self.thawed().await?;
            tokio::select! {
                biased;
                frozen = until(&mut self.control, |control| control.frozen) => frozen?,
                read = self.from.read(buffer) => return Ok(read),
            }
        }
    }

    async fn thawed(&mut self) -> Result<(), Reset> {
        until(&mut self.control, |control| !control.frozen).await
    }
}

/// From the client to the server.
struct Requests<'a> {
    source: Source<'a>,
    to: WriteHalf<'a>,
    scanner: Scanner,
    shared: &'a Shared,
    id: u64,
    reply_hold: &'a ReplyHold,
}

impl Requests<'_> {
    async fn pump(mut self) -> Result<(), Reset> {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            // A client that died says the same to the server as one that left: what it sent before still counts.
            let read = self.source.read(&mut buffer).await?.unwrap_or(0);
            if read == 0 {
                self.source.thawed().await?;
                // Fails when the server is gone too.
                let _ = self.to.shutdown().await;
                return Ok(());
            }
            self.cut_reply();
            self.forward(&buffer[..read]).await?;
        }
    }

    /// Takes one of the proxy's pending cuts for this connection, before the request is forwarded.
    fn cut_reply(&self) {
        let mut state = self.shared.lock();
        if state.cuts_left == 0 {
            return;
        }
        let mut taken = false;
        if let Some(link) = state.links.get(&self.id) {
            link.send_if_modified(|control| {
                // The rest of a request that came in several chunks takes no second cut.
                taken = !control.cut;
                control.cut = true;
                taken
            });
        }
        state.cuts_left -= usize::from(taken);
    }

    async fn forward(&mut self, chunk: &[u8]) -> Result<(), Reset> {
        let holds = self.shared.lock().holds.clone();
        let mut forwarded = 0;
        for hit in self.scanner.scan(chunk, &holds) {
            if !hit.hold.claim() {
                continue;
            }
            self.write(&chunk[forwarded..hit.start]).await?;
            forwarded = hit.start;
            match hit.hold.direction() {
                Direction::Request => {
                    hit.hold.reach();
                    hit.hold.decision().await?;
                }
                // Before the last byte of the request goes out, so that no reply can slip through.
                Direction::Reply => {
                    let held = (hit.hold, self.scanner.reply_end());
                    *self
                        .reply_hold
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner) = Some(held);
                }
            }
        }
        self.write(&chunk[forwarded..]).await
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), Reset> {
        self.source.thawed().await?;
        self.to.write_all(bytes).await.map_err(|_| Reset)
    }
}

/// From the server to the client.
struct Replies<'a> {
    source: Source<'a>,
    to: WriteHalf<'a>,
    answers: Answers,
    reply_hold: &'a ReplyHold,
}

impl Replies<'_> {
    async fn pump(mut self) -> Result<(), Reset> {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            // A server that died resets its connections.
            let read = self.source.read(&mut buffer).await?.map_err(|_| Reset)?;
            if read > 0 && self.source.control.borrow().cut {
                return Err(Reset);
            }
            self.answers.read(&buffer[..read]);
            let held = self
                .reply_hold
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            let mut ended = read == 0;
            if let Some((hold, reply_end)) = held {
                let mut reply = buffer[..read].to_vec();
                ended = self.hold(&hold, reply_end, &mut reply, ended).await?;
                if self.write(&reply).await.is_err() {
                    return Ok(());
                }
            } else if self.write(&buffer[..read]).await.is_err() {
                // The client is gone. What it asked for may still be on its way to the server.
                return Ok(());
            }
            if ended {
                self.source.thawed().await?;
                // Fails when the client is gone too.
                let _ = self.to.shutdown().await;
                return Ok(());
            }
        }
    }

    /// Keeps the reply back until the test has decided. Returns whether the server has ended meanwhile.
    async fn hold(
        &mut self,
        hold: &HoldState,
        reply_end: ReplyEnd,
        reply: &mut Vec<u8>,
        mut ended: bool,
    ) -> Result<bool, Reset> {
        let mut buffer = vec![0; CHUNK_BYTES];
        while !ended && reply.len() < HELD_BYTES_MAX && !self.has_answered(reply_end, reply) {
            tokio::select! {
                read = self.source.read(&mut buffer) => {
                    let read = read?.unwrap_or(0);
                    self.answers.read(&buffer[..read]);
                    reply.extend_from_slice(&buffer[..read]);
                    ended = read == 0;
                }
                decision = hold.decision() => return decision.map(|()| ended),
            }
        }
        if self.has_answered(reply_end, reply) {
            hold.reach();
        }
        hold.decision().await?;
        Ok(ended)
    }

    fn has_answered(&self, reply_end: ReplyEnd, reply: &[u8]) -> bool {
        match reply_end {
            ReplyEnd::FirstByte => !reply.is_empty(),
            ReplyEnd::Answers(count) => self.answers.count() >= count,
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), Reset> {
        self.source.thawed().await?;
        self.to.write_all(bytes).await.map_err(|_| Reset)
    }
}
