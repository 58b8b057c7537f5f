//! `anyroll schema`: the JSON Schema of configs.

use anyroll_pipelines::Result;

use super::stdout::print;

/// The schema, which a test of `anyroll-config` writes from the fields' doc comments.
pub(super) const SCHEMA: &str = include_str!("../../../docs/reference/config.schema.json");

pub(super) fn schema() -> Result<u8> {
    print(SCHEMA)?;
    Ok(0)
}
