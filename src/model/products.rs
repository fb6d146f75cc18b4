//! Products on a CPU with weights that are packed once, in float32 (`panels.rs`) or in 8-bit integers (`codes.rs`), and the step of an LSTM
//! that is made of them. In both formats a product is added to float32 numbers.

use std::ops::Range;

use tch::Tensor;

use super::{
    DeviceError, Precision,
    codes::{self, Codes, Rounded},
    kernels::{cell_row, dispatch},
    panels::{self, CELLS, COLUMNS, GROUP, LANES, VECTORS, groups, prefetch},
    tensors::{self, Change, FLOAT_ON_HOST},
};

/// Weights `[k, n]` as `N` panels of 64 columns, the last filled up with zeros; one matrix, or several.
#[derive(Debug)]
pub(crate) enum Weights {
    Float(Tensor), // [.., N, k, 64]
    Codes(Codes),
}

impl Weights {
    /// Cuts a matrix `[k, n]` into panels, or several, `[m, k, n]`, and quantises it for [`Precision::Int8`].
    ///
    /// # Errors
    /// [`DeviceError::Precision`] when `k` is too large for 8-bit integers, and when libtorch fails.
    pub(crate) fn new(weights: &Tensor, precision: Precision) -> Result<Self, DeviceError> {
        Ok(match precision {
            Precision::Int8 => Self::Codes(Codes::new(weights)?),
            _ => Self::Float(panels::cut(weights)?),
        })
    }

    /// Memory for the weights of the gates of `d` cells in both directions, `2 x [k, 4D]`: [`CELLS`] cells to a panel.
    ///
    /// # Errors
    /// As [`Weights::new`].
    pub(crate) fn empty_gates(k: usize, d: usize, precision: Precision) -> Result<Self, DeviceError> {
        let panels = d.div_ceil(CELLS);
        Ok(match precision {
            Precision::Int8 => Self::Codes(Codes::empty(&[2], panels, k)?),
            _ => Self::Float(Tensor::f_empty([2, panels as i64, k as i64, COLUMNS as i64], FLOAT_ON_HOST)?),
        })
    }

    /// Copies the weights of gates in one direction, `[2 k, 4D]` in the order `i, j, f, o` of the file, to panels: the first half of the
    /// rows to those of `parts[0]`, and the other half to those of `parts[1]`. Codes of a column have the same scale in both.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn fill_gates(parts: [&Self; 2], direction: i64, weights: &Tensor) -> Result<(), DeviceError> {
        let k = weights.size()[0] / 2;
        match parts {
            [Self::Float(of_input), Self::Float(of_output)] => {
                panels::cut_gates(&weights.f_narrow(0, 0, k)?, &of_input.f_select(0, direction)?)?;
                panels::cut_gates(&weights.f_narrow(0, k, k)?, &of_output.f_select(0, direction)?)
            }
            [Self::Codes(of_input), Self::Codes(of_output)] => {
                let rounded = Rounded::new(weights)?;
                of_input.of(direction)?.fill(&rounded.rows(0, k)?, 4)?;
                of_output.of(direction)?.fill(&rounded.rows(k, k)?, 4)
            }
            _ => Err(DeviceError::internal("gates in two formats")),
        }
    }

    /// The matrix of one direction.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn of(&self, direction: i64) -> Result<Self, DeviceError> {
        self.map(&mut |tensor| Ok(tensor.f_select(0, direction)?))
    }

    /// The same with every tensor changed, always in the same order.
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(match self {
            Self::Float(panels) => Self::Float(change(panels)?),
            Self::Codes(codes) => Self::Codes(codes.map(change)?),
        })
    }

    /// Panels to be read.
    pub(crate) fn panels(&self) -> Panels<'_> {
        match self {
            // SAFETY: nothing writes to the weights while a model computes.
            Self::Float(panels) => {
                let k = panels.size()[panels.dim() - 2] as usize;
                Panels::Float(panels::Panels::new(unsafe { tensors::values(panels) }, k))
            }
            Self::Codes(codes) => Panels::Codes(codes.panels()),
        }
    }

    /// Rows of `k` numbers for the left side of a product with these weights. Codes are kept in `buffer`.
    ///
    /// # Panics
    /// When `k` is 0.
    pub(crate) fn left<'a>(&self, x: &'a [f32], k: usize, buffer: &'a mut codes::Buffer) -> Left<'a> {
        match self {
            Self::Float(_) => Left::Float(panels::Rows::of(x, k)),
            Self::Codes(_) => Left::Codes(buffer.quantise(x, k)),
        }
    }
}

