//! Completions of training as text: for the terminal and for TensorBoard.

use crate::format::{number, shortened};
use crate::samples::{Sample, Training};
use serde_json::Value;

/// Most characters of a text that is shown.
pub const SHOWN_CHARS: usize = 800;

/// Facts of a completion in a line: its reward, terms, advantage and length.
pub fn facts(sample: &Sample) -> String {
    let reward = if sample.reward.is_finite() { number(sample.reward) } else { "failed".to_owned() };
    let mut facts = vec![format!("reward {reward}")];
    let Some(Training { terms, advantage, tokens, cut, trained, .. }) = &sample.training else {
        return facts.remove(0);
    };
    if terms.len() > 1 {
        let of_term = |(name, score): (&String, &Option<f64>)| Some(format!("{name} {}", number((*score)?)));
        facts.extend(terms.iter().filter_map(of_term));
    }
    facts.push(format!("advantage {}{}", if *advantage > 0.0 { "+" } else { "" }, number(*advantage)));
    facts.push(format!("{tokens} tokens{}", if *cut { ", cut" } else { "" }));
    if !trained {
        facts.push("not trained on".to_owned());
    }
    facts.join(", ")
}

/// Columns that reward functions logged for a completion, as `TERM/COLUMN` with a short text.
pub fn columns(sample: &Sample) -> impl Iterator<Item = (String, String)> {
    const CHARS: usize = 200;
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let of_term = sample.columns.iter().flat_map(|(term, columns)| columns.iter().map(move |it| (term, it)));
    of_term.map(move |(term, (name, value))| (format!("{term}/{name}"), shortened(&text(value), CHARS)))
}

/// [`facts`], followed by the [`columns`].
pub fn facts_and_columns(sample: &Sample) -> String {
    let columns = columns(sample).map(|(name, text)| format!(", {name} {text}"));
    facts(sample) + &columns.collect::<String>()
}

/// The completion with the highest reward and the one with the lowest, of completions of one group; the first and the
/// last of equal ones.
pub fn best_and_worst<'a>(group: &[&'a Sample]) -> Option<[&'a Sample; 2]> {
    let by_reward = |a: &&&Sample, b: &&&Sample| a.reward.total_cmp(&b.reward);
    let scored = || group.iter().filter(|sample| sample.reward.is_finite());
    let (best, worst) = (scored().rev().max_by(by_reward), scored().rev().min_by(by_reward));
    match best.zip(worst) {
        Some((best, worst)) => Some([*best, *worst]),
        None => Some([*group.first()?, *group.last()?]),
    }
}

/// Completions of a group: samples that follow one another with the same step and group.
pub fn groups(samples: &[Sample]) -> impl DoubleEndedIterator<Item = Vec<&Sample>> {
    let key = |sample: &Sample| sample.training.as_ref().map(|training| (sample.step, training.group));
    samples.chunk_by(move |a, b| key(a).is_some() && key(a) == key(b)).map(|group| group.iter().collect())
}

/// Lines for the terminal.
pub fn lines(sample: &Sample) -> String {
    let mut text = format!("step {}, a completion of training: {}", sample.step, facts(sample));
    let texts = [("prompt", &sample.prompt), ("completion", &sample.completion), ("answer", &sample.answer)];
    let texts = texts.map(|(name, text)| (name.to_owned(), shortened(text, SHOWN_CHARS)));
    for (name, value) in texts.into_iter().chain(columns(sample)) {
        let value = value.lines().collect::<Vec<_>>().join("\n              ");
        text += &format!("\n  {name:<11} {value}");
    }
    text
}

/// The best and the worst completion of each group, as Markdown.
pub fn markdown(samples: &[Sample]) -> String {
    let mut text = String::new();
    for group in groups(samples) {
        let Some([best, worst]) = best_and_worst(&group) else { continue };
        text += &format!("**prompt**\n\n{}**answer**\n\n{}", code(&best.prompt), code(&best.answer));
        for (name, sample) in [("best", best), ("worst", worst)] {
            text += &format!("**{name}**: {}\n\n{}", facts_and_columns(sample), code(&sample.completion));
        }
        text += "---\n\n";
    }
    text
}

/// An indented block, which no text can end.
fn code(text: &str) -> String {
    let text = shortened(text, SHOWN_CHARS);
    let lines = if text.is_empty() { vec!["(empty)"] } else { text.lines().collect() };
    lines.iter().map(|line| format!("    {line}\n")).collect::<String>() + "\n"
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::samples::Phase;

    /// A completion of training.
    pub fn sample(step: u64, group: usize, completion: &str, reward: f64) -> Sample {
        Sample {
            step,
            phase: Phase::Train,
            prompt: format!("prompt {group}"),
            completion: completion.to_owned(),
            turns: Vec::new(),
            answer: "gold".to_owned(),
            reward,
            columns: Default::default(),
            training: Some(Training {
                group,
                terms: [("math".to_owned(), Some(reward)), ("length".to_owned(), None)].into(),
                advantage: reward - 0.5,
                tokens: 7,
                cut: reward == 0.0,
                trained: true,
            }),
        }
    }

    #[test]
    fn a_text_has_what_one_needs_to_see_why() {
        assert_eq!(
            lines(&sample(10, 3, "first\nsecond", 0.75)),
            "step 10, a completion of training: reward 0.75, math 0.75, advantage +0.25, 7 tokens\n  \
             prompt      prompt 3\n  completion  first\n              second\n  answer      gold"
        );
        assert_eq!(facts(&sample(1, 0, "", 0.0)), "reward 0, math 0, advantage -0.5, 7 tokens, cut");
        let logged = [("gold".to_owned(), "4".into()), ("right".to_owned(), true.into())];
        let logged =
            Sample { columns: [("python".to_owned(), logged.into())].into(), ..sample(1, 0, "", 0.0) };
        assert!(lines(&logged).ends_with("answer      gold\n  python/gold 4\n  python/right true"));
        assert!(facts_and_columns(&logged).ends_with("cut, python/gold 4, python/right true"));
        let failed = Sample { reward: f64::NAN, training: None, ..sample(1, 0, "", 0.0) };
        assert_eq!(facts(&failed), "reward failed");
    }

    #[test]
    fn groups_are_told_apart_and_have_a_best_and_a_worst() {
        let samples = [
            sample(1, 0, "a", 0.5),
            sample(1, 0, "b", 1.0),
            sample(1, 0, "c", f64::NAN),
            sample(1, 0, "d", 0.0),
            sample(1, 2, "e", 0.0),
            sample(1, 2, "f", 0.0),
            sample(2, 2, "g", 0.0),
        ];
        let found: Vec<String> = groups(&samples)
            .map(|group| best_and_worst(&group).unwrap().map(|it| it.completion.as_str()).concat())
            .collect();
        assert_eq!(found, ["bd", "ef", "gg"]);
        let text = markdown(&samples[..4]);
        assert!(
            text.contains("**best**: reward 1") && text.contains("    b\n") && !text.contains("    a\n"),
            "{text}"
        );
    }
}
