//! The C ABI of `shim/`: one declaration a function, in the order of the C++ files.
