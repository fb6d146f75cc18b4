//! The random choices of a step: which values dropout keeps, and which words are negatives.

use std::{cell::OnceCell, fmt, ops::Range};

use tch::{Device, Kind, Tensor};

use super::{
    random::{self, Purpose, Random},
    sampler::{LogUniform, Negatives},
};
use crate::model::{DeviceError, Dropout, DropoutNumbers, DropoutRows, PackedBatch, tensors};

/// A place where dropout applies: a row of a window after a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// 0 is the token layer.
    pub layer: usize,
    /// 0 is forward.
    pub direction: usize,
    /// Row of the window of all processes.
    pub row: usize,
}

/// The random choices of one step. All are functions of the step, so that no thread waits for another one.
pub trait Draws: fmt::Debug + Send + Sync {
    /// Sets each value of `keep` (positions x width) to 1 if dropout keeps it and to 0 if not.
    fn keep(&self, place: Place, keep: &mut [u8]);

    /// The numbers by which [`Draws::keep`] chooses after a layer, so that a GPU can draw them itself; `None` if it cannot.
    fn on_device(&self, _layer: usize) -> Option<DropoutNumbers> {
        None
    }

    /// Distinct negatives of a direction from a vocabulary of so many words, for the rows of a replica.
    fn negatives(&self, direction: usize, words: usize, samples: usize, replica: usize) -> Negatives;
}

/// Draws of a run: functions of its seed.
#[derive(Debug, Clone, Copy)]
pub(super) struct SeededDraws {
    pub(super) seed: u64,
    pub(super) step: u32,
    pub(super) rate: f64,
}

impl Draws for SeededDraws {
    fn keep(&self, Place { layer, direction, row }: Place, keep: &mut [u8]) {
        let purpose = Purpose::Dropout { layer: layer as u8, direction: direction as u8 };
        Random::new(self.seed, purpose, self.step, 0, row as u32).drop_values(self.rate, 1, keep);
    }

    fn on_device(&self, layer: usize) -> Option<DropoutNumbers> {
        Some(random::dropout_numbers(self.seed, self.step, layer as u8, self.rate))
    }

    fn negatives(&self, direction: usize, words: usize, samples: usize, replica: usize) -> Negatives {
        let purpose = Purpose::Negatives(direction as u8);
        let mut random = Random::new(self.seed, purpose, self.step, replica as u16, 0);
        LogUniform::new(words).distinct(samples, &mut random)
    }
}

/// Inverted dropout of the rows of a lane.
pub(super) struct LaneDropout<'d> {
    pub(super) draws: &'d dyn Draws,
    pub(super) rate: f64,
    /// Rows of this lane, numbered over the window of all processes.
    pub(super) rows: Range<usize>,
    pub(super) positions: usize,
    /// Packed row of each token, per direction.
    pub(super) packed: [Vec<i64>; 2],
    /// The same on the device that draws.
    on_device: OnceCell<DropoutRows>,
}

impl<'d> LaneDropout<'d> {
    pub(super) fn new(
        draws: &'d dyn Draws,
        rate: f64,
        rows: Range<usize>,
        positions: usize,
        batch: &PackedBatch,
    ) -> Self {
        Self { draws, rate, rows, positions, packed: [batch.rows(0), batch.rows(1)], on_device: OnceCell::new() }
    }

    /// Which values to keep, `[2, R, P]`. Rows that nothing reads are dropped.
    fn mask(&self, layer: usize, packed_rows: usize, width: usize) -> Vec<u8> {
        let mut mask = vec![0; 2 * packed_rows * width];
        let mut keep = vec![0; self.positions * width];
        for (direction, packed) in self.packed.iter().enumerate() {
            for (row, places) in self.rows.clone().zip(packed.chunks(self.positions)) {
                self.draws.keep(Place { layer, direction, row }, &mut keep);
                for (&place, keep) in places.iter().zip(keep.chunks(width)) {
                    let first = (direction * packed_rows + place as usize) * width;
                    mask[first..first + width].copy_from_slice(keep);
                }
            }
        }
        mask
    }

