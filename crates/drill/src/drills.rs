//! The drills: what is done to the shard, and what has to come of it by itself.

use std::{
    fmt, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rand::{Rng, rngs::StdRng};

use crate::cluster::{COORDINATORS, Cluster, DataPath, REPLICA_HOSTS, REPLICAS, Role, id};

/// How long another coordinator may take to serve: the authority's lease, the members' leases, and time to rebuild, on a
/// machine that is busy.
const TAKE_OVER_MAX: Duration = Duration::from_secs(10);
/// How long a change of members may take, with the copy.
const CHANGE_MAX: Duration = Duration::from_secs(10);
/// Longer than until a silent member is removed.
const MEMBER_GONE: Duration = Duration::from_millis(1500);
/// Longer than the lease of the role at the authority.
const ROLE_GONE: Duration = Duration::from_millis(3500);
/// Shorter than any lease.
const BRIEF: Duration = Duration::from_millis(300);

/// How long clients may have to wait, on a machine that is busy. Service that must not stop at all is given half a second.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// For reads.
    pub reads: Duration,
    /// For writes.
    pub writes: Duration,
}

const fn bounds(reads_ms: u64, writes_ms: u64) -> Bounds {
    Bounds { reads: Duration::from_millis(reads_ms), writes: Duration::from_millis(writes_ms) }
}

/// Nobody need notice.
const NONE: Bounds = bounds(700, 700);
/// A replica is lost: writes wait until it is removed.
const MEMBER: Bounds = bounds(700, 3000);
/// A coordinator is lost, or out of reach.
const COORDINATOR: Bounds = bounds(9000, 9000);
/// A coordinator hands over.
const HANDOVER: Bounds = bounds(2500, 2500);

/// What a drill works with.
pub struct Scene<'a> {
    /// The shard.
    pub cluster: &'a mut Cluster,
    /// Chooses among equals.
    pub rng: &'a mut StdRng,
}

type Act = Box<dyn Fn(&mut Scene<'_>) -> Result<()>>;

/// A drill.
pub struct Drill {
    /// What it is called by.
    pub name: String,
    /// What is done, in a sentence.
    pub about: String,
    /// The data path that alone knows of it.
    pub only: Option<DataPath>,
    /// How long clients may have to wait.
    pub bounds: Bounds,
    /// Does it, waits for what has to come of it, and mends what nobody else does.
    pub act: Act,
}

impl fmt::Debug for Drill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drill").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Scene<'_> {
    fn pause(&self, length: Duration) {
        thread::sleep(length);
    }

    fn pause_up_to(&mut self, milliseconds: std::ops::Range<u64>) {
        let length = Duration::from_millis(self.rng.random_range(milliseconds));
        self.pause(length);
    }

    fn leader(&self) -> Result<usize> {
        let mut leader = None;
        self.cluster.wait("nobody serves", TAKE_OVER_MAX, || {
            leader = self.cluster.leader();
            Ok(leader.is_some())
        })?;
        leader.context("nobody serves")
    }

    fn standby(&self) -> Result<usize> {
        Ok(COORDINATORS - 1 - self.leader()?)
    }

    fn any_replica(&mut self) -> usize {
        self.rng.random_range(0..REPLICAS)
    }

    /// Two different ones.
    fn two_replicas(&mut self) -> (usize, usize) {
        let first = self.any_replica();
        (first, (first + self.rng.random_range(1..REPLICAS)) % REPLICAS)
    }

    /// Ends whoever coordinates, waits for the other one to serve, and starts it again.
    fn take_over_from(&mut self, end: impl Fn(&mut Cluster, Role) -> Result<()>) -> Result<()> {
        let (leader, standby) = (self.leader()?, self.standby()?);
        end(self.cluster, Role::Coordinator(leader))?;
        self.cluster.await_leader(standby, TAKE_OVER_MAX)?;
        self.cluster.start_all()
    }

    /// Waits until a replica takes part, or no longer does.
    fn await_member(&self, replica: usize, takes_part: bool) -> Result<()> {
        let what =
            format!("replica-{replica} {} taking part", if takes_part { "does not begin" } else { "does not end" });
        self.cluster.wait(&what, CHANGE_MAX, || {
            let status = self.cluster.leader().and_then(|leader| self.cluster.status(leader));
            let is_member = |member: &&crate::cluster::Member| member.id == id(replica);
            Ok(status.is_some_and(|status| match takes_part {
                true => status.members.iter().find(is_member).is_some_and(|member| member.active),
                false => !status.members.iter().any(|member| member.id == id(replica)),
            }))
        })
    }

    /// Has the operator say something to whoever coordinates, again while it says that it is busy.
    fn operator(&self, arguments: &[&str]) -> Result<String> {
        let until = Instant::now() + CHANGE_MAX;
        loop {
            match self.cluster.operator(self.leader()?, arguments) {
                Err(error) if error.to_string().contains("try again") && Instant::now() < until => {
                    self.pause(Duration::from_millis(50));
                }
                result => return result,
            }
        }
    }

    fn cut_for(&self, pairs: &[(&str, &str)], length: Duration) -> Result<()> {
        for (from, to) in pairs {
            self.cluster.cut(from, to)?;
        }
        self.pause(length);
        self.cluster.heal()
    }
}

