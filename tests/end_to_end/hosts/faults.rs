//! Links that are bad, and hosts that vanish, under another launcher.

use std::time::{Duration, Instant};

use super::super::offline::{self, SFT};
use super::super::{Process, TWO_RANKS, assert_nothing_left, assert_same, python_with, tiny, wait_for_steps};
use super::{ENDLESS, Network, start_ranks};

/// Most time from the deadline of a collective to the end of its rank, on a busy machine.
const MOST: Duration = Duration::from_secs(15);

#[test]
fn ranks_whose_hosts_lost_the_link_end_in_time_and_name_who_is_missing() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["devices=1", ENDLESS[0], ENDLESS[1], "strategy.collective_timeout_s=3"];
    let ranks = start_ranks(&network, &["a", "b"], (1, "10.77.0.1"), &tiny(TWO_RANKS, &run, &sets));
    wait_for_steps(&run, 3);
    // For b this is the loss of the store, too.
    network.cut("b");
    let cut = Instant::now();
    for (ended, (own, other)) in
        ranks.into_iter().map(Process::finish).zip([("0", "1 on b"), ("1", "0 on a")])
    {
        assert!(cut.elapsed() < MOST, "it took {:?}: {ended:#?}", cut.elapsed());
        let words = format!(" on rank {own} of 2 did not finish within 3s: it waits for rank {other}; ");
        assert!(ended.error().contains(&words), "no {words:?} in {ended:#?}");
    }
    assert_nothing_left(&run);
}

#[test]
fn a_link_that_delays_and_loses_changes_no_bit() {
    let Some(mut network) = Network::of(&["a", "b"]) else { return };
    let Some(python) = python_with("socket", "a link that loses frames") else { return };
    network.degrade(&python, 5, 0.05);
    let folder = tempfile::tempdir().unwrap();
    let one = offline::run(&folder, "one", SFT, &["pipeline.offline.steps=8", "devices=2"]);
    let run = folder.path().join("run");
    let rank = offline::command(SFT, &run, &["pipeline.offline.steps=8"]);
    for ended in start_ranks(&network, &["a", "b"], (1, "a"), &rank).into_iter().map(Process::finish) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    assert_same(&one, &run);
}
