//! Every metric that a run can write: its name, unit, reduction and meaning.
//!
//! [`DECLARED`] is the one place: `docs/reference/metrics.md` is generated from it, and the report and TensorBoard show
//! its sentences. A name that is not in it fails the tests.

use Reduction::{Last, Max, Mean, Min, Std, Sum};

/// Reduction of a step's values, over its samples and all ranks, to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Their mean, or a share.
    Mean,
    /// Their sum, or a count.
    Sum,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// Their standard deviation, the unbiased one.
    Std,
    /// None: one value of the step, or of rank 0.
    Last,
}

/// A metric that a run can write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its name in `metrics.jsonl`; a part in braces stands for a name of the run's own.
    pub name: &'static str,
    /// Its unit; empty for a plain number.
    pub unit: &'static str,
    /// Reduction of the step's values.
    pub reduction: Reduction,
    /// Its meaning, in a sentence.
    pub sentence: &'static str,
}

impl Declared {
    const fn new(
        name: &'static str,
        unit: &'static str,
        reduction: Reduction,
        sentence: &'static str,
    ) -> Self {
        Self { name, unit, reduction, sentence }
    }

    /// Returns true if runs of one config, seed and world size write the same bits, resumed or not. Only metrics that
    /// depend on the clock or on memory differ.
    pub fn is_bitwise(&self) -> bool {
        !["time/", "perf/"].iter().any(|prefix| self.name.starts_with(prefix))
    }
}

/// Returns true if `found` is `own` with a text for each `{...}`. Domains and logged metrics have names of the user's,
/// which may have slashes.
fn matches(own: &str, found: &str) -> bool {
    let Some((before, (part, after))) =
        own.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)))
    else {
        return own == found;
    };
    let Some(found) = found.strip_prefix(before) else { return false };
    let ends = (1..=found.len()).filter(|&end| found.is_char_boundary(end));
    let mut fitting = ends.filter(|&end| ["domain", "metric"].contains(&part) || !found[..end].contains('/'));
    fitting.any(|end| matches(after, &found[end..]))
}

/// The declaration of a metric's `name`; `None` for one that no run writes.
pub fn declared(name: &str) -> Option<&'static Declared> {
    let exact = DECLARED.iter().find(|metric| metric.name == name);
    exact.or_else(|| DECLARED.iter().find(|metric| matches(metric.name, name)))
}

