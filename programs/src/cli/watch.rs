//! `anyroll watch`: a live page of runs.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use anyroll_pipelines::Result;
use clap::Args;

use crate::{
    serve::{Access, Host, Origin},
    watch::{self, Runs},
};

#[derive(Debug, Args)]
pub(super) struct WatchArgs {
    /// Run folders, or folders of runs
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The address to listen on; whoever reaches it can read the runs
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8088)]
    port: u16,
    /// Names by which browsers may ask, separated by commas, besides the loopback names and the address; `*` for
    /// all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    allowed_hosts: Vec<Host>,
    /// Origins whose pages may ask from a browser, separated by commas; `*` for all
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    allowed_origins: Vec<Origin>,
}

pub(super) fn run(args: &WatchArgs) -> Result<u8> {
    let runs = Runs::open(&args.runs)?;
    if !args.host.is_loopback() {
        tracing::warn!(host = %args.host, "whoever reaches this address can read the runs' texts");
    }
    let access = Access {
        key: None,
        hosts: args.allowed_hosts.clone(),
        origins: args.allowed_origins.clone(),
        bound: args.host,
    };
    let ready = |address, count| {
        let runs = if count == 1 { "a run".to_owned() } else { format!("{count} runs") };
        eprintln!(
            "watching {runs} at http://{address}/  (open it in a browser; Ctrl-C ends this, not the runs)"
        );
    };
    watch::watch(runs, SocketAddr::new(args.host, args.port), access, ready)?;
    Ok(0)
}
