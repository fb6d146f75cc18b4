//! Checks that typed values of CSV and JSON files are equal to the text in the file. Columns are read as strings and then
//! cast, as Arrow's readers truncate `1.99` to 1, read `007` as 7, round long numbers, and drop the time of day of a date.

use arrow::{
    array::{Array, ArrayRef, ArrowPrimitiveType, AsArray, Float64Array},
    compute::cast,
    datatypes::{
        DataType, Date32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, TimeUnit,
        TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType, TimestampSecondType, UInt8Type,
        UInt16Type, UInt32Type, UInt64Type,
    },
    error::ArrowError,
    util::display::{ArrayFormatter, FormatOptions},
};
use chrono::{Datelike, NaiveDate};

use super::reason::own;

/// Any normal double holds this many digits (DBL_DIG).
const DIGITS: usize = 15;
/// No double has more than 767 significant digits.
const MAX_DIGITS: usize = 800;
/// Digits of an integer that a `u64` always holds.
const INTEGER_DIGITS: usize = 19;
/// 1970-01-01, counted from 0001-01-01 as day 1.
const EPOCH_DAY: i32 = 719_163;

/// Checks that the values of `read`, of any type and at any depth, are those in `written`. Columns that were not read as
/// strings are not checked.
///
/// # Errors
/// An error with the type when one of its values would be written differently.
pub(crate) fn check(written: &ArrayRef, read: &ArrayRef) -> Result<(), ArrowError> {
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
            check_text(written, read)
        }
        _ => Ok(()),
    }
}

fn differs(kind: &DataType) -> ArrowError {
    own(format!("Cast error: {kind} would not hold the value as it is written"))
}

fn check_floats(written: &ArrayRef, read: &ArrayRef) -> Result<(), ArrowError> {
    // Lossless for narrower floats.
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

/// Whether a double represents the number exactly, as [`is_number`] defines it.
pub(super) fn is_double(written: &str) -> bool {
    double(written).is_some()
}

/// The double that represents the number exactly, as [`is_number`] defines it.
pub(crate) fn double(written: &str) -> Option<f64> {
    written.parse().ok().filter(|number| is_number(written, *number, true))
}

/// The same for a float of 32 bits.
#[cfg(feature = "kafka")]
pub(crate) fn single(written: &str) -> Option<f32> {
    written.parse().ok().filter(|number: &f32| is_number(written, f64::from(*number), false))
}

/// `true` or `false`, in any case.
pub(crate) fn boolean(written: &str) -> Option<bool> {
    [true, false].into_iter().find(|value| written.eq_ignore_ascii_case(if *value { "true" } else { "false" }))
}

/// Whether `number`, printed with as many significant digits as `written` has, has the same digits. True for 0.1 and for
/// doubles that were printed with all digits; false for identifiers, long integers, and numbers that overflow or
/// underflow.
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
    let (whole, mut fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    if whole.is_empty() {
        fraction = fraction.trim_start_matches('0');
    }
    match whole.len() + fraction.len() {
        0 => number == 0.0,
        n if n <= DIGITS && is_double && number.is_normal() => true,
        n if n > MAX_DIGITS => false,
        n => {
            let digits = whole.bytes().chain(fraction.bytes());
            let printed = format!("{:.*e}", n - 1, number.abs());
            let printed = printed.split('e').next().unwrap_or_default();
            printed.bytes().filter(|&byte| byte != b'.').eq(digits)
        }
    }
}

/// Checks types whose values have one canonical text.
fn check_text(written: &ArrayRef, read: &ArrayRef) -> Result<(), ArrowError> {
    let is_canonical = canonical(read);
    for (row, written) in written.as_string::<i32>().iter().enumerate() {
        let Some(written) = written else { continue };
        if !is_canonical(row, written) && !is_shown(written, read, row)? {
            return Err(differs(read.data_type()));
        }
    }
    Ok(())
}

/// A check of the value of a row against a text.
type Check<'a> = Box<dyn Fn(usize, &str) -> bool + 'a>;

/// A fast test whether a text is the canonical one of the value in a row. If it fails, the value must be formatted and
/// compared.
fn canonical<'a>(read: &'a ArrayRef) -> Check<'a> {
    match read.data_type() {
        DataType::Int8 => values::<Int8Type>(read, integer),
        DataType::Int16 => values::<Int16Type>(read, integer),
        DataType::Int32 => values::<Int32Type>(read, integer),
        DataType::Int64 => values::<Int64Type>(read, integer),
        DataType::UInt8 => values::<UInt8Type>(read, integer),
        DataType::UInt16 => values::<UInt16Type>(read, integer),
        DataType::UInt32 => values::<UInt32Type>(read, integer),
        DataType::UInt64 => values::<UInt64Type>(read, integer),
        DataType::Date32 => values::<Date32Type>(read, |text| day(text.as_bytes()).map(i128::from)),
        DataType::Timestamp(unit, zone) => {
            let is_utc = match zone.as_deref() {
                None => false,
                Some("+00:00") => true,
                Some(_) => return Box::new(|_, _| false),
            };
            match unit {
                TimeUnit::Second => values::<TimestampSecondType>(read, move |text| time(text, 0, is_utc)),
                TimeUnit::Millisecond => values::<TimestampMillisecondType>(read, move |text| time(text, 3, is_utc)),
                TimeUnit::Microsecond => values::<TimestampMicrosecondType>(read, move |text| time(text, 6, is_utc)),
                TimeUnit::Nanosecond => values::<TimestampNanosecondType>(read, move |text| time(text, 9, is_utc)),
            }
        }
        DataType::Boolean => {
            let values = read.as_boolean();
            Box::new(|row, text| values.is_valid(row) && boolean(text) == Some(values.value(row)))
        }
        _ => Box::new(|_, _| false),
    }
}

