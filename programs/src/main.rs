//! The `anyroll-engine` program, which the `anyroll` launcher starts once it has found libtorch: the command line and the
//! servers, over [`anyroll_pipelines`].

#![forbid(unsafe_code)]

mod cli;
mod serve;
mod watch;

use std::{any::Any, panic};

use anyroll_backends::exit_at_once;
use anyroll_config::error_chain::panic_text;
use anyroll_pipelines::launch::{self, FailureKind};

fn main() -> ! {
    let code = panic::catch_unwind(cli::main).unwrap_or_else(|payload| {
        // The panic's hook has printed it already. A rank's parent hears of it here; without a parent this does nothing.
        let _ = launch::report_failure(&format!("it panicked: {}", message(&*payload)), FailureKind::Own);
        PANICKED
    });
    // Exits without returning: threads of a failed collective may never end, and must not keep the process
    // alive.
    exit_at_once(code)
}

/// Exit code of a panic, as Rust programs have it.
const PANICKED: u8 = 101;

/// Text of a panic.
fn message(payload: &(dyn Any + Send)) -> &str {
    panic_text(payload).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_panic_is_its_text() {
        let reason = |panics: fn()| message(&*panic::catch_unwind(panics).unwrap_err()).to_owned();
        assert_eq!(reason(|| panic!("no memory for {}", 1)), "no memory for 1");
        assert_eq!(reason(|| panic!("no thread")), "no thread");
        assert_eq!(reason(|| panic::panic_any(3)), "without a message");
    }
}
