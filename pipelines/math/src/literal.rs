//! Literals of numbers: `12`, `1,234`, `10 000`, `0.5`, `1.5e-3`, `0.\overline{3}`.

use num_bigint::BigInt;
use num_rational::BigRational;

use super::expr::Number;
use super::lex::Lexer;

/// Limit of digits in a literal, and of the power of ten in its exponent.
const MOST_DIGITS: usize = 300;

/// Marks of a decimal that goes on.
const DOTS: [&str; 5] = ["...", "…", r"\ldots", r"\dots", r"\cdots"];

impl Lexer<'_> {
    /// A number at the start of the text. With a decimal comma, a point between groups of three digits groups them.
    pub(super) fn number(&mut self) -> Option<Number> {
        let mut digits = String::new();
        let first = self.take_digits(&mut digits);
        if (1..=3).contains(&first) && !digits.starts_with('0') {
            self.take_groups(&mut digits);
        }
        let mut places = None;
        let comma = self.decimal_comma && self.rest.starts_with(',') && self.digits_at(1) > 0;
        let mark = if self.decimal_comma && self.rest.starts_with("{,}") { "{,}" } else { "{.}" };
        let braced = self.rest.starts_with(mark) && self.digits_at(3) > 0;
        if comma || braced || (self.rest.starts_with('.') && !self.rest.starts_with("..")) {
            self.rest = &self.rest[if braced { 3 } else { 1 }..];
            let count = self.take_digits(&mut digits);
            // `5.` is an integer at the end of a sentence.
            places = (count > 0).then_some(count as i32);
            if let Some(period) = self.take_period(count) {
                return repeating(&digits, count, &period);
            }
            if let Some(dots) = DOTS.iter().find(|dots| self.rest.starts_with(**dots)) {
                let period = last_period(&digits[digits.len() - count..])?.to_owned();
                self.rest = &self.rest[dots.len()..];
                return repeating(&digits[..digits.len() - period.len()], count - period.len(), &period);
            }
        }
        if digits.len() > MOST_DIGITS {
            return None;
        }
        let mut exponent = -places.unwrap_or(0);
        if let Some(power) = self.take_exponent()? {
            exponent += power;
            places = places.map(|places| places - power);
        }
        let value = BigRational::from(digits.parse::<BigInt>().ok()?) * power_of_ten(exponent);
        Some(Number { value, places })
    }

    /// Takes groups of thousands: `,234` outside of brackets, and with spaces anywhere.
    fn take_groups(&mut self, digits: &mut String) {
        const COMMAS: [&str; 3] = [",\\! ", ",\\!", ","];
        const SPACES: [&str; 16] = [
            "{,}\\!",
            "{,}",
            "{, }",
            " {,}",
            " {, }",
            " {,} ",
            "\\,",
            "\\ ",
            "\\;",
            "\\:",
            "~",
            "{\\,}",
            "{\\ }",
            "\\text{ }",
            "'",
            " ",
        ];
        let points: &[&str] = if self.decimal_comma { &["."] } else { &[] };
        let commas: &[&str] = if self.depth > 0 || self.decimal_comma { &[] } else { &COMMAS };
        let length = indian_groups(self.rest).filter(|_| !commas.is_empty() && digits.len() < 3);
        let mut separators = points.iter().chain(commas).chain(&SPACES);
        let length = length.or_else(|| separators.find_map(|separator| groups(self.rest, separator)));
        // A lone point is a decimal point, even with a decimal comma.
        let is_decimal =
            |length: usize| self.rest.starts_with('.') && !self.rest[length..].starts_with(',') && length < 8;
        if let Some(length) = length.filter(|length| !is_decimal(*length)) {
            digits.extend(self.rest[..length].chars().filter(char::is_ascii_digit));
            self.rest = &self.rest[length..];
        }
    }

    /// The period of a repeating decimal with `places` digits before it.
    fn take_period(&mut self, places: usize) -> Option<String> {
        for bar in ["\\overline", "\\bar"] {
            let Some(rest) = self.rest.strip_prefix(bar) else { continue };
            let (inner, rest) = match rest.strip_prefix('{') {
                Some(rest) => rest.split_once('}')?,
                None => rest.split_at_checked(1)?,
            };
            return self.taken(inner, rest);
        }
        if places == 0
            && let Some((inner, rest)) = self.rest.strip_prefix('(').and_then(|rest| rest.split_once(')'))
        {
            return self.taken(inner, rest);
        }
        let (first, rest) = dotted(self.rest)?;
        let between = rest.bytes().take_while(u8::is_ascii_digit).count();
        match dotted(&rest[between..]) {
            Some((last, after)) => self.taken(&format!("{first}{}{last}", &rest[..between]), after),
            None if between == 0 => self.taken(first, rest),
            None => None,
        }
    }

    fn taken(&mut self, period: &str, rest: &str) -> Option<String> {
        let is_period = !period.is_empty() && period.bytes().all(|byte| byte.is_ascii_digit());
        let period = is_period.then(|| period.to_owned())?;
        self.rest = &self.rest[self.rest.len() - rest.len()..];
        Some(period)
    }

    /// The power in `e5` or `E-5`, if digits follow; otherwise `e` is Euler's number.
    fn take_exponent(&mut self) -> Option<Option<i32>> {
        let Some(after) = self.rest.strip_prefix(['e', 'E']) else { return Some(None) };
        let unsigned = after.strip_prefix(['+', '-']).unwrap_or(after);
        let count = unsigned.bytes().take_while(u8::is_ascii_digit).count();
        if count == 0 {
            return Some(None);
        }
        let length = after.len() - unsigned.len() + count;
        let power: i32 = after[..length].parse().ok()?;
        self.rest = &after[length..];
        (power.unsigned_abs() as usize <= MOST_DIGITS).then_some(Some(power))
    }
}

