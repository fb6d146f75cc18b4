//! The size of the terminal.

use terminal_size::{Height, Width, terminal_size_of};

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Screen {
    /// Characters in a line.
    pub columns: usize,
    /// Lines.
    pub rows: usize,
}

impl Screen {
    /// The terminal on stdout; `None` if stdout is not a terminal or its size is unknown.
    pub fn of_stdout() -> Option<Self> {
        let (Width(columns), Height(rows)) = terminal_size_of(std::io::stdout())?;
        Some(Self { columns: columns.into(), rows: rows.into() })
    }
}
