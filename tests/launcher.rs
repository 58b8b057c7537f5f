//! The programs on a machine where libtorch is elsewhere than where they were built.
//!
//! In the tested copies, every occurrence of the folder they were built against is overwritten with one that
//! does not exist, as on another machine.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_anyroll");
const ENGINE: &str = env!("CARGO_BIN_EXE_anyroll-engine");
const BUILT: &str = env!("ANYROLL_TORCH_LIB_BUILT");

/// A folder with the two programs, as if copied from the build machine.
struct Moved {
    folder: TempDir,
}

impl Moved {
    fn new() -> Self {
        let moved = Self { folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() };
        fs::create_dir(moved.at("no-programs")).unwrap();
        for (program, name) in [(LAUNCHER, "anyroll"), (ENGINE, "anyroll-engine")] {
            let mut bytes = fs::read(program).unwrap();
            assert!(overwrite(&mut bytes, BUILT.as_bytes()) > 0, "{program} does not name {BUILT}");
            moved.program(name, &bytes);
        }
        moved
    }

    /// Writes a program through another process. Programs started by parallel tests inherit a file open for
    /// writing, and until those have started the kernel refuses to run it.
    fn program(&self, name: &str, bytes: &[u8]) {
        let aside = self.at("aside");
        fs::write(&aside, bytes).unwrap();
        let installed = Command::new("install").arg(&aside).arg(self.at(name)).status();
        assert!(installed.unwrap().success());
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// Starts a program without anything in its environment that leads to a torch.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.at(program));
        command.arg("--version").env_clear().env("PATH", self.at("no-programs"));
        command
    }

    /// Runs the launcher, and asserts that the engine ran with the libraries in `lib`.
    #[track_caller]
    fn runs_on(&self, lib: &Path, command: &mut Command) {
        // The loader itself prints the file that it uses.
        let output = command.env("LD_DEBUG", "files").output().unwrap();
        let loader = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{loader}");
        assert!(String::from_utf8_lossy(&output.stdout).starts_with("anyroll "));
        let loaded = format!("calling init: {}", lib.join("libtorch_cpu.so").display());
        assert!(loader.contains(&loaded), "no {loaded:?} in {loader}");
    }

    #[track_caller]
    fn fails_with(&self, reason: &str, command: &mut Command) -> String {
        let output = command.output().unwrap();
        let text = error_text(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.lines().next().unwrap_or_default().contains(reason),
            "no {reason:?} in the first line of {text}"
        );
        text
    }
}

fn error_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Overwrites each `needle` with a path of the same length that does not exist, and counts them.
fn overwrite(bytes: &mut [u8], needle: &[u8]) -> usize {
    let mut gone = b"/does/not/exist/".to_vec();
    gone.resize(needle.len(), b'x');
    let mut count = 0;
    let mut start = 0;
    while let Some(found) = bytes[start..].windows(needle.len()).position(|it| it == needle) {
        start += found;
        bytes[start..start + needle.len()].copy_from_slice(&gone);
        count += 1;
    }
    count
}

#[test]
fn the_built_programs_need_no_environment() {
    let mut command = Command::new(LAUNCHER);
    let output = command.arg("--version").env_clear().output().unwrap();
    assert!(output.status.success(), "{}", error_text(&output));
}

#[test]
fn a_moved_program_finds_torch_elsewhere() {
    let moved = Moved::new();
    // Without help the loader finds nothing: the rest is the launcher's work.
    let alone = moved.command("anyroll-engine").output().unwrap();
    assert!(!alone.status.success());
    assert!(error_text(&alone).contains("libtorch_cpu.so: cannot open shared object file"));

    let lib = moved.at("elsewhere/torch-lib");
    fs::create_dir(moved.at("elsewhere")).unwrap();
    symlink(BUILT, &lib).unwrap();
    moved.runs_on(&lib, moved.command("anyroll").env("ANYROLL_TORCH_LIB", &lib));

    let site = moved.at("venv/lib/python3.11/site-packages");
    fs::create_dir_all(&site).unwrap();
    symlink(Path::new(BUILT).parent().unwrap(), site.join("torch")).unwrap();
    moved.runs_on(&site.join("torch/lib"), moved.command("anyroll").env("VIRTUAL_ENV", moved.at("venv")));

    // A real interpreter that has this torch.
    let path = std::env::var_os("PATH").unwrap();
    let mut command = moved.command("anyroll");
    moved.runs_on(&site.join("torch/lib"), command.env("PATH", path).env("PYTHONPATH", &site));

    // With a link next to the programs no environment is needed, not even the launcher.
    symlink(BUILT, moved.at("torch-lib")).unwrap();
    moved.runs_on(&moved.at("torch-lib"), &mut moved.command("anyroll"));
    assert!(moved.command("anyroll-engine").output().unwrap().status.success());
}

