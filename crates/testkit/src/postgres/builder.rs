//! How a Postgres server is set up before its first start.

use std::path::PathBuf;

use super::{Postgres, STARTING, template};
use crate::{
    Certificate, Error, binaries, identity::Identity, ports::Port, supervised::Supervised,
};

/// Starts are tried on another port when somebody outside the kit took this one.
pub(super) const PORT_TRIES_MAX: u32 = 5;

/// Options of a Postgres server; made by [`Postgres::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing starts before `start`"]
pub struct PostgresBuilder {
    encoding: String,
    locale: String,
    pub(super) settings: Vec<(String, String)>,
    hba: Option<String>,
    tls: Option<Certificate>,
    client_root: Option<PathBuf>,
}

impl PostgresBuilder {
    pub(super) fn new() -> Self {
        Self {
            encoding: "UTF8".to_owned(),
            locale: "C".to_owned(),
            settings: Vec::new(),
            hba: None,
            tls: None,
            client_root: None,
        }
    }

    /// A line of `postgresql.conf`. `ALTER SYSTEM` can still change it later.
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// The encoding of the cluster and of fresh databases. Default: `UTF8`.
    pub fn encoding(mut self, encoding: impl Into<String>) -> Self {
        self.encoding = encoding.into();
        self
    }

    /// The locale of the cluster, which must be installed on this machine. Default: `C`.
    pub fn locale(mut self, locale: impl Into<String>) -> Self {
        self.locale = locale.into();
        self
    }

    /// The lines of `pg_hba.conf` for TCP connections, instead of trusting everybody. The kit's own calls
    /// ([`Postgres::fresh_database`] and the like) use a Unix socket that stays trusted.
    pub fn hba(mut self, lines: impl Into<String>) -> Self {
        self.hba = Some(lines.into());
        self
    }

    /// Turns TLS on, on the same port. Connections without it are still accepted unless
    /// [`hba`](Self::hba) says otherwise.
    pub fn tls(mut self, certificate: Certificate) -> Self {
        self.tls = Some(certificate);
        self
    }

    /// Names the file of the authority whose certificates clients may show ([`Authority::root`](crate::Authority::root));
    /// [`hba`](Self::hba) says who must (`hostssl all all 127.0.0.1/32 cert`).
    pub fn client_authority(mut self, root: PathBuf) -> Self {
        self.client_root = Some(root);
        self
    }

    /// Makes the cluster and starts the server; returns when it takes connections.
    ///
    /// # Errors
    ///
    /// Postgres is not installed, or did not start; the message ends with its log.
    pub async fn start(self) -> Result<Postgres, Error> {
        let identity = Identity::for_postgres()?;
        let bin_dir = binaries::postgres_dir()?;
        let server = Supervised::new("postgres", identity)?;
        let options = [
            format!("--encoding={}", self.encoding),
            format!("--locale={}", self.locale),
        ];
        let data_dir = server.dir().join("data");
        template::create_cluster(server.identity(), &bin_dir, &options, &data_dir).await?;
        let postgres = Postgres::stopped(server, bin_dir, Port::reserve()?);
        self.configure(&postgres)?;
        postgres.first_start().await
    }

    fn configure(&self, postgres: &Postgres) -> Result<(), Error> {
        let mut settings = self.settings.clone();
        if let Some(Certificate { certificate, key }) = &self.tls {
            settings.push(("ssl".to_owned(), "on".to_owned()));
            let files = [("ssl_cert_file", certificate), ("ssl_key_file", key)];
            let root = self.client_root.iter().map(|root| ("ssl_ca_file", root));
            for (name, from) in files.into_iter().chain(root) {
                let content = std::fs::read(from)
                    .map_err(|e| Error::io(format!("read {}", from.display()), e))?;
                // Postgres refuses a key that is readable by others or owned by another account.
                let to = postgres.server.dir().join(name);
                postgres.write_file(&to, &content)?;
                settings.push((name.to_owned(), to.display().to_string()));
            }
        }
        // Kept in the data directory, so that a killed server leaves none behind.
        settings.push(("dynamic_shared_memory_type".to_owned(), "mmap".to_owned()));
        settings.push(("include_if_exists".to_owned(), STARTING.to_owned()));
        postgres.append_settings(&settings)?;
        if let Some(lines) = &self.hba {
            let kept = "local all all trust\nlocal replication all trust\n";
            postgres.write_file(
                &postgres.data_dir().join("pg_hba.conf"),
                format!("{kept}{lines}\n").as_bytes(),
            )?;
        }
        Ok(())
    }
}
