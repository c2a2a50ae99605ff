//! Histories that tell a story, each with the verdict and the words that a person should get.

use underpass_check::{
    history::Operation,
    linearizability::{Checker, Options, Verdict},
};

/// A line: client, operation with arguments, call and return in ns (`-`: never), outcome and what it told.
///
/// `1 put a 0-10 ok cas=1`, `2 get 5-20 a cas=1`, `3 cas b expected=1 0- unknown`
fn operation(line: &str) -> Operation {
    let mut words = line.split_whitespace();
    let client = words.next().unwrap();
    let op = words.next().unwrap();
    let mut json = format!(r#""client":{client},"op":"{op}","key":"k""#);
    let mut field = |name: &str, value: &str| json.push_str(&format!(",\"{name}\":{value}"));
    let mut timed = false;
    for word in words {
        if let Some((name, value)) = word.split_once('=') {
            field(name, value);
        } else if let Some((call, ret)) = word.split_once('-').filter(|(call, _)| call.parse::<u64>().is_ok()) {
            timed = true;
            field("call_ns", call);
            if !ret.is_empty() {
                field("return_ns", ret);
            }
        } else if timed && op == "get" && !["unknown", "failed", "not_found"].contains(&word) {
            field("value", &format!("\"{word}\""));
            field("outcome", "\"ok\"");
        } else {
            field(if timed { "outcome" } else { "value" }, &format!("\"{word}\""));
        }
    }
    let operation: Operation = serde_json::from_str(&format!("{{{json}}}")).unwrap_or_else(|e| panic!("{line}: {e}"));
    operation.validate().unwrap_or_else(|e| panic!("{line}: {e}"));
    operation
}

fn report(story: &str) -> (Verdict, String) {
    let mut checker = Checker::new();
    for line in story.lines().map(str::trim).filter(|line| !line.is_empty()) {
        checker.add(&operation(line));
    }
    let report = checker.check(&Options::default());
    (report.verdict(), report.to_string())
}

#[track_caller]
fn good(story: &str) {
    let (verdict, text) = report(story);
    assert_eq!(verdict, Verdict::Linearizable, "{text}");
}

#[track_caller]
fn bad(story: &str, title: &str) {
    let (verdict, text) = report(story);
    assert_eq!(verdict, Verdict::Violation, "{text}");
    assert!(text.contains(&format!("VIOLATION: key \"k\": {title}\n")), "{text}");
}

#[test]
fn stale_read() {
    let story = "1 put a 0-10 ok cas=1
        1 put b 20-30 ok cas=2
        2 get 40-50 a cas=1";
    bad(story, "stale read");
    bad(&story.replace("cas=1", "").replace("cas=2", ""), "stale read");
    good(&story.replace("40-50", "25-50"));
}

#[test]
fn reads_go_back() {
    let story = "1 put a 0-10 ok cas=1
        1 put b 20-100 ok cas=2
        2 get 30-40 b cas=2
        3 get 50-60 a cas=1";
    bad(story, "reads went back");
    good(&story.replace("50-60", "35-60"));
}

#[test]
fn lost_update() {
    bad(
        "1 put 5 0-10 ok cas=1
        2 incr delta=1 20-40 ok number=6 cas=2
        3 incr delta=1 20-50 ok number=6 cas=3
        1 get 60-70 6 cas=3",
        "these operations fit in no order",
    );
    bad(
        "1 put a 0-10 ok cas=1
        2 put b 20-30 ok cas=2
        3 cas c expected=1 15-50 ok cas=3",
        "lost update",
    );
    // A first-come write may come before the version that was expected is replaced, if the numbers say so.
    good(
        "1 put a 0-10 ok cas=1
        2 put b 20-30 ok cas=3
        3 cas c expected=1 15-50 ok cas=2",
    );
}

#[test]
fn both_cas_succeed() {
    let story = "1 put a 0-10 ok cas=1
        2 cas b expected=1 20-40 ok cas=2
        3 cas c expected=1 20-40 ok cas=3";
    bad(story, "lost update");
    good(&story.replace("ok cas=3", "exists"));
    good(&story.replace("ok cas=3", "failed"));
}

#[test]
fn read_of_what_was_never_written() {
    bad("1 put a 0-10 ok cas=1\n 2 get 20-30 z cas=1", "a value was read that nobody wrote");
    bad("1 put a 0-10 failed\n 2 get 20-30 a cas=1", "a write that had failed was read");
    bad("2 get 0-10 a cas=1\n 1 put a 20-30 ok cas=1", "a value was read before it was written");
}

#[test]
fn an_unknown_write_takes_effect_late() {
    good(
        "1 put a 0-10 ok cas=1
        2 put b 5- unknown
        3 get 20-30 a cas=1
        3 put c 40-50 ok cas=2
        3 get 60-70 c cas=2
        3 get 1000-1010 b cas=3",
    );
}

#[test]
fn an_unknown_write_is_seen_and_then_not() {
    let story = "1 put a 0-10 ok cas=1
        2 put b 5- unknown
        3 get 20-30 b cas=2
        3 get 40-50 a cas=1";
    bad(story, "reads went back");
    bad(&story.replace("cas=1", "").replace("cas=2", ""), "these operations fit in no order");
    good(&story.replace("40-50", "25-50"));
}

#[test]
fn an_unknown_write_takes_effect_once() {
    let story = "1 put 1 0-10 ok
        2 incr delta=1 5- unknown
        3 get 20-30 2
        3 get 40-50 3";
    bad(story, "these operations fit in no order");
    good(&format!("{story}\n 4 incr delta=1 7- unknown"));
}

#[test]
fn an_acknowledged_write_disappears() {
    let story = "1 put a 0-10 ok cas=1
        2 get 20-30 not_found";
    bad(story, "a stored item was not found");
    good(&format!("{story}\n 3 delete 5- unknown"));
    good(&format!("{story}\n 3 delete 25-40 ok cas=2"));
    bad(&format!("{story}\n 3 delete 31-40 ok cas=2"), "a stored item was not found");
}

#[test]
fn numbers_that_contradict() {
    bad("1 put a 0-10 ok cas=4\n 2 put b 0-10 ok cas=4", "two writes were given one sequence number");
    bad("1 put a 0-10 ok cas=4\n 2 put b 20-30 ok cas=3", "writes out of order");
    bad("1 put a 0-10 ok cas=4\n 2 put b 0-20 ok cas=5\n 3 get 5-20 b cas=4", "two different values under one cas");
    bad("1 put a 0-10 ok cas=4\n 2 get 5-20 a cas=5", "these operations fit in no order");
    bad("2 get 0-10 a cas=4\n 1 put a 20-30 ok cas=4\n 3 put a 0- unknown", "a version was read before it was written");
}

#[test]
fn a_failed_condition_and_a_touch_keep_the_cas() {
    let story = "1 put a 0-10 ok cas=1
        1 add b 20-30 exists cas=2
        1 touch ttl_ms=0 40-50 ok cas=3
        2 get 60-70 a cas=1
        2 cas c expected=1 80-90 ok cas=4";
    good(story);
    bad(&story.replace("60-70 a cas=1", "60-70 a cas=3"), "these operations fit in no order");
}

#[test]
fn a_swap_of_a_version_that_never_was_tells_only_that_there_is_one() {
    // The INCR might have made what was read, for all its number tells: so the PUT is bound to no number, and its version
    // is one without a number where the swap finds it.
    let story = "1 put 1 0-10 ok cas=1
        1 incr delta=5 20- unknown
        1 delete 30- unknown
        2 put 2 40- unknown
        1 put 8 50- unknown
        2 cas 9 expected=0 60-70 exists cas=9
        2 get 80-90 8 cas=8";
    good(story);
    good(&story.replace("expected=0", "expected=7"));
    good(&story.replace("expected=0", "expected=9"));
    // It was read under the very number that was refused.
    bad(&story.replace("expected=0", "expected=8"), "these operations fit in no order");
    bad(&story.replace("exists cas=9", "ok cas=9"), "lost update");
    // The first that is refused counts as much as the last.
    let twice = story.replace("exists cas=9", "exists cas=9\n 3 cas 7 expected=8 72-75 exists cas=10");
    bad(&twice, "these operations fit in no order");
    bad(&twice.replace("expected=0", "expected=7"), "these operations fit in no order");
    bad(
        &twice.replace("expected=8", "expected=7").replace("expected=0", "expected=8"),
        "these operations fit in no order",
    );
    // The least that shows it.
    good("1 put a 0- unknown\n 2 cas b expected=0 10-20 exists");
    bad("1 put a 30- unknown\n 2 cas b expected=0 10-20 exists", "these operations fit in no order");
}

#[test]
fn a_write_that_nobody_tells_from_the_one_before_it() {
    // The second put has no number and may be the version that the read names.
    good(
        "1 put a 15-26 ok
        2 get 17-29 a cas=2
        2 put a 29-29 ok
        3 get 31-33 a cas=2",
    );
    good(
        "1 put b 12-17 ok
        3 put b 21-36 ok
        2 get 28-30 b cas=4
        3 cas a expected=4 39-49 ok",
    );
}

#[test]
fn a_touch_lets_several_reads_find_the_item() {
    good(
        "3 put a ttl_ms=2000 0-2400000000 ok cas=1 time_ms=5200
        3 touch ttl_ms=4000 1200000000-3000000000 ok cas=2 time_ms=5600
        1 get 2000000000-2700000000 a cas=1 time_ms=9000
        2 get 2000000000-3000000000 a cas=1 time_ms=7400",
    );
}

#[test]
fn lifetimes() {
    let story = "1 put a ttl_ms=1000 0-10 ok cas=1 time_ms=5000
        2 get 100-200 a cas=1 time_ms=5999
        2 get 300-400 not_found time_ms=6000";
    good(story);
    bad(&story.replace("6000", "5999"), "these operations fit in no order");
    bad(&story.replace("5999", "6001"), "these operations fit in no order");
    // Unstamped: not before most of the lifetime is over, and not again after that.
    let unstamped = "1 put a ttl_ms=1000 0-10 ok cas=1
        2 get 100-900000000 not_found";
    good(unstamped);
    bad(&unstamped.replace("900000000", "500000000"), "these operations fit in no order");
    bad(&format!("{unstamped}\n 2 get 900000001-900000002 a cas=1"), "these operations fit in no order");
    bad("1 put a ttl_ms=1000 0-10 ok cas=1\n 2 get 1400000000-1400000001 a cas=1", "these operations fit in no order");
}

#[test]
fn the_excerpt_leaves_out_what_does_not_matter() {
    let mut story = String::from("1 put 0 0-1 ok\n");
    for i in 0..300 {
        let t = 10 + i * 10;
        story += &format!("2 put v{i} {t}-{} ok\n3 get {t}-{} v{i}\n", t + 15, t + 25);
    }
    // Both must come last.
    story += "4 incr delta=1 5000-5010 not_a_number\n4 put 7 5020-5030 ok\n";
    story += "5 incr delta=1 5040-5090 ok number=8\n6 incr delta=1 5045-5080 ok number=8\n";
    let (verdict, text) = report(&story);
    assert_eq!(verdict, Verdict::Violation);
    assert_eq!(text.lines().filter(|line| line.contains("client")).count(), 2, "{text}");
    assert!(text.contains("before: the item was \"7\"") && text.matches("incr +1 -> ok, now 8").count() == 2, "{text}");
}

#[test]
fn too_many_orders_is_not_ok() {
    // 24 unanswered pieces of one value that nobody can have composed.
    let mut story = String::from("1 put x 0-1 ok\n");
    for i in 0..24 {
        story += &format!("2 append p{} 5- unknown\n", char::from(b'a' + i));
    }
    let whole: String = (0..24).rev().map(|i| format!("p{}", char::from(b'a' + i))).collect();
    story += &format!("3 get 100-200 x{whole}{whole}\n");
    let mut checker = Checker::new();
    for line in story.lines() {
        checker.add(&operation(line));
    }
    let report = checker.check(&Options { budget: 1000, ..Options::default() });
    assert_eq!(report.verdict(), Verdict::Undecided, "{report}");
    assert!(report.to_string().contains("UNDECIDED: key \"k\": after 25 of 26 operations"), "{report}");
}
