//! Every command, and which servers it asks. A command without a row here is found by the sweep.

/// What of Postgres a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Database {
    /// None at all.
    Nothing,
    /// A database, whatever is in it.
    Bare,
    /// The schema `outbox`, in the database that `DATABASE_URL` names.
    Outbox,
    /// The schema `inbox`, in the database that `INBOX_DATABASE_URL` names.
    Inbox,
}

/// One way to call a command.
#[derive(Debug)]
pub(super) struct Call {
    /// The command line, without the program.
    pub(super) line: &'static str,
    pub(super) database: Database,
    pub(super) asks_redis: bool,
}

impl Call {
    const fn of(line: &'static str, database: Database, asks_redis: bool) -> Self {
        Call {
            line,
            database,
            asks_redis,
        }
    }

    /// Whether this is a call of the command with these words, which have dashes between them.
    pub(super) fn is_of(&self, command: &str) -> bool {
        let line = self.line.replace(' ', "-");
        line.strip_prefix(command)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    }
}

/// Those that only print, and the one that asks a relay (its address is put behind it), heed no server; so a fault of either
/// must not show in them.
pub(super) const ALL: &[Call] = &[
    Call::of("run --start-timeout 0s", Database::Outbox, true),
    Call::of("config check", Database::Outbox, true),
    Call::of("status", Database::Outbox, true),
    Call::of("status --json", Database::Outbox, true),
    Call::of("doctor", Database::Outbox, true),
    Call::of("trace row", Database::Outbox, true),
    Call::of("trace row --group packing", Database::Inbox, true),
    Call::of("verify", Database::Outbox, true),
    Call::of("verify --group packing", Database::Inbox, true),
    Call::of("replay --name again --all", Database::Outbox, true),
    Call::of("replay --dry-run --all", Database::Outbox, true),
    Call::of("adopt", Database::Outbox, true),
    Call::of("rewind --group packing --since 1h", Database::Nothing, true),
    Call::of("pause --reason a-test", Database::Outbox, false),
    Call::of("resume", Database::Outbox, false),
    Call::of("topics list", Database::Outbox, false),
    Call::of("topics set orders --partitions 1", Database::Outbox, false),
    Call::of("dead-letters list", Database::Inbox, false),
    Call::of("dead-letters show 1", Database::Inbox, false),
    Call::of("dead-letters retry --topic other", Database::Inbox, false),
    Call::of("dead-letters discard --topic other", Database::Inbox, false),
    Call::of("migrate", Database::Bare, false),
    Call::of("migrate --inbox", Database::Bare, false),
    Call::of("migrate --print", Database::Nothing, false),
    Call::of("ready --listen", Database::Nothing, false),
    Call::of("grants --relay relay", Database::Nothing, false),
    Call::of("grants --redis --relay relay", Database::Nothing, false),
    Call::of("config docs", Database::Nothing, false),
    Call::of("completions bash", Database::Nothing, false),
    Call::of("man", Database::Nothing, false),
];
