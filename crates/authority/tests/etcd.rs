//! Against a real etcd server.

mod common;

use std::{
    fs,
    time::{Duration, Instant},
};

use common::{Agent, Etcd, Line, SOON, TTL, endpoint, patient, record};
use etcd_client::{CompactionOptions, ConnectOptions, Permission, PermissionType};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use underpass_authority::{Admin, Authority, Config, EtcdConfig, Notice, Record, Request, StoreOutcome};

const KEY: &str = "underpass/shards/3";
const ROLE: &str = "underpass/coordinators/3";
/// By when the role of a holder that vanished is another's: its lease, and how seldom etcd looks for leases that are over.
const ROLE_PASSES: Duration = Duration::from_secs(6);

#[test]
fn a_record_is_swapped_only_for_the_revision_it_had() {
    let etcd = Etcd::start();
    let (mut a, mut b) = (Agent::new(&etcd.config(), 1), Agent::new(&etcd.config(), 2));
    assert_eq!(b.load(), (0, None));
    let first = a.stored(0, record(1, endpoint(1)));
    assert_eq!(b.until_record(SOON), (first, Some(record(1, endpoint(1)))), "watched");
    assert_eq!(b.store(0, record(9, endpoint(2))), StoreOutcome::Conflict);
    assert_eq!(b.until_record(SOON), (first, Some(record(1, endpoint(1)))), "after a conflict");
    let second = b.stored(first, record(2, endpoint(2)));
    assert!(second > first);
    assert_eq!(a.until_record(SOON), (second, Some(record(2, endpoint(2)))));
    assert_eq!(a.store(first, record(9, endpoint(1))), StoreOutcome::Conflict);
    assert_eq!(b.load(), (second, Some(record(2, endpoint(2)))));
    assert_eq!(b.next(Duration::from_millis(1500)), None, "nothing that it knows already is told again");
    let bad = Record { lease_ms: 0, ..record(3, endpoint(1)) };
    assert!(matches!(a.store(second, bad), StoreOutcome::Unknown(why) if why.contains("a lease of 0 ms")));
    assert_eq!(b.load(), (second, Some(record(2, endpoint(2)))));
}

#[test]
fn a_role_passes_on_when_its_holder_vanishes_or_resigns() {
    let etcd = Etcd::start();
    let (mut a, mut b) = (Agent::new(&etcd.config(), 1), Agent::new(&etcd.config(), 2));
    a.campaign();
    a.until_role(true, SOON);
    b.campaign();
    // Longer than a lease: it is kept alive.
    b.no_role(TTL + TTL / 2);
    a.no_role(Duration::ZERO);
    let started = Instant::now();
    drop(a);
    b.until_role(true, ROLE_PASSES);
    assert!(started.elapsed() > TTL / 2, "not resigned, so the lease was waited for");
    let mut c = Agent::new(&etcd.config(), 3);
    c.campaign();
    c.no_role(Duration::from_millis(300));
    let resigned = Instant::now();
    b.resign(Duration::from_secs(3));
    b.until_role(false, SOON);
    c.until_role(true, Duration::from_secs(1));
    drop(c);
    // Long free, when b may have it again: its own wait alone counts.
    b.until_role(true, ROLE_PASSES);
    assert!(resigned.elapsed() >= Duration::from_secs(3));
    b.resign(Duration::from_secs(1));
    b.until_role(false, SOON);
    b.until_role(true, SOON);
}

