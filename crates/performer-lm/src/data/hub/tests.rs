use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use std::sync::Mutex;

use super::*;
use crate::listener::{Bar, Silent};

/// Returns a hub at an address of this machine where nobody listens (the discard port).
pub(crate) fn nowhere(cache: &Path) -> Hub {
    Hub {
        endpoint: "http://127.0.0.1:9".into(),
        cache: cache.into(),
        offline: false,
        answer: Duration::from_secs(10),
        stall: Duration::from_secs(10),
    }
}

/// Puts two files into a cache in the layout of the client.
pub(crate) fn fill(cache: &Path, train: &str, valid: &str) {
    let repo = cache.join("datasets--roneneldan--TinyStories");
    let snapshot = repo.join("snapshots/abc");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), "abc").unwrap();
    std::fs::write(snapshot.join(FILES[0]), valid).unwrap();
    std::fs::write(snapshot.join(FILES[1]), train).unwrap();
}

/// The variables that name a proxy, which cannot reach a server of these tests.
const PROXIES: [&str; 6] = ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "https_proxy", "http_proxy"];

/// Whether this process has a proxy. If so, the test of this module with this name has been run in
/// a process of its own that has none, and has passed.
fn ran_without_proxy(test: &str) -> bool {
    if PROXIES.iter().all(|name| std::env::var_os(name).is_none()) {
        return false;
    }
    // Tests are named without the crate that they are in.
    let (_, module) = module_path!().split_once("::").unwrap();
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    alone.args([&format!("{module}::{test}"), "--exact", "--nocapture"]);
    for name in PROXIES {
        alone.env_remove(name);
    }
    let output = alone.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    true
}

/// What a server sends of the range that it is asked for.
#[derive(Clone, Copy, PartialEq)]
enum Sends {
    All,
    /// Half of it, though it has told the length.
    Half,
    /// Half of it, whose length it does not tell.
    HalfWithoutLength,
    /// All of the file, whatever the range.
    AllOfTheFile,
}

/// Answers requests for ranges of `body`; `sends` is told the number of the request.
fn serve(listener: TcpListener, body: &'static [u8], sends: impl Fn(usize) -> Sends) {
    for (request, stream) in listener.incoming().enumerate() {
        let Ok(mut stream) = stream else { return };
        let Some((_, first, last)) = request_of(&stream, body.len()) else {
            return;
        };
        if first >= body.len() {
            let refusal = "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(refusal.as_bytes());
            continue;
        }
        let sends = sends(request);
        let part = if sends == Sends::AllOfTheFile { body } else { &body[first..=last] };
        let sent = match sends {
            Sends::Half | Sends::HalfWithoutLength => part.len() / 2,
            Sends::All | Sends::AllOfTheFile => part.len(),
        };
        let length = match sends {
            Sends::HalfWithoutLength => String::new(),
            _ => format!("Content-Length: {}\r\n", part.len()),
        };
        let _ = write!(
            stream,
            "HTTP/1.1 206 Partial Content\r\n{length}Content-Range: bytes {first}-{last}/{}\r\n\
             ETag: \"tag\"\r\nX-Repo-Commit: abc\r\nConnection: close\r\n\r\n",
            body.len()
        );
        let _ = stream.write_all(&part[..sent]);
    }
}

/// Serves [`BODY`], and returns a hub that asks this server.
fn served(cache: &Path, sends: impl Fn(usize) -> Sends + Send + 'static) -> Hub {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(|| serve(listener, BODY, sends));
    Hub { endpoint, ..nowhere(cache) }
}

/// Reads a request: its first line, and the first and the last byte that it asks for.
fn request_of(stream: &TcpStream, len: usize) -> Option<(String, usize, usize)> {
    let mut lines = BufReader::new(stream).lines();
    let (begin, mut range) = (lines.next()?.ok()?, None);
    for line in lines {
        let line = line.ok()?.to_ascii_lowercase();
        if line.is_empty() {
            return range.map(|(first, last)| (begin, first, last));
        }
        if let Some(bytes) = line.strip_prefix("range: bytes=") {
            let (first, last) = bytes.split_once('-')?;
            range = Some((first.parse().ok()?, last.parse().unwrap_or(len - 1)));
        }
    }
    None
}

const BODY: &[u8] = b"a story of exactly forty-two bytes, or nearly";

