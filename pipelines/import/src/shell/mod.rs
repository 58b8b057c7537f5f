//! Commands of a shell script as words. Handles quotes, comments, escaped line ends, redirections, here
//! documents, command separators, `case` arms, and variables assigned in the script. Nothing is executed.

mod arithmetic;
mod folders;
mod heredoc;
#[cfg(test)]
mod tests;
mod variables;

use std::{iter::Peekable, mem, str::Chars};

use heredoc::Heredoc;
pub(super) use variables::Variables;
use variables::{Value, assignment};

/// The commands of `script` in order, each as words without redirections. A here document is the last word.
/// Known variables are expanded; others stay as written, which [`is_expanded`] detects.
///
/// # Errors
/// An unclosed quote, `$(` or list, after which the rest cannot be parsed, or variables that grow too long.
pub(super) fn commands(script: &str, variables: &mut Variables) -> Result<Vec<Vec<String>>, String> {
    let script = script.replace("\r\n", "\n");
    let mut reader = Reader::new(&script, variables);
    while let Some(next) = reader.next() {
        reader.take(next)?;
    }
    reader.end_command()?;
    reader.heredocs()?;
    Ok(reader.commands)
}

/// Returns true for a word such as `name=value`, which assigns a variable.
pub(super) fn is_assignment(word: &str) -> bool {
    assignment(word).is_some()
}

/// Returns true for a word that the shell reads before a command, such as `then`.
pub(super) fn is_keyword(word: &str) -> bool {
    KEYWORDS.contains(&word)
}

/// Returns true if a word contains no variable or command substitution.
pub(super) fn is_expanded(word: &str) -> bool {
    let follows =
        |next: Option<char>| next.is_some_and(|next| next.is_alphanumeric() || "_{(".contains(next));
    !word.match_indices('$').any(|(at, _)| follows(word[at + 1..].chars().next()))
}

/// Limit of nested brackets; a script has a few.
const MOST_NESTED: i32 = 64;

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
    /// Current line, for messages.
    line: usize,
    word: Option<String>,
    /// True if the word is the target of a redirection, not an argument.
    is_target: bool,
    command: Vec<String>,
    commands: Vec<Vec<String>>,
    variables: &'a mut Variables,
    /// Number of open `if`, loops and functions.
    depth: usize,
    /// Number of open lists.
    lists: i32,
    /// Number of open `case`.
    cases: usize,
    /// True in the pattern of a `case` arm, which is no command.
    is_pattern: bool,
    /// Here documents of the current line.
    pending: Vec<Heredoc>,
    /// True if the command runs only after success or failure of the one before.
    follows: bool,
}

