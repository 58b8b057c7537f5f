//! A store of objects for a run's checkpoints: a bucket of S3's, Google's or Azure's kind, or a folder.
//!
//! [`Storage`] puts, gets, lists and removes objects, and every call has a deadline. What it keeps of a run, and when, is
//! [`train`](crate::train)'s.

mod http;

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant},
};

use object_store::{
    ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig, WriteMultipart, aws::AmazonS3Builder,
    azure::MicrosoftAzureBuilder, gcp::GoogleCloudStorageBuilder, local::LocalFileSystem, path::Path as Key,
};
use tokio::runtime::{Builder, Runtime};

use http::Connector;

use crate::launch;

/// Bytes of a request. Larger files travel in parts.
const PART_BYTES: usize = 32 << 20;
/// Parts in flight.
const PARTS: usize = 4;
/// Waits between two attempts: the first, and the longest.
const WAITS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];

/// An operation that a store did not do.
#[derive(Debug, thiserror::Error)]
#[error("`checkpoint.storage` {url}: cannot {action}")]
pub struct StorageError {
    url: String,
    action: String,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// `Result` with [`StorageError`].
pub type Result<T> = std::result::Result<T, StorageError>;

/// A place in a store, in which keys are relative paths.
pub struct Storage {
    url: String,
    store: Box<dyn ObjectStore>,
    prefix: Key,
    /// The place itself, if it is a folder.
    folder: Option<PathBuf>,
    /// Most time from a failure to the last attempt.
    timeout: Duration,
    runtime: Runtime,
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Storage").field(&self.url).finish()
    }
}

