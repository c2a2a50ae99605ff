//! What comes out of a benchmark: medians, ratios, tables for people, JSON for programs.

use std::{fmt, fs, path::Path};

use anyhow::{Context, Result};
use serde::Serialize;

/// The middle value; of an even number, the mean of the two in the middle.
///
/// # Panics
/// If there is none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    assert!(!values.is_empty(), "the median of nothing");
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

/// Smallest, middle and largest value over the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// Middle.
    pub median: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// Of at least one value.
    ///
    /// # Panics
    /// If there is none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.into_iter().collect();
        Self {
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            median: median(values.iter().copied()),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

/// A number of things with its magnitude, as `2.35 M`.
pub fn count(value: f64) -> String {
    let (divided, unit) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, " G"),
        v if v >= 1e6 => (value / 1e6, " M"),
        v if v >= 1e3 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let digits = match divided.abs() {
        v if v >= 100.0 || unit.is_empty() => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{divided:.digits$}{unit}")
}

/// A time, as `12.3 µs`, from nanoseconds.
pub fn time(nanoseconds: f64) -> String {
    match nanoseconds {
        ns if ns >= 1e9 => format!("{:.2} s", ns / 1e9),
        ns if ns >= 1e6 => format!("{:.2} ms", ns / 1e6),
        ns if ns >= 1e3 => format!("{:.1} µs", ns / 1e3),
        ns => format!("{ns:.0} ns"),
    }
}

/// A size, as `12.3 MiB`, from bytes.
pub fn size(bytes: f64) -> String {
    match bytes {
        b if b >= 1048576.0 => format!("{:.1} MiB", b / 1048576.0),
        b if b >= 1024.0 => format!("{:.1} KiB", b / 1024.0),
        b => format!("{b:.0} B"),
    }
}

/// A table in plain text: first column to the left, the others to the right.
#[derive(Clone, Debug, Default)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With these headings.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If it has another number of cells than the headings.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        assert_eq!(cells.len(), self.head.len(), "a row has as many cells as the table has columns");
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            self.rows.iter().chain([&self.head]).map(|row| row[column].chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let line = |f: &mut fmt::Formatter<'_>, row: &[String]| {
            let mut text = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                match column {
                    0 => text += &format!("{cell:<width$}"),
                    _ => text += &format!("  {cell:>width$}"),
                }
            }
            writeln!(f, "{}", text.trim_end())
        };
        line(f, &self.head)?;
        line(f, &widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>())?;
        self.rows.iter().try_for_each(|row| line(f, row))
    }
}

/// One side against another of the same run.
#[derive(Clone, Debug, Serialize)]
pub struct Ratio {
    /// What is compared.
    pub what: String,
    /// First side divided by the second.
    pub value: f64,
    /// What it should be, in words; empty: nothing in particular.
    pub goal: String,
}

impl Ratio {
    /// Of two medians. `goal` is printed beside it.
    pub fn new(what: impl Into<String>, first: f64, second: f64, goal: &str) -> Self {
        Self { what: what.into(), value: first / second, goal: goal.into() }
    }
}

/// Ratios as a table.
pub fn ratios_table(ratios: &[Ratio]) -> Table {
    let mut table = Table::new(["ratio", "value", "goal"]);
    for ratio in ratios {
        table.row([ratio.what.clone(), format!("{:.2}", ratio.value), ratio.goal.clone()]);
    }
    table
}

/// What a result was measured on.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Release of the running kernel.
    pub kernel: String,
    /// Model of the processor.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Version of this program.
    pub version: String,
    /// The command line.
    pub command: String,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
        Self {
            kernel,
            processor: crate::cpu::model(),
            cores: crate::cpu::count(),
            version: env!("CARGO_PKG_VERSION").into(),
            command: std::env::args().collect::<Vec<_>>().join(" "),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cores of {}, Linux {}", self.cores, self.processor, self.kernel)
    }
}

/// Writes a report as JSON.
///
/// # Errors
/// When the file cannot be written: names it.
pub fn write_json(path: &Path, report: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report).context("cannot make JSON of the report")?;
    text.push('\n');
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Refuses a file that could not be written at the end, before minutes of measuring.
///
/// # Errors
/// When its directory does not exist.
pub fn check_output(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    anyhow::ensure!(
        directory.is_dir(),
        "cannot write {}: there is no directory {}",
        path.display(),
        directory.display()
    );
    anyhow::ensure!(!path.is_dir(), "cannot write {}: it is a directory", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(Spread::of([5.0]), Spread { min: 5.0, median: 5.0, max: 5.0 });
        assert_eq!(Spread::of([9.0, 1.0, 2.0]), Spread { min: 1.0, median: 2.0, max: 9.0 });
    }

    #[test]
    fn numbers_are_short_and_have_units() {
        for (value, text) in
            [(0.0, "0"), (999.0, "999"), (2_353_758.0, "2.35 M"), (240_000.0, "240 k"), (5e9, "5.00 G")]
        {
            assert_eq!(count(value), text);
        }
        for (value, text) in [(15.0, "15 ns"), (12_340.0, "12.3 µs"), (1.5e6, "1.50 ms"), (2e9, "2.00 s")] {
            assert_eq!(time(value), text);
        }
        for (value, text) in [(15.0, "15 B"), (2048.0, "2.0 KiB"), (64.0 * 1048576.0, "64.0 MiB")] {
            assert_eq!(size(value), text);
        }
    }

    #[test]
    fn tables_line_up() {
        let mut table = Table::new(["who", "rate"]);
        table.row(["xdp", "2.35 M"]);
        table.row(["bare XDP_TX", "5 µs"]);
        assert_eq!(
            table.to_string(),
            "who            rate\n-----------  ------\nxdp          2.35 M\nbare XDP_TX    5 µs\n"
        );
        let ratios = [Ratio::new("xdp / socket", 10.0, 4.0, "10 or more")];
        assert!(ratios_table(&ratios).to_string().contains("xdp / socket   2.50  10 or more"));
    }

    #[test]
    fn reports_are_json_and_bad_paths_are_refused_early() {
        let dir = std::env::temp_dir().join(format!("underpass-report-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("r.json");
        write_json(&path, &Machine::here()).unwrap();
        let read: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(read["version"], env!("CARGO_PKG_VERSION"));
        assert!(check_output(Some(&path)).is_ok());
        assert!(check_output(Some(&dir.join("no/r.json"))).unwrap_err().to_string().contains("no directory"));
        assert!(check_output(Some(&dir)).unwrap_err().to_string().contains("is a directory"));
        fs::remove_dir_all(&dir).unwrap();
    }
}
