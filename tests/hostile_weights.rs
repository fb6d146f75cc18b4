//! Untrusted weights and options: written by other libraries, broken, or malicious.
//!
//! `fixtures/hdf5` was written by h5py (the C library); `reference/make_hdf5_fixtures.py` made it and
//! says by which formula the expected values are.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{collections::BTreeMap, fs, path::PathBuf};

use elmo::{
    fingerprint::Fingerprint,
    options::ModelOptions,
    weights::{self, FileKind, Loaded, Weights, WeightsError, What, hdf5, safetensors},
};

fn fixture(name: &str) -> PathBuf {
    crate::repository().join("tests/fixtures/hdf5").join(name)
}

fn options() -> ModelOptions {
    ModelOptions::from_json(&fs::read(fixture("options.json")).unwrap(), "options.json").unwrap()
}

fn load(name: &str) -> Result<Loaded, WeightsError> {
    weights::load(&fixture(name), &options().weight_plan())
}

/// The formula of the script.
fn expected() -> Weights {
    let mut weights = Weights::default();
    for spec in options().weight_plan() {
        let value = |k: usize| ((37 * k + 11 * spec.name.len()) % 101) as f32 - 50.0;
        let data = (0..spec.len()).map(|k| value(k) / 64.0).collect();
        weights.insert(spec.name, weights::Tensor { shape: spec.shape, data });
    }
    weights
}

fn bits(weights: &Weights) -> Vec<(&str, &[usize], Vec<u32>)> {
    weights.iter().map(|(n, t)| (n, t.shape.as_slice(), t.data.iter().map(|v| v.to_bits()).collect())).collect()
}

fn problems(name: &str) -> BTreeMap<String, What> {
    match load(name) {
        Err(WeightsError::Tensors { problems, .. }) => problems.into_iter().map(|p| (p.name, p.what)).collect(),
        Err(other) => panic!("{name}: {other}"),
        Ok(_) => panic!("{name} was read"),
    }
}

fn only_problem(name: &str) -> What {
    let problems = problems(name);
    assert_eq!(problems.len(), 1, "{name}: {problems:?}");
    problems.into_values().next().unwrap()
}

#[test]
fn files_of_h5py_are_read_to_the_bit() {
    let expected = expected();
    for name in [
        "default",
        "latest",
        "gzip",
        "gzip_v114",
        "lzf",
        "chunked_v114",
        "f64",
        "f16",
        "f16_big_endian",
        "big_endian",
        "compact",
        "surplus",
    ] {
        let loaded = load(&format!("{name}.hdf5")).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(bits(&loaded.weights), bits(&expected), "{name}");
        assert_eq!(loaded.converted.len(), if name.starts_with("f") { expected.len() } else { 0 }, "{name}");
        let bytes = fs::read(fixture(&format!("{name}.hdf5"))).unwrap();
        assert_eq!(hdf5::read(&bytes, &fixture(name), &options().weight_plan()).unwrap(), loaded, "{name}");
    }
}

#[test]
fn surplus_datasets_are_listed_and_harmless() {
    let loaded = load("surplus.hdf5").unwrap();
    assert_eq!(loaded.surplus, ["CNN/extra", "softmax/"]);
    assert_eq!(loaded.notes(), ["2 names in the weights are not used: CNN/extra, softmax/"]);
    assert!(load("default.hdf5").unwrap().notes().is_empty());
}

#[test]
fn what_leads_out_of_the_file_is_refused_by_its_name() {
    let bias = "CNN/b_cnn_0";
    let refused = |file: &str| {
        let what = only_problem(file);
        (problems(file).into_keys().next().unwrap(), what)
    };
    assert_eq!(refused("external_storage_refused.hdf5"), (bias.to_owned(), What::ExternalStorage));
    assert_eq!(refused("virtual_refused.hdf5"), (bias.to_owned(), What::Virtual));
    let file_link = What::Link("a link into another file");
    assert_eq!(refused("external_link_refused.hdf5"), (bias.to_owned(), file_link.clone()));
    let group = problems("external_group_refused.hdf5");
    assert_eq!(group.len(), 4);
    assert!(group.iter().all(|(name, what)| name.starts_with("CNN/") && *what == file_link), "{group:?}");
    let soft = What::Link("a soft link");
    assert_eq!(refused("soft_link_refused.hdf5"), (bias.to_owned(), soft.clone()));
    assert_eq!(refused("soft_link_latest_refused.hdf5"), (bias.to_owned(), soft));
}

