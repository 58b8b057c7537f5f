//! Models and data sets by their names on the hub, found in the local cache of Hugging Face's tools.
//!
//! ```text
//! models--ORG--NAME/refs/main          the commit that `main` is
//! models--ORG--NAME/snapshots/COMMIT/  the files of a commit
//! ```

use std::env;
use std::fmt;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{Error, Result};

/// First parts of paths that are usual folders, and never owners on the hub.
const FOLDERS: [&str; 6] = ["models", "data", "datasets", "runs", "checkpoints", "configs"];

/// The local cache, and permission to fill it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hub {
    /// Folder of the cache; `None` without a home folder.
    pub cache: Option<PathBuf>,
    /// True if a missing model or data set is downloaded.
    pub downloads: bool,
}

/// Kind of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

/// Name of a repository on the hub, `ORG/NAME` or `ORG/NAME@REVISION`, with a path inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    kind: Kind,
    /// `ORG/NAME`.
    repository: String,
    /// Branch, tag or commit; `None` for `main`.
    revision: Option<String>,
    /// File or pattern inside; empty for all of it.
    inside: PathBuf,
}

impl Hub {
    /// The cache that Hugging Face's tools use in this process's environment.
    pub fn of_environment(downloads: bool) -> Self {
        let folder = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = || {
            let all = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
            folder("HF_HOME").or_else(|| Some(all?.join("huggingface")))
        };
        let named = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE"));
        Self { cache: named.or_else(|| Some(home()?.join("hub"))), downloads }
    }

    /// Path of the named file or folder in the cache; `None` if it is not there.
    pub fn cached(&self, name: &Name) -> Option<PathBuf> {
        let folder = self.cache.as_ref()?.join(name.folder());
        let revision = name.revision.as_deref().unwrap_or("main");
        let commit = std::fs::read_to_string(folder.join("refs").join(revision));
        let commit = commit.as_deref().map_or(revision, str::trim);
        let snapshot = folder.join("snapshots").join(commit);
        // Also with a revision like `..`, nothing outside is found.
        let is_plain = Path::new(commit).components().all(|part| matches!(part, Component::Normal(_)));
        (is_plain && snapshot.is_dir()).then(|| snapshot.join(&name.inside))
    }

    /// [`Self::cached`], after a download if it is not there and downloads are allowed.
    ///
    /// # Errors
    /// The reason, a sentence.
    pub fn find(&self, name: &Name) -> Result<PathBuf, String> {
        if let Some(path) = self.cached(name) {
            return Ok(path);
        }
        let missing = || {
            let cache =
                self.cache.as_ref().map_or("(no home folder)".into(), |cache| cache.display().to_string());
            format!("{name} is not in the hub's cache, {cache}")
        };
        if !self.downloads {
            return Err(missing());
        }
        self.download(name)?;
        self.cached(name).ok_or_else(missing)
    }

    /// The folder at `path`, or that of the model with this name.
    ///
    /// # Errors
    /// [`Error::NotFetched`], or [`Error::Model`] if `path` can be no name.
    pub fn model(&self, path: &Path) -> Result<PathBuf> {
        if path.exists() {
            return Ok(path.to_owned());
        }
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let Some(name) = Name::of_model(path) else {
            let missing = anyroll_models::hf::Error::NoFolder { path: absolute };
            return Err(anyroll_models::Error::from(missing).into());
        };
        let command = name.command();
        self.find(&name).map_err(|problem| Error::NotFetched { path: absolute, problem, command })
    }

    /// Runs Hugging Face's program for downloads, whose output goes to standard error.
    fn download(&self, name: &Name) -> Result<(), String> {
        const PROGRAMS: [&str; 2] = ["hf", "huggingface-cli"];
        for program in PROGRAMS {
            eprintln!("downloading: {program} {}", name.arguments().join(" "));
            let mut command = Command::new(program);
            command.args(name.arguments()).stdin(Stdio::null()).stdout(Stdio::null());
            if let Some(cache) = &self.cache {
                command.env("HF_HUB_CACHE", cache);
            }
            match command.status() {
                Ok(status) if status.success() => return Ok(()),
                Ok(status) => return Err(format!("`{program}` could not download {name}: {status}")),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(format!("`{program}` cannot be started: {error}")),
            }
        }
        Err(format!(
            "{name} cannot be downloaded: neither `hf` nor `huggingface-cli` is in PATH; \
             `pip install huggingface_hub` installs them"
        ))
    }
}

impl Name {
    /// Reads `path` as the name of a model; `None` if it can only be a path.
    pub fn of_model(path: &Path) -> Option<Self> {
        Self::of(Kind::Model, path).filter(|name| name.inside.as_os_str().is_empty())
    }

    /// Reads `path` as the name of a data set with a file in it, such as `ORG/NAME/train-*.parquet`.
    pub fn of_data(path: &Path) -> Option<Self> {
        Self::of(Kind::Dataset, path)
    }

