//! Lost or damaged parts, entries and manifests are written again, even where bits differ from run to run.

use std::{fs, path::Path, sync::Arc};

use arrow::{
    array::{Array, AsArray, FixedSizeListArray, Float32Array},
    datatypes::Float32Type,
};
use elmo::EmbeddedColumns;
use elmo_pipelines::{
    Exit,
    bulk::{BulkJob, manifest::ManifestError},
    stage::Pending,
    stores::Stores,
};
use sha2::{Digest, Sha256};

use crate::{
    common::{Hashing, Place, lines, names, part, parts, run, run_local},
    resume::Watched,
};

fn stores() -> Stores {
    Stores::with_settings([])
}

/// Other hardware: the same settings, and vectors that differ in the last bits.
pub(crate) fn other_hardware() -> Watched<impl Fn(usize, Pending) -> Pending + Send + Sync> {
    Watched(Hashing::default(), |_, pending: Pending| -> Pending {
        Box::pin(async {
            let columns = pending.await?;
            let (item, width, values, nulls) = columns.vectors.as_fixed_size_list().clone().into_parts();
            let values: Float32Array = values.as_primitive::<Float32Type>().unary(|value| value + f32::EPSILON);
            let vectors = FixedSizeListArray::new(item, width, Arc::new(values), nulls);
            Ok(EmbeddedColumns { vectors: Arc::new(vectors) as Arc<dyn Array>, ..columns })
        })
    })
}

/// A complete output of 45 rows in 5 parts.
async fn place() -> (Place, BulkJob) {
    let place = Place::new();
    place.write("a.txt", lines(45));
    let job = place.job("a.txt", "out");
    run_local(&job).await.unwrap();
    (place, job)
}

/// Every part is the one that its entry describes; `sha256` is computed here.
fn assert_consistent(output: &Path) {
    let parts = parts(output);
    assert_eq!(parts.len(), 5);
    for (number, bytes) in parts.values().enumerate() {
        let entry = fs::read(output.join(format!("_elmo/part-{number:05}.json"))).unwrap();
        let entry: serde_json::Value = serde_json::from_slice(&entry).unwrap();
        assert_eq!(entry["sha256"], format!("{:x}", Sha256::digest(bytes)), "part {number}");
        assert_eq!(entry["bytes"], bytes.len());
    }
    assert!(output.join("_elmo/done.json").exists());
}

