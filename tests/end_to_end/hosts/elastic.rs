//! A job that goes on with fewer hosts.

use std::fs;

use nix::sys::signal::Signal;

use super::super::{
    Process, assert_nothing_left, assert_same, checkpoints, copy_folder, fail, resume, starts, wait_for_steps,
};
use super::restarts::{assert_words, command, supervisor};
use super::{Network, start_ranks};

/// Three hosts and two hosts have whole groups of these.
const SETS: [&str; 4] = [
    "elastic={min: 2}",
    "pipeline.rlvr.prompts_per_step=12",
    "pipeline.rlvr.warmup.batch_size=24",
    "pipeline.rlvr.checkpoint.keep_last=20",
];

#[test]
fn a_run_goes_on_without_a_host_that_does_not_come_back() {
    let Some(network) = Network::of(&["a", "b", "c"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let more = ["--nnodes", "3", "--restarts", "2", "--join-timeout", "6"];
    let [a, b, c] = ["a", "b", "c"].map(|host| supervisor(&network, host, &run, &SETS, &more));
    wait_for_steps(&run, 6);
    c.send(Signal::SIGKILL);
    drop(c);
    let [a, b] = [a, b].map(Process::finish);
    assert_eq!((a.code, b.code), (Some(0), Some(0)), "{a:#?} {b:#?}");
    let words = "host 2 (c) did not come back: the run goes on with 2 of 3 hosts";
    assert_words(&a, &[words, "restart 1 of 2, from checkpoint step_"]);
    assert!(fs::read_to_string(run.join("log.jsonl")).unwrap().contains(words));
    assert_eq!(starts(&run), 2);
    assert_nothing_left(&run);

    // The same by hand: the two hosts resume from the checkpoint of three.
    let (_, after) = a.stderr.split_once("from checkpoint ").unwrap();
    let by_hand = folder.path().join("by hand");
    copy_folder(&run, &by_hand);
    for later in checkpoints(&by_hand).iter().filter(|name| name.as_str() > &after[..11]) {
        fs::remove_dir_all(by_hand.join("checkpoints").join(later)).unwrap();
    }
    let ranks = start_ranks(&network, &["a", "b"], (1, "10.77.0.1"), &resume(&by_hand));
    for ended in ranks.into_iter().map(Process::finish) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    assert_same(&run, &by_hand);
}

#[test]
fn a_run_that_no_smaller_number_of_hosts_can_continue_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let check = |hosts: &str, sets: &[&str], words: &str| {
        let run = folder.path().join("run");
        let sets = [&SETS[..], sets].concat();
        let error = fail(command("a", &run, &sets, &["--nnodes", hosts, "--restarts", "1"]));
        let words = format!(
            "`elastic.min` is 2, and with {hosts} hosts the run could not go on without one: {words}"
        );
        assert!(error.contains(&words), "no {words:?} in {error:?}");
        assert!(!run.exists());
    };
    check("2", &[], "it must be below `--nnodes`");
    check("3", &["pipeline.rlvr.prompts_per_step=9", "pipeline.rlvr.mini_batches=1"], "");
    let ahead = ["pipeline.rlvr.rollout.async={ahead: 1}"];
    check("3", &ahead, "`rollout.async` keeps completions of each rank in flight");
}
