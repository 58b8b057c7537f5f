//! [`Diffusion`]: the pipeline of image models.

use std::path::{Path, PathBuf};

use anyroll_config::{DiffusionConfig, DitConfig, MethodConfig};
use anyroll_models::diffusion::Transformer;
use anyroll_strategy::{
    Zero,
    checkpoint::{self, Saver},
};
use serde_json::Value;
use tch::Tensor;

use super::{EncodedTexts, ImageModels, ImageTask, PublishedModel, Reference, image_model::ImageModel};
use crate::{
    Result,
    run::Run,
    samples::Phase,
    train::{
        Evaluation, Exchange, Kept, Learner, Nothing, Pipeline, Place, Plan, Schedule, StepOutcome,
        WarmupStep, describe, hold,
    },
};

/// An image model that is trained with rewards.
pub struct Diffusion {
    run: Run,
    place: Place,
    exchange: Exchange,
    task: ImageTask,
    models: ImageModels,
    /// The policy's images of the evaluation's noise before the first RL step: this rank's part.
    base: Option<Tensor>,
}

impl Diffusion {
    /// Prepares a run on `place` that trains a model of shape `dit` on synthetic images.
    pub fn of_shapes(run: Run, config: &DiffusionConfig, dit: &DitConfig, place: Place) -> Result<Self> {
        let image_model = ImageModel::shapes(dit, run.config.seed)?;
        Self::new(run, config, image_model, place)
    }

    /// Prepares a run on `place` that trains a published model on `texts`.
    pub fn of_texts(
        run: Run,
        config: &DiffusionConfig,
        model: PublishedModel,
        texts: EncodedTexts,
        place: Place,
    ) -> Result<Self> {
        let image_model = ImageModel::published(&run, config, model, texts, place.torch_device()?)?;
        Self::new(run, config, image_model, place)
    }

    fn new(run: Run, config: &DiffusionConfig, image_model: ImageModel, place: Place) -> Result<Self> {
        let task = ImageTask::new(&run, config, image_model, &place)?;
        let warmup = config.warmup.as_ref().filter(|warmup| warmup.steps > 0);
        let schedule = Schedule {
            optimizer: config.optimizer.clone(),
            steps: config.steps,
            warmup: warmup.map(|warmup| warmup.optimizer.clone()),
        };
        let learner = Learner::new(task.model.clone(), &run.policy, &place, &*task.weights, schedule)?;
        let exchange = Exchange::new(place.group())?;
        let models = ImageModels { learner, reference: None, old: None };
        Ok(Self { run, place, exchange, task, models, base: None })
    }

    /// Returns true if there is a KL term.
    fn keeps_near(&self) -> bool {
        self.task.config.method.kl_coef() > 0.0
    }

    fn has_old_policy(&self) -> bool {
        matches!(self.task.config.method, MethodConfig::DiffusionNft(_))
    }

    /// Freezes a policy with adapters. The reference is the policy without adapters; only DiffusionNFT's old policy
    /// is a copy.
    fn freeze_adapters(&mut self) -> Result<()> {
        let painted = self.task.evaluation_images(&mut self.models.learner.model, &self.exchange, false)?;
        self.base = Some(painted.images);
        if self.has_old_policy() && self.models.old.is_none() {
            let mut old = self.frozen()?;
            old.copy_weights_from(&mut self.models.learner.model)?;
            self.models.old = Some(old);
        }
        self.models.reference = self.keeps_near().then_some(Reference::AdaptersOff);
        Ok(())
    }

    /// Creates a frozen model under the reference's strategy in the config.
    fn frozen(&self) -> Result<Zero<Transformer>> {
        let role = self.run.reference.as_ref().unwrap_or(&self.run.policy);
        hold(self.task.model.clone(), &role.strategy, &self.place, None, &*self.task.weights)
    }
}

impl Pipeline for Diffusion {
    type Carried = Nothing;

    fn plan(&self) -> Plan {
        let config = &self.task.config;
        Plan {
            warmup_steps: config.warmup.as_ref().map_or(0, |warmup| warmup.steps),
            steps: config.steps,
            evaluate_every: Some(config.evaluation.every),
            save_every: config.checkpoint.every,
            keep_last: config.checkpoint.keep_last,
        }
    }

