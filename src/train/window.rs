//! What one step reads: a window of both directions.

use std::{collections::HashMap, ops::Range, sync::Arc};

/// A window of one direction: `rows` rows of `positions` tokens, and the word that follows each of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stream {
    /// Distinct tokens.
    pub words: Vec<Arc<str>>,
    /// Row by row, in reading order of the direction: indices into `words`.
    pub inputs: Vec<u32>,
    /// Row by row: the id of the next word in the vocabulary.
    pub targets: Vec<u32>,
}

/// A window of both directions, which read different sentences.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Window {
    /// Distinct tokens of both directions.
    pub words: Vec<Arc<str>>,
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
    /// Joins the windows of both directions, of so many rows each.
    pub fn of_streams(forward: Stream, backward: Stream, rows: usize) -> Self {
        let mut window =
            Self { rows, positions: forward.inputs.len().checked_div(rows).unwrap_or(0), ..Self::default() };
        let most = forward.words.len() + backward.words.len();
        let mut places = HashMap::with_capacity(most);
        window.words.reserve(most);
        for (direction, stream) in [forward, backward].into_iter().enumerate() {
            let place = |word: Arc<str>| {
                *places.entry(word).or_insert_with_key(|word| {
                    window.words.push(Arc::clone(word));
                    window.words.len() as u32 - 1
                })
            };
            let own: Vec<u32> = stream.words.into_iter().map(place).collect();
            window.inputs[direction] = stream.inputs.into_iter().map(|input| own[input as usize]).collect();
            window.targets[direction] = stream.targets;
        }
        window
    }

    /// Some rows of both directions: the share of one process of several.
    pub fn of_rows(&self, rows: Range<usize>) -> Self {
        let cells = rows.start * self.positions..rows.end * self.positions;
        let part = |direction: usize| Stream {
            words: self.words.clone(),
            inputs: self.inputs[direction][cells.clone()].to_vec(),
            targets: self.targets[direction][cells.clone()].to_vec(),
        };
        let mut window = Self::of_streams(part(0), part(1), rows.len());
        window.keep_used_words();
        window
    }

    fn keep_used_words(&mut self) {
        let mut places = vec![None; self.words.len()];
        let mut used = Vec::new();
        for input in self.inputs.iter_mut().flatten() {
            let place = places[*input as usize].get_or_insert_with(|| {
                used.push(Arc::clone(&self.words[*input as usize]));
                used.len() as u32 - 1
            });
            *input = *place;
        }
        self.words = used;
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

    fn stream(words: &[&str], inputs: &[u32], targets: &[u32]) -> Stream {
        let words = words.iter().map(|&word| Arc::from(word)).collect();
        Stream { words, inputs: inputs.to_vec(), targets: targets.to_vec() }
    }

    /// By hand.
    #[test]
    fn directions_share_their_words() {
        let forward = stream(&["a", "b"], &[0, 1, 1, 0], &[1, 1, 0, 5]);
        let backward = stream(&["c", "a"], &[0, 1, 0, 0], &[2, 3, 4, 5]);
        let window = Window::of_streams(forward, backward, 2);
        assert_eq!(window.words.iter().map(AsRef::as_ref).collect::<Vec<&str>>(), ["a", "b", "c"]);
        assert_eq!((window.rows, window.positions), (2, 2));
        assert_eq!(window.inputs, [[0, 1, 1, 0], [2, 0, 2, 2]]);
        assert_eq!(window.targets, [[1, 1, 0, 5], [2, 3, 4, 5]]);
        assert_eq!(window.problem(2, 6), None);
        let second = window.of_rows(1..2);
        assert_eq!(second.words.iter().map(AsRef::as_ref).collect::<Vec<&str>>(), ["b", "a", "c"]);
        assert_eq!((second.inputs, second.targets), ([vec![0, 1], vec![2, 2]], [vec![0, 5], vec![4, 5]]));
    }

    #[test]
    fn windows_that_cannot_be_read_are_refused() {
        let good = Window::of_streams(stream(&["a"], &[0, 0], &[0, 1]), stream(&["b"], &[0, 0], &[0, 1]), 2);
        assert!(good.problem(3, 2).unwrap().contains("2 rows, not the 3"));
        assert!(good.problem(2, 1).unwrap().contains("target 1 is not in the vocabulary"));
        assert!(Window { inputs: [vec![0, 2], vec![0, 0]], ..good.clone() }.problem(2, 2).unwrap().contains("input 2"));
        assert!(Window { targets: [vec![0, 0], vec![0]], ..good }.problem(2, 2).unwrap().contains("1 targets"));
        assert!(Window::default().problem(0, 2).is_some());
    }
}
