//! The sandbox with malicious and with harmless programs.

mod abuses;
mod kernel;

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyroll_sandbox::calls::{KINDS, Kind, Verdict};
use anyroll_sandbox::{Error, Exit, File, Finished, Limits, Protection, Sandbox};

use abuses::{ABUSES, Abuse, PRELUDE};

const HELPER: &str = env!("CARGO_BIN_EXE_anyroll-sandbox");

const LIMITS: Limits = Limits {
    wall_s: 20.0,
    memory_bytes: 512 << 20,
    processes: 8,
    disk_bytes: 8 << 20,
    output_bytes: 64 << 10,
};

/// Returns a sandbox with all protections. If the machine has no user namespaces or no Landlock, prints a
/// message and returns `None`.
fn sandbox(wall_s: f64) -> Option<Sandbox> {
    let limits = Limits { wall_s, ..LIMITS };
    let sandbox = Sandbox::new(HELPER.into(), limits, Vec::new(), Protection::ALL.to_vec());
    match sandbox.probe() {
        Ok(held) => {
            assert_eq!(held.len(), Protection::ALL.len(), "{held:?}");
            Some(sandbox)
        }
        Err(Error::Refused(why)) => {
            eprintln!("SKIPPED: this machine cannot create the sandbox: {why}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn run(sandbox: &Sandbox, program: &str, tag: &str, stdin: &str) -> Finished {
    let command = ["python3", "-I", "main.py", tag].map(str::to_owned);
    let files = [File { name: "main.py".into(), text: program.into() }];
    sandbox.run(&command, &files, stdin).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Counts the processes of this machine that run the program of an abuse.
fn abuses_left() -> usize {
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let command = |path: &Path| fs::read(path.join("cmdline")).unwrap_or_default();
    entries.filter(|it| command(&it.path()).ends_with(b"main.py\0abuse\0")).count()
}

#[test]
fn honest_programs_run() {
    let Some(sandbox) = sandbox(20.0) else { return };
    let check = |program: &str, stdin: &str, exit: Exit, stdout: &str| {
        let finished = run(&sandbox, program, "honest", stdin);
        assert_eq!(
            (finished.exit, text(&finished.stdout).as_str()),
            (exit, stdout),
            "{program}: {finished:?}"
        );
    };
    check("print(sum(map(int, input().split())))", "3 4\n", Exit::Success, "7\n");
    check("import math, json, re, collections, itertools\nprint(math.comb(5, 2))", "", Exit::Success, "10\n");
    check("open('x', 'w').write('y')\nprint(open('x').read())", "", Exit::Success, "y\n");
    check("raise SystemExit(3)", "", Exit::Failure, "");
    check(
        "import os\nprint(os.getcwd(), os.getuid(), os.getpid() < 20)",
        "",
        Exit::Success,
        "/box 1000 True\n",
    );
    let two =
        "from multiprocessing import Process\np = Process(target=print, args=(2,))\np.start()\np.join()";
    check(
        &format!("if __name__ == '__main__':\n    {}", two.replace('\n', "\n    ")),
        "",
        Exit::Success,
        "2\n",
    );
    // Output before the forced end is kept.
    let unread = "x".repeat(1 << 20);
    check("print(1)", &unread, Exit::Success, "1\n");
}

#[test]
fn abuses_are_contained() {
    let (Some(patient), Some(hasty)) = (sandbox(20.0), sandbox(2.0)) else { return };
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    fs::write(&secret, "ESCAPED").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    assert!(ABUSES.len() >= 30);
    for Abuse { name, program, exits, says } in ABUSES {
        let program = program
            .replace("SECRET", &format!("{:?}", secret.to_str().unwrap()))
            .replace("PORT", &port.to_string())
            .replace("HOST_PID", &std::process::id().to_string());
        let waits = exits.contains(&Exit::TimedOut);
        let started = Instant::now();
        let finished =
            run(if waits { &hasty } else { &patient }, &format!("{PRELUDE}{program}"), "abuse", "");
        assert!(started.elapsed() < Duration::from_secs(if waits { 10 } else { 25 }), "{name}");
        let said = text(&finished.stdout);
        assert!(!said.contains("ESCAPED"), "{name}: {said}");
        assert!(exits.contains(&finished.exit) && said.contains(says), "{name}: {finished:?}");
        // Shortly after, no process of it is left: the kernel ends a namespace with its first process.
        let deadline = Instant::now() + Duration::from_secs(10);
        while abuses_left() > 0 {
            assert!(Instant::now() < deadline, "{name} left a process");
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(fs::read_to_string(&secret).unwrap(), "ESCAPED", "{name}");
    }
    assert!(listener.accept().is_err(), "somebody came through the network");
    assert!(Path::new("/usr/bin").exists());
    // And the caller keeps working.
    assert_eq!(text(&run(&patient, "print('fine')", "honest", "").stdout), "fine\n");
}

/// Returns the available memory of the machine, in MiB.
fn available_mib() -> i64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<i64>().unwrap() >> 10
}

/// Runs a program; returns its result and the largest drop of available memory during the run, in MiB.
fn run_measured(sandbox: &Sandbox, program: &str) -> (Finished, i64) {
    let before = available_mib();
    thread::scope(|scope| {
        let running = scope.spawn(|| run(sandbox, program, "abuse", ""));
        let mut least = before;
        while !running.is_finished() {
            least = least.min(available_mib());
            thread::sleep(Duration::from_millis(5));
        }
        (running.join().unwrap(), before - least)
    })
}

/// Tries each kind of calls in the table: denied calls fail, and bounded ones reach their bound with little kernel
/// memory in use.
#[test]
fn the_table_of_calls_holds() {
    const MOST_MIB: i64 = 150;
    let Some(sandbox) = sandbox(20.0) else { return };
    let program_of = |kind: &Kind| kernel::PROGRAMS.iter().find(|(name, _)| *name == kind.name);
    for (name, _) in kernel::PROGRAMS {
        assert!(KINDS.iter().any(|kind| kind.name == *name), "{name} is no kind");
    }
    for kind in KINDS {
        let numbers: Vec<i64> = kind.always_denied().collect();
        let mut program = format!("{PRELUDE}{}", kernel::IMPORTS);
        if !numbers.is_empty() {
            program += &kernel::ALWAYS.replace("NUMBERS", &format!("{numbers:?}"));
        }
        match program_of(kind) {
            Some((_, own)) => program += own,
            None => assert!(kind.verdict == Verdict::Denied && !numbers.is_empty(), "{}", kind.name),
        }
        // Other programs of the machine take memory as well, and give it back.
        let mut runs = (0..3).map(|_| run_measured(&sandbox, &program));
        let (finished, _) = runs.find(|(_, mib)| *mib <= MOST_MIB).expect(kind.name);
        let said = text(&finished.stdout);
        assert!(finished.exit == Exit::Success && !said.contains("ESCAPED"), "{}: {finished:?}", kind.name);
        assert!(said.contains("refused") || kind.name == "locks of records", "{}: {finished:?}", kind.name);
    }
    // Another ABI has other numbers for the same calls.
    let finished = run(&sandbox, &format!("{PRELUDE}refused(call, 0x40000027, 0x40000027)"), "abuse", "");
    assert!(text(&finished.stdout).contains("refused"), "{finished:?}");
}

/// Process pools work, and standard input has a name.
#[test]
fn programs_have_what_judges_give_them() {
    let Some(sandbox) = sandbox(20.0) else { return };
    let check = |program: &str, stdin: &str, stdout: &str| {
        let finished = run(&sandbox, program, "honest", stdin);
        assert_eq!((finished.exit, text(&finished.stdout).as_str()), (Exit::Success, stdout), "{finished:?}");
    };
    let pool = "with Pool(2) as pool: print(sum(pool.map(abs, range(4))))";
    check(&format!("from multiprocessing import Pool\nif __name__ == '__main__':\n    {pool}"), "", "6\n");
    let pool = "with ProcessPoolExecutor() as pool: print(sum(pool.map(abs, range(4))))";
    let program =
        format!("from concurrent.futures import ProcessPoolExecutor\nif __name__ == '__main__':\n    {pool}");
    check(&program, "", "6\n");
    let manager =
        "with Manager() as manager:\n        shared = manager.dict(a=1)\n        print(dict(shared))";
    let program = format!("from multiprocessing import Manager\nif __name__ == '__main__':\n    {manager}");
    check(&program, "", "{'a': 1}\n");
    let shared = "from multiprocessing.shared_memory import SharedMemory\nit = SharedMemory(create=True, size=100)\n\
                  it.buf[0] = 7\nprint(it.buf[0])\nit.close()\nit.unlink()";
    check(shared, "", "7\n");
    for name in ["/dev/stdin", "/dev/fd/0", "0"] {
        let name = if name == "0" { name.to_owned() } else { format!("{name:?}") };
        check(&format!("print(sum(map(int, open({name}).read().split())))"), "3\n4\n", "7\n");
    }
    check("import sys\nprint(sys.stdin.readline() + open('/dev/stdin').read())", "1\n2\n", "1\n1\n2\n\n");
    // One that is read once has no name.
    let command = ["python3", "-I", "main.py"].map(str::to_owned);
    let program = "import os\nprint(input(), os.path.exists('/dev/stdin'), os.listdir('.'))";
    let files = [File { name: "main.py".into(), text: program.into() }];
    let finished = sandbox.run_on_secret(&command, &files, "secret\n").unwrap();
    assert_eq!(text(&finished.stdout), "secret False ['main.py']\n");
}

/// Number of this process's children that ended and that nobody has waited for.
fn zombies() -> usize {
    let own = std::process::id().to_string();
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let stats = entries.filter_map(|it| fs::read_to_string(it.path().join("stat")).ok());
    let is_zombie = |stat: &String| {
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        fields.first() == Some(&"Z") && fields.get(1) == Some(&own.as_str())
    };
    stats.filter(is_zombie).count()
}

/// Makes this process a subreaper, which must wait for orphans like process 1 of a container.
#[test]
fn a_program_that_is_ended_leaves_no_orphan() {
    let Some(sandbox) = sandbox(1.0) else { return };
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    let program = "import os, time\nif os.fork(): os.fork()\ntime.sleep(60)";
    let finished = run(&sandbox, program, "orphan", "");
    assert_eq!(finished.exit, Exit::TimedOut);
    // Other tests' children may just have ended.
    let deadline = Instant::now() + Duration::from_secs(10);
    while zombies() > 0 {
        assert!(Instant::now() < deadline, "a program has left an orphan");
        thread::sleep(Duration::from_millis(3));
    }
}

#[test]
fn what_is_required_and_not_there_is_refused() {
    let helper = |path: &str| Sandbox::new(path.into(), LIMITS, Vec::new(), Protection::ALL.to_vec());
    let error = helper("no/such/helper").probe().unwrap_err();
    assert!(matches!(error, Error::Helper { .. }), "{error}");
    let unreadable = Sandbox::new(HELPER.into(), LIMITS, vec!["/no/such/folder".into()], Vec::new());
    let error = unreadable.probe().unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why.contains("no/such/folder")), "{error}");
    let Some(sandbox) = sandbox(20.0) else { return };
    let missing = sandbox.run(&["no-such-program".to_owned()], &[], "").unwrap_err();
    assert!(matches!(&missing, Error::Refused(why) if why.contains("no-such-program")), "{missing}");
}
