//! This module is the command line, with one file for each command. Results are printed to stdout,
//! everything else to stderr.

mod args;
mod bench;
mod compare;
mod convert;
mod data;
mod ending;
mod eval;
mod export;
mod first_run;
mod generate;
mod gpu_check;
mod lab;
mod output;
mod paths;
mod reference;
mod train;
mod unfinished;

use std::{
    collections::BTreeSet,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Error, Result, bail};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand, parser::ValueSource};
use performer_dist::{Disagreement, One, Ranks};

use args::{Global, Machine};

use crate::{device::explain_memory, errors::Cause, unfinished::remove_unfinished};

/// Flag that Ctrl-C sets while steps are taken, which are saved then, and at any time where several
/// processes work together; a second one ends the program at once.
static STOP: AtomicBool = AtomicBool::new(false);

/// How long processes wait for each other until a command says otherwise: one of them may have data
/// to prepare that the others wait for.
const DEADLINE: Duration = Duration::from_secs(3600);

/// Exit code of a program that Ctrl-C ends.
const STOPPED: u8 = 130;

/// Train, compare and run small language models with softmax or Performer (FAVOR+) attention.
#[derive(Parser)]
#[command(version, propagate_version = true, after_help = EXAMPLES)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  performer-lm train --attention favor              train the small published model, minutes on two cores
  performer-lm train --preset small --data stories/ train a larger one on a folder with train.txt and valid.txt
  performer-lm compare --seeds 1,2,3                softmax against FAVOR+, three seeds, a table and a plot
  performer-lm generate runs/seed-favor-m128-seed42      write a story
  performer-lm eval runs/seed-favor-m128-seed42 --data book.txt --json
  performer-lm convert runs/small-softmax-seed42 --out runs/converted     a softmax model into a Performer
  performer-lm bench attention                      time FAVOR+ and softmax over sequence lengths
  performer-lm lab error --out runs/error           how near random features come to softmax, as a page with charts
  performer-lm gpu-check --device cuda              check and time every kernel on this machine's GPU";

#[derive(Subcommand)]
enum Command {
    /// Train a language model.
    Train(train::Args),
    /// Train with several attentions and seeds under identical conditions, and compare.
    Compare(compare::Args),
    /// Turn a pretrained softmax model into a Performer.
    Convert(convert::Args),
    /// Measure how well a model predicts a text.
    Eval(eval::Args),
    /// Continue a text.
    Generate(generate::Args),
    /// Write a model as a Hugging Face folder.
    Export(export::Args),
    /// Measure the speed of attention, decoding, text generation and training on this machine.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Answer questions about FAVOR+ by experiments, as a report with charts.
    #[command(subcommand)]
    Lab(lab::Command),
    /// Check that this machine's GPU computes what it should, and measure how fast.
    GpuCheck(gpu_check::Args),
    /// Prepare or inspect training data.
    Data(data::Args),
    /// Print shell completions.
    #[command(after_help = "\
Example:
  performer-lm completions bash > ~/.local/share/bash-completion/completions/performer-lm")]
    Completions {
        /// The shell to complete for.
        shell: clap_complete::Shell,
    },
    /// Print the manual pages: that of the program, and those of its commands.
    #[command(after_help = "\
Example:
  performer-lm man > performer-lm.1 && man ./performer-lm.1")]
    Man,
    /// Print all commands and options as Markdown.
    #[command(after_help = "\
Example:
  performer-lm reference > reference.md")]
    Reference,
}

/// Runs the command line. Exit codes are 0 for success, 1 for failure, 2 for wrong usage, and 130
/// for a command that was stopped, however much of it is saved.
pub fn main() -> ExitCode {
    // All processes have the same arguments; the first says what is wrong with them.
    if performer_dist::launched_rank() > 0 {
        output::be_silent();
    }
    let mut command = with_negative_numbers(Cli::command());
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let parsed = matches.and_then(|matches| {
        let (usable, typed) = options(&command, &matches);
        output::set_options(usable, typed);
        Cli::from_arg_matches(&matches)
    });
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) if performer_dist::launched_rank() > 0 => return ExitCode::from(error.exit_code() as u8),
        Err(error) => error.exit(),
    };
    let mut ranks: Arc<dyn Ranks> = Arc::new(One);
    match run(cli, &mut ranks) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => match error.downcast_ref() {
            Some(Cause::Stopped(text)) => {
                output::note(text);
                ExitCode::from(STOPPED)
            }
            _ if ranks.size() > 1 => {
                if !output::error_of_rank(&error, ranks.rank(), ranks.size()) {
                    ranks.abort();
                }
                ExitCode::FAILURE
            }
            _ => {
                output::error(&error);
                ExitCode::FAILURE
            }
        },
    }
}

