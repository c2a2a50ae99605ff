//! Writing histories.

use std::{
    cell::RefCell,
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
    sync::{Mutex, PoisonError},
};

use super::Operation;

/// Bytes gathered before they go to the file.
const BUFFER_LEN: usize = 1 << 20;

/// Writes a history, one line for each operation, in whatever order they are recorded. Threads share it: a line is made
/// outside the lock, so that recording costs well under a microsecond.
#[derive(Debug)]
pub struct HistoryWriter {
    file: Mutex<BufWriter<File>>,
}

thread_local! {
    static LINE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl HistoryWriter {
    /// Starts a new history, replacing a file of that name.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        let file = File::create(path)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot create the history {}: {e}", path.display())))?;
        Ok(Self { file: Mutex::new(BufWriter::with_capacity(BUFFER_LEN, file)) })
    }

    /// Adds one operation. Errors are those of the file.
    pub fn record(&self, operation: &Operation) -> io::Result<()> {
        LINE.with_borrow_mut(|line| {
            line.clear();
            serde_json::to_writer(&mut *line, operation)?;
            line.push(b'\n');
            self.file.lock().unwrap_or_else(PoisonError::into_inner).write_all(line)
        })
    }

    /// Hands everything recorded so far to the kernel. Dropping the writer does so too, but cannot report a full disk.
    pub fn flush(&self) -> io::Result<()> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).flush()
    }

    /// Flushes and closes.
    pub fn finish(self) -> io::Result<()> {
        self.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Outcome, Request, read_file},
        *,
    };

    #[test]
    fn threads_write_one_history() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h.jsonl");
        let writer = HistoryWriter::create(&path).unwrap();
        std::thread::scope(|scope| {
            for client in 0..4 {
                let writer = &writer;
                scope.spawn(move || {
                    for i in 0..1000 {
                        let mut op = Operation::call(client, Request::Put, "k", i);
                        op.value = Some(format!("{client}-{i}").into());
                        op.finish(Outcome::Ok, i + 1);
                        writer.record(&op).unwrap();
                    }
                });
            }
        });
        writer.finish().unwrap();
        let mut seen = vec![0u64; 4];
        read_file(&path, |op| {
            assert_eq!(op.value, Some(format!("{}-{}", op.client, op.call_ns).into()));
            assert_eq!(op.call_ns, seen[op.client as usize], "a thread's operations stay in order");
            seen[op.client as usize] += 1;
        })
        .unwrap();
        assert_eq!(seen, [1000; 4]);
    }

    #[test]
    fn a_path_that_cannot_be_is_named() {
        let error = HistoryWriter::create("/nonexistent/h.jsonl").unwrap_err();
        assert!(error.to_string().contains("/nonexistent/h.jsonl"), "{error}");
    }
}
