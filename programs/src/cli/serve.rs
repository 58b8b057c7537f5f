//! `anyroll serve`: serves a model over HTTP.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyroll_pipelines::{
    Result,
    inference::Capacity,
    loaded::{Loaded, LoadedModel, Options},
};
use clap::{Args, builder::NonEmptyStringValueParser, value_parser};

use super::model_args::{CapacityArgs, GuidanceArgs, ModelArgs, at_least_one};
use crate::serve::{self, Access, Host, Key, Origin, Served};

#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The address to listen on; beyond this machine with a key, since anyone else can use the model
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
    /// Seconds for the header of a request, from the end of the one before on its connection; the connection is
    /// then closed
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = value_parser!(u64).range(1..=MOST_SECONDS))]
    header_timeout: u64,
    /// Seconds for the body of a request
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = value_parser!(u64).range(1..=MOST_SECONDS))]
    body_timeout: u64,
    /// The most open connections, fewer if `ulimit -n` is lower; for one more the connection that has been idle
    /// longest is closed
    #[arg(long, default_value_t = 1024, value_parser = at_least_one)]
    max_connections: usize,
    /// The key that clients send as `Authorization: Bearer KEY`. Other users see arguments, so prefer the
    /// environment
    #[arg(long, value_name = "KEY", env = serve::KEY_VARIABLE, hide_env_values = true)]
    api_key: Option<Key>,
    /// Names by which clients may ask, separated by commas, besides the loopback names and the address; `*` for
    /// all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    allowed_hosts: Vec<Host>,
    /// Origins whose pages may ask from a browser, separated by commas, such as http://localhost:3000; `*` for all
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    allowed_origins: Vec<Origin>,
    /// A name by which clients ask for the model; repeatable, and the first one is in answers [default: the folder's
    /// name, or the name on the hub]
    #[arg(long = "served-model-name", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    names: Vec<String>,
    #[command(flatten)]
    guidance: GuidanceArgs,
    #[command(flatten)]
    capacity: CapacityArgs,
}

const MOST_SECONDS: u64 = 86_400;

pub(super) fn serve(args: &ServeArgs) -> Result<u8> {
    let names = if args.names.is_empty() { vec![args.model.name()] } else { args.names.clone() };
    let loading = Options { guidance: args.guidance.guidance, ..Options::default() };
    eprintln!("loading {}", args.model.path().display());
    let (model, paths) = match args.model.load_any(loading)? {
        Loaded::Text(model) => {
            let capacity = capacity(args, &model)?;
            (Served::Text(model, capacity), "/v1/completions, /v1/chat/completions")
        }
        Loaded::Scorer(_) if args.max_length.is_some() => {
            let problem =
                "is for models that generate text, and this is a reward model: leave it out".to_owned();
            return Err(anyroll_models::Error::Input { what: "--max-length", problem }.into());
        }
        Loaded::Scorer(model) => (Served::Scorer(model), "/v1/rewards, /score"),
    };
    let name = names[0].clone();
    let ready = |address| eprintln!("listening on http://{address}; POST {paths} for the model `{name}`");
    if !args.host.is_loopback() && args.api_key.is_none() {
        tracing::warn!(host = %args.host, "whoever reaches this address can use the model: set `--api-key`");
    }
    let options = serve::Options {
        address: SocketAddr::new(args.host, args.port),
        grace: Duration::from_secs(args.grace),
        limits: serve::Limits {
            header: Duration::from_secs(args.header_timeout),
            body: Duration::from_secs(args.body_timeout),
            connections: args.max_connections,
        },
        access: Access {
            key: args.api_key.clone(),
            hosts: args.allowed_hosts.clone(),
            origins: args.allowed_origins.clone(),
            bound: args.host,
        },
        names: serve::Names::new(names),
    };
    serve::serve(model, options, ready)?;
    Ok(0)
}

/// Capacity for requests to a model that generates text.
fn capacity(args: &ServeArgs, model: &LoadedModel) -> Result<Capacity> {
    const DEFAULT_MAX_LENGTH: usize = 8192;
    let most = model.max_length();
    let longest = args.max_length.unwrap_or(DEFAULT_MAX_LENGTH.min(most));
    // One token for the prompt and one for the completion.
    if !(2..=most).contains(&longest) {
        let why = model.why_no_longer();
        let problem = format!("is {longest}, must be from 2 to {most}, the most that the model takes{why}");
        return Err(anyroll_models::Error::Input { what: "--max-length", problem }.into());
    }
    let CapacityArgs { sequences, memory } = args.capacity;
    Ok(Capacity { sequences, longest, memory, speculation: None })
}
