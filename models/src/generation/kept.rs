//! [`KeptSteps`]: what an engine that has ended leaves to the next one.

use std::sync::Arc;

use super::{Limits, recorder::Recorder};
use crate::{Decoder, KvCache, Result, Runs};

/// Recorded steps of an engine, with the memory whose addresses they have. To record a step takes the host several times as long
/// as the step takes the device, and sampling for each step of training would record the same ones again.
///
/// The memory of a step's activations and the recordings stay meanwhile ([`KeptSteps::most_bytes`]), and that of a
/// [small](KeptSteps::keeps_cache) cache. Of a larger one only the addresses do, so that training has the room.
#[derive(Debug)]
pub struct KeptSteps {
    pub(super) decoder: Arc<Decoder>,
    pub(super) cache: KvCache,
    pub(super) recorder: Recorder,
    /// Maximum number of rows of a step.
    rows: usize,
}

impl KeptSteps {
    /// Takes the recorder of an engine with steps of up to `rows` rows, and gives the memory of a large cache back.
    pub(super) fn new(
        decoder: Arc<Decoder>,
        cache: KvCache,
        mut recorder: Recorder,
        rows: usize,
    ) -> Result<KeptSteps> {
        recorder.trim();
        if !KeptSteps::keeps_cache(cache.bytes(), recorder.memory_info()?.total_bytes) {
            cache.release()?;
        }
        Ok(KeptSteps { decoder, cache, recorder, rows })
    }

    /// Returns the bytes that steps of an engine of `decoder` with these limits take while no engine has them, at most. `decoder`
    /// may be on any device.
    pub fn most_bytes(decoder: &Decoder, limits: Limits, runs: Runs) -> usize {
        if runs.on_host {
            return 0;
        }
        Recorder::kept_bytes(decoder, limits.rows(), runs).expect("memory that is made with values, too")
    }

    /// Returns true if a cache of `bytes` keeps its memory on a device of `total_bytes`. To take and to give it back costs a step
    /// of a small model a twentieth (`docs/results/rl_step.md`).
    pub fn keeps_cache(bytes: usize, total_bytes: usize) -> bool {
        bytes <= total_bytes / 50
    }

    /// Returns true if an engine of `decoder` with these limits and a cache of `blocks` blocks can have them.
    pub fn fits(&self, decoder: &Arc<Decoder>, limits: Limits, blocks: usize) -> bool {
        Arc::ptr_eq(&self.decoder, decoder)
            && limits.rows() <= self.rows
            && blocks <= self.cache.held_blocks()
    }

    /// Returns the bytes that the cache takes from the device when an engine begins.
    pub fn missing_bytes(&self) -> usize {
        if self.cache.is_mapped() { 0 } else { self.cache.bytes() }
    }
}
