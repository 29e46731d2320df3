//! The revision of this program, for whatever it writes.

/// The revision this program was built from: a git commit (with `-dirty` where files had been
/// changed), or the version of the package where it was built outside its repository.
pub fn git_revision() -> &'static str {
    match option_env!("PERFORMER_GIT_REVISION") {
        Some(revision) => revision,
        None => concat!("v", env!("CARGO_PKG_VERSION")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_revision_is_a_commit_or_a_version() {
        let revision = git_revision();
        let commit = revision.strip_suffix("-dirty").unwrap_or(revision);
        let is_commit = commit.len() == 40 && commit.bytes().all(|b| b.is_ascii_hexdigit());
        assert!(is_commit || revision.starts_with('v'), "{revision}");
    }
}
