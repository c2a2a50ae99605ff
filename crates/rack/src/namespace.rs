//! Network namespaces: their names, entering them, and the processes in them.

use std::{
    ffi::CStr,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        linux::fs::MetadataExt,
        unix::process::CommandExt,
    },
    panic,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::{
    mount::{MntFlags, MsFlags},
    sched::CloneFlags,
};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Where `ip netns` keeps namespaces.
const DIRECTORY: &str = "/run/netns";
/// Everything of a rack in [`DIRECTORY`] starts with this and its name, so that it is found without a state file.
const PREFIX: &str = "underpass.";
/// How long a process may take to end before it is killed.
const TERM_WAIT: Duration = Duration::from_secs(1);
const KILL_WAIT: Duration = Duration::from_secs(5);
/// A process can start another between being seen and being killed, but not for ever.
const KILL_ROUNDS: usize = 8;

/// The name of the namespace of a rack's switch; dots are not allowed in names of racks and hosts.
pub(crate) fn switch_name(rack: &str) -> String {
    format!("{PREFIX}{rack}")
}

/// The name of a host's namespace.
pub(crate) fn host_name(rack: &str, host: &str) -> String {
    format!("{PREFIX}{rack}.{host}")
}

/// The file that a namespace is bound to.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(name)
}

/// The names of all namespaces of a rack that exist, the switch's first.
pub(crate) fn of_rack(rack: &str) -> Vec<String> {
    let switch = switch_name(rack);
    let prefix = format!("{switch}.");
    let mut names: Vec<_> = all().into_iter().filter(|name| *name == switch || name.starts_with(&prefix)).collect();
    names.sort();
    names
}

/// The names of all racks that have a namespace.
pub(crate) fn racks() -> Vec<String> {
    all().iter().filter_map(|name| Some(name.strip_prefix(PREFIX)?.split('.').next()?.to_string())).collect()
}

fn all() -> Vec<String> {
    let Ok(entries) = fs::read_dir(DIRECTORY) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

/// Takes the name of a namespace away. It ends with its last process, thread and socket.
pub(crate) fn delete(name: &str) -> Result<()> {
    let path = path(name);
    // Fails if a crash left the file without a mount: then the file is all that there is to remove.
    let _ = nix::mount::umount2(&path, MntFlags::MNT_DETACH);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format!("cannot remove {}", path.display()))(error))
        }
        _ => Ok(()),
    }
}

pub(crate) fn open(path: &Path) -> Result<OwnedFd> {
    match File::open(path) {
        Ok(file) => Ok(file.into()),
        Err(error) => Err(Error::io(format!("cannot open the network namespace {}", path.display()))(error)),
    }
}

/// Moves the calling thread into a network namespace.
pub(crate) fn set(namespace: BorrowedFd) -> io::Result<()> {
    Ok(nix::sched::setns(namespace, CloneFlags::CLONE_NEWNET)?)
}

/// Moves the calling thread into a network namespace for good, with what /sys says about interfaces.
///
/// A sysfs shows the interfaces of the namespace that it was mounted from. A second one is mounted, but only its part
/// about interfaces takes the place of the first one's: `/sys/fs/bpf`, control groups and tracing stay as they are.
/// Allocates nothing and takes no lock: called between fork and exec.
fn enter(namespace: BorrowedFd) -> io::Result<()> {
    const CLASS: &CStr = c"/sys/class/net";
    const DEVICES: &CStr = c"/sys/devices/virtual/net";
    const NEW_CLASS: &CStr = c"/sys/devices/virtual/net/class/net";
    const NEW_DEVICES: &CStr = c"/sys/devices/virtual/net/devices/virtual/net";
    set(namespace)?;
    nix::sched::unshare(CloneFlags::CLONE_NEWNS)?;
    // None of these mounts must reach the caller's; later ones of the caller's may come in.
    nix::mount::mount(None::<&CStr>, c"/", None::<&CStr>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&CStr>)?;
    nix::mount::mount(Some(c"sysfs"), DEVICES, Some(c"sysfs"), MsFlags::empty(), None::<&CStr>)?;
    nix::mount::mount(Some(NEW_CLASS), CLASS, None::<&CStr>, MsFlags::MS_BIND, None::<&CStr>)?;
    nix::mount::mount(Some(NEW_DEVICES), DEVICES, None::<&CStr>, MsFlags::MS_BIND, None::<&CStr>)?;
    Ok(())
}

