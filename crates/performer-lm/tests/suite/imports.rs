//! The direction of imports: a module of the library imports only from modules that stand before it
//! in one list, so that there is no cycle and a part can be used without what stands after it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The modules, each after everything that it imports from.
const ORDER: [&str; 26] = [
    "errors",
    "files",
    "unfinished",
    "listener",
    "memory",
    "parallel",
    "revision",
    "feature_rows",
    "device",
    "draw",
    "machine",
    "plot",
    "seeds",
    "config",
    "data",
    "checkpoint",
    "model",
    "eval",
    "recall",
    "generate",
    "train",
    "convert",
    "compare",
    "bench",
    "lab",
    "gpu_check",
];

/// The command line may import from all of them, and none of them from it.
const LAST: &str = "cli";

/// What is needed to use a model and to train one imports nothing of the experiments.
const MODEL: [&str; 7] = ["config", "data", "checkpoint", "model", "eval", "recall", "generate"];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// The modules that stand after `crate::` in a text, alone or in braces.
fn imported(text: &str) -> BTreeSet<String> {
    let code: String =
        text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|l| format!("{l}\n")).collect();
    let word = |text: &str| -> String { text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    let mut found = BTreeSet::new();
    for part in code.split("crate::").skip(1) {
        let Some(list) = part.strip_prefix('{') else {
            found.insert(word(part));
            continue;
        };
        let mut depth = 0;
        let mut item = String::new();
        for c in list.chars() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    found.insert(word(item.trim()));
                    item.clear();
                    continue;
                }
                _ => {}
            }
            item.push(c);
        }
        found.insert(word(item.trim()));
    }
    found.remove("");
    found
}

/// Every import as a pair of modules, the importing one first.
fn arrows() -> BTreeSet<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut arrows = BTreeSet::new();
    for path in sources(&root) {
        let inside = path.strip_prefix(&root).expect("a source");
        let first = inside.iter().next().expect("a name").to_string_lossy();
        let module = first.trim_end_matches(".rs").to_string();
        if module == "lib" || module == "main" {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source can be read");
        arrows.extend(imported(&text).into_iter().filter(|to| *to != module).map(|to| (module.clone(), to)));
    }
    arrows
}

#[test]
fn imports_go_one_way() {
    let place = |module: &str| match module {
        LAST => ORDER.len(),
        _ => ORDER.iter().position(|name| *name == module).unwrap_or_else(|| panic!("{module} is not in the list")),
    };
    let arrows = arrows();
    assert!(arrows.contains(&("train".into(), "model".into())), "the sources are not read as they should be");
    let wrong: Vec<_> = arrows.iter().filter(|(from, to)| place(from) <= place(to)).collect();
    assert!(wrong.is_empty(), "these import from a module that stands after them: {wrong:?}");
    let experiments = ["machine", "plot"];
    let heavy: Vec<_> = arrows
        .iter()
        .filter(|(from, to)| (MODEL.contains(&&**from) || from == "train") && experiments.contains(&&**to))
        .collect();
    assert!(heavy.is_empty(), "a model needs no charts and no measurements: {heavy:?}");
}

/// The printer, which alone writes to stdout and stderr and draws bars.
const PRINTER: &str = "cli/output.rs";

#[test]
fn only_the_printer_prints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let prints = |path: &PathBuf| {
        let text = fs::read_to_string(path).expect("a source can be read");
        let mut code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        code.any(|line| {
            ["print!(", "println!(", "io::stdout", "io::stderr", "indicatif"].iter().any(|word| line.contains(word))
        })
    };
    let printing: Vec<PathBuf> = sources(&root).into_iter().filter(prints).collect();
    assert_eq!(printing, [root.join(PRINTER)]);
}

#[test]
fn imports_are_found_however_they_are_written() {
    let text = "// crate::comment\nuse crate::{a::{B, c::D}, e, f::g};\nuse crate::h;\nfn i() { crate::j::k() }";
    let expected = ["a", "e", "f", "h", "j"].map(String::from);
    assert_eq!(imported(text), BTreeSet::from(expected));
}
