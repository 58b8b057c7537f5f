//! Files that the config of an image model names, and checks that a published model can paint the requested images.

use std::path::Path;

use anyroll_config::error_chain::one_line;
use anyroll_config::{
    DiffusersConfig, DiffusionConfig, EncodeConfig, ImageDataConfig, LoraConfig, ModelConfig, Precision,
    PromptsConfig, Section, TilesConfig, list,
};
use anyroll_data::Record;
use anyroll_models::diffusion::Lora;
use anyroll_models::hf::{self, DiffusersFolder, ImageAdapterFiles, TextEmbeddings};
use anyroll_models::lora_scale;

use super::{image_rewards, pair};
use crate::Error;
use crate::diffusion::{
    self, EncodedTexts, PaintedTexts, PromptEncoders, Prompts, PublishedModel, open_encoders, read_records,
};
use crate::opened::Opened;

/// Opens the files of an image run; `None` if one cannot be used.
pub(super) fn open(model: &ModelConfig, diffusion: &DiffusionConfig, at: &Section) -> Option<Opened> {
    match model {
        ModelConfig::Diffusers(model) => {
            Some(Opened::Images(Box::new(open_published(model, diffusion, at)?)))
        }
        ModelConfig::Dit(dit) => {
            image_rewards::check_of_shapes(&diffusion.reward, &at.below("pipeline.diffusion.reward"));
            Some(Opened::Shapes(dit.clone()))
        }
        ModelConfig::Decoder(_) | ModelConfig::Folder(_) => None, // reported elsewhere
    }
}

/// Opens the model's folder and the texts, and checks that they fit.
fn open_published(
    model: &DiffusersConfig,
    config: &DiffusionConfig,
    at: &Section,
) -> Option<diffusion::Opened> {
    let pipeline = at.below("pipeline.diffusion");
    pipeline.ensure(
        config.warmup.is_none(),
        "warmup",
        "texts come without images to learn from",
        "leave it out: a published model has been trained",
    );
    let ImageDataConfig::Prompts(prompts) = &config.data else {
        let help = "write `data: {prompts: {records: FILE, encode: {}, height: 512, width: 512}}`, or `embeddings: FILE`";
        pipeline.refuse("data", "a published model paints texts, and no classes", help);
        return None;
    };
    let records = match &prompts.records {
        Some(path) => open_records(path, &pipeline.below("data.prompts")).map(Some),
        None => Some(None),
    };
    let folder = open_folder(model, at);
    let (lora, adapter) = match (&model.lora, &folder) {
        (Some(lora), Some(folder)) => open_adapters(lora, folder, &at.below("model.lora")),
        _ => (None, None),
    };
    if let Some(folder) = &folder {
        check_model(lora.as_ref(), config, prompts, folder, at);
    }
    let texts = open_texts(model, config, prompts, records.as_ref(), folder.as_ref(), &pipeline);
    image_rewards::check_of_texts(&config.reward, prompts, folder.as_ref(), &pipeline.below("reward"));
    let (texts, folder, records) = (texts?, folder?, records?);
    let texts = match texts {
        Texts::Encoded(embeddings) => PaintedTexts::Encoded(EncodedTexts { embeddings, records }),
        Texts::ToEncode(encoders, encode) => {
            let (encoders, encode) = (Box::new(encoders), encode.clone());
            PaintedTexts::ToEncode { encoders, encode, records: records? }
        }
    };
    let sides = [prompts.frames, prompts.height, prompts.width].map(|size| size as i64);
    let sides = folder.latent_sizes(sides)?;
    let model = PublishedModel { folder, lora, adapter, frames: prompts.frames, sides };
    Some(diffusion::Opened { model, texts })
}

fn open_folder(model: &DiffusersConfig, at: &Section) -> Option<DiffusersFolder> {
    if !at.is_read("model") || !at.is_read("model.diffusers") {
        return None;
    }
    let opened = DiffusersFolder::open(&model.path, model.variant.as_deref());
    let help =
        "give the folder of a model as diffusers publishes it; docs/guides/diffusion.md has the families";
    opened
        .inspect_err(|error| {
            if !refuse_variant(error, at) {
                at.refuse("model.diffusers", one_line(error), help);
            }
        })
        .ok()
}

