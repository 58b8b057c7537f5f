//! Decoding in tiles, compared with diffusers' `enable_tiling`.

use anyroll_models::Model;
use anyroll_models::diffusion::{LatentBatch, Tiles, VaeDecoder, WanVaeDecoder};
use anyroll_models::model::Unit;
use anyroll_models::passes;
use tch::Tensor;

use crate::golden::{Golden, goldens};
use crate::{vae, wan_vae};

/// Returns the tiles of `make_tiles_golden.py`.
fn tiles(zoom: i64, patch: i64) -> Tiles {
    Tiles { size: 4, stride: 3, zoom, patch }
}

fn weights(units: &[Unit], golden: &Golden) -> Vec<Vec<Tensor>> {
    // A layer's parts, such as queries and keys, are separate tensors there.
    let whole = |spec: &anyroll_models::ParamSpec| {
        Tensor::cat(&spec.parts.iter().map(|part| golden.get(&part.name)).collect::<Vec<_>>(), 0)
    };
    units.iter().map(|unit| unit.params.iter().map(whole).collect()).collect()
}

#[test]
fn pictures_and_gradients_in_tiles_equal_diffusers() {
    for (config, golden) in goldens("tiles") {
        let latents = golden.get("latents");
        if config["z_dim"].is_null() {
            let model = VaeDecoder::new(vae::config_of(&config), false).unwrap();
            let weights = weights(model.units(), &golden);
            let weights: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
            let pass = |latents: &Tensor, save: bool| {
                let batch = LatentBatch { latents: latents.shallow_clone(), latents_grad: save };
                let (images, saved) = passes::forward(&model, &weights, &batch, save)?;
                Ok::<_, anyroll_models::Error>((images, batch, saved))
            };
            let tiles = tiles(model.config().zoom(), 1);
            let images = tiles.decode(&latents, |latents| Ok(pass(latents, false)?.0)).unwrap();
            golden.assert_close("output", &images);
            let follow_back = |latents: &Tensor, grad: &Tensor| {
                let (_, batch, saved) = pass(latents, true)?;
                let found = passes::input_gradient(&model, &weights, &batch, saved, grad.shallow_clone())?;
                Ok(found.unwrap())
            };
            let found = tiles.latents_grad(&latents, &golden.get("d_output"), follow_back).unwrap();
            golden.assert_close("grad.latents", &found);
            continue;
        }
        let model = WanVaeDecoder::new(wan_vae::config_of(&config)).unwrap();
        let weights = weights(model.units(), &golden);
        let weights: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        let tiles = tiles(model.config().zoom(), model.config().patch_size);
        let decode = |latents: &Tensor, record| model.decode(&weights, latents, 1, record);
        let videos = tiles.decode(&latents, |latents| Ok(decode(latents, false)?.0)).unwrap();
        let within = videos.abs().le(1.0);
        assert!(!within.all().equal(&within.any()), "some values are clipped");
        golden.assert_close("output", &videos.clamp(-1.0, 1.0));
        let follow_back = |latents: &Tensor, grad: &Tensor| {
            model.latents_grad(&weights, decode(latents, true)?.1.unwrap(), grad)
        };
        let found = tiles.latents_grad(&latents, &(golden.get("d_output") * within), follow_back).unwrap();
        golden.assert_close("grad.latents", &found);
    }
}
