//! Reading histories.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
};

use super::Operation;

/// Longest line that is read: far above what an operation with the largest key and value needs, even all escaped.
const LINE_MAX: u64 = 1 << 20;

/// What is wrong with a history, and where.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("cannot read the history {path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line is not an operation.
    #[error("{path}, line {line}: {what}")]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// What is wrong with it.
        what: String,
    },
}

/// Reads the history at `path`, calling `each` for every operation. Empty lines are skipped.
pub fn read_file(path: impl AsRef<Path>, each: impl FnMut(Operation)) -> Result<(), ReadError> {
    let path = path.as_ref();
    let file = File::open(path).map_err(|source| ReadError::Io { path: path.into(), source })?;
    read(BufReader::with_capacity(1 << 20, file), path, each)
}

/// Reads a history from `input`, calling `each` for every operation; `path` names it in errors.
pub fn read(mut input: impl BufRead, path: &Path, mut each: impl FnMut(Operation)) -> Result<(), ReadError> {
    let mut bytes = Vec::new();
    let mut line = 0;
    loop {
        bytes.clear();
        let mut limited = io::Read::take(&mut input, LINE_MAX);
        let len =
            limited.read_until(b'\n', &mut bytes).map_err(|source| ReadError::Io { path: path.into(), source })?;
        if len == 0 {
            return Ok(());
        }
        line += 1;
        let complete = bytes.last() == Some(&b'\n');
        let fail = |what: String| ReadError::Line { path: path.into(), line, what };
        if !complete && len as u64 == LINE_MAX {
            return Err(fail(format!("longer than {LINE_MAX} bytes; this is not a history")));
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let operation: Operation = serde_json::from_slice(&bytes).map_err(|error| {
            fail(if error.is_eof() && !complete {
                "the file ends in the middle of an operation: the recording was cut short; delete this line if the rest \
                 is to be checked, but note that operations are missing then"
                    .into()
            } else {
                // serde_json counts lines within what it was given, which is always our one line.
                let text = error.to_string();
                let text = text.split(" at line ").next().unwrap_or(&text);
                format!("not an operation: {text} (column {})", error.column())
            })
        })?;
        operation.validate().map_err(fail)?;
        each(operation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<usize, String> {
        let mut count = 0;
        read(text.as_bytes(), Path::new("h.jsonl"), |_| count += 1).map_err(|e| e.to_string())?;
        Ok(count)
    }

    const GOOD: &str = r#"{"client":1,"op":"delete","key":"k","call_ns":1,"return_ns":2,"outcome":"ok"}"#;

    #[test]
    fn errors_name_file_line_and_cause() {
        assert_eq!(read_text(&format!("{GOOD}\n\n{GOOD}")), Ok(2), "no newline needed at the end");
        for (second, part) in [
            ("{\"client\":1,", "cut short"),
            ("{\"client\":}\n", "not an operation: expected value (column 11)"),
            ("{}\n", "missing field `client`"),
            (&GOOD.replace("delete", "put"), "needs \"value\""),
            (&GOOD.replace("\"k\"", "\"%k\""), "two hexadecimal digits"),
            ("\u{0}\n", "not an operation"),
        ] {
            let error = read_text(&format!("{GOOD}\n{second}")).unwrap_err();
            assert!(error.starts_with("h.jsonl, line 2: ") && error.contains(part), "{error}");
        }
        let error = read_text(&"x".repeat(2 << 20)).unwrap_err();
        assert!(error.contains("longer than"), "{error}");
        let error = read_file("/nonexistent/h", |_| ()).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/h: No such file"), "{error}");
    }
}
