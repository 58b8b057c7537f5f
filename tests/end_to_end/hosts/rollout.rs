//! Hosts that only sample.

use super::super::rollout_hosts::{engines, rollout_host};
use super::super::{ONE_RANK, Process, assert_same, run_tiny, tiny, wait_for_steps, wait_until};
use super::{ENDLESS, Network};

const HOSTS: &str = "roles.rollout={devices: 1, hosts: {min: 2}}";
const AHEAD: &str = "pipeline.rlvr.rollout.async.ahead=1";

#[test]
fn hosts_that_sample_are_used_and_lost() {
    let Some(network) = Network::of(&["a", "b", "c"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let start = |sets: &[&str]| {
        let start = |host| Process::start(network.on(host, &rollout_host(ONE_RANK, "a", sets)));
        ["b", "c"].map(start)
    };
    let own = run_tiny(&folder, "own", ONE_RANK, &[AHEAD, "roles.rollout.devices=2"]);
    let run = folder.path().join("run");
    let sets = [AHEAD, HOSTS];
    let hosts = start(&sets);
    let trainer = Process::start(network.on("a", &tiny(ONE_RANK, &run, &sets)));
    let trainer = trainer.finish();
    assert!(trainer.code == Some(0) && !trainer.stderr.contains("samples no more"), "{trainer:#?}");
    for ended in hosts.map(Process::finish) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    assert_same(&own, &run);

    // Nobody tells the trainer that a link is gone, nor the host behind it.
    let run = folder.path().join("cut");
    let sets = [&[AHEAD, HOSTS], &ENDLESS[..]].concat();
    let [lost, left] = start(&sets);
    let trainer = Process::start(network.on("a", &tiny(ONE_RANK, &run, &sets)));
    wait_for_steps(&run, 3);
    network.cut("b");
    wait_until("one engine samples", || engines(&run) == Some(1.0));
    let lost = lost.finish();
    assert!(lost.error().contains("the trainer at a:29600 is gone: nothing was heard"), "{lost:#?}");
    trainer.send(nix::sys::signal::Signal::SIGINT);
    assert_eq!((trainer.finish().code, left.finish().code), (Some(130), Some(0)));
}
