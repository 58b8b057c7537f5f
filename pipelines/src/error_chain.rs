//! An error with all its causes.

use anyroll_backends::without_backtrace;
use anyroll_strategy::Error as StrategyError;

use crate::Error;

/// `cannot read a.jsonl: No such file or directory`: an error and its causes in one line.
pub fn one_line(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(|error| without_backtrace(&error.to_string()).to_owned()).collect::<Vec<_>>().join(": ")
}

/// What is wrong with a text of one line, of which serde says that it is the first. The place is told where the text is no
/// JSON.
pub fn within_line(error: &serde_json::Error) -> String {
    let said = error.to_string().replace("expected f64", "expected a number");
    let said = said.replace("expected usize", "expected a whole number, 0 or above");
    let column = error.column();
    match said.strip_suffix(&format!(" at line 1 column {column}")) {
        Some(problem) if error.is_data() => problem.to_owned(),
        Some(problem) => format!("{problem} at character {column}"),
        None => said,
    }
}

/// What a user can do about an error that ended a run, if that is known; `told` is its [`one_line`].
pub fn help(error: &Error, told: &str) -> Option<&'static str> {
    match error {
        Error::Strategy(error) => help_with_gradients(error),
        _ => None,
    }
    .or_else(|| help_with_memory(told))
}

/// What keeps gradients finite.
fn help_with_gradients(error: &StrategyError) -> Option<&'static str> {
    match error {
        StrategyError::AllSkipped { .. } => Some(
            "`strategy.precision: bf16` has the range of fp32; weights that have infinity or NaN in them, in the folder of \
             `model.path` say, overflow in each",
        ),
        StrategyError::NonFiniteGradient { loss_scale: Some(_), .. } => Some(
            "`strategy.precision: bf16` has the range of fp32; a lower `optimizer.adamw.learning_rate` keeps weights from \
             growing out of it",
        ),
        StrategyError::NonFiniteGradient { step: 1, .. } => Some(
            "nothing was learnt before: look for infinity, NaN and very large numbers in the weights of `model.path`, or \
             for a warm-up whose `optimizer.adamw.learning_rate` is too high",
        ),
        StrategyError::NonFiniteGradient { .. } => Some(
            "a lower `optimizer.adamw.learning_rate` or `optimizer.max_grad_norm`, or more `warmup_steps` in its schedule, \
             keep steps small; `--resume` goes on from the last checkpoint as the folder's `resolved.yaml` says",
        ),
        StrategyError::NonFiniteWeights { .. } => Some(
            "a lower `optimizer.adamw.learning_rate` keeps weights from growing out of `strategy.precision`",
        ),
        _ => None,
    }
}

/// What takes less memory, if an error that ended a run is that a device or the host has no more. Drivers and libtorch
/// have no code for that in common, but words.
fn help_with_memory(error: &str) -> Option<&'static str> {
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
        let full = crate::Error::NothingMeasured;
        assert!(super::help(&full, &told).is_some_and(|help| help.contains("micro_batch_size")));
        assert_eq!(super::help(&full, "the disk is full"), None);
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_told_with_what_may_mend_it() {
        let check = |step, loss_scale, words: &str| {
            let source = anyroll_strategy::Error::NonFiniteGradient { step, grad_norm: f64::NAN, loss_scale };
            let error = crate::Error::from(source);
            let help = super::help(&error, &super::one_line(&error)).unwrap();
            assert!(help.contains(words), "{help}");
        };
        check(1, None, "`model.path`");
        check(2, None, "a lower `optimizer.adamw.learning_rate`");
        check(1, Some(1.0), "`strategy.precision: bf16`");
    }
}