/// Compares the values with the results of `parse`.
fn values<'a, T: ArrowPrimitiveType<Native: Into<i128>>>(
    read: &'a ArrayRef,
    parse: impl Fn(&str) -> Option<i128> + 'a,
) -> Check<'a> {
    let values = read.as_primitive::<T>();
    Box::new(move |row, text| values.is_valid(row) && parse(text) == Some(values.value(row).into()))
}

/// An integer without leading zeros and plus sign.
pub(crate) fn integer(text: &str) -> Option<i128> {
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let is_negative = unsigned.len() < text.len();
    let is_canonical = match unsigned.as_bytes() {
        [b'0'] => !is_negative,
        [first, ..] => *first != b'0' && unsigned.len() <= INTEGER_DIGITS,
        [] => false,
    };
    let number = i128::from(digits(unsigned.as_bytes()).filter(|_| is_canonical)?);
    Some(if is_negative { -number } else { number })
}

/// The number of at most [`INTEGER_DIGITS`] digits.
fn digits(text: &[u8]) -> Option<u64> {
    text.iter().try_fold(0, |number: u64, byte| {
        let digit = byte.wrapping_sub(b'0');
        (digit < 10).then(|| number.wrapping_mul(10).wrapping_add(digit.into()))
    })
}

/// Days since 1970 of `YYYY-MM-DD`.
pub(crate) fn day(text: &[u8]) -> Option<i32> {
    let [y @ .., b'-', m1, m0, b'-', d1, d0] = text else { return None };
    let number = |text: &[u8]| digits(text).and_then(|number| u32::try_from(number).ok());
    let year = i32::try_from(number(y).filter(|_| y.len() == 4)?).ok()?;
    let date = NaiveDate::from_ymd_opt(year, number(&[*m1, *m0])?, number(&[*d1, *d0])?)?;
    Some(date.num_days_from_ce() - EPOCH_DAY)
}

