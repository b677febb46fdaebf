//! TLS to Postgres, with the modes as libpq names them.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};

use crate::error::{Error, Result};

/// How a connection is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TlsMode {
    /// Plain text.
    Disable,
    /// TLS if the server offers it, unchecked; plain text otherwise.
    Prefer,
    /// TLS without a check of the certificate, unless a CA file is named: then as `verify-ca`.
    Require,
    /// TLS, and the certificate must be signed by a trusted CA.
    VerifyCa,
    /// TLS, and the certificate must also be for the host that was asked for.
    VerifyFull,
}

/// TLS settings of one server.
#[derive(Clone, Debug)]
pub struct TlsSettings {
    /// The mode.
    pub mode: TlsMode,
    /// A PEM file of trusted CAs; the system's when absent.
    pub ca_file: Option<PathBuf>,
    /// A PEM file with the client's certificate.
    pub client_cert: Option<PathBuf>,
    /// A PEM file with the key to it.
    pub client_key: Option<PathBuf>,
}

impl TlsSettings {
    /// Builds the rustls configuration for this mode.
    ///
    /// # Errors
    ///
    /// A file that is missing or holds no certificate or key.
    pub fn client_config(&self) -> Result<ClientConfig> {
        let provider = Arc::new(ring::default_provider());
        let verifier: Arc<dyn ServerCertVerifier> = match (self.mode, &self.ca_file) {
            (TlsMode::VerifyFull, _) => self.chain_verifier(&provider)?,
            (TlsMode::VerifyCa, _) | (TlsMode::Require, Some(_)) => Arc::new(Unchecked {
                chain: Some(self.chain_verifier(&provider)?),
                provider: provider.clone(),
            }),
            (TlsMode::Disable | TlsMode::Prefer | TlsMode::Require, _) => Arc::new(Unchecked {
                chain: None,
                provider: provider.clone(),
            }),
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(tls_error)?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        match (&self.client_cert, &self.client_key) {
            (Some(cert), Some(key)) => {
                let chain = certificates(cert)?;
                let key = PrivateKeyDer::from_pem_file(key).map_err(|e| file_error(key, &e))?;
                builder.with_client_auth_cert(chain, key).map_err(tls_error)
            }
            (None, None) => Ok(builder.with_no_client_auth()),
            _ => Err(Error::Config {
                field: "--database-url",
                problem: "sslcert and sslkey go together; give both or neither".into(),
            }),
        }
    }

    fn chain_verifier(&self, provider: &Arc<CryptoProvider>) -> Result<Arc<WebPkiServerVerifier>> {
        let mut roots = RootCertStore::empty();
        match &self.ca_file {
            Some(file) => {
                for certificate in certificates(file)? {
                    roots.add(certificate).map_err(tls_error)?;
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .build()
            .map_err(|e| Error::Tls {
                server: "Postgres",
                problem: format!("no usable CA certificates ({e}); name a file with sslrootcert"),
            })
    }
}

fn certificates(file: &PathBuf) -> Result<Vec<CertificateDer<'static>>> {
    let all = CertificateDer::pem_file_iter(file)
        .and_then(|certificates| certificates.collect::<std::result::Result<Vec<_>, _>>())
        .map_err(|e| file_error(file, &e))?;
    if all.is_empty() {
        return Err(file_error(file, &"it holds no certificate"));
    }
    Ok(all)
}

fn file_error(file: &std::path::Path, problem: &dyn std::fmt::Display) -> Error {
    Error::Config {
        field: "TLS file",
        problem: format!("{}: {problem}", file.display()),
    }
}

fn tls_error(error: rustls::Error) -> Error {
    Error::Tls {
        server: "Postgres",
        problem: error.to_string(),
    }
}

/// Checks the chain but not the name (`verify-ca`), or neither (`require`, `prefer`).
#[derive(Debug)]
struct Unchecked {
    chain: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Unchecked {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else {
            return Ok(ServerCertVerified::assertion());
        };
        match chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The name is checked last, once the chain holds.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            cert,
            dss,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            cert,
            dss,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
