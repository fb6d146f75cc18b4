//! The format `table`: aligned columns, which are narrowed to the width of a terminal, or a record per row.

use arrow::{
    array::RecordBatch,
    datatypes::{DataType, Schema},
    error::ArrowError,
};

use super::{
    cell::cells,
    text::{cut, escaped, width},
};

/// Columns that a string, a list or a struct keeps at least before other columns are hidden.
const LEAST: usize = 12;
/// Width of the borders of a column, and of the border at the end.
const BORDERS: usize = 3;
const LAST_BORDER: usize = 1;
/// The column in place of the hidden ones.
const GAP: &str = "…";
/// Columns are aligned up to this width.
const ALIGNED: usize = 1000;
/// Wider ones only as long as the blanks that pad all of their lines are at most so many: a cell with many lines beside one
/// with a long line would otherwise take the product of both.
const BLANKS: usize = 16 << 20;

/// Rows as text.
#[derive(Debug, Default)]
pub(super) struct Table {
    columns: Vec<Column>,
    rows: usize,
}

#[derive(Debug)]
struct Column {
    name: String,
    cells: Vec<String>,
    /// The width of the widest line of its cells.
    widest: usize,
    /// Whether a cell may be cut. A cut number would be another number.
    can_cut: bool,
}

impl Table {
    pub(super) fn new(schema: &Schema, batches: &[RecordBatch]) -> Result<Self, ArrowError> {
        let column = |(index, field): (usize, &arrow::datatypes::FieldRef)| {
            let mut texts = Vec::new();
            for batch in batches {
                texts.extend(cells(batch.column(index))?);
            }
            let name = escaped(field.name()).into_owned();
            let lines = texts.iter().flat_map(|cell| cell.split('\n'));
            let widest = lines.map(|line| width(&escaped(line))).max().unwrap_or(0);
            Ok(Column { name, cells: texts, widest, can_cut: can_cut(field.data_type()) })
        };
        let columns = schema.fields().iter().enumerate().map(column).collect::<Result<_, ArrowError>>()?;
        Ok(Self { columns, rows: batches.iter().map(RecordBatch::num_rows).sum() })
    }

    /// Whether the table, without cuts, is wider than `max` columns.
    pub(super) fn is_wider_than(&self, max: usize) -> bool {
        table_width(self.columns.iter().map(Column::natural)) > max
    }

    /// The table in at most `max` columns of a terminal: long cells are cut, and then columns in the middle hidden.
    /// Also the number of hidden columns.
    pub(super) fn fit(&self, max: usize) -> (String, usize) {
        let shown = self.shown(max);
        let hidden = self.columns.len() - shown.len();
        let space = max.saturating_sub(if hidden > 0 { gap_width() } else { 0 });
        let widths = widths(&shown, space);
        let mut drawn: Vec<Drawn> =
            shown.iter().zip(widths).map(|(column, width)| Drawn { column: Some(column), width }).collect();
        if hidden > 0 {
            drawn.insert(shown.len().div_ceil(2), Drawn { column: None, width: width(GAP) });
        }
        (self.draw(&drawn), hidden)
    }

    /// The columns that fit: the first and the last ones.
    fn shown(&self, max: usize) -> Vec<&Column> {
        let all = self.columns.len();
        let kept = |n: usize| self.columns[..n.div_ceil(2)].iter().chain(&self.columns[all - n / 2..]);
        let fits = |n: &usize| {
            let gap = if *n < all { gap_width() } else { 0 };
            table_width(kept(*n).map(Column::least)) + gap <= max
        };
        let n = (1..=all).rev().find(fits).unwrap_or(all.min(1));
        kept(n).collect()
    }

    fn draw(&self, columns: &[Drawn]) -> String {
        let aligned = ALIGNED.max(BLANKS / (1 + self.lines()));
        let border = columns.iter().map(|drawn| "-".repeat(drawn.width.min(aligned) + 2)).collect::<Vec<_>>().join("+");
        let border = format!("+{border}+\n");
        let mut text = border.clone();
        push_row(&mut text, columns, aligned, |column| &column.name);
        text.push_str(&border);
        for row in 0..self.rows {
            push_row(&mut text, columns, aligned, |column| &column.cells[row]);
        }
        text.push_str(&border);
        text
    }

