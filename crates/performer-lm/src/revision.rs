//! What made a result: the revision of this program and its command line, for whatever it writes.

#[cfg(feature = "lab")]
use std::ffi::OsStr;

/// The revision this program was built from: a git commit (with `-dirty` where files had been
/// changed), or the version of the package where it was built outside its repository.
pub fn git_revision() -> &'static str {
    match option_env!("PERFORMER_GIT_REVISION") {
        Some(revision) => revision,
        None => concat!("v", env!("CARGO_PKG_VERSION")),
    }
}

/// The command line of this process, as a shell takes it. An argument that is no UTF-8 is written
/// with replacement characters.
#[cfg(feature = "lab")]
pub(crate) fn command_line() -> String {
    let words = std::env::args_os().skip(1).map(quoted);
    std::iter::once("performer-lm".to_string()).chain(words).collect::<Vec<_>>().join(" ")
}

/// Returns a word of a command line as a shell takes it: in single quotes where it holds a
/// character that a shell may interpret.
#[cfg(feature = "lab")]
pub(crate) fn quoted(word: impl AsRef<OsStr>) -> String {
    let word = word.as_ref().to_string_lossy();
    let is_plain = |c: char| c.is_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "lab")]
    #[test]
    fn words_that_a_shell_would_interpret_are_quoted() {
        for (word, expected) in [
            ("--attention", "--attention"),
            ("favor:m=32,map=learned", "favor:m=32,map=learned"),
            ("favor:m=32|softmax:window=8", "'favor:m=32|softmax:window=8'"),
            ("a b", "'a b'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(word), expected);
        }
        #[cfg(unix)]
        {
            use std::os::unix::ffi::OsStrExt;
            assert_eq!(quoted(OsStr::from_bytes(b"rep\xff")), "'rep\u{fffd}'");
        }
    }

    #[test]
    fn the_revision_is_a_commit_or_a_version() {
        let revision = git_revision();
        let commit = revision.strip_suffix("-dirty").unwrap_or(revision);
        let is_commit = commit.len() == 40 && commit.bytes().all(|b| b.is_ascii_hexdigit());
        assert!(is_commit || revision.starts_with('v'), "{revision}");
    }
}
