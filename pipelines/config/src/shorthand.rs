//! Shorter forms of a config, written out before it is read.

use crate::document::{Node, Value};

/// Turns a reward that is a single term, `reward: {math: {}}`, into a list of that term.
pub fn write_out(tree: &mut Node) {
    let Some(reward) = tree.get_mut("pipeline.rlvr.reward") else { return };
    if let Value::Map(entries) = &mut reward.value {
        let term = Node { value: Value::Map(std::mem::take(entries)), origin: reward.origin };
        reward.value = Value::List(vec![term]);
    }
}
