//! Atomic writes: a file is complete or absent.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::output_error::{OutputError, Result};

/// Replaces the file at `path` by `bytes`. A reader, or a machine that loses power, sees the old file or the
/// new one, never a part.
///
/// The bytes are written to a temporary file in the same folder, flushed to disk and renamed; then the folder
/// is flushed, which holds the rename. One writer at a time: the temporary name is fixed, so that a leftover
/// of a killed process is overwritten.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let aside = aside(path);
    let write = || {
        let mut file = File::create(&aside)?;
        file.write_all(bytes)?;
        publish(&aside, path)
    };
    write().map_err(|source| OutputError::io("write", path, source))
}

/// Like [`write_atomic`], for a file that `write` makes at the path that it is given.
pub fn place(path: &Path, write: impl FnOnce(&Path) -> crate::Result<()>) -> crate::Result<()> {
    let aside = aside(path);
    write(&aside)?;
    Ok(publish(&aside, path).map_err(|source| OutputError::io("write", path, source))?)
}

/// Flushes the whole file `aside` to disk and renames it.
fn publish(aside: &Path, path: &Path) -> std::io::Result<()> {
    File::open(aside)?.sync_all()?;
    fs::rename(aside, path)?;
    sync_folder_of(path)
}

/// Temporary name of a file: `report.html.partial` for `report.html`, in the same folder and so the same file
/// system.
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
        // A folder at the temporary name makes the write fail for every user.
        fs::create_dir(aside(&path)).unwrap();
        let error = write_atomic(&path, b"new").unwrap_err();
        assert_eq!(error.to_string(), format!("cannot write {}", path.display()));
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }
}