/// All metrics, in the order of the page.
pub const DECLARED: &[Declared] = &[
    Declared::new("warmup/loss", "nats", Last, "Loss of the last supervised warm-up step on gold answers."),
    Declared::new("warmup/learning_rate", "", Last, "Learning rate of the step of the supervised warm-up."),
    Declared::new("reward/mean", "", Mean, "Mean reward of the step's samples."),
    Declared::new("reward/std", "", Std, "Standard deviation of the step's rewards."),
    Declared::new("reward/min", "", Min, "Smallest reward of the step."),
    Declared::new("reward/max", "", Max, "Largest reward of the step."),
    Declared::new(
        "reward/greedy",
        "",
        Mean,
        "Mean reward of the prompts' greedy completions, which ReMax compares with.",
    ),
    Declared::new("reward/errors", "samples", Sum, "Samples on which a term of the reward failed."),
    Declared::new(
        "reward/error_rate",
        "share",
        Mean,
        "Share of samples on which a term of the reward failed.",
    ),
    Declared::new("reward/dropped", "samples", Sum, "Images without a finite reward, which teach nothing."),
    Declared::new("reward/{term}/mean", "", Mean, "Mean score of a term of the reward, without its weight."),
    Declared::new("reward/{term}/errors", "samples", Sum, "Samples on which this term failed."),
    Declared::new("reward/{term}/timeouts", "samples", Sum, "Samples on which this term took too long."),
    Declared::new("reward/{term}/dropped", "samples", Sum, "Images without a finite score of this term."),
    Declared::new(
        "logged/{term}/{metric}",
        "",
        Mean,
        "Mean of the values that a term's Python function logged with `log_metric`.",
    ),
    Declared::new("reward/chosen", "", Mean, "Mean implicit reward of the better answers."),
    Declared::new("reward/rejected", "", Mean, "Mean implicit reward of the worse answers."),
    Declared::new(
        "reward/margin",
        "",
        Mean,
        "Mean implicit reward of the better answers less that of the worse ones; training raises it.",
    ),
    Declared::new(
        "reward/accuracy",
        "share",
        Mean,
        "Share of pairs whose better answer has the larger implicit reward.",
    ),
    Declared::new(
        "steps/accuracy",
        "share",
        Mean,
        "Share of steps that the process reward model classifies as their label.",
    ),
    Declared::new(
        "steps/right",
        "share",
        Mean,
        "Mean label of the step's solution steps: the share of right ones.",
    ),
    Declared::new(
        "group/all_right",
        "share",
        Mean,
        "Share of groups in which every sample earned 1 or more.",
    ),
    Declared::new(
        "group/mixed",
        "share",
        Mean,
        "Share of groups whose rewards differ; only these have a gradient.",
    ),
    Declared::new("group/all_wrong", "share", Mean, "Share of groups in which no sample earned anything."),
    Declared::new("response_length/mean", "tokens", Mean, "Mean length of a completion."),
    Declared::new("response_length/min", "tokens", Min, "Length of the shortest completion."),
    Declared::new("response_length/max", "tokens", Max, "Length of the longest completion."),
    Declared::new("response_length/clipped", "share", Mean, "Share of completions cut at the length limit."),
    Declared::new("turns/mean", "turns", Mean, "Mean number of turns of an episode."),
    Declared::new("turns/min", "turns", Min, "Turns of the shortest episode."),
    Declared::new("turns/max", "turns", Max, "Turns of the longest episode."),
    Declared::new("selection/left_out", "share", Mean, "Share of completions that are not trained on."),
    Declared::new("selection/batches", "batches", Last, "Batches of prompts that the step sampled."),
    Declared::new(
        "selection/teaching_groups",
        "share",
        Mean,
        "Share of the sampled groups whose rewards differ and whose difficulty is in range.",
    ),
    Declared::new(
        "selection/filled_up",
        "share",
        Mean,
        "Share of the step's groups that teach nothing and only fill it up.",
    ),
    Declared::new(
        "staleness/mean",
        "steps",
        Mean,
        "Mean age of the weights that sampled a token that is trained on.",
    ),
    Declared::new(
        "staleness/max",
        "steps",
        Max,
        "Age of the oldest weights that sampled a token that is trained on.",
    ),
    Declared::new(
        "staleness/continued",
        "share",
        Mean,
        "Share of completions that several steps' weights sampled.",
    ),
    Declared::new(
        "staleness/waited_for",
        "share",
        Mean,
        "Share of groups at the staleness bound, which the step had to wait for.",
    ),
    Declared::new(
        "carried/sequences",
        "samples",
        Sum,
        "Unfinished completions that the next step continues.",
    ),
    Declared::new("carried/tokens", "tokens", Sum, "Tokens that the unfinished completions have."),
    Declared::new("carried/whole_groups", "groups", Sum, "Whole groups that wait for the next step."),
    Declared::new("loss", "nats", Mean, "Loss that the optimizer descends."),
    Declared::new("loss/policy", "", Mean, "Policy loss; its level says little, its jumps say something."),
    Declared::new(
        "loss/kl",
        "nats",
        Mean,
        "KL divergence from the reference as the loss has it, without its weight.",
    ),
    Declared::new(
        "loss/router_balance",
        "",
        Mean,
        "Loss that balances experts, without its weight: the experts per token if all have as many tokens. `loss` has no part of it.",
    ),
    Declared::new("loss/nll", "nats", Mean, "Negative log-likelihood of an answer's token."),
    Declared::new(
        "loss/preference",
        "",
        Mean,
        "Loss of the comparison of answers, or of the judged answers.",
    ),
    Declared::new("loss/divergence", "nats", Mean, "Divergence of the policy from the teacher, a token."),
    Declared::new("loss/q", "", Mean, "Squared error of the Q heads, a token: the sum over the heads."),
    Declared::new("loss/v", "", Mean, "Expectile error of the value head, a token."),
    Declared::new(
        "loss/cql",
        "nats",
        Mean,
        "Conservative term of the Q heads, a token: the sum over the heads.",
    ),
    Declared::new("loss/awac", "nats", Mean, "Weighted -log-prob of a token of the answers."),
    Declared::new("values/v", "", Mean, "Value of the state before a token, by the value head."),
    Declared::new("values/awac_weight", "", Mean, "Weight of a token in `loss/awac`."),
    Declared::new("values/q_desirable", "", Mean, "Smaller Q of a token, over desirable answers."),
    Declared::new("values/q_other", "", Mean, "Smaller Q of a token, over the other answers."),
    Declared::new("values/q_margin", "", Mean, "Smaller Q of desirable answers less that of the others."),
    Declared::new(
        "kl/old",
        "nats",
        Mean,
        "KL divergence of the policy from the one before the step's first update.",
    ),
    Declared::new("kl/reference", "nats", Mean, "KL divergence of the policy from the frozen reference."),
    Declared::new("kl/coef", "", Last, "Weight of the KL divergence that goes off rewards or advantages."),
    Declared::new(
        "entropy",
        "nats",
        Mean,
        "Entropy of the policy, a token; near 0 samples no longer differ.",
    ),
    Declared::new(
        "clip_fraction/low",
        "share",
        Mean,
        "Share of tokens whose ratio is kept from below by the clipping.",
    ),
    Declared::new(
        "clip_fraction/high",
        "share",
        Mean,
        "Share of tokens whose ratio is kept from above by the clipping.",
    ),
    Declared::new("ratio/mean", "", Mean, "Mean ratio of the new to the old probability of a token."),
    Declared::new("ratio/max", "", Max, "Largest ratio of the new to the old probability of a token."),
    Declared::new("off_policy_fraction", "share", Mean, "Share of tokens left out as off-policy."),
    Declared::new(
        "rollout/logprob_diff_mean",
        "nats",
        Mean,
        "Mean difference of a token's log-prob between sampling and training on the same weights.",
    ),
    Declared::new(
        "rollout/logprob_diff_max",
        "nats",
        Max,
        "Largest difference of a token's log-prob between sampling and training on the same weights.",
    ),
    Declared::new(
        "rollout/routing_diff",
        "share",
        Mean,
        "Share of tokens and layers whose experts of sampling differ from those of training's router on the same weights.",
    ),
    Declared::new(
        "router/entropy",
        "nats",
        Mean,
        "Entropy of a token's probabilities of experts, over the layers with experts.",
    ),
    Declared::new(
        "router/load_max",
        "",
        Max,
        "Tokens of a layer's most loaded expert over the mean of its experts: 1 if all have as many.",
    ),
    Declared::new(
        "router/idle_experts",
        "",
        Sum,
        "Experts without a token in the step, over the layers with experts.",
    ),
    Declared::new(
        "rollout/weight_mean",
        "",
        Mean,
        "Mean importance weight of a token, from sampling to training.",
    ),
    Declared::new(
        "rollout/weight_changed",
        "share",
        Mean,
        "Share of tokens whose importance weight is truncated or masked.",
    ),
    Declared::new(
        "rollout/effective_share",
        "share",
        Mean,
        "Kish's effective share of the tokens under their importance weights.",
    ),
    Declared::new("critic/vf_loss", "", Mean, "Loss of the critic."),
    Declared::new(
        "critic/vf_clipfrac",
        "share",
        Mean,
        "Share of tokens whose value is kept from moving on by the clipping.",
    ),
    Declared::new(
        "critic/vf_explained_var",
        "share",
        Mean,
        "Variance of the returns that the values explain, before the update; below 0 a constant is better.",
    ),
    Declared::new("critic/values/mean", "", Mean, "Mean value of a token."),
    Declared::new("critic/values/min", "", Min, "Smallest value of a token."),
    Declared::new("critic/values/max", "", Max, "Largest value of a token."),
    Declared::new("critic/returns/mean", "", Mean, "Mean return of a token."),
    Declared::new("critic/returns/min", "", Min, "Smallest return of a token."),
    Declared::new("critic/returns/max", "", Max, "Largest return of a token."),
    Declared::new("critic/advantages/mean", "", Mean, "Mean advantage of a token, as the loss has it."),
    Declared::new("critic/advantages/min", "", Min, "Smallest advantage of a token, as the loss has it."),
    Declared::new("critic/advantages/max", "", Max, "Largest advantage of a token, as the loss has it."),
    Declared::new("critic/grad_norm", "", Mean, "Norm of the critic's gradient before clipping."),
    Declared::new("critic/loss_scale", "", Last, "Loss scale of the critic in fp16."),
    Declared::new(
        "critic/skipped_steps",
        "optimizer steps",
        Sum,
        "The critic's optimizer steps that fp16 skipped for an overflow.",
    ),
    Declared::new("critic/learning_rate", "", Last, "Learning rate of the critic."),
    Declared::new("grad_norm", "", Mean, "Norm of the gradient before clipping."),
    Declared::new("loss_scale", "", Last, "Loss scale in fp16."),
    Declared::new(
        "skipped_steps",
        "optimizer steps",
        Sum,
        "Optimizer steps that fp16 skipped for an overflow.",
    ),
    Declared::new("learning_rate", "", Last, "Learning rate after warm-up and decay."),
    Declared::new("eval/greedy", "share", Mean, "Mean reward of greedy completions of held-out prompts."),
    Declared::new("eval/pass@1", "share", Mean, "Chance that a sample of a held-out prompt is right."),
    Declared::new(
        "eval/pass@{k}",
        "share",
        Mean,
        "Chance that one of k samples of a held-out prompt is right.",
    ),
    Declared::new(
        "eval/maj@{k}",
        "share",
        Mean,
        "Chance that the most frequent answer of k samples of a held-out prompt is right.",
    ),
    Declared::new(
        "eval/errors",
        "samples",
        Sum,
        "Completions of held-out prompts on which the reward failed.",
    ),
    Declared::new("eval/loss", "nats", Mean, "Loss on held-out records."),
    Declared::new("eval/nll", "nats", Mean, "Negative log-likelihood of a held-out answer's token."),
    Declared::new("eval/perplexity", "", Mean, "Perplexity of held-out answers."),
    Declared::new(
        "eval/divergence",
        "nats",
        Mean,
        "Divergence of the policy from the teacher on held-out answers, a token.",
    ),
    Declared::new(
        "eval/accuracy",
        "share",
        Mean,
        "Share of held-out pairs whose better answer has the larger implicit reward.",
    ),
    Declared::new(
        "eval/step_accuracy",
        "share",
        Mean,
        "Share of steps of held-out solutions that are classified as their label.",
    ),
    Declared::new(
        "eval/margin",
        "",
        Mean,
        "Mean implicit reward of better held-out answers less that of worse ones.",
    ),
    Declared::new("eval/q_desirable", "", Mean, "Smaller Q of a token, over desirable held-out answers."),
    Declared::new("eval/q_other", "", Mean, "Smaller Q of a token, over the other held-out answers."),
    Declared::new(
        "eval/q_margin",
        "",
        Mean,
        "Smaller Q of desirable held-out answers less that of the others.",
    ),
    Declared::new(
        "eval/kl",
        "nats",
        Mean,
        "KL divergence from the reference, estimated on held-out prompts with answers of others.",
    ),
    Declared::new("eval/exact", "share", Mean, "Share of greedy completions that equal the held-out answer."),
    Declared::new(
        "eval/drift",
        "",
        Mean,
        "Squared distance of pixels from those before training, of the same noise.",
    ),
    Declared::new("eval/dropped", "samples", Sum, "Images of the evaluation without a finite reward."),
    Declared::new("eval/reward", "", Mean, "Mean reward of images from noise that is never trained on."),
    Declared::new(
        "eval/brightness",
        "",
        Mean,
        "Mean brightness of images from noise that is never trained on.",
    ),
    Declared::new(
        "eval/logged/{term}/{metric}",
        "",
        Mean,
        "As `logged/{term}/{metric}`, over the completions of held-out prompts.",
    ),
    Declared::new(
        "eval/{term}",
        "",
        Mean,
        "Mean score of a term of the reward on images from noise that is never trained on.",
    ),
    Declared::new(
        "eval/{domain}/greedy",
        "share",
        Mean,
        "As `eval/greedy`, on the held-out prompts of a domain.",
    ),
    Declared::new(
        "eval/{domain}/pass@1",
        "share",
        Mean,
        "As `eval/pass@1`, on the held-out prompts of a domain.",
    ),
    Declared::new(
        "eval/{domain}/pass@{k}",
        "share",
        Mean,
        "As `eval/pass@{k}`, on the held-out prompts of a domain.",
    ),
    Declared::new(
        "eval/{domain}/maj@{k}",
        "share",
        Mean,
        "As `eval/maj@{k}`, on the held-out prompts of a domain.",
    ),
    Declared::new(
        "perf/tokens_per_s",
        "tokens/s",
        Sum,
        "Tokens sampled or read over the time of the whole step.",
    ),
    Declared::new("perf/images_per_s", "images/s", Sum, "Images sampled over the time of the whole step."),
    Declared::new("perf/denoising_steps_per_s", "steps/s", Sum, "Denoising steps over the time of sampling."),
    Declared::new(
        "perf/allocated_bytes",
        "bytes",
        Last,
        "Memory allocated on rank 0's device at the end of the update, without libtorch's own.",
    ),
    Declared::new(
        "perf/generate_allocated_bytes",
        "bytes",
        Last,
        "Memory allocated on rank 0's device while it samples, without libtorch's own.",
    ),
    Declared::new(
        "perf/device_used_bytes",
        "bytes",
        Max,
        "Most memory in use on a rank's device at the end of the step, by all processes.",
    ),
    Declared::new(
        "perf/device_used_share",
        "share",
        Max,
        "Largest share of a device's memory that is in use at the end of the step.",
    ),
    Declared::new(
        "perf/device_utilization",
        "share",
        Mean,
        "Share of the time since the step before in which the ranks' devices were busy, as drivers report it.",
    ),
    Declared::new(
        "perf/resident_bytes",
        "bytes",
        Max,
        "Most resident host memory of a rank's process at the end of the step.",
    ),
    Declared::new(
        "perf/generate_passes",
        "passes",
        Last,
        "Passes through the model that rank 0's sampling took.",
    ),
    Declared::new(
        "perf/kept_tokens",
        "tokens",
        Last,
        "Tokens whose keys and values rank 0 kept from one turn to the next.",
    ),
    Declared::new(
        "perf/proposed_tokens",
        "tokens",
        Last,
        "Tokens that rank 0's sequences proposed by prompt lookup.",
    ),
    Declared::new("perf/accepted_tokens", "tokens", Last, "Proposed tokens that rank 0 sampled."),
    Declared::new(
        "perf/tokens_per_proposal",
        "tokens",
        Last,
        "Mean number of tokens that a sequence of rank 0 got in a step with a proposal.",
    ),
    Declared::new(
        "perf/shared_rows",
        "share",
        Last,
        "Share of rank 0's training rows that a common prompt saved.",
    ),
    Declared::new(
        "perf/rank_balance",
        "share",
        Last,
        "Mean of the ranks' training rows over the largest: below 1, ranks wait for the one with the longest completions.",
    ),
    Declared::new(
        "perf/experts_sent_bytes",
        "bytes",
        Last,
        "Bytes of rows that rank 0 sent to and for experts on other ranks, in the update.",
    ),
    Declared::new("time/step_s", "s", Last, "Time of a whole step without its evaluation."),
    Declared::new("time/train_s", "s", Last, "Time of preparing and updating."),
    Declared::new("time/generate_s", "s", Last, "Time of sampling."),
    Declared::new("time/reward_s", "s", Last, "Time of scoring beyond sampling."),
    Declared::new("time/rollout_s", "s", Last, "Time that rollout's own devices sampled for the step."),
    Declared::new(
        "perf/rollout_engines",
        "",
        Last,
        "Engines on rollout's own devices that sampled for rank 0.",
    ),
    Declared::new("time/weights_s", "s", Last, "Time waited until rollout's own devices had the weights."),
    Declared::new("time/offload_s", "s", Last, "Time spent waiting for states to leave the device."),
    Declared::new("time/gather_s", "s", Last, "Time of gathering the weights for sampling."),
    Declared::new("time/load_s", "s", Last, "Time that compute stood still for states on their way back."),
    Declared::new(
        "time/experts_exchange_s",
        "s",
        Last,
        "Time that rank 0's compute stood still for rows to and from experts of other ranks, in the update.",
    ),
    Declared::new("time/eval_s", "s", Last, "Time of the evaluation behind the step."),
];