/// Indices of the parts that differ.
fn changed(before: &std::collections::BTreeMap<String, Vec<u8>>, output: &Path) -> Vec<usize> {
    let after = parts(output);
    assert!(before.keys().eq(after.keys()));
    before.values().zip(after.values()).enumerate().filter(|(_, (a, b))| a != b).map(|(n, _)| n).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_and_entries_are_made_anew_on_other_hardware() {
    let entry = |place: &Place, n: usize| place.path(&format!("out/_elmo/part-{n:05}.json"));
    type Damage = fn(&Place, &dyn Fn(&Place, usize) -> std::path::PathBuf);
    let damages: [(Damage, &[usize]); 6] = [
        (|place, _| fs::remove_file(part(&place.path("out"), 1)).unwrap(), &[1]),
        (|place, _| fs::write(part(&place.path("out"), 0), "cut").unwrap(), &[0]),
        // A torn entry in the middle, a lost one, several, and one beside a lost part.
        (|place, entry| fs::write(entry(place, 2), "").unwrap(), &[2]),
        (|place, entry| fs::remove_file(entry(place, 0)).unwrap(), &[0]),
        (
            |place, entry| {
                fs::write(entry(place, 1), "{\"file\": \"par").unwrap();
                fs::remove_file(entry(place, 2)).unwrap();
            },
            &[1, 2],
        ),
        (
            |place, entry| {
                fs::remove_file(entry(place, 3)).unwrap();
                fs::remove_file(part(&place.path("out"), 3)).unwrap();
                fs::remove_file(part(&place.path("out"), 4)).unwrap();
            },
            &[3, 4],
        ),
    ];
    for (damage, numbers) in damages {
        let (place, job) = place().await;
        let before = parts(&place.path("out"));
        damage(&place, &entry);
        run(&job, &other_hardware(), &stores()).await.unwrap();
        assert_eq!(changed(&before, &place.path("out")), numbers);
        assert_consistent(&place.path("out"));
        let again = Hashing::default();
        run(&job, &again, &stores()).await.unwrap();
        assert_eq!(again.rows.into_inner(), 0, "nothing is left to do");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_job_is_recorded_again_when_settings_and_rows_are_the_same() {
    for content in [None, Some("{\"settings\"")] {
        let (place, job) = place().await;
        let before = parts(&place.path("out"));
        let path = place.path("out/_elmo/job.json");
        let right = fs::read_to_string(&path).unwrap();
        let lose = || match content {
            Some(content) => fs::write(&path, content).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        };
        lose();
        let other = BulkJob { rows_per_file: Some(5), ..job.clone() };
        let refused = run_local(&other).await.unwrap_err();
        assert!(matches!(refused.module(), Some(ManifestError::JobLost { .. })), "{refused}");
        assert_eq!(refused.exit(), Exit::Storage);
        let stage = Hashing::default();
        run(&job, &stage, &stores()).await.unwrap();
        assert_eq!(stage.rows.into_inner(), 0);
        assert_eq!(fs::read_to_string(&path).unwrap(), right);
        assert!(changed(&before, &place.path("out")).is_empty());
        // Other rows under the same name are noticed.
        lose();
        place.write("a.txt", lines(45).replace("Line 7 says", "Line 7 said"));
        let refused = run_local(&job).await.unwrap_err();
        assert!(refused.to_string().contains("a.txt: changed since"), "{refused}");
        for job in [BulkJob { overwrite: true, ..job }, BulkJob { overwrite: true, ..other }] {
            if path.exists() {
                lose();
            }
            run_local(&job).await.unwrap();
            assert!(path.exists());
        }
        assert_eq!(parts(&place.path("out")).len(), 9);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_manifest_is_made_anew_with_its_parts() {
    let (place, job) = place().await;
    let before = parts(&place.path("out"));
    let lose = || fs::remove_dir_all(place.path("out/_elmo")).unwrap();
    lose();
    let report = run(&job, &other_hardware(), &stores()).await.unwrap();
    assert_eq!((report.resumed_rows, report.counts.rows_in), (0, 45));
    assert_eq!(changed(&before, &place.path("out")), [0, 1, 2, 3, 4]);
    assert_consistent(&place.path("out"));
    // Without a manifest, parts with other settings count as foreign, except for --overwrite, which recognises their
    // footers.
    lose();
    let other = BulkJob { rows_per_file: Some(5), ..job };
    let refused = run_local(&other).await.unwrap_err();
    assert!(matches!(refused.module(), Some(ManifestError::Foreign { .. })), "{refused}");
    place.write("out/part-00009-00c0ffee.parquet", "of the user");
    let overwriting = BulkJob { overwrite: true, ..other };
    let refused = run_local(&overwriting).await.unwrap_err();
    assert!(refused.to_string().contains("part-00009-00c0ffee.parquet"), "{refused}");
    assert_eq!(names(&place.path("out")).len(), 6, "nothing was removed");
    fs::remove_file(place.path("out/part-00009-00c0ffee.parquet")).unwrap();
    run_local(&overwriting).await.unwrap();
    assert_eq!(parts(&place.path("out")).len(), 9);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_whose_bytes_changed_is_found_by_a_check() {
    let (place, job) = place().await;
    let calm = parts(&place.path("out"));
    let path = part(&place.path("out"), 3);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let stage = Hashing::default();
    run(&job, &stage, &stores()).await.unwrap();
    assert_eq!(stage.rows.into_inner(), 0, "sizes alone are compared");
    let stage = Hashing::default();
    run(&BulkJob { check: true, ..job }, &stage, &stores()).await.unwrap();
    assert_eq!(stage.rows.into_inner(), 10);
    assert!(parts(&place.path("out")) == calm);
    assert_consistent(&place.path("out"));
}

/// A job that lost its lease may create an entry late, and end before it deletes it.
#[tokio::test(flavor = "multi_thread")]
async fn an_entry_of_another_job_does_not_count() {
    for number in [1, 5] {
        let (place, job) = place().await;
        let before = parts(&place.path("out"));
        run_local(&BulkJob { row_group_bytes: 1 << 20, ..place.job("a.txt", "other") }).await.unwrap();
        let entry = fs::read_to_string(place.path("other/_elmo/part-00001.json")).unwrap();
        let entry = entry.replace("part-00001", &format!("part-{number:05}"));
        place.write(&format!("out/_elmo/part-{number:05}.json"), entry);
        run_local(&job).await.unwrap();
        assert!(changed(&before, &place.path("out")).is_empty());
        assert_consistent(&place.path("out"));
    }
}

/// The name of an entry is not trusted.
#[tokio::test(flavor = "multi_thread")]
async fn an_entry_with_a_huge_number_is_refused() {
    let (place, job) = place().await;
    let entry = fs::read(place.path("out/_elmo/part-00004.json")).unwrap();
    for name in ["part-b1000000.json", "part-o18446744073709551615.json"] {
        fs::write(place.path("out/_elmo").join(name), &entry).unwrap();
        let error = run_local(&job).await.unwrap_err();
        assert!(error.to_string().contains("entries before it are missing"), "{error}");
        run_local(&BulkJob { overwrite: true, ..job.clone() }).await.unwrap();
        assert_consistent(&place.path("out"));
    }
}