/// Bytes of the groups of three digits at the start of `rest`, each after `separator`.
fn groups(rest: &str, separator: &str) -> Option<usize> {
    let mut length = 0;
    while let Some(group) = rest[length..].strip_prefix(separator) {
        if group.bytes().take_while(u8::is_ascii_digit).count() != 3 {
            break;
        }
        length += separator.len() + 3;
    }
    // `1,234,5` does not group digits, and `3 125/1000` is a mixed number.
    let after = &rest[length..];
    let follows = after.strip_prefix(separator).unwrap_or_default().starts_with(|c: char| c.is_ascii_digit());
    let is_mixed = separator != "," && after.trim_start().starts_with('/');
    (length > 0 && !follows && !is_mixed).then_some(length)
}

/// Bytes of groups of two digits and a last one of three: `1,00,000`. A zero at the start of one shows that it is no
/// list.
fn indian_groups(rest: &str) -> Option<usize> {
    let pair = |at: usize| {
        rest[at..].starts_with(',') && rest[at + 1..].bytes().take_while(u8::is_ascii_digit).count() == 2
    };
    let mut length = 0;
    let mut has_zero = false;
    while pair(length) {
        has_zero |= rest[length + 1..].starts_with('0');
        length += 3;
    }
    let last = groups(&rest[length..], ",").filter(|last| *last == 4 && has_zero)?;
    Some(length + last)
}

/// The digit in `\dot{3}` at the start of `text`, and the text behind it.
fn dotted(text: &str) -> Option<(&str, &str)> {
    let (digit, rest) = text.strip_prefix(r"\dot{")?.split_once('}')?;
    (digit.len() == 1).then_some((digit, rest))
}

/// The period that the decimals show: one digit three times, or several twice.
fn last_period(decimals: &str) -> Option<&str> {
    (1..=decimals.len() / 2).find_map(|length| {
        let (before, period) = decimals.split_at(decimals.len() - length);
        let is_repeated =
            if length == 1 { before.ends_with(&period.repeat(2)) } else { before.ends_with(period) };
        is_repeated.then_some(period)
    })
}

/// A number from its digits, with `places` decimals, and a repeating period.
fn repeating(digits: &str, places: usize, period: &str) -> Option<Number> {
    if digits.len() + period.len() > MOST_DIGITS {
        return None;
    }
    let before = BigRational::from(format!("0{digits}").parse::<BigInt>().ok()?);
    let nines = power_of_ten(period.len() as i32) - BigRational::from(BigInt::from(1));
    let period = BigRational::from(period.parse::<BigInt>().ok()?) / nines;
    Some(Number { value: (before + period) * power_of_ten(-(places as i32)), places: None })
}

fn power_of_ten(power: i32) -> BigRational {
    num_traits::Pow::pow(BigRational::from(BigInt::from(10)), power)
}
