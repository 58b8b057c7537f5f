//! Rewards of images.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyroll_config::{ImageReward, ImageRewardConfig, ImageTerm, ScorerInput, TorchscriptConfig};
use anyroll_data::Record;
use anyroll_reward::{StartError, distinct};
use tch::{CModule, Device, Kind, Tensor};

use super::aesthetic::AestheticScorer;
use super::clip::ClipScorer;
use super::frames::{evenly_spaced, mean_score};
use super::function::FunctionScorer;
use super::quadrants::{Light, Quadrants};
use crate::{Result, error_rates::check_error_rates};

/// Images with their labels.
#[derive(Debug)]
pub struct Painted {
    /// Pixels, normally -1 to 1: fp32 `[B, channels, height, width]`, for videos with frames before the
    /// height.
    pub images: Tensor,
    /// Latents that they were decoded from; the images themselves without a decoder.
    pub latents: Tensor,
    /// Classes or text indices: int64 `[B]`.
    pub labels: Tensor,
}

/// Failed images: index of the term, and the cause. These images have no score.
pub type Failures = Vec<(usize, anyroll_reward::Error)>;

/// Rewards of images.
#[derive(Debug)]
pub struct Scores {
    /// Weighted sum: fp32 `[B]`, NaN if a term excludes the image.
    pub total: Tensor,
    /// Unweighted score of each term: fp32 `[B]` each.
    pub parts: Vec<Tensor>,
    /// Failures of images without a score.
    pub failures: Failures,
}

impl Scores {
    /// Concatenates the scores of several batches.
    pub fn cat(mut batches: Vec<Scores>) -> Result<Self> {
        let terms = batches[0].parts.len();
        let join = |of: &dyn Fn(&Scores) -> Tensor| -> Result<Tensor> {
            Ok(Tensor::f_cat(&batches.iter().map(of).collect::<Vec<_>>(), 0)?)
        };
        let parts = (0..terms).map(|term| join(&|batch| batch.parts[term].shallow_clone()));
        let (total, parts) = (join(&|batch| batch.total.shallow_clone())?, parts.collect::<Result<_>>()?);
        let failures = batches.iter_mut().flat_map(|batch| std::mem::take(&mut batch.failures)).collect();
        Ok(Self { total, parts, failures })
    }
}

/// The weighted sum of a config's image rewards.
pub struct Scorer(Vec<Term>);

struct Term {
    /// Name of the reward, made [`distinct`].
    name: String,
    weight: f64,
    max_error_rate: f64,
    /// Frames of a video that it reads; all if `None`.
    frames: Option<usize>,
    rule: Rule,
}

/// Scoring method of a term.
enum Rule {
    /// Light in the quadrant of the class.
    Shapes {
        /// Masks of the classes.
        quadrants: Quadrants,
        /// Measure of light to train on.
        reward: Light,
    },
    /// A function of the user's.
    Function(FunctionScorer),
    /// Similarity of image and text.
    Clip(Box<ClipScorer>),
    /// Predicted human preference.
    Aesthetic(Box<AestheticScorer>),
    /// A TorchScript network.
    Script {
        /// The network. The lock is needed only because tch's modules are not `Sync`.
        module: Mutex<CModule>,
        /// Its inputs and options.
        config: TorchscriptConfig,
    },
}

/// Loads the network of the file `path` on `device`.
pub fn load_script(path: &Path, device: Device) -> Result<CModule> {
    let mut module = CModule::load_on_device(path, device)?;
    module.f_set_eval()?;
    Ok(module)
}

impl Scorer {
    /// Creates the rewards of `reward`; `records` are those of the classes or texts.
    pub fn new(reward: &ImageRewardConfig, records: &[Record], device: Device) -> Result<Self> {
        let terms = reward.terms();
        let names = distinct(&terms.iter().map(|term| term.kind.name()).collect::<Vec<_>>());
        let term_of = |(name, ImageTerm { kind, weight, max_error_rate, frames })| {
            Ok(Term { name, weight, max_error_rate, frames, rule: Rule::new(&kind, records, device)? })
        };
        Ok(Self(names.into_iter().zip(terms).map(term_of).collect::<Result<_>>()?))
    }

