//! This module finds the text to train on and holds part of it out for validation, and another part
//! for the test.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};

use super::hub::Hub;
use super::split::{MAX_VALID, halves, split, without_shared};
use super::text::{Documents, Text};
use crate::errors::Cause;
use crate::files::between;
use crate::listener::Listener;

/// Short stories embedded in the program, so that everything works without a network. They are
/// composed by `scripts/sample_stories.py`.
const SAMPLE: &str = include_str!("../../assets/sample.txt");

/// The number of the sample's stories that are held out: few, because every run on the sample
/// validates on all of them, a run of two steps on an emulated device too.
const SAMPLE_VALID: usize = 80;

/// The text files of TinyStories.
#[derive(Debug)]
pub(crate) struct TinyStories {
    pub(crate) train: PathBuf,
    pub(crate) valid: PathBuf,
}

/// What a folder's training text may be called.
const TRAINING_TEXTS: [&str; 2] = ["train.txt", "train"];

/// What to train on, as spelled on the command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DataSpec {
    /// `auto`: TinyStories if it has been downloaded before, else the embedded sample; never asks
    /// the network.
    #[default]
    Auto,
    /// `tinystories`: TinyStories from the Hugging Face hub or its cache.
    TinyStories,
    /// `sample`: the embedded sample.
    Sample,
    /// Anything else: a text file, or a folder with a training file and, optionally, a validation
    /// and a test file.
    Path(PathBuf),
}

impl DataSpec {
    /// What [`DataSpec::Auto`] stands for on this machine now, and every other as it is.
    pub fn resolved(&self) -> Self {
        self.resolved_with(Hub::from_env())
    }

    /// Returns the path that leads to the data from a folder, where they are named by a relative
    /// one. A path that JSON has no text for is left out: a run then asks for its data where it
    /// goes on in another folder.
    pub(crate) fn path_from(&self, folder: &Path) -> Option<PathBuf> {
        match self {
            Self::Path(path) if path.is_relative() => between(folder, path).filter(|path| path.to_str().is_some()),
            _ => None,
        }
    }

    /// Whether `file` is the text that this data trains on, or one of which it trains on a part.
    pub(crate) fn trains_on(&self, file: &Path) -> bool {
        let Self::Path(path) = self else { return false };
        let of_folder = TRAINING_TEXTS.map(|name| path.join(name)).into_iter().find(|text| text.is_file());
        let text = of_folder.as_ref().unwrap_or(path);
        text.is_file() && text.canonicalize().is_ok_and(|text| file.canonicalize().is_ok_and(|file| file == text))
    }

    fn resolved_with(&self, hub: Result<Hub>) -> Self {
        match self {
            Self::Auto if hub.ok().and_then(|hub| hub.cached()).is_some() => Self::TinyStories,
            Self::Auto => Self::Sample,
            other => other.clone(),
        }
    }
}

impl FromStr for DataSpec {
    type Err = anyhow::Error;

    fn from_str(spec: &str) -> Result<Self> {
        Ok(match spec {
            "auto" => Self::Auto,
            "tinystories" => Self::TinyStories,
            "sample" => Self::Sample,
            "" => {
                bail!("no data named; give auto, tinystories, sample, or the path of a text file or folder")
            }
            path => Self::Path(path.into()),
        })
    }
}

impl fmt::Display for DataSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::TinyStories => f.write_str("tinystories"),
            Self::Sample => f.write_str("sample"),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// A `Corpus` is text in splits that share no document: training, validation and, where there is
/// one, test. Settings are chosen by the validation split, so the loss over it favours whoever
/// chooses among more of them; the test split is for the figures that are reported.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// Short name for tables and metadata: `tinystories`, `sample`, or `file:NAME`.
    pub name: String,
    /// One line that describes the corpus to a reader.
    pub description: String,
    /// The training text.
    pub train: Documents,
    /// The held-out text for validation.
    pub valid: Documents,
    /// The held-out text by which nothing is chosen: the file `test.txt` of a folder, or what
    /// [`Self::with_test`] divides off the validation text.
    pub test: Option<Documents>,
}