#[test]
fn a_named_successor_comes_first() {
    let etcd = Etcd::start();
    let mut agents: Vec<_> = (1..=3).map(|port| Agent::new(&etcd.config(), port)).collect();
    for agent in &mut agents {
        agent.load();
    }
    let [a, b, c] = &mut agents[..] else { unreachable!() };
    a.campaign();
    a.until_role(true, SOON);
    b.campaign();
    c.campaign();
    let first = a.stored(0, record(1, a.me));
    c.until("the record", SOON, |notice| {
        matches!(notice, Notice::Record { revision, .. } if revision == first).then_some(())
    });
    a.stored(first, record(2, endpoint(3)));
    let resigned = Instant::now();
    a.resign(Duration::from_secs(60));
    c.until_role(true, SOON);
    assert!(resigned.elapsed() < Duration::from_millis(400), "{:?}", resigned.elapsed());
    b.no_role(Duration::from_millis(700));
    // The record still names c: the others wait.
    let resigned = Instant::now();
    c.resign(Duration::from_secs(60));
    b.until_role(true, SOON);
    assert!(resigned.elapsed() >= Duration::from_millis(100), "{:?}", resigned.elapsed());
}

#[test]
fn a_paused_etcd_leaves_outcomes_unknown_and_roles_lost_until_it_runs() {
    let etcd = Etcd::start();
    let mut a = Agent::new(&EtcdConfig { timeout_ms: 1000, ..etcd.config() }, 1);
    a.campaign();
    a.until_role(true, SOON);
    let first = a.stored(0, record(1, a.me));
    etcd.pause();
    let started = Instant::now();
    let StoreOutcome::Unknown(why) = a.store(first, record(2, endpoint(1))) else { panic!() };
    assert!(why.contains("does not answer within 1000 ms"), "{why}");
    assert!(started.elapsed() < Duration::from_secs(5));
    a.until_role(false, 2 * TTL);
    assert!(!a.authority.troubles().is_empty());
    a.no_role(Duration::from_millis(500));
    etcd.resume();
    // The server finds the store in its socket. That is over when the record is told: what follows is stored at once.
    let (revision, read) = a.until_record_and_role(SOON);
    assert!(matches!(read.as_ref().unwrap().epoch, 1 | 2), "{read:?}");
    a.stored(revision, record(3, endpoint(1)));
    a.until_no_trouble(SOON);
}

#[test]
fn a_killed_etcd_is_found_again() {
    let mut etcd = Etcd::start();
    let (mut a, mut b) = (Agent::new(&etcd.config(), 1), Agent::new(&etcd.config(), 2));
    a.campaign();
    a.until_role(true, SOON);
    assert_eq!(b.load(), (0, None));
    let first = a.stored(0, record(1, a.me));
    assert_eq!(b.until_record(SOON).0, first);
    etcd.kill();
    let StoreOutcome::Unknown(why) = a.store(first, record(2, endpoint(1))) else { panic!() };
    assert!(why.contains("check that it runs"), "{why}");
    b.until_trouble(&["check that it runs", &etcd.address(), "changes wait"], SOON);
    a.until_role(false, 2 * TTL);
    etcd.restart();
    // Under a new revision: the store of unknown outcome cannot replace it any more.
    let (settled, read) = a.until_record_and_role(SOON);
    assert!(settled > first && read == Some(record(1, endpoint(1))), "{settled} {read:?}");
    let second = a.stored(settled, record(2, endpoint(1)));
    b.until("the record, by a watch that goes on", SOON, |notice| {
        matches!(notice, Notice::Record { revision, .. } if revision == second).then_some(())
    });
    a.until_no_trouble(SOON);
    b.until_no_trouble(SOON);
}

#[test]
fn a_short_outage_costs_no_role() {
    let etcd = Etcd::start();
    let mut a = Agent::new(&EtcdConfig { ttl_ms: 5000, ..etcd.config() }, 1);
    a.campaign();
    a.until_role(true, SOON);
    etcd.pause();
    a.no_role(Duration::from_secs(1));
    etcd.resume();
    a.no_role(Duration::from_secs(6));
}

#[test]
fn an_agent_unreachable_from_the_start_says_so_and_comes_in_later() {
    let mut etcd = Etcd::start();
    assert_eq!(etcd.value(KEY), None, "it has come up");
    etcd.kill();
    let mut a = Agent::new(&etcd.config(), 1);
    a.campaign();
    a.until_trouble(&["check that it runs"], SOON);
    assert!(matches!(a.store(0, record(1, endpoint(1))), StoreOutcome::Unknown(_)));
    etcd.restart();
    assert_eq!(a.until_record_and_role(SOON), (0, None));
    a.until_no_trouble(SOON);
}

