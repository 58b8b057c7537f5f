//! Prometheus, which reads a run while it goes on.

use std::net::TcpListener;

use super::{ONE_RANK, Process, TWO_RANKS, fail, tiny, wait_for_steps, wait_until};

#[test]
fn prometheus_reads_the_metrics_while_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let sets =
        [format!("metrics.prometheus={port}"), "pipeline.rlvr.steps=2000".into(), "name=watched".into()];
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();

    let error = fail(tiny(TWO_RANKS, &run, &sets));
    assert!(error.contains("metrics.prometheus") && error.contains(&port.to_string()), "{error}");
    drop(taken);

    let run = folder.path().join("watched");
    let process = Process::start(tiny(TWO_RANKS, &run, &sets));
    wait_for_steps(&run, 2);
    let mut page = String::new();
    wait_until("the page has a step", || {
        let answer = ureq::get(format!("http://127.0.0.1:{port}/metrics")).call();
        page = answer.ok().and_then(|mut it| it.body_mut().read_to_string().ok()).unwrap_or_default();
        page.contains("anyroll_step{run=\"watched\"} ")
    });
    for line in
        ["# TYPE anyroll_reward_mean gauge\nanyroll_reward_mean{run=\"watched\"} ", "\nanyroll_eval_pass_1{"]
    {
        assert!(page.contains(line), "no {line:?} in\n{page}");
    }
    process.send(nix::sys::signal::Signal::SIGINT);
    assert_eq!(process.finish().code, Some(130));

    let refused = fail(tiny(ONE_RANK, &folder.path().join("none"), &["metrics.prometheus=somewhere"]));
    assert!(refused.contains("metrics.prometheus"), "{refused}");
}
