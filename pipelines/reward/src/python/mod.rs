//! The `python` reward: a user's function in Python.

mod worker;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyroll_config::{PythonConfig, Signature};
use anyroll_data::Record;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::{Completion, Error, Failure, Logged, Reward};
use worker::{Answer, Worker};

/// A user's scoring function. It runs in separate processes, at most one per scoring thread. A process that
/// crashes or hangs fails its completion only, and the next completion starts a new one.
#[derive(Debug)]
pub struct Python {
    config: PythonConfig,
    /// Parameters of the function that have no default.
    needs: Vec<String>,
    /// Idle workers.
    idle: Mutex<Vec<Worker>>,
}

/// Input of a worker.
#[derive(Serialize)]
struct Case<'a> {
    prompt: &'a str,
    /// The prompt as messages, empty if it is a text.
    messages: &'a [Value],
    completion: &'a str,
    finished: bool,
    answer: &'a str,
    columns: &'a Map<String, Value>,
    /// Images to score instead of a completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<&'a Images>,
}

/// An image or a video to score.
#[derive(Debug, Serialize)]
pub struct Images {
    /// Frames (one for an image) in the form that the config asks for: a PNG file, or the values of an array.
    #[serde(serialize_with = "in_base64")]
    pub frames: Vec<Vec<u8>>,
    /// Height, width and channels of a frame.
    pub shape: [usize; 3],
    /// True for a video, even of one frame.
    pub is_video: bool,
}

