//! A closed terminal sends SIGHUP: a job writes the lines that it has read from standard input, and exits.

use std::{
    fs::File,
    io::Seek,
    process::{Child, Command, Stdio},
};

use crate::place::{Place, ended};

const JOB: &str = "embed -q --model tiny --threads 1 --rows-per-file 400 --window-rows 64 --input - --output out";

/// Starts a job on lines that are a file, because its offset is shared and shows which lines were read.
fn start(place: &Place, mut command: Command, lines: usize) -> (Child, File) {
    place.write("lines.txt", "It rained all day, and we stayed in and read what there was.\n".repeat(lines));
    let input = File::open(place.path("lines.txt")).unwrap();
    command.stdin(Stdio::from(input.try_clone().unwrap())).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    place.wait_for_entry();
    (child, input)
}

fn hang_up(child: &Child) {
    assert!(Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success());
}

/// The rows of `out`, a single line each.
fn rows(place: &Place) -> u64 {
    place.exits("inspect out --json", 0).json()["rows"].as_u64().unwrap()
}

#[test]
fn a_hangup_loses_no_line_of_standard_input() {
    let place = Place::new();
    // The parent of the tests may ignore the signal.
    let command = place.shell_command(&format!("exec env --default-signal=HUP elmo {JOB}"));
    let (child, mut input) = start(&place, command, 40_000);
    // The shell and the kernel may both send one.
    hang_up(&child);
    hang_up(&child);
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(130), "{ended:?}");
    let taken = input.stream_position().unwrap();
    let content = std::fs::read(place.path("lines.txt")).unwrap();
    assert!(taken < content.len() as u64, "there was nothing left to interrupt");
    let lines = content[..taken as usize].iter().filter(|byte| **byte == b'\n').count();
    assert_eq!(rows(&place), lines as u64);
}

#[test]
fn nohup_is_respected() {
    let place = Place::new();
    let (child, _) = start(&place, place.shell_command(&format!("trap '' HUP; exec elmo {JOB}")), 6_000);
    hang_up(&child);
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(rows(&place), 6_000);
}
