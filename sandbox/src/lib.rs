//! Runs one program that nobody trusts, such as a policy's answer to a programming task.
//!
//! [`Sandbox`] is what a caller has: it starts the helper program, feeds it, and ends it when it takes too long or
//! writes too much. [`helper`] is what that program does: it builds a world with nothing in it but an interpreter,
//! moves into it, gives up every right, and only then starts the program. The two speak [`Job`].
//!
//! ```text
//! caller -> helper, outside -> helper, process 1 inside -> program
//!           builds the world    ends with the helper,       and what it starts
//!           and locks the door  and ends all with it
//! ```
//!
//! Layers, from the outside in; a program has to get through all of them:
//! - namespaces: no process but its own, no network, no host file but those that are mounted, an unknown user;
//! - Landlock: of these files only its own folder can be written;
//! - seccomp: the calls that reach for the kernel, for other processes or for the network are refused;
//! - limits on processor time, memory, processes, files and their size, and a scratch folder in memory of fixed size.

#![forbid(unsafe_code)]

pub mod calls;
mod filter;
mod host;
mod job;
mod world;

pub mod helper;

pub use host::{Ended, Error, Finished, Sandbox};
pub use job::{File, Job, Limits, Protection};
