//! `anyroll plan`: memory of a run before it starts, for every choice of stage, offload and recomputation, and the time of a
//! step on many hosts.

mod time;

use std::path::PathBuf;

use anyroll_backends::BackendKind;
use anyroll_config::{Devices, Offload, OptimizerOffload, Recompute, ShardGroup};
use anyroll_pipelines::{
    NoTime, Result,
    format::gib,
    plan::{
        Choice, MemoryPlan, PhaseBytes, Planner, Settled, Stages, Tightest, Unsettled, choices, settle,
        time::Cluster,
    },
    prepare::{Draft, Prepared, Purpose},
    run::{BackendFacts, Machine, Run},
};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use super::{DownloadArg, machine, stdout::print};
use time::{TimeArgs, Times};

/// Arguments of `anyroll plan`.
#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    /// The YAML file
    config: PathBuf,
    /// Change a field, as in `--set strategy.recompute=full`; repeatable
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    sets: Vec<String>,
    /// Memory of a device, which need not be in this machine [default: that of this machine's devices]
    #[arg(long, value_name = "80GiB", value_parser = bytes)]
    memory: Option<usize>,
    /// Number of ranks, one device each, which need not be in this machine [default: the config's]
    #[arg(long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    world: Option<u32>,
    #[command(flatten)]
    time: TimeArgs,
    /// Print JSON, in bytes and seconds
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    download: DownloadArg,
}

/// `80GiB`, `80GB`, `512MiB` or a number of bytes.
fn bytes(text: &str) -> std::result::Result<usize, String> {
    const UNITS: [(&str, f64); 7] = [
        ("TiB", 1099511627776.0),
        ("GiB", 1073741824.0),
        ("MiB", 1048576.0),
        ("TB", 1e12),
        ("GB", 1e9),
        ("MB", 1e6),
        ("", 1.0),
    ];
    let found = UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)));
    let (number, factor) = found.expect("every text ends in nothing");
    match number.trim().parse::<f64>() {
        Ok(number) if number * factor >= 1e6 && number * factor < 1e18 => Ok((number * factor) as usize),
        _ => Err("write a size such as 80GiB, 80GB or 512MiB".into()),
    }
}

pub(super) fn plan(args: &PlanArgs) -> Result<u8> {
    let cluster = args.time.cluster()?;
    let world = args.world.map(|world| world as usize).or(cluster.map(|cluster| cluster.world_size()));
    let mut sets = args.sets.clone();
    sets.extend(world.map(|world| format!("devices={world}")));
    let draft = Draft::read(&args.config, &sets)?.with_hub(args.download.hub());
    let takes_all = draft.config().is_some_and(|config| config.devices == Devices::All);
    let Prepared { mut run, opened } =
        draft.prepare(&machine_of((args.memory, world), takes_all), Purpose::Plan)?;
    if let Some(memory) = args.memory {
        let of_devices = BackendKind::all().filter(|kind| !kind.is_host());
        let backends = of_devices.map(|kind| kind.name().to_owned()).chain([run.policy.backend.clone()]);
        run.memory_bytes.extend(backends.map(|backend| (backend, memory)));
    }
    if let Some(cluster) = &cluster
        && run.policy.strategy.shard_group == ShardGroup::Host
    {
        run.policy.strategy.shard_group = ShardGroup::Ranks(cluster.devices_per_host);
    }
    let planner = Planner::new(&run, &opened)?;
    let settled = settle(&planner, &run);
    let (own, choices) = (configured(&planner, &run, &settled), choices(&planner, &run));
    let is_settled = matches!(&settled, Ok(Some(Settled { keep_logits: Some(true), .. })));
    let undecided = own.as_ref().filter(|_| !is_settled);
    let keeping_logits = undecided.and_then(|(stages, _)| planner.keeping_logits(&run, *stages));
    let auto = auto(&run, &settled);
    let times = cluster.map(|cluster| times(&args.time, (&planner, &run, &settled), cluster)).transpose()?;
    let report = Report { auto, times, choices, planner, run, configured: own, keeping_logits };
    print(if args.json { report.json() } else { report.text() })?;
    Ok(0)
}

/// Times of a step at the config's stages, or those that `auto` chose.
fn times(
    args: &TimeArgs,
    (planner, run, settled): (&Planner, &Run, &Result<Option<Settled>, Unsettled>),
    cluster: Cluster,
) -> Result<Times> {
    let settled = settled.as_ref().map_err(|_| NoTime::NoStage)?;
    let mut run = run.clone();
    let stages = match settled {
        Some(settled) => {
            run.policy.strategy.keep_logits |= settled.keep_logits == Some(true);
            settled.stages
        }
        None => Stages::of(&run),
    };
    Times::new(args, (planner, &run), stages, cluster)
}