#[test]
fn what_was_compacted_while_away_is_read_anew() {
    let etcd = Etcd::start();
    let line = Line::to(&etcd.address());
    let mut away = Agent::new(&patient(vec![line.address()]), 1);
    let mut b = Agent::new(&etcd.config(), 2);
    let first = b.stored(0, record(1, endpoint(2)));
    assert_eq!(away.load().0, first);
    line.cut();
    away.until_trouble(&["check that it runs"], SOON);
    let second = b.stored(first, record(2, endpoint(2)));
    let third = b.stored(second, record(3, endpoint(2)));
    etcd.with(async |client| client.compact(third as i64, Some(CompactionOptions::new().with_physical())).await);
    line.mend();
    assert_eq!(away.until_record(SOON), (third, Some(record(3, endpoint(2)))));
    away.until_no_trouble(SOON);
    b.stored(third, record(4, endpoint(2)));
    assert_eq!(away.until_record(SOON).1, Some(record(4, endpoint(2))), "the new watch works");
}

#[test]
fn an_etcd_that_forgot_is_not_believed() {
    let mut etcd = Etcd::start();
    let mut a = Agent::new(&etcd.config(), 1);
    let mut revision = 0;
    for epoch in 1..10 {
        revision = a.stored(revision, record(epoch, endpoint(1)));
    }
    etcd.kill();
    etcd.forget();
    etcd.restart();
    a.until_trouble(&["has forgotten changes", "restored from an old copy"], SOON);
    assert!(a.next(Duration::from_millis(500)).is_none());
}

#[test]
fn one_of_several_members_is_enough() {
    let etcd = Etcd::start();
    let dead = Line::to(&etcd.address());
    dead.cut();
    let config = patient(vec![dead.address(), etcd.address()]);
    let mut a = Agent::new(&config, 1);
    a.campaign();
    a.until_role(true, SOON);
    let first = a.stored(0, record(1, endpoint(1)));
    assert_eq!(Admin::open(&Config::Etcd(config)).unwrap().load(3).unwrap(), Some((first, record(1, endpoint(1)))));
}

#[test]
fn two_agents_with_one_address_are_told_apart() {
    let etcd = Etcd::start();
    let (mut a, mut twin) = (Agent::new(&etcd.config(), 1), Agent::new(&etcd.config(), 1));
    a.campaign();
    a.until_role(true, SOON);
    twin.campaign();
    let what = twin.until_trouble(&["another agent with this address (10.0.0.1:1)", "stop one of the two"], SOON);
    let held = etcd.value(ROLE).unwrap();
    let instance = what.split("instance ").nth(1).unwrap().split(')').next().unwrap();
    assert!(held.contains(instance), "{what} {held}");
    drop(a);
    twin.until_role(true, ROLE_PASSES);
    twin.until_no_trouble(SOON);
}

#[test]
fn an_agent_that_crashed_is_not_its_own_twin() {
    let etcd = Etcd::start();
    let mut a = Agent::new(&etcd.config(), 1);
    a.campaign();
    a.until_role(true, SOON);
    drop(a);
    let mut again = Agent::new(&etcd.config(), 1);
    again.campaign();
    let end = Instant::now() + ROLE_PASSES;
    again.until("the role, and no trouble", end - Instant::now(), |notice| match notice {
        Notice::Role { held: true, .. } => Some(()),
        Notice::Trouble { what } => panic!("{what}"),
        _ => None,
    });
}