/// Takes what begins with a minus and a digit for a number, so that an error says what is wrong
/// with it.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command.allow_negative_numbers(true).mut_subcommands(with_negative_numbers)
}

/// The long options of the command that was given: first those that do not contradict what was
/// typed, then those that were typed.
fn options(mut command: &clap::Command, mut matches: &ArgMatches) -> (BTreeSet<String>, BTreeSet<String>) {
    while let Some((name, inner)) = matches.subcommand() {
        let Some(found) = command.find_subcommand(name) else { break };
        (command, matches) = (found, inner);
    }
    let is_typed = |arg: &clap::Arg| {
        let source = matches.try_contains_id(arg.get_id().as_str()).is_ok();
        source && matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
    };
    let typed: Vec<&clap::Arg> = command.get_arguments().filter(|arg| is_typed(arg)).collect();
    let contradicts = |a: &clap::Arg, b: &clap::Arg| {
        command.get_arg_conflicts_with(a).iter().any(|other| other.get_id() == b.get_id())
    };
    let usable = command.get_arguments().filter(|arg| {
        !typed
            .iter()
            .any(|typed| typed.get_id() != arg.get_id() && (contradicts(typed, arg) || contradicts(arg, typed)))
    });
    let name = |arg: &clap::Arg| arg.get_long().map(str::to_owned);
    (usable.filter_map(name).collect(), typed.iter().copied().filter_map(name).collect())
}

/// How many forward passes a command runs side by side, at most. Those that read many sequences, or
/// train by settings of their own, run one on each thread.
fn passes(command: &Command) -> usize {
    match command {
        // All processes share the passes of a step; of other commands each makes runs of its own.
        Command::Train(args) => args.passes().div_ceil(performer_dist::launched_size()),
        Command::Compare(args) => args.passes(),
        Command::Bench(bench) => bench.passes(),
        Command::Lab(lab) if lab.is_one_at_a_time() => 1,
        Command::GpuCheck(_) | Command::Generate(_) => 1,
        _ => usize::MAX,
    }
}

/// Runs a command. `ranks` become the processes that were started with this one.
fn run(cli: Cli, ranks: &mut Arc<dyn Ranks>) -> Result<()> {
    let is_shared = match &cli.command {
        Command::Train(_) | Command::Compare(_) => true,
        Command::Lab(lab) => lab.is_shared(),
        _ => false,
    };
    let mut global = cli.global.configure(passes(&cli.command))?;
    // MPI may start threads, so it comes after the environment is set.
    *ranks = performer_dist::start(DEADLINE).map_err(Error::msg)?;
    #[cfg(feature = "nccl")]
    if matches!(cli.command, Command::Train(_)) {
        *ranks = crate::train::connect(Arc::clone(ranks), &global.device, DEADLINE)?;
    }
    global.ranks = Arc::clone(ranks);
    if ranks.size() > 1 && !is_shared {
        let text = "only train, compare, lab ablate and lab tasks work on several processes; start this command without mpirun".into();
        bail!(Disagreement { rank: 0, size: ranks.size(), text });
    }
    listen_for_ctrl_c(ranks.size() > 1)?;
    let done = perform(cli.command, &global).map_err(|error| {
        let lower = "the batch, the context or the length of the text".to_string();
        explain_memory(error, &global.device, lower, false)
    });
    #[cfg(feature = "cuda")]
    tell_of_kernels(&performer_core::kernels::cuda::loads());
    done
}

