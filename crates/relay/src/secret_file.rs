//! A secret that stands in a file of its own, so that whoever turns it over need not restart the relay.

use std::io::Read;
use std::path::Path;

use secrecy::SecretString;

use crate::error::{Error, Result};

/// No address is longer than this; whatever is was named by mistake.
const SECRET_BYTES_MAX: u64 = 64 << 10;

/// Reads the secret, without the white space around it.
///
/// # Errors
///
/// [`Error::Config`] for a file that cannot be read, is empty, or is too long. What stands in it is never repeated.
pub(crate) fn read_secret(field: &'static str, path: &Path) -> Result<SecretString> {
    let bad = |problem: &dyn std::fmt::Display| Error::Config {
        field,
        problem: format!("{}: {problem}", path.display()),
    };
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(SECRET_BYTES_MAX + 1).read_to_string(&mut text))
        .map_err(|e| bad(&e))?;
    if text.len() as u64 > SECRET_BYTES_MAX {
        return Err(bad(&"is too long for an address"));
    }
    match text.trim() {
        "" => Err(bad(&"is empty")),
        secret => Ok(SecretString::from(secret)),
    }
}
