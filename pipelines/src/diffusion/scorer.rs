//! What an image earns.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use tch::{CModule, Device, Kind, Tensor};

use super::quadrants::{Light, Quadrants};
use crate::{
    Error, Result,
    config::{ImageReward, PythonConfig, ScorerInput, TorchscriptConfig},
    data::Record,
    picture::Picture,
    reward::Python,
};

/// Images that are scored by processes at a time.
const WORKERS: usize = 4;

/// Images, with what they show.
#[derive(Debug)]
pub struct Painted {
    /// Pixels, -1 to 1 where they are natural: fp32 `[B, channels, height, width]`.
    pub images: Tensor,
    /// What they were decoded from; the images themselves where there is no decoder.
    pub latents: Tensor,
    /// Their classes or the numbers of their texts: int64 `[B]`.
    pub labels: Tensor,
}

/// Scores images.
pub enum Scorer {
    /// By the class of shapes.
    Shapes {
        /// Where each class should be light.
        quadrants: Quadrants,
        /// What is trained on.
        reward: Light,
    },
    /// By a function of the user's.
    Python {
        /// The function.
        python: Python,
        /// What is known of each text.
        records: Vec<Record>,
    },
    /// By a network.
    Script {
        /// The network. Behind a lock only because tch's modules are not `Sync`.
        module: Mutex<CModule>,
        /// How it is called.
        config: TorchscriptConfig,
    },
}

/// The network of the file `path` on `device`.
pub fn load_script(path: &Path, device: Device) -> Result<CModule> {
    let mut module = CModule::load_on_device(path, device)?;
    module.f_set_eval()?;
    Ok(module)
}

impl Scorer {
    /// What `reward` says; `records` are those of the texts.
    pub fn new(reward: &ImageReward, records: Vec<Record>, device: Device) -> Result<Self> {
        let shapes = |reward| Ok(Self::Shapes { quadrants: Quadrants::new(device)?, reward });
        match reward {
            ImageReward::Brightness => shapes(Light::Brightness),
            ImageReward::Lit => shapes(Light::Lit),
            ImageReward::Python(config) => Ok(Self::Python { python: start(config)?, records }),
            ImageReward::Torchscript(config) => {
                let module = Mutex::new(load_script(&config.path, device)?);
                Ok(Self::Script { module, config: config.clone() })
            }
        }
    }

    /// The score of each image: fp32 `[B]`, not a number where it is refused.
    pub fn score(&self, painted: &Painted) -> Result<Tensor> {
        match self {
            Self::Shapes { quadrants, reward } => quadrants.score(*reward, &painted.images, &painted.labels),
            Self::Python { python, records } => score_by_processes(python, records, painted),
            Self::Script { module, config } => {
                let module = lock(module);
                let input = match config.input {
                    ScorerInput::Latents => painted.latents.shallow_clone(),
                    ScorerInput::Images => painted.images.f_mul_scalar(0.5)?.f_add_scalar(0.5)?,
                };
                let scores = match config.labels {
                    true => module.forward_ts(&[input, painted.labels.shallow_clone()])?,
                    false => module.forward_ts(&[input])?,
                };
                let (found, wanted) = (scores.size(), painted.labels.size());
                if found != wanted {
                    let failure = format!("it says {found:?} of {wanted:?} images").into();
                    return Err(Error::Start { name: "torchscript".into(), failure });
                }
                Ok(scores.f_to_kind(Kind::Float)?)
            }
        }
    }

    /// Scores, and the gradients of their sum with respect to the images and to the latents, of a reward that is
    /// differentiable; where it does not read one of them, that has none.
    pub fn score_with_gradient(&self, painted: &Painted) -> Result<(Tensor, [Tensor; 2])> {
        let leaf = |tensor: &Tensor| tensor.f_detach()?.f_set_requires_grad(true);
        let painted = Painted {
            images: leaf(&painted.images)?,
            latents: leaf(&painted.latents)?,
            labels: painted.labels.shallow_clone(),
        };
        let scores = self.score(&painted)?;
        let total = scores.f_sum(Kind::Float)?;
        let leaves = [&painted.images, &painted.latents];
        let found = Tensor::f_run_backward(&[total], &leaves, false, false)?;
        let or_zeros = |found: &Tensor, of: &Tensor| {
            if found.defined() { Ok(found.shallow_clone()) } else { of.f_detach()?.f_zeros_like() }
        };
        let gradients = [or_zeros(&found[0], leaves[0])?, or_zeros(&found[1], leaves[1])?];
        Ok((scores.f_detach()?, gradients))
    }