fn in_base64<S: Serializer>(frames: &[Vec<u8>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(frames.iter().map(|frame| BASE64.encode(frame)))
}

/// Problem with the first of `needs`, parameters without a default, that is neither one of the `given` arguments nor one
/// of the `columns`.
pub fn missing(needs: &[String], given: &[&str], columns: Option<&Map<String, Value>>) -> Option<String> {
    let is_column = |name: &String| columns.is_some_and(|columns| columns.contains_key(name));
    let name = needs.iter().find(|name| !given.contains(&name.as_str()) && !is_column(name))?;
    let columns = columns.into_iter().flat_map(Map::keys).map(String::as_str);
    let columns = columns.filter(|name| !given.contains(name));
    let known: Vec<String> = given.iter().copied().chain(columns).map(|name| format!("`{name}`")).collect();
    Some(format!(
        "it needs `{name}`, which is not among {}: give the parameter a default, or the records the column",
        known.join(", ")
    ))
}

impl Python {
    /// Starts a first worker, which checks that the file has the function.
    ///
    /// # Errors
    /// If Python does not start, or the file fails.
    pub fn new(config: &PythonConfig) -> Result<Self, Failure> {
        let first = Worker::start(config)?;
        let needs = first.needs.clone();
        Ok(Self { config: config.clone(), needs, idle: Mutex::new(vec![first]) })
    }

    /// Scores an image or a video of `record`'s prompt; `None` if the function excludes it.
    ///
    /// # Errors
    /// If the function raises, returns no number, or times out.
    pub fn score_images(&self, record: &Record, images: &Images) -> Result<Option<f64>, Error> {
        let Record { prompt, answer, columns, .. } = record;
        let (messages, completion) = (&[][..], "");
        let case =
            Case { prompt, messages, completion, finished: true, answer, columns, image: Some(images) };
        let scored = self.ask(&case).map_err(|failure| Error::new(self.name(), record, failure))?;
        Ok(scored.map(|(score, _)| score))
    }

    fn ask(&self, case: &Case) -> Result<Option<(f64, Logged)>, Failure> {
        let waiting = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut worker = match waiting {
            Some(worker) => worker,
            None => Worker::start(&self.config)?,
        };
        let line = serde_json::to_string(case).expect("plain data");
        let answer = worker.ask(line, Duration::from_secs_f64(self.config.timeout_s))?;
        // A worker that failed is not used again.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
        match answer {
            Answer::Score(score, logged) => Ok(Some((score, logged))),
            Answer::Refused => Ok(None),
            Answer::Error(error) => Err(error.into()),
        }
    }
}

impl Reward for Python {
    fn name(&self) -> &'static str {
        "python"
    }

    /// Reports a parameter without a default that neither the signature nor a column of the record gives.
    fn check(&self, record: &Record) -> Result<(), Error> {
        let of_columns = match self.config.signature {
            Signature::Trl => Some(&record.columns),
            Signature::Verl | Signature::Openrlhf => None,
        };
        let missing = missing(&self.needs, self.config.signature.arguments(), of_columns);
        missing.map_or(Ok(()), |problem| Err(Error::new(self.name(), record, Failure::from(problem))))
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        self.score_and_log(record, completion).map(|(score, _)| score)
    }

    fn score_and_log(&self, record: &Record, completion: &Completion) -> Result<(f64, Logged), Error> {
        let Record { prompt, messages, answer, columns, .. } = record;
        let Completion { text, finished, .. } = *completion;
        let case = Case { prompt, messages, completion: text, finished, answer, columns, image: None };
        let score =
            self.ask(&case).and_then(|score| score.ok_or_else(|| "it returned None for a text".into()));
        score.map_err(|failure| Error::new(self.name(), record, failure))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::time::Instant;

    use super::*;
    use anyroll_config::ImageForm;

    const FUNCTIONS: &str = r#"
import os, subprocess, sys, time
print("printed while loading")

def lengths(completions, answer, **columns):
    print("printed while scoring")
    return [float(len(c)) + float(len(a)) for c, a in zip(completions, answer)]

def by_column(prompts, completions, bonus, finished):
    return [bonus[0] + len(prompts[0]) + finished[0]]

def reward_list(queries, prompts, labels):
    answer = queries[0][len(prompts[0]):]
    return [0.0, 0.0] if answer == "many" else [float(answer == labels[0])]

def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": reward_list(queries, prompts, labels), "scores": [0.5]}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 if solution_str == ground_truth else 0.0, "acc": data_source}

def sizes(images, prompts, bonus):
    assert images[0] != b"bad"
    return [len(images[0]) + bonus[0] if images[0].startswith(b"\x89PNG") and prompts == ["2+2="] else None]

def of_frames(images):
    return [sum(map(len, images[0]))]

def stops(images):
    import signal, threading
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return [0.5]

async def later(completions):
    return [0.25]

def moody(completions):
    text = completions[0]
    if text == "crash":
        os._exit(3)
    if text == "hang":
        time.sleep(600)
    if text == "raise":
        raise KeyError("wrong")
    if text == "none":
        return [None]
    if text == "word":
        return "good"
    if text == "nan":
        return [float("nan")]
    if text == "two":
        return [1.0, 2.0]
    if text == "exit":
        sys.exit("over")
    if text == "killed":
        os.kill(os.getpid(), 9)
    return [float(os.getpid())]

def of_messages(prompts, completions):
    (prompt,), (completion,) = prompts, completions
    assert [it["role"] for it in prompt + completion] == ["system", "user", "assistant"], (prompt, completion)
    return [float(completion[0]["content"] == prompt[-1]["content"])]

def reads():
    try:
        input()
    except EOFError:
        return subprocess.run(["cat"], capture_output=True).stdout

def of_input(completions):
    return [0.5 if reads() == b"" and sys.stdin.read() == "" else 0.0]

def starts(completions):
    for new in (False, True):
        pid = subprocess.Popen(["sleep", "97"], start_new_session=new).pid
        with open(completions[0], "a") as file:
            print(pid, file=file)
    time.sleep(97)

class Thing:
    def __str__(self):
        return "a thing"

def logs(completions, answer, log_metric, log_extra):
    log_metric("chars", len(completions[0]))
    log_metric("chars", 0)
    log_metric("right/share", answer == completions)
    log_extra("gold", answer)
    for name, value in {"none": None, "flag": True, "nan": float("nan"), "big": 10**400, "thing": Thing()}.items():
        log_extra(name, [value])
    return [0.0]

def logs_all(completions, **columns):
    columns["log_metric"]("columns", len(columns))
    return [0.0]

def logs_wrongly(completions, log_metric, log_extra):
    try:
        eval(completions[0], {"metric": log_metric, "extra": log_extra})
    finally:
        log_metric("after", 1)
    return [0.0]
"#;

    fn python(function: &str, signature: Signature) -> (tempfile::TempDir, Result<Python, Failure>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rewards.py");
        std::fs::File::create(&path).unwrap().write_all(FUNCTIONS.as_bytes()).unwrap();
        let config = PythonConfig { signature, ..config(path, function) };
        (folder, Python::new(&config))
    }

    fn config(path: PathBuf, function: &str) -> PythonConfig {
        PythonConfig {
            path,
            function: function.to_owned(),
            signature: Signature::Trl,
            python: "python3".to_owned(),
            timeout_s: 3.0,
            start_timeout_s: 30.0,
            images: None,
        }
    }

    fn record() -> Record {
        let columns = [("bonus".to_owned(), 0.5.into()), ("data_source".to_owned(), "gsm8k".into())];
        Record {
            id: "7".into(),
            prompt: "2+2=".into(),
            answer: "4".into(),
            columns: columns.into_iter().collect(),
            ..Record::default()
        }
    }

    fn image(bytes: Vec<u8>) -> Images {
        Images { frames: vec![bytes], shape: [1, 1, 1], is_video: false }
    }

    fn score(python: &Python, text: &str) -> Result<f64, Error> {
        python.score(&record(), &Completion { text, tokens: None, finished: true })
    }

    #[test]
    fn calls_functions_of_either_signature() {
        let check = |function, signature, text, expected| {
            let (_folder, python) = python(function, signature);
            assert_eq!(score(&python.unwrap(), text).unwrap(), expected, "{function}");
        };
        check("lengths", Signature::Trl, "abc", 4.0);
        check("by_column", Signature::Trl, "abc", 5.5);
        check("later", Signature::Trl, "abc", 0.25);
        check("compute_score", Signature::Verl, "4", 1.0);
        check("compute_score", Signature::Verl, "5", 0.0);
        check("reward_func", Signature::Openrlhf, "4", 1.0);
        check("reward_list", Signature::Openrlhf, "5", 0.0);
        let (_folder, python) = python("reward_list", Signature::Openrlhf);
        let error = anyroll_config::error_chain::one_line(&score(&python.unwrap(), "many").unwrap_err());
        assert!(error.contains("2 rewards"), "{error}");
    }

    #[test]
    fn a_function_logs_metrics_and_columns() {
        let logged = |function: &str, text: &str| {
            let (_folder, python) = python(function, Signature::Trl);
            let python = python.unwrap();
            python.check(&record()).unwrap();
            let completion = Completion { text, tokens: None, finished: true };
            python.score_and_log(&record(), &completion).map(|(_, logged)| logged)
        };
        let found = logged("logs", "4").unwrap();
        let metrics = [("chars", 1.0), ("chars", 0.0), ("right/share", 1.0)];
        assert_eq!(found.metrics, metrics.map(|(name, value)| (name.to_owned(), value)));
        assert_eq!(found.means(), [("chars", 0.5), ("right/share", 1.0)].into());
        let big = format!("1{}", "0".repeat(400));
        let columns = serde_json::json!(
            {"gold": "4", "none": null, "flag": true, "nan": "nan", "big": big, "thing": "a thing"}
        );
        assert_eq!(serde_json::json!(found.columns), columns);
        // `bonus`, `data_source`, `answer`, `finished`, `prompts` and the two functions.
        assert_eq!(logged("logs_all", "").unwrap().metrics, [("columns".to_owned(), 7.0)]);

        for (call, words) in [
            ("metric('a', float('nan'))", "log_metric('a', nan): a metric is a finite number"),
            ("metric('a', '1')", "log_metric('a', '1'): a metric is a finite number"),
            ("metric('a', [1])", "log_metric('a', [1]): a metric is a finite number"),
            ("metric('', 1)", "log_metric('', ...): a name is a text"),
            ("metric('a\\nb', 1)", "a name is a text of 1 to 200 characters in a line"),
            ("extra('a', 'text')", "log_extra('a', 'text'): give a list"),
            ("extra('a', [1, 2])", "log_extra('a', ...) was given 2 values for one completion"),
            ("extra('a', [])", "log_extra('a', ...) was given 0 values for one completion"),
            ("extra(1, [2])", "log_extra(1, ...): a name is a text"),
        ] {
            let error = anyroll_config::error_chain::one_line(&logged("logs_wrongly", call).unwrap_err());
            assert!(error.contains(words) && error.contains("in logs_wrongly"), "{call}: {error}");
        }
    }

    #[test]
    fn conversations_come_as_messages() {
        let (_folder, python) = python("of_messages", Signature::Trl);
        let python = python.unwrap();
        let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
        let messages = vec![message("system", "Reason."), message("user", "4")];
        let record = Record { messages, ..record() };
        for (text, expected) in [("4", 1.0), ("5", 0.0)] {
            let completion = Completion { text, tokens: None, finished: true };
            assert_eq!(python.score(&record, &completion).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn a_function_has_an_empty_input() {
        let (_folder, python) = python("of_input", Signature::Trl);
        assert_eq!(score(&python.unwrap(), "x").unwrap(), 0.5);
    }

    #[test]
    fn a_function_that_is_given_up_leaves_nothing_behind() {
        let (folder, python) = python("starts", Signature::Trl);
        let started = folder.path().join("started");
        assert!(score(&python.unwrap(), started.to_str().unwrap()).unwrap_err().failure.is_timeout());
        let started = std::fs::read_to_string(started).unwrap();
        assert_eq!(started.lines().count(), 2);
        for pid in started.lines() {
            assert!(!std::path::Path::new("/proc").join(pid).exists(), "{pid} is left");
        }
    }

    #[test]
    fn images_come_as_png_files_and_may_be_refused() {
        let (_folder, python) = python("sizes", Signature::Trl);
        let python = python.unwrap();
        let score = |png: &[u8]| python.score_images(&record(), &image(png.to_vec()));
        assert_eq!(score(b"\x89PNG\x00").unwrap(), Some(5.0 + 0.5));
        assert_eq!(score(b"").unwrap(), None);
        assert!(score(b"bad").is_err());
    }

    #[test]
    fn videos_come_as_lists_of_their_frames() {
        let (_folder, python) = python("of_frames", Signature::Trl);
        let frames = vec![b"12".to_vec(), b"345".to_vec()];
        let video = Images { frames, shape: [1, 1, 1], is_video: true };
        assert_eq!(python.unwrap().score_images(&record(), &video).unwrap(), Some(5.0));
    }

    /// The image is larger than a pipe's buffer, so that even the write blocks.
    #[test]
    fn a_process_that_reads_no_more_is_given_up() {
        let (_folder, python) = python("stops", Signature::Trl);
        let python = python.unwrap();
        let score = || python.score_images(&record(), &image(vec![0; 1 << 20]));
        assert_eq!(score().unwrap(), Some(0.5));
        std::thread::sleep(Duration::from_millis(500));
        assert!(score().unwrap_err().failure.is_timeout());
        assert_eq!(score().unwrap(), Some(0.5));
    }

    #[test]
    fn arrays_without_numpy_are_told_at_the_start() {
        let (folder, _) = python("sizes", Signature::Trl);
        // A Python without any packages.
        let bare = folder.path().join("python");
        std::fs::write(&bare, "#!/bin/sh\nexec python3 -I -S \"$@\"\n").unwrap();
        std::fs::set_permissions(&bare, std::fs::Permissions::from_mode(0o755)).unwrap();
        let config = |images| PythonConfig {
            python: bare.to_str().unwrap().to_owned(),
            images,
            ..config(folder.path().join("rewards.py"), "sizes")
        };
        assert!(Python::new(&config(Some(ImageForm::Png))).is_ok());
        let error = Python::new(&config(Some(ImageForm::Uint8))).unwrap_err().to_string();
        for words in ["`images: uint8` needs numpy", "install it there", "write `images: png`"] {
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn what_goes_wrong_costs_its_sample_and_no_other() {
        let (_folder, python) = python("moody", Signature::Trl);
        let python = python.unwrap();
        let first = score(&python, "fine").unwrap();
        let fails = |text: &str, words: &str, same_worker: bool| {
            let error = score(&python, text).unwrap_err();
            let told = anyroll_config::error_chain::one_line(&error);
            assert!(told.contains("record 7") && told.contains(words), "{told}");
            let before = score(&python, "fine").unwrap();
            assert_eq!(before == first, same_worker, "{text}");
            error
        };
        fails("raise", "KeyError: 'wrong'; File \"", true);
        fails("raise", "rewards.py\", line 44, in moody", true);
        fails("exit", "it called sys.exit('over'); File \"", true);
        fails("none", "it returned None", true);
        fails("word", "it returned 'good': return a list with a score", true);
        fails("nan", "it returned nan", true);
        fails("two", "it returned 2 scores", true);
        fails("crash", "ended with exit status: 3", false);
        fails("killed", "ended with signal: 9", false);
        let started = Instant::now();
        assert!(fails("hang", "no answer in 3 s", false).failure.is_timeout());
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    }

    #[test]
    fn a_file_that_cannot_be_used_is_told_at_the_start() {
        let (_folder, missing) = python("no_such", Signature::Trl);
        assert!(missing.unwrap_err().to_string().contains("no function `no_such`"));
        let (folder, _) = python("moody", Signature::Trl);
        let path = folder.path().join("broken.py");
        std::fs::write(&path, "def f(:\n").unwrap();
        let config = config(path, "f");
        assert!(Python::new(&config).unwrap_err().to_string().contains("SyntaxError"));
        let config = PythonConfig { python: "no-such-python".into(), ..config };
        assert!(Python::new(&config).unwrap_err().to_string().contains("no-such-python"));
    }
}
