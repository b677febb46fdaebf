//! Which streams a group is to read now: the relay's marker says how many partitions each topic has and had.

use std::collections::{BTreeSet, HashMap, HashSet};

use redis::{Script, Value};
use tracing::{error, info};

use crate::{builder::Settings, layout::Layout, link::Link, queries, trouble::Trouble};

/// The topics of a consumer, with their layouts as far as they are known.
pub(crate) struct Topics {
    control: Link,
    group: String,
    prefix: String,
    topics: Vec<Topic>,
    drained: Script,
}

struct Topic {
    name: String,
    layout: Option<Layout>,
    /// Streams of earlier counts, to their last entry at the time when this layout was first seen: what is added
    /// later is of the layout in force.
    ends: HashMap<String, String>,
    /// How many of the earlier counts the group has drained.
    drained: usize,
}

/// A stream that the group is to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) stream: String,
    pub(crate) topic: String,
}

impl Topics {
    pub(crate) fn new(settings: &Settings, control: Link) -> Self {
        let topic = |name: &String| Topic {
            name: name.clone(),
            layout: None,
            ends: HashMap::new(),
            drained: 0,
        };
        Self {
            control,
            group: settings.group.clone(),
            prefix: settings.stream_prefix.clone(),
            topics: settings.topics.iter().map(topic).collect(),
            drained: Script::new(queries::DRAINED),
        }
    }

    /// Looks at the marker, and at the streams of earlier counts as long as they are not drained: a key whose messages
    /// moved to another stream keeps its order only if the old one is empty first.
    pub(crate) async fn wanted(&mut self) -> Result<Vec<Wanted>, Trouble> {
        self.read_layouts().await?;
        let mut wanted = Vec::new();
        for index in 0..self.topics.len() {
            let streams = self.current_stage(index).await?;
            let topic = &self.topics[index].name;
            wanted.extend(streams.into_iter().map(|stream| Wanted {
                stream,
                topic: topic.clone(),
            }));
        }
        Ok(wanted)
    }

    /// All streams of the topics, also those that are drained and those whose turn is still to come.
    pub(crate) async fn all(&mut self) -> Result<Vec<String>, Trouble> {
        self.read_layouts().await?;
        let stages = self.topics.iter().flat_map(|topic| {
            let layout = topic.layout.clone().unwrap_or_default();
            layout.stages(&self.prefix, &topic.name)
        });
        let streams: BTreeSet<String> = stages.flatten().collect();
        Ok(streams.into_iter().collect())
    }

    async fn read_layouts(&mut self) -> Result<(), Trouble> {
        for (index, field) in self.read_marker().await?.into_iter().enumerate() {
            let topic = &mut self.topics[index];
            let layout = match field.as_deref().map(Layout::parse) {
                None => Layout::default(),
                Some(Some(layout)) => layout,
                Some(None) => {
                    error!(
                        topic = topic.name,
                        counts = field,
                        "the marker's partition counts are not understood; the last known stay"
                    );
                    continue;
                }
            };
            if topic.layout.as_ref() != Some(&layout) {
                info!(topic = topic.name, ?layout, "partitions of the topic");
                topic.layout = Some(layout);
                topic.drained = 0;
                topic.ends.clear();
            }
        }
        Ok(())
    }

    /// Looks anew at the streams of earlier counts: a group that was made anew has drained nothing.
    pub(crate) fn begin_anew(&mut self) {
        for topic in &mut self.topics {
            topic.drained = 0;
        }
    }

    /// The partition counts of each topic; none for a topic that the relay says nothing about.
    async fn read_marker(&self) -> Result<Vec<Option<String>>, Trouble> {
        let mut command = redis::cmd("HMGET");
        command.arg(format!("{}relay:marker", self.prefix));
        for topic in &self.topics {
            command.arg(format!("topic:{}", topic.name));
        }
        let fields = match self.control.query(&command).await? {
            Value::Array(fields) => fields,
            _ => Vec::new(),
        };
        let text = |field| match field {
            Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
            _ => None,
        };
        let mut fields: Vec<_> = fields.into_iter().map(text).collect();
        fields.resize(self.topics.len(), None);
        Ok(fields)
    }

    async fn current_stage(&mut self, index: usize) -> Result<Vec<String>, Trouble> {
        let topic = &self.topics[index];
        let layout = topic.layout.clone().unwrap_or_default();
        let mut stages = layout.stages(&self.prefix, &topic.name);
        let now = stages.pop().unwrap_or_default();
        let in_force: HashSet<&String> = now.iter().collect();
        for (stage, streams) in stages.iter().enumerate().skip(topic.drained) {
            if !self.is_drained(index, streams, &in_force).await? {
                return Ok(streams.clone());
            }
            self.topics[index].drained = stage + 1;
        }
        Ok(now)
    }

    async fn is_drained(
        &mut self,
        index: usize,
        streams: &[String],
        in_force: &HashSet<&String>,
    ) -> Result<bool, Trouble> {
        for stream in streams {
            let end = if in_force.contains(stream) {
                self.end_of(index, stream).await?
            } else {
                "+".to_owned()
            };
            let drained = self
                .control
                .run_script(&self.drained, stream, &[&self.group, &end])
                .await?;
            if drained == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The last entry of a stream when this layout was first seen.
    async fn end_of(&mut self, index: usize, stream: &str) -> Result<String, Trouble> {
        if let Some(end) = self.topics[index].ends.get(stream) {
            return Ok(end.clone());
        }
        let mut command = redis::cmd("XREVRANGE");
        command.arg(stream).arg("+").arg("-").arg("COUNT").arg(1);
        let last = match self.control.query(&command).await? {
            Value::Array(mut entries) if !entries.is_empty() => match entries.remove(0) {
                Value::Array(mut entry) if !entry.is_empty() => match entry.remove(0) {
                    Value::BulkString(id) => String::from_utf8(id).ok(),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        };
        let end = last.unwrap_or_else(|| "0-0".to_owned());
        let ends = &mut self.topics[index].ends;
        ends.insert(stream.to_owned(), end.clone());
        Ok(end)
    }
}
