//! This module is the command `performer-lm gpu-check`.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    str::FromStr,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::{args::Machine, bench::read_others, output};
use crate::{
    files,
    gpu_check::{About, Extent, Item, Line, Part, Report, State, items, perform},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm gpu-check --device cuda
  performer-lm gpu-check --device cuda --only-checks --only bf16 --out bf16.json
  performer-lm gpu-check --device cuda --minutes 8 --out h100.json
  performer-lm gpu-check --device cuda --resume --out h100.json
  performer-lm gpu-check --device cuda --against torch.json
  performer-lm gpu-check --device cpu --quick

Every kernel against a reference in f64, timings of attention, a short training run: minutes on a GPU. It fails if a result is
wrong.

Each result is written to a file of lines (h100.jsonl for h100.json) as soon as it is known, and another process does the work. A
kernel that makes the device fail, or hangs, therefore costs only what was being done: the next process goes on after it.
--resume goes on after this program was stopped.

--against puts PyTorch's FlashAttention beside, as scripts/torch_attention.py timed it on this card:

  python3 scripts/torch_attention.py --device cuda --dtype bf16 --heads 64 --tokens 512,1024,2048,4096,8192,16384 > torch.json")]
pub(super) struct Args {
    /// Small sizes: half a minute on a CPU.
    #[arg(long)]
    quick: bool,
    /// Only the comparisons with the reference.
    #[arg(long, conflicts_with_all = ["against", "only_timings"])]
    only_checks: bool,
    /// Only the timings of attention.
    #[arg(long)]
    only_timings: bool,
    /// Only what has this text in its name, such as `bf16` or `favor, 4096 tokens`; may be given
    /// several times.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Only the K-th of N equal parts of the work that the other options choose, so that several
    /// processes, or cards, can divide it. Each writes results of its own.
    #[arg(long, value_name = "K/N", default_value = "1/1", hide_default_value = true)]
    share: Share,
    /// Stop beginning new work after this many minutes; what is left is listed.
    #[arg(long, value_name = "N")]
    minutes: Option<f64>,
    /// The most seconds that one piece of work may take before its process is ended.
    #[arg(long, value_name = "N", default_value_t = 240)]
    patience: u64,
    /// Go on from the lines of a check that was stopped.
    #[arg(long)]
    resume: bool,
    /// Measurements of scripts/torch_attention.py to put beside ours.
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// File for the results as JSON; the lines go beside it [default: gpu-check.json, or
    /// gpu-check-K-of-N.json for a share].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
    /// Do the work for as many seconds and add it to the lines: this program starts processes of
    /// itself with it.
    #[arg(long, hide = true, value_name = "SECONDS")]
    work: Option<f64>,
    /// End with the process that started this one, which holds the other end of the input.
    #[arg(long, hide = true, requires = "work")]
    overseen: bool,
    /// Name an item whose process is ended in its middle, to test that nothing else is lost.
    #[arg(long, hide = true, value_name = "TEXT")]
    crash: Option<String>,
}

/// `Share` is one of several equal parts of a list, in its order.
#[derive(Clone, Copy, Debug)]
struct Share {
    /// The number of this part, from 1 to `of`.
    which: usize,
    of: usize,
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(which, of)| Some((which.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((which, of)) if 1 <= which && which <= of => Ok(Self { which, of }),
            _ => Err("it must be K/N with K from 1 to N, such as 1/2 for the first half".into()),
        }
    }
}

impl Share {
    /// Keeps this share of a list.
    fn take<T>(self, mut list: Vec<T>) -> Vec<T> {
        let border = |which: usize| (list.len() as u128 * which as u128 / self.of as u128) as usize;
        let (from, to) = (border(self.which - 1), border(self.which));
        list.drain(from..to).collect()
    }
}

impl Args {
    fn extent(&self) -> Extent {
        if self.quick { Extent::Quick } else { Extent::Full }
    }

    fn out(&self) -> PathBuf {
        let Share { which, of } = self.share;
        let usual = if of == 1 { "gpu-check.json".into() } else { format!("gpu-check-{which}-of-{of}.json").into() };
        self.out.clone().unwrap_or(usual)
    }

    fn lines(&self) -> PathBuf {
        self.out().with_extension("jsonl")
    }

    /// Returns the most time that all the work may take, if there is a limit.
    fn time(&self) -> Result<Option<Duration>> {
        let time = |minutes: f64| {
            Duration::try_from_secs_f64(minutes * 60.0)
                .map_err(|_| anyhow!("--minutes is {minutes}; it must be a number of at least 0"))
        };
        self.minutes.map(time).transpose()
    }

    fn wants(&self, item: &Item) -> bool {
        let part = match item.part {
            Part::Checks => !self.only_timings,
            Part::Timings => !self.only_checks,
            Part::Training => !self.only_checks && !self.only_timings,
        };
        part && (self.only.is_empty() || self.only.iter().any(|text| item.name.contains(text)))
    }
}

pub(super) fn run(args: Args, machine: &Machine) -> Result<()> {
    let time = args.time()?;
    ensure!(args.patience > 0, "--patience is 0; it must be at least 1 second");
    let about = About::new(&machine.device, args.extent());
    let mut items = items(&machine.device, args.extent());
    items.retain(|item| args.wants(item));
    if items.is_empty() {
        bail!("nothing has a name with {}", args.only.join(" or "));
    }
    let (all, Share { which, of }) = (items.len(), args.share);
    let items = args.share.take(items);
    if items.is_empty() {
        bail!("share {which} of {of} has nothing of {all} pieces of work; divide them into fewer");
    }
    if let Some(seconds) = args.work {
        return work(&args, seconds, machine, &items);
    }
    if machine.device.is_cpu() && args.extent() == Extent::Full {
        output::note("there is no GPU here: the CPU takes long for these sizes (--quick for small ones)");
    }
    let pytorch = args.against.as_deref().map(read_others).transpose()?;
    let (out, path) = (args.out(), args.lines());
    require_own(&out, &path, args.resume)?;
    begin(&path, &about, args.resume)?;
    oversee(time, Duration::from_secs(args.patience), &path, &items)?;

    let report = Report::of(about, &read_lines(&path)?, &items, pytorch.as_ref());
    if let Some(path) = &args.against
        && report.speed.iter().all(|s| s.pytorch_milliseconds.is_none())
    {
        output::note(&format!("{} has none of the sizes that were timed: see --help", path.display()));
    }
    files::write_json(&out, &report)?;
    output::note(&format!("saved {}, and each result as a line in {}", out.display(), path.display()));
    if args.json {
        output::json(&report)?
    } else {
        output::result(&tables(&report))?
    }
    let failed = report.checks.iter().filter(|c| !c.passed).count();
    if failed > 0 || !report.lost.is_empty() {
        let lost = report.lost.len();
        bail!(
            "{failed} of {} checks failed and {lost} pieces of work were lost on {}",
            report.checks.len(),
            report.device
        );
    }
    Ok(())
}

/// Refuses files that would be replaced and are no results of a check. Lines that are gone on with
/// are not replaced.
fn require_own(out: &Path, lines: &Path, resume: bool) -> Result<()> {
    ensure!(
        !out.is_dir(),
        "--out is {}, which is a folder: give the name of a file, such as {}",
        out.display(),
        out.join("gpu-check.json").display()
    );
    ensure!(
        out != lines,
        "--out is {}, but results go there line by line while they are measured: give a name that ends in .json",
        out.display()
    );
    ensure!(
        !resume || lines.exists(),
        "there is no {} to go on with: leave out --resume to begin, or give the --out of the check that is to go on",
        lines.display()
    );
    let is_report =
        |text: &str| serde_json::from_str::<serde_json::Value>(text).is_ok_and(|found| found["checks"].is_array());
    let are_lines =
        |text: &str| text.lines().next().is_some_and(|line| matches!(serde_json::from_str(line), Ok(Line::About(_))));
    let is_foreign = |path: &Path, is_own: &dyn Fn(&str) -> bool| {
        fs::read(path).is_ok_and(|found| !found.is_empty() && !std::str::from_utf8(&found).is_ok_and(is_own))
    };
    let foreign = [(out, is_foreign(out, &is_report)), (lines, !resume && is_foreign(lines, &are_lines))];
    match foreign.into_iter().find(|(_, is_foreign)| *is_foreign) {
        Some((path, _)) => bail!(
            "{} holds no results of a check, and would be replaced: give another file by --out, or remove it first",
            path.display()
        ),
        None => Ok(()),
    }
}

/// Starts the file of lines, or makes sure that it can be gone on with.
fn begin(path: &Path, about: &About, resume: bool) -> Result<()> {
    if !resume {
        let mut line = serde_json::to_vec(&Line::About(about.clone()))?;
        line.push(b'\n');
        return files::write(path, &line);
    }
    match read_lines(path)?.first() {
        Some(Line::About(before)) if before == about => Ok(()),
        Some(Line::About(before)) => bail!(
            "{} is of another check ({} on {}, {}; here {} on {}, {}): leave out --resume to begin anew",
            path.display(),
            before.revision,
            before.device,
            sizes(before.extent),
            about.revision,
            about.device,
            sizes(about.extent)
        ),
        _ => bail!("{} does not begin as a check's lines do: leave out --resume to begin anew", path.display()),
    }
}

fn sizes(extent: Extent) -> &'static str {
    match extent {
        Extent::Quick => "small sizes",
        Extent::Full => "full sizes",
    }
}

