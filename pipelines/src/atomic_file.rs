//! Files that are either whole or not there.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::output_error::{OutputError, Result};

/// Replaces the file at `path` by `bytes`, so that a reader, or a machine that loses power, sees the old
/// file or the new one and nothing between.
///
/// The bytes are written beside the file, flushed to the disk and renamed over it; then the folder is
/// flushed, since the rename lives there. One writer at a time: the name beside the file is fixed, so that
/// a leftover of a killed process is overwritten and does not pile up.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let aside = aside(path);
    let write = || {
        let mut file = File::create(&aside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&aside, path)?;
        sync_folder_of(path)
    };
    write().map_err(|source| OutputError::io("write", path, source))
}

/// `report.html` is written as `report.html.partial` first: same folder, hence the same file system.
fn aside(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".partial");
    PathBuf::from(name)
}

fn sync_folder_of(path: &Path) -> std::io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_the_file_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_atomic(&path, b"first, and longer").unwrap();
        write_atomic(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file_and_names_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_atomic(&path, b"old").unwrap();
        // A folder where the bytes would go aside makes the write fail, whoever the user is.
        fs::create_dir(aside(&path)).unwrap();
        let error = write_atomic(&path, b"new").unwrap_err();
        assert_eq!(error.to_string(), format!("cannot write {}", path.display()));
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }
}