/// This machine, or one with every device asked for if `--memory`, `--world` or `--hosts` is given; one device if the
/// config `takes_all`.
fn machine_of((memory, world): (Option<usize>, Option<usize>), takes_all: bool) -> Machine {
    const MANY: usize = 1 << 16;
    if memory.is_none() && world.is_none() {
        return machine(None);
    }
    let count = if takes_all { 1 } else { MANY };
    // Memory of the devices here counts only without `--memory`.
    let here = if memory.is_none() { machine(None).backends } else { Vec::new() };
    let backends = BackendKind::all().map(|kind| BackendFacts {
        name: kind.name().to_owned(),
        runs_models: kind.runs_models(),
        adds_by_rows: kind.adds_by_rows(),
        devices: (!kind.is_host()).then_some(count),
        memory_bytes: here.iter().find(|facts| facts.name == kind.name()).and_then(|it| it.memory_bytes),
        unavailable: None,
    });
    Machine { cores: 1, backends: backends.collect(), rank: None, hosts: 1 }
}

/// The config's own plan and its stages; `None` if `auto` finds no stage.
fn configured(
    planner: &Planner,
    run: &Run,
    settled: &Result<Option<Settled>, Unsettled>,
) -> Option<(Stages, MemoryPlan)> {
    Some(match settled.as_ref().ok()? {
        Some(settled) => (settled.stages, settled.plan.clone()),
        None => (Stages::of(run), planner.plan_at(run, Stages::of(run))),
    })
}

/// Outcome of `zero_stage: auto`, if the config uses it.
fn auto(run: &Run, settled: &Result<Option<Settled>, Unsettled>) -> Option<String> {
    match settled {
        Ok(settled) => {
            let memory_bytes = run.policy_memory_bytes().unwrap_or(0);
            settled.as_ref().map(|settled| settled.reason(memory_bytes))
        }
        Err(Unsettled::NoMemory) => Some("auto needs the memory of a device: add `--memory 80GiB`".into()),
        Err(Unsettled::TooLarge { tightest: Tightest { phase, needs, memory_bytes }, .. }) => {
            let (needs, has) = (gib(*needs), gib(*memory_bytes));
            Some(format!("auto finds no stage that fits: the smallest needs {needs} GiB of {has} in {phase}"))
        }
    }
}

struct Report {
    planner: Planner,
    run: Run,
    auto: Option<String>,
    configured: Option<(Stages, MemoryPlan)>,
    /// The same plan with `keep_logits`, if the config does not set it.
    keeping_logits: Option<MemoryPlan>,
    choices: Vec<Choice>,
    times: Option<Times>,
}

impl Report {
    fn text(&self) -> String {
        let Self { planner, run, .. } = self;
        let memory = of_memory(run.policy_memory_bytes());
        let strategy = &run.policy.strategy;
        let together = match strategy.sequence_parallel * strategy.tensor_parallel {
            1 => String::new(),
            ranks => format!(", each on {ranks} ranks"),
        };
        let mut text = format!(
            "{}: {} parameters in {}, {} ranks on {}, each {memory}\nmicro-batches of {} {}{together}; every rank holds the same\n{} steps{}\n",
            run.config.name,
            planner.parameters(),
            run.policy.strategy.precision.name(),
            run.world_size,
            run.policy.backend,
            run.policy.strategy.micro_batch_size,
            planner.describe(),
            run.steps,
            run.steps_reason.as_ref().map_or(String::new(), |reason| format!(": {reason}")),
        );
        text.extend(self.auto.iter().map(|reason| format!("zero_stage: {reason}\n")));
        text.extend(planner.not_counted(run).iter().map(|role| format!("not counted: {role}\n")));
        if let Some((stages, plan)) = &self.configured {
            text += &self.phases(stages.policy, plan);
        }
        text += &self.table();
        text.extend(self.times.iter().map(Times::text));
        text
    }

