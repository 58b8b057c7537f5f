//! Tests of `xtask` on machines that lack things: the whole `PATH` is a folder of fake programs.

#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A python3 that answers the two queries of set-up and installs a torch of empty files. Its first lines set
/// VERSION, MISSING, TORCH and PIP; it logs each installation.
const PYTHON: &str = r#"
PATH=/usr/bin:/bin
make_torch() {
    mkdir -p "$1/lib" "$1/include/torch/csrc/api/include/torch"
    touch "$1/lib/libtorch_cpu.so" "$1/lib/libc10.so" "$1/include/torch/csrc/api/include/torch/torch.h"
    echo "__version__ = '$2'" > "$1/version.py"
}
case "$1 $2" in
    "-c "*find_spec*torch*) echo "$TORCH" ;;
    "-c "*) printf '%s\n%s\n%s\n' "$VERSION" "$MISSING" "$0" ;;
    "recipes/common/run.py "*) echo "$@"; exit 5 ;;
    "-m venv") mkdir -p "$3/bin" "$3/lib/python3.11/site-packages" && cp "$0" "$3/bin/python" ;;
    "-m hatchling") mkdir -p "$7" && touch "$7/anyroll.whl" ;;
    "-m unittest") echo "$@" >> "$LOG" ;;
    "-m pip")
        echo "$@" >> "$LOG"
        case "$PIP" in
            works) make_torch "$(dirname "$0")/../lib/python3.11/site-packages/torch" 2.11.0+cu130 ;;
            offline) echo "WARNING: Retrying (Retry(total=0)) after 'NewConnectionError'" >&2; exit 1 ;;
            killed) make_torch "$(dirname "$0")/../lib/python3.11/site-packages/torch" 2.11.0+cu130; exit 130 ;;
        esac ;;
esac
"#;

/// A machine with a checkout, a folder of programs and nothing else.
struct Machine {
    folder: TempDir,
}

