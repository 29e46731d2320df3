//! This module writes the commands and their options as Markdown, from what the parser knows: the
//! page of the book that is never out of date.

use std::fmt::Write as _;

use clap::{Arg, Command};

/// Columns of a line of text.
const WIDTH: usize = 98;

/// Returns the page: the options of every command first, then a section for each command.
pub(super) fn markdown(mut command: Command) -> String {
    // This hands global options and full names down to the subcommands.
    command.build();
    let mut page = String::from(
        "# Commands and options\n\n<!-- Written by `performer-lm reference`; change the help texts in \
         crates/performer-lm/src/cli/ instead. -->\n\n",
    );
    paragraph(&mut page, "", &text(&command.get_about().map(ToString::to_string).unwrap_or_default()));
    page += "\nOptions of every command:\n\n";
    for arg in command.get_arguments().filter(|arg| arg.is_global_set()) {
        option(&mut page, arg);
    }
    for subcommand in command.get_subcommands_mut() {
        section(&mut page, subcommand);
    }
    page
}

/// Adds the section of a command, then those of its subcommands.
fn section(page: &mut String, command: &mut Command) {
    if command.get_name() == "help" {
        return;
    }
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_string();
    let _ = write!(page, "\n## {name}\n\n");
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    paragraph(page, "", &text(&about));
    let usage = command.render_usage().to_string();
    let _ = write!(page, "\n```text\n{}\n```\n", usage.trim_start_matches("Usage: "));
    let own = |arg: &&Arg| {
        !arg.is_global_set() && !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str())
    };
    let mut arguments = command.get_arguments().filter(own).peekable();
    if arguments.peek().is_some() {
        page.push('\n');
    }
    arguments.for_each(|arg| option(page, arg));
    if let Some(after) = command.get_after_help() {
        let after = after.to_string();
        let _ = write!(page, "\n```text\n{}\n```\n", after.trim());
    }
    for subcommand in command.get_subcommands_mut() {
        section(page, subcommand);
    }
}

/// Adds an option or argument as an item of a list.
fn option(page: &mut String, arg: &Arg) {
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut item = format!("- `{arg}`: {}", text(&help));
    if arg.get_action().takes_values() {
        let code = |values: Vec<String>| format!("`{}`", values.join("`, `"));
        let defaults: Vec<_> = arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
        if !defaults.is_empty() {
            let _ = write!(item, " [default: {}]", code(defaults));
        }
        let possible: Vec<_> = arg.get_possible_values().iter().map(|v| v.get_name().to_string()).collect();
        if !possible.is_empty() {
            let _ = write!(item, " [possible values: {}]", code(possible));
        }
    }
    paragraph(page, "  ", &item);
}

/// Help as Markdown: what Markdown would take for a tag is text.
fn text(help: &str) -> String {
    help.replace('<', "\\<")
}

/// Adds text in lines of at most [`WIDTH`] columns, all but the first behind `indent`.
fn paragraph(page: &mut String, indent: &str, text: &str) {
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > WIDTH {
            let _ = write!(page, "\n{indent}{word}");
            column = indent.len() + length;
        } else {
            let space = if column > 0 { " " } else { "" };
            let _ = write!(page, "{space}{word}");
            column += space.len() + length;
        }
    }
    page.push('\n');
}
