//! Certificates for servers that speak TLS, and an authority that a client can be told to trust, or not to.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use crate::{Error, sandbox};

/// A certificate authority of this test. Dropped, its files are removed; servers have copies of theirs.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// A server's certificate and its key, as PEM files that live as long as their [`Authority`].
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The file with the certificate.
    pub certificate: PathBuf,
    /// The file with the private key.
    pub key: PathBuf,
}

impl Authority {
    /// Makes an authority that nobody trusts yet.
    ///
    /// # Errors
    ///
    /// Its files cannot be written.
    pub fn new() -> Result<Self, Error> {
        let dir = sandbox::new_dir("authority")?;
        let key = KeyPair::generate().map_err(refused)?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Unlike any other's, or clients would find a bad signature instead of an unknown issuer.
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        params
            .distinguished_name
            .push(DnType::CommonName, name.as_ref());
        let root = params.self_signed(&key).map_err(refused)?;
        write(&dir.join("root.pem"), &root.pem())?;
        Ok(Self {
            dir,
            issuer: Issuer::new(params, key),
        })
    }

    /// The file that clients are given to trust this authority (`sslrootcert`).
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.dir.join("root.pem")
    }

    /// Issues a certificate for a host name or an IP address.
    ///
    /// # Errors
    ///
    /// That is no host name, or its files cannot be written.
    pub fn issue(&self, host: &str) -> Result<Certificate, Error> {
        let key = KeyPair::generate().map_err(refused)?;
        let mut params = CertificateParams::new([host.to_owned()]).map_err(refused)?;
        params.distinguished_name.push(DnType::CommonName, host);
        let issued = params.signed_by(&key, &self.issuer).map_err(refused)?;
        let certificate = Certificate {
            certificate: self.dir.join(format!("{host}.pem")),
            key: self.dir.join(format!("{host}.key")),
        };
        write(&certificate.certificate, &issued.pem())?;
        write(&certificate.key, &key.serialize_pem())?;
        Ok(certificate)
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the watchdog.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn write(path: &Path, pem: &str) -> Result<(), Error> {
    fs::write(path, pem).map_err(|e| Error::io(format!("write {}", path.display()), e))
}

fn refused(error: rcgen::Error) -> Error {
    Error::misuse(format!("make a certificate: {error}"))
}
