//! Namespaces and mounts of the sandbox.
//!
//! An unprivileged user first creates a user namespace, which gives the right to create the others. Root
//! creates the others first and the user namespace last, and inside it is nobody: limits on processes are not
//! enforced for root.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
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

/// The program's folder. Only this one and [`SHARED`] are writable.
pub const FOLDER: &str = "/box";

/// Folder of POSIX semaphores and shared memory, on the same disk.
pub const SHARED: &str = "/dev/shm";

/// Path of standard input, if it has one.
pub const INPUT: &str = "/dev/stdin";

/// Its other name.
const INPUT_AS_NUMBER: &str = "/dev/fd/0";

/// Maximum numbers of connections and of datagrams that wait at a socket. Each takes about 200 KiB, even after its
/// sender has closed.
const WAITING: [(&str, &[u8]); 2] = [("sys/net/core/somaxconn", b"4"), ("sys/net/unix/max_dgram_qlen", b"2")];

/// Maximum number of processors that a program sees, so that pools with a process per processor stay below
/// `processes`.
const PROCESSORS: usize = 4;

/// Maximum size of a page of memory.
const PAGE_BYTES: u64 = 64 << 10;

/// Path of the helper inside the sandbox.
pub const HELPER: &str = "/helper";

/// Paths that the system's programs need; missing ones are skipped.
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

/// User id of the program inside. Outside it is the caller's, or nobody if the caller is root.
const INSIDE: u32 = 1000;
const NOBODY: u32 = 65_534;

/// A failed step of the set-up, with the action that failed.
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

/// Moves this process into new namespaces, in which its first child is process 1. Returns true if the number of
/// connections that wait at a socket is bounded there.
///
/// # Errors
/// If the machine does not allow it, with the step that failed.
pub fn enter(job: &Job) -> Result<bool, Error> {
    let (uid, gid) = (geteuid(), getegid());
    // Opened before the host's files are gone.
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
    unshare(others).during(|| "create namespaces for processes, files and the network".into())?;
    // Some hosts do not allow writing there.
    let listens = WAITING.iter().all(|(name, most)| {
        let file = openat(&proc, *name, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty());
        file.is_ok_and(|file| fs::File::from(file).write_all(most).is_ok())
    });
    narrow().during(|| "choose its processors".into())?;
    build(job)?;
    if uid.is_root() {
        let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
        setgroups(&[]).during(|| "leave all groups".into())?;
        setresgid(gid, gid, gid).during(|| "switch to the group of nobody".into())?;
        setresuid(uid, uid, uid).during(|| "become nobody".into())?;
        // The kernel makes root the owner of a process's files in /proc when the process changes its user.
        set_dumpable(true).during(|| "take ownership of its own files in /proc".into())?;
        become_unknown(&proc, uid, gid)?;
    }
    Ok(listens)
}

/// Restricts this process to [`PROCESSORS`] processors, which follow from its id.
fn narrow() -> nix::Result<()> {
    let all = sched_getaffinity(Pid::this())?;
    let all: Vec<usize> = (0..CpuSet::count()).filter(|&it| all.is_set(it) == Ok(true)).collect();
    let mut few = CpuSet::new();
    let first = Pid::this().as_raw().cast_unsigned() as usize;
    (first..first + PROCESSORS).try_for_each(|number| few.set(all[number % all.len()]))?;
    sched_setaffinity(Pid::this(), &few)
}

/// Creates a user namespace in which `uid` is mapped to another id, the only one there is.
fn become_unknown(proc: &OwnedFd, uid: Uid, gid: Gid) -> Result<(), Error> {
    unshare(CloneFlags::CLONE_NEWUSER).during(|| "create a user namespace".into())?;
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

/// Mounts the allowed files, and makes them the whole file system.
fn build(job: &Job) -> Result<(), Error> {
    const NONE: Option<&str> = None;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
        .during(|| "make its mounts private".into())?;
    // Sources are opened first, since the new root hides files below its mount point.
    let helper = std::env::current_exe().during(|| "find its own program".into())?;
    let mut sources = vec![(held(&helper)?, PathBuf::from(HELPER))];
    let given = job.readable.iter().map(PathBuf::as_path);
    for path in SYSTEM.into_iter().chain(DEVICES).map(Path::new).filter(|path| path.exists()).chain(given) {
        sources.push((held(path)?, path.to_owned()));
    }
    // Any folder works: only this process sees the mount.
    let root = Path::new("/tmp");
    umask(Mode::from_bits_truncate(0o022));
    let input = job.input.as_deref().unwrap_or_default();
    mount_scratch(root, (1 << 20) + input.len() as u64, MsFlags::empty())?;
    for (source, path) in &sources {
        place(source, root, path)?;
    }
    if job.input.is_some() {
        let other = root.join(&INPUT_AS_NUMBER[1..]);
        fs::write(root.join(&INPUT[1..]), input).during(|| format!("write {INPUT}"))?;
        fs::create_dir_all(other.parent().unwrap_or(root))
            .and_then(|()| symlink(INPUT, other))
            .during(|| format!("make {INPUT_AS_NUMBER}"))?;
    }
    // A program of any length has a place, beside what it may write.
    let own: u64 = job.files.iter().map(|file| (file.text.len() as u64).next_multiple_of(PAGE_BYTES)).sum();
    let folder = mount_disk(root, job.limits.disk_bytes + own)?;
    for File { name, text } in &job.files {
        fs::write(folder.join(name), text).during(|| format!("write {name}"))?;
    }
    mount(NONE, root, NONE, MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY, NONE)
        .during(|| "make the root read-only".into())?;
    chdir(root).during(|| "enter the new root".into())?;
    pivot_root(".", ".").during(|| "switch to the new root".into())?;
    umount2(".", MntFlags::MNT_DETACH).during(|| "unmount the host's files".into())?;
    chdir(FOLDER).during(|| format!("enter {FOLDER}"))
}

/// Mounts the program's in-memory disk: its folder, which is returned, and the folder of semaphores.
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

/// Opens a path, which stays reachable when something is mounted over it later.
fn held(path: &Path) -> Result<OwnedFd, Error> {
    open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).during(|| format!("open {}", path.display()))
}

fn mount_scratch(at: &Path, bytes: u64, flags: MsFlags) -> Result<(), Error> {
    // Writable for all users: the program's user is not the one that mounts.
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
    // A user namespace cannot remove flags set by the host, so they are passed again.
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
