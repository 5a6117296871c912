//! The look of all tables.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

/// Horizontal lines above and below the table and below its header; no others.
const STYLE: TableStyle = {
    const LINE: LineStyle = LineStyle::none().fill('─').junction('─');
    TableStyle::new().top_border(LINE).header_separator(LINE).bottom_border(LINE)
};

/// Formats a table. The first `left` columns are aligned left, the others right.
pub(crate) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>, left: usize) -> String {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(left) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

/// A cell that may be empty.
pub(crate) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".into())
}
