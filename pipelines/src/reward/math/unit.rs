//! Units behind a number, and currencies before it.

use super::lex::Token;

/// Takes the unit out of `tokens`; its spelling becomes one of each unit's.
pub(super) fn take_unit(tokens: &mut Vec<Token>) -> Option<String> {
    take_currency(tokens).or_else(|| take_words(tokens))
}

fn take_currency(tokens: &mut Vec<Token>) -> Option<String> {
    let is_sign =
        |token: &Token| matches!(token, Token::Word(word) if ["$", "€", "£"].contains(&word.as_str()));
    let at = tokens.iter().position(is_sign)?;
    let Token::Word(sign) = tokens.remove(at) else { return None };
    Some(singular(&sign).to_owned())
}

/// The words at the end, with their powers and what they are divided by.
fn take_words(tokens: &mut Vec<Token>) -> Option<String> {
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
    if !ends_value {
        return None;
    }
    let unit = spell(&tokens[start..]);
    tokens.truncate(start);
    Some(unit)
}

/// How many of the last tokens are one part of a unit.
fn part_of_unit(tokens: &[Token]) -> usize {
    use Token::*;
    match tokens {
        [.., Power, Open('<'), Number(_), Close('<')] => 4,
        [.., Power, Number(_)] => 2,
        [.., Word(_)] => 1,
        [.., Word(_), Divide] => 1,
        _ => 0,
    }
}

fn spell(tokens: &[Token]) -> String {
    let mut unit = String::new();
    let mut power = "";
    for token in tokens {
        match token {
            Token::Word(word) => match word.as_str() {
                "square" | "sq" => power = "^2",
                "cubic" => power = "^3",
                "squared" => unit.push_str("^2"),
                "cubed" => unit.push_str("^3"),
                "per" => unit.push('/'),
                word => {
                    if unit.ends_with(char::is_alphanumeric) {
                        unit.push(' ');
                    }
                    unit.push_str(singular(word));
                    unit.push_str(std::mem::take(&mut power));
                }
            },
            Token::Divide => unit.push('/'),
            Token::Power => unit.push('^'),
            Token::Number(number) => unit.push_str(&number.value.to_string()),
            _ => {}
        }
    }
    unit
}

fn singular(word: &str) -> &str {
    match word {
        "$" | "dollars" | "usd" => "dollar",
        "€" | "euros" | "eur" => "euro",
        "£" | "pounds" => "pound",
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
        _ if word.len() > 3 && !word.ends_with("ss") => word.strip_suffix('s').unwrap_or(word),
        _ => word,
    }
}
