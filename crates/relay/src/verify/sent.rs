//! What the cursor says was sent.

use uuid::Uuid;

use crate::checkpoint;
use crate::error::{Error, Result};
use crate::postgres::Session;
use crate::protocol::cursor::Cursor;
use crate::protocol::layout::{Layout, hold_name, streams_of};
use crate::protocol::place::Place;
use crate::protocol::start::{MarkerFound, Refusal};
use crate::publisher::Publisher;

/// Where an id lies by the cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// Sent, unless its stream is held back.
    Yes,
    /// Above it.
    NotYet,
    /// In one of its gaps.
    Gap,
}

/// The cursor: of the marker, which is exact; where there is none, of the checkpoint.
pub(crate) struct Sent {
    place: Option<Place>,
}

impl Sent {
    /// Reads the cursor.
    ///
    /// # Errors
    ///
    /// Those of the servers, or that this Redis under this prefix belongs to another outbox.
    pub(crate) async fn read(
        publisher: &mut Publisher,
        session: &Session,
        outbox_id: Uuid,
    ) -> Result<Self> {
        match publisher.marker().await? {
            MarkerFound::Foreign(what) => Err(Error::Refused(Refusal::NotAMarker(what))),
            MarkerFound::Marker { outbox_id: of, .. } if of != outbox_id => {
                Err(Error::Refused(Refusal::OtherOutbox {
                    marker: of,
                    database: outbox_id,
                }))
            }
            MarkerFound::Marker { place, .. } => Ok(Sent { place: Some(place) }),
            MarkerFound::Missing => Ok(Sent {
                place: checkpoint::read(session).await?,
            }),
        }
    }

    /// What a place says.
    pub(crate) fn at(place: Place) -> Self {
        Sent { place: Some(place) }
    }

    /// The place, if anything was ever published.
    pub(crate) fn place(&self) -> Option<&Place> {
        self.place.as_ref()
    }

    /// The same.
    pub(crate) fn into_place(self) -> Option<Place> {
        self.place
    }

    /// How a topic is spread over streams, as the marker writes it; empty where it does not.
    pub(crate) fn layout(&self, topic: &str) -> String {
        let layout = self
            .place
            .as_ref()
            .and_then(|place| place.layouts.get(topic));
        layout.map_or(String::new(), Layout::encode)
    }

    /// Where an id lies.
    pub(crate) fn passed(&self, id: i64) -> Passed {
        match &self.place {
            Some(place) => lies(&place.cursor, id),
            None => Passed::NotYet,
        }
    }

    /// The stream of a message, and those of earlier partition counts.
    pub(crate) fn streams(
        &self,
        prefix: &str,
        topic: &str,
        ordering_key: Option<&str>,
        message_key: &str,
    ) -> Vec<String> {
        let layout = self
            .place
            .as_ref()
            .and_then(|place| place.layouts.get(topic).cloned())
            .unwrap_or_default();
        streams_of(prefix, topic, &layout, ordering_key, message_key)
    }

    /// Why a message that the cursor has passed is held back, if it is.
    pub(crate) fn held_back(&self, id: i64, topic: &str, stream: &str) -> Option<&str> {
        let blocked = &self.place.as_ref()?.blocked;
        [stream, hold_name(topic).as_str()]
            .into_iter()
            .filter_map(|name| blocked.get(name))
            .find(|blocked| lies(&blocked.cursor, id) != Passed::Yes)
            .map(|blocked| blocked.reason.as_str())
    }
}

fn lies(cursor: &Cursor, id: i64) -> Passed {
    if id > cursor.high {
        Passed::NotYet
    } else if cursor.gaps.contains(id) {
        Passed::Gap
    } else {
        Passed::Yes
    }
}
