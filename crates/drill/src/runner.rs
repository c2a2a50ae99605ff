//! Runs drills, one after the other, in racks that live through many of them.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
use underpass_bench::process;
use underpass_check::{
    history::{HistoryWriter, Operation},
    linearizability::Verdict,
};
use underpass_client::engine::monotonic_ns;

use crate::{
    cluster::{Cluster, DataPath, Settings},
    drills::{Drill, Scene},
    judge::{self, Judgement, Pauses},
    load::{Clients, Keys, LASTING_PREFIX},
};

/// How long clients work before anything happens.
const BEFORE: Duration = Duration::from_millis(400);
/// How long they go on when all is well again.
const AFTER: Duration = Duration::from_millis(200);
/// How long the shard may take to be as before, after a drill has done what it does.
const RECOVER_MAX: Duration = Duration::from_secs(15);
/// How long replicas may differ once clients are done: writes whose clients gave up are repaired first.
const AGREE_MAX: Duration = Duration::from_secs(6);

/// How drills are run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// One after the other.
    pub data_paths: Vec<DataPath>,
    /// How often each drill.
    pub rounds: usize,
    /// Loss, duplication and reordering, each.
    pub faults: f64,
    /// Of the order of drills, and of what is random in them.
    pub seed: u64,
    /// In a random order.
    pub shuffled: bool,
    /// Where logs and histories of what fails are kept.
    pub keep: PathBuf,
}

/// What came of one drill.
#[derive(Debug)]
pub struct Outcome {
    /// Its name.
    pub name: String,
    /// On this data path.
    pub data_path: DataPath,
    /// What clients saw.
    pub pauses: Pauses,
    /// Operations in its history.
    pub operations: usize,
    /// Of these, without an answer.
    pub unknown: usize,
    /// Acknowledged writes that are gone.
    pub lost: usize,
    /// Not linearizable, or not proved to be.
    pub violation: bool,
    /// What else is wrong; empty if it did what it should.
    pub failure: String,
    /// How long it took.
    pub took: Duration,
}

impl Outcome {
    /// Whether nothing is wrong.
    pub fn is_good(&self) -> bool {
        self.lost == 0 && !self.violation && self.failure.is_empty()
    }
}

/// Runs these drills; calls `told` after each.
///
/// # Errors
/// When a rack cannot be brought up at all, or after an interrupt.
pub fn run(plan: &Plan, drills: &[&Drill], mut told: impl FnMut(&Outcome)) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    let mut rng = StdRng::seed_from_u64(plan.seed);
    for &data_path in &plan.data_paths {
        let fitting: Vec<&Drill> =
            drills.iter().copied().filter(|drill| drill.only.is_none_or(|only| only == data_path)).collect();
        let mut order: Vec<&Drill> = (0..plan.rounds).flat_map(|_| fitting.iter().copied()).collect();
        if plan.shuffled {
            order.shuffle(&mut rng);
        }
        let mut rest = order.as_slice();
        while !rest.is_empty() {
            let mut life = Life::begin(plan, data_path)?;
            // A rack in which something failed may be left in any state: the next drill gets another one.
            while let Some((drill, after)) = rest.split_first() {
                rest = after;
                let outcome = life.perform(drill, &mut rng)?;
                let good = outcome.is_good();
                told(&outcome);
                outcomes.push(outcome);
                if !good {
                    break;
                }
            }
            if let Some(outcome) = life.end() {
                told(&outcome);
                outcomes.push(outcome);
            }
        }
    }
    Ok(outcomes)
}

/// A rack and its clients, while all goes well.
struct Life<'a> {
    plan: &'a Plan,
    cluster: Cluster,
    clients: Clients,
    /// Operations on the keys that live as long as this.
    lasting: Vec<Operation>,
    /// When all keys were read last.
    last_ns: u64,
    /// Drills so far.
    drills: u32,
    failed: bool,
}

impl<'a> Life<'a> {
    fn begin(plan: &'a Plan, data_path: DataPath) -> Result<Self> {
        let cluster = Cluster::up(Settings { data_path, faults: plan.faults, memory_mib: 256 })?;
        let clients = Clients::connect(&cluster)?;
        Ok(Self { plan, cluster, clients, lasting: Vec::new(), last_ns: 0, drills: 0, failed: false })
    }

