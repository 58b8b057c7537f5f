//! Safetensors files, a single one or several with an index: headers are read on opening, values by range.
//!
//! Values are read with positioned reads and not through a memory map. A file that shrinks in the meantime is
//! then an error instead of a crash, and a rank reads only its ranges either way.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use super::{Error, Result, is_lfs_pointer, read_json};
use crate::model::{ParamSpec, Unit};

/// Implements [`WeightSource`](crate::init::WeightSource) for a type with [`WeightFiles`] in its field
/// `weights`.
macro_rules! reads_files {
    ($source:ty) => {
        impl crate::init::WeightSource for $source {
            fn read(
                &self,
                spec: &crate::model::ParamSpec,
                range: std::ops::Range<usize>,
                values: &mut [f32],
            ) -> crate::Result<()> {
                Ok(self.weights.read(spec, range, values)?)
            }
        }
    };
}
pub(super) use reads_files;

/// Maximum number of bytes that a read holds at a time.
const CHUNK_BYTES: usize = 1 << 22;

/// Returns the name of the index of several files that begin with `stem`.
pub(super) fn index_name(stem: &str) -> String {
    format!("{stem}.safetensors.index.json")
}

/// Returns an error if no folder in `model` has weights of the `variant`.
pub(super) fn check_variant(model: &Path, variant: Option<&str>) -> Result<()> {
    let Some(variant) = variant else { return Ok(()) };
    let entries = fs::read_dir(model).map_err(|source| Error::Read { path: model.to_owned(), source })?;
    let has = |folder: &Path| variants(folder).iter().any(|found| found == variant);
    match entries.flatten().any(|entry| has(&entry.path())) {
        true => Ok(()),
        false => {
            let problem = format!("no folder in it has weights of the variant `{variant}`");
            Err(Error::Variant { path: model.to_owned(), problem })
        }
    }
}

