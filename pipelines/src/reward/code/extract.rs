//! Where in a completion the program is.

/// The last fenced block after the last `</think>`; without one, all that stands there. A fence that is not closed ends
/// with the text.
pub(super) fn program(text: &str) -> &str {
    let text = text.rsplit("</think>").next().unwrap_or(text);
    let fences: Vec<usize> =
        text.match_indices("```").map(|(at, _)| at).filter(|&at| starts_line(text, at)).collect();
    // They open and close in turn; the last that opens has an even number before it.
    let Some(&open) = fences.iter().step_by(2).next_back() else { return text.trim_matches('\n') };
    let close = fences.iter().find(|&&at| at > open).copied().unwrap_or(text.len());
    let block = &text[open..close];
    // The language stands behind the fence.
    block.split_once('\n').map_or("", |(_, program)| program)
}

fn starts_line(text: &str, at: usize) -> bool {
    text[..at].rsplit('\n').next().is_some_and(|before| before.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn the_last_block_is_the_program() {
        for (text, expected) in [
            ("print(1)\n", "print(1)"),
            ("```python\nprint(1)\n```", "print(1)\n"),
            ("First\n```\na\n```\nbetter:\n```py\nb\nc\n```\nDone.", "b\nc\n"),
            ("```python\nprint('```')\n```\n", "print('```')\n"),
            ("```python\nprint(1)", "print(1)"),
            ("<think>```\nno\n```</think>\nprint(2)", "print(2)"),
            ("```python", ""),
            ("", ""),
        ] {
            assert_eq!(program(text), expected, "{text:?}");
        }
    }
}
