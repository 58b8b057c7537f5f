//! Writer of TensorBoard event files.
//!
//! A file is a sequence of records, `u64le length, u32le crc(length), data, u32le crc(data)`, where `crc` is
//! CRC-32C, rotated and shifted as in `masked_crc`. The data is a protobuf message `Event`. Only a few of its
//! fields are needed, so they are encoded here. Field numbers are those of
//! `tensorboard/compat/proto/{event,summary,tensor,tensor_shape}.proto`.
//!
//! Every start of a run creates a new file. Its second record is `SessionLog { status: START }` with the next
//! step. TensorBoard then drops points at and after that step from earlier files, which a resumed run will
//! write again.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::metrics::{Metrics, declared};
use crate::output_error::{OutputError, Result};

/// An event file, open for appending. Every record is handed to the operating system at once.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
    /// Tags whose description is in the file.
    described: HashSet<String>,
}

impl EventWriter {
    /// Starts an event file in `folder`. `first_step` is the first step that will be written: 0 for a new
    /// run, the checkpoint's step plus one for a resumed one.
    ///
    /// # Errors
    /// If the file cannot be created or written.
    pub fn create(folder: &Path, first_step: u64) -> Result<EventWriter> {
        let now = since_epoch();
        // TensorBoard finds the files by `tfevents` and reads them in the order of their names. The time
        // comes first, with nanoseconds since a run may restart within a second.
        let (seconds, nanos) = (now.as_secs(), now.subsec_nanos());
        let path = folder.join(format!("events.out.tfevents.{seconds}.{nanos:09}.{}", std::process::id()));
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let file = file.map_err(|source| OutputError::io("create", &path, source))?;
        let mut writer = EventWriter { path, file, described: HashSet::new() };
        let version = Message::default().bytes(event::FILE_VERSION, b"brain.Event:2");
        writer.append(0, version)?;
        let start = Message::default().varint(session_log::STATUS, session_log::START);
        writer.append(first_step, Message::default().message(event::SESSION_LOG, start))?;
        Ok(writer)
    }

    /// Writes all metrics of a step, each as the scalar of its name, the first time with its meaning. TensorBoard's
    /// scalars are single precision; it shows those that are not finite as such.
    pub fn scalars(&mut self, step: u64, metrics: &Metrics) -> Result<()> {
        let described = &mut self.described;
        let add = |summary: Message, (name, value): (&str, f64)| {
            let mut scalar = Message::default().bytes(value::TAG, name.as_bytes());
            scalar = scalar.float(value::SIMPLE_VALUE, value as f32);
            // TensorBoard keeps the first description of a tag.
            if let Some(metric) = declared(name).filter(|_| described.insert(name.to_owned())) {
                let plugin = Message::default().bytes(plugin_data::PLUGIN_NAME, b"scalars");
                let metadata = Message::default().message(metadata::PLUGIN_DATA, plugin);
                let metadata = metadata.bytes(metadata::DESCRIPTION, metric.sentence.as_bytes());
                scalar = scalar.message(value::METADATA, metadata);
            }
            summary.message(summary::VALUE, scalar)
        };
        let summary = metrics.iter().fold(Message::default(), add);
        self.append(step, Message::default().message(event::SUMMARY, summary))
    }

    /// Writes an image: `png` is its file, with its width, height and channels.
    pub fn image(
        &mut self,
        step: u64,
        tag: &str,
        (width, height, channels): (u32, u32, u32),
        png: &[u8],
    ) -> Result<()> {
        let image = Message::default()
            .varint(image::HEIGHT, u64::from(height))
            .varint(image::WIDTH, u64::from(width))
            .varint(image::COLORSPACE, u64::from(channels))
            .bytes(image::ENCODED, png);
        let value = Message::default().bytes(value::TAG, tag.as_bytes()).message(value::IMAGE, image);
        let summary = Message::default().message(summary::VALUE, value);
        self.append(step, Message::default().message(event::SUMMARY, summary))
    }

    /// Writes a text, which TensorBoard renders as Markdown.
    pub fn text(&mut self, step: u64, tag: &str, markdown: &str) -> Result<()> {
        let plugin = Message::default().bytes(plugin_data::PLUGIN_NAME, b"text");
        let metadata = Message::default()
            .message(metadata::PLUGIN_DATA, plugin)
            .varint(metadata::DATA_CLASS, metadata::DATA_CLASS_TENSOR);
        // A tensor without a shape is a scalar: one string.
        let tensor = Message::default()
            .varint(tensor::DTYPE, tensor::DT_STRING)
            .message(tensor::SHAPE, Message::default())
            .bytes(tensor::STRING_VAL, markdown.as_bytes());
        let value = Message::default()
            .bytes(value::TAG, tag.as_bytes())
            .message(value::TENSOR, tensor)
            .message(value::METADATA, metadata);
        let summary = Message::default().message(summary::VALUE, value);
        self.append(step, Message::default().message(event::SUMMARY, summary))
    }

