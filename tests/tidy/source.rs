//! The text of a file, and for Rust also its code.

/// One file of the tree.
pub struct Source {
    /// Path from the root, with `/`.
    pub path: String,
    /// Whole text; empty for a file that is no text.
    pub text: String,
    /// For Rust: the text with comments and the contents of literals replaced by blanks, so that lines keep
    /// their positions.
    pub code: String,
}

impl Source {
    pub fn new(path: &str, text: String) -> Self {
        let code = if path.ends_with(".rs") { code_of(&text) } else { String::new() };
        Self { path: path.into(), text, code }
    }

    /// Returns the folder of the crate that contains the file.
    pub fn krate(&self) -> &str {
        const NESTED: [&str; 9] = [
            "pipelines/algorithm",
            "pipelines/config",
            "pipelines/data",
            "pipelines/import",
            "pipelines/math",
            "pipelines/reward",
            "tests/close",
            "tests/conformance",
            "xtask/libtorch",
        ];
        let nested = NESTED.into_iter().find(|it| self.path.starts_with(&format!("{it}/")));
        nested.or_else(|| self.path.split_once('/').map(|it| it.0)).unwrap_or_default()
    }

    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// Returns the identifiers and keywords of a line.
pub fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|it: char| !is_word(it)).filter(|it| !it.is_empty())
}

fn is_word(it: char) -> bool {
    it.is_alphanumeric() || it == '_'
}

fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let after_word = code.chars().next_back().is_some_and(is_word);
        let blank_len = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment_len(rest)
        } else if first == '"' {
            string_len(rest)
        } else if first == '\'' {
            char_len(rest)
        } else if after_word {
            0
        } else {
            raw_string_len(rest)
        };
        let len = if blank_len > 0 { blank_len } else { first.len_utf8() };
        let (token, after) = rest.split_at(len);
        let blank = |it: char| if it == '\n' { '\n' } else { ' ' };
        match blank_len {
            0 => code.push_str(token),
            _ => code.extend(token.chars().map(blank)),
        }
        rest = after;
    }
    code
}

fn block_comment_len(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    at
}

fn string_len(text: &str) -> usize {
    let mut escaped = false;
    for (at, it) in text.char_indices().skip(1) {
        match it {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns the length of a character literal; 0 for a lifetime.
fn char_len(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, it))) => {
            let escaped = at + it.len_utf8();
            text[escaped..].find('\'').map_or(text.len(), |end| escaped + end + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

/// Returns the length of a raw string of any kind (`r""`, `br#""#`); 0 if there is none.
fn raw_string_len(text: &str) -> usize {
    let Some(marked) = text.strip_prefix(['b', 'c']).unwrap_or(text).strip_prefix('r') else { return 0 };
    let body = marked.trim_start_matches('#');
    if !body.starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(marked.len() - body.len()));
    let start = text.len() - body.len() + 1;
    text[start..].find(&end).map_or(text.len(), |at| start + at + end.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked() {
        let check = |text: &str, code: &str| assert_eq!(code_of(text), code, "{text}");
        check("a // b\nc", "a     \nc");
        check("a /* b /* c */ d\n */ e", "a               \n    e");
        check(r#"f("un\"safe", 'x', '\'', '\u{1f}', '"') g"#, "f(          ,    ,     ,         ,    ) g");
        check("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}");
        check("r\"a\\\" b", "      b");
        check("br#\"a\" // \"# b; bar\"x\"", "             b; bar   ");
        check("r#type 'é' é", "r#type     é");
        check("\"open\n// no comment", "     \n             ");
    }
}
