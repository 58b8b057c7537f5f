//! Formatting of numbers and texts for people.

/// A number with about four digits at any size: `0.4817`, `12.35`, `1.20e-5`.
pub fn number(value: f64) -> String {
    let exponent = value.abs().log10().floor();
    if value == 0.0 || (-4.0..6.0).contains(&exponent) {
        let decimals = if value == 0.0 { 0 } else { (3.0 - exponent).clamp(0.0, 6.0) as usize };
        let text = format!("{value:.decimals$}");
        if decimals == 0 { text } else { text.trim_end_matches('0').trim_end_matches('.').to_owned() }
    } else if value.is_finite() {
        format!("{value:.2e}")
    } else {
        "not finite".to_owned()
    }
}

/// A fraction or a reward with three decimals, as in a column: `0.855`.
pub fn score(value: f64) -> String {
    format!("{value:.3}")
}

/// A count or a rate: `0.043`, `870`, `12.3k`, `4.05M`.
pub fn count(value: f64) -> String {
    match value.abs() {
        size if size < 10.0 => number(value),
        size if size < 999.5 => format!("{value:.0}"),
        size if size < 9_995.0 => format!("{:.2}k", value / 1e3),
        size if size < 99_950.0 => format!("{:.1}k", value / 1e3),
        size if size < 999_500.0 => format!("{:.0}k", value / 1e3),
        size if size < 9_995_000.0 => format!("{:.2}M", value / 1e6),
        _ => format!("{:.1}M", value / 1e6),
    }
}

/// Bytes in GiB, with about three digits: `91.4`, `0.0312`.
pub fn gib(bytes: usize) -> String {
    let gib = bytes as f64 / f64::from(1 << 30);
    match gib {
        0.0 => "0".to_owned(),
        gib if gib < 0.01 => format!("{gib:.4}"),
        gib if gib < 1.0 => format!("{gib:.3}"),
        gib if gib < 10.0 => format!("{gib:.2}"),
        gib => format!("{gib:.1}"),
    }
}

/// A duration, in at most two units: `4.2 s`, `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        _ if seconds < 9.95 => format!("{seconds:.1} s"),
        0..120 => format!("{whole} s"),
        120..7_200 => format!("{} min {} s", whole / 60, whole % 60),
        7_200..172_800 => format!("{} h {} min", whole / 3_600, whole % 3_600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3_600),
    }
}

/// A duration in clock format, which is shorter: `0:31`, `3:20`, `2:05:07`.
pub fn clock(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    let (hours, minutes, seconds) = (whole / 3_600, whole % 3_600 / 60, whole % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

/// A text of at most `most` characters, and the number of characters that are left out.
pub fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((end, _)) => {
            let left_out = text[end..].chars().count();
            format!("{} … ({left_out} more characters)", &text[..end])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_say_what_is_left_out() {
        assert_eq!(shortened("äöü", 3), "äöü");
        assert_eq!(shortened("äöüß", 3), "äöü … (1 more characters)");
        assert_eq!(shortened("", 0), "");
    }

    #[test]
    fn numbers() {
        let check = |value, expected: &str| assert_eq!(number(value), expected);
        check(0.0, "0");
        check(1.0, "1");
        check(0.48172, "0.4817");
        check(-0.05, "-0.05");
        check(12.3456, "12.35");
        check(5e-4, "0.0005");
        check(1.2e-5, "1.20e-5");
        check(123_456.0, "123456");
        check(1_000.0, "1000");
        check(1.5e9, "1.50e9");
        check(f64::NAN, "not finite");
        check(f64::INFINITY, "not finite");
    }

    #[test]
    fn counts() {
        let check = |value, expected: &str| assert_eq!(count(value), expected);
        check(0.0, "0");
        check(0.0429, "0.0429");
        check(3.0, "3");
        check(999.4, "999");
        check(999.6, "1.00k");
        check(9_996.0, "10.0k");
        check(12_345.0, "12.3k");
        check(123_456.0, "123k");
        check(999_600.0, "1.00M");
        check(12_345_678.0, "12.3M");
    }

    #[test]
    fn durations() {
        let check = |seconds, expected: &str| assert_eq!(duration(seconds), expected);
        check(0.04, "0.0 s");
        check(9.96, "10 s");
        check(119.4, "119 s");
        check(119.6, "2 min 0 s");
        check(7_500.0, "2 h 5 min");
        check(273_600.0, "3 d 4 h");
    }

    #[test]
    fn clocks() {
        let check = |seconds, expected: &str| assert_eq!(clock(seconds), expected);
        check(0.4, "0:00");
        check(59.6, "1:00");
        check(7_507.0, "2:05:07");
    }
}
