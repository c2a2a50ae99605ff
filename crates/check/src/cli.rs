//! `underpass check`.

use std::path::PathBuf;

use anyhow::bail;

use crate::{
    history::read_file,
    invariants::linearizable,
    linearizability::{Checker, Options},
};

/// Checks recorded histories for linearizability.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Histories to check, as docs/history.md describes them; several are taken together as one
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Steps to try for each key before giving up on it; a million take about a second
    #[arg(long, default_value_t = Options::default().budget, value_name = "STEPS")]
    budget: u64,
    /// Keys to check at a time [default: one for each CPU]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

/// Prints a report. Fails if the history cannot be read, is not linearizable, or could not be decided.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut checker = Checker::new();
    let mut count = 0u64;
    for file in &args.files {
        read_file(file, |operation| {
            checker.add(&operation);
            count += 1;
        })?;
    }
    if count == 0 {
        bail!("the history is empty: there is nothing to check");
    }
    let defaults = Options::default();
    let options = Options { budget: args.budget, threads: args.threads.unwrap_or(defaults.threads) };
    let report = checker.check(&options);
    println!("{report}");
    linearizable::verify(&report)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn check(files: &[&str]) -> Result<(), String> {
        let dir = tempfile::tempdir().unwrap();
        let mut line = vec!["check".to_owned()];
        for (i, text) in files.iter().enumerate() {
            let path = dir.path().join(format!("{i}.jsonl"));
            std::fs::File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
            line.push(path.display().to_string());
        }
        let command = Command::try_parse_from(line).map_err(|e| e.to_string())?;
        run(&command.args).map_err(|e| e.to_string())
    }

    const PUT: &str =
        r#"{"client":1,"op":"put","key":"k","value":"a","call_ns":1,"return_ns":2,"outcome":"ok","cas":1}"#;
    const GET: &str =
        r#"{"client":2,"op":"get","key":"k","value":"a","call_ns":3,"return_ns":4,"outcome":"ok","cas":1}"#;

    #[test]
    fn several_files_are_one_history() {
        check(&[PUT, GET]).unwrap();
        assert!(check(&[GET]).unwrap_err().contains("linearizable"));
        assert!(check(&[PUT, "{"]).unwrap_err().contains("1.jsonl, line 1"));
        assert!(check(&["\n"]).unwrap_err().contains("empty"));
        assert!(check(&[]).unwrap_err().contains("FILE"));
    }
}