    /// The config's own plan, phase by phase.
    fn phases(&self, stage: u8, plan: &MemoryPlan) -> String {
        let strategy = &self.run.policy.strategy;
        let memory = self.run.policy_memory_bytes();
        let mut text = format!(
            "\nas configured: ZeRO {stage}, offload: {{optimizer: {}, params: {}}}, recompute: {}; GiB of a rank\n{}\
             host memory {}{}\n",
            optimizer_name(strategy.offload.optimizer),
            params_name(strategy.offload.params),
            recompute_name(strategy.recompute),
            parts_of(plan.phases()),
            gib(plan.host),
            verdict(plan.peak(), memory)
        );
        if let (Some(memory), Some(keeping)) = (memory, &self.keeping_logits)
            && keeping.fits(memory)
        {
            let needs = gib(keeping.train.total());
            text += &format!(
                "with `keep_logits: true`, which fits, train takes {needs} and computes logits once\n"
            );
        }
        text.extend(plan.others.iter().map(|device| {
            let parts = parts_of(device.phases());
            let verdict = verdict(device.peak(), device.memory_bytes);
            let (roles, place) = (device.roles.join(", "), device.place());
            format!("\n{roles} on {place}, {}{verdict}\n{parts}", of_memory(device.memory_bytes))
        }));
        text
    }

    /// All choices; those that differ in recomputation only share a line.
    fn table(&self) -> String {
        let memory = self.run.policy_memory_bytes();
        let cell = |bytes: usize| {
            format!(
                "{:>10}{}",
                gib(bytes),
                if memory.is_some_and(|memory| bytes > memory) { "!" } else { " " }
            )
        };
        let marks = memory.map_or(String::new(), |it| format!("; ! is more than {}", gib(it)));
        let mut text = format!("\nevery choice, GiB of a rank{marks}\n");
        let between = BETWEEN.iter().filter(|(_, phase)| phase(&self.choices[0].plan).is_some());
        text += &format!("{:<7}{:<15}{:<8}", "stage", "optimizer", "params");
        text += "train:none  selective       full ";
        text += &between.clone().map(|(name, _)| format!("{name:>10} ")).collect::<String>();
        text += "  generate       host";
        let has_others = !self.choices[0].plan.others.is_empty();
        text += if has_others { "     others\n" } else { "\n" };
        for of_place in self.choices.chunks(3).filter(|it| self.is_as_configured(it[0].reference_params)) {
            let own = of_place.iter().find(|it| it.recompute == self.run.policy.strategy.recompute);
            let own = own.expect("all recomputations are there");
            let (optimizer, params) = (optimizer_name(own.optimizer), params_name(own.params));
            text += &format!("{:<7}{optimizer:<15}{params:<8}", own.zero_stage);
            text += &of_place.iter().map(|it| cell(training(&it.plan))).collect::<String>();
            let phases = between.clone().filter_map(|(_, phase)| phase(&own.plan));
            text += &phases.map(|phase| cell(phase.total())).collect::<String>();
            text += &format!("{}{:>10}", cell(own.plan.generate.total()), gib(own.plan.host));
            text +=
                &own.plan.others.iter().max_by_key(|device| device.peak().1).map_or(String::new(), |most| {
                    let fits = own.plan.others.iter().all(|device| device.fits() != Some(false));
                    format!("{:>10}{}", gib(most.peak().1), if fits { " " } else { "!" })
                });
            text += "\n";
        }
        if let Some(params) = self.reference_params() {
            text += &format!("the reference's params: {} (--json has all)\n", params_name(params));
        }
        text
    }

    /// `offload.params` of the reference, if there is one.
    fn reference_params(&self) -> Option<Offload> {
        let reference = self.run.reference.as_ref().filter(|_| self.planner.has_reference());
        reference.map(|role| role.strategy.offload.params)
    }

    fn is_as_configured(&self, reference_params: Option<Offload>) -> bool {
        reference_params == self.reference_params()
    }

    fn json(&self) -> String {
        let Self { planner, run, auto, configured, keeping_logits, choices, times } = self;
        let (prompt, completion) = planner.longest().unzip();
        let memory_bytes = run.policy_memory_bytes();
        let of = |plan: &MemoryPlan| {
            let mut value = with_totals(plan, plan.phases());
            value["fits"] = memory_bytes.map(|memory| plan.fits(memory)).into();
            let others = plan.others.iter().map(|device| {
                let mut value = with_totals(device, device.phases());
                value["fits"] = device.fits().into();
                value
            });
            value["others"] = others.collect();
            value
        };
        let choices: Vec<Value> = choices
            .iter()
            .map(|choice| {
                let mut value = serde_json::to_value(choice).expect("plain data");
                value["plan"] = of(&choice.plan);
                value
            })
            .collect();
        let report = json!({
            "name": run.config.name,
            "parameters": planner.parameters(),
            "backend": run.policy.backend,
            "world_size": run.world_size,
            "steps": run.steps,
            "memory_bytes": memory_bytes,
            "longest_prompt": prompt,
            "longest_completion": completion,
            "auto": auto,
            "not_counted": planner.not_counted(run),
            "configured": configured.as_ref().map(|(stages, plan)| json!({"zero_stage": stages.policy, "plan": of(plan)})),
            "keeping_logits": keeping_logits.as_ref().map(of),
            "choices": choices,
            "time": times.as_ref().map(Times::json),
        });
        serde_json::to_string_pretty(&report).expect("plain data") + "\n"
    }
}

