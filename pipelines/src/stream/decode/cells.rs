//! Builds a column out of values as they are written, by the rules of `elmo embed`: a value that the type would not hold
//! exactly as it is written does not belong to the column.

use std::sync::Arc;

use arrow::array::{
    ArrayBuilder, ArrayRef, BooleanBuilder, Date32Builder, Float32Builder, Float64Builder, Int32Builder, Int64Builder,
    StringBuilder, TimestampMicrosecondBuilder,
};

use super::{settings::ColumnType, unescape::Scalar};
use crate::source::lossless;

/// Digits of a fraction of a second that a timestamp holds.
const TIME_DIGITS: usize = 6;
/// Microseconds in a millisecond.
const MICROS: i64 = 1000;

/// A column under construction.
#[derive(Debug)]
pub(super) enum Cells {
    String(StringBuilder),
    Int64(Int64Builder),
    Int32(Int32Builder),
    Float64(Float64Builder),
    Float32(Float32Builder),
    Bool(BooleanBuilder),
    Timestamp(TimestampMicrosecondBuilder),
    Date(Date32Builder),
    Json(StringBuilder),
}

/// Applies an expression to the builder of any type.
macro_rules! each {
    ($cells:expr, $builder:ident => $result:expr) => {
        match $cells {
            Cells::String($builder) | Cells::Json($builder) => $result,
            Cells::Int64($builder) => $result,
            Cells::Int32($builder) => $result,
            Cells::Float64($builder) => $result,
            Cells::Float32($builder) => $result,
            Cells::Bool($builder) => $result,
            Cells::Timestamp($builder) => $result,
            Cells::Date($builder) => $result,
        }
    };
}

impl Cells {
    /// An empty column.
    pub(super) fn new(kind: ColumnType) -> Self {
        match kind {
            ColumnType::String => Self::String(StringBuilder::new()),
            ColumnType::Int64 => Self::Int64(Int64Builder::new()),
            ColumnType::Int32 => Self::Int32(Int32Builder::new()),
            ColumnType::Float64 => Self::Float64(Float64Builder::new()),
            ColumnType::Float32 => Self::Float32(Float32Builder::new()),
            ColumnType::Bool => Self::Bool(BooleanBuilder::new()),
            ColumnType::Timestamp => {
                Self::Timestamp(TimestampMicrosecondBuilder::new().with_data_type(kind.data_type()))
            }
            ColumnType::Date => Self::Date(Date32Builder::new()),
            ColumnType::Json => Self::Json(StringBuilder::new()),
        }
    }

    /// Number of values.
    pub(super) fn len(&self) -> usize {
        each!(self, builder => builder.len())
    }

    /// Adds NULL.
    pub(super) fn push_null(&mut self) {
        each!(self, builder => builder.append_null());
    }

    /// Adds a JSON value as it is written. False: the type would not hold it, and NULL was added.
    #[must_use]
    pub(super) fn push_json(&mut self, json: &str) -> bool {
        match (self, Scalar::of(json)) {
            (cells, Some(Scalar::Null)) => {
                cells.push_null();
                true
            }
            (Self::Json(builder), _) => {
                builder.append_value(json);
                true
            }
            (cells, Some(Scalar::String(text))) => cells.push(&text, true),
            (cells, Some(Scalar::Other(written))) => cells.push(written, false),
            (cells, None) => {
                cells.push_null();
                false
            }
        }
    }

    /// Adds a string (`is_string`) or a number or boolean as it is written. False: the type would not hold it, and NULL was
    /// added.
    #[must_use]
    pub(super) fn push(&mut self, written: &str, is_string: bool) -> bool {
        let integer = || lossless::integer(written);
        match self {
            Self::String(builder) | Self::Json(builder) => {
                builder.append_value(written);
                true
            }
            Self::Int64(builder) => append(integer().and_then(|n| n.try_into().ok()), |n| builder.append_option(n)),
            Self::Int32(builder) => append(integer().and_then(|n| n.try_into().ok()), |n| builder.append_option(n)),
            Self::Float64(builder) => append(lossless::double(written), |n| builder.append_option(n)),
            Self::Float32(builder) => append(lossless::single(written), |n| builder.append_option(n)),
            Self::Bool(builder) => append(lossless::boolean(written), |b| builder.append_option(b)),
            Self::Date(builder) => append(lossless::day(written.as_bytes()), |day| builder.append_option(day)),
            Self::Timestamp(builder) => append(micros(written, is_string), |time| builder.append_option(time)),
        }
    }

    /// The column.
    pub(super) fn finish(mut self) -> ArrayRef {
        each!(&mut self, builder => Arc::new(builder.finish()))
    }
}

fn append<T>(value: Option<T>, push: impl FnOnce(Option<T>)) -> bool {
    let is_some = value.is_some();
    push(value);
    is_some
}

/// Microseconds since 1970 of a time in RFC 3339, or of a number of milliseconds.
fn micros(written: &str, is_string: bool) -> Option<i64> {
    if is_string {
        return lossless::instant(written, TIME_DIGITS)?.try_into().ok();
    }
    i64::try_from(lossless::integer(written)?).ok()?.checked_mul(MICROS)
}

#[cfg(test)]
mod tests {
    use arrow::{
        array::{Array, AsArray, StringArray},
        compute::{CastOptions, cast_with_options},
        datatypes::{Date32Type, TimestampMicrosecondType},
        util::display::array_value_to_string,
    };
    use proptest::prelude::*;

    use super::*;

