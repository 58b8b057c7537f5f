//! Rewards that run programs or ask another model: the fields of `code` and `judge`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::reward::Credit;
use crate::document::Section;

/// How programs are run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CodeConfig {
    /// How tests count. Default `all`.
    pub credit: Credit,
    /// A sandbox behind an endpoint, which then has its own `python`, `readable`, `isolation`, `processes` and `disk_mib`.
    /// Default: this machine's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpSandboxConfig>,
    /// The interpreter, a name in `/usr/local/bin`, `/usr/bin` or `/bin`, or a path; one that lies elsewhere needs its
    /// folders in `readable`. Default `python3`.
    pub python: String,
    /// Folders and files of the host that programs can read, beside those of the system. Default: none.
    pub readable: Vec<PathBuf>,
    /// What must protect the host, or the run does not start. Default `full`.
    pub isolation: Isolation,
    /// Seconds of a test, on the clock and of the processor. Default 10.
    pub timeout_s: f64,
    /// Address space of each process, in MiB; behind an endpoint the memory of a test. Default 512.
    pub memory_mib: u64,
    /// Processes and threads at a time. Default 16.
    pub processes: u64,
    /// What a program may write to its folder, which is in memory, in MiB. Default 16.
    pub disk_mib: u64,
    /// What a program may write to standard output, in KiB. Default 256.
    pub output_kib: u64,
    /// Largest error of a number in the output if the expected one has a fraction, relative above 1. With 0, outputs
    /// must match exactly. Default 1e-6.
    pub tolerance: f64,
}

impl Default for CodeConfig {
    fn default() -> Self {
        Self {
            credit: Credit::All,
            http: None,
            python: "python3".into(),
            readable: Vec::new(),
            isolation: Isolation::Full,
            timeout_s: 10.0,
            memory_mib: 512,
            processes: 16,
            disk_mib: 16,
            output_kib: 256,
            tolerance: 1e-6,
        }
    }
}

/// A sandbox behind an endpoint that speaks SandboxFusion's protocol.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HttpSandboxConfig {
    /// Where programs are sent, the whole of it, such as `http://127.0.0.1:8080/run_code`.
    pub url: String,
    /// What programs are written in, by the service's name for it. Default `python`.
    #[serde(default = "python")]
    pub language: String,
    /// The environment variable that has the endpoint's key. Default: none is sent.
    #[serde(default)]
    pub key_variable: Option<String>,
    /// Requests of a rank at a time, one for each test; `scoring.workers` bounds them as well. Default 8.
    #[serde(default = "eight")]
    pub concurrency: usize,
    /// Further attempts where the service is busy, broken, slow or away. Default 3.
    #[serde(default = "attempts")]
    pub retries: u32,
    /// Seconds before the first of them, doubled before each next one. Default 1.
    #[serde(default = "one")]
    pub retry_s: f64,
    /// Seconds of an attempt; more than `code.timeout_s`, since programs wait in the service's queue. Default 60.
    #[serde(default = "minute")]
    pub timeout_s: f64,
}

/// How an endpoint is asked, as its reward says it.
#[derive(Clone, Copy, Debug)]
pub struct EndpointConfig<'a> {
    /// Where it is.
    pub url: &'a str,
    /// The environment variable that has its key.
    pub key_variable: Option<&'a str>,
    /// Requests of a rank at a time.
    pub concurrency: usize,
    /// Further attempts.
    pub retries: u32,
    /// Seconds before the first of them.
    pub retry_s: f64,
    /// Seconds of an attempt.
    pub timeout_s: f64,
}

impl HttpSandboxConfig {
    /// How it is asked.
    pub fn endpoint(&self) -> EndpointConfig<'_> {
        EndpointConfig {
            url: &self.url,
            key_variable: self.key_variable.as_deref(),
            concurrency: self.concurrency,
            retries: self.retries,
            retry_s: self.retry_s,
            timeout_s: self.timeout_s,
        }
    }
}

/// What protects the host from a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// Namespaces for users, processes, files and the network, seccomp, limits, a folder of fixed size, and Landlock.
    #[default]
    Full,
    /// All of these; Landlock where the kernel has it.
    Namespaces,
}

