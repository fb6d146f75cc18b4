//! The command line overrides the environment, which overrides `elmo.toml`, which overrides the defaults.

use crate::place::{Ended, Place, snapshot};

/// The job in `out` was made with pooling `mean`. Resuming it with another pooling fails and names that pooling.
fn place() -> Place {
    let place = Place::new();
    place.write("plain.txt", "It rained.\n");
    place.exits("embed -q --model tiny --input plain.txt --output out", 0);
    place
}

const EMBED: &str = "embed -q --model tiny --input plain.txt --output out";

fn pooling(ended: &Ended) -> String {
    match ended.code {
        Some(0) => "mean".into(),
        _ => {
            ended.err.split("was mean, now ").nth(1).unwrap_or_default().split(['\n', ' ', ';']).next().unwrap().into()
        }
    }
}

#[test]
fn the_command_line_overrides_the_environment_and_the_file() {
    let place = place();
    let env = [("ELMO_POOLING", "max")];
    assert_eq!(pooling(&place.run(EMBED)), "mean");
    place.write("elmo.toml", "[embed]\npooling = 'first'\n");
    assert_eq!(pooling(&place.run(EMBED)), "first");
    assert_eq!(pooling(&place.run_with(EMBED, &env)), "max");
    assert_eq!(pooling(&place.run_with(&format!("{EMBED} --pooling last"), &env)), "last");
    assert_eq!(pooling(&place.run_with(EMBED, &[("ELMO_POOLING", "")])), "first");
    place.write("other.toml", "pooling = 'ends'\nmin-count = 9\n");
    let unknown = place.run(&format!("{EMBED} --config other.toml"));
    // It belongs to one command, so it needs a section.
    assert!(unknown.err.contains("unknown key min-count"), "{unknown:?}");
    place.write("other.toml", "[embed]\npooling = 'ends'\n");
    assert_eq!(pooling(&place.run(&format!("{EMBED} --config=other.toml"))), "ends");
    assert_eq!(pooling(&place.run_with(EMBED, &[("ELMO_CONFIG", "other.toml")])), "ends");
}

#[test]
fn an_option_overrides_those_that_it_excludes() {
    let place = place();
    let bench = "bench --constant 8 --rows 100";
    assert_eq!(place.run_with(bench, &[("ELMO_SIZE", "tiny")]).code, Some(0));
    let both = place.run(&format!("{bench} --size tiny"));
    assert_eq!((both.code, both.err.contains("cannot be used with")), (Some(2), true), "{both:?}");
}

/// `elmo stream` refuses state carry, and its status needs none.
#[test]
fn settings_for_embed_do_not_stop_other_commands() {
    let place = place();
    place.write("elmo.toml", "state = 'carry'\nbatch-rows = 4\nsentences = 'off'\non-long = 'truncate'\n");
    place.exits("embed -q --model tiny --input plain.txt --output carried", 0);
    let status = place.run("stream status --output none");
    assert!(status.err.contains("no dataset of a stream"), "{status:?}");
}

#[test]
fn required_options_lists_and_the_model_may_come_from_the_file() {
    let place = place();
    place.write(
        "elmo.toml",
        "model = 'tiny'\nquiet = true\n[embed]\ninput = ['plain.txt', 'reviews.jsonl']\noutput = 'both'\nkeep = 'none'\njson = true\n",
    );
    assert_eq!(place.exits("embed", 0).json()["rows_out"], 201);
    // A pair on the command line overrides the model of the file.
    let pair = place.run("embed --options a.json --weights b.hdf5");
    assert_eq!((pair.code, pair.err.contains("a.json")), (Some(4), true), "{pair:?}");
}

#[test]
fn a_list_of_the_file_is_taken_whole() {
    let place = Place::new();
    let embed = "embed -q --model tiny --input reviews.jsonl --output out";
    place.write("elmo.toml", "[embed]\nkeep = ['id', 'stars']\n");
    place.exits(embed, 0);
    std::fs::remove_file(place.path("elmo.toml")).unwrap();
    // It is the same job only if both columns were kept.
    place.exits(&format!("{embed} --keep id,stars"), 0);
    place.exits(&format!("{embed} --keep id"), 2);
}

#[test]
fn mistakes() {
    let place = place();
    let mut blocks = Vec::new();
    for file in [
        "min-count = 9",
        "min-coun = 9",
        "[embed]\npoling = 'max'",
        "[verify]\npoling = 'max'",
        "[embedd]\npooling = 'max'",
        "[embed]\npooling = 'middle'",
        "[embed]\nbatch_tokens = 'many'",
        "threads = { cpu = 3 }",
        "[embed]\nmax-tokens = [3, 4]",
        "[embed]\nkeep = []",
        "[embed]\nmax-tokens = 3\nmax_tokens = 4",
        "threads",
    ] {
        place.write("elmo.toml", file);
        blocks.push(format!("elmo.toml: {file}\n{}", place.run(EMBED).shown(EMBED)));
    }
    std::fs::remove_file(place.path("elmo.toml")).unwrap();
    for env in [("ELMO_POLING", "max"), ("ELMO_POOLING", "middle")] {
        blocks.push(format!("{}={}\n{}", env.0, env.1, place.run_with(EMBED, &[env]).shown(EMBED)));
    }
    let missing = format!("{EMBED} --config none.toml");
    blocks.push(place.run(&missing).shown(&missing));
    snapshot("settings-mistakes", &blocks.join("\n"));
}

#[test]
fn variables_of_others_are_left_alone() {
    // Variables that Kubernetes sets in containers for a service called elmo.
    let env = [("ELMO_SERVICE_HOST", "10.0.0.1"), ("ELMO_PORT_80_TCP", "tcp://10.0.0.1:80"), ("ELMO_LOG", "elmo=[")];
    let ended = place().run_with("model info tiny", &env);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.err.contains("ELMO_LOG is ignored"), "{ended:?}");
}
