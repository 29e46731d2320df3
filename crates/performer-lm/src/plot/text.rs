//! This module sets the text of a chart: it has the one embedded font and its widths, and escapes
//! user text.
//!
//! The font is Ubuntu Light, compiled in from the crate `epaint_default_fonts` under the Ubuntu
//! Font Licence 1.0. That licence lets any software embed and redistribute the unmodified font,
//! which stays under it; documents made with the font, such as the charts, are not covered. It asks
//! that copies of the font (a distributed binary) come with its copyright notice (Copyright 2011
//! Canonical Ltd.) and its text.

use std::sync::{Arc, LazyLock};

use resvg::usvg::{self, fontdb};

/// The font family for viewers of the SVG: the same typeface where it is installed, their
/// sans-serif where it is not.
pub(super) const FAMILY: &str = "Ubuntu, sans-serif";

static FONTS: LazyLock<Arc<fontdb::Database>> = LazyLock::new(|| {
    let mut fonts = fontdb::Database::new();
    fonts.load_font_source(fontdb::Source::Binary(Arc::new(epaint_default_fonts::UBUNTU_LIGHT)));
    fonts.set_sans_serif_family("Ubuntu");
    Arc::new(fonts)
});

/// Reads an SVG document with the embedded font and no other.
pub(super) fn parse(svg: &str) -> Result<usvg::Tree, usvg::Error> {
    let options = usvg::Options { fontdb: FONTS.clone(), ..Default::default() };
    usvg::Tree::from_str(svg, &options)
}

/// Returns the width of `text` in pixels at the given font size.
pub(super) fn width(text: &str, size: f64) -> f64 {
    let text = markup(text, size);
    let svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"><text font-family="{FAMILY}" font-size="{size}">{text}</text></svg>"#
    );
    parse(&svg).map_or(0.0, |tree| f64::from(tree.root().bounding_box().width()))
}

/// Returns `text` if it is at most `room` pixels wide, else as much of its beginning as fits before
/// an ellipsis.
pub(super) fn fit(text: &str, size: f64, room: f64) -> String {
    if width(text, size) <= room {
        return text.to_owned();
    }
    let ends: Vec<usize> = text.char_indices().map(|(i, _)| i).collect();
    let cut = |end: usize| format!("{}…", text[..end].trim_end());
    let fitting = ends.partition_point(|&end| width(&cut(end), size) <= room);
    cut(ends[..fitting].last().copied().unwrap_or(0))
}

/// Returns `text` as XML character data that is safe in attributes too; characters that XML 1.0
/// forbids become U+FFFD.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\t' | '\n' | '\r' => out.push(' '),
            '\0'..' ' | '\u{FFFE}' | '\u{FFFF}' => out.push('\u{FFFD}'),
            c => out.push(c),
        }
    }
    out
}

/// Returns escaped `text` with superscript characters as raised digits: fonts draw 2 and 3 unlike
/// the other superscripts, and the embedded one has no superscript minus.
pub(super) fn markup(text: &str, size: f64) -> String {
    let (small, lift) = (0.72 * size, 0.38 * size);
    let runs: Vec<char> = text.chars().collect();
    let mut out = String::new();
    let mut lifted = false;
    for run in runs.chunk_by(|a, b| lowered(*a).is_some() == lowered(*b).is_some()) {
        if let Some(digits) = run.iter().map(|c| lowered(*c)).collect::<Option<String>>() {
            out += &format!(r#"<tspan font-size="{small:.1}" dy="-{lift:.1}">{digits}</tspan>"#);
            lifted = true;
        } else {
            let plain = escape(&run.iter().collect::<String>());
            out += &if lifted { format!(r#"<tspan dy="{lift:.1}">{plain}</tspan>"#) } else { plain };
            lifted = false;
        }
    }
    out
}

fn lowered(c: char) -> Option<char> {
    Some(match c {
        '⁰' => '0',
        '¹' => '1',
        '²' => '2',
        '³' => '3',
        '⁴'..='⁹' => char::from_digit(c as u32 - '⁰' as u32, 10)?,
        '⁻' => '−',
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_font_has_widths() {
        let (one, two) = (width("softmax", 13.0), width("softmaxsoftmax", 13.0));
        assert!((30.0..60.0).contains(&one), "{one}");
        assert!((two / one - 2.0).abs() < 0.1, "{two}");
        assert!((width("softmax", 26.0) / one - 2.0).abs() < 0.1);
    }

    #[test]
    fn long_text_is_cut_to_its_room() {
        assert_eq!(fit("favor", 13.0, 100.0), "favor");
        let cut = fit("φ ünïcode favor M=128, orthogonal rows", 13.0, 100.0);
        assert!(cut.starts_with("φ ünïcode") && cut.ends_with('…'), "{cut}");
        assert!((80.0..=100.0).contains(&width(&cut, 13.0)), "{cut}");
        assert_eq!(fit("favor", 13.0, 0.0), "…");
    }

    #[test]
    fn superscripts_are_raised_and_lowered_again() {
        let raised = r#"<tspan font-size="7.2" dy="-3.8">−12</tspan>"#;
        assert_eq!(markup("10⁻¹²", 10.0), format!("10{raised}"));
        assert_eq!(markup("s⁻¹² <", 10.0), format!(r#"s{raised}<tspan dy="3.8"> &lt;</tspan>"#));
    }
}
