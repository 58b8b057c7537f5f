//! The decoder of latents.

use anyroll_models::diffusion::{LatentBatch, VaeConfig, VaeDecoder};
use serde_json::Value;

use crate::golden::{goldens, integer};

#[test]
fn images_and_gradients_equal_diffusers() {
    for (config, golden) in goldens("vae") {
        let model = VaeDecoder::new(config_of(&config), true).unwrap();
        golden.check(&model, &LatentBatch { latents: golden.get("latents"), latents_grad: true });
    }
}

#[test]
fn contradictions_name_their_field() {
    let check = |field: &str, change: fn(&mut VaeConfig)| {
        let mut config = config_of(&goldens("vae")[0].0);
        change(&mut config);
        let error = VaeDecoder::new(config, false).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`")), "{error}");
    };
    check("block_out_channels", |config| config.block_out_channels = vec![4, 7]);
    check("block_out_channels", |config| config.block_out_channels.clear());
    check("scaling_factor", |config| config.scaling_factor = 0.0);
}

pub fn config_of(config: &Value) -> VaeConfig {
    VaeConfig {
        latent_channels: integer(config, "latent_channels"),
        out_channels: integer(config, "out_channels"),
        block_out_channels: serde_json::from_value(config["block_out_channels"].clone()).unwrap(),
        layers_per_block: integer(config, "layers_per_block") as usize,
        norm_num_groups: integer(config, "norm_num_groups"),
        scaling_factor: config["scaling_factor"].as_f64().unwrap(),
        shift_factor: config["shift_factor"].as_f64().unwrap_or(0.0),
        use_post_quant_conv: config["use_post_quant_conv"].as_bool().unwrap(),
    }
}
