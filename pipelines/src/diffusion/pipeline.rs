//! [`Diffusion`]: what the loop trains here.

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
    config::{MethodConfig, Run},
    samples::Phase,
    train::{Evaluation, Exchange, Kept, Nothing, Pipeline, Place, Plan, StepOutcome, adamw, describe, hold},
};

/// A model of images that learns from rewards.
pub struct Diffusion {
    run: Run,
    place: Place,
    exchange: Exchange,
    setup: Setup,
    roles: Roles,
    /// What the policy made of the evaluation's noise before its first RL step: this rank's part.
    base: Option<Tensor>,
}

impl Diffusion {
    /// Prepares a run on `place`, on texts of these `embeddings` if it has encoded them itself.
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

    /// Whether there is a KL term.
    fn keeps_near(&self) -> bool {
        self.setup.config.method.kl_coef() > 0.0
    }

    fn has_old_policy(&self) -> bool {
        matches!(self.setup.config.method, MethodConfig::DiffusionNft(_))
    }

    /// What stays as it was is the policy with its adapters off, and only DiffusionNFT's old policy is a copy.
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

    /// A frozen model, held as the config's reference.
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
        Ok(self.roles.policy.check_learnt()?)
    }

    fn end_warm_up(&mut self) -> Result<()> {
        Ok(self.roles.policy.reset_optimizer(adamw(&self.setup.config.optimizer))?)
    }

    /// The policy's first images, its reference if there is a KL term, and DiffusionNFT's old policy.
    fn freeze(&mut self, kept: Kept) -> Result<()> {
        if self.setup.has_adapters {
            return self.freeze_adapters();
        }
        let path = kept.folder.join("reference");
        let mut frozen = self.frozen()?;
        if kept.is_saved {
            checkpoint::check_stamp(&path, kept.stamp())?;
            checkpoint::load(&mut frozen, &path)?;
        } else {
            frozen.copy_weights_from(&mut self.roles.policy)?;
            checkpoint::save(&mut frozen, &path, kept.stamp(), Value::Null)?;
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

    /// The old policy first: a folder of the checkpoint's name says that all of it is there.
    fn save(&mut self, saver: &mut Saver, path: &Path, position: Value) -> Result<()> {
        if let Some(old) = &mut self.roles.old {
            let path = old_policy(path);
            checkpoint::save(old, &path, saver.stamp(), Value::Null)?;
            if self.exchange.rank() == 0 {
                // One more than of checkpoints: the one that belongs to this is not written yet.
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
            if let Some(stamp) = checkpoint::stamp(path)? {
                checkpoint::check_stamp(&old_path, stamp)?;
            }
            checkpoint::load(&mut old, &old_path)?;
            self.roles.old = Some(old);
        }
        Ok(())
    }
}

/// Where the old policy of the checkpoint `run/checkpoints/step_000010` lies: `run/old_policy/step_000010`.
fn old_policy(checkpoint: &Path) -> PathBuf {
    let name = checkpoint.file_name().expect("a checkpoint has a name");
    let run = checkpoint.parent().and_then(Path::parent).expect("a checkpoint lies in a run");
    run.join("old_policy").join(name)
}

/// The method as papers call it.
fn title(method: &MethodConfig) -> &'static str {
    match method {
        MethodConfig::Refl(_) => "ReFL",
        MethodConfig::DraftK(_) => "DRaFT-K",
        MethodConfig::FlowGrpo(_) => "Flow-GRPO",
        MethodConfig::DanceGrpo(_) => "DanceGRPO",
        MethodConfig::DiffusionNft(_) => "DiffusionNFT",
    }
}