impl<'a> Reader<'a> {
    fn new(script: &'a str, variables: &'a mut Variables) -> Self {
        Reader {
            rest: script.chars().peekable(),
            line: 1,
            word: None,
            is_target: false,
            command: Vec::new(),
            commands: Vec::new(),
            variables,
            depth: 0,
            lists: 0,
            cases: 0,
            is_pattern: false,
            pending: Vec::new(),
            follows: false,
        }
    }

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
            '\'' => self.quoted()?,
            '"' => self.double_quoted()?,
            '$' => {
                let value = self.dollar()?;
                self.place(value);
            }
            '`' => {
                let value = self.backquoted()?;
                self.place(value);
            }
            '#' if self.word.is_none() => while self.rest.next_if(|next| *next != '\n').is_some() {},
            ')' if self.is_pattern => {
                self.command.clear();
                self.word = None;
                self.is_pattern = false;
            }
            ';' if self.cases > 0 && matches!(self.rest.peek(), Some(';' | '&')) => {
                self.end_command()?;
                while self.rest.next_if(|next| matches!(next, ';' | '&')).is_some() {}
                self.is_pattern = true;
            }
            '&' if self.rest.peek() == Some(&'>') => self.end_word(),
            '<' | '>' => self.redirection(next)?,
            '(' if self.word.as_deref().is_some_and(|word| assignment(word).is_some()) => self.list()?,
            '&' | '|' if self.rest.next_if_eq(&next).is_some() => {
                self.end_command()?;
                self.follows = true;
            }
            '\n' => {
                self.end_command()?;
                self.heredocs()?;
            }
            ';' | '&' | '|' | '(' | ')' => self.end_command()?,
            space if space.is_whitespace() => self.end_word(),
            plain => self.push(plain),
        }
        Ok(())
    }

    fn push(&mut self, plain: char) {
        self.word.get_or_insert_default().push(plain);
    }

    fn quoted(&mut self) -> Result<(), String> {
        let line = self.line;
        self.word.get_or_insert_default();
        while let Some(next) = self.next() {
            match next {
                '\'' => return Ok(()),
                plain => self.push(plain),
            }
        }
        Err(format!("the quote ' in line {line} is never closed"))
    }

    fn double_quoted(&mut self) -> Result<(), String> {
        let line = self.line;
        // An empty list expands to no word, even in quotes.
        let mut has_word = self.word.is_some() || self.rest.peek() == Some(&'"');
        while let Some(next) = self.next() {
            match next {
                '"' => {
                    if has_word {
                        self.word.get_or_insert_default();
                    }
                    return Ok(());
                }
                '\\' => match self.next() {
                    Some('\n') | None => {}
                    Some(escaped) => {
                        if !matches!(escaped, '"' | '\\' | '$' | '`') {
                            self.push('\\');
                        }
                        self.push(escaped);
                    }
                },
                '$' | '`' => match self.expansion(next)? {
                    Value::List(items) => {
                        for (index, item) in items.into_iter().enumerate() {
                            if index > 0 {
                                self.end_word();
                            }
                            self.word.get_or_insert_default().push_str(&item);
                        }
                    }
                    Value::Text(text) => {
                        has_word = true;
                        self.word.get_or_insert_default().push_str(&text);
                    }
                },
                plain => self.push(plain),
            }
        }
        Err(format!("the quote \" in line {line} is never closed"))
    }

    /// Appends an expansion. Outside quotes it is split into words, except in assignments.
    fn place(&mut self, value: Value) {
        let may_precede =
            |word: &str| assignment(word).is_some() || KEYWORDS.contains(&word) || EXPORTS.contains(&word);
        let is_assigned = self.word.as_deref().is_some_and(|word| assignment(word).is_some())
            && self.command.iter().all(|word| may_precede(word));
        match value {
            Value::Text(text) if is_assigned => self.word.get_or_insert_default().push_str(&text),
            Value::Text(text) => self.split(&text),
            Value::List(items) => {
                for (index, item) in items.into_iter().enumerate() {
                    if index > 0 {
                        self.end_word();
                    }
                    self.word.get_or_insert_default().push_str(&item);
                }
            }
        }
    }

    /// Appends `text` as words, which end at spaces outside of its `$(...)` and `${...}`.
    fn split(&mut self, text: &str) {
        let (mut depth, mut before) = (0_usize, ' ');
        for plain in text.chars() {
            match plain {
                '(' | '{' if depth > 0 || before == '$' => depth += 1,
                ')' | '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            match plain.is_whitespace() && depth == 0 {
                true => self.end_word(),
                false => self.push(plain),
            }
            before = plain;
        }
    }

    fn expansion(&mut self, mark: char) -> Result<Value, String> {
        if mark == '`' { self.backquoted() } else { self.dollar() }
    }

    /// A command in backquotes, as the `$(...)` that it equals.
    fn backquoted(&mut self) -> Result<Value, String> {
        let (line, mut text) = (self.line, String::from("$("));
        while let Some(next) = self.next() {
            match next {
                '`' => return self.variables.bracketed(&(text + ")")),
                plain => text.push(plain),
            }
        }
        Err(format!("the backquote in line {line} is never closed"))
    }

    /// Expands `$name`, `${...}`, `$((...))` or `$(...)`, or keeps it. Its content ends neither a word nor a
    /// command.
    fn dollar(&mut self) -> Result<Value, String> {
        let mut text = String::from("$");
        let (open, close) = match self.rest.peek() {
            Some('(') => ('(', ')'),
            Some('{') => ('{', '}'),
            Some('@' | '*') => {
                self.next();
                return Ok(Value::List(Vec::new()));
            }
            _ => {
                while let Some(next) = self.rest.next_if(|next| next.is_ascii_alphanumeric() || *next == '_')
                {
                    text.push(next);
                }
                return self.variables.plain(&text);
            }
        };
        let (line, mut depth) = (self.line, 0);
        while let Some(next) = self.next() {
            text.push(next);
            depth += i32::from(next == open) - i32::from(next == close);
            if depth == 0 {
                return self.variables.bracketed(&text);
            }
            if depth == MOST_NESTED {
                return Err(format!("the `${open}` in line {line} is nested too deeply"));
            }
        }
        Err(format!("the `${open}` in line {line} is never closed"))
    }

    /// Parses `name=(a b c)`, possibly over several lines.
    fn list(&mut self) -> Result<(), String> {
        let line = self.line;
        let name = self.word.take().unwrap_or_default();
        let command = mem::take(&mut self.command);
        self.lists += 1;
        if self.lists == MOST_NESTED {
            return Err(format!("the list in line {line} is nested too deeply"));
        }
        loop {
            match self.next() {
                Some(')') => break,
                Some('\n') => self.end_word(),
                Some(next) => self.take(next)?,
                None => return Err(format!("the list `{name}(` in line {line} is never closed")),
            }
        }
        self.end_word();
        self.lists -= 1;
        let items = mem::replace(&mut self.command, command);
        if let Some((name, appends, _)) = assignment(&name) {
            self.variables.assign(name, appends, Value::List(items), self.is_conditional())?;
        }
        Ok(())
    }

    /// Parses `> log`, `2>&1` or `<<END`, with the number before it and the word after it.
    fn redirection(&mut self, first: char) -> Result<(), String> {
        self.word.take_if(|word| word.chars().all(|digit| digit.is_ascii_digit()));
        self.end_word();
        if first == '<' && self.rest.next_if_eq(&'<').is_some() {
            match self.rest.next_if_eq(&'<').is_some() {
                true => self.is_target = true,
                false => self.begin_heredoc()?,
            }
            return Ok(());
        }
        while self.rest.next_if(|next| matches!(next, '<' | '>' | '&' | '|')).is_some() {}
        self.is_target = true;
        Ok(())
    }

    fn end_word(&mut self) {
        if let Some(word) = self.word.take()
            && !mem::take(&mut self.is_target)
        {
            self.command.push(word);
            self.begin_case();
        }
    }

    /// Begins the arms of `case WORD in`.
    fn begin_case(&mut self) {
        let [before @ .., case, _, word] = &self.command[..] else { return };
        if case == "case" && word == "in" && before.iter().all(|word| is_keyword(word)) {
            self.depth += 1;
            self.cases += 1;
            self.is_pattern = true;
            self.command.clear();
        }
    }

    /// Ends a `case` at its `esac`, before which a pattern could be.
    fn end_case(&mut self) {
        if self.cases > 0 && self.command.first().is_some_and(|word| word == "esac") {
            self.cases -= 1;
            self.is_pattern = false;
        }
        if self.is_pattern {
            self.command.clear();
        }
    }

    fn end_command(&mut self) -> Result<(), String> {
        self.end_word();
        self.is_target = false;
        self.end_case();
        if !self.command.is_empty() {
            let command = mem::take(&mut self.command);
            self.assign(&command)?;
            self.commands.push(command);
            self.follows = false;
        }
        Ok(())
    }

    /// Returns true if the current command may not run.
    fn is_conditional(&self) -> bool {
        self.depth > 0 || self.follows
    }

    /// Takes the assignments of a command without other words.
    fn assign(&mut self, command: &[String]) -> Result<(), String> {
        let mut words = command.iter().map(String::as_str).peekable();
        while let Some(word) = words.next_if(|word| KEYWORDS.contains(word)) {
            match word {
                "if" | "for" | "while" | "until" | "select" | "function" | "{" => self.depth += 1,
                "fi" | "done" | "esac" | "}" => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        let exports = words.next_if(|word| EXPORTS.contains(word)).is_some();
        let assigned: Vec<_> = words.map(|word| assignment(word).ok_or(word)).collect();
        if !exports && assigned.iter().any(Result::is_err) {
            return Ok(());
        }
        let is_conditional = self.is_conditional();
        for (name, appends, value) in assigned.into_iter().flatten() {
            self.variables.assign(name, appends, Value::Text(value.to_owned()), is_conditional)?;
        }
        Ok(())
    }
}

/// Commands whose arguments are assignments or names.
const EXPORTS: [&str; 5] = ["export", "readonly", "declare", "local", "typeset"];

/// Words before a command.
const KEYWORDS: [&str; 16] = [
    "if", "then", "elif", "else", "fi", "for", "while", "until", "select", "do", "done", "case", "esac",
    "function", "{", "}",
];
