//! Processes that a benchmark starts and ends, and what it does when it is told to end itself.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction},
    unistd::Pid,
};

/// How long a process may take to end in order: long, for a machine that is busy with other things.
pub const STOP: Duration = Duration::from_secs(30);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_interrupt(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on SIGINT and SIGTERM no longer end the process at once: [`check_interrupt`] tells of them, so that
/// everything that was started can be ended first.
///
/// # Errors
/// Never on Linux.
pub fn catch_interrupts() -> Result<()> {
    let action = SigAction::new(SigHandler::Handler(note_interrupt), SaFlags::empty(), SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }.context("cannot catch signals")?;
    }
    Ok(())
}

/// Fails after an interrupt.
///
/// # Errors
/// After SIGINT or SIGTERM.
pub fn check_interrupt() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// Waits, but not beyond an interrupt.
///
/// # Errors
/// After SIGINT or SIGTERM.
pub fn sleep(length: Duration) -> Result<()> {
    let until = Instant::now() + length;
    loop {
        check_interrupt()?;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(Duration::from_millis(100)));
    }
}

/// A temporary directory, removed when dropped.
#[derive(Debug)]
pub struct Directory {
    /// Where it is.
    pub path: PathBuf,
}

impl Directory {
    /// Makes one.
    ///
    /// # Errors
    /// When that is not allowed.
    pub fn new() -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("underpass-bench-{}-{number}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot make the directory {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// The program `underpass`: this one, or the one that was built beside this test.
///
/// # Errors
/// When there is none.
pub fn program() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot tell where this program is")?;
    if own.file_stem().is_some_and(|name| name == "underpass") {
        return Ok(own);
    }
    own.ancestors()
        .skip(1)
        .take(3)
        .map(|directory| directory.join("underpass"))
        .find(|path| path.is_file())
        .with_context(|| format!("no program `underpass` beside {}: build it (cargo build)", own.display()))
}

/// A process that runs until it is told to end. Dropping it ends it.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts it; what it says goes to the file `log`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(name: impl Into<String>, mut command: Command, log: PathBuf) -> Result<Self> {
        let name = name.into();
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(std::process::Stdio::null()).stdout(file.try_clone()?).stderr(file);
        // Not in the terminal's foreground group: Ctrl-C is for us, who then end it in order.
        command.process_group(0);
        // SAFETY: prctl with these arguments is async-signal-safe.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name, child, log })
    }

    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it said, the last lines of it.
    pub fn said(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Fails if it has ended.
    ///
    /// # Errors
    /// Then: with what it said.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended with {status}; it said:\n{}", self.name, self.said());
        }
        Ok(())
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.check()?;
        kill(Pid::from_raw(self.child.id() as i32), signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Ends it at once, as a crash does.
    ///
    /// # Errors
    /// When it had ended before.
    pub fn crash(mut self) -> Result<()> {
        self.check()?;
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits until it has ended by itself, however.
    ///
    /// # Errors
    /// When it takes longer.
    pub fn wait(&mut self, length: Duration) -> Result<std::process::ExitStatus> {
        let until = Instant::now() + length;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            check_interrupt()?;
            ensure!(Instant::now() < until, "{} does not end within {length:?}; it said:\n{}", self.name, self.said());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until a file appears that it makes when it is ready.
    ///
    /// # Errors
    /// When it ends or takes longer.
    pub fn wait_for(&mut self, file: &Path, length: Duration) -> Result<()> {
        self.wait_until(length, |_| file.exists())
    }

    /// Waits until it says a line that begins so.
    ///
    /// # Errors
    /// When it ends or takes longer.
    pub fn wait_for_line(&mut self, begins: &str, length: Duration) -> Result<()> {
        self.wait_until(length, |daemon| {
            let text = fs::read_to_string(&daemon.log).unwrap_or_default();
            text.lines().any(|line| line.starts_with(begins))
        })
    }

    fn wait_until(&mut self, length: Duration, ready: impl Fn(&Self) -> bool) -> Result<()> {
        let until = Instant::now() + length;
        while !ready(self) {
            self.check()?;
            check_interrupt()?;
            ensure!(Instant::now() < until, "{} does not come up; it said:\n{}", self.name, self.said());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Ends it in order.
    ///
    /// # Errors
    /// When it had to be forced, or ended with an error.
    pub fn stop(&mut self, length: Duration) -> Result<()> {
        let ended = |status: std::process::ExitStatus, daemon: &Self| {
            ensure!(status.success(), "{} ended with {status}; it said:\n{}", daemon.name, daemon.said());
            Ok(())
        };
        if let Some(status) = self.child.try_wait()? {
            return ended(status, self);
        }
        let pid = Pid::from_raw(self.child.id() as i32);
        kill(pid, Signal::SIGTERM)?;
        // One that is stopped cannot end.
        kill(pid, Signal::SIGCONT)?;
        let until = Instant::now() + length;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait()? {
                return ended(status, self);
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.child.kill()?;
        self.child.wait()?;
        bail!("{} did not end within {length:?} and was killed; it said:\n{}", self.name, self.said())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After `stop` it is gone already; else something failed, and that is what gets told.
        let _ = self.stop(Duration::from_secs(3));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon(script: &str, directory: &Directory) -> Daemon {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Daemon::start("a script", command, directory.path.join("log")).unwrap()
    }

    #[test]
    fn processes_end_in_order_or_by_force_and_say_why_they_failed() {
        let directory = Directory::new().unwrap();
        let path = directory.path.clone();
        let ready = path.join("ready");
        let script = format!("trap 'exit 0' TERM; touch {}; while :; do sleep 0.01; done", ready.display());
        let mut good = daemon(&script, &directory);
        good.wait_for(&ready, Duration::from_secs(5)).unwrap();
        good.check().unwrap();
        good.stop(Duration::from_secs(5)).unwrap();

        let mut talking = daemon("echo first; echo second line; exec sleep 60", &directory);
        talking.wait_for_line("second", Duration::from_secs(5)).unwrap();
        let error = talking.wait_for_line("third", Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("second line"), "{error}");
        talking.crash().unwrap();

        let mut failing = daemon("echo the reason; exit 3", &directory);
        let error = failing.wait_for(&path.join("never"), Duration::from_secs(5)).unwrap_err().to_string();
        assert!(error.contains("the reason") && error.contains("3"), "{error}");

        let stubborn_ready = path.join("stubborn");
        let script = format!("trap '' TERM; touch {}; while :; do sleep 0.01; done", stubborn_ready.display());
        let mut stubborn = daemon(&script, &directory);
        stubborn.wait_for(&stubborn_ready, Duration::from_secs(5)).unwrap();
        assert!(stubborn.stop(Duration::from_millis(50)).unwrap_err().to_string().contains("was killed"));
        drop((good, failing, stubborn));
        drop(directory);
        assert!(!path.exists());
    }
}
