//! [`Disk`]: the file system changes that a checkpoint makes, one call each, so that a test can end a save
//! before any of them.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

/// File system operations of a save. [`RealDisk`] is the only implementation outside tests.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Creates a folder; it may already exist.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Writes a file and waits until it is on disk.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Waits until a folder's entries are on disk.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// Renames a file or folder.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a folder and its contents, if it exists.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The file system.
#[derive(Clone, Copy, Debug)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
