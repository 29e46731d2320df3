//! Compiled kernels on disk: a compiler's result is kept in a folder, so that the next process that
//! asks for the same kernel reads it instead of waiting for the compiler.
//!
//! A file is named by the digest of everything that its contents depend on, and begins with the
//! digest of its contents. A file that is damaged is therefore known, not used, and written anew.
//! Files are written beside their place and then renamed, so that a reader finds a whole file or
//! none. If two containers whose processes have equal numbers mix one up, its digest shows that.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

/// The bytes of a digest.
const DIGEST: usize = blake3::OUT_LEN;

/// The hexadecimal digits of a file's name.
const NAME: usize = 40;

/// The end of the name of a file that is still being written.
const UNFINISHED: &str = ".new";

/// A `Store` is a folder of compiled kernels.
#[derive(Clone, Debug)]
pub(super) struct Store {
    folder: PathBuf,
    /// The most bytes that all files may have together.
    limit: u64,
}

/// What a store has under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The contents as they were put there.
    Whole(Vec<u8>),
    /// No file, or none that can be read.
    Missing,
    /// A file that is not what was put there.
    Damaged(PathBuf),
}

/// Returns the name of the kernel that `parts` describe. The same parts in the same order give the
/// same name; the length of each part is a part of the name too, so no two lists are confused.
pub(super) fn name<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut digest = blake3::Hasher::new();
    for part in parts {
        digest.update(&(part.len() as u64).to_le_bytes());
        digest.update(part.as_bytes());
    }
    digest.finalize().to_hex()[..NAME].to_string()
}

/// Returns whether a store can have written a file of this name.
fn is_of_store(file: &OsStr) -> bool {
    let Some((digest, rest)) = file.to_str().and_then(|file| file.split_at_checked(NAME)) else { return false };
    digest.bytes().all(|digit| digit.is_ascii_hexdigit())
        && (rest.is_empty() || rest.starts_with('.') && rest.ends_with(UNFINISHED))
}

impl Store {
    /// Describes the store in `folder`, which is made when the first kernel is kept.
    pub(super) fn new(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Self { folder: folder.into(), limit }
    }

    /// Returns what the store has under a name.
    pub(super) fn get(&self, name: &str) -> Found {
        let path = self.folder.join(name);
        let Ok(mut bytes) = fs::read(&path) else { return Found::Missing };
        if bytes.len() <= DIGEST {
            return Found::Damaged(path);
        }
        let contents = bytes.split_off(DIGEST);
        if blake3::hash(&contents).as_bytes()[..] != bytes[..] {
            return Found::Damaged(path);
        }
        // The modification time stands for the last use, by which `shrink` chooses what to remove.
        // In a read-only folder it cannot be set, and nothing is removed there.
        let _ = fs::File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
        Found::Whole(contents)
    }

    /// Keeps a kernel under a name, and removes those that were used longest ago while all
    /// together are larger than the limit.
    ///
    /// # Errors
    /// If the file cannot be written: the folder is read-only, say, or the disk is full. Nothing is
    /// left behind then. Also if the folder cannot be listed afterwards; the kernel is then kept.
    pub(super) fn put(&self, name: &str, contents: &[u8]) -> io::Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.folder)?;
        let unique = format!("{name}.{}-{}{UNFINISHED}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let beside = self.folder.join(unique);
        let written = fs::File::create(&beside).and_then(|mut file| {
            file.write_all(blake3::hash(contents).as_bytes())?;
            file.write_all(contents)?;
            file.sync_all()
        });
        let renamed = written.and_then(|()| fs::rename(&beside, self.folder.join(name)));
        if renamed.is_err() {
            let _ = fs::remove_file(&beside);
        }
        renamed?;
        self.shrink(name)
    }

    /// Removes kernels that were used longest ago, but not `newest`, until the limit holds. What
    /// else lies in the folder, which a user may have named, is neither counted nor removed.
    fn shrink(&self, newest: &str) -> io::Result<()> {
        let mut files: Vec<(SystemTime, u64, OsString)> = fs::read_dir(&self.folder)?
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let about = entry.metadata().ok()?;
                if !about.is_file() || !is_of_store(&entry.file_name()) {
                    return None;
                }
                Some((about.modified().ok()?, about.len(), entry.file_name()))
            })
            .collect();
        let mut all: u64 = files.iter().map(|(_, size, _)| size).sum();
        files.sort();
        for (_, size, name) in files {
            if all <= self.limit {
                break;
            }
            if name != newest {
                // Another process may have been faster.
                let _ = fs::remove_file(self.folder.join(name));
                all -= size;
            }
        }
        Ok(())
    }
}

