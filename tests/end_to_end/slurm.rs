//! A real Slurm of two nodes on one machine, and the job that `deploy/slurm` has for users.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use super::{
    ANYROLL, ONE_RANK, TINY, TWO_RANKS, assert_same, checkpoints, other_launchers::free_port, processes_of,
    run_tiny, starts, wait_for_steps, wait_within,
};

/// Starts munge, the controller and two nodes. Arguments: a folder for files, and three ports.
const START: &str = r#"
set -eu
folder=$1 host=$(hostname)
chmod 755 "$folder"; mkdir "$folder/state" "$folder/spool"
dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 status=none; chmod 400 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
cat > "$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$2
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
ReturnToService=2
NodeName=n0 NodeHostname=$host NodeAddr=127.0.0.1 Port=$3 CPUs=4 State=UNKNOWN
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$4 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
export SLURM_CONF="$folder/slurm.conf"
slurmctld && slurmd -N n0 && slurmd -N n1
"#;

/// Longest time of a job's end or start. A job that was requeued waits until its old credential has expired.
const MOST: Duration = Duration::from_secs(180);

/// A cluster of two nodes, which ends with this value.
struct Cluster {
    folder: TempDir,
    /// Rendezvous of a job, whose number another cluster's job has too.
    port: u16,
}

impl Cluster {
    /// Returns `None`, with a printed message, where Slurm is not installed or does not start.
    fn start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh"]).arg(folder.path());
        command.args([free_port(), free_port(), free_port()].map(|port| port.to_string()));
        let started = command.output().unwrap();
        let cluster = Self { folder, port: free_port() };
        if !started.status.success() {
            let why = String::from_utf8_lossy(&started.stderr).into_owned();
            let words = format!("SKIPPED: Slurm: it does not start here: {}\n", why.trim());
            io::stderr().write_all(words.as_bytes()).unwrap();
            return None;
        }
        wait_within(MOST, "both nodes are idle", || {
            cluster.says("sinfo", &["-h", "-o", "%T %D"]).trim() == "idle 2"
        });
        Some(cluster)
    }

    fn run(&self, program: &str, args: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(args).env("SLURM_CONF", self.folder.path().join("slurm.conf"));
        command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
        // The nodes' names are of this test alone, so that the host of rank 0 is given.
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", self.port.to_string())
            .env("ANYROLL", ANYROLL);
        command.output().unwrap()
    }

    #[track_caller]
    fn says(&self, program: &str, args: &[&str]) -> String {
        let output = self.run(program, args);
        assert!(output.status.success(), "{program} {args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Submits the job of `deploy/slurm`, and returns its number.
    fn submit(&self, run: &Path, options: &[&str], sets: &[&str]) -> String {
        let log = self.folder.path().join("job.log");
        let mut args = vec!["--parsable", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0"];
        args.extend(["--output", log.to_str().unwrap()]);
        args.extend(options);
        args.extend(["deploy/slurm/anyroll.sbatch", TWO_RANKS, run.to_str().unwrap()]);
        let sets = TINY.iter().chain(sets).chain(&["devices=1"]);
        args.extend(sets.flat_map(|set| ["--set", set]));
        self.says("sbatch", &args).trim().to_owned()
    }

    /// Submits the array of `deploy/slurm` with these indices, with runs in `folder`.
    fn submit_array(&self, indices: &str, folder: &Path, options: &[&str]) {
        let log = self.folder.path().join("job.log");
        let array = format!("--array={indices}");
        let mut args = vec![array.as_str(), "--gpus-per-node=0", "--output", log.to_str().unwrap()];
        args.extend(options);
        args.extend(["deploy/slurm/anyroll_array.sbatch", ONE_RANK, folder.to_str().unwrap()]);
        args.extend(TINY.iter().flat_map(|set| ["--set", set]));
        self.says("sbatch", &args);
    }

    /// A field of the job, such as `JobState` or `Restarts`.
    fn field(&self, job: &str, name: &str) -> String {
        let told = self.says("scontrol", &["show", "job", job]);
        let value = told.split_whitespace().find_map(|word| word.strip_prefix(&format!("{name}=")));
        value.unwrap_or_else(|| panic!("no {name} in {told}")).to_owned()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("job.log")).unwrap_or_default()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for name in ["slurmd.n0", "slurmd.n1", "slurmctld", "munged"] {
            let pid = fs::read_to_string(self.folder.path().join(format!("{name}.pid"))).unwrap_or_default();
            if let Ok(pid) = pid.trim().parse() {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
        }
    }
}

#[test]
fn a_job_that_is_requeued_ends_with_the_metrics_of_one_that_was_not() {
    let Some(cluster) = Cluster::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let sets = ["pipeline.rlvr.steps=40", "strategy.zero_stage=2"];
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let run: PathBuf = folder.path().join("run");
    let job = cluster.submit(&run, &[], &sets);
    wait_within(MOST, "the run has begun", || starts(&run) == 1);
    wait_for_steps(&run, 6);
    cluster.says("scontrol", &["requeue", &job]);
    wait_within(MOST, "the job is completed", || cluster.field(&job, "JobState") == "COMPLETED");
    assert_eq!((cluster.field(&job, "Restarts"), starts(&run)), ("1".to_owned(), 2), "{}", cluster.log());
    assert_same(&whole, &run);
}

#[test]
fn a_job_saves_before_its_time_limit_and_requeues_itself() {
    let Some(cluster) = Cluster::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    // Slurm looks at time limits twice a minute, and sends the signal up to a minute early.
    let sets = ["pipeline.rlvr.steps=1000000", "pipeline.rlvr.checkpoint.every=1000000"];
    let job = cluster.submit(&run, &["--time=2", "--signal=TERM@60"], &sets);
    wait_within(MOST, "the job waits again", || cluster.field(&job, "Restarts") == "1");
    assert_eq!(checkpoints(&run).len(), 1, "{}", cluster.log());
    wait_within(MOST, "the run goes on", || starts(&run) == 2);
    cluster.says("scancel", &[&job]);
    wait_within(MOST, "no job is left", || cluster.says("squeue", &["-h"]).is_empty());
    assert!(processes_of(&run).is_empty());
    assert!(cluster.log().contains("interrupted after"), "{}", cluster.log());
}

#[test]
fn an_array_has_a_run_for_each_seed_or_line() {
    let Some(cluster) = Cluster::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let sweep = path("sweep.txt");
    fs::write(&sweep, "--set seed=5\n--set seed=6 --set pipeline.rlvr.group_size=2\n").unwrap();
    cluster.submit_array("3", &path("seeds"), &[]);
    let export = format!("--export=ALL,SWEEP={}", sweep.display());
    cluster.submit_array("1-2", &path("sweep"), &[&export]);
    wait_within(MOST, "no job is left", || cluster.says("squeue", &["-h"]).is_empty());
    for (run, sets) in [
        ("seeds/3", &["seed=3"][..]),
        ("sweep/1", &["seed=5"]),
        ("sweep/2", &["seed=6", "pipeline.rlvr.group_size=2"]),
    ] {
        assert!(path(run).join("report.html").exists(), "{}", cluster.log());
        assert_same(
            &run_tiny(&folder, &format!("{run} alone").replace('/', " "), ONE_RANK, sets),
            &path(run),
        );
    }
}