    /// The lines of all rows, each of which has as many as its highest cell.
    fn lines(&self) -> usize {
        let height = |row: usize| self.columns.iter().map(|column| column.cells[row].split('\n').count()).max();
        (0..self.rows).filter_map(height).sum()
    }

    /// The expanded display: a line per value, which is not cut.
    pub(super) fn expanded(&self) -> String {
        let names = self.columns.iter().map(|column| width(&column.name)).max().unwrap_or(0);
        let rule = names + BORDERS + 20;
        let mut text = String::new();
        for row in 0..self.rows {
            let title = format!("-[ RECORD {} ]", row + 1);
            text.push_str(&format!("{title:-<rule$}\n"));
            for column in &self.columns {
                let mut name = column.name.as_str();
                for line in column.cells[row].split('\n') {
                    let blank = " ".repeat(names - width(name));
                    text.push_str(&format!("{name}{blank} | {}\n", escaped(line)));
                    name = "";
                }
            }
        }
        text
    }
}

impl Column {
    /// The width of its widest line.
    fn natural(&self) -> usize {
        self.widest.max(width(&self.name))
    }

    /// The width below which it is not cut as long as other columns can be hidden.
    fn least(&self) -> usize {
        let cells = if self.can_cut { self.widest.min(LEAST) } else { self.widest };
        cells.max(width(&self.name).min(LEAST))
    }
}

/// A column of the drawn table; `None` stands for the hidden ones.
struct Drawn<'a> {
    column: Option<&'a Column>,
    width: usize,
}

fn table_width(columns: impl Iterator<Item = usize>) -> usize {
    columns.map(|width| width + BORDERS).sum::<usize>() + LAST_BORDER
}

fn gap_width() -> usize {
    width(GAP) + BORDERS
}

/// Widths of columns that add up to at most `max`: the widest ones are narrowed to a common width.
fn widths(columns: &[&Column], max: usize) -> Vec<usize> {
    let limits: Vec<(usize, usize)> = columns.iter().map(|column| (column.least(), column.natural())).collect();
    let at = |cap: usize| limits.iter().map(move |&(least, natural)| natural.min(cap.max(least)));
    let widest = limits.iter().map(|&(_, natural)| natural).max().unwrap_or(0);
    let fits = |cap: &usize| table_width(at(*cap)) <= max;
    let Some(cap) = (1..=widest.min(max)).rev().find(fits) else {
        // A single column that is too wide.
        let space = max.saturating_sub(table_width(std::iter::repeat_n(0, columns.len())));
        return limits.iter().map(|&(_, natural)| natural.min(space).max(1)).collect();
    };
    let mut widths: Vec<usize> = at(cap).collect();
    let mut rest = max - table_width(widths.iter().copied());
    for (width, &(_, natural)) in widths.iter_mut().zip(&limits) {
        if rest > 0 && *width < natural {
            (*width, rest) = (*width + 1, rest - 1);
        }
    }
    widths
}

/// Appends a row, which has as many lines as its highest cell, with columns aligned up to a width.
fn push_row<'a>(text: &mut String, columns: &[Drawn<'a>], aligned: usize, cell: impl Fn(&'a Column) -> &'a str) {
    let cells: Vec<Vec<&str>> = columns
        .iter()
        .map(|drawn| drawn.column.map_or(vec![GAP], |column| cell(column).split('\n').collect()))
        .collect();
    let height = cells.iter().map(Vec::len).max().unwrap_or(0);
    for number in 0..height {
        for (drawn, lines) in columns.iter().zip(&cells) {
            let line = escaped(lines.get(number).copied().unwrap_or_default());
            let line = cut(&line, drawn.width);
            let blank = " ".repeat(drawn.width.min(aligned).saturating_sub(width(&line)));
            text.push_str(&format!("| {line}{blank} "));
        }
        text.push_str("|\n");
    }
}