impl Corpus {
    /// Finds the text and splits it. What is taken instead of what was asked for, and
    /// what is left out, is said to `listener`.
    ///
    /// # Errors
    /// Text that is missing, unreadable, not UTF-8, empty, or too little to be split; TinyStories
    /// asked for by name and not to be had.
    pub fn load(spec: &DataSpec, listener: &dyn Listener) -> Result<Self> {
        Self::load_with(spec, Hub::from_env(), listener)
    }

    /// Returns the corpus with a test split: its own, or else the second half of the validation
    /// split, which keeps the first. Documents of the second half that stand in the first too are
    /// left out. What is divided, and what is left out, is said to `listener`.
    ///
    /// # Errors
    /// If the validation split is too short to be divided, or its second half repeats the first.
    pub fn with_test(self, listener: &dyn Listener) -> Result<Self> {
        if self.test.is_some() {
            return Ok(self);
        }
        let Some((valid, second)) = halves(&self.valid) else {
            bail!(
                "the held-out text of {} is too short to be divided into validation and test: give a folder with \
                 train.txt, valid.txt and test.txt",
                self.description
            );
        };
        let test = unseen("the second half of the held-out text", second, &valid, "validation", listener)?;
        listener.note(&format!(
            "data: there is no test.txt: the first half of the held-out text is for validation ({} documents), the \
             second for the test ({})",
            valid.len(),
            test.len()
        ));
        Ok(Self { valid, test: Some(test), ..self })
    }

    pub(crate) fn load_with(spec: &DataSpec, hub: Result<Hub>, listener: &dyn Listener) -> Result<Self> {
        match spec {
            DataSpec::Sample => sample(listener),
            DataSpec::Path(path) if path.is_dir() => folder(path, listener),
            DataSpec::Path(path) => single_file(path, listener),
            DataSpec::TinyStories => {
                let files = hub.and_then(|hub| hub.tinystories(listener)).context(Cause::Data(
                    "TinyStories is not available; use a text file, or the embedded sample".into(),
                ))?;
                tinystories(&files, listener)
            }
            // A first run must neither wait for a network nor download gigabytes unasked.
            DataSpec::Auto => match hub.ok().and_then(|hub| hub.cached()) {
                Some(files) => {
                    listener.note("data: TinyStories, from the Hugging Face cache");
                    tinystories(&files, listener)
                }
                None => {
                    let corpus = sample(listener)?;
                    listener.note(&format!(
                        "data: {}; for real stories, give --data tinystories (2 GB from the Hugging Face hub, once), or \
                         a text file with --data PATH",
                        corpus.description
                    ));
                    Ok(corpus)
                }
            },
        }
    }
}

/// Returns all documents of one text file; none are held out. A file without separators is one
/// document.
///
/// # Errors
/// If there is no regular file of this path, or if it is unreadable, not UTF-8, or holds no text.
pub fn load_text(path: &Path) -> Result<Documents> {
    if path.is_dir() {
        bail!("{} is a folder; give one text file", path.display());
    }
    let documents = Documents::of(Text::open(path)?);
    if documents.is_empty() {
        bail!("{} holds no text", path.display());
    }
    Ok(documents)
}

fn sample(listener: &dyn Listener) -> Result<Corpus> {
    let documents = Documents::from_text(SAMPLE);
    let description = format!("the embedded sample of {} short stories, composed by a grammar", documents.len());
    let (train, valid) = split(&documents, SAMPLE_VALID, listener).context("the embedded sample")?;
    Ok(Corpus { name: "sample".into(), description, train, valid, test: None })
}

fn tinystories(files: &TinyStories, listener: &dyn Listener) -> Result<Corpus> {
    let (train, valid) = pair(&files.train, &files.valid, listener)?;
    Ok(Corpus {
        name: "tinystories".into(),
        description: format!("TinyStories, {} stories", train.len() + valid.len()),
        train,
        valid,
        test: None,
    })
}

fn single_file(path: &Path, listener: &dyn Listener) -> Result<Corpus> {
    if !path.exists() {
        bail!(
            "there is no file or folder {}; give the path of a text file or folder, or one of auto, tinystories, sample",
            path.display()
        );
    }
    let documents = load_text(path)?;
    let (train, valid) = split(&documents, MAX_VALID, listener).with_context(|| path.display().to_string())?;
    Ok(Corpus {
        name: name_of(path),
        description: format!("{}, split into training and validation", path.display()),
        train,
        valid,
        test: None,
    })
}

