//! [`BackendKind`] and [`DeviceId`]: which backend, and which of its devices.

use std::{fmt, hash};

/// The facts about a backend on which code above this crate depends.
#[derive(Debug)]
pub struct BackendTraits {
    /// Name in YAML and on the command line.
    pub name: &'static str,
    /// It is the host itself, which holds any number of ranks.
    pub is_host: bool,
    /// One device serves several ranks: their collectives go through the host.
    pub shares_devices: bool,
    /// libtorch computes on it, so models can run.
    pub runs_models: bool,
    /// Models can compute each row by itself there, if their sizes fit: see [`crate::ops::exist_by_rows`].
    pub adds_by_rows: bool,
}

impl BackendTraits {
    /// An accelerator with one rank a device, on which libtorch computes.
    pub const fn accelerator(name: &'static str) -> Self {
        Self { name, is_host: false, shares_devices: false, runs_models: true, adds_by_rows: false }
    }
}

/// A family of accelerators, by its facts: `BackendKind::CPU` and its like are constants of the backends' own folders.
#[derive(Clone, Copy)]
pub struct BackendKind(&'static BackendTraits);

impl BackendKind {
    /// Handle of a backend; two with one name are the same.
    pub const fn new(traits: &'static BackendTraits) -> Self {
        Self(traits)
    }

    /// See [`BackendTraits::name`].
    pub const fn name(self) -> &'static str {
        self.0.name
    }

    /// See [`BackendTraits::is_host`].
    pub const fn is_host(self) -> bool {
        self.0.is_host
    }

    /// See [`BackendTraits::shares_devices`].
    pub const fn shares_devices(self) -> bool {
        self.0.shares_devices
    }

    /// See [`BackendTraits::runs_models`].
    pub const fn runs_models(self) -> bool {
        self.0.runs_models
    }

    /// See [`BackendTraits::adds_by_rows`].
    pub const fn adds_by_rows(self) -> bool {
        self.0.adds_by_rows
    }
}

impl PartialEq for BackendKind {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for BackendKind {}

impl hash::Hash for BackendKind {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One device of one backend: `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// The family.
    pub backend: BackendKind,
    /// Index on this host.
    pub ordinal: usize,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend, self.ordinal)
    }
}
