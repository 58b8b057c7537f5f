//! Table of system calls that take kernel memory, outlive their process or reach beyond it. Each kind is denied or
//! bounded. `tests/sandbox/kernel.rs` has a program for each.

use libc::c_long;

/// System calls of one kind.
#[derive(Debug)]
pub struct Kind {
    /// Name of the kind.
    pub name: &'static str,
    /// Treatment of the calls.
    pub verdict: Verdict,
    /// The reason for a denial, or the bound.
    pub why: &'static str,
    /// Denied calls, with their conditions.
    pub(crate) denied: &'static [Call],
}

impl Kind {
    /// Returns the numbers of the calls that are blocked with all arguments.
    pub fn always_denied(&self) -> impl Iterator<Item = i64> {
        self.denied.iter().filter(|call| call.when.is_empty()).map(|call| call.number)
    }
}

/// Treatment of a kind of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The sandbox blocks them.
    Denied,
    /// They are allowed, and their use of resources is bounded.
    Bounded,
}

/// A call that is blocked.
#[derive(Debug)]
pub(crate) struct Call {
    pub number: c_long,
    /// Lists of conditions. The call is blocked if all conditions of a list hold, or if there are no lists.
    pub when: &'static [&'static [Condition]],
}

/// A condition on an argument.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition {
    /// Index of the argument, from 0.
    pub argument: u8,
    pub test: Test,
}

/// Comparison of an argument with a value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Test {
    /// The lower 32 bits equal this.
    Is(u32),
    /// The lower 32 bits differ from this.
    IsNot(u32),
    /// This bit is set.
    Has(u64),
}

const fn call(number: c_long) -> Call {
    Call { number, when: &[] }
}

const fn is(argument: u8, value: u32) -> Condition {
    Condition { argument, test: Test::Is(value) }
}

const fn is_not(argument: u8, value: u32) -> Condition {
    Condition { argument, test: Test::IsNot(value) }
}

const fn has(argument: u8, bit: i32) -> Condition {
    Condition { argument, test: Test::Has(bit as u64) }
}

const fn denied(name: &'static str, why: &'static str, denied: &'static [Call]) -> Kind {
    Kind { name, verdict: Verdict::Denied, why, denied }
}

const fn bounded(name: &'static str, why: &'static str) -> Kind {
    Kind { name, verdict: Verdict::Bounded, why, denied: &[] }
}

const SOL_SOCKET: u32 = libc::SOL_SOCKET as u32;
/// From `linux/prctl.h`; the caller chooses the number of slots.
const PR_FUTEX_HASH: u32 = 78;
/// Calls of this number and above are the same on all architectures, and not all of them have names in `libc`.
const PROCESS_MRELEASE: c_long = 448;
const LSM_SET_SELF_ATTR: c_long = 460;
const OPEN_TREE_ATTR: c_long = 467;

