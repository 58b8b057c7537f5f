//! Texts shared by several importers.

/// Pipeline of most imported configs.
pub(super) const R: &str = "pipeline.rlvr";
pub(super) const ONE_ENGINE: &str = "training and generation share one engine and its weights";
pub(super) const ALL_WEIGHTS: &str =
    "each rank samples by itself: set `rollout.tensor_parallel` if the weights do not fit its device";
pub(super) const ALL_EXPERTS: &str = "each rank samples by itself: set `rollout.tensor_parallel` and `rollout.expert_parallel` if the experts do not fit its device";
pub(super) const IN_FOUR_BITS: &str =
    "only weights that are frozen beside adapters, without magnitudes, are in 4 bits";
pub(super) const ONE_PLACE: &str = "every rank holds a part of every role";
pub(super) const NO_EPOCHS: &str =
    "with `selection.mixed_groups` the number of prompts per step varies: set `pipeline.rlvr.steps`";
pub(super) const REPORTS: &str = "metrics, TensorBoard events and a report are always written to the run folder; `metrics` names wandb and others";
pub(super) const DOWNLOAD: &str = "a folder: download the model there first";

/// Default of `rollout.batch_size`, which must be set here. Other systems leave it to their engine.
pub(super) const ROLLOUT_BATCH_SIZE: u64 = 64;