/// Reads the lines that are whole. The last may not be, where a process was ended while it wrote.
fn read_lines(path: &Path) -> Result<Vec<Line>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n') && line.trim() != "");
    // A line that was cut off has the next process's first line behind it.
    Ok(whole.filter_map(|line| serde_json::from_str(line).ok()).collect())
}

fn add_line(path: &Path, line: &Line) -> Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    let added = fs::File::options().append(true).open(path).and_then(|mut file| file.write_all(&text));
    added.with_context(|| format!("cannot write {}: check free space and permissions", path.display()))
}

/// Starts processes that do the work until nothing is left, or `time` is up. One that adds no line
/// for longer than `patience` is ended.
fn oversee(time: Option<Duration>, patience: Duration, path: &Path, items: &[Item]) -> Result<()> {
    let started = Instant::now();
    loop {
        let before = State::of(&read_lines(path)?);
        let left = time.map(|time| time.saturating_sub(started.elapsed()));
        if items.iter().all(|item| before.done.contains(&item.name)) || left.is_some_and(|left| left.is_zero()) {
            return Ok(());
        }
        let ended = watch(worker(left)?, path, patience)?;
        let after = State::of(&read_lines(path)?);
        match (after.running, ended) {
            (None, Ended::Itself(status)) if status.success() => return Ok(()),
            (Some(item), ended) => {
                let because = ended.to_string();
                output::note(&format!("lost: {item}: {because}; going on after it"));
                // A line that was cut off ends here.
                fs::File::options().append(true).open(path).and_then(|mut file| file.write_all(b"\n"))?;
                add_line(path, &Line::Lost { item, because })?;
            }
            // Nothing had begun.
            (None, ended) if after.done.len() == before.done.len() => bail!("the process that does the work {ended}"),
            (None, _) => {}
        }
    }
}

