//! `anyroll run`: starts the ranks of this host, or runs as one of them.

use std::{
    env,
    ffi::OsString,
    mem,
    ops::ControlFlow,
    path::{self, Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyroll_config::{Config, PipelineConfig, error_chain::one_line};
use anyroll_pipelines::{
    Error, Result,
    diffusion::{self, Diffusion},
    launch::{self, Hosts, Interrupts, LaunchPlan, Leader, Outcome, Rank},
    offline::Offline,
    opened::Opened,
    output_error::OutputError,
    prepare::{self, Draft, Prepared, Purpose},
    progress::Screen,
    rlvr::Rlvr,
    run::{Machine, Run},
    run_dir::{Lock, RunDir},
    run_log::LogKind,
    storage::Storage,
    train::{self, Ended, Exchange, Folders, Job, Mirror, Place, train},
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

use super::{
    RunArgs, log_to, machine,
    restarts::{launch_with_restarts, newest, newest_in, tell, write_to_log},
};

/// The run folder that the parent created, for the ranks that it starts.
const RUN_DIR: &str = "ANYROLL_RUN_DIR";
/// Most time for the first words with the run's store.
const REACHED_WITHIN: Duration = Duration::from_secs(30);

pub(super) fn run(args: &RunArgs) -> Result<u8> {
    launch::watch_parent();
    let text = args.config.as_ref().map(|path| prepare::text_of(path)).transpose()?;
    let changes = text.as_ref().map(|text| args.strategy.changes(text, &args.sets)).transpose()?;
    // A rank of another launcher is placed by that.
    let machines =
        changes.as_ref().and_then(|it| it.machines.clone()).filter(|_| env::var_os("RANK").is_none());
    let hosts = if launch::is_launched() { None } else { args.hosts.hosts(machines)? };
    // Under srun each host has one such process, which is no rank.
    let rank = if hosts.is_some() { None } else { Rank::from_env()? };
    if hosts.is_some() && env::var_os("RANK").is_some() {
        return Err(Error::StartedHosts);
    }
    if args.restarts > 0 && rank.is_some() && !launch::is_launched() {
        return Err(Error::Restarts);
    }
    let screen = Screen::default();
    let log = || {
        let writer = screen.clone();
        log_to(move || writer.clone());
    };
    // A rank is a process and may run on another host, so it reads the config and its files itself: open folders and
    // tokenizers are not sent. Only one process logs the warnings.
    let follows = hosts.as_ref().is_some_and(|hosts| hosts.node_rank > 0);
    let speaks = !follows && rank.as_ref().is_none_or(|rank| rank.rank == 0 && !launch::is_launched());
    if speaks {
        log();
    }
    let draft = match (args.config.as_ref().zip(text).zip(changes), &args.resume) {
        (Some(((path, text), changes)), _) => {
            Draft::parse(path, text, &changes.tell())?.with_hub(args.download.hub())
        }
        (None, Some(dir)) => {
            let resolved = RunDir::open(dir)?.resolved();
            if !args.sets.is_empty() {
                return Err(Error::Resumed { resolved });
            }
            Draft::read(&resolved, &[])?
        }
        (None, None) => unreachable!("clap requires one of them"),
    };
    let machine = Machine { hosts: hosts.as_ref().map_or(1, |hosts| hosts.nnodes), ..machine(rank.clone()) };
    let prepared = draft.prepare(&machine, Purpose::Run)?;
    if !speaks {
        log();
    }
    // Each host once.
    if rank.as_ref().is_none_or(|rank| rank.local_rank == 0 && !launch::is_launched())
        && let Some(storage) = storage(&prepared.run, Some(REACHED_WITHIN))?
    {
        storage.check()?;
    }
    let elastic =
        Elastic { draft: &draft, machine: &machine, min: prepared.run.config.elastic.map(|it| it.min) };
    match rank {
        None => supervise(args, &elastic, &prepared.run, hosts.as_ref()),
        Some(rank) => work(args, &draft, prepared, rank, &screen),
    }
}

/// The run's store, whose requests end `within` a time or that of the config.
fn storage(run: &Run, within: Option<Duration>) -> Result<Option<Arc<Storage>>> {
    let checkpoint = run.config.pipeline.checkpoint();
    let timeout = Duration::from_secs(checkpoint.storage_timeout_s);
    let timeout = within.map_or(timeout, |within| within.min(timeout));
    let storage = checkpoint.storage.as_ref().map(|url| Storage::open(url, timeout));
    Ok(storage.transpose()?.map(Arc::new))
}

/// Numbers of hosts with which a run can go on.
struct Elastic<'a> {
    draft: &'a Draft,
    machine: &'a Machine,
    /// `elastic.min`; `None` if all hosts are needed.
    min: Option<usize>,
}

impl Elastic<'_> {
    /// Returns the problems of a run on so many hosts.
    fn problem(&self, hosts: usize) -> Option<Error> {
        let machine = Machine { hosts, ..self.machine.clone() };
        self.draft.prepare(&machine, Purpose::Plan).err().map(Error::from)
    }

    /// Refuses a run that can go on with no smaller number of hosts.
    ///
    /// # Errors
    /// [`Error::NotElastic`], with the problem of the largest such number.
    fn check(&self, nnodes: usize, restarts: u32) -> Result<()> {
        let Some(min) = self.min else { return Ok(()) };
        if restarts == 0 || nnodes == 1 {
            tracing::warn!("`elastic` has no effect without `--nnodes` of 2 or above and `--restarts`");
            return Ok(());
        }
        let refused = |problem: String| Err(Error::NotElastic { min, nnodes, problem });
        if min >= nnodes {
            return refused("it must be below `--nnodes`".to_owned());
        }
        if let PipelineConfig::Rlvr(rlvr) = self.config()
            && rlvr.rollout.asynchronous.ahead > 0
        {
            return refused("`rollout.async` keeps completions of each rank in flight".to_owned());
        }
        let mut problems = (min..nnodes).rev().map(|hosts| self.problem(hosts));
        match problems.next().flatten() {
            Some(first) if problems.all(|problem| problem.is_some()) => refused(one_line(&first)),
            _ => Ok(()),
        }
    }

    fn config(&self) -> &PipelineConfig {
        &self.draft.config().expect("a run was made of it").pipeline
    }
}

/// Starts the ranks of this host and waits until those of all hosts have ended.
fn supervise(args: &RunArgs, elastic: &Elastic, run: &Run, hosts: Option<&Hosts>) -> Result<u8> {
    elastic.check(hosts.map_or(1, |hosts| hosts.nnodes), args.restarts)?;
    let program = env::current_exe().map_err(|source| launch::Error::Start {
        rank: 0,
        program: "anyroll-engine".into(),
        source,
    })?;
    let plan = LaunchPlan {
        program,
        args: env::args_os().skip(1).collect(),
        local_ranks: run.policy.ordinals.len(),
        threads: run.threads,
        env: Vec::new(),
    };
    let resumed = |folder: &Path| {
        let show = args.show.then(|| "--show".into());
        let profile = (args.profile > 0).then(|| format!("--profile={}", args.profile).into());
        ["run".into(), "--resume".into(), OsString::from(folder)]
            .into_iter()
            .chain(show)
            .chain(profile)
            .collect()
    };
    match hosts {
        Some(hosts) if hosts.node_rank > 0 => {
            // The folder is that of host 0. With a store this host has its own, and may not have begun the run.
            let stored = run.config.pipeline.checkpoint().storage.is_some();
            let resumed = |folder: &Path| if stored { plan.args.clone() } else { resumed(folder) };
            Ok(launch::follow(hosts, &plan, args.restarts > 0, resumed)?.exit_code())
        }
        _ => {
            let storage = storage(run, None)?;
            let folder = folder(args, elastic.draft, run, storage.as_deref())?;
            let fits =
                |hosts| elastic.min.is_some_and(|min| hosts >= min) && elastic.problem(hosts).is_none();
            let job = JobOfHosts { hosts, storage: storage.as_deref(), fits: &fits };
            lead(args, folder, plan, job, resumed)
        }
    }
}

/// A job, as its leader sees it.
struct JobOfHosts<'a> {
    /// `None` if this host is the only one.
    hosts: Option<&'a Hosts>,
    storage: Option<&'a Storage>,
    /// Returns true if the job can go on with so many hosts.
    fits: &'a dyn Fn(usize) -> bool,
}

