//! The fixtures of `tests/fixtures/train`; its README describes them.

use std::{collections::BTreeMap, sync::Arc};

use elmo::{
    model::Precision,
    options::ModelOptions,
    train::{
        Classes, Draws, LanguageModel, Negatives, Optimizer, Place, Recipe, Resources, Schedule, Stream, Trainer,
        Window, Words,
    },
};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::{
    reference::seeded::{seeded_softmax, seeded_weights},
    repository,
};

pub(crate) const STEPS: usize = 50;
pub(crate) const ROWS: usize = 4;
pub(crate) const POSITIONS: usize = 5;

/// The numbers of a safetensors file by name, whatever their type.
pub(crate) type Numbers = BTreeMap<String, Vec<f64>>;

pub(crate) fn json(name: &str) -> Value {
    let path = repository().join("tests/fixtures/train").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub(crate) fn numbers(name: &str) -> Numbers {
    let bytes = std::fs::read(repository().join("tests/fixtures/train").join(name)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let values = |dtype: Dtype, data: &[u8]| -> Vec<f64> {
        match dtype {
            Dtype::F64 => data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            Dtype::I64 => data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            Dtype::U8 => data.iter().map(|&b| f64::from(b)).collect(),
            other => panic!("{other:?}"),
        }
    };
    file.tensors().into_iter().map(|(name, view)| (name, values(view.dtype(), view.data()))).collect()
}

pub(crate) fn strings(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// The windows of all steps.
pub(crate) fn windows() -> Vec<Window> {
    let words: Words = strings(&json("text.json")["words"]).iter().map(String::as_str).collect();
    let all = numbers("windows.safetensors");
    let cells = ROWS * POSITIONS;
    let part = |name: &str, step: usize, direction: usize| -> Vec<u32> {
        let first = (2 * step + direction) * cells;
        all[name][first..first + cells].iter().map(|&n| n as u32).collect()
    };
    let stream =
        |step, direction| Stream { inputs: part("inputs", step, direction), targets: part("targets", step, direction) };
    (0..STEPS).map(|step| Window::of_streams(words.clone(), [stream(step, 0), stream(step, 1)], ROWS)).collect()
}

/// A case of the fixtures.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) json: Value,
    pub(crate) options: ModelOptions,
    given: Arc<Numbers>,
}

/// All cases.
pub(crate) fn cases() -> Vec<Case> {
    let given = Arc::new(numbers("given.safetensors"));
    let case = |json: &Value| Case {
        name: json["name"].as_str().unwrap().to_owned(),
        options: ModelOptions::from_json(json["options"].to_string().as_bytes(), "case").unwrap(),
        json: json.clone(),
        given: Arc::clone(&given),
    };
    let file = json("cases.json");
    file["cases"].as_array().unwrap().iter().map(case).collect()
}

impl Case {
    fn number(&self, pointer: &str) -> f64 {
        self.json.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{}: {pointer}", self.name))
    }

    fn replicas(&self) -> Option<usize> {
        Some(self.json.get("replicas")?.as_u64().unwrap() as usize)
    }

    pub(crate) fn words(&self) -> usize {
        self.number("/options/n_tokens_vocab") as usize
    }

    pub(crate) fn model(&self) -> LanguageModel {
        model(&self.options, self.words(), self.number("/seed") as u64, self.number("/scale"))
    }

    pub(crate) fn recipe(&self, precision: Precision, lanes: usize) -> Recipe {
        let optimizer = match self.json["optimizer"]["name"].as_str().unwrap() {
            "adagrad" => Optimizer::Adagrad { initial_accumulator: self.number("/optimizer/initial_accumulator") },
            "adamw" => Optimizer::AdamW {
                beta1: self.number("/optimizer/beta1"),
                beta2: self.number("/optimizer/beta2"),
                epsilon: self.number("/optimizer/epsilon"),
                weight_decay: self.number("/optimizer/weight_decay"),
            },
            other => panic!("{other}"),
        };
        let sampled = self.json["options"]["sample_softmax"].as_bool().unwrap();
        Recipe {
            rows: ROWS,
            replica_rows: self.replicas().map(|replicas| ROWS / replicas),
            positions: POSITIONS,
            dropout: self.number("/options/dropout"),
            classes: match sampled {
                true => Classes::Sampled(self.number("/options/n_negative_samples_batch") as usize),
                false => Classes::Full,
            },
            gradient_scale: self.number("/gradient_scale"),
            clip_norm: Some(self.number("/options/all_clip_norm_val")),
            optimizer,
            learning_rate: self.number("/options/learning_rate"),
            schedule: schedule(&self.json["schedule"]),
            precision,
            lanes,
            ..Recipe::bilm()
        }
    }

    pub(crate) fn trainer(&self, precision: Precision, lanes: usize, threads: usize) -> Trainer {
        let resources = Resources { threads, ..Resources::default() };
        Trainer::new(&self.options, self.recipe(precision, lanes), resources, &self.model()).unwrap()
    }

    /// The choices of a step, from 0.
    pub(crate) fn draws(&self, step: usize) -> Arc<dyn Draws> {
        Arc::new(Given {
            case: self.name.clone(),
            numbers: Arc::clone(&self.given),
            step,
            layers: self.options.n_layers_out(),
            has_replicas: self.replicas().is_some(),
        })
    }
}

/// A model of seeded numbers.
pub(crate) fn model(options: &ModelOptions, words: usize, seed: u64, scale: f64) -> LanguageModel {
    let (softmax_weight, softmax_bias) = seeded_softmax(words, options.lstm.projection_dim, seed, scale);
    LanguageModel { weights: seeded_weights(options, seed, scale), softmax_weight, softmax_bias }
}

pub(crate) fn schedule(json: &Value) -> Schedule {
    let number = |name: &str| json[name].as_u64().unwrap();
    match json["name"].as_str().unwrap() {
        "constant" => Schedule::Constant,
        "cosine" => Schedule::Cosine {
            warm_up: number("warmup_steps"),
            total: number("total_steps"),
            final_ratio: json["final_ratio"].as_f64().unwrap(),
        },
        "inverse_sqrt" => Schedule::InverseSquareRoot { warm_up: number("warmup_steps") },
        other => panic!("{other}"),
    }
}

/// The choices that `given.safetensors` has for a step.
#[derive(Debug)]
struct Given {
    case: String,
    numbers: Arc<Numbers>,
    step: usize,
    layers: usize,
    has_replicas: bool,
}

impl Given {
    /// Part `index` of `parts` equal parts.
    fn part(&self, what: &str, index: usize, parts: usize) -> &[f64] {
        let all = &self.numbers[&format!("{}/{what}", self.case)];
        let n = all.len() / parts;
        &all[index * n..(index + 1) * n]
    }
}

impl Draws for Given {
    fn keep(&self, Place { layer, direction, row }: Place, keep: &mut [u8]) {
        // [S, 2, L + 1, R, T, P]
        let index = ((2 * self.step + direction) * self.layers + layer) * ROWS + row;
        let given = self.part("dropout", index, STEPS * 2 * self.layers * ROWS);
        assert_eq!(given.len(), keep.len());
        keep.iter_mut().zip(given).for_each(|(keep, &given)| *keep = given as u8);
    }

    fn negatives(&self, direction: usize, words: usize, samples: usize, replica: usize) -> Negatives {
        let index = 2 * self.step + direction;
        assert!(self.has_replicas || replica == 0);
        let folder = if self.has_replicas { format!("replica{replica}/") } else { String::new() };
        let given = |what: &str| self.part(&format!("{folder}{what}"), index, 2 * STEPS);
        let ids: Vec<i64> = given("negatives").iter().map(|&id| id as i64).collect();
        assert!(ids.len() == samples && ids.iter().all(|&id| (id as usize) < words));
        Negatives { ids, tries: given("num_tries")[0] as u64 }
    }
}