#[test]
fn other_refusals_name_their_reason() {
    let filter = only_problem("filter_refused.hdf5").to_string();
    assert!(filter.starts_with("uses the HDF5 filter scaleoffset"), "{filter}");
    let new = problems("chunks_of_hdf5_2_refused.hdf5")["char_embed"].to_string();
    assert!(new.contains("libver"), "{new}");
    assert_eq!(
        problems("unwritten_refused.hdf5").into_values().collect::<Vec<_>>(),
        [What::Unwritten, What::Unwritten]
    );
    let bomb = problems("size_bomb_refused.hdf5");
    assert_eq!(bomb["char_embed"], What::Shape { expected: vec![261, 2], found: vec![1 << 36] });
    assert_eq!(bomb["CNN/b_cnn_0"], What::Shape { expected: vec![2], found: vec![1 << 40, 1 << 20] });
    assert!(matches!(only_problem("chunk_bomb_refused.hdf5"), What::Chunk { .. }));
    let nan = load("not_finite_refused.hdf5").unwrap_err().to_string();
    assert!(nan.contains("`RNN_0/RNN/MultiRNNCell/Cell0/LSTMCell/W_0` holds NaN at [2, 5]"), "{nan}");
    let overflow = load("overflow_refused.hdf5").unwrap_err().to_string();
    assert!(overflow.contains("`CNN/b_cnn_0` holds inf at [1]"), "{overflow}");
}

#[test]
fn everything_that_is_wrong_is_reported_together() {
    let error = load("wrong_refused.hdf5").unwrap_err().to_string();
    for part in [
        "4 of the tensors",
        "`char_embed` has shape [260, 2] instead of [261, 2]",
        "`CNN/b_cnn_0` is not a dataset",
        "`CNN/b_cnn_1` is missing",
        "`CNN_proj/W_proj` has type i32 instead of float32",
        "are these options and weights of the same model?",
    ] {
        assert!(error.contains(part), "no {part:?} in {error}");
    }
}

#[test]
fn structures_that_refer_to_themselves_end_quickly() {
    for (file, reason) in [("tree_bomb_refused.hdf5", "refers to itself"), ("name_bomb_refused.hdf5", "127 bytes")] {
        let error = load(file).unwrap_err().to_string();
        assert!(error.contains(reason), "{file}: {error}");
    }
}

#[test]
fn other_kinds_of_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights.hdf5");
    for (bytes, kind, word) in [
        (&b"\n <?xml version=\"1.0\"?><Error><Code>NoSuchKey"[..], FileKind::Markup, "error page"),
        (b"<!DOCTYPE html>", FileKind::Markup, "error page"),
        (b"PK\x03\x04 rest", FileKind::Zip, "unpack"),
        (b"\x1f\x8b\x08", FileKind::Gzip, "unpack"),
        (b"\x80\x02\x8a\x0a", FileKind::Pickle, "never read"),
        (b"version https://git-lfs.github.com/spec/v1\noid", FileKind::LfsPointer, "git lfs pull"),
        (b"{\"lstm\": {}}", FileKind::Json, "exchanged"),
        (b"", FileKind::Empty, "again"),
        (b"\0\0\0\0", FileKind::Unknown, "bilm-tf"),
    ] {
        fs::write(&path, bytes).unwrap();
        match weights::read(&path, &[]) {
            Err(e @ WeightsError::NotWeights { kind: found, .. }) => {
                assert_eq!(found, kind);
                assert!(e.to_string().contains(word), "{e}");
            }
            other => panic!("{kind}: {other:?}"),
        }
    }
}

#[test]
fn both_formats_give_back_the_same_bits_and_the_same_fingerprint() {
    let (options, weights) = (options(), odd_values());
    let plan = options.weight_plan();
    let here = PathBuf::from("written");
    let metadata = BTreeMap::from([("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2\u{e9}".to_owned())]);

    let h5 = hdf5::write(&weights).unwrap();
    assert_eq!(h5, hdf5::write(&weights).unwrap());
    let from_h5 = hdf5::read(&h5, &here, &plan).unwrap();
    let st = safetensors::write(&weights, &metadata).unwrap();
    assert_eq!(st, safetensors::write(&weights, &metadata).unwrap());
    let from_st = safetensors::read(&st, &here, &plan).unwrap();

    assert_eq!(bits(&from_h5.weights), bits(&weights));
    assert_eq!(bits(&from_st.weights), bits(&weights));
    assert_eq!(from_st.metadata, metadata);
    // The `safetensors` crate itself accepts what was written without it.
    let parsed = ::safetensors::SafeTensors::deserialize(&st).unwrap();
    assert_eq!(parsed.len(), weights.len());
    let fingerprint = Fingerprint::of(&options, &weights);
    assert_eq!(Fingerprint::of(&options, &from_h5.weights), fingerprint);
    assert_eq!(Fingerprint::of(&options, &from_st.weights), fingerprint);
}

