//! Options of `anyroll run` for several hosts.

use std::time::Duration;

use anyroll_import::Machines;
use anyroll_pipelines::{Error, Result, launch::Hosts};
use clap::Args;

/// Place of this host among those that start ranks.
#[derive(Debug, Args)]
pub(super) struct HostArgs {
    /// Train on so many hosts, on each of which this command runs
    #[arg(long, value_name = "N", requires_all = ["node_rank", "master_addr"], value_parser = clap::value_parser!(u32).range(1..))]
    nnodes: Option<u32>,
    /// Index of this host, from 0
    #[arg(long, value_name = "INDEX", requires = "nnodes")]
    node_rank: Option<u32>,
    /// Address of host 0
    #[arg(long, value_name = "HOST", requires = "nnodes")]
    master_addr: Option<String>,
    /// Port at which host 0 listens to the others
    #[arg(long, value_name = "PORT", default_value_t = 29500, requires = "nnodes", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: u16,
    /// Wait so many seconds for all hosts, at the start and, with `--restarts`, after one is lost
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "nnodes")]
    join_timeout: u32,
}

impl HostArgs {
    /// The hosts, or else those of a file; `None` if this one is the only one.
    ///
    /// # Errors
    /// If the index is none of theirs.
    pub(super) fn hosts(&self, of_file: Option<Machines>) -> Result<Option<Hosts>> {
        let Self { nnodes, node_rank, master_addr, master_port, join_timeout } = self;
        let join_timeout = Duration::from_secs((*join_timeout).into());
        let (Some(nnodes), Some(node_rank), Some(master_addr)) = (*nnodes, *node_rank, master_addr) else {
            return Ok(of_file.map(|Machines { count, index, master_addr, master_port }| Hosts {
                nnodes: count,
                node_rank: index,
                master_addr,
                master_port,
                join_timeout,
            }));
        };
        if node_rank >= nnodes {
            return Err(Error::NodeRank { node_rank, nnodes });
        }
        Ok(Some(Hosts {
            nnodes: nnodes as usize,
            node_rank: node_rank as usize,
            master_addr: master_addr.clone(),
            master_port: *master_port,
            join_timeout,
        }))
    }
}
