//! A completion, finished or in flight.

use std::ops::Range;

use anyroll_data::Tokenizer;
use anyroll_models::{
    Completion, Routes, Sequence,
    generation::{Ending, PolicySpan},
};
use serde::{Deserialize, Serialize};

use super::Episode;

/// A completion, finished or in flight: one turn, or several with an environment's observations between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Prompt, then completion. Each turn includes its end token or stop string, and observations are between
    /// turns.
    pub tokens: Vec<i64>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Log-prob of each sampled token at sampling time: log softmax(logits / temperature), before any other
    /// modification.
    pub logprobs: Vec<f32>,
    /// Weight versions that sampled the tokens, in order.
    pub policies: Vec<PolicySpan>,
    /// Reason why it ended; `None` if it is in flight.
    pub ending: Option<Ending>,
    /// Experts of the first tokens, if sampling [records them](super::Sampler::records_routing): of all but the last, which
    /// is never run, and but observations that no turn follows.
    #[serde(default)]
    pub routes: Routes,
    /// The environment's results, if there is one.
    #[serde(default)]
    pub episode: Option<Episode>,
}

impl Sample {
    /// Creates a sample with an empty completion.
    pub fn begin(prompt: Vec<i64>) -> Self {
        let prompt_len = prompt.len();
        let (logprobs, policies, routes) = (Vec::new(), Vec::new(), Routes::default());
        Self { tokens: prompt, prompt_len, logprobs, policies, ending: None, routes, episode: None }
    }

    /// Returns true if it ended by itself.
    pub fn finished(&self) -> bool {
        self.ending == Some(Ending::Stop)
    }

    /// Ranges of the environment's observations.
    fn observations(&self) -> &[Range<usize>] {
        self.episode.as_ref().map_or(&[], |episode| &episode.observations)
    }

    /// Ranges of sampled tokens: at least one turn, of which the last may be empty.
    pub fn turns(&self) -> Vec<Range<usize>> {
        let starts = [self.prompt_len].into_iter().chain(self.observations().iter().map(|it| it.end));
        let ends = self.observations().iter().map(|it| it.start).chain([self.tokens.len()]);
        starts.zip(ends).map(|(start, end)| start..end).collect()
    }

    /// Tokens before the last turn.
    pub fn context(&self) -> &[i64] {
        &self.tokens[..self.context_len()]
    }

    /// Number of tokens before the last turn.
    pub fn context_len(&self) -> usize {
        self.observations().last().map_or(self.prompt_len, |observation| observation.end)
    }

    /// The unfinished last turn, from which an engine continues.
    pub fn begun(&self) -> Completion {
        let tokens = self.tokens[self.context_len()..].to_vec();
        let (_, policies) = split(&self.policies, self.sampled_before());
        let logprobs = self.logprobs[self.sampled_before()..].to_vec();
        Completion { tokens, logprobs, policies, routes: self.routes.clone(), ..Completion::default() }
    }

    /// Replaces the last turn by the engine's result.
    pub fn go_on(&mut self, turn: Completion) {
        let before = self.sampled_before();
        self.tokens.truncate(self.context_len());
        self.tokens.extend(turn.tokens);
        self.logprobs.truncate(before);
        self.logprobs.extend(turn.logprobs);
        (self.policies, _) = split(&self.policies, before);
        for span in turn.policies {
            match self.policies.last_mut().filter(|last| last.version == span.version) {
                Some(last) => last.tokens += span.tokens,
                None => self.policies.push(span),
            }
        }
        self.routes = turn.routes;
        self.ending = turn.ending;
    }

    /// Appends an observation after the last turn; the next turn starts.
    ///
    /// # Panics
    /// If there is no environment.
    pub fn hear(&mut self, tokens: &[i64]) {
        let start = self.tokens.len();
        self.tokens.extend(tokens);
        self.ending = None;
        let episode = self.episode.as_mut().expect("only an environment speaks");
        episode.observations.push(start..self.tokens.len());
    }

    /// Number of sampled tokens: the completion without observations.
    pub fn completion_len(&self) -> usize {
        self.tokens.len() - self.prompt_len - self.observations().iter().map(Range::len).sum::<usize>()
    }

    /// Text of the last turn, without its end.
    pub fn text(&self, tokenizer: &Tokenizer) -> String {
        tokenizer.decode(&self.tokens[self.context_len()..])
    }

    /// Text after the prompt: the turns with the observations between them.
    pub fn transcript(&self, tokenizer: &Tokenizer) -> String {
        tokenizer.decode(&self.tokens[self.prompt_len..])
    }

    /// Sequence for training; its targets are the tokens of [`Self::turns`].
    pub fn sequence(&self) -> Sequence<'_> {
        Sequence { tokens: &self.tokens, prompt_len: self.prompt_len }
    }

    /// Tokens sampled before the last turn.
    fn sampled_before(&self) -> usize {
        self.completion_len() - (self.tokens.len() - self.context_len())
    }
}

/// Splits spans at a token index.
fn split(spans: &[PolicySpan], mut at: usize) -> (Vec<PolicySpan>, Vec<PolicySpan>) {
    let (mut before, mut behind) = (Vec::new(), Vec::new());
    for &PolicySpan { version, tokens } in spans {
        let first = tokens.min(at);
        at -= first;
        for (part, tokens) in [(&mut before, first), (&mut behind, tokens - first)] {
            if tokens > 0 {
                part.push(PolicySpan { version, tokens });
            }
        }
    }
    (before, behind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(tokens: &[i64], policies: &[(u64, usize)], ending: Option<Ending>) -> Completion {
        let logprobs = tokens.iter().map(|&token| -(token as f32)).collect();
        let span = |&(version, tokens): &(u64, usize)| PolicySpan { version, tokens };
        Completion {
            tokens: tokens.to_vec(),
            logprobs,
            policies: policies.iter().map(span).collect(),
            ending,
            ..Completion::default()
        }
    }

    #[test]
    fn what_was_sampled_stays_what_it_was() {
        let mut sample = Sample { episode: Some(Episode::default()), ..Sample::begin(vec![1, 2]) };
        assert_eq!((sample.turns().len(), sample.completion_len()), (1, 0));
        sample.go_on(turn(&[5, 6], &[(3, 2)], Some(Ending::Stop)));
        sample.hear(&[90, 91, 92]);
        assert_eq!((sample.ending, sample.context_len(), sample.begun()), (None, 7, Completion::default()));
        // A turn that another version of the weights finishes.
        sample.go_on(turn(&[7], &[(3, 1)], None));
        assert_eq!(sample.begun(), turn(&[7], &[(3, 1)], None));
        sample.go_on(turn(&[7, 8], &[(3, 1), (4, 1)], Some(Ending::Stop)));
        assert_eq!(sample.tokens, [1, 2, 5, 6, 90, 91, 92, 7, 8]);
        assert_eq!(sample.turns(), [2..4, 7..9]);
        assert_eq!((sample.completion_len(), sample.logprobs.len()), (4, 4));
        assert_eq!(sample.logprobs, [-5.0, -6.0, -7.0, -8.0]);
        assert_eq!(sample.policies, turn(&[], &[(3, 3), (4, 1)], None).policies);
        assert_eq!(sample.context(), [1, 2, 5, 6, 90, 91, 92]);
    }
}
