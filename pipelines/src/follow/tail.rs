//! New lines of a log that another process appends to.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::output_error::{OutputError, Result};

/// Reader of a log from the end of what it has read. A last line without its newline is left for later.
#[derive(Debug)]
pub(super) struct Tail {
    path: PathBuf,
    /// Open, so that no other file can have its inode.
    file: Option<File>,
    /// Bytes of the lines that were read.
    offset: u64,
    /// Number of lines that were read.
    lines: usize,
}

impl Tail {
    pub(super) fn new(path: PathBuf) -> Tail {
        Tail { path, file: None, offset: 0, lines: 0 }
    }

    /// Opens the file anew if it was replaced or cut, as a resumed run does. Returns true if it was: what was read is
    /// then no longer valid.
    pub(super) fn reopen_if_replaced(&mut self) -> Result<bool> {
        let error = |source| OutputError::io("read", &self.path, source);
        let found = match fs::metadata(&self.path) {
            Err(source) if source.kind() == ErrorKind::NotFound => None,
            found => Some(found.map_err(error)?),
        };
        if let (Some(found), Some(file)) = (&found, &self.file) {
            let own = file.metadata().map_err(error)?;
            if (own.dev(), own.ino()) == (found.dev(), found.ino()) && found.len() >= self.offset {
                return Ok(false);
            }
        }
        let was_read = self.lines > 0;
        self.file = match found {
            Some(_) => Some(File::open(&self.path).map_err(error)?),
            None => None,
        };
        (self.offset, self.lines) = (0, 0);
        Ok(was_read)
    }

    /// Calls `visit` for each whole line since the last call. After an error the line is read again.
    pub(super) fn each(&mut self, mut visit: impl FnMut(&Path, usize, &[u8]) -> Result<()>) -> Result<bool> {
        let Some(file) = &mut self.file else { return Ok(false) };
        let error = |source| OutputError::io("read", &self.path, source);
        file.seek(SeekFrom::Start(self.offset)).map_err(error)?;
        let mut reader = BufReader::new(file);
        let mut line = Vec::new();
        let before = self.lines;
        loop {
            line.clear();
            reader.read_until(b'\n', &mut line).map_err(error)?;
            if !line.ends_with(b"\n") {
                return Ok(self.lines > before);
            }
            visit(&self.path, self.lines + 1, &line)?;
            self.offset += line.len() as u64;
            self.lines += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn new_lines(tail: &mut Tail) -> (bool, Vec<String>) {
        let replaced = tail.reopen_if_replaced().unwrap();
        let mut lines = Vec::new();
        tail.each(|_, _, line| {
            lines.push(String::from_utf8(line.to_vec()).unwrap());
            Ok(())
        })
        .unwrap();
        (replaced, lines)
    }

    #[test]
    fn only_whole_new_lines_are_read_and_a_replaced_file_from_its_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut tail = Tail::new(path.clone());
        assert_eq!(new_lines(&mut tail), (false, vec![]));
        let mut file = File::create(&path).unwrap();
        file.write_all("1\né".as_bytes()).unwrap();
        assert_eq!(new_lines(&mut tail), (false, vec!["1\n".into()]));
        file.write_all(b" whole\n3\n").unwrap();
        assert_eq!(new_lines(&mut tail), (false, vec!["é whole\n".into(), "3\n".into()]));
        assert_eq!(new_lines(&mut tail), (false, vec![]));
        // A resumed run writes aside and renames.
        fs::write(folder.path().join("aside"), "1\né whole\n3\n4\n").unwrap();
        fs::rename(folder.path().join("aside"), &path).unwrap();
        assert!(new_lines(&mut tail).0);
        assert_eq!(tail.lines, 4);
        fs::write(&path, "5\n").unwrap();
        assert_eq!(new_lines(&mut tail), (true, vec!["5\n".into()]));
    }

    #[test]
    fn a_line_that_fails_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, "1\nbad\n3\n").unwrap();
        let mut tail = Tail::new(path);
        tail.reopen_if_replaced().unwrap();
        let mut seen = Vec::new();
        for _ in 0..2 {
            let failed = tail.each(|path, number, line| {
                seen.push(number);
                match line {
                    b"bad\n" => Err(OutputError::io("parse", path, std::io::Error::other("bad"))),
                    _ => Ok(()),
                }
            });
            assert!(failed.is_err());
        }
        assert_eq!(seen, [1, 2, 2]);
    }
}
