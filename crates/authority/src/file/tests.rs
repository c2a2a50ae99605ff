use std::net::Ipv4Addr;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use underpass_protocol::{agent::Wanted, control::MemberInfo};

use super::*;
use crate::{Admin, Config, FileConfig};

fn record(shard: u32, epoch: u32) -> Record {
    let addr = Ipv4Addr::new(10, 0, 0, 2);
    let record = Record::new(shard, vec![Wanted { id: 4, addr, port: 5550, replaces: None }]);
    if epoch == 0 {
        return record;
    }
    let member = MemberInfo { index: 0, id: 4, incarnation: u64::MAX - 6, addr, port: 5550, active: true };
    Record { epoch, tenure: 1, coordinator: Some((Ipv4Addr::new(10, 0, 0, 1), 5550)), members: vec![member], ..record }
}

fn next(authority: &mut FileAuthority) -> Notice {
    let mut fds = [PollFd::new(authority.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut fds, PollTimeout::from(10_000u16)).unwrap(), 1, "nothing was told");
    authority.try_next().unwrap()
}

fn store(authority: &mut FileAuthority, expected: u64, record: Record) -> StoreOutcome {
    let shard = record.shard;
    authority.request(Request::Store { shard, id: 77, expected, record });
    match next(authority) {
        Notice::Stored { shard: of, id: 77, outcome } if of == shard => outcome,
        other => panic!("{other:?}"),
    }
}

fn load(authority: &mut FileAuthority, shard: u32) -> Option<(u64, Record)> {
    authority.request(Request::Load { shard });
    match next(authority) {
        Notice::Record { shard: of, revision, record } if of == shard => record.map(|record| (revision, record)),
        other => panic!("{other:?}"),
    }
}

fn refusal(directory: &Path) -> String {
    format!("{:#}", FileAuthority::open(directory).unwrap_err())
}

#[test]
fn what_is_stored_is_read_back_by_the_next_agent() {
    let directory = tempfile::tempdir().unwrap();
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    assert_eq!(load(&mut authority, 0), None);
    assert_eq!(store(&mut authority, 0, record(3, 0)), StoreOutcome::Stored(1));
    assert_eq!(store(&mut authority, 1, record(3, 1)), StoreOutcome::Stored(2));
    assert_eq!(store(&mut authority, 0, record(0, 9)), StoreOutcome::Stored(3));
    drop(authority);
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    assert_eq!(load(&mut authority, 3), Some((2, record(3, 1))));
    assert_eq!(load(&mut authority, 0), Some((3, record(0, 9))));
    assert_eq!(load(&mut authority, 1), None);
    assert!(authority.try_next().is_none());
    assert!(authority.troubles().is_empty());
}

#[test]
fn a_revision_is_replaced_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    assert_eq!(store(&mut authority, 0, record(0, 1)), StoreOutcome::Stored(1));
    for expected in [0, 2] {
        assert_eq!(store(&mut authority, expected, record(0, 2)), StoreOutcome::Conflict);
        let follows = Notice::Record { shard: 0, revision: 1, record: Some(record(0, 1)) };
        assert_eq!(next(&mut authority), follows);
    }
    assert_eq!(store(&mut authority, 1, record(0, 2)), StoreOutcome::Stored(2));
    assert_eq!(store(&mut authority, 1, record(0, 3)), StoreOutcome::Conflict);
}

#[test]
fn the_role_is_held_until_it_is_resigned() {
    let directory = tempfile::tempdir().unwrap();
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    authority.request(Request::Campaign { shard: 2 });
    authority.request(Request::Campaign { shard: 2 });
    assert_eq!(next(&mut authority), Notice::Role { shard: 2, held: true });
    let started = Instant::now();
    authority.request(Request::Resign { shard: 2, leave_to: Duration::from_millis(200) });
    authority.request(Request::Campaign { shard: 2 });
    assert_eq!(next(&mut authority), Notice::Role { shard: 2, held: false });
    assert_eq!(next(&mut authority), Notice::Role { shard: 2, held: true });
    assert!(started.elapsed() >= Duration::from_millis(200));
    authority.request(Request::Resign { shard: 2, leave_to: Duration::MAX });
    assert_eq!(next(&mut authority), Notice::Role { shard: 2, held: false });
    assert_eq!(load(&mut authority, 2), None, "the thread goes on");
}

#[test]
fn a_torn_write_leaves_the_record_before() {
    let directory = tempfile::tempdir().unwrap();
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    store(&mut authority, 0, record(0, 1));
    drop(authority);
    // A crash in the middle of writing the next record.
    let whole = fs::read(directory.path().join("authority.json")).unwrap();
    fs::write(directory.path().join("authority.json.new"), &whole[..whole.len() / 2]).unwrap();
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    assert_eq!(load(&mut authority, 0), Some((1, record(0, 1))));
    assert_eq!(store(&mut authority, 1, record(0, 2)), StoreOutcome::Stored(2));
    drop(authority);
    assert_eq!(load(&mut FileAuthority::open(directory.path()).unwrap(), 0), Some((2, record(0, 2))));
}

