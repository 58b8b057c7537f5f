//! `report.html`: a run's results on one page that opens from the disk.

use crate::atomic_file::write_atomic;
use crate::follow::{Cursor, Follower};
use crate::output_error::Result;
use crate::page::Page;
use crate::run_dir::RunDir;

/// Writes `report.html` of a run from the files of its folder, replacing an existing one. Curves of missing metrics are
/// left out.
///
/// # Errors
/// If one of the files cannot be read, or the page cannot be written.
pub fn write_report(run: &RunDir) -> Result<()> {
    let mut follower = Follower::open(run.path())?;
    follower.poll()?;
    let update = follower.update(&mut Cursor::default());
    write_atomic(&run.report(), Page::Frozen(&update).html().as_bytes())
}

#[cfg(test)]
mod tests;