/// Runs a closure on a thread of its own inside a namespace and waits for it; a panic of the closure is passed on.
pub(crate) fn run<T: Send>(path: &Path, body: impl FnOnce() -> T + Send) -> Result<T> {
    let namespace = open(path)?;
    let run = || match enter(namespace.as_fd()) {
        Ok(()) => Ok(body()),
        Err(error) => Err(error),
    };
    match thread::scope(|scope| scope.spawn(run).join()) {
        Ok(result) => result.map_err(Error::io(format!("cannot enter the network namespace {}", path.display()))),
        Err(payload) => panic::resume_unwind(payload),
    }
}

/// A command that will run inside a namespace.
pub(crate) fn command(path: &Path, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
    let namespace = open(path)?;
    let mut command = Command::new(program);
    // SAFETY: `enter` makes system calls only; it neither allocates nor locks.
    unsafe { command.pre_exec(move || enter(namespace.as_fd())) };
    Ok(command)
}

/// A process, told apart from a later one of the same number by when it started.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// When it started, in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start: u64,
    /// Its command line, or its name if it has none.
    pub command: String,
}

impl Process {
    /// The process that has a number now; `None` if there is none, or it has ended and nobody has asked how.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may contain any character, even these.
        let (name, fields) = stat.split_once('(')?.1.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        if matches!(fields.next()?, "Z" | "X") {
            return None;
        }
        let start = fields.nth(18)?.parse().ok()?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ").trim().to_string();
        Some(Self { pid, start, command: if line.is_empty() { name.into() } else { line } })
    }

    /// Whether this very process still runs.
    pub fn runs(&self) -> bool {
        Self::of(self.pid).is_some_and(|now| now.start == self.start)
    }
}

/// The processes whose main thread is in one of the namespaces. Not the calling process, nor one that merely has some
/// threads there, as users of [`Host::enter`](crate::Host::enter) do.
pub(crate) fn processes(names: &[String]) -> Vec<Process> {
    // A namespace file that is not (or no longer) mounted has an inode of another device: it matches nobody.
    let identity = |path: &Path| fs::metadata(path).map(|data| (data.st_dev(), data.st_ino())).ok();
    let wanted: Vec<_> = names.iter().filter_map(|name| identity(&path(name))).collect();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mut processes: Vec<_> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|&pid| pid as u32 != std::process::id())
        .filter(|pid| identity(Path::new(&format!("/proc/{pid}/ns/net"))).is_some_and(|id| wanted.contains(&id)))
        .filter_map(Process::of)
        .collect();
    processes.sort_by_key(|process| process.pid);
    processes
}

/// Ends processes and whatever they start meanwhile in the namespaces: asks first, then kills. Never one that has taken
/// over the number of another.
pub(crate) fn end(mut wanted: Vec<Process>, names: &[String]) -> Result<()> {
    for (signal, wait) in [(Signal::TERM, TERM_WAIT)].into_iter().chain([(Signal::KILL, KILL_WAIT); KILL_ROUNDS]) {
        for process in &wanted {
            let Some(pid) = Pid::from_raw(process.pid) else { continue };
            // The descriptor stays with its process; so the check that comes after it holds for the signal.
            let Ok(handle) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { continue };
            if process.runs() {
                let _ = rustix::process::pidfd_send_signal(&handle, signal);
            }
        }
        let start = Instant::now();
        while wanted.iter().any(Process::runs) && start.elapsed() < wait {
            thread::sleep(Duration::from_millis(5));
        }
        wanted.retain(Process::runs);
        let known: Vec<_> = wanted.iter().map(|process| process.pid).collect();
        wanted.extend(processes(names).into_iter().filter(|process| !known.contains(&process.pid)));
        if wanted.is_empty() {
            return Ok(());
        }
    }
    let left: Vec<_> = wanted.iter().map(|process| format!("{} ({})", process.pid, process.command)).collect();
    Err(Error::Io {
        what: format!("processes of the rack do not end: {}; end them, then call down again", left.join(", ")),
        source: io::ErrorKind::TimedOut.into(),
    })
}
