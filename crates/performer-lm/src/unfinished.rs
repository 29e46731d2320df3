//! What this process has made and nobody is to find once it has ended: files that are being
//! written, and folders of runs that are only measured. Each goes when it is dropped; a program
//! that ends at once, as one does that is stopped, removes them by [`remove_unfinished`].

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// The files and folders that there are now.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Locks the list. A thread that panicked while it held the lock has left the list whole, so the
/// poison is ignored.
fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often a folder is removed into which somebody writes at the same time.
const ATTEMPTS: usize = 10;

/// Removes the temporary files and folders of this process, for a program that is about to end.
/// What makes them fails if it goes on.
pub fn remove_unfinished() {
    remove(&std::mem::take(&mut *unfinished()));
}

fn remove(paths: &BTreeSet<PathBuf>) {
    for path in paths {
        // There is nobody left to tell.
        let _ = match path.is_dir() {
            true => (0..ATTEMPTS).any(|_| fs::remove_dir_all(path).is_ok()),
            false => fs::remove_file(path).is_ok(),
        };
    }
}

/// An entry of the list, which goes when it is dropped. What the entry names stays.
#[derive(Debug)]
pub(crate) struct Listed(PathBuf);

impl Listed {
    pub(crate) fn new(path: &Path) -> Self {
        unfinished().insert(path.into());
        Self(path.into())
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        unfinished().remove(&self.0);
    }
}

#[cfg(test)]
pub(crate) fn is_listed(path: &Path) -> bool {
    unfinished().contains(path)
}

/// A `Scratch` is a temporary folder, which goes when it is dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    folder: TempDir,
    _listed: Listed,
}

impl Scratch {
    /// Makes a folder for `what`, which an error names.
    ///
    /// # Errors
    /// If none can be made.
    pub(crate) fn new(what: &str) -> Result<Self> {
        let folder = tempfile::tempdir().with_context(|| {
            format!("cannot make a folder for {what} in {}; set TMPDIR to another one", std::env::temp_dir().display())
        })?;
        let listed = Listed::new(folder.path());
        Ok(Self { folder, _listed: listed })
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The list is that of the whole process, of which other tests have files: only those of this
    /// test are removed.
    #[test]
    fn what_is_unfinished_goes_with_the_program_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let [kept, partial] = ["kept", "partial"].map(|name| dir.path().join(name));
        fs::write(&kept, "whole").unwrap();
        fs::write(&partial, "half").unwrap();
        drop(Listed::new(&kept));
        let dropped = Scratch::new("a test").unwrap().path().to_path_buf();
        assert!(!dropped.exists());
        let (_partial, scratch) = (Listed::new(&partial), Scratch::new("a test").unwrap());
        fs::create_dir(scratch.path().join("inner")).unwrap();
        fs::write(scratch.path().join("inner/file"), "of a run").unwrap();
        assert!(is_listed(scratch.path()) && is_listed(&partial) && !is_listed(&kept) && !is_listed(&dropped));
        remove(&[partial.clone(), scratch.path().into()].into());
        assert!(kept.exists() && !partial.exists() && !scratch.path().exists());
    }
}
