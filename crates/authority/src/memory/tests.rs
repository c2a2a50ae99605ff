use std::net::Ipv4Addr;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::*;

const A: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port: 1 };
const B: Endpoint = Endpoint { addr: Ipv4Addr::new(10, 0, 0, 1), port: 2 };

fn next(authority: &mut MemoryAuthority) -> Notice {
    let mut fds = [PollFd::new(authority.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut fds, PollTimeout::from(10_000u16)).unwrap(), 1, "nothing was told");
    authority.try_next().unwrap()
}

fn stored(authority: &mut MemoryAuthority, expected: u64, record: Record) -> StoreOutcome {
    authority.request(Request::Store { shard: 0, id: 1, expected, record });
    let Notice::Stored { shard: 0, id: 1, outcome } = next(authority) else { panic!() };
    outcome
}

fn told(authority: &mut MemoryAuthority) -> u64 {
    let Notice::Record { revision, .. } = next(authority) else { panic!() };
    revision
}

#[test]
fn several_share_records_and_see_each_others() {
    let memory = Memory::new();
    let (mut a, mut b) = (memory.authority(A), memory.authority(B));
    b.request(Request::Load { shard: 0 });
    assert_eq!(told(&mut b), 0);
    let first = Record::new(0, Vec::new());
    assert_eq!(stored(&mut a, 0, first.clone()), StoreOutcome::Stored(1));
    assert_eq!(told(&mut b), 1);
    assert_eq!(stored(&mut b, 0, first.clone()), StoreOutcome::Conflict);
    assert_eq!(told(&mut b), 1);
    assert_eq!(stored(&mut b, 1, Record { given_up: 5, ..first.clone() }), StoreOutcome::Stored(2));
    assert_eq!(told(&mut a), 2);
    // Of several that nobody took, the newest.
    memory.store(2, first.clone());
    memory.store(3, first);
    assert_eq!(told(&mut a), 4);
    assert!(a.try_next().is_none());
}

#[test]
fn the_role_goes_to_whom_the_record_names() {
    let memory = Memory::new();
    let (mut a, mut b) = (memory.authority(A), memory.authority(B));
    let mut c = memory.authority(Endpoint { port: 3, ..A });
    for authority in [&a, &b, &c] {
        authority.request(Request::Campaign { shard: 0 });
    }
    assert_eq!(next(&mut a), Notice::Role { shard: 0, held: true });
    let addr = Ipv4Addr::new(10, 0, 0, 9);
    let member =
        underpass_protocol::control::MemberInfo { index: 0, id: 0, incarnation: 1, addr, port: 1, active: true };
    let names = |to: Endpoint| Record {
        epoch: 1,
        tenure: 1,
        coordinator: Some((to.addr, to.port)),
        members: vec![member.clone()],
        ..Record::new(0, Vec::new())
    };
    memory.store(0, names(Endpoint { port: 3, ..A }));
    a.request(Request::Resign { shard: 0, leave_to: Duration::from_millis(100) });
    assert_eq!(next(&mut c), Notice::Record { shard: 0, revision: 1, record: Some(names(Endpoint { port: 3, ..A })) });
    assert_eq!(next(&mut c), Notice::Role { shard: 0, held: true });
    drop(c);
    assert_eq!(told(&mut b), 1);
    assert_eq!(next(&mut b), Notice::Role { shard: 0, held: true });
    drop(b);
    assert_eq!(told(&mut a), 1);
    assert_eq!(next(&mut a), Notice::Role { shard: 0, held: false });
    assert_eq!(next(&mut a), Notice::Role { shard: 0, held: true });
}

#[test]
fn it_is_slow_unreachable_and_wrong_on_demand() {
    let memory = Memory::new();
    let (mut a, mut b) = (memory.authority(A), memory.authority(B));
    let first = Record::new(0, Vec::new());
    a.request(Request::Campaign { shard: 0 });
    b.request(Request::Campaign { shard: 0 });
    assert_eq!(next(&mut a), Notice::Role { shard: 0, held: true });
    for (lost, revision) in [(Lost::Request, 0), (Lost::Answer, 1)] {
        memory.disconnect(A, lost);
        assert!(matches!(next(&mut a), Notice::Trouble { .. }));
        assert_eq!(next(&mut a), Notice::Role { shard: 0, held: false });
        assert_eq!(next(&mut b), Notice::Role { shard: 0, held: true });
        assert!(matches!(stored(&mut a, 0, first.clone()), StoreOutcome::Unknown(_)));
        assert!(a.try_next().is_none());
        memory.connect(A);
        assert!(matches!(next(&mut a), Notice::Recovered { .. }));
        assert_eq!(told(&mut a), revision);
        memory.disconnect(B, Lost::Request);
        assert_eq!(next(&mut a), Notice::Role { shard: 0, held: true });
        memory.connect(B);
        while b.try_next().is_some() {}
    }
    memory.slow(Duration::from_millis(100));
    let started = Instant::now();
    b.request(Request::Load { shard: 0 });
    assert_eq!(told(&mut b), 1);
    assert!(started.elapsed() >= Duration::from_millis(100));
    let lie = Notice::Record { shard: 0, revision: 9, record: None };
    memory.lie(B, &lie);
    assert_eq!(next(&mut b), lie);
}
