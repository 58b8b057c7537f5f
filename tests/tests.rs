//! The workspace's tests: one program, a module an idea.

#![forbid(unsafe_code)]

mod launcher;
mod tidy;
