//! What drills came to, for people.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use underpass_bench::report::{Table, median};

use crate::runner::Outcome;

fn milliseconds(pause: Duration) -> String {
    match pause.as_secs_f64() * 1000.0 {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.0} ms"),
    }
}

fn verdict(outcome: &Outcome) -> String {
    match (outcome.violation, outcome.lost, outcome.failure.as_str()) {
        (true, ..) => "NOT LINEARIZABLE".into(),
        (_, lost @ 1.., _) => format!("{lost} WRITES LOST"),
        (_, _, "") => "linearizable".into(),
        _ => "FAILED".into(),
    }
}

/// One drill, on a line.
pub fn line(outcome: &Outcome) -> String {
    let mut line = format!(
        "{:<6} {:<28} pause of reads {:>8}, of writes {:>8}; {:>6} operations, {:>3} unknown: {} ({:.1} s)",
        outcome.data_path,
        outcome.name,
        milliseconds(outcome.pauses.reads),
        milliseconds(outcome.pauses.writes),
        outcome.operations,
        outcome.unknown,
        verdict(outcome),
        outcome.took.as_secs_f64(),
    );
    if !outcome.failure.is_empty() {
        let _ = write!(line, "\n  {}", outcome.failure.replace('\n', "\n  "));
    }
    line
}

/// All drills, by name and data path, with a total.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut groups: BTreeMap<_, Vec<&Outcome>> = BTreeMap::new();
    for outcome in outcomes {
        groups.entry((outcome.data_path, outcome.name.as_str())).or_default().push(outcome);
    }
    let mut table = Table::new([
        "drill",
        "rounds",
        "reads pause (worst)",
        "writes pause (worst)",
        "operations",
        "unknown",
        "verdict",
    ]);
    for ((data_path, name), group) in &groups {
        let pause = |of: fn(&Outcome) -> Duration| {
            let typical = Duration::from_secs_f64(median(group.iter().map(|outcome| of(outcome).as_secs_f64())));
            let worst = group.iter().map(|outcome| of(outcome)).max().unwrap_or_default();
            format!("{} ({})", milliseconds(typical), milliseconds(worst))
        };
        let bad: Vec<String> =
            group.iter().filter(|outcome| !outcome.is_good()).map(|outcome| verdict(outcome)).collect();
        table.row([
            format!("{data_path} {name}"),
            group.len().to_string(),
            pause(|outcome| outcome.pauses.reads),
            pause(|outcome| outcome.pauses.writes),
            group.iter().map(|outcome| outcome.operations).sum::<usize>().to_string(),
            group.iter().map(|outcome| outcome.unknown).sum::<usize>().to_string(),
            if bad.is_empty() { "linearizable".into() } else { bad.join(", ") },
        ]);
    }
    format!("{table}\n{}\n", total(outcomes))
}

fn total(outcomes: &[Outcome]) -> String {
    let sum = |of: fn(&Outcome) -> usize| outcomes.iter().map(of).sum::<usize>();
    format!(
        "{} drills, {} operations checked, {} of unknown outcome: {} lost acknowledged writes, {} violations, {} failed \
         otherwise",
        outcomes.len(),
        sum(|outcome| outcome.operations),
        sum(|outcome| outcome.unknown),
        sum(|outcome| outcome.lost),
        sum(|outcome| usize::from(outcome.violation)),
        sum(|outcome| usize::from(!outcome.failure.is_empty())),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cluster::DataPath, judge::Pauses};

    #[test]
    fn what_is_wrong_is_in_the_line_the_table_and_the_total() {
        let good = Outcome {
            name: "replica-killed".into(),
            data_path: DataPath::Xdp,
            pauses: Pauses { reads: Duration::from_micros(4300), writes: Duration::from_millis(700) },
            operations: 1000,
            unknown: 2,
            lost: 0,
            violation: false,
            failure: String::new(),
            took: Duration::from_secs(3),
        };
        let bad = Outcome { violation: true, name: "other".into(), ..good_copy(&good) };
        let failed = Outcome { failure: "nobody serves".into(), ..good_copy(&good) };
        assert!(
            line(&good).contains("4.3 ms") && line(&good).contains("700 ms") && line(&good).contains("linearizable")
        );
        assert!(line(&failed).contains("FAILED") && line(&failed).contains("nobody serves"));
        let text = table(&[good, bad, failed]);
        assert!(text.contains("NOT LINEARIZABLE") && text.contains("FAILED"), "{text}");
        assert!(text.contains("3 drills, 3000 operations checked, 6 of unknown outcome: 0 lost"), "{text}");
        assert!(text.contains("1 violations, 1 failed otherwise"), "{text}");
    }

    fn good_copy(outcome: &Outcome) -> Outcome {
        Outcome { name: outcome.name.clone(), failure: String::new(), ..*outcome }
    }
}