const HEAD: &str = "\
# Metrics

One line of `metrics.jsonl` is one step: `{\"step\":12,\"reward/mean\":0.5,...}`. A metric is over all ranks, unless it says
otherwise. Runs of one config, seed, world size and machine write the same bits, resumed or not, except for `time/*` and
`perf/*`. A part in braces stands for a name of the run's own, such as a term of its reward.

This page is generated from `pipelines/src/metrics/declared.rs`.

| metric | unit | over the step's samples | meaning |
|---|---|---|---|
";

/// `docs/reference/metrics.md`.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    for Declared { name, unit, reduction, sentence } in DECLARED {
        let reduction = match reduction {
            Mean => "mean",
            Sum => "sum",
            Max => "max",
            Min => "min",
            Std => "std",
            Last => "",
        };
        page += &format!("| `{name}` | {unit} | {reduction} | {sentence} |\n");
    }
    page
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, fs, path::Path};

    use super::*;

    #[test]
    fn names_find_their_declaration() {
        let name = |name| declared(name).map(|metric| metric.name);
        assert_eq!(name("reward/mean"), Some("reward/mean"));
        assert_eq!(name("reward/math/mean"), Some("reward/{term}/mean"));
        assert_eq!(name("eval/pass@8"), Some("eval/pass@{k}"));
        assert_eq!(name("eval/pass@1"), Some("eval/pass@1"));
        assert_eq!(name("eval/gsm8k/maj@16"), Some("eval/{domain}/maj@{k}"));
        assert_eq!(name("eval/clip"), Some("eval/{term}"));
        assert_eq!(name("eval/sums/é/greedy"), Some("eval/{domain}/greedy"));
        assert_eq!(name("logged/python/mean"), Some("logged/{term}/{metric}"));
        assert_eq!(name("eval/logged/python_2/a/b"), Some("eval/logged/{term}/{metric}"));
        for none in
            ["reward", "reward/median", "reward//mean", "time/lunch_s", "eval/a/b/c", "reward/a/b/mean"]
        {
            assert_eq!(name(none), None, "{none}");
        }
    }

    #[test]
    fn each_metric_is_declared_once_in_a_sentence() {
        let mut names = HashSet::new();
        for Declared { name, sentence, .. } in DECLARED {
            assert!(names.insert(name), "{name} is declared twice");
            assert!(sentence.ends_with('.') && sentence.split(' ').count() <= 25, "{name}: {sentence}");
        }
    }

    /// `ANYROLL_WRITE_DOCS=1 cargo test --release -p anyroll-pipelines the_page_of_metrics` writes it.
    #[test]
    fn the_page_of_metrics_is_what_is_declared() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/metrics.md");
        if std::env::var_os("ANYROLL_WRITE_DOCS").is_some() {
            fs::write(&path, page()).unwrap();
        }
        let written = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == page(),
            "docs/reference/metrics.md is stale: run this test with ANYROLL_WRITE_DOCS=1"
        );
    }
}
