//! Building blocks of HTML.

/// Escapes a text for HTML.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            other => out.push(other),
        }
    }
    out
}

/// A section with a heading and a paragraph.
pub(super) fn section(title: &str, about: &str, content: &str) -> String {
    format!("<section>\n<h2>{}</h2>\n<p>{}</p>\n{content}\n</section>\n", escape(title), escape(about))
}

/// A table with a header line.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<&str>, tag: &str| {
        let cells: Vec<String> =
            cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        format!("<tr>{}</tr>\n", cells.concat())
    };
    let rows: Vec<String> =
        rows.iter().map(|row| line(row.iter().map(String::as_str).collect(), "td")).collect();
    format!("<div class=\"scroll\"><table>\n{}{}</table></div>", line(header.to_vec(), "th"), rows.concat())
}
