//! Where the servers are installed, and what to install when they are not.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::Error;

/// Names a directory with `initdb`, `postgres` and the other tools; goes before everything else.
const POSTGRES_DIR_VARIABLE: &str = "OUTBOX_POSTGRES_BIN_DIR";
/// Names the Redis server itself; goes before everything else.
const REDIS_VARIABLE: &str = "OUTBOX_REDIS_SERVER";

/// Names PgBouncer itself; goes before everything else.
const PGBOUNCER_VARIABLE: &str = "OUTBOX_PGBOUNCER";

/// What the kit runs.
const POSTGRES_TOOLS: [&str; 4] = ["initdb", "postgres", "pg_basebackup", "pg_resetwal"];

/// Roots whose entries hold a `bin`: Debian, Fedora (PGDG), Homebrew on Apple and on Intel machines.
const POSTGRES_ROOTS: [(&str, &str); 4] = [
    ("/usr/lib/postgresql", ""),
    ("/usr", "pgsql-"),
    ("/opt/homebrew/opt", "postgresql@"),
    ("/usr/local/opt", "postgresql@"),
];

const REDIS_DIRS: [&str; 6] = [
    "/usr/bin",
    "/usr/local/bin",
    "/usr/sbin",
    "/opt/homebrew/bin",
    "/opt/homebrew/opt/redis/bin",
    "/usr/local/opt/redis/bin",
];

const PGBOUNCER_DIRS: [&str; 5] = [
    "/usr/sbin",
    "/usr/bin",
    "/usr/local/bin",
    "/opt/homebrew/bin",
    "/usr/local/sbin",
];

/// The directory with the Postgres binaries.
pub(crate) fn postgres_dir() -> Result<PathBuf, Error> {
    let remedy = "install Postgres 14 or later (Debian: apt install postgresql; Fedora: dnf install \
                  postgresql-server; Homebrew: brew install postgresql@17)";
    if let Some(dir) = env::var_os(POSTGRES_DIR_VARIABLE).map(PathBuf::from) {
        if let Some(dir) = complete(&dir) {
            return Ok(dir);
        }
        return Err(Error::not_installed(
            "Postgres (initdb, postgres, pg_basebackup, pg_resetwal)",
            vec![dir.display().to_string()],
            format!("correct {POSTGRES_DIR_VARIABLE}, or unset it and {remedy}"),
        ));
    }
    let mut candidates = path_dirs();
    for (root, prefix) in POSTGRES_ROOTS {
        candidates.extend(versioned(Path::new(root), prefix));
    }
    candidates.push(PathBuf::from("/usr/bin"));
    candidates
        .into_iter()
        .find_map(|dir| complete(&dir))
        .ok_or_else(|| {
            let mut looked_in = vec!["PATH".to_owned()];
            looked_in.extend(POSTGRES_ROOTS.map(|(root, prefix)| format!("{root}/{prefix}*/bin")));
            looked_in.push("/usr/bin".to_owned());
            Error::not_installed(
                "Postgres (initdb, postgres, pg_basebackup, pg_resetwal)",
                looked_in,
                format!("{remedy}, or name their directory in {POSTGRES_DIR_VARIABLE}"),
            )
        })
}

/// The directory itself when it has every tool the kit runs, or the one that its `postgres` is a link to.
fn complete(dir: &Path) -> Option<PathBuf> {
    let linked = dir.join("postgres").canonicalize().ok()?;
    [dir, linked.parent()?]
        .into_iter()
        .find(|dir| POSTGRES_TOOLS.iter().all(|tool| dir.join(tool).is_file()))
        .map(Path::to_path_buf)
}

/// The Redis server.
pub(crate) fn redis_server() -> Result<PathBuf, Error> {
    let remedy = "install Redis 7.0 or later (Debian: apt install redis-server; Fedora: dnf install \
                  redis; Homebrew: brew install redis)";
    if let Some(path) = env::var_os(REDIS_VARIABLE).map(PathBuf::from) {
        if path.is_file() {
            return Ok(path);
        }
        return Err(Error::not_installed(
            "redis-server",
            vec![path.display().to_string()],
            format!("correct {REDIS_VARIABLE}, or unset it and {remedy}"),
        ));
    }
    let mut candidates = path_dirs();
    candidates.extend(REDIS_DIRS.map(PathBuf::from));
    candidates
        .into_iter()
        .map(|dir| dir.join("redis-server"))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            let mut looked_in = vec!["PATH".to_owned()];
            looked_in.extend(REDIS_DIRS.map(str::to_owned));
            Error::not_installed(
                "redis-server",
                looked_in,
                format!("{remedy}, or name it in {REDIS_VARIABLE}"),
            )
        })
}

/// PgBouncer; Debian puts it where only root looks.
pub(crate) fn pgbouncer() -> Result<PathBuf, Error> {
    if let Some(path) = env::var_os(PGBOUNCER_VARIABLE).map(PathBuf::from) {
        if path.is_file() {
            return Ok(path);
        }
        return Err(Error::not_installed(
            "pgbouncer",
            vec![path.display().to_string()],
            format!("correct {PGBOUNCER_VARIABLE}"),
        ));
    }
    let mut candidates = path_dirs();
    candidates.extend(PGBOUNCER_DIRS.map(PathBuf::from));
    candidates
        .into_iter()
        .map(|dir| dir.join("pgbouncer"))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            let mut looked_in = vec!["PATH".to_owned()];
            looked_in.extend(PGBOUNCER_DIRS.map(str::to_owned));
            Error::not_installed(
                "pgbouncer",
                looked_in,
                format!(
                    "install PgBouncer (Debian: apt install pgbouncer; Fedora: dnf install pgbouncer; Homebrew: brew \
                     install pgbouncer), or name it in {PGBOUNCER_VARIABLE}"
                ),
            )
        })
}

fn path_dirs() -> Vec<PathBuf> {
    env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect())
        .unwrap_or_default()
}

/// `root/prefixVERSION/bin` for every version there is, newest first.
fn versioned(root: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = root.read_dir() else {
        return Vec::new();
    };
    let mut found: Vec<(u32, PathBuf)> = entries
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let name = entry.file_name();
            let version = name.to_str()?.strip_prefix(prefix)?;
            let major = version.split('.').next()?.parse().ok()?;
            Some((major, entry.path().join("bin")))
        })
        .collect();
    found.sort_by_key(|(major, _)| std::cmp::Reverse(*major));
    found.into_iter().map(|(_, dir)| dir).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_comes_first() {
        let root = tempfile::tempdir().unwrap();
        for name in ["pgsql-9", "pgsql-17", "pgsql-15", "pgsql-beta", "other"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let found = versioned(root.path(), "pgsql-");
        let expected: Vec<PathBuf> = ["pgsql-17", "pgsql-15", "pgsql-9"]
            .map(|name| root.path().join(name).join("bin"))
            .into();
        assert_eq!(found, expected);
    }
}
