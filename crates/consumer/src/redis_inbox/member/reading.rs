//! What a member handles next: entries that nobody has touched for the claim time, and new ones.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{BLOCK_MAX, Member};
use crate::{
    counters::Count,
    decision::Fault,
    layout::Layout,
    message::Source,
    reader::milliseconds,
    redis_inbox::source,
    replies::{self, Delivered},
    survey::ask,
    trouble::Trouble,
};

/// Entries of one read. They wait for each other, and count as idle meanwhile.
const READ_ENTRIES: usize = 10;
/// How often the relay's marker is read for the partitions of the topics.
const LAYOUT_INTERVAL: Duration = Duration::from_secs(2);
impl<F, E> Member<F, E> {
    /// What nobody has touched for the claim time, when that is due, and new entries.
    pub(super) async fn read(&mut self) -> Result<VecDeque<(Arc<Source>, Delivered)>, Trouble> {
        if Instant::now() >= self.layout_at {
            self.sources = self.find_sources().await?;
            self.layout_at = Instant::now() + LAYOUT_INTERVAL;
        }
        let mut found = VecDeque::new();
        if Instant::now() >= self.claim_at {
            for source in &self.sources {
                self.claim(source, &mut found).await?;
            }
            if found.is_empty() {
                self.claim_at = Instant::now() + self.settings.claim_after / 2;
            }
            return Ok(found);
        }
        let block = BLOCK_MAX.min(self.settings.claim_after / 2);
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP")
            .arg(&self.settings.group)
            .arg(&self.settings.name)
            .arg("COUNT")
            .arg(READ_ENTRIES);
        read.arg("BLOCK").arg(milliseconds(block)).arg("STREAMS");
        for source in &self.sources {
            read.arg(&source.stream);
        }
        for _ in &self.sources {
            read.arg(">");
        }
        for (stream, delivered) in replies::read_group(self.link.query(&read).await?)? {
            if let Some(source) = self.sources.iter().find(|source| source.stream == stream) {
                found.push_back((Arc::clone(source), delivered));
            }
        }
        Ok(found)
    }

    /// Goes through the pending entries until something is found; the next call begins anew, and what was found is
    /// no longer idle then.
    async fn claim(
        &self,
        source: &Arc<Source>,
        found: &mut VecDeque<(Arc<Source>, Delivered)>,
    ) -> Result<(), Trouble> {
        let mut cursor = "0-0".to_owned();
        loop {
            let mut command = redis::cmd("XAUTOCLAIM");
            command
                .arg(&source.stream)
                .arg(&self.settings.group)
                .arg(&self.settings.name);
            command
                .arg(milliseconds(self.settings.claim_after))
                .arg(&cursor)
                .arg("COUNT")
                .arg(READ_ENTRIES);
            let (next, delivered) = replies::auto_claim(self.link.query(&command).await?)?;
            if !delivered.entries.is_empty() || !delivered.lost.is_empty() {
                let claimed = delivered.entries.len();
                self.settings
                    .counters
                    .add(&source.stream, Count::Claimed, claimed);
                found.push_back((Arc::clone(source), delivered));
                return Ok(());
            }
            if next == "0-0" {
                return Ok(());
            }
            cursor = next;
        }
    }

    /// The streams of all partition counts of the topics, which need no order here.
    async fn find_sources(&self) -> Result<Vec<Arc<Source>>, Trouble> {
        let prefix = &self.settings.stream_prefix;
        let mut sources: Vec<Arc<Source>> = Vec::new();
        for topic in &self.settings.topics {
            let mut get = redis::cmd("HGET");
            get.arg(format!("{prefix}relay:marker"))
                .arg(format!("topic:{topic}"));
            let counts: Option<String> = ask(&self.link, &get).await?;
            let layout = counts
                .as_deref()
                .and_then(Layout::parse)
                .unwrap_or_default();
            for stream in layout.stages(prefix, topic).into_iter().flatten() {
                if !sources.iter().any(|source| source.stream == stream) {
                    sources.push(source(topic, stream));
                }
            }
        }
        Ok(sources)
    }

    pub(super) async fn make_groups(&self) -> Result<(), Trouble> {
        for source in &self.sources {
            let mut command = redis::cmd("XGROUP");
            command
                .arg("CREATE")
                .arg(&source.stream)
                .arg(&self.settings.group)
                .arg("0")
                .arg("MKSTREAM");
            match self.link.query(&command).await {
                Err(trouble) if trouble.fault != Fault::GroupExists => return Err(trouble),
                _ => {}
            }
        }
        Ok(())
    }
}