/// All kinds.
pub const KINDS: &[Kind] = &[
    // Memory of the kernel that no limit of a process counts.
    denied(
        "SysV semaphores",
        "64 bytes each, as many as the host allows",
        &[call(libc::SYS_semget), call(libc::SYS_semop), call(libc::SYS_semctl), call(libc::SYS_semtimedop)],
    ),
    denied(
        "SysV shared memory",
        "memory without an address space",
        &[call(libc::SYS_shmget), call(libc::SYS_shmat), call(libc::SYS_shmctl)],
    ),
    denied(
        "SysV message queues",
        "messages that no process holds",
        &[call(libc::SYS_msgget), call(libc::SYS_msgsnd), call(libc::SYS_msgrcv), call(libc::SYS_msgctl)],
    ),
    denied(
        "POSIX message queues",
        "messages that no process holds",
        &[call(libc::SYS_mq_open), call(libc::SYS_mq_unlink), call(libc::SYS_mq_notify)],
    ),
    denied(
        "keys",
        "they outlive the process, and large parts of the kernel serve them",
        &[call(libc::SYS_add_key), call(libc::SYS_request_key), call(libc::SYS_keyctl)],
    ),
    denied(
        "memory files",
        "memory without an address space",
        &[call(libc::SYS_memfd_create), call(libc::SYS_memfd_secret)],
    ),
    denied(
        "huge pages",
        "a stock of the host's",
        &[Call { number: libc::SYS_mmap, when: &[&[has(3, libc::MAP_HUGETLB)]] }],
    ),
    denied("all memory locked", "memory that cannot be swapped", &[call(libc::SYS_mlockall)]),
    denied("watches of files", "a watch and its events take some kilobytes, a million of them", WATCHES),
    denied("page faults", "broken out of before", &[call(libc::SYS_userfaultfd)]),
    denied("performance events", "broken out of before", &[call(libc::SYS_perf_event_open)]),
    denied(
        "io_uring",
        "broken out of before",
        &[call(libc::SYS_io_uring_setup), call(libc::SYS_io_uring_enter), call(libc::SYS_io_uring_register)],
    ),
    denied(
        "asynchronous input and output",
        "all processes of the host share one number of requests",
        &[call(libc::SYS_io_setup), call(libc::SYS_io_submit)],
    ),
    denied("bpf", "broken out of before", &[call(libc::SYS_bpf)]),
    denied(
        "rules of Landlock",
        "64 bytes each, and no bound on how many; those of the sandbox are made before",
        &[
            call(libc::SYS_landlock_create_ruleset),
            call(libc::SYS_landlock_add_rule),
            call(libc::SYS_landlock_restrict_self),
        ],
    ),
    denied("pages lent to pipes", "a page keeps the 2 MiB that it is a part of", &[call(libc::SYS_vmsplice)]),
    denied(
        "longer pipes",
        "all processes of a user share 64 MiB",
        &[Call { number: libc::SYS_fcntl, when: &[&[is(1, libc::F_SETPIPE_SZ as u32)]] }],
    ),
    denied(
        "longer socket buffers",
        "megabytes each where the host allows it",
        &[Call {
            number: libc::SYS_setsockopt,
            when: &[
                &[is(1, SOL_SOCKET), is(2, libc::SO_SNDBUF as u32)],
                &[is(1, SOL_SOCKET), is(2, libc::SO_RCVBUF as u32)],
                &[is(1, SOL_SOCKET), is(2, libc::SO_SNDBUFFORCE as u32)],
                &[is(1, SOL_SOCKET), is(2, libc::SO_RCVBUFFORCE as u32)],
                // Filters of sockets are programs in the kernel.
                &[is(1, SOL_SOCKET), is(2, libc::SO_ATTACH_FILTER as u32)],
                &[is(1, SOL_SOCKET), is(2, libc::SO_ATTACH_BPF as u32)],
            ],
        }],
    ),
    denied(
        "futex tables",
        "64 bytes a slot, as many as the caller says",
        &[Call { number: libc::SYS_prctl, when: &[&[is(0, PR_FUTEX_HASH)]] }],
    ),
    bounded("pipes", "open files, 64 KiB each"),
    bounded("socket buffers", "open files, some 200 KiB each"),
    bounded("datagrams", "open files, and 2 that wait at each"),
    bounded("connections that wait", "open files, and 4 that wait at each; where that cannot be set, none"),
    bounded("descriptors on their way", "as many as open files"),
    bounded("epoll", "open files, as many watches each"),
    bounded("eventfd", "open files"),
    bounded("timerfd", "open files"),
    bounded("signalfd", "open files"),
    bounded("pidfd", "open files"),
    bounded("splice", "the pipes' size"),
    bounded("timers", "RLIMIT_SIGPENDING"),
    bounded("queued signals", "RLIMIT_SIGPENDING"),
    bounded("locks of files", "open files"),
    bounded("locks of records", "processor time: each one is looked for among all of its file's"),
    bounded("leases", "open files"),
    bounded("POSIX semaphores", "files of /dev/shm, which are on the program's disk"),
    bounded("POSIX shared memory", "files of /dev/shm, which are on the program's disk"),
    bounded("attributes of files", "the disk's 4096 files' worth of bytes"),
    bounded("links", "the disk's 4096 files"),
    bounded("mappings", "RLIMIT_AS, and the kernel's 65,530 of a process"),
    bounded("locked memory", "RLIMIT_MEMLOCK, which is 0"),
    bounded("processes", "RLIMIT_NPROC"),
    bounded("filters of calls", "the kernel's 32,768 instructions of a process"),
    // Beyond the process.
    denied(
        "other processes",
        "their memory and their files",
        &[
            call(libc::SYS_ptrace),
            call(libc::SYS_process_vm_readv),
            call(libc::SYS_process_vm_writev),
            call(libc::SYS_process_madvise),
            call(PROCESS_MRELEASE),
            call(libc::SYS_pidfd_getfd),
            call(libc::SYS_kcmp),
            call(libc::SYS_move_pages),
            call(libc::SYS_migrate_pages),
        ],
    ),
    denied(
        "namespaces",
        "a right over parts of the kernel that are made for root",
        &[
            call(libc::SYS_unshare),
            call(libc::SYS_setns),
            Call {
                number: libc::SYS_clone,
                when: &[
                    &[has(0, libc::CLONE_NEWUSER)],
                    &[has(0, libc::CLONE_NEWPID)],
                    &[has(0, libc::CLONE_NEWNS)],
                    &[has(0, libc::CLONE_NEWNET)],
                    &[has(0, libc::CLONE_NEWIPC)],
                    &[has(0, libc::CLONE_NEWUTS)],
                    &[has(0, libc::CLONE_NEWCGROUP)],
                ],
            },
        ],
    ),
    denied(
        "file systems",
        "the files of the host",
        &[
            call(libc::SYS_mount),
            call(libc::SYS_umount2),
            call(libc::SYS_pivot_root),
            call(libc::SYS_chroot),
            call(libc::SYS_open_tree),
            call(OPEN_TREE_ATTR),
            call(libc::SYS_move_mount),
            call(libc::SYS_fsopen),
            call(libc::SYS_fsconfig),
            call(libc::SYS_fsmount),
            call(libc::SYS_fspick),
            call(libc::SYS_mount_setattr),
            call(libc::SYS_open_by_handle_at),
            call(libc::SYS_name_to_handle_at),
            call(libc::SYS_quotactl),
            call(libc::SYS_quotactl_fd),
            call(libc::SYS_swapon),
            call(libc::SYS_swapoff),
            call(libc::SYS_mknodat),
        ],
    ),
    denied(
        "the kernel's own code",
        "it is everybody's",
        &[
            call(libc::SYS_init_module),
            call(libc::SYS_finit_module),
            call(libc::SYS_delete_module),
            call(libc::SYS_kexec_load),
            call(libc::SYS_kexec_file_load),
            call(libc::SYS_personality),
            call(LSM_SET_SELF_ATTR),
        ],
    ),
    denied(
        "the machine",
        "its clock, its name, its log and its disks are everybody's",
        &[
            call(libc::SYS_reboot),
            call(libc::SYS_syslog),
            call(libc::SYS_acct),
            call(libc::SYS_settimeofday),
            call(libc::SYS_clock_settime),
            call(libc::SYS_clock_adjtime),
            call(libc::SYS_adjtimex),
            call(libc::SYS_sethostname),
            call(libc::SYS_setdomainname),
            call(libc::SYS_vhangup),
            call(libc::SYS_sync),
            call(libc::SYS_syncfs),
        ],
    ),
    denied(
        "priority",
        "the processors are everybody's",
        &[
            call(libc::SYS_sched_setscheduler),
            call(libc::SYS_sched_setparam),
            call(libc::SYS_sched_setattr),
            call(libc::SYS_setpriority),
            call(libc::SYS_ioprio_set),
        ],
    ),
    denied(
        "the network",
        "local sockets are all there is",
        &[
            Call { number: libc::SYS_socket, when: &[&[is_not(0, libc::AF_UNIX as u32)]] },
            Call { number: libc::SYS_socketpair, when: &[&[is_not(0, libc::AF_UNIX as u32)]] },
        ],
    ),
    denied(
        "a terminal's input",
        "the host's shell reads characters that are pushed into it",
        &[Call {
            number: libc::SYS_ioctl,
            when: &[&[is(1, libc::TIOCSTI as u32)], &[is(1, libc::TIOCLINUX as u32)]],
        }],
    ),
    #[cfg(target_arch = "x86_64")]
    denied(
        "segments and ports",
        "only x86 has them, and no program of a task",
        &[call(libc::SYS_modify_ldt), call(libc::SYS_ioperm), call(libc::SYS_iopl), call(libc::SYS_mknod)],
    ),
];

const WATCHES: &[Call] = &[
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_inotify_init),
    call(libc::SYS_inotify_init1),
    call(libc::SYS_inotify_add_watch),
    call(libc::SYS_fanotify_init),
    call(libc::SYS_fanotify_mark),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn kinds_and_calls_are_there_once() {
        let names: BTreeSet<&str> = KINDS.iter().map(|kind| kind.name).collect();
        assert_eq!(names.len(), KINDS.len());
        let calls: Vec<c_long> = KINDS.iter().flat_map(|kind| kind.denied).map(|call| call.number).collect();
        assert_eq!(calls.iter().collect::<BTreeSet<_>>().len(), calls.len());
        for kind in KINDS {
            assert_eq!(kind.verdict == Verdict::Denied, !kind.denied.is_empty(), "{}", kind.name);
        }
    }
}