    /// Unique names of the terms.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.iter().map(|term| term.name.as_str())
    }

    /// Returns true if a term reads pixels, false if all read latents.
    pub fn reads_images(&self) -> bool {
        self.0.iter().any(|term| match &term.rule {
            Rule::Script { config, .. } => config.input == ScorerInput::Images,
            Rule::Shapes { .. } | Rule::Function(_) | Rule::Clip(_) | Rule::Aesthetic(_) => true,
        })
    }

    /// Scores images.
    pub fn score(&self, painted: &Painted) -> Result<Scores> {
        let (mut parts, mut failures) = (Vec::with_capacity(self.0.len()), Vec::new());
        for (number, term) in self.0.iter().enumerate() {
            let (part, errors) = term.score(painted)?;
            parts.push(part);
            failures.extend(errors.into_iter().map(|error| (number, error)));
        }
        let weighted = self.0.iter().zip(&parts).map(|(term, part)| part.f_mul_scalar(term.weight));
        let weighted = weighted.collect::<Result<Vec<_>, _>>()?;
        let mut total = weighted[0].shallow_clone();
        for part in &weighted[1..] {
            total = total.f_add(part)?;
        }
        Ok(Scores { total, parts, failures })
    }

    /// Number of images on which each term failed.
    pub fn failed(&self, failures: &Failures) -> Vec<f64> {
        let of = |term: usize| failures.iter().filter(|(failed, _)| *failed == term).count() as f64;
        (0..self.0.len()).map(of).collect()
    }

    /// Fails if a term failed on more of `images` than allowed; `failed` are the counts over all ranks, `own`
    /// this rank's failures.
    pub fn check_error_rates(&self, failed: &[f64], images: usize, own: Failures) -> Result<()> {
        let terms = self.0.iter().zip(failed);
        let terms = terms.map(|(term, &failed)| (term.name.as_str(), term.max_error_rate, failed));
        check_error_rates(terms, images, own)
    }

    /// Scores of a differentiable reward, with the gradients of their sum with respect to images and latents.
    /// An input that the reward does not read has no gradient.
    pub fn score_with_gradient(&self, painted: &Painted) -> Result<(Scores, [Tensor; 2])> {
        let leaf = |tensor: &Tensor| tensor.f_detach()?.f_set_requires_grad(true);
        let painted = Painted {
            images: leaf(&painted.images)?,
            latents: leaf(&painted.latents)?,
            labels: painted.labels.shallow_clone(),
        };
        let Scores { total, parts, failures } = self.score(&painted)?;
        let leaves = [&painted.images, &painted.latents];
        let found = Tensor::f_run_backward(&[total.f_sum(Kind::Float)?], &leaves, false, false)?;
        let or_zeros = |found: &Tensor, of: &Tensor| {
            if found.defined() { Ok(found.shallow_clone()) } else { of.f_detach()?.f_zeros_like() }
        };
        let gradients = [or_zeros(&found[0], leaves[0])?, or_zeros(&found[1], leaves[1])?];
        let parts = parts.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;
        Ok((Scores { total: total.f_detach()?, parts, failures }, gradients))
    }

    /// Names of the evaluations' measurements; the first is the reward. If all rewards are of shapes, the
    /// names are fixed.
    pub fn measured(&self) -> Vec<String> {
        let mut names = vec!["reward".to_owned()];
        match self.quadrants() {
            Some(_) => names.push("brightness".to_owned()),
            None if self.0.len() == 1 => {}
            None => names.extend(self.names().map(str::to_owned)),
        }
        names
    }

    /// Measurements of each image, in the order of [`Self::measured`]: fp32 `[B]` each; and
    /// [`Scores::failures`].
    pub fn measure(&self, painted: &Painted) -> Result<(Vec<Tensor>, Failures)> {
        if let Some(quadrants) = self.quadrants() {
            let of = |light| quadrants.score(light, &painted.images, &painted.labels);
            return Ok((vec![of(Light::Lit)?, of(Light::Brightness)?], Vec::new()));
        }
        let Scores { total, parts, failures } = self.score(painted)?;
        let measured = [total].into_iter().chain(parts.into_iter().filter(|_| self.0.len() > 1));
        Ok((measured.collect(), failures))
    }

    /// Masks of the shapes, if all terms are about shapes.
    fn quadrants(&self) -> Option<&Quadrants> {
        let of_terms = self.0.iter().map(|term| match &term.rule {
            Rule::Shapes { quadrants, .. } => Some(quadrants),
            Rule::Function(_) | Rule::Clip(_) | Rule::Aesthetic(_) | Rule::Script { .. } => None,
        });
        of_terms.collect::<Option<Vec<_>>>()?.pop()
    }
}

