//! Foreign bytes: a reader of damaged files returns a value or an error, soon, and never panics.
//!
//! Each test damages good files. `ANYROLL_FUZZ_SECONDS=600` makes each last so long, with other cases each time; without
//! it a test tries the same 48 cases. A failing case is shrunk, printed, and kept in `tests/regressions`, whose cases are tried first.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyroll_data::CellTypes;
use anyroll_import::{Origin, import};
use anyroll_pipelines::prepare::Draft;
use anyroll_strategy::checkpoint;
use proptest::{
    collection::vec,
    prelude::{Just, Strategy, any, prop_oneof},
    sample::{Index, select},
    test_runner::{Config, FileFailurePersistence, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};

use super::{ONE_RANK, run_tiny};

/// Longest time of a case, on a crowded machine.
const MOST: Duration = Duration::from_secs(20);

/// Pieces of the readers' languages, and numbers at the edges of types.
const WORDS: [&str; 32] = [
    "null",
    "true",
    "NaN",
    "-1",
    "0",
    "1e999",
    "9223372036854775808",
    "\0",
    "{",
    "}",
    "[",
    "]",
    "{%",
    "%}",
    "{{",
    "}}",
    "\"",
    "'",
    "\\",
    "\\ud800",
    "$",
    "${a}",
    "$((",
    "`",
    "&a ",
    "*a",
    "<<: ",
    "!!binary ",
    ": ",
    "\n",
    "  ",
    "\u{feff}",
];

/// A change of some bytes. An index is a share of the file's length.
#[derive(Clone, Debug)]
enum Damage {
    Set(Index, u8),
    Insert(Index, &'static str),
    Number(Index, u64),
    Delete(Index, usize),
    Repeat(Index, usize, usize),
    Cut(Index),
}

impl Damage {
    fn any() -> impl Strategy<Value = Self> {
        let index = any::<Index>;
        let number = prop_oneof![Just(0), Just(u64::MAX), Just(1 << 31), Just(1 << 40), any::<u64>()];
        prop_oneof![
            4 => (index(), any::<u8>()).prop_map(|(at, byte)| Self::Set(at, byte)),
            4 => (index(), select(&WORDS[..])).prop_map(|(at, word)| Self::Insert(at, word)),
            2 => (index(), number).prop_map(|(at, number)| Self::Number(at, number)),
            2 => (index(), 1_usize..64).prop_map(|(at, len)| Self::Delete(at, len)),
            2 => (index(), 1_usize..64, 1_usize..40).prop_map(|(at, len, times)| Self::Repeat(at, len, times)),
            1 => index().prop_map(Self::Cut),
        ]
    }

    fn apply(&self, bytes: &mut Vec<u8>) {
        let place = |at: &Index, bytes: &[u8]| at.index(bytes.len() + 1);
        let range = |at: &Index, len: usize, bytes: &[u8]| {
            let from = place(at, bytes);
            from..(from + len).min(bytes.len())
        };
        match self {
            Self::Set(at, byte) => {
                let at = place(at, bytes);
                bytes.get_mut(at).into_iter().for_each(|it| *it = *byte);
            }
            Self::Insert(at, word) => {
                let at = place(at, bytes);
                bytes.splice(at..at, word.bytes());
            }
            Self::Number(at, number) => {
                let range = range(at, 8, bytes);
                let len = range.len();
                bytes.splice(range, number.to_le_bytes()[..len].iter().copied());
            }
            Self::Delete(at, len) => drop(bytes.drain(range(at, *len, bytes))),
            Self::Repeat(at, len, times) => {
                let range = range(at, *len, bytes);
                let piece = bytes[range.clone()].repeat(*times);
                bytes.splice(range, piece);
            }
            Self::Cut(at) => bytes.truncate(place(at, bytes)),
        }
    }
}

/// Reads damaged copies of `good` files, by number and content.
pub(super) fn fuzz(name: &str, good: &[Vec<u8>], read: impl Fn(usize, &[u8])) {
    let seconds = env::var("ANYROLL_FUZZ_SECONDS").ok().map(|it| it.parse().expect("a number of seconds"));
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(0));
    let kept = root().join("tests/regressions").join(format!("{name}.txt"));
    let kept = Box::leak(kept.to_str().expect("a text").to_owned().into_boxed_str());
    let mut cases = 0;
    loop {
        let config = Config {
            cases: 48,
            failure_persistence: Some(Box::new(FileFailurePersistence::Direct(kept))),
            ..Config::default()
        };
        let mut runner = match seconds {
            Some(_) => TestRunner::new(config),
            None => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
        };
        let outcome = runner.run(&(0..good.len(), vec(Damage::any(), 1..6)), |(file, damages)| {
            let mut bytes = good[file].clone();
            damages.iter().for_each(|damage| damage.apply(&mut bytes));
            let start = Instant::now();
            read(file, &bytes);
            let took = start.elapsed();
            if took < MOST { Ok(()) } else { Err(TestCaseError::fail(format!("it took {took:?}"))) }
        });
        outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
        cases += 48;
        if Instant::now() >= end {
            return println!("{name}: {cases} cases");
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn golden(names: &[&str]) -> Vec<Vec<u8>> {
    names
        .iter()
        .map(|name| fs::read(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}")))
        .collect()
}

/// Opens what a config names, as `check` does.
fn open(config: &str, sets: &[String]) {
    if let Ok(draft) = Draft::parse(Path::new("damaged.yaml"), config.to_owned(), sets) {
        let _ = draft.open();
    }
}

#[test]
fn configs() {
    let names = [
        "configs/rlvr_sort_cpu.yaml",
        "configs/offline_dpo_sort_cpu.yaml",
        "configs/diffusion_nft_shapes_cpu.yaml",
    ];
    fuzz("configs", &golden(&names), |_, bytes| open(&String::from_utf8_lossy(bytes), &[]));
}

#[test]
fn sets() {
    let sets =
        ["pipeline.rlvr.steps=3", "pipeline.rlvr.reward=[{math: {tolerance: 0.1}}]", "strategy.zero_stage=3"];
    let config = fs::read_to_string(root().join(ONE_RANK)).unwrap();
    let sets = sets.map(|set| set.as_bytes().to_vec());
    fuzz("sets", &sets, |_, bytes| open(&config, &[String::from_utf8_lossy(bytes).into_owned()]));
}

#[test]
fn data() {
    let tables = ["gzip.parquet", "stream.arrow", "verl.arrow", "verl.parquet", "zstd.arrow", "zstd.parquet"];
    let texts = [
        (
            "lines.jsonl",
            "{\"prompt\": \"1>\", \"answer\": \"2\"}\n{\"prompt\": \"3>\", \"answer\": \"4\", \"list\": [1, {\"a\": null}]}\n",
        ),
        (
            "array.json",
            "[{\"prompt\": \"1>\", \"answer\": \"2\"},\n {\"prompt\": \"3>\", \"answer\": \"4\", \"list\": [1, {\"a\": null}]}]\n",
        ),
        (
            "table.csv",
            "prompt,answer,good,score,steps\n1>,2,true,0.5,\"[\"\"a\"\", \"\"b\"\"]\"\n\"3,\n>\",4,0,-1e3,[]\n",
        ),
    ];
    let paths = tables.map(|name| format!("tests/golden/tables/{name}"));
    let mut good = golden(&paths.each_ref().map(|path| &**path));
    good.extend(texts.map(|(_, text)| text.as_bytes().to_vec()));
    let names: Vec<&str> = tables.into_iter().chain(texts.map(|(name, _)| name)).collect();
    let config = fs::read_to_string(root().join(ONE_RANK)).unwrap();
    let cells = CellTypes { flags: vec!["good"], numbers: vec!["score"], lists: vec!["steps"] };
    let folder = tempfile::tempdir().unwrap();
    fuzz("data", &good, |file, bytes| {
        let path = folder.path().join(names[file]);
        fs::write(&path, bytes).unwrap();
        let _ = anyroll_data::rows(&path, &cells);
        open(
            &config,
            &[format!("pipeline.rlvr.data={{file: {{path: {}, held_out_percent: 50}}}}", path.display())],
        );
    });
}

#[test]
fn models() {
    let folder = tempfile::tempdir().unwrap();
    let mut names: Vec<String> = fs::read_dir(root().join("tests/golden/tiny_model"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let mut paths: Vec<String> = names.iter().map(|name| format!("tests/golden/tiny_model/{name}")).collect();
    // Twice, with templates of one name: a folder holds the last that was written.
    for template in ["qwen3", "llama3_1"] {
        names.push("chat_template.jinja".to_owned());
        paths.push(format!("tests/golden/chat/{template}.jinja"));
    }
    let good = golden(&paths.iter().map(|path| &**path).collect::<Vec<_>>());
    let config = fs::read_to_string(root().join(ONE_RANK)).unwrap();
    let sets = [
        format!("model={{path: {}, chat: true}}", folder.path().display()),
        "pipeline.rlvr.warmup=null".to_owned(),
    ];
    fuzz("models", &good, |file, bytes| {
        for (name, content) in names.iter().zip(&good) {
            fs::write(folder.path().join(name), content).unwrap();
        }
        fs::write(folder.path().join(&names[file]), bytes).unwrap();
        open(&config, &sets);
    });
}

#[test]
fn gguf() {
    let names = ["llama.gguf", "spm.gguf", "llama3.gguf"].map(|name| format!("tests/golden/gguf/{name}"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let config = fs::read_to_string(root().join(ONE_RANK)).unwrap();
    let sets =
        [format!("model={{path: {}, chat: false}}", path.display()), "pipeline.rlvr.warmup=null".to_owned()];
    fuzz("gguf", &golden(&names.each_ref().map(|name| &**name)), |_, bytes| {
        fs::write(&path, bytes).unwrap();
        open(&config, &sets);
    });
}

#[test]
fn checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.steps=4"]);
    let path = run.join("checkpoints/step_000004");
    let names: Vec<PathBuf> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
    let files: Vec<PathBuf> = names.into_iter().filter(|path| path.is_file()).collect();
    let good: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    fuzz("checkpoints", &good, |file, bytes| {
        fs::write(&files[file], bytes).unwrap();
        let read = [
            checkpoint::verify(&path).is_ok(),
            checkpoint::extra(&path).is_ok(),
            checkpoint::stamp(&path).is_ok(),
        ];
        let changed = bytes != good[file];
        fs::write(&files[file], &good[file]).unwrap();
        assert!(!(changed && read[0]), "a changed {} passes", files[file].display());
    });
}

#[test]
fn imports() {
    let script = "#!/bin/bash\nset -x\nSIZE=${1:-8}\nARGS=(--beta 0.1 \"--lr\" 5e-7)\nfor i in 1 2; do echo $i; done\n\
                  python3 -m openrlhf.cli.train_dpo \\\n  --pretrain model --dataset data.jsonl \\\n  --train_batch_size \
                  $((SIZE * 4)) \"${ARGS[@]}\" # the end\n";
    let overrides = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/a.parquet \
                     actor_rollout_ref.model.path=m trainer.n_gpus_per_node=8 +a.b=1 $@\n";
    let deepspeed = "{\"zero_optimization\": {\"stage\": 2, \"offload_optimizer\": {\"device\": \"cpu\"}}, \
                     \"bf16\": {\"enabled\": true}, \"train_batch_size\": \"auto\"} // a comment\n";
    let trl =
        "model_name_or_path: m\ndataset_name: d\nlearning_rate: 1.0e-6\nbeta: 0.0\nnum_generations: 8\n";
    let good = [script, overrides, deepspeed, trl].map(|text| text.as_bytes().to_vec());
    let folder = tempfile::tempdir().unwrap();
    let names = ["run.sh", "verl.sh", "ds.json", "grpo.yaml"].map(|name| folder.path().join(name));
    fuzz("imports", &good, |file, bytes| {
        fs::write(&names[file], bytes).unwrap();
        let _ = import(&names[file], None);
        let origins = [Origin::Roll, Origin::Verl, Origin::Deepspeed, Origin::Trl];
        let _ = import(&names[file], Some(origins[file])).map(|import| import.yaml());
    });
}
