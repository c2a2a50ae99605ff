//! The library: blocking calls and the engine.

use std::{
    collections::HashSet,
    net::UdpSocket,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::support::{Fault, Shard};
use underpass_client::{
    Client, Conditional, Config, Doubt, Error, Failure, Invalid, Number, Reason, ShardConfig, Stored, Unmet,
    engine::{Engine, Outcome, Refused, Request},
};
use underpass_protocol::wire::{Kind, Op, Operand};

fn config(shard: &Shard) -> Config {
    Config { deadline_ms: 400, ..Config::single(0, shard.coordinator) }
}

fn connect(shard: &Shard) -> Client {
    Client::connect(config(shard)).unwrap()
}

#[test]
fn every_operation_does_what_it_says() {
    let shard = Shard::start(0);
    let client = connect(&shard);
    assert_eq!(client.get(b"k").unwrap(), None);
    let Stored { cas } = client.put(b"k", b"one").unwrap();
    let item = client.get(b"k").unwrap().unwrap();
    assert_eq!((&item.value[..], item.cas), (&b"one"[..], cas));

    assert_eq!(client.add(b"k", b"x").unwrap(), Conditional::Unmet(Unmet::Exists));
    assert_eq!(client.replace(b"none", b"x").unwrap(), Conditional::Unmet(Unmet::NotFound));
    assert_eq!(client.cas(b"k", b"x", cas + 1).unwrap(), Conditional::Unmet(Unmet::Exists));
    let Conditional::Done(Stored { cas: newer }) = client.cas(b"k", b"two", cas).unwrap() else { panic!("its cas") };
    assert!(newer > cas);
    assert!(client.append(b"k", b"!").unwrap().done().is_some());
    assert!(client.prepend(b"k", b"-").unwrap().done().is_some());
    assert_eq!(client.get(b"k").unwrap().unwrap().value, b"-two!");
    assert_eq!(client.incr(b"k", 1).unwrap(), Conditional::Unmet(Unmet::NotANumber));

    assert!(client.add(b"n", b"40").unwrap().done().is_some());
    let Conditional::Done(Number { number, .. }) = client.incr(b"n", -42).unwrap() else { panic!("it is a number") };
    assert_eq!(number, -2);
    assert_eq!(client.incr(b"n", i64::MIN).unwrap(), Conditional::Unmet(Unmet::Overflow));
    assert_eq!(client.touch(b"n", Some(Duration::from_secs(5))).unwrap(), Conditional::Done(()));
    assert_eq!(client.touch(b"none", None).unwrap(), Conditional::Unmet(Unmet::NotFound));
    assert_eq!(client.delete(b"n").unwrap(), Conditional::Done(()));
    assert_eq!(client.delete(b"n").unwrap(), Conditional::Unmet(Unmet::NotFound));
    client.put_ttl(b"t", b"v", Duration::from_micros(1)).unwrap();
}

#[test]
fn what_cannot_be_sent_is_told_without_sending() {
    let shard = Shard::start(0);
    let client = connect(&shard);
    assert!(matches!(client.get(b""), Err(Error::Invalid(Invalid::KeyLength { length: 0 }))));
    assert!(matches!(client.put(&[1; 251], b""), Err(Error::Invalid(Invalid::KeyLength { length: 251 }))));
    let told = client.put(b"key", &[0; 1390]).unwrap_err().to_string();
    assert_eq!(told, "the value has 1390 bytes; with this key and operation at most 1389 fit in a datagram");
    client.put(b"key", &[0; 1389]).unwrap();
    assert_eq!(client.get(b"key").unwrap().unwrap().value.len(), 1389);
    assert_eq!(shard.writes.load(Ordering::Relaxed), 1);
}

#[test]
fn losses_are_repaired_and_a_write_takes_effect_once() {
    let shard = Shard::start(0);
    let client = Client::connect(Config { deadline_ms: 5000, ..config(&shard) }).unwrap();
    client.put(b"n", b"0").unwrap();
    let mut count = 0;
    shard.set_faults(move |_| {
        count += 1;
        match count % 5 {
            0 => Some(Fault::LoseAnswer),
            2 => Some(Fault::Lose),
            3 => Some(Fault::Reject(Reason::KeyBusy)),
            _ => None,
        }
    });
    for expected in 1..=30 {
        assert_eq!(client.incr(b"n", 1).unwrap().done().map(|done| done.number), Some(expected));
        assert_eq!(client.get(b"n").unwrap().unwrap().value, expected.to_string().into_bytes());
    }
    assert_eq!(shard.writes.load(Ordering::Relaxed), 31);
}

#[test]
fn a_lost_answer_is_unknown_and_says_so() {
    let shard = Shard::start(0);
    let client = connect(&shard);
    shard.set_faults(|header| (header.op == Op::Write).then_some(Fault::LoseAnswer));
    let error = client.put(b"k", b"v").unwrap_err();
    assert!(error.may_have_taken_effect());
    assert!(matches!(error, Error::Unknown { doubt: Doubt::Deadline(None), .. }));
    assert!(error.to_string().starts_with("the write may or may not have taken effect: "), "{error}");
    assert_eq!(client.get(b"k").unwrap().unwrap().value, b"v");
    shard.clear_faults();
    client.put(b"k", b"w").unwrap();
}

#[test]
fn rejects_until_the_deadline_are_a_definite_failure() {
    let shard = Shard::start(0);
    let client = connect(&shard);
    shard.set_faults(|header| (header.op == Op::Write).then_some(Fault::Reject(Reason::StoreFull)));
    let before = Instant::now();
    let error = client.put(b"k", b"v").unwrap_err();
    assert!(matches!(error, Error::Failed { failure: Failure::Rejected(Reason::StoreFull), .. }), "{error:?}");
    assert!(error.to_string().contains("a replica is at its memory budget"), "{error}");
    let took = before.elapsed();
    assert!((Duration::from_millis(400)..Duration::from_millis(700)).contains(&took), "{took:?}");
    shard.clear_faults();
    assert_eq!(client.get(b"k").unwrap(), None);
    client.put(b"k", b"v").unwrap();
}

#[test]
fn a_read_without_an_answer_times_out() {
    let shard = Shard::start(0);
    let client = connect(&shard);
    shard.set_faults(|header| (header.op == Op::Read).then_some(Fault::Lose));
    let error = client.with_deadline(Duration::from_millis(60)).get(b"k").unwrap_err();
    assert!(matches!(error, Error::TimedOut { sent: true, last: None, .. }), "{error:?}");
    assert!(error.to_string().contains("It answered before"), "{error}");
}

#[test]
fn after_a_restart_one_write_is_unknown_at_most() {
    let shard = Shard::start(0);
    let client = connect(&shard);
    let mut first = true;
    shard.set_faults(move |header| {
        let restart = header.op == Op::Write && std::mem::take(&mut first);
        restart.then_some(Fault::Restart)
    });
    let error = client.put(b"k", b"v").unwrap_err();
    assert!(matches!(error, Error::Unknown { doubt: Doubt::SessionLost(Reason::Session), .. }), "{error:?}");
    for _ in 0..20 {
        client.put(b"k", b"v").unwrap();
        client.get(b"k").unwrap();
    }
}

#[test]
fn a_read_survives_a_restart() {
    let shard = Shard::start(0);
    let client = connect(&shard);
    client.put(b"k", b"v").unwrap();
    let mut first = true;
    shard.set_faults(move |_| std::mem::take(&mut first).then_some(Fault::Restart));
    for _ in 0..10 {
        assert_eq!(client.get(b"k").unwrap().unwrap().value, b"v");
    }
    for _ in 0..10 {
        client.put(b"k", b"v").unwrap();
    }
}

#[test]
fn nobody_there_is_told_with_what_to_check() {
    // A port that was free a moment ago.
    let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}").parse().unwrap();
    let error = Client::connect(Config { deadline_ms: 100, ..Config::single(3, address) }).unwrap_err();
    assert!(matches!(error, Error::NoSession { .. }), "{error:?}");
    let told = error.to_string();
    assert!(told.contains("Connection refused") && told.contains(&address.to_string()), "{told}");

    // Somebody who never answers.
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string().parse().unwrap();
    let told = Client::connect(Config { deadline_ms: 100, ..Config::single(3, address) }).unwrap_err().to_string();
    assert!(told.contains("Nothing was ever heard from") && told.contains("firewall"), "{told}");
}