    fn of(kind: Kind, path: &Path) -> Option<Self> {
        let text = path.to_str()?;
        let (owner, rest) = text.split_once('/')?;
        let (name, inside) = rest.split_once('/').unwrap_or((rest, ""));
        // A branch such as `refs/pr/1` has slashes, which a file inside cannot be told from.
        let (name, revision) = match name.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (name, None),
        };
        let is_word = |word: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            word.starts_with(|c: char| c.is_ascii_alphanumeric()) && word.chars().all(is_plain)
        };
        let is_name = [Some(owner), Some(name), revision].into_iter().flatten().all(is_word)
            && !FOLDERS.contains(&owner)
            && !name.ends_with(".gguf")
            && Path::new(inside).components().all(|part| matches!(part, Component::Normal(_)));
        is_name.then(|| Self {
            kind,
            repository: format!("{owner}/{name}"),
            revision: revision.map(str::to_owned),
            inside: inside.into(),
        })
    }

    /// Name of the model whose snapshot in the cache is the folder `path`, with its revision if that is not a commit
    /// that `main` names.
    pub fn of_snapshot(path: &Path) -> Option<Self> {
        let commit = path.file_name()?.to_str()?;
        let snapshots = path.parent().filter(|parent| parent.ends_with("snapshots"))?;
        let folder = snapshots.parent()?;
        let (owner, name) = folder.file_name()?.to_str()?.strip_prefix("models--")?.split_once("--")?;
        let main = std::fs::read_to_string(folder.join("refs/main"));
        let is_main = main.is_ok_and(|main| main.trim() == commit);
        Some(Self {
            kind: Kind::Model,
            repository: format!("{owner}/{name}"),
            revision: (!is_main).then(|| commit.to_owned()),
            inside: PathBuf::new(),
        })
    }

    /// `ORG/NAME`, without a revision.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Branch, tag or commit; `None` for `main`.
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The command that downloads it.
    pub fn command(&self) -> String {
        format!("hf {}", self.arguments().join(" "))
    }

    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["download".to_owned(), self.repository.clone()];
        if self.kind == Kind::Dataset {
            arguments.extend(["--repo-type".to_owned(), "dataset".to_owned()]);
        }
        if let Some(revision) = &self.revision {
            arguments.extend(["--revision".to_owned(), revision.clone()]);
        }
        arguments
    }

    /// Folder of the repository in the cache.
    fn folder(&self) -> String {
        let kind = match self.kind {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        };
        format!("{kind}--{}", self.repository.replace('/', "--"))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Model => "model",
            Kind::Dataset => "data set",
        };
        write!(f, "the {kind} {}", self.repository)?;
        self.revision.as_ref().map_or(Ok(()), |revision| write!(f, " at {revision}"))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn name(text: &str) -> Option<String> {
        Name::of_model(Path::new(text)).map(|name| name.command())
    }

    #[test]
    fn names_are_told_from_paths() {
        assert_eq!(name("Qwen/Qwen2.5-0.5B").unwrap(), "hf download Qwen/Qwen2.5-0.5B");
        assert_eq!(name("a/b@v1.0").unwrap(), "hf download a/b --revision v1.0");
        for path in [
            "models/a", "a", "a/b/c", "./a/b", "/a/b", "../a", "a/..", "a/b.gguf", "a/-b", "a b/c", "a/b@",
            "",
        ] {
            assert_eq!(name(path), None, "{path}");
        }
        let data = Name::of_data(Path::new("openai/gsm8k@r/main/train-*.parquet")).unwrap();
        assert_eq!(data.command(), "hf download openai/gsm8k --repo-type dataset --revision r");
        assert_eq!(data.inside, Path::new("main/train-*.parquet"));
        assert!(
            Name::of_data(Path::new("a/b/../c")).is_none()
                && Name::of_data(Path::new("data/b.jsonl")).is_none()
        );
    }

    #[test]
    fn a_snapshot_is_found_by_branch_and_by_commit() {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("models--a--b");
        for commit in ["c0", "c1"] {
            fs::create_dir_all(folder.join("snapshots").join(commit)).unwrap();
        }
        fs::create_dir(folder.join("refs")).unwrap();
        fs::write(folder.join("refs/main"), "c1\n").unwrap();
        fs::write(folder.join("refs/old"), "c0").unwrap();
        fs::write(folder.join("refs/out"), "../../..").unwrap();
        let hub = Hub { cache: Some(cache.path().to_owned()), downloads: false };
        let find = |text: &str| hub.find(&Name::of_model(Path::new(text)).unwrap());
        for (text, commit) in [("a/b", "c1"), ("a/b@main", "c1"), ("a/b@old", "c0"), ("a/b@c0", "c0")] {
            let path = folder.join("snapshots").join(commit);
            assert_eq!(find(text), Ok(path.clone()));
            let back = Name::of_snapshot(&path).unwrap();
            assert_eq!(back.repository(), "a/b");
            assert_eq!(back.revision(), (commit == "c0").then_some("c0"));
        }
        for text in ["a/c", "a/b@c2", "a/b@out"] {
            let problem = find(text).unwrap_err();
            assert!(
                problem.contains("is not in the hub's cache") && problem.contains("the model a/"),
                "{problem}"
            );
        }
        assert_eq!(Name::of_snapshot(&folder), None);
    }
}