    /// The value as Arrow shows it; `None` when the type does not hold it.
    fn held(kind: ColumnType, json: &str) -> Option<String> {
        let mut cells = Cells::new(kind);
        let is_held = cells.push_json(json);
        let column = cells.finish();
        assert_eq!((column.len(), column.data_type()), (1, &kind.data_type()));
        assert!(is_held || column.is_null(0), "{json}");
        is_held.then(|| array_value_to_string(&column, 0).unwrap())
    }

    /// By hand: 2^63 is 9223372036854775808, 2^53 + 1 is the first integer that no double holds, 2^24 + 1 the first that no
    /// single holds.
    #[test]
    fn values_are_held_exactly_or_not_at_all() {
        use ColumnType::*;
        for (kind, json, expected) in [
            (String, r#""a\u00e9\n""#, Some("a\u{e9}\n")),
            (String, "1.50", Some("1.50")),
            (String, "18446744073709551616", Some("18446744073709551616")),
            (String, "true", Some("true")),
            (String, "null", Some("")),
            (String, "[]", None),
            (String, "{}", None),
            (Int64, "9223372036854775807", Some("9223372036854775807")),
            (Int64, "9223372036854775808", None),
            (Int64, "-9223372036854775808", Some("-9223372036854775808")),
            (Int64, "1.0", None),
            (Int64, "1e3", None),
            (Int64, "\"5\"", Some("5")),
            (Int64, "\"05\"", None),
            (Int64, "true", None),
            (Int32, "2147483647", Some("2147483647")),
            (Int32, "2147483648", None),
            (Float64, "0.1", Some("0.1")),
            (Float64, "9007199254740992", Some("9007199254740992.0")),
            (Float64, "9007199254740993", None),
            (Float64, "1e400", None),
            (Float32, "16777216", Some("16777216.0")),
            (Float32, "16777217", None),
            (Bool, "false", Some("false")),
            (Bool, "\"TRUE\"", Some("true")),
            (Bool, "1", None),
            (Date, "\"2024-02-29\"", Some("2024-02-29")),
            (Date, "\"2023-02-29\"", None),
            (Date, "\"2024-02-29T00:00:00Z\"", None),
            (Date, "19782", None),
            (Timestamp, "1709202600250", Some("2024-02-29T10:30:00.250Z")),
            (Timestamp, "\"2024-02-29T10:30:00.250Z\"", Some("2024-02-29T10:30:00.250Z")),
            (Timestamp, "\"2024-02-29T12:30:00.250001+02:00\"", Some("2024-02-29T10:30:00.250001Z")),
            (Timestamp, "\"2024-02-28T23:30:00-11:00\"", Some("2024-02-29T10:30:00Z")),
            (Timestamp, "\"2024-02-29T10:30:00.2500010Z\"", Some("2024-02-29T10:30:00.250001Z")),
            (Timestamp, "\"2024-02-29T10:30:00.2500011Z\"", None),
            (Timestamp, "\"2024-02-29T10:30:00\"", None),
            (Timestamp, "\"2024-02-29T23:59:60Z\"", None),
            (Timestamp, "\"2024-02-29T10:30:00+2:00\"", None),
            (Timestamp, "1.5", None),
            (Timestamp, "9223372036854775807", None),
            (Json, r#"{"a": [1.50]}"#, Some(r#"{"a": [1.50]}"#)),
            (Json, r#""a\n""#, Some(r#""a\n""#)),
            (Json, "null", Some("")),
        ] {
            assert_eq!(held(kind, json).as_deref(), expected, "{kind} {json}");
        }
    }

    /// What `elmo embed` makes of the same text: Arrow's cast, and its check.
    fn embedded(kind: ColumnType, written: &str) -> Option<std::string::String> {
        let column: ArrayRef = Arc::new(StringArray::from(vec![written]));
        let read =
            cast_with_options(&column, &kind.data_type(), &CastOptions { safe: false, ..Default::default() }).ok()?;
        lossless::check(&column, &read).ok().map(|()| array_value_to_string(&read, 0).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        /// The same values are accepted as by `elmo embed`.
        #[test]
        fn numbers_and_days_as_in_a_file(
            written in r"-?[0-9]{1,20}|-?[0-9]{1,17}\.[0-9]{1,10}|-?[0-9]{1,3}(\.[0-9]{1,20})?[eE][-+]?[0-9]{1,3}|[0-9]{4}-[0-9]{2}-[0-9]{2}|[tT]rue"
        ) {
            use ColumnType::*;
            for kind in [Int64, Int32, Float64, Float32, Bool, Date, String] {
                let json = serde_json::Value::from(written.as_str()).to_string();
                prop_assert_eq!(held(kind, &json), embedded(kind, &written), "{} {}", kind, written);
            }
        }

        /// Expected: chrono's own formatting of the instant in the zone.
        #[test]
        fn instants_in_any_zone(micros in -62_000_000_000_000_000_i64..250_000_000_000_000_000, minutes in -1439..1440_i32) {
            let zone = chrono::FixedOffset::east_opt(minutes * 60).unwrap();
            let time = chrono::DateTime::from_timestamp_micros(micros).unwrap().with_timezone(&zone);
            let json = format!("\"{}\"", time.format("%Y-%m-%dT%H:%M:%S%.6f%:z"));
            let mut cells = Cells::new(ColumnType::Timestamp);
            prop_assert!(cells.push_json(&json), "{}", json);
            prop_assert_eq!(cells.finish().as_primitive::<TimestampMicrosecondType>().value(0), micros);
        }
    }

    #[test]
    fn days_count_from_1970() {
        let mut cells = Cells::new(ColumnType::Date);
        assert!(cells.push_json("\"1970-01-02\""));
        assert_eq!(cells.finish().as_primitive::<Date32Type>().value(0), 1);
    }
}
