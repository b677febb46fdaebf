//! A loopback TCP proxy that fails the way networks do, or exactly where a test wants it to.

mod frames;
mod hold;
mod link;

use std::{
    collections::HashMap,
    net::Ipv4Addr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

use self::hold::HoldState;
pub use self::hold::{Direction, Hold, Matcher};
use crate::{Error, eventually, ports::Port};

/// A reset needs one turn of each connection's task.
const RESET_DEADLINE: Duration = Duration::from_secs(10);

/// Starts are tried on another port when somebody outside the kit took this one.
const PORT_TRIES_MAX: u32 = 5;

/// What a connection's task is told.
#[derive(Clone, Copy, Debug, Default)]
struct Control {
    /// Nothing is read or forwarded, and an end is not passed on.
    frozen: bool,
    /// Both sockets are reset.
    reset: bool,
    /// The next bytes from the server are dropped and both sockets reset.
    cut: bool,
}

#[derive(Debug)]
struct State {
    target: u16,
    /// New connections start frozen.
    freeze_new: bool,
    /// How many requests still lose their reply.
    cuts_left: usize,
    links: HashMap<u64, watch::Sender<Control>>,
    holds: Vec<Arc<HoldState>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    next_id: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change under this lock is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }
}

/// A TCP proxy on 127.0.0.1 before one server. It starts in [`pass`](Self::pass) and belongs to the runtime
/// that started it; dropped, it resets its connections.
///
/// What it has already handed to a socket when a mode changes can still arrive.
#[derive(Debug)]
pub struct Proxy {
    port: Port,
    shared: Arc<Shared>,
    /// Absent while connections are refused.
    acceptor: tokio::sync::Mutex<Option<JoinHandle<()>>>,
}