/// A model behind an endpoint, and what it is asked.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct JudgeConfig {
    /// Where the endpoint's paths start, such as `http://127.0.0.1:8000/v1`.
    pub url: String,
    /// The model's name there.
    pub model: String,
    /// What it is asked, with `{{ prompt }}`, `{{ completion }}` and `{{ answer }}` in it.
    pub template: String,
    /// A regular expression with one group, around the number or word in the judge's answer; its last match counts. Default
    /// `Score:\s*([-+]?[0-9.]+)`.
    #[serde(default = "score_pattern")]
    pub pattern: String,
    /// What a word counts, such as `{yes: 1, no: 0}`, in whatever case it is written. Default: the group is a number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub words: BTreeMap<String, f64>,
    /// What the number is multiplied by, such as 0.1 where it goes to 10. Default 1.
    #[serde(default = "one")]
    pub scale: f64,
    /// The environment variable that holds the key; it is never written anywhere. Default: no key.
    #[serde(default)]
    pub key_variable: Option<String>,
    /// The longest answer in tokens. Default 512.
    #[serde(default = "answer_tokens")]
    pub max_tokens: u64,
    /// Requests of a rank at a time. Default 8.
    #[serde(default = "eight")]
    pub concurrency: usize,
    /// Further attempts where the endpoint is busy, broken, slow or away. Default 3.
    #[serde(default = "attempts")]
    pub retries: u32,
    /// Seconds before the first of them, doubled before each next one. Default 1.
    #[serde(default = "one")]
    pub retry_s: f64,
    /// Seconds of an attempt. Default 60.
    #[serde(default = "minute")]
    pub timeout_s: f64,
}

impl JudgeConfig {
    /// How it is asked.
    pub fn endpoint(&self) -> EndpointConfig<'_> {
        EndpointConfig {
            url: &self.url,
            key_variable: self.key_variable.as_deref(),
            concurrency: self.concurrency,
            retries: self.retries,
            retry_s: self.retry_s,
            timeout_s: self.timeout_s,
        }
    }
}

impl CodeConfig {
    pub(super) fn validate(&self, at: &Section) {
        at.seconds("timeout_s", self.timeout_s);
        for (name, size) in [
            ("memory_mib", self.memory_mib),
            ("processes", self.processes),
            ("disk_mib", self.disk_mib),
            ("output_kib", self.output_kib),
        ] {
            at.positive(name, size);
        }
        at.ensure(
            (0.0..1.0).contains(&self.tolerance),
            "tolerance",
            format!("{} is no tolerance below 1", self.tolerance),
            "write 1e-6, or 0 to compare outputs to the letter",
        );
        if let Some(http) = &self.http {
            self.validate_http(http, at);
        }
    }

    /// Reports what is asked of this machine's sandbox where programs run in another.
    fn validate_http(&self, http: &HttpSandboxConfig, at: &Section) {
        let plain = Self::default();
        for (name, is_unsaid) in [
            ("python", self.python == plain.python),
            ("readable", self.readable == plain.readable),
            ("isolation", self.isolation == plain.isolation),
            ("processes", self.processes == plain.processes),
            ("disk_mib", self.disk_mib == plain.disk_mib),
        ] {
            let message = "it is of this machine's sandbox, and with `http` programs run in another";
            at.ensure(is_unsaid, name, message, "leave it out: whoever runs the service says it there");
        }
        http.endpoint().validate(&at.below("http"));
        let help = "write a language of the service's, such as `python` or `cpp`";
        at.ensure(!http.language.is_empty(), "http.language", "it is empty", help);
        at.given(&["timeout_s"]).ensure(
            http.timeout_s > self.timeout_s,
            "http.timeout_s",
            format!("an attempt ends after {} s, and a test may take {}", http.timeout_s, self.timeout_s),
            "write more than `code.timeout_s`",
        );
    }
}

impl JudgeConfig {
    pub(super) fn validate(&self, at: &Section) {
        self.endpoint().validate(at);
        at.positive("max_tokens", self.max_tokens);
        at.number("scale", self.scale, self.scale != 0.0, "other than 0");
        for (word, number) in &self.words {
            at.number(&format!("words.{word}"), *number, true, "that is finite");
        }
    }
}

impl EndpointConfig<'_> {
    fn validate(&self, at: &Section) {
        const MOST_RETRIES: u32 = 16;
        let Self { url, retries, .. } = *self;
        let is_url = url.starts_with("http://") || url.starts_with("https://");
        let help = "write it with `http://` or `https://` before";
        at.ensure(is_url, "url", format!("`{url}` is no URL"), help);
        at.positive("concurrency", self.concurrency);
        at.seconds("retry_s", self.retry_s);
        at.seconds("timeout_s", self.timeout_s);
        let message = format!("{retries} are too many: each waits twice as long as the one before");
        at.ensure(retries <= MOST_RETRIES, "retries", message, format!("write {MOST_RETRIES} or fewer"));
    }
}

// serde's attributes take functions only.

fn one() -> f64 {
    1.0
}

fn eight() -> usize {
    8
}

fn attempts() -> u32 {
    3
}

fn answer_tokens() -> u64 {
    512
}

fn minute() -> f64 {
    60.0
}

fn python() -> String {
    "python".into()
}

fn score_pattern() -> String {
    r"Score:\s*([-+]?[0-9.]+)".into()
}
