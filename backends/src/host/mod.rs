//! Host memory and host work that devices share.

pub(crate) mod memory;
pub(crate) mod pinned_ranges;
pub(crate) mod work;
