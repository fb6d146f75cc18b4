//! The files of `fixtures/golden`, read.

use std::fs;

use elmo::{mix::ScalarMix, options::ModelOptions, spec};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::reference::{
    Layers,
    vectors::{self, Pooling},
};

/// One line of cases.json.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) options: ModelOptions,
    pub(crate) seed: u64,
    pub(crate) scale: f64,
    /// zero, given (made from the seed) or carry.
    pub(crate) state: String,
    pub(crate) boundaries: bool,
    /// `[batch][sentence][word]`.
    pub(crate) batches: Vec<Vec<Vec<String>>>,
    /// How many values of each layer of a batch the file keeps; all if not given.
    pub(crate) probes: Option<usize>,
    /// Largest distance allowed to a float32 engine.
    pub(crate) tolerance: f64,
}

pub(crate) fn cases() -> Vec<Case> {
    list(&json("cases.json")["cases"]).iter().map(case).collect()
}

fn case(value: &Value) -> Case {
    Case {
        name: text(&value["name"]),
        options: options(&value["options"]),
        seed: value["seed"].as_u64().unwrap(),
        scale: value["scale"].as_f64().unwrap(),
        state: text(&value["state"]),
        boundaries: value["boundaries"].as_bool().unwrap(),
        batches: serde_json::from_value(value["batches"].clone()).unwrap(),
        probes: value["probes"].as_u64().map(|n| n as usize),
        tolerance: value["tolerance"].as_f64().unwrap(),
    }
}

/// What is known of one batch.
pub(crate) enum Expected {
    /// `[layer][all tokens * 2P]`.
    All(Layers),
    /// `[layer]`: the values at the places, then mean and mean magnitude of the layer.
    Probes { places: Vec<usize>, layers: Layers },
}

/// values.safetensors.
pub(crate) struct Values(Vec<u8>);

impl Values {
    pub(crate) fn read() -> Self {
        Self(bytes("values.safetensors"))
    }

    /// Batch `i` of a case.
    pub(crate) fn expected(&self, case: &Case, i: usize) -> Expected {
        let name = format!("{}/{i}", case.name);
        let Some(count) = case.probes else { return Expected::All(self.rows(&name)) };
        let tokens: usize = case.batches[i].iter().map(|words| words.len() + 2 * usize::from(case.boundaries)).sum();
        let n = tokens * case.options.width();
        let places = (0..count).map(|k| (7 + 10_007 * k) % n).collect();
        Expected::Probes { places, layers: self.rows(&format!("{name}/probes")) }
    }

    /// A tensor of float64 by its first axis.
    fn rows(&self, name: &str) -> Layers {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap();
        let numbers: Vec<f64> =
            tensor.data().chunks_exact(8).map(|raw| f64::from_le_bytes(raw.try_into().unwrap())).collect();
        let rows = tensor.shape()[0];
        let columns = numbers.len() / rows;
        (0..rows).map(|k| numbers[k * columns..(k + 1) * columns].to_vec()).collect()
    }
}

/// Words and their 50 ids.
pub(crate) fn char_ids() -> Vec<(String, Vec<u16>)> {
    let entry = |entry: &Value| (text(&entry["word"]), serde_json::from_value(entry["ids"].clone()).unwrap());
    list(&json("char_ids.json")["words"]).iter().map(entry).collect()
}

/// vectors.json: one sentence of one model, many ways to make a vector of it.
pub(crate) struct Vectors {
    pub(crate) options: ModelOptions,
    pub(crate) seed: u64,
    pub(crate) scale: f64,
    pub(crate) sentence: Vec<String>,
    pub(crate) vectors: Vec<Wanted>,
}

/// One combination of settings, and its result.
pub(crate) struct Wanted {
    how: Value,
    pub(crate) vector: Vec<f64>,
    /// The same at length 1.
    pub(crate) l2: Vec<f64>,
}

pub(crate) fn vectors() -> Vectors {
    let file = json("vectors.json");
    let wanted = |how: &Value| Wanted { how: how.clone(), vector: numbers(&how["vector"]), l2: numbers(&how["l2"]) };
    Vectors {
        options: options(&file["options"]),
        seed: file["seed"].as_u64().unwrap(),
        scale: file["scale"].as_f64().unwrap(),
        sentence: serde_json::from_value(file["sentence"].clone()).unwrap(),
        vectors: list(&file["vectors"]).iter().map(wanted).collect(),
    }
}

impl Wanted {
    pub(crate) fn choose(&self, layers: &Layers, width: usize) -> Vec<f64> {
        match text(&self.how["layers"]).as_str() {
            "average" => vectors::average(layers),
            "top" => vectors::top(layers),
            "token" => vectors::token(layers),
            "all" => vectors::all(layers, width),
            "mix" => {
                let scalars: Vec<f32> = serde_json::from_value(self.how["scalars"].clone()).unwrap();
                let gamma = self.how["gamma"].as_f64().unwrap() as f32;
                vectors::mix(layers, &scalars, gamma, self.how["layer_norm"].as_bool().unwrap())
            }
            other => panic!("no layers {other}"),
        }
    }

    /// The layers as an engine is asked for them.
    pub(crate) fn layers(&self) -> spec::Layers {
        match text(&self.how["layers"]).as_str() {
            "mix" => spec::Layers::Mix(ScalarMix {
                scalars: serde_json::from_value(self.how["scalars"].clone()).unwrap(),
                gamma: self.how["gamma"].as_f64().unwrap() as f32,
                layer_norm: self.how["layer_norm"].as_bool().unwrap(),
            }),
            word => word.parse().unwrap(),
        }
    }

    pub(crate) fn pooling(&self) -> Pooling {
        match text(&self.how["pooling"]).as_str() {
            "mean" => Pooling::Mean,
            "max" => Pooling::Max,
            "first" => Pooling::First,
            "last" => Pooling::Last,
            "ends" => Pooling::Ends,
            other => panic!("no pooling {other}"),
        }
    }

    pub(crate) fn describe(&self) -> String {
        let part = |key: &str| format!("{key} {}", self.how[key]);
        ["layers", "scalars", "gamma", "layer_norm", "pooling"].map(part).join(", ")
    }
}

fn options(value: &Value) -> ModelOptions {
    ModelOptions::from_json(value.to_string().as_bytes(), "fixture").unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&bytes(name)).unwrap()
}

fn bytes(name: &str) -> Vec<u8> {
    let path = crate::repository().join("tests/fixtures/golden").join(name);
    fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