/// Decides on starts for all hosts, or for this one alone.
fn lead(
    args: &RunArgs,
    Folder { dir, has_begun }: Folder,
    mut plan: LaunchPlan,
    JobOfHosts { hosts, storage, fits }: JobOfHosts,
    resumed: impl Fn(&Path) -> Vec<OsString>,
) -> Result<u8> {
    let _kept = if has_begun { None } else { Some(dir.keep()?) };
    plan.env.push((RUN_DIR.into(), OsString::from(dir.path())));
    if has_begun {
        plan.args = resumed(dir.path());
    }
    let mut leader = hosts.map(|hosts| Leader::listen(hosts, plan.local_ranks, fits)).transpose()?;
    let absolute = path::absolute(dir.path()).unwrap_or_else(|_| dir.path().to_owned());
    let mut continues = has_begun;
    let start = |plan: &LaunchPlan, interrupts: &mut Interrupts| {
        let continues = mem::replace(&mut continues, true);
        match &mut leader {
            Some(leader) => {
                let tell = |text: &str| tell(&dir, text);
                leader.launch(plan, continues.then_some(&absolute), interrupts, tell)
            }
            None => launch::launch(plan, interrupts),
        }
    };
    let record = |error: &launch::Error| record_failure(&dir, has_begun, error);
    // Hosts continue together from what all of them can have.
    let newest = || storage.filter(|_| hosts.is_some()).map_or_else(|| newest(&dir), newest_in);
    let again = || (resumed(dir.path()), newest());
    let outcome = launch_with_restarts(plan, args.restarts, &dir, again, start, record);
    if let Some(leader) = leader {
        leader.part(outcome.as_ref().copied());
    }
    Ok(outcome?.exit_code())
}