/// Values that a careless conversion would change: -0, subnormals, the extremes.
fn odd_values() -> Weights {
    let odd = [-0.0, f32::MIN_POSITIVE / 2.0, f32::from_bits(1), f32::MAX, f32::MIN, 0.1];
    let mut weights = Weights::default();
    for (name, tensor) in expected().iter() {
        let mut tensor = tensor.clone();
        for (value, &odd) in tensor.data.iter_mut().zip(&odd) {
            *value = odd;
        }
        weights.insert(name.to_owned(), tensor);
    }
    weights
}

#[test]
fn the_fingerprint_notices_every_change_that_matters() {
    let (options, weights) = (options(), expected());
    let fingerprint = Fingerprint::of(&options, &weights);
    let mut other = weights.clone();
    let mut tensor = other.get("CNN_proj/b_proj").unwrap().clone();
    tensor.data[0] = f32::from_bits(tensor.data[0].to_bits() ^ 1);
    other.insert("CNN_proj/b_proj".to_owned(), tensor);
    assert_ne!(Fingerprint::of(&options, &other), fingerprint);
    let mut clipless = options.clone();
    clipless.lstm.cell_clip = None;
    assert_ne!(Fingerprint::of(&clipless, &weights), fingerprint);
    let mut same = options.clone();
    same.char_cnn.n_characters = None;
    let mut more = weights.clone();
    more.insert("softmax/W".to_owned(), weights.get("char_embed").unwrap().clone());
    assert_eq!(Fingerprint::of(&same, &more), fingerprint);
}

#[test]
fn safetensors_of_other_types_and_broken_headers() {
    let plan = options().weight_plan();
    let here = PathBuf::from("x.safetensors");
    let st = |metadata: &BTreeMap<String, String>| safetensors::write(&expected(), metadata).unwrap();
    let good = st(&BTreeMap::new());
    let edited = |from: &str, to: &str| {
        let at = good.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        [&good[..at], to.as_bytes(), &good[at + from.len()..]].concat()
    };
    let error = |bytes: &[u8]| safetensors::read(bytes, &here, &plan).unwrap_err().to_string();
    // Same length: only the words change.
    assert!(
        error(&edited("\"CNN/b_cnn_0\":{\"dtype\":\"F32\"", "\"CNN/b_cnn_0\":{\"dtype\":\"I32\""))
            .contains("has type I32")
    );
    assert!(error(&edited("CNN/b_cnn_0", "CNN/b_cnn_9")).contains("`CNN/b_cnn_0` is missing"));
    assert!(error(&good[..good.len() - 1]).contains("the header describes"));
    assert!(error(&[&good[..], b"x"].concat()).contains("the header describes"));
    assert!(error(&[&(1u64 << 40).to_le_bytes()[..], &good[8..]].concat()).contains("a header of 1099511627776 bytes"));
    assert!(error(b"\x02\0\0\0\0\0\0\0{]").contains("the header:"));
    assert!(error(b"\x02\0\0").contains("no header"));
    // A message quotes the file, but neither a megabyte of it nor terminal escapes.
    let rude = format!("{{\"t\":{{\"dtype\":\"\\u001b[2J{}\"}}}}", "x".repeat(1 << 20));
    let rude = error(&[&(rude.len() as u64).to_le_bytes()[..], rude.as_bytes()].concat());
    assert!(rude.len() < 600 && !rude.contains('\u{1b}'), "{}", rude.len());
}

#[test]
fn half_precision_safetensors_are_widened_exactly() {
    // By hand: 1.5 is 3E00 in float16 and 3FC0 in bfloat16; -2 is C000 in both.
    let plan = [elmo::options::TensorSpec { name: "t".to_owned(), shape: vec![2] }];
    for (dtype, one_and_a_half) in [("F16", [0x00, 0x3e]), ("BF16", [0xc0, 0x3f])] {
        let header = format!("{{\"t\":{{\"dtype\":\"{dtype}\",\"shape\":[2],\"data_offsets\":[0,4]}}}}");
        let bytes =
            [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &one_and_a_half, &[0x00, 0xc0]].concat();
        let loaded = safetensors::read(&bytes, &PathBuf::from("t"), &plan).unwrap();
        assert_eq!(loaded.weights.get("t").unwrap().data, [1.5, -2.0]);
        assert_eq!(loaded.converted.len(), 1);
    }
}