#[test]
fn an_interrupted_download_is_taken_up() {
    if ran_without_proxy("an_interrupted_download_is_taken_up") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // The requests are: 0 size, 1 transfer (cut short), 2 size, 3 the rest.
    let hub = served(dir.path(), |request| if request == 1 { Sends::Half } else { Sends::All });
    hub.fetch(&dataset(), FILES[0], &Silent).unwrap_err();
    let part = dir.path().join("datasets--roneneldan--TinyStories/blobs/tag.part");
    assert_eq!(std::fs::read(part).unwrap(), BODY[..BODY.len() / 2]);
    assert!(hub.cached().is_none());
    let path = hub.fetch(&dataset(), FILES[0], &Silent).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), BODY);
    // Once in the cache it is not asked for again, with a hub or without.
    assert_eq!(nowhere(dir.path()).fetch(&dataset(), FILES[0], &Silent).unwrap(), path);
}

/// Half a file would be taken for the whole one forever.
#[test]
fn a_file_of_another_length_is_refused_and_removed() {
    if ran_without_proxy("a_file_of_another_length_is_refused_and_removed") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let hub = served(dir.path(), |request| if request == 1 { Sends::HalfWithoutLength } else { Sends::All });
    let error = format!("{:#}", hub.fetch(&dataset(), FILES[0], &Silent).unwrap_err());
    let told = format!("{} bytes came where the hub told of {}", BODY.len() / 2, BODY.len());
    assert!(error.contains(&told), "{error}");
    assert!(hub.in_cache(&dataset(), FILES[0]).is_none());
    assert_eq!(std::fs::read(hub.fetch(&dataset(), FILES[0], &Silent).unwrap()).unwrap(), BODY);

    // The rest is asked for, and all comes.
    let dir = tempfile::tempdir().unwrap();
    let hub = served(dir.path(), |request| match request {
        1 => Sends::Half,
        3 => Sends::AllOfTheFile,
        _ => Sends::All,
    });
    hub.fetch(&dataset(), FILES[0], &Silent).unwrap_err();
    hub.fetch(&dataset(), FILES[0], &Silent).unwrap_err();
    assert!(hub.in_cache(&dataset(), FILES[0]).is_none());
    assert_eq!(std::fs::read(hub.fetch(&dataset(), FILES[0], &Silent).unwrap()).unwrap(), BODY);
}

/// A process may be killed between the last byte and the name of a file.
#[test]
fn a_part_that_is_whole_becomes_the_file() {
    if ran_without_proxy("a_part_that_is_whole_becomes_the_file") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let hub = served(dir.path(), |_| Sends::All);
    let blobs = dir.path().join("datasets--roneneldan--TinyStories/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join("tag.part"), BODY).unwrap();
    assert_eq!(std::fs::read(hub.fetch(&dataset(), FILES[0], &Silent).unwrap()).unwrap(), BODY);
}

/// What is shortened is asked for again, so nothing else may be: parts of another length, files
/// that are no parts, and parts that another process holds the lock of.
#[test]
fn only_parts_that_lack_nothing_but_their_names_are_shortened() {
    let dir = tempfile::tempdir().unwrap();
    let hub = nowhere(dir.path());
    let blobs = dir.path().join(dataset().folder_name()).join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    for (name, len) in [("whole.part", 9), ("half.part", 5), ("empty.part", 0), ("held.part", 9), ("other", 9)] {
        std::fs::write(blobs.join(name), vec![b'x'; len]).unwrap();
        std::fs::write(blobs.join(name).with_extension("lock"), "").unwrap();
    }
    let held = File::options().write(true).open(blobs.join("held.lock")).unwrap();
    held.lock().unwrap();
    assert!(!hub.shorten_whole_parts(&dataset(), 0));
    assert!(!hub.shorten_whole_parts(&dataset(), 4));
    assert!(hub.shorten_whole_parts(&dataset(), 9));
    let len = |name: &str| blobs.join(name).metadata().unwrap().len();
    assert_eq!(["whole.part", "half.part", "empty.part", "held.part", "other"].map(len), [8, 5, 0, 9, 9]);
    assert!(!hub.shorten_whole_parts(&dataset(), 9));
}

/// The client keeps files under names that are links to them; a copied cache has the files.
#[test]
fn files_of_another_length_are_removed_with_their_links() {
    let dir = tempfile::tempdir().unwrap();
    let (file, link) = (dir.path().join("file"), dir.path().join("link"));
    let refused = |path: &Path| {
        let error = require_whole(path, 4).unwrap_err().to_string();
        assert!(error.starts_with("3 bytes came where the hub told of 4"), "{error}");
        assert!(!path.exists() && !file.exists());
    };
    std::fs::write(&file, "abc").unwrap();
    require_whole(&file, 3).unwrap();
    refused(&file);
    #[cfg(unix)]
    {
        std::fs::write(&file, "abc").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        refused(&link);
    }
    assert!(!link.exists());
    // What cannot be removed is not said to be gone.
    let stays = dir.path().join("stays");
    std::fs::create_dir(&stays).unwrap();
    let error = format!("{:#}", require_whole(&stays, u64::MAX).unwrap_err());
    assert!(error.contains("remove it") && !error.contains("are removed"), "{error}");
}

#[test]
fn the_words_of_a_panic_are_found() {
    assert_eq!(panic_message(&"literal"), "literal");
    assert_eq!(panic_message(&String::from("formatted")), "formatted");
    assert_eq!(panic_message(&3), "the client failed");
}

/// Keeps what it is told, and how far each piece of work came.
#[derive(Default)]
struct Told {
    notes: Mutex<Vec<String>>,
    bytes: Mutex<Vec<u64>>,
}

struct ToldBar<'a>(&'a Told);