fn folder(path: &Path, listener: &dyn Listener) -> Result<Corpus> {
    let find = |names: &[&str]| {
        let candidates = names.iter().map(|name| path.join(name));
        candidates.into_iter().find(|file| file.is_file())
    };
    let train = find(&TRAINING_TEXTS);
    let valid = find(&["valid.txt", "valid", "validation.txt", "validation"]);
    let (train, valid) = match (train, valid) {
        (Some(train), Some(valid)) => pair(&train, &valid, listener)?,
        (Some(train), None) => {
            listener.note(&format!(
                "data: {} has no valid.txt: a part of {} is held out instead",
                path.display(),
                train.display()
            ));
            split(&load_text(&train)?, MAX_VALID, listener).with_context(|| train.display().to_string())?
        }
        (None, _) => bail!(
            "{} has no train.txt; a folder needs train.txt and, better, valid.txt, or give the path of one text file",
            path.display()
        ),
    };
    let test = match find(&["test.txt", "test"]) {
        Some(test) => {
            let rest = unseen(test.display(), load_text(&test)?, &train, "training", listener)?;
            Some(unseen(test.display(), rest, &valid, "validation", listener)?)
        }
        None => None,
    };
    Ok(Corpus { name: name_of(path), description: path.display().to_string(), train, valid, test })
}

/// Returns a training and a validation file; what stands in both is dropped from the second.
fn pair(train: &Path, valid: &Path, listener: &dyn Listener) -> Result<(Documents, Documents)> {
    let train = load_text(train)?;
    let all = load_text(valid)?;
    let valid = unseen(valid.display(), all, &train, "training", listener)?;
    Ok((train, valid))
}

/// Returns the documents of a held-out text that are not in an earlier split; `name` says which
/// text it is.
///
/// # Errors
/// If every document of the held-out text is in the earlier split.
fn unseen(
    name: impl fmt::Display,
    all: Documents,
    earlier: &Documents,
    split: &str,
    listener: &dyn Listener,
) -> Result<Documents> {
    let rest = without_shared(&all, earlier);
    let dropped = all.len() - rest.len();
    if dropped > 0 {
        listener.note(&format!("data: documents of {name} that stand in the {split} text too are left out: {dropped}"));
    }
    if rest.is_empty() {
        bail!("every document of {name} stands in the {split} text too; give a file of other documents");
    }
    Ok(rest)
}

fn name_of(path: &Path) -> String {
    // `.` and `..` have no name of their own.
    let full = path.canonicalize().unwrap_or_else(|_| path.into());
    let name = path.file_name().or(full.file_name());
    format!("file:{}", name.unwrap_or_default().to_string_lossy())
}

#[cfg(all(test, feature = "hub"))]
mod tests {
    use super::super::hub::tests::{fill, nowhere};
    use super::*;
    use crate::listener::{Silent, tests::Told};
    use std::collections::HashSet;

    fn load(spec: &str) -> Result<Corpus> {
        let nothing = tempfile::tempdir().unwrap();
        Corpus::load_with(&spec.parse().unwrap(), Ok(nowhere(nothing.path())), &Silent)
    }

    fn write(dir: &Path, name: &str, text: &str) -> String {
        std::fs::write(dir.join(name), text).unwrap();
        dir.join(name).to_str().unwrap().into()
    }

    fn disjoint(corpus: &Corpus) -> bool {
        let train: HashSet<_> = corpus.train.iter().collect();
        corpus.valid.iter().all(|story| !train.contains(story))
    }

    #[test]
    fn what_auto_stands_for_is_settled() {
        assert_eq!(DataSpec::Auto.resolved_with(Err(anyhow::anyhow!("no cache"))), DataSpec::Sample);
        assert_ne!(DataSpec::Auto.resolved(), DataSpec::Auto);
        for other in [DataSpec::Sample, DataSpec::TinyStories, DataSpec::Path("text".into())] {
            assert_eq!(other.resolved(), other);
        }
    }