impl Machine {
    /// Creates a machine with a C++ compiler, and a Python 3.11 that has no torch but can install it.
    fn new() -> Self {
        let machine = Self { folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() };
        fs::create_dir_all(machine.at("bin")).unwrap();
        fs::create_dir_all(machine.at("checkout/xtask")).unwrap();
        machine.program("c++", "");
        machine.python("3 11", "", "", "works");
        machine
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn program(&self, name: &str, body: &str) {
        // Written by another process. Programs started by parallel tests inherit a file open for writing, and
        // until those have started the kernel refuses to run it.
        let text = self.at("text");
        fs::write(&text, format!("#!/bin/sh\n{body}\n")).unwrap();
        let installed = Command::new("install").arg(&text).arg(self.at("bin").join(name)).status();
        assert!(installed.unwrap().success());
    }

    fn python(&self, version: &str, missing: &str, torch: &str, pip: &str) {
        let log = self.at("pip.log");
        let head = format!(
            "VERSION='{version}' MISSING='{missing}' TORCH='{torch}' PIP={pip} LOG='{}'",
            log.display()
        );
        self.program("python3", &(head + PYTHON));
    }

    /// Puts a torch into a folder, like a wheel would.
    fn torch(&self, package: &str, version: &str) -> PathBuf {
        let package = self.at(package);
        let headers = package.join("include/torch/csrc/api/include/torch");
        fs::create_dir_all(&headers).unwrap();
        fs::create_dir_all(package.join("lib")).unwrap();
        for file in
            [headers.join("torch.h"), package.join("lib/libtorch_cpu.so"), package.join("lib/libc10.so")]
        {
            fs::write(file, "").unwrap();
        }
        fs::write(package.join("version.py"), format!("__version__ = '{version}'\n")).unwrap();
        package
    }

    fn command(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(args).env_clear().env("PATH", self.at("bin"));
        command.env("CARGO_MANIFEST_DIR", self.at("checkout/xtask"));
        command
    }

    fn xtask(&self, args: &[&str]) -> Output {
        self.command(Path::new(env!("CARGO_BIN_EXE_xtask")), args).output().unwrap()
    }

    fn setup_passes(&self, args: &[&str]) -> String {
        let output = self.xtask(&[&["setup"], args].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        text
    }

    /// Runs a set-up that must fail with this first line, and returns the whole message.
    fn setup_fails(&self, args: &[&str], code: i32, reason: &str) -> String {
        let output = self.xtask(&[&["setup"], args].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{text}");
        let error = text.lines().find(|line| line.starts_with("error: "));
        assert!(error.is_some_and(|line| line.contains(reason)), "no {reason:?} in the reason of:\n{text}");
        text
    }

    /// Returns the target of the view's library link.
    fn library(&self) -> PathBuf {
        fs::read_link(self.at("checkout/.torch/view/lib/libtorch_cpu.so")).unwrap()
    }

    fn installations(&self) -> Vec<String> {
        fs::read_to_string(self.at("pip.log")).unwrap_or_default().lines().map(str::to_string).collect()
    }
}

#[test]
fn installs_once_and_repairs_what_is_broken() {
    let machine = Machine::new();
    machine.setup_passes(&[]);
    let view = machine.at("checkout/.torch/view");
    let site = machine.at("checkout/.torch/venv/lib/python3.11/site-packages");
    assert_eq!(machine.library(), site.join("torch/lib/libtorch_cpu.so"));
    assert_eq!(fs::read_to_string(view.join("lib/libtorch.so")).unwrap(), "INPUT ( -ltorch_cpu -lc10 )\n");
    assert!(view.join("include/torch/csrc/api/include/torch/torch.h").exists());
    let installed = machine.installations();
    assert_eq!(installed.len(), 1);
    assert!(
        installed[0]
            .ends_with("--no-deps torch==2.11.0 nvidia-cuda-cupti==13.0.85 nvidia-cuda-runtime==13.0.96")
    );

    // Complete: Python is not run, so it is not needed.
    fs::rename(machine.at("bin/python3"), machine.at("python3")).unwrap();
    let written = fs::metadata(view.join("build-version")).unwrap().modified().unwrap();
    machine.setup_passes(&[]);
    assert_eq!(fs::metadata(view.join("build-version")).unwrap().modified().unwrap(), written);
    fs::rename(machine.at("python3"), machine.at("bin/python3")).unwrap();

    // A broken view is rewritten without an installation.
    for broken in ["lib/libc10.so", "lib/libtorch.so", "include", "build-version"] {
        fs::remove_file(view.join(broken)).unwrap();
        machine.setup_passes(&[]);
        assert!(view.join(broken).exists(), "{broken}");
    }
    fs::remove_dir_all(&view).unwrap();
    machine.setup_passes(&[]);
    assert!(view.join("include").exists());
    assert_eq!(machine.installations().len(), 1);

    // A changed library, a missing one and a missing mark each cause a new installation.
    let stray = machine.at("checkout/.torch/venv/stray");
    type Break<'a> = &'a dyn Fn();
    let breaks: [Break<'_>; 3] = [
        &|| fs::write(site.join("torch/lib/libc10.so"), "half").unwrap(),
        &|| fs::remove_file(site.join("torch/lib/libtorch_cpu.so")).unwrap(),
        &|| fs::remove_file(machine.at("checkout/.torch/venv/installed")).unwrap(),
    ];
    for (count, broken) in breaks.iter().enumerate() {
        fs::write(&stray, "").unwrap();
        broken();
        machine.setup_passes(&[]);
        assert_eq!(machine.installations().len(), 2 + count);
        assert!(!stray.exists());
        assert!(machine.library().exists());
    }
}

#[test]
fn an_interrupted_installation_is_not_trusted() {
    let machine = Machine::new();
    machine.python("3 11", "", "", "killed");
    machine.setup_fails(&[], 1, "pip could not install torch 2.11.0");
    assert!(!machine.at("checkout/.torch/view").exists());
    machine.python("3 11", "", "", "works");
    machine.setup_passes(&[]);
    assert_eq!(machine.installations().len(), 2);
}

#[test]
fn the_gpu_set_is_added_to_the_small_one() {
    let machine = Machine::new();
    machine.setup_passes(&[]);
    fs::write(machine.at("checkout/.torch/venv/kept"), "").unwrap();
    machine.setup_passes(&["--gpu"]);
    assert!(machine.at("checkout/.torch/venv/kept").exists());
    assert!(machine.installations()[1].ends_with("--no-input torch==2.11.0"));
    // The larger set serves both requests.
    machine.setup_passes(&[]);
    machine.setup_passes(&["--gpu"]);
    assert_eq!(machine.installations().len(), 2);
}

#[test]
fn uses_the_torch_that_is_there() {
    let machine = Machine::new();
    let package = machine.torch("system/torch", "2.11.0+cpu");
    machine.python("3 11", "", &package.display().to_string(), "works");
    machine.setup_passes(&[]);
    assert_eq!(machine.library(), package.join("lib/libtorch_cpu.so"));

    // An active environment has priority over python3, but the torch in use stays in use.
    let other = machine.torch("env/lib/python3.12/site-packages/torch", "2.11.0");
    let in_env = || {
        let mut command = machine.command(Path::new(env!("CARGO_BIN_EXE_xtask")), &["setup"]);
        assert!(command.env("VIRTUAL_ENV", machine.at("env")).output().unwrap().status.success());
        machine.library()
    };
    assert_eq!(in_env(), package.join("lib/libtorch_cpu.so"));
    fs::remove_dir_all(&package).unwrap();
    assert_eq!(in_env(), other.join("lib/libtorch_cpu.so"));
    assert_eq!(machine.installations().len(), 0);
}

#[test]
fn another_version_is_named_and_not_used() {
    let machine = Machine::new();
    let package = machine.torch("system/torch", "2.9.1");
    machine.python("3 11", "", &package.display().to_string(), "works");
    let text = machine.setup_passes(&[]);
    let note = format!("the torch of python3 is not used: torch 2.9.1 in {}/lib", package.display());
    assert!(text.contains(&note), "{text}");
    assert_eq!(machine.installations().len(), 1);
}

#[test]
fn a_named_torch_is_used_or_refused() {
    let machine = Machine::new();
    let package = machine.torch("a/torch", "2.11.0");
    machine.torch("env/lib/python3.12/site-packages/torch", "2.11.0");
    for named in ["a/torch", "env"] {
        machine.setup_passes(&["--torch", machine.at(named).to_str().unwrap()]);
        assert!(machine.library().starts_with(machine.at(named)));
    }

    let old = machine.torch("old/torch", "2.10.0");
    let text = machine.setup_fails(&["--torch", old.to_str().unwrap()], 1, "torch 2.10.0 in");
    assert!(text.contains("pip install torch==2.11.0"), "{text}");
    machine.setup_fails(&["--torch", machine.at("bin").to_str().unwrap()], 1, "no torch there");
    machine.setup_fails(&["--torch", machine.at("nowhere").to_str().unwrap()], 1, "nowhere");
    fs::remove_file(package.join("lib/libc10.so")).unwrap();
    machine.setup_fails(&["--torch", package.to_str().unwrap()], 1, "libc10.so is missing");
    // A refusal leaves the previous set-up unchanged.
    assert!(machine.library().starts_with(machine.at("env")));
}

#[test]
fn a_libtorch_of_ones_own_is_checked_and_left_alone() {
    let machine = Machine::new();
    let setup = |own: &Path, args: &[&str]| {
        let mut command = machine.command(Path::new(env!("CARGO_BIN_EXE_xtask")), &["setup"]);
        let output = command.args(args).env("LIBTORCH", own).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let own = machine.torch("own", "2.11.0");
    assert_eq!(setup(&own, &[]).0, Some(0));
    let (code, text) = setup(&own, &["--gpu"]);
    assert!(code == Some(2) && text.contains("unset it first"), "{text}");
    let (code, text) = setup(&machine.torch("old", "2.5.1"), &[]);
    assert!(code == Some(1) && text.contains("torch 2.5.1 in") && text.contains("unset LIBTORCH"), "{text}");
    assert!(!machine.at("checkout/.torch").exists());
    // The value that the checkout's own cargo configuration sets.
    assert_eq!(setup(&machine.at("checkout/.torch/view"), &[]).0, Some(0));
    assert_eq!(machine.installations().len(), 1);
}

#[test]
fn says_what_the_machine_lacks() {
    let machine = Machine::new();
    machine.python("3 11", "", "", "offline");
    let text = machine.setup_fails(&[], 1, "no network");
    assert!(text.contains("HTTPS_PROXY") && text.contains("--torch PATH"), "{text}");

    machine.python("3 9", "", "", "works");
    machine.setup_fails(&[], 1, "is Python 3.9, and torch 2.11.0 needs 3.10 or newer");
    machine.python("3 11", "ensurepip", "", "works");
    let text = machine.setup_fails(&[], 1, "lacks the module ensurepip");
    assert!(text.contains("apt install python3-venv"), "{text}");
    machine.program("python3", "echo no such command >&2; exit 127");
    machine.setup_fails(&[], 1, "does not run: no such command");
    fs::remove_file(machine.at("bin/python3")).unwrap();
    machine.setup_fails(&[], 1, "no python3 on PATH");
    fs::remove_file(machine.at("bin/c++")).unwrap();
    machine.setup_fails(&[], 1, "no C++ compiler: `c++` is not on PATH");
    assert_eq!(machine.installations().len(), 1);
}

#[test]
fn two_set_ups_do_not_meet() {
    let machine = Machine::new();
    fs::create_dir_all(machine.at("checkout/.torch")).unwrap();
    let file = fs::File::create(machine.at("checkout/.torch/lock")).unwrap();
    file.lock().unwrap();
    machine.setup_fails(&[], 1, "another set-up holds");
    drop(file);
    machine.setup_passes(&[]);
}

#[test]
fn a_wrong_command_line_is_refused() {
    let machine = Machine::new();
    machine.setup_fails(&["--cuda"], 2, "got `--cuda`");
    machine.setup_fails(&["--torch"], 2, "--torch needs a path");
    for (args, reason) in [
        (vec!["bulid"], "no command `bulid`"),
        (vec!["run"], "`run` needs a config"),
        (vec!["wheel", "--tset"], "`wheel` takes --test or nothing"),
    ] {
        let output = machine.xtask(&args);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).starts_with(&format!("error: {reason}")));
    }
    let help = machine.xtask(&["--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("cargo xtask run"));
}

/// Creates a machine whose cargo logs its arguments, and an `xtask` in its own target folder.
fn built(machine: &Machine, cargo: &str) -> PathBuf {
    machine.program("cargo", &format!("echo \"$@\" >> {}\n{cargo}", machine.at("cargo.log").display()));
    let program = machine.at("target/debug/xtask");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    fs::create_dir_all(machine.at("target/release")).unwrap();
    for name in ["anyroll", "anyroll-matrix"] {
        symlink(machine.at("bin").join(name), machine.at("target/release").join(name)).unwrap();
    }
    // A symbolic link would lead back to the real target folder.
    fs::hard_link(env!("CARGO_BIN_EXE_xtask"), &program).unwrap();
    program
}

#[test]
fn run_builds_and_becomes_the_program() {
    let machine = Machine::new();
    let xtask = built(&machine, "");
    machine.program("anyroll", "echo \"$@\"; exit 7");
    let output = machine.command(&xtask, &["run", "a.yaml", "--set", "seed=1"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "run a.yaml --set seed=1\n");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(fs::read_to_string(machine.at("cargo.log")).unwrap(), "build --release --workspace\n");
}

#[test]
fn a_recipe_installs_its_packages_once_and_becomes_its_run() {
    let machine = Machine::new();
    let xtask = built(&machine, "");
    let recipe = machine.at("checkout/recipes/demo");
    for folder in [&recipe, &machine.at("checkout/recipes/common")] {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("requirements.txt"), "numpy\n").unwrap();
    }
    fs::write(recipe.join("data.py"), "").unwrap();
    let run = |name: &str| machine.command(&xtask, &["recipe", name, "--seed", "1"]).output().unwrap();
    let installations = || {
        let log = fs::read_to_string(machine.at("pip.log")).unwrap();
        log.lines().filter(|line| line.contains("--requirement")).count()
    };

    for _ in 0..2 {
        let output = run("demo");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(printed.starts_with("recipes/common/run.py demo --anyroll "), "{printed}");
        assert!(printed.ends_with("/anyroll --seed 1\n"), "{printed}");
        assert_eq!(output.status.code(), Some(5));
        // Of all recipes, and of this one.
        assert_eq!(installations(), 2);
    }
    fs::write(recipe.join("requirements.txt"), "numpy\nreasoning-gym\n").unwrap();
    run("demo");
    assert_eq!(installations(), 3);

    let output = run("common");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no recipe `common`; there are demo"));
}

#[test]
fn a_failed_child_ends_the_command_with_its_code() {
    let machine = Machine::new();
    let xtask = built(&machine, "exit 101");
    for args in [&["run", "a.yaml"][..], &["test"], &["check"]] {
        let output = machine.command(&xtask, args).output().unwrap();
        assert_eq!(output.status.code(), Some(101), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("ended with exit code 101"));
    }
    let log = fs::read_to_string(machine.at("cargo.log")).unwrap();
    assert_eq!(log, "build --release --workspace\ntest --release --workspace\nfmt --all --check\n");
}

#[test]
fn test_and_check_say_what_ran() {
    let machine = Machine::new();
    let xtask = built(&machine, "");
    let output = machine.command(&xtask, &["test", "rope"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("xtask: cargo test --release --workspace rope: passed"), "{text}");
    fs::remove_file(machine.at("cargo.log")).unwrap();
    machine.program("anyroll-matrix", "echo \"$@\"; exit 3");
    fs::create_dir_all(machine.at("checkout/python")).unwrap();
    let output = machine.command(&xtask, &["check"]).output().unwrap();
    let log = fs::read_to_string(machine.at("cargo.log")).unwrap();
    let commands: Vec<&str> = log.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(commands, ["fmt", "clippy", "doc", "test", "build", "build"], "{output:?}");
    let pythons = fs::read_to_string(machine.at("pip.log")).unwrap();
    assert!(pythons.contains("/anyroll.whl\n") && pythons.contains("unittest discover"), "{pythons}");
    // Then it becomes the matrix's program.
    assert_eq!(String::from_utf8_lossy(&output.stdout), "run --backend cpu\n");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_missing_cargo_is_named() {
    let machine = Machine::new();
    let output = machine.xtask(&["test"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("error: cargo did not start") && text.contains("rustup"), "{text}");
}
