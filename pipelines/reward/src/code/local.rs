//! The sandbox of this machine.

use anyroll_config::{CodeConfig, Isolation};
use anyroll_sandbox::{Exit, File, Finished, Limits, Protection, Sandbox};

use crate::Failure;

/// Standard input of a program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Input<'a> {
    /// Input that `/dev/stdin` also names.
    Named(&'a str),
    /// Input that can be read only once, before the tested program begins.
    Secret(&'a str),
}

/// Runs each program as a process of its own, locked in.
#[derive(Debug)]
pub(super) struct Local {
    python: String,
    sandbox: Sandbox,
}

impl Local {
    /// Tries it once.
    ///
    /// # Errors
    /// If this machine cannot protect itself as `config` requires.
    pub(super) fn new(config: &CodeConfig) -> Result<Self, Failure> {
        let helper =
            std::env::current_exe().map_err(|error| error.to_string())?.with_file_name("anyroll-sandbox");
        let limits = Limits {
            wall_s: config.timeout_s,
            memory_bytes: config.memory_mib << 20,
            processes: config.processes,
            disk_bytes: config.disk_mib << 20,
            output_bytes: config.output_kib << 10,
        };
        let required = match config.isolation {
            Isolation::Full => Protection::ALL.to_vec(),
            Isolation::Namespaces => {
                Protection::ALL.into_iter().filter(|it| *it != Protection::Landlock).collect()
            }
        };
        let sandbox = Sandbox::new(helper, limits, config.readable.clone(), required);
        let held = sandbox.probe().map_err(told)?;
        let names: Vec<String> = held.iter().map(Protection::to_string).collect();
        tracing::info!(protections = names.join(", "), "programs run in a sandbox");
        Ok(Self { python: config.python.clone(), sandbox })
    }

    /// Returns the output of `program`; `None` if it does not end well.
    pub(super) fn run(&self, program: String, input: Input) -> Result<Option<String>, Failure> {
        let command = [self.python.as_str(), "-I", "main.py"].map(str::to_owned);
        let files = [File { name: "main.py".into(), text: program }];
        let finished = match input {
            Input::Named(text) => self.sandbox.run(&command, &files, text),
            Input::Secret(text) => self.sandbox.run_on_secret(&command, &files, text),
        };
        let Finished { exit, stdout, .. } = finished.map_err(told)?;
        Ok((exit == Exit::Success).then(|| String::from_utf8_lossy(&stdout).into_owned()))
    }
}

fn told(error: anyroll_sandbox::Error) -> Failure {
    anyroll_config::error_chain::one_line(&error).into()
}
