//! `shard_group`: the ranks that share one replica of a model.

use std::fmt;

use serde::{
    Deserialize, Serialize,
    de::{self, Deserializer, Visitor},
    ser::Serializer,
};

/// Ranks over which a model's states are sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShardGroup {
    /// All ranks: there is one replica.
    #[default]
    All,
    /// The ranks of each host: there is a replica on every host.
    Host,
    /// A number of neighbouring ranks; 1 or above.
    Ranks(usize),
}

impl ShardGroup {
    /// Number of ranks of a group, of `world_size` in all and `on_host` on each host.
    pub fn ranks(self, world_size: usize, on_host: usize) -> usize {
        match self {
            Self::All => world_size,
            Self::Host => on_host,
            Self::Ranks(ranks) => ranks,
        }
    }
}

impl<'de> Deserialize<'de> for ShardGroup {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ShardGroupVisitor;

        impl Visitor<'_> for ShardGroupVisitor {
            type Value = ShardGroup;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of ranks, `all` or `host`")
            }

            fn visit_u64<E: de::Error>(self, ranks: u64) -> Result<ShardGroup, E> {
                Ok(ShardGroup::Ranks(usize::try_from(ranks).unwrap_or(usize::MAX)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ShardGroup, E> {
                match text {
                    "all" => Ok(ShardGroup::All),
                    "host" => Ok(ShardGroup::Host),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(ShardGroupVisitor)
    }
}

impl Serialize for ShardGroup {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => "all".serialize(serializer),
            Self::Host => "host".serialize(serializer),
            Self::Ranks(ranks) => ranks.serialize(serializer),
        }
    }
}
