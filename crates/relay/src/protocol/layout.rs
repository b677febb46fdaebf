//! How a topic's messages are spread over streams.

use std::collections::BTreeMap;

/// The streams of one topic.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// How many streams the topic's messages go to.
    pub partitions: u32,
    /// Counts that were in force before, oldest first. Their streams may hold entries that a new group wants.
    pub earlier: Vec<u32>,
}

impl Default for Layout {
    fn default() -> Self {
        Layout {
            partitions: 1,
            earlier: Vec::new(),
        }
    }
}

/// Layouts by topic; a topic without one has the default.
pub type Layouts = BTreeMap<String, Layout>;

impl Layout {
    /// The layout after a change of the count.
    pub fn changed_to(&self, partitions: u32) -> Layout {
        let mut earlier = self.earlier.clone();
        earlier.retain(|count| *count != self.partitions && *count != partitions);
        if partitions != self.partitions {
            earlier.push(self.partitions);
        }
        Layout {
            partitions,
            earlier,
        }
    }

    /// The count in force and, from the latest to the first, those before: `16,4,1`.
    pub fn encode(&self) -> String {
        let counts = std::iter::once(&self.partitions).chain(self.earlier.iter().rev());
        counts.map(u32::to_string).collect::<Vec<_>>().join(",")
    }

    /// Reads what [`Layout::encode`] wrote.
    pub fn decode(text: &str) -> Option<Layout> {
        let mut counts = text
            .split(',')
            .map(|count| count.parse().ok().filter(|count| *count > 0));
        let partitions = counts.next()??;
        let mut earlier: Vec<u32> = counts.collect::<Option<_>>()?;
        earlier.reverse();
        Some(Layout {
            partitions,
            earlier,
        })
    }
}

/// The partition of a message: CRC-32 (ISO-HDLC) of its ordering key, or of its message key where it has
/// none, modulo the count.
pub fn partition(ordering_key: Option<&str>, message_key: &str, partitions: u32) -> u32 {
    if partitions <= 1 {
        return 0;
    }
    crc32fast::hash(ordering_key.unwrap_or(message_key).as_bytes()) % partitions
}

/// Name of the stream of a partition; the only partition has no number.
pub fn stream_name(prefix: &str, topic: &str, partition: u32, partitions: u32) -> String {
    match partitions {
        0 | 1 => format!("{prefix}{topic}"),
        _ => format!("{prefix}{topic}:{partition}"),
    }
}

/// The name under which a whole topic is held back. No stream has a space in its name.
pub fn hold_name(topic: &str) -> String {
    format!("topic {topic}")
}

/// The stream that a message goes to, and then those of earlier counts, where it may stand already.
pub fn streams_of(
    prefix: &str,
    topic: &str,
    layout: &Layout,
    ordering_key: Option<&str>,
    message_key: &str,
) -> Vec<String> {
    std::iter::once(layout.partitions)
        .chain(layout.earlier.iter().copied())
        .map(|partitions| {
            stream_name(
                prefix,
                topic,
                partition(ordering_key, message_key, partitions),
                partitions,
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_public_contract() {
        // The check value of CRC-32/ISO-HDLC in the catalogue of parametrised CRC algorithms.
        assert_eq!(crc32fast::hash(b"123456789"), 0xcbf4_3926);
        assert_eq!(partition(Some("123456789"), "other", 16), 0x6);
        assert_eq!(partition(None, "123456789", 16), 0x6);
        assert_eq!(partition(Some("anything"), "k", 1), 0);
    }

    #[test]
    fn layouts_remember_every_stream_that_may_hold_entries() {
        let layout = Layout::default().changed_to(4).changed_to(16);
        assert_eq!(
            (layout.partitions, layout.earlier.as_slice()),
            (16, &[1, 4][..])
        );
        assert_eq!(layout.changed_to(4).earlier, [1, 16]);
        assert_eq!(layout.changed_to(16), layout);
        assert_eq!(layout.encode(), "16,4,1");
        assert_eq!(Layout::decode("16,4,1"), Some(layout));
        for bad in ["", "0", "4,", "four"] {
            assert_eq!(Layout::decode(bad), None, "{bad}");
        }
    }
}
