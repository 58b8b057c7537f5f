//! `anyroll watch`, and the report, which is its page: over HTTP, and in a browser where there is one.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::{
    ONE_RANK, Process, anyroll, fail, run_tiny, succeed, tiny, wait_for_steps, wait_until, whole_lines,
};

/// A page that is served, on a port of its own.
struct Watch {
    address: String,
    process: Process,
}

impl Watch {
    fn start(args: &[&str]) -> Self {
        let process = Process::start(anyroll(["watch", "--port", "0"].iter().chain(args)));
        let said = process.output.path().join("stderr");
        let mut address = String::new();
        wait_until("the page is served", || {
            let text = fs::read_to_string(&said).unwrap();
            let found = text.split_once("http://").and_then(|(_, rest)| rest.split_once('/'));
            found.inspect(|(found, _)| (*found).clone_into(&mut address)).is_some()
        });
        Self { address, process }
    }

    fn send(&self, path: &str, host: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        stream
    }

    fn ask(&self, path: &str, host: &str) -> String {
        let mut answer = String::new();
        self.send(path, host).read_to_string(&mut answer).unwrap();
        answer
    }

    /// Updates of runs as they come.
    fn updates(&self) -> impl Iterator<Item = Value> {
        let lines = BufReader::new(self.send("/events", &self.address)).lines();
        lines.filter_map(|line| serde_json::from_str(line.unwrap().strip_prefix("data: ")?).ok())
    }

    fn url(&self) -> String {
        format!("http://{}/", self.address)
    }
}

/// Opens a page in a browser with the options of `tests/python/browse.py`. Without a browser, prints what is
/// `untested`.
fn browse(page: &str, args: &[&str], untested: &str) -> Option<Value> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/python/browse.py");
    let python = |args: &[&str]| {
        let mut command = Command::new("python3");
        command.arg(script).args(args);
        command
    };
    if !python(&["--find"]).output().is_ok_and(|found| found.status.success()) {
        let words = format!("SKIPPED: {untested}: there is no Chromium, or no python3\n");
        // Past the harness, which hides the output of passing tests.
        io::stderr().write_all(words.as_bytes()).unwrap();
        return None;
    }
    let ended = succeed(python(&[&[page, "--timeout", "100"], args].concat()));
    let seen: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(seen["errors"], serde_json::json!([]), "errors in the page");
    let origin = page.split_inclusive('/').take(3).collect::<String>();
    for request in seen["requests"].as_array().unwrap() {
        let request = request.as_str().unwrap();
        assert!(
            request.starts_with(&origin) || request.starts_with("file://") || request.starts_with("data:")
        );
    }
    Some(seen["values"].clone())
}

#[test]
fn updates_follow_a_run_and_tell_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let process = Process::start(tiny(ONE_RANK, &run, &["pipeline.rlvr.steps=5000"]));
    wait_for_steps(&run, 2);
    let watch = Watch::start(&[run.to_str().unwrap()]);
    let mut updates = watch.updates();
    let first = updates.next().unwrap();
    let head = &first["update"]["head"];
    assert_eq!(
        (&head["state"], &head["steps"], &head["name"]),
        (&"running".into(), &5000.into(), &"run".into())
    );
    assert!(head["description"].as_str().unwrap().starts_with("GRPO"), "{head}");
    let later = updates.next().unwrap();
    assert!(
        later["update"]["head"]["step"].as_u64() > head["step"].as_u64() && later["update"]["reset"] == false
    );
    process.send(Signal::SIGINT);
    assert_eq!(process.finish().code, Some(130));
    let ended = updates.find(|update| update["update"]["head"]["state"] != "running").unwrap();
    assert_eq!(ended["update"]["head"]["state"], "interrupted");
    assert!(ended["update"]["head"]["reason"].as_str().unwrap().contains("--resume"));
    drop(updates);
    watch.process.send(Signal::SIGTERM);
    assert_eq!(watch.process.finish().code, Some(0));
}

#[test]
fn a_browser_shows_a_run_while_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let process = Process::start(tiny(ONE_RANK, &run, &["pipeline.rlvr.steps=20000"]));
    wait_for_steps(&run, 2);
    let watch = Watch::start(&[run.to_str().unwrap()]);
    let args = [
        "--until",
        "runs[0] && (globalThis.first ??= runs[0].head.step) > 0 && runs[0].head.step > first + 5 && \
         document.querySelectorAll('figure:not([hidden]) canvas').length > 8",
        "--do",
        "page.draw()",
        "--value",
        "text=document.querySelector('.run').innerText",
        "--value",
        "newest=(page.draw(), document.querySelector('.steps').textContent === `step ${runs[0].head.step} of 20000`)",
        "--value",
        "lost=!page.connection.hidden",
        "--value",
        "within=trend([0, 1, 1, 1, 0.9, 1, 1, 1, 1, 1], 0.5).every(it => it >= 0 && it <= 1)",
        "--value",
        "wide=document.documentElement.scrollWidth",
    ];
    let phone = ["--width", "390", "--height", "800", "--mobile"];
    if let Some(seen) = browse(&watch.url(), &[&phone[..], &args].concat(), "the page of a running run") {
        let text = seen["text"].as_str().unwrap();
        assert!(text.contains("running") && text.contains("pass@1") && text.contains("of 20000"), "{text}");
        let others = ["newest", "lost", "within", "wide"].map(|name| seen[name].clone());
        assert_eq!(others, [true.into(), false.into(), true.into(), Value::from(390)]);
    }
    process.send(Signal::SIGINT);
    assert_eq!(process.finish().code, Some(130));
}

