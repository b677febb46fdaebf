//! `outbox-relay dead-letters`: what a consumer group has set aside, and what is to become of it.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use secrecy::SecretString;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};

use crate::config::given_twice;
use crate::error::{Error, Result};
use crate::postgres::{PostgresTarget, sql};

const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Characters of a reason in a list; `show` has all of it.
const REASON_LISTED: usize = 100;

/// What `dead-letters` is asked to do. It works on the schema `inbox`, hence on the consumer's database.
#[derive(Subcommand, Clone, Debug)]
pub enum DeadLettersCommand {
    /// One line for each, oldest first, without payloads
    List {
        /// Which ones
        #[command(flatten)]
        filter: LetterFilter,
        /// Messages that wait behind a dead letter of their ordering key, and those to be retried, as well
        #[arg(long)]
        all_states: bool,
        /// Most lines
        #[arg(long, default_value_t = 1_000, value_name = "ROWS")]
        limit: u32,
    },
    /// Everything about some of them, payload included
    Show {
        /// Their numbers
        #[arg(required = true, value_name = "ID")]
        ids: Vec<i64>,
    },
    /// Let the group deliver them again, from the table, to itself only
    ///
    /// A member of the group takes them up within about a second, with a new series of attempts. The effect, its key in
    /// the inbox and the removal of the dead letter are one commit.
    Retry(LetterChoice),
    /// Give them up: their keys count as applied, and messages that they hold go on
    Discard(LetterChoice),
}

/// Which dead letters; all conditions must hold.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct LetterFilter {
    /// Of this consumer group
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
    /// Of this topic
    #[arg(long, value_name = "TOPIC")]
    pub topic: Option<String>,
    /// Of this event type
    #[arg(long, value_name = "TYPE")]
    pub event_type: Option<String>,
    /// Set aside longer ago than this, e.g. 2h
    #[arg(long, value_parser = humantime::parse_duration, value_name = "TIME")]
    pub older_than: Option<Duration>,
    /// With this text in the reason, in upper or lower case
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Dead letters by number or by filter; one of them must be given.
#[derive(Args, Clone, Debug)]
pub struct LetterChoice {
    /// Their numbers, as `list` shows them
    #[arg(value_name = "ID")]
    pub ids: Vec<i64>,
    /// Or which ones
    #[command(flatten)]
    pub filter: LetterFilter,
    /// Or really all
    #[arg(long)]
    pub all: bool,
}

impl LetterChoice {
    /// Whether it says which ones, in one of the three ways.
    fn check(&self) -> Result<()> {
        let by_filter = self.filter != LetterFilter::default();
        let given = [!self.ids.is_empty(), by_filter, self.all];
        if given.into_iter().filter(|given| *given).count() == 1 {
            return Ok(());
        }
        Err(Error::Config {
            field: "dead-letters",
            problem:
                "name dead letters by their numbers, or by a filter, or say --all; one of the three"
                    .into(),
        })
    }
}

/// Where the schema `inbox` is.
#[derive(Args, Clone)]
pub struct InboxFlags {
    /// The consumer's database, in the form of --database-url [default: --database-url]
    #[arg(
        long,
        env = "INBOX_DATABASE_URL",
        hide_env_values = true,
        global = true,
        value_name = "URL"
    )]
    pub inbox_database_url: Option<SecretString>,

    /// File that holds what --inbox-database-url would be given; read anew for each connection
    #[arg(
        long,
        env = "INBOX_DATABASE_URL_FILE",
        global = true,
        value_name = "FILE"
    )]
    pub inbox_database_url_file: Option<PathBuf>,
}

impl InboxFlags {
    /// The database named for the inbox, if one is.
    ///
    /// # Errors
    ///
    /// A URL that is given twice or not understood, or a file that cannot be read.
    pub fn postgres(&self) -> Result<Option<PostgresTarget>> {
        let (plain, of_file) = ("--inbox-database-url", "--inbox-database-url-file");
        match (&self.inbox_database_url, &self.inbox_database_url_file) {
            (None, None) => Ok(None),
            (Some(url), None) => PostgresTarget::parse_of(plain, url).map(Some),
            (None, Some(file)) => PostgresTarget::from_file_of(of_file, file).map(Some),
            (Some(_), Some(_)) => Err(given_twice(of_file, plain)),
        }
    }
}

/// Does what is asked in the consumer's database, and returns what to say about it.
///
/// # Errors
///
/// The database is out of reach or has no schema `inbox`, a number is not there, or no choice was made.
pub async fn dead_letters(target: &PostgresTarget, command: &DeadLettersCommand) -> Result<String> {
    if let DeadLettersCommand::Retry(choice) | DeadLettersCommand::Discard(choice) = command {
        choice.check()?;
    }
    let client = inbox(target, "outbox-relay dead-letters").await?;
    match command {
        DeadLettersCommand::List {
            filter,
            all_states,
            limit,
        } => list(&client, filter, *all_states, *limit).await,
        DeadLettersCommand::Show { ids } => show(&client, ids).await,
        DeadLettersCommand::Retry(choice) => {
            let counts = change(&client, sql::RETRY_LETTERS, choice).await?;
            let malformed = match counts.get::<_, i64>(1) {
                0 => String::new(),
                n => format!("; {n} are no messages and cannot be retried"),
            };
            Ok(format!(
                "{} will be delivered again{malformed}",
                counts.get::<_, i64>(0)
            ))
        }
        DeadLettersCommand::Discard(choice) => {
            let counts = change(&client, sql::DISCARD_LETTERS, choice).await?;
            Ok(format!("{} discarded", counts.get::<_, i64>(0)))
        }
    }
}

