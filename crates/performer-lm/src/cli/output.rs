//! The printer, which alone writes to stdout and stderr and draws bars: results to stdout,
//! everything else to stderr.

use std::{
    cell::Cell,
    collections::BTreeSet,
    io::{ErrorKind, Write},
    sync::{
        LazyLock, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{HumanBytes, HumanDuration, MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use performer_dist::Disagreement;
use serde::Serialize;

use crate::{
    errors::Cause,
    listener::{Bar, Listener, Unit, show_speed},
    recall::Recall,
};

/// All bars, on stderr; where that is no terminal, lines stand for them.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// The number of bars that show steps of a training. While it is above 0, a first Ctrl-C lets the
/// step in progress end and the training be saved.
static TRAININGS: AtomicUsize = AtomicUsize::new(0);

/// Whether this process says nothing but errors.
static SILENT: AtomicBool = AtomicBool::new(false);

/// Makes this process, one of several of which another speaks, say nothing but errors.
pub(super) fn be_silent() {
    SILENT.store(true, Ordering::Relaxed);
}

/// Shows a person at the terminal what the library says.
pub(super) static TERMINAL: Terminal = Terminal;

/// See [`TERMINAL`].
pub(super) struct Terminal;

impl Listener for Terminal {
    fn note(&self, text: &str) {
        note(text);
    }

    fn begin(&self, name: &str, unit: Unit, done: u64, total: u64) -> Box<dyn Bar + '_> {
        let template = match unit {
            Unit::Bytes => "{prefix} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec}  {left}",
            Unit::Steps => "{prefix} [{bar:30}] step {pos}/{len}  {msg}  {left}",
            Unit::Layers => "{prefix} [{bar:30}] {pos}/{len} layers  {left}",
            Unit::Texts => "{prefix} [{bar:30}] {pos}/{len} texts  {left}",
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        // By what was done since the bar began, which what was done before says nothing of. Before
        // anything is done, nobody knows.
        let begun = Instant::now();
        let style = style.with_key("left", move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            if state.pos() > done {
                let seconds_each = begun.elapsed().as_secs_f64() / (state.pos() - done) as f64;
                let _ = out.write_str(&time_left(seconds_each, state.pos(), total));
            }
        });
        let bar = if SILENT.load(Ordering::Relaxed) { ProgressBar::hidden() } else { ProgressBar::new(total) };
        let bar = bar.with_position(done).with_prefix(name.to_string());
        let bar = BARS.add(bar.with_style(if unit == Unit::Bytes { style } else { style.progress_chars("=> ") }));
        bar.enable_steady_tick(Duration::from_millis(500));
        if unit == Unit::Steps {
            TRAININGS.fetch_add(1, Ordering::Relaxed);
        }
        Box::new(Drawn { bar, unit, total, begun: (begun, done), told: Cell::new(Instant::now()) })
    }
}

/// Whether steps of a training are being taken.
pub(super) fn takes_steps() -> bool {
    TRAININGS.load(Ordering::Relaxed) > 0
}

/// The time between two lines that stand for a bar where stderr is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(60);

/// A bar on the terminal, which goes when the work ends. Where there is no terminal, as in a log, a
/// line a minute says how far the work is.
struct Drawn {
    bar: ProgressBar,
    unit: Unit,
    total: u64,
    /// When the bar began, and what was done by then.
    begun: (Instant, u64),
    /// When the last line was printed.
    told: Cell<Instant>,
}

impl Drawn {
    fn show(&self, done: u64) {
        self.bar.set_position(done);
        if BARS.is_hidden() && self.told.get().elapsed() >= LINE_EVERY {
            self.told.set(Instant::now());
            let (begun, before) = self.begun;
            note(&self.line(done, begun.elapsed().as_secs_f64() / done.saturating_sub(before) as f64));
        }
    }

    /// Says how far the work is, and how long the rest will take at so many seconds for each of its
    /// parts.
    fn line(&self, done: u64, seconds_each: f64) -> String {
        let Self { bar, unit, total, .. } = self;
        let line = match unit {
            Unit::Bytes => format!("{}  {} of {}", bar.prefix(), HumanBytes(done), HumanBytes(*total)),
            Unit::Steps => format!("{}  step {done}/{total}  {}", bar.prefix(), bar.message()),
            Unit::Layers => format!("{}  {done}/{total} layers", bar.prefix()),
            Unit::Texts => format!("{}  {done}/{total} texts", bar.prefix()),
        };
        format!("{line}  {}", time_left(seconds_each, done, *total)).trim_end().to_string()
    }
}

/// Says how long the rest takes at so many seconds for each of its parts. Before anything is done,
/// nobody knows.
fn time_left(seconds_each: f64, done: u64, total: u64) -> String {
    let left = Duration::try_from_secs_f64(seconds_each * total.saturating_sub(done) as f64);
    left.map_or_else(|_| String::new(), |left| format!("left {:#}", HumanDuration(left)))
}

impl Bar for Drawn {
    fn advance(&self, done: u64) {
        self.show(done);
    }

    fn step(&self, number: usize, loss: f64, tokens_per_second: f64) {
        self.bar.set_message(format!("loss {loss:.4}  {}", show_speed(tokens_per_second)));
        self.show(number as u64);
    }
}

impl Drop for Drawn {
    fn drop(&mut self) {
        if self.unit == Unit::Steps {
            TRAININGS.fetch_sub(1, Ordering::Relaxed);
        }
        self.bar.finish_and_clear();
        BARS.remove(&self.bar);
    }
}

/// Prints a result, for a person or a machine, and one line break after it.
pub(super) fn result(text: &str) -> Result<()> {
    bytes(format!("{}\n", text.trim_end_matches('\n')).as_bytes())
}

/// Prints a result as raw bytes.
pub(super) fn bytes(bytes: &[u8]) -> Result<()> {
    if SILENT.load(Ordering::Relaxed) {
        return Ok(());
    }
    BARS.suspend(|| {
        let mut out = std::io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush()).context("cannot write the result to stdout")
    })
}

/// Prints a result as one line of JSON.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    result(&serde_json::to_string(value)?)
}

