//! A process's rank in its job, read from its launcher's environment variables.

use std::time::Duration;

use anyroll_backends::Rendezvous;

/// Rank of a process in its job, with the rendezvous address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    /// From 0 to below `world_size`.
    pub rank: usize,
    /// Number of ranks on all hosts.
    pub world_size: usize,
    /// Index on this host, from 0: the ordinal of its device.
    pub local_rank: usize,
    /// The host of rank 0.
    pub master_addr: String,
    /// Port on that host for the rendezvous.
    pub master_port: u16,
    /// Prefix of our keys in the store that the launcher serves there; `None` if rank 0 serves it.
    pub agent_store: Option<String>,
    /// Interfaces whose address the other ranks are offered; see [`Rendezvous::interfaces`].
    pub interfaces: Option<String>,
}

/// Launcher variables that are incomplete or invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// One of the launcher's variables is missing.
    #[error("{present} is set but {missing} is not: set both, or neither")]
    Missing {
        /// A variable that is set.
        present: &'static str,
        /// The variable that must be set with it.
        missing: &'static str,
    },
    /// A variable has an invalid value.
    #[error("{variable} is `{value}`, must be {expected}")]
    Garbled {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// Expected value.
        expected: &'static str,
    },
    /// A rank that is not below the world size.
    #[error("{variable} is {value}, must be below {world_variable}, which is {world_size}")]
    OutOfRange {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: usize,
        /// The variable of the world size.
        world_variable: &'static str,
        /// The world size.
        world_size: usize,
    },
}

/// A launcher's names of rank, world size and local rank.
struct Names {
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
}

