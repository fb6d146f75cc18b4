//! Values of CSV and JSON files. They are read as they are written and get a type only when that loses nothing: readers
//! of Arrow cut `1.99` to 1, take `007` for 7, round long numbers, and forget the time of day of a date.

use arrow::{
    array::{Array, ArrayRef, AsArray, Float64Array},
    compute::cast,
    datatypes::{DataType, Float64Type},
    error::ArrowError,
    util::display::{ArrayFormatter, FormatOptions},
};

/// So many digits any normal double holds (DBL_DIG).
const DIGITS: usize = 15;
/// No double has more digits than 767, and to print more takes time.
const DIGITS_MAX: usize = 800;

/// Makes sure that the values of `read`, of any type and at any depth, are those that stand in `written`. Columns that
/// were not read as strings are left alone.
///
/// # Errors
/// [`ArrowError::CastError`] when a value would be written differently now.
pub(super) fn check(written: &ArrayRef, read: &ArrayRef) -> Result<(), ArrowError> {
    match (written.data_type(), read.data_type()) {
        (DataType::List(_), DataType::List(_)) => {
            let (written, read) = (written.as_list::<i32>(), read.as_list::<i32>());
            // A cast keeps the offsets.
            let (first, last) = (written.value_offsets()[0] as usize, written.value_offsets()[written.len()] as usize);
            let items = |values: &ArrayRef| values.slice(first, last - first);
            check(&items(written.values()), &items(read.values()))
        }
        (DataType::Struct(_), DataType::Struct(_)) => {
            let mut columns = written.as_struct().columns().iter().zip(read.as_struct().columns());
            columns.try_for_each(|(written, read)| check(written, read))
        }
        (DataType::Utf8, kind) if kind.is_floating() => check_floats(written, read),
        (DataType::Utf8, kind) if kind.is_integer() || kind.is_temporal() || kind == &DataType::Boolean => {
            check_shown(written, read)
        }
        _ => Ok(()),
    }
}

fn differs(kind: &DataType) -> ArrowError {
    ArrowError::CastError(format!("{kind} would not hold the value as it is written"))
}

fn check_floats(written: &ArrayRef, read: &ArrayRef) -> Result<(), ArrowError> {
    // A wider float is the same number.
    let wide = cast(read, &DataType::Float64)?;
    let wide: &Float64Array = wide.as_primitive::<Float64Type>();
    let mut pairs = written.as_string::<i32>().iter().zip(wide);
    let is_double = read.data_type() == &DataType::Float64;
    let fine = pairs.all(|pair| match pair {
        (Some(written), Some(number)) => is_number(written, number, is_double),
        (written, number) => written.is_some() == number.is_some(),
    });
    if fine { Ok(()) } else { Err(differs(read.data_type())) }
}

/// Whether a double holds the number that is written.
pub(super) fn is_double(written: &str) -> bool {
    written.parse().is_ok_and(|number| is_number(written, number, true))
}

/// Whether `number`, printed with as many digits as are written, has these digits. So 0.1 is fine, and what a program
/// wrote with all digits of a double, but no identifier, no long integer, and nothing that became infinite or zero.
fn is_number(written: &str, number: f64, is_double: bool) -> bool {
    let unsigned = written.strip_prefix('-').unwrap_or(written);
    if !number.is_finite() {
        return !unsigned.contains(|c: char| c.is_ascii_digit());
    }
    let (mantissa, _) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, ""));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let is_identifier = whole.len() > 1 && whole.starts_with('0');
    if is_identifier || !whole.bytes().chain(fraction.bytes()).all(|byte| byte.is_ascii_digit()) {
        return false;
    }
    let digits = [whole, fraction.trim_end_matches('0')].concat();
    let digits = digits.trim_start_matches('0');
    match digits.len() {
        0 => number == 0.0,
        n if n <= DIGITS && is_double && number.is_normal() => true,
        n if n > DIGITS_MAX => false,
        n => {
            let printed = format!("{:.*e}", n - 1, number.abs());
            let printed = printed.split('e').next().unwrap_or_default();
            printed.bytes().filter(|&byte| byte != b'.').eq(digits.bytes())
        }
    }
}

/// For types whose values are written in one way only.
fn check_shown(written: &ArrayRef, read: &ArrayRef) -> Result<(), ArrowError> {
    let kind = read.data_type();
    let shown = ArrayFormatter::try_new(read, &FormatOptions::default())?;
    for (row, written) in written.as_string::<i32>().iter().enumerate() {
        let Some(written) = written else { continue };
        let shown = shown.value(row).try_to_string()?;
        let same = match kind {
            DataType::Boolean => shown.eq_ignore_ascii_case(written),
            DataType::Timestamp(..) => time(&shown) == time(written),
            _ => shown == written,
        };
        if !same {
            return Err(differs(kind));
        }
    }
    Ok(())
}

