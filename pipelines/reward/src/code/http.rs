//! A sandbox behind an endpoint that speaks SandboxFusion's protocol, `POST /run_code`.
//!
//! A reply has the `status` `Success` for a program that returned 0, `Failed` for one that did not, took too long or did
//! not compile, and `SandboxError` where the service itself failed; then `compile_result` and `run_result`, each with a
//! `status` (`Finished`, `TimeLimitExceeded` or `Error`), a `return_code`, `stdout` and `stderr`.

use anyroll_config::{CodeConfig, HttpSandboxConfig};
use serde::Deserialize;
use serde_json::json;

use crate::Failure;
use crate::endpoint::{Endpoint, Trouble};

/// Has each program run by the service.
#[derive(Debug)]
pub(super) struct Http {
    endpoint: Endpoint,
    language: String,
    timeout_s: f64,
    memory_mib: u64,
    output_bytes: u64,
}

#[derive(Deserialize)]
struct Reply {
    status: String,
    #[serde(default)]
    message: Option<String>,
    compile_result: Option<Ran>,
    run_result: Option<Ran>,
}

#[derive(Deserialize)]
struct Ran {
    status: String,
    return_code: Option<i64>,
    stdout: Option<String>,
}

impl Http {
    /// Nothing is asked yet.
    ///
    /// # Errors
    /// If the endpoint's key is not in the environment.
    pub(super) fn new(config: &CodeConfig, http: &HttpSandboxConfig) -> Result<Self, Failure> {
        Ok(Self {
            endpoint: Endpoint::new(&http.endpoint(), "")?,
            language: http.language.clone(),
            timeout_s: config.timeout_s,
            memory_mib: config.memory_mib,
            output_bytes: config.output_kib << 10,
        })
    }

    /// Language of the programs.
    pub(super) fn language(&self) -> &str {
        &self.language
    }

    /// Returns the output of `program`; `None` if it does not end well.
    pub(super) fn run(&self, program: &str, input: &str) -> Result<Option<String>, Failure> {
        let body = json!({
            "code": program,
            "language": self.language,
            "stdin": input,
            "compile_timeout": self.timeout_s,
            "run_timeout": self.timeout_s,
            "memory_limit_MB": self.memory_mib,
        });
        // A program whose output makes the answer too long has written too much.
        let written = self.endpoint.ask(&body, |text| self.written(text))?.flatten();
        Ok(written.filter(|written| written.len() as u64 <= self.output_bytes))
    }

