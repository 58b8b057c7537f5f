//! What must hold between a published model of images and what it is to paint.

use std::path::Path;

use anyroll_models::diffusion::Lora;
use anyroll_models::hf::{self, DiffusersFolder, ImageAdapterFiles, TextEmbeddings};
use anyroll_models::lora_scale;

use super::check::Check;
use crate::Error;
use crate::config::*;
use crate::data::Record;
use crate::diffusion::{Prompts, open_encoders, read_records};
use crate::error_chain::one_line;

impl Check<'_> {
    /// Opens the model's folder and the texts, and sees whether they fit.
    pub(super) fn diffusers(
        &self,
        model: &DiffusersConfig,
        diffusion: &DiffusionConfig,
        reference: &RoleConfig,
    ) -> Result<(), Problem> {
        let folder = DiffusersFolder::open(&model.path, model.variant.as_deref()).map_err(|error| {
            let help =
                "give the folder of a model as diffusers publishes it; docs/guides/diffusion.md has the families";
            self.variant(&error).unwrap_or_else(|| self.problem("model.diffusers", one_line(&error), help))
        })?;
        let lora = model.lora.as_ref().map(|lora| self.image_lora(lora, &folder)).transpose()?;
        if lora.is_some() {
            self.no_reference(reference)?;
        }
        if let Some(boundary) = folder.transformer_config().boundary() {
            let shift = diffusion.sampler.shift.unwrap_or(folder.shift());
            self.meets_what_it_trains(lora.as_ref(), diffusion, boundary, shift)?;
        }
        let field = |name: &str| format!("pipeline.diffusion.{name}");
        let ImageDataConfig::Prompts(prompts) = &diffusion.data else {
            let help = "write `data: {prompts: {records: FILE, encode: {}, height: 512, width: 512}}`, or `embeddings: FILE`";
            return Err(self.problem(&field("data"), "a published model paints texts, and no classes", help));
        };
        self.ensure(
            diffusion.warmup.is_none(),
            &field("warmup"),
            "texts come without images to learn from",
            "leave it out: a published model has been trained",
        )?;
        self.second_guidance(&diffusion.sampler, folder.transformer_config().boundary())?;
        self.sizes(prompts, &folder)?;
        match (&prompts.embeddings, &prompts.encode) {
            (Some(path), None) => {
                self.embeddings((prompts, path), &folder, diffusion.sampler.guided_by())?;
            }
            (None, Some(encode)) => self.encode(prompts, encode, model)?,
            _ => {
                let help = "write `embeddings: FILE`, which `anyroll embed` makes, or `encode: {}`, by which the model's own \
                            text encoders read the `records` when the run begins";
                let problem = "it has to have one of `embeddings` and `encode`";
                return Err(self.problem(&field("data.prompts"), problem, help));
            }
        }
        self.tiles(diffusion.sampler.decode_tiles, &folder)?;
        let decoded = self.decoded_frames(diffusion.sampler.decode_frames, prompts.frames, &folder)?;
        for (at, reward) in diffusion.reward.fields() {
            self.reward_of_texts(&format!("{}{at}", field("reward")), reward, (prompts, &folder))?;
        }
        self.seen_frames(&diffusion.reward, decoded)
    }

    /// Refuses a `field` about decoding for a model whose latents are not decoded.
    fn is_decoded(&self, field: &str, folder: &DiffusersFolder) -> Result<(), Problem> {
        let Err(error) = folder.decoder() else { return Ok(()) };
        let message = format!("this model's videos are not decoded here: {}", one_line(error));
        Err(self.problem(field, message, "leave it out"))
    }

    /// How many frames of videos are decoded; `None` for images.
    fn decoded_frames(
        &self,
        asked: Option<usize>,
        frames: usize,
        folder: &DiffusersFolder,
    ) -> Result<Option<usize>, Problem> {
        let field = "pipeline.diffusion.sampler.decode_frames";
        if !folder.transformer_config().latents().is_video {
            self.ensure(
                asked.is_none(),
                field,
                "the model paints images, which have no frames",
                "leave it out",
            )?;
            return Ok(None);
        }
        let Some(decoded) = asked else { return Ok(Some(frames)) };
        self.is_decoded(field, folder)?;
        let (in_time, _) = folder.zoom();
        let whole = (1..=frames).contains(&decoded) && (decoded - 1).is_multiple_of(in_time as usize);
        self.ensure(
            whole,
            field,
            format!("{decoded} of {frames} frames cannot be decoded"),
            format!("write 1 more than a multiple of {in_time}, at most {frames}"),
        )?;
        Ok(Some(decoded))
    }

    fn image_lora(&self, lora: &LoraConfig, folder: &DiffusersFolder) -> Result<Lora, Problem> {
        self.lora_numbers(lora)?;
        self.ensure(
            lora.dropout == 0.0,
            "model.lora.dropout",
            "adapters of a model of images see all of their input",
            "leave it out",
        )?;
        let one_shape = "adapters of a model of images have one rank and one alpha";
        for (field, is_absent, message) in [
            ("rank_pattern", lora.rank_pattern.is_empty(), one_shape),
            ("alpha_pattern", lora.alpha_pattern.is_empty(), one_shape),
            ("dora", !lora.dora, "adapters of a model of images have no magnitudes"),
            ("layers", lora.layers.is_none(), "blocks of a model of images are named in `targets`"),
        ] {
            self.ensure(is_absent, &format!("model.lora.{field}"), message, "leave it out")?;
        }
        let modules = folder.transformer_config().modules();
        let shape = lora.image_shape(&modules).map_err(|entry| {
            let begins = match folder.transformer_config().boundary() {
                None => "",
                Some(_) => ", behind `transformer.blocks.0.` or `transformer_2.blocks.0.` and so on",
            };
            let help = format!(
                "write ends or patterns of layers' names; there is {}{begins}",
                list(&ends(&modules))
            );
            self.problem("model.lora.targets", format!("`{entry}` names no layer of a block"), help)
        })?;
        self.ensure(!shape.modules.is_empty(), "model.lora.targets", "the list is empty", "name a layer")?;
        let Some(path) = &lora.path else { return Ok(shape) };
        let help = "give an adapter for this model as diffusers saves it, or the folder that it is in";
        let adapter = ImageAdapterFiles::open(path, folder.transformer_config())
            .map_err(|error| self.problem("model.lora.path", one_line(&error), help))?;
        let found = Lora { modules: in_order(&modules, &adapter.lora().modules), ..adapter.lora().clone() };
        self.ensure(
            found == shape,
            "model.lora.path",
            "the adapter there has another shape",
            format!("write its own: {}", fields_of(&found, lora.rslora, &modules)),
        )?;
        Ok(shape)
    }

    /// What is wrong with the variant that is asked for, if it is that.
    fn variant(&self, error: &hf::Error) -> Option<Problem> {
        let help = "write what stands between the name of the files and its end, such as `fp16`; or leave it out for files \
                    without";
        matches!(error, hf::Error::Variant { .. })
            .then(|| self.problem("model.variant", one_line(error), help))
    }

    /// Whether tiles are whole latents that overlap by half at most.
    fn tiles(&self, tiles: Option<TilesConfig>, folder: &DiffusersFolder) -> Result<(), Problem> {
        let Some(tiles) = tiles else { return Ok(()) };
        self.is_decoded("pipeline.diffusion.sampler.decode_tiles", folder)?;
        let field = |name: &str| format!("pipeline.diffusion.sampler.decode_tiles.{name}");
        let zoom = folder.zoom().1 as usize;
        self.positive(&field("size"), tiles.size)?;
        self.ensure(
            tiles.size.is_multiple_of(zoom) && tiles.size / zoom >= 2,
            &field("size"),
            format!("{} pixels are no tile of whole latents", tiles.size),
            format!("write a multiple of {zoom}, at least {}; diffusers has 256 for videos", 2 * zoom),
        )?;
        let stride = tiles.stride(zoom);
        let fits = stride.is_multiple_of(zoom) && stride * 2 >= tiles.size && stride <= tiles.size;
        self.ensure(
            fits,
            &field("stride"),
            format!("tiles of {} pixels do not follow each other by {stride}", tiles.size),
            format!("write a multiple of {zoom}, from half of `size` to all of it"),
        )
    }

    /// Whether texts are left to train on.
    fn held_out(&self, prompts: &PromptsConfig, count: usize) -> Result<(), Problem> {
        self.ensure(
            prompts.held_out < count,
            "pipeline.diffusion.data.prompts.held_out",
            format!("{} of {count} texts leave none to train on", prompts.held_out),
            format!("write {} or fewer", count.saturating_sub(1)),
        )
    }

    /// Opens the model's own text encoders and the texts that they are to read.
    fn encode(
        &self,
        prompts: &PromptsConfig,
        encode: &EncodeConfig,
        model: &DiffusersConfig,
    ) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.diffusion.data.prompts.{name}");
        let Some(path) = &prompts.records else {
            let help = "write `records: FILE`, with a JSON object a line that has a `prompt`, or a .txt";
            return Err(self.problem(&field("records"), "`encode` reads the texts there", help));
        };
        self.positive(&field("encode.batch_size"), encode.batch_size)?;
        self.ensure(
            !matches!(encode.precision, Some(Precision::Fp16(_))),
            &field("encode.precision"),
            "fp16 overflows in T5",
            "write fp32 or bf16",
        )?;
        let encoders = open_encoders(model, encode).map_err(|error| match &error {
            Error::Model(anyroll_models::Error::Input { what, problem }) => {
                let help = "docs/guides/diffusion.md has what each model's encoders read";
                self.problem(&field(&format!("encode.{what}")), problem.as_str(), help)
            }
            Error::Model(anyroll_models::Error::Folder(of_folder)) => {
                self.variant(of_folder).unwrap_or_else(|| self.encoders(&error))
            }
            _ => self.encoders(&error),
        })?;
        let records = self.records(path)?;
        self.ensure(!records.is_empty(), &field("records"), "the file has no text", "write one a line")?;
        encoders.check(&Prompts::of(&records, encode).texts()).map_err(|error| {
            let help = "leave it out of the records and of `encode`";
            self.problem(&field("records"), one_line(&error), help)
        })?;
        self.held_out(prompts, records.len())
    }

    /// What keeps text encoders from being opened.
    fn encoders(&self, error: &Error) -> Problem {
        let help = "a model's folder has its text encoders and tokenizers as diffusers publishes them; or write `embeddings`, \
                    which `anyroll embed` makes elsewhere";
        self.problem("pipeline.diffusion.data.prompts.encode", one_line(error), help)
    }

    fn records(&self, path: &Path) -> Result<Vec<Record>, Problem> {
        let help = "write a JSON object a line, with a `prompt`";
        let field = "pipeline.diffusion.data.prompts.records";
        read_records(path).map_err(|error| self.problem(field, one_line(&error), help))
    }

    /// Whether the model paints images or videos of these sizes.
    fn sizes(&self, prompts: &PromptsConfig, folder: &DiffusersFolder) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.diffusion.data.prompts.{name}");
        let sizes = folder.transformer_config().latents();
        let (in_time, of_sides) = folder.zoom();
        for (name, side, axis) in [("height", prompts.height, 1), ("width", prompts.width, 2)] {
            self.positive(&field(name), side)?;
            let (multiple, most) = (of_sides * sizes.multiple[axis], of_sides * sizes.most[axis]);
            self.ensure(
                side.is_multiple_of(multiple as usize) && side as i64 <= most,
                &field(name),
                format!("the model does not paint {side} pixels"),
                format!("write a multiple of {multiple}, at most {most}"),
            )?;
        }
        self.positive(&field("frames"), prompts.frames)?;
        let frames = prompts.frames as i64;
        let latents = (frames - 1) / in_time + 1;
        let whole = (frames - 1) % in_time == 0 && latents % sizes.multiple[0] == 0;
        self.ensure(
            if sizes.is_video { whole && latents <= sizes.most[0] } else { frames == 1 },
            &field("frames"),
            format!("the model does not make {frames} frames"),
            match sizes.is_video {
                true => format!("write 1 more than a multiple of {}", in_time * sizes.multiple[0]),
                false => "leave it out: it paints images".to_owned(),
            },
        )
    }

    /// Opens the texts that were encoded beforehand.
    fn embeddings(
        &self,
        (prompts, path): (&PromptsConfig, &Path),
        folder: &DiffusersFolder,
        guided_by: Option<&str>,
    ) -> Result<(), Problem> {
        let field = |name: &str| format!("pipeline.diffusion.data.prompts.{name}");
        let widths = folder.transformer_config().text_widths();
        let texts = TextEmbeddings::open(path, widths).map_err(|error| {
            let help = "`anyroll embed` writes it: docs/guides/diffusion.md";
            self.problem(&field("embeddings"), one_line(&error), help)
        })?;
        self.ensure(
            guided_by.is_none() || texts.has_negative(),
            &format!("pipeline.diffusion.sampler.{}", guided_by.unwrap_or_default()),
            format!("guidance leads away from a text, and {} has none", texts.path().display()),
            "add `negative_prompt_embeds` and `negative_pooled_prompt_embeds`, or write 1",
        )?;
        self.held_out(prompts, texts.count())?;
        let Some(path) = &prompts.records else { return Ok(()) };
        let records = self.records(path)?;
        self.ensure(
            records.len() == texts.count(),
            &field("records"),
            format!("it has {} lines, and there are {} texts", records.len(), texts.count()),
            "write a line for each text, in their order",
        )
    }
}

/// The ends of the names of layers, behind the number of the block.
fn ends(modules: &[String]) -> Vec<&str> {
    let behind_blocks = modules.iter().filter_map(|name| name.split_once("blocks."));
    let mut ends: Vec<&str> =
        behind_blocks.filter_map(|(_, rest)| rest.split_once('.')).map(|(_, end)| end).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Those of `modules` that are `chosen`.
fn in_order(modules: &[String], chosen: &[String]) -> Vec<String> {
    modules.iter().filter(|module| chosen.contains(module)).cloned().collect()
}

/// The shape of an adapter as YAML has it, beside the `rslora` that is there: with ends of names, if these are the same in
/// all blocks.
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
