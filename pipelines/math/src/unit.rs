//! Units after a number, and currencies before it.

use std::sync::LazyLock;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::ToPrimitive;
use regex::Regex;

use super::expr::Number;
use super::foreign::{self, count_of, scale_of};
use super::token::Token;

/// Words after a number that multiply it.
const COUNTS: [(&str, i64); 9] = [
    ("ten", 10),
    ("dozen", 12),
    ("hundred", 100),
    ("thousand", 1000),
    ("lakh", 100_000),
    ("million", 1_000_000),
    ("crore", 10_000_000),
    ("billion", 1_000_000_000),
    ("trillion", 1_000_000_000_000),
];

/// Words after a number that divide it. Singulars are excluded: `5 third graders` are five.
const PARTS: [(&str, i64); 12] = [
    ("halves", 2),
    ("thirds", 3),
    ("fourths", 4),
    ("fifths", 5),
    ("sixths", 6),
    ("sevenths", 7),
    ("eighths", 8),
    ("ninths", 9),
    ("tenths", 10),
    ("twelfths", 12),
    ("hundredths", 100),
    ("thousandths", 1000),
];

/// Other words that change a number, or may: a quarter is also a coin.
const NUMBERS: &str = "zero one two three four five six seven eight nine eleven twelve thirteen fourteen fifteen \
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety half quarter quarters \
    ones millionths billionths quadrillion gross";

/// Words that change a number only directly after it: `5 squared` is 25, but `5 cm squared` has a unit.
const OPERATIONS: [&str; 8] = ["squared", "cubed", "factorial", "k", "mil", "mln", "mn", "bn"];

/// Words after a number that say it is not the answer, or not exactly.
const DOUBTS: &str = "not no wrong false incorrect isn wasn least most more less fewer over under above below approximately \
    approx about around roughly almost nearly circa plus minus times negative if maybe perhaps unless except too";

/// Letters that may be a unit or a factor: kelvin and thousands, bytes and billions.
const SCALES: [&str; 4] = ["k", "K", "M", "B"];

/// Removes the unit from `tokens` and returns its canonical spelling. A counting word such as `million`
/// becomes a factor. `None` if a word is unknown, since the number might be another one without it.
pub(super) fn take_unit(tokens: &mut Vec<Token>) -> Option<Option<String>> {
    let currency = take_currency(tokens);
    name_temperature(tokens);
    flatten_fraction(tokens);
    split_scales(tokens);
    let Some(start) = start_of_words(tokens) else { return Some(currency) };
    let mut words = tokens.split_off(start);
    words.drain(..take_factors(tokens, &words));
    let counts = |token: &Token| matches!(token, Token::Word(word) if is_number_word(word));
    let operates = |token: &Token| matches!(token, Token::Word(word) if OPERATIONS.contains(&&**word));
    if words.iter().any(counts) || words.first().is_some_and(operates) {
        return None;
    }
    if currency.is_some() {
        tokens.append(&mut words);
        return Some(currency);
    }
    Some((!words.is_empty()).then(|| spell(&words)))
}

/// `text` with the letters of a unit at its end in `\text{}`, if a space separates them from the number: `5 m`, `24 m^2`.
pub(super) fn with_upright_unit(text: &str) -> Option<String> {
    /// Limit of a text with two readings.
    const MOST_BYTES: usize = 100;
    static UNIT: LazyLock<Regex> = LazyLock::new(|| {
        let power = r"(?:\^(?:[23]|\{[23]\}))?";
        Regex::new(&format!(
            r"^.*[0-9}}](?:\s|~|\\[,; ])+((?:[mshgLNJWV]|[kcm]m|kg){power}(?:/(?:[mshgL]|[kcm]m){power})?)$"
        ))
        .expect("a pattern of this file")
    });
    if text.len() > MOST_BYTES {
        return None;
    }
    let unit = UNIT.captures(text)?.get(1)?;
    Some(format!(r"{}\text{{{}}}", &text[..unit.start()], unit.as_str()))
}

/// `°C` is a unit, not an angle.
fn name_temperature(tokens: &mut Vec<Token>) {
    let unit = match tokens.as_slice() {
        [.., Token::Degree, Token::Symbol(name) | Token::Word(name)] => match name.as_str() {
            "C" | "celsius" => "celsius",
            "F" | "fahrenheit" => "fahrenheit",
            _ => return,
        },
        _ => return,
    };
    tokens.truncate(tokens.len() - 2);
    tokens.push(Token::Word(unit.to_owned()));
}

