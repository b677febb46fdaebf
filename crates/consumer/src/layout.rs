//! The streams of a topic: those of its partition count now, and before them those of earlier counts.

/// The most partitions that a count is believed to have; more is a marker that was written by somebody else.
const PARTITIONS_MAX: u32 = 100_000;

/// The partition counts of one topic as the relay publishes them in its marker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// From the first to the one in force.
    counts: Vec<u32>,
}

impl Default for Layout {
    /// A topic that the relay says nothing about has one partition.
    fn default() -> Self {
        Self { counts: vec![1] }
    }
}

impl Layout {
    /// Reads the marker's field: the count in force, then earlier ones from the latest to the first.
    pub(crate) fn parse(field: &str) -> Option<Self> {
        let mut counts = field
            .split(',')
            .map(|count| count.trim().parse().ok())
            .map(|count| count.filter(|count| (1..=PARTITIONS_MAX).contains(count)))
            .collect::<Option<Vec<u32>>>()?;
        counts.reverse();
        Some(Self { counts })
    }

    /// The streams of each count, in the order in which they were in use. Those of an earlier count are to be
    /// drained before the next ones are begun: a key has moved from one to the other.
    pub(crate) fn stages(&self, prefix: &str, topic: &str) -> Vec<Vec<String>> {
        let streams = |count: &u32| match count {
            1 => vec![format!("{prefix}{topic}")],
            count => (0..*count)
                .map(|partition| format!("{prefix}{topic}:{partition}"))
                .collect(),
        };
        self.counts.iter().map(streams).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_partition_has_no_number() {
        assert_eq!(
            Layout::default().stages("outbox:", "orders"),
            [["outbox:orders"]]
        );
    }

    #[test]
    fn earlier_counts_come_first() {
        let stages = Layout::parse("3,2,1").unwrap().stages("p:", "t");
        assert_eq!(stages[0], ["p:t"]);
        assert_eq!(stages[1], ["p:t:0", "p:t:1"]);
        assert_eq!(stages[2], ["p:t:0", "p:t:1", "p:t:2"]);
    }

    #[test]
    fn what_is_no_list_of_counts_is_not_believed() {
        for field in ["", "0", "4,", "x", "4,0", "-1", "100001"] {
            assert_eq!(Layout::parse(field), None, "{field:?}");
        }
    }
}