impl Listener for Told {
    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.into());
    }

    fn begin(&self, _name: &str, unit: Unit, done: u64, total: u64) -> Box<dyn Bar + '_> {
        assert!(unit == Unit::Bytes && done == 0 && total == BODY.len() as u64);
        Box::new(ToldBar(self))
    }
}

impl Bar for ToldBar<'_> {
    fn advance(&self, done: u64) {
        self.0.bytes.lock().unwrap().push(done);
    }
}

#[test]
fn a_download_tells_how_far_it_is() {
    if ran_without_proxy("a_download_tells_how_far_it_is") {
        return;
    }
    let (dir, told) = (tempfile::tempdir().unwrap(), Told::default());
    served(dir.path(), |_| Sends::All).fetch(&dataset(), FILES[0], &told).unwrap();
    let bytes = told.bytes.lock().unwrap();
    assert!(bytes.is_sorted() && bytes.last() == Some(&(BODY.len() as u64)), "{bytes:?}");
    let notes = told.notes.lock().unwrap();
    assert!(notes.iter().any(|note| note.starts_with("downloading")), "{notes:?}");
}

/// A hub that has told a size and then sends nothing is another error than one that never
/// answered, since what came before the silence is kept.
#[test]
fn a_stalled_download_is_told_from_a_silent_hub() {
    let dir = tempfile::tempdir().unwrap();
    let mut hub = nowhere(dir.path());
    (hub.answer, hub.stall) = (Duration::from_secs(60), Duration::from_millis(50));
    let (send, events) = channel();
    send.send(Event::Size(9)).unwrap();
    let error = hub.watch("file", "name", &events, &Silent).unwrap_err().to_string();
    assert!(error.starts_with("the download of file stalled"), "{error}");
}

#[test]
fn only_a_model_that_is_not_here_is_announced() {
    let (dir, told) = (tempfile::tempdir().unwrap(), Told::default());
    let hub = nowhere(dir.path());
    hub.model("someone/model", &told).unwrap_err();
    assert!(told.notes.lock().unwrap()[0].starts_with("asking"));
    told.notes.lock().unwrap().clear();
    let repo = dir.path().join("models--someone--model");
    std::fs::create_dir_all(repo.join("snapshots/abc")).unwrap();
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), "abc").unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::write(repo.join("snapshots/abc").join(name), "").unwrap();
    }
    hub.model("someone/model", &told).unwrap();
    assert!(told.notes.lock().unwrap().is_empty(), "{:?}", told.notes);
}

/// Serves a model whose branch `main` is at the commit `def`, and returns the address. Asked for
/// its generation_config.json, it answers with `status`. `hear` is told the first line of each
/// request.
fn serve_model(status: &'static str, hear: impl Fn(&str) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let Some((line, first, last)) = request_of(&stream, BODY.len()) else { return };
            hear(&line);
            let commit = if line.contains("/resolve/abc/") { "abc" } else { "def" };
            let answer = match line.contains("generation_config.json") {
                true => format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
                false => format!(
                    "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {first}-{last}/{}\r\n\
                     ETag: \"{commit}\"\r\nX-Repo-Commit: {commit}\r\nConnection: close\r\n\r\n{}",
                    last + 1 - first,
                    BODY.len(),
                    String::from_utf8_lossy(&BODY[first..=last])
                ),
            };
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    endpoint
}