/// Returns the folder for compiled kernels: `$PERFORMER_KERNELS`, or `performer/kernels` in the
/// user's folder for caches. An empty variable turns the store off.
pub(super) fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    if let Some(folder) = variable("PERFORMER_KERNELS") {
        return Some(folder).filter(|folder| !folder.as_os_str().is_empty());
    }
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    let caches = variable("XDG_CACHE_HOME")
        .and_then(absolute)
        .or_else(|| variable("LOCALAPPDATA").and_then(absolute))
        .or_else(|| Some(variable("HOME").and_then(absolute)?.join(".cache")))?;
    Some(caches.join("performer").join("kernels"))
}

/// Returns the folder of kernels that were compiled elsewhere and came with the program: `kernels`
/// beside it. No kernel is written to it; reading one sets its modification time, where it may.
pub(super) fn shipped() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    Some(program.parent()?.join("kernels")).filter(|folder: &PathBuf| Path::is_dir(folder))
}

/// `Collection` is a folder that is to come with a program elsewhere, and for which architectures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Collection {
    pub(super) folder: PathBuf,
    /// Each `major · 10 + minor`.
    pub(super) archs: Vec<i32>,
}

/// Returns the folder that every kernel in use is to be added to, compiled for several
/// architectures: `$PERFORMER_KERNELS_COLLECT`, such as `80,90:FOLDER`. `scripts/cuda-kernels.sh`
/// makes a program's [`shipped`] folder by it.
pub(super) fn collection() -> Option<Collection> {
    parse_collection(std::env::var_os("PERFORMER_KERNELS_COLLECT")?.to_str()?)
}

