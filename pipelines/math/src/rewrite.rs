//! Notations that other ones replace before the parser: `]1;2[`, `3 to 2`, and a condition in brackets.

use super::expr::Relation;
use super::token::Token;

/// Replaces notations in `tokens`.
pub(super) fn rewrite(tokens: &mut Vec<Token>) {
    turned_brackets(tokens);
    ratio_in_words(tokens);
    condition(tokens);
}

/// Open intervals as in France: `]1;2[` is `(1;2)`.
fn turned_brackets(tokens: &mut [Token]) {
    let last = tokens.len();
    for at in 0..last {
        let is_start = at == 0 || matches!(tokens[at - 1], Token::Union | Token::Relation(_));
        let is_end = at + 1 == last || tokens[at + 1] == Token::Union;
        if is_start && tokens[at] == Token::Close('[') {
            tokens[at] = Token::Open('(');
        } else if is_end && at > 0 && tokens[at] == Token::Open('[') {
            tokens[at] = Token::Close('(');
        }
    }
}

/// `3 to 2` is `3:2`.
fn ratio_in_words(tokens: &mut [Token]) {
    for at in 1..tokens.len().saturating_sub(1) {
        let is_between = matches!((&tokens[at - 1], &tokens[at + 1]), (Token::Number(_), Token::Number(_)));
        if is_between && tokens[at] == Token::Word("to".to_owned()) {
            tokens[at] = Token::Colon;
        }
    }
}

/// `k\pi (k \in Z)` is `k\pi, k \in Z`.
fn condition(tokens: &mut Vec<Token>) {
    let Some(Token::Close('(')) = tokens.last() else { return };
    let Some(start) = tokens.iter().rposition(|token| *token == Token::Open('(')) else { return };
    let inner = &tokens[start + 1..tokens.len() - 1];
    if start > 0 && matches!(inner, [Token::Symbol(_), Token::Relation(Relation::In), ..]) {
        tokens[start] = Token::Comma;
        tokens.pop();
    }
}
