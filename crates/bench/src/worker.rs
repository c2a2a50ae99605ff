//! Threads of a benchmark that work until they are told to stop.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{Builder, JoinHandle},
};

use anyhow::Result;

/// Tells a worker whether it is to stop.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Whether it is.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A thread that works until it is told to stop. Dropping it stops it.
#[derive(Debug)]
pub struct Worker {
    stop: Stop,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Worker {
    /// Starts it. `work` looks at its argument often.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub fn start(name: &str, work: impl FnOnce(&Stop) -> Result<()> + Send + 'static) -> Result<Self> {
        let stop = Stop::default();
        let told = stop.clone();
        let thread = Builder::new().name(name.into()).spawn(move || work(&told))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends it and waits until it has.
    ///
    /// # Errors
    /// Why it ended before, if it did.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    /// Whether it ended by itself: it failed.
    pub fn failed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn end(&mut self) -> Result<()> {
        self.stop.0.store(true, Ordering::Relaxed);
        match self.thread.take() {
            Some(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => Ok(()),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Whoever drops it without `stop` is failing already and says why.
        let _ = self.end();
    }
}