/// Returns the variants of weights in a folder, sorted. A variant is the part that diffusers inserts in a
/// file name, such as `fp16` in `model.fp16.safetensors` and `model.safetensors.index.fp16.json`.
fn variants(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut found: Vec<String> = names.filter_map(|name| variant_of(&name).map(str::to_owned)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Returns the variant of a file or an index by its name; `None` for no variant, and for a part that an index
/// lists.
fn variant_of(name: &str) -> Option<&str> {
    let inner = match name.strip_suffix(".json") {
        Some(index) => index.split_once(".safetensors.index.")?.1,
        None => name.strip_suffix(".safetensors")?.split_once('.')?.1,
    };
    let is_plain = !inner.is_empty() && inner.chars().all(|it| it.is_ascii_alphanumeric() || it == '_');
    is_plain.then_some(inner)
}

/// All tensors of a folder, by name.
#[derive(Debug)]
pub(super) struct WeightFiles {
    path: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: HashMap<String, Place>,
    metadata: HashMap<String, String>,
}

/// Location of a tensor.
#[derive(Debug)]
struct Place {
    /// Index of the file.
    file: usize,
    /// Offset of its first byte.
    offset: u64,
    dtype: Dtype,
    shape: Vec<i64>,
}

/// The field read from the index.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Creates an empty collection for the folder or file `path`.
    pub fn empty(path: &Path) -> WeightFiles {
        let (tensors, metadata) = (HashMap::new(), HashMap::new());
        WeightFiles { path: path.to_owned(), files: Vec::new(), tensors, metadata }
    }

    /// Opens the files of the folder `path` whose names begin with `stem`, and reads their headers.
    pub fn open(path: &Path, stem: &str) -> Result<WeightFiles> {
        Self::open_named(path, &format!("{stem}.safetensors"), &index_name(stem))
    }

    /// Like [`Self::open`] for a part of a model: opens the `variant` if the folder has it, and otherwise the
    /// plain files, like diffusers.
    pub fn open_variant(path: &Path, stem: &str, variant: Option<&str>) -> Result<WeightFiles> {
        let file = |variant: &str| format!("{stem}.{variant}.safetensors");
        let index = |variant: &str| format!("{stem}.safetensors.index.{variant}.json");
        let has = |name: String| path.join(name).exists();
        if let Some(variant) = variant.filter(|variant| has(file(variant)) || has(index(variant))) {
            return Self::open_named(path, &file(variant), &index(variant));
        }
        let is_plain = has(format!("{stem}.safetensors")) || has(index_name(stem));
        match variants(path).first() {
            Some(only) if !is_plain => {
                let problem = format!("its weights exist only as the variant `{only}`: request that variant");
                Err(Error::Variant { path: path.to_owned(), problem })
            }
            _ => Self::open(path, stem),
        }
    }

    /// Opens the files that `index` lists if it exists, and otherwise `file`. Warns of a `file` that the index leaves out.
    fn open_named(path: &Path, file: &str, index: &str) -> Result<WeightFiles> {
        let mut weights = WeightFiles::empty(path);
        let index_path = path.join(index);
        if !index_path.exists() {
            weights.add_file(&path.join(file))?;
            return Ok(weights);
        }
        let index: Index = read_json(&index_path)?;
        let mut names: Vec<&str> = index.weight_map.values().map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        if path.join(file).exists() && !names.contains(&file) {
            let (path, index) = (path.display(), index_path.display());
            tracing::warn!("{path} has both {file} and an index: the files that {index} names are read");
        }
        for name in names {
            let is_plain = Path::new(name).file_name().is_some_and(|file| file == name);
            if !is_plain {
                return Err(broken(
                    &index_path,
                    format!("`{name}` is not the name of a file in the same folder"),
                ));
            }
            weights.add_file(&path.join(name))?;
        }
        for (tensor, file) in &index.weight_map {
            let found = weights.tensors.get(tensor).map(|place| &weights.files[place.file].0);
            if found != Some(&path.join(file)) {
                return Err(broken(
                    &index_path,
                    format!("`{tensor}` is not in {file}, where the index lists it"),
                ));
            }
        }
        Ok(weights)
    }

    /// Opens a single file and reads its header.
    pub fn open_file(path: &Path) -> Result<WeightFiles> {
        let mut weights = WeightFiles::empty(path);
        weights.add_file(path)?;
        Ok(weights)
    }

    /// Adds the tensors of `other`, which must have other names.
    pub fn join(&mut self, other: WeightFiles) {
        let first = self.files.len();
        self.files.extend(other.files);
        let moved = other
            .tensors
            .into_iter()
            .map(|(name, place)| (name, Place { file: first + place.file, ..place }));
        self.tensors.extend(moved);
    }

    /// Returns the value of `key` in a file header's metadata.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// Renames the tensors: `rename` returns each new name.
    pub fn renamed(mut self, rename: impl Fn(&str) -> String) -> Result<WeightFiles> {
        for (name, place) in std::mem::take(&mut self.tensors) {
            let path = &self.files[place.file].0;
            let new = rename(&name);
            if self.tensors.contains_key(&new) {
                return Err(broken(path, format!("`{name}` exists with and without a prefix")));
            }
            self.tensors.insert(new, place);
        }
        Ok(self)
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Returns true if there is a tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the shape of the tensor `name`, if it exists and has a supported dtype.
    pub fn shape(&self, name: &str) -> Option<&[i64]> {
        self.tensors.get(name).filter(|place| bytes_of(place.dtype).is_some()).map(|place| &place.shape[..])
    }

    /// Returns the bytes of a tensor in its file.
    pub fn bytes(&self, name: &str) -> Option<usize> {
        let values = self.shape(name)?.iter().product::<i64>() as usize;
        Some(values * bytes_of(self.tensors[name].dtype)?)
    }

    /// Returns libtorch's dtype of a tensor; its [`Self::shape`] is known.
    fn kind(&self, name: &str) -> Kind {
        match self.tensors[name].dtype {
            Dtype::BF16 => Kind::BFloat16,
            Dtype::F16 => Kind::Half,
            _ => Kind::Float,
        }
    }

    /// Checks that the tensors of `units` exist in their shapes, and no others except those that `is_known`
    /// accepts.
    pub fn check<'a>(
        &self,
        units: impl IntoIterator<Item = &'a Unit>,
        is_known: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let mut expected = HashMap::new();
        for spec in units.into_iter().flat_map(|unit| &unit.params) {
            for part in &spec.parts {
                let shape: Vec<i64> =
                    std::iter::once(part.rows).chain(spec.shape[1..].iter().copied()).collect();
                expected.insert(part.name.as_str(), shape);
            }
        }
        let mut names: Vec<&&str> = expected.keys().collect();
        names.sort_unstable();
        for name in names {
            let place = self.tensors.get(*name).ok_or_else(|| self.problem(name, "is missing".into()))?;
            let shape = &expected[name];
            if place.shape != *shape {
                let problem =
                    format!("has shape {:?}, but the configuration requires {shape:?}", place.shape);
                return Err(self.problem(name, problem));
            }
            if bytes_of(place.dtype).is_none() {
                let problem = format!("is {:?}, must be F32, BF16 or F16", place.dtype);
                return Err(self.problem(name, problem));
            }
        }
        let mut others: Vec<&String> = self.tensors.keys().collect();
        others.retain(|name| !expected.contains_key(name.as_str()) && !is_known(name));
        match others.iter().min() {
            None => Ok(()),
            Some(name) => {
                Err(self.problem(name, "is not part of the model that the configuration describes".into()))
            }
        }
    }

    /// Returns true if two tensors begin with the same values, or if one of them does not exist.
    pub fn begins_alike(&self, one: &str, other: &str) -> Result<bool> {
        const COMPARED: usize = 1 << 16;
        let (Some(shape), Some(other_shape)) = (self.shape(one), self.shape(other)) else { return Ok(true) };
        if shape != other_shape {
            return Ok(false);
        }
        let count = COMPARED.min(shape.iter().product::<i64>() as usize);
        let read = |name: &str| {
            let mut values = vec![0.0; count];
            self.read_tensor(name, 0, &mut values).map(|()| values)
        };
        Ok(read(one)? == read(other)?)
    }

    /// Reads the values `range` of a parameter, whose parts follow one another.
    pub fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        let row = spec.elements() / spec.shape[0] as usize;
        let mut part_start = 0;
        for part in &spec.parts {
            let part_end = part_start + part.rows as usize * row;
            let (start, end) = (range.start.max(part_start), range.end.min(part_end));
            if start < end {
                let values = &mut values[start - range.start..end - range.start];
                self.read_tensor(&part.name, start - part_start, values)?;
            }
            part_start = part_end;
        }
        if spec.offset != 0.0 {
            values.iter_mut().for_each(|value| *value += spec.offset);
        }
        Ok(())
    }

    /// Reads the values of a tensor, starting with number `first`; its [`Self::shape`] is known.
    fn read_tensor(&self, name: &str, first: usize, values: &mut [f32]) -> Result<()> {
        let place = &self.tensors[name];
        let (path, file) = &self.files[place.file];
        let width = bytes_of(place.dtype).expect("checked when the folder was opened");
        let mut bytes = vec![0; CHUNK_BYTES.min(values.len() * width)];
        let mut offset = place.offset + (first * width) as u64;
        for chunk in values.chunks_mut(CHUNK_BYTES / width) {
            let bytes = &mut bytes[..chunk.len() * width];
            file.read_exact_at(bytes, offset).map_err(|source| Error::Read { path: path.clone(), source })?;
            decode(place.dtype, bytes, chunk);
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Loads a whole tensor to `device`, in its dtype in the file; its [`Self::shape`] is known.
    pub fn tensor(&self, name: &str, device: Device) -> crate::Result<Tensor> {
        let shape = self.shape(name).expect("checked when the file was opened");
        let mut values = vec![0.0; shape.iter().product::<i64>() as usize];
        self.read_tensor(name, 0, &mut values)?;
        let tensor = Tensor::f_from_slice(&values)?.f_view(shape)?;
        Ok(tensor.f_to_kind(self.kind(name))?.f_to_device(device)?)
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let unreadable = |source| Error::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(|source| missing(path, source))?;
        let len = file.metadata().map_err(unreadable)?.len();
        let mut start = vec![0; 64.min(len as usize)];
        file.read_exact_at(&mut start, 0).map_err(unreadable)?;
        if is_lfs_pointer(&start) {
            return Err(Error::Pointer { path: path.to_owned() });
        }
        if start.trim_ascii_start().starts_with(b"<") {
            return Err(broken(path, "it is a page of HTML, not weights: download it again".to_owned()));
        }
        let mut length = [0; 8];
        let short = || broken(path, format!("it has {len} bytes, too few for its header"));
        file.read_exact_at(&mut length, 0).map_err(|_| short())?;
        let header_len = u64::from_le_bytes(length);
        let data_start = header_len.checked_add(8).filter(|&start| start <= len).ok_or_else(short)?;
        let mut header = vec![0; header_len as usize];
        file.read_exact_at(&mut header, 8).map_err(unreadable)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| broken(path, format!("its header is wrong: {error}")))?;
        let expected = data_start + metadata.data_len() as u64;
        if expected != len {
            return Err(broken(path, format!("it has {len} bytes, but its header describes {expected}")));
        }
        for (name, info) in metadata.tensors() {
            let place = Place {
                file: self.files.len(),
                offset: data_start + info.data_offsets.0 as u64,
                dtype: info.dtype,
                shape: info.shape.iter().map(|&size| size as i64).collect(),
            };
            if self.tensors.insert(name.clone(), place).is_some() {
                return Err(broken(path, format!("`{name}` is in another file, too")));
            }
        }
        self.metadata.extend(metadata.metadata().clone().unwrap_or_default());
        self.files.push((path.to_owned(), file));
        Ok(())
    }

    /// Returns an error about a tensor, with the file that has it, or the folder if none does.
    pub fn problem(&self, name: &str, problem: String) -> Error {
        let file = self.tensors.get(name).map(|place| &self.files[place.file].0);
        Error::Tensor { path: file.unwrap_or(&self.path).clone(), name: name.to_owned(), problem }
    }
}

/// Returns the error of a file that cannot be opened; the same weights may exist as a pickle.
fn missing(path: &Path, source: io::Error) -> Error {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let usual = if stem == "model" { "pytorch_model" } else { &*stem };
    let pickles = [format!("{usual}.bin"), format!("{usual}.bin.index.json"), format!("{usual}.pth")];
    match pickles.into_iter().find(|name| path.with_file_name(name).exists()) {
        Some(found) if source.kind() == io::ErrorKind::NotFound => {
            Error::Pickle { path: path.parent().unwrap_or(path).to_owned(), found }
        }
        _ => Error::Read { path: path.to_owned(), source },
    }
}

/// Returns the bytes of a value, if weights may have this dtype.
fn bytes_of(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 => Some(4),
        Dtype::BF16 | Dtype::F16 => Some(2),
        _ => None,
    }
}

