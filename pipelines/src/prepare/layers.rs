//! Checks of `strategy.tensor_parallel`.

use anyroll_config::{Config, Section, ShardGroup};
use anyroll_models::ExpertParts;

use super::sequence::{check_groups, shapes, unsplit};
use super::tensor::EQUAL_PARTS;
use crate::opened::Opened;

const FIELD: &str = "strategy.tensor_parallel";

/// Reports ranks that cannot hold layers together. `on_host` is their number on each host.
pub(super) fn check(
    config: &Config,
    opened: Option<&Opened>,
    (world_size, on_host): (Option<usize>, usize),
    at: &Section,
) {
    let ranks = config.strategy.tensor_parallel;
    if ranks <= 1 || !at.is_read("pipeline") {
        return;
    }
    let dora = config.model.has_dora().then_some("`lora.dora`, which needs the norms of whole rows,");
    if let Some(part) = unsplit(&config.pipeline).or(dora) {
        at.refuse(FIELD, format!("{part} cannot be split over ranks"), "leave it out");
        return;
    }
    check_groups(FIELD, ranks, world_size, at);
    let sequence = config.strategy.sequence_parallel.max(1);
    if sequence > 1 {
        check_groups(FIELD, ranks * sequence, world_size, at);
    }
    check_replicas(FIELD, (config, ranks), on_host, at);
    let texts = opened.and_then(Opened::texts);
    if let Some(module) = texts.and_then(|texts| texts.base.adapted_expert()) {
        let problem = format!("the adapters of experts, such as `{module}`, cannot be split over ranks");
        at.refuse(FIELD, problem, "write `strategy.expert_parallel` in its place");
    }
    for (what, shape) in texts.into_iter().flat_map(shapes) {
        if let Err(error) = shape.check_split(ranks as i64, ExpertParts::Columns) {
            at.refuse(FIELD, format!("{what}: {error}"), EQUAL_PARTS);
        }
    }
}

/// Reports replicas that are no whole groups of `ranks`.
pub(super) fn check_replicas(field: &str, (config, ranks): (&Config, usize), on_host: usize, at: &Section) {
    let (replica, what) = match config.strategy.shard_group {
        ShardGroup::All => return,
        ShardGroup::Host => (on_host, "`shard_group: host`"),
        ShardGroup::Ranks(replica) => (replica, "`shard_group`"),
    };
    let message = format!("{what} is {replica} ranks, which cannot be divided into groups of {ranks}");
    at.ensure(
        replica.is_multiple_of(ranks),
        field,
        message,
        "write a divisor of it, or a multiple of this there",
    );
}
