//! The end of a training run, for the person at the terminal: a story that the model writes, and the
//! commands that show more.

use std::path::Path;

use anyhow::Result;
use candle_core::Device;

use super::output;
use crate::{
    config::AttentionPattern,
    generate::begin_story,
    train::{Report, load_model, run_name},
};

/// Most tokens of the story.
const STORY_TOKENS: usize = 256;

/// Columns of a line of it.
const STORY_WIDTH: usize = 88;

/// Options of `train` that `compare` has not, or has for several runs, and that take a value.
const OWN_OPTIONS: [&str; 4] = ["--attention", "--seed", "--out", "--resume"];

/// Flags of `train` that do not change the result.
const OWN_FLAGS: [&str; 2] = ["--overwrite", "--json"];

/// Shows a story by the model in `out`, and says how to see another, and one by a model with
/// softmax. `words` is the command line, the program first.
pub(super) fn tell(out: &Path, report: &Report, words: impl Iterator<Item = String>) -> Result<()> {
    // A few words are written as fast on the CPU, and every device's models load there.
    let (model, tokenizer) = load_model(out, &Device::Cpu)?;
    if let Some(story) = begin_story(&model, &tokenizer, STORY_TOKENS)? {
        output::note(&format!("\n{} writes:\n", report.attention_spec));
        for line in story.lines().flat_map(|paragraph| wrapped(paragraph, STORY_WIDTH)) {
            output::note(format!("  | {line}").trim_end());
        }
    }
    let words: Vec<String> = words.collect();
    let program = words.first().map_or("performer-lm", String::as_str);
    let other = if report.attention_spec == "softmax" { "favor" } else { "softmax" };
    let other: AttentionPattern = other.parse().map_err(anyhow::Error::msg)?;
    output::note(&format!(
        "\nsaved in {}; another story by it:\n  {program} generate {0} --seed 7\n{other} beside it, trained alike, and \
         both losses in one chart, runs/compare/loss.png:\n  {}\n  {program} generate runs/compare/{}",
        out.display(),
        comparison(&words, &report.attention_spec, report.seed),
        run_name(&other, report.seed),
    ));
    Ok(())
}

/// Returns the command that trains the model of a command line again beside the one with softmax,
/// or the default beside a model with softmax.
fn comparison(words: &[String], attention: &str, seed: u64) -> String {
    let pair = if attention == "softmax" { ["softmax", "favor"] } else { ["softmax", attention] };
    let program = words.first().map_or("performer-lm", String::as_str);
    let mut command = vec![program.to_string(), "compare".into()];
    command.extend(pair.iter().flat_map(|attention| ["--attention".to_string(), quoted(attention)]));
    let (mut own, mut seeded, mut resumed) = (false, false, false);
    let mut at_options = false;
    for word in words.iter().skip(1) {
        let name = word.split_once('=').map_or(word.as_str(), |(name, _)| name);
        if std::mem::take(&mut own) || OWN_FLAGS.contains(&name) {
            continue;
        }
        if OWN_OPTIONS.contains(&name) {
            own = name == word;
            seeded |= name == "--seed";
            resumed |= name == "--resume";
        } else if !at_options && word == "train" {
            at_options = true;
        } else {
            command.push(quoted(word));
        }
    }
    if seeded {
        command.extend(["--seeds".into(), seed.to_string()]);
    }
    if resumed {
        // The settings are the folder's, and no command line has them.
        command.push("(and the options that the run began with)".into());
    }
    command.join(" ")
}

/// Returns a word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if word.chars().all(plain) && !word.is_empty() {
        return word.into();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Breaks a paragraph between words into lines of at most `width` characters, but for words that
/// are longer.
fn wrapped(paragraph: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in paragraph.split_whitespace() {
        let length = word.chars().count();
        if used > 0 && used + 1 + length > width {
            lines.push(String::new());
            used = 0;
        }
        let line = lines.len() - 1;
        if used > 0 {
            lines[line].push(' ');
            used += 1;
        }
        lines[line].push_str(word);
        used += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str, attention: &str) -> String {
        let words: Vec<String> = line.split(' ').map(|word| word.replace('_', " ")).collect();
        comparison(&words, attention, 7)
    }

    #[test]
    fn the_command_to_compare_has_the_options_of_the_run() {
        assert_eq!(
            of("plm train --attention favor", "favor:m=128"),
            "plm compare --attention softmax --attention favor:m=128"
        );
        assert_eq!(
            of(
                "plm --threads 2 train --data my_text --attention=favor --epochs 3 --seed 7 --out train --json",
                "favor:m=128"
            ),
            "plm compare --attention softmax --attention favor:m=128 --threads 2 --data 'my text' --epochs 3 --seeds 7"
        );
        assert_eq!(
            of("plm train --attention softmax --overwrite --data train", "softmax"),
            "plm compare --attention softmax --attention favor --data train"
        );
        assert!(of("plm train --resume runs/a", "favor:m=8").ends_with("(and the options that the run began with)"));
    }

    #[test]
    fn stories_are_broken_between_words() {
        assert_eq!(wrapped("a fox met a hen", 7), ["a fox", "met a", "hen"]);
        assert_eq!(wrapped("unbreakable", 4), ["unbreakable"]);
        assert_eq!(wrapped("", 4), [""]);
    }
}
