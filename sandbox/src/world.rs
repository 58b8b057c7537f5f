//! The world that a program lives in, built from namespaces and mounts.
//!
//! Someone without rights on the host first makes a user namespace, which gives the right to make the others. Root
//! makes the others first and the user namespace last, so that it belongs to nobody there: a limit on processes is
//! not enforced against root.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open, openat};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, CpuSet, sched_getaffinity, sched_setaffinity, unshare};
use nix::sys::prctl::set_dumpable;
use nix::sys::stat::{Mode, umask};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{Gid, Pid, Uid, chdir, getegid, geteuid, pivot_root, setgroups, setresgid, setresuid};

use crate::filter::DEVICES;
use crate::job::{File, Job};

/// The program's folder, the only one that can be written.
pub const FOLDER: &str = "/box";

/// The folder of POSIX semaphores and shared memory, on the same disk.
pub const SHARED: &str = "/dev/shm";

/// Standard input by a name, if it has one.
pub const INPUT: &str = "/dev/stdin";

/// Connections that wait at a socket, and datagrams: each keeps some 200 KiB, even of who has gone.
const WAITING: [(&str, &[u8]); 2] = [("sys/net/core/somaxconn", b"4"), ("sys/net/unix/max_dgram_qlen", b"2")];

/// Most processors that a program sees, so that pools of a process a processor stay below `processes`.
const PROCESSORS: usize = 4;

/// The helper inside the world.
pub const HELPER: &str = "/helper";

/// What the system's programs need; what is absent on a machine is left out.
const SYSTEM: [&str; 9] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
];

/// Who the program is, inside. Outside it is who started the helper, or nobody if that is root.
const INSIDE: u32 = 1000;
const NOBODY: u32 = 65_534;

/// A step that failed, with what it was to do.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}")]
pub struct Error {
    what: String,
    source: io::Error,
}

trait During<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error { what: what(), source: source.into() })
    }
}