    fn perform(&mut self, drill: &Drill, rng: &mut StdRng) -> Result<Outcome> {
        let began = Instant::now();
        self.drills += 1;
        let keys = Keys::of(self.drills);
        let load = self.clients.start(&keys, rng.random());
        thread::sleep(BEFORE);
        let start_ns = monotonic_ns();
        let mut scene = Scene { cluster: &mut self.cluster, rng };
        let done = (drill.act)(&mut scene).and_then(|()| {
            self.cluster.check()?;
            self.cluster.await_health(RECOVER_MAX)
        });
        let end_ns = monotonic_ns();
        thread::sleep(AFTER);
        load.stop();
        process::check_interrupt()?;
        self.last_ns = monotonic_ns();
        let done = done.and_then(|()| {
            self.clients.read_all(&keys);
            self.cluster.await_agreement(AGREE_MAX)
        });
        let mut history = self.clients.take_history();
        let pauses = judge::pauses(&history, &(start_ns..end_ns));
        let (operations, unknown) = (history.len(), history.iter().filter(|each| each.return_ns.is_none()).count());
        let lasts = |operation: &mut Operation| operation.key.0.starts_with(LASTING_PREFIX.as_bytes());
        self.lasting.extend(history.extract_if(.., lasts));
        // Keys that last are judged by all that was ever done to them.
        history.extend_from_slice(&self.lasting);
        let judgement = judge::judge(&history, self.last_ns);
        let mut failure = match done {
            Ok(()) => String::new(),
            Err(error) => format!("{error:#}"),
        };
        for (what, pause, bound) in
            [("reads", pauses.reads, drill.bounds.reads), ("writes", pauses.writes, drill.bounds.writes)]
        {
            if failure.is_empty() && pause > bound {
                failure = format!("no {what} for {pause:?}, and {bound:?} are allowed");
            }
        }
        let name = format!("{:03}-{}-{}", self.drills, drill.name, self.cluster.data_path());
        let outcome = Outcome {
            name: drill.name.clone(),
            data_path: self.cluster.data_path(),
            pauses,
            operations,
            unknown,
            lost: judgement.lost.len(),
            violation: judgement.report.verdict() != Verdict::Linearizable,
            failure,
            took: began.elapsed(),
        };
        if !outcome.is_good() {
            self.failed = true;
            self.keep(&name, &history, &judgement, &outcome.failure);
        }
        Ok(outcome)
    }

    /// Takes everything down. Something to tell of only if that does not go as it should.
    fn end(self) -> Option<Outcome> {
        let began = Instant::now();
        let data_path = self.cluster.data_path();
        let Self { cluster, clients, failed, .. } = self;
        drop(clients);
        let error = cluster.down().err().filter(|_| !failed)?;
        Some(Outcome {
            name: "(the end)".to_owned(),
            data_path,
            pauses: Pauses::default(),
            operations: 0,
            unknown: 0,
            lost: 0,
            violation: false,
            failure: format!("{error:#}"),
            took: began.elapsed(),
        })
    }

    /// Keeps what is needed to see what happened.
    fn keep(&self, name: &str, history: &[Operation], judgement: &Judgement, failure: &str) {
        let folder = self.plan.keep.join(name);
        let kept = keep(&folder, history).and_then(|()| {
            for (log, text) in self.cluster.logs() {
                fs::write(folder.join(log), text)?;
            }
            let mut text = format!("{failure}\n{}\n", judgement.report);
            judgement.lost.iter().for_each(|lost| text += &format!("lost: {lost}\n"));
            for coordinator in 0..crate::cluster::COORDINATORS {
                text += &format!("coordinator-{coordinator}: {:#?}\n", self.cluster.status(coordinator));
            }
            fs::write(folder.join("what.txt"), text).context("cannot write what.txt")
        });
        match kept {
            Ok(()) => eprintln!("  its history and all logs are in {}", folder.display()),
            Err(error) => eprintln!("  its history and logs could not be kept: {error:#}"),
        }
    }
}

fn keep(folder: &Path, history: &[Operation]) -> Result<()> {
    fs::create_dir_all(folder)?;
    let writer = HistoryWriter::create(folder.join("history.jsonl"))?;
    history.iter().try_for_each(|operation| writer.record(operation))?;
    writer.finish()?;
    Ok(())
}