/// Texts of a run are never code: not in the report, and not on the live page.
#[test]
fn hostile_texts_are_shown_as_texts() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.steps=3"]);
    let hostile =
        "</script><script>globalThis.hacked = 1</script><img src=x onerror='globalThis.hacked = 2'>";
    let lines = whole_lines(&run.join("samples.jsonl"));
    let mut sample: Value = serde_json::from_str(lines.last().unwrap()).unwrap();
    for field in ["prompt", "completion", "answer"] {
        sample[field] = hostile.into();
    }
    append(&run.join("samples.jsonl"), &format!("{sample}\n"));
    append(
        &run.join("log.jsonl"),
        &format!(
            "{}\n",
            serde_json::json!({"time": "2026-01-01T00:00:00Z", "kind": "line", "text": hostile})
        ),
    );
    let watch = Watch::start(&[run.to_str().unwrap()]);
    let args = [
        "--until",
        "runs[0] && document.querySelectorAll('td pre').length > 4",
        "--value",
        "hacked=globalThis.hacked ?? null",
        "--value",
        "cell=page.newest.wide.querySelector('tbody pre').textContent",
        "--value",
        "log=page.log.textContent.includes('<script>')",
        "--value",
        "images=document.querySelectorAll('img').length",
    ];
    if let Some(seen) = browse(&watch.url(), &args, "hostile texts on the live page") {
        let expected = serde_json::json!({"hacked": null, "cell": hostile, "log": true, "images": 0});
        assert_eq!(seen, expected);
    }
}

#[test]
fn the_report_is_the_same_page_without_a_server() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &[]);
    let report = run.join("report.html");
    let args = [
        "--until",
        "document.querySelectorAll('canvas').length > 8",
        "--do",
        "page.newest.search.value = 'no such text'; page.newest.search.dispatchEvent(new Event('input'))",
        "--value",
        "text=document.querySelector('.run').innerText",
        "--value",
        "tiles=[...document.querySelectorAll('.tile h2')].map(it => it.textContent)",
        "--value",
        "found=page.newest.wide.querySelectorAll('tbody tr').length",
        "--value",
        "table=[...page.before.querySelectorAll('th')].map(it => it.textContent)",
    ];
    if let Some(seen) = browse(report.to_str().unwrap(), &args, "the report in a browser") {
        let text = seen["text"].as_str().unwrap();
        assert!(text.contains("finished") && text.contains("step 12 of 12"), "{text}");
        assert!(seen["tiles"].as_array().unwrap().contains(&"pass@1".into()), "{seen}");
        assert_eq!(seen["found"], 0);
        let headings = ["prompt", "right answer", "before (step 0)", "after (step 12)"];
        assert_eq!(seen["table"], serde_json::json!(headings));
    }
}

#[test]
fn a_folder_of_runs_shows_those_that_begin_later_too() {
    let folder = tempfile::tempdir().unwrap();
    let first = run_tiny(&folder, "first", ONE_RANK, &["pipeline.rlvr.steps=3"]);
    let watch = Watch::start(&[folder.path().to_str().unwrap(), first.to_str().unwrap()]);
    let mut updates = watch.updates();
    assert_eq!(updates.next().unwrap()["update"]["head"]["name"], "first");
    let copied = Command::new("cp").arg("-r").arg(&first).arg(folder.path().join("second")).status();
    assert!(copied.unwrap().success());
    let second = updates.find(|update| update["run"] == 1).unwrap();
    assert_eq!(
        (&second["update"]["head"]["name"], &second["update"]["head"]["state"]),
        (&"second".into(), &"finished".into())
    );
    let args = [
        "--until",
        "runs.length === 2 && runs[1] && document.querySelectorAll('.run').length === 2",
        "--value",
        "legend=document.querySelector('figure:not([hidden]) ul').innerText",
    ];
    if let Some(seen) = browse(&watch.url(), &args, "a page of two runs") {
        let legend = seen["legend"].as_str().unwrap();
        assert!(legend.contains("first · reward") && legend.contains("second · reward"), "{legend}");
    }
}

#[test]
fn other_sites_may_not_read_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.steps=3"]);
    let watch = Watch::start(&[run.to_str().unwrap()]);
    let own = watch.ask("/", &watch.address);
    assert!(own.starts_with("HTTP/1.1 200") && own.contains("frame-ancestors 'none'"), "{own}");
    for path in ["/", "/events"] {
        let foreign = watch.ask(path, "evil.example");
        assert!(foreign.starts_with("HTTP/1.1 403") && foreign.contains("--allowed-hosts"), "{foreign}");
    }
    assert!(watch.ask("/config.yaml", &watch.address).starts_with("HTTP/1.1 404"));
}

#[test]
fn mistakes_are_named_with_their_fix() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::create_dir(at("empty")).unwrap();
    fs::write(at("file"), "").unwrap();
    let says = |args: &[&str], parts: &[&str]| {
        let error = fail(anyroll(["watch"].iter().chain(args)));
        parts.iter().for_each(|part| assert!(error.contains(part), "no {part:?} in {error}"));
    };
    says(&[&at("missing")], &["does not exist", "--output", "missing"]);
    says(&[&at("empty")], &["no run folder", "resolved.yaml"]);
    says(&[&at("file")], &["it is a file"]);
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.steps=3"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    says(
        &[run.to_str().unwrap(), "--port", &port],
        &["cannot listen at 127.0.0.1", &port, "choose another `--port`"],
    );
}

fn append(path: &Path, text: &str) {
    OpenOptions::new().append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}
