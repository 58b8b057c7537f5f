//! The files and folders that a config names.

use std::path::PathBuf;

use super::*;

/// Kind of a file or folder that a config names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// Folder of a published model.
    Model,
    /// A file or folder of adapters.
    Adapter,
    /// A file of records, or a pattern of files.
    Data,
    /// Another file.
    File,
    /// A program; a name without a slash is looked up in `PATH`.
    Program,
}

/// Called with the field of a path, such as `model.path`, its kind and the path.
pub type EachPath<'a> = dyn FnMut(&str, PathKind, &mut PathBuf) + 'a;

impl Config {
    /// Calls `each` for every file and folder that the config names.
    pub fn each_path(&mut self, each: &mut EachPath) {
        let lora = match &mut self.model {
            ModelConfig::Folder(folder) => {
                each("model.path", PathKind::Model, &mut folder.path);
                &mut folder.lora
            }
            ModelConfig::Diffusers(model) => {
                each("model.diffusers", PathKind::Model, &mut model.path);
                &mut model.lora
            }
            ModelConfig::Decoder(_) | ModelConfig::Dit(_) => &mut None,
        };
        if let Some(path) = lora.as_mut().and_then(|lora| lora.path.as_mut()) {
            each("model.lora.path", PathKind::Adapter, path);
        }
        if let Some(path) = &mut self.roles.reference.path {
            each("roles.reference.path", PathKind::Model, path);
        }
        program(&mut self.metrics.python, "metrics.python", each);
        match &mut self.pipeline {
            PipelineConfig::Rlvr(rlvr) => {
                each_of_data(&mut rlvr.data, "pipeline.rlvr.data", each);
                if let RewardConfig::Sum(terms) = &mut rlvr.reward {
                    for (index, term) in terms.iter_mut().enumerate() {
                        each_of_reward(&mut term.kind, &format!("pipeline.rlvr.reward[{index}]"), each);
                    }
                }
                if let Some(environment) = &mut rlvr.rollout.environment {
                    let at = "pipeline.rlvr.rollout.environment";
                    each(&format!("{at}.path"), PathKind::File, &mut environment.path);
                    program(&mut environment.python, &format!("{at}.python"), each);
                }
            }
            PipelineConfig::Offline(offline) => {
                each_of_data(&mut offline.data, "pipeline.offline.data", each);
            }
            PipelineConfig::Diffusion(diffusion) => each_of_images(diffusion, each),
        }
    }
}

fn each_of_data(data: &mut DataConfig, at: &str, each: &mut EachPath) {
    match data {
        DataConfig::File(file) => {
            let groups = [("path", Some(&mut file.path)), ("held_out", file.held_out.as_mut())];
            for (name, paths) in groups.into_iter().filter_map(|(name, paths)| Some((name, paths?))) {
                // A single path is the field itself.
                let is_list = paths.0.len() > 1;
                for (index, path) in paths.0.iter_mut().enumerate() {
                    let item = if is_list { format!("[{index}]") } else { String::new() };
                    each(&format!("{at}.file.{name}{item}"), PathKind::Data, path);
                }
            }
        }
        DataConfig::Mix(sources) => {
            for (index, source) in sources.iter_mut().enumerate() {
                each_of_data(&mut source.data, &format!("{at}.mix[{index}].data"), each);
            }
        }
        DataConfig::Sort(_) | DataConfig::Addition(_) | DataConfig::Countdown(_) => {}
    }
}

fn each_of_reward(reward: &mut RewardKind, at: &str, each: &mut EachPath) {
    match reward {
        RewardKind::Python(python) => each_of_python(python, at, each),
        RewardKind::Model(model) => each(&format!("{at}.model.path"), PathKind::Model, &mut model.path),
        _ => {}
    }
}

fn each_of_python(python: &mut PythonConfig, at: &str, each: &mut EachPath) {
    each(&format!("{at}.python.path"), PathKind::File, &mut python.path);
    program(&mut python.python, &format!("{at}.python.python"), each);
}

fn program(name: &mut String, field: &str, each: &mut EachPath) {
    let mut path = PathBuf::from(&*name);
    each(field, PathKind::Program, &mut path);
    // A path that is no text was not written in YAML, and stays as it was.
    if let Some(path) = path.to_str() {
        *name = path.to_owned();
    }
}

fn each_of_images(diffusion: &mut DiffusionConfig, each: &mut EachPath) {
    if let ImageDataConfig::Prompts(prompts) = &mut diffusion.data {
        for (name, path) in [("embeddings", &mut prompts.embeddings), ("records", &mut prompts.records)] {
            if let Some(path) = path {
                each(&format!("pipeline.diffusion.data.prompts.{name}"), PathKind::File, path);
            }
        }
    }
    let at = "pipeline.diffusion.reward";
    match &mut diffusion.reward {
        ImageRewardConfig::One(kind) => each_of_image_reward(kind, at, each),
        ImageRewardConfig::Sum(terms) => {
            for (index, term) in terms.iter_mut().enumerate() {
                each_of_image_reward(&mut term.kind, &format!("{at}[{index}]"), each);
            }
        }
    }
}

fn each_of_image_reward(reward: &mut ImageReward, at: &str, each: &mut EachPath) {
    match reward {
        ImageReward::Python(python) => each_of_python(python, at, each),
        ImageReward::Clip(clip) => each(&format!("{at}.clip.path"), PathKind::Model, &mut clip.path),
        ImageReward::Aesthetic(aesthetic) => {
            each(&format!("{at}.aesthetic.clip"), PathKind::Model, &mut aesthetic.clip);
            each(&format!("{at}.aesthetic.head"), PathKind::File, &mut aesthetic.head);
        }
        ImageReward::Torchscript(script) => {
            each(&format!("{at}.torchscript.path"), PathKind::File, &mut script.path);
        }
        ImageReward::Brightness | ImageReward::Lit => {}
    }
}
