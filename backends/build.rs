//! Compiles the C++ shim over libtorch into this crate.

#![forbid(unsafe_code)]

fn main() {
    println!("cargo::rerun-if-changed=shim");
    let include = anyroll_libtorch::link().join("include");

    let mut build = cc::Build::new();
    // Vectors are passed between inlined functions only, so GCC's note on how it passes them is idle.
    build.flag_if_supported("-Wno-psabi");
    if build.cpp(true).get_compiler().is_like_gnu() {
        // The kernels share libtorch's pool of threads, which is GNU OpenMP's; without it they run on one.
        build.flag("-fopenmp");
        println!("cargo::rustc-link-lib=gomp");
    }
    build
        .std("c++17")
        .opt_level(3)
        .warnings(false) // libtorch's headers warn by the thousand; ours are checked with -Wall by hand
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .define("USE_DISTRIBUTED", None)
        .files([
            "shim/attention.cpp",
            "shim/kernels.cpp",
            "shim/libtorch.cpp",
            "shim/linear.cpp",
            "shim/optimizer.cpp",
        ])
        .compile("anyroll_shim");
}
