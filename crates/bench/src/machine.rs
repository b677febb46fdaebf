//! The machine and the servers that figures were taken on.

use std::fs;

use outbox_testkit::Redis;
use serde::Serialize;

use crate::{
    Error,
    stage::{POSTGRES_SETTINGS, Stage, file_system_of},
};

/// What a reader has to know before comparing absolute values.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) memory_gib: f64,
    pub(crate) kernel: String,
    pub(crate) postgres: String,
    pub(crate) redis: String,
    /// File system that the servers' files lie on.
    pub(crate) data_on: String,
    pub(crate) fsync: String,
    pub(crate) synchronous_commit: String,
    pub(crate) postgres_settings: Vec<String>,
}

impl Machine {
    pub(crate) async fn describe(stage: &Stage) -> Result<Self, Error> {
        let client = stage.connect("postgres").await?;
        let setting = async |name: &str| -> Result<String, Error> {
            Ok(client
                .query_one("SELECT current_setting($1)", &[&name])
                .await?
                .get(0))
        };
        let redis = Redis::start().await?;
        let info: String = redis::cmd("INFO")
            .arg("server")
            .query_async(&mut redis.connect().await?)
            .await?;
        Ok(Self {
            cpu: after(&read("/proc/cpuinfo"), "model name")
                .unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(0, Into::into),
            memory_gib: memory_gib(&read("/proc/meminfo")),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            postgres: setting("server_version").await?,
            redis: after(&info, "redis_version").unwrap_or_default(),
            data_on: file_system_of(&stage.data_dir()),
            fsync: setting("fsync").await?,
            synchronous_commit: setting("synchronous_commit").await?,
            postgres_settings: POSTGRES_SETTINGS
                .map(|(name, value)| format!("{name}={value}"))
                .to_vec(),
        })
    }

    /// One line for charts.
    pub(crate) fn short(&self) -> String {
        format!(
            "{} cores ({}), {:.0} GiB, Postgres {}, Redis {}, data on {}",
            self.cores,
            self.cpu,
            self.memory_gib,
            self.postgres.split(' ').next().unwrap_or_default(),
            self.redis,
            self.data_on
        )
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value of the first line `name : value`.
fn after(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let (_, value) = line.split_once(':')?;
    Some(value.trim().to_owned())
}

fn memory_gib(meminfo: &str) -> f64 {
    let total = after(meminfo, "MemTotal").unwrap_or_default();
    let kib: f64 = total
        .split(' ')
        .next()
        .and_then(|kib| kib.parse().ok())
        .unwrap_or(0.0);
    kib / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_their_names() {
        let cpu = "processor\t: 0\nmodel name\t: A Processor @ 2.0GHz\n";
        assert_eq!(after(cpu, "model name").unwrap(), "A Processor @ 2.0GHz");
        assert_eq!(memory_gib("MemTotal:       2097152 kB\n"), 2.0);
        assert_eq!(
            after("redis_version:7.0.15\r\n", "redis_version").unwrap(),
            "7.0.15"
        );
    }
}