#[test]
fn the_wrong_shard_is_told() {
    let shard = Shard::start(0);
    let before = Instant::now();
    let told = Client::connect(Config::single(1, shard.coordinator)).unwrap_err().to_string();
    assert!(told.contains("unknown shard (shard 1, coordinator "), "{told}");
    assert!(told.contains("Check the shard's number"), "{told}");
    assert!(before.elapsed() < Duration::from_millis(900), "there is nothing to wait for");
}

#[test]
fn an_address_that_is_not_ours_is_told() {
    let shard = Shard::start(0);
    let error = Client::connect(Config { bind: [192, 0, 2, 77].into(), ..config(&shard) }).unwrap_err();
    assert!(error.to_string().starts_with("cannot bind to 192.0.2.77:0: "), "{error}");
}

#[test]
fn many_threads_share_few_sessions() {
    let shard = Shard::start(0);
    let calls = Arc::new(Mutex::new(Vec::new()));
    let record = calls.clone();
    let config = Config { sessions: 2, deadline_ms: 10_000, ..config(&shard) };
    let client = Client::connect_recorded(
        config,
        Box::new(move |call| {
            assert!(call.call_ns <= call.return_ns && call.result.is_ok());
            record.lock().unwrap().push(call.request.key().to_vec());
        }),
    )
    .unwrap();
    client.put(b"n", b"0").unwrap();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let client = client.clone();
            thread::spawn(move || {
                (0..50).map(|_| client.incr(b"n", 1).unwrap().done().unwrap().number).collect::<Vec<_>>()
            })
        })
        .collect();
    let numbers: HashSet<i64> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    assert_eq!(numbers, (1..=400).collect());
    assert_eq!(calls.lock().unwrap().len(), 401);
}

