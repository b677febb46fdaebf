//! How connections are protected (feature `tls`).

use std::{error::Error as StdError, fs, io, path::PathBuf, sync::Arc};

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, RedisResult, TlsCertificates,
};

use crate::Error;

/// How a connection with TLS is protected.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// How the server's certificate is checked.
    pub check: TlsCheck,
    /// A PEM file of trusted CAs; the system's when absent.
    pub ca_file: Option<PathBuf>,
    /// A PEM file with the client's certificate; goes with `client_key`.
    pub client_cert: Option<PathBuf>,
    /// A PEM file with the key to it.
    pub client_key: Option<PathBuf>,
}

/// What is checked of a server's certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsCheck {
    /// That a trusted CA signed it, and that it is for the host that was asked for.
    #[default]
    Full,
    /// That a trusted CA signed it.
    Ca,
    /// Nothing: the connection is encrypted, and nobody knows with whom.
    Nothing,
}

/// What holds where nothing else is said.
pub(crate) fn of_url(info: &ConnectionInfo) -> Option<Tls> {
    matches!(info.addr(), ConnectionAddr::TcpTls { .. }).then(Tls::default)
}

impl Tls {
    /// What connects to the server of this address.
    pub(crate) fn client(&self, info: ConnectionInfo) -> Result<RedisResult<Client>, Error> {
        // redis takes whatever provider the process has; an application's own choice stands.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut addr = info.addr().clone();
        if let ConnectionAddr::TcpTls { insecure, .. } = &mut addr {
            *insecure = self.check == TlsCheck::Nothing;
        }
        let certificates = self.certificates()?;
        let client = Client::build_with_tls(info.set_addr(addr), certificates);
        if self.check == TlsCheck::Full {
            return Ok(client);
        }
        Ok(client.and_then(|client| {
            let info = client.get_connection_info().clone();
            let mut addr = info.addr().clone();
            addr.set_danger_accept_invalid_hostnames(true);
            Client::open(info.set_addr(addr))
        }))
    }

    fn certificates(&self) -> Result<TlsCertificates, Error> {
        let read = |setting, file: &Option<PathBuf>| {
            let read = |path: &PathBuf| {
                fs::read(path).map_err(|source| Error::File {
                    setting,
                    path: path.clone(),
                    source,
                })
            };
            file.as_ref().map(read).transpose()
        };
        let client_cert = read("client_cert", &self.client_cert)?;
        let client_key = read("client_key", &self.client_key)?;
        let client_tls = client_cert.zip(client_key);
        Ok(TlsCertificates {
            client_tls: client_tls.map(|(client_cert, client_key)| ClientTlsConfig {
                client_cert,
                client_key,
            }),
            root_cert: read("ca_file", &self.ca_file)?,
        })
    }
}

/// Whether it was TLS that failed, somewhere among the causes of this error.
pub fn is_tls_failure(error: &dyn StdError) -> bool {
    let mut cause = error.source();
    while let Some(inner) = cause {
        // redis shares its causes, and what shares a cause answers with the cause behind it.
        if let Some(shared) = inner.downcast_ref::<Arc<dyn StdError + Send + Sync>>() {
            cause = Some(&**shared);
            continue;
        }
        if inner.is::<rustls::Error>() {
            return true;
        }
        let wrapped = inner.downcast_ref().and_then(io::Error::get_ref);
        cause = match wrapped {
            Some(wrapped) => Some(wrapped),
            None => inner.source(),
        };
    }
    false
}

#[cfg(test)]
mod tests {
    use crate::{RedisAddress, Tls};

    #[test]
    fn settings_of_tls_need_an_address_with_it() {
        for (address, with_tls) in [
            ("rediss://a", true),
            ("rediss://a,b", true),
            ("rediss+sentinel://a/shop", true),
            ("redis://a", false),
            ("redis+sentinel://a/shop", false),
        ] {
            let address = RedisAddress::parse(address).unwrap();
            assert_eq!(address.is_with_tls(), with_tls, "{address}");
            let settled = address.clone().with_tls(Tls::default());
            assert_eq!(settled.is_ok(), with_tls, "{address}");
        }
    }
}
