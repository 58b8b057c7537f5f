//! Metrics of the server, served at `/metrics` in Prometheus' text format.

use std::{
    fmt::Write,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use anyroll_models::generation::Load;

#[derive(Debug, Default)]
pub(super) struct Counters {
    requests: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    load: Mutex<Option<Load>>,
}

impl Counters {
    pub fn request(&self, prompt_tokens: usize) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.prompt_tokens.fetch_add(prompt_tokens as u64, Ordering::Relaxed);
    }

    pub fn tokens(&self, count: usize) {
        self.generated_tokens.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub fn set_load(&self, load: Load) {
        *self.load.lock().unwrap() = Some(load);
    }

    /// Text of the page.
    pub fn text(&self) -> String {
        let mut page = String::new();
        let mut add = |name: &str, kind: &str, help: &str, value: u64| {
            writeln!(
                page,
                "# HELP anyroll_{name} {help}\n# TYPE anyroll_{name} {kind}\nanyroll_{name} {value}"
            )
            .expect("a string takes all that is written");
        };
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        add("requests_total", "counter", "Accepted requests.", read(&self.requests));
        add("prompt_tokens_total", "counter", "Tokens of their prompts.", read(&self.prompt_tokens));
        add("generated_tokens_total", "counter", "Sampled tokens.", read(&self.generated_tokens));
        if let Some(load) = *self.load.lock().unwrap() {
            add("samples_waiting", "gauge", "Samples waiting for a slot or for blocks.", load.waiting as u64);
            add("samples_live", "gauge", "Samples in flight.", load.live as u64);
            add("kv_blocks", "gauge", "Blocks of the KV cache.", load.blocks as u64);
            add("kv_blocks_free", "gauge", "Free blocks of the KV cache.", load.free_blocks as u64);
            add("preemptions_total", "counter", "Samples that were preempted.", load.preemptions);
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_every_counter_with_its_type() {
        let counters = Counters::default();
        counters.request(7);
        counters.tokens(3);
        let load = Load { waiting: 1, live: 2, blocks: 9, free_blocks: 4, preemptions: 5, ..Load::default() };
        counters.set_load(load);
        let page = counters.text();
        for line in [
            "# TYPE anyroll_prompt_tokens_total counter\nanyroll_prompt_tokens_total 7\n",
            "anyroll_generated_tokens_total 3\n",
            "# TYPE anyroll_kv_blocks_free gauge\nanyroll_kv_blocks_free 4\n",
            "anyroll_preemptions_total 5\n",
        ] {
            assert!(page.contains(line), "{line:?} is not in\n{page}");
        }
    }
}