/// Not every model has a generation_config.json. If one cannot be fetched, the user is told why,
/// unless the reason is that the hub has none.
#[test]
fn a_file_that_a_model_may_lack_is_missed_where_the_hub_fails() {
    if ran_without_proxy("a_file_that_a_model_may_lack_is_missed_where_the_hub_fails") {
        return;
    }
    for (status, is_told) in [("404 Not Found", false), ("500 Internal Server Error", true)] {
        let (dir, told) = (tempfile::tempdir().unwrap(), Told::default());
        let endpoint = serve_model(status, |_| ());
        Hub { endpoint, ..nowhere(dir.path()) }.model("someone/model", &told).unwrap();
        let notes = told.notes.lock().unwrap();
        let found = notes.iter().any(|note| note.starts_with("warning") && note.contains("generation_config.json"));
        assert_eq!(found, is_told, "{status}: {notes:?}");
    }
}

#[test]
fn a_silent_hub_is_given_up() {
    if ran_without_proxy("a_silent_hub_is_given_up") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut hub = nowhere(dir.path());
    hub.endpoint = format!("http://{}", listener.local_addr().unwrap());
    hub.answer = Duration::from_millis(100);
    let error = hub.tinystories(&Silent).unwrap_err().to_string();
    assert!(error.contains("no answer"), "{error}");
}

#[test]
fn models_in_the_cache_need_no_hub() {
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("models--someone--model");
    let snapshot = repo.join("snapshots/abc");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), "abc").unwrap();
    let mut hub = nowhere(dir.path());
    hub.offline = true;
    let lacks = |file: &str| {
        let error = hub.model("someone/model", &Silent).unwrap_err().to_string();
        assert!(error.starts_with(file) && error.contains("HF_HUB_OFFLINE"), "{error}");
    };
    let index = r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}"#;
    for (file, content) in
        [("config.json", ""), ("tokenizer.json", ""), ("model.safetensors", ""), ("two.safetensors", "")]
    {
        lacks(if file == "two.safetensors" { "one.safetensors" } else { file });
        let (file, content) = match file {
            "model.safetensors" => ("model.safetensors.index.json", index),
            _ => (file, content),
        };
        std::fs::write(snapshot.join(file), content).unwrap();
    }
    lacks("one.safetensors");
    std::fs::write(snapshot.join("one.safetensors"), "").unwrap();
    assert_eq!(hub.model("someone/model", &Silent).unwrap(), snapshot);
}

/// Between two loads a model's branch `main` may move on to another commit. What the folder of the
/// first commit lacks is then taken from that commit, and the cache goes on to name it.
#[test]
fn all_files_of_a_model_are_of_one_commit() {
    if ran_without_proxy("all_files_of_a_model_are_of_one_commit") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let repo = dir.path().join("models--someone--model");
    std::fs::create_dir_all(repo.join("snapshots/abc")).unwrap();
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), "abc").unwrap();
    std::fs::write(repo.join("snapshots/abc/config.json"), "").unwrap();
    let asked = std::sync::Arc::new(Mutex::new(Vec::new()));
    let lines = asked.clone();
    let endpoint = serve_model("404 Not Found", move |line| lines.lock().unwrap().push(line.to_owned()));
    let hub = Hub { endpoint, ..nowhere(dir.path()) };
    let folder = hub.model("someone/model", &Silent).unwrap();
    assert_eq!(folder, repo.join("snapshots/abc"));
    for name in ["tokenizer.json", "model.safetensors"] {
        assert_eq!(std::fs::read(folder.join(name)).unwrap(), BODY, "{name}");
    }
    assert_eq!(std::fs::read_to_string(repo.join("refs/main")).unwrap(), "abc");
    // What the hub does not have is not asked for again.
    asked.lock().unwrap().clear();
    assert_eq!(hub.model("someone/model", &Silent).unwrap(), folder);
    assert!(asked.lock().unwrap().is_empty(), "{asked:?}");
}

#[test]
fn an_address_ends_without_a_slash() {
    for (variable, address) in [
        (None, "https://huggingface.co"),
        (Some(""), "https://huggingface.co"),
        (Some("https://mirror/hf/"), "https://mirror/hf"),
    ] {
        assert_eq!(endpoint(variable.map(str::to_owned)), address);
    }
}

#[test]
fn an_unreachable_hub_and_a_forbidden_one_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let mut hub = nowhere(dir.path());
    let error = hub.tinystories(&Silent).unwrap_err().to_string();
    assert!(error.contains("cannot download"), "{error}");
    hub.offline = true;
    let error = hub.tinystories(&Silent).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE"), "{error}");
    let error = hub.model("someone/model", &Silent).unwrap_err().to_string();
    assert!(error.contains("config.json of someone/model") && error.contains("HF_HUB_OFFLINE"), "{error}");
    fill(dir.path(), "train", "valid");
    assert!(hub.tinystories(&Silent).unwrap().train.exists());
}