    /// Appends one record: an event with the current time at `step` and the fields in `what`.
    fn append(&mut self, step: u64, what: Message) -> Result<()> {
        let stamp = Message::default()
            .double(event::WALL_TIME, since_epoch().as_secs_f64())
            .varint(event::STEP, step);
        let data = [stamp.bytes, what.bytes].concat();
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(&data);
        record.extend(masked_crc(&data).to_le_bytes());
        self.file.write_all(&record).map_err(|source| OutputError::io("append to", &self.path, source))
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970")
}

/// CRC of data that may itself contain CRCs, hence masked (`tensorflow/core/lib/hash/crc32c.h`).
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

mod event {
    pub const WALL_TIME: u64 = 1;
    pub const STEP: u64 = 2;
    pub const FILE_VERSION: u64 = 3;
    pub const SUMMARY: u64 = 5;
    pub const SESSION_LOG: u64 = 7;
}
mod session_log {
    pub const STATUS: u64 = 1;
    pub const START: u64 = 1;
}
mod summary {
    pub const VALUE: u64 = 1;
}
mod value {
    pub const TAG: u64 = 1;
    pub const SIMPLE_VALUE: u64 = 2;
    pub const IMAGE: u64 = 4;
    pub const TENSOR: u64 = 8;
    pub const METADATA: u64 = 9;
}
mod image {
    pub const HEIGHT: u64 = 1;
    pub const WIDTH: u64 = 2;
    pub const COLORSPACE: u64 = 3;
    pub const ENCODED: u64 = 4;
}
mod metadata {
    pub const PLUGIN_DATA: u64 = 1;
    pub const DESCRIPTION: u64 = 3;
    pub const DATA_CLASS: u64 = 4;
    pub const DATA_CLASS_TENSOR: u64 = 2;
}
mod plugin_data {
    pub const PLUGIN_NAME: u64 = 1;
}
mod tensor {
    pub const DTYPE: u64 = 1;
    pub const SHAPE: u64 = 2;
    pub const STRING_VAL: u64 = 8;
    pub const DT_STRING: u64 = 7;
}

/// A protobuf message: its fields in sequence, each with a key of `number << 3 | wire type`.
#[derive(Default)]
struct Message {
    bytes: Vec<u8>,
}

impl Message {
    fn varint(self, field: u64, value: u64) -> Message {
        self.raw_varint(field << 3).raw_varint(value)
    }

    fn double(self, field: u64, value: f64) -> Message {
        self.raw_varint(field << 3 | 1).raw(&value.to_le_bytes())
    }

    fn bytes(self, field: u64, value: &[u8]) -> Message {
        self.raw_varint(field << 3 | 2).raw_varint(value.len() as u64).raw(value)
    }

    fn message(self, field: u64, value: Message) -> Message {
        self.bytes(field, &value.bytes)
    }

    fn float(self, field: u64, value: f32) -> Message {
        self.raw_varint(field << 3 | 5).raw(&value.to_le_bytes())
    }

    /// Seven bits per byte, lowest first; the high bit marks that more follow.
    fn raw_varint(mut self, mut value: u64) -> Message {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
        self
    }