/// Writes a fraction of units at the end in one line: `\frac{km}{h}` as `km/h`.
fn flatten_fraction(tokens: &mut Vec<Token>) {
    use Token::{Close, Divide, Fraction, Number, Open, Power, Times, Word};
    let Some(start) = tokens.iter().rposition(|token| *token == Fraction) else { return };
    let is_unit = |part: &[Token]| {
        let starts = matches!(part.first(), Some(Word(_)));
        starts && part.iter().all(|token| matches!(token, Word(_) | Power | Number(_) | Times))
    };
    let mut groups = tokens[start + 1..].split(|token| matches!(token, Open('<') | Close('<')));
    let parts = (groups.next(), groups.next(), groups.next(), groups.next(), groups.next(), groups.next());
    if let (Some([]), Some(top), Some([]), Some(below), Some([]), None) = parts
        && is_unit(top)
        && is_unit(below)
    {
        let unit = [top, &[Divide], below].concat();
        tokens.truncate(start);
        tokens.extend(unit);
    }
}

/// Separates a power of ten from the word after it: `万元` is `万` and `元`.
fn split_scales(tokens: &mut Vec<Token>) {
    let mut at = 1;
    while at < tokens.len() {
        let follows = matches!(&tokens[at - 1], Token::Number(_))
            || matches!(&tokens[at - 1], Token::Word(word) if scale_of(word).is_some());
        if follows
            && let Token::Word(word) = &tokens[at]
            && let Some((length, _)) = scale_of(word).filter(|(length, _)| *length < word.len())
        {
            let (scale, rest) = word.split_at(length);
            let parts = [Token::Word(scale.to_owned()), Token::Word(rest.to_owned())];
            tokens.splice(at..=at, parts);
        }
        at += 1;
    }
}

/// Returns true if `unit` may change a number for which no unit is expected.
pub(super) fn changes_meaning(unit: &str) -> bool {
    SCALES.contains(&unit) || unit.split(|c: char| !c.is_alphabetic()).any(doubts)
}

fn doubts(word: &str) -> bool {
    DOUBTS.split_whitespace().any(|doubt| doubt == word) || foreign::doubts(word)
}

/// Returns true for a half of the day, which is a part of a time.
pub(super) fn is_half_of_day(unit: &str) -> bool {
    ["am", "pm"].contains(&unit)
}

/// Returns true if `word` changes the number before it.
pub(super) fn changes_number(word: &str) -> bool {
    is_number_word(word) || OPERATIONS.contains(&word)
}

fn is_number_word(word: &str) -> bool {
    let is_part = |name: &str| name == word || name.strip_suffix('s') == Some(word);
    count(word).is_some()
        || PARTS.iter().any(|(name, _)| is_part(name))
        || NUMBERS.split(' ').any(|name| name == word)
}

fn count(word: &str) -> Option<i64> {
    let found = COUNTS.iter().find(|(name, _)| word == *name || word.strip_suffix('s') == Some(name));
    let scale = scale_of(word).filter(|(length, _)| *length == word.len()).map(|(_, factor)| factor);
    found.map(|(_, count)| *count).or_else(|| count_of(word)).or(scale)
}

/// Multiplies `tokens` by the leading factors in `words`, and returns the number of words used.
fn take_factors(tokens: &mut Vec<Token>, words: &[Token]) -> usize {
    let mut taken = 0;
    while let Some(factor) = factor(&words[taken..]) {
        tokens.extend([Token::Times, Token::Number(Number { value: factor, places: None })]);
        taken += 1;
    }
    taken
}

fn factor(words: &[Token]) -> Option<BigRational> {
    let (Token::Word(word), rest) = words.split_first()? else { return None };
    if rest.first() == Some(&Token::Power) {
        return None;
    }
    if let Some(count) = count(word) {
        return Some(BigRational::from(BigInt::from(count)));
    }
    // `3 halves of it`, but not `3 halves lost`.
    let ends = rest.first().is_none_or(|next| *next == Token::Word("of".to_owned()));
    let (_, parts) = PARTS.iter().find(|(name, _)| ends && name == word)?;
    Some(BigRational::new(BigInt::from(1), BigInt::from(*parts)))
}

fn take_currency(tokens: &mut Vec<Token>) -> Option<String> {
    let is_sign = |token: &Token| matches!(token, Token::Word(word) if ["$", "€", "£", "¥", "₹", "₽", "₩"].contains(&word.as_str()));
    let at = tokens.iter().position(is_sign)?;
    let Token::Word(sign) = tokens.remove(at) else { return None };
    Some(singular(&sign).to_owned())
}