/// Some panels of the same height.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Panels<'a> {
    Float(panels::Panels<'a>),
    Codes(codes::Panels<'a>),
}

impl Panels<'_> {
    /// One of them.
    pub(crate) fn one(&self, index: usize) -> Self {
        match self {
            Self::Float(panels) => Self::Float(panels.one(index)),
            Self::Codes(panels) => Self::Codes(panels.one(index)),
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::Float(panels) => panels.count(),
            Self::Codes(panels) => panels.count(),
        }
    }

    /// Whether these rows can be multiplied with them.
    fn fit(&self, rows: &Left<'_>) -> bool {
        match (self, rows) {
            (Self::Float(panels), Left::Float(rows)) => panels.fit(rows),
            (Self::Codes(panels), Left::Codes(rows)) => panels.fit(rows),
            _ => false,
        }
    }
}

/// Rows of the left side of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Left<'a> {
    Float(panels::Rows<'a>),
    Codes(codes::Rows<'a>),
}

impl Left<'_> {
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Float(rows) => rows.count(),
            Self::Codes(rows) => rows.count(),
        }
    }
}

/// `c = bias + a b`: `[w, k] x [k, n] -> [w, n]`, with one bias `[n]` for all rows, if any.
///
/// # Panics
/// When the lengths or the formats do not belong together.
pub(crate) fn multiply(a: Left<'_>, b: Panels<'_>, bias: Option<&[f32]>, c: &mut [f32]) {
    let n = c.len() / a.count().max(1);
    if a.count() == 0 && c.is_empty() {
        return;
    }
    let fits = c.len() == a.count() * n && b.count() == n.div_ceil(COLUMNS) && b.fit(&a);
    assert!(fits && bias.is_none_or(|bias| bias.len() == n), "shapes of a product with panels");
    match (a, b) {
        (Left::Float(a), Panels::Float(b)) => panels::multiply(&a, &b, bias, c, n),
        (Left::Codes(a), Panels::Codes(b)) => codes::multiply(&a, &b, bias, c, n),
        _ => unreachable!("formats were checked"),
    }
}

/// The gates of a step before their non-linearities: `start` and the products of rows with one panel `[k, 64]` each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gates<'g> {
    pub(crate) start: Start<'g>,
    pub(crate) products: &'g [(Left<'g>, Panels<'g>)],
}

/// What the products of a step are added to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'g> {
    /// The bias, with the +1 of the forget gate.
    Bias(&'g [f32; COLUMNS]),
    /// The sum of the bias and the input product.
    Input {
        /// Sums that several rows share, and sums of one row each.
        gates: [&'g [[f32; COLUMNS]]; 2],
        /// Which of them each row of the step has.
        places: &'g [Place],
    },
}

/// One of the rows of two matrices: the matrix is the lowest bit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place(u32);

impl Place {
    /// A row of matrix 0 or 1.
    pub(crate) fn new(matrix: usize, row: usize) -> Self {
        Self((row * 2 + matrix) as u32)
    }

    pub(crate) fn matrix(self) -> usize {
        self.0 as usize % 2
    }

    pub(crate) fn row(self) -> usize {
        self.0 as usize / 2
    }

    /// The row, without a branch on the matrix, which no processor could predict.
    #[inline(always)]
    fn of<'g>(self, matrices: &[&'g [[f32; COLUMNS]]; 2]) -> &'g [f32; COLUMNS] {
        &matrices[self.matrix()][self.row()]
    }
}

impl<'g> Start<'g> {
    /// Whether a step of `w` rows can begin with it.
    fn fits(&self, w: usize) -> bool {
        match self {
            Self::Bias(_) => true,
            Self::Input { gates, places } => {
                places.len() == w && places.iter().all(|place| place.row() < gates[place.matrix()].len())
            }
        }
    }

    /// That of a row.
    #[inline(always)]
    fn of(&self, row: usize) -> &'g [f32; COLUMNS] {
        match self {
            Self::Bias(bias) => bias,
            Self::Input { gates, places } => places[row].of(gates),
        }
    }

    /// Asks for the memory of the group of rows from `first` on, which is multiplied next.
    #[inline(always)]
    fn prefetch(&self, first: usize) {
        if let Self::Input { gates, places } = self {
            for place in &places[first..(first + GROUP).min(places.len())] {
                place.of(gates).iter().step_by(LANES).for_each(prefetch);
            }
        }
    }
}

