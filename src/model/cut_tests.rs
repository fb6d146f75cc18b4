//! Finite differences notice every cut of the graph: each tensor that a model derives from its parameters, each output of a layer
//! and each state between two windows is detached once, and then the gradient of some parameter is wrong.

use std::cell::Cell;

use tch::{Kind, Tensor};

use super::*;
use crate::{model::start_state::LayerState, tiny};

/// Step of central differences, and how far they may be from the gradient, as in `tests/gradients.rs`.
const STEP: f64 = 1e-6;
const TOLERANCE: f64 = 1e-7;

const WORDS: [&str; 4] = ["a", "bank", "über", "</S>"];

/// Where the graph is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Site {
    /// A tensor derived from parameters, by its number in [`BiLm::map`].
    Derived(usize),
    /// The output of a layer in one direction.
    Output { layer: usize, direction: i64 },
    /// The outputs or the cells of a layer that the second window begins with.
    State { layer: usize, is_cells: bool },
}

struct Knife(Option<Site>);

impl Dropout for Knife {
    fn apply(&self, layer: usize, x: Tensor) -> Result<Tensor, DeviceError> {
        match self.0 {
            Some(Site::Output { layer: cut, direction }) if cut == layer => {
                let part = |d: i64| -> Result<Tensor, DeviceError> {
                    let part = x.f_select(0, d)?;
                    Ok(if d == direction { part.f_detach()? } else { part })
                };
                Ok(Tensor::f_stack(&[part(0)?, part(1)?], 0)?)
            }
            _ => Ok(x),
        }
    }
}

/// Two layers with a skip connection, highways, both projections, and clips that some values reach.
fn options() -> ModelOptions {
    let json = serde_json::json!({
        "lstm": {"use_skip_connections": true, "projection_dim": 5, "dim": 7, "n_layers": 2, "cell_clip": 0.6, "proj_clip": 0.4},
        "char_cnn": {"activation": "tanh", "n_highway": 2, "filters": [[1, 4], [2, 3]], "embedding": {"dim": 3},
            "n_characters": 262, "max_characters_per_token": 12},
    });
    ModelOptions::from_json(json.to_string().as_bytes(), "case").unwrap()
}

/// Numbers in `-1..1` without a pattern.
fn wave(n: usize, seed: f64) -> Tensor {
    (Tensor::arange(n as i64, (Kind::Double, tch::Device::Cpu)) * 12.9898 + seed).sin() * 0.999
}

fn weighted(t: &Tensor, seed: f64) -> Tensor {
    (t * wave(t.numel(), seed).view(t.size().as_slice())).sum(Kind::Double)
}

/// A number that depends on every output of two windows, the second of which begins where the first ends.
fn loss(options: &ModelOptions, parameters: &Parameters, cut: Option<Site>) -> Tensor {
    let number = Cell::new(0);
    let derived = BiLm::from_parameters(options, parameters, Precision::F64).unwrap();
    let model = derived.map::<DeviceError>(&mut |tensor| {
        let this = number.replace(number.get() + 1);
        Ok(if cut == Some(Site::Derived(this)) { tensor.f_detach()? } else { tensor.shallow_clone() })
    });
    let model = model.unwrap();
    let table = model.token_table(&WORDS).unwrap();
    let rows = [vec![vec![0, 1, 2], vec![3, 2]], vec![vec![2, 0, 3], vec![1, 1]]];
    let batch = PackedBatch::of_directions([&rows[0], &rows[1]]).unwrap();
    let mut state = model.zero_state().unwrap();
    let mut sum = Tensor::from(0.0);
    for window in 0..2 {
        let found = model.forward(&table, &batch, &state, &Knife(cut), true).unwrap();
        for (layer, direction) in (0..found.n_layers()).flat_map(|layer| [(layer, 0), (layer, 1)]) {
            sum += weighted(&found.tokens(layer, direction).unwrap(), (window * 8 + 2 * layer + direction) as f64);
        }
        state = carried(&found.into_last().unwrap().unwrap(), cut);
    }
    sum
}

fn carried(state: &StartState, cut: Option<Site>) -> StartState {
    let of_layer = |(layer, state): (usize, &LayerState)| {
        let part = |t: &Tensor, is_cells: bool| match cut == Some(Site::State { layer, is_cells }) {
            true => t.detach(),
            false => t.shallow_clone(),
        };
        LayerState { h: part(&state.h, false), c: part(&state.c, true) }
    };
    StartState::per_sentence(state.layers().iter().enumerate().map(of_layer).collect())
}

/// Parameters whose gradient is not that of finite differences, along a direction that changes all its numbers.
fn wrong(options: &ModelOptions, parameters: &Parameters, cut: Option<Site>) -> Vec<String> {
    let tensors: Vec<&Tensor> = parameters.iter().map(|(_, tensor)| tensor).collect();
    let gradients = Tensor::run_backward(&[loss(options, parameters, cut)], &tensors, false, false);
    let differs = |((name, tensor), gradient): ((&str, &Tensor), &Tensor)| {
        let direction = wave(tensor.numel(), 0.1).view(tensor.size().as_slice());
        let moved = |by: f64| -> f64 {
            let _no_gradients = tch::no_grad_guard();
            let _ = tensor.shallow_clone().g_add_(&(&direction * by));
            let loss = f64::try_from(loss(options, parameters, cut)).unwrap();
            let _ = tensor.shallow_clone().g_sub_(&(&direction * by));
            loss
        };
        let difference = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
        // Nothing depends on the parameter: libtorch has no gradient.
        let derivative = match gradient.defined() {
            true => f64::try_from((gradient * &direction).sum(Kind::Double)).unwrap(),
            false => 0.0,
        };
        let is_wrong = (difference - derivative).abs() > TOLERANCE * (1.0 + derivative.abs());
        is_wrong.then(|| name.to_owned())
    };
    parameters.iter().zip(&gradients).filter_map(differs).collect()
}

#[test]
fn finite_differences_notice_every_cut_of_the_graph() {
    let options = options();
    let parameters = Parameters::new(&options, &tiny::weights(&options), DeviceName::Cpu, Precision::F64).unwrap();
    let parameters = parameters.require_gradients().unwrap();
    assert_eq!(wrong(&options, &parameters, None), Vec::<String>::new(), "nothing is cut");
    let derived = Cell::new(0);
    BiLm::from_parameters(&options, &parameters, Precision::F64)
        .unwrap()
        .map::<DeviceError>(&mut |tensor| {
            derived.set(derived.get() + 1);
            Ok(tensor.shallow_clone())
        })
        .unwrap();
    // A character table, weight and bias of two filters, two highways and the projection, and four tensors of each layer.
    assert_eq!(derived.get(), 1 + 2 * 5 + 2 * 4);
    let mut sites: Vec<Site> = (0..derived.get()).map(Site::Derived).collect();
    sites.extend((0..=2).flat_map(|layer| [0, 1].map(|direction| Site::Output { layer, direction })));
    sites.extend((0..2).flat_map(|layer| [false, true].map(|is_cells| Site::State { layer, is_cells })));
    for site in sites {
        assert!(!wrong(&options, &parameters, Some(site)).is_empty(), "{site:?} is cut, and nothing shows it");
    }
}
