//! Runs one untrusted program, such as a policy's answer to a programming task.
//!
//! [`Sandbox`] is the caller's interface: it starts the helper program, feeds it, and ends it when it runs
//! too long or writes too much. [`helper`] is the code of that program. It enters namespaces that contain
//! little more than an interpreter, drops all privileges, and only then starts the program. The two
//! communicate through [`Job`].
//!
//! ```text
//! caller -> helper, outside       -> helper, process 1 inside -> program
//!           enters the namespaces    ends with the helper,       and its children
//!           and locks them           and ends all with it
//! ```
//!
//! Layers, from the outside in; an escape has to break all of them:
//! - namespaces: only its own processes, no network, only mounted files of the host, an unknown user;
//! - Landlock: of these files only its own folder can be written;
//! - seccomp: calls that reach for the kernel, other processes or the network are blocked;
//! - limits on CPU time, memory, processes, files and their size, and a scratch folder in memory of fixed
//!   size.

#![forbid(unsafe_code)]

pub mod calls;
mod filter;
mod host;
mod job;
mod namespaces;

pub mod helper;

pub use host::{Error, Exit, Finished, Sandbox};
pub use job::{File, Job, Limits, Protection};
