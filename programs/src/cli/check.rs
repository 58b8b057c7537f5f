//! `anyroll check`: validates a config, and prints its resolved form and facts on its data.

use anyroll_pipelines::{
    Result,
    data_facts::data_facts,
    launch::Rank,
    prepare::{self, Draft, Prepared, Purpose},
};
use clap::Args;

use super::{ConfigArgs, machine, stdout::print};

#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Run no code that the config names: no reward, no environment, no test of a record. For configs of others
    #[arg(long)]
    no_code: bool,
}

pub(super) fn check(CheckArgs { config: args, no_code }: &CheckArgs) -> Result<u8> {
    let text = prepare::text_of(&args.config)?;
    let sets = args.strategy.changes(&text, &args.sets)?.tell();
    let draft = Draft::parse(&args.config, text, &sets)?.with_hub(args.download.hub());
    let purpose = if *no_code { Purpose::CheckWithoutCode } else { Purpose::Check };
    let machine = machine(Rank::from_env()?);
    let Prepared { run, opened } = draft.prepare(&machine, purpose)?;
    let batches = run.batches;
    let micro_batches = match (batches.micro_batches_per_update, run.policy.strategy.micro_batch_tokens) {
        (None, Some(tokens)) => format!("micro-batches of up to {tokens} tokens"),
        (count, _) => format!("{} micro-batches", count.unwrap_or_default()),
    };
    let facts = data_facts(&run, &opened)?;
    let facts: String = facts.iter().map(|fact| format!("# {fact}\n")).collect();
    print(format_args!(
        "{}# {} ranks on {}, {} CPU threads each; a step has {} sequences, {} a rank in one optimizer update, in \
         {micro_batches}\n{facts}",
        run.to_yaml(),
        run.world_size,
        run.policy.backend,
        run.threads,
        batches.sequences_per_step,
        batches.sequences_per_update,
    ))?;
    if let Some(rollout) = run.rollout.as_ref().filter(|rollout| rollout.hosts.is_some()) {
        eprintln!(
            "note: {}, started there by `anyroll rollout CONFIG --trainer HOST`; its devices were not checked",
            rollout.describe()
        );
    }
    for facts in machine.missing(&run) {
        let reason = facts.unavailable.as_deref().unwrap_or_default();
        eprintln!(
            "note: `{}` is not on this machine, so its devices and memory were not checked: {reason}",
            facts.name
        );
    }
    Ok(0)
}
