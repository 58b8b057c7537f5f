//! The caller's request to the helper.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A program to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Program and arguments; a bare name is searched in `/usr/local/bin`, `/usr/bin` and `/bin`. With an
    /// empty list the helper sets up the sandbox, reports its protections, and exits.
    pub command: Vec<String>,
    /// Files in the program's working folder.
    pub files: Vec<File>,
    /// Folders and files of the host that it can read and execute, in addition to the system's.
    pub readable: Vec<PathBuf>,
    /// Resource limits.
    pub limits: Limits,
    /// Protections that must work, or the program is not started.
    pub required: Vec<Protection>,
    /// Standard input, which `/dev/stdin` also names. `None` if the input follows the job and can be read only once.
    pub input: Option<String>,
}

/// A file in the program's folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Name, without a folder.
    pub name: String,
    /// Contents.
    pub text: String,
}

/// Resource limits of a program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Wall-clock time in seconds, after which all of its processes end. Each process also has this much CPU
    /// time.
    pub wall_s: f64,
    /// Address space per process.
    pub memory_bytes: u64,
    /// Number of processes and threads at a time.
    pub processes: u64,
    /// Total size of its files.
    pub disk_bytes: u64,
    /// Maximum size of standard output, and of standard error.
    pub output_bytes: u64,
}

/// A layer between a program and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protection {
    /// An unknown user without privileges, in a user namespace of its own.
    User,
    /// Sees and reaches no other process, and none of its own outlives it.
    Processes,
    /// Sees only files that are mounted for it.
    Files,
    /// Has no network.
    Network,
    /// Landlock: writes only to its folder.
    Landlock,
    /// Dangerous system calls are blocked.
    Seccomp,
    /// CPU time, memory, processes and files are limited.
    Limits,
    /// Its folder is in memory, with a fixed size.
    Disk,
}

impl Protection {
    /// All protections.
    pub const ALL: [Self; 8] = [
        Self::User,
        Self::Processes,
        Self::Files,
        Self::Network,
        Self::Landlock,
        Self::Seccomp,
        Self::Limits,
        Self::Disk,
    ];
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::User => "user",
            Self::Processes => "processes",
            Self::Files => "files",
            Self::Network => "network",
            Self::Landlock => "landlock",
            Self::Seccomp => "seccomp",
            Self::Limits => "limits",
            Self::Disk => "disk",
        })
    }
}

impl Job {
    /// Writes the job, preceded by its length, so that the reader reads no further: the program's own input
    /// follows.
    ///
    /// # Errors
    /// If the helper does not read.
    pub fn write_to(&self, mut to: impl Write) -> io::Result<()> {
        let text = serde_json::to_vec(self).expect("plain data");
        let length = u32::try_from(text.len())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a job of more than 4 GiB"))?;
        to.write_all(&length.to_le_bytes())?;
        to.write_all(&text)
    }

    /// Reads a job written by [`Self::write_to`] from an unbuffered input.
    ///
    /// # Errors
    /// If it is not a job.
    pub fn read_from(mut from: impl Read) -> io::Result<Self> {
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let mut text = vec![0; u32::from_le_bytes(length) as usize];
        from.read_exact(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_read_to_its_last_byte_and_not_beyond() {
        let job = Job {
            command: vec!["python3".into(), "main.py".into()],
            files: vec![File { name: "main.py".into(), text: "print('é')\n".into() }],
            readable: vec!["/opt/python".into()],
            limits: Limits {
                wall_s: 2.5,
                memory_bytes: 1 << 29,
                processes: 8,
                disk_bytes: 1 << 20,
                output_bytes: 1 << 16,
            },
            required: Protection::ALL.to_vec(),
            input: None,
        };
        let mut bytes = Vec::new();
        job.write_to(&mut bytes).unwrap();
        bytes.extend(b"3 4\n");
        let mut rest = &bytes[..];
        assert_eq!(Job::read_from(&mut rest).unwrap(), job);
        assert_eq!(rest, b"3 4\n");
        assert!(Job::read_from(&bytes[..10]).is_err());
    }
}
