//! This module writes result files atomically: a process that is killed leaves the old file or the
//! new one. It also keeps two processes from working in one folder, and files from being replaced
//! that nobody asked to replace.

use std::{
    fs::{File, TryLockError},
    io::{ErrorKind, Write},
    path::{Component, Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::errors::Cause;

/// Name of the empty file by which a folder is locked. It stays in the folder: to remove it while
/// another process opens it would give each of the two a lock of its own.
const LOCK: &str = ".lock";

/// A `Lock` says that this process alone writes to a folder, until it is dropped or the process
/// ends, however it ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Locks a folder, which is created where needed.
    ///
    /// # Errors
    /// If another process works in the folder, or the folder cannot be written to.
    pub(crate) fn of(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let path = dir.join(LOCK);
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        // Where several users share a folder, the file may be another one's, which can be locked
        // all the same.
        let file = match file {
            Err(e) if e.kind() == ErrorKind::PermissionDenied => File::open(&path).or(Err(e)),
            file => file,
        };
        Self::hold(file.with_context(|| format!("cannot write {}", path.display()))?, dir)
    }

    /// Locks a file, or the folder itself, for work in a folder.
    fn hold(file: File, dir: &Path) -> Result<Self> {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                bail!("another process works in {}: wait until it ends, or choose another folder", dir.display())
            }
            // Some file systems have no locks; work goes on there as it would without this module.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Self { _file: file }),
        }
    }

    /// Locks a folder that is there, without a new file in it, since it is to be given away: the
    /// file by which it was locked before, if any, and the folder itself, which only Unix lets one
    /// lock.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub(crate) fn without_a_file(dir: &Path) -> Result<(Option<Self>, Option<Self>)> {
        let worked_in = dir.join(LOCK).exists().then(|| Self::of(dir)).transpose()?;
        let itself = File::open(dir).ok().map(|folder| Self::hold(folder, dir)).transpose()?;
        Ok((worked_in, itself))
    }
}

/// Refuses a name that is a file's, or leads through one, where a folder is to be.
///
/// # Errors
/// If it is so; the message names the file.
pub(crate) fn require_no_file(dir: &Path) -> Result<()> {
    match dir.ancestors().find(|path| path.exists()) {
        Some(file) if !file.is_dir() => {
            bail!("{} is a file, where a folder for results is to be: choose another name", file.display())
        }
        _ => Ok(()),
    }
}

/// Refuses a folder in which one of these files exists; an empty file holds nothing to lose.
///
/// # Errors
/// [`Cause::WouldReplace`] with the first such file.
pub(crate) fn require_free(dir: &Path, names: &[&str]) -> Result<()> {
    let is_taken = |name: &&&str| dir.join(name).metadata().is_ok_and(|found| !found.is_file() || found.len() > 0);
    if let Some(name) = names.iter().find(is_taken) {
        bail!(Cause::WouldReplace(format!("{} holds {name}, which would be replaced", dir.display())));
    }
    Ok(())
}

/// Refuses a folder in which nothing can be written, before the work whose results go there.
/// Nothing is left behind.
///
/// # Errors
/// If the folder, or the one that it would be created in, cannot be written to.
#[cfg(feature = "lab")]
pub(crate) fn require_writable(dir: &Path) -> Result<()> {
    require_no_file(dir)?;
    let there = dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    tempfile::tempfile_in(there).map(drop).with_context(|| {
        format!("cannot write to {}: check the folder and its permissions, or choose another one", dir.display())
    })
}

/// Refuses a folder in which results would replace files that this program did not write. It knows
/// its own by `record`, a JSON file with this field that stands beside the files `names`.
///
/// # Errors
/// [`Cause::AnotherFolder`] with the first file that is not this program's.
#[cfg(feature = "lab")]
pub(crate) fn require_own(dir: &Path, (record, field): (&str, &str), names: &[&str]) -> Result<()> {
    require_writable(dir)?;
    let foreign = match std::fs::read(dir.join(record)) {
        Ok(text) => {
            let is_own =
                serde_json::from_slice::<serde_json::Value>(&text).is_ok_and(|found| found.get(field).is_some());
            (!is_own).then_some(record)
        }
        Err(_) => names.iter().copied().find(|name| dir.join(name).exists()),
    };
    match foreign {
        Some(name) => bail!(Cause::AnotherFolder(format!(
            "{} holds a {name} that is no result of this kind, and would be replaced: choose another folder",
            dir.display()
        ))),
        None => Ok(()),
    }
}

/// Says of a report that could not be read what to do about it: a damaged one of this program's, by
/// the name of one of its fields, may go with its folder, and a file of something else may not.
pub(crate) fn unread(file: &Path, text: &str, field: &str, again: &str) -> String {
    if text.contains(&format!("\"{field}\"")) {
        format!("{} is damaged: remove its folder to {again}", file.display())
    } else {
        format!(
            "{} is no report of this program, or is cut off: choose another folder, or remove the file",
            file.display()
        )
    }
}

/// Returns the path that leads from the folder `from` to `to`, if both exist and are on one drive.
pub(crate) fn between(from: &Path, to: &Path) -> Option<PathBuf> {
    let (from, to) = (from.canonicalize().ok()?, to.canonicalize().ok()?);
    let shared = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(shared).map(|_| Component::ParentDir);
    (shared > 0).then(|| up.chain(to.components().skip(shared)).collect())
}

/// Writes `bytes` to `path` through a temporary file in the folder of `path`.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let attempt = || -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let builder = &mut tempfile::Builder::new();
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
    write(path, &as_json(value)?)
}

/// Returns what [`write_json`] writes.
pub(crate) fn as_json(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut json = serde_json::to_vec_pretty(value)?;
    json.push(b'\n');
    Ok(json)
}

/// Removes a file, if there is one.
///
/// # Errors
/// If it cannot be removed.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_folder_is_locked_without_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::without_a_file(dir.path()).unwrap();
        let error = Lock::without_a_file(dir.path()).unwrap_err().to_string();
        assert!(error.contains("another process works in"), "{error}");
        drop(lock);
        drop(Lock::without_a_file(dir.path()).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let _lock = Lock::of(dir.path()).unwrap();
        assert!(Lock::without_a_file(dir.path()).is_err());
    }

    #[test]
    fn a_path_leads_from_one_folder_to_another() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["a/b", "c"] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        let between = |from: &str, to: &str| between(&dir.path().join(from), &dir.path().join(to));
        for (from, to, path) in
            [("a/b", "c", "../../c"), ("a", "a/b", "b"), ("a/b", "a", ".."), ("c", "c/../a", "../a")]
        {
            assert_eq!(between(from, to), Some(path.into()));
        }
        assert_eq!(between("a", "none"), None);
    }
}