fn drill(name: &str, about: &str, bounds: Bounds, act: impl Fn(&mut Scene<'_>) -> Result<()> + 'static) -> Drill {
    Drill { name: name.to_owned(), about: about.to_owned(), only: None, bounds, act: Box::new(act) }
}

fn xdp(drill: Drill) -> Drill {
    Drill { only: Some(DataPath::Xdp), ..drill }
}

/// All drills.
pub fn all() -> Vec<Drill> {
    let mut all = processes();
    all.extend(links());
    all.extend(hosts());
    all.extend(changes());
    all
}

/// Every role is ended as by a crash, ended in order, or stopped for a while.
fn processes() -> Vec<Drill> {
    vec![
        drill(
            "coordinator-killed",
            "the coordinator's agent is killed; the standby takes over",
            COORDINATOR,
            |scene| scene.take_over_from(|cluster, role| cluster.crash(role)),
        ),
        drill(
            "coordinator-stopped",
            "the coordinator's agent ends in order; the standby takes over",
            HANDOVER,
            |scene| scene.take_over_from(|cluster, role| cluster.stop(role)),
        ),
        drill(
            "coordinator-restarted",
            "the coordinator's agent is killed and started again at once",
            COORDINATOR,
            |scene| {
                let leader = Role::Coordinator(scene.leader()?);
                scene.cluster.crash(leader)?;
                scene.cluster.start(leader)?;
                scene.leader().map(drop)
            },
        ),
        drill("coordinator-paused", "the coordinator's agent stands still for a moment", bounds(1200, 1200), |scene| {
            let leader = Role::Coordinator(scene.leader()?);
            scene.cluster.signal(leader, Signal::SIGSTOP)?;
            scene.pause(BRIEF);
            scene.cluster.signal(leader, Signal::SIGCONT)
        }),
        drill(
            "coordinator-back",
            "the coordinator's agent stands still until the standby has taken over, then goes on as if nothing were",
            COORDINATOR,
            |scene| {
                let (old, new) = (scene.leader()?, scene.standby()?);
                scene.cluster.signal(Role::Coordinator(old), Signal::SIGSTOP)?;
                let taken = scene.cluster.await_leader(new, TAKE_OVER_MAX);
                scene.cluster.signal(Role::Coordinator(old), Signal::SIGCONT)?;
                taken?;
                scene.pause(Duration::from_millis(500));
                ensure!(scene.leader()? == new, "the old coordinator has the shard again");
                Ok(())
            },
        ),
        drill("standby-killed", "the standby is killed and started again", NONE, |scene| {
            let standby = Role::Coordinator(scene.standby()?);
            scene.cluster.crash(standby)?;
            scene.pause(BRIEF);
            scene.cluster.start(standby)
        }),
        drill("standby-paused", "the standby stands still for longer than any lease", NONE, |scene| {
            let standby = Role::Coordinator(scene.standby()?);
            scene.cluster.signal(standby, Signal::SIGSTOP)?;
            scene.pause(ROLE_GONE);
            scene.cluster.signal(standby, Signal::SIGCONT)
        }),
        drill(
            "replica-killed",
            "a replica is killed, and started again, empty, when it has been removed",
            MEMBER,
            |scene| {
                let replica = scene.any_replica();
                scene.cluster.crash(Role::Replica(replica))?;
                scene.await_member(replica, false)?;
                scene.cluster.start(Role::Replica(replica))
            },
        ),
        drill("replica-restarted", "a replica is killed and started again at once, empty", MEMBER, |scene| {
            let replica = Role::Replica(scene.any_replica());
            scene.cluster.crash(replica)?;
            scene.cluster.start(replica)
        }),
        drill("replica-stopped", "a replica ends in order and is started again", MEMBER, |scene| {
            let replica = Role::Replica(scene.any_replica());
            scene.cluster.stop(replica)?;
            scene.pause(BRIEF);
            scene.cluster.start(replica)
        }),
        drill("replica-paused", "a replica stands still for a moment, too short to be removed", MEMBER, |scene| {
            let replica = Role::Replica(scene.any_replica());
            scene.cluster.signal(replica, Signal::SIGSTOP)?;
            scene.pause(BRIEF);
            scene.cluster.signal(replica, Signal::SIGCONT)
        }),
        drill(
            "replica-back",
            "a replica stands still until it has been removed, then goes on with what it held",
            MEMBER,
            |scene| {
                let replica = scene.any_replica();
                scene.cluster.signal(Role::Replica(replica), Signal::SIGSTOP)?;
                let removed = scene.await_member(replica, false);
                scene.cluster.signal(Role::Replica(replica), Signal::SIGCONT)?;
                removed
            },
        ),
        drill(
            "authority-killed",
            "the authority is killed; service goes on, and a change waits until it is back",
            NONE,
            |scene| {
                authority_away(
                    scene,
                    |scene| scene.cluster.crash(Role::Authority),
                    |scene| scene.cluster.start(Role::Authority),
                )
            },
        ),
        drill(
            "authority-paused",
            "the authority stands still; service goes on, and a change waits until it moves",
            NONE,
            |scene| {
                authority_away(
                    scene,
                    |scene| scene.cluster.signal(Role::Authority, Signal::SIGSTOP),
                    |scene| scene.cluster.signal(Role::Authority, Signal::SIGCONT),
                )
            },
        ),
        drill("authority-restarted", "the authority is restarted at once", NONE, |scene| {
            scene.cluster.crash(Role::Authority)?;
            scene.cluster.start(Role::Authority)?;
            scene.pause(ROLE_GONE);
            Ok(())
        }),
        drill("both-killed", "the coordinator's agent and a replica are killed at once", COORDINATOR, |scene| {
            let replica = scene.any_replica();
            let (leader, standby) = (scene.leader()?, scene.standby()?);
            scene.cluster.crash(Role::Replica(replica))?;
            scene.cluster.crash(Role::Coordinator(leader))?;
            scene.cluster.await_leader(standby, TAKE_OVER_MAX)?;
            scene.await_member(replica, false)?;
            scene.cluster.start_all()
        }),
        drill("two-replicas-killed", "two of three replicas are killed at once", bounds(1000, 3000), |scene| {
            let (first, second) = scene.two_replicas();
            scene.cluster.crash(Role::Replica(first))?;
            scene.cluster.crash(Role::Replica(second))?;
            scene.await_member(first, false)?;
            scene.await_member(second, false)?;
            scene.cluster.start_all()
        }),
        drill("learner-killed", "a replica that is being filled is killed", MEMBER, |scene| {
            let replica = Role::Replica(scene.any_replica());
            scene.cluster.crash(replica)?;
            scene.cluster.start(replica)?;
            scene.pause_up_to(10..200);
            scene.cluster.crash(replica)?;
            scene.cluster.start(replica)
        }),
        drill("take-over-interrupted", "the standby that takes over is killed while it does", COORDINATOR, |scene| {
            let (leader, standby) = (scene.leader()?, scene.standby()?);
            scene.cluster.stop(Role::Coordinator(leader))?;
            scene.pause_up_to(0..300);
            scene.cluster.crash(Role::Coordinator(standby))?;
            scene.cluster.start_all()?;
            scene.leader().map(drop)
        }),
    ]
}

fn authority_away(
    scene: &mut Scene<'_>,
    leave: impl Fn(&mut Scene<'_>) -> Result<()>,
    back: impl Fn(&mut Scene<'_>) -> Result<()>,
) -> Result<()> {
    let leader = scene.leader()?;
    let spare = REPLICA_HOSTS - 1;
    leave(scene)?;
    let mut asked = scene.cluster.begin_operator(leader, &["members", "add", &scene.cluster.wanted(spare)])?;
    scene.pause(ROLE_GONE);
    let served = scene.cluster.leader() == Some(leader);
    let waits = scene.cluster.status(leader).is_none_or(|status| status.members.len() == REPLICAS);
    back(scene)?;
    let refused = !asked.wait()?.success();
    ensure!(served, "service did not go on without the authority");
    ensure!(waits, "the members changed without the authority");
    if refused {
        // It was told that it is not known whether the change is on record, or that it is not.
        scene.operator(&["members", "add", &scene.cluster.wanted(spare)])?;
    }
    scene.await_member(spare, true)?;
    scene.operator(&["members", "remove", &id(spare).to_string()])?;
    scene.await_member(spare, false)
}

/// What is at one end of a link.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Client,
    Coordinator,
    Standby,
    Replica,
    OtherReplica,
    Authority,
}

impl End {
    fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Coordinator => "coordinator",
            Self::Standby => "standby",
            Self::Replica | Self::OtherReplica => "replica",
            Self::Authority => "authority",
        }
    }
}

