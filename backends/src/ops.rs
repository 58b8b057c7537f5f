//! The tensor operations that tch lacks or that libtorch does in many passes.
