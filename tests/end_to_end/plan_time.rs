//! A step's time on paper, and the table of docs/guides/many_hosts.md.

use std::{fs, path::Path};

use serde_json::Value;

use super::{TWO_RANKS, anyroll, finish, succeed};

const STEP: &str = "bench/many_hosts/step.yaml";
const H200: [&str; 2] = ["--device", "H200"];

/// Plans the step of `bench/many_hosts` on so many hosts of eight devices, two prompts on each.
fn plan(hosts: usize, link: &str, sets: &[&str]) -> Value {
    let prompts = format!("pipeline.rlvr.prompts_per_step={}", 16 * hosts);
    let hosts = hosts.to_string();
    let place = ["--hosts", &hosts, "--devices-per-host", "8", "--link", link, "--memory", "141GB", "--json"];
    let sets = sets.iter().copied().chain([&*prompts]).flat_map(|set| ["--set", set]);
    let args = ["plan", STEP].into_iter().chain(place).chain(H200).chain(sets);
    serde_json::from_str(&succeed(anyroll(args.collect::<Vec<_>>())).stdout).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[test]
fn a_step_on_many_hosts_has_phases_and_bounds() {
    let report = plan(2, "400Gb/s", &[]);
    assert_eq!(report["world_size"], 16, "memory is that of as many ranks");
    let time = &report["time"];
    let phases = time["step"]["phases"].as_array().unwrap();
    let names: Vec<_> = phases.iter().map(|phase| phase["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["sampling", "forward", "backward", "optimizer", "weights", "offload"]);
    let sum: f64 = phases.iter().map(|phase| number(&phase["seconds"])).sum();
    assert!((sum - number(&time["step"]["seconds"])).abs() < 1e-9);
    assert_eq!((&phases[0]["bound"], &phases[1]["bound"]), (&"device memory".into(), &"compute".into()));
    assert_eq!(number(&time["link_bytes_per_s"]), 50e9);
    // A link so slow that it is the step, and the same step with shards in each host.
    let slow = plan(2, "10Gb/s", &[])["time"].clone();
    let bound = |of: &Value, phase: usize| of["phases"][phase]["bound"].as_str().unwrap().to_owned();
    assert_eq!(bound(&slow["step"], 2), "links between hosts");
    assert_eq!(slow["one_host"], time["one_host"]);
    let training = |of: &Value| number(&of["training_s"]);
    assert!(training(&slow["step"]) > 2.0 * training(&time["step"]));
    assert!(training(&slow["hybrid"]) < training(&slow["step"]));
    assert!(training(&time["step"]) > training(&time["one_host"]));
    // The library's sums send less between hosts than slices to each rank.
    let library = plan(2, "10Gb/s", &["strategy.reduction=library"])["time"].clone();
    assert!(training(&library["step"]) < training(&slow["step"]));
    // A config with replicas on hosts is planned as one.
    let replicas = plan(2, "10Gb/s", &["strategy.shard_group=host"]);
    assert_eq!(replicas["time"]["step"], slow["hybrid"]);
    assert_eq!(replicas["time"]["hybrid"], Value::Null);
    let weights = |report: &Value| number(&report["configured"]["plan"]["train"]["weights"]);
    let ratio = weights(&replicas) / weights(&report);
    assert!((1.99..2.01).contains(&ratio), "each host holds a replica: {ratio}");
}

#[test]
fn a_step_on_many_hosts_is_a_table_for_people() {
    let args = ["plan", STEP, "--hosts", "1", "--devices-per-host", "8", "--memory", "141GB"];
    let text = succeed(anyroll([&args[..], &H200].concat())).stdout;
    for part in
        ["on 1 host of 8 H200", "bounded by", "sampling", "backward", "tokens/s of a device", "not counted"]
    {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(!text.contains("shard_group"), "{text}");
    let args =
        ["plan", STEP, "--hosts", "2", "--devices-per-host", "8", "--link", "50GB/s", "--memory", "141GB"];
    let text = succeed(anyroll([&args[..], &H200].concat())).stdout;
    for part in ["2 hosts of 8 H200", "400 Gb/s", "with `shard_group: host`", "% of one host"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn a_step_without_figures_is_refused_with_the_option_to_give() {
    let refused = |config: &str, options: &[&str], parts: &[&str]| {
        let args = ["plan", config, "--memory", "80GiB"].into_iter().chain(options.iter().copied());
        let ended = finish(anyroll(args.collect::<Vec<_>>()));
        assert!(matches!(ended.code, Some(1 | 2)), "{ended:#?}");
        for part in parts {
            assert!(ended.stderr.contains(part), "no {part:?} in {}", ended.stderr);
        }
    };
    let hosts = ["--hosts", "2", "--devices-per-host", "8"];
    let with = |more: &[&'static str]| [&hosts[..], more].concat();
    let linked = |more: &[&'static str]| [&hosts[..], &["--link", "400Gb/s"], more].concat();
    refused(STEP, &with(&H200), &["--link 400Gb/s"]);
    refused(STEP, &linked(&[]), &["--device H100", "--device-flops, --device-memory-rate"]);
    refused(STEP, &linked(&["--device-flops", "1PFLOP/s"]), &["another card, or --device-memory-rate"]);
    refused(STEP, &linked(&["--device", "H2000"]), &["A100, H100, H200", "--device-flops"]);
    refused(STEP, &with(&["--link", "400"]), &["--link", "400Gb/s (bits)", "50GB/s (bytes)"]);
    refused(STEP, &["--hosts", "2"], &["--devices-per-host"]);
    refused(STEP, &["--link", "400Gb/s"], &["--hosts"]);
    refused(STEP, &linked(&["--world", "4"]), &["--world"]);
    // 16 prompts are not to be shared by 24 ranks.
    let three = ["--hosts", "3", "--devices-per-host", "8", "--link", "1Gb/s", "--device", "H200"];
    refused(STEP, &three, &["prompts_per_step"]);
    let two = ["--hosts", "1", "--devices-per-host", "2"];
    let on_two = |more: &[&'static str]| [&two[..], more].concat();
    refused(TWO_RANKS, &on_two(&H200), &["strategy.precision", "--device-flops"]);
    let step = "strategy.offload.optimizer=cpu_step";
    refused(STEP, &linked(&["--device", "H200", "--set", step]), &["cpu_step", "between_steps"]);
    let images = "configs/diffusion_nft_shapes_cpu.yaml";
    refused(images, &on_two(&H200), &["language models", "--world"]);
}

/// The page's tables are what its commands print.
///
/// `ANYROLL_WRITE_DOCS=1 cargo test --release -p anyroll-programs the_page_of_many_hosts` writes them.
#[test]
fn the_page_of_many_hosts_is_what_the_plan_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guides/many_hosts.md");
    let mut page = fs::read_to_string(&path).unwrap();
    let written = page.clone();
    for (heading, model) in [("### Qwen2.5-7B\n", "7b"), ("### Qwen2.5-32B\n", "32b")] {
        let (before, after) = page.split_once(heading).unwrap();
        let start = after.find("\n|").unwrap() + 1;
        let end = start + after[start..].find("\n\n").unwrap() + 1;
        page = format!("{before}{heading}{}{}{}", &after[..start], table(model), &after[end..]);
    }
    if std::env::var_os("ANYROLL_WRITE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    assert!(written == page, "docs/guides/many_hosts.md is stale: run this test with ANYROLL_WRITE_DOCS=1");
}

/// Tokens per second and GPU in training, by hosts and links, with the percentage of one host's.
fn table(model: &str) -> String {
    let rows: Vec<(usize, usize)> = [1]
        .into_iter()
        .map(|hosts| (hosts, 100))
        .chain([2, 8, 16, 64, 128].into_iter().flat_map(|hosts| [100, 400, 3200].map(|link| (hosts, link))))
        .collect();
    let row = |&(hosts, link): &(usize, usize)| {
        let time =
            plan(hosts, &format!("{link}Gb/s"), &[&format!("model.path=bench/many_hosts/{model}")])["time"]
                .clone();
        let one = number(&time["one_host"]["training_tokens_per_s"]);
        let cell = |of: &Value| match of.as_object() {
            None => String::new(),
            Some(of) => {
                let tokens = number(&of["training_tokens_per_s"]);
                format!("{tokens:.0} ({:.0} %)", 100.0 * tokens / one)
            }
        };
        let [whole, library, hybrid] = [&time["step"], &time["library"], &time["hybrid"]];
        let backward = whole["phases"].as_array().unwrap().iter().find(|phase| phase["name"] == "backward");
        let link = if hosts == 1 { String::new() } else { link.to_string() };
        format!(
            "| {} | {link} | {} | {} | {} | {} | {:.1} |\n",
            8 * hosts,
            cell(whole),
            backward.unwrap()["bound"].as_str().unwrap(),
            cell(library),
            cell(hybrid),
            number(&whole["seconds"]),
        )
    };
    let mut text = "| GPUs | Gb/s of a host | ZeRO-3 | backward is bounded by | `reduction: library` | `shard_group: host` | a step, s |\n|---|---|---|---|---|---|---|\n".to_owned();
    for two in rows.chunks(2) {
        let lines: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = two.iter().map(|it| scope.spawn(|| row(it))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        text.extend(lines);
    }
    text
}
