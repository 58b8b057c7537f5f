//! What several importers say.

/// The pipeline that most of their configs are for.
pub(super) const R: &str = "pipeline.rlvr";
pub(super) const ONE_ENGINE: &str = "training and generation are one engine on the same weights";
pub(super) const ONE_PLACE: &str = "every rank holds its part of every role";
pub(super) const NO_EPOCHS: &str =
    "with `selection.mixed_groups` a step takes as many prompts as it needs: say `pipeline.rlvr.steps`";
pub(super) const REPORTS: &str =
    "metrics, TensorBoard events and a report are always written to the run folder";
pub(super) const DOWNLOAD: &str = "a folder: download the model there first";

/// Sequences that a rank generates at a time. Elsewhere an engine decides it, and here `rollout.batch_size` has to be
/// said.
pub(super) const ROLLOUT_BATCH_SIZE: u64 = 64;