/// Moves this process into a new world, in which only its children are process 1 and below. Returns whether the
/// number of connections that wait at a socket is bounded there.
///
/// # Errors
/// If the machine does not allow it, with the step that it refused.
pub fn enter(job: &Job) -> Result<bool, Error> {
    let (uid, gid) = (geteuid(), getegid());
    // Before the host's files are gone.
    let proc = open("/proc", OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
        .during(|| "open /proc".into())?;
    let others = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    if !uid.is_root() {
        become_unknown(&proc, uid, gid)?;
    }
    unshare(others).during(|| "make namespaces for processes, files and the network".into())?;
    // Some hosts let nobody write there.
    let listens = WAITING.iter().all(|(name, most)| {
        let file = openat(&proc, *name, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty());
        file.is_ok_and(|file| fs::File::from(file).write_all(most).is_ok())
    });
    narrow().during(|| "choose its processors".into())?;
    build(job)?;
    if uid.is_root() {
        let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
        setgroups(&[]).during(|| "leave all groups".into())?;
        setresgid(gid, gid, gid).during(|| "become the group of nobody".into())?;
        setresuid(uid, uid, uid).during(|| "become nobody".into())?;
        // The kernel takes a process's own files in /proc from it when it changes its user.
        set_dumpable(true).during(|| "be the owner of its own files in /proc".into())?;
        become_unknown(&proc, uid, gid)?;
    }
    Ok(listens)
}

/// Leaves some of the processors, others for each process.
fn narrow() -> nix::Result<()> {
    let all = sched_getaffinity(Pid::this())?;
    let all: Vec<usize> = (0..CpuSet::count()).filter(|&it| all.is_set(it) == Ok(true)).collect();
    let mut few = CpuSet::new();
    let first = Pid::this().as_raw().cast_unsigned() as usize;
    (first..first + PROCESSORS).try_for_each(|number| few.set(all[number % all.len()]))?;
    sched_setaffinity(Pid::this(), &few)
}

/// Makes a user namespace in which `uid` has another number, and is the only user there is.
fn become_unknown(proc: &OwnedFd, uid: Uid, gid: Gid) -> Result<(), Error> {
    unshare(CloneFlags::CLONE_NEWUSER).during(|| "make a user namespace".into())?;
    let write = |name: &str, text: String| {
        let path = format!("self/{name}");
        let file = openat(proc, path.as_str(), OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty());
        file.map_err(io::Error::from)
            .and_then(|file| fs::File::from(file).write_all(text.as_bytes()))
            .during(|| format!("write /proc/{path}"))
    };
    write("setgroups", "deny".into())?;
    write("uid_map", format!("{INSIDE} {uid} 1"))?;
    write("gid_map", format!("{INSIDE} {gid} 1"))
}

/// Mounts the files that there are, and makes them all there is.
fn build(job: &Job) -> Result<(), Error> {
    const NONE: Option<&str> = None;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
        .during(|| "keep mounts to itself".into())?;
    // What is mounted is opened first: the new root hides what lies below it.
    let helper = std::env::current_exe().during(|| "find its own program".into())?;
    let mut sources = vec![(held(&helper)?, PathBuf::from(HELPER))];
    let given = job.readable.iter().map(PathBuf::as_path);
    for path in SYSTEM.into_iter().chain(DEVICES).map(Path::new).filter(|path| path.exists()).chain(given) {
        sources.push((held(path)?, path.to_owned()));
    }
    // Any folder will do: only this process sees what is mounted there.
    let root = Path::new("/tmp");
    umask(Mode::from_bits_truncate(0o022));
    let input = job.input.as_deref().unwrap_or_default();
    mount_scratch(root, (1 << 20) + input.len() as u64, MsFlags::empty())?;
    for (source, path) in &sources {
        place(source, root, path)?;
    }
    if job.input.is_some() {
        fs::write(root.join(&INPUT[1..]), input).during(|| format!("write {INPUT}"))?;
    }
    let folder = mount_disk(root, job.limits.disk_bytes)?;
    for File { name, text } in &job.files {
        fs::write(folder.join(name), text).during(|| format!("write {name}"))?;
    }
    mount(NONE, root, NONE, MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY, NONE)
        .during(|| "close the root for writing".into())?;
    chdir(root).during(|| "enter the new root".into())?;
    pivot_root(".", ".").during(|| "make it the root".into())?;
    umount2(".", MntFlags::MNT_DETACH).during(|| "let the host's files go".into())?;
    chdir(FOLDER).during(|| format!("enter {FOLDER}"))
}

/// Mounts the program's disk, in memory: its folder, which is returned, and the one of semaphores.
fn mount_disk(root: &Path, bytes: u64) -> Result<PathBuf, Error> {
    const NONE: Option<&str> = None;
    let [folder, shared] = [FOLDER, SHARED].map(|path| root.join(&path[1..]));
    for folder in [&folder, &shared] {
        fs::create_dir(folder).during(|| format!("make {}", folder.display()))?;
    }
    mount_scratch(&folder, bytes, MsFlags::MS_NODEV | MsFlags::MS_NOSUID)?;
    // The folder comes last, over the disk.
    for (name, to) in [("shared", &shared), ("folder", &folder)] {
        let part = folder.join(name);
        let open = fs::Permissions::from_mode(0o777);
        fs::create_dir(&part)
            .and_then(|()| fs::set_permissions(&part, open))
            .during(|| format!("make {name} on the disk"))?;
        mount(Some(&part), to, NONE, MsFlags::MS_BIND, NONE).during(|| format!("mount {name}"))?;
    }
    Ok(folder)
}

/// A path kept open, whatever is mounted over it later.
fn held(path: &Path) -> Result<OwnedFd, Error> {
    open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).during(|| format!("open {}", path.display()))
}

fn mount_scratch(at: &Path, bytes: u64, flags: MsFlags) -> Result<(), Error> {
    // Everybody may write: the program is not who builds.
    let options = format!("size={bytes},nr_inodes=4096,mode=0777");
    mount(Some("scratch"), at, Some("tmpfs"), flags, Some(options.as_str()))
        .during(|| format!("mount memory at {}", at.display()))
}

/// Makes `source` readable at `path` of the new root.
fn place(source: &OwnedFd, root: &Path, path: &Path) -> Result<(), Error> {
    let inside = root.join(path.strip_prefix("/").unwrap_or(path));
    let says = || format!("mount {}", path.display());
    let parent = inside.parent().unwrap_or(root);
    fs::create_dir_all(parent).during(says)?;
    let source = PathBuf::from(format!("/proc/self/fd/{}", source.as_raw_fd()));
    match fs::metadata(&source).during(says)?.is_dir() {
        true => fs::create_dir_all(&inside).during(says)?,
        false => drop(fs::File::create(&inside).during(says)?),
    }
    const NONE: Option<&str> = None;
    mount(Some(&source), &inside, NONE, MsFlags::MS_BIND | MsFlags::MS_REC, NONE).during(says)?;
    // Flags that the host has set cannot be lifted in a user namespace, so they are said again.
    let has = statvfs(&inside).during(says)?.flags();
    let kept = [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    let kept = kept.into_iter().filter(|(flag, _)| has.contains(*flag)).map(|(_, flag)| flag);
    let flags = kept.fold(MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY, |a, b| a | b);
    mount(NONE, &inside, NONE, flags | MsFlags::MS_NOSUID, NONE).during(says)
}