fn decode(dtype: Dtype, bytes: &[u8], values: &mut [f32]) {
    match dtype {
        Dtype::F32 => decode_with(bytes, values, f32::from_le_bytes),
        Dtype::BF16 => decode_with(bytes, values, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Dtype::F16 => decode_with(bytes, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
        _ => unreachable!("checked when the folder was opened"),
    }
}

fn decode_with<const WIDTH: usize>(bytes: &[u8], values: &mut [f32], decode: impl Fn([u8; WIDTH]) -> f32) {
    let (bytes, _) = bytes.as_chunks::<WIDTH>();
    for (value, bytes) in values.iter_mut().zip(bytes) {
        *value = decode(*bytes);
    }
}

fn broken(path: &Path, problem: String) -> Error {
    Error::Broken { path: path.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_no_weights_are_told_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let check = |name: &str, content: &str, stem: &str, words: &[&str]| {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            let error = WeightFiles::open(folder.path(), stem).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error} has not {words:?}");
            fs::remove_file(path).unwrap();
        };
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n";
        check("model.safetensors", pointer, "model", &["model.safetensors", "git lfs pull"]);
        check("model.safetensors.index.json", pointer, "model", &["index.json", "git lfs pull"]);
        check("model.safetensors", "<!DOCTYPE html>", "model", &["model.safetensors", "a page of HTML"]);
        check("model.safetensors", "{}", "model", &["too few for its header"]);
        check("pytorch_model.bin", "", "model", &["only as pytorch_model.bin", "save_pretrained"]);
        check("pytorch_model.bin.index.json", "{}", "model", &["only as pytorch_model.bin.index.json"]);
        check("adapter_model.bin", "", "adapter_model", &["only as adapter_model.bin"]);
        check("other.bin", "", "model", &["cannot read", "model.safetensors"]);
    }
}