impl Term {
    /// [`Rule::score`] on the frames that the term reads.
    fn score(&self, painted: &Painted) -> Result<(Tensor, Vec<anyroll_reward::Error>)> {
        let Some(frames) = self.frames else { return self.rule.score(painted) };
        self.rule.score(&Painted {
            images: evenly_spaced(&painted.images, frames)?,
            latents: painted.latents.shallow_clone(),
            labels: painted.labels.shallow_clone(),
        })
    }
}

impl Rule {
    fn new(reward: &ImageReward, records: &[Record], device: Device) -> Result<Self> {
        let shapes = |reward| Ok(Self::Shapes { quadrants: Quadrants::new(device)?, reward });
        match reward {
            ImageReward::Brightness => shapes(Light::Brightness),
            ImageReward::Lit => shapes(Light::Lit),
            ImageReward::Python(config) => Ok(Self::Function(FunctionScorer::new(config, records)?)),
            ImageReward::Clip(config) => Ok(Self::Clip(Box::new(ClipScorer::new(config, records, device)?))),
            ImageReward::Aesthetic(config) => {
                Ok(Self::Aesthetic(Box::new(AestheticScorer::new(config, device)?)))
            }
            ImageReward::Torchscript(config) => {
                let module = Mutex::new(load_script(&config.path, device)?);
                Ok(Self::Script { module, config: config.clone() })
            }
        }
    }