#[test]
fn a_disk_that_fails_changes_nothing_until_it_works() {
    let directory = tempfile::tempdir().unwrap();
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    store(&mut authority, 0, record(0, 1));
    // Also root cannot write a file where a directory is.
    let obstacle = directory.path().join("authority.json.new");
    fs::create_dir(&obstacle).unwrap();
    authority.request(Request::Store { shard: 0, id: 5, expected: 1, record: record(0, 2) });
    let Notice::Trouble { what } = next(&mut authority) else { panic!() };
    assert!(what.contains("make room"), "{what}");
    let Notice::Stored { id: 5, outcome: StoreOutcome::Unknown(why), .. } = next(&mut authority) else { panic!() };
    assert_eq!(why, what);
    assert_eq!(authority.troubles().len(), 1);
    let StoreOutcome::Unknown(why) = store(&mut authority, 1, record(0, 2)) else { panic!() };
    assert!(why.contains("not stored"), "{why}");
    fs::remove_dir(&obstacle).unwrap();
    assert!(matches!(next(&mut authority), Notice::Recovered { .. }));
    assert_eq!(next(&mut authority), Notice::Record { shard: 0, revision: 1, record: Some(record(0, 1)) });
    assert!(authority.troubles().is_empty());
    assert_eq!(store(&mut authority, 1, record(0, 2)), StoreOutcome::Stored(2));
}

#[test]
fn a_record_that_nobody_could_use_is_not_stored() {
    let directory = tempfile::tempdir().unwrap();
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    let bad = Record { lease_ms: 0, ..record(0, 1) };
    let StoreOutcome::Unknown(why) = store(&mut authority, 0, bad) else { panic!() };
    assert!(why.contains("a lease of 0 ms"), "{why}");
    assert_eq!(next(&mut authority), Notice::Record { shard: 0, revision: 0, record: None });
    authority.request(Request::Store { shard: 1, id: 0, expected: 0, record: record(0, 1) });
    let Notice::Stored { outcome: StoreOutcome::Unknown(why), .. } = next(&mut authority) else { panic!() };
    assert!(why.contains("the record of shard 0"), "{why}");
}

#[test]
fn damaged_older_and_newer_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("authority.json");
    let mut authority = FileAuthority::open(directory.path()).unwrap();
    store(&mut authority, 0, record(0, 3));
    store(&mut authority, 0, record(1, 4));
    drop(authority);
    let good = fs::read_to_string(&path).unwrap();
    for cut in 0..good.len() - 1 {
        fs::write(&path, &good[..cut]).unwrap();
        let error = refusal(directory.path());
        assert!(error.contains("restore it from a copy"), "{error}");
    }
    for (from, to, says) in [
        ("\"version\": 2", "\"version\": 3", "start the newer build"),
        ("\"version\": 2", "\"version\": 1", "copy out what you need"),
        ("\"version\":2", "\"version\":3", "start the newer build"),
        ("\"version\":2", "\"version\":1", "start the older build"),
        ("\"epoch\":3", "\"epoch\":0", "contradict"),
        ("\"epoch\":3", "\"epoch\":8388608", "used up"),
        ("\"lease_ms\":1000", "\"lease_ms\":1", "a lease of 1 ms"),
        ("\"settled\"", "\"settle\"", "unknown field"),
        ("\"shard\":1", "\"shard\":0", "not where it belongs"),
        ("\"revision\": 2,", "\"revision\": 1,", "revision"),
    ] {
        assert!(good.contains(from), "{good}");
        fs::write(&path, good.replacen(from, to, 1)).unwrap();
        let error = refusal(directory.path());
        assert!(error.contains(says), "{error}");
    }
    fs::write(&path, good).unwrap();
    FileAuthority::open(directory.path()).unwrap();
}

#[test]
fn a_second_agent_is_told_who_the_first_is() {
    let directory = tempfile::tempdir().unwrap();
    let first = FileAuthority::open(directory.path()).unwrap();
    let error = refusal(directory.path());
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    drop(first);
    FileAuthority::open(directory.path()).unwrap();
}

#[test]
fn commands_work_without_an_agent_and_read_beside_one() {
    let directory = tempfile::tempdir().unwrap();
    let mut admin = Admin::open(&Config::File(FileConfig { directory: directory.path().join("new") })).unwrap();
    assert_eq!(admin.shards().unwrap(), []);
    assert_eq!(admin.create(record(4, 0)).unwrap(), 1);
    let error = admin.create(record(4, 0)).unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
    assert!(admin.create(record(5, 1)).is_err(), "not a new one");
    assert_eq!(admin.load(4).unwrap(), Some((1, record(4, 0))));
    assert_eq!(admin.load(5).unwrap(), None);
    let _agent = FileAuthority::open(&directory.path().join("new")).unwrap();
    assert_eq!(admin.shards().unwrap().iter().map(|shard| shard.id).collect::<Vec<_>>(), [4]);
    let error = admin.create(record(5, 0)).unwrap_err().to_string();
    assert!(error.contains("another coordinator (process"), "{error}");
}