/// Units of 10^-`precision` seconds since 1970 of `YYYY-MM-DD?HH:MM:SS` with `T` or a space in the middle, perhaps with a
/// fraction, and with `Z` or `+00:00` if `is_utc`.
fn time(text: &str, precision: usize, is_utc: bool) -> Option<i128> {
    let without_zone = text.strip_suffix('Z').or_else(|| text.strip_suffix("+00:00"));
    if without_zone.is_some() != is_utc {
        return None;
    }
    let (date, clock) = without_zone.unwrap_or(text).as_bytes().split_at_checked(10)?;
    let [b'T' | b' ', h1, h0, b':', m1, m0, b':', s1, s0, fraction @ ..] = clock else { return None };
    let below = |text: [u8; 2], limit: u64| digits(&text).filter(|number| *number < limit);
    let (hour, minute, second) = (below([*h1, *h0], 24)?, below([*m1, *m0], 60)?, below([*s1, *s0], 60)?);
    let seconds = i128::from(day(date)?) * 86_400 + i128::from(hour * 3600 + minute * 60 + second);
    Some(seconds * 10_i128.pow(precision as u32) + i128::from(units(fraction, precision)?))
}

/// Units of 10^-`precision` seconds since 1970 of a time in RFC 3339, in any zone.
#[cfg(feature = "kafka")]
pub(crate) fn instant(text: &str, precision: usize) -> Option<i128> {
    const ZONE: usize = "+hh:mm".len();
    if let Some(time) = text.strip_suffix('Z') {
        return self::time(time, precision, false);
    }
    let (local, zone) = text.split_at_checked(text.len().checked_sub(ZONE)?)?;
    let [sign @ (b'+' | b'-'), h1, h0, b':', m1, m0] = *zone.as_bytes() else { return None };
    let below = |text: [u8; 2], limit: u64| digits(&text).filter(|number| *number < limit);
    let east = i128::from(below([h1, h0], 24)? * 3600 + below([m1, m0], 60)? * 60);
    let east = if sign == b'-' { -east } else { east };
    Some(time(local, precision, false)? - east * 10_i128.pow(precision as u32))
}

/// Units of 10^-`precision` in a fraction such as `.25`; `None` when it has more digits than that, zeros at its end left
/// out.
fn units(fraction: &[u8], precision: usize) -> Option<u64> {
    let figures = match fraction {
        [] => return Some(0),
        [b'.', figures @ ..] if !figures.is_empty() => figures,
        _ => return None,
    };
    let zeros = figures.iter().rev().take_while(|byte| **byte == b'0').count();
    let figures = &figures[..figures.len() - zeros];
    let missing = precision.checked_sub(figures.len())?;
    Some(digits(figures)? * 10_u64.pow(missing as u32))
}

/// Whether the formatted value of a row is equal to the text.
fn is_shown(written: &str, read: &ArrayRef, row: usize) -> Result<bool, ArrowError> {
    let shown = ArrayFormatter::try_new(read, &FormatOptions::default())?.value(row).try_to_string()?;
    Ok(match read.data_type() {
        DataType::Boolean => shown.eq_ignore_ascii_case(written),
        DataType::Timestamp(..) => normal_time(&shown) == normal_time(written),
        _ => shown == written,
    })
}

