//! This module downloads TinyStories and models from the Hugging Face hub into the cache that all
//! Hugging Face tools share.

use std::any::Any;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use hf_hub::api::Progress;
use hf_hub::api::sync::ApiBuilder;
use hf_hub::{Cache, Repo, RepoType};

use super::corpus::TinyStories;
use super::weights_index::shards;
use crate::files;
use crate::listener::{Listener, Unit};

const DATASET: &str = "roneneldan/TinyStories";
/// The validation file comes first: it is small, so a hub that does not work is found out before
/// the two gigabytes of the training file.
const FILES: [&str; 2] = ["TinyStoriesV2-GPT4-valid.txt", "TinyStoriesV2-GPT4-train.txt"];

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const GENERATION: &str = "generation_config.json";

/// Where to look for a dataset or model, and how long to wait for it.
#[derive(Debug, Clone)]
pub(crate) struct Hub {
    endpoint: String,
    cache: PathBuf,
    offline: bool,
    /// The longest wait for the first answer, including name look-up and connection.
    answer: Duration,
    /// The longest silence during a download.
    stall: Duration,
}

impl Hub {
    /// Configures the hub from `HF_ENDPOINT`, `HF_HOME` and `HF_HUB_OFFLINE`.
    pub(crate) fn from_env() -> Result<Self> {
        if std::env::var_os("HF_HOME").is_none() && dirs::home_dir().is_none() {
            bail!("there is no home folder for the Hugging Face cache; set HF_HOME to a folder of yours");
        }
        let offline = std::env::var("HF_HUB_OFFLINE")
            .is_ok_and(|value| ["1", "true", "yes", "on"].contains(&value.to_ascii_lowercase().as_str()));
        Ok(Self {
            endpoint: endpoint(std::env::var("HF_ENDPOINT").ok()),
            cache: Cache::from_env().path().clone(),
            offline,
            answer: Duration::from_secs(10),
            stall: Duration::from_secs(60),
        })
    }

    /// Returns TinyStories if it has been downloaded before; never touches the network.
    pub(crate) fn cached(&self) -> Option<TinyStories> {
        let [valid, train] = FILES.map(|file| self.in_cache(&dataset(), file));
        Some(TinyStories { train: train?, valid: valid? })
    }

    fn in_cache(&self, repo: &Repo, file: &str) -> Option<PathBuf> {
        Cache::new(self.cache.clone()).repo(repo.clone()).get(file)
    }

    /// TinyStories from the cache, or else downloaded into it; an interrupted download is taken up
    /// where it stopped.
    pub(crate) fn tinystories(&self, listener: &dyn Listener) -> Result<TinyStories> {
        if let Some(files) = self.cached() {
            return Ok(files);
        }
        if self.offline {
            bail!("TinyStories is not in the {}", self.forbidden());
        }
        self.announce(DATASET, listener);
        let [valid, train] = FILES;
        Ok(TinyStories {
            valid: self.fetch(&dataset(), valid, listener)?,
            train: self.fetch(&dataset(), train, listener)?,
        })
    }

    /// Says that the hub is asked, whose first answer may be long in coming.
    fn announce(&self, name: &str, listener: &dyn Listener) {
        listener.note(&format!("asking {} for {name}", self.endpoint));
    }

    fn forbidden(&self) -> String {
        format!("Hugging Face cache ({}), and HF_HUB_OFFLINE forbids fetching it", self.cache.display())
    }

