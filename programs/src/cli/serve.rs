//! `anyroll serve`: serves a model over HTTP.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyroll_pipelines::{Result, inference::Room};
use clap::Args;

use super::model_args::{ModelArgs, RoomArgs};
use crate::serve;

#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The address to listen on; there is no password, so listen beyond this machine only in trusted networks
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// The most tokens of a sequence, completion included; longer requests are refused [default: the model's,
    /// at most 8192]
    #[arg(long)]
    max_length: Option<usize>,
    /// Seconds for running requests to finish after SIGTERM or Ctrl-C; a second signal ends them at once
    #[arg(long, value_name = "SECONDS", default_value_t = 25)]
    grace: u64,
    #[command(flatten)]
    room: RoomArgs,
}

pub(super) fn serve(args: &ServeArgs) -> Result<u8> {
    const DEFAULT_MAX_LENGTH: usize = 8192;
    let model = args.model.load(false, None)?;
    let most = model.max_length();
    let longest = args.max_length.unwrap_or(DEFAULT_MAX_LENGTH.min(most));
    // One token for the prompt and one for the completion.
    if !(2..=most).contains(&longest) {
        let why = model.why_no_longer();
        let problem = format!("is {longest}, must be from 2 to {most}, the most that the model takes{why}");
        return Err(anyroll_models::Error::Input { what: "--max-length", problem }.into());
    }
    let room = Room { sequences: args.room.sequences, longest, memory: args.room.memory };
    let ready =
        |address| eprintln!("listening on http://{address}; POST /v1/completions, /v1/chat/completions");
    let (address, grace) = (SocketAddr::new(args.host, args.port), Duration::from_secs(args.grace));
    serve::serve(model, room, address, grace, ready)?;
    Ok(0)
}