/// As [`lstm_step`].
#[inline(always)]
fn step_rows<const FUSED: bool, const V: usize>(
    gates: &Gates<'_>,
    cell: &mut [f32],
    out: &mut [f32],
    d: usize,
    cells: Range<usize>,
    clip: f32,
) {
    let mut z = [[[0.0; LANES]; VECTORS]; GROUP];
    for rows in groups(cell.len() / d) {
        for (z, row) in z.iter_mut().zip(rows.clone()) {
            let (start, _) = gates.start.of(row).as_chunks();
            z.copy_from_slice(start);
            prefetch(&cell[row * d + cells.start]);
            prefetch(&out[row * d + cells.start]);
        }
        gates.start.prefetch(rows.end);
        // No closure: one that is not inlined is not compiled for the instruction set of its caller.
        for product in gates.products {
            match product {
                (Left::Float(a), Panels::Float(panel)) => {
                    panels::add_product::<FUSED, V>(&mut z, a, rows.clone(), panel)
                }
                (Left::Codes(a), Panels::Codes(panel)) => {
                    codes::add_product(&mut z[..rows.len()], a, rows.start, panel)
                }
                _ => unreachable!("formats were checked"),
            }
        }
        for (z, row) in z.iter().zip(rows) {
            let z = z.as_flattened();
            let own = row * d + cells.start..row * d + cells.end;
            let (cell, out) = (&mut cell[own.clone()], &mut out[own]);
            match (cell.as_mut_array::<CELLS>(), out.as_mut_array::<CELLS>()) {
                (Some(cell), Some(out)) => cell_row::<FUSED>(z, cell, out, clip),
                _ => {
                    let (mut whole, mut m) = ([0.0; CELLS], [0.0; CELLS]);
                    whole[..cells.len()].copy_from_slice(cell);
                    cell_row::<FUSED>(z, &mut whole, &mut m, clip);
                    cell.copy_from_slice(&whole[..cells.len()]);
                    out.copy_from_slice(&m[..cells.len()]);
                }
            }
        }
    }
}

