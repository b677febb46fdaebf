//! The commands and their flags, as clap reads them.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use outbox_relay::{
    DeadLettersCommand, DoctorFlags, GrantsFlags, InboxFlags, LogFormat, ReplayFlags, RewindFlags,
    RunFlags, ServerFlags, StatusFlags, TraceFlags, VerifyFlags,
};

/// Publishes committed outbox messages from Postgres into Redis Streams.
///
/// Exit codes: 0 done, or stopped as asked; 1 a server or the set-up is at fault; 2 `verify` found something wrong, or
/// `doctor` warns; 3 `doctor` found an error; 64 the command line or the configuration is at fault.
#[derive(Parser)]
#[command(name = "outbox-relay", version, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) servers: ServerFlags,

    /// TOML file of settings; flags and environment go before it (`config docs` shows its keys)
    #[arg(long, env = "OUTBOX_CONFIG", global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Look of the log lines on standard error
    #[arg(
        long,
        env = "OUTBOX_LOG_FORMAT",
        global = true,
        default_value = "text",
        value_name = "FORMAT"
    )]
    pub(crate) log_format: LogFormat,

    /// What is logged: error, warn, info, debug or trace, also by module
    #[arg(
        long,
        env = "OUTBOX_LOG",
        global = true,
        default_value = "info",
        value_name = "FILTER"
    )]
    pub(crate) log: String,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Publish messages until told to stop (SIGTERM or SIGINT); several relays may run, one leads
    Run(Box<RunFlags>),
    /// Create or upgrade the schema; safe to repeat, and while producers write
    Migrate(MigrateFlags),
    /// Show leader, cursor, backlog and who holds it up, Redis' memory and losses, streams with groups and trimming
    ///
    /// Asks both servers and needs no running relay. Takes two seconds at the most on large outboxes and thousands of
    /// streams; what was not counted or not shown is said. Of the streams the 100 longest are shown.
    Status(StatusFlags),
    /// Stop publishing until `resume`; a leader that runs stops within its poll interval
    ///
    /// Holds for every leader, also across restarts and take-overs. Producers notice nothing: their messages wait in the
    /// outbox, and the purge takes none of them. The leader leads on, is ready (`/readyz` names the reason), and goes on
    /// where it stopped. `replay` is not held up.
    Pause {
        /// Why, for whoever finds it paused; up to 1,000 bytes
        #[arg(
            long,
            default_value = "",
            hide_default_value = true,
            value_name = "TEXT"
        )]
        reason: String,
    },
    /// Publish again after a `pause`
    Resume,
    /// Ask the relay that runs beside it whether it is ready, and why not; exit code 1 if it is not
    ///
    /// What a container's health check runs: asks /readyz of the address that `run` answers on.
    Ready {
        /// The address that `run` was given
        #[arg(long, env = "OUTBOX_LISTEN", value_name = "ADDRESS")]
        listen: std::net::SocketAddr,
    },
    /// Show or change how many partitions a topic has
    #[command(subcommand)]
    Topics(TopicsCommand),
    /// Accept that this database takes over for another cluster (restored dump, pg_upgrade)
    ///
    /// A copy of a production database must not publish into production's Redis, so a relay refuses to start when the
    /// cursor belongs to another cluster. This says that the other one is gone for good.
    Adopt,
    /// See what a consumer group has set aside; retry or discard it (in the consumer's database)
    DeadLetters {
        #[command(flatten)]
        inbox: InboxFlags,
        #[command(subcommand)]
        command: DeadLettersCommand,
    },
    /// Deliver to a consumer group again what was published since some time; the inbox absorbs what it has applied
    Rewind(RewindFlags),
    /// Publish messages again that were published before, into their own streams or into another one
    ///
    /// A group that has applied a message does nothing when it comes again, since its inbox knows the key: to have a group
    /// apply anew what it has applied is not what this is for. It is for a group that came too late, for streams that were
    /// trimmed or lost, and for another stream (--stream). To deliver again what still stands in a stream, `rewind` the
    /// group. A group that keeps its keys in Redis (RedisInbox) applies again what it has forgotten.
    ///
    /// What is replayed stands behind newer messages of its ordering key. Each entry has one more field, `replay`, with the
    /// name; by that `verify` and the relay's own proofs pass over it. Messages that are not published yet, wait in a gap
    /// or are held back are left to the relay. Runs with a leader beside it or without, and during a pause. Killed and begun
    /// again under the same name, it goes on where it stopped, to the message.
    Replay(Box<ReplayFlags>),
    /// Show where one message is: committed, published, given to a consumer group, applied; and if not, why
    ///
    /// Finds its entry without reading the stream, as long as ids rise in it; one that was committed late is looked for for a
    /// second, or with --scan for as long as it takes. A message that was purged is not in the outbox any more.
    Trace(Box<TraceFlags>),
    /// Hold the rows of the outbox against the entries of the streams, and against a consumer group's inbox
    ///
    /// Reports messages that are missing, doubled or out of order in the streams, entries without a message, and messages
    /// that a group acknowledged without their effect. Writes nothing, and may run while everything else does. Exit code 2 if
    /// something is wrong. Needs 100 bytes of temporary space (TMPDIR) for each stream entry.
    Verify(Box<VerifyFlags>),
    /// Print the rights that each role needs, and no more: SQL for psql, or with --redis an ACL for redis-cli
    ///
    /// Asks no server. The rights of producers and relays are for the producer's database, those of consumers for their own; pipe
    /// them apart. Set a Redis user's password beside it: ACL SETUSER name >password.
    Grants(GrantsFlags),
    /// Check whether both servers, their streams and the rights are as they should be, and say what to do where not
    ///
    /// Exit code by the worst finding: 0 all is well, with notes at the most; 2 a warning; 3 an error; 1 a server could not be
    /// looked at. Looks at streams for a second at the most, and writes nothing but one notification.
    Doctor(DoctorFlags),
    /// Check the configuration, or print what can be configured
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print the script that teaches a shell these commands and flags
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, in roff
    Man {
        /// Write it and a page for each command into this directory instead
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

#[derive(Subcommand)]
pub(crate) enum ConfigCommand {
    /// Say where each setting comes from, connect to both servers, and say what is wrong
    ///
    /// Takes the flags of `run`. Exit code 0 if nothing is wrong, 1 for a server, 64 for the configuration. Secrets are not
    /// shown. It writes nothing.
    Check(Box<RunFlags>),
    /// Print the table of all settings, in Markdown
    Docs,
}

#[derive(Subcommand)]
pub(crate) enum TopicsCommand {
    /// Topics that were given a number of partitions; every other topic has one
    List,
    /// Ask for another number of partitions
    ///
    /// Messages with the same ordering key go to the same partition, so the change moves keys to other streams. The
    /// leader holds the topic's messages back until all groups have acknowledged what stands in its streams, changes the
    /// number, and goes on.
    Set {
        /// The topic
        topic: String,
        /// How many partitions, 1 to 1024
        #[arg(long, value_name = "COUNT")]
        partitions: u32,
        /// Do not wait for the groups; messages of one ordering key may then be applied out of order
        #[arg(long)]
        at_once: bool,
    },
}

#[derive(Args)]
pub(crate) struct MigrateFlags {
    /// The consumer's schema `inbox` instead of the producer's `outbox`; --database-url is then the consumer's database
    #[arg(long)]
    pub(crate) inbox: bool,

    /// Print the SQL instead of running it, for psql -f
    #[arg(long)]
    pub(crate) print: bool,
}
