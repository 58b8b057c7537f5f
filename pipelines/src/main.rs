//! The `anyroll-engine` program: what the `anyroll` launcher starts once libtorch is found.

#![forbid(unsafe_code)]

fn main() {
    println!("anyroll {}, libtorch on {} threads", env!("CARGO_PKG_VERSION"), tch::get_num_threads());
}
