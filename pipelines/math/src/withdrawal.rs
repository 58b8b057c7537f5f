//! Words behind an answer that take it back: `wait, that is wrong`.

use std::sync::LazyLock;

use regex::Regex;

/// Limit of the bytes searched, at the end of a text.
const MOST_BYTES: usize = 20_000;

/// End of the last statement that takes back what precedes it, unless later words confirm that.
pub(super) fn last_withdrawal(text: &str) -> Option<usize> {
    let mut from = text.len().saturating_sub(MOST_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let found = WITHDRAWN.find_iter(&text[from..]).last()?;
    let (start, end) = (from + found.start(), from + found.end());
    // `if that is wrong` and `to see that it is wrong` take nothing back.
    let is_said = !SUPPOSED.is_match(&text[from..start]);
    let is_taken_back = is_said && !CONFIRMED.is_match(&text[end..]);
    // `actually, the answer is` begins the next answer.
    is_taken_back.then_some(if found.as_str().ends_with("is") { start } else { end })
}

static WITHDRAWN: LazyLock<Regex> = LazyLock::new(|| {
    let it = r"(?:that|this|it|which|(?:the|my|our)\s+(?:(?:above|previous|first|earlier|last)\s+)?(?:answer|result|solution|calculation|value)(?:\s+above)?)";
    let is = r"(?:['’]s|\s+is|\s+was|\s+seems|\s+looks)";
    let wrong = r"(?:\s+(?:actually|also|clearly|just|still|completely|obviously))?\s+(?:wrong|incorrect|false|mistaken|not\s+(?:right|correct|true|the\s+(?:right\s+|correct\s+)?answer)|a\s+mistake|an\s+error)\b";
    let cannot = r"\s+(?:cannot|can['’]t|could\s*n['’]t|is\s*n['’]t|was\s*n['’]t)\s+(?:be\s+)?(?:right|correct|true|the\s+answer)\b";
    let erred = r"\bI\s+(?:(?:have\s+)?made|see\s+(?:a|my))\s+(?:a|an|the|some)?\s*(?:\w+\s+)?(?:mistake|error)|\bI\s+was\s+(?:wrong|mistaken)\b|\bI\s+(?:take|took)\s+(?:that|it)\s+back|\bI\s+(?:retract|withdraw)\b|\bmy\s+(?:mistake|bad)\b";
    let dropped = r"\b(?:scratch|strike|forget|ignore|disregard)\s+(?:that|this|it|the\s+(?:above|previous|last|first)|my\s+(?:previous|last|first))\b";
    let again = r"\b(?:wait|no|oops|hmm|hold\s+on|actually|sorry|let\s+me|I(?:['’]ll|\s+will|\s+need\s+to|\s+must|\s+have\s+to))\b[,.!—…-]*\s+(?:let\s+me\s+|I\s+(?:need|have)\s+to\s+|let['’]s\s+)?(?:redo|re-do|recompute|recalculate|start\s+(?:over|again)|try\s+again|fix\s+(?:this|that|it)|correct\s+(?:this|that|it|myself))\b";
    let instead = r"\b(?:wait|no|oops|hmm|hold\s+on|actually|sorry|rather)\b[,.!—…-]*\s+(?:no[,.]?\s+|wait[,.]?\s+)?(?:(?:it|that|the\s+answer)\s+(?:should|must)\s+(?:be|have\s+been)\b|it\s+is\s+[$\\(*-]*[0-9]|(?:the|my)\s+(?:(?:correct|right|final|real|true)\s+)?answer\s+(?:is|should\s+be|must\s+be)\b)";
    let again_later = r"\bon\s+second\s+thoughts?\b|(?:^|[\n.!]\s*)correction\b";
    let chinese = r"不对[，,。. ]|(?:这|那|上面|答案|我)(?:是|个|里|的|算|做|写)*错(?:了|的|误)|算错了|更正|重新(?:算|计算|来)";
    pattern(&format!(
        r"(?i)\b{it}(?:{is}{wrong}|{cannot})|{erred}|{dropped}|{again}|{instead}|{again_later}|{chinese}"
    ))
});

/// Words before a withdrawal that make it a supposition, a question or a denial.
static SUPPOSED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)\b(?:if|whether|verify\s+that|check\s+that|think|believe|why|unless|suppose|assume|hope|prove|see\s+(?:if|that)|not\s+that|claim(?:s|ed)?(?:\s+that)?)\s+(?:that\s+)?$")
});

static CONFIRMED: LazyLock<Regex> = LazyLock::new(|| {
    let it = r"(?:(?:the|my|our)\s+(?:(?:original|first|previous|above|final)\s+)?(?:answer|result|solution)|it|this|that)";
    let right = r"(?:indeed|still|actually|in\s+fact)?\s*(?:correct|right)\b[^?]{0,20}(?:[.!\n]|$)";
    let to = r"^\s+(?:to\s+(?:think|say|assume|believe|conclude)|that\b)";
    pattern(&format!(
        r"(?i){to}|\b{it}\s+(?:is|was)\s+{right}|\b(?:indeed|still)\s+(?:correct|right|holds?)\b|\b{it}\s+(?:stands|holds|checks\s+out)\b|\bno\s+mistake\b|^\s*\?"
    ))
});

fn pattern(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}
