//! An error with all its causes.

/// `cannot read a.jsonl: No such file or directory`: an error and its causes in one line.
pub fn one_line(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn causes_follow_the_error() {
        let source = std::io::Error::other("the folder is full");
        let error = crate::launch::Error::Prepare { action: "make a file", source };
        assert_eq!(super::one_line(&error), "cannot make a file to start the ranks: the folder is full");
    }
}
