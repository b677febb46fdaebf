//! A real PgBouncer before a Postgres, as people put one there.

use std::{
    fs,
    time::{Duration, Instant},
};

use crate::{
    Error, Postgres, binaries, identity::Identity, ports::Port, sandbox, supervised::Supervised,
    wait::POLL_INTERVAL,
};

/// It starts in milliseconds; past this it hangs.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// What its log says once it takes connections.
const UP: &str = "process up";

/// What goes into its configuration; the names in braces are filled in.
const CONFIGURATION: &str = "\
[databases]
* = host=127.0.0.1 port={server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
admin_users = postgres
pool_mode = {pool_mode}
default_pool_size = {pool_size}
";

/// A PgBouncer of this test process. Dropped, it is killed.
#[derive(Debug)]
pub struct PgBouncer {
    server: Supervised,
    port: Port,
}

impl PgBouncer {
    /// Starts one before `postgres`, for its superuser, with this `pool_mode` and so many backends for each database.
    ///
    /// # Errors
    ///
    /// PgBouncer is not installed, or did not start; the message ends with its log.
    pub async fn start(
        postgres: &Postgres,
        pool_mode: &str,
        pool_size: u32,
    ) -> Result<Self, Error> {
        let program = binaries::pgbouncer()?;
        // It refuses to run as root, as Postgres does.
        let server = Supervised::new("pgbouncer", Identity::for_postgres()?)?;
        let port = Port::reserve()?;
        let users = server.dir().join("users.txt");
        let configuration = CONFIGURATION
            .replace("{server}", &postgres.port().to_string())
            .replace("{port}", &port.number().to_string())
            .replace("{users}", &users.display().to_string())
            .replace("{pool_mode}", pool_mode)
            .replace("{pool_size}", &pool_size.to_string());
        let file = server.dir().join("pgbouncer.ini");
        for (path, content) in [(&users, "\"postgres\" \"\"\n"), (&file, &configuration)] {
            fs::write(path, content)
                .map_err(|e| Error::io(format!("write {}", path.display()), e))?;
            sandbox::set_mode(path, 0o600)?;
            server.identity().own(path)?;
        }
        server.spawn(&program, &[file.into()])?;
        let bouncer = Self { server, port };
        let started = Instant::now();
        while !bouncer.log().contains(UP) {
            if !bouncer.server.is_running() || started.elapsed() > START_DEADLINE {
                return Err(Error::server(
                    format!("PgBouncer on port {} did not start", bouncer.port()),
                    bouncer.server.log_tail(),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(bouncer)
    }

    /// The TCP port on 127.0.0.1; see [`Postgres::url_via`].
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        self.server.log_from(0)
    }
}