/// `plan` as JSON, with the total of each phase.
fn with_totals(plan: &impl Serialize, phases: impl Iterator<Item = (&'static str, PhaseBytes)>) -> Value {
    let mut value = serde_json::to_value(plan).expect("plain data");
    for (name, phase) in phases {
        value[name]["total"] = phase.total().into();
    }
    value
}

fn of_memory(memory_bytes: Option<usize>) -> String {
    memory_bytes.map_or("of unknown memory".into(), |it| format!("of {} GiB", gib(it)))
}

/// Returns a sentence on the largest phase: the bytes to spare or missing.
fn verdict((phase, peak): (&str, usize), memory_bytes: Option<usize>) -> String {
    match memory_bytes {
        None => String::new(),
        Some(memory) if peak <= memory => {
            format!("; it fits, with {} to spare in {phase}", gib(memory - peak))
        }
        Some(memory) => format!("; it does not fit: {phase} needs {} more", gib(peak - memory)),
    }
}

/// A line for each phase, under the names of its parts.
fn parts_of(phases: impl Iterator<Item = (&'static str, PhaseBytes)>) -> String {
    let phases: Vec<_> = phases.collect();
    let is_there = |part: Part| phases.iter().any(|(_, phase)| part(phase) > 0);
    let parts: Vec<_> =
        PARTS.into_iter().filter(|(name, part)| !OF_SOME.contains(name) || is_there(*part)).collect();
    let row = |of: &dyn Fn(&str, Part) -> String| {
        parts.iter().map(|(name, part)| of(name, *part)).collect::<String>()
    };
    let mut text = format!("{:<10}{}\n", "", row(&|name, _| format!("{name:>12}")));
    for (name, phase) in &phases {
        text += &format!("{name:<10}{}\n", row(&|_, part| format!("{:>12}", gib(part(phase)))));
    }
    text
}

/// Bytes of training: the policy's or the critic's, whichever is larger.
fn training(plan: &MemoryPlan) -> usize {
    plan.critic.map_or(0, |critic| critic.total()).max(plan.train.total())
}

/// Phases between sampling and training, if present.
type Phase = fn(&MemoryPlan) -> Option<PhaseBytes>;
const BETWEEN: [(&str, Phase); 2] = [("reward", |it| it.reward), ("score", |it| it.score)];

/// A column of a phase.
type Part = fn(&PhaseBytes) -> usize;
/// Columns that are shown only if a phase has any.
const OF_SOME: [&str; 3] = ["KV cache", "images", "frozen"];
const PARTS: [(&str, Part); 10] = [
    ("weights", |it| it.weights),
    ("gradients", |it| it.gradients),
    ("optimizer", |it| it.optimizer),
    ("activations", |it| it.activations),
    ("buffers", |it| it.buffers),
    ("KV cache", |it| it.kv_cache),
    ("images", |it| it.images),
    ("frozen", |it| it.frozen),
    ("driver", |it| it.driver),
    ("total", PhaseBytes::total),
];

fn optimizer_name(offload: OptimizerOffload) -> &'static str {
    match offload {
        OptimizerOffload::None => "none",
        OptimizerOffload::BetweenSteps => "between_steps",
        OptimizerOffload::CpuStep => "cpu_step",
    }
}

fn params_name(offload: Offload) -> &'static str {
    match offload {
        Offload::None => "none",
        Offload::BetweenSteps => "between_steps",
        Offload::Cpu => "cpu",
    }
}

fn recompute_name(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::None => "none",
        Recompute::Selective => "selective",
        Recompute::Full => "full",
    }
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_read_with_their_unit() {
        let check = |text: &str, expected: usize| assert_eq!(bytes(text), Ok(expected), "{text}");
        check("80GiB", 80 << 30);
        check("1.5 GiB", 3 << 29);
        check("80GB", 80_000_000_000);
        check("512MiB", 512 << 20);
        check("4194304", 4 << 20);
        for wrong in ["", "GiB", "-1GiB", "80 bananas", "0", "80", "1e30TiB", "nan"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
