//! One spelling for characters and escapes: digits, powers and signs of Unicode, and doubled backslashes.

use std::borrow::Cow;

use super::symbols::is_command;

/// Returns `text` with ASCII digits, LaTeX powers, indices and fractions, plain spaces, and single backslashes.
pub(super) fn normalize(text: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| byte.is_ascii() && (byte >= b' ' || byte == b'\n');
    let text = if text.bytes().all(is_plain) { Cow::Borrowed(text) } else { Cow::Owned(characters(text)) };
    match unescaped(&text) {
        Some(unescaped) => Cow::Owned(unescaped),
        None => text,
    }
}

fn characters(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        // Most letters of Chinese, Japanese and Korean need no table.
        let is_letter = matches!(c, '\u{3040}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}');
        if is_letter || (c.is_ascii() && !c.is_ascii_control()) {
            kept.push(c);
        } else if let Some(letter) = lost_letter(c, &text[at + c.len_utf8()..]) {
            kept.push('\\');
            kept.push(letter);
        } else if let Some((open, first)) = raised(c) {
            kept.push_str(open);
            kept.push(first);
            while let Some(next) = chars.peek().and_then(|(_, next)| raised(*next)).filter(|it| it.0 == open)
            {
                kept.push(next.1);
                chars.next();
            }
            kept.push('}');
        } else if let Some((top, bottom)) = vulgar_fraction(c) {
            kept.push_str(&format!(r"\frac{{{top}}}{{{bottom}}}"));
        } else if let Some(spelling) = spelling(c) {
            kept.push_str(spelling);
        } else {
            kept.extend(plain(c));
        }
    }
    kept
}

/// The letter of a command that an escape replaced with a control character: `f` in `\frac`, `b` in `\boxed`.
fn lost_letter(control: char, after: &str) -> Option<char> {
    const LOST: [(char, char, &[&str]); 4] = [
        ('\u{c}', 'f', &["rac{", "rac1", "box{"]),
        ('\u{8}', 'b', &["oxed", "inom", "egin{", "eta"]),
        ('\t', 't', &["ext{", "imes", "heta", "frac", "extbf{"]),
        ('\r', 'r', &["ight", "floor", "ceil", "angle"]),
    ];
    let (_, letter, rest) = LOST.iter().find(|(c, _, _)| *c == control)?;
    rest.iter().any(|rest| after.starts_with(rest)).then_some(*letter)
}

/// Opening of a power or an index, and the character raised or lowered.
fn raised(c: char) -> Option<(&'static str, char)> {
    const POWERS: &str = "⁰0¹1²2³3⁴4⁵5⁶6⁷7⁸8⁹9⁺+⁻-⁽(⁾)ⁿnⁱiᵏkᵐmˣx";
    const INDICES: &str = "₀0₁1₂2₃3₄4₅5₆6₇7₈8₉9₊+₋-ₐaₑeₓxₖkₘmₙnₚpₜtᵢiⱼj";
    let find = |table: &str| {
        let mut chars = table.chars();
        std::iter::from_fn(|| Some((chars.next()?, chars.next()?))).find(|pair| pair.0 == c)
    };
    let power = find(POWERS).map(|(_, plain)| ("^{", plain));
    power.or_else(|| find(INDICES).map(|(_, plain)| ("_{", plain)))
}

fn vulgar_fraction(c: char) -> Option<(u8, u8)> {
    Some(match c {
        '½' => (1, 2),
        '⅓' => (1, 3),
        '⅔' => (2, 3),
        '¼' => (1, 4),
        '¾' => (3, 4),
        '⅕' => (1, 5),
        '⅖' => (2, 5),
        '⅗' => (3, 5),
        '⅘' => (4, 5),
        '⅙' => (1, 6),
        '⅚' => (5, 6),
        '⅐' => (1, 7),
        '⅛' => (1, 8),
        '⅜' => (3, 8),
        '⅝' => (5, 8),
        '⅞' => (7, 8),
        '⅑' => (1, 9),
        '⅒' => (1, 10),
        _ => return None,
    })
}

