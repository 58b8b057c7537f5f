//! [`Diffusion`]: the pipeline of image models.

use std::path::{Path, PathBuf};

use anyroll_models::diffusion::Transformer;
use anyroll_strategy::{
    Zero,
    checkpoint::{self, Saver},
};
use serde_json::Value;
use tch::Tensor;

use super::{Reference, Roles, Setup};
use crate::{
    Result,
    config::MethodConfig,
    run::Run,
    samples::Phase,
    train::{Evaluation, Exchange, Nothing, Pipeline, Place, Plan, StepOutcome, adamw, describe, hold},
};

/// An image model that is trained with rewards.
pub struct Diffusion {
    run: Run,
    place: Place,
    exchange: Exchange,
    setup: Setup,
    roles: Roles,
    /// The policy's images of the evaluation's noise before its first RL step: this rank's share.
    base: Option<Tensor>,
}

impl Diffusion {
    /// Prepares a run on `place`; `embeddings` is the file of a run that has encoded its own texts.
    pub fn new(run: Run, place: Place, embeddings: Option<&Path>) -> Result<Self> {
        let setup = Setup::new(&run, &place, embeddings)?;
        let optimizer = match &setup.config.warmup {
            Some(warmup) if warmup.steps > 0 => &warmup.optimizer,
            _ => &setup.config.optimizer,
        };
        let strategy = &run.policy.strategy;
        let policy = hold(setup.model.clone(), strategy, &place, Some(adamw(optimizer)), &*setup.weights)?;
        let exchange = Exchange::new(&place.group)?;
        let roles = Roles { policy, reference: None, old: None };
        Ok(Self { run, place, exchange, setup, roles, base: None })
    }

    /// Returns true if there is a KL term.
    fn keeps_near(&self) -> bool {
        self.setup.config.method.kl_coef() > 0.0
    }

    fn has_old_policy(&self) -> bool {
        matches!(self.setup.config.method, MethodConfig::DiffusionNft(_))
    }

    /// The reference is the policy without adapters; only DiffusionNFT's old policy is a copy.
    fn freeze_adapters(&mut self) -> Result<()> {
        let painted = self.setup.evaluation_images(&mut self.roles.policy, &self.exchange, false)?;
        self.base = Some(painted.images);
        if self.has_old_policy() && self.roles.old.is_none() {
            let mut old = self.frozen()?;
            old.copy_weights_from(&mut self.roles.policy)?;
            self.roles.old = Some(old);
        }
        self.roles.reference = self.keeps_near().then_some(Reference::AdaptersOff);
        Ok(())
    }

    /// A frozen model under the config's strategy of the reference.
    fn frozen(&self) -> Result<Zero<Transformer>> {
        let role = self.run.reference.as_ref().unwrap_or(&self.run.policy);
        hold(self.setup.model.clone(), &role.strategy, &self.place, None, &*self.setup.weights)
    }
}

impl Pipeline for Diffusion {
    type Carried = Nothing;

    fn plan(&self) -> Plan {
        let config = &self.setup.config;
        Plan {
            warmup_steps: config.warmup.as_ref().map_or(0, |warmup| warmup.steps),
            steps: config.steps,
            evaluate_every: Some(config.evaluation.every),
            save_every: config.checkpoint.every,
            keep_last: config.checkpoint.keep_last,
        }
    }

    fn description(&self) -> String {
        describe(title(&self.setup.config.method), &*self.setup.model, &self.run)
    }

    fn warmup_step(&mut self, exchange: &Exchange, step: u64) -> Result<f64> {
        let warmup = self.setup.config.warmup.as_ref().expect("the plan has warm-up steps");
        self.setup.warmup_step(&mut self.roles, exchange, warmup, step)
    }

    fn check_learnt(&mut self) -> Result<()> {
        self.roles.policy.load_states(&self.setup.offloaded)?;
        Ok(self.roles.policy.check_divergence()?)
    }

    fn end_warm_up(&mut self) -> Result<()> {
        Ok(self.roles.policy.reset_optimizer(adamw(&self.setup.config.optimizer))?)
    }

    /// Makes the policy's first images, its reference if there is a KL term, and DiffusionNFT's old policy.
    fn freeze(&mut self, folder: &Path, kept: bool) -> Result<()> {
        if self.setup.has_adapters {
            return self.freeze_adapters();
        }
        let path = folder.join("reference");
        let mut frozen = self.frozen()?;
        if kept {
            checkpoint::load(&mut frozen, &path)?;
        } else {
            frozen.copy_weights_from(&mut self.roles.policy)?;
            checkpoint::save(&mut frozen, &path, Value::Null)?;
        }
        self.base = Some(self.setup.evaluation_images(&mut frozen, &self.exchange, true)?.images);
        if self.has_old_policy() && self.roles.old.is_none() {
            let mut old = self.frozen()?;
            old.copy_weights_from(&mut frozen)?;
            self.roles.old = Some(old);
        }
        self.roles.reference = self.keeps_near().then_some(Reference::Copy(Box::new(frozen)));
        Ok(())
    }

    fn step(&mut self, exchange: &Exchange, step: u64, _: &mut Nothing, stop: bool) -> Result<StepOutcome> {
        self.setup.step(&mut self.roles, exchange, step, stop)
    }

    fn evaluate(&mut self, exchange: &Exchange, _: u64, _: Phase) -> Result<Evaluation> {
        let base = self.base.as_ref().expect("the first images are made before the first evaluation");
        self.setup.evaluate(&mut self.roles.policy, base, exchange)
    }

    /// The old policy is saved first, since the checkpoint's folder marks that everything is complete.
    fn save(&mut self, saver: &mut Saver, path: &Path, position: Value) -> Result<()> {
        if let Some(old) = &mut self.roles.old {
            let path = old_policy(path);
            checkpoint::save(old, &path, Value::Null)?;
            if self.exchange.rank() == 0 {
                // One more than checkpoints, since the checkpoint of this one is not written yet.
                let keep = self.plan().keep_last + 1;
                checkpoint::prune(path.parent().expect("it has just been joined"), keep)?;
            }
        }
        let policy = &mut self.roles.policy;
        policy.load_states(&self.setup.offloaded)?;
        saver.start(policy, path, position)?;
        Ok(policy.start_offload(&self.setup.offloaded)?)
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        checkpoint::load(&mut self.roles.policy, path)?;
        let old_path = old_policy(path);
        if old_path.exists() {
            let mut old = self.frozen()?;
            checkpoint::load(&mut old, &old_path)?;
            self.roles.old = Some(old);
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
