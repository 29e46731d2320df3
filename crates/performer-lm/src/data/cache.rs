//! This module is the cache of trained tokenizers and token files. Each is kept under the hash of
//! what it is made from.
//!
//! A file that is being made has a name of its own, is locked by the process that makes it, and
//! goes if the process fails or is stopped ([`remove_unfinished`]). What a killed process left
//! is removed by the next one that opens the cache: nobody holds its lock.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use tempfile::NamedTempFile;

use super::text::Documents;
use super::tokenizer::Tokenizer;
use super::tokens::{TokenFile, content_hash};
#[cfg(doc)]
use crate::unfinished::remove_unfinished;
use crate::{
    listener::Listener,
    unfinished::{Listed, Scratch},
};

/// Returns the folder of the cache: `$PERFORMER_CACHE`, or else `performer-lm` in the platform's
/// cache folder (`~/.cache` on Linux). It can be deleted at any time.
///
/// # Errors
/// If there is neither a home folder nor `PERFORMER_CACHE`.
pub fn cache_dir() -> Result<PathBuf> {
    named_or_usual(std::env::var_os("PERFORMER_CACHE"))
}

/// The folder of this name, or else the usual one: an empty name is none.
fn named_or_usual(name: Option<OsString>) -> Result<PathBuf> {
    match name {
        Some(dir) if !dir.is_empty() => Ok(dir.into()),
        _ => Ok(dirs::cache_dir()
            .context("there is no home folder; set PERFORMER_CACHE to a folder of yours")?
            .join("performer-lm")),
    }
}

/// What the names of files that are being made begin and end with.
const PARTIAL: (&str, &str) = ("performer-lm-", ".partial");

/// The age from which a file that nobody holds the lock of was left by a killed process: one that
/// is younger may be about to be locked.
const LEFT: Duration = Duration::from_secs(60);

/// The time between two signs of work whose progress is not known.
const SIGN: Duration = Duration::from_secs(20);

/// Trains a tokenizer, and says at these intervals that it is still being trained.
fn patiently<T: Send>(listener: &dyn Listener, interval: Duration, train: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let (ended, waiting) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            let started = Instant::now();
            while let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(interval) {
                listener.note(&format!("tokenizer: still training, {} s", started.elapsed().as_secs()));
            }
        });
        let trained = train();
        drop(ended);
        trained
    })
}

/// Removes what killed processes left in the cache.
fn sweep(dir: &Path) {
    let is_partial = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(PARTIAL.0) && name.ends_with(PARTIAL.1)
    };
    let paths = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in paths.filter(is_partial) {
        // What cannot be looked at or removed is no obstacle. Some network file systems lock only
        // what is open for writing.
        let Ok(file) = File::options().write(true).open(&path) else { continue };
        let age = file.metadata().and_then(|found| found.modified()).ok().and_then(|time| time.elapsed().ok());
        if age.is_some_and(|age| age > LEFT) && file.try_lock().is_ok() {
            let _ = fs::remove_file(&path);
        }
    }
}

/// `Partial` is a file of the cache that is being made; it goes when this is dropped.
struct Partial {
    file: NamedTempFile,
    listed: Listed,
}

impl Partial {
    fn new_in(dir: &Path) -> std::io::Result<Self> {
        let builder = &mut tempfile::Builder::new();
        // Temporary files are private by default; a cache may be that of several users, and its
        // files have the permissions of any other new file.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let file = builder.prefix(PARTIAL.0).suffix(PARTIAL.1).tempfile_in(dir)?;
        // Some file systems have no locks. `sweep` removes only what it can lock, so it leaves all
        // files there.
        let _ = file.as_file().try_lock();
        let listed = Listed::new(file.path());
        Ok(Self { file, listed })
    }

    /// Gives the file its name.
    fn persist(self, path: &Path) -> std::io::Result<()> {
        let Self { file, listed } = self;
        file.persist(path).map_err(|error| error.error)?;
        drop(listed);
        Ok(())
    }
}

/// `Cache` is a folder of tokenizers and token files.
#[derive(Debug)]
pub(crate) struct Cache {
    dir: PathBuf,
    /// Deletes the folder on drop, if it is a temporary one.
    scratch: Option<Scratch>,
}

impl Cache {
    /// The cache at [`cache_dir`]; if nothing can be written there, a temporary folder, and a
    /// notice that says so.
    pub(crate) fn from_env(listener: &dyn Listener) -> Result<Self> {
        cache_dir().and_then(|dir| Self::at(&dir)).or_else(|error| {
            let scratch = Scratch::new("tokens")?;
            listener.note(&format!("cache: tokens are not kept for the next time: {error:#}"));
            Ok(Self { dir: scratch.path().into(), scratch: Some(scratch) })
        })
    }