#[test]
fn what_cannot_be_read_is_told_and_left_alone() {
    let etcd = Etcd::start();
    let good = serde_json::to_string(&record(5, endpoint(1))).unwrap();
    let mut a = Agent::new(&etcd.config(), 1);
    let mut admin = Admin::open(&Config::Etcd(etcd.config())).unwrap();
    for (bad, says) in [
        ("hello".to_owned(), "it is not a record"),
        (good.replace("\"version\":2", "\"version\":3"), "start the newer build"),
        (good.replace("\"version\":2", "\"version\":1"), "start the older build"),
        (good.replace("\"shard\":3", "\"shard\":4"), "the record of shard 4"),
        (good.replace("\"settled\":", "\"unsettled\":"), "unknown field"),
    ] {
        etcd.put(KEY, &bad);
        a.authority.request(Request::Load { shard: 3 });
        a.until_trouble(&[says, KEY], SOON);
        assert_eq!(a.store(0, record(6, endpoint(1))), StoreOutcome::Conflict);
        assert_eq!(etcd.value(KEY).unwrap(), bad);
        assert!(admin.load(3).unwrap_err().to_string().contains(says));
        assert!(admin.shards().unwrap()[0].record.as_ref().unwrap_err().contains(says));
        etcd.put(KEY, &good);
        assert_eq!(a.until_record(SOON).1, Some(record(5, endpoint(1))));
        a.until_no_trouble(SOON);
    }
    etcd.put(ROLE, "hello");
    a.campaign();
    a.until_trouble(&[ROLE, "holds something else", "etcdctl del"], SOON);
    a.no_role(TTL);
    assert_eq!(etcd.value(ROLE).unwrap(), "hello");
    etcd.with(async |client| client.delete(ROLE, None).await);
    a.until_role(true, SOON);
    a.until_no_trouble(SOON);
    // Who removes the key takes the role away; it comes back.
    etcd.with(async |client| client.delete(ROLE, None).await);
    a.until_role(false, SOON);
    a.until_role(true, SOON);
    etcd.put("underpass/shards/none", "");
    assert!(admin.shards().unwrap_err().to_string().contains("not a shard's"));
}

#[test]
fn commands_work_without_an_agent() {
    let mut etcd = Etcd::start();
    let config = EtcdConfig { prefix: "elsewhere".into(), ..etcd.config() };
    let mut admin = Admin::open(&Config::Etcd(config)).unwrap();
    assert_eq!(admin.shards().unwrap(), []);
    let revisions: Vec<_> = [12, 3].map(|id| admin.create(Record::new(id, Vec::new())).unwrap()).into();
    assert!(admin.create(Record::new(3, Vec::new())).unwrap_err().to_string().contains("exists already"));
    let shards: Vec<_> = admin.shards().unwrap().into_iter().map(|shard| (shard.id, shard.revision)).collect();
    assert_eq!(shards, [(3, revisions[1]), (12, revisions[0])]);
    assert_eq!(admin.load(3).unwrap(), Some((revisions[1], Record::new(3, Vec::new()))));
    assert_eq!(admin.load(4).unwrap(), None);
    assert!(etcd.value("elsewhere/shards/12").is_some());
    etcd.kill();
    assert!(admin.load(3).unwrap_err().to_string().contains("check that it runs"));
}