#[test]
fn keys_are_spread_over_the_shards() {
    let shards = [Shard::start(0), Shard::start(1), Shard::start(5)];
    let mut config = config(&shards[0]);
    config.shards = [0, 1, 5]
        .iter()
        .zip(&shards)
        .map(|(&id, shard)| ShardConfig { id, coordinators: vec![shard.coordinator] })
        .collect();
    let client = Client::connect(config).unwrap();
    for i in 0..300u32 {
        client.put(&i.to_be_bytes(), &i.to_le_bytes()).unwrap();
    }
    for i in 0..300u32 {
        assert_eq!(client.get(&i.to_be_bytes()).unwrap().unwrap().value, i.to_le_bytes());
    }
    let counts: Vec<u64> = shards.iter().map(|shard| shard.writes.load(Ordering::Relaxed)).collect();
    assert_eq!(counts.iter().sum::<u64>(), 300);
    assert!(counts.iter().all(|&count| count > 60), "{counts:?}");
}

#[test]
fn a_shard_that_is_down_hinders_its_own_keys_alone() {
    let (up, silent) = (Shard::start(0), UdpSocket::bind("127.0.0.1:0").unwrap());
    let mut config = config(&up);
    let coordinator = silent.local_addr().unwrap().to_string().parse().unwrap();
    config.shards.push(ShardConfig { id: 1, coordinators: vec![coordinator] });
    config.deadline_ms = 100;
    let client = Client::new(config).unwrap();
    let mut hindered = 0;
    for i in 0..8u32 {
        let key = i.to_be_bytes();
        if underpass_client::placement::place(&key, &[0, 1]) == 0 {
            client.put(&key, b"v").unwrap();
            continue;
        }
        hindered += 1;
        let error = client.put(&key, b"v").unwrap_err();
        assert!(matches!(error, Error::Failed { failure: Failure::NeverSent(None), .. }), "{error:?}");
        assert!(error.to_string().contains("Nothing was ever heard from"), "{error}");
        let error = client.get(&key).unwrap_err();
        assert!(matches!(error, Error::TimedOut { sent: false, .. }), "{error:?}");
    }
    assert!((1..8).contains(&hindered));
}

