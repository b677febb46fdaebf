//! Messages to different handlers, by topic and event type.

use std::{collections::HashMap, marker::PhantomData, pin::Pin};

use deadpool_postgres::Transaction;
use serde::de::DeserializeOwned;

use crate::{Handler, HandlerError, Message, handler::Closure};

/// A [`Handler`] that gives each message to the handler of its topic and event type.
///
/// The most special route wins: topic and event type, then the event type in any topic, then the topic, then
/// [`otherwise`](Self::otherwise). A message that has no route is **rejected**: it becomes a dead letter that names its
/// event type, and `outbox-relay dead-letters retry` delivers it once there is a handler. A group that wants only some of
/// a topic's messages says so with [`ignore_others`](Self::ignore_others).
///
/// ```
/// use outbox_consumer::{HandlerError, Message, Router, Transaction};
///
/// #[derive(serde::Deserialize)]
/// struct OrderPlaced { order: i64 }
///
/// async fn ship(tx: &Transaction<'_>, _: &Message, placed: OrderPlaced) -> Result<(), tokio_postgres::Error> {
///     tx.execute("INSERT INTO shipments (order_id) VALUES ($1)", &[&placed.order]).await.map(drop)
/// }
///
/// async fn refund(tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
///     tx.execute("INSERT INTO refunds (document) VALUES ($1)", &[&message.payload()]).await?;
///     Ok(())
/// }
///
/// let router = Router::new()
///     .on_json("OrderPlaced", ship)
///     .on("OrderCancelled", async |_: &Transaction<'_>, _: &Message| Ok::<(), HandlerError>(()))
///     .on_topic("refunds", refund)
///     .ignore_others();
/// ```
#[derive(Default)]
#[must_use = "a router does nothing until a consumer runs it"]
pub struct Router {
    by_topic_and_type: HashMap<(String, String), Box<dyn Route>>,
    by_type: HashMap<String, Box<dyn Route>>,
    by_topic: HashMap<String, Box<dyn Route>>,
    otherwise: Option<Box<dyn Route>>,
}

/// A handler whose type is forgotten, so that different ones fit into one map.
trait Route: Send {
    fn call<'a>(&'a self, tx: &'a Transaction<'_>, message: &'a Message) -> Called<'a>;
}

type Called<'a> = Pin<Box<dyn Future<Output = Result<(), HandlerError>> + 'a>>;

impl<H: Handler + Send> Route for H {
    fn call<'a>(&'a self, tx: &'a Transaction<'_>, message: &'a Message) -> Called<'a> {
        Box::pin(self.handle(tx, message))
    }
}

/// A handler of decoded payloads.
struct Json<F, T, E>(F, PhantomData<fn() -> (T, E)>);

impl<F, T, E> Handler for Json<F, T, E>
where
    F: AsyncFn(&Transaction<'_>, &Message, T) -> Result<(), E>,
    T: DeserializeOwned,
    E: Into<HandlerError>,
{
    async fn handle(&self, tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
        let payload = message.json().map_err(HandlerError::reject)?;
        (self.0)(tx, message, payload).await.map_err(Into::into)
    }
}

impl Router {
    /// No routes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Messages of this event type, in whatever topic.
    pub fn on<F, E>(mut self, event_type: impl Into<String>, handler: F) -> Self
    where
        F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E> + Send + 'static,
        E: Into<HandlerError> + 'static,
    {
        self.by_type
            .insert(event_type.into(), Box::new(Closure::new(handler)));
        self
    }

    /// Messages of this event type, in whatever topic, with their payload decoded from JSON. One that cannot be
    /// decoded is rejected: it becomes a dead letter at once. The bytes are there as [`Message::payload`].
    pub fn on_json<F, T, E>(mut self, event_type: impl Into<String>, handler: F) -> Self
    where
        F: AsyncFn(&Transaction<'_>, &Message, T) -> Result<(), E> + Send + 'static,
        T: DeserializeOwned + 'static,
        E: Into<HandlerError> + 'static,
    {
        self.by_type
            .insert(event_type.into(), Box::new(Json(handler, PhantomData)));
        self
    }

    /// Messages of this event type in this topic.
    pub fn on_topic_and_type<F, E>(
        mut self,
        topic: impl Into<String>,
        event_type: impl Into<String>,
        handler: F,
    ) -> Self
    where
        F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E> + Send + 'static,
        E: Into<HandlerError> + 'static,
    {
        let route = Box::new(Closure::new(handler));
        self.by_topic_and_type
            .insert((topic.into(), event_type.into()), route);
        self
    }

    /// Messages of this topic whose event type has no route, or that have none.
    pub fn on_topic<F, E>(mut self, topic: impl Into<String>, handler: F) -> Self
    where
        F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E> + Send + 'static,
        E: Into<HandlerError> + 'static,
    {
        self.by_topic
            .insert(topic.into(), Box::new(Closure::new(handler)));
        self
    }

    /// Messages without any other route, instead of rejecting them.
    pub fn otherwise<F, E>(mut self, handler: F) -> Self
    where
        F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E> + Send + 'static,
        E: Into<HandlerError> + 'static,
    {
        self.otherwise = Some(Box::new(Closure::new(handler)));
        self
    }

    /// Messages without any other route are recorded as applied, and nothing is done for them.
    pub fn ignore_others(self) -> Self {
        self.otherwise(async |_: &Transaction<'_>, _: &Message| Ok::<(), HandlerError>(()))
    }

    fn route(&self, topic: &str, event_type: Option<&str>) -> Option<&dyn Route> {
        let special = event_type.and_then(|event_type| {
            let both = (topic.to_owned(), event_type.to_owned());
            self.by_topic_and_type
                .get(&both)
                .or_else(|| self.by_type.get(event_type))
        });
        let route = special
            .or_else(|| self.by_topic.get(topic))
            .or(self.otherwise.as_ref());
        route.map(|route| &**route)
    }
}

impl Handler for Router {
    async fn handle(&self, tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
        match self.route(message.topic(), message.event_type()) {
            Some(route) => route.call(tx, message).await,
            None => {
                let event_type = message.event_type().unwrap_or("none");
                Err(HandlerError::reject(format!(
                    "no handler for event type {event_type:?}"
                )))
            }
        }
    }
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router")
            .field("by_topic_and_type", &self.by_topic_and_type.keys())
            .field("by_type", &self.by_type.keys())
            .field("by_topic", &self.by_topic.keys())
            .finish_non_exhaustive()
    }
}