    /// `kept` for values that are kept, and 0.
    fn factors_of_host(&self, layer: usize, x: &Tensor, kept: f64) -> Result<Tensor, DeviceError> {
        let [directions, rows, width] = x.size3()?.into();
        let mask = self.mask(layer, rows as usize, width as usize);
        let mask = Tensor::f_from_data_size(&mask, &[directions, rows, width], Kind::Uint8)?;
        let mut factors = tensors::uploaded(&mask, x.device())?.f_to_kind(x.kind())?;
        let _ = factors.f_mul_scalar_(kept)?;
        Ok(factors)
    }

    /// What a device needs to draw for itself.
    fn rows_on(&self, device: Device) -> Result<&DropoutRows, DeviceError> {
        if let Some(rows) = self.on_device.get() {
            return Ok(rows);
        }
        let tokens = self.packed[0].len() as i64;
        let packed = tensors::index(&self.packed.concat(), device)?.f_view([2, tokens])?;
        let rows = DropoutRows { packed, positions: self.positions, first: self.rows.start as u32 };
        Ok(self.on_device.get_or_init(|| rows))
    }
}

impl Dropout for LaneDropout<'_> {
    fn apply(&self, layer: usize, x: Tensor) -> Result<Tensor, DeviceError> {
        if self.rate == 0.0 {
            return Ok(x);
        }
        let kept = 1.0 / (1.0 - self.rate);
        let drawn = match self.draws.on_device(layer) {
            Some(numbers) if x.device() != Device::Cpu => self.rows_on(x.device())?.factors(&x, kept, numbers)?,
            _ => None,
        };
        let factors = match drawn {
            Some(factors) => factors,
            None => self.factors_of_host(layer, &x, kept)?,
        };
        Ok(x.f_mul(&factors)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::DropoutRows;

    /// The code of the kernels against that of the CPU, with every bit: widths that are multiples of four and others, rows of a window that
    /// do not begin at 0, and few rows, of which a batch adds some that nothing reads.
    #[test]
    fn a_gpu_draws_the_same_numbers() {
        for (rows, positions, width) in [(3..20, 5, 8), (1..4, 3, 6), (40..57, 1, 1), (0..16, 7, 12)] {
            let sequences: Vec<Vec<i64>> = rows.clone().map(|_| vec![0; positions]).collect();
            let batch = PackedBatch::of_directions([&sequences, &sequences]).unwrap();
            let draws = SeededDraws { seed: 0x1234_5678_9abc_def0, step: 11, rate: 0.1 };
            let dropout = LaneDropout::new(&draws, draws.rate, rows, positions, &batch);
            for (layer, kind) in [(0, Kind::Float), (2, Kind::BFloat16)] {
                let x = Tensor::ones([2, batch.packed_rows() as i64, width], (kind, Device::Cpu));
                let kept = 1.0 / (1.0 - draws.rate);
                let expected = dropout.factors_of_host(layer, &x, kept).unwrap();
                let numbers = draws.on_device(layer).unwrap();
                let found: &DropoutRows = dropout.rows_on(Device::Cpu).unwrap();
                assert_eq!(found.factors_on_host(&x, kept, numbers).unwrap(), expected);
                assert!(f64::try_from(expected.sum(Kind::Float)).unwrap() > 0.0);
            }
        }
    }

    /// Every difference in step, direction or replica makes another draw; the same arguments repeat it.
    #[test]
    fn every_replica_has_negatives_of_its_own() {
        let drawn =
            |step, direction, replica| SeededDraws { seed: 7, step, rate: 0.0 }.negatives(direction, 1000, 50, replica);
        let mut all = Vec::new();
        for (step, direction) in [(1, 0), (1, 1), (2, 0)] {
            (0..3).for_each(|replica| all.push(drawn(step, direction, replica)));
        }
        for (one, first) in all.iter().enumerate() {
            assert!(all[one + 1..].iter().all(|other| other.ids != first.ids));
        }
        assert_eq!(all[2], drawn(1, 0, 2));
    }
}
