//! Facts of a run that no metric has: its name, kind and number of steps, and how it last ended.

use indexmap::IndexMap;
use serde::Deserialize;

use crate::run_log::{LogKind, LogLine};

/// Facts of a run.
#[derive(Debug, Default)]
pub(super) struct About {
    name: String,
    kind: String,
    steps: Option<u64>,
    warmup_steps: Option<u64>,
    description: Option<String>,
    /// Last line of the log that is not for people alone.
    last: Option<LogLine>,
}

/// The part of `resolved.yaml` that is shown. A config of another version may lack it.
#[derive(Deserialize)]
struct Resolved {
    name: String,
    backend: String,
    pipeline: IndexMap<String, Pipeline>,
}

#[derive(Deserialize)]
struct Pipeline {
    steps: u64,
    warmup: Option<Warmup>,
}

#[derive(Deserialize)]
struct Warmup {
    steps: u64,
}

impl About {
    /// Facts of the resolved config.
    pub(super) fn new(resolved: &str) -> About {
        let Ok(Resolved { name, backend, pipeline }) = serde_saphyr::from_str(resolved) else {
            return About::default();
        };
        let Some((kind, pipeline)) = pipeline.first() else { return About::default() };
        About {
            name,
            kind: format!("{kind} on {backend}"),
            steps: Some(pipeline.steps),
            warmup_steps: pipeline.warmup.as_ref().map(|warmup| warmup.steps),
            ..About::default()
        }
    }

    /// Takes the next line of the log.
    pub(super) fn hear(&mut self, line: &LogLine) {
        if line.kind == LogKind::Start {
            self.description = Some(line.text.clone());
        }
        if line.kind != LogKind::Line {
            self.last = Some(line.clone());
        }
    }

    /// Name in the config, if it has one.
    pub(super) fn name(&self) -> Option<&str> {
        Some(self.name.as_str()).filter(|name| !name.is_empty())
    }

    /// Sentence about the run.
    pub(super) fn description(&self) -> &str {
        self.description.as_deref().unwrap_or(&self.kind)
    }

    /// Number of steps after which the run is finished.
    pub(super) fn steps(&self) -> Option<u64> {
        self.steps
    }

    /// Number of steps of the warm-up, if there is one.
    pub(super) fn warmup_steps(&self) -> Option<u64> {
        self.warmup_steps
    }

    /// Line with which the last start ended; `None` if it did not end, or the run has no log.
    pub(super) fn ended(&self) -> Option<&LogLine> {
        self.last.as_ref().filter(|line| line.kind != LogKind::Start)
    }
}
