//! This module is the cache of trained tokenizers and token files. Each is kept under the hash of
//! what it is made from.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use tempfile::{NamedTempFile, TempDir};

use super::text::Documents;
use super::tokenizer::Tokenizer;
use super::tokens::{TokenFile, content_hash};
use crate::listener::Listener;

/// Returns the folder of the cache: `$PERFORMER_CACHE`, or else `performer-lm` in the platform's
/// cache folder (`~/.cache` on Linux). It can be deleted at any time.
///
/// # Errors
/// If there is neither a home folder nor `PERFORMER_CACHE`.
pub fn cache_dir() -> Result<PathBuf> {
    match std::env::var_os("PERFORMER_CACHE") {
        Some(dir) if !dir.is_empty() => Ok(dir.into()),
        _ => Ok(dirs::cache_dir()
            .context("there is no home folder; set PERFORMER_CACHE to a folder of yours")?
            .join("performer-lm")),
    }
}

/// `Cache` is a folder of tokenizers and token files.
#[derive(Debug)]
pub(crate) struct Cache {
    dir: PathBuf,
    /// Deletes the folder on drop, if it is a temporary one.
    _scratch: Option<TempDir>,
}

impl Cache {
    /// The cache at [`cache_dir`]; if nothing can be written there, a temporary folder, and a
    /// notice that says so.
    pub(crate) fn from_env(listener: &dyn Listener) -> Result<Self> {
        cache_dir().and_then(|dir| Self::at(&dir)).or_else(|error| {
            let scratch = tempfile::tempdir().context("cannot make a temporary folder")?;
            listener.note(&format!("cache: tokens are not kept for the next time: {error:#}"));
            Ok(Self { dir: scratch.path().into(), _scratch: Some(scratch) })
        })
    }