/// Starts a process that does what is left.
fn worker(left: Option<Duration>) -> Result<std::process::Child> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    let seconds = left.map_or(f64::INFINITY, |left| left.as_secs_f64());
    command.args(std::env::args_os().skip(1)).args(["--work", &seconds.to_string(), "--overseen"]);
    command.stdin(std::process::Stdio::piped()).spawn().context("cannot start another process of this program")
}

/// How a process came to its end.
enum Ended {
    Itself(ExitStatus),
    TookTooLong(Duration),
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Self::Itself(status) => write!(f, "ended with {status}"),
            Self::TookTooLong(time) => write!(f, "was ended after {} s (--patience)", time.as_secs()),
        }
    }
}

/// Waits for a process, and ends it if it adds no line for longer than `patience`.
fn watch(mut process: std::process::Child, path: &Path, patience: Duration) -> Result<Ended> {
    let started = SystemTime::now();
    loop {
        if let Some(status) = process.try_wait()? {
            return Ok(Ended::Itself(status));
        }
        let last = fs::metadata(path).and_then(|about| about.modified()).unwrap_or(started).max(started);
        if last.elapsed().is_ok_and(|silent| silent > patience) {
            process.kill()?;
            process.wait()?;
            return Ok(Ended::TookTooLong(patience));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends this process when the one that started it has ended, however it did: its end of the input
/// closes then. Otherwise this one would go on to add lines beside the process that is started to
/// go on.
fn end_with_overseer() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
}

/// Does what is left, and adds it to the lines.
fn work(args: &Args, seconds: f64, machine: &Machine, items: &[Item]) -> Result<()> {
    if args.overseen {
        end_with_overseer();
    }
    let path = args.lines();
    let done = State::of(&read_lines(&path)?).done;
    let left = items.iter().filter(|item| !done.contains(&item.name));
    let started = Instant::now();
    let stop = || started.elapsed().as_secs_f64() > seconds;
    perform(left, &machine.device, stop, |line| {
        add_line(&path, line)?;
        if let Line::Begin { item } = line {
            output::note(item);
            if args.crash.as_ref().is_some_and(|text| item.contains(text)) {
                std::process::abort();
            }
        }
        Ok(())
    })
}

/// Counts the checks of each path, those that passed among them.
fn paths(report: &Report) -> Vec<Vec<String>> {
    let mut counts = BTreeMap::<&str, (usize, usize)>::new();
    for check in &report.checks {
        if let Some(path) = &check.path {
            let (all, passed) = counts.entry(path).or_default();
            *all += 1;
            *passed += usize::from(check.passed);
        }
    }
    counts.into_iter().map(|(path, (all, passed))| vec![all.to_string(), passed.to_string(), path.into()]).collect()
}

fn tables(report: &Report) -> String {
    let mut checks: Vec<Vec<String>> = Vec::new();
    for check in report.checks.iter().filter(|c| !c.passed) {
        let error = match (check.error, &check.because) {
            (Some(error), _) => format!("{error:.1e}"),
            (None, None) => "not finite".into(),
            (None, Some(_)) => "–".into(),
        };
        let because = check.because.clone().unwrap_or_default();
        checks.push(vec![check.what.clone(), error, format!("{:.0e}", check.tolerance), because]);
    }
    let speed: Vec<Vec<String>> = report
        .speed
        .iter()
        .map(|s| {
            vec![
                s.attention.clone(),
                format!("{:?}", s.work).to_lowercase(),
                output::thousands(s.tokens as u64),
                s.heads.to_string(),
                s.dtype.clone(),
                format!("{:.3}", s.milliseconds),
                format!("{:.3}–{:.3}", s.quartiles.0, s.quartiles.1),
                output::thousands(s.picoseconds as u64),
                s.pytorch_milliseconds.map(|ms| format!("{ms:.3}")).unwrap_or_default(),
                s.pytorch_milliseconds.map(|ms| format!("{:.2}", ms / s.milliseconds)).unwrap_or_default(),
                s.memory_mib.map(output::thousands).unwrap_or_default(),
            ]
        })
        .collect();
    let training: Vec<Vec<String>> = report
        .training
        .iter()
        .map(|t| {
            vec![
                format!("{} {}", t.preset, t.attention_spec),
                output::thousands(t.params as u64),
                format!("{:?}", t.dtype).to_lowercase(),
                output::thousands(t.tokens_per_second as u64),
                format!("{:.3}", t.val_loss),
            ]
        })
        .collect();
    let passed = report.checks.iter().filter(|c| c.passed).count();
    let mut text =
        format!("{}: {passed} of {} checks passed, {:.0} s\n", report.device, report.checks.len(), report.seconds);
    if !checks.is_empty() {
        text += &format!("\n{}\n", output::table(&["failed", "error", "allowed", "because"], &checks));
    }
    let paths = paths(report);
    if !paths.is_empty() {
        text += &format!("\n{}\n", output::table(&["checks", "passed", "computed by"], &paths));
    }
    let header = [
        "attention",
        "work",
        "tokens",
        "heads",
        "type",
        "ms",
        "quartiles",
        "ps/token/head",
        "SDPA ms",
        "times as fast",
        "MiB",
    ];
    for (what, all) in [("lost", &report.lost), ("skipped", &report.skipped), ("not reached", &report.not_reached)] {
        for one in all {
            text += &format!("\n{what}: {one}");
        }
        text += if all.is_empty() { "" } else { "\n" };
    }
    if !speed.is_empty() {
        text += &format!("\n{}\n", output::table(&header, &speed));
    }
    if !training.is_empty() {
        let header = ["training", "parameters", "type", "tokens/s", "val loss"];
        text += &format!("\n{}", output::table(&header, &training));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_all_of_a_list_once() {
        for of in 1..9 {
            let shares = (1..=of).map(|which| Share { which, of }.take((0..7).collect::<Vec<_>>()));
            let lengths: Vec<usize> = shares.clone().map(|share| share.len()).collect();
            assert_eq!(shares.flatten().collect::<Vec<_>>(), (0..7).collect::<Vec<_>>());
            assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1, "{lengths:?}");
        }
        for text in ["", "1", "0/2", "3/2", "1/0", "-1/2", "a/b"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
    }
}
