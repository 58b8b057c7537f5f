//! Checks of the files and models that image rewards name.

use anyroll_config::error_chain::one_line;
use anyroll_config::{
    AestheticConfig, ClipRewardConfig, ImageReward, ImageRewardConfig, PromptsConfig, Section,
    TorchscriptConfig,
};
use anyroll_models::hf::{ClipFolder, DiffusersFolder, HeadFile};

use super::rewards::check_file;
use crate::diffusion::{load_script, open_clip};

/// Reports unusable files of rewards for shapes. `at` is the rewards' section.
pub(super) fn check_of_shapes(reward: &ImageRewardConfig, at: &Section) {
    if !at.has_all_items() {
        return;
    }
    for (index, kind) in reward.fields() {
        let at = at.below(&index);
        match kind {
            ImageReward::Python(python) => check_file("python.path", &python.path, &at),
            ImageReward::Torchscript(script) => check_torchscript(script, &at),
            ImageReward::Brightness | ImageReward::Lit | ImageReward::Clip(_) | ImageReward::Aesthetic(_) => {
            }
        }
    }
}

/// Reports unusable rewards for texts. `at` is the rewards' section.
pub(super) fn check_of_texts(
    reward: &ImageRewardConfig,
    prompts: &PromptsConfig,
    folder: Option<&DiffusersFolder>,
    at: &Section,
) {
    if !at.has_all_items() {
        return;
    }
    for (index, kind) in reward.fields() {
        let at = at.below(&index);
        if let Some(Err(error)) = folder.map(DiffusersFolder::decoder)
            && !kind.is_of_latents()
        {
            let message = format!("this model's videos are not decoded here: {}", one_line(error));
            let help =
                "write `torchscript: {path: FILE, input: latents}`, a network that decodes what it needs";
            at.refuse("", message, help);
            continue;
        }
        match kind {
            ImageReward::Brightness | ImageReward::Lit => {
                let help = "write `python`, `clip`, `aesthetic` or `torchscript`";
                at.refuse("", "it is for the classes of `shapes`", help);
            }
            ImageReward::Python(python) => {
                python.validate_of_images(&at.below("python"));
                check_file("python.path", &python.path, &at);
            }
            ImageReward::Clip(clip) => check_clip(clip, prompts, &at),
            ImageReward::Aesthetic(aesthetic) => check_aesthetic(aesthetic, &at),
            ImageReward::Torchscript(script) => check_torchscript(script, &at),
        }
    }
}

fn check_clip(clip: &ClipRewardConfig, prompts: &PromptsConfig, at: &Section) {
    at.ensure(
        prompts.records.is_some(),
        "",
        "it reads the texts, and only what encoders made of them is there",
        "name a file of texts in `pipeline.diffusion.data.prompts.records`",
    );
    if at.is_read("clip.path") {
        let help = "name the folder of a CLIP as `transformers` saves it, with its tokenizer";
        at.take(open_clip(clip), "clip.path", |error| one_line(error), help);
    }
}

fn check_aesthetic(aesthetic: &AestheticConfig, at: &Section) {
    if !at.is_read("aesthetic.clip") {
        return;
    }
    let help = "name the folder of a CLIP as `transformers` saves it";
    let folder = ClipFolder::open(&aesthetic.clip);
    let Some(folder) = at.take(folder, "aesthetic.clip", |error| one_line(error), help) else { return };
    let width = folder.config().projection_dim;
    let help = format!(
        "name the safetensors file of a head for vectors of {width} values, those of the CLIP; \
         docs/guides/diffusion.md has the line that writes it"
    );
    at.take(HeadFile::open(&aesthetic.head, width), "aesthetic.head", |error| one_line(error), help);
}

fn check_torchscript(script: &TorchscriptConfig, at: &Section) {
    let field = "torchscript.path";
    check_file(field, &script.path, at);
    if at.is_sound(field) {
        let help = "write the file with `torch.jit.save`";
        at.take(load_script(&script.path, tch::Device::Cpu), field, |error| one_line(error), help);
    }
}
