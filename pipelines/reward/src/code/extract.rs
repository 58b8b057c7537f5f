//! Finds the program in a completion.

/// Returns the last fenced block of the language after the last `</think>`, otherwise the last without a language,
/// otherwise the last of all. Without blocks it is the whole text. An open fence ends with the text.
pub(super) fn program(text: &str, language: &str) -> String {
    let text = text.rsplit("</think>").next().unwrap_or(text);
    let blocks = blocks(text);
    let last = |is: &dyn Fn(&str) -> bool| blocks.iter().rev().find(|block| is(&block.language));
    let found =
        last(&|it| is_language(it, language)).or_else(|| last(&str::is_empty)).or_else(|| blocks.last());
    found.map_or_else(|| text.trim_matches('\n').to_owned(), |block| block.text.clone())
}

struct Block {
    /// First word after the fence, in lower case; empty if there is none.
    language: String,
    text: String,
}

/// A line of three or more backticks or tildes.
struct Fence {
    /// Characters before it, which the lines of its block are indented by.
    indent: usize,
    mark: char,
    len: usize,
}

fn blocks(text: &str) -> Vec<Block> {
    let (mut blocks, mut open): (Vec<Block>, Option<Fence>) = (Vec::new(), None);
    for line in text.split_inclusive('\n') {
        match (&open, fence(line)) {
            (None, Some((fence, info))) => {
                let words = info.split(|it: char| !(it.is_alphanumeric() || "+#".contains(it)));
                let language = words.map(str::to_lowercase).find(|it| !it.is_empty()).unwrap_or_default();
                blocks.push(Block { language, text: String::new() });
                open = Some(fence);
            }
            (Some(begun), Some((fence, ""))) if fence.mark == begun.mark && fence.len >= begun.len => {
                open = None;
            }
            (Some(begun), _) => {
                let block = blocks.last_mut().expect("one is open");
                block.text.push_str(&line[spaces(line).min(begun.indent)..]);
            }
            (None, None) => {}
        }
    }
    blocks
}

/// Parses a line as a fence, and returns it with the text after it. It may be the first line of a list item.
fn fence(line: &str) -> Option<(Fence, &str)> {
    let line = line.trim_end();
    let mut rest = &line[spaces(line)..];
    let item =
        rest.trim_start_matches(|it: char| it.is_ascii_digit()).trim_start_matches(['.', ')', '-', '*', '+']);
    if item.len() < rest.len() && item.starts_with(' ') {
        rest = &item[spaces(item)..];
    }
    let mark = rest.chars().next().filter(|mark| "`~".contains(*mark))?;
    let info = rest.trim_start_matches(mark);
    let fence = Fence { indent: line.len() - rest.len(), mark, len: rest.len() - info.len() };
    let holds = fence.len >= 3 && !(mark == '`' && info.contains('`'));
    holds.then_some((fence, info.trim()))
}

fn spaces(text: &str) -> usize {
    text.len() - text.trim_start_matches([' ', '\t']).len()
}

/// Returns true if a fence's word is a name of the language.
fn is_language(word: &str, language: &str) -> bool {
    const NAMES: [&[&str]; 5] = [
        &["python", "python3", "py", "py3"],
        &["cpp", "c++", "cc", "cxx"],
        &["javascript", "js", "nodejs", "node"],
        &["csharp", "c#", "cs"],
        &["go", "golang"],
    ];
    let language = language.to_lowercase();
    word == language || NAMES.iter().any(|names| names.contains(&word) && names.contains(&language.as_str()))
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn the_last_block_of_the_language_is_the_program() {
        for (text, expected) in [
            ("print(1)\n", "print(1)"),
            ("```python\nprint(1)\n```", "print(1)\n"),
            ("First\n```\na\n```\nbetter:\n```py\nb\nc\n```\nDone.", "b\nc\n"),
            ("```python\nprint('```')\n```\n", "print('```')\n"),
            ("```python\nprint(1)", "print(1)"),
            ("<think>```\nno\n```</think>\nprint(2)", "print(2)"),
            ("```python", ""),
            ("", ""),
            ("```python\na\n```\nOutput:\n```text\n2\n```\n", "a\n"),
            ("```Python3\na\n```\n```\n2\n```\n", "a\n"),
            ("```{.python}\na\n```\n~~~bash\n2\n~~~\n", "a\n"),
            ("```\na\n```\n```text\n2\n```\n", "a\n"),
            ("```text\na\n```\n", "a\n"),
            ("1. Code:\n\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
            ("1. ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
            ("````python\na\n```\nb\n````\n", "a\n```\nb\n"),
        ] {
            assert_eq!(program(text, "python"), expected, "{text:?}");
        }
        assert_eq!(program("```c++\na\n```\n```python\nb\n```", "cpp"), "a\n");
    }
}