/// Checks of the model that do not depend on the texts.
fn check_model(
    lora: Option<&Lora>,
    config: &DiffusionConfig,
    prompts: &PromptsConfig,
    folder: &DiffusersFolder,
    at: &Section,
) {
    let (pipeline, sampler) = (at.below("pipeline.diffusion"), &config.sampler);
    let boundary = folder.transformer_config().boundary();
    if let Some(boundary) = boundary {
        let shift = sampler.shift.unwrap_or(folder.shift());
        pair::check_both_learn(lora, config, boundary, shift, &at.given(&["model.lora"]));
    }
    let at = pipeline.below("sampler");
    sampler.validate_second_guidance(boundary.is_some(), &at);
    check_sizes(prompts, folder, &pipeline.below("data.prompts"));
    check_tiles(sampler.decode_tiles, folder, &at);
    let frames = pipeline.given(&["data.prompts.frames"]);
    let decoded = decoded_frames(sampler.decode_frames, prompts.frames, folder, &frames.below("sampler"));
    let rewards = frames.given(&["sampler.decode_frames"]).below("reward");
    config.reward.validate_frames(decoded, &rewards);
}

/// Refuses a `field` about decoding for a model whose latents are not decoded.
fn check_decoded(field: &str, folder: &DiffusersFolder, at: &Section) -> bool {
    let Err(error) = folder.decoder() else { return true };
    let message = format!("this model's videos are not decoded here: {}", one_line(error));
    at.ensure(false, field, message, "leave it out")
}

/// Number of frames of a video to decode; `None` for images.
fn decoded_frames(
    asked: Option<usize>,
    frames: usize,
    folder: &DiffusersFolder,
    at: &Section,
) -> Option<usize> {
    let field = "decode_frames";
    if !folder.transformer_config().latents().is_video {
        let message = "the model paints images, which have no frames";
        at.ensure(asked.is_none(), field, message, "leave it out");
        return None;
    }
    let Some(decoded) = asked else { return Some(frames) };
    if !check_decoded(field, folder, at) {
        return None;
    }
    let (in_time, _) = folder.zoom();
    let is_whole = (1..=frames).contains(&decoded) && (decoded - 1).is_multiple_of(in_time as usize);
    at.ensure(
        is_whole,
        field,
        format!("{decoded} of {frames} frames cannot be decoded"),
        format!("write 1 more than a multiple of {in_time}, at most {frames}"),
    );
    Some(decoded)
}

/// Returns the shape of the adapters, and the files of their initial values if they are not new.
fn open_adapters(
    lora: &LoraConfig,
    folder: &DiffusersFolder,
    at: &Section,
) -> (Option<Lora>, Option<ImageAdapterFiles>) {
    let modules = folder.transformer_config().modules();
    let shape = match lora.image_shape(&modules) {
        Ok(shape) => shape,
        Err(entry) => {
            let begins = match folder.transformer_config().boundary() {
                None => "",
                Some(_) => ", behind `transformer.blocks.0.` or `transformer_2.blocks.0.` and so on",
            };
            let help = format!(
                "write ends or patterns of layers' names; there is {}{begins}",
                list(&ends(&modules))
            );
            at.refuse("targets", format!("`{entry}` names no layer of a block"), help);
            return (None, None);
        }
    };
    at.ensure(!shape.modules.is_empty(), "targets", "the list is empty", "name a layer");
    let Some(path) = &lora.path else { return (Some(shape), None) };
    let help = "give an adapter for this model as diffusers saves it, or the folder that it is in";
    let opened = ImageAdapterFiles::open(path, folder.transformer_config());
    let adapter = at.take(opened, "path", |error| one_line(error), help);
    if let Some(adapter) = &adapter {
        let found = Lora { modules: in_order(&modules, &adapter.lora().modules), ..adapter.lora().clone() };
        at.given(&["rank", "alpha", "targets"]).ensure(
            found == shape,
            "path",
            "the adapter there has another shape",
            format!("write its own: {}", fields_of(&found, lora.rslora, &modules)),
        );
    }
    (Some(shape), adapter)
}

/// Reports an error about the requested variant; returns true if the error is about it.
fn refuse_variant(error: &hf::Error, at: &Section) -> bool {
    let help = "write what stands between the name of the files and its end, such as `fp16`; or leave it out for files \
                without";
    let is_of_variant = matches!(error, hf::Error::Variant { .. });
    if is_of_variant {
        at.refuse("model.variant", one_line(error), help);
    }
    is_of_variant
}

