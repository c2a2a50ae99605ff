//! `underpass drill`.

use std::{io::Write, path::PathBuf};

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use underpass_bench::process;

use crate::{
    cluster::{self, DataPath},
    drills::{self, Drill},
    measure, report,
    runner::{self, Plan},
};

/// Options of `underpass drill`.
#[derive(Clone, Debug, Args)]
pub struct DrillArgs {
    /// `list`, `all`, `measure` (how long losses take to be over, without faults on links), or names of drills
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Which coordinator
    #[arg(long, value_enum, default_value_t = DataPaths::Both)]
    pub datapath: DataPaths,
    /// How often each
    #[arg(long, default_value_t = 1)]
    pub rounds: usize,
    /// Lose, duplicate and reorder this share of all frames, each [default: 0.01 if all are run, else 0]
    #[arg(long, value_name = "SHARE", num_args = 0..=1, require_equals = true, default_missing_value = "0.01")]
    pub faults: Option<f64>,
    /// What is random in the drills, and their order if all are run [default: another one every time]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Where histories and logs of drills that fail are kept
    #[arg(long, value_name = "DIRECTORY")]
    pub keep: Option<PathBuf>,
    /// measure: items stored meanwhile
    #[arg(long, default_value_t = 1_000_000)]
    pub items: u64,
}

/// Which data paths.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum DataPaths {
    /// In the kernel.
    Xdp,
    /// Sockets.
    Socket,
    /// One after the other.
    Both,
}

impl DataPaths {
    fn list(self) -> Vec<DataPath> {
        match self {
            Self::Xdp => vec![DataPath::Xdp],
            Self::Socket => vec![DataPath::Socket],
            Self::Both => vec![DataPath::Socket, DataPath::Xdp],
        }
    }
}

/// Runs drills, and prints what came of them.
///
/// # Errors
/// When a drill fails, or cannot be run.
pub fn run(args: &DrillArgs) -> Result<()> {
    let known = drills::all();
    if args.names == ["list"] {
        for drill in &known {
            let only = drill.only.map_or(String::new(), |only| format!(" ({only} alone)"));
            println!("{:<28} {}{only}", drill.name, drill.about);
        }
        return Ok(());
    }
    ensure!((0.0..=0.2).contains(&args.faults.unwrap_or(0.0)), "--faults is a share of all frames: 0 to 0.2");
    ensure!((1..=10_000).contains(&args.rounds), "--rounds must be 1 to 10000");
    process::catch_interrupts()?;
    cluster::remove_left()?;
    let data_paths = args.datapath.list();
    if args.names == ["measure"] {
        return measure::run(&data_paths, args.items, args.rounds);
    }
    let all = args.names == ["all"];
    let chosen: Vec<&Drill> = if all {
        known.iter().collect()
    } else {
        let find = |name: &String| match known.iter().find(|drill| drill.name == *name) {
            Some(drill) => Ok(drill),
            None => bail!("there is no drill {name:?}; `underpass drill list` shows all"),
        };
        args.names.iter().map(find).collect::<Result<_>>()?
    };
    let plan = Plan {
        data_paths,
        rounds: args.rounds,
        faults: args.faults.unwrap_or(if all { 0.01 } else { 0.0 }),
        seed: args.seed.unwrap_or_else(|| rand::random::<u64>() >> 16),
        shuffled: all,
        keep: args
            .keep
            .clone()
            .unwrap_or_else(|| std::env::temp_dir().join(format!("underpass-drills-failed-{}", std::process::id()))),
    };
    eprintln!("faults {} %, seed {}", plan.faults * 100.0, plan.seed);
    let outcomes = runner::run(&plan, &chosen, |outcome| println!("{}", report::line(outcome)))?;
    println!("\n{}", report::table(&outcomes));
    std::io::stdout().flush()?;
    ensure!(!outcomes.is_empty(), "no drill was run: the data path chosen has none of them");
    ensure!(outcomes.iter().all(runner::Outcome::is_good), "some drills failed; run again with --seed {}", plan.seed);
    Ok(())
}