#[test]
fn sessions_are_closed_when_the_client_goes() {
    let shard = Shard::start(0);
    let client = Client::connect(Config { sessions: 9, ..config(&shard) }).unwrap();
    client.put(b"k", b"v").unwrap();
    assert_eq!(shard.sessions.load(Ordering::Relaxed), 9);
    drop(client);
    let end = Instant::now() + Duration::from_secs(2);
    while shard.sessions.load(Ordering::Relaxed) > 0 && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(shard.sessions.load(Ordering::Relaxed), 0);
}

#[test]
fn an_engine_keeps_many_requests_in_flight_and_says_when_it_is_full() {
    let shard = Shard::start(0);
    let mut engine = Engine::new(&Config { sessions: 8, reads_per_session: 4, ..config(&shard) }).unwrap();
    engine.open(Duration::from_secs(2)).unwrap();
    assert_eq!(engine.sessions_open(), 8);
    let deadline = engine.now() + 5_000_000_000;
    let operand = Operand { ttl_ms: None, expected: 0, delta: 0, data: b"v" };
    fn put<'a>(key: &'a [u8], operand: Operand<'a>) -> Request<'a> {
        Request::Write { kind: Kind::Put, key, operand }
    }
    for tag in 0..8u64 {
        engine.submit(put(&tag.to_be_bytes(), operand), tag, deadline).unwrap();
    }
    assert_eq!(engine.submit(put(b"k", operand), 99, deadline), Err(Refused::Full));
    for tag in 100..132 {
        engine.submit(Request::Read { key: b"k" }, tag, deadline).unwrap();
    }
    assert_eq!(engine.submit(Request::Read { key: b"k" }, 99, deadline), Err(Refused::Full));
    assert!(matches!(engine.submit(Request::Read { key: b"" }, 99, deadline), Err(Refused::Invalid(_))));
    let mut done = Vec::new();
    while done.len() < 40 {
        engine.poll(Duration::from_secs(5), &mut done).unwrap();
    }
    let tags: HashSet<u64> = done.iter().map(|completion| completion.tag).collect();
    assert_eq!(tags, (0..8).chain(100..132).collect());
    for completion in &done {
        let ended = matches!(completion.outcome, Outcome::Read(None) | Outcome::Written { .. });
        assert!(ended, "{completion:?}");
        assert!(completion.submitted_ns <= completion.done_ns && completion.sends >= 1);
    }
    assert_eq!(engine.poll(Duration::ZERO, &mut done).unwrap(), 0);
}

#[test]
fn an_engine_is_woken() {
    let shard = Shard::start(0);
    let mut engine = Engine::new(&config(&shard)).unwrap();
    let waker = engine.waker();
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        waker.wake();
    });
    let before = Instant::now();
    assert_eq!(engine.poll(Duration::from_secs(30), &mut Vec::new()).unwrap(), 0);
    assert!(before.elapsed() < Duration::from_secs(10));
    thread.join().unwrap();
}

#[test]
fn an_engine_refused_by_the_network_reports_it_and_recovers() {
    let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}").parse().unwrap();
    let mut engine = Engine::new(&Config::single(0, address)).unwrap();
    let deadline = engine.now() + 100_000_000;
    engine.submit(Request::Read { key: b"k" }, 1, deadline).unwrap();
    let mut done = Vec::new();
    let started = Instant::now();
    let mut polls = 0;
    while done.is_empty() {
        engine.poll(Duration::from_millis(50), &mut done).unwrap();
        polls += 1;
    }
    assert!(polls < 20, "refusals must not make it spin: {polls} polls in {:?}", started.elapsed());
    assert_eq!(done[0].outcome, Outcome::TimedOut { last: None, sent: false });
    assert_eq!(engine.diagnosis(0).error, Some(std::io::ErrorKind::ConnectionRefused));
}

