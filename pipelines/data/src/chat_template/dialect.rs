//! Translation of a template in Jinja2's dialect to one that minijinja renders with the same text.
//!
//! Operators and slices with Python's semantics become calls of functions that [`super::operators`] defines. Tags
//! that Jinja2 gets from extensions become built-in ones, and each round of a loop is counted.

use super::expression::{Expressions, Token, lexed};

/// Deepest nesting of tags and expressions; minijinja refuses less.
pub(super) const MAX_DEPTH: usize = 150;

/// Most operators, filters and calls of a tag. minijinja reads a chain of them by recursion.
pub(super) const MAX_STEPS: usize = 500;

/// Returns the template in minijinja's dialect, with the same number of lines. A tag that cannot be parsed
/// stays as it is, and minijinja reports its error.
///
/// # Errors
/// A tag with more than [`MAX_STEPS`] operators.
pub(super) fn translated(source: &str) -> Result<String, String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut translation = Translation { pieces: Vec::new(), open: Vec::new(), has_long_tag: false };
    let mut rest = source.as_str();
    while let Some(at) = next_tag(rest) {
        let (data, tag) = rest.split_at(at);
        translation.raw(data);
        rest = match &tag[..2] {
            "{#" => {
                let end = tag.find("#}").map_or(tag.len(), |end| end + 2);
                translation.verbatim(&tag[..end]);
                &tag[end..]
            }
            open => translation.tag(open, tag),
        };
    }
    translation.raw(rest);
    match translation.has_long_tag {
        true => Err(format!("it has a tag with more than {MAX_STEPS} operators")),
        false => Ok(translation.pieces.concat()),
    }
}

/// Start of the first tag or comment.
fn next_tag(text: &str) -> Option<usize> {
    let opens = |at: &usize| matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
    text.match_indices('{').map(|(at, _)| at).find(opens)
}

/// A translation so far.
struct Translation {
    pieces: Vec<String>,
    /// Tags with bodies that are counted, and the bytes of text in each.
    open: Vec<Counted>,
    has_long_tag: bool,
}

/// A body whose rounds are counted.
struct Counted {
    /// Index of the piece that counts a round.
    piece: usize,
    /// Bytes of text in the body.
    bytes: usize,
    /// Name of the tag that ends the body.
    end: &'static str,
}

impl Translation {
    fn verbatim(&mut self, text: &str) {
        self.pieces.push(text.to_owned());
    }

    /// Adds text between tags.
    fn raw(&mut self, text: &str) {
        for body in &mut self.open {
            body.bytes += text.len();
        }
        self.verbatim(text);
    }

    /// Adds the tag at the start of `text`, and returns the text after it.
    fn tag<'a>(&mut self, open: &str, text: &'a str) -> &'a str {
        let close = if open == "{{" { "}}" } else { "%}" };
        let mark = text[2..].chars().next().filter(|mark| matches!(mark, '-' | '+'));
        let start = 2 + mark.map_or(0, char::len_utf8);
        let Some((tokens, length)) = lexed(&text[start..], close) else {
            // Not a valid tag: minijinja reports it, at the latest at the end of the text.
            self.verbatim(text);
            return "";
        };
        let end = start + length + close.len();
        let (tag, rest) = text.split_at(end);
        let close_mark = tag[..start + length].chars().next_back().filter(|it| matches!(it, '-' | '+'));
        let close = match close_mark.filter(|_| length > 0) {
            Some(mark) => format!("{mark}{close}"),
            None => close.to_owned(),
        };
        let open = format!("{open}{}", mark.map(String::from).unwrap_or_default());
        if open.starts_with("{{") {
            let body = self.parsed(&tokens, false);
            self.pieces.push(body.map_or(tag.to_owned(), |body| format!("{open} {body} {close}")));
            return rest;
        }
        if let [Token { name: Some("raw"), .. }] = tokens[..] {
            return self.raw_block(tag, rest);
        }
        self.statement(&open, &tokens, &close, tag);
        rest
    }

    /// Text of a tag with these tokens, as a statement or as expressions.
    fn parsed(&mut self, tokens: &[Token], is_statement: bool) -> Option<String> {
        let mut expressions = Expressions::new(tokens);
        let parsed = if is_statement { expressions.statement() } else { expressions.all() };
        self.has_long_tag |= expressions.is_long();
        parsed
    }

    /// Adds a block without tags in it, which starts with `tag`.
    fn raw_block<'a>(&mut self, tag: &str, rest: &'a str) -> &'a str {
        let mut from = 0;
        let end = loop {
            let Some(at) = rest[from..].find("{%").map(|at| from + at) else { break rest.len() };
            let inner = rest[at + 2..].trim_start_matches(['-', '+']).trim_start();
            let Some(after) = inner.strip_prefix("endraw") else {
                from = at + 2;
                continue;
            };
            break after.find("%}").map_or(rest.len(), |end| rest.len() - after.len() + end + 2);
        };
        self.verbatim(tag);
        self.raw(&rest[..end]);
        &rest[end..]
    }

    /// Adds a statement; `tag` is its text.
    fn statement(&mut self, open: &str, tokens: &[Token], close: &str, tag: &str) {
        let name = tokens.first().and_then(|token| token.name).unwrap_or_default();
        let body = match (name, tokens) {
            // The block of transformers' own extension renders its body, in a scope of its own.
            ("generation", [_]) => Some("with".to_owned()),
            ("endgeneration", [_]) => Some("endwith".to_owned()),
            _ => self.parsed(tokens, true),
        };
        let Some(body) = body else { return self.verbatim(tag) };
        let end = match name {
            "for" => "endfor",
            "macro" => "endmacro",
            "call" => "endcall",
            _ => {
                if self.open.last().is_some_and(|body| body.end == name) {
                    self.close_body();
                }
                return self.pieces.push(format!("{open} {body} {close}"));
            }
        };
        // The counting tag stands behind the opening one, with its mark for white space.
        self.pieces.push(format!("{open} {body} %}}"));
        self.open.push(Counted { piece: self.pieces.len(), bytes: 0, end });
        self.pieces.push(close.to_owned());
    }

    /// Ends the innermost counted body: its rounds cost the text in it.
    fn close_body(&mut self) {
        if let Some(Counted { piece, bytes, .. }) = self.open.pop() {
            let close = &self.pieces[piece];
            self.pieces[piece] = format!("{{% do __round({bytes}) {close}");
        }
    }
}