/// Start of the trailing words with their powers and divisors, if a value precedes them.
fn start_of_words(tokens: &[Token]) -> Option<usize> {
    let mut start = tokens.len();
    while start > 0 {
        let length = part_of_unit(&tokens[..start]);
        if length == 0 {
            break;
        }
        start -= length;
    }
    // A power or a slash before the first word belongs to the number.
    start += tokens[start..].iter().position(|token| matches!(token, Token::Word(_)))?;
    let before = tokens[..start].last()?;
    let ends_value = matches!(
        before,
        Token::Number(_) | Token::Symbol(_) | Token::Constant(_) | Token::Close(_) | Token::Factorial
    );
    ends_value.then_some(start)
}

/// Number of trailing tokens that form one part of a unit.
fn part_of_unit(tokens: &[Token]) -> usize {
    use Token::*;
    match tokens {
        [.., Power, Open('<'), Minus, Number(_), Close('<')] => 5,
        [.., Power, Open('<'), Number(_), Close('<')] => 4,
        [.., Power, Number(_)] => 2,
        [.., Word(_)] => 1,
        [.., Word(_) | Number(_) | Close(_), Divide | Times] => 1,
        _ => 0,
    }
}

/// Canonical spelling: the parts in alphabetical order with their powers. Powers that are no small integers are
/// spelled as they are.
fn spell(tokens: &[Token]) -> String {
    let mut parts: Vec<(&str, i32)> = Vec::new();
    let (mut power, mut divides) = (1, false);
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        at += 1;
        match token {
            Token::Word(word) => match word.as_str() {
                "square" | "sq" => power = 2,
                "cubic" => power = 3,
                "squared" => raise(&mut parts, 2),
                "cubed" => raise(&mut parts, 3),
                "per" => divides = true,
                word => {
                    parts.push((singular(word), if divides { -power } else { power }));
                    (power, divides) = (1, false);
                }
            },
            Token::Divide => divides = true,
            Token::Power => {
                let group = &tokens[at..];
                let is_negative = group.iter().take(2).any(|token| *token == Token::Minus);
                let exponent = group.iter().find_map(|token| match token {
                    Token::Number(number) => number.value.to_i32(),
                    _ => None,
                });
                raise(&mut parts, exponent.unwrap_or(0) * if is_negative { -1 } else { 1 });
            }
            _ => {}
        }
    }
    parts.sort_unstable();
    let spelled = parts.iter().map(|(name, power)| match power {
        1 => (*name).to_owned(),
        power => format!("{name}^{power}"),
    });
    spelled.collect::<Vec<_>>().join(" ")
}

/// Raises the last part of a unit to a power.
fn raise(parts: &mut [(&str, i32)], exponent: i32) {
    if let Some((_, power)) = parts.last_mut() {
        *power = power.saturating_mul(exponent);
    }
}

fn singular(word: &str) -> &str {
    match word {
        "$" | "dollars" | "usd" => "dollar",
        "€" | "euros" | "eur" => "euro",
        "£" | "pounds" => "pound",
        "¥" | "円" | "元" | "yuan" => "yen",
        "₹" | "rupees" => "rupee",
        "₽" | "рублей" | "рубля" | "рубль" => "rouble",
        "¢" | "cents" => "cent",
        "₩" | "원" => "won",
        "cm" | "centimeters" | "centimetre" | "centimetres" => "centimeter",
        "mm" | "millimeters" | "millimetre" | "millimetres" => "millimeter",
        "km" | "kilometers" | "kilometre" | "kilometres" => "kilometer",
        "m" | "meters" | "metre" | "metres" => "meter",
        "kg" | "kilograms" | "kilogramme" => "kilogram",
        "g" | "grams" => "gram",
        "mg" | "milligrams" => "milligram",
        "ml" | "milliliters" | "millilitre" | "millilitres" => "milliliter",
        "l" | "L" | "liters" | "litre" | "litres" => "liter",
        "s" | "sec" | "secs" | "seconds" => "second",
        "min" | "mins" | "minutes" => "minute",
        "h" | "hr" | "hrs" | "hours" => "hour",
        "in" | "inches" => "inch",
        "ft" | "feet" => "foot",
        "mi" | "miles" => "mile",
        "lb" | "lbs" => "pound",
        "oz" | "ounces" => "ounce",
        _ if word.len() > 3 && !word.ends_with("ss") && !doubts(word) => {
            word.strip_suffix('s').unwrap_or(word)
        }
        _ => word,
    }
}