    /// Returns the program's output in a reply. A reply without a sign that the program ran is a failure of the service,
    /// never a wrong program.
    fn written(&self, text: &str) -> Result<Option<String>, Trouble> {
        let url = self.endpoint.url();
        let cut = |text: &str| text.chars().take(200).collect::<String>();
        let strange = || Trouble::Lasting(format!("{url} answered without a result: {}", cut(text)).into());
        let reply: Reply = serde_json::from_str(text).map_err(|_| strange())?;
        match (reply.status.as_str(), reply.run_result) {
            ("Success", Some(Ran { status, return_code: Some(0), stdout: Some(stdout) }))
                if status == "Finished" =>
            {
                Ok(Some(stdout))
            }
            ("Failed", run) if run.is_some() || reply.compile_result.is_some() => Ok(None),
            ("SandboxError", _) => {
                let message = reply.message.unwrap_or_default();
                Err(Trouble::Passing(format!("{url}: its sandbox failed: {}", cut(&message)).into()))
            }
            _ => Err(strange()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};
    use std::sync::atomic::Ordering;
    use std::thread;
    use std::time::Duration;

    use serde_json::Value;

    use super::*;
    use crate::endpoint::stub::stub;
    use crate::{Code, Completion, Error, Reward};
    use anyroll_config::Credit;
    use anyroll_config::error_chain::one_line;
    use anyroll_data::Record;

    const SUMS: &str = r#"{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}"#;
    const ASSERTS: &str = r#"{"asserts": ["assert abs(add(1, 2) - 3) < 0.32109876543"]}"#;

    fn code(url: String, change: impl FnOnce(&mut CodeConfig)) -> Code {
        let http = HttpSandboxConfig {
            url,
            language: "python".into(),
            key_variable: None,
            concurrency: 2,
            retries: 2,
            retry_s: 0.01,
            timeout_s: 5.0,
        };
        let mut config = CodeConfig { http: Some(http), timeout_s: 3.0, ..CodeConfig::default() };
        change(&mut config);
        Code::new(&config).unwrap()
    }

    fn score(code: &Code, answer: &str) -> Result<f64, Error> {
        let record = Record { id: "3".into(), answer: answer.into(), ..Record::default() };
        let text = "So:\n```python\nprint(sum(map(int, input().split())))\n```\n";
        code.score(&record, &Completion { text, tokens: None, finished: true })
    }

    fn ran(status: &str, return_code: Option<i64>, stdout: &str) -> Value {
        json!({"status": status, "execution_time": 0.02, "return_code": return_code, "stdout": stdout, "stderr": ""})
    }

    fn reply(status: &str, compile: Value, run: Value) -> String {
        let none = Value::Null;
        json!({"status": status, "message": "", "compile_result": compile, "run_result": run,
               "executor_pod_name": none, "files": {}})
        .to_string()
    }

    /// A service that runs the program of these tests, by knowing what it does.
    fn adds(_: usize, body: &Value) -> (u16, String) {
        let input = body["stdin"].as_str().unwrap();
        let sum: i64 = input.split(' ').map(|number| number.parse::<i64>().unwrap()).sum();
        (200, reply("Success", Value::Null, ran("Finished", Some(0), &format!("{sum}\n"))))
    }

    #[test]
    fn programs_are_run_by_the_service() {
        let (url, seen) = stub(adds, Duration::ZERO);
        assert_eq!(score(&code(url, |_| {}), SUMS).unwrap(), 1.0);
        let body = seen.bodies.lock().unwrap()[0].clone();
        let expected = json!({
            "code": "print(sum(map(int, input().split())))\n", "language": "python", "stdin": "1 2",
            "compile_timeout": 3.0, "run_timeout": 3.0, "memory_limit_MB": 512,
        });
        assert_eq!(body, expected);
        let (url, _) = stub(adds, Duration::ZERO);
        let half = r#"{"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}"#;
        assert_eq!(score(&code(url, |code| code.credit = Credit::Share), half).unwrap(), 0.5);
    }

    /// A service that does run Python.
    fn runs(_: usize, body: &Value) -> (u16, String) {
        let text = |key: &str| body[key].as_str().unwrap();
        let mut python = Command::new("python3");
        python.args(["-c", text("code")]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut python = python.spawn().unwrap();
        // A program may end without reading its input.
        let _ = python.stdin.take().unwrap().write_all(text("stdin").as_bytes());
        let ended = python.wait_with_output().unwrap();
        let status = if ended.status.success() { "Success" } else { "Failed" };
        let written = String::from_utf8(ended.stdout).unwrap();
        (200, reply(status, Value::Null, ran("Finished", ended.status.code().map(i64::from), &written)))
    }

    #[test]
    fn what_asserts_expect_is_never_sent_with_the_program() {
        let score = |code: &Code, program: &str| {
            let record = Record { answer: ASSERTS.into(), ..Record::default() };
            code.score(&record, &Completion { text: program, tokens: None, finished: true })
        };
        let (url, seen) = stub(runs, Duration::ZERO);
        let code = code(url, |_| {});
        assert_eq!(score(&code, "add = lambda a, b: a + b").unwrap(), 1.0);
        assert_eq!(score(&code, "add = lambda a, b: a - b").unwrap(), 0.0);
        assert_eq!(score(&code, "raise SystemExit").unwrap(), 0.0);
        let sent: Vec<String> = seen
            .bodies
            .lock()
            .unwrap()
            .iter()
            .map(|body| body["code"].as_str().unwrap().to_owned())
            .collect();
        let with_program: Vec<&String> = sent.iter().filter(|code| code.starts_with("def _")).collect();
        // The asserts are divided once, and decided twice: a program that ends early is not asked about.
        assert_eq!((sent.len(), with_program.len()), (6, 3));
        for code in with_program {
            assert!(code.contains("add(1, 2))") && !code.contains("32109876543"), "{code}");
        }
    }

    #[test]
    fn asserts_that_cannot_be_read_are_no_wrong_program() {
        let score = |code: &Code, answer: &str| {
            let record = Record { answer: answer.into(), ..Record::default() };
            one_line(
                &code.score(&record, &Completion { text: "", tokens: None, finished: true }).unwrap_err(),
            )
        };
        let (url, _) = stub(runs, Duration::ZERO);
        let error = score(&code(url, |_| {}), r#"{"asserts": ["assert add(1, 2) = 3"]}"#);
        assert!(error.contains("its asserts are no Python: assert add(1, 2) = 3: "), "{error}");
        let silent = |_: usize, _: &Value| (200, reply("Success", Value::Null, ran("Finished", Some(0), "")));
        let (url, _) = stub(silent, Duration::ZERO);
        let error = score(&code(url, |_| {}), ASSERTS);
        assert!(error.contains("its asserts cannot be read"), "{error}");
        let (url, seen) = stub(silent, Duration::ZERO);
        let cpp = code(url, |code| code.http.as_mut().unwrap().language = "cpp".into());
        assert!(score(&cpp, ASSERTS).contains("asserts are Python"));
        assert_eq!(seen.requests.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_program_that_fails_is_wrong() {
        let flood = "x".repeat(300 << 10);
        for answer in [
            reply("Failed", Value::Null, ran("Finished", Some(1), "")),
            reply("Failed", Value::Null, ran("TimeLimitExceeded", None, "")),
            reply("Failed", ran("Finished", Some(1), ""), Value::Null),
            reply("Success", Value::Null, ran("Finished", Some(0), &flood)),
            reply("Success", Value::Null, ran("Finished", Some(0), &flood.repeat(64))),
        ] {
            let told: String = answer.chars().take(120).collect();
            let (url, seen) = stub(move |_, _| (200, answer.clone()), Duration::ZERO);
            assert_eq!(score(&code(url, |_| {}), SUMS).unwrap(), 0.0, "{told}");
            assert_eq!(seen.requests.load(Ordering::SeqCst), 1, "{told}");
        }
    }

    #[test]
    fn a_service_that_fails_is_no_wrong_program() {
        let busy = |n: usize, body: &Value| if n < 2 { (504, "busy".into()) } else { adds(n, body) };
        let (url, seen) = stub(busy, Duration::ZERO);
        assert_eq!(score(&code(url, |_| {}), SUMS).unwrap(), 1.0);
        assert_eq!(seen.requests.load(Ordering::SeqCst), 4);

        let none = Value::Null;
        let broken =
            json!({"status": "SandboxError", "message": "no room left", "run_result": none}).to_string();
        for (answer, words, requests) in [
            ((200, broken), "no room left", 3),
            ((422, "language: not permitted".to_owned()), "not permitted", 1),
            ((200, "{}".to_owned()), "without a result", 1),
            ((200, reply("Failed", Value::Null, Value::Null)), "without a result", 1),
            ((200, reply("Success", Value::Null, ran("Finished", Some(1), ""))), "without a result", 1),
        ] {
            let (url, seen) = stub(move |_, _| answer.clone(), Duration::ZERO);
            let error = one_line(&score(&code(url, |_| {}), SUMS).unwrap_err());
            assert!(error.contains(words), "{error}");
            assert_eq!(seen.requests.load(Ordering::SeqCst), requests, "{error}");
        }
        let (url, _) = stub(adds, Duration::from_secs(30));
        let slow = code(url, |code| {
            let http = code.http.as_mut().unwrap();
            (http.timeout_s, http.retries) = (0.2, 0);
        });
        assert!(score(&slow, SUMS).unwrap_err().failure.is_timeout());
    }

    #[test]
    fn no_more_programs_at_a_time_than_allowed() {
        let (url, seen) = stub(adds, Duration::from_millis(20));
        let code = code(url, |_| {});
        thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| score(&code, SUMS).unwrap());
            }
        });
        assert_eq!(seen.requests.load(Ordering::SeqCst), 12);
        assert_eq!(seen.most_at_once.load(Ordering::SeqCst), 2);
    }
}
