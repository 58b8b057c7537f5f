//! Header of a GGUF file: its metadata and its list of tensors.
//!
//! Every length is compared with the bytes that are left before memory is reserved for it.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::super::encoding::Encoding;
use super::super::{Error, Result, is_lfs_pointer};

/// First bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Most bytes of a header. The largest published vocabularies take some 20 MiB.
const MOST_HEADER_BYTES: u64 = 64 << 20;
/// Most dimensions of a tensor.
const MOST_DIMENSIONS: u32 = 4;
/// Bytes of a text's length, of a key's type, and of a count of dimensions, with an empty name and no values.
const LEAST_KEY_BYTES: u64 = 13;
const LEAST_TENSOR_BYTES: u64 = 24;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Bool(bool),
    Integer(i64),
    Number(f64),
    Text(String),
    Integers(Vec<i64>),
    Numbers(Vec<f32>),
    Texts(Vec<String>),
}

/// A tensor in the list.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub name: String,
    /// Sizes, the outermost dimension first.
    pub shape: Vec<i64>,
    pub encoding: Encoding,
    /// Bytes in the file.
    pub place: Range<u64>,
}

/// An opened file, without the tensors' values.
#[derive(Debug)]
pub(super) struct GgufFile {
    pub path: PathBuf,
    pub file: File,
    pub metadata: HashMap<String, Value>,
    pub tensors: Vec<TensorInfo>,
}

impl GgufFile {
    /// Opens the file at `path`, and reads its header.
    ///
    /// # Errors
    /// [`Error::Broken`] or [`Error::Tensor`] for a file that is cut off or contradicts itself.
    pub fn open(path: &Path) -> Result<GgufFile> {
        let unreadable = |source| Error::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        let len = file.metadata().map_err(unreadable)?.len();
        let left = len.min(MOST_HEADER_BYTES);
        let mut header = Header { path, input: BufReader::new(&file), at: 0, left, is_whole: left == len };
        let (tensor_count, key_count) = header.start()?;
        let metadata = header.metadata(key_count)?;
        let listed = header.tensors(tensor_count)?;
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(&Value::Integer(alignment @ 1..=0x10_0000)) => alignment as u64,
            Some(value) => return Err(header.broken(format!("`general.alignment` is {value:?}"))),
        };
        let values = header.at.next_multiple_of(alignment);
        let tensors = placed(path, listed, values, alignment, len)?;
        Ok(GgufFile { path: path.to_owned(), file, metadata, tensors })
    }
}

/// The part of a file that is not yet read.
struct Header<'a> {
    path: &'a Path,
    input: BufReader<&'a File>,
    /// Bytes that are read.
    at: u64,
    /// Bytes that may still be read.
    left: u64,
    /// True if these are all of the file's.
    is_whole: bool,
}