    /// What evaluations measure; the first is the reward.
    pub fn measured(&self) -> &'static [&'static str] {
        match self {
            Self::Shapes { .. } => &["reward", "brightness"],
            Self::Python { .. } | Self::Script { .. } => &["reward"],
        }
    }

    /// That of each image, in the order of [`Self::measured`]: fp32 `[B]` each.
    pub fn measure(&self, painted: &Painted) -> Result<Vec<Tensor>> {
        match self {
            Self::Shapes { quadrants, .. } => {
                let of = |light| quadrants.score(light, &painted.images, &painted.labels);
                Ok(vec![of(Light::Lit)?, of(Light::Brightness)?])
            }
            Self::Python { .. } | Self::Script { .. } => Ok(vec![self.score(painted)?]),
        }
    }
}

fn start(config: &PythonConfig) -> Result<Python> {
    Python::new(config).map_err(|failure| Error::Start { name: "python".into(), failure })
}

/// Each image as a PNG file for the function, several at a time.
fn score_by_processes(python: &Python, records: &[Record], painted: &Painted) -> Result<Tensor> {
    let labels = Vec::<i64>::try_from(painted.labels.f_to_device(Device::Cpu)?)?;
    let pictures = Picture::of_images(&painted.images)?;
    let (next, found) = (AtomicUsize::new(0), Mutex::new(vec![f32::NAN; labels.len()]));
    let failures = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..WORKERS.min(labels.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&label) = labels.get(index) else { break };
                    match python.score_image(&records[label as usize], &pictures[index].png()) {
                        Ok(score) => lock(&found)[index] = score.map_or(f32::NAN, |score| score as f32),
                        Err(error) => lock(&failures).push(error),
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let failed @ 1.. = failures.len() {
        let (name, source) = ("python".to_owned(), failures.pop());
        return Err(Error::Reward { name, failed, completions: labels.len(), max_error_rate: 0.0, source });
    }
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(Tensor::f_from_slice(&found)?.f_to_device(painted.images.device())?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn painted(images: Tensor, label: i64) -> Painted {
        Painted { latents: images.shallow_clone(), images, labels: Tensor::from_slice(&[label]) }
    }

    /// Compares the gradient with finite differences at some pixels.
    fn check_gradient(scorer: &Scorer, of: usize) {
        let image = Tensor::full([1, 1, 8, 8], -0.25, (Kind::Float, Device::Cpu));
        let _ = image.narrow(2, 0, 4).narrow(3, 0, 4).fill_(0.5);
        let (_, gradients) = scorer.score_with_gradient(&painted(image.copy(), 2)).unwrap();
        for (y, x) in [(0, 0), (6, 1), (7, 7)] {
            let moved = |by: f64| {
                let moved = image.copy();
                let _ = moved.narrow(2, y, 1).narrow(3, x, 1).g_add_scalar_(by);
                let still = image.copy();
                let (images, latents) = if of == 0 { (moved, still) } else { (still, moved) };
                let painted = Painted { images, latents, labels: Tensor::from_slice(&[2i64]) };
                scorer.score(&painted).unwrap().double_value(&[0])
            };
            let expected = (moved(0.125) - moved(-0.125)) / 0.25;
            assert!((gradients[of].double_value(&[0, 0, y, x]) - expected).abs() < 1e-5, "({y}, {x})");
            assert_eq!(gradients[1 - of].abs().max().double_value(&[]), 0.0);
        }
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        check_gradient(&Scorer::new(&ImageReward::Brightness, Vec::new(), Device::Cpu).unwrap(), 0);
        for (input, of) in [(ScorerInput::Images, 0), (ScorerInput::Latents, 1)] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("scorer.pt");
            let sample = [Tensor::ones([1, 1, 8, 8], (Kind::Float, Device::Cpu))];
            let mut squares =
                |inputs: &[Tensor]| vec![inputs[0].square().mean_dim([1, 2, 3].as_slice(), false, None)];
            CModule::create_by_tracing("scorer", "forward", &sample, &mut squares)
                .unwrap()
                .save(&path)
                .unwrap();
            let config = TorchscriptConfig { path, input, labels: false };
            let scorer = Scorer::new(&ImageReward::Torchscript(config), Vec::new(), Device::Cpu).unwrap();
            check_gradient(&scorer, of);
        }
    }
}