impl Storage {
    /// The place that `url` names, with the credentials of the environment. Nothing is sent.
    ///
    /// # Errors
    /// If the URL is not one of a store, or credentials have the wrong form.
    pub fn open(url: &str, timeout: Duration) -> Result<Self> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| StorageError {
            url: url.to_owned(),
            action: "open it".to_owned(),
            source,
        };
        let runtime = Builder::new_current_thread().enable_time().build().map_err(|it| failed(it.into()))?;
        let (store, prefix) = store(url, timeout).map_err(failed)?;
        let folder = url.strip_prefix("file://").map(PathBuf::from);
        Ok(Self { url: url.to_owned(), store, prefix, folder, timeout, runtime })
    }

    /// The place, for people.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Writes, lists and removes an object.
    ///
    /// # Errors
    /// If the store cannot be reached, or does not let this process do so.
    pub fn check(&self) -> Result<()> {
        let key = format!("probe-{}-{}", launch::host_name(), process::id());
        self.put_bytes(&key, b"anyroll")?;
        self.list("")?;
        self.remove(&key)
    }

    /// Puts a small object.
    pub fn put_bytes(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let path = self.key(key);
        self.again(&format!("write {key}"), || {
            self.runtime.block_on(self.store.put(&path, bytes.to_vec().into())).map(drop)
        })
    }

    /// Puts the content of a file.
    pub fn put_file(&self, key: &str, file: &Path) -> Result<()> {
        let path = self.key(key);
        self.again(&format!("write {key}"), || {
            let mut file = File::open(file).map_err(of_file)?;
            self.runtime.block_on(self.send(&path, &mut file))
        })
    }

    async fn send(&self, path: &Key, file: &mut File) -> object_store::Result<()> {
        let mut part = Vec::new();
        let mut next = || -> object_store::Result<Vec<u8>> {
            part.clear();
            (&mut *file).take(PART_BYTES as u64).read_to_end(&mut part).map_err(of_file)?;
            Ok(std::mem::take(&mut part))
        };
        let first = next()?;
        if first.len() < PART_BYTES {
            return self.store.put(path, first.into()).await.map(drop);
        }
        let upload = self.store.put_multipart(path).await?;
        let mut parts = WriteMultipart::new_with_chunk_size(upload, PART_BYTES);
        let mut bytes = first;
        while !bytes.is_empty() {
            parts.write(&bytes);
            let sent = match parts.wait_for_capacity(PARTS).await {
                Ok(()) => next(),
                Err(error) => Err(error),
            };
            match sent {
                Ok(more) => bytes = more,
                Err(error) => {
                    // Its parts would be paid for. One that cannot be given up ends by the bucket's own rule.
                    let _ = parts.abort().await;
                    return Err(error);
                }
            }
        }
        parts.finish().await.map(drop)
    }

    /// The bytes of a small object; `None` if there is no such object.
    pub fn get_bytes(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let path = self.key(key);
        self.again(&format!("read {key}"), || {
            let get = async { self.store.get(&path).await?.bytes().await };
            match self.runtime.block_on(get) {
                Ok(bytes) => Ok(Some(bytes.to_vec())),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    /// Writes an object of so many bytes into the new file `to`, and waits until it is on disk.
    pub fn get_file(&self, key: &str, bytes: u64, to: &Path) -> Result<()> {
        let path = self.key(key);
        let action = format!("read {key} into {}", to.display());
        let mut file = self.again(&action, || File::create(to).map_err(of_file))?;
        let mut start = 0;
        while start < bytes {
            let range = start..bytes.min(start + PART_BYTES as u64);
            let part =
                self.again(&action, || self.runtime.block_on(self.store.get_range(&path, range.clone())))?;
            file.write_all(&part).map_err(|source| self.failed(&action, source))?;
            start = range.end;
        }
        file.sync_all().map_err(|source| self.failed(&action, source))
    }

    /// Paths and lengths of the objects below `folder`, sorted. Paths are relative to the place.
    pub fn list(&self, folder: &str) -> Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        let mut folders = vec![self.key(folder)];
        while let Some(folder) = folders.pop() {
            let listed = self.again(&format!("list {folder}"), || {
                let prefix = (!folder.as_ref().is_empty()).then_some(&folder);
                self.runtime.block_on(self.store.list_with_delimiter(prefix))
            })?;
            folders.extend(listed.common_prefixes);
            found.extend(listed.objects.iter().filter_map(|object| self.relative(object)));
        }
        found.sort();
        Ok(found)
    }

    fn relative(&self, object: &ObjectMeta) -> Option<(String, u64)> {
        let path = object.location.as_ref().strip_prefix(self.prefix.as_ref())?;
        Some((path.trim_start_matches('/').to_owned(), object.size))
    }

    /// Removes an object, which may be gone already.
    pub fn remove(&self, key: &str) -> Result<()> {
        let path = self.key(key);
        self.again(&format!("remove {key}"), || match self.runtime.block_on(self.store.delete(&path)) {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            removed => removed,
        })
    }

    /// Removes all objects below `folder`.
    pub fn remove_below(&self, folder: &str) -> Result<()> {
        self.list(folder)?.iter().try_for_each(|(key, _)| self.remove(key))?;
        // A process that was killed has left parts of files, which are no objects.
        match self.folder.as_ref().map(|own| fs::remove_dir_all(own.join(folder))) {
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.failed(&format!("remove {folder}"), error))
            }
            _ => Ok(()),
        }
    }

    fn key(&self, relative: &str) -> Key {
        let parts = relative.split('/').filter(|part| !part.is_empty()).map(Into::into);
        self.prefix.parts().chain(parts).collect()
    }

    /// Tries an operation until it is done, refused or late.
    fn again<T>(&self, action: &str, attempt: impl FnMut() -> object_store::Result<T>) -> Result<T> {
        until(self.timeout, attempt).map_err(|source| self.failed(action, source))
    }

    /// The error of an action on this store's objects.
    pub fn failed(
        &self,
        action: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> StorageError {
        StorageError { url: self.url.clone(), action: action.to_owned(), source: source.into() }
    }
}

/// Makes attempts, with growing waits between them, as long as one may succeed after another.
fn until<T>(
    timeout: Duration,
    mut attempt: impl FnMut() -> object_store::Result<T>,
) -> object_store::Result<T> {
    let (started, [mut wait, longest]) = (Instant::now(), WAITS);
    loop {
        let error = match attempt() {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        if !is_passing(&error) || started.elapsed() + wait >= timeout {
            return Err(error);
        }
        tracing::debug!("{error}; tries again");
        thread::sleep(wait);
        wait = (wait * 2).min(longest);
    }
}

fn is_passing(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::Generic { .. } | object_store::Error::JoinError { .. })
}

fn of_file(source: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "file", source: source.into() }
}

type Opened = std::result::Result<(Box<dyn ObjectStore>, Key), Box<dyn std::error::Error + Send + Sync>>;

fn store(url: &str, timeout: Duration) -> Opened {
    let (scheme, rest) = url.split_once("://").ok_or("it is no URL")?;
    // A folder's path begins with the slash after an empty host.
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = Key::parse(path)?;
    let retry = retry(timeout);
    let connector = Connector { timeout };
    Ok(match scheme {
        "file" => {
            let folder = Path::new("/").join(path);
            fs::create_dir_all(&folder)?;
            let store =
                LocalFileSystem::new_with_prefix(&folder)?.with_fsync(true).with_automatic_cleanup(true);
            (Box::new(store), Key::default())
        }
        "s3" => {
            let builder = AmazonS3Builder::from_env().with_bucket_name(host).with_retry(retry);
            (Box::new(builder.with_http_connector(connector).build()?), prefix)
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(host).with_retry(retry);
            (Box::new(builder.with_http_connector(connector).build()?), prefix)
        }
        "az" => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(host).with_retry(retry);
            (Box::new(builder.with_http_connector(connector).build()?), prefix)
        }
        _ => return Err(format!("`{scheme}` is no kind of store").into()),
    })
}

/// Attempts at a request of the network. What they do not end is over.
fn retry(timeout: Duration) -> RetryConfig {
    RetryConfig { retry_timeout: timeout, max_retries: usize::MAX, ..RetryConfig::default() }
}

#[cfg(test)]
mod tests;
