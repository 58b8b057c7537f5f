//! Checksum of a dataset.

use serde_json::json;

use super::{Dataset, Record, Records};

impl Dataset {
    /// Checksum of all prompts, answers and columns that a reward may read, in order; equal on every machine.
    /// Generated records are determined by the config.
    pub fn digest(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        self.each_listed(&mut |part, records| {
            hash(&mut hasher, records);
            hasher.update(part.as_bytes());
        });
        hasher.finalize()
    }

    /// Calls `with` for the listed records of all sources, with the name of their part: training, then held
    /// out.
    fn each_listed(&self, with: &mut dyn FnMut(&str, &[Record])) {
        match &self.0 {
            Records::Synthetic { .. } => {}
            Records::Listed { train, held_out } => {
                with("train", train);
                with("held out", held_out);
            }
            Records::Mixed { sources, .. } => sources.iter().for_each(|(_, data)| data.each_listed(with)),
        }
    }
}

/// Checksum of records outside a dataset, computed as in [`Dataset::digest`].
pub fn digest(records: &[Record]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hash(&mut hasher, records);
    hasher.finalize()
}

fn hash(hasher: &mut crc32fast::Hasher, records: &[Record]) {
    for Record { prompt, answer, rejected, desirable, reward, steps, columns, .. } in records {
        let columns = (!columns.is_empty()).then(|| json!(columns).to_string());
        let of_steps = || steps.iter().map(|step| json!([step.text, step.label])).collect::<Vec<_>>();
        let label = desirable.map(|label| label.to_string());
        let label = if steps.is_empty() { label } else { Some(json!(of_steps()).to_string()) };
        let reward = reward.map(|reward| reward.to_string());
        let judged = [rejected, &label, &reward, &columns].map(Option::as_ref);
        let texts = [Some(prompt), Some(answer)].into_iter().chain(judged);
        for text in texts.flatten() {
            // The length comes first, so that adjacent texts cannot be confused.
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Map;

    use super::*;

    #[test]
    fn a_digest_tells_data_from_any_other() {
        use std::slice::from_ref;
        let record = |prompt: &str, answer: &str, rejected: Option<&str>| Record {
            prompt: prompt.into(),
            answer: answer.into(),
            rejected: rejected.map(str::to_owned),
            ..Record::default()
        };
        let digest = |train: &[Record], held_out: &[Record]| {
            Dataset(Records::Listed { train: train.to_vec(), held_out: held_out.to_vec() }).digest()
        };
        let (a, b, c) = (record("1", "23", None), record("12", "3", None), record("1", "23", Some("4")));
        let with = |value: i32| {
            let columns = Map::from_iter([("length".to_owned(), json!(value))]);
            Record { columns, ..a.clone() }
        };
        let all = [
            digest(from_ref(&a), from_ref(&b)),
            digest(from_ref(&b), from_ref(&a)),
            digest(&[a.clone(), b.clone()], &[]),
            digest(&[], &[a.clone(), b.clone()]),
            digest(&[b.clone(), a.clone()], &[]),
            digest(from_ref(&a), &[]),
            digest(&[b], &[]),
            digest(&[c], &[]),
            digest(&[with(1)], &[]),
            digest(&[with(2)], &[]),
            digest(&[Record { desirable: Some(true), ..a.clone() }], &[]),
            digest(&[Record { desirable: Some(false), ..a.clone() }], &[]),
            digest(&[Record { reward: Some(0.5), ..a.clone() }], &[]),
            digest(&[Record { reward: Some(0.25), ..a.clone() }], &[]),
        ];
        assert_eq!(BTreeSet::from(all).len(), all.len(), "{all:?}");
        // Pinned, since checkpoints contain it.
        assert_eq!(digest(&[a], &[]), 0x03e0fef9);
    }
}
