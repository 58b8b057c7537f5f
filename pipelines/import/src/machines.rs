//! Several machines in a file of `accelerate config`, each with its own copy that names its place.

use super::{ledger::Ledger, values};

/// Machines of a job, each with equally many ranks, and the place of this one among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machines {
    /// Number of machines, above 1.
    pub count: usize,
    /// Index of this one.
    pub index: usize,
    /// Address of machine 0.
    pub master_addr: String,
    /// Port at which ranks meet there.
    pub master_port: u16,
}

/// accelerate's own port for machines that name none.
const PORT: u16 = 29500;

/// Takes the place of this machine. `None` without an address: then another launcher starts the ranks.
pub(super) fn take(ledger: &mut Ledger) -> Option<Machines> {
    let count = ledger.whole("num_machines").filter(|count| *count > 1)?;
    let (address, port, rank) = ("main_process_ip", "main_process_port", "machine_rank");
    let is_set = |key: &str| ledger.peek(key).is_some_and(|value| !values::is_unset(value));
    if !is_set(address) {
        return None;
    }
    if !is_set(rank) {
        ledger.refuse(address, "`machine_rank` is missing, the index of this machine from 0");
        return None;
    }
    ledger.assume_if_unset(port, PORT.into());
    let index = ledger.whole(rank).filter(|index| *index < count);
    let master_port = ledger.whole(port).and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0);
    if index.is_none() {
        ledger.refuse(rank, format!("must be below `num_machines`, {count}"));
    }
    if master_port.is_none() {
        ledger.refuse(port, "must be a port, 1 to 65535");
    }
    let backend = ledger.peek("rdzv_backend").filter(|value| !values::is_unset(value)).map(values::text);
    if backend.is_some_and(|backend| !["static", "c10d"].contains(&&*backend)) {
        ledger.refuse("rdzv_backend", "ranks meet at `main_process_ip`: write static, or leave it out");
    }
    let master_addr = ledger.text(address)?;
    let (index, master_port) = (index?, master_port?);
    ledger.pass(address, "MASTER_ADDR");
    ledger.pass(port, "MASTER_PORT");
    ledger.pass(rank, "RANK");
    Some(Machines { count: count as usize, index: index as usize, master_addr, master_port })
}