    #[test]
    fn sample_is_split() {
        let corpus = load("sample").unwrap();
        assert_eq!(corpus.name, "sample");
        assert!(disjoint(&corpus));
        assert_eq!(corpus.valid.len(), SAMPLE_VALID);
        assert!(corpus.train.len() > 20 * SAMPLE_VALID, "{}", corpus.train.len());
        assert!(SAMPLE.len() < 1_500_000, "{} bytes are more than a package should carry", SAMPLE.len());
    }

    #[test]
    fn a_held_out_story_of_the_sample_shares_few_sentences_with_any_other() {
        fn sentences(story: &str) -> HashSet<&str> {
            story.split_inclusive(['.', '?', '!']).map(|part| part.trim_matches(['"', ' '])).collect()
        }
        let corpus = load("sample").unwrap();
        let train: Vec<_> = corpus.train.iter().map(sentences).collect();
        for story in corpus.valid.iter().map(sentences) {
            assert!(story.len() >= 8, "{story:?}");
            let most = train.iter().map(|other| story.intersection(other).count()).max();
            // A sentence with speech in it is divided into more parts here than in the script,
            // which allows two.
            assert!(most <= Some(3), "{most:?} parts of {story:?} stand in one training story");
        }
    }

    #[test]
    fn auto_takes_the_sample_without_asking_the_hub_and_tinystories_asks() {
        let nothing = tempfile::tempdir().unwrap();
        let load = |spec| {
            let told = Told::default();
            let corpus = Corpus::load_with(&spec, Ok(nowhere(nothing.path())), &told);
            (corpus, told.0.into_inner().unwrap())
        };
        let (corpus, told) = load(DataSpec::Auto);
        assert_eq!(corpus.unwrap().name, "sample");
        assert!(told.contains("--data tinystories") && !told.contains("asking"), "{told}");
        let (corpus, told) = load(DataSpec::TinyStories);
        let error = format!("{:#}", corpus.unwrap_err());
        assert!(error.contains("embedded sample") && told.contains("asking"), "{error}; {told}");
        let homeless = Corpus::load_with(&DataSpec::Auto, Err(anyhow::anyhow!("no home")), &Silent);
        assert_eq!(homeless.unwrap().name, "sample");
    }

    #[test]
    fn auto_takes_cached_tinystories() {
        let cache = tempfile::tempdir().unwrap();
        let train = "Tom ran.<|endoftext|>Sue ran.<|endoftext|>Sue ran.";
        fill(cache.path(), train, "Ann ran.<|endoftext|>Sue ran.");
        let corpus = Corpus::load_with(&DataSpec::Auto, Ok(nowhere(cache.path())), &Silent).unwrap();
        assert_eq!(corpus.name, "tinystories");
        assert_eq!(corpus.train.len(), 3);
        assert_eq!(corpus.valid.iter().collect::<Vec<_>>(), ["Ann ran."]);
    }

    #[test]
    fn folders() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        let error = load(path).unwrap_err().to_string();
        assert!(error.contains("train.txt"), "{error}");

        let stories: Vec<_> = (0..40).map(|i| format!("Story {i}.")).collect();
        write(dir.path(), "train", &stories.join(SEP));
        let corpus = load(path).unwrap();
        assert_eq!((corpus.train.len(), corpus.valid.len()), (36, 4));

        write(dir.path(), "validation.txt", "Story 7.<|endoftext|>Other.");
        let corpus = load(path).unwrap();
        assert_eq!((corpus.train.len(), corpus.valid.len()), (40, 1));
        assert!(disjoint(&corpus));

