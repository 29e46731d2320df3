//! Results as lines: what is written while the check runs, and the report that is made of it.

use std::collections::{BTreeSet, HashSet};

use serde::{Deserialize, Serialize};

use super::{Check, Extent, Item, Speed, Training};
use crate::{bench::attention::Others, device::describe, machine::Machine, train::git_revision};
use candle_core::Device;

/// `About` says what was checked, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// Name of the GPU, or `cpu`.
    pub device: String,
    /// The machine that has the device.
    pub machine: Machine,
    /// Revision of this program.
    pub revision: String,
    /// How much is checked.
    pub extent: Extent,
}

impl About {
    /// Describes a check on a device of this machine.
    pub fn new(device: &Device, extent: Extent) -> Self {
        let (machine, revision) = (Machine::with(device), git_revision().to_string());
        Self { device: describe(device), machine, revision, extent }
    }
}

/// A `Line` is one line of the file that grows while the check runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    /// What the lines after it are about: the first line.
    About(About),
    /// An item begins.
    Begin {
        /// Its name.
        item: String,
    },
    /// A comparison with a reference.
    Check(Check),
    /// A timing.
    Speed(Speed),
    /// A training run.
    Training(Training),
    /// Something could not be measured.
    Skipped {
        /// What was to be measured.
        what: String,
        /// Why it was not, for instance for lack of memory.
        because: String,
    },
    /// An item is done.
    End {
        /// Its name.
        item: String,
        /// How long it took.
        seconds: f64,
    },
    /// An item will not end: it made the process or the device fail, or took too long.
    Lost {
        /// Its name.
        item: String,
        /// What happened.
        because: String,
    },
}

/// A `State` says how far a file of lines has come.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The items that ended or are lost.
    pub done: HashSet<String>,
    /// The item that began last, if it neither ended nor is lost.
    pub running: Option<String>,
}

impl State {
    /// Finds out from the lines so far.
    pub fn of(lines: &[Line]) -> Self {
        let mut state = Self::default();
        for line in lines {
            match line {
                Line::Begin { item } => state.running = Some(item.clone()),
                Line::End { item, .. } | Line::Lost { item, .. } => {
                    state.done.insert(item.clone());
                    state.running = state.running.filter(|running| running != item);
                }
                _ => {}
            }
        }
        state
    }
}

/// A `Report` holds all results.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Name of the GPU, or `cpu`.
    pub device: String,
    /// The machine that has the device.
    pub machine: Machine,
    /// Revision of this program.
    pub revision: String,
    /// Whether every check that was done passed and no item was lost, be it of checks, a timing or
    /// a training.
    pub passed: bool,
    /// The comparisons with references.
    pub checks: Vec<Check>,
    /// The timings of attention.
    pub speed: Vec<Speed>,
    /// The training runs.
    pub training: Vec<Training>,
    /// What could not be timed, and why, for instance for lack of memory.
    pub skipped: Vec<String>,
    /// What made a process or the device fail, and how.
    #[serde(default)]
    pub lost: Vec<String>,
    /// What there was no time for.
    #[serde(default)]
    pub not_reached: Vec<String>,
    /// Seconds that all of it took.
    pub seconds: f64,
}

