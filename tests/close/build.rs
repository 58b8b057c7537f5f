//! Links the tests of this crate to libtorch.

#![forbid(unsafe_code)]

fn main() {
    let _view = anyroll_libtorch::link();
}
