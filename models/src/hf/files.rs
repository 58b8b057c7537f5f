//! Files of a published model other than its weights: those of its folder, or those that a GGUF file's metadata
//! means.

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};

use super::gguf;
use super::{Error, Result, is_lfs_pointer};

/// Files of a published model other than its weights.
#[derive(Debug)]
pub struct PublishedFiles {
    /// The folder, or the GGUF file.
    path: PathBuf,
    /// Folder with files; `None` if all are made of a GGUF file.
    folder: Option<PathBuf>,
    /// Files made of a GGUF file's metadata, by name.
    made: Vec<(&'static str, Vec<u8>)>,
}

impl PublishedFiles {
    /// Finds the files of the model at `path`: a folder, a GGUF file, or a folder of one and without safetensors.
    ///
    /// # Errors
    /// [`Error::SeveralGguf`], or an error of the GGUF file.
    pub fn open(path: &Path) -> Result<PublishedFiles> {
        let Some(file) = gguf::find(path)? else {
            return Ok(PublishedFiles {
                path: path.to_owned(),
                folder: Some(path.to_owned()),
                made: Vec::new(),
            });
        };
        let made = gguf::made_files(&file)?;
        // Without a tokenizer, the other files beside it may be those of another model.
        let is_beside = !made.iter().any(|(name, _)| *name == gguf::TOKENIZER);
        let folder = file.parent().filter(|_| is_beside).map(Path::to_owned);
        Ok(PublishedFiles { path: file, folder, made })
    }

    /// Returns the path of the folder, or of the GGUF file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the place that errors name for the file `name`: its path, or the GGUF file that it is made of.
    pub fn place(&self, name: &str) -> PathBuf {
        match (&self.folder, self.is_made(name)) {
            (Some(folder), false) => folder.join(name),
            _ => self.path.clone(),
        }
    }

    /// Returns true if there is a file `name`.
    pub fn has(&self, name: &str) -> bool {
        self.is_made(name) || self.existing(name).is_some()
    }

    /// Returns the content of the file `name`.
    ///
    /// # Errors
    /// [`Error::Read`] if there is none, or [`Error::Pointer`].
    pub fn read(&self, name: &str) -> Result<Cow<'_, [u8]>> {
        if let Some((_, content)) = self.made.iter().find(|(made, _)| *made == name) {
            return Ok(content.into());
        }
        let path = self.place(name);
        let content = match &self.folder {
            Some(_) => fs::read(&path),
            None => Err(std::io::ErrorKind::NotFound.into()),
        };
        let content = content.map_err(|source| Error::Read { path: path.clone(), source })?;
        if is_lfs_pointer(&content) {
            return Err(Error::Pointer { path });
        }
        Ok(content.into())
    }

    /// Returns the paths of the files in the folder that have these names.
    pub fn copied(&self, names: &[&str]) -> Vec<PathBuf> {
        let names = names.iter().filter(|name| !self.is_made(name));
        names.filter_map(|name| self.existing(name)).collect()
    }

    /// Returns the files made of a GGUF file's metadata that have these names, with their contents.
    pub fn made(&self, names: &[&str]) -> Vec<(&'static str, Vec<u8>)> {
        self.made.iter().filter(|(name, _)| names.contains(name)).cloned().collect()
    }

    fn is_made(&self, name: &str) -> bool {
        self.made.iter().any(|(made, _)| *made == name)
    }

    fn existing(&self, name: &str) -> Option<PathBuf> {
        let path = self.folder.as_ref()?.join(name);
        path.exists().then_some(path)
    }
}
