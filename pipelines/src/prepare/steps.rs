//! Number of steps for a number of passes over the data.

use anyroll_config::{DataConfig, DataEpochs, PipelineConfig, Section, Steps, whole_steps};
use anyroll_data::Dataset;

use crate::opened::Opened;

/// Maximum passes over the data; a larger number is a typing mistake.
const MOST_EPOCHS: f64 = 1e6;

/// Length of a run.
pub(super) struct Length {
    pub(super) steps: u64,
    /// Passes that the steps cover, if the config sets passes.
    pub(super) reason: Option<String>,
}

/// Writes the number of steps for the config's passes over the data into the `pipeline` of a valid config.
pub(super) fn fill(pipeline: &mut PipelineConfig, opened: &Opened) -> Length {
    let (steps, size) = pipeline.steps_and_their_size();
    let length = match steps {
        Steps::Count(steps) => Length { steps, reason: None },
        Steps::By(DataEpochs { data_epochs }) => {
            let records = opened.dataset().and_then(Dataset::records_of_a_pass);
            of_epochs(data_epochs, records.unwrap_or(0), size)
        }
    };
    match pipeline {
        PipelineConfig::Rlvr(rlvr) => rlvr.steps = Steps::Count(length.steps),
        PipelineConfig::Offline(offline) => offline.steps = Steps::Count(length.steps),
        PipelineConfig::Diffusion(_) => {}
    }
    length
}

/// Number of steps of a pipeline with this data; `None` if it is unknown, with a problem if the config is the cause.
pub(super) fn length(pipeline: &PipelineConfig, dataset: Option<&Dataset>, at: &Section) -> Option<Length> {
    let at = at.below("pipeline").below(pipeline.name());
    let (steps, size) = pipeline.steps_and_their_size();
    let epochs = match steps {
        Steps::Count(steps) => {
            // With 0 steps an RLVR run only evaluates.
            let evaluates = steps == 0 && matches!(pipeline, PipelineConfig::Rlvr(_));
            let holds = (evaluates || at.positive("steps", steps)) && at.is_read("steps");
            return holds.then_some(Length { steps, reason: None });
        }
        Steps::By(DataEpochs { data_epochs }) => data_epochs,
    };
    let holds = epochs > 0.0 && epochs <= MOST_EPOCHS;
    at.number("steps.data_epochs", epochs, holds, &format!("above 0, at most {MOST_EPOCHS}"));
    let records = records_of_a_pass(pipeline, dataset?, &at)?;
    at.is_sound("steps").then(|| of_epochs(epochs, records, size))
}

fn of_epochs(epochs: f64, records: usize, size: usize) -> Length {
    let reason = Some(format!("{epochs} epochs of {records} training records, {size} a step"));
    Length { steps: steps_of(epochs, records, size), reason }
}

/// Records of one pass over the data, if the config sets passes and every step has the same number of records.
fn records_of_a_pass(pipeline: &PipelineConfig, dataset: &Dataset, at: &Section) -> Option<usize> {
    let field = "steps.data_epochs";
    let help = "write the number of steps, such as `steps: 200`";
    let (data, mixes_groups) = match pipeline {
        PipelineConfig::Rlvr(rlvr) => (&rlvr.data, rlvr.selection.mixed_groups.is_some()),
        PipelineConfig::Offline(offline) => (&offline.data, false),
        PipelineConfig::Diffusion(_) => return None,
    };
    let message = "how many prompts a step takes depends on its completions: `selection.mixed_groups` samples further ones";
    at.ensure(!mixes_groups, field, message, format!("{help}, or leave `mixed_groups` out"));
    let records = dataset.records_of_a_pass();
    let message = match data {
        DataConfig::Mix(_) => "each source of a mix has passes of its own, by its weight",
        _ => "the records are made for each step anew: no pass over them ends",
    };
    at.ensure(records.is_some(), field, message, help);
    records
}

