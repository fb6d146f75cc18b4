//! The random choices of a step: which values dropout keeps, and which words are negatives.

use std::{fmt, ops::Range};

use tch::{Device, Kind, Tensor};

use super::{
    random::{Purpose, Random},
    sampler::{LogUniform, Negatives},
};
use crate::model::{DeviceError, Dropout, PackedBatch};

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
    /// Rows of the window of all processes.
    pub(super) rows: Range<usize>,
    pub(super) positions: usize,
    /// Packed row of each token, per direction.
    pub(super) packed: [Vec<i64>; 2],
}

impl<'d> LaneDropout<'d> {
    pub(super) fn new(
        draws: &'d dyn Draws,
        rate: f64,
        rows: Range<usize>,
        positions: usize,
        batch: &PackedBatch,
    ) -> Self {
        Self { draws, rate, rows, positions, packed: [batch.rows(0), batch.rows(1)] }
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
}

impl Dropout for LaneDropout<'_> {
    fn apply(&self, layer: usize, x: Tensor) -> Result<Tensor, DeviceError> {
        if self.rate == 0.0 {
            return Ok(x);
        }
        let [directions, rows, width] = x.size3()?.into();
        let mask = self.mask(layer, rows as usize, width as usize);
        let mask = Tensor::f_from_data_size(&mask, &[directions, rows, width], Kind::Uint8)?;
        Ok(x.f_mul(&factors(&mask, self.rate, x.kind(), x.device())?)?)
    }
}

/// `1 / (1 - rate)` for values that are kept, and 0.
fn factors(mask: &Tensor, rate: f64, kind: Kind, device: Device) -> Result<Tensor, DeviceError> {
    let mut factors = mask.f_to_device(device)?.f_to_kind(kind)?;
    let _ = factors.f_mul_scalar_(1.0 / (1.0 - rate))?;
    Ok(factors)
}

#[cfg(test)]
mod tests {
    use super::*;

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
