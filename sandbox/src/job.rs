//! What the caller asks of the helper.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A program to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The program and its arguments; a bare name is looked for in `/usr/local/bin`, `/usr/bin` and `/bin`. With an
    /// empty list the helper builds the world, says what protects it, and ends.
    pub command: Vec<String>,
    /// What lies in the program's folder, its current one.
    pub files: Vec<File>,
    /// Folders and files of the host that it can read and execute, beside those of the system.
    pub readable: Vec<PathBuf>,
    /// What it may use up.
    pub limits: Limits,
    /// What must protect the host, or the program is not started.
    pub required: Vec<Protection>,
    /// Standard input, which `/dev/stdin` names as well; `None` for what follows the job, and can be read once.
    pub input: Option<String>,
}

/// A file in the program's folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Its name, without a folder.
    pub name: String,
    /// What it holds.
    pub text: String,
}

/// What a program may use up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Seconds on the clock, after which all of its processes end. Each process has as many of processor time.
    pub wall_s: f64,
    /// Address space of each process.
    pub memory_bytes: u64,
    /// Processes and threads at a time.
    pub processes: u64,
    /// What its files may hold together.
    pub disk_bytes: u64,
    /// What it may write to standard output, and to standard error.
    pub output_bytes: u64,
}

/// A layer between a program and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protection {
    /// An unknown user without rights, in a user namespace of its own.
    User,
    /// Sees and reaches no other process, and none of its own outlives it.
    Processes,
    /// Sees no file but those that are mounted for it.
    Files,
    /// Has no network.
    Network,
    /// Landlock: writes nowhere but in its folder.
    Landlock,
    /// Dangerous system calls are refused.
    Seccomp,
    /// Processor time, memory, processes and files are bounded.
    Limits,
    /// Its folder is in memory, and of fixed size.
    Disk,
}

impl Protection {
    /// All of them.
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
    /// Writes it with its length before, so that the reader takes not a byte more: the program's own input follows.
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

    /// Reads what [`Self::write_to`] wrote, from an input without a buffer.
    ///
    /// # Errors
    /// If it is no job.
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
