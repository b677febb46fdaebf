//! An outbox with everything that the commands look for, where each password holds the secret.

use std::net::{SocketAddr, TcpListener};

use outbox_testkit::{Postgres, Process, Redis, relay};
use tokio_postgres::Client;

use crate::http::{LISTEN, address_of};
use crate::pair::{DEADLINE, Pair, Server};
use crate::support::leading;

/// Every password, or a part of it.
pub(super) const SECRET: &str = "s3cret-Pa55word";

/// The servers take a password in clear, so that it is sent as it is; the kit's own role needs none.
const HBA: &str = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 password";

const DEAD_LETTER: &str = "INSERT INTO inbox.dead_letters
    (consumer_group, stream, entry_id, topic, message_key, payload, attempts, reason)
    VALUES ('packing', 'outbox:orders', '1-0', 'orders', 'row', '{}', 3, 'a test')";

/// An outbox, an inbox in the same database, and a relay that leads.
pub(super) struct Stage {
    pub(super) pair: Pair,
    /// A role that may do everything.
    pub(super) owner: String,
    /// A role that may do nothing.
    pub(super) stranger: String,
    /// Where the relay answers HTTP.
    pub(super) listen: String,
    /// Takes connections and says nothing.
    silent: TcpListener,
    _relay: Process,
}

impl Stage {
    /// On a Postgres that wants passwords.
    pub(super) async fn open_with_passwords() -> Self {
        let postgres = Postgres::builder().hba(HBA).start().await.unwrap();
        Self::open_on(Server::Own(Box::new(postgres))).await
    }

    /// On the shared Postgres, which heeds no password.
    pub(super) async fn open() -> Self {
        Self::open_on(Server::Shared(Postgres::shared().await.unwrap())).await
    }

    async fn open_on(postgres: Server) -> Self {
        let redis = Redis::builder().password(SECRET).start().await.unwrap();
        let pair = Pair::on(postgres, redis).await;
        pair.postgres
            .migrate(&pair.database, "inbox")
            .await
            .unwrap();
        pair.sql.execute(DEAD_LETTER, &[]).await.unwrap();
        let owner = role(&pair.sql, &format!("{}_owner", pair.database), "SUPERUSER").await;
        let stranger = role(&pair.sql, &format!("{}_stranger", pair.database), "").await;
        let insert = "INSERT INTO outbox.messages (topic, message_key, payload) VALUES ('orders', 'row', '{}')";
        pair.sql.execute(insert, &[]).await.unwrap();
        let run = relay(&pair.postgres.url(&pair.database), &pair.redis.url());
        let relay = leading(run.args(LISTEN)).await;
        pair.all_published(DEADLINE).await;
        let mut redis = pair.redis.connect().await.unwrap();
        for command in [
            "XGROUP CREATE outbox:orders packing 0",
            // What a connection says at first, and nothing else.
            "ACL SETUSER stranger on >s3cret-Pa55word ~* -@all +ping +client +hello +select",
        ] {
            let mut words = command.split(' ');
            let mut command = redis::cmd(words.next().unwrap());
            command.arg(words.collect::<Vec<_>>());
            command.exec_async(&mut redis).await.unwrap();
        }
        Stage {
            listen: address_of(&relay).await,
            pair,
            owner,
            stranger,
            silent: TcpListener::bind("127.0.0.1:0").unwrap(),
            _relay: relay,
        }
    }

    /// Where a server takes connections and says nothing.
    pub(super) fn silent(&self) -> SocketAddr {
        self.silent.local_addr().unwrap()
    }

    /// A database of this server as a role sees it.
    pub(super) fn postgres_url(&self, role: &str, password: &str, database: &str) -> String {
        let port = self.pair.postgres.port();
        format!("postgres://{role}:{password}@127.0.0.1:{port}/{database}")
    }

    /// The outbox and its Redis as those see them who may do everything.
    pub(super) fn right_urls(&self) -> (String, String) {
        let postgres = self.postgres_url(&self.owner, SECRET, &self.pair.database);
        (postgres, self.pair.redis.url())
    }
}

/// Makes a role, and returns its name.
async fn role(sql: &Client, name: &str, attributes: &str) -> String {
    let create = format!("CREATE ROLE {name} LOGIN {attributes} PASSWORD '{SECRET}'");
    sql.batch_execute(&create).await.unwrap();
    name.to_owned()
}
