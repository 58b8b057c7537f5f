//! The workspace's tests: one program, with a module per topic.

#![forbid(unsafe_code)]

mod end_to_end;
mod launcher;
mod sandbox;
mod tidy;