/// Ways of a link: there, and back.
const BOTH: &[bool] = &[true, false];
const THERE: &[bool] = &[true];
const BACK: &[bool] = &[false];

/// Every link is cut: one way, the other way, both ways.
fn links() -> Vec<Drill> {
    use End::*;
    let links = [
        (Client, Coordinator, MEMBER_GONE, bounds(4000, 4000)),
        (Client, Replica, MEMBER_GONE, bounds(1000, 1000)),
        (Coordinator, Replica, MEMBER_GONE, MEMBER),
        (Coordinator, Standby, MEMBER_GONE, NONE),
        (Coordinator, Authority, ROLE_GONE, COORDINATOR),
        (Standby, Authority, ROLE_GONE, NONE),
        (Standby, Replica, MEMBER_GONE, NONE),
        (Replica, OtherReplica, MEMBER_GONE, MEMBER),
    ];
    let mut drills = Vec::new();
    for (a, b, length, bounds) in links {
        let (from, to) = (a.name(), b.name());
        for (ways, name) in [
            (BOTH, format!("cut-{from}-{to}")),
            (THERE, format!("cut-{from}-to-{to}")),
            (BACK, format!("cut-{to}-to-{from}")),
        ] {
            if b == OtherReplica && ways == BACK {
                continue;
            }
            let how = match ways {
                [true] => format!("nothing passes from the {from} to the {to}"),
                [false] => format!("nothing passes from the {to} to the {from}"),
                _ => format!("the link between the {from} and the {to} is cut"),
            };
            drills.push(drill(&name, &format!("{how}, for {length:?}"), bounds, move |scene| {
                if b == OtherReplica {
                    // One of them needs the other: it is being filled.
                    let replica = Role::Replica(0);
                    scene.cluster.crash(replica)?;
                    scene.cluster.start(replica)?;
                }
                let (replica, other) = if b == OtherReplica { (0, 1) } else { scene.two_replicas() };
                let host = |end| {
                    Ok::<_, anyhow::Error>(match end {
                        Client => crate::cluster::CLIENT.to_owned(),
                        Coordinator => Role::Coordinator(scene.leader()?).host(),
                        Standby => Role::Coordinator(scene.standby()?).host(),
                        Replica => Role::Replica(replica).host(),
                        OtherReplica => Role::Replica(other).host(),
                        Authority => Role::Authority.host(),
                    })
                };
                let (from, to) = (host(a)?, host(b)?);
                let pairs: Vec<(&str, &str)> = ways
                    .iter()
                    .map(|forth| if *forth { (from.as_str(), to.as_str()) } else { (to.as_str(), from.as_str()) })
                    .collect();
                scene.cut_for(&pairs, length)
            }));
        }
    }
    drills.push(drill("coordinator-isolated", "the coordinator is cut off from everybody", COORDINATOR, |scene| {
        let (old, new) = (scene.leader()?, scene.standby()?);
        isolate(scene, Role::Coordinator(old), &[])?;
        let taken = scene.cluster.await_leader_of(new, TAKE_OVER_MAX);
        scene.cluster.heal()?;
        taken
    }));
    drills.push(drill(
        "coordinator-with-replica",
        "the coordinator and one replica are cut off from everybody but the clients, and each other",
        COORDINATOR,
        |scene| {
            let (old, new) = (scene.leader()?, scene.standby()?);
            let replica = scene.any_replica();
            let friends = [Role::Replica(replica).host(), crate::cluster::CLIENT.to_owned()];
            isolate(scene, Role::Coordinator(old), &friends)?;
            isolate(
                scene,
                Role::Replica(replica),
                &[Role::Coordinator(old).host(), crate::cluster::CLIENT.to_owned()],
            )?;
            let taken = scene.cluster.await_leader_of(new, TAKE_OVER_MAX);
            scene.cluster.heal()?;
            taken
        },
    ));
    drills
}