    /// Downloads the files that loading a model needs, as far as the cache lacks them, and returns
    /// the model's folder in the cache. All of them are of one commit of the model.
    pub(crate) fn model(&self, id: &str, listener: &dyn Listener) -> Result<PathBuf> {
        let main = Repo::model(id.into());
        let is_new = !self.offline && self.in_cache(&main, CONFIG).is_none();
        if is_new {
            self.announce(id, listener);
        }
        let config = self.fetch(&main, CONFIG, listener)?;
        let folder = config.parent().context("the Hugging Face cache has a file without a folder")?;
        let commit = folder.file_name().and_then(|name| name.to_str()).context("a commit has no name")?;
        // The model's branch `main` may have moved on since config.json was downloaded.
        let repo = Repo::with_revision(id.into(), RepoType::Model, commit.into());
        let has = |file: &str| folder.join(file).exists();
        let fetch = |file: &str| match has(file) {
            true => Ok(folder.join(file)),
            false => self.fetch(&repo, file, listener),
        };
        fetch(TOKENIZER)?;
        // Large models come in several files, and a list of them.
        let whole = if has(INDEX) && !has(WEIGHTS) { Err(None) } else { fetch(WEIGHTS).map_err(Some) };
        if let Err(error) = whole {
            let index = fetch(INDEX).map_err(|no_index| error.unwrap_or(no_index))?;
            for shard in shards(&index)? {
                fetch(&shard)?;
            }
        }
        // Not every model has one, and without it a text ends where config.json says. Where other
        // programs note that there is none, it is noted here too, and not asked for again.
        let absent = self.cache.join(repo.folder_name()).join(".no_exist").join(commit).join(GENERATION);
        if !absent.exists()
            && let Err(error) = fetch(GENERATION)
        {
            if is_missing(&error) {
                // Whoever cannot note it asks again.
                let _ = absent.parent().map(std::fs::create_dir_all);
                let _ = File::create(&absent);
            } else if is_new {
                listener.note(&format!("warning: {error:#}; texts end where config.json says"));
            }
        }
        Ok(folder.into())
    }

    fn fetch(&self, repo: &Repo, file: &str, listener: &dyn Listener) -> Result<PathBuf> {
        if let Some(path) = self.in_cache(repo, file) {
            return Ok(path);
        }
        let name = repo.url();
        if self.offline {
            bail!("{file} of {name} is not in the {}", self.forbidden());
        }
        let (mut size, mut result) = self.download(repo, file, listener)?;
        if result.is_err() && size.is_some_and(|size| self.shorten_whole_parts(repo, size)) {
            (size, result) = self.download(repo, file, listener)?;
        }
        let path = result.with_context(|| format!("cannot download {file} of {name}"))?;
        if let Some(size) = size {
            require_whole(&path, size).with_context(|| format!("cannot download {file} of {name}"))?;
        }
        Ok(path)
    }

    /// Downloads a file, and returns the size that the hub told, if it did, and where the file is.
    ///
    /// # Errors
    /// If the hub falls silent; what else may fail is in the result.
    fn download(&self, repo: &Repo, file: &str, listener: &dyn Listener) -> Result<(Option<u64>, Result<PathBuf>)> {
        // The client has no time limit of its own, so it works in a thread, which is abandoned when
        // the client falls silent.
        let (sender, events) = channel();
        let (hub, repo, wanted) = (self.clone(), repo.clone(), file.to_owned());
        let name = repo.url();
        let worker = std::thread::spawn(move || {
            let api = ApiBuilder::from_cache(Cache::new(hub.cache)).with_endpoint(hub.endpoint).build()?;
            api.repo(repo).download_with_progress(&wanted, Reporter(sender))
        });
        let size = self.watch(file, &name, &events, listener)?;
        let result = match worker.join() {
            Ok(result) => result.map_err(|error| anyhow!("{error}")),
            Err(panic) => Err(anyhow!("{}", panic_message(panic.as_ref()))),
        };
        Ok((size, result))
    }

    /// Takes the last byte off parts of files that lack nothing but their names: a process that is
    /// killed after the last byte leaves one, and the hub refuses to send what is beyond the end.
    /// Returns whether there was such a part.
    fn shorten_whole_parts(&self, repo: &Repo, size: u64) -> bool {
        let blobs = self.cache.join(repo.folder_name()).join("blobs");
        let paths = std::fs::read_dir(blobs).into_iter().flatten().flatten().map(|entry| entry.path());
        let shorten = |part: &Path| -> std::io::Result<bool> {
            if size == 0 || part.metadata()?.len() != size {
                return Ok(false);
            }
            // Another process may be about to give it its name.
            let lock = File::options().write(true).open(part.with_extension("lock"))?;
            if lock.try_lock().is_err() || part.metadata()?.len() != size {
                return Ok(false);
            }
            File::options().write(true).open(part)?.set_len(size - 1)?;
            Ok(true)
        };
        let parts = paths.filter(|path| path.extension().is_some_and(|extension| extension == "part"));
        parts.filter(|part| shorten(part).unwrap_or(false)).count() > 0
    }

