//! What the operator asks for, a hand-over among it, and the end. `docs/protocol.md`, section 7, "Hand-over".

use super::{
    Action, Command, Level, Record, TablesError, Wanted,
    shard::{Context, Part, Shard},
};
use crate::{
    control::{self, Located, MemberInfo},
    wire::{Endpoint, Op},
};

/// How long a hand-over waits for the successor's claim.
const TRANSFER_MS: u64 = 2000;

impl Shard {
    // Hand-over and stop.

    pub(super) fn check_transfer(&mut self, cx: &mut Context<'_>) {
        let Part::Serving(serving) = &mut self.part else { return };
        let Some((to, until_ms, id)) = serving.transfer else { return };
        if cx.now_ms >= until_ms {
            serving.transfer = None;
            let result = Err(format!("{to} has not taken over: start a coordinator there, with the same authority"));
            cx.out.push(Action::Reply { id, result });
            return;
        }
        self.ask_successor(cx, to);
    }

    /// Serves on meanwhile: the successor's claim, and then its fence, end that.
    pub(super) fn ask_successor(&self, cx: &mut Context<'_>, to: Endpoint) {
        let take_over = self.record().epoch;
        let padding = " ".repeat(control::OPEN_PADDING);
        let header = self.header(cx, Op::Locate, take_over);
        cx.send(to, control::emit(header, &control::Locate { take_over, padding }));
    }

    /// The coordinator on record asks this agent to take over. No role is needed for that: its holder wants it so, and the claim
    /// is a compare-and-swap.
    pub(super) fn invited(&mut self, cx: &mut Context<'_>, from: Endpoint, epoch: u32) -> Result<(), TablesError> {
        let Some(record) = &self.record else { return Ok(()) };
        if !matches!(self.part, Part::Standby) || record.coordinator() != Some(from) {
            return Ok(());
        }
        if record.epoch < epoch {
            cx.out.push(Action::Load { shard: self.id });
        }
        if record.epoch != epoch {
            return Ok(());
        }
        self.invited = Some(epoch);
        self.begin(cx)
    }

    /// Refuses everything from now on, then says so on record.
    fn leave(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        let Part::Serving(serving) = &self.part else { return Ok(()) };
        let config = self.config(serving, serving.epoch, &serving.must_ack, true);
        cx.tables.configure(&config)?;
        self.part = Part::Leaving { tenure: serving.tenure };
        if !self.is_storing() {
            self.store_leaving(cx);
        }
        Ok(())
    }

    /// No table of ours is of use any more: the record is settled, whatever it was.
    pub(super) fn store_leaving(&mut self, cx: &mut Context<'_>) {
        let record = self.record().clone();
        if !record.settled {
            self.store(cx, Record { settled: true, ..record }, Vec::new());
        }
    }

    /// The process is to end: what it serves is left, and what it was about to serve is not begun.
    pub(super) fn stop(&mut self, cx: &mut Context<'_>) -> Result<(), TablesError> {
        match self.part {
            Part::Forming | Part::TakingOver(_) => self.step_down(cx, "this agent is stopping"),
            _ => self.leave(cx),
        }
    }

    /// It left, and that is on record.
    pub(super) fn has_left(&self) -> bool {
        match &self.part {
            Part::Leaving { .. } => self.record.as_ref().is_none_or(|record| record.settled) && !self.is_storing(),
            Part::Serving(_) => false,
            _ => true,
        }
    }

    // The operator.