/// Cuts a host off from all but its friends.
fn isolate(scene: &Scene<'_>, role: Role, friends: &[String]) -> Result<()> {
    for other in scene.cluster.hosts() {
        if other != role.host() && !friends.contains(&other) {
            scene.cluster.cut(&role.host(), &other)?;
            scene.cluster.cut(&other, &role.host())?;
        }
    }
    Ok(())
}

/// What happens to hosts, and to what is attached to them.
fn hosts() -> Vec<Drill> {
    vec![
        drill(
            "replica-slow",
            "a replica's link is slow: every frame takes 15 ms longer",
            bounds(1000, 1500),
            |scene| {
                let replica = Role::Replica(scene.any_replica()).host();
                scene.cluster.delay(&replica, Duration::from_millis(15))?;
                scene.pause(MEMBER_GONE);
                scene.cluster.heal()
            },
        ),
        drill("replica-interface", "a replica's interface goes down and up", MEMBER, |scene| {
            let replica = Role::Replica(scene.any_replica()).host();
            interface_away(scene, &replica, MEMBER_GONE)
        }),
        drill(
            "coordinator-interface",
            "the coordinator's interface goes down, and up when another has taken over",
            COORDINATOR,
            |scene| {
                let leader = Role::Coordinator(scene.leader()?).host();
                interface_away(scene, &leader, ROLE_GONE)
            },
        ),
        drill(
            "coordinator-interface-blinks",
            "the coordinator's interface goes down for a moment",
            bounds(3000, 3000),
            |scene| {
                let leader = Role::Coordinator(scene.leader()?).host();
                interface_away(scene, &leader, Duration::from_millis(100))
            },
        ),
        xdp(drill("program-detached", "somebody detaches the coordinator's program", bounds(2000, 2000), |scene| {
            let leader = scene.leader()?;
            scene.cluster.detach_program(leader)?;
            // The agent notices, and attaches it again.
            scene
                .cluster
                .wait("the program is not attached again", TAKE_OVER_MAX, || scene.cluster.is_attached(leader))?;
            scene.leader().map(drop)
        })),
        xdp(drill(
            "agent-upgraded",
            "the agent is told to leave its tables, and its successor goes on with them",
            NONE,
            |scene| {
                let leader = Role::Coordinator(scene.leader()?);
                let before = scene.cluster.status(scene.leader()?).context("the coordinator does not answer")?.tenure;
                scene.cluster.signal(leader, Signal::SIGHUP)?;
                ensure!(scene.cluster.await_end(leader)?, "the agent did not end well");
                scene.pause(BRIEF);
                scene.cluster.start(leader)?;
                let leader_now = scene.leader()?;
                ensure!(Role::Coordinator(leader_now) == leader, "another coordinator took over");
                let after = scene.cluster.status(leader_now).context("the coordinator does not answer")?.tenure;
                ensure!(before == after, "tenure {before} became {after}: the tables were not kept");
                Ok(())
            },
        )),
    ]
}

