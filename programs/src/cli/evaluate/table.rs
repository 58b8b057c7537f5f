//! The result of an evaluation for a terminal.

use anyroll_pipelines::{
    evaluation::{Completion, DomainSummary, Method, Prompt, Summary},
    format::shortened,
};
use serde_json::Value;

/// Most characters of a text in an example.
const EXAMPLE_CHARS: usize = 600;

/// The numbers, with the `facts` of the sampling.
pub(super) fn table(facts: &Value, summary: &Summary) -> String {
    let mut text = String::new();
    let text_of = |name: &str| facts[name].as_str().map_or_else(|| facts[name].to_string(), str::to_owned);
    let terms = facts["reward"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let step = facts["step"].as_u64().filter(|step| *step > 0);
    let mut fact = |name: &str, value: String| text += &format!("{name:<10}{value}\n");
    fact("model", text_of("model") + &step.map_or_else(String::new, |step| format!(", step {step}")));
    fact("reward", terms.collect::<Vec<_>>().join(", "));
    let samples = format!(
        "greedy and {} samples a prompt at temperature {}, top_p {}, seed {}",
        facts["samples"], facts["temperature"], facts["top_p"], facts["seed"]
    );
    fact("sampling", samples);
    let lengths = summary.lengths;
    let share = 100.0 * lengths.cut as f64 / lengths.completions as f64;
    let cut = format!("{} of {} cut ({share:.1} %)", lengths.cut, lengths.completions);
    let limit = &facts["max_new_tokens"];
    fact(
        "tokens",
        format!("mean {:.1}, p95 {}, longest {}; {cut} at {limit}", lengths.mean, lengths.p95, lengths.max),
    );
    text += "\n";
    text += &estimates(&summary.all);
    if let Some(reason) = summary.no_votes {
        text += &format!("\nno maj@k: {reason}\n");
    }
    text += &domains(&summary.domains);
    text
}

/// A row for each estimate of all prompts.
fn estimates(summary: &DomainSummary) -> String {
    let mut text = format!("{:<10}{:>8}   95 % interval   of {} prompts\n", "", "value", summary.prompts);
    for it in &summary.estimates {
        let method = match it.interval {
            Method::Wilson => "Wilson",
            Method::Bootstrap => "bootstrap over prompts",
        };
        text += &format!("{:<10}{:>8.3}   {:.3} to {:.3}  {method}\n", it.name, it.value, it.low, it.high);
    }
    if summary.unscored > 0 {
        text +=
            &format!("{} prompts are left out, since the reward failed on a completion\n", summary.unscored);
    }
    text
}

/// A row for each domain, if there are several.
fn domains(domains: &[DomainSummary]) -> String {
    let Some(first) = domains.iter().max_by_key(|domain| domain.estimates.len()) else {
        return String::new();
    };
    let width = domains.iter().map(|it| it.domain.chars().count()).max().unwrap_or(0).max(6) + 2;
    let names: String = first.estimates.iter().map(|it| format!("{:>9}", it.name)).collect();
    let mut text = format!("\n{:<width$}{:>8}{names}\n", "domain", "prompts");
    for domain in domains {
        let values: String = domain.estimates.iter().map(|it| format!("{:>9.3}", it.value)).collect();
        text += &format!("{:<width$}{:>8}{values}\n", domain.domain, domain.prompts);
    }
    text
}

/// The first `count` right and wrong greedy completions, in the order of the prompts.
pub(super) fn examples(prompts: &[Prompt], count: usize) -> String {
    let mut text = String::new();
    for (name, right) in [("right", true), ("wrong", false)] {
        let chosen =
            prompts.iter().filter(|prompt| prompt.greedy.score.is_ok() && prompt.greedy.is_right() == right);
        for prompt in chosen.take(count) {
            text += &example(name, prompt, &prompt.greedy);
        }
    }
    text
}

fn example(name: &str, prompt: &Prompt, completion: &Completion) -> String {
    let cut = if completion.finished { "" } else { ", cut" };
    let mut text = format!("\n{name}: {}, {} tokens{cut}\n", prompt.record.id, completion.tokens);
    let mut part = |name: &str, value: &str| {
        let value = shortened(value, EXAMPLE_CHARS);
        let lines: Vec<&str> = value.lines().collect();
        text += &format!("  {name:<12}{}\n", lines.join("\n              "));
    };
    part("prompt", &prompt.record.prompt);
    part("completion", &completion.text);
    part("answer", &prompt.record.answer);
    if let Some(extracted) = &completion.extracted
        && *extracted != completion.text
    {
        part("extracted", extracted);
    }
    text
}
