//! Text of an error with all its causes, and advice on it.

use anyroll_backends::without_backtrace;
use anyroll_strategy::Error as StrategyError;

use crate::Error;

/// An error and its causes in one line, as in `cannot read a.jsonl: No such file or directory`.
pub fn one_line(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(|error| without_backtrace(&error.to_string()).to_owned()).collect::<Vec<_>>().join(": ")
}

/// Message of a JSON error in a text of one line, without serde's `line 1`. The character is given if the
/// text is not JSON.
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

/// Advice on an error that ended a run, if there is any; `told` is the error's [`one_line`].
pub fn help(error: &Error, told: &str) -> Option<&'static str> {
    match error {
        Error::Strategy(error) => help_with_gradients(error),
        _ => None,
    }
    .or_else(|| help_with_memory(told))
}

/// Advice that keeps gradients finite.
fn help_with_gradients(error: &StrategyError) -> Option<&'static str> {
    match error {
        StrategyError::AllSkipped { .. } => Some(
            "`strategy.precision: bf16` has the range of fp32; weights with infinity or NaN, in the folder of \
             `model.path` for example, overflow in each step",
        ),
        StrategyError::NonFiniteGradient { loss_scale: Some(_), .. } => Some(
            "`strategy.precision: bf16` has the range of fp32; a lower `optimizer.adamw.learning_rate` keeps weights from \
             growing out of it",
        ),
        StrategyError::NonFiniteGradient { step: 1, .. } => Some(
            "the weights were not trained before: look for infinity, NaN and very large numbers in the weights of `model.path`, or \
             for a warm-up whose `optimizer.adamw.learning_rate` is too high",
        ),
        StrategyError::NonFiniteGradient { .. } => Some(
            "a lower `optimizer.adamw.learning_rate` or `optimizer.max_grad_norm`, or more `warmup_steps` in its schedule, \
             keep steps small; `--resume` continues from the last checkpoint with the folder's `resolved.yaml`",
        ),
        StrategyError::NonFiniteWeights { .. } => Some(
            "a lower `optimizer.adamw.learning_rate` keeps weights from growing out of `strategy.precision`",
        ),
        _ => None,
    }
}

/// Advice that saves memory, if the device or the host is out of memory. Drivers and libtorch have no common
/// code for that, only messages.
fn help_with_memory(error: &str) -> Option<&'static str> {
    let is_full = ["out of memory", "can't allocate memory"].iter().any(|words| error.contains(words));
    is_full.then_some(
        "a smaller `strategy.micro_batch_size`, `strategy.recompute: full`, a higher `strategy.zero_stage`, or \
         a smaller `rollout.batch_size` need less memory; `anyroll plan` shows what each phase needs",
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
    /// libtorch's message is kept, its backtrace is not.
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
