//! Lets the programs and tests of this crate find libtorch.

#![forbid(unsafe_code)]

fn main() {
    let _view = anyroll_libtorch::link();
}
