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
    apply_filter, sock_filter,
};

use crate::calls::{Call, Condition, KINDS, Test};
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
        // Timers count as signals.
        (Resource::RLIMIT_SIGPENDING, 256),
    ] {
        setrlimit(resource, most, most)?;
    }
    Ok(())
}

/// Allows reading and executing files below `/`, and writing only below `folders` and to the devices. Forbids
/// TCP, abstract sockets, and signals to outside processes. Returns true if the kernel enforces at least part
/// of it; old kernels support only files.
pub fn restrict_files(folders: &[&Path]) -> Result<bool> {
    let abi = ABI::V6;
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .add_rules(path_beneath_rules(["/"], AccessFs::from_read(abi)))?
        .add_rules(path_beneath_rules(folders, AccessFs::from_all(abi)))?
        .add_rules(path_beneath_rules(DEVICES, AccessFs::from_file(abi)))?
        .restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Blocks the calls that no task program needs ([`KINDS`]), and those of other ABIs, whose numbers mean other
/// calls. Without `listens`, sockets cannot wait for connections.
pub fn restrict_calls(listens: bool) -> Result<()> {
    let mut calls = denied()?;
    if !listens {
        calls.insert(libc::SYS_listen, Vec::new());
    }
    apply_filter(&refusing(calls, libc::EPERM)?)?;
    // `clone3` passes its flags in memory, which filters cannot see. With ENOSYS, the C library falls back to
    // `clone`.
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    apply_filter(&refusing(clone3, libc::ENOSYS)?)?;
    Ok(apply_filter(&below_x32())?)
}

fn refusing(calls: BTreeMap<i64, Vec<SeccompRule>>, error: i32) -> Result<BpfProgram> {
    let action = SeccompAction::Errno(error as u32);
    Ok(SeccompFilter::new(calls, SeccompAction::Allow, action, ARCH.try_into()?)?.try_into()?)
}

/// Returns a filter that blocks x86-64's second ABI, x32, which has the same architecture and sets one bit of each
/// number.
fn below_x32() -> BpfProgram {
    const X32_BIT: u32 = 0x4000_0000;
    const NUMBER_OFFSET: u32 = 0;
    let step = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    vec![
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, NUMBER_OFFSET),
        step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, X32_BIT),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

/// Lists the blocked calls of [`KINDS`] with the rules that block them; a call without rules is always blocked.
fn denied() -> Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let calls = KINDS.iter().flat_map(|kind| kind.denied);
    let rules = |call: &Call| call.when.iter().map(|conditions| rule(conditions)).collect::<Result<_>>();
    calls.map(|call| Ok((call.number, rules(call)?))).collect()
}

fn rule(conditions: &[Condition]) -> Result<SeccompRule> {
    let condition = |it: &Condition| {
        let (length, is, value) = match it.test {
            Test::Is(value) => (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value.into()),
            Test::IsNot(value) => (SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value.into()),
            Test::Has(bit) => (SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(bit), bit),
        };
        SeccompCondition::new(it.argument, length, is, value)
    };
    let conditions: std::result::Result<_, _> = conditions.iter().map(condition).collect();
    Ok(SeccompRule::new(conditions?)?)
}