    /// Opens the cache in `dir`, creating the folder if need be.
    pub(crate) fn at(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).and_then(|()| Partial::new_in(dir).map(drop)).with_context(|| {
            format!("cannot write to the cache {}; set PERFORMER_CACHE to another folder", dir.display())
        })?;
        sweep(dir);
        Ok(Self { dir: dir.into(), scratch: None })
    }

    /// The folder, unless it is a temporary one.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.scratch.is_none().then_some(&*self.dir)
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
            let tokenizer = patiently(listener, SIGN, || Tokenizer::train(documents, vocab_size))?;
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
        let mut partial =
            Partial::new_in(&self.dir).with_context(|| format!("cannot write to the cache {}", self.dir.display()))?;
        make(partial.file.as_file_mut()).and_then(|()| Ok(partial.persist(path)?)).map_err(|error| match error
            .is::<std::io::Error>(
        ) {
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
    use crate::listener::{Silent, tests::Told};

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

    #[cfg(unix)]
    #[test]
    fn files_of_a_cache_are_as_open_as_any_other() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        Cache::at(dir.path()).unwrap().tokenizer(&stories(), 300, &Silent).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&only_file(dir.path(), "tokenizer-")), mode(&other));
    }

    #[test]
    fn a_cache_that_is_named_by_nothing_is_the_usual_one() {
        let usual = named_or_usual(None).ok();
        assert_eq!(usual, dirs::cache_dir().map(|dir| dir.join("performer-lm")));
        assert_eq!(named_or_usual(Some("".into())).ok(), usual);
        assert_eq!(named_or_usual(Some("here".into())).unwrap(), Path::new("here"));
        assert_eq!(cache_dir().ok(), named_or_usual(std::env::var_os("PERFORMER_CACHE")).ok());
    }

    #[test]
    fn a_long_training_gives_signs() {
        let told = Told::default();
        let answer = patiently(&told, Duration::from_millis(1), || {
            while told.0.lock().unwrap().is_empty() {
                std::thread::yield_now();
            }
            7
        });
        assert_eq!((answer, told.all().starts_with("tokenizer: still training, 0 s")), (7, true));
    }

    #[test]
    fn a_text_that_is_too_short_for_a_vocabulary_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let notes = |vocab_size| {
            let told = Told::default();
            let size = cache.tokenizer(&stories(), vocab_size, &told).unwrap().vocab_size();
            (size, told.all())
        };
        let (size, told) = notes(300);
        assert_eq!((size, told.contains("is enough for")), (300, false), "{told}");
        let (size, told) = notes(100_000);
        assert!(size < 100_000 && told.contains(&format!("is enough for a vocabulary of {size}")), "{told}");
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

    /// A killed process leaves a file that it was making; the next one removes it, and neither what
    /// another process is making nor what is not the cache's.
    #[test]
    fn what_a_killed_process_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let long_ago = |name: &str| {
            let path = dir.path().join(name);
            fs::write(&path, "half").unwrap();
            age(&path);
            path
        };
        let (left, working, foreign) =
            (long_ago("performer-lm-a1.partial"), long_ago("performer-lm-b2.partial"), long_ago(".tmpc3"));
        // Names that are half like those of this program are others'.
        let others = [long_ago("performer-lm-notes.txt"), long_ago("download.partial")];
        let young = dir.path().join("performer-lm-d4.partial");
        fs::write(&young, "").unwrap();
        let lock = File::open(&working).unwrap();
        lock.try_lock().unwrap();
        drop(cache);
        Cache::at(dir.path()).unwrap();
        assert!(!left.exists() && working.exists() && foreign.exists() && young.exists());
        assert!(others.iter().all(|path| path.exists()));

        // What this process makes is on the list of what to remove until it is whole or dropped.
        let is_listed = crate::unfinished::is_listed;
        let (whole, dropped) = (Partial::new_in(dir.path()).unwrap(), Partial::new_in(dir.path()).unwrap());
        let paths = [&whole, &dropped].map(|partial| partial.file.path().to_path_buf());
        assert!(paths.iter().all(|path| path.exists() && is_listed(path)));
        whole.persist(&dir.path().join("whole")).unwrap();
        drop(dropped);
        assert!(!paths.iter().any(|path| path.exists() || is_listed(path)));
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
