//! Panics of other people's parsers as errors, without a backtrace on the terminal.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use anyroll_config::error_chain::panic_text;

thread_local! {
    /// Set while a panic of this thread is caught.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Result of `work`, or the message of its panic.
pub(super) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_CAUGHT.get() {
                before(info);
            }
        }));
    });
    let outer = IS_CAUGHT.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    IS_CAUGHT.set(outer);
    result
        .map_err(|panic| format!("its reader fails: {}", panic_text(&*panic).unwrap_or("for no told reason")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_its_message() {
        assert_eq!(caught(|| 1), Ok(1));
        let nested = caught(|| caught(|| panic!("{}", 1 + 1)).map(|()| 2));
        assert_eq!(nested, Ok(Err("its reader fails: 2".to_owned())));
        assert_eq!(caught(|| -> u8 { panic!("no") }), Err("its reader fails: no".to_owned()));
    }
}