#[test]
fn names_of_a_one_layer_dump_are_not_guessed() {
    let mut options = options();
    options.lstm.n_layers = 1;
    let mut dumped = Weights::default();
    for (name, tensor) in expected().iter().filter(|(n, _)| !n.contains("Cell1")) {
        dumped.insert(name.replace("MultiRNNCell/Cell0/", ""), tensor.clone());
    }
    let bytes = hdf5::write(&dumped).unwrap();
    let error = hdf5::read(&bytes, &PathBuf::from("w"), &options.weight_plan()).unwrap_err().to_string();
    assert!(error.contains("`RNN_0/RNN/MultiRNNCell/Cell0/LSTMCell/W_0` is missing"), "{error}");
}

// Mutations. Required: no panic, no abort, no hang; the result is an error or some values.

/// xorshift64*: integers only.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }
}

/// One to three of: a flipped bit, another byte, eight bytes of a size that hurts, a cut, a moved block.
fn mutate(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..=random.below(3) {
        let at = random.below(out.len());
        match random.below(6) {
            0 => out[at] ^= 1 << random.below(8),
            1 => out[at] = random.next() as u8,
            2 | 3 => {
                let sizes =
                    [0, 1, 0xff, 0xffff, u64::from(u32::MAX), 1 << 36, 1 << 40, u64::MAX >> 1, u64::MAX, at as u64];
                let size = sizes[random.below(sizes.len())].to_le_bytes();
                let n = size.len().min(out.len() - at);
                out[at..at + n].copy_from_slice(&size[..n]);
            }
            4 => out.truncate(at.max(1)),
            _ => {
                let from = random.below(out.len());
                let n = random.below(64).min(out.len() - from.max(at));
                out.copy_within(from..from + n, at);
            }
        }
    }
    out
}

/// How many mutations of each file: few in the suite, `ELMO_MUTATIONS=2000` by hand.
fn mutations(usual: usize) -> usize {
    std::env::var("ELMO_MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

#[test]
fn mutated_hdf5_is_an_error_or_values() {
    let plan = options().weight_plan();
    for (seed, name) in ["default", "latest", "gzip", "gzip_v114", "chunked_v114", "compact"].iter().enumerate() {
        let bytes = fs::read(fixture(&format!("{name}.hdf5"))).unwrap();
        let mut random = Random(seed as u64 + 1);
        for _ in 0..mutations(250) {
            if let Ok(loaded) = hdf5::read(&mutate(&bytes, &mut random), &fixture(name), &plan) {
                loaded.weights.check(&plan, &fixture(name)).unwrap();
            }
        }
    }
}

#[test]
fn mutated_safetensors_is_an_error_or_values() {
    let plan = options().weight_plan();
    let bytes = safetensors::write(&expected(), &BTreeMap::new()).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut random = Random(11);
    for i in 0..mutations(1500) {
        // Most of the file is values: every other time only the header is hit.
        let part = if i % 2 == 0 { bytes.len() } else { header };
        let mutated = [&mutate(&bytes[..part], &mut random), &bytes[part..]].concat();
        if let Ok(loaded) = safetensors::read(&mutated, &PathBuf::from("m"), &plan) {
            loaded.weights.check(&plan, &PathBuf::from("m")).unwrap();
        }
    }
}

#[test]
fn mutated_options_are_an_error_or_a_bounded_model() {
    let bytes = fs::read(fixture("options.json")).unwrap();
    let words: [&[u8]; 12] = [
        b"0",
        b"-1",
        b"1e308",
        b"99999999999999999999",
        b"null",
        b"[]",
        b"{}",
        b"true",
        b"\"",
        b"65536",
        b"[[",
        b"4096",
    ];
    let mut random = Random(12);
    for i in 0..mutations(3000) {
        let mut mutated = mutate(&bytes, &mut random);
        if i % 2 == 0 {
            let (at, word) = (random.below(bytes.len()), words[random.below(words.len())]);
            mutated = [&bytes[..at], word, &bytes[at + random.below(bytes.len() - at).min(6)..]].concat();
        }
        if let Ok(options) = ModelOptions::from_json(&mutated, "m") {
            assert!(options.parameters() <= elmo::options::MAX_PARAMETERS);
            let again = ModelOptions::from_json(options.to_json_pretty().as_bytes(), "m").unwrap();
            assert_eq!(again.canonical_json(), options.canonical_json());
        }
    }
}
