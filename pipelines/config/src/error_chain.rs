//! Text of an error with all its causes, and advice on it.

use std::any::Any;

use anyroll_backends::without_backtrace;

/// Returns an error and its causes in one line, such as `cannot read a.jsonl: No such file or directory`.
pub fn one_line(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(|error| without_backtrace(&error.to_string()).to_owned()).collect::<Vec<_>>().join(": ")
}

/// Returns the text of a caught panic, if it has one.
pub fn panic_text(payload: &(dyn Any + Send)) -> Option<&str> {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied())
}

/// Returns the message of a JSON error without the line. If the text is not JSON, the message has the character's
/// position in its line.
pub fn within_line(error: &serde_json::Error) -> String {
    let said = error.to_string().replace("expected f64", "expected a number");
    let said = said.replace("expected usize", "expected a whole number, 0 or above");
    let (line, column) = (error.line(), error.column());
    match said.strip_suffix(&format!(" at line {line} column {column}")) {
        Some(problem) if error.is_data() => problem.to_owned(),
        Some(problem) => format!("{problem} at character {column}"),
        None => said,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn causes_follow_the_error() {
        let source = std::io::Error::other("the folder is full");
        let error = crate::Error::Read { path: "a.yaml".into(), source };
        assert_eq!(super::one_line(&error), "cannot read the config a.yaml: the folder is full");
    }
}