/// Prints a message for the user. If stderr is closed, there is nobody to tell.
pub(super) fn note(text: &str) {
    if !SILENT.load(Ordering::Relaxed) {
        say(text);
    }
}

fn say(text: &str) {
    BARS.suspend(|| {
        let _ = writeln!(std::io::stderr(), "{text}");
    });
}

/// Prints an error with its causes.
pub(super) fn error(error: &anyhow::Error) {
    let mut before = "error";
    for cause in error.chain() {
        say(&format!("{before}: {}", message(cause)));
        before = "  because";
    }
    help(error);
}

/// Returns what an error says. A setting is called by the option that was typed. Of an error of
/// Candle only the first line is kept, because a backtrace follows where the environment asks for
/// one.
fn message(error: &(dyn std::error::Error + 'static)) -> String {
    if let Some(text) = error.downcast_ref().and_then(|cause| setting(cause, &is_typed)) {
        return text;
    }
    let text = error.to_string();
    match error.downcast_ref::<candle_core::Error>() {
        Some(_) => text.lines().next().unwrap_or_default().into(),
        None => text,
    }
}

/// Prints an error of one rank among several: the one that all of them return is printed by the
/// rank that it names. Returns whether the others know of the error.
pub(super) fn error_of_rank(error: &anyhow::Error, rank: usize, size: usize) -> bool {
    let known = error.downcast_ref::<Disagreement>();
    if known.is_none_or(|known| known.rank == rank) {
        say(&format!("error: {}", text_of_rank(error, rank, size)));
        help(error);
    }
    known.is_some()
}

/// Returns what a rank says of its error. Where the others were told of it in words, this rank
/// writes its own causes, in which a setting is called by the option that was typed.
fn text_of_rank(error: &anyhow::Error, rank: usize, size: usize) -> String {
    let told = error.downcast_ref().map(Disagreement::to_string);
    let causes: Vec<String> = error.chain().map(message).filter(|text| Some(text) != told.as_ref()).collect();
    let causes = causes.join(": ");
    match told {
        None => format!("rank {rank} of {size} ends all: {causes}"),
        Some(told) if causes.is_empty() => told,
        Some(_) => format!("rank {rank} of {size}: {causes}"),
    }
}

fn help(error: &anyhow::Error) {
    if let Some(options) = error.downcast_ref().and_then(|cause| options(cause, &has_option)) {
        say(&format!("  help: {options}"));
    }
}

/// The long options of the command that do not contradict what was typed; those that were typed are
/// among them.
static OPTIONS: OnceLock<BTreeSet<String>> = OnceLock::new();

/// The long options that were typed.
static TYPED: OnceLock<BTreeSet<String>> = OnceLock::new();

/// Remembers which options the command can take, and which were typed: messages name no others.
pub(super) fn set_options(usable: BTreeSet<String>, typed: BTreeSet<String>) {
    // The command line is read once.
    let _ = OPTIONS.set(usable);
    let _ = TYPED.set(typed);
}

fn has_option(name: &str) -> bool {
    OPTIONS.get().is_some_and(|options| options.contains(name))
}

fn is_typed(name: &str) -> bool {
    TYPED.get().is_some_and(|options| options.contains(name))
}

/// What is wrong with a setting, by the option that set it, where one was typed. Other values come
/// from a file or a preset.
fn setting(cause: &Cause, is_typed: &dyn Fn(&str) -> bool) -> Option<String> {
    let Cause::Setting { name, value, must, .. } = cause else { return None };
    let option = name.replace('_', "-");
    is_typed(&option).then(|| format!("--{option} is {value}; it must be {must}"))
}

/// The options that mend what went wrong, of those that the command has.
fn options(cause: &Cause, has: &dyn Fn(&str) -> bool) -> Option<String> {
    let sets = |options: &[&str]| {
        let all: Vec<String> = options.iter().filter(|name| has(name)).map(|name| format!("--{name}")).collect();
        match all.as_slice() {
            [] => None,
            [one] => Some(format!("{one} sets it")),
            [most @ .., last] => Some(format!("{} and {last} set these", most.join(", "))),
        }
    };
    let texts = |texts: &[(&str, &str)]| {
        let all: Vec<&str> = texts.iter().filter(|(name, _)| has(name)).map(|(_, text)| *text).collect();
        (!all.is_empty()).then(|| all.join(", "))
    };
    let other_folder = ("out", "--out FOLDER chooses another one");
    match cause {
        Cause::OutOfMemory { in_training: true, .. } => sets(&["micro-batch", "context", "dtype"]),
        Cause::Diverged { training, .. } => sets(match training.as_str() {
            "transfer" => &["transfer-rate"],
            "tune" | "control" => &["tune-rate"],
            _ => &["learning-rate"],
        }),
        Cause::AnotherFolder(_) => texts(&[other_folder]),
        Cause::WouldReplace(_) => texts(&[other_folder, ("overwrite", "--overwrite replaces what this one holds")]),
        Cause::Device(_) => texts(&[("device", "--device cpu does without")]),
        Cause::OtherData(_) => texts(&[("data", "--data and --tokenizer name what the run began with")]),
        Cause::Data(_) => texts(&[(
            "data",
            "--data PATH gives a text file of yours, --data sample the stories that come with the program",
        )]),
        Cause::OutOfMemory { .. } | Cause::Setting { .. } | Cause::Stopped(_) => None,
    }
}

/// Whether the reader of our output has closed it, as `performer-lm ... | head` does.
pub(super) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|e| e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe))
}

