//! Rewards that run programs or query another model: the fields of `code`, `judge` and `remote`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::reward::Credit;
use crate::document::Section;

/// Options of running programs.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CodeConfig {
    /// Credit for tests that pass. Default `all`.
    pub credit: Credit,
    /// A sandbox service at an endpoint, instead of this machine's sandbox. The service has its own `python`,
    /// `readable`, `isolation`, `processes` and `disk_mib`. Default: this machine's sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpSandboxConfig>,
    /// The interpreter, a name in `/usr/local/bin`, `/usr/bin` or `/bin`, or a path; an interpreter elsewhere needs its
    /// folders in `readable`. Default `python3`.
    pub python: String,
    /// Folders and files of the host that programs can read, in addition to those of the system. Default: none.
    pub readable: Vec<PathBuf>,
    /// Protection of the host that must be available; the run does not start without it. Default `full`.
    pub isolation: Isolation,
    /// Timeout of a test in seconds, of wall-clock time and of CPU time; above 0, at most 3600. Default 10.
    pub timeout_s: f64,
    /// Address space of each process, in MiB; with `http`, the memory of a test; 1 or above. Default 512.
    pub memory_mib: u64,
    /// Maximum number of processes and threads at a time; 1 or above. Default 16.
    pub processes: u64,
    /// Size of a program's folder, which is in memory, in MiB; 1 or above. Default 16.
    pub disk_mib: u64,
    /// Maximum size of a program's standard output, in KiB; 1 or above. Default 256.
    pub output_kib: u64,
    /// Largest error of a number in the output if the expected number has a fraction, relative above 1; from 0 to
    /// below 1. With 0, outputs must match exactly. Default 1e-6.
    pub tolerance: f64,
    /// Text that stands before each program, such as the imports of a judge. Default: none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub prelude: String,
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
            prelude: String::new(),
        }
    }
}

/// Declares a section that names a service: the given fields, and those that every service has. The page of fields has
/// their docs from [`EndpointConfig`].
macro_rules! service {
    ($(#[$of_section:meta])* pub struct $name:ident { $($fields:tt)* }) => {
        $(#[$of_section])*
        #[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($fields)*
            /// See [`EndpointConfig`].
            #[serde(default = "eight")]
            pub concurrency: usize,
            /// See [`EndpointConfig`].
            #[serde(default = "attempts")]
            pub retries: u32,
            /// See [`EndpointConfig`].
            #[serde(default = "one")]
            pub retry_s: f64,
            /// See [`EndpointConfig`].
            #[serde(default = "minute")]
            pub timeout_s: f64,
        }

        impl $name {
            /// Returns the options of requests to the service.
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
    };
}

/// Address and key of a service, and the fields that every service has.
#[derive(Clone, Copy, Debug)]
pub struct EndpointConfig<'a> {
    /// URL of the endpoint.
    pub url: &'a str,
    /// Environment variable with the endpoint's key.
    pub key_variable: Option<&'a str>,
    /// Number of requests in flight per rank; 1 or above. Default 8.
    pub concurrency: usize,
    /// Number of retries after a service is busy, fails, times out or is unreachable; 0 to 16. Default 3.
    pub retries: u32,
    /// Seconds before the first retry, doubled before each next retry; above 0, at most 3600. Default 1.
    pub retry_s: f64,
    /// Timeout of an attempt in seconds; above 0, at most 3600. Default 60.
    pub timeout_s: f64,
}

service! {
    /// A sandbox at an endpoint that implements SandboxFusion's protocol. A test is a request; `scoring.workers` is another
    /// bound on requests in flight. Programs wait in the service's queue, so `timeout_s` is above `code.timeout_s`.
    pub struct HttpSandboxConfig {
        /// Complete URL that programs are sent to, such as `http://127.0.0.1:8080/run_code`.
        pub url: String,
        /// Language of the programs, by the service's name. Default `python`.
        #[serde(default = "python")]
        pub language: String,
        /// Environment variable with the endpoint's key. Default: no key is sent.
        #[serde(default)]
        pub key_variable: Option<String>,
    }
}

/// Protection of the host from a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// Namespaces for users, processes, files and the network, seccomp, limits, a folder of fixed size, and Landlock.
    #[default]
    Full,
    /// The same, with Landlock only if the kernel has it.
    Namespaces,
}

service! {
    /// A judge model at an endpoint, and its prompt.
    pub struct JudgeConfig {
        /// Base URL of the endpoint, such as `http://127.0.0.1:8000/v1`.
        pub url: String,
        /// Name of the model at the endpoint.
        pub model: String,
        /// Template of the judge's prompt, with `{{ prompt }}`, `{{ completion }}` and `{{ answer }}`.
        pub template: String,
        /// A regular expression with one group, around the number or word in the judge's completion; the last match counts.
        /// Default `Score:\s*([-+]?[0-9.]+)`.
        #[serde(default = "score_pattern")]
        pub pattern: String,
        /// Scores of words, such as `{yes: 1, no: 0}`; upper and lower case are equal. Default: the group is a number.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub words: BTreeMap<String, f64>,
        /// Factor on the number, such as 0.1 for scores up to 10; other than 0. Default 1.
        #[serde(default = "one")]
        pub scale: f64,
        /// Environment variable with the key; the key is never written anywhere. Default: no key.
        #[serde(default)]
        pub key_variable: Option<String>,
        /// Maximum length of the judge's completion in tokens; 1 or above. Default 512.
        #[serde(default = "answer_tokens")]
        pub max_tokens: u64,
    }
}

service! {
    /// A reward model behind an endpoint, in the form of OpenRLHF's remote reward models.
    pub struct RemoteConfig {
        /// Complete URL that completions are sent to, such as `http://127.0.0.1:8000/v1/rewards`.
        pub url: String,
        /// Number of completions in a request; 1 or above. Default 8.
        #[serde(default = "eight")]
        pub batch_size: usize,
        /// Environment variable with the endpoint's key. Default: no key is sent.
        #[serde(default)]
        pub key_variable: Option<String>,
    }
}

impl RemoteConfig {
    pub(super) fn validate(&self, at: &Section) {
        self.endpoint().validate(at);
        at.positive("batch_size", self.batch_size);
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

    /// Reports fields of this machine's sandbox where programs run in another sandbox.
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
