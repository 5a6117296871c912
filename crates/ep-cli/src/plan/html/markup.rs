//! Building blocks of HTML. Functions suffice, without a template crate: the page has four kinds of blocks, and every text
//! passes through [`escape`].

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

/// Escapes a sentence. Names between backticks become code.
pub(super) fn sentence(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(index, part)| match index % 2 {
        0 => escape(part),
        _ => format!("<code>{}</code>", escape(part)),
    });
    parts.collect()
}

/// A paragraph with a remark.
pub(super) fn note(text: &str) -> String {
    format!("<p class=\"note\">{}</p>\n", sentence(text))
}

/// A section with a heading and a paragraph.
pub(super) fn section(title: &str, about: &str, content: &str) -> String {
    format!("<section>\n<h2>{}</h2>\n<p>{}</p>\n{content}\n</section>\n", escape(title), sentence(about))
}

/// The class of a cell whose text is so long that it must wrap.
fn wrapped(cell: &str) -> &'static str {
    if cell.chars().count() > 40 { " class=\"long\"" } else { "" }
}

/// A table with a header line.
pub(super) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<&str>, tag: &str| {
        let cells: Vec<String> =
            cells.iter().map(|cell| format!("<{tag}{}>{}</{tag}>", wrapped(cell), escape(cell))).collect();
        format!("<tr>{}</tr>\n", cells.concat())
    };
    let rows: Vec<String> =
        rows.iter().map(|row| line(row.iter().map(String::as_str).collect(), "td")).collect();
    format!("<div class=\"scroll\"><table>\n{}{}</table></div>", line(header.to_vec(), "th"), rows.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_problem_is_no_html() {
        assert_eq!(escape("a<b> & \"c\""), "a&lt;b&gt; &amp; &quot;c&quot;");
        assert_eq!(note("set `a<b>` & go"), "<p class=\"note\">set <code>a&lt;b&gt;</code> &amp; go</p>\n");
        let long = "x".repeat(41);
        let rows = table(&["<h>"], &[vec!["<i>".into(), long.clone()]]);
        assert!(rows.contains("<th>&lt;h&gt;</th>") && rows.contains("<td>&lt;i&gt;</td>"), "{rows}");
        assert!(rows.contains(&format!("<td class=\"long\">{long}</td>")), "{rows}");
    }
}