dispatch!(
    step_any,
    step_avx2,
    step_avx512,
    step_rows,
    (gates: &Gates<'_>, cell: &mut [f32], out: &mut [f32], d: usize, cells: Range<usize>, clip: f32),
    vectors 1, 4
);

/// One LSTM step in some cells, at most [`CELLS`], of every row: those of `cell` `[w, d]` are updated and clipped (never where `clip` is
/// infinite), and those of `out` `[w, d]` become `sigmoid(o) * tanh(c)`.
///
/// # Panics
/// When the lengths or the formats do not belong together.
pub(crate) fn lstm_step(gates: Gates<'_>, cell: &mut [f32], out: &mut [f32], d: usize, cells: Range<usize>, clip: f32) {
    let w = cell.len() / d;
    let products = gates.products.iter().all(|(a, panel)| a.count() == w && panel.count() == 1 && panel.fit(a));
    let states = cell.len() == w * d && out.len() == w * d && cells.len() <= CELLS && cells.end <= d;
    assert!(gates.start.fits(w) && products && states, "shapes of a step with panels");
    step_any(&gates, cell, out, d, cells, clip);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        kernels,
        tensors::samples::{matrix, numbers},
    };

    /// `[2 k, 4D]` as gates of one direction: those for the input and for the previous output.
    fn gates(values: &[f32], k: usize, d: usize, precision: Precision) -> [Weights; 2] {
        let empty = || Weights::empty_gates(k, d, precision).unwrap();
        let parts = [empty(), empty()];
        Weights::fill_gates([&parts[0], &parts[1]], 1, &matrix(values, 2 * k)).unwrap();
        parts.map(|part| part.of(1).unwrap())
    }

    /// Expected: products of whole matrices, whose own tests compare them with sums by hand, and the pass over the gates of training. A
    /// step whose input was multiplied before has the same bits, and so has a row alone.
    #[test]
    fn a_step_is_products_and_the_pass_over_the_gates() {
        for precision in [Precision::F32, Precision::Int8] {
            for (d, p) in [(11_usize, 5_usize), (16, 203), (40, 400), (24, 1100)] {
                let (w, clip) = (9, 0.4);
                let (x, h, before) = (numbers(w * p, 0.37), numbers(w * p, 0.21), numbers(w * d, 0.9));
                let weights: Vec<f32> = numbers(2 * p * 4 * d, 0.73).iter().map(|weight| weight * 0.1).collect();
                let bias = numbers(4 * d, 0.11);

                // Codes of a column have one scale for both parts, so the weights of the expected product are rounded as a whole.
                let rounded = |part: i64| match precision {
                    Precision::Int8 => {
                        let all = Codes::empty(&[], (4 * d).div_ceil(COLUMNS), p).unwrap();
                        let rounded = Rounded::new(&matrix(&weights, 2 * p)).unwrap();
                        all.fill(&rounded.rows(part * p as i64, p as i64).unwrap(), 1).unwrap();
                        Weights::Codes(all)
                    }
                    _ => {
                        Weights::new(&matrix(&weights[part as usize * p * 4 * d..][..p * 4 * d], p), precision).unwrap()
                    }
                };
                let [mut one, mut other] = [codes::Buffer::default(), codes::Buffer::default()];
                let (w_x, w_h) = (rounded(0), rounded(1));
                let (mut of_input, mut of_output) = (vec![0.0; w * 4 * d], vec![0.0; w * 4 * d]);
                multiply(w_x.left(&x, p, &mut one), w_x.panels(), Some(&bias), &mut of_input);
                multiply(w_h.left(&h, p, &mut other), w_h.panels(), None, &mut of_output);
                let mut expected_gates: Vec<f32> = of_input.iter().zip(&of_output).map(|(a, b)| a + b).collect();
                let (mut expected, mut expected_out) = (vec![0.0; w * d], vec![0.0; w * d]);
                kernels::lstm_cell_kept(&mut expected_gates, &before, &mut expected, &mut expected_out, d, clip);

                let [w_x, w_h] = gates(&weights, p, d, precision);
                let starts = Tensor::empty([d.div_ceil(CELLS) as i64, 1, COLUMNS as i64], FLOAT_ON_HOST);
                panels::cut_gates(&matrix(&bias, 1), &starts).unwrap();
                let starts = Vec::<f32>::try_from(starts.view(-1)).unwrap();
                let step = |rows: Range<usize>, joined: bool| {
                    let [mut one, mut other] = [codes::Buffer::default(), codes::Buffer::default()];
                    let input = w_x.left(&x[rows.start * p..rows.end * p], p, &mut one);
                    let previous = w_h.left(&h[rows.start * p..rows.end * p], p, &mut other);
                    let mut cell = before[rows.start * d..rows.end * d].to_vec();
                    let mut out = vec![0.0; cell.len()];
                    for (n, first) in (0..d).step_by(CELLS).enumerate() {
                        let (cells, start) =
                            (first..(first + CELLS).min(d), starts[n * COLUMNS..].first_chunk().unwrap());
                        let (w_x, w_h) = (w_x.panels().one(n), w_h.panels().one(n));
                        let mut sums = vec![0.0; rows.len() * COLUMNS];
                        let half = rows.len() / 2;
                        // Sums of the first rows are in matrix 0, in reverse order.
                        let place =
                            |row| if row < half { Place::new(0, half - 1 - row) } else { Place::new(1, row - half) };
                        let places: Vec<Place> = (0..rows.len()).map(place).collect();
                        let gates = match joined {
                            true => {
                                multiply(input, w_x, Some(start), &mut sums);
                                let (shared, own) = sums.as_chunks_mut().0.split_at_mut(half);
                                shared.reverse();
                                let start = Start::Input { gates: [shared, own], places: &places };
                                Gates { start, products: &[(previous, w_h)] }
                            }
                            false => Gates { start: Start::Bias(start), products: &[(input, w_x), (previous, w_h)] },
                        };
                        lstm_step(gates, &mut cell, &mut out, d, cells, clip);
                    }
                    (cell, out)
                };
                let (cell, out) = step(0..w, false);
                let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 2e-6);
                assert!(near(&cell, &expected) && near(&out, &expected_out), "{precision}: {d} cells");
                assert_eq!((cell.clone(), out.clone()), step(0..w, true), "{precision}: {d} cells");
                for row in 0..w {
                    let alone = (cell[row * d..][..d].to_vec(), out[row * d..][..d].to_vec());
                    assert_eq!(step(row..row + 1, row % 2 == 0), alone, "{precision}: {d} cells, row {row}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "shapes of a product with panels")]
    fn rows_and_weights_in_two_formats_are_refused() {
        let float = Weights::new(&matrix(&numbers(4 * 3, 0.7), 4), Precision::F32).unwrap();
        let codes = Weights::new(&matrix(&numbers(4 * 3, 0.7), 4), Precision::Int8).unwrap();
        let mut buffer = codes::Buffer::default();
        multiply(float.left(&numbers(4, 0.3), 4, &mut buffer), codes.panels(), None, &mut [0.0; 3]);
    }
}