fn parse_collection(text: &str) -> Option<Collection> {
    let (archs, folder) = text.split_once(':')?;
    let archs = archs.split(',').map(|arch| arch.parse().ok()).collect::<Option<_>>()?;
    Some(Collection { folder: folder.into(), archs }).filter(|_| !folder.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("performer-store-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn a_kernel_comes_back_and_a_damaged_one_does_not() {
        let store = Store::new(folder("damaged"), 1 << 20);
        assert_eq!(store.get("a"), Found::Missing);
        store.put("a", b"machine code").unwrap();
        assert_eq!(store.get("a"), Found::Whole(b"machine code".to_vec()));
        let path = store.folder.join("a");
        let whole = fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &whole[..DIGEST], &[], &[&whole[..], b"x"].concat()] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(store.get("a"), Found::Damaged(path.clone()), "{} bytes of {}", damaged.len(), whole.len());
        }
        store.put("a", b"again").unwrap();
        assert_eq!(store.get("a"), Found::Whole(b"again".to_vec()));
        fs::remove_dir_all(&store.folder).unwrap();
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let store = Store::new(folder("limit"), 3 * (DIGEST as u64 + 10));
        let back = |name: &str, seconds: u64| {
            let time = SystemTime::now() - std::time::Duration::from_secs(seconds);
            fs::File::options().append(true).open(store.folder.join(name)).unwrap().set_modified(time).unwrap();
        };
        let has = |name: &str| matches!(store.get(name), Found::Whole(_));
        let names = ["a", "b", "c", "d", "e", "large"].map(|kernel| name([kernel]));
        let [a, b, c, d, e, large] = names.each_ref().map(String::as_str);
        // What is not the store's, old and large as it is, stays and does not count.
        let foreign = ["thesis.txt", "0123456789abcdef0123456789abcdef01234567.txt"];
        fs::create_dir_all(store.folder.join("folder")).unwrap();
        for file in foreign {
            fs::write(store.folder.join(file), [0; 5000]).unwrap();
            back(file, 10_000);
        }
        for (name, seconds) in [(a, 300), (b, 200), (c, 100)] {
            store.put(name, &[1; 10]).unwrap();
            back(name, seconds);
        }
        // This read makes `b` the oldest.
        assert!(has(a));
        store.put(d, &[1; 10]).unwrap();
        assert!(!has(b));
        for name in [a, c, d] {
            assert!(has(name), "{name}");
        }
        // The two that were used longest ago make room for one of twice their size.
        for (name, seconds) in [(a, 300), (c, 200), (d, 100)] {
            back(name, seconds);
        }
        store.put(e, &[1; DIGEST + 20]).unwrap();
        assert_eq!([a, c, d, e].map(has), [false, false, true, true]);
        // A kernel that is larger than the limit is kept: it was asked for last.
        store.put(large, &[1; 1000]).unwrap();
        assert!(has(large) && !has(d));
        // A process that was killed may have left the beginning of a file.
        let unfinished = format!("{}.1-0{UNFINISHED}", name(["unfinished"]));
        fs::write(store.folder.join(&unfinished), [0; 5000]).unwrap();
        back(&unfinished, 10_000);
        store.put(a, &[1; 10]).unwrap();
        assert!(!store.folder.join(unfinished).exists());
        for file in foreign.into_iter().chain(["folder"]) {
            assert!(store.folder.join(file).exists(), "{file}");
        }
        fs::remove_dir_all(&store.folder).unwrap();
    }

    #[test]
    fn readers_beside_writers_see_whole_kernels_or_none() {
        let store = Store::new(folder("beside"), 1 << 30);
        std::thread::scope(|scope| {
            for writer in 0..4u8 {
                let store = &store;
                scope.spawn(move || {
                    for _ in 0..50 {
                        store.put("same", &vec![writer; 5000]).unwrap();
                        let Found::Whole(read) = store.get("same") else { panic!("it was put there") };
                        assert!(read.len() == 5000 && read.iter().all(|&x| x == read[0]));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(&store.folder).unwrap().count(), 1, "something was left behind");
        fs::remove_dir_all(&store.folder).unwrap();
    }

    /// The bytes of a kernel, so many that another process may well see some of them missing if
    /// they are written in place; and of the kernels that a folder holds.
    const LENGTH: u64 = 200_000;
    const SHARED_LIMIT: u64 = 3 * (LENGTH + DIGEST as u64);

    /// The name and contents of a kernel, the latter from nothing but its number.
    fn kernel(number: u64) -> (String, Vec<u8>) {
        let contents = (0..LENGTH).map(|i| (number * 31 + i * (number + 7)) as u8).collect();
        (name(["kernel", &number.to_string()]), contents)
    }

    const SHARED: &str = "PERFORMER_TEST_OF_STORE";

    /// Uses kernels as a program does, in a folder that the environment names: a process of the
    /// next test. By itself it has nothing to do.
    #[test]
    fn one_process_of_several() {
        let Some(folder) = std::env::var_os(SHARED) else { return };
        let endless = std::env::var_os("PERFORMER_TEST_WITHOUT_END").is_some();
        let store = Store::new(folder, SHARED_LIMIT);
        let kernels: Vec<_> = (0..4).map(kernel).collect();
        let mut state = u64::from(std::process::id());
        for round in 0.. {
            if round == 150 && !endless {
                break;
            }
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (name, contents) = &kernels[(state >> 33) as usize % kernels.len()];
            match store.get(name) {
                Found::Whole(read) => assert!(read == *contents, "another kernel's contents"),
                Found::Missing => {}
                Found::Damaged(path) => panic!("{} is damaged", path.display()),
            }
            if state >> 63 == 0 {
                // It may fail: another process removes what is old, at any moment.
                let _ = store.put(name, contents);
            }
        }
    }

    #[test]
    fn processes_that_share_a_folder_and_one_that_is_killed_leave_it_whole_and_small() {
        let folder = folder("processes");
        let start = |endless: bool| {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "kernels::store::tests::one_process_of_several"]).env(SHARED, &folder);
            if endless {
                command.env("PERFORMER_TEST_WITHOUT_END", "1");
            }
            command.stdout(std::process::Stdio::null()).spawn().unwrap()
        };
        let mut victim = start(true);
        let others = [start(false), start(false), start(false)];
        for mut other in others {
            assert!(other.wait().unwrap().success());
        }
        assert_eq!(victim.try_wait().unwrap(), None, "it was to go on until it is killed");
        victim.kill().unwrap();
        victim.wait().unwrap();

        let store = Store::new(&folder, SHARED_LIMIT);
        let (name, contents) = kernel(99);
        store.put(&name, &contents).unwrap();
        let all: u64 = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
        assert!(all <= SHARED_LIMIT, "{all} bytes");
        let there = (0..4).map(|i| store.get(&kernel(i).0)).filter(|found| *found != Found::Missing).count();
        let whole = (0..4).filter(|&i| store.get(&kernel(i).0) == Found::Whole(kernel(i).1)).count();
        assert!(whole == there && whole > 0, "{whole} of {there} are whole");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_collection_is_architectures_and_a_folder() {
        let collection = Collection { folder: "/some/folder:x".into(), archs: vec![80, 120] };
        assert_eq!(parse_collection("80,120:/some/folder:x"), Some(collection));
        for wrong in ["", "/some/folder", "80,:x", "80:", "sm_80:x"] {
            assert_eq!(parse_collection(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        let folder = folder("file");
        fs::write(&folder, "a file").unwrap();
        let store = Store::new(folder.join("kernels"), 1 << 20);
        assert!(store.put("a", b"code").is_err());
        assert_eq!(store.get("a"), Found::Missing);
        fs::remove_file(&folder).unwrap();
    }

    #[test]
    fn names_tell_lists_of_parts_apart() {
        let names = [name(["ab", "c"]), name(["a", "bc"]), name(["abc"]), name(["abc", ""])];
        for (i, a) in names.iter().enumerate() {
            assert!(names[i + 1..].iter().all(|b| a != b));
        }
        assert_eq!(names[0], name(["ab", "c"]));
    }
}
