//! Words behind an answer that take it back: `wait, that is wrong`.

use std::sync::LazyLock;

use regex::Regex;

use super::foreign::any_of;
use super::trim::last_bytes;

/// End of the last statement that takes back what precedes it, unless later words confirm that.
pub(super) fn last_withdrawal(text: &str) -> Option<usize> {
    let from = text.len() - last_bytes(text).len();
    let found =
        WITHDRAWN.find_iter(&text[from..]).filter(|found| is_said(&text[..from + found.start()])).last()?;
    let (start, end) = (from + found.start(), from + found.end());
    // `actually, the answer is` begins the next answer.
    let end = if NEXT.is_match(found.as_str()) { start } else { end };
    (!CONFIRMED.is_match(&text[end..])).then_some(end)
}

/// Returns true if `later`, the text behind an answer, says that it is not `content`.
pub(super) fn denies(later: &str, content: &str) -> bool {
    static NOT: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r"(?i)(?:(?-u:\b)not|n['’]t(?:\s+be)?|(?-u:\b)cannot\s+be|不是)\s*(?:\\boxed\{|[$\\(*\s])*(-?[\p{L}\p{N}]+(?:[./][\p{N}]+)?)",
        )
    });
    let content = content.trim_matches(['$', ' ', '*']);
    NOT.captures_iter(later).any(|found| found.get(1).is_some_and(|denied| denied.as_str() == content))
}

/// Returns true unless the sentence that `before` ends with is a supposition, or a question that the next words answer.
fn is_said(before: &str) -> bool {
    static SUPPOSED: LazyLock<Regex> = LazyLock::new(|| {
        let words = "if|whether|one|you|someone|students?|might|may|would|could|suppose|assume|with|for|why|unless|prove|trying|hope|claims?";
        pattern(&format!(
            r"(?i)(?-u:\b)(?:{words}|verify\s+that|check\s+that|see\s+that|not\s+that|then)(?-u:\b)"
        ))
    });
    static JUDGES: LazyLock<Regex> = LazyLock::new(|| {
        pattern(r"(?i)(?-u:\b)(?:right|correct)\s*\?[\s\p{L},]*$|(?-u:\b)I\s+(?:think|believe)(?-u:\b)")
    });
    static CALLS: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r"(?i)^(?:\s|[,.!—…-]|(?-u:\b)(?:wait|no|oops|hmm+|oh|hold\s+on|actually|sorry|but|so|edit)(?-u:\b))*$",
        )
    });
    const MOST_CHARS: usize = 160;
    let start = before.char_indices().rev().take(MOST_CHARS).last().map_or(0, |(start, _)| start);
    let last = &before[start..];
    let at = last.rfind(['.', '!', '\n', '?', '}']).map_or(0, |at| at + 1);
    let sentence = &last[at..];
    let answers = last[..at].ends_with('?') && CALLS.is_match(sentence);
    JUDGES.is_match(last) || !(answers || SUPPOSED.is_match(sentence))
}

