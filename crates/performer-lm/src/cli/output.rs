//! This module prints results to stdout and everything else to stderr.

use std::io::{ErrorKind, Write};

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// Prints a result as text.
pub(super) fn result(text: &str) -> Result<()> {
    bytes(format!("{}\n", text.trim_end_matches('\n')).as_bytes())
}

/// Prints a result as raw bytes.
pub(super) fn bytes(bytes: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()?;
    Ok(())
}

/// Prints a result as one line of JSON.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    result(&serde_json::to_string(value)?)
}

/// Prints a message for the user. If stderr is closed, there is nobody to tell.
pub(super) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints an error with its causes.
pub(super) fn error(error: &anyhow::Error) {
    note(&format!("error: {error}"));
    for cause in error.chain().skip(1) {
        // Candle adds a backtrace to its messages; the first line is the message.
        let cause = cause.to_string();
        note(&format!("  because: {}", cause.lines().next().unwrap_or_default()));
    }
}

/// Whether the reader of our output has closed it, as `performer-lm ... | head` does.
pub(super) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|e| e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe))
}

/// Formats a table in Markdown; the first column is aligned to the left, numbers to the right.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(header.to_vec());
    for row in rows {
        table.add_row(row.clone());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_grouped() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(thousands(n), text);
        }
    }
}