/// Says where the kernels of a CUDA device came from, if any were used: to compile them may have
/// been most of a short command's time.
#[cfg(feature = "cuda")]
fn tell_of_kernels(loads: &performer_core::kernels::cuda::Loads) {
    for path in &loads.damaged {
        output::note(&format!("{} is damaged, and was not used", path.display()));
    }
    if loads.shipped + loads.kept + loads.compiled > 0 {
        output::note(&format!(
            "kernels: {} came with the program, {} were kept from before, {} compiled now; {:.2} s",
            loads.shipped,
            loads.kept,
            loads.compiled,
            loads.time.as_secs_f64()
        ));
    }
}

fn perform(command: Command, global: &Machine) -> Result<()> {
    match command {
        Command::Train(args) => train::run(args, global, &STOP),
        Command::Compare(args) => compare::run(args, global, &STOP),
        Command::Convert(args) => convert::run(args, global, &STOP),
        Command::Eval(args) => eval::run(args, global),
        Command::Generate(args) => generate::run(args, global),
        Command::Export(args) => export::run(args),
        Command::Bench(command) => bench::run(command, global),
        Command::GpuCheck(args) => gpu_check::run(args, global),
        Command::Lab(command) => lab::run(command, global),
        Command::Data(args) => data::run(args, global),
        Command::Completions { shell } => {
            let mut buffer = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "performer-lm", &mut buffer);
            output::bytes(&buffer)
        }
        Command::Man => {
            let mut program = Cli::command().disable_help_subcommand(true);
            // This hands full names down to the subcommands.
            program.build();
            let mut pages = Vec::new();
            manual(&program, &mut pages)?;
            output::bytes(&pages)
        }
        Command::Reference => output::result(&reference::markdown(Cli::command())),
    }
}

/// Writes the manual page of a command, and then those of its subcommands, which it names.
fn manual(command: &clap::Command, pages: &mut Vec<u8>) -> std::io::Result<()> {
    clap_mangen::Man::new(command.clone()).render(pages)?;
    command.get_subcommands().try_for_each(|inner| manual(inner, pages))
}