impl Header<'_> {
    fn broken(&self, problem: String) -> Error {
        Error::Broken { path: self.path.to_owned(), problem }
    }

    /// Returns an error unless `bytes` are left.
    fn expect(&self, bytes: u64) -> Result<()> {
        match (bytes <= self.left, self.is_whole) {
            (true, _) => Ok(()),
            (false, true) => {
                let problem = "it ends within its header: download it again".to_owned();
                Err(self.broken(problem))
            }
            (false, false) => {
                Err(self.broken(format!("its header has more than {} MiB", MOST_HEADER_BYTES >> 20)))
            }
        }
    }

    fn bytes(&mut self, count: u64) -> Result<Vec<u8>> {
        self.expect(count)?;
        let mut bytes = vec![0; count as usize];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn array<const WIDTH: usize>(&mut self) -> Result<[u8; WIDTH]> {
        self.expect(WIDTH as u64)?;
        let mut bytes = [0; WIDTH];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        let read = self.input.read_exact(bytes);
        read.map_err(|source: io::Error| Error::Read { path: self.path.to_owned(), source })?;
        self.at += bytes.len() as u64;
        self.left -= bytes.len() as u64;
        Ok(())
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a number of items, each of at least `least` bytes.
    fn count(&mut self, least: u64, what: &str) -> Result<u64> {
        let count = self.u64()?;
        match count.checked_mul(least) {
            Some(bytes) if bytes <= self.left => Ok(count),
            _ => {
                let left = self.left;
                Err(self.broken(format!("it lists {count} {what}, more than the {left} bytes left can hold")))
            }
        }
    }

    /// Reads the magic number, the version and both counts: of tensors and of keys.
    fn start(&mut self) -> Result<(u64, u64)> {
        let mut start = self.bytes(self.left.min(4))?;
        if start != MAGIC {
            start.extend(self.bytes(self.left.min(60))?);
            return Err(match is_lfs_pointer(&start) {
                true => Error::Pointer { path: self.path.to_owned() },
                false => self.broken("it does not begin with `GGUF`".to_owned()),
            });
        }
        match self.u32()? {
            2 | 3 => {}
            version @ (0x0200_0000 | 0x0300_0000) => {
                let version = version.swap_bytes();
                return Err(self.broken(format!("its version {version} is big-endian, which is not read")));
            }
            version => {
                return Err(self.broken(format!("it has version {version} of GGUF, must be 2 or 3")));
            }
        }
        let tensors = self.count(LEAST_TENSOR_BYTES, "tensors")?;
        Ok((tensors, self.count(LEAST_KEY_BYTES, "keys")?))
    }

    fn text(&mut self, what: &str) -> Result<String> {
        let length = self.count(1, what)?;
        let bytes = self.bytes(length)?;
        String::from_utf8(bytes).map_err(|_| self.broken(format!("{what} is not UTF-8")))
    }

    fn metadata(&mut self, count: u64) -> Result<HashMap<String, Value>> {
        let mut metadata = HashMap::new();
        for _ in 0..count {
            let key = self.text("bytes of a key")?;
            let kind = self.u32()?;
            let value = self.value(&key, kind)?;
            if metadata.contains_key(&key) {
                return Err(self.broken(format!("the key `{key}` is there twice")));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<Value> {
        Ok(match kind {
            6 => Value::Number(widened(f32::from_le_bytes(self.array()?))),
            7 => Value::Bool(self.integer(key, kind)? != 0),
            8 => Value::Text(self.text(&format!("bytes of `{key}`"))?),
            9 => self.list(key)?,
            12 => Value::Number(f64::from_le_bytes(self.array()?)),
            _ => Value::Integer(self.integer(key, kind)?),
        })
    }

    fn list(&mut self, key: &str) -> Result<Value> {
        let kind = self.u32()?;
        let items = format!("items of `{key}`");
        Ok(match kind {
            6 => {
                let count = self.count(4, &items)?;
                let bytes = self.bytes(count * 4)?;
                Value::Numbers(bytes.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)).collect())
            }
            8 => {
                let count = self.count(8, &items)?;
                Value::Texts((0..count).map(|_| self.text(&items)).collect::<Result<_>>()?)
            }
            _ => {
                let count = self.count(1, &items)?;
                Value::Integers((0..count).map(|_| self.integer(key, kind)).collect::<Result<_>>()?)
            }
        })
    }

    fn integer(&mut self, key: &str, kind: u32) -> Result<i64> {
        Ok(match kind {
            0 | 7 => i64::from(u8::from_le_bytes(self.array()?)),
            1 => i64::from(i8::from_le_bytes(self.array()?)),
            2 => i64::from(u16::from_le_bytes(self.array()?)),
            3 => i64::from(i16::from_le_bytes(self.array()?)),
            4 => i64::from(self.u32()?),
            5 => i64::from(i32::from_le_bytes(self.array()?)),
            // Counts and sizes; a larger one is none.
            10 => i64::try_from(self.u64()?)
                .map_err(|_| self.broken(format!("`{key}` has a number of more than 63 bits")))?,
            11 => i64::from_le_bytes(self.array()?),
            _ => return Err(self.broken(format!("`{key}` has the type {kind}, which is not read"))),
        })
    }

    /// Reads the list of tensors, with offsets that begin behind the header.
    fn tensors(&mut self, count: u64) -> Result<Vec<Listed>> {
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        for _ in 0..count {
            let name = self.text("bytes of a tensor's name")?;
            if !names.insert(name.clone()) {
                return Err(self.broken(format!("the tensor `{name}` is there twice")));
            }
            let dimensions = self.u32()?;
            if !(1..=MOST_DIMENSIONS).contains(&dimensions) {
                let problem = format!("has {dimensions} dimensions, must have 1 to {MOST_DIMENSIONS}");
                return Err(tensor(self.path, &name, problem));
            }
            let mut shape = (0..dimensions).map(|_| self.u64()).collect::<Result<Vec<u64>>>()?;
            // The file has the innermost dimension first.
            shape.reverse();
            tensors.push(Listed { name, shape, kind: self.u32()?, offset: self.u64()? });
        }
        Ok(tensors)
    }
}

/// A tensor as the list has it.
struct Listed {
    name: String,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

/// Finds the tensors' bytes in a file of `len` bytes, whose values begin at `values`. No two may overlap.
fn placed(
    path: &Path,
    listed: Vec<Listed>,
    values: u64,
    alignment: u64,
    len: u64,
) -> Result<Vec<TensorInfo>> {
    let mut tensors = Vec::with_capacity(listed.len());
    for Listed { name, shape, kind, offset } in listed {
        let refuse = |problem: String| tensor(path, &name, problem);
        let encoding = Encoding::of_gguf(kind).ok_or_else(|| refuse(not_read(kind)))?;
        let (in_block, width) = encoding.block().expect("types in the list are read");
        let row = shape.last().copied().unwrap_or_default();
        if !row.is_multiple_of(in_block as u64) {
            return Err(refuse(format!(
                "has rows of {row} values, must be a multiple of {in_block} in this type"
            )));
        }
        let count = shape.iter().try_fold(1_u64, |count, size| count.checked_mul(*size));
        let bytes = count.and_then(|count| (count / in_block as u64).checked_mul(width as u64));
        let start = values.checked_add(offset);
        let place = start.zip(bytes).and_then(|(start, bytes)| Some(start..start.checked_add(bytes)?));
        let place = place
            .filter(|place| place.end <= len)
            .ok_or_else(|| refuse(format!("ends behind the file's {len} bytes: download it again")))?;
        if bytes == Some(0) || !offset.is_multiple_of(alignment) {
            return Err(refuse(format!("of shape {shape:?} begins at {offset}, or is empty")));
        }
        let shape = shape.into_iter().map(|size| size as i64).collect();
        tensors.push(TensorInfo { name, shape, encoding, place });
    }
    tensors.sort_by_key(|tensor| tensor.place.start);
    match tensors.windows(2).find(|pair| pair[0].place.end > pair[1].place.start) {
        None => Ok(tensors),
        Some(pair) => Err(tensor(path, &pair[1].name, format!("begins within `{}`", pair[0].name))),
    }
}

/// Returns the error for a type that is not read.
fn not_read(kind: u32) -> String {
    let name = match kind {
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16..=23 | 29 => "an IQ type",
        34 | 35 => "a TQ type",
        39 => "MXFP4",
        _ => "unknown",
    };
    format!(
        "has the type {kind} ({name}), must be F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K: \
         take a file of another quantization"
    )
}

fn tensor(path: &Path, name: &str, problem: String) -> Error {
    Error::Tensor { path: path.to_owned(), name: name.to_owned(), problem }
}

/// Returns the number with the same shortest decimals: 0.00001 is stored as 0.0000099999997 in 32 bits.
fn widened(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| f64::from(number))
}
