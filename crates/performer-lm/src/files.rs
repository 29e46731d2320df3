//! Writing result files so that a kill leaves the old one or the new one.

use std::{io::Write, path::Path};

use anyhow::{Context, Result};
use serde::Serialize;

/// Writes `bytes` to `path` by way of a temporary file beside it.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let attempt = || -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::Builder::new().permissions(permissions()).tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    attempt().with_context(|| format!("cannot write {}: check free space and permissions", path.display()))
}

/// Writes `value` as indented JSON.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut json = serde_json::to_vec_pretty(value)?;
    json.push(b'\n');
    write(path, &json)
}

/// Temporary files are for their owner alone by default; results are as public as any other file.
#[cfg(unix)]
fn permissions() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o644)
}

#[cfg(not(unix))]
fn permissions() -> std::fs::Permissions {
    unimplemented_permissions()
}