/// Handles Ctrl-C. Steps of a training would be lost, so they are saved first; everything else that
/// a command does is saved already or is made again, and ends at once. Of several processes none
/// ends at once, for the launcher would end those that save.
///
/// A terminal that is closed is handled in the same way, unless the program was started to live on
/// after it.
fn listen_for_ctrl_c(several: bool) -> Result<()> {
    #[cfg(unix)]
    let lives_on = ignores_hangup();
    ctrlc::set_handler(move || {
        if (several || output::takes_steps()) && !STOP.swap(true, Ordering::Relaxed) {
            output::note(match output::takes_steps() {
                true => "stopping after this step; once more to stop at once",
                false => "stopping when all processes can; once more to stop at once",
            });
            return;
        }
        remove_unfinished();
        output::note("stopped");
        std::process::exit(STOPPED.into());
    })
    .context("cannot listen for Ctrl-C")?;
    #[cfg(unix)]
    if lives_on {
        // SAFETY: this replaces the handler that was set above by none.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    }
    Ok(())
}

/// Whether the signal that a closing terminal sends is ignored, as it is after `nohup`.
#[cfg(unix)]
fn ignores_hangup() -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action, the function changes nothing and writes the present one, which
    // is read only if it was written.
    unsafe {
        libc::sigaction(libc::SIGHUP, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Path, PathBuf},
    };

    use super::*;

    #[test]
    fn every_command_shows_an_example() {
        fn lacking(command: &clap::Command) -> Vec<String> {
            let has = command.get_after_help().is_some_and(|help| help.to_string().contains("performer-lm "));
            let inner = command.get_subcommands().filter(|inner| inner.get_name() != "help").flat_map(lacking);
            (!has).then(|| command.get_name().to_string()).into_iter().chain(inner).collect()
        }
        let lacking: Vec<String> = Cli::command().get_subcommands().flat_map(lacking).collect();
        assert!(lacking.is_empty(), "{lacking:?}");
    }

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    /// Threads beyond the passes of a step work inside of these, so the passes have to be known
    /// before anything is read but the settings of a run that goes on.
    #[test]
    fn passes_of_a_step_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let state = r#"{"training": {"batch_size": 9, "micro_batch": 4}}"#;
        fs::write(folder.path().join("train_state.json"), state).unwrap();
        let run = folder.path().to_str().unwrap();
        for (words, expected) in [
            (&["train", "--data", "sample"][..], 2),
            (&["train", "--data", "text.txt"], 8),
            (&["train", "--data", "text.txt", "--batch-size", "1"], 1),
            (&["train", "--data", "sample", "--batch-size", "9", "--micro-batch", "2"], 5),
            (&["train", "--batch-size", "0", "--micro-batch", "0"], 1),
            (&["train", "--data", "sample", "--context", "64", "--sequence-parallel", "2"], 1),
            (&["train", "--data", "sample", "--from", run], 8),
            (&["train", "--resume", run], 3),
            (&["train", "--resume", "no run"], usize::MAX),
            (&["compare", "--preset", "code", "--data", "text.txt"], 16),
            (&["compare", "--preset", "code", "--data", "text.txt", "--batch-size", "2"], 2),
            (&["bench", "train", "--preset", "small", "--data", "text.txt"], 8),
            (&["bench", "train", "--data", "sample"], 8),
            (&["bench", "attention"], 1),
            (&["generate", "run"], 1),
            (&["eval", "run", "--data", "sample"], usize::MAX),
        ] {
            let mut command = with_negative_numbers(Cli::command());
            let words = ["performer-lm"].iter().chain(words);
            let matches = command.try_get_matches_from_mut(words.clone()).expect("words of a command");
            let cli = Cli::from_arg_matches(&matches).expect("a command");
            assert_eq!(passes(&cli.command), expected, "{words:?}");
        }
    }

    /// A message names no option that the command lacks, or that contradicts what was typed.
    #[test]
    fn options_that_can_be_added_are_known() {
        for (words, with, without) in [
            (&["train"][..], &["learning-rate", "micro-batch", "out", "overwrite", "device"][..], &["tune-rate"][..]),
            (&["train", "--resume", "run"], &["device"], &["learning-rate", "micro-batch", "out", "max-train-tokens"]),
            (&["compare", "--learning-rates", "1e-3,3e-3"], &["out", "context"], &["learning-rate", "overwrite"]),
            (&["lab", "ablate"], &["context", "out"], &["learning-rate", "micro-batch", "overwrite"]),
            (&["eval", "run", "--data", "sample"], &["context", "data"], &["micro-batch", "out", "overwrite"]),
        ] {
            let mut command = with_negative_numbers(Cli::command());
            let words = ["performer-lm"].iter().chain(words);
            let matches = command.try_get_matches_from_mut(words.clone()).expect("words of a command");
            let (options, typed) = options(&command, &matches);
            let long: BTreeSet<String> =
                words.clone().filter_map(|word| word.strip_prefix("--")).map(str::to_owned).collect();
            assert_eq!(typed, long, "{words:?}");
            let lacks =
                |names: &[&str]| names.iter().find(|name| !options.contains(**name)).map(|name| name.to_string());
            assert_eq!(lacks(with), None, "{words:?}: {options:?}");
            for name in without {
                assert!(!options.contains(*name), "{words:?} has --{name}");
            }
        }
    }

    /// Returns the pages of a folder and of the folders in it.
    fn pages(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).expect("the book is there").map(|entry| entry.expect("an entry").path());
        entries.flat_map(|path| if path.is_dir() { pages(&path) } else { vec![path] }).collect()
    }

    /// Commands that the book and the project's README show to the reader are commands that the
    /// program takes.
    #[test]
    fn the_commands_of_the_book_are_understood() {
        let mut commands = 0;
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        for path in pages(&crate_folder.join("book")).into_iter().chain([crate_folder.join("project.md")]) {
            let page = fs::read_to_string(&path).expect("pages are text").replace("\\\n", " ");
            for block in page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next()) {
                for line in block.lines().filter(|line| line.starts_with("performer-lm ")) {
                    let command = line.split(" #").next().unwrap_or(line);
                    // Every second part stands between quotation marks, of either kind, and is one
                    // word.
                    let words = command.split(['"', '\'']).enumerate().flat_map(|(i, part)| match i % 2 {
                        0 => part.split_whitespace().collect(),
                        _ => vec![part],
                    });
                    if let Err(error) = Cli::try_parse_from(words) {
                        panic!("{}: {line}: {error}", path.display());
                    }
                    commands += 1;
                }
            }
        }
        assert!(commands > 20, "only {commands} commands were found");
    }
}