/// A timestamp in a normal form: with `T`, without trailing zeros of the fraction, and whether it is in UTC.
fn normal_time(shown: &str) -> (String, bool) {
    let zone = shown.strip_suffix('Z').or_else(|| shown.strip_suffix("+00:00"));
    let time = zone.unwrap_or(shown).replacen(' ', "T", 1);
    let time = if time.contains('.') { time.trim_end_matches('0').trim_end_matches('.') } else { &time };
    (time.to_owned(), zone.is_some())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::{array::StringArray, datatypes::TimeUnit};
    use proptest::prelude::*;

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

    /// The check without the shortcut: every value is formatted and compared.
    fn check_formatted(written: &ArrayRef, read: &ArrayRef) -> Result<(), ArrowError> {
        let kind = read.data_type();
        let shown = ArrayFormatter::try_new(read, &FormatOptions::default())?;
        for (row, written) in written.as_string::<i32>().iter().enumerate() {
            let Some(written) = written else { continue };
            let shown = shown.value(row).try_to_string()?;
            let same = match kind {
                DataType::Boolean => shown.eq_ignore_ascii_case(written),
                DataType::Timestamp(..) => formatted_time(&shown) == formatted_time(written),
                _ => shown == written,
            };
            if !same {
                return Err(differs(kind));
            }
        }
        Ok(())
    }

    fn formatted_time(shown: &str) -> (String, bool) {
        let zone = shown.strip_suffix('Z').or_else(|| shown.strip_suffix("+00:00"));
        let time = zone.unwrap_or(shown).replacen(' ', "T", 1);
        let time = if time.contains('.') { time.trim_end_matches('0').trim_end_matches('.') } else { &time };
        (time.to_owned(), zone.is_some())
    }

    fn kinds() -> Vec<DataType> {
        use DataType::*;
        let mut kinds = vec![Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64, Boolean, Date32, Date64];
        for unit in [TimeUnit::Second, TimeUnit::Millisecond, TimeUnit::Microsecond, TimeUnit::Nanosecond] {
            for zone in [None, Some("+00:00"), Some("+02:00")] {
                kinds.push(Timestamp(unit, zone.map(Into::into)));
            }
        }
        kinds
    }

    /// What looks like a value of one of the types, and often is.
    fn text() -> impl Strategy<Value = String> {
        let times = "[0-9]{4}-(0[0-9]|1[0-3])-[0-3][0-9]([T ][0-2][0-9]:[0-6][0-9]:[0-6][0-9]([.][0-9]{0,3}0{0,4}[0-9]{0,4})?(Z|[+]00:00|[+]02:00| ?)?)?";
        let near = "(19[0-9][0-9]|20[0-9][0-9])-0[1-9]-[12][0-9][T ]1[0-9]:[0-5][0-9]:[0-5][0-9]([.][0-9]{1,3}0{0,6})?(Z|[+]00:00)?";
        prop_oneof![
            "[-+]?0{0,2}[0-9]{1,20}",
            any::<i64>().prop_map(|n| n.to_string()),
            (-200_i64..300).prop_map(|n| n.to_string()),
            "[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|yes|no|[tf01]",
            times,
            near,
            near,
            "[-0-9T:. Z]{0,24}",
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn the_shortcut_accepts_what_formatting_accepts(texts in prop::collection::vec(prop::option::of(text()), 1..4)) {
            let column: ArrayRef = Arc::new(StringArray::from(texts.clone()));
            let options = arrow::compute::CastOptions { safe: true, ..Default::default() };
            for kind in kinds() {
                // What cannot be parsed is NULL in `read`, and so differs from what is written.
                let read = arrow::compute::cast_with_options(&column, &kind, &options).unwrap();
                let expected = check_formatted(&column, &read).is_ok();
                prop_assert_eq!(check(&column, &read).is_ok(), expected, "{:?} as {}", texts, kind);
            }
        }

        /// The shortcut is of use only if it knows what files usually hold.
        #[test]
        fn usual_values_are_known_without_formatting(n: i64, days in -700_000_i32..2_900_000, seconds in 0_i64..4_000_000_000, millis in 0_i64..1000, yes: bool) {
            let columns: [ArrayRef; 4] = [
                Arc::new(arrow::array::Int64Array::from(vec![n])),
                Arc::new(arrow::array::Date32Array::from(vec![days])),
                Arc::new(arrow::array::TimestampMillisecondArray::from(vec![seconds * 1000 + millis])),
                Arc::new(arrow::array::BooleanArray::from(vec![yes])),
            ];
            for read in columns {
                let shown = arrow::util::display::array_value_to_string(&read, 0).unwrap();
                prop_assert!(canonical(&read)(0, &shown), "{}", shown);
            }
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