    /// Shows the progress until the worker hangs up, and returns the size that the hub told; an
    /// error if it falls silent.
    fn watch(&self, file: &str, name: &str, events: &Receiver<Event>, listener: &dyn Listener) -> Result<Option<u64>> {
        let (mut bar, mut received, mut told) = (None, 0, None);
        loop {
            let limit = if bar.is_some() { self.stall } else { self.answer };
            match events.recv_timeout(limit) {
                Ok(Event::Size(size)) => {
                    let bar = bar.get_or_insert_with(|| {
                        listener.note(&format!("downloading {file} of {name}: {:.1} MB", size as f64 / 1e6));
                        listener.begin("downloading", Unit::Bytes, 0, size)
                    });
                    received = 0;
                    told = Some(size);
                    bar.advance(received);
                }
                Ok(Event::Received(bytes)) => {
                    received += bytes;
                    if let Some(bar) = &bar {
                        bar.advance(received);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(told),
                Err(RecvTimeoutError::Timeout) if bar.is_some() => bail!(
                    "the download of {file} stalled for {} s; the same command takes it up where it stopped",
                    limit.as_secs()
                ),
                Err(RecvTimeoutError::Timeout) => {
                    bail!(
                        "no answer from {} in {} s: check the network or HF_ENDPOINT, or give a folder on this machine",
                        self.endpoint,
                        limit.as_secs()
                    )
                }
            }
        }
    }
}

/// Removes a downloaded file that has another length than the hub told. A connection may end early
/// without a sign of it, and a server may send all of a file where its rest was asked for.
///
/// # Errors
/// If the file has another length.
fn require_whole(link: &Path, size: u64) -> Result<()> {
    let found = link.metadata().with_context(|| format!("cannot read {}", link.display()))?.len();
    if found == size {
        return Ok(());
    }
    for path in [link.canonicalize()?, link.to_path_buf()] {
        files::remove(&path).with_context(|| format!("{} has {found} bytes, not {size}: remove it", path.display()))?;
    }
    bail!(
        "{found} bytes came where the hub told of {size}: they are removed, and the same command fetches the file again"
    )
}

/// Whether the hub answered that it has no such file. Its client tells the status by the message
/// alone.
fn is_missing(error: &anyhow::Error) -> bool {
    error.root_cause().to_string().ends_with("status: 404")
}

/// Returns the address of the hub that `HF_ENDPOINT` names, to which paths are appended, or that of
/// the public one where the variable is missing or empty.
fn endpoint(variable: Option<String>) -> String {
    match variable.as_deref().map(|address| address.trim_end_matches('/')) {
        None | Some("") => "https://huggingface.co".into(),
        Some(address) => address.into(),
    }
}

fn dataset() -> Repo {
    Repo::dataset(DATASET.into())
}

/// What the downloading thread reports: the size of the file when the transfer starts, then the
/// bytes as they come.
enum Event {
    Size(u64),
    Received(u64),
}

struct Reporter(Sender<Event>);

impl Reporter {
    fn send(&self, event: Event) {
        if self.0.send(event).is_err() {
            // Nobody waits for this download any more. Unwinding is the only way out of the
            // client's copy loop; it does not go through the panic hook, so nothing is printed, and
            // the partial file remains for another time.
            std::panic::resume_unwind(Box::new("abandoned"));
        }
    }
}

impl Progress for Reporter {
    fn init(&mut self, size: usize, _filename: &str) {
        self.send(Event::Size(size as u64));
    }

    fn update(&mut self, size: usize) {
        self.send(Event::Received(size as u64));
    }

    fn finish(&mut self) {}
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("the client failed")
}

#[cfg(test)]
pub(crate) mod tests;
