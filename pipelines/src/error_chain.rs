//! An error with all its causes.

use anyroll_backends::without_backtrace;

/// `cannot read a.jsonl: No such file or directory`: an error and its causes in one line.
pub fn one_line(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(|error| without_backtrace(&error.to_string()).to_owned()).collect::<Vec<_>>().join(": ")
}

/// What takes less memory, if an error that ended a run is that a device or the host has no more. Drivers and libtorch
/// have no code for that in common, but words.
pub fn help_with_memory(error: &str) -> Option<&'static str> {
    let is_full = ["out of memory", "can't allocate memory"].iter().any(|words| error.contains(words));
    is_full.then_some(
        "a smaller `strategy.micro_batch_size`, `strategy.recompute: full`, a higher `strategy.zero_stage`, or fewer \
         samples at a time in `rollout.batch_size` take less; `anyroll plan` shows what each phase takes",
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn causes_follow_the_error() {
        let source = std::io::Error::other("the folder is full");
        let error = crate::launch::Error::Prepare { action: "make a file", source };
        assert_eq!(super::one_line(&error), "cannot make a file to start the ranks: the folder is full");
    }
    /// What libtorch says of it is told, and not its backtrace.
    #[test]
    fn memory_that_is_not_there_is_told_with_what_takes_less() {
        let tebibytes = tch::Tensor::f_empty([1 << 50], (tch::Kind::Uint8, tch::Device::Cpu));
        let error = crate::Error::from(tebibytes.unwrap_err());
        let told = super::one_line(&error);
        assert!(told.contains("you tried to allocate 1125899906842624 bytes"), "{told}");
        assert!(!told.contains("frame #") && !told.contains('\n'), "{told}");
        assert!(super::help_with_memory(&told).is_some_and(|help| help.contains("micro_batch_size")));
        assert_eq!(super::help_with_memory("the disk is full"), None);
    }
}
