//! What must hold for rewards of images.

use anyroll_models::hf::{ClipFolder, DiffusersFolder, HeadFile};

use super::check::Check;
use crate::config::*;
use crate::diffusion::{load_script, open_clip};
use crate::error_chain::one_line;

impl Check<'_> {
    /// What stands beside the rewards of a list.
    pub(super) fn image_rewards(&self, path: &str, reward: &ImageRewardConfig) -> Result<(), Problem> {
        let ImageRewardConfig::Sum(terms) = reward else { return Ok(()) };
        let help = "add a term, such as `- torchscript: {path: scorer.pt}`";
        self.ensure(!terms.is_empty(), path, "the list is empty", help)?;
        for (index, term) in terms.iter().enumerate() {
            let field = format!("{path}[{index}]");
            self.weight_and_error_rate(&field, term.weight, term.max_error_rate)?;
        }
        Ok(())
    }

    /// What is said of the frames that rewards see, of videos of `decoded` frames or of images.
    pub(super) fn seen_frames(
        &self,
        reward: &ImageRewardConfig,
        decoded: Option<usize>,
    ) -> Result<(), Problem> {
        for (term, (at, kind)) in reward.terms().iter().zip(reward.fields()) {
            let Some(frames) = term.frames else { continue };
            let field = format!("pipeline.diffusion.reward{at}.frames");
            let of_latents =
                matches!(kind, ImageReward::Torchscript(script) if script.input == ScorerInput::Latents);
            let decoded = decoded.filter(|_| !of_latents);
            let Some(decoded) = decoded else {
                let message =
                    if of_latents { "it sees latents, and no frames" } else { "images have no frames" };
                return Err(self.problem(&field, message, "leave it out"));
            };
            self.ensure(
                (1..=decoded).contains(&frames),
                &field,
                format!("{frames} frames are out of range"),
                format!("write 1 or above, at most {decoded}, as are decoded"),
            )?;
        }
        Ok(())
    }

    /// What following a reward's gradient needs of the reward.
    pub(super) fn followed_reward(&self, diffusion: &DiffusionConfig) -> Result<(), Problem> {
        let name = diffusion.method.name();
        for (at, reward) in diffusion.reward.fields() {
            self.ensure(
                reward.is_differentiable(),
                &format!("pipeline.diffusion.reward{at}"),
                format!("`{name}` follows the reward's gradient, and this one has none"),
                "write `brightness`, `clip`, `aesthetic` or `torchscript`",
            )?;
        }
        self.ensure(
            !diffusion.shuffle_rewards,
            "pipeline.diffusion.shuffle_rewards",
            format!("`{name}` follows the reward's gradient, which cannot be another image's"),
            "leave it out, or choose another method",
        )
    }

    /// A reward of classes, whose images are grey.
    pub(super) fn reward_of_shapes(&self, path: &str, reward: &ImageReward) -> Result<(), Problem> {
        let refused = |message: &str| {
            Err(self.problem(path, message, "write `brightness`, `lit`, `python` or `torchscript`"))
        };
        match reward {
            ImageReward::Brightness | ImageReward::Lit => Ok(()),
            ImageReward::Python(python) => self.image_function(path, python),
            ImageReward::Torchscript(script) => self.torchscript(path, script),
            ImageReward::Clip(_) => refused("it reads texts, and the shapes have classes"),
            ImageReward::Aesthetic(_) => refused("it reads colours, and the shapes are grey"),
        }
    }

    /// A reward of texts.
    pub(super) fn reward_of_texts(
        &self,
        path: &str,
        reward: &ImageReward,
        (prompts, folder): (&PromptsConfig, &DiffusersFolder),
    ) -> Result<(), Problem> {
        let of_latents =
            matches!(reward, ImageReward::Torchscript(script) if script.input == ScorerInput::Latents);
        if let (Err(error), false) = (folder.decoder(), of_latents) {
            let message = format!("this model's videos are not decoded here: {}", one_line(error));
            let help =
                "write `torchscript: {path: FILE, input: latents}`, a network that decodes what it needs";
            return Err(self.problem(path, message, help));
        }
        match reward {
            ImageReward::Brightness | ImageReward::Lit => Err(self.problem(
                path,
                "it is for the classes of `shapes`",
                "write `python`, `clip`, `aesthetic` or `torchscript`",
            )),
            ImageReward::Python(python) => self.image_function(path, python),
            ImageReward::Clip(clip) => self.clip(path, clip, prompts),
            ImageReward::Aesthetic(aesthetic) => self.aesthetic(path, aesthetic),
            ImageReward::Torchscript(script) => self.torchscript(path, script),
        }
    }

    fn image_function(&self, path: &str, python: &PythonConfig) -> Result<(), Problem> {
        self.python(&format!("{path}.python"), python)?;
        self.ensure(
            python.signature == Signature::Trl,
            &format!("{path}.python.signature"),
            "verl's functions read texts, and no images",
            "leave it out: the function is called with `images`, `prompts` and the columns",
        )
    }

    fn clip(&self, path: &str, clip: &ClipRewardConfig, prompts: &PromptsConfig) -> Result<(), Problem> {
        self.ensure(
            prompts.records.is_some(),
            path,
            "it reads the texts, and only what encoders made of them is there",
            "name a file of texts in `pipeline.diffusion.data.prompts.records`",
        )?;
        let help = "name the folder of a CLIP as `transformers` saves it, with its tokenizer";
        open_clip(clip)
            .map(|_| ())
            .map_err(|error| self.problem(&format!("{path}.clip.path"), one_line(&error), help))
    }

    fn aesthetic(&self, path: &str, aesthetic: &AestheticConfig) -> Result<(), Problem> {
        let folder = ClipFolder::open(&aesthetic.clip).map_err(|error| {
            let help = "name the folder of a CLIP as `transformers` saves it";
            self.problem(&format!("{path}.aesthetic.clip"), one_line(&error), help)
        })?;
        let width = folder.config().projection_dim;
        HeadFile::open(&aesthetic.head, width).map(|_| ()).map_err(|error| {
            let help = format!(
                "name the safetensors file of a head for vectors of {width} values, those of the CLIP; \
                 docs/guides/diffusion.md has the line that writes it"
            );
            self.problem(&format!("{path}.aesthetic.head"), one_line(&error), help)
        })
    }

    fn torchscript(&self, path: &str, script: &TorchscriptConfig) -> Result<(), Problem> {
        let field = format!("{path}.torchscript.path");
        self.file(&field, &script.path)?;
        let help = "write the file with `torch.jit.save`";
        load_script(&script.path, tch::Device::Cpu)
            .map(|_| ())
            .map_err(|error| self.problem(&field, one_line(&error), help))
    }
}
