//! Strategies that are included by name: `strategy: {include: zero3, micro_batch_size: 8}`. The fields next to the name
//! override the fields of the strategy file. If a `--set` has the name, the included fields override the fields of the
//! config file and of earlier `--set`s.

use crate::document::Problem;
use crate::document::{Entry, Node, Value};
use crate::document::{Origin, suggestion};

/// The files of `configs/strategy`, by their names.
pub const READY: [(&str, &str); 6] = [
    ("ddp", include_str!("../../../configs/strategy/ddp.yaml")),
    ("zero1", include_str!("../../../configs/strategy/zero1.yaml")),
    ("zero2_bf16", include_str!("../../../configs/strategy/zero2_bf16.yaml")),
    ("zero2_fp16", include_str!("../../../configs/strategy/zero2_fp16.yaml")),
    ("zero3", include_str!("../../../configs/strategy/zero3.yaml")),
    ("zero3_cpu_offload", include_str!("../../../configs/strategy/zero3_cpu_offload.yaml")),
];

/// Fields that may include a strategy.
const PLACES: [&str; 4] =
    ["strategy", "roles.policy.strategy", "roles.reference.strategy", "roles.critic.strategy"];

/// Replaces each `include` by the fields of the named file, under the fields next to `include`. An unknown name is left
/// out. Returns the problems.
pub fn include_strategies(tree: &mut Node) -> Vec<Problem> {
    PLACES.iter().filter_map(|place| include(place, tree).err()).collect()
}

fn include(place: &str, tree: &mut Node) -> Result<(), Problem> {
    let Some(strategy) = tree.get_mut(place) else { return Ok(()) };
    let Value::Map(entries) = &mut strategy.value else { return Ok(()) };
    let Some(position) = entries.iter().position(|entry| entry.key == "include") else { return Ok(()) };
    let include = entries.remove(position);
    let origin = include.node.origin;
    let file = file_of(&include.node).map_err(|(message, help)| Problem {
        field: format!("{place}.include"),
        origin,
        message,
        help,
    })?;
    strategy.fill_from(placed(Node::parse(file)?, origin));
    Ok(())
}

/// Returns the text of the file `name`, or the problem and its fix.
fn file_of(name: &Node) -> Result<&'static str, (String, String)> {
    let names = READY.map(|(name, _)| name);
    let Value::Text(text) = &name.value else {
        return Err((format!("expected a name, found {}", name.kind()), suggestion("", &names)));
    };
    let found = READY.iter().find(|(name, _)| name == text);
    let missing = || (format!("there is no ready strategy `{text}`"), suggestion(text, &names));
    found.map(|(_, file)| *file).ok_or_else(missing)
}

/// Moves all positions in a node to `origin`, so that an error in an included file points at the include.
fn placed(node: Node, origin: Origin) -> Node {
    let value = match node.value {
        Value::List(items) => Value::List(items.into_iter().map(|item| placed(item, origin)).collect()),
        Value::Map(entries) => {
            let entries = entries.into_iter().map(|entry| {
                let node = placed(entry.node, origin);
                Entry { key: entry.key, key_origin: origin, node }
            });
            Value::Map(entries.collect())
        }
        scalar => scalar,
    };
    Node { value, origin }
}
