//! Text of `anyroll --version`.

use anyroll_backends::BackendKind;
use anyroll_libtorch::VERSION;

use super::doctor;

/// Commit of a release, which its workflow sets; other builds are named by their version alone.
const COMMIT: Option<&str> = option_env!("ANYROLL_COMMIT");

/// Returns the version, the commit, the torch in use and the backends of this build; leaked, as it is made once.
pub(super) fn long() -> &'static str {
    let torch = doctor::torch();
    let backends: Vec<&str> = BackendKind::all().map(BackendKind::name).collect();
    let text = format!(
        "{}\ncommit    {}\ntorch     {}, built for {VERSION}\nbackends  {}",
        env!("CARGO_PKG_VERSION"),
        COMMIT.unwrap_or("unknown: not built by the release workflow"),
        torch.version.as_deref().unwrap_or("of an unknown version"),
        backends.join(", "),
    );
    text.leak()
}
