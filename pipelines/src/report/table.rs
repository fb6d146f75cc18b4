//! Tables with a name and a value per line.

/// Formats lines of `name  value` with aligned values.
pub(crate) fn table(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

/// Rows below a header, columns aligned and separated by two blanks.
pub(crate) fn grid(header: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<String> = header.iter().map(|name| (*name).to_owned()).collect();
    let all: Vec<&Vec<String>> = std::iter::once(&header).chain(rows).collect();
    let width = |column: usize| all.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..header.len()).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    all.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn tables_are_aligned() {
        assert_eq!(super::table(&[("a", "1".into()), ("long", "2".into())]), "a     1\nlong  2\n");
    }
}