    fn description(&self) -> String {
        describe(title(&self.task.config.method), &*self.task.model, &self.run)
    }

    fn warmup_step(&mut self, exchange: &Exchange, step: u64) -> Result<WarmupStep> {
        let warmup = self.task.config.warmup.as_ref().expect("the plan has warm-up steps");
        self.task.warmup_step(&mut self.models, exchange, warmup, step)
    }

    fn check_divergence(&mut self) -> Result<()> {
        self.models.learner.check_divergence()
    }

    fn end_warm_up(&mut self) -> Result<()> {
        self.models.learner.end_warm_up()
    }

    /// Creates the policy's first images, the reference if there is a KL term, and DiffusionNFT's old policy.
    fn freeze(&mut self, kept: Kept) -> Result<()> {
        if self.task.has_adapters {
            return self.freeze_adapters();
        }
        let path = kept.folder.join("reference");
        let mut frozen = self.frozen()?;
        if kept.is_saved {
            checkpoint::check_stamp(&path, kept.stamp())?;
            checkpoint::load(&mut frozen, &path)?;
        } else {
            frozen.copy_weights_from(&mut self.models.learner.model)?;
            checkpoint::save(&mut frozen, &path, kept.save(), Value::Null)?;
        }
        self.base = Some(self.task.evaluation_images(&mut frozen, &self.exchange, true)?.images);
        if self.has_old_policy() && self.models.old.is_none() {
            let mut old = self.frozen()?;
            old.copy_weights_from(&mut frozen)?;
            self.models.old = Some(old);
        }
        self.models.reference = self.keeps_near().then_some(Reference::Copy(Box::new(frozen)));
        Ok(())
    }

    fn step(&mut self, exchange: &Exchange, step: u64, _: &mut Nothing, stop: bool) -> Result<StepOutcome> {
        self.task.step(&mut self.models, exchange, step, stop)
    }

    fn evaluate(&mut self, exchange: &Exchange, _: u64, _: Phase) -> Result<Evaluation> {
        let base = self.base.as_ref().expect("the first images are made before the first evaluation");
        self.task.evaluate(&mut self.models.learner, base, exchange)
    }

    /// Saves the old policy first, since the checkpoint's folder marks that everything is complete.
    fn save(&mut self, saver: &mut Saver, path: &Path, position: Value) -> Result<()> {
        if let Some(old) = &mut self.models.old {
            let path = old_policy(path);
            checkpoint::save(old, &path, saver.save(), Value::Null)?;
            if saver.save().folders.leads(self.exchange.rank()) {
                // One more than the number of checkpoints, since this step's checkpoint is not written yet.
                let keep = self.plan().keep_last + 1;
                checkpoint::prune(path.parent().expect("it has just been joined"), keep)?;
            }
        }
        self.models.learner.save(saver, path, position, None, |_| Ok(()))
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        self.models.learner.restore(path)?;
        let old_path = old_policy(path);
        if old_path.exists() {
            let mut old = self.frozen()?;
            if let Some(stamp) = checkpoint::stamp(path)? {
                checkpoint::check_stamp(&old_path, stamp)?;
            }
            checkpoint::load(&mut old, &old_path)?;
            self.models.old = Some(old);
        }
        Ok(())
    }
}

/// Folder of the old policy for the checkpoint `run/checkpoints/step_000010`: `run/old_policy/step_000010`.
fn old_policy(checkpoint: &Path) -> PathBuf {
    let name = checkpoint.file_name().expect("a checkpoint has a name");
    let run = checkpoint.parent().and_then(Path::parent).expect("a checkpoint lies in a run");
    run.join("old_policy").join(name)
}

/// Name of the method in papers.
fn title(method: &MethodConfig) -> &'static str {
    match method {
        MethodConfig::Refl(_) => "ReFL",
        MethodConfig::DraftK(_) => "DRaFT-K",
        MethodConfig::FlowGrpo(_) => "Flow-GRPO",
        MethodConfig::DanceGrpo(_) => "DanceGRPO",
        MethodConfig::DiffusionNft(_) => "DiffusionNFT",
    }
}