static WITHDRAWN: LazyLock<Regex> = LazyLock::new(|| {
    let noun = r"(?:answer|result|solution|calculation|computation|value|number)(?:\s+above|\s+of\s+\S+|\s+\$?[0-9]+\$?)?";
    let it = format!(
        r"(?:that|this|it|which|the\s+above|(?:the|my|our|that|this)\s+(?:(?:above|previous|first|earlier|last|boxed)\s+)?{noun})"
    );
    let adverb = r"(?:\s+(?:actually|also|clearly|just|still|completely|obviously))?";
    let wrong = r"\s+(?:wrong|incorrect|false|mistaken|not\s+(?:right|correct|true|the\s+(?:right\s+|correct\s+)?answer)|a\s+mistake|an\s+error)(?-u:\b)";
    let is = format!(r"(?:['’]s|\s+is|\s+was|\s+seems|\s+looks|\s+must\s+be){adverb}{wrong}");
    let cannot = any_of(
        r"\s+(?:cannot|can['’]t|could\s*n['’]t|is\s*n['’]t|was\s*n['’]t|does\s*n['’]t|does\s+not|do\s*n['’]t)\s+(?:be\s+|look\s+|seem\s+|sound\s+)?(?:right|correct|true|the\s+answer)(?-u:\b)
          \s+contradicts(?-u:\b)",
    );
    let erred = any_of(
        r"(?-u:\b)I(?:['’]ve)?\s+(?:(?:have\s+)?made|see\s+(?:a|my))\s+(?:a|an|the|some)?\s*(?:\w+\s+)?(?:mistake|error)
          (?-u:\b)I\s+was\s+(?:wrong|mistaken)(?-u:\b) (?-u:\b)I\s+(?:mis\w+(?:ed|t)|misread)(?-u:\b)
          (?-u:\b)I\s+(?:take|took)\s+(?:that|it)\s+back (?-u:\b)I\s+(?:retract|withdraw)(?-u:\b)
          (?-u:\b)my\s+(?:mistake|bad)(?-u:\b)",
    );
    let dropped = any_of(
        r"(?-u:\b)(?:scratch|strike|forget|ignore|disregard)\s+(?:that|this|it|the\s+(?:above|previous|last|first)|my\s+(?:previous|last|first))(?-u:\b)
          (?-u:\b)never\s*mind(?-u:\b) (?-u:\b)oops(?-u:\b)
          (?-u:\b)or\s+is\s+(?:it|that|the\s+answer)(?-u:\b)
          \((?:wrong|incorrect|false|not\s+correct)(?-u:\b)",
    );
    let call = r"(?-u:\b)(?:wait|no|oops|hmm+|hold\s+on|actually|sorry)(?-u:\b)[,.!—…-]*\s+";
    let begin = r"(?:let\s+me|I['’]ll|I\s+will|I\s+(?:need|have)\s+to|I\s+must|let['’]s)\s+";
    let again = format!(
        r"(?:{call}|\b{begin})(?:{begin})?(?:redo|re-do|recompute|recalculate|reconsider|rethink|start\s+(?:over|again)|try\s+again|fix\s+(?:this|that|it|my)|correct\s+(?:this|that|it|myself|my))(?-u:\b)"
    );
    let number = r"\s+[$\\(*]*-?[0-9]";
    let answer = r"(?:the|my)\s+(?:(?:correct|right|final|real|true|actual)\s+)?answer";
    let instead = format!(
        r"(?:{call})+(?:(?:it|that)\s+(?:should|must)\s+(?:be|have\s+been)(?-u:\b)|(?:it\s+is|it['’]s|that['’]s|I\s+meant){number}|{answer}\s+(?:is|should\s+be|must\s+be)(?-u:\b))"
    );
    let later = format!(
        r"(?-u:\b)on\s+second\s+thoughts?(?-u:\b)|(?:^|[\n.!]\s*)\**correction(?-u:\b)|(?-u:\b)the\s+answer\s+is\s+(?:actually|instead|rather){number}"
    );
    let chinese = r"不对[，,。. ]|(?:这|那|上面|答案|我)(?:是|个|里|的|算|做|写)*错(?:了|的|误)|算错了|更正|重新(?:算|计算|来)";
    pattern(&format!(r"(?i)\b{it}(?:{is}|{cannot})|{erred}|{dropped}|{again}|{instead}|{later}|{chinese}"))
});

/// A withdrawal that begins the next answer.
static NEXT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)(?-u:\b)answer\s+(?:is|should\s+be|must\s+be)(?-u:\b)|(?-u:\b)correction$")
});

static CONFIRMED: LazyLock<Regex> = LazyLock::new(|| {
    let it = r"(?:(?:the|my|our)\s+(?:(?:original|first|previous|above|final)\s+)?(?:answer|result|solution)|it|this|that)";
    let right = r"(?:indeed|still|actually|in\s+fact)?\s*(?:correct|right)(?-u:\b)[^?]{0,20}(?:[.!\n]|$)";
    let to = r"^\s+(?:to\s+(?:think|say|assume|believe|conclude|add|use|take)|that(?-u:\b))";
    pattern(&format!(
        r"(?i){to}|\b{it}\s+(?:is|was)\s+{right}|(?-u:\b)(?:indeed|still)\s+(?:correct|right|holds?)(?-u:\b)|\b{it}\s+(?:stands|holds|checks\s+out)(?-u:\b)|(?-u:\b)no\s+mistake(?-u:\b)|^\s*\?"
    ))
});

fn pattern(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}
