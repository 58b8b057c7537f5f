//! [`Folders`]: who makes a checkpoint's folder, and completes it.

use super::Stamp;

/// Folders in which the ranks write their files of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Folders {
    /// All ranks see one, which rank 0 makes and completes.
    #[default]
    One,
    /// Each host has its own. One of its ranks makes and completes it.
    OfHosts {
        /// True on that rank.
        is_first: bool,
    },
}

impl Folders {
    /// Returns true if this rank, `rank` of its group, makes and completes the folder that it sees.
    pub fn leads(self, rank: usize) -> bool {
        match self {
            Self::One => rank == 0,
            Self::OfHosts { is_first } => is_first,
        }
    }
}

/// A save, which further models may be part of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Save {
    /// Run and step.
    pub stamp: Stamp,
    /// Folders that it writes.
    pub folders: Folders,
}

impl From<Stamp> for Save {
    /// A save to a folder that all ranks see.
    fn from(stamp: Stamp) -> Self {
        Self { stamp, folders: Folders::One }
    }
}
