//! `tensorboard/`: the numbers of the journals as event files of TensorBoard.
//!
//! Every process that goes on with a run writes a file of its own, as TensorBoard expects, and only adds to it: a kill leaves
//! at most an incomplete last record, at which readers stop. Steps that will be made again are removed from earlier files.

mod message;
mod record;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use super::{
    held_out::ValidLine,
    journal::{Softmax, StepLine},
    model::ignore_missing,
};

/// Folder of the event files in that of a run.
pub(super) const FOLDER: &str = "tensorboard";
/// Readers look for `tfevents` in names, and read files in the order of their names.
const PREFIX: &str = "events.out.tfevents.";
const SUFFIX: &str = ".elmo";
/// A file that is being replaced. Readers do not read it.
const PARTIAL: &str = "partial";

/// The event files of a run.
#[derive(Debug)]
pub(super) struct Events {
    pub(super) folder: PathBuf,
    /// The step after which this process goes on; `None`: it begins.
    after: Option<u64>,
    /// Created with the first event.
    file: Option<File>,
}

impl Events {
    /// Goes on after a step, or begins: events of later steps are removed.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn open(folder: &Path, after: Option<u64>) -> io::Result<Self> {
        for second in seconds(folder)? {
            trim(folder, &name(second), after)?;
        }
        Ok(Self { folder: folder.to_owned(), after, file: None })
    }

    /// Adds a line of `steps.jsonl`.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn step(&mut self, line: &StepLine) -> io::Result<()> {
        let [loss, forward, backward] = match line.softmax {
            Softmax::Full => ["training/loss", "training/loss_forward", "training/loss_backward"],
            Softmax::Sampled => {
                ["training/sampled_loss", "training/sampled_loss_forward", "training/sampled_loss_backward"]
            }
        };
        let mut values = vec![
            (loss, line.loss),
            (forward, line.loss_forward),
            (backward, line.loss_backward),
            ("training/grad_norm", line.grad_norm),
            ("training/clip_scale", line.clip_scale),
            ("training/learning_rate", line.learning_rate),
            ("training/tokens_per_second", line.tokens_per_second()),
            ("training/epoch", line.epoch),
        ];
        values.extend(line.share_of_ceiling.map(|share| ("training/share_of_ceiling", share)));
        self.add(line.step, &values)
    }

    /// Adds a line of `valid.jsonl`.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn measurement(&mut self, line: &ValidLine) -> io::Result<()> {
        let values = [
            ("held_out/perplexity", line.perplexity),
            ("held_out/perplexity_forward", line.perplexity_forward),
            ("held_out/perplexity_backward", line.perplexity_backward),
        ];
        self.add(line.step, &values)
    }

    /// Makes all events durable.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), File::sync_data)
    }

    fn add(&mut self, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut records = Vec::new();
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                fs::create_dir_all(&self.folder)?;
                // Later than all others, whatever the clock says.
                let last = seconds(&self.folder)?.pop();
                let path = self.folder.join(name(last.map_or(0, |last| last + 1).max(now.as_secs())));
                records.extend(record::frame(&message::version(now.as_secs_f64())));
                records
                    .extend(record::frame(&message::start(now.as_secs_f64(), self.after.map_or(0, |step| step + 1))));
                self.file.insert(OpenOptions::new().create_new(true).append(true).open(path)?)
            }
        };
        records.extend(record::frame(&message::scalars(now.as_secs_f64(), step, values)));
        file.write_all(&records)
    }
}

/// The name of a file that was begun at a time.
fn name(second: u64) -> String {
    format!("{PREFIX}{second:010}{SUFFIX}")
}

/// When the files of a folder were begun, ascending.
fn seconds(folder: &Path) -> io::Result<Vec<u64>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let second = |file: &str| file.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok();
    let mut seconds: Vec<u64> = entries.iter().filter_map(|entry| second(entry.file_name().to_str()?)).collect();
    seconds.sort_unstable();
    Ok(seconds)
}