/// Names of our own launcher, torchrun and Kubernetes operators.
const TORCHRUN: Names = Names { rank: "RANK", world_size: "WORLD_SIZE", local_rank: "LOCAL_RANK" };
/// Launchers that set the rank but leave the rendezvous address to the user.
const OTHERS: [Names; 2] = [
    Names { rank: "SLURM_PROCID", world_size: "SLURM_NTASKS", local_rank: "SLURM_LOCALID" },
    Names {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
];
const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
/// Set by torchrun to "True" if it serves the store.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// Read as torch reads it.
const INTERFACES: &str = "GLOO_SOCKET_IFNAME";

impl Rank {
    /// Rendezvous with the other ranks, with this timeout.
    pub fn rendezvous(&self, timeout: Duration) -> Rendezvous {
        Rendezvous {
            rank: self.rank,
            world_size: self.world_size,
            master_addr: self.master_addr.clone(),
            master_port: self.master_port,
            agent_store: self.agent_store.clone(),
            listener: super::child::listener(),
            interfaces: self.interfaces.clone(),
            timeout,
        }
    }

    /// Rank of this process; `None` if no launcher started it.
    ///
    /// Reads `RANK`, `WORLD_SIZE` and `LOCAL_RANK`, or those of srun and mpirun. A shell inside an allocation has
    /// the latter too: without `MASTER_ADDR`, rank 0 counts as one, and any other rank is an error. A rank needs
    /// `MASTER_ADDR` and `MASTER_PORT`.
    ///
    /// # Errors
    /// If some of the variables are missing, are not numbers, or contradict each other.
    pub fn from_env() -> Result<Option<Self>, RankError> {
        Self::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, RankError> {
        // WORLD_SIZE or LOCAL_RANK without RANK is a mistake; MASTER_ADDR alone belongs to other launchers.
        let own = [TORCHRUN.rank, TORCHRUN.world_size, TORCHRUN.local_rank];
        if let Some(present) = own.into_iter().find(|name| get(name).is_some()) {
            return Self::named(&get, present, &TORCHRUN).map(Some);
        }
        let is_first = |names: &Names| get(names.rank).is_none_or(|rank| rank == "0");
        if get(MASTER_ADDR).is_none() && OTHERS.iter().all(is_first) {
            return Ok(None);
        }
        match OTHERS.iter().find(|names| get(names.rank).is_some()) {
            Some(names) => Self::named(&get, names.rank, names).map(Some),
            None => Ok(None),
        }
    }

    fn named(
        get: &impl Fn(&str) -> Option<String>,
        present: &'static str,
        names: &Names,
    ) -> Result<Self, RankError> {
        let value = |missing| get(missing).ok_or(RankError::Missing { present, missing });
        let number = |variable| {
            let value = value(variable)?;
            let expected = "an integer of at least 0";
            value.parse::<usize>().map_err(|_| RankError::Garbled { variable, value, expected })
        };
        let (rank, world_size, local_rank) =
            (number(names.rank)?, number(names.world_size)?, number(names.local_rank)?);
        for (variable, value) in [(names.rank, rank), (names.local_rank, local_rank)] {
            if value >= world_size {
                let world_variable = names.world_size;
                return Err(RankError::OutOfRange { variable, value, world_variable, world_size });
            }
        }
        let master_addr = value(MASTER_ADDR)?;
        if master_addr.trim().is_empty() {
            let expected = "the host of rank 0";
            return Err(RankError::Garbled { variable: MASTER_ADDR, value: master_addr, expected });
        }
        let port = value(MASTER_PORT)?;
        let master_port = match port.parse() {
            Ok(port) if port != 0 => port,
            _ => {
                let expected = "a port, 1 to 65535";
                return Err(RankError::Garbled { variable: MASTER_PORT, value: port, expected });
            }
        };
        // torchrun's agent holds the port itself, and survives restarts of its ranks.
        let served = get(AGENT_STORE).is_some_and(|value| value == "True");
        let restart = get(RESTART_COUNT).unwrap_or_else(|| "0".to_owned());
        let agent_store = served.then(|| format!("anyroll/attempt_{restart}/"));
        let interfaces = get(INTERFACES).filter(|names| !names.is_empty());
        Ok(Self { rank, world_size, local_rank, master_addr, master_port, agent_store, interfaces })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `variables` as `NAME=value`, separated by spaces.
    fn read(variables: &str) -> Result<Option<Rank>, String> {
        let get = |name: &str| {
            let mut pairs = variables.split(' ').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        Rank::from_variables(get).map_err(|error| error.to_string())
    }

    fn rank_1_of_4() -> Rank {
        let master_addr = "node0".to_owned();
        let (agent_store, interfaces) = (None, None);
        Rank {
            rank: 1,
            world_size: 4,
            local_rank: 0,
            master_addr,
            master_port: 29500,
            agent_store,
            interfaces,
        }
    }

    #[test]
    fn every_launcher_is_understood() {
        let master = "MASTER_ADDR=node0 MASTER_PORT=29500";
        for place in [
            "RANK=1 WORLD_SIZE=4 LOCAL_RANK=0",
            "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_LOCALID=0",
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0",
            // torchrun inside an allocation.
            "RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0",
        ] {
            assert_eq!(read(&format!("{place} {master}")), Ok(Some(rank_1_of_4())), "{place}");
        }
    }

    #[test]
    fn the_agents_store_is_not_served_again() {
        let place = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29500";
        let read = |more: &str| read(&format!("{place} {more}")).unwrap().unwrap().agent_store;
        assert_eq!(read("TORCHELASTIC_USE_AGENT_STORE=False"), None);
        let served = "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2";
        assert_eq!(read(served), Some("anyroll/attempt_2/".to_owned()));
    }

    #[test]
    fn no_launcher_is_no_rank() {
        for variables in ["", "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0", "MASTER_ADDR=node0"] {
            assert_eq!(read(variables), Ok(None), "{variables}");
        }
    }

    /// Several processes that each consider themselves the whole job would write one folder.
    #[test]
    fn one_of_several_without_a_meeting_place_is_refused() {
        for place in [
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1",
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1",
        ] {
            let name = place.split('=').next().unwrap();
            assert_eq!(
                read(place),
                Err(format!("{name} is set but MASTER_ADDR is not: set both, or neither"))
            );
        }
    }

    #[test]
    fn half_a_place_is_refused() {
        let check = |variables: &str, expected: &str| {
            assert_eq!(read(variables), Err(expected.to_owned()), "{variables}");
        };
        let master = "MASTER_ADDR=node0 MASTER_PORT=29500";
        check("RANK=1", "RANK is set but WORLD_SIZE is not: set both, or neither");
        check("WORLD_SIZE=1", "WORLD_SIZE is set but RANK is not: set both, or neither");
        check("RANK=0 WORLD_SIZE=1", "RANK is set but LOCAL_RANK is not: set both, or neither");
        check("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", "RANK is set but MASTER_ADDR is not: set both, or neither");
        check(
            "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=a",
            "RANK is set but MASTER_PORT is not: set both, or neither",
        );
        check(
            &format!("RANK=one WORLD_SIZE=2 LOCAL_RANK=0 {master}"),
            "RANK is `one`, must be an integer of at least 0",
        );
        check(
            &format!("RANK=-1 WORLD_SIZE=2 LOCAL_RANK=0 {master}"),
            "RANK is `-1`, must be an integer of at least 0",
        );
        check(
            &format!("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 {master}"),
            "RANK is 2, must be below WORLD_SIZE, which is 2",
        );
        check(
            "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=70000",
            "MASTER_PORT is `70000`, must be a port, 1 to 65535",
        );
        check(
            &format!("SLURM_PROCID=0 {master}"),
            "SLURM_PROCID is set but SLURM_NTASKS is not: set both, or neither",
        );
    }
}