/// Whether values of a type may be cut: strings, structs, and lists of anything but numbers, which are short already.
fn can_cut(data_type: &DataType) -> bool {
    use DataType as T;
    match data_type {
        T::Utf8 | T::LargeUtf8 | T::Utf8View | T::Binary | T::LargeBinary | T::BinaryView | T::FixedSizeBinary(_) => {
            true
        }
        T::Dictionary(_, values) => can_cut(values),
        T::FixedSizeList(item, _) | T::List(item) | T::LargeList(item) => can_cut(item.data_type()),
        other => other.is_nested(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::{
        array::{Array, ArrayRef, Float64Array, Int64Array, StringArray},
        datatypes::Field,
    };

    use super::*;

    fn table(columns: Vec<(&str, ArrayRef)>) -> Table {
        let fields: Vec<Field> =
            columns.iter().map(|(name, column)| Field::new(*name, column.data_type().clone(), true)).collect();
        let schema = Arc::new(Schema::new(fields));
        let arrays = columns.into_iter().map(|(_, column)| column).collect();
        Table::new(&schema, &[RecordBatch::try_new(Arc::clone(&schema), arrays).unwrap()]).unwrap()
    }

    fn strings(texts: &[&str]) -> ArrayRef {
        Arc::new(StringArray::from(texts.to_vec()))
    }

    // All tables are written by hand.
    #[test]
    fn long_cells_are_cut_and_numbers_are_not() {
        let ids: ArrayRef = Arc::new(Int64Array::from(vec![1_234_567, 2]));
        let table = table(vec![("id", ids), ("text", strings(&["It rained all day, and we stayed in.", "東京"]))]);
        assert!(table.is_wider_than(30) && !table.is_wider_than(50));
        let expected = "\
+---------+------------------+
| id      | text             |
+---------+------------------+
| 1234567 | It rained all d… |
| 2       | 東京             |
+---------+------------------+
";
        assert_eq!(table.fit(30), (expected.to_owned(), 0));
        assert!(table.fit(50).0.contains("| It rained all day, and we stayed in. |"));
    }

    #[test]
    fn columns_in_the_middle_are_hidden() {
        let number = |n: f64| Arc::new(Float64Array::from(vec![n])) as ArrayRef;
        let table =
            table(vec![("a", number(1234.5)), ("b", number(2234.5)), ("c", number(3234.5)), ("d", number(4234.5))]);
        // Four columns need 4 · 9 + 1 = 37.
        assert_eq!(table.fit(37).1, 0);
        let expected = "\
+--------+--------+---+--------+
| a      | b      | … | d      |
+--------+--------+---+--------+
| 1234.5 | 2234.5 | … | 4234.5 |
+--------+--------+---+--------+
";
        assert_eq!(table.fit(36), (expected.to_owned(), 1));
        assert_eq!(table.fit(3).0.lines().next(), Some("+---+---+"));
    }

    #[test]
    fn lines_of_a_cell_and_control_characters() {
        let table = table(vec![("plan", strings(&["Sort\n  Scan\x1b[2J", ""]))]);
        let expected = "\
+-----------------+
| plan            |
+-----------------+
| Sort            |
|   Scan\\u{1b}[2J |
|                 |
+-----------------+
";
        assert_eq!(table.fit(80), (expected.to_owned(), 0));
    }

    /// By hand: 30,000 lines of 300,000 columns would take 9 GB.
    #[test]
    fn a_table_is_not_much_larger_than_its_cells() {
        let (high, wide) = ("\n".repeat(30_000), "x".repeat(300_000));
        let table = table(vec![("high", strings(&[&high])), ("wide", strings(&[&wide]))]);
        let (text, _) = table.fit(usize::MAX);
        assert!(text.len() < 2 * ALIGNED * 30_000, "{}", text.len());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[3], format!("|      | {wide} |"));
        assert_eq!(lines[4], format!("|      | {} |", " ".repeat(ALIGNED)));
        assert_eq!(lines.len(), 30_001 + 4);
    }

    #[test]
    fn records() {
        let table = table(vec![("id", strings(&["1", "2"])), ("text", strings(&["It rained\nall day.", "東京"]))]);
        let expected = "\
-[ RECORD 1 ]--------------
id   | 1
text | It rained
     | all day.
-[ RECORD 2 ]--------------
id   | 2
text | 東京
";
        assert_eq!(table.expanded(), expected);
    }
}
