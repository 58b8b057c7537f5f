//! Restrictions on the program's requests to the kernel: Landlock for files, seccomp for system calls,
//! resource limits.

use std::collections::BTreeMap;
use std::env::consts::ARCH;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
    path_beneath_rules,
};
use nix::sys::resource::{Resource, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter,
};

use crate::job::Limits;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Devices that a program may write to.
pub const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// Sets resource limits per process. Core files are off, since they would hold its memory.
pub fn limit(limits: &Limits) -> Result<()> {
    let processor_s = limits.wall_s.ceil() as u64;
    for (resource, most) in [
        (Resource::RLIMIT_CPU, processor_s),
        (Resource::RLIMIT_AS, limits.memory_bytes),
        (Resource::RLIMIT_FSIZE, limits.disk_bytes),
        (Resource::RLIMIT_NPROC, limits.processes),
        (Resource::RLIMIT_NOFILE, 64),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_MEMLOCK, 0),
        (Resource::RLIMIT_MSGQUEUE, 0),
    ] {
        setrlimit(resource, most, most)?;
    }
    Ok(())
}

/// Allows reading and executing files below `/`, and writing only below `folder` and to the devices. Forbids
/// TCP, abstract sockets, and signals to outside processes. Returns true if the kernel enforces at least part
/// of it; old kernels support only files.
pub fn restrict_files(folder: &Path) -> Result<bool> {
    let abi = ABI::V6;
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .add_rules(path_beneath_rules(["/"], AccessFs::from_read(abi)))?
        .add_rules(path_beneath_rules([folder], AccessFs::from_all(abi)))?
        .add_rules(path_beneath_rules(DEVICES, AccessFs::from_file(abi)))?
        .restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Blocks system calls that no task program needs and that reach for the kernel, other processes, new
/// namespaces or the network.
pub fn restrict_calls() -> Result<()> {
    apply_filter(&refusing(denied()?, libc::EPERM)?)?;
    // `clone3` passes its flags in memory, which filters cannot see. With ENOSYS, the C library falls back to
    // `clone`.
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    Ok(apply_filter(&refusing(clone3, libc::ENOSYS)?)?)
}

fn refusing(calls: BTreeMap<i64, Vec<SeccompRule>>, error: i32) -> Result<BpfProgram> {
    let action = SeccompAction::Errno(error as u32);
    Ok(SeccompFilter::new(calls, SeccompAction::Allow, action, ARCH.try_into()?)?.try_into()?)
}

/// Lists the blocked calls with the rules that block them; a call without rules is always blocked.
fn denied() -> Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let mut calls: BTreeMap<i64, Vec<SeccompRule>> = DENIED.iter().map(|&call| (call, Vec::new())).collect();
    let flag = |flag: i32| {
        let flag = flag as u64;
        rule(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(flag), flag)
    };
    let namespaces: Result<Vec<SeccompRule>> = NAMESPACES.iter().map(|&it| flag(it)).collect();
    calls.insert(libc::SYS_clone, namespaces?);
    // Pairs of local sockets are created by another call.
    let not_local = rule(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, libc::AF_UNIX as u64)?;
    calls.insert(libc::SYS_socket, vec![not_local]);
    // Characters pushed into a terminal would be read by the host's shell.
    let push = rule(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, libc::TIOCSTI)?;
    calls.insert(libc::SYS_ioctl, vec![push]);
    Ok(calls)
}

fn rule(argument: u8, length: SeccompCmpArgLen, is: SeccompCmpOp, value: u64) -> Result<SeccompRule> {
    Ok(SeccompRule::new(vec![SeccompCondition::new(argument, length, is, value)?])?)
}

const NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

const DENIED: &[i64] = &[
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // Namespaces and file systems.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_quotactl,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_mknodat,
    libc::SYS_fanotify_init,
    // Large parts of the kernel with a history of escapes.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_personality,
    // The machine.
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_acct,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    // Scheduling of the process itself.
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setattr,
    libc::SYS_setpriority,
    // Memory that no limit counts.
    libc::SYS_memfd_create,
    libc::SYS_memfd_secret,
    libc::SYS_shmget,
    libc::SYS_msgget,
    libc::SYS_mlockall,
];
