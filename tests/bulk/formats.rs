//! What the options for inputs change: which files are read, as what, and how many rows of them.

use arrow::{
    array::{Array, AsArray},
    compute::cast,
    datatypes::{DataType, Date32Type, Int64Type},
};
use elmo_pipelines::{
    bulk::BulkJob,
    source::{Keep, KeptTypes},
};

use crate::common::{Place, assert_own_vectors, run_local, strings};

/// The names and types of an output's columns, without those that the job adds.
fn kept(place: &Place, output: &str) -> Vec<(String, DataType)> {
    let schema = place.rows(output).schema();
    let kept = schema.fields().iter().take(schema.fields().len() - 3);
    kept.map(|field| (field.name().clone(), field.data_type().clone())).collect()
}

fn named<const N: usize>(columns: [(&str, DataType); N]) -> Vec<(String, DataType)> {
    columns.map(|(name, kind)| (name.to_owned(), kind)).to_vec()
}

/// Expected: what DuckDB 2.0 returns for `read_csv('**/*.csv', hive_partitioning = true)` on the same folders, in the order
/// of the paths.
#[tokio::test(flavor = "multi_thread")]
async fn folders_of_hive_partitions_are_columns() {
    let place = Place::new();
    for (folder, text) in [
        ("year=2023/day=2023-12-31/tag=a%20b%2Fc", "one"),
        ("year=2024/day=__HIVE_DEFAULT_PARTITION__/tag=01", "two"),
        ("year=2024/day=2024-02-29/tag=__HIVE_DEFAULT_PARTITION__", "three"),
    ] {
        place.write(&format!("in/{folder}/x.csv"), format!("id,text\n7,{text}\n"));
    }
    // More rows than one batch has.
    place.write("in/year=2025/day=2025-01-01/tag=z/x.csv", "id,text\n".to_owned() + &"8,four\n".repeat(9000));
    let job = BulkJob { rows_per_file: Some(10_000), window_rows: 8192, ..place.job("in", "out") };
    run_local(&job).await.unwrap();
    let rows = place.rows("out");
    assert_own_vectors(&rows);
    let (int, utf8) = (DataType::Int64, DataType::Utf8);
    let expected =
        [("id", int.clone()), ("text", utf8.clone()), ("year", int), ("day", DataType::Date32), ("tag", utf8)];
    assert_eq!(kept(&place, "out"), named(expected));
    let years = rows.column_by_name("year").unwrap().as_primitive::<Int64Type>();
    assert_eq!(years.values()[..3], [2023, 2024, 2024]);
    assert!(years.values()[3..].iter().all(|year| *year == 2025) && years.len() == 9003);
    let days = rows.column_by_name("day").unwrap().as_primitive::<Date32Type>();
    // Days since 1970, by `date -d 2023-12-31 +%s` / 86400.
    assert_eq!(
        (0..4).map(|i| days.is_valid(i).then(|| days.value(i))).collect::<Vec<_>>(),
        [Some(19722), None, Some(19782), Some(20089)]
    );
    let tags = strings(&rows, "tag");
    assert_eq!(tags[..4], [Some("a b/c".to_owned()), Some("01".to_owned()), None, Some("z".to_owned())]);
}

/// Expected: the columns do not depend on how the same file is named.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_has_its_partitions_however_it_is_named() {
    let place = Place::new();
    place.write("data/a=1/b=x/raw/c=2/x.txt", "line\n");
    place.write("data/plain/x.txt", "line\n");
    let (int, utf8) = (DataType::Int64, DataType::Utf8);
    let all = [("text", utf8.clone()), ("a", int.clone()), ("b", utf8.clone()), ("c", int.clone())];
    for (number, (input, expected)) in [
        ("data/a=1", named(all.clone())),
        ("data/a=*/b=*/**/*.txt", named(all.clone())),
        ("data/a=1/b=x", named(all)),
        ("data/a=1/b=x/raw/c=2/x.txt", named([("text", utf8.clone()), ("c", int)])),
        ("data/plain", named([("text", utf8)])),
    ]
    .into_iter()
    .enumerate()
    {
        let output = format!("out-{number}");
        run_local(&place.job(input, &output)).await.unwrap();
        assert_eq!(kept(&place, &output), expected, "{input}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_beside_columns_of_the_files() {
    let place = Place::new();
    // DuckDB: the folder's value counts, at the place of the file's column.
    place.write("in/year=2024/x.csv", "year,text\n1999,one\n");
    // A file without the folder keeps its column.
    place.write("in/y.csv", "year,text\n2000,two\n");
    run_local(&place.job("in", "out")).await.unwrap();
    assert_eq!(kept(&place, "out"), named([("year", DataType::Int64), ("text", DataType::Utf8)]));
    assert_eq!(strings(&place.rows("out"), "year"), [Some("2024".to_owned()), Some("2000".to_owned())]);
    // A file that lacks a key has NULL there, as with columns.
    place.write("some/a=1/x.txt", "one\n");
    place.write("some/x.txt", "two\n");
    run_local(&place.job("some", "null")).await.unwrap();
    assert_eq!(strings(&place.rows("null"), "a"), [Some("1".to_owned()), None]);
    // As any other column they can be left out, be the id, and stay as they are written.
    let id = BulkJob { id: Some("a".into()), keep: Keep::None, ..place.job("some/a=1", "id") };
    run_local(&id).await.unwrap();
    assert_eq!(kept(&place, "id"), named([("a", DataType::Int64)]));
    let written = BulkJob { types: KeptTypes::Strings, ..place.job("some/a=1", "written") };
    run_local(&written).await.unwrap();
    assert_eq!(kept(&place, "written"), named([("text", DataType::Utf8), ("a", DataType::Utf8)]));
    // The texts are those of the file, whatever its folder is called.
    place.write("texts/text=en/x.txt", "of the file\n");
    run_local(&place.job("texts", "own")).await.unwrap();
    let own = cast(place.rows("own").column_by_name("text").unwrap(), &DataType::Utf8).unwrap();
    assert_eq!(own.as_string::<i32>().value(0), "of the file");
}