/// A time without what people write in two ways: `T` or a space, zeros that end a fraction, `Z` or `+00:00`.
fn time(shown: &str) -> (String, bool) {
    let zone = shown.strip_suffix('Z').or_else(|| shown.strip_suffix("+00:00"));
    let time = zone.unwrap_or(shown).replacen(' ', "T", 1);
    let time = if time.contains('.') { time.trim_end_matches('0').trim_end_matches('.') } else { &time };
    (time.to_owned(), zone.is_some())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::{array::StringArray, datatypes::TimeUnit};

    use super::*;

    fn holds(kind: &DataType, written: &str) -> bool {
        let column: ArrayRef = Arc::new(StringArray::from(vec![written]));
        let options = arrow::compute::CastOptions { safe: false, ..Default::default() };
        let read = arrow::compute::cast_with_options(&column, kind, &options);
        read.and_then(|read| check(&column, &read)).is_ok()
    }

    /// IEEE 754: 2^53 is the last of the integers that a double holds one by one, 2^24 that of a single, 2^11 that of
    /// a half; 1.8e308 is infinite, 2e-324 is zero. 0.1 is 1.000000000000000056e-01 in C's `%.18e`.
    #[test]
    fn floats() {
        let long_fraction = format!("0.5{}", "0".repeat(40));
        for written in [
            "0.1",
            "-0.1",
            "1e300",
            "5e-324",
            "0",
            "-0.0",
            ".5",
            "5.",
            "9007199254740992",
            "9007199254740994",
            "nan",
            "inf",
            "0.1000000000000000055511151231257827",
            "1.000000000000000056e-01",
            "0.10000000000000001",
            &long_fraction,
        ] {
            assert!(holds(&DataType::Float64, written), "{written}");
        }
        for written in [
            "9007199254740993",
            "0.1234567890123456789",
            "1e400",
            "-1e400",
            "1e-400",
            "007",
            "+1",
            " 1",
            "00.5",
            "12345678901234567890",
            "100000000000000000000000",
            "1.0000000000000000000000001",
        ] {
            assert!(!holds(&DataType::Float64, written), "{written}");
        }
        for (written, fits) in [("16777216", true), ("16777217", false), ("0.1", true), ("1e39", false)] {
            assert_eq!(holds(&DataType::Float32, written), fits, "{written}");
        }
        assert!(holds(&DataType::Float16, "2048") && !holds(&DataType::Float16, "2049"));
        assert!(!is_double(&format!("0.{}1", "3".repeat(1000))));
    }

    #[test]
    fn integers_and_booleans() {
        for (written, fits) in [("5", true), ("-5", true), ("007", false), ("+5", false), (" 5", false), ("5.0", false)]
        {
            assert_eq!(holds(&DataType::Int64, written), fits, "{written}");
        }
        for (written, fits) in [("true", true), ("FALSE", true), ("yes", false), ("1", false)] {
            assert_eq!(holds(&DataType::Boolean, written), fits, "{written}");
        }
    }

    #[test]
    fn dates_and_times() {
        for (written, fits) in [
            ("2024-02-29", true),
            ("2023-02-29", false),
            ("2024-02-29T10:30:00", false),
            ("2024-02-29 00:00:00", false),
            ("2024-2-9", false),
        ] {
            assert_eq!(holds(&DataType::Date32, written), fits, "{written}");
        }
        let plain = DataType::Timestamp(TimeUnit::Millisecond, None);
        let utc = DataType::Timestamp(TimeUnit::Millisecond, Some("+00:00".into()));
        for (written, without_zone, in_utc) in [
            ("2024-02-29T10:30:00", true, false),
            ("2024-02-29 10:30:00.5", true, false),
            ("2024-02-29 10:30:00.120", true, false),
            ("2024-02-29T10:30:00.0001", false, false),
            ("2024-02-29T10:30:00Z", false, true),
            ("2024-02-29 10:30:00.250+00:00", false, true),
            ("2024-02-29T10:30:00+02:00", false, false),
            ("2024-02-29T23:59:60", false, false),
            ("2024-02-29", false, false),
        ] {
            assert_eq!((holds(&plain, written), holds(&utc, written)), (without_zone, in_utc), "{written}");
        }
    }
}