/// Writes the failure of the ranks to the run's log. It names the rank to blame, which each rank alone does not know.
fn record_failure(dir: &RunDir, is_resumed: bool, error: &launch::Error) {
    // The ranks may have been refused since another process runs the run.
    if is_resumed && dir.is_in_use() {
        return;
    }
    write_to_log(dir, LogKind::Failed, &one_line(error));
}

/// The folder of a run.
struct Folder {
    dir: RunDir,
    /// True if the run is continued.
    has_begun: bool,
}

/// Creates the run folder, or opens the one to continue.
fn folder(args: &RunArgs, draft: &Draft, run: &Run, storage: Option<&Storage>) -> Result<Folder> {
    if let Some(dir) = &args.resume {
        return Ok(Folder { dir: RunDir::open(dir)?, has_begun: true });
    }
    let stored = storage.map(|storage| Ok::<_, Error>((storage, train::newest(storage)?.is_some())));
    let stored = stored.transpose()?.filter(|(_, has_checkpoint)| *has_checkpoint);
    if let (Some((storage, _)), false) = (stored, args.auto_resume) {
        return Err(Error::Stored { url: storage.url().to_owned() });
    }
    let path = match &args.output {
        Some(path) => path.clone(),
        None => RunDir::default_path(Path::new("runs"), &run.config.name, &jiff::Zoned::now()),
    };
    match RunDir::create(&path, draft.as_written(), &run.to_yaml()) {
        Ok(dir) => {
            if let Some((storage, _)) = stored {
                train::fetch_records(storage, dir.path())?;
                same_run(&dir, run)?;
            }
            Ok(Folder { dir, has_begun: stored.is_some() })
        }
        Err(OutputError::AlreadyARun { path }) if args.auto_resume => {
            let dir = RunDir::open(&path)?;
            same_run(&dir, run)?;
            Ok(Folder { dir, has_begun: true })
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses a folder of a run with another config.
fn same_run(dir: &RunDir, run: &Run) -> Result<()> {
    let there = prepare::text_of(&dir.resolved())?;
    match first_difference(&run.to_yaml(), &there) {
        Some((here, there)) => Err(Error::OtherRun { folder: dir.path().to_owned(), there, here }),
        None => Ok(()),
    }
}

/// The first line in which two texts differ, of each.
fn first_difference(own: &str, other: &str) -> Option<(String, String)> {
    let lines = own.lines().map(Some).chain([None]).zip(other.lines().map(Some).chain([None]));
    let (own, other) = lines.into_iter().find(|(own, other)| own != other)?;
    let line = |line: Option<&str>| line.map_or("nothing".to_owned(), |line| format!("`{}`", line.trim()));
    Some((line(own), line(other)))
}

/// Runs as a rank.
fn work(args: &RunArgs, draft: &Draft, prepared: Prepared, rank: Rank, screen: &Screen) -> Result<u8> {
    let Prepared { run, opened } = prepared;
    tch::set_num_threads(run.threads as i32);
    let storage = storage(&run, None)?;
    // Rank 0 writes the folder. Another launcher has not created it yet.
    let folder = match (rank.rank, env::var_os(RUN_DIR)) {
        (0, Some(path)) => {
            Some(Folder { dir: RunDir::open(Path::new(&path))?, has_begun: args.resume.is_some() })
        }
        (0, None) => Some(folder(args, draft, &run, storage.as_deref())?),
        _ => None,
    };
    let (dir, has_begun) = folder.map_or((None, false), |it| (Some(it.dir), it.has_begun));
    let lock = dir.as_ref().map(RunDir::lock).transpose()?;
    let place = Place::open(&run, &rank)?;
    let exchange = Exchange::new(place.group())?;
    place.group().name_hosts(&exchange.gather(&launch::host_name())?);
    let data = opened.digest().map(|digest| format!("{digest:08x}"));
    same_config(&run, data.as_deref(), &exchange)?;
    // Rank 0 alone knows if `--auto-resume` found a run: another rank may look after it was created.
    let resume = exchange.gather(&has_begun)?[0];
    let of_rank_0 = dir.as_ref().zip(lock.as_ref());
    // With a store each host may have a folder of its own.
    let named = args.output.as_deref().or(args.resume.as_deref()).filter(|_| storage.is_some());
    let host = match shared_folder(of_rank_0, named, &exchange)? {
        Seen { folder, missing: None, .. } => HostFolder { path: folder, folders: Folders::One, _lock: None },
        Seen { folder, missing: Some(rank), .. } if storage.is_none() => {
            return Err(Error::NotShared { rank, folder });
        }
        seen => {
            refuse_to_encode(&opened)?;
            let make = |path: &Path| make_folder(path, draft, &run, resume);
            host_folder(named, &rank, seen, &exchange, make)?
        }
    };
    let keep_last = run.config.pipeline.checkpoint().keep_last;
    let mirror = storage.map(|storage| Mirror::new(storage, &host.path, host.folders, keep_last));
    let name = run.config.name.clone();
    let metrics = run.config.metrics.clone();
    let number = run_number(&run, data.as_deref());
    let (show, profile, folders, folder) = (args.show, args.profile, host.folders, host.path.clone());
    let job = Job { name: &name, data, number, dir, folder, folders, mirror, resume, show, profile, metrics };
    // Signals are caught only once the pipeline is made: a rank that still waits for the others, or for a reward to
    // start, has nothing to save, and the signal ends it.
    let ended = match (run.config.pipeline.clone(), opened) {
        (PipelineConfig::Rlvr(rlvr), Opened::Texts(texts)) => {
            train(Rlvr::new(run, &rlvr, *texts, place, &rank)?, exchange, job, screen, &stop_flag()?)?
        }
        (PipelineConfig::Offline(offline), Opened::Texts(texts)) if offline.objective.is_of_numbers() => {
            train(Offline::of_numbers(run, &offline, *texts, place)?, exchange, job, screen, &stop_flag()?)?
        }
        (PipelineConfig::Offline(offline), Opened::Texts(texts)) if offline.objective.ilql().is_some() => {
            train(Offline::of_values(run, &offline, *texts, place)?, exchange, job, screen, &stop_flag()?)?
        }
        (PipelineConfig::Offline(offline), Opened::Texts(texts)) => train(
            Offline::of_language(run, &offline, *texts, place, &rank)?,
            exchange,
            job,
            screen,
            &stop_flag()?,
        )?,
        (PipelineConfig::Diffusion(config), Opened::Shapes(dit)) => {
            train(Diffusion::of_shapes(run, &config, &dit, place)?, exchange, job, screen, &stop_flag()?)?
        }
        (PipelineConfig::Diffusion(config), Opened::Images(images)) => {
            let diffusion::Opened { model, texts } = *images;
            let widths = model.folder.transformer_config().text_widths();
            let stop = stop_flag()?;
            let encoded = diffusion::encode(texts, widths, &place, &exchange, &job.folder, screen, &stop)?;
            let ControlFlow::Continue(texts) = encoded else {
                return Ok(Outcome::Interrupted.exit_code());
            };
            train(Diffusion::of_texts(run, &config, model, texts, place)?, exchange, job, screen, &stop)?
        }
        (pipeline, _) => unreachable!("`prepare` opens what `{}` trains", pipeline.name()),
    };
    match ended {
        Ended::Finished => Ok(Outcome::Finished.exit_code()),
        Ended::Interrupted => Ok(Outcome::Interrupted.exit_code()),
    }
}

/// Number of a new run, which its checkpoint files contain: a checksum of its seed, model and data. Runs that differ
/// only in how they are computed write the same files.
fn run_number(run: &Run, data: Option<&str>) -> u32 {
    let Config { seed, model, .. } = &run.config;
    let model = serde_json::to_string(model).expect("a config is plain data");
    crc32c::crc32c(format!("{seed} {} {model}", data.unwrap_or_default()).as_bytes())
}

/// Refuses ranks with another config or another digest of the data. Each host may have its own files, and
/// `zero_stage: auto` may resolve differently on it.
fn same_config(run: &Run, data: Option<&str>, exchange: &Exchange) -> Result<()> {
    let data = data.map(|digest| format!("records of the data: {digest}\n"));
    let own = run.config.to_yaml() + &data.unwrap_or_default();
    let all = exchange.gather(&own)?;
    let differ = |(rank, text): (usize, &String)| Some((rank, first_difference(text, &all[0])?));
    match all.iter().enumerate().find_map(differ) {
        Some((rank, (own, first))) => Err(Error::Configs { rank, own, first }),
        None => Ok(()),
    }
}

/// The run's folder on this host.
struct HostFolder {
    path: PathBuf,
    folders: Folders,
    /// Lock of a folder that rank 0 does not see, on the rank that made it.
    _lock: Option<Lock>,
}

/// Rank 0's folder.
struct Seen {
    folder: PathBuf,
    /// True if this rank sees it.
    is_here: bool,
    /// The first rank that does not.
    missing: Option<usize>,
}

/// Finds out which ranks see rank 0's folder: at the path that is `named` on their host, or else at rank 0's.
fn shared_folder(own: Option<(&RunDir, &Lock)>, named: Option<&Path>, exchange: &Exchange) -> Result<Seen> {
    let said = own.map_or(String::new(), |(dir, lock)| {
        let path = path::absolute(dir.path()).unwrap_or_else(|_| dir.path().to_owned());
        format!("{}\n{}", lock.mark(), path.display())
    });
    let said = exchange.gather(&said)?.swap_remove(0);
    let (mark, path) = said.split_once('\n').expect("rank 0 says both");
    let folder = PathBuf::from(path);
    let is_here = Lock::is_at(named.unwrap_or(&folder), mark);
    let missing = exchange.gather(&is_here)?.iter().position(|sees| !sees);
    Ok(Seen { folder: own.map_or(folder, |(dir, _)| dir.path().to_owned()), is_here, missing })
}

/// The folder of this host, where some do not see rank 0's: the `named` one, or else one at the path of rank 0's. One rank
/// of the host makes it.
fn host_folder(
    named: Option<&Path>,
    rank: &Rank,
    Seen { folder, is_here, .. }: Seen,
    exchange: &Exchange,
    make: impl Fn(&Path) -> Result<Lock>,
) -> Result<HostFolder> {
    let path = named.filter(|_| !is_here).map_or(folder, Path::to_owned);
    let makes = !is_here && rank.local_rank == 0;
    let lock = if makes { Some(make(&path)?) } else { None };
    // Now it is there for all ranks of the host.
    exchange.gather(&())?;
    Ok(HostFolder { path, folders: Folders::OfHosts { is_first: makes || rank.rank == 0 }, _lock: lock })
}

/// Refuses texts that rank 0 would encode into its folder, for all ranks.
fn refuse_to_encode(opened: &Opened) -> Result<()> {
    match opened {
        Opened::Images(images) if images.texts.are_to_encode() => Err(Error::EncodesApart),
        _ => Ok(()),
    }
}

/// Makes the folder of a host that does not see rank 0's, or opens the one that it had before the run was resumed.
fn make_folder(path: &Path, draft: &Draft, run: &Run, resume: bool) -> Result<Lock> {
    let dir = match RunDir::create(path, draft.as_written(), &run.to_yaml()) {
        Err(OutputError::AlreadyARun { path }) if resume => {
            let dir = RunDir::open(&path)?;
            same_run(&dir, run)?;
            dir
        }
        made => made?,
    };
    Ok(dir.lock()?)
}

/// A flag that Ctrl-C, SIGTERM and SIGHUP set.
pub(super) fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, stop.clone()).map_err(Error::Signals)?;
    }
    Ok(stop)
}
