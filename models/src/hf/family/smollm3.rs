//! SmolLM3: layers without rotation, which are the ones with a window if there is one.

use super::{Class, Family, Reader, write_layer_types};
use crate::hf::Result;
use crate::{DecoderConfig, OtherRope, SlidingWindow};
use serde_json::{Map, Value};

pub(super) const FAMILY: Family = Family {
    class: Class {
        attention_bias: true,
        mlp_bias: true,
        tied: true,
        sliding_window: None,
        rope_theta: 2_000_000.0,
        ..Class::USUAL
    },
    write,
    ..Family::new("SmolLM3", "smollm3", read)
};

fn read(file: &Reader) -> Result<DecoderConfig> {
    let window = window(file)?;
    let layers = layers_without_rope(file)?;
    let other_rope = layers.contains(&true).then_some(OtherRope { theta: None, layers });
    Ok(DecoderConfig { other_rope, ..file.decoder(window)? })
}

fn window(file: &Reader) -> Result<Option<SlidingWindow>> {
    let named = file.named_layers()?.is_some_and(|layers| layers.contains(&true));
    if !file.uses_window()? {
        // In transformers only some of the attention implementations would use the window.
        let problem = "is false, but `layer_types` has `sliding_attention`: make them agree";
        file.ensure(!named, "use_sliding_window", problem)?;
        return Ok(None);
    }
    let layers = layers_without_rope(file)?;
    if named { file.sized_window(layers) } else { file.window(layers) }
}

/// For each layer, returns true if it has no rotation.
fn layers_without_rope(file: &Reader) -> Result<Vec<bool>> {
    let count = file.shared.num_hidden_layers;
    let Some(turned) = file.get::<Vec<i64>>("no_rope_layers")? else {
        let interval: usize = file.get("no_rope_layer_interval")?.unwrap_or(4);
        file.ensure(interval > 0, "no_rope_layer_interval", "is 0, must be at least 1")?;
        return Ok((1..=count).map(|layer| layer % interval == 0).collect());
    };
    let problem = format!("has {} entries, must have one for each of the {count} layers", turned.len());
    file.ensure(turned.len() >= count, "no_rope_layers", problem)?;
    Ok(turned[..count].iter().map(|&turned| turned == 0).collect())
}

fn write(config: &DecoderConfig, file: &mut Map<String, Value>) {
    write_layer_types(config, file);
    let is_still = |layer: usize| config.other_rope.as_ref().is_some_and(|other| other.layers[layer]);
    let turned: Vec<i64> = (0..config.num_hidden_layers).map(|layer| i64::from(!is_still(layer))).collect();
    file.insert("no_rope_layers".to_owned(), turned.into());
}
