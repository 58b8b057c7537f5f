//! Gradient of the latents.

use tch::Tensor;

use super::frame_cache::FrameCache;
use super::layers::Layer;
use super::{WanVaeDecoder, of_channels};
use crate::Result;
use crate::model::Weights;

/// State that [`WanVaeDecoder::latents_grad`] needs.
#[derive(Debug)]
pub struct WanVaeTape {
    /// Latents of each part.
    pub(super) parts: Vec<Tensor>,
    /// Cached frames of the convolutions before the first of every `run_length` parts.
    pub(super) seen: Vec<Vec<Tensor>>,
    pub(super) run_length: usize,
}

impl WanVaeDecoder {
    /// Returns the gradient of the latents, from that of the videos.
    ///
    /// # Errors
    /// libtorch's.
    pub fn latents_grad(&self, weights: &[&[Tensor]], tape: WanVaeTape, grad: &Tensor) -> Result<Tensor> {
        let WanVaeTape { parts, seen, run_length } = tape;
        let zoom = self.config.zoom_in_time();
        let (mut frames_left, mut of_latents, mut of_seen) = (grad.size()[2], Vec::new(), Vec::new());
        for (run, first) in parts.chunks(run_length).zip(seen).rev() {
            let mut seen = vec![first];
            for part in &run[..run.len() - 1] {
                let (_, after) =
                    self.run(weights, part, seen.last().expect("the first part has an entry"))?;
                seen.push(after);
            }
            for (part, seen) in run.iter().zip(seen).rev() {
                // A video's first latent is one frame.
                let frames = part.size()[2] * zoom - if seen.is_empty() { zoom - 1 } else { 0 };
                frames_left -= frames;
                let own = grad.f_narrow(2, frames_left, frames)?;
                let (of_part, of_before) = self.part_grad(weights, part, &seen, (own, &of_seen))?;
                of_latents.push(of_part);
                of_seen = of_before;
            }
        }
        of_latents.reverse();
        Ok(Tensor::f_cat(&of_latents, 2)?)
    }

    /// Returns the gradients of a part's latents and of the convolutions' `seen` frames before it. Takes
    /// those of its frames and, unless it is the last part, of the convolutions' frames after it.
    fn part_grad(
        &self,
        weights: &[&[Tensor]],
        latents: &Tensor,
        seen: &[Tensor],
        (mut grad, of_after): (Tensor, &[Tensor]),
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let (mut inputs, asked) = self.inputs(weights, latents, seen)?;
        let mut of_seen = Vec::with_capacity(inputs.len());
        while let Some(x) = inputs.pop() {
            let number = inputs.len();
            let own = asked[number]..asked[number + 1];
            // The video's first part has no frames before it, and the last has none after it.
            let [seen, of_after] = [seen, of_after].map(|all| all.get(own.clone()).unwrap_or_default());
            let layer = (&self.layers[number], &Weights::new(&weights[number..=number]));
            let (of_input, of_own) = layer_grad(layer, &x, seen, (&grad, of_after))?;
            grad = of_input;
            of_seen.push(of_own);
        }
        let scale = of_channels(&self.config.latents_std, latents)?;
        let of_latents = grad.f_to_kind(latents.kind())?.f_mul(&scale)?;
        Ok((of_latents, of_seen.into_iter().rev().flatten().collect()))
    }

    /// Returns the input of each layer in [`Self::run`], the number of convolutions before each, and their
    /// total number.
    fn inputs(
        &self,
        weights: &[&[Tensor]],
        latents: &Tensor,
        seen: &[Tensor],
    ) -> Result<(Vec<Tensor>, Vec<usize>)> {
        let (mut x, mut cache) = (self.first_input(weights, latents)?, FrameCache::new(seen));
        let (mut inputs, mut asked) = (Vec::new(), vec![0]);
        for (layer, unit) in self.layers.iter().zip(weights) {
            let output = layer.run(&Weights::new(&[unit]), &x, &mut cache)?;
            inputs.push(std::mem::replace(&mut x, output));
            asked.push(cache.asked());
        }
        Ok((inputs, asked))
    }
}

/// Returns the gradients of a layer's input and of its convolutions' `seen` frames. Takes those of its output
/// and, unless it is the last part, of the convolutions' frames after it.
fn layer_grad(
    (layer, weights): (&Layer, &Weights),
    x: &Tensor,
    seen: &[Tensor],
    (grad, of_after): (&Tensor, &[Tensor]),
) -> Result<(Tensor, Vec<Tensor>)> {
    let leaves = std::iter::once(x).chain(seen);
    let leaves = leaves.map(|leaf| Ok(leaf.f_detach()?.f_set_requires_grad(true)?));
    let leaves = leaves.collect::<Result<Vec<Tensor>>>()?;
    let mut cache = FrameCache::new(&leaves[1..]);
    let output = layer.run(weights, &leaves[0], &mut cache)?;
    let mut objective = output.f_mul(grad)?.f_sum(output.kind())?;
    for (after, grad) in cache.into_kept().iter().zip(of_after) {
        objective = objective.f_add(&after.f_mul(grad)?.f_sum(after.kind())?)?;
    }
    let mut found = Tensor::f_run_backward(&[objective], &leaves, false, false)?;
    let of_seen = found.split_off(1);
    Ok((found.pop().expect("the input is a leaf"), of_seen))
}
