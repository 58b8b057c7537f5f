//! Lengths in Arrow files, checked before a reader allocates by them.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use arrow_ipc::{Message, RecordBatch, root_as_footer, root_as_message};

/// Length of the magic bytes at both ends of a file.
const MAGIC: u64 = 6;
/// Most bytes of a compressed buffer's content: this much, or so many times its length.
const SMALL: u64 = 64 << 20;
const RATIO: u64 = 1000;

/// A file with its length.
pub(super) struct Lengths<'a> {
    file: &'a File,
    length: u64,
}

impl<'a> Lengths<'a> {
    pub(super) fn of(file: &'a File) -> Result<Self, String> {
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        Ok(Lengths { file, length })
    }

    /// Checks all messages that a file's footer lists.
    pub(super) fn check_file(&self) -> Result<(), String> {
        let end = self.length.checked_sub(MAGIC + 4).ok_or("it has no footer")?;
        let footer = u64::from(self.number(end)?);
        let start = end.checked_sub(footer).ok_or("its footer is longer than the file")?;
        let footer = self.bytes(start, footer)?;
        let footer = root_as_footer(&footer).map_err(|error| format!("its footer: {error}"))?;
        let blocks = [footer.dictionaries(), footer.recordBatches()];
        for block in blocks.into_iter().flatten().flatten() {
            let lengths = [block.offset(), i64::from(block.metaDataLength()), block.bodyLength()];
            let [offset, metadata, body] = lengths.map(u64::try_from);
            let (Ok(offset), Ok(metadata), Ok(body)) = (offset, metadata, body) else {
                return Err("a length in its footer is negative".to_owned());
            };
            // Older files have no marker before the length of the metadata.
            let prefix = if self.number(offset)? == u32::MAX { 8 } else { 4 };
            let inner = metadata.checked_sub(prefix).ok_or("a length in its footer is too small")?;
            let start = offset.checked_add(prefix).ok_or("a length in its footer is too large")?;
            self.check_message(start, inner, Some(body))?;
        }
        Ok(())
    }

    /// Checks the messages of a stream.
    pub(super) fn check_stream(&self) -> Result<(), String> {
        let mut at = 0;
        while at < self.length {
            let first = self.number(at)?;
            let (length, start) = match first {
                u32::MAX => (self.number(at + 4)?, at + 8),
                first => (first, at + 4),
            };
            if length == 0 {
                break;
            }
            at = self.check_message(start, u64::from(length), None)?;
        }
        Ok(())
    }

    /// Checks the message whose metadata starts at `start`, and returns its end. `body` is the length of its body
    /// in a footer.
    fn check_message(&self, start: u64, metadata: u64, body: Option<u64>) -> Result<u64, String> {
        let bytes = self.bytes(start, metadata)?;
        let message = root_as_message(&bytes).map_err(|error| format!("a message: {error}"))?;
        let told = u64::try_from(message.bodyLength()).map_err(|_| "a body has a negative length")?;
        let (body_start, length) = (start + metadata, body.unwrap_or(told).max(told));
        let end = body_start.checked_add(length).filter(|end| *end <= self.length);
        let end = end.ok_or_else(|| self.longer(length))?;
        if let Some(batch) = batch_of(&message) {
            self.check_batch(&batch, body_start, length)?;
        }
        Ok(end)
    }

    fn check_batch(&self, batch: &RecordBatch, start: u64, length: u64) -> Result<(), String> {
        let mut content = length;
        for buffer in batch.buffers().into_iter().flatten() {
            let (Ok(at), Ok(bytes)) = (u64::try_from(buffer.offset()), u64::try_from(buffer.length())) else {
                return Err("a buffer has a negative length".to_owned());
            };
            if at.checked_add(bytes).is_none_or(|end| end > length) {
                return Err(format!("a buffer of {bytes} bytes ends behind its message of {length}"));
            }
            if batch.compression().is_none() || bytes < 8 {
                continue;
            }
            let inner = self.bytes(start + at, 8)?.try_into().map_or(0, i64::from_le_bytes);
            // Minus one marks a buffer that is not compressed.
            let inner = if inner == -1 { bytes } else { u64::try_from(inner).unwrap_or(u64::MAX) };
            if inner > SMALL.max(bytes.saturating_mul(RATIO)) {
                return Err(format!("a buffer of {bytes} bytes claims to hold {inner}"));
            }
            content = content.saturating_add(inner);
        }
        // A column of nulls has no bytes, all others have a bit for each row.
        let most = content.saturating_mul(8).max(SMALL);
        let rows = batch.nodes().into_iter().flatten().map(|node| node.length()).chain([batch.length()]);
        match rows.max().unwrap_or(0) {
            rows if u64::try_from(rows).is_ok_and(|rows| rows <= most) => Ok(()),
            rows => Err(format!("a message of {length} bytes claims to have {rows} rows")),
        }
    }

    fn longer(&self, length: u64) -> String {
        format!("a part of {length} bytes is longer than the file of {}", self.length)
    }

    fn number(&self, at: u64) -> Result<u32, String> {
        let bytes = self.bytes(at, 4)?;
        Ok(u32::from_le_bytes(bytes.try_into().unwrap_or_default()))
    }

    fn bytes(&self, at: u64, length: u64) -> Result<Vec<u8>, String> {
        if at.checked_add(length).is_none_or(|end| end > self.length) {
            return Err(self.longer(length));
        }
        let mut file = self.file;
        let mut bytes = vec![0; length as usize];
        file.seek(SeekFrom::Start(at)).map_err(|error| error.to_string())?;
        file.read_exact(&mut bytes).map_err(|error| error.to_string())?;
        Ok(bytes)
    }
}

/// Rows of a message, if it has any.
fn batch_of<'a>(message: &Message<'a>) -> Option<RecordBatch<'a>> {
    message.header_as_record_batch().or_else(|| message.header_as_dictionary_batch()?.data())
}