/// `site-packages/anyroll/bin` and `site-packages/torch`, as pip installs both.
#[test]
fn programs_of_a_python_package_find_the_torch_beside_it() {
    let moved = Moved::new();
    let bin = "site-packages/anyroll/bin";
    fs::create_dir_all(moved.at(bin)).unwrap();
    for program in ["anyroll", "anyroll-engine"] {
        fs::rename(moved.at(program), moved.at(bin).join(program)).unwrap();
    }
    let launcher = format!("{bin}/anyroll");
    moved.fails_with("no torch 2.11.0 found", &mut moved.command(&launcher));
    symlink(Path::new(BUILT).parent().unwrap(), moved.at("site-packages/torch")).unwrap();
    moved.runs_on(&moved.at(bin).join("../../torch/lib"), &mut moved.command(&launcher));
    // The engine finds it alone, as the ranks of another launcher start it.
    assert!(moved.command(&format!("{bin}/anyroll-engine")).output().unwrap().status.success());
}

#[test]
fn a_torch_of_another_version_is_refused() {
    let moved = Moved::new();
    let package = moved.at("venv/lib/python3.11/site-packages/torch");
    fs::create_dir_all(package.join("lib")).unwrap();
    fs::write(package.join("version.py"), "__version__ = '2.10.0+cpu'\n").unwrap();
    let mut command = moved.command("anyroll");
    moved.fails_with("torch 2.10.0+cpu in", command.env("ANYROLL_TORCH_LIB", package.join("lib")));
    let mut command = moved.command("anyroll");
    let text = moved.fails_with("no torch 2.11.0 found", command.env("VIRTUAL_ENV", moved.at("venv")));
    assert!(text.contains("torch 2.10.0+cpu in"), "{text}");
}

#[test]
fn says_what_was_tried_and_what_to_do() {
    let moved = Moved::new();
    let text = moved.fails_with("no torch 2.11.0 found", &mut moved.command("anyroll"));
    for part in [
        "ANYROLL_TORCH_LIB: not set",
        "/does/not/exist/",
        "VIRTUAL_ENV",
        "python3",
        "pip install torch==2.11.0",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    fs::remove_file(moved.at("anyroll-engine")).unwrap();
    moved.fails_with("anyroll-engine is missing", &mut moved.command("anyroll"));
}

#[test]
fn arguments_and_exit_code_pass_through() {
    let moved = Moved::new();
    symlink(BUILT, moved.at("torch-lib")).unwrap();
    moved.program("anyroll-engine", b"#!/bin/sh\necho \"$@\"\necho \"[$LD_LIBRARY_PATH]\"\nexit 9\n");
    let run = |command: &mut Command| {
        let output = command.args(["run", "a b"]).output().unwrap();
        assert_eq!(output.status.code(), Some(9), "{}", error_text(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(run(&mut moved.command("anyroll")), "--version run a b\n[]\n");

    // A user's search path is kept, after a torch that it would hide.
    let other = moved.at("other");
    fs::create_dir(&other).unwrap();
    let mut command = moved.command("anyroll");
    let kept = format!("--version run a b\n[{}]\n", other.display());
    assert_eq!(run(command.env("LD_LIBRARY_PATH", &other)), kept);
    fs::write(other.join("libtorch_cpu.so"), "").unwrap();
    let mut command = moved.command("anyroll");
    let ours = moved.at("torch-lib");
    let first = format!("--version run a b\n[{}:{}]\n", ours.display(), other.display());
    assert_eq!(run(command.env("LD_LIBRARY_PATH", &other)), first);
}

#[test]
fn libtorch_is_told_how_to_hold_memory_unless_the_user_does() {
    let moved = Moved::new();
    symlink(BUILT, moved.at("torch-lib")).unwrap();
    moved.program("anyroll-engine", b"#!/bin/sh\necho \"$PYTORCH_ALLOC_CONF, $PYTORCH_CUDA_ALLOC_CONF\"\n");
    let told = |command: &mut Command| String::from_utf8(command.output().unwrap().stdout).unwrap();
    let names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];
    let command = || {
        let mut command = moved.command("anyroll");
        for name in names {
            command.env_remove(name);
        }
        command
    };
    assert_eq!(told(&mut command()), "expandable_segments:True, \n");
    assert_eq!(told(command().env(names[0], "backend:native")), "backend:native, \n");
    assert_eq!(told(command().env(names[1], "max_split_size_mb:512")), ", max_split_size_mb:512\n");
}
