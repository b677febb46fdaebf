//! Gives a copied cluster a system identifier of its own, as if `initdb` had made it.
//!
//! Two servers with one identifier would pass for one cluster, and that is what the identifier is there to
//! tell apart.

use std::{
    fs,
    hash::{BuildHasher, Hasher, RandomState},
    path::Path,
    time::SystemTime,
};

use crate::{Error, identity::Identity, supervised::run_tool};

/// The checksum stands behind all fields, whose number differs between versions; the struct stays well below
/// one disk sector.
const CRC_OFFSETS: std::ops::Range<usize> = 8..512;

/// Renames a cluster that was shut down cleanly. `false`: this version's control file is not understood,
/// and nothing was changed.
pub(super) async fn renew(
    identity: &Identity,
    bin_dir: &Path,
    data_dir: &Path,
) -> Result<bool, Error> {
    let path = data_dir.join("global/pg_control");
    let mut control =
        fs::read(&path).map_err(|e| Error::io(format!("read {}", path.display()), e))?;
    if !rewrite(&mut control, new_id()) {
        return Ok(false);
    }
    // Written in place: owner and mode stay.
    fs::write(&path, &control).map_err(|e| Error::io(format!("write {}", path.display()), e))?;
    // Each WAL file names the cluster it belongs to, so the log is begun anew.
    let args = ["-D".as_ref(), data_dir.as_os_str()];
    run_tool(identity, &bin_dir.join("pg_resetwal"), args).await?;
    Ok(true)
}

/// Puts `id` into the first field, and the checksum right.
fn rewrite(control: &mut [u8], id: u64) -> bool {
    let at = |control: &[u8], offset: usize| {
        control
            .get(offset..offset + 4)
            .and_then(|bytes| bytes.try_into().ok())
            .map(u32::from_ne_bytes)
    };
    let Some(offset) = CRC_OFFSETS
        .step_by(4)
        .find(|&offset| at(control, offset).is_some_and(|crc| crc == crc32c(&control[..offset])))
    else {
        return false;
    };
    control[..8].copy_from_slice(&id.to_ne_bytes());
    let crc = crc32c(&control[..offset]);
    control[offset..offset + 4].copy_from_slice(&crc.to_ne_bytes());
    true
}

/// Seconds in the upper half, as `initdb` does, and enough randomness below for parallel processes.
fn new_id() -> u64 {
    let seconds = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let random = RandomState::new().build_hasher().finish();
    seconds << 32 | random >> 32
}

/// CRC-32C (Castagnoli), bit by bit: a few hundred bytes are read once.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 {
                crc >> 1 ^ 0x82F6_3B78
            } else {
                crc >> 1
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnoli() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn a_rewritten_file_is_valid_again() {
        let mut control = vec![7; 600];
        let crc = crc32c(&control[..288]);
        control[288..292].copy_from_slice(&crc.to_ne_bytes());
        assert!(rewrite(&mut control, 42));
        assert_eq!(control[..8], 42_u64.to_ne_bytes());
        let crc = crc32c(&control[..288]);
        assert_eq!(control[288..292], crc.to_ne_bytes());
    }

    #[test]
    fn an_unknown_file_is_left_alone() {
        let mut control = vec![7; 600];
        assert!(!rewrite(&mut control, 42));
        assert_eq!(control, vec![7; 600]);
    }
}
