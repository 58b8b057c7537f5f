//! The commands of a shell script as words: quotes, comments, escaped line ends, redirections and what joins commands.
//! Nothing is expanded.

use std::{iter::Peekable, mem, str::Chars};

/// The commands of `script` in their order, each a list of words without its redirections.
///
/// # Errors
/// A quote or a `$(` is never closed: what follows could be anything.
pub(super) fn commands(script: &str) -> Result<Vec<Vec<String>>, String> {
    let script = script.replace("\r\n", "\n");
    let mut reader = Reader {
        rest: script.chars().peekable(),
        line: 1,
        word: None,
        is_target: false,
        command: Vec::new(),
        commands: Vec::new(),
    };
    while let Some(next) = reader.next() {
        reader.take(next)?;
    }
    reader.end_command();
    Ok(reader.commands)
}

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
    /// The line that is read, for messages.
    line: usize,
    word: Option<String>,
    /// Whether the word is where a redirection goes, and so none of the command's.
    is_target: bool,
    command: Vec<String>,
    commands: Vec<Vec<String>>,
}

impl Reader<'_> {
    fn next(&mut self) -> Option<char> {
        let next = self.rest.next();
        self.line += usize::from(next == Some('\n'));
        next
    }

    fn take(&mut self, next: char) -> Result<(), String> {
        match next {
            '\\' => {
                if let Some(escaped) = self.next().filter(|escaped| *escaped != '\n') {
                    self.push(escaped);
                }
            }
            '\'' | '"' => self.quoted(next)?,
            '$' => self.dollar()?,
            '#' if self.word.is_none() => while self.rest.next_if(|next| *next != '\n').is_some() {},
            '&' if self.rest.peek() == Some(&'>') => self.end_word(),
            '<' | '>' => self.redirection(),
            '\n' | ';' | '&' | '|' | '(' | ')' => self.end_command(),
            space if space.is_whitespace() => self.end_word(),
            plain => self.push(plain),
        }
        Ok(())
    }

    fn push(&mut self, plain: char) {
        self.word.get_or_insert_default().push(plain);
    }

    fn quoted(&mut self, quote: char) -> Result<(), String> {
        let line = self.line;
        self.word.get_or_insert_default();
        while let Some(next) = self.next() {
            match next {
                _ if next == quote => return Ok(()),
                '\\' if quote == '"' => match self.next() {
                    Some('\n') | None => {}
                    Some(escaped) => {
                        if !matches!(escaped, '"' | '\\' | '$' | '`') {
                            self.push('\\');
                        }
                        self.push(escaped);
                    }
                },
                plain => self.push(plain),
            }
        }
        Err(format!("the quote {quote} in line {line} is never closed"))
    }

    /// `$(...)` and `${...}` stay as they are: what is in them neither ends a word nor a command.
    fn dollar(&mut self) -> Result<(), String> {
        self.push('$');
        let (open, close) = match self.rest.peek() {
            Some('(') => ('(', ')'),
            Some('{') => ('{', '}'),
            _ => return Ok(()),
        };
        let (line, mut depth) = (self.line, 0);
        while let Some(next) = self.next() {
            self.push(next);
            depth += i32::from(next == open) - i32::from(next == close);
            if depth == 0 {
                return Ok(());
            }
        }
        Err(format!("the `${open}` in line {line} is never closed"))
    }

    /// `> log`, `2>&1`, `<<END`: the number before it belongs to it, as the word after it does.
    fn redirection(&mut self) {
        self.word.take_if(|word| word.chars().all(|digit| digit.is_ascii_digit()));
        self.end_word();
        while self.rest.next_if(|next| matches!(next, '<' | '>' | '&' | '|')).is_some() {}
        self.is_target = true;
    }

    fn end_word(&mut self) {
        if let Some(word) = self.word.take()
            && !mem::take(&mut self.is_target)
        {
            self.command.push(word);
        }
    }

    fn end_command(&mut self) {
        self.end_word();
        self.is_target = false;
        if !self.command.is_empty() {
            self.commands.push(mem::take(&mut self.command));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(script: &str, expected: &[&[&str]]) {
        assert_eq!(commands(script).unwrap(), expected, "{script}");
    }

    #[test]
    fn words_and_quotes() {
        check("a  'b c'\"d \\\" $e\"f \\g ''", &[&["a", "b cd \" $ef", "g", ""]]);
        check("a \"b\\nc\" 'd\\'", &[&["a", "b\\nc", "d\\"]]);
        check("a $(b; c | (d)) ${e} #f 'g", &[&["a", "$(b; c | (d))", "${e}"]]);
        check("a#b", &[&["a#b"]]);
    }

    #[test]
    fn ends_of_commands() {
        check("a \\\n b\nc \\\r\n d", &[&["a", "b"], &["c", "d"]]);
        check("a && b || c; d & (e | f)", &[&["a"], &["b"], &["c"], &["d"], &["e"], &["f"]]);
    }

    #[test]
    fn redirections_are_no_words() {
        check("a 3 2>&1 | b", &[&["a", "3"], &["b"]]);
        check("a >log 4 &>> 'l o g' 5 2>/dev/null <<END\nc\nEND", &[&["a", "4", "5"], &["c"], &["END"]]);
    }

    #[test]
    fn what_is_never_closed_is_said() {
        for (script, expected) in [("a\nb 'c\nd", "' in line 2"), ("\"a", "\" in line 1"), ("$(a", "`$(`")] {
            let error = commands(script).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