/// Reports tiles that are not whole latents, or that overlap by more than half. `at` is the sampler's section.
fn check_tiles(tiles: Option<TilesConfig>, folder: &DiffusersFolder, at: &Section) {
    let Some(tiles) = tiles else { return };
    if !check_decoded("decode_tiles", folder, at) {
        return;
    }
    let at = at.below("decode_tiles");
    let zoom = folder.zoom().1 as usize;
    at.positive("size", tiles.size);
    at.ensure(
        tiles.size.is_multiple_of(zoom) && tiles.size / zoom >= 2,
        "size",
        format!("{} pixels are no tile of whole latents", tiles.size),
        format!("write a multiple of {zoom}, at least {}; diffusers has 256 for videos", 2 * zoom),
    );
    let stride = tiles.stride(zoom);
    let fits = stride.is_multiple_of(zoom) && stride * 2 >= tiles.size && stride <= tiles.size;
    at.given(&["size"]).ensure(
        fits,
        "stride",
        format!("tiles of {} pixels do not follow each other by {stride}", tiles.size),
        format!("write a multiple of {zoom}, from half of `size` to all of it"),
    );
}

/// Reports sizes of images or videos that the model does not paint. `at` is the prompts' section.
fn check_sizes(prompts: &PromptsConfig, folder: &DiffusersFolder, at: &Section) {
    let sizes = folder.transformer_config().latents();
    let (in_time, of_sides) = folder.zoom();
    for (name, side, axis) in [("height", prompts.height, 1), ("width", prompts.width, 2)] {
        at.positive(name, side);
        let (multiple, most) = (of_sides * sizes.multiple[axis], of_sides * sizes.most[axis]);
        at.ensure(
            side.is_multiple_of(multiple as usize) && side as i64 <= most,
            name,
            format!("the model does not paint {side} pixels"),
            format!("write a multiple of {multiple}, at most {most}"),
        );
    }
    at.positive("frames", prompts.frames);
    let frames = prompts.frames as i64;
    let latents = (frames - 1) / in_time + 1;
    let is_whole = (frames - 1) % in_time == 0 && latents % sizes.multiple[0] == 0;
    at.ensure(
        if sizes.is_video { is_whole && latents <= sizes.most[0] } else { frames == 1 },
        "frames",
        format!("the model does not make {frames} frames"),
        match sizes.is_video {
            true => format!("write 1 more than a multiple of {}", in_time * sizes.multiple[0]),
            false => "leave it out: it paints images".to_owned(),
        },
    );
}

/// Texts that were encoded before the run, or the encoders for the start of the run.
enum Texts<'a> {
    Encoded(TextEmbeddings),
    ToEncode(PromptEncoders, &'a EncodeConfig),
}

/// Opens the texts. `records` are the config's, if they could be read. `at` is the pipeline's section.
fn open_texts<'a>(
    model: &DiffusersConfig,
    config: &DiffusionConfig,
    prompts: &'a PromptsConfig,
    records: Option<&Option<Vec<Record>>>,
    folder: Option<&DiffusersFolder>,
    at: &Section,
) -> Option<Texts<'a>> {
    match (&prompts.embeddings, &prompts.encode) {
        (Some(path), None) => {
            let texts = open_embeddings(path, config, folder?, at)?;
            check_held_out(prompts, texts.count(), at);
            if let Some(Some(records)) = records {
                at.ensure(
                    records.len() == texts.count(),
                    "data.prompts.records",
                    format!("it has {} lines, and there are {} texts", records.len(), texts.count()),
                    "write a line for each text, in their order",
                );
            }
            Some(Texts::Encoded(texts))
        }
        (None, Some(encode)) => {
            let encoders = open_own_encoders(prompts, encode, model, folder, at);
            let Some(Some(records)) = records else { return None };
            let (field, help) = ("data.prompts.records", "write one a line");
            if at.ensure(!records.is_empty(), field, "the file has no text", help) {
                check_held_out(prompts, records.len(), at);
            }
            let encoders = encoders?;
            let help = "leave it out of the records and of `encode`";
            let checked = encoders.check(&Prompts::of(records, encode).texts());
            at.take(checked, field, |error| one_line(error), help);
            Some(Texts::ToEncode(encoders, encode))
        }
        _ => {
            let help = "write `embeddings: FILE`, which `anyroll embed` makes, or `encode: {}`, by which the model's own \
                        text encoders read the `records` when the run begins";
            let problem = "it has to have one of `embeddings` and `encode`";
            at.refuse("data.prompts", problem, help);
            None
        }
    }
}

