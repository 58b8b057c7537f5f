//! Cache of compiled kernels on disk.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Mutex,
};

use tempfile::NamedTempFile;

use crate::Result;

static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Caches compiled kernels in `folder`, which is created when it is needed. Call it before the first [`crate::open`]; without
/// it, each process compiles kernels.
pub fn cache_kernels_in(folder: impl Into<PathBuf>) {
    *FOLDER.lock().unwrap() = Some(folder.into());
}

/// Returns the cached image of `key`, or that of `compile`, a function of `key`: source, options and architecture among it.
pub(crate) fn cached(key: &[&[u8]], compile: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    match &*FOLDER.lock().unwrap() {
        Some(folder) => cached_in(folder, key, compile),
        None => compile(),
    }
}

fn cached_in(folder: &Path, key: &[&[u8]], compile: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    let key = joined(key);
    let path = folder.join(format!("{:08x}.kernels", crc32c::crc32c(&key)));
    if let Some(image) = fs::read(&path).ok().and_then(|entry| image_of(&entry, &key)) {
        return Ok(image);
    }
    let image = compile()?;
    if let Err(error) = store(&path, &entry(&key, &image)) {
        tracing::warn!("compiled kernels are not kept in {}: {error}", path.display());
    }
    Ok(image)
}

/// The parts with their lengths, so that different parts never make one key.
fn joined(parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::new();
    for part in parts {
        key.extend((part.len() as u64).to_le_bytes());
        key.extend(*part);
    }
    key
}

/// The checksum of all that follows, the key's length, the key, the image.
fn entry(key: &[u8], image: &[u8]) -> Vec<u8> {
    let body = [&(key.len() as u64).to_le_bytes()[..], key, image].concat();
    [&crc32c::crc32c(&body).to_le_bytes()[..], &body].concat()
}

/// The image of a whole entry for this key. Names of files are checksums, which different keys may share.
fn image_of(entry: &[u8], key: &[u8]) -> Option<Vec<u8>> {
    let (sum, body) = entry.split_first_chunk::<4>()?;
    let (len, rest) = body.split_first_chunk::<8>()?;
    let is_whole = crc32c::crc32c(body) == u32::from_le_bytes(*sum);
    let is_ours = u64::from_le_bytes(*len) == key.len() as u64;
    let image = rest.strip_prefix(key).filter(|_| is_whole && is_ours)?;
    Some(image.to_vec())
}

/// Written aside and renamed: ranks of one host write the same file at the same time.
fn store(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().expect("a file in a folder");
    fs::create_dir_all(folder)?;
    let mut file = NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_kernel_is_compiled_once_and_again_when_its_entry_is_not_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/when/needed");
        let compiled = Cell::new(0);
        let get = |key: &[&[u8]]| {
            cached_in(&path, key, || {
                compiled.set(compiled.get() + 1);
                Ok(format!("image {}", compiled.get()).into_bytes())
            })
            .unwrap()
        };
        let key: [&[u8]; 2] = [b"source", b"sm_90"];
        assert_eq!((get(&key), get(&key)), (b"image 1".to_vec(), b"image 1".to_vec()));
        assert_eq!(get(&[b"source", b"sm_80"]), b"image 2");
        assert_eq!(get(&[b"sources", b"m_90"]), b"image 3");

        let name = format!("{:08x}.kernels", crc32c::crc32c(&joined(&key)));
        let whole = fs::read(path.join(&name)).unwrap();
        let mut damaged: Vec<Vec<u8>> =
            [0, 3, 11, 20, whole.len() - 1].map(|len| whole[..len].to_vec()).into();
        damaged.extend((0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            bytes
        }));
        damaged.push(entry(&joined(&[b"another key"]), b"of the same checksum"));
        for (count, bytes) in damaged.iter().enumerate() {
            fs::write(path.join(&name), bytes).unwrap();
            let want = format!("image {}", count + 4).into_bytes();
            assert_eq!((get(&key), get(&key)), (want.clone(), want), "entry {bytes:?}");
        }
        assert_eq!(fs::read_dir(&path).unwrap().count(), 3, "nothing is left beside the entries");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_failure() {
        let file = NamedTempFile::new().unwrap();
        assert_eq!(cached_in(file.path(), &[b"key"], || Ok(vec![7])).unwrap(), [7]);
    }
}