/// A session of a database that has the schema `inbox`.
pub(crate) async fn inbox(target: &PostgresTarget, application_name: &str) -> Result<Client> {
    let (client, _) = target
        .connect_directly(application_name, CONNECT_LIMIT)
        .await?;
    client
        .batch_execute(sql::DEAD_LETTERS_SESSION)
        .await
        .map_err(failed("set up the session"))?;
    let row = client
        .query_one(sql::INBOX_EXISTS, &[])
        .await
        .map_err(failed("look for the schema"))?;
    if !row.get::<_, bool>(0) {
        return Err(Error::Setup {
            problem: format!("{} has no schema \"inbox\"", target.describe()),
            remedy: "name the consumer's database in --inbox-database-url, or run `outbox-relay migrate --inbox`".into(),
        });
    }
    Ok(client)
}

async fn list(
    client: &Client,
    filter: &LetterFilter,
    all_states: bool,
    limit: u32,
) -> Result<String> {
    let older_than = filter.older_than.map(|age| age.as_secs_f64());
    let limit = i64::from(limit);
    let params: [&(dyn ToSql + Sync); 7] = [
        &filter.group,
        &filter.topic,
        &filter.event_type,
        &older_than,
        &filter.reason,
        &all_states,
        &limit,
    ];
    let rows = client
        .query(sql::LIST_LETTERS, &params)
        .await
        .map_err(failed("list dead letters"))?;
    let mut out = String::from(
        "id\tset aside\tstate\tgroup\ttopic\tevent type\tmessage key\tattempts\treason",
    );
    for row in &rows {
        let reason: String = row
            .get::<_, String>("reason")
            .chars()
            .take(REASON_LISTED)
            .collect();
        let columns = [
            row.get::<_, i64>("id").to_string(),
            row.get("set_aside_at"),
            row.get("state"),
            printable(row.get("consumer_group")),
            row.get("topic"),
            row.get::<_, Option<&str>>("event_type")
                .map_or_else(|| "-".into(), printable),
            row.get::<_, Option<&str>>("message_key")
                .map_or_else(|| "-".into(), printable),
            row.get::<_, i32>("attempts").to_string(),
            printable(&reason),
        ];
        out.push('\n');
        out.push_str(&columns.join("\t"));
    }
    Ok(out)
}

async fn show(client: &Client, ids: &[i64]) -> Result<String> {
    let rows = client
        .query(sql::SHOW_LETTERS, &[&ids])
        .await
        .map_err(failed("read dead letters"))?;
    if let Some(missing) = ids
        .iter()
        .find(|id| !rows.iter().any(|row| row.get::<_, i64>("id") == **id))
    {
        return Err(no_such_letter(*missing));
    }
    let letters: Vec<String> = rows.iter().map(described).collect();
    Ok(letters.join("\n\n"))
}

fn described(row: &Row) -> String {
    let mut out = String::new();
    let names = [
        "number",
        "state",
        "consumer_group",
        "topic",
        "stream",
        "entry_id",
        "message_id",
        "message_key",
        "ordering_key",
        "event_type",
        "created_at",
        "set_aside_at",
        "attempts",
        "reason",
        "content_type",
        "headers",
    ];
    for name in names {
        if let Some(value) = row.get::<_, Option<&str>>(name) {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{name:<15} {}", printable(value));
        }
    }
    let payload: &[u8] = row.get("payload");
    match std::str::from_utf8(payload) {
        Ok(text) => out.push_str(text),
        Err(_) => {
            out.push_str("hex ");
            for byte in payload {
                let _ = write!(out, "{byte:02x}");
            }
        }
    }
    out
}

/// Retries or discards; the first column of the row says how many.
async fn change(client: &Client, sql: &str, choice: &LetterChoice) -> Result<Row> {
    let LetterChoice { ids, filter, .. } = choice;
    if !ids.is_empty() {
        let rows = client
            .query(sql::SHOW_LETTERS, &[ids])
            .await
            .map_err(failed("read dead letters"))?;
        let found = |id: &i64| rows.iter().any(|row| row.get::<_, i64>("id") == *id);
        if let Some(missing) = ids.iter().find(|id| !found(id)) {
            return Err(no_such_letter(*missing));
        }
    }
    let older_than = filter.older_than.map(|age| age.as_secs_f64());
    let ids = (!ids.is_empty()).then_some(ids);
    let params: [&(dyn ToSql + Sync); 6] = [
        &filter.group,
        &filter.topic,
        &filter.event_type,
        &older_than,
        &filter.reason,
        &ids,
    ];
    client
        .query_one(sql, &params)
        .await
        .map_err(failed("change dead letters"))
}

fn no_such_letter(id: i64) -> Error {
    Error::Setup {
        problem: format!("there is no dead letter {id}"),
        remedy: "see `outbox-relay dead-letters list`".into(),
    }
}

fn failed(doing: &'static str) -> impl Fn(tokio_postgres::Error) -> Error {
    move |source| Error::Postgres { doing, source }
}

/// One line, whatever an application or an attacker wrote: no control character reaches the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}