/// Reports prompts that are all held out, so that none is left for training.
fn check_held_out(prompts: &PromptsConfig, count: usize, at: &Section) {
    at.ensure(
        prompts.held_out < count,
        "data.prompts.held_out",
        format!("{} of {count} texts leave none to train on", prompts.held_out),
        format!("write {} or fewer", count.saturating_sub(1)),
    );
}

/// Opens the model's own text encoders. `at` is the pipeline's section.
fn open_own_encoders(
    prompts: &PromptsConfig,
    encode: &EncodeConfig,
    model: &DiffusersConfig,
    folder: Option<&DiffusersFolder>,
    at: &Section,
) -> Option<PromptEncoders> {
    let at = at.below("data.prompts");
    let help = "write `records: FILE`, with a JSON object a line that has a `prompt`, or a .txt";
    at.ensure(prompts.records.is_some(), "records", "`encode` reads the texts there", help);
    at.positive("encode.batch_size", encode.batch_size);
    at.ensure(
        !matches!(encode.precision, Some(Precision::Fp16(_))),
        "encode.precision",
        "fp16 overflows in T5",
        "write fp32 or bf16",
    );
    // An unusable folder has no encoders.
    folder?;
    open_encoders(model, encode).inspect_err(|error| refuse_encoders(error, &at)).ok()
}

/// Reports an error of opening text encoders.
fn refuse_encoders(error: &Error, at: &Section) {
    let help = "a model's folder has its text encoders and tokenizers as diffusers publishes them; or write `embeddings`, \
                which `anyroll embed` makes elsewhere";
    match error {
        Error::Model(anyroll_models::Error::Input { what, problem }) => {
            let help = "docs/guides/diffusion.md has what each model's encoders read";
            at.refuse(&format!("encode.{what}"), problem.as_str(), help);
        }
        Error::Model(anyroll_models::Error::Folder(of_folder)) if refuse_variant(of_folder, &at.root()) => {}
        _ => at.refuse("encode", one_line(error), help),
    }
}

/// Reads the records of the texts. `at` is the prompts' section.
fn open_records(path: &Path, at: &Section) -> Option<Vec<Record>> {
    if !at.is_read("records") {
        return None;
    }
    let help = "write a JSON object a line, with a `prompt`";
    at.take(read_records(path), "records", |error| one_line(error), help)
}

/// Opens the embeddings that were encoded before the run. `at` is the pipeline's section.
fn open_embeddings(
    path: &Path,
    config: &DiffusionConfig,
    folder: &DiffusersFolder,
    at: &Section,
) -> Option<TextEmbeddings> {
    let widths = folder.transformer_config().text_widths();
    let help = "`anyroll embed` writes it: docs/guides/diffusion.md";
    let opened = TextEmbeddings::open(path, widths);
    let texts = at.take(opened, "data.prompts.embeddings", |error| one_line(error), help)?;
    if let Some(name) = config.sampler.guided_by() {
        at.ensure(
            texts.has_negative(),
            &format!("sampler.{name}"),
            format!("guidance leads away from a text, and {} has none", texts.path().display()),
            "add `negative_prompt_embeds` and `negative_pooled_prompt_embeds`, or write 1",
        );
    }
    Some(texts)
}

/// Ends of the names of layers, after the index of the block.
fn ends(modules: &[String]) -> Vec<&str> {
    let behind_blocks = modules.iter().filter_map(|name| name.split_once("blocks."));
    let mut ends: Vec<&str> =
        behind_blocks.filter_map(|(_, rest)| rest.split_once('.')).map(|(_, end)| end).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// The `chosen` ones of `modules`, in the order of `modules`.
fn in_order(modules: &[String], chosen: &[String]) -> Vec<String> {
    modules.iter().filter(|module| chosen.contains(module)).cloned().collect()
}

/// The shape of an adapter as YAML fields, except for `rslora`, which is given. Modules are named by their ends if
/// these are the same in all blocks.
fn fields_of(lora: &Lora, rslora: bool, modules: &[String]) -> String {
    let short = ends(&lora.modules);
    let chosen = |name: &&String| short.iter().any(|end| name.ends_with(&format!(".{end}")));
    let all_chosen: Vec<&String> = modules.iter().filter(chosen).collect();
    let targets = match all_chosen.len() == lora.modules.len() {
        true => short,
        false => lora.modules.iter().map(String::as_str).collect(),
    };
    let alpha = lora.scale / lora_scale(lora.rank, 1.0, rslora);
    format!("rank: {}, alpha: {alpha:?}, targets: [{}]", lora.rank, targets.join(", "))
}
