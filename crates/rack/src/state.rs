//! What is kept about a rack that is up, for other processes.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::{Error, Result, config::Topology, namespace::Process};

const DIRECTORY: &str = "/run/underpass/racks";

/// Where a rack's delay line runs.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", tag = "in")]
pub(crate) enum Line {
    /// A thread of a process that uses this crate: it is not ours to end.
    Thread(Process),
    /// A process of its own.
    Process(Process),
}

impl Line {
    pub(crate) fn process(&self) -> &Process {
        match self {
            Self::Thread(process) | Self::Process(process) => process,
        }
    }
}

/// The content of a rack's state file.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    pub(crate) topology: Topology,
    /// Absent until the rack is up.
    pub(crate) line: Option<Line>,
    /// The kernel threads that receive for hosts, by interface.
    pub(crate) threads: BTreeMap<String, Process>,
}

pub(crate) fn path(rack: &str) -> PathBuf {
    Path::new(DIRECTORY).join(format!("{rack}.json"))
}

/// Where the process of a delay line writes what it has to say.
pub(crate) fn log_path(rack: &str) -> PathBuf {
    Path::new(DIRECTORY).join(format!("{rack}.log"))
}

/// The names of all racks that have a state file.
pub(crate) fn racks() -> Vec<String> {
    let Ok(entries) = fs::read_dir(DIRECTORY) else { return Vec::new() };
    entries.filter_map(|entry| Some(entry.ok()?.file_name().to_str()?.strip_suffix(".json")?.to_string())).collect()
}

/// Waits until no other process starts, ends or changes a rack. The lock is on the directory: it leaves no file behind.
pub(crate) fn lock() -> Result<Flock<File>> {
    let what = || format!("cannot lock {DIRECTORY}");
    fs::create_dir_all(DIRECTORY).map_err(Error::io(format!("cannot make {DIRECTORY}")))?;
    let directory = File::open(DIRECTORY).map_err(Error::io(what()))?;
    Flock::lock(directory, FlockArg::LockExclusive).map_err(|(_, error)| Error::io(what())(error))
}

impl State {
    pub(crate) fn read(rack: &str) -> Result<Option<Self>> {
        let path = path(rack);
        match fs::read_to_string(&path) {
            Ok(text) => match serde_json::from_str(&text) {
                Ok(state) => Ok(Some(state)),
                Err(error) => Err(Error::State { path, reason: error.to_string() }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(format!("cannot read {}", path.display()))(error)),
        }
    }

    /// Replaces the file as a whole: a reader sees the old or the new one.
    pub(crate) fn write(&self) -> Result<()> {
        let path = path(&self.topology.name);
        let what = || format!("cannot write {}", path.display());
        let mut text = serde_json::to_string_pretty(self).map_err(|error| Error::io(what())(io::Error::from(error)))?;
        text.push('\n');
        let new = path.with_extension("json.new");
        fs::write(&new, text).and_then(|()| fs::rename(&new, &path)).map_err(Error::io(what()))
    }
}

/// Removes all files about a rack.
pub(crate) fn remove(rack: &str) -> Result<()> {
    for path in [path(rack), path(rack).with_extension("json.new"), log_path(rack)] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io(format!("cannot remove {}", path.display()))(error));
            }
            _ => {}
        }
    }
    Ok(())
}
