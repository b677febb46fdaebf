//! The connections of a member's lanes. Their own thread drives them, so that no other one has to be woken between a
//! statement and its answer.

use std::{
    cell::RefCell,
    ops::{Deref, DerefMut},
    time::Duration,
};

use deadpool_postgres::{Object, Pool};
use tokio::runtime::Handle;

use crate::{
    own_thread::{driven_by, in_time},
    trouble::Trouble,
};

/// Opens and keeps them. Each takes a place in the pool for as long as it lives.
pub(crate) struct OwnConnections {
    pool: Pool,
    /// The runtime of this thread.
    here: Handle,
    response_timeout: Duration,
    idle: RefCell<Vec<OwnConnection>>,
}

/// A connection that never goes back to the pool: whoever got it there would depend on this thread.
pub(crate) struct OwnConnection(Option<Object>);

impl OwnConnections {
    pub(crate) fn new(pool: Pool, here: Handle, response_timeout: Duration) -> Self {
        Self {
            pool,
            here,
            response_timeout,
            idle: RefCell::default(),
        }
    }

    pub(crate) async fn get(&self) -> Result<OwnConnection, Trouble> {
        loop {
            let kept = self.idle.borrow_mut().pop();
            match kept {
                Some(connection) if connection.is_closed() => {}
                Some(connection) => return Ok(connection),
                None => break,
            }
        }
        let opened = in_time(self.response_timeout, driven_by(&self.here, self.open()));
        match opened.await {
            Some(connection) => connection,
            None => Err(Trouble::postgres_silent()),
        }
    }

    /// Those that the pool has open already are driven elsewhere: they go back to it when there is a new one. Where the
    /// pool is full, one of them makes room.
    async fn open(&self) -> Result<OwnConnection, Trouble> {
        let mut others = Vec::new();
        loop {
            let mut connection = OwnConnection(Some(self.pool.get().await?));
            if connection.is_new() {
                return Ok(connection);
            }
            let pool = self.pool.status();
            if pool.size < pool.max_size {
                others.push(connection.0.take());
            }
        }
    }

    pub(crate) fn put_back(&self, connection: OwnConnection) {
        self.idle.borrow_mut().push(connection);
    }

    /// Closes those that nobody uses.
    pub(crate) fn close_idle(&self) {
        self.idle.borrow_mut().clear();
    }
}

impl OwnConnection {
    /// Whether the pool has opened it just now.
    fn is_new(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|object| Object::metrics(object).recycle_count == 0)
    }
}

impl Deref for OwnConnection {
    type Target = Object;

    fn deref(&self) -> &Object {
        self.0
            .as_ref()
            .expect("it is taken only when it is dropped")
    }
}

impl DerefMut for OwnConnection {
    fn deref_mut(&mut self) -> &mut Object {
        self.0
            .as_mut()
            .expect("it is taken only when it is dropped")
    }
}

impl Drop for OwnConnection {
    fn drop(&mut self) {
        drop(self.0.take().map(Object::take));
    }
}