impl Report {
    /// Puts together what the lines say about `items`; PyTorch's times, if given, are put beside
    /// ours.
    pub fn of<'a>(
        about: About,
        lines: &[Line],
        items: impl IntoIterator<Item = &'a Item>,
        pytorch: Option<&Others>,
    ) -> Self {
        let names: BTreeSet<&str> = items.into_iter().map(|item| item.name.as_str()).collect();
        let state = State::of(lines);
        let mut report = Self {
            device: about.device,
            machine: about.machine,
            revision: about.revision,
            passed: true,
            checks: Vec::new(),
            speed: Vec::new(),
            training: Vec::new(),
            skipped: Vec::new(),
            lost: Vec::new(),
            not_reached: Vec::new(),
            seconds: 0.0,
        };
        for line in told_once(lines) {
            match line.clone() {
                Line::About(_) | Line::Begin { .. } => {}
                Line::Check(check) => report.checks.push(check),
                Line::Speed(speed) => report.speed.push(speed),
                Line::Training(training) => report.training.push(training),
                Line::Skipped { what, because } => report.skipped.push(format!("{what}: {because}")),
                Line::End { seconds, .. } => report.seconds += seconds,
                Line::Lost { item, because } => {
                    // Whatever it was, a device that fails does not pass.
                    report.passed = false;
                    report.lost.push(format!("{item}: {because}"));
                }
            }
        }
        if let Some(pytorch) = pytorch {
            report.speed.iter_mut().for_each(|speed| speed.set_beside(pytorch));
        }
        report.passed &= report.checks.iter().all(|check| check.passed);
        report.not_reached = names.into_iter().filter(|name| !state.done.contains(*name)).map(String::from).collect();
        report
    }
}

/// Returns the lines without what an item told that was begun again. That happens where everything
/// was killed between its results and its end.
fn told_once(lines: &[Line]) -> Vec<&Line> {
    let (mut kept, mut begun): (Vec<&Line>, _) = (Vec::new(), None);
    for line in lines {
        if let Line::Begin { item } = line {
            if let Some((last, at)) = begun
                && last == item
            {
                kept.truncate(at);
            }
            begun = Some((item, kept.len()));
        }
        kept.push(line);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(item: &str) -> Line {
        Line::Begin { item: item.into() }
    }

    #[test]
    fn the_state_knows_what_ended_what_was_lost_and_what_was_running() {
        let end = Line::End { item: "a".into(), seconds: 1.0 };
        let lost = Line::Lost { item: "b".into(), because: "signal 11".into() };
        let state = State::of(&[begin("a"), end.clone(), begin("b")]);
        assert!(state.done.contains("a") && state.running.as_deref() == Some("b"));
        let state = State::of(&[begin("a"), end, begin("b"), lost]);
        assert!(state.done.contains("b") && state.running.is_none());
    }

    #[test]
    fn a_report_with_a_lost_item_has_not_passed_and_says_what_it_did_not_reach() {
        let about = About::new(&Device::Cpu, Extent::Quick);
        let items: Vec<Item> = ["a", "b", "c"].map(|name| Item::checks(name, |_| Ok(Vec::new()))).into_iter().collect();
        let end = Line::End { item: "a".into(), seconds: 1.5 };
        let report = Report::of(about.clone(), &[begin("a"), end.clone()], &items, None);
        assert!(report.passed && report.not_reached == ["b", "c"] && report.seconds == 1.5);
        let lost = Line::Lost { item: "b".into(), because: "signal 11".into() };
        let report = Report::of(about, &[begin("a"), end, begin("b"), lost], &items, None);
        assert!(!report.passed && report.lost == ["b: signal 11"] && report.not_reached == ["c"]);
    }

    #[test]
    fn an_item_that_was_begun_again_counts_once() {
        let about = About::new(&Device::Cpu, Extent::Quick);
        let check = |what: &str| Line::Check(Check::of(what.into(), Ok(0.0), 1.0));
        let end = |item: &str| Line::End { item: item.into(), seconds: 1.0 };
        let lines = [begin("a"), check("1"), end("a"), begin("b"), check("2"), begin("b"), check("2"), end("b")];
        let report = Report::of(about, &lines, [], None);
        assert_eq!(report.checks.iter().map(|check| check.what.as_str()).collect::<Vec<_>>(), ["1", "2"]);
    }

    #[test]
    fn lines_come_back_from_json() {
        let lines = [Line::About(About::new(&Device::Cpu, Extent::Full)), begin("a")];
        for line in lines {
            let text = serde_json::to_string(&line).unwrap();
            let again: Line = serde_json::from_str(&text).unwrap();
            assert_eq!(serde_json::to_string(&again).unwrap(), text);
        }
    }
}
