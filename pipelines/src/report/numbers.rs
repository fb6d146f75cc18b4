//! Numbers formatted for people.

use std::time::Duration;

/// `1234567` -> `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1536` -> `1.5 KiB`: binary units, with one decimal from KiB on.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 and more would print as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// 3725 s -> `1h02m05s`; below a minute, seconds with one decimal.
pub fn duration(d: Duration) -> String {
    let seconds = d.as_secs_f64();
    if seconds < 59.95 {
        return format!("{seconds:.1}s");
    }
    let whole = seconds.round() as u64;
    let (h, m, s) = (whole / 3600, whole / 60 % 60, whole % 60);
    if h > 0 { format!("{h}h{m:02}m{s:02}s") } else { format!("{m}m{s:02}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected values written by hand.
    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0, 1023, 1536, 1 << 20, (1 << 20) - 1].map(bytes),
            ["0 B", "1023 B", "1.5 KiB", "1.0 MiB", "1.0 MiB"]
        );
        assert_eq!(
            [4.26, 59.99, 61.0, 3725.0].map(|s| duration(Duration::from_secs_f64(s))),
            ["4.3s", "1m00s", "1m01s", "1h02m05s"]
        );
    }
}
