//! Here documents, such as `cat <<END`, and the variables that `read` takes from them.

use super::{Reader, Value, is_keyword};

/// A here document whose text follows the current line.
pub(super) struct Heredoc {
    /// Index of its command.
    command: usize,
    /// The line that ends it.
    end: String,
    /// True if its text is taken literally.
    is_quoted: bool,
    /// True if tabs in front of its lines are removed.
    strips_tabs: bool,
}

impl Reader<'_> {
    /// Parses what follows `<<`.
    pub(super) fn begin_heredoc(&mut self) -> Result<(), String> {
        let strips_tabs = self.rest.next_if_eq(&'-').is_some();
        while self.rest.next_if(|next| matches!(next, ' ' | '\t')).is_some() {}
        let (mut end, mut is_quoted) = (String::new(), false);
        while let Some(next) = self.rest.next_if(|next| !next.is_whitespace() && !";|&<>()".contains(*next)) {
            match next {
                '\'' | '"' | '\\' => is_quoted = true,
                plain => end.push(plain),
            }
        }
        if end.is_empty() {
            return Err(format!("the `<<` in line {} has no word that ends its text", self.line));
        }
        self.pending.push(Heredoc { command: self.commands.len(), end, is_quoted, strips_tabs });
        Ok(())
    }

    /// Takes the texts of the current line's here documents.
    pub(super) fn heredocs(&mut self) -> Result<(), String> {
        for heredoc in std::mem::take(&mut self.pending) {
            let raw = self.lines_until(&heredoc);
            let text = if heredoc.is_quoted { raw } else { self.variables.heredoc(&raw)? };
            let Some(command) = self.commands.get_mut(heredoc.command) else { continue };
            let target = read_target(command).map(|(name, ends)| (name.to_owned(), ends));
            command.push(text.clone());
            if let Some((name, is_whole)) = target {
                let value = if is_whole { text.trim() } else { text.lines().next().unwrap_or_default() };
                let value = Value::Text(value.trim().to_owned());
                let is_conditional = self.is_conditional();
                self.variables.assign(&name, false, value, is_conditional)?;
            }
        }
        Ok(())
    }

    fn lines_until(&mut self, heredoc: &Heredoc) -> String {
        let mut text = String::new();
        while self.rest.peek().is_some() {
            let mut line = String::new();
            while let Some(next) = self.next().filter(|next| *next != '\n') {
                line.push(next);
            }
            let line = if heredoc.strips_tabs { line.trim_start_matches('\t') } else { &line };
            if line == heredoc.end {
                break;
            }
            text.push_str(line);
            text.push('\n');
        }
        text
    }
}

/// Variable that a `read` command fills, and whether it takes all lines.
fn read_target(command: &[String]) -> Option<(&str, bool)> {
    let mut words = command.iter().map(String::as_str).skip_while(|word| is_keyword(word) || *word == "!");
    words.next().filter(|word| *word == "read")?;
    let (mut name, mut is_whole) = (None, false);
    while let Some(word) = words.next() {
        match word.strip_prefix('-') {
            Some(options) if options.ends_with('d') => is_whole = words.next() == Some(""),
            Some(options) if options.ends_with(['p', 't', 'n', 'N', 'u', 'i']) => drop(words.next()),
            Some(_) => {}
            // A line that is divided among several variables fills none as a whole.
            None if name.is_some() => return None,
            None => name = Some(word),
        }
    }
    Some((name?, is_whole))
}
