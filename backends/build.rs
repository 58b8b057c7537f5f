//! Compiles the C++ shim over libtorch into this crate.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=shim");
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    let libtorch = std::env::var("LIBTORCH").expect("LIBTORCH is not set: run `cargo xtask setup`");
    let include = Path::new(&libtorch).join("include");
    assert!(include.exists(), "{} does not exist: run `cargo xtask setup`", include.display());

    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(3)
        .warnings(false) // libtorch's headers warn by the thousand; ours are checked with -Wall by hand
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .include("shim/gloo_stub")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .define("USE_C10D_GLOO", None)
        .define("USE_DISTRIBUTED", None)
        .files([
            "shim/c10d.cpp",
            "shim/device.cpp",
            "shim/kernels.cpp",
            "shim/optimizer.cpp",
            "shim/tensor.cpp",
        ])
        .compile("anyroll_shim");
}
