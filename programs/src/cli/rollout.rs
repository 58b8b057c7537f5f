//! `anyroll rollout`: samples on this host's devices for a run on other hosts.

use std::{env, io, time::Duration};

use anyroll_config::{PipelineConfig, error_chain::one_line};
use anyroll_pipelines::{
    Result,
    launch::{self, Interrupts, LaunchPlan, Outcome, Rank},
    prepare::{self, Draft, Prepared, Purpose},
    rlvr::{Served, Trainer, serve},
    run::Machine,
};
use clap::Args;

use super::{ConfigArgs, log_to, machine, restarts::PAUSE, run::stop_flag};

#[derive(Debug, Args)]
pub(super) struct RolloutArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Host of the run's rank 0, which listens at the config's `roles.rollout.hosts.port`
    #[arg(long, value_name = "HOST")]
    trainer: String,
    /// Wait so many seconds for the trainer
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    join_timeout: u32,
    /// Look for the trainer again after it is gone, or after another failure, at most so many times
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u32,
}

/// Starts an engine for each of this host's rollout devices, or runs as one of them.
pub(super) fn rollout(
    RolloutArgs { config: args, trainer, join_timeout, restarts }: &RolloutArgs,
) -> Result<u8> {
    launch::watch_parent();
    // An engine has a rank among those of its host alone.
    let rank = Rank::from_env()?;
    let speaks = rank.as_ref().is_none_or(|rank| rank.rank == 0 && !launch::is_launched());
    if speaks {
        log_to(io::stderr);
    }
    let text = prepare::text_of(&args.config)?;
    let sets = args.strategy.changes(&text, &args.sets)?.tell();
    let draft = Draft::parse(&args.config, text, &sets)?.with_hub(args.download.hub());
    let machine = Machine { rank: None, ..machine(None) };
    let Prepared { run, opened } = draft.prepare(&machine, Purpose::Rollout)?;
    if !speaks {
        log_to(io::stderr);
    }
    let ordinals = run.rollout.iter().flat_map(|role| &role.ordinals).flatten();
    let Some(rank) = rank else {
        let program = env::current_exe().map_err(|source| launch::Error::Start {
            rank: 0,
            program: "anyroll-engine".into(),
            source,
        })?;
        let plan = LaunchPlan {
            program,
            args: env::args_os().skip(1).collect(),
            local_ranks: ordinals.count(),
            threads: run.threads,
            env: Vec::new(),
        };
        return Ok(launch_again(&plan, *restarts)?.exit_code());
    };
    let (PipelineConfig::Rlvr(rlvr), Some(texts), Some(hosts)) =
        (&run.config.pipeline, opened.into_texts(), run.rollout.as_ref().and_then(|role| role.hosts))
    else {
        unreachable!("`prepare` has rollout hosts of `rlvr` alone")
    };
    let ordinal = *ordinals.clone().nth(rank.local_rank).expect("as many ranks as devices");
    let trainer = Trainer {
        host: trainer,
        port: hosts.port,
        join_timeout: Duration::from_secs((*join_timeout).into()),
        interfaces: rank.interfaces,
    };
    let stop = stop_flag()?;
    Ok(match serve((&run, rlvr), &texts.base, ordinal, &trainer, &stop)? {
        Served::Over => Outcome::Finished.exit_code(),
        Served::Stopped => Outcome::Interrupted.exit_code(),
    })
}

/// Starts the engines, and again after each failure, at most `most` times.
fn launch_again(plan: &LaunchPlan, most: u32) -> Result<Outcome, launch::Error> {
    let mut interrupts = Interrupts::catch()?;
    for restart in 1..=most {
        match launch::launch(plan, &mut interrupts) {
            Ok(outcome) => return Ok(outcome),
            Err(error) => tracing::warn!("{}; restart {restart} of {most}", one_line(&error)),
        }
        if interrupts.arrives_within(PAUSE) {
            return Ok(Outcome::Interrupted);
        }
    }
    launch::launch(plan, &mut interrupts)
}
