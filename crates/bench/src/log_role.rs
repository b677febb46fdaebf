//! A role whose statements Postgres logs, to count those of the relay and of nobody else.

use crate::{Error, stage::Stage};

/// The role.
pub(crate) const LOG_ROLE: &str = "counted";

const CREATE_ROLE: &str = "
    DO $$ BEGIN
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'counted') THEN
            CREATE ROLE counted SUPERUSER LOGIN;
            ALTER ROLE counted SET log_statement = 'all';
        END IF;
    END $$";

/// What the log has of every statement: by the simple and by the extended protocol.
const STATEMENTS: [&str; 2] = ["LOG:  statement: ", "LOG:  execute "];

/// The relay's forced commit, as its SQL names it.
const FORCED_COMMIT: &str = "pg_logical_emit_message(true";

/// The address of a database for a relay whose statements are counted.
pub(crate) async fn counted_url(stage: &Stage, database: &str) -> Result<String, Error> {
    stage
        .connect(database)
        .await?
        .batch_execute(CREATE_ROLE)
        .await?;
    Ok(stage.url_beside_as(LOG_ROLE, database))
}

/// Statements of that role so far.
pub(crate) fn statements(stage: &Stage) -> usize {
    STATEMENTS.iter().map(|text| stage.logged(text)).sum()
}

/// Commits that the relay forced so far.
pub(crate) fn forced_commits(stage: &Stage) -> usize {
    stage.logged(FORCED_COMMIT)
}
