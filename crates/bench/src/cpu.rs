//! Pinning threads to cores and reading how much time they used there.

use std::{
    fs,
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// Number of cores that this process may use.
pub fn count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn set_of(cpu: usize) -> Result<CpuSet> {
    let mut set = CpuSet::new();
    set.set(cpu).with_context(|| format!("core {cpu} does not exist"))?;
    Ok(set)
}

/// Pins a thread; 0 is the calling one.
///
/// # Errors
/// When the core or the thread does not exist.
pub fn pin(thread: i32, cpu: usize) -> Result<()> {
    sched_setaffinity(Pid::from_raw(thread), &set_of(cpu)?)
        .with_context(|| format!("cannot pin thread {thread} to core {cpu}"))
}

/// Pins what a command starts, with all its threads.
///
/// # Errors
/// When the core does not exist.
pub fn pin_command(command: &mut std::process::Command, cpu: usize) -> Result<()> {
    use std::os::unix::process::CommandExt;
    let set = set_of(cpu)?;
    // SAFETY: sched_setaffinity is async-signal-safe; the set is moved in.
    unsafe {
        command.pre_exec(move || Ok(sched_setaffinity(Pid::from_raw(0), &set)?));
    }
    Ok(())
}

/// Has a thread run as soon as it can, before every ordinary thread.
///
/// # Errors
/// Without the right to, or when the thread does not exist.
pub fn prefer(thread: i32) -> Result<()> {
    let parameters = libc::sched_param { sched_priority: 10 };
    // SAFETY: reads one sched_param that lives here.
    let result = unsafe { libc::sched_setscheduler(thread, libc::SCHED_FIFO, &raw const parameters) };
    nix::errno::Errno::result(result).with_context(|| format!("cannot set the scheduling of thread {thread}"))?;
    Ok(())
}

/// Threads of a process.
pub fn threads_of(process: u32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Time that a thread has run, from the scheduler's own count; `None` when it is gone.
pub fn time_of(thread: i32) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).ok()?;
    Some(Duration::from_nanos(text.split_whitespace().next()?.parse().ok()?))
}

fn kernel_threads(matches: impl Fn(&str) -> bool) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| matches(name.trim_end())))
        .collect()
}

/// The kernel thread that receives for a device with threaded NAPI. The device's name must be unique on this machine.
///
/// # Errors
/// When there is none within a second: threaded NAPI is off, or the device has no NAPI.
pub fn napi_thread(device: &str) -> Result<i32> {
    let prefix = format!("napi/{device}-");
    let until = Instant::now() + Duration::from_secs(1);
    loop {
        let found = kernel_threads(|name| name.starts_with(&prefix));
        match found[..] {
            [thread] => return Ok(thread),
            _ if Instant::now() > until => bail!(
                "{device} has {} receive threads instead of one: is its threaded NAPI on, and an XDP program or GRO?",
                found.len()
            ),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// The kernel thread that does a core's deferred softirq work.
pub fn ksoftirqd(cpu: usize) -> Option<i32> {
    kernel_threads(|name| name == format!("ksoftirqd/{cpu}")).first().copied()
}

/// Keeps idle cores from being halted: on a virtual machine, waking one costs more than the work that is measured. No thread
/// that spins at a low priority does it: the scheduler's groups let it keep a core from kernel threads for seconds.
pub struct KeepAwake {
    _held: fs::File,
}

impl KeepAwake {
    /// Starts it: asks the kernel for no latency at all, so that idle cores poll, until it is dropped.
    ///
    /// # Errors
    /// Without the right to.
    pub fn start() -> Result<Self> {
        const PATH: &str = "/dev/cpu_dma_latency";
        let open = || -> std::io::Result<fs::File> {
            let mut file = fs::OpenOptions::new().write(true).open(PATH)?;
            file.write_all(&0i32.to_ne_bytes())?;
            Ok(file)
        };
        Ok(Self { _held: open().with_context(|| format!("cannot keep cores awake by {PATH}"))? })
    }
}

/// Time used by a set of threads, where new threads of the watched processes count as they appear.
pub struct Meter {
    threads: Vec<i32>,
    processes: Vec<u32>,
}

impl Meter {
    /// Watches these threads, and all threads of these processes.
    pub fn new(threads: Vec<i32>, processes: Vec<u32>) -> Self {
        Self { threads, processes }
    }

    /// Time used so far. The scheduler accounts a running thread at each tick, so this is exact to a few milliseconds.
    pub fn read(&self) -> Duration {
        let of_processes = self.processes.iter().flat_map(|process| threads_of(*process));
        self.threads.iter().copied().chain(of_processes).filter_map(time_of).sum()
    }
}

/// Model of the processor, as reports name it.
pub fn model() -> String {
    let text = fs::read_to_string(Path::new("/proc/cpuinfo")).unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or_else(|| "unknown processor".into(), |rest| rest.trim_start_matches([' ', '\t', ':']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_is_charged_its_time() {
        let meter = Meter::new(Vec::new(), vec![std::process::id()]);
        let before = meter.read();
        let until = Instant::now() + Duration::from_millis(200);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        let used = meter.read() - before;
        assert!(used > Duration::from_millis(20), "{used:?}");
    }

    #[test]
    fn cores_that_do_not_exist_are_named() {
        assert!(pin(0, 100_000).unwrap_err().to_string().contains("100000"));
        assert!(napi_thread("no-such-device").unwrap_err().to_string().contains("no-such-device"));
        assert!(!model().is_empty());
    }
}