    /// Opens the cache in `dir`, creating the folder if need be.
    pub(crate) fn at(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).and_then(|()| NamedTempFile::new_in(dir).map(drop)).with_context(|| {
            format!("cannot write to the cache {}; set PERFORMER_CACHE to another folder", dir.display())
        })?;
        Ok(Self { dir: dir.into(), _scratch: None })
    }

    /// The tokenizer of `vocab_size` trained on documents.
    pub(crate) fn tokenizer(
        &self,
        documents: &Documents,
        vocab_size: usize,
        listener: &dyn Listener,
    ) -> Result<Tokenizer> {
        let hash = documents.hash().to_hex();
        let path = self.dir.join(format!("tokenizer-{}-{vocab_size}.json", &hash[..32]));
        self.get(&path, listener, Tokenizer::load, |file| {
            listener.note(&format!("tokenizer: training one of {vocab_size} tokens"));
            let tokenizer = Tokenizer::train(documents, vocab_size)?;
            let size = tokenizer.vocab_size();
            if size < vocab_size {
                listener.note(&format!("tokenizer: the text is enough for a vocabulary of {size}, not {vocab_size}"));
            }
            std::io::Write::write_all(file, tokenizer.as_bytes())?;
            Ok(())
        })
    }

    /// The tokens of documents.
    pub(crate) fn tokens(
        &self,
        documents: &Documents,
        tokenizer: &Tokenizer,
        listener: &dyn Listener,
    ) -> Result<TokenFile> {
        let content = content_hash(documents, tokenizer);
        let path = self.dir.join(format!("tokens-{}.bin", &content.to_hex()[..32]));
        let open = |path: &Path| {
            let file = TokenFile::open(path)?;
            if file.hash() != content {
                return Err(anyhow!("{} holds the tokens of another text", path.display()));
            }
            Ok(file)
        };
        self.get(&path, listener, open, |file| TokenFile::write(file, documents, tokenizer, listener))
    }

    /// Returns the content of `path`, made anew if it is missing or damaged. Other processes never
    /// see half a file: it is written under a temporary name and renamed.
    fn get<T>(
        &self,
        path: &Path,
        listener: &dyn Listener,
        open: impl Fn(&Path) -> Result<T>,
        make: impl FnOnce(&mut File) -> Result<()>,
    ) -> Result<T> {
        if path.exists() {
            match open(path) {
                Ok(found) => return Ok(found),
                Err(error) => listener.note(&format!("cache: made anew: {error:#}")),
            }
        }
        let mut file = NamedTempFile::new_in(&self.dir)
            .with_context(|| format!("cannot write to the cache {}", self.dir.display()))?;
        make(file.as_file_mut())
            .and_then(|()| Ok(file.persist(path).map(drop).map_err(|error| error.error)?))
            .map_err(|error| match error.is::<std::io::Error>() {
                true => error.context(format!(
                    "cannot write to the cache {}; set PERFORMER_CACHE to a folder with more room",
                    self.dir.display()
                )),
                false => error,
            })?;
        open(path)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::{documents, stories};
    use super::*;
    use crate::listener::Silent;

    fn only_file(dir: &Path, prefix: &str) -> PathBuf {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let mut found: Vec<_> =
            entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(prefix)).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    /// Sets the modification time of a file to long ago and returns it, so that a test can tell
    /// whether the file is written again.
    fn age(path: &Path) -> std::time::SystemTime {
        let long_ago = std::time::UNIX_EPOCH;
        File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
        long_ago
    }

    #[test]
    fn made_once() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("new/folder")).unwrap();
        let docs = stories();
        let tokenizer = cache.tokenizer(&docs, 300, &Silent).unwrap();
        let tokens = cache.tokens(&docs, &tokenizer, &Silent).unwrap();
        let paths = ["tokenizer-", "tokens-"].map(|prefix| only_file(&cache.dir, prefix));
        let ages = paths.each_ref().map(|path| age(path));
        assert_eq!(cache.tokenizer(&docs, 300, &Silent).unwrap().hash(), tokenizer.hash());
        let again = cache.tokens(&docs, &tokenizer, &Silent).unwrap();
        assert_eq!(again.read(0..again.len()), tokens.read(0..tokens.len()));
        for (path, age) in paths.iter().zip(ages) {
            assert_eq!(fs::metadata(path).unwrap().modified().unwrap(), age);
        }
        // Another vocabulary and another text are other files; no temporary file stays.
        let other = cache.tokenizer(&docs, 310, &Silent).unwrap();
        cache.tokens(&docs, &other, &Silent).unwrap();
        cache.tokens(&documents("Other text."), &tokenizer, &Silent).unwrap();
        assert_eq!(fs::read_dir(&cache.dir).unwrap().count(), 5);
    }

    #[test]
    fn damaged_and_foreign_files_are_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let docs = stories();
        let tokenizer = cache.tokenizer(&docs, 300, &Silent).unwrap();
        let tokens = cache.tokens(&docs, &tokenizer, &Silent).unwrap();
        let expected = tokens.read(0..tokens.len());
        let path = only_file(dir.path(), "tokens-");
        let good = fs::read(&path).unwrap();
        let mut changed = good.clone();
        *changed.last_mut().unwrap() ^= 1;
        let foreign = documents("Some other text.");
        let mut stranger = tempfile::NamedTempFile::new().unwrap();
        TokenFile::write(stranger.as_file_mut(), &foreign, &tokenizer, &Silent).unwrap();
        let stranger = fs::read(stranger.path()).unwrap();
        for bad in [&good[..good.len() / 2], &good[..10], &[], &changed, &stranger] {
            fs::write(&path, bad).unwrap();
            let rebuilt = cache.tokens(&docs, &tokenizer, &Silent).unwrap();
            assert_eq!(rebuilt.read(0..rebuilt.len()), expected);
            assert_eq!(fs::read(&path).unwrap(), good);
        }
        let path = only_file(dir.path(), "tokenizer-");
        fs::write(&path, &tokenizer.as_bytes()[..100]).unwrap();
        assert_eq!(cache.tokenizer(&docs, 300, &Silent).unwrap().hash(), tokenizer.hash());
        assert_eq!(fs::read(&path).unwrap(), tokenizer.as_bytes());
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        assert!(cache.tokenizer(&stories(), 3, &Silent).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // There is a file where the folder should be.
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Cache::at(&file).unwrap_err().to_string();
        assert!(error.contains("PERFORMER_CACHE"), "{error}");
    }
}