impl Proxy {
    /// Starts a proxy before the server on `target_port` of 127.0.0.1, which need not run yet: a connection that
    /// cannot be passed on is reset.
    ///
    /// # Errors
    ///
    /// No port is free.
    pub async fn start(target_port: u16) -> Result<Self, Error> {
        let mut tries = 1;
        let (port, listener) = loop {
            let port = Port::reserve()?;
            match listen(port.number()).await {
                Ok(listener) => break (port, listener),
                Err(e) if tries == PORT_TRIES_MAX => return Err(e),
                Err(_) => tries += 1,
            }
        };
        let state = State {
            target: target_port,
            freeze_new: false,
            cuts_left: 0,
            links: HashMap::new(),
            holds: Vec::new(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            next_id: AtomicU64::new(1),
        });
        let acceptor = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self {
            port,
            shared,
            acceptor: tokio::sync::Mutex::new(Some(acceptor)),
        })
    }

    /// Where clients connect.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// How many connections are open through the proxy.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.lock().links.len()
    }

    /// Forwards everything, as after the start. Connections in a black hole go on where they were, as after a
    /// healed partition; pending [`cut_reply`](Self::cut_reply)s are forgotten, holds are not.
    ///
    /// # Errors
    ///
    /// The port cannot be opened again after [`refuse`](Self::refuse).
    pub async fn pass(&self) -> Result<(), Error> {
        {
            let mut state = self.shared.lock();
            state.freeze_new = false;
            state.cuts_left = 0;
            state.tell_all(|control| {
                control.frozen = false;
                control.cut = false;
            });
        }
        self.open().await
    }

    /// Connections that exist stay open and forward nothing, without FIN or RST; new ones pass.
    ///
    /// # Errors
    ///
    /// The port cannot be opened again after [`refuse`](Self::refuse).
    pub async fn blackhole(&self) -> Result<(), Error> {
        {
            let mut state = self.shared.lock();
            state.freeze_new = false;
            state.tell_all(|control| control.frozen = true);
        }
        self.open().await
    }

    /// Connections that exist stay open and forward nothing; new ones are accepted and forward nothing either.
    ///
    /// # Errors
    ///
    /// The port cannot be opened again after [`refuse`](Self::refuse).
    pub async fn blackhole_all(&self) -> Result<(), Error> {
        {
            let mut state = self.shared.lock();
            state.freeze_new = true;
            state.tell_all(|control| control.frozen = true);
        }
        self.open().await
    }

    /// Resets the connections that exist and refuses new ones, as when nothing listens.
    ///
    /// # Errors
    ///
    /// A connection is still there after 10 s.
    pub async fn refuse(&self) -> Result<(), Error> {
        if let Some(acceptor) = self.acceptor.lock().await.take() {
            acceptor.abort();
            // It is cancelled or has panicked; either way the listener is closed now.
            let _ = acceptor.await;
        }
        self.reset_all().await
    }

    /// Forwards each of the next `requests` requests, drops its reply and resets its connection.
    ///
    /// A request is what a client sends in one go, whatever the protocol makes of it: the commands with which a
    /// client introduces itself on a new connection count too. To cut the reply to one certain command,
    /// [`hold`](Self::hold) it in [`Direction::Reply`] and [drop it](Hold::drop_it).
    ///
    /// # Errors
    ///
    /// None so far.
    pub async fn cut_reply(&self, requests: usize) -> Result<(), Error> {
        self.shared.lock().cuts_left = requests;
        Ok(())
    }

    /// New connections go to another port of 127.0.0.1; those that exist stay where they are.
    ///
    /// # Errors
    ///
    /// None so far.
    pub async fn retarget(&self, target_port: u16) -> Result<(), Error> {
        self.shared.lock().target = target_port;
        Ok(())
    }

    /// Resets (RST) every connection that exists, to both sides; returns when it is done.
    ///
    /// # Errors
    ///
    /// A connection is still there after 10 s.
    pub async fn reset_all(&self) -> Result<(), Error> {
        let ids: Vec<u64> = {
            let mut state = self.shared.lock();
            state.tell_all(|control| control.reset = true);
            state.links.keys().copied().collect()
        };
        eventually(RESET_DEADLINE, "all connections to be reset", || async {
            let state = self.shared.lock();
            let left = ids.iter().filter(|id| state.links.contains_key(id)).count();
            if left == 0 { Ok(()) } else { Err(left) }
        })
        .await
    }

    /// Stops forwarding on one connection when a chosen request passes, or the reply to it. Only requests that
    /// pass after this call count; other connections are not touched.
    pub fn hold(&self, matcher: Matcher, direction: Direction) -> Hold {
        let hold = Arc::new(HoldState::new(self.shared.id(), matcher, direction));
        self.shared.lock().holds.push(Arc::clone(&hold));
        Hold::new(hold, Arc::clone(&self.shared))
    }

    async fn open(&self) -> Result<(), Error> {
        let mut acceptor = self.acceptor.lock().await;
        if acceptor.is_none() {
            let listener = listen(self.port()).await?;
            *acceptor = Some(tokio::spawn(accept(listener, Arc::clone(&self.shared))));
        }
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(acceptor) = self.acceptor.get_mut().take() {
            acceptor.abort();
        }
        self.shared.lock().tell_all(|control| control.reset = true);
    }
}

impl State {
    fn tell_all(&mut self, change: impl Fn(&mut Control)) {
        for link in self.links.values() {
            link.send_modify(&change);
        }
    }
}

async fn listen(port: u16) -> Result<TcpListener, Error> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .await
        .map_err(|e| Error::io(format!("listen on 127.0.0.1:{port}"), e))
}

/// Gives each connection a task. Ends by being aborted, which closes the listener.
async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => adopt(client, &shared),
            // Out of descriptors, or the client is gone already: the next may be fine.
            Err(_) => tokio::time::sleep(crate::wait::POLL_INTERVAL).await,
        }
    }
}

fn adopt(client: TcpStream, shared: &Arc<Shared>) {
    let id = shared.id();
    let control = {
        let mut state = shared.lock();
        let (sender, control) = watch::channel(Control {
            frozen: state.freeze_new,
            ..Control::default()
        });
        state.links.insert(id, sender);
        control
    };
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        link::run(client, control, &shared, id).await;
        shared.lock().links.remove(&id);
    });
}
