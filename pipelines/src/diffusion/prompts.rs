//! Files of prompt embeddings: for `anyroll embed`, and for a run that encodes its own prompts before it
//! loads a model.

use std::collections::HashMap;
use std::io::Write;
use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyroll_backends::release_cached;
use anyroll_config::{DiffusersConfig, EncodeConfig, EncodeOn, Precision};
use anyroll_data::{self, Record};
use anyroll_models::diffusion::TextWidths;
use anyroll_models::hf::{ExportDtype, TextEmbeddings, TextEmbeddingsWriter};
use tch::{Device, Kind};

use super::embed::{EncoderOptions, PromptEncoders};
use super::opened::{EncodedTexts, PaintedTexts};
use crate::{
    Result,
    format::gib,
    progress::Screen,
    train::{Exchange, Place},
};

/// Text of a prompt for each encoder, the first one's first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PromptTexts([String; 3]);

impl PromptTexts {
    /// The second and third encoder read `prompt` too if they have no own text.
    pub fn new(prompt: &str, second: Option<&str>, third: Option<&str>) -> Self {
        Self([prompt, second.unwrap_or(prompt), third.unwrap_or(prompt)].map(str::to_owned))
    }

    /// Texts of a record: its `prompt`, `prompt_2` and `prompt_3`, named as in diffusers.
    fn of(record: &Record) -> Self {
        let [second, third] = OF_OTHERS.map(|name| record.columns.get(name).and_then(|text| text.as_str()));
        Self::new(&record.prompt, second, third)
    }

    /// Text for the encoder with this index.
    pub fn of_encoder(&self, number: usize) -> &str {
        &self.0[number]
    }

    /// Returns true if encoders have different texts.
    pub fn differ(&self) -> bool {
        self.0.iter().any(|text| *text != self.0[0])
    }
}

/// Columns of a record for the second and third encoder.
pub const OF_OTHERS: [&str; 2] = ["prompt_2", "prompt_3"];

/// Prompts to encode.
#[derive(Debug)]
pub struct Prompts {
    /// Distinct prompts.
    distinct: Vec<PromptTexts>,
    /// Rows of the file for each prompt.
    places: Vec<Vec<usize>>,
    /// The negative prompt of guidance.
    negative: PromptTexts,
    /// Prompts in a batch.
    batch_size: usize,
}

impl Prompts {
    /// Creates the prompts of `records`, a row each.
    pub fn new(records: &[Record], negative: PromptTexts, batch_size: usize) -> Self {
        let (mut distinct, mut places) = (Vec::new(), Vec::<Vec<usize>>::new());
        let mut known = HashMap::new();
        for (row, record) in records.iter().enumerate() {
            let texts = PromptTexts::of(record);
            let number = *known.entry(texts).or_insert_with_key(|texts| {
                distinct.push(texts.clone());
                places.push(Vec::new());
                places.len() - 1
            });
            places[number].push(row);
        }
        Self { distinct, places, negative, batch_size }
    }

    /// Creates the prompts of `records` with a run's options.
    pub fn of(records: &[Record], encode: &EncodeConfig) -> Self {
        let [second, third] = [&encode.negative_prompt_2, &encode.negative_prompt_3].map(Option::as_deref);
        let negative = PromptTexts::new(&encode.negative_prompt, second, third);
        Self::new(records, negative, encode.batch_size)
    }

    /// All texts, the negative one last.
    pub fn texts(&self) -> Vec<&PromptTexts> {
        self.distinct.iter().chain([&self.negative]).collect()
    }

    /// Rows of the file, without the negative one.
    pub fn rows(&self) -> usize {
        self.places.iter().map(Vec::len).sum()
    }

    /// Number of batches, after each of which [`Self::write`] calls `goes_on`.
    fn batches(&self) -> usize {
        self.distinct.len().div_ceil(self.batch_size)
    }

    /// Writes the new file `out` in dtype `kind`, encoding each text once on `device`, whose memory is freed
    /// afterwards. `goes_on` is called after each batch with the number of texts done and of all. If it
    /// returns false, no file is written, and this returns false.
    ///
    /// # Errors
    /// An error of `goes_on`; a text that encoders cannot read; files that cannot be read or written; an
    /// error of libtorch (out of memory).
    pub fn write(
        &self,
        encoders: &PromptEncoders,
        (kind, device): (Kind, Device),
        out: &Path,
        goes_on: &mut dyn FnMut(usize, usize) -> Result<bool>,
    ) -> Result<bool> {
        let dtype = if kind == Kind::Float { ExportDtype::Fp32 } else { ExportDtype::Bf16 };
        let tokens = encoders.tokens(&self.texts())?;
        let file = TextEmbeddingsWriter::create(out, encoders.shape(self.rows()), dtype);
        let mut file = file.map_err(anyroll_models::Error::from)?;
        let loaded = encoders.load(kind, device)?;
        let count = self.distinct.len();
        for first in (0..count).step_by(self.batch_size) {
            let rows = first..count.min(first + self.batch_size);
            let (states, pooled) = loaded.encode(&tokens, rows.clone(), encoders.clip_skip())?;
            file.put(&self.places[rows.clone()], &states, pooled.as_ref())?;
            if !goes_on(rows.end, count)? {
                return Ok(false);
            }
        }
        // diffusers skips no layer for the negative prompt.
        let (states, pooled) = loaded.encode(&tokens, count..count + 1, 0)?;
        file.finish(&states, pooled.as_ref())?;
        drop((loaded, states, pooled));
        release_cached(device)?;
        Ok(true)
    }
}

