//! The workspace's tests: one program, a module an idea.

#![forbid(unsafe_code)]

mod end_to_end;
mod launcher;
mod sandbox;
mod tidy;