#[test]
fn an_engine_is_fed_from_open_loop() {
    // Enough to see that nothing is quadratic; a rate is measured by the benchmark.
    const REQUESTS: u64 = 20_000;
    let shard = Shard::start(0);
    let mut engine = Engine::new(&Config { sessions: 64, ..config(&shard) }).unwrap();
    engine.open(Duration::from_secs(2)).unwrap();
    let answered = AtomicU64::new(0);
    let (mut next, mut done) = (0, Vec::new());
    while answered.load(Ordering::Relaxed) < REQUESTS {
        while next < REQUESTS {
            let key = (next % 1000).to_be_bytes();
            let operand = Operand { ttl_ms: None, expected: 0, delta: 0, data: b"value" };
            let request = if next % 20 == 0 {
                Request::Write { kind: Kind::Put, key: &key, operand }
            } else {
                Request::Read { key: &key }
            };
            let outstanding = next - answered.load(Ordering::Relaxed);
            let deadline = engine.now() + 10_000_000_000;
            if outstanding >= 128 || engine.submit(request, next, deadline).is_err() {
                break;
            }
            next += 1;
        }
        engine.poll(Duration::from_millis(100), &mut done).unwrap();
        for completion in done.drain(..) {
            let ended = matches!(completion.outcome, Outcome::Read(_) | Outcome::Written { .. });
            assert!(ended, "{completion:?}");
            answered.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_client_follows_its_shard_to_and_fro() {
    let (a, b) = (Shard::start(0), Shard::start(0));
    let config = Config { deadline_ms: 1000, ..Config::of_shard(0, vec![a.coordinator, b.coordinator]) };
    let client = Client::connect(config).unwrap();
    client.put(b"k", b"a").unwrap();
    for (epoch, (from, to)) in [(&a, &b), (&b, &a), (&a, &b)].into_iter().enumerate() {
        from.hand_over(to, 2 + epoch as u32);
        let before = Instant::now();
        client.get(b"k").unwrap();
        assert!(before.elapsed() < Duration::from_millis(500), "{:?}", before.elapsed());
    }
    // These two share no sessions: those that were given by one are replaced at the other.
    let written = b.writes.load(Ordering::Relaxed);
    while client.put(b"k", b"b").is_err() {}
    assert!(b.writes.load(Ordering::Relaxed) > written);
}

#[test]
fn many_sessions_ask_once_and_all_of_them_move() {
    let (a, b) = (Shard::start(0), Shard::start(0));
    let config = Config::of_shard(0, vec![a.coordinator, b.coordinator]);
    let mut engine = Engine::new(&Config { sessions: 32, ..config }).unwrap();
    engine.open(Duration::from_secs(2)).unwrap();
    a.hand_over(&b, 2);
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    a.set_faults(move |header| match header.op {
        Op::Locate => {
            count.fetch_add(1, Ordering::Relaxed);
            None
        }
        _ => Some(Fault::Reject(Reason::NotCoordinator)),
    });
    let deadline = engine.now() + 5_000_000_000;
    for tag in 0..256 {
        engine.submit(Request::Read { key: b"k" }, tag, deadline).unwrap();
    }
    let mut done = Vec::new();
    while done.len() < 256 {
        engine.poll(Duration::from_secs(5), &mut done).unwrap();
    }
    assert!(done.iter().all(|completion| completion.outcome == Outcome::Read(None)), "{done:?}");
    assert!(asked.load(Ordering::Relaxed) < 16, "{asked:?} questions of 32 sessions");
    assert_eq!(engine.diagnosis(0).coordinator, b.coordinator);
}

#[test]
fn nobody_who_serves_is_told_with_what_everybody_said() {
    let (a, b) = (Shard::start(0), Shard::start(0));
    for shard in [&a, &b] {
        shard.set_faults(|_| Some(Fault::Reject(Reason::NotCoordinator)));
    }
    let config = Config { deadline_ms: 200, ..Config::of_shard(0, vec![a.coordinator, b.coordinator]) };
    let told = Client::new(config).unwrap().get(b"k").unwrap_err().to_string();
    for shard in [&a, &b] {
        assert!(told.contains(&format!("{} rejected: not from the epoch's coordinator", shard.coordinator)), "{told}");
    }
}