    /// Score of each image: fp32 `[B]`, NaN if it is excluded or failed; and the failures.
    fn score(&self, painted: &Painted) -> Result<(Tensor, Vec<anyroll_reward::Error>)> {
        match self {
            Self::Shapes { quadrants, reward } => {
                Ok((quadrants.score(*reward, &painted.images, &painted.labels)?, Vec::new()))
            }
            Self::Clip(clip) => {
                let score = |images: &Tensor, labels: &Tensor| clip.score(images, labels);
                Ok((mean_score(&painted.images, &painted.labels, score)?, Vec::new()))
            }
            Self::Aesthetic(aesthetic) => {
                let score = |images: &Tensor, _: &Tensor| aesthetic.score(images);
                Ok((mean_score(&painted.images, &painted.labels, score)?, Vec::new()))
            }
            Self::Function(function) => function.score(painted),
            Self::Script { module, config } => {
                let module = module.lock().unwrap_or_else(PoisonError::into_inner);
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
                    let failure = format!("it returns {found:?} for {wanted:?} images").into();
                    return Err(StartError { name: "torchscript".into(), failure }.into());
                }
                Ok((scores.f_to_kind(Kind::Float)?, Vec::new()))
            }
        }
    }
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
                scorer.score(&painted).unwrap().total.double_value(&[0])
            };
            let expected = (moved(0.125) - moved(-0.125)) / 0.25;
            assert!((gradients[of].double_value(&[0, 0, y, x]) - expected).abs() < 1e-5, "({y}, {x})");
            assert_eq!(gradients[1 - of].abs().max().double_value(&[]), 0.0);
        }
    }

    fn term(kind: ImageReward, weight: f64) -> ImageTerm {
        ImageTerm { weight, ..ImageTerm::of(kind) }
    }

    fn one(reward: ImageReward) -> Scorer {
        Scorer::new(&ImageRewardConfig::One(reward), &[], Device::Cpu).unwrap()
    }

    /// A network that computes `of`.
    fn script(
        folder: &Path,
        name: &str,
        input: ScorerInput,
        mut of: impl FnMut(&Tensor) -> Tensor,
    ) -> ImageReward {
        let path = folder.join(name);
        let sample = [Tensor::ones([1, 1, 8, 8], (Kind::Float, Device::Cpu))];
        let mut closure = |inputs: &[Tensor]| vec![of(&inputs[0])];
        CModule::create_by_tracing("scorer", "forward", &sample, &mut closure).unwrap().save(&path).unwrap();
        ImageReward::Torchscript(TorchscriptConfig { path, input, labels: false })
    }

    fn squares(images: &Tensor) -> Tensor {
        images.square().mean_dim([1, 2, 3].as_slice(), false, None)
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        check_gradient(&one(ImageReward::Brightness), 0);
        let folder = tempfile::tempdir().unwrap();
        for (input, of) in [(ScorerInput::Images, 0), (ScorerInput::Latents, 1)] {
            check_gradient(&one(script(folder.path(), "scorer.pt", input, squares)), of);
        }
        let sum = ImageRewardConfig::Sum(vec![
            term(ImageReward::Brightness, 0.5),
            term(script(folder.path(), "scorer.pt", ScorerInput::Images, squares), -2.0),
        ]);
        check_gradient(&Scorer::new(&sum, &[], Device::Cpu).unwrap(), 0);
    }

    #[test]
    fn terms_are_summed_by_their_weights_and_refuse_each_for_itself() {
        let folder = tempfile::tempdir().unwrap();
        // Black images have no logarithm; only the first image is black.
        let logarithm = |images: &Tensor| images.mean_dim([1, 2, 3].as_slice(), false, None).log().log1p();
        let terms = vec![
            term(script(folder.path(), "a.pt", ScorerInput::Images, squares), 3.0),
            term(script(folder.path(), "b.pt", ScorerInput::Images, logarithm), -1.0),
        ];
        let scorer = Scorer::new(&ImageRewardConfig::Sum(terms), &[], Device::Cpu).unwrap();
        assert_eq!(scorer.names().collect::<Vec<_>>(), ["torchscript", "torchscript_2"]);
        assert_eq!(scorer.measured(), ["reward", "torchscript", "torchscript_2"]);
        let light = 0.5f64;
        let images = Tensor::from_slice(&[-1.0f32, (2.0 * light - 1.0) as f32]).view([2, 1, 1, 1]);
        let images = images.expand([2, 1, 8, 8], false).contiguous();
        let latents = images.shallow_clone();
        let painted = Painted { latents, images, labels: Tensor::from_slice(&[0i64, 1]) };
        let scores = scorer.score(&painted).unwrap();
        let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double)).unwrap();
        assert_eq!(values(&scores.parts[0]), [0.0, light * light]);
        assert!(!values(&scores.total)[0].is_finite() && !values(&scores.parts[1])[0].is_finite());
        let expected = 3.0 * light * light - light.ln().ln_1p();
        assert!((values(&scores.total)[1] - expected).abs() < 1e-6);
        let twice = Scores::cat(vec![scorer.score(&painted).unwrap(), scores]).unwrap();
        assert_eq!((twice.total.size(), twice.parts.len()), (vec![4], 2));
    }
}