    pub(super) fn command(&mut self, cx: &mut Context<'_>, id: u64, command: Command) -> Result<(), TablesError> {
        let refuse = |cx: &mut Context<'_>, why: String| {
            cx.out.push(Action::Reply { id, result: Err(why) });
            Ok(())
        };
        let Some(record) = self.record.clone() else {
            return refuse(cx, format!("shard {} has no record: create it with `underpass shard create`", self.id));
        };
        let me = record.coordinator() == Some(cx.settings.listen);
        let begins_empty = matches!(command, Command::BeginEmpty);
        let coordinates = self.serves() && me;
        if record.epoch > 0 && !begins_empty && !coordinates {
            let at = record.coordinator().map_or("nobody".to_owned(), |at| at.to_string());
            return refuse(cx, format!("this agent does not coordinate shard {}; {at} does: ask there", self.id));
        }
        if self.is_storing() {
            return refuse(cx, "a change is under way, and the authority has not answered yet: try again".to_owned());
        }
        let mut next = record.clone();
        let text;
        match command {
            Command::Add(wanted) => {
                if record.wanted.contains(&wanted) {
                    let text = format!("replica {} ({}) is wanted already", wanted.id, wanted.endpoint());
                    cx.out.push(Action::Reply { id, result: Ok(text) });
                    return Ok(());
                }
                if let Some(other) =
                    record.wanted.iter().find(|other| other.id == wanted.id || other.endpoint() == wanted.endpoint())
                {
                    return refuse(
                        cx,
                        format!("replica {} is at {}: ids and addresses are unique", other.id, other.endpoint()),
                    );
                }
                text = format!(
                    "replica {} ({}) will be filled from the others, then take part",
                    wanted.id,
                    wanted.endpoint()
                );
                next.wanted.push(wanted);
            }
            Command::Remove { id: replica, lose_data } => {
                let Some(wanted) = record.wanted.iter().find(|wanted| wanted.id == replica).cloned() else {
                    return refuse(cx, format!("there is no replica {replica} in shard {}", self.id));
                };
                let active = |other: &&MemberInfo| other.active;
                let is_last = record.members.iter().filter(active).all(|member| member.id == replica);
                if is_last && record.epoch > 0 && record.members.iter().any(|member| member.id == replica) {
                    let flag = if lose_data {
                        "`underpass shard begin-empty` gives data up; removing it cannot"
                    } else {
                        "add and fill another first"
                    };
                    return refuse(
                        cx,
                        format!("replica {replica} ({}) is the last that holds the data: {flag}", wanted.endpoint()),
                    );
                }
                next.wanted.retain(|wanted| wanted.id != replica);
                if next.wanted.is_empty() {
                    return refuse(cx, "it is the last replica of the shard".to_owned());
                }
                let left = record.members.iter().filter(active).filter(|member| member.id != replica).count();
                if left == 1 && record.members.iter().any(|member| member.id == replica && member.active) && !lose_data
                {
                    return refuse(
                        cx,
                        "one replica alone would hold the data, and its loss would be theirs: say so with \
                         `--to-a-single-copy`, or add another first"
                            .to_owned(),
                    );
                }
                text = format!("replica {replica} ({}) is removed", wanted.endpoint());
            }
            Command::Promote { id: replica } => {
                let member = self.members.values().find(|member| member.info.id == replica);
                let result = match member {
                    None => Err(format!("replica {replica} is no member; `underpass members list` says why")),
                    Some(member) if member.info.active => Ok(format!("replica {replica} is active")),
                    Some(member) => match &member.copying {
                        Some(copying) if copying.trouble.is_empty() => Err(format!(
                            "replica {replica} has copied {} of about {} items: it becomes active by itself when it has \
                             them all, and not before",
                            copying.items, copying.of
                        )),
                        Some(copying) => Err(format!("replica {replica} cannot copy: {}", copying.trouble)),
                        None => Err(format!("replica {replica} is about to begin copying")),
                    },
                };
                cx.out.push(Action::Reply { id, result });
                return Ok(());
            }
            Command::Replace { id: replica, by } => {
                if !record.wanted.iter().any(|wanted| wanted.id == replica) {
                    return refuse(cx, format!("there is no replica {replica} in shard {}", self.id));
                }
                if record.wanted.iter().any(|other| other.id == by.id || other.endpoint() == by.endpoint()) {
                    return refuse(
                        cx,
                        format!("replica {} or its address {} is in the shard already", by.id, by.endpoint()),
                    );
                }
                text =
                    format!("replica {} ({}) will be filled, and then replica {replica} removed", by.id, by.endpoint());
                next.wanted.push(Wanted { replaces: Some(replica), ..by });
            }
            Command::Transfer { to } => {
                if to == cx.settings.listen {
                    return refuse(cx, format!("{to} is this coordinator"));
                }
                let Part::Serving(serving) = &mut self.part else {
                    return refuse(cx, format!("shard {} is not served yet", self.id));
                };
                if serving.epoch < record.epoch || !record.settled {
                    return refuse(cx, "a change of members is under way: try again when it is complete".to_owned());
                }
                serving.transfer = Some((to, cx.now_ms + TRANSFER_MS, id));
                self.ask_successor(cx, to);
                return Ok(());
            }
            Command::BeginEmpty => {
                let down = match &self.part {
                    Part::TakingOver(over) => !over.has_source(),
                    Part::Serving(_) => self.members.values().filter(|m| m.info.active).all(|m| m.lost),
                    _ => false,
                };
                if !down {
                    return refuse(
                        cx,
                        format!(
                            "shard {} is served, or may be once a replica that holds its data answers, or this agent does not \
                             hold the role: nothing is given up",
                            self.id
                        ),
                    );
                }
                next.given_up = record.epoch;
                text = format!("shard {}: what epoch {} held is given up; it begins empty", self.id, record.epoch);
                cx.log(Level::Error, text.clone());
                self.step_down(cx, "its data are given up")?;
            }
        }
        if next == record {
            cx.out.push(Action::Reply { id, result: Ok(text) });
            return Ok(());
        }
        self.store(cx, next, vec![(id, text)]);
        Ok(())
    }

    /// LOCATE: whom to ask.
    pub(super) fn locate(&self, cx: &Context<'_>) -> Option<Located> {
        let record = self.record.as_ref().filter(|record| record.epoch > 0)?;
        let serves = match &self.part {
            Part::Serving(serving) => cx.now_ms < serving.lease_until_ms,
            _ => false,
        };
        Some(Located { configuration: record.configuration(), serves })
    }
}
