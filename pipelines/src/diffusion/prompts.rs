//! Prompts to a file of what a model's text encoders say of them: for `anyroll embed`, and for a run that encodes its own
//! prompts before it holds a model.

use std::collections::HashMap;
use std::io::Write;
use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyroll_backends::release_cached;
use anyroll_models::hf::{ExportDtype, TextEmbeddings, TextEmbeddingsWriter};
use tch::{Device, Kind};

use super::embed::{EncoderOptions, PromptEncoders};
use super::opened::{EncodedTexts, PaintedTexts};
use crate::{
    Result,
    config::{DiffusersConfig, EncodeConfig, EncodeOn, Precision},
    data::{self, Record},
    format::gib,
    progress::Screen,
    train::{Exchange, Place},
};

/// What each encoder of a model reads of a prompt, the first one's text first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PromptTexts([String; 3]);

impl PromptTexts {
    /// The encoders behind the first read `prompt` as well where they have no text of their own.
    pub fn new(prompt: &str, second: Option<&str>, third: Option<&str>) -> Self {
        Self([prompt, second.unwrap_or(prompt), third.unwrap_or(prompt)].map(str::to_owned))
    }

    /// Those of a record: its `prompt`, `prompt_2` and `prompt_3`, as diffusers calls them.
    fn of(record: &Record) -> Self {
        let [second, third] = OF_OTHERS.map(|name| record.columns.get(name).and_then(|text| text.as_str()));
        Self::new(&record.prompt, second, third)
    }

    /// That of the encoder of this number.
    pub fn of_encoder(&self, number: usize) -> &str {
        &self.0[number]
    }

    /// Whether encoders have texts of their own.
    pub fn differ(&self) -> bool {
        self.0.iter().any(|text| *text != self.0[0])
    }
}

/// The columns of a record with texts of their own for the encoders behind the first.
pub const OF_OTHERS: [&str; 2] = ["prompt_2", "prompt_3"];

/// Prompts that are to be encoded.
#[derive(Debug)]
pub struct Prompts {
    /// Each once.
    distinct: Vec<PromptTexts>,
    /// In which rows of the file each is.
    places: Vec<Vec<usize>>,
    /// What guidance leads away from.
    negative: PromptTexts,
    /// So many are read at a time.
    batch_size: usize,
}

impl Prompts {
    /// Those of `records`, a row each.
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

    /// Those of `records` as a run encodes them.
    pub fn of(records: &[Record], encode: &EncodeConfig) -> Self {
        let [second, third] = [&encode.negative_prompt_2, &encode.negative_prompt_3].map(Option::as_deref);
        let negative = PromptTexts::new(&encode.negative_prompt, second, third);
        Self::new(records, negative, encode.batch_size)
    }

    /// All texts, the negative one last.
    pub fn texts(&self) -> Vec<&PromptTexts> {
        self.distinct.iter().chain([&self.negative]).collect()
    }

    /// Rows of the file, apart from the negative one.
    pub fn rows(&self) -> usize {
        self.places.iter().map(Vec::len).sum()
    }

    /// How often [`Self::write`] asks whether it goes on.
    fn batches(&self) -> usize {
        self.distinct.len().div_ceil(self.batch_size)
    }

    /// Writes the new file `out`, each text encoded once, in the dtype `kind` on `device`, whose memory is free again afterwards.
    /// `goes_on` is told after each batch how many texts are done, of how many; where it does not, there is no file, and this
    /// returns false.
    ///
    /// # Errors
    /// What `goes_on` says; a text that encoders do not read; files that cannot be read or written; libtorch's (out of memory).
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
        // diffusers skips no layer here.
        let (states, pooled) = loaded.encode(&tokens, count..count + 1, 0)?;
        file.finish(&states, pooled.as_ref())?;
        drop((loaded, states, pooled));
        release_cached(device)?;
        Ok(true)
    }
}

/// The dtype that texts are encoded in: where nobody says it fp32 on a host, bf16 elsewhere.
fn kind_on(on_host: bool, precision: Option<Precision>) -> Kind {
    match precision {
        Some(Precision::Fp32) => Kind::Float,
        Some(_) => Kind::BFloat16,
        None if on_host => Kind::Float,
        None => Kind::BFloat16,
    }
}

/// Bytes of a value of what a run's encoders hold and say.
pub fn encoded_in(encode: &EncodeConfig, on_host: bool) -> usize {
    kind_on(on_host, encode.precision).elt_size_in_bytes()
}

/// The encoders in a model's folder as `encode` has them read.
///
/// # Errors
/// As [`PromptEncoders::open`].
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

/// The texts as encoders have read them. What is still to be encoded is, into a file in the run's `folder` and before any rank
/// holds a model: rank 0 encodes, and the others wait, for no batch longer than their timeout. A run that is resumed finds its
/// file there. The embeddings are of these `widths`. `screen` shows what is done; it breaks off if somebody `stop`s a rank.
///
/// # Errors
/// As [`Prompts::write`]; a rank that fails or stalls.
pub fn encode(
    texts: PaintedTexts,
    widths: (i64, Option<i64>),
    (place, exchange): (&Place, &Exchange),
    folder: &Path,
    screen: &Screen,
    stop: &AtomicBool,
) -> Result<ControlFlow<(), EncodedTexts>> {
    let (encoders, encode, records) = match texts {
        PaintedTexts::Encoded(texts) => return Ok(Continue(texts)),
        PaintedTexts::ToEncode { encoders, encode, records } => (encoders, encode, records),
    };
    // Of other records it is another file: what a run that has no checkpoint yet finds may be older than they are.
    let out = folder.join(format!("prompts-{:08x}.safetensors", data::digest(&records)));
    let prompts = Prompts::of(&records, &encode);
    let is_first = exchange.rank() == 0;
    let is_missing = is_first && !out.exists();
    if exchange.sum(&[f64::from(u8::from(is_missing))])?[0] > 0.0 {
        let mut goes_on = || {
            let wish = f64::from(u8::from(stop.load(Ordering::Relaxed)));
            Ok(exchange.sum(&[wish])?[0] == 0.0)
        };
        // Nobody is kept from training by a screen that is gone.
        let say = |line: &str| drop(writeln!(screen.clone(), "{line}"));
        let is_whole = match is_first {
            true => encode_here((&encoders, &encode), &prompts, place, &out, &say, &mut goes_on)?,
            false => wait(prompts.batches(), &mut goes_on)?,
        };
        if !is_whole {
            if is_first {
                let folder = folder.display();
                say(&format!("interrupted while encoding: begin anew with `anyroll run --resume {folder}`"));
            }
            return Ok(Break(()));
        }
        // The file has its name.
        exchange.sum(&[0.0])?;
    }
    let embeddings = TextEmbeddings::open(&out, widths).map_err(anyroll_models::Error::from)?;
    Ok(Continue(EncodedTexts { embeddings, records: Some(records) }))
}

/// Rank 0's part of [`encode`]: false if it does not go on to the end.
fn encode_here(
    (encoders, encode): (&PromptEncoders, &EncodeConfig),
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

/// Another rank's part: as often as rank 0 asks.
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