fn interface_away(scene: &Scene<'_>, host: &str, length: Duration) -> Result<()> {
    scene.cluster.set_interface(host, false)?;
    scene.pause(length);
    scene.cluster.set_interface(host, true)
}

/// What the operator does.
fn changes() -> Vec<Drill> {
    vec![
        drill("handed-over", "the operator hands the shard over to the standby", HANDOVER, |scene| {
            let standby = scene.standby()?;
            let to = scene.cluster.address(Role::Coordinator(standby))?.to_string();
            scene.operator(&["coordinator", "transfer", "--to", &to])?;
            scene.cluster.await_leader(standby, TAKE_OVER_MAX)
        }),
        drill("replica-added", "the operator adds a replica, then removes it", NONE, |scene| {
            let spare = REPLICA_HOSTS - 1;
            scene.operator(&["members", "add", &scene.cluster.wanted(spare)])?;
            scene.await_member(spare, true)?;
            scene.operator(&["members", "remove", &id(spare).to_string()])?;
            scene.await_member(spare, false)
        }),
        drill("replica-removed", "the operator removes a replica, then adds it again", NONE, |scene| {
            let replica = scene.any_replica();
            scene.operator(&["members", "remove", &id(replica).to_string()])?;
            scene.await_member(replica, false)?;
            scene.operator(&["members", "add", &scene.cluster.wanted(replica)])?;
            scene.await_member(replica, true)
        }),
        drill("replica-replaced", "the operator replaces a replica by the spare one, and back", NONE, |scene| {
            let (replica, spare) = (scene.any_replica(), REPLICA_HOSTS - 1);
            for (old, new) in [(replica, spare), (spare, replica)] {
                scene.operator(&["members", "replace", &id(old).to_string(), "--by", &scene.cluster.wanted(new)])?;
                scene.await_member(new, true)?;
                scene.await_member(old, false)?;
            }
            Ok(())
        }),
        drill(
            "single-copy",
            "two replicas are removed by the operator, one with the flag, and added again",
            NONE,
            |scene| {
                let (first, second) = scene.two_replicas();
                scene.operator(&["members", "remove", &id(first).to_string()])?;
                scene.await_member(first, false)?;
                let refused = scene.operator(&["members", "remove", &id(second).to_string()]);
                ensure!(
                    refused.as_ref().is_err_and(|why| why.to_string().contains("--to-a-single-copy")),
                    "not refused with the flag's name: {refused:?}"
                );
                scene.operator(&["members", "remove", &id(second).to_string(), "--to-a-single-copy"])?;
                scene.await_member(second, false)?;
                for replica in [first, second] {
                    scene.operator(&["members", "add", &scene.cluster.wanted(replica)])?;
                    scene.await_member(replica, true)?;
                }
                Ok(())
            },
        ),
        drill("handed-over-while-joining", "a hand-over while a replica is being filled", HANDOVER, |scene| {
            let replica = Role::Replica(scene.any_replica());
            scene.cluster.crash(replica)?;
            scene.cluster.start(replica)?;
            scene.pause_up_to(0..700);
            let standby = scene.standby()?;
            let to = scene.cluster.address(Role::Coordinator(standby))?.to_string();
            scene.operator(&["coordinator", "transfer", "--to", &to])?;
            scene.cluster.await_leader(standby, TAKE_OVER_MAX)
        }),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_can_be_typed() {
        let drills = all();
        let names: BTreeSet<&str> = drills.iter().map(|drill| drill.name.as_str()).collect();
        assert_eq!(names.len(), drills.len());
        assert!(
            names.iter().all(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')),
            "{names:?}"
        );
        assert!(names.len() >= 50, "{}", names.len());
    }
}
