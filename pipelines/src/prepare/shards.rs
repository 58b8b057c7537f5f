//! Checks of `strategy.shard_group`.

use anyroll_config::{Config, Section, ShardGroup};

use super::sequence::check_groups;

const FIELD: &str = "strategy.shard_group";

/// Reports ranks that cannot be divided into shard groups.
pub(super) fn check(config: &Config, world_size: Option<usize>, at: &Section) {
    if let ShardGroup::Ranks(ranks) = config.strategy.shard_group
        && ranks > 0
    {
        check_groups(FIELD, ranks, world_size, at);
    }
}
