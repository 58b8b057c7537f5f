//! Two hosts on one machine: network namespaces with addresses of their own, and a link between them.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{Ended, Process, TWO_RANKS, assert_same, run_tiny, tiny};

/// Makes the hosts `a` and `b`.
const MAKE: &str = r#"
set -e
mount -t tmpfs none /run && mkdir /run/netns
ip netns add a && ip netns add b
ip link add to_b netns a type veth peer name to_a netns b
ip -n a addr add 10.77.0.1/24 dev to_b && ip -n b addr add 10.77.0.2/24 dev to_a
for host in a b; do ip -n $host link set lo up; done
ip -n a link set to_b up && ip -n b link set to_a up
# on HOST NAMES COMMAND...: with a file of names of its own
on() {
  host=$1 names=$2; shift 2
  nsenter --net=/run/netns/$host unshare --mount sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$names" "$@"
}
"#;

/// Starts a rank on each host, and ends with their exit codes. Arguments: a folder for files, the address of host `a` as
/// seen from `b`, and the command. Both hosts resolve their own name to loopback, as Debian's `/etc/hosts` does.
const RUN: &str = r#"
folder=$1 MASTER_ADDR=$2; shift 2; export MASTER_ADDR
printf '127.0.0.1 localhost\n127.0.1.1 host-a %s\n' "$(hostname)" > "$folder/hosts_0"
printf '127.0.0.1 localhost\n127.0.1.1 %s\n10.77.0.1 host-a\n' "$(hostname)" > "$folder/hosts_1"
rank() {
  host=$1; export RANK=$2; shift 2
  on $host "$folder/hosts_$RANK" "$@" > "$folder/out_$RANK" 2>&1 || echo $? > "$folder/code_$RANK"
}
rank a 0 "$@" & rank b 1 "$@" & wait
"#;

fn in_namespaces(script: &str) -> Command {
    let mut command = Command::new("unshare");
    let script = format!("{MAKE}{script}");
    command.args(["--user", "--map-root-user", "--net", "--mount", "sh", "-c", &script, "sh"]);
    command
}

/// Returns false, with a printed message, if this machine lets nobody make hosts.
fn can_make_hosts() -> bool {
    let can = in_namespaces("on a /etc/hosts true").output().is_ok_and(|output| output.status.success());
    if !can {
        let words = "SKIPPED: two hosts: network namespaces, or `ip`, are not to be had here\n";
        io::stderr().write_all(words.as_bytes()).unwrap();
    }
    can
}

/// Runs a job of one rank on each host, which meet at `name`. Returns both exit codes and outputs.
fn on_two_hosts(folder: &TempDir, name: &str, rank: &Command) -> [Ended; 2] {
    let files = folder.path().join(format!("files_{name}"));
    fs::create_dir(&files).unwrap();
    let mut command = in_namespaces(RUN);
    command.arg(&files).arg(name).arg(rank.get_program()).args(rank.get_args());
    command.envs(rank.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(rank.get_current_dir().unwrap_or(Path::new(".")));
    command.env("LOCAL_RANK", "0").env("WORLD_SIZE", "2").env("MASTER_PORT", "29500");
    let all = Process::start(command).finish();
    assert_eq!(all.code, Some(0), "{all:#?}");
    [0, 1].map(|rank| {
        let code = fs::read_to_string(files.join(format!("code_{rank}"))).ok();
        let text = fs::read_to_string(files.join(format!("out_{rank}"))).unwrap();
        let code = Some(code.map_or(0, |code| code.trim().parse().unwrap()));
        Ended { code, stdout: String::new(), stderr: text, took: all.took }
    })
}

#[test]
fn two_hosts_train_as_two_ranks_of_one() {
    if !can_make_hosts() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let one = run_tiny(&folder, "one", TWO_RANKS, &[]);
    // By address, and by a name that is loopback on the host that it names.
    for name in ["10.77.0.1", "host-a"] {
        let run = folder.path().join(name);
        for ended in on_two_hosts(&folder, name, &tiny(TWO_RANKS, &run, &["devices=1"])) {
            assert_eq!(ended.code, Some(0), "{ended:#?}");
        }
        assert_same(&one, &run);
    }
}

#[test]
fn ranks_that_cannot_reach_one_another_end_in_time_and_say_why() {
    if !can_make_hosts() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let sets = ["devices=1", "strategy.collective_timeout_s=10"];
    let mut rank = tiny(TWO_RANKS, &folder.path().join("run"), &sets);
    rank.env("GLOO_SOCKET_IFNAME", "lo");
    let started = Instant::now();
    let both = on_two_hosts(&folder, "10.77.0.1", &rank);
    assert!(started.elapsed() < Duration::from_secs(60), "it took {:?}", started.elapsed());
    for ended in &both {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
    }
    let told = "It offers them the interface lo (GLOO_SOCKET_IFNAME)";
    let remedy = "set GLOO_SOCKET_IFNAME to the interface of their network";
    assert!(
        both.iter().all(|ended| ended.stderr.contains(told) && ended.stderr.contains(remedy)),
        "{both:#?}"
    );
}
