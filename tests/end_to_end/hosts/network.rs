//! Hosts on one machine: namespaces with a name, an address and a link of their own. The links meet in a switch.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// Makes the hosts, says `ready`, and keeps them until its input ends. Arguments: a folder for files, and the hosts'
/// names. The first has the address 10.77.0.1.
const MAKE: &str = r#"
set -e
folder=$1 number=0; shift
exec 3<&0
ip link add name switch type bridge && ip link set switch up
for host; do
  number=$((number + 1))
  unshare --net --mount --uts sh -c '
    hostname "$1" && ip link set lo up && mount --bind "$2/names_$1" /etc/hosts && echo $$ > "$2/pid_$1" && exec cat
  ' sh "$host" "$folder" <&3 > /dev/null &
  while ! [ -s "$folder/pid_$host" ]; do kill -0 $!; sleep 0.01; done
  pid=$(cat "$folder/pid_$host")
  ip link add name "port_$host" type veth peer name eth0 netns "$pid"
  ip link set "port_$host" master switch up
  nsenter --net=/proc/$pid/ns/net sh -c "ip addr add 10.77.0.$number/24 dev eth0 && ip link set eth0 up"
done
echo ready
exec cat
"#;

/// The switch in place of the kernel's whose links delay and lose frames. Few kernels have netem.
const LOSSY_SWITCH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/end_to_end/hosts/lossy_switch.py");

/// Hosts that end with this value. The files of this machine are on all of them.
pub(super) struct Network {
    hosts: Vec<String>,
    switch: Child,
    lossy_switch: Option<Child>,
    folder: TempDir,
}

impl Network {
    /// Makes hosts of these names. Each resolves its own name to loopback, as Debian's `/etc/hosts` does, and those of the
    /// others to their addresses.
    ///
    /// Returns `None`, with a printed message, if this machine lets nobody make hosts.
    pub(super) fn of(hosts: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        for own in hosts {
            let line = |(host, number)| match host == own {
                true => format!("127.0.1.1 {host}\n"),
                false => format!("10.77.0.{number} {host}\n"),
            };
            let names: String = hosts.iter().zip(1..).map(line).collect();
            let file = folder.path().join(format!("names_{own}"));
            fs::write(file, format!("127.0.0.1 localhost\n{names}")).unwrap();
        }
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "--mount", "sh", "-c", MAKE, "sh"]);
        command.arg(folder.path()).args(hosts);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = command.spawn().map(|mut switch| {
            let mut said = String::new();
            BufReader::new(switch.stdout.take().unwrap()).read_line(&mut said).unwrap();
            let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            let mut network = Self { hosts, switch, lossy_switch: None, folder };
            if said == "ready\n" { Ok(network) } else { Err(network.problem()) }
        });
        let problem = match started {
            Ok(Ok(network)) => return Some(network),
            Ok(Err(problem)) => problem,
            Err(error) => error.to_string(),
        };
        let words =
            format!("SKIPPED: several hosts: network namespaces, or `ip`, are not to be had: {problem}\n");
        io::stderr().write_all(words.as_bytes()).unwrap();
        None
    }

    fn problem(&mut self) -> String {
        drop(self.switch.stdin.take());
        let mut text = String::new();
        self.switch.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text.trim().to_owned()
    }

    /// `command`, on a host.
    pub(super) fn on(&self, host: &str, command: &Command) -> Command {
        let mut on_host = enter(&self.pid(host), &["--net", "--mount", "--uts"]);
        // A process that enters a namespace of files is in its root.
        let folder = command.get_current_dir().unwrap_or(Path::new("."));
        on_host.args(["sh", "-c", r#"cd "$0" && exec "$@""#]).arg(folder.canonicalize().unwrap());
        on_host.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => on_host.env(name, value),
                None => on_host.env_remove(name),
            };
        }
        on_host
    }

    /// Takes a host's link away. Nobody is told.
    pub(super) fn cut(&self, host: &str) {
        self.link(host, "down");
    }

    /// Gives a host's link back.
    pub(super) fn restore(&self, host: &str) {
        self.link(host, "up");
    }

    fn link(&self, host: &str, state: &str) {
        run(self.at_switch().args(["ip", "link", "set", &port(host), state]));
    }

    /// Delays all frames by this much, and loses this fraction of them. Needs `python`.
    pub(super) fn degrade(&mut self, python: &str, delay_ms: u32, loss: f64) {
        for host in &self.hosts {
            run(enter(&self.pid(host), &["--net"]).args([python, LOSSY_SWITCH, "whole", "eth0"]));
            run(self.at_switch().args(["ip", "link", "set", &port(host), "nomaster"]));
        }
        let mut command = self.at_switch();
        command.args([python, LOSSY_SWITCH, &delay_ms.to_string(), &loss.to_string(), "0"]);
        command.args(self.hosts.iter().map(|host| port(host))).stdout(Stdio::piped());
        let mut switch = command.spawn().unwrap();
        let mut said = String::new();
        BufReader::new(switch.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "ready\n");
        self.lossy_switch = Some(switch);
    }

    fn pid(&self, host: &str) -> String {
        fs::read_to_string(self.folder.path().join(format!("pid_{host}"))).unwrap().trim().to_owned()
    }

    fn at_switch(&self) -> Command {
        enter(&self.switch.id().to_string(), &["--net"])
    }
}

/// The switch's end of a host's link.
fn port(host: &str) -> String {
    format!("port_{host}")
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// A command in namespaces of a process, whose user owns them.
fn enter(pid: &str, namespaces: &[&str]) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", pid, "--user", "--preserve-credentials"]).args(namespaces);
    command
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(mut switch) = self.lossy_switch.take() {
            let _ = switch.kill();
            let _ = switch.wait();
        }
        // The switch and the hosts end with their input.
        drop(self.switch.stdin.take());
        let _ = self.switch.wait();
    }
}