        write(dir.path(), "valid.txt", "Story 7.");
        let error = load(path).unwrap_err().to_string();
        assert!(error.contains("every document"), "{error}");
    }

    #[test]
    fn documents_that_are_left_out_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name, text: &[&str]| PathBuf::from(write(dir.path(), name, &text.join(SEP)));
        let train = file("train.txt", &["a", "b", "c"]);
        for (valid, left, note) in
            [(&["d", "e"][..], 2, ""), (&["d", "a", "e", "b"], 2, "stand in the training text too are left out: 2")]
        {
            let told = Told::default();
            assert_eq!(pair(&train, &file("valid.txt", valid), &told).unwrap().1.len(), left);
            let told = told.all();
            assert!(told.ends_with(note) && told.is_empty() == note.is_empty(), "{told}");
        }
    }

    #[test]
    fn a_test_split_is_a_file_or_half_of_what_is_held_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        write(dir.path(), "train.txt", &["a", "b", "c"].join(SEP));
        write(dir.path(), "valid.txt", &["d", "e", "f"].join(SEP));
        assert!(load(path).unwrap().test.is_none());
        let halved = load(path).unwrap().with_test(&Silent).unwrap();
        assert_eq!(halved.valid.iter().collect::<Vec<_>>(), ["d", "e"]);
        assert_eq!(halved.test.unwrap().iter().collect::<Vec<_>>(), ["f"]);

        // What stands in an earlier split is no test.
        write(dir.path(), "test.txt", &["b", "e", "g"].join(SEP));
        let corpus = load(path).unwrap().with_test(&Silent).unwrap();
        assert_eq!(corpus.valid.len(), 3);
        assert_eq!(corpus.test.unwrap().iter().collect::<Vec<_>>(), ["g"]);
        write(dir.path(), "test.txt", &["b", "e"].join(SEP));
        let error = load(path).unwrap_err().to_string();
        assert!(error.contains("test.txt") && error.contains("validation"), "{error}");

        std::fs::remove_file(dir.path().join("test.txt")).unwrap();
        write(dir.path(), "valid.txt", "d");
        let error = load(path).unwrap().with_test(&Silent).unwrap_err().to_string();
        assert!(error.contains("too short") && error.contains("test.txt"), "{error}");
    }

    /// A document that is held out twice is not in both halves.
    #[test]
    fn halves_of_what_is_held_out_share_no_document() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        write(dir.path(), "train.txt", &["a", "b", "c"].join(SEP));
        write(dir.path(), "valid.txt", &["d", "e", "d", "f"].join(SEP));
        let told = Told::default();
        let halved = load(path).unwrap().with_test(&told).unwrap();
        assert_eq!(halved.valid.iter().collect::<Vec<_>>(), ["d", "e"]);
        assert_eq!(halved.test.unwrap().iter().collect::<Vec<_>>(), ["f"]);
        let told = told.all();
        assert!(told.contains("validation text too are left out: 1") && told.contains("the test (1)"), "{told}");

        write(dir.path(), "valid.txt", &["d", "e", "e", "d"].join(SEP));
        let error = load(path).unwrap().with_test(&Silent).unwrap_err().to_string();
        assert!(error.contains("second half") && error.contains("validation"), "{error}");
    }

    const SEP: &str = "\n<|endoftext|>\n";

    #[test]
    fn names_and_errors() {
        let dir = tempfile::tempdir().unwrap();
        let stories = write(dir.path(), "tales.txt", &["a", "b", "c"].join(SEP));
        assert_eq!(load(&stories).unwrap().name, "file:tales.txt");
        assert!(name_of(Path::new(".")).len() > "file:".len());

        let error = load("no/such/path").unwrap_err().to_string();
        assert!(error.contains("no/such/path") && error.contains("sample"), "{error}");
        let empty = write(dir.path(), "empty.txt", " \n<|endoftext|>\n");
        let error = load(&empty).unwrap_err().to_string();
        assert!(error.contains("empty.txt") && error.contains("no text"), "{error}");
        write(dir.path(), "zero.txt", "");
        assert!(load_text(&dir.path().join("zero.txt")).is_err());
        assert!("".parse::<DataSpec>().is_err());
        for spec in ["auto", "tinystories", "sample", "./sample"] {
            assert_eq!(spec.parse::<DataSpec>().unwrap().to_string(), spec);
        }
    }

    #[test]
    fn text_for_evaluation_is_not_split() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), "one.txt", "A paragraph.\n\nAnother.\n");
        let documents = load_text(Path::new(&path)).unwrap();
        assert_eq!(documents.iter().collect::<Vec<_>>(), ["A paragraph.\n\nAnother."]);
        assert!(load_text(dir.path()).is_err());
    }
}
