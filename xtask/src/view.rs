//! The link view: the part of a torch installation that the workspace is built against.
//!
//! `torch-sys` links every libtorch library it finds. The view contains only the two that work everywhere, so
//! that a binary starts without GPU libraries. Its `libtorch.so` is a linker script that names them:
//!
//! ```text
//! .torch/view/include -> torch/include
//!             lib/libtorch_cpu.so, lib/libc10.so -> torch/lib/...
//!             lib/libtorch.so = INPUT ( -ltorch_cpu -lc10 )
//!             build-version = 2.11.0
//! ```

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyroll_libtorch::{Torch, VERSION};

use crate::error::{Error, Result};

const LIBRARIES: [&str; 2] = ["libtorch_cpu.so", "libc10.so"];
const LINKER_SCRIPT: &str = "INPUT ( -ltorch_cpu -lc10 )\n";

/// The folder in `LIBTORCH`.
pub struct View {
    folder: PathBuf,
}

impl View {
    /// Refers to the view in `folder`, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Returns the torch that the view links to, if both are complete.
    pub fn torch(&self) -> Option<Torch> {
        let library = fs::read_link(self.folder.join("lib").join(LIBRARIES[0])).ok()?;
        let torch = Torch::open(library.parent()?).ok()?;
        self.shows(&torch).then_some(torch)
    }

    /// Links the view to `torch`. Written under a temporary name first, so that it is never incomplete.
    pub fn write(&self, torch: &Torch) -> Result<()> {
        if self.shows(torch) {
            return Ok(());
        }
        let aside = self.folder.with_extension("new");
        let write = || {
            remove(&aside)?;
            fs::create_dir_all(aside.join("lib"))?;
            symlink(include(torch), aside.join("include"))?;
            for name in LIBRARIES {
                symlink(torch.lib.join(name), aside.join("lib").join(name))?;
            }
            fs::write(aside.join("lib/libtorch.so"), LINKER_SCRIPT)?;
            fs::write(aside.join("build-version"), VERSION)?;
            remove(&self.folder)?;
            fs::rename(&aside, &self.folder)
        };
        write().map_err(|error| Error::io("write", &self.folder, error))
    }

    fn shows(&self, torch: &Torch) -> bool {
        let links_to = |link: PathBuf, to: PathBuf| fs::read_link(link).is_ok_and(|it| it == to);
        let reads =
            |file: &str, text: &str| fs::read_to_string(self.folder.join(file)).is_ok_and(|it| it == text);
        include(torch).join("torch/csrc/api/include/torch/torch.h").is_file()
            && links_to(self.folder.join("include"), include(torch))
            && LIBRARIES.iter().all(|name| links_to(self.folder.join("lib").join(name), torch.lib.join(name)))
            && reads("lib/libtorch.so", LINKER_SCRIPT)
            && reads("build-version", VERSION)
    }
}

/// Returns the folder of headers, next to the libraries.
fn include(torch: &Torch) -> PathBuf {
    torch.lib.with_file_name("include")
}

/// Removes a folder if it exists.
pub fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