/// Removes the events after a step and what is damaged from a file, and the file if it has no scalars then.
fn trim(folder: &Path, name: &str, after: Option<u64>) -> io::Result<()> {
    let path = folder.join(name);
    let bytes = fs::read(&path)?;
    let (mut kept, mut has_scalars) = (Vec::new(), false);
    for (record, data) in record::Records(&bytes) {
        if let Some(known) = message::read(data).filter(|known| Some(known.step) <= after) {
            kept.extend_from_slice(record);
            has_scalars |= known.has_scalars;
        }
    }
    if !has_scalars {
        return ignore_missing(fs::remove_file(path));
    }
    if kept != bytes {
        let partial = folder.join(PARTIAL);
        let mut file = File::create(&partial)?;
        file.write_all(&kept).and_then(|()| file.sync_all())?;
        fs::rename(&partial, &path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by `tests/reference/tensorboard_events.py`, with TensorBoard's own writer.
    const OFFICIAL: &[u8] = include_bytes!("../../../../tests/fixtures/train/events.tfevents");

    /// The events of that program.
    #[test]
    fn records_have_the_bytes_of_the_official_writer() {
        let events = [
            message::version(1_700_000_000.0),
            message::start(1_700_000_000.25, 1),
            message::scalars(
                1_700_000_001.5,
                10,
                &[("training/loss", 5.5), ("training/grad_norm", 0.0), ("training/learning_rate", 0.1)],
            ),
            message::scalars(1_700_000_002.75, 300, &[("training/loss", -1e30)]),
        ];
        let ours: Vec<u8> = events.iter().flat_map(|event| record::frame(event)).collect();
        assert_eq!(ours, OFFICIAL);
        let steps: Vec<_> = record::Records(OFFICIAL).map(|(_, data)| message::read(data).unwrap().step).collect();
        assert_eq!(steps, [0, 1, 10, 300]);
    }

    /// Steps of the scalars in all files, file by file.
    fn steps(folder: &Path) -> Vec<Vec<u64>> {
        let of_file = |second: u64| {
            let bytes = fs::read(folder.join(name(second))).unwrap();
            let records = record::Records(&bytes);
            assert_eq!(records.map(|(record, _)| record.len()).sum::<usize>(), bytes.len());
            let known = record::Records(&bytes).map(|(_, data)| message::read(data).unwrap());
            known.filter(|known| known.has_scalars).map(|known| known.step).collect()
        };
        seconds(folder).unwrap().into_iter().map(of_file).collect()
    }

    #[test]
    fn events_go_on_after_a_step() {
        let run = tempfile::tempdir().unwrap();
        let folder = run.path().join(FOLDER);
        let write = |after: Option<u64>, steps: std::ops::RangeInclusive<u64>| {
            let mut events = Events::open(&folder, after).unwrap();
            steps.for_each(|step| events.add(step, &[("a", 0.5)]).unwrap());
            events.sync().unwrap();
        };
        write(None, 1..=4);
        assert_eq!(steps(&folder), [[1, 2, 3, 4]]);
        // The process was killed while it wrote.
        let first = folder.join(name(seconds(&folder).unwrap()[0]));
        OpenOptions::new().append(true).open(&first).unwrap().write_all(&[9, 0, 0]).unwrap();
        write(Some(2), 3..=6);
        assert_eq!(steps(&folder), [vec![1, 2], vec![3, 4, 5, 6]]);
        // A process that made no step leaves no file, and one whose steps are all made again neither.
        Events::open(&folder, Some(5)).unwrap().sync().unwrap();
        assert_eq!(steps(&folder), [vec![1, 2], vec![3, 4, 5]]);
        write(Some(1), 2..=3);
        assert_eq!(steps(&folder), [vec![1], vec![2, 3]]);
        // Files of others stay as they are.
        fs::write(folder.join("events.out.tfevents.1.host"), b"x").unwrap();
        write(None, 1..=1);
        assert_eq!(steps(&folder), [[1]]);
        assert_eq!(fs::read(folder.join("events.out.tfevents.1.host")).unwrap(), b"x");
    }
}
