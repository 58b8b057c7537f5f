//! Records of an evaluation without a run.

use anyroll_config::DataConfig;

use super::{Dataset, Error, Reading, Records, distinct, file};

impl Dataset {
    /// Reads the files of `config` for an evaluation alone: all prompts are held out, unless the config holds a part of
    /// them out. The order is that of a run that has the files as `held_out`.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn to_evaluate(config: &DataConfig, reading: Reading) -> Result<Self, Error> {
        match config {
            DataConfig::File(file) if file.held_out.is_none() && file.held_out_percent.is_none() => {
                let records = file::read(file, &file.path, file.max_records, reading)?;
                let read = records.len();
                let held_out = distinct(records);
                if held_out.len() < read {
                    let repeated = read - held_out.len();
                    tracing::warn!(repeated, of = read, "records whose prompt came before are left out");
                }
                Ok(Self(Records::Listed { train: Vec::new(), held_out }))
            }
            config => Self::open(config, reading),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use anyroll_config::FileConfig;

    use super::*;
    use crate::file::tests::plain;

    #[test]
    fn all_prompts_are_held_out_in_the_order_of_a_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let line = |number: u32| format!("{{\"prompt\": \"{number}\", \"answer\": \"a\"}}\n");
        fs::write(path("train.jsonl"), (100..200).map(line).collect::<String>()).unwrap();
        fs::write(path("test.jsonl"), (0..30).chain(0..5).map(line).collect::<String>()).unwrap();
        let reading = Reading { tokens: &|_, _| Ok(0), holds_out: true, step_separator: "" };
        let file = |path: &std::path::Path| FileConfig { path: path.into(), ..plain() };
        let alone = DataConfig::File(Box::new(file(&path("test.jsonl"))));
        let alone = Dataset::to_evaluate(&alone, reading).unwrap();
        let with_train =
            FileConfig { held_out: Some(path("test.jsonl").as_path().into()), ..file(&path("train.jsonl")) };
        let run = Dataset::open(&DataConfig::File(Box::new(with_train)), reading).unwrap();
        for count in [1, 7, 30] {
            assert_eq!(alone.held_out(count).unwrap(), run.held_out(count).unwrap());
        }
        assert_eq!(alone.most_held_out(1000), 30, "a repeated prompt counts once");
        // A percentage is that of training on the same file.
        let part = FileConfig { held_out_percent: Some(20), ..file(&path("test.jsonl")) };
        let part = DataConfig::File(Box::new(part));
        let found = Dataset::to_evaluate(&part, reading).unwrap().most_held_out(1000);
        assert_eq!(found, Dataset::open(&part, reading).unwrap().most_held_out(1000));
        assert!(found > 0 && found < 30, "{found}");
    }
}
