//! Tables with a name and a value per line.

/// Formats lines of `name  value` with aligned values.
pub(crate) fn table(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn tables_are_aligned() {
        assert_eq!(super::table(&[("a", "1".into()), ("long", "2".into())]), "a     1\nlong  2\n");
    }
}