/// Formats a table in Markdown; the first column is aligned to the left, all others to the right.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(header.to_vec());
    for row in rows {
        // A stroke, as in the attention favor:m=32|softmax, would end the cell.
        table.add_row(row.iter().map(|cell| cell.replace('|', "\\|")));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Formats `1234567` as `1,234,567`.
pub(super) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats pass keys and pairs of a measurement of recall, each as the share that was found again
/// and the loss, such as `87% (0.41)`.
pub(super) fn recall_cells(recall: &Recall) -> [String; 2] {
    [(recall.passkey, recall.passkey_loss), (recall.pairs, recall.pairs_loss)]
        .map(|(share, loss)| format!("{:.0}% ({loss:.2})", 100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_that_of_what_is_not_done() {
        assert_eq!(time_left(2.0, 3, 10), "left 14s");
        assert_eq!(time_left(f64::INFINITY, 0, 10), "");
    }

    #[test]
    fn a_rank_says_its_own_causes_and_another_what_it_was_told() {
        let told = Disagreement { rank: 1, size: 2, text: "the disk: is full".into() };
        let own = || anyhow::anyhow!("is full").context("the disk");
        assert_eq!(text_of_rank(&own(), 1, 2), "rank 1 of 2 ends all: the disk: is full");
        assert_eq!(text_of_rank(&own().context(told.clone()), 1, 2), "rank 1 of 2: the disk: is full");
        assert_eq!(text_of_rank(&told.into(), 1, 2), "rank 1 of 2: the disk: is full");
    }

    #[test]
    fn an_error_of_the_library_gets_its_option() {
        let diverged =
            |training: &str| Cause::Diverged { training: training.into(), step: 3, loss: Some(f64::INFINITY) };
        for (training, option) in
            [("training", "--learning-rate"), ("transfer", "--transfer-rate"), ("control", "--tune-rate")]
        {
            // The cause may stand anywhere among what led to the error.
            let error = anyhow::anyhow!("a value is not finite").context(diverged(training)).context("this run");
            assert!(!format!("{error:#}").contains("--"));
            let help = |has: &dyn Fn(&str) -> bool| error.downcast_ref().and_then(|cause| options(cause, has));
            assert_eq!(help(&|_| true), Some(format!("{option} sets it")));
            // A command without the option does not hear of it.
            assert_eq!(help(&|_| false), None);
        }
        let folder = Cause::WouldReplace("runs/a is taken".into());
        assert_eq!(options(&folder, &|name| name == "out").unwrap(), "--out FOLDER chooses another one");
        assert!(options(&folder, &|_| true).unwrap().ends_with("--overwrite replaces what this one holds"));
        let memory = Cause::OutOfMemory { free: None, lower: "the batch".into(), in_training: true };
        assert_eq!(options(&memory, &|name| name != "dtype").unwrap(), "--micro-batch and --context set these");
        assert_eq!(options(&memory, &|name| name == "context").unwrap(), "--context sets it");
    }

    /// The library calls a setting by its name in the files; who typed an option reads the option.
    #[test]
    fn a_setting_is_called_by_its_option_where_there_is_one() {
        let cause = Cause::setting("training config", "batch_size", 0, "at least 1");
        assert_eq!(cause.to_string(), "training config: batch_size is 0; it must be at least 1");
        let typed = setting(&cause, &|name| name == "batch-size");
        assert_eq!(typed.unwrap(), "--batch-size is 0; it must be at least 1");
        assert_eq!(setting(&cause, &|_| false), None);
    }

    #[test]
    fn a_line_says_how_far_the_work_is() {
        // A bar of steps takes itself off this count when it is dropped.
        TRAININGS.fetch_add(1, Ordering::Relaxed);
        let drawn = |unit| Drawn {
            bar: ProgressBar::hidden().with_prefix("tune").with_message("loss 2.1000"),
            unit,
            total: 250,
            begun: (Instant::now(), 10),
            told: Cell::new(Instant::now()),
        };
        assert_eq!(drawn(Unit::Steps).line(40, 2.0), "tune  step 40/250  loss 2.1000  left 7m");
        assert_eq!(drawn(Unit::Layers).line(40, f64::INFINITY), "tune  40/250 layers");
        assert_eq!(drawn(Unit::Texts).line(40, 0.5), "tune  40/250 texts  left 2m");
        assert_eq!(drawn(Unit::Bytes).line(250, 0.1), "tune  250 B of 250 B  left 0s");
    }

    #[test]
    fn a_stroke_does_not_end_a_cell() {
        let table = table(&["attention", "loss"], &[vec!["favor:m=32|softmax,gate".into(), "2.1".into()]]);
        assert!(table.contains("| favor:m=32\\|softmax,gate |  2.1 |"), "{table}");
    }

    #[test]
    fn thousands_are_grouped() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(thousands(n), text);
        }
    }
}