/// Dtype of embeddings; by default fp32 on a host, bf16 elsewhere.
fn kind_on(on_host: bool, precision: Option<Precision>) -> Kind {
    match precision {
        Some(Precision::Fp32) => Kind::Float,
        Some(_) => Kind::BFloat16,
        None if on_host => Kind::Float,
        None => Kind::BFloat16,
    }
}

/// Bytes per value of a run's encoders and embeddings.
pub fn encoded_in(encode: &EncodeConfig, on_host: bool) -> usize {
    kind_on(on_host, encode.precision).elt_size_in_bytes()
}

/// Opens the encoders in a model's folder with the options of `encode`.
///
/// # Errors
/// Those of [`PromptEncoders::open`].
pub fn open_encoders(model: &DiffusersConfig, encode: &EncodeConfig) -> Result<PromptEncoders> {
    PromptEncoders::open(
        &model.path,
        EncoderOptions {
            variant: model.variant.as_deref(),
            max_sequence_length: encode.max_sequence_length,
            clip_skip: encode.clip_skip,
        },
    )
}

/// Returns the encoded texts of a run. Texts that are not encoded yet go into a file in the run's `folder`, before any
/// rank loads a model: rank 0 encodes, and the others wait, each batch within their timeout. A resumed run finds the
/// file. The embeddings have these `widths`. `screen` shows the progress; the encoding stops if a rank is asked to `stop`.
///
/// # Errors
/// Those of [`Prompts::write`]; a rank that fails or stalls.
pub fn encode(
    texts: PaintedTexts,
    widths: TextWidths,
    place: &Place,
    exchange: &Exchange,
    folder: &Path,
    screen: &Screen,
    stop: &AtomicBool,
) -> Result<ControlFlow<(), EncodedTexts>> {
    let (encoders, encode, records) = match texts {
        PaintedTexts::Encoded(texts) => return Ok(Continue(texts)),
        PaintedTexts::ToEncode { encoders, encode, records } => (encoders, encode, records),
    };
    // The file's name depends on the records, since a run without a checkpoint may find an older file.
    let out = folder.join(format!("prompts-{:08x}.safetensors", anyroll_data::digest(&records)));
    let prompts = Prompts::of(&records, &encode);
    let is_first = exchange.rank() == 0;
    let is_missing = is_first && !out.exists();
    if exchange.any(is_missing)? {
        let mut goes_on = || {
            let stops = exchange.any(stop.load(Ordering::Relaxed))?;
            Ok(!stops)
        };
        // A closed screen must not stop training.
        let say = |line: &str| drop(writeln!(screen.clone(), "{line}"));
        let is_whole = match is_first {
            true => encode_here(&encoders, &encode, &prompts, place, &out, &say, &mut goes_on)?,
            false => wait(prompts.batches(), &mut goes_on)?,
        };
        if !is_whole {
            if is_first {
                let folder = folder.display();
                say(&format!("interrupted while encoding: restart with `anyroll run --resume {folder}`"));
            }
            return Ok(Break(()));
        }
        // The file has its name.
        exchange.gather(&())?;
    }
    let embeddings = TextEmbeddings::open(&out, widths).map_err(anyroll_models::Error::from)?;
    Ok(Continue(EncodedTexts { embeddings, records: Some(records) }))
}

/// Rank 0's part of [`encode`]; returns false if it was stopped.
fn encode_here(
    encoders: &PromptEncoders,
    encode: &EncodeConfig,
    prompts: &Prompts,
    place: &Place,
    out: &Path,
    say: &dyn Fn(&str),
    goes_on: &mut dyn FnMut() -> Result<bool>,
) -> Result<bool> {
    let (device, name) = match encode.on {
        EncodeOn::Device => (place.torch_device()?, place.device.id().to_string()),
        EncodeOn::Host => (Device::Cpu, "the host".to_owned()),
    };
    let kind = kind_on(device == Device::Cpu, encode.precision);
    let (count, bytes) = (prompts.distinct.len(), encoders.elements() * kind.elt_size_in_bytes());
    say(&format!("encoding {count} texts with the model's own encoders, {} GiB on {name}", gib(bytes)));
    prompts.write(encoders, (kind, device), out, &mut |_, _| goes_on())
}

/// Another rank's part: it follows rank 0's batches.
fn wait(batches: usize, goes_on: &mut dyn FnMut() -> Result<bool>) -> Result<bool> {
    for _ in 0..batches {
        if !goes_on()? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_that_comes_again_is_encoded_once() {
        let record = |prompt: &str, second: Option<&str>| {
            let mut record = Record { prompt: prompt.to_owned(), ..Record::default() };
            record.columns.extend(second.map(|second| (OF_OTHERS[0].to_owned(), json!(second))));
            record
        };
        let records = [
            record("a cat", None),
            record("a dog", None),
            record("a cat", None),
            record("a cat", Some("red")),
            record("a dog", Some("a dog")),
        ];
        let prompts = Prompts::new(&records, PromptTexts::new("", None, Some("blue")), 2);
        assert_eq!(prompts.places, [vec![0, 2], vec![1, 4], vec![3]]);
        assert_eq!((prompts.rows(), prompts.batches()), (5, 2));
        let read = |number: usize| prompts.texts().into_iter().map(move |texts| texts.of_encoder(number));
        assert_eq!(read(0).collect::<Vec<_>>(), ["a cat", "a dog", "a cat", ""]);
        assert_eq!(read(1).collect::<Vec<_>>(), ["a cat", "a dog", "red", ""]);
        assert_eq!(read(2).collect::<Vec<_>>(), ["a cat", "a dog", "a cat", "blue"]);
    }
}