    fn raw(mut self, bytes: &[u8]) -> Message {
        self.bytes.extend(bytes);
        self
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// An undecoded field on the wire: its number and content.
    #[derive(Debug, PartialEq)]
    enum Wire {
        Varint(u64, u64),
        Bits64(u64, u64),
        Bits32(u64, u32),
        Bytes(u64, Vec<u8>),
    }

    /// Decodes a message by the wire format's specification, without the writer's code.
    fn decode(mut bytes: &[u8]) -> Vec<Wire> {
        fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
            let (head, tail) = bytes.split_at(count);
            *bytes = tail;
            head
        }
        fn varint(bytes: &mut &[u8]) -> u64 {
            let length = 1 + bytes.iter().position(|byte| byte & 0x80 == 0).unwrap();
            take(bytes, length).iter().rev().fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f))
        }
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let number = key / 8;
            fields.push(match key % 8 {
                0 => Wire::Varint(number, varint(&mut bytes)),
                1 => Wire::Bits64(number, u64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
                2 => {
                    let length = varint(&mut bytes) as usize;
                    Wire::Bytes(number, take(&mut bytes, length).to_vec())
                }
                5 => Wire::Bits32(number, u32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap())),
                other => panic!("wire type {other}"),
            });
        }
        fields
    }

    /// CRC-32C bit by bit, from its polynomial.
    fn slow_crc(bytes: &[u8]) -> u32 {
        let shift = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        let byte = |crc: u32, &byte: &u8| (0..8).fold(crc ^ u32::from(byte), |crc, _| shift(crc));
        !bytes.iter().fold(!0, byte)
    }

    /// Events of the only file in `folder`, as their fields after the time. Verifies both checksums.
    fn events(folder: &Path) -> Vec<Vec<Wire>> {
        let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        let [file] = files.as_slice() else { panic!("one file, not {files:?}") };
        assert!(file.to_str().unwrap().contains("tfevents"));
        let bytes = fs::read(file).unwrap();
        let mut rest = bytes.as_slice();
        let mut events = Vec::new();
        while !rest.is_empty() {
            let check = |covered: &[u8], at: usize| {
                let crc = slow_crc(covered);
                let masked = crc.rotate_right(15).wrapping_add(0xa282_ead8);
                assert_eq!(rest[at..at + 4], masked.to_le_bytes());
            };
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            check(&rest[..8], 8);
            check(&rest[12..12 + length], 12 + length);
            let mut fields = decode(&rest[12..12 + length]);
            let Wire::Bits64(1, time) = fields.remove(0) else { panic!("the time comes first") };
            assert!((since_epoch().as_secs_f64() - f64::from_bits(time)).abs() < 60.0);
            events.push(fields);
            rest = &rest[16 + length..];
        }
        events
    }

    fn bytes_of(wire: &Wire) -> &[u8] {
        let Wire::Bytes(_, bytes) = wire else { panic!("{wire:?} is not bytes") };
        bytes
    }

    #[test]
    fn scalars_decode_to_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(folder.path(), 301).unwrap();
        let mut metrics = Metrics::new();
        metrics.insert("reward/mean", 0.75);
        metrics.insert("grad_norm", f64::NAN);
        writer.scalars(301, &metrics).unwrap();
        writer.scalars(302, &metrics).unwrap();

        let events = events(folder.path());
        assert_eq!(events[0], [Wire::Varint(2, 0), Wire::Bytes(3, b"brain.Event:2".to_vec())]);
        // START, with the next step.
        assert_eq!(events[1], [Wire::Varint(2, 301), Wire::Bytes(7, vec![1 << 3, 1])]);
        assert_eq!(events[2][0], Wire::Varint(2, 301));
        let values = decode(bytes_of(&events[2][1]));
        let tag = |name: &str| Wire::Bytes(1, name.as_bytes().to_vec());
        let (mean, norm) = (decode(bytes_of(&values[0])), decode(bytes_of(&values[1])));
        assert_eq!(mean[..2], [tag("reward/mean"), Wire::Bits32(2, 0.75f32.to_bits())]);
        assert_eq!(norm[..2], [tag("grad_norm"), Wire::Bits32(2, f32::NAN.to_bits())]);
        let meaning = declared("reward/mean").unwrap().sentence.as_bytes().to_vec();
        let metadata = [Wire::Bytes(1, b"\x0a\x07scalars".to_vec()), Wire::Bytes(3, meaning)];
        assert_eq!(decode(bytes_of(&mean[2])), metadata);
        assert_eq!((events.len(), values.len()), (4, 2));
        // Once is enough.
        let again = decode(bytes_of(&events[3][1]));
        assert_eq!(decode(bytes_of(&again[0])), mean[..2]);
    }

    #[test]
    fn a_text_decodes_to_a_scalar_string_of_the_text_plugin() {
        let folder = tempfile::tempdir().unwrap();
        let long = "é".repeat(100);
        EventWriter::create(folder.path(), 0).unwrap().text(5, "samples", &long).unwrap();
        let summary = bytes_of(&events(folder.path())[2][1]).to_vec();
        let value = decode(bytes_of(&decode(&summary)[0]));
        assert_eq!(value[0], Wire::Bytes(1, b"samples".to_vec()));
        let tensor = decode(bytes_of(&value[1]));
        let text = Wire::Bytes(8, long.as_bytes().to_vec());
        assert_eq!(tensor, [Wire::Varint(1, 7), Wire::Bytes(2, vec![]), text]);
        let metadata = decode(bytes_of(&value[2]));
        assert_eq!(metadata, [Wire::Bytes(1, b"\x0a\x04text".to_vec()), Wire::Varint(4, 2)]);
    }

    #[test]
    fn an_image_decodes_to_its_file_and_size() {
        let folder = tempfile::tempdir().unwrap();
        EventWriter::create(folder.path(), 0).unwrap().image(5, "images", (7, 300, 1), b"file").unwrap();
        let summary = bytes_of(&events(folder.path())[2][1]).to_vec();
        let value = decode(bytes_of(&decode(&summary)[0]));
        assert_eq!(value[0], Wire::Bytes(1, b"images".to_vec()));
        let Wire::Bytes(4, image) = &value[1] else { panic!("{value:?}") };
        let expected =
            [Wire::Varint(1, 300), Wire::Varint(2, 7), Wire::Varint(3, 1), Wire::Bytes(4, b"file".to_vec())];
        assert_eq!(decode(image), expected);
    }

    #[test]
    fn every_start_has_a_file_of_its_own_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<_> =
            (0..3).map(|step| EventWriter::create(folder.path(), step).unwrap().path).collect();
        assert!(paths.is_sorted() && paths[0] != paths[1] && paths[1] != paths[2]);
    }
}