/// The smallest number of steps of `size` records that covers `epochs` passes over `records`.
fn steps_of(epochs: f64, records: usize, size: usize) -> u64 {
    whole_steps(epochs * records as f64 / size as f64).max(1)
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, fs, path::Path};

    use super::*;
    use crate::{
        prepare::tests::{Loaded, SMALL, machine, only_problem, read},
        run::{Machine, Run},
    };
    use anyroll_config::{Error, Invalid};
    use anyroll_data::Draw;

    /// Steps of consecutive epochs in `transformers` (`Trainer.set_initial_training_values`).
    fn of_transformers(epochs: f64, records: usize, size: usize) -> u64 {
        (epochs * records.div_ceil(size) as f64).ceil() as u64
    }

    /// Steps in verl, whose loader drops the last batch of an epoch if it is not full.
    fn of_verl(epochs: u64, records: usize, size: usize) -> u64 {
        (records / size) as u64 * epochs
    }

    #[test]
    fn steps_are_those_of_other_systems_where_batches_are_full() {
        for (epochs, records, size) in [(1, 64, 8), (3, 64, 8), (15, 7473, 53), (7, 5, 5), (2, 90, 1)] {
            let steps = steps_of(epochs as f64, records, size);
            assert_eq!(steps, of_transformers(epochs as f64, records, size));
            assert_eq!(steps, of_verl(epochs, records, size));
        }
        for (epochs, records, size) in [(0.5, 64, 8), (0.3, 80, 8), (2.25, 64, 16), (0.01, 64, 8)] {
            assert_eq!(steps_of(epochs, records, size), of_transformers(epochs, records, size), "{epochs}");
        }
        // Between the two if they differ.
        for (epochs, records, size) in [(3, 100, 8), (4, 7, 5), (2, 7473, 1024)] {
            let steps = steps_of(epochs as f64, records, size);
            assert!(of_verl(epochs, records, size) <= steps);
            assert!(steps <= of_transformers(epochs as f64, records, size));
        }
        // 11 and 7 in decimal, slightly more in binary.
        assert_eq!((steps_of(1.1, 10, 1), steps_of(0.07, 100, 1)), (11, 7));
        assert_eq!(steps_of(1.0, 3, 8), 1);
    }

    /// Loads a config with a file of 40 sums, some of them held out.
    fn with_file(folder: &Path, sets: &[&str]) -> Result<Loaded, Error> {
        let line = |number: u32| format!("{{\"prompt\": \"{number}+1=\", \"answer\": \"{}\"}}\n", number + 1);
        let path = folder.join("sums.jsonl");
        fs::write(&path, (0..40).map(line).collect::<String>()).unwrap();
        let data = format!("pipeline.rlvr.data={{file: {{path: {}}}}}", path.display());
        let few = "pipeline.rlvr.evaluation.prompts=1";
        read(SMALL, &[&[data.as_str(), few], sets].concat())
    }

    fn resolved(folder: &Path, sets: &[&str], machine: &Machine) -> Run {
        with_file(folder, sets).unwrap().resolve(machine).unwrap()
    }

    #[test]
    fn epochs_cover_the_records_that_are_trained_on() {
        let folder = tempfile::tempdir().unwrap();
        for (epochs, least, most) in [("1", 1, 2), ("3", 3, 4), ("2.5", 2, 3), ("0.25", 0, 1)] {
            let set = format!("pipeline.rlvr.steps={{data_epochs: {epochs}}}");
            let loaded = with_file(folder.path(), &[&set]).unwrap();
            let run = loaded.resolve(&machine()).unwrap();
            let dataset = loaded.dataset().unwrap();
            let records = dataset.records_of_a_pass().unwrap();
            assert!((25..40).contains(&records), "some of 40 are held out: {records}");

            let mut seen: HashMap<String, u64> = HashMap::new();
            for step in 0..run.steps {
                for record in dataset.train_batch(Draw::Rollout, run.config.seed, step, 4) {
                    *seen.entry(record.id).or_default() += 1;
                }
            }
            let drawn: u64 = seen.values().sum();
            let wanted = epochs.parse::<f64>().unwrap() * records as f64;
            assert!(drawn as f64 >= wanted && ((drawn - 4) as f64) < wanted, "{drawn} for {wanted}");
            assert!(least == 0 || seen.len() == records);
            assert!(seen.values().all(|times| (least..=most).contains(times)), "{epochs}: {seen:?}");
        }
    }

    #[test]
    fn a_resolved_run_has_the_number_and_why() {
        let folder = tempfile::tempdir().unwrap();
        let sets = ["pipeline.rlvr.steps={data_epochs: 2}"];
        let run = resolved(folder.path(), &sets, &machine());
        let yaml = run.to_yaml();
        let reason = format!("# pipeline.rlvr.steps: {}\n", run.steps_reason.as_ref().unwrap());
        assert!(yaml.starts_with(&reason) && reason.contains(": 2 epochs of "), "{yaml}");
        assert!(yaml.contains(&format!("\n    steps: {}\n", run.steps)), "{yaml}");
        let again = read(&yaml, &[]).unwrap().resolve(&machine()).unwrap();
        assert_eq!((&again.config, again.steps_reason), (&run.config, None));
        // Records of a step over all ranks.
        let two = resolved(folder.path(), &[sets[0], "devices=2"], &machine());
        assert_eq!(two.steps, run.steps);
        // A later `--set` overrides an earlier one.
        let ten = resolved(folder.path(), &[sets[0], "pipeline.rlvr.steps=10"], &machine());
        assert_eq!((ten.steps, ten.steps_reason), (10, None));
    }

    #[track_caller]
    fn check_refused(loaded: Result<Loaded, Error>, expected: [&str; 3]) {
        let Invalid { field, message, help, .. } = only_problem(loaded.unwrap_err());
        let [in_field, in_message, in_help] = expected;
        assert_eq!(field, in_field);
        assert!(message.contains(in_message) && help.contains(in_help), "{message}\n{help}");
    }

    #[test]
    fn what_has_no_passes_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let field = "pipeline.rlvr.steps.data_epochs";
        let epochs = "pipeline.rlvr.steps={data_epochs: 2}";
        check_refused(read(SMALL, &[epochs]), [field, "made for each step anew", "`steps: 200`"]);
        let mix = "pipeline.rlvr.data={mix: [{domain: a, data: {sort: {digits: 6}}}]}";
        check_refused(read(SMALL, &[mix, epochs]), [field, "each source of a mix", "`steps: 200`"]);
        let mixed = "pipeline.rlvr.selection.mixed_groups={}";
        let with = |sets: &[&str]| with_file(folder.path(), sets);
        check_refused(with(&[epochs, mixed]), [field, "depends on its completions", "leave `mixed_groups`"]);
        for wrong in ["0", "-1", ".nan", "1e9"] {
            let set = format!("pipeline.rlvr.steps={{data_epochs: {wrong}}}");
            check_refused(with(&[&set]), [field, "out of range", "above 0, at most 1000000"]);
        }
        let set = "pipeline.rlvr.steps={epochs: 2}";
        check_refused(with(&[set]), ["pipeline.rlvr.steps.epochs", "no such field", "`data_epochs`"]);
        let set = "pipeline.rlvr.steps=many";
        check_refused(with(&[set]), ["pipeline.rlvr.steps", "the text `many`", "or {data_epochs: 3}"]);
    }

    #[test]
    fn schedules_end_with_the_last_epoch() {
        let folder = tempfile::tempdir().unwrap();
        let warmup =
            |steps: u64| format!("pipeline.rlvr.optimizer.schedule={{linear: {{warmup_steps: {steps}}}}}");
        let epochs = "pipeline.rlvr.steps={data_epochs: 2}";
        let steps = resolved(folder.path(), &[epochs], &machine()).steps;
        resolved(folder.path(), &[epochs, &warmup(steps - 1)], &machine());
        let refused = with_file(folder.path(), &[epochs, &warmup(steps)]);
        let message = format!("{steps} of {steps} steps leave none to fall");
        let field = "pipeline.rlvr.optimizer.schedule.linear.warmup_steps";
        check_refused(refused, [field, &message, "fewer than the steps"]);
    }
}
