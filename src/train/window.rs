//! What one step reads: a window of both directions.

use std::ops::Range;

use super::words::Words;

/// A window of one direction: `rows` rows of `positions` tokens, and the word that follows each of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stream {
    /// Row by row, in reading order of the direction: indices into the distinct words of the window.
    pub inputs: Vec<u32>,
    /// Row by row: the id of the next word in the vocabulary.
    pub targets: Vec<u32>,
}

/// A window of both directions, which read different sentences.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Window {
    /// Distinct tokens of both directions.
    pub words: Words,
    /// Rows of each direction.
    pub rows: usize,
    /// Tokens of each row.
    pub positions: usize,
    /// Per direction (0 is forward), row by row, in reading order: indices into `words`.
    pub inputs: [Vec<u32>; 2],
    /// Per direction, row by row: the id of the next word in the vocabulary.
    pub targets: [Vec<u32>; 2],
}

impl Window {
    /// Joins the windows of both directions, forward first, of so many rows each and with these distinct words.
    pub fn of_streams(words: Words, streams: [Stream; 2], rows: usize) -> Self {
        let positions = streams[0].inputs.len().checked_div(rows).unwrap_or(0);
        let [forward, backward] = streams;
        let (inputs, targets) = ([forward.inputs, backward.inputs], [forward.targets, backward.targets]);
        Self { words, rows, positions, inputs, targets }
    }

    /// Some rows of both directions: the share of one process of several.
    pub fn of_rows(&self, rows: Range<usize>) -> Self {
        let cells = rows.start * self.positions..rows.end * self.positions;
        let part = |all: &Vec<u32>| all[cells.clone()].to_vec();
        let mut window = Self {
            words: self.words.clone(),
            rows: rows.len(),
            positions: self.positions,
            inputs: self.inputs.each_ref().map(part),
            targets: self.targets.each_ref().map(part),
        };
        window.keep_used_words();
        window
    }

    fn keep_used_words(&mut self) {
        let mut places = vec![None; self.words.len()];
        let mut used = Vec::new();
        for input in self.inputs.iter_mut().flatten() {
            let place = places[*input as usize].get_or_insert_with(|| {
                used.push(*input as usize);
                used.len() as u32 - 1
            });
            *input = *place;
        }
        self.words = self.words.select(used.into_iter());
    }

    /// Predictions of each direction.
    pub fn predictions(&self) -> usize {
        self.rows * self.positions
    }

    /// What is wrong with a window for `rows` rows and a vocabulary of `vocabulary` words.
    pub(super) fn problem(&self, rows: usize, vocabulary: usize) -> Option<String> {
        if self.rows != rows {
            return Some(format!("{} rows, not the {rows} of this run", self.rows));
        }
        for direction in 0..2 {
            let (inputs, targets) = (&self.inputs[direction], &self.targets[direction]);
            if inputs.is_empty() || inputs.len() != self.predictions() || targets.len() != self.predictions() {
                let cells = format!("{rows} x {}", self.positions);
                return Some(format!("{} inputs and {} targets for {cells} cells", inputs.len(), targets.len()));
            }
            if let Some(input) = inputs.iter().find(|&&input| input as usize >= self.words.len()) {
                return Some(format!("input {input} is not one of its {} words", self.words.len()));
            }
            if let Some(target) = targets.iter().find(|&&target| target as usize >= vocabulary) {
                return Some(format!("target {target} is not in the vocabulary of {vocabulary} words"));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(words: &[&str], inputs: [&[u32]; 2], targets: [&[u32]; 2], rows: usize) -> Window {
        let stream =
            |direction: usize| Stream { inputs: inputs[direction].to_vec(), targets: targets[direction].to_vec() };
        Window::of_streams(words.iter().copied().collect(), [stream(0), stream(1)], rows)
    }

    /// By hand.
    #[test]
    fn rows_of_a_window_have_their_words_alone() {
        let inputs: [&[u32]; 2] = [&[0, 1, 1, 0], &[2, 0, 2, 2]];
        let window = window(&["a", "b", "c"], inputs, [&[1, 1, 0, 5], &[2, 3, 4, 5]], 2);
        assert_eq!((window.rows, window.positions), (2, 2));
        assert_eq!(window.problem(2, 6), None);
        let words = |window: &Window| window.words.iter().collect::<String>();
        let (first, second) = (window.of_rows(0..1), window.of_rows(1..2));
        assert_eq!((words(&first), words(&second)), ("abc".to_owned(), "bac".to_owned()));
        assert_eq!((second.inputs, second.targets), ([vec![0, 1], vec![2, 2]], [vec![0, 5], vec![4, 5]]));
        assert_eq!(window.of_rows(0..0).words.len(), 0);
    }

    #[test]
    fn windows_that_cannot_be_read_are_refused() {
        let good = window(&["a", "b"], [&[0, 0], &[1, 1]], [&[0, 1], &[0, 1]], 2);
        assert!(good.problem(3, 2).unwrap().contains("2 rows, not the 3"));
        assert!(good.problem(2, 1).unwrap().contains("target 1 is not in the vocabulary"));
        assert!(Window { inputs: [vec![0, 2], vec![0, 0]], ..good.clone() }.problem(2, 2).unwrap().contains("input 2"));
        assert!(Window { targets: [vec![0, 0], vec![0]], ..good }.problem(2, 2).unwrap().contains("1 targets"));
        assert!(Window::default().problem(0, 2).is_some());
    }
}
