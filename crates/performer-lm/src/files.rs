//! This module writes result files atomically: a process that is killed leaves the old file or the
//! new one.

use std::{io::Write, path::Path};

use anyhow::{Context, Result};
use serde::Serialize;

/// Writes `bytes` to `path` through a temporary file in the folder of `path`.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let attempt = || -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let mut builder = tempfile::Builder::new();
        // Temporary files are private by default; with this mode the umask gives them the
        // permissions of any other new file.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = builder.tempfile_in(folder)?;
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