/// Replacement of a sign by ASCII or a LaTeX command.
fn spelling(c: char) -> Option<&'static str> {
    Some(match c {
        '，' | '、' | '،' => ", ",
        '；' => "; ",
        '。' | '｡' | '।' | '！' => ". ",
        '؟' => "?",
        '٪' => "%",
        '٫' => ".",
        '٬' => ",",
        '∶' => ":",
        '⁄' | '∕' => "/",
        '∙' | '∗' => "*",
        '‐' | '‑' | '‒' | '﹣' => "-",
        '′' => "'",
        '✓' | '✔' | '✅' => "",
        '″' => "''",
        'º' => "°",
        '∛' => r"\sqrt[3]",
        '∜' => r"\sqrt[4]",
        'ℝ' => r"\mathbb{R}",
        'ℤ' => r"\mathbb{Z}",
        'ℕ' => r"\mathbb{N}",
        'ℚ' => r"\mathbb{Q}",
        'ℂ' => r"\mathbb{C}",
        '∠' => r"\angle ",
        '△' => r"\triangle ",
        '≡' => r"\equiv ",
        '∩' => r"\cap ",
        '∨' => r"\lor ",
        '∧' => r"\land ",
        '∉' => r"\notin ",
        '∖' => r"\setminus ",
        '\u{a0}' | '\u{2000}'..='\u{200a}' | '\u{202f}' | '\u{205f}' | '\u{3000}' => " ",
        '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{feff}' | '\u{fe0f}' => "",
        _ => return None,
    })
}

/// The ASCII character for a digit of any script, and for full-width and mathematical letters; otherwise the same.
fn plain(c: char) -> Option<char> {
    /// Zeros of the decimal digits in Unicode.
    const ZEROS: [u32; 30] = [
        0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xde6, 0xe50,
        0xed0, 0xf20, 0x1040, 0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90, 0x1b50, 0x1bb0, 0x1c40,
        0x1c50, 0xa620, 0xff10,
    ];
    /// Thirteen alphabets of 52 letters each.
    const LETTERS: std::ops::Range<u32> = 0x1d400..0x1d6a4;
    const DIGITS: std::ops::Range<u32> = 0x1d7ce..0x1d800;
    let code = c as u32;
    let digit = ZEROS.iter().find(|zero| (**zero..**zero + 10).contains(&code)).map(|zero| code - zero);
    let digit = digit.or_else(|| DIGITS.contains(&code).then(|| (code - DIGITS.start) % 10));
    if let Some(digit) = digit {
        return char::from_digit(digit, 10);
    }
    if (0xff01..=0xff5e).contains(&code) {
        return char::from_u32(code - 0xfee0);
    }
    if LETTERS.contains(&code) {
        let index = (code - LETTERS.start) % 52;
        return char::from_u32(if index < 26 { 'A' as u32 + index } else { 'a' as u32 + index - 26 });
    }
    Some(c)
}

/// `text` without the doubling of backslashes; `None` if they are not doubled.
///
/// If all are, each pair becomes one. Otherwise only a pair before a command's name does, since it also ends a row.
fn unescaped(text: &str) -> Option<String> {
    /// Escaped signs that are doubled, in pairs.
    const SIGNS: [(&str, &str); 5] =
        [(r"\\{", r"\\}"), (r"\\(", r"\\)"), (r"\\[", r"\\]"), (r"\\%", r"\\%"), (r"\\$", r"\\$")];
    if !text.contains(r"\\") {
        return None;
    }
    let doubled = |at: usize| {
        let name = &text[at + 2..];
        let length = name.bytes().take_while(u8::is_ascii_alphabetic).count();
        length > 1 && is_command(&name[..length])
    };
    let bytes = text.as_bytes();
    let (mut all, mut any, mut at) =
        (true, SIGNS.iter().any(|(open, close)| text.contains(open) && text.contains(close)), 0);
    let mut dropped = Vec::new();
    while let Some(found) = text[at..].find('\\') {
        at += found;
        let count = bytes[at..].iter().take_while(|byte| **byte == b'\\').count();
        all &= count % 2 == 0;
        if count % 2 == 0 && doubled(at + count - 2) {
            any = true;
            dropped.push(at + count - 2);
        } else if count == 4 {
            // The end of a row.
            dropped.extend([at, at + 1]);
        }
        at += count;
    }
    if !any {
        return None;
    }
    if all {
        return Some(text.replace(r"\\", r"\"));
    }
    if dropped.iter().all(|at| !doubled(*at)) {
        return None;
    }
    let mut kept = String::with_capacity(text.len());
    let mut from = 0;
    for at in dropped {
        kept.push_str(&text[from..at]);
        from = at + 1;
    }
    kept.push_str(&text[from..]);
    Some(kept)
}