#[test]
fn passwords_and_permissions() {
    // Cheap hashes, and time for them on a busy machine.
    let etcd = Etcd::start_with("http", &["--bcrypt-cost=4"]);
    etcd.with(async |client| {
        for (user, role) in [("root", "root"), ("agent", "agent"), ("other", "other")] {
            client.user_add(user, format!("{user}'s secret"), None).await?;
            client.role_add(role).await?;
            client.user_grant_role(user, role).await?;
        }
        let permission = Permission::new(PermissionType::Readwrite, "underpass/").with_prefix();
        client.role_grant_permission("agent", permission).await?;
        client.auth_enable().await
    });
    let directory = tempfile::tempdir().unwrap();
    let with = |user: &str, password: &str| {
        let file = directory.path().join(format!("{user} {password}"));
        fs::write(&file, format!("{password}\n")).unwrap();
        EtcdConfig { user: Some(user.into()), password_file: Some(file), ..etcd.config() }
    };
    let mut good = Agent::new(&with("agent", "agent's secret"), 1);
    good.campaign();
    good.until_role(true, SOON);
    good.stored(0, record(1, endpoint(1)));
    for (config, says) in [
        (with("agent", "guess"), "check `user` and `password_file`"),
        (etcd.config(), "set `user` and `password_file`"),
        (with("other", "other's secret"), "grant-permission ROLE --prefix=true readwrite underpass/"),
    ] {
        let mut bad = Agent::new(&config, 2);
        bad.campaign();
        bad.until_trouble(&["the role of shard 3", says], SOON);
        let outcome = bad.store(0, record(1, endpoint(2)));
        assert!(matches!(&outcome, StoreOutcome::Unknown(why) if why.contains(says)), "{outcome:?}");
        let error = Admin::open(&Config::Etcd(config)).unwrap().shards().unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let root = ConnectOptions::new().with_user("root", "root's secret");
    etcd.with_options(Some(root), async |client| client.auth_disable().await);
    let mut unneeded = Agent::new(&with("agent", "agent's secret"), 2);
    unneeded.authority.request(Request::Load { shard: 3 });
    unneeded.until_trouble(&["remove `user`"], SOON);
    let missing = EtcdConfig { password_file: Some("/nonexistent".into()), ..with("agent", "") };
    let error = format!("{:#}", Admin::open(&Config::Etcd(missing)).err().unwrap());
    assert!(error.contains("password_file"), "{error}");
}

#[test]
fn certificates() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: String| {
        let path = directory.path().join(name);
        fs::write(&path, content).unwrap();
        path
    };
    let authority = || {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    };
    let (ours, stranger) = (authority(), authority());
    let certificate = |name: &str, issuer: &CertifiedIssuer<'_, KeyPair>| {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
        let signed = params.signed_by(&key, issuer).unwrap();
        (file(&format!("{name}.pem"), signed.pem()), file(&format!("{name}-key.pem"), key.serialize_pem()))
    };
    let ca = file("ca.pem", ours.pem());
    let (server_cert, server_key) = certificate("server", &ours);
    let options = [
        format!("--cert-file={}", server_cert.display()),
        format!("--key-file={}", server_key.display()),
        format!("--trusted-ca-file={}", ca.display()),
        "--client-cert-auth".into(),
    ];
    let etcd = Etcd::start_with("https", &options.each_ref().map(String::as_str));
    let (cert, key) = certificate("client", &ours);
    let good = EtcdConfig { ca: Some(ca), cert: Some(cert), key: Some(key), ..etcd.config() };
    let mut a = Agent::new(&good, 1);
    a.campaign();
    a.until_role(true, SOON);
    a.stored(0, record(1, endpoint(1)));
    let https = EtcdConfig { endpoints: vec![format!("https://{}", etcd.address())], ..good.clone() };
    assert_eq!(Admin::open(&Config::Etcd(https)).unwrap().shards().unwrap().len(), 1);

    let (strange_cert, strange_key) = certificate("strange", &stranger);
    let strange_ca = file("strange-ca.pem", stranger.pem());
    let plain = Etcd::start();
    for (config, says) in [
        (EtcdConfig { ca: Some(strange_ca), ..good.clone() }, "does not vouch for"),
        (EtcdConfig { cert: None, key: None, ..good.clone() }, "check `cert` and `key`"),
        (EtcdConfig { cert: Some(strange_cert), key: Some(strange_key), ..good.clone() }, "check `cert` and `key`"),
        (EtcdConfig { ca: None, cert: None, key: None, ..good.clone() }, "set `ca`"),
        (EtcdConfig { endpoints: plain.config().endpoints, ..good.clone() }, "speaks no TLS"),
    ] {
        let mut bad = Agent::new(&config, 2);
        bad.authority.request(Request::Load { shard: 3 });
        bad.until_trouble(&[says], SOON);
    }
}
