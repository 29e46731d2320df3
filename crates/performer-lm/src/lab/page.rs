//! This module writes findings as one self-contained HTML page: charts are inline SVG, and colours
//! follow the reader's theme.

use std::fmt::Write;

use anyhow::Result;

use super::{Findings, Provenance, Section, Table};
use crate::plot::escape;

const STYLE: &str = include_str!("page.css");

/// Returns the HTML page.
pub(super) fn html(provenance: &Provenance, findings: &[Findings]) -> Result<String> {
    let title = match findings {
        [one] => one.title.as_str(),
        _ => "FAVOR+ measured",
    };
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
        title = escape(title)
    );
    if findings.len() > 1 {
        writeln!(page, "<h1>{}</h1>\n<nav><ul>", escape(title))?;
        for found in findings {
            writeln!(page, "<li><a href=\"#{}\">{}</a></li>", found.name, escape(&found.title))?;
        }
        page.push_str("</ul></nav>\n");
    }
    for found in findings {
        writeln!(page, "<article id=\"{}\">\n<h1>{}</h1>", found.name, escape(&found.title))?;
        for paragraph in &found.summary {
            writeln!(page, "<p class=\"summary\">{}</p>", escape(paragraph))?;
        }
        contents(&mut page, found)?;
        for (index, part) in found.sections.iter().enumerate() {
            section(&mut page, &anchor(found, index), part)?;
        }
        page.push_str("</article>\n");
    }
    writeln!(
        page,
        "<footer>\n<p>Put together in {:.0} s on {}, revision {}. Runs that were there already had been made \
         before, perhaps on another machine.</p>\n<pre>{}</pre>\n</footer>\n</main>\n</body>\n</html>",
        provenance.seconds,
        escape(&provenance.machine.in_full(provenance.threads)),
        escape(provenance.revision),
        escape(&provenance.command)
    )?;
    Ok(page)
}

/// Writes links to the sections, if there are four or more.
fn contents(page: &mut String, found: &Findings) -> Result<()> {
    if found.sections.len() < 4 {
        return Ok(());
    }
    page.push_str("<nav><ol>\n");
    for (index, part) in found.sections.iter().enumerate() {
        writeln!(page, "<li><a href=\"#{}\">{}</a></li>", anchor(found, index), escape(&part.title))?;
    }
    page.push_str("</ol></nav>\n");
    Ok(())
}

fn anchor(found: &Findings, index: usize) -> String {
    format!("{}-{}", found.name, index + 1)
}

fn section(page: &mut String, anchor: &str, section: &Section) -> Result<()> {
    writeln!(page, "<section id=\"{anchor}\">\n<h2>{}</h2>", escape(&section.title))?;
    for paragraph in &section.text {
        writeln!(page, "<p>{}</p>", escape(paragraph))?;
    }
    if let Some((_, chart)) = &section.chart {
        writeln!(page, "<figure tabindex=\"0\">\n{}\n</figure>", chart.to_svg()?)?;
    }
    if let Some(rows) = &section.table {
        table(page, rows)?;
    }
    page.push_str("</section>\n");
    Ok(())
}

fn table(page: &mut String, table: &Table) -> Result<()> {
    page.push_str("<div class=\"table\" tabindex=\"0\"><table>\n<thead><tr>");
    for cell in &table.header {
        write!(page, "<th>{}</th>", escape(cell))?;
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for row in &table.rows {
        page.push_str("<tr>");
        for cell in row {
            write!(page, "<td>{}</td>", escape(cell))?;
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody>\n</table></div>\n");
    Ok(())
}
