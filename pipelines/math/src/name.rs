//! Names on one side of an equation: `AB = 5`, `f(x) = 2x`, `P(A) = 1/2`, `\text{Area} = 12`, `a:b = 3:2`.
//!
//! A name that the grammar would read as a formula is replaced by one symbol, and words are dropped, so that the
//! other side is the answer.

use super::context::{hedges, is_neutral};
use super::expr::{Function, Relation};
use super::token::Token;
use super::unit::changes_number;

/// Replaces names in `tokens`, of each item of a list.
pub(super) fn take_names(tokens: &mut Vec<Token>) {
    let mut named = Vec::with_capacity(tokens.len());
    let mut rest = &tokens[..];
    while !rest.is_empty() {
        let end = position(rest, |token| matches!(token, Token::Comma | Token::And | Token::Or))
            .unwrap_or(rest.len());
        named.extend(item(&rest[..end]));
        named.extend(rest.get(end).cloned());
        rest = rest.get(end + 1..).unwrap_or_default();
    }
    *tokens = named;
}

/// Position of the first token outside of brackets for which `holds`.
fn position(tokens: &[Token], holds: impl Fn(&Token) -> bool) -> Option<usize> {
    let mut depth = 0_usize;
    tokens.iter().position(|token| {
        match token {
            Token::Open(_) | Token::BeginMatrix => depth += 1,
            Token::Close(_) | Token::EndMatrix => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && holds(token)
    })
}

/// One item of a list without its name.
fn item(tokens: &[Token]) -> Vec<Token> {
    if let Some(value) = without_sentence(tokens).or_else(|| point(tokens)) {
        return value.to_vec();
    }
    let is_relation = |token: &Token| matches!(token, Token::Relation(_));
    let Some(at) = position(tokens, is_relation) else { return tokens.to_vec() };
    let (name, value) = tokens.split_at(at);
    if let Some(symbol) = symbol_of(name, value) {
        return [&[Token::Symbol(symbol)], value].concat();
    }
    // `0 < f(x) < 1`
    let middle = &value[1..];
    let Some(end) = position(middle, is_relation) else { return tokens.to_vec() };
    match symbol_of(&middle[..end], &middle[end..]) {
        Some(symbol) => [name, &value[..1], &[Token::Symbol(symbol)], &middle[end..]].concat(),
        None => tokens.to_vec(),
    }
}

/// The coordinates of a point with its name: `P(1,2)`. `C(5,2)` is a binomial.
fn point(tokens: &[Token]) -> Option<&[Token]> {
    let [Token::Symbol(name), rest @ ..] = tokens else { return None };
    let [Token::Open('('), inner @ .., Token::Close('(')] = rest else { return None };
    let is_point = name.len() == 1 && name.contains(|c: char| c.is_ascii_uppercase()) && name != "C";
    let is_tuple =
        position(inner, |token| *token == Token::Comma).is_some() && !inner.contains(&Token::Close('('));
    (is_point && is_tuple).then_some(rest)
}

/// The value behind words that only introduce it: `the area is 5`, `Area = 5`, `Domain: [2,3]`.
fn without_sentence(tokens: &[Token]) -> Option<&[Token]> {
    const COPULAS: &str = "is are equals be was es est ist son sind é è";
    let is_word = |token: &Token| matches!(token, Token::Word(word) if word.len() > 1);
    let is_letters =
        |token: &&Token| matches!(token, Token::Word(word) if word.starts_with(char::is_alphabetic));
    let count = tokens.iter().take_while(is_letters).count();
    if count == 0 || count == tokens.len() || !tokens[..count].iter().any(is_word) {
        return None;
    }
    let Token::Word(last) = &tokens[count - 1] else { return None };
    let ends_sentence = COPULAS.split(' ').any(|copula| copula == last) || !last.is_ascii();
    let at =
        position(&tokens[count..], |token| !is_part_of_words(token)).map_or(tokens.len(), |at| count + at);
    let (words, value) = match tokens.get(at) {
        Some(Token::Relation(Relation::Equal) | Token::Colon) => (&tokens[..at], &tokens[at + 1..]),
        _ if ends_sentence && !matches!(tokens[count], Token::Relation(_)) => tokens.split_at(count),
        _ => return None,
    };
    const CHANGES: &str = "twice double triple square squared cube cubed root minus plus times negative reciprocal inverse opposite error \
        mistake guess unknown what";
    let is_name = |token: &&Token| matches!(token, Token::Word(_) | Token::Symbol(_));
    let text: String = words.iter().filter(is_name).map(spell).collect::<Vec<_>>().join(" ") + " ";
    let changes = |word: &str| changes_number(word) || CHANGES.split(' ').any(|change| change == word);
    let is_neutral = !hedges(&text) && is_neutral(&text, "", false) && !text.split(' ').any(changes);
    let is_value = |token: &Token| matches!(token, Token::Number(_) | Token::Constant(_) | Token::EmptySet);
    (is_neutral && value.iter().any(is_value)).then_some(value)
}

/// Returns true for the tokens of `Area of ABC` and `Area(ABC)`.
fn is_part_of_words(token: &Token) -> bool {
    matches!(token, Token::Word(_) | Token::Symbol(_) | Token::Open('(') | Token::Close('(') | Token::Prime)
}

fn spell(token: &Token) -> String {
    match token {
        Token::Word(word) => word.clone(),
        Token::Symbol(name) => name.clone(),
        Token::Open('(') => "(".to_owned(),
        Token::Close('(') => ")".to_owned(),
        other => format!("{other:?}"),
    }
}

/// The symbol for a name whose `value` follows; `None` if it is no name, or needs none.
fn symbol_of(name: &[Token], value: &[Token]) -> Option<String> {
    use Token::{Colon, Divide, Open, Operator, SetMinus, Union};
    let is_derivative = matches!(name, [Token::Fraction, Open(_), Token::Symbol(d), ..] if d == "d");
    if matches!(name, [Operator(_), ..]) || is_derivative || is_composed(name) {
        return Some(spelled(name));
    }
    // `|z| < 2` bounds z.
    let gives_a_value = matches!(value.first(), Some(Token::Relation(relation)) if relation.gives_a_value());
    if let Some(figure) = figure(name, gives_a_value) {
        return Some(figure);
    }
    let is_free = |names: &[Token]| {
        names.iter().all(|token| !matches!(token, Token::Symbol(_)) || !value.contains(token))
    };
    let length = atom(name)?;
    let mut rest = &name[length..];
    if matches!(rest, [Token::Power, ..]) && value.contains(&Token::BeginMatrix) {
        return Some(spelled(name));
    }
    let is_intersection = |token: &Token| matches!(token, Operator(name) if name == "cap");
    while let [joint, after @ ..] = rest
        && (matches!(joint, Colon | Divide | Union | SetMinus) || is_intersection(joint))
    {
        rest = &after[atom(after)?..];
    }
    let is_call = length == name.len() && matches!(name[0], Token::Symbol(_));
    let is_plain = |token: &Token| {
        let is_index = matches!(
            token,
            Token::Subscript | Open('<') | Token::Close('<') | Token::Prime | Token::Constant(_)
        );
        is_index || matches!(token, Token::Symbol(_) | Token::Number(_) | Token::Word(_))
    };
    let needs_none = is_call && name.iter().all(is_plain);
    if needs_none || !rest.is_empty() {
        return None;
    }
    // Only the letter of a function must not be in its value.
    is_free(if is_call { &name[..1] } else { name }).then(|| spelled(name))
}

/// Returns true for `(f \circ g)(2)`.
fn is_composed(tokens: &[Token]) -> bool {
    use Token::{Close, Open, Operator, Symbol};
    let [Open('('), Symbol(_), Operator(circle), Symbol(_), Close('('), rest @ ..] = tokens else {
        return false;
    };
    circle == "circ" && matches!(rest, [Open('('), .., Close('(')])
}

fn spelled(tokens: &[Token]) -> String {
    tokens.iter().map(spell).collect()
}

/// The name of a segment `|AB|`, an area `[ABC]` or an angle `m\angle A`.
fn figure(tokens: &[Token], gives_a_value: bool) -> Option<String> {
    use Token::{Bar, Close, Open, Symbol};
    let points =
        |name: &str, least: usize| name.len() >= least && name.bytes().all(|byte| byte.is_ascii_uppercase());
    match tokens {
        [Bar, Symbol(name), Bar] | [Open('|'), Symbol(name), Close('|')] if points(name, 2) => {
            Some(name.clone())
        }
        [Open('['), Symbol(name), Close('[')] if points(name, 3) => Some(spelled(tokens)),
        [Bar, Symbol(name), Bar] | [Open('|'), Symbol(name), Close('|')]
            if gives_a_value && is_complex(name) =>
        {
            Some(spelled(tokens))
        }
        [Symbol(measure), Symbol(name)] if measure == "m" && name.starts_with("angle") => Some(name.clone()),
        _ => None,
    }
}

/// Returns true for names that are complex numbers or vectors, whose absolute value is a number asked for.
fn is_complex(name: &str) -> bool {
    ["z", "w"].contains(&name) || name.contains(' ')
}

/// Number of tokens of the name at the start: a variable with its index, a function with its arguments, a sine of an
/// angle, or a fraction of names.
fn atom(tokens: &[Token]) -> Option<usize> {
    use Token::{Close, Fraction, Minus, Number, Open, Power, Prime, Subscript, Symbol};
    let mut at = match tokens {
        [Symbol(_), ..] => 1,
        [Token::Function(Function::Sin | Function::Cos | Function::Tan), Symbol(angle), ..]
            if is_angle(angle) =>
        {
            return Some(2);
        }
        [Fraction, Open('<'), rest @ ..] => {
            let top = group_of_symbols(rest)?;
            let [Open('<'), below @ ..] = &rest[top..] else { return None };
            return Some(2 + top + 1 + group_of_symbols(below)?);
        }
        _ => return None,
    };
    let Symbol(letter) = &tokens[0] else { return None };
    at += tokens[at..].iter().take_while(|token| **token == Prime).count();
    match &tokens[at..] {
        [Subscript, Open('<'), rest @ ..] => {
            at += 2 + rest.iter().position(|token| *token == Close('<'))? + 1
        }
        [Subscript, _, ..] => at += 2,
        [Power, Open('<'), Minus, Number(_), Close('<'), Open('('), ..] => at += 5,
        _ => {}
    }
    let Some(Open('(' | '[')) = tokens.get(at) else { return Some(at) };
    let arguments = &tokens[at + 1..];
    let mut depth = 1_i32;
    let end = arguments.iter().position(|token| {
        depth += i32::from(matches!(token, Open(_))) - i32::from(matches!(token, Close(_)));
        depth == 0
    })?;
    let is_function =
        letter.len() == 1 && letter.contains(|c: char| c.is_ascii_uppercase() || "fghpq".contains(c));
    let is_simple = |token: &Token| matches!(token, Symbol(_) | Number(_) | Token::Comma | Minus);
    let has_no_sum = end > 0 && arguments[..end].iter().all(is_simple) && !arguments[1..end].contains(&Minus);
    let end = at + 1 + end + 1;
    let index = match &tokens[end..] {
        [Subscript, Open('<'), rest @ ..] => 2 + rest.iter().position(|token| *token == Close('<'))? + 1,
        _ => 0,
    };
    (is_function || has_no_sum).then_some(end + index)
}

fn is_angle(name: &str) -> bool {
    name.starts_with("angle")
        || name.bytes().all(|byte| byte.is_ascii_uppercase())
        || ["alpha", "beta", "gamma", "theta", "phi"].contains(&name)
}

/// Number of tokens of a group that has only variables and their indices, with its closing brace.
fn group_of_symbols(tokens: &[Token]) -> Option<usize> {
    let end = tokens.iter().position(|token| *token == Token::Close('<'))?;
    let is_name = |token: &Token| matches!(token, Token::Symbol(_) | Token::Subscript | Token::Number(_));
    let starts = matches!(tokens.first(), Some(Token::Symbol(_)));
    let numbers = tokens[..end]
        .windows(2)
        .all(|pair| !matches!(pair[1], Token::Number(_)) || pair[0] == Token::Subscript);
    (starts && numbers && tokens[..end].iter().all(is_name)).then_some(end + 1)
}
