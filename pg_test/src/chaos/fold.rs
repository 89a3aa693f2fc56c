//! From what clients told to the records of a history: which transaction a statement belonged to, and how that ended.

use std::collections::HashMap;

use super::clients::Told;
use super::clock::{Micros, millis};
use super::event::{ABANDONED, Acquire, Event, Lease, Op, Stamped};
use super::history::{
    Attempt, Break, Broken, Denial, Fate, Grant, History, Outcome, Refusal, Release, Renewal,
    Sight, Strike, Write,
};
use super::report::Tally;

/// For so long after it a statement may be one that the strike cancels.
const STRIKE_LATE: Micros = millis(2000);

/// The history of a run; operations and refusals are counted on the way. `strikes`: what was done to backends, so that it
/// is not taken for what a server does by itself.
pub fn fold(told: &Told, strikes: &[Strike], tally: &mut Tally) -> History {
    let mut history = History::default();
    for (client, events) in told {
        let mut fold = Fold::new(*client, strikes, &mut history, tally);
        for stamped in events {
            fold.take(stamped);
        }
        fold.end();
    }
    history.grants = one_of_each_request(std::mem::take(&mut history.grants));
    history
}

/// The same token as the answer to the same request is one grant, unless it was rolled back: then it was not to come back.
fn one_of_each_request(grants: Vec<Grant>) -> Vec<Grant> {
    let mut places: HashMap<(i64, Lease), usize> = HashMap::new();
    let mut all: Vec<Grant> = Vec::new();
    for grant in grants {
        let known = match grant.request {
            Some(request) if grant.fate != Fate::RolledBack => {
                let place = places.entry((request, grant.lease)).or_insert(all.len());
                all.get_mut(*place)
            }
            _ => None,
        };
        match known {
            Some(known) => *known = joined(known, &grant),
            None => all.push(grant),
        }
    }
    all
}

fn joined(one: &Grant, other: &Grant) -> Grant {
    let known = [one, other]
        .into_iter()
        .filter(|grant| grant.fate == Fate::Committed);
    let committed = known.map(|grant| grant.committed).min();
    Grant {
        durable: one.durable && other.durable,
        asked: one.asked.min(other.asked),
        answered: one.answered.min(other.answered),
        fate: committed.map_or(Fate::Unknown, |_| Fate::Committed),
        committed: committed.unwrap_or(Micros::MAX),
        open_until: one.open_until.max(other.open_until),
        ..*one
    }
}

/// What a transaction has done, its end still open.
enum Draft {
    Grant(Grant),
    Renewal(Renewal),
    Release(Release),
    Break(Break),
    Write(Write),
}

#[derive(Default)]
struct Txn {
    began: Micros,
    drafts: Vec<Draft>,
    /// How many drafts there were at each savepoint.
    savepoints: Vec<usize>,
    /// Leases that it has worked under.
    leases: Vec<Lease>,
    /// When it was last open for sure.
    open: Micros,
    /// A statement has failed: all is undone already, or all since the savepoint.
    failed: bool,
}

struct Fold<'a> {
    client: usize,
    history: &'a mut History,
    tally: &'a mut Tally,
    strikes: &'a [Strike],
    /// The backend of the session.
    pid: i32,
    txn: Option<Txn>,
    asked: Option<(Op, Micros)>,
    /// The requests so far: when the first was sent, and whether all were to be durable.
    requests: HashMap<i64, (Micros, bool)>,
    /// What was asked for last is a request that was asked for before.
    is_retry: bool,
}

impl<'a> Fold<'a> {
    fn new(
        client: usize,
        strikes: &'a [Strike],
        history: &'a mut History,
        tally: &'a mut Tally,
    ) -> Self {
        Self {
            client,
            history,
            tally,
            strikes,
            pid: 0,
            txn: None,
            asked: None,
            requests: HashMap::new(),
            is_retry: false,
        }
    }

    fn take(&mut self, stamped: &Stamped) {
        let at = stamped.at;
        match &stamped.event {
            Event::Connected(pid) => self.pid = *pid,
            Event::Asked(op) => {
                if let Op::Acquire(wanted) = op {
                    self.note_request(wanted, at);
                }
                if let (Op::Begin, None) = (op, &self.txn) {
                    self.txn = Some(Txn {
                        began: at,
                        open: at,
                        ..Txn::default()
                    });
                }
                self.asked = Some((op.clone(), at));
            }
            Event::Answered(numbers) => {
                if let Some((op, asked)) = self.asked.take() {
                    self.answered(&op, asked, at, numbers);
                }
            }
            Event::Refused { sqlstate, message } => self.refused(at, sqlstate, message),
            Event::Lost { sqlstate } => self.lost(at, sqlstate),
            Event::Ended => self.broken_off(at, Outcome::Open),
        }
    }

    fn note_request(&mut self, wanted: &Acquire, at: Micros) {
        self.is_retry = false;
        if let Some(request) = wanted.request {
            self.is_retry = self.requests.contains_key(&request);
            let (_, durable) = self.requests.entry(request).or_insert((at, true));
            *durable &= wanted.durable;
        }
    }

    /// The client was killed, or its work is over.
    fn end(mut self) {
        let last = self.asked.as_ref().map_or(0, |(_, asked)| *asked);
        self.broken_off(last, Outcome::Open);
    }

    fn answered(&mut self, op: &Op, asked: Micros, at: Micros, numbers: &[i64]) {
        self.tally.operation(op, numbers);
        if let Some(txn) = &mut self.txn {
            if !txn.failed {
                txn.open = asked;
            }
            txn.leases.extend(leases_of(op));
        }
        match op {
            Op::Begin => {}
            Op::Savepoint => self.in_txn(|txn| txn.savepoints.push(txn.drafts.len())),
            Op::ReleaseSavepoint => {
                self.in_txn(|txn| txn.savepoints.truncate(txn.savepoints.len() - 1))
            }
            Op::RollbackTo => {
                if let Some(mut txn) = self.txn.take() {
                    let undone = txn.savepoints.pop().unwrap_or(0);
                    let undone = txn.drafts.split_off(undone);
                    self.file(undone, Fate::RolledBack, asked, at, txn.open);
                    txn.failed = false;
                    self.txn = Some(txn);
                }
            }
            // cancelled, it has not waited for a standby, and is committed all the same
            Op::Commit if self.is_struck(asked, at) => {
                self.ended(Fate::Unknown, asked, Micros::MAX);
            }
            Op::Commit => self.ended(Fate::Committed, asked, at),
            Op::Rollback => self.ended(Fate::RolledBack, asked, at),
            _ => self.worked(op, asked, at, numbers),
        }
    }

    fn in_txn(&mut self, change: impl FnOnce(&mut Txn)) {
        if let Some(txn) = &mut self.txn {
            change(txn);
        }
    }
}

impl Fold<'_> {
    /// A statement that leaves a record, in a transaction or as one of its own.
    fn worked(&mut self, op: &Op, asked: Micros, at: Micros, numbers: &[i64]) {
        let drafts = self.drafts_of(op, asked, at, numbers);
        let is_struck = self.is_struck(asked, at);
        match &mut self.txn {
            Some(txn) => txn.drafts.extend(drafts),
            None if is_struck => self.file(drafts, Fate::Unknown, asked, Micros::MAX, at),
            None => self.file(drafts, Fate::Committed, asked, at, at),
        }
    }

    /// Whether a statement may have been cancelled, or its session ended, by others than leasehold.
    fn is_struck(&self, asked: Micros, at: Micros) -> bool {
        let own = self.strikes.iter().filter(|strike| strike.pid == self.pid);
        own.into_iter()
            .any(|strike| strike.from <= at && asked <= strike.until + STRIKE_LATE)
    }

    /// One that was ended may notice it late.
    fn is_struck_down(&self, at: Micros) -> bool {
        let mut own = self.strikes.iter().filter(|strike| strike.pid == self.pid);
        own.any(|strike| strike.ends && strike.from <= at)
    }

    fn drafts_of(&mut self, op: &Op, asked: Micros, at: Micros, numbers: &[i64]) -> Vec<Draft> {
        let client = self.client;
        let first = numbers.first().copied();
        match (op, first) {
            (Op::Acquire(wanted), _) => {
                self.attempt(
                    wanted,
                    asked,
                    at,
                    first.map_or(Outcome::Null, Outcome::Token),
                );
                let request = wanted
                    .request
                    .and_then(|request| self.requests.get(&request));
                let (asked, durable) = request.copied().unwrap_or((asked, wanted.durable));
                let grant = first.map(|token| Grant {
                    client,
                    lease: Lease {
                        resource: wanted.resource,
                        token,
                    },
                    request: wanted.request,
                    ttl: wanted.ttl,
                    durable,
                    asked,
                    answered: at,
                    fate: Fate::Unknown,
                    committed: at,
                    open_until: at,
                });
                grant.map(Draft::Grant).into_iter().collect()
            }
            (Op::Break { resource }, _) => vec![Draft::Break(Break {
                client,
                resource: *resource,
                said: first.map_or(Broken::Nothing, Broken::Token),
                asked,
                said_at: at,
                from: asked,
                answered: at,
                fate: Fate::Unknown,
            })],
            (Op::Renew { lease, ttl }, Some(answer)) => vec![Draft::Renewal(Renewal {
                client,
                lease: *lease,
                ttl: *ttl,
                asked,
                answered: at,
                renewed: answer == 1,
                fate: Fate::Unknown,
            })],
            (Op::Release { lease }, Some(1)) => vec![Draft::Release(Release {
                client,
                lease: *lease,
                asked,
                from: asked,
                answered: at,
                fate: Fate::Unknown,
            })],
            (Op::Release { lease }, _) => {
                self.history.denials.push(Denial {
                    client,
                    lease: *lease,
                    asked,
                    answered: at,
                });
                Vec::new()
            }
            (Op::See { lease }, Some(seq)) => {
                self.history.sights.push(Sight {
                    client,
                    lease: *lease,
                    seq,
                    asked,
                    answered: at,
                });
                Vec::new()
            }
            (Op::Write { id, leases }, _) => {
                let passed = leases.iter().zip(numbers);
                passed
                    .map(|(lease, seq)| self.write(*lease, *id, *seq, asked, at))
                    .collect()
            }
            (Op::Fence { lease }, _) => vec![self.write(*lease, 0, 0, asked, at)],
            _ => Vec::new(),
        }
    }

    fn attempt(&mut self, wanted: &Acquire, asked: Micros, answered: Micros, outcome: Outcome) {
        self.history.attempts.push(Attempt {
            client: self.client,
            pid: self.pid,
            resource: wanted.resource,
            request: wanted.request,
            is_retry: self.is_retry,
            wait: wanted.wait,
            ttl: wanted.ttl,
            asked,
            answered,
            outcome,
        });
    }

    /// What a statement that was not answered, or by an error, may have done all the same.
    fn unheard(&mut self, op: &Op, asked: Micros, at: Micros, outcome: Outcome) {
        match op {
            Op::Acquire(wanted) => self.attempt(wanted, asked, at, outcome),
            Op::Renew { lease, .. } => self.history.unheard_renewals.push((lease.token, at)),
            _ => {}
        }
    }

    fn write(&self, lease: Lease, id: i64, seq: i64, asked: Micros, passed: Micros) -> Draft {
        Draft::Write(Write {
            client: self.client,
            lease,
            id,
            seq,
            began: self.txn.as_ref().map_or(asked, |txn| txn.began),
            asked,
            passed,
            commit_asked: asked,
            answered: passed,
            fate: Fate::Unknown,
        })
    }

    /// The transaction has ended: its end was asked for and answered then.
    fn ended(&mut self, fate: Fate, asked: Micros, answered: Micros) {
        if let Some(txn) = self.txn.take() {
            self.file(txn.drafts, fate, asked, answered, txn.open);
        }
    }

    /// Files what was done, as of an end that was asked for at `asked` and was over at `answered`, of a transaction that was
    /// open for sure until `open`.
    fn file(
        &mut self,
        drafts: Vec<Draft>,
        fate: Fate,
        asked: Micros,
        answered: Micros,
        open: Micros,
    ) {
        for draft in drafts {
            match draft {
                Draft::Grant(grant) => self.history.grants.push(Grant {
                    fate,
                    committed: answered,
                    open_until: grant.open_until.max(open),
                    ..grant
                }),
                Draft::Renewal(renewal) => self.history.renewals.push(Renewal { fate, ..renewal }),
                Draft::Release(release) => self.history.releases.push(Release {
                    from: release.from.max(asked),
                    answered,
                    fate,
                    ..release
                }),
                Draft::Break(broken) => self.history.breaks.push(Break {
                    from: broken.from.max(asked),
                    answered,
                    fate,
                    ..broken
                }),
                Draft::Write(write) => self.history.writes.push(Write {
                    commit_asked: asked,
                    answered,
                    fate,
                    ..write
                }),
            }
        }
    }

    fn refused(&mut self, at: Micros, sqlstate: &str, message: &str) {
        let asked = self.asked.take();
        self.tally.refusal(sqlstate);
        // one that is not about a statement of note was sent not long before
        let is_struck = self.is_struck(asked.as_ref().map_or(at, |(_, asked)| *asked), at);
        if let Some((op, asked)) = &asked {
            let outcome = match sqlstate {
                "LH005" => Outcome::Shed,
                _ => Outcome::Failed,
            };
            self.unheard(op, *asked, at, outcome);
        }
        let legal = match (sqlstate, asked.as_ref().map(|(op, _)| op)) {
            ("LH001" | "LH002" | "LH004", Some(Op::Write { .. } | Op::Fence { .. })) => true,
            ("LH005", Some(Op::Acquire(wanted))) => wanted.wait > 0,
            ("LH006", Some(Op::Acquire(_) | Op::Renew { .. })) => true,
            // a taker has ended the statement of a zombie
            ("57014", _) => self.txn.is_some() || is_struck,
            _ => false,
        };
        if !legal {
            let op = asked.as_ref().map(|(op, _)| op.to_string());
            self.history.unexpected.push(format!(
                "client {}: {sqlstate} {message} from {}",
                self.client,
                op.unwrap_or_default()
            ));
        }
        let mut leases = asked.as_ref().map_or(Vec::new(), |(op, _)| leases_of(op));
        let mut began = asked.as_ref().map_or(at, |(_, asked)| *asked);
        if let (Some(txn), "57014") = (&self.txn, sqlstate) {
            leases = txn.leases.clone();
            began = txn.open;
        }
        if !(is_struck && sqlstate == "57014") {
            self.refusal(leases, began, at, sqlstate);
        }
        match asked {
            Some((Op::Commit, asked)) => self.ended(Fate::RolledBack, asked, at),
            _ => self.in_txn(|txn| txn.failed = true),
        }
    }

    fn refusal(&mut self, leases: Vec<Lease>, asked: Micros, answered: Micros, sqlstate: &str) {
        if !leases.is_empty() {
            self.history.refusals.push(Refusal {
                client: self.client,
                leases,
                asked,
                answered,
                sqlstate: sqlstate.to_owned(),
            });
        }
    }

    fn lost(&mut self, at: Micros, sqlstate: &str) {
        self.tally.refusal(&format!("connection lost, {sqlstate}"));
        if let Some(txn) = &self.txn
            && sqlstate != ABANDONED
            && !self.is_struck_down(at)
        {
            self.refusal(txn.leases.clone(), txn.open, at, LOST);
        }
        self.broken_off(at, Outcome::Lost);
        self.pid = 0;
    }

    /// The connection is gone, or the client: what becomes of an acquire that way.
    fn broken_off(&mut self, at: Micros, outcome: Outcome) {
        let asked = self.asked.take();
        if let Some((op, asked)) = &asked {
            self.unheard(op, *asked, at, outcome);
        }
        match (asked, &self.txn) {
            (Some((Op::Commit, asked)), Some(_)) => {
                self.tally.in_doubt += 1;
                self.ended(Fate::Unknown, asked, Micros::MAX);
            }
            (asked, Some(_)) => {
                let asked = asked.map_or(at, |(_, asked)| asked);
                self.ended(Fate::RolledBack, asked, at);
            }
            (Some((Op::Release { lease }, from)), None) => self.history.releases.push(Release {
                client: self.client,
                lease,
                asked: from,
                from,
                answered: Micros::MAX,
                fate: Fate::Unknown,
            }),
            (Some((Op::Break { resource }, from)), None) => self.history.breaks.push(Break {
                client: self.client,
                resource,
                said: Broken::Unheard,
                asked: from,
                said_at: Micros::MAX,
                from,
                answered: Micros::MAX,
                fate: Fate::Unknown,
            }),
            _ => {}
        }
    }
}

/// The SQLSTATE that stands for a connection that is gone: the server's last word does not always get through.
pub const LOST: &str = "08006";

fn leases_of(op: &Op) -> Vec<Lease> {
    match op {
        Op::Renew { lease, .. } | Op::Release { lease } | Op::Fence { lease } => vec![*lease],
        Op::Write { leases, .. } => leases.clone(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Lease = Lease {
        resource: 1,
        token: 10,
    };

    /// Each word is a line of a client at the time of its place.
    fn fold_lines(lines: &[&str]) -> History {
        fold_struck(lines, &[])
    }

    fn fold_struck(lines: &[&str], strikes: &[Strike]) -> History {
        let events = (0..)
            .zip(lines)
            .map(|(at, line)| format!("{at} {line}").parse().expect(line));
        fold(&vec![(0, events.collect())], strikes, &mut Tally::default())
    }

    const ACQUIRE: &str = "acquire 1 100 1 0 0 0";

    #[test]
    fn grant_of_its_own_counts_from_what_was_asked() {
        let history = fold_lines(&[ACQUIRE, "answered 10", ACQUIRE, "answered"]);
        let [grant] = history.grants[..] else {
            panic!("{history:?}")
        };
        assert_eq!((grant.lease, grant.asked, grant.committed), (LEASE, 0, 1));
        assert_eq!((grant.fate, grant.durable), (Fate::Committed, true));
    }

    #[test]
    fn block_ends_as_its_last_word_says() {
        let block = [
            "begin",
            "answered",
            ACQUIRE,
            "answered 10",
            "write 7 1 10",
            "answered 3",
        ];
        let ends: [(&[&str], Fate); 6] = [
            (&["commit", "answered"], Fate::Committed),
            (&["rollback", "answered"], Fate::RolledBack),
            (&["commit", "lost 08006"], Fate::Unknown),
            (&["commit"], Fate::Unknown),
            (&["commit", "refused 57014 no"], Fate::RolledBack),
            (&["lost 08006"], Fate::RolledBack),
        ];
        for (end, fate) in ends {
            let history = fold_lines(&[&block, end].concat());
            let ([grant], [write]) = (&history.grants[..], &history.writes[..]) else {
                panic!("{history:?}")
            };
            assert_eq!((grant.fate, write.fate), (fate, fate), "{end:?}");
            assert_eq!(
                (write.began, write.asked, write.passed, write.seq),
                (0, 4, 5, 3)
            );
            if fate == Fate::Committed {
                assert_eq!(
                    (write.commit_asked, write.answered, grant.committed),
                    (6, 7, 7)
                );
            }
        }
    }

    #[test]
    fn grant_that_is_undone_was_open_until_then() {
        let block = [
            "begin",
            "answered",
            ACQUIRE,
            "answered 10",
            "see 1 10",
            "answered 2",
        ];
        let ends: [(&[&str], Micros); 5] = [
            (&["rollback", "answered"], 6),
            (&["lost 08006"], 4),
            (&["rollback", "lost 08006"], 4),
            (&["commit", "lost 08006"], 4),
            // undone when it failed, not when that was answered
            (
                &["write 7 1 10", "refused LH004 over", "rollback", "answered"],
                4,
            ),
        ];
        for (end, open) in ends {
            let history = fold_lines(&[&block, end].concat());
            assert_eq!(history.grants[0].open_until, open, "{end:?}");
        }
    }

    /// An acquire of request 5, and the same again.
    const ASK: &str = "acquire 1 100 1 0 5 0";

    #[test]
    fn request_is_one_grant_that_counts_from_when_it_was_made_first() {
        let lost = [
            ASK,
            "lost 08006",
            "connected 3",
            ASK,
            "answered 10",
            ASK,
            "answered 10",
        ];
        let history = fold_lines(&lost);
        let [grant] = history.grants[..] else {
            panic!("{history:?}")
        };
        assert_eq!((grant.asked, grant.answered, grant.committed), (0, 4, 4));
        assert_eq!((grant.request, grant.lease), (Some(5), LEASE));
        let retries: Vec<(bool, Outcome)> = history
            .attempts
            .iter()
            .map(|attempt| (attempt.is_retry, attempt.outcome))
            .collect();
        assert_eq!(
            retries,
            [
                (false, Outcome::Lost),
                (true, Outcome::Token(10)),
                (true, Outcome::Token(10))
            ]
        );
        // any of them may be the one that was granted
        let memory = "acquire 1 100 0 0 5 0";
        for (one, other) in [(ASK, memory), (memory, ASK)] {
            let history = fold_lines(&[one, "lost 08006", other, "answered 10"]);
            assert!(!history.grants[0].durable);
        }
        // another token, another request
        for other in ["answered 11", "answered"] {
            assert_eq!(
                fold_lines(&[ASK, "answered 10", ASK, other]).grants[0].answered,
                1
            );
        }
        let another = "acquire 1 100 1 0 6 0";
        let history = fold_lines(&[ASK, "answered 10", another, "answered 10"]);
        assert_eq!(history.grants.len(), 2);
    }

    #[test]
    fn retry_tells_of_a_commit_that_was_not_heard_of_and_not_of_one_undone() {
        let block = ["begin", "answered", ASK, "answered 10"];
        let again = [ASK, "answered 10"];
        let history = fold_lines(&[&block[..], &["commit", "lost 08006"], &again].concat());
        let [grant] = history.grants[..] else {
            panic!("{history:?}")
        };
        assert_eq!(
            (grant.fate, grant.asked, grant.committed),
            (Fate::Committed, 2, 7)
        );
        let history = fold_lines(&[&block[..], &["rollback", "answered"], &again].concat());
        assert_eq!(history.grants.len(), 2, "the same token twice");
    }

    #[test]
    fn acquire_ends_in_some_way() {
        let wait = "acquire 1 100 1 50 0 0";
        for (end, outcome) in [
            (&["answered 10"][..], Outcome::Token(10)),
            (&["answered"], Outcome::Null),
            (&["refused LH005 full"], Outcome::Shed),
            (&["refused LH006 full"], Outcome::Failed),
            (&["lost abandoned"], Outcome::Lost),
            (&["ended"], Outcome::Open),
            (&[], Outcome::Open),
        ] {
            let history = fold_lines(&[&["connected 9", wait], end].concat());
            let [attempt] = history.attempts[..] else {
                panic!("{history:?}")
            };
            assert_eq!((attempt.outcome, attempt.pid), (outcome, 9));
            assert!(history.unexpected.is_empty());
        }
        // who does not wait is not shed
        assert_eq!(
            fold_lines(&[ACQUIRE, "refused LH005 full"])
                .unexpected
                .len(),
            1
        );
    }

    #[test]
    fn break_counts_from_its_own_end_or_that_of_its_block() {
        let history = fold_lines(&["break 1", "answered 10", "break 1", "answered"]);
        let said: Vec<Broken> = history.breaks.iter().map(|one| one.said).collect();
        assert_eq!(said, [Broken::Token(10), Broken::Nothing]);
        assert_eq!((history.breaks[0].from, history.breaks[0].answered), (0, 1));
        let block = ["begin", "answered", "break 1", "answered 10"];
        let ends: [(&[&str], Fate); 4] = [
            (&["commit", "answered"], Fate::Committed),
            (&["rollback", "answered"], Fate::RolledBack),
            (&["lost 08006"], Fate::RolledBack),
            (&["commit", "lost 08006"], Fate::Unknown),
        ];
        for (end, fate) in ends {
            let one = fold_lines(&[&block, end].concat()).breaks[0];
            assert_eq!(
                (one.fate, one.asked, one.said_at, one.from),
                (fate, 2, 3, 4)
            );
        }
        let history = fold_lines(&["break 1", "lost 08006"]);
        let one = history.breaks[0];
        assert_eq!((one.said, one.fate), (Broken::Unheard, Fate::Unknown));
    }

    #[test]
    fn strike_explains_what_it_has_done() {
        let strike = |pid: i32, ends: bool, from: Micros| Strike {
            pid,
            ends,
            from,
            until: from,
        };
        let wait = ["connected 9", "acquire 1 100 1 50 0 0", "refused 57014 no"];
        assert!(
            fold_struck(&wait, &[strike(9, false, 2)])
                .unexpected
                .is_empty()
        );
        assert_eq!(
            fold_struck(&wait, &[strike(9, false, 3)]).unexpected.len(),
            1
        );
        assert_eq!(
            fold_struck(&wait, &[strike(8, false, 2)]).unexpected.len(),
            1
        );
        // the session of a holder
        let block = ["connected 9", "begin", "answered", "fence 1 10", "answered"];
        for (end, ends) in [("lost 57P01", true), ("refused 57014 no", false)] {
            let lines = [&block[..], &[end]].concat();
            assert_eq!(fold_lines(&lines).refusals.len(), 1);
            let history = fold_struck(&lines, &[strike(9, ends, 4)]);
            assert!(history.refusals.is_empty() && history.unexpected.is_empty());
        }
        let lines = [&block[..], &["lost 57P01"]].concat();
        assert_eq!(
            fold_struck(&lines, &[strike(9, false, 4)]).refusals.len(),
            1
        );
        // a commit that did not wait for its standby
        let commits = [
            &["connected 9", ACQUIRE, "answered 10"][..],
            &[
                "connected 9",
                "begin",
                "answered",
                ACQUIRE,
                "answered 10",
                "commit",
                "answered",
            ],
        ];
        for lines in commits {
            assert_eq!(fold_lines(lines).grants[0].fate, Fate::Committed);
            let history = fold_struck(lines, &[strike(9, false, 0)]);
            assert_eq!(history.grants[0].fate, Fate::Unknown);
        }
    }

    #[test]
    fn who_does_not_wait_for_an_answer_was_not_ended() {
        let history = fold_lines(&[
            "begin",
            "answered",
            "fence 1 10",
            "answered",
            "lost abandoned",
        ]);
        assert!(history.refusals.is_empty());
        assert_eq!(history.writes[0].fate, Fate::RolledBack);
    }

    #[test]
    fn renewal_of_an_unknown_end_is_kept_and_a_release_that_was_refused() {
        for end in ["lost 08006", "refused LH006 full", "ended"] {
            assert_eq!(
                fold_lines(&["renew 1 10 5", end]).unheard_renewals,
                [(10, 1)]
            );
        }
        let history = fold_lines(&["release 1 10", "answered 0"]);
        assert_eq!((history.denials.len(), history.releases.len()), (1, 0));
    }

    #[test]
    fn savepoint_takes_with_it_what_came_after() {
        let write = ["write 7 1 10", "answered 3"];
        let lines = [
            &["begin", "answered"][..],
            &write,
            &["savepoint", "answered"],
            &write,
            &["rollback_to", "answered"],
            &write,
            &["savepoint", "answered"],
            &write,
            &["release_savepoint", "answered", "commit", "answered"],
        ]
        .concat();
        let fates: Vec<Fate> = fold_lines(&lines)
            .writes
            .iter()
            .map(|write| write.fate)
            .collect();
        assert_eq!(
            fates,
            [
                Fate::RolledBack,
                Fate::Committed,
                Fate::Committed,
                Fate::Committed
            ]
        );
    }

    #[test]
    fn release_counts_from_its_own_end_or_that_of_its_block() {
        let history = fold_lines(&["release 1 10", "answered 1", "release 1 10", "answered 0"]);
        let [release] = history.releases[..] else {
            panic!("{history:?}")
        };
        assert_eq!((release.from, release.answered), (0, 1));
        let block = [
            "begin",
            "answered",
            "release 1 10",
            "answered 1",
            "commit",
            "answered",
        ];
        let history = fold_lines(&block);
        assert_eq!(
            (history.releases[0].from, history.releases[0].answered),
            (4, 5)
        );
        let history = fold_lines(&["release 1 10"]);
        assert_eq!(history.releases[0].fate, Fate::Unknown);
    }

    #[test]
    fn refusal_names_the_leases_it_may_be_about() {
        let history = fold_lines(&[
            "begin",
            "answered",
            "write 7 1 10 2 11",
            "refused LH001 stale",
            "rollback",
            "answered",
        ]);
        assert_eq!(history.refusals[0].leases.len(), 2);
        assert!(history.writes.is_empty() && history.unexpected.is_empty());
        // a session that is ended in a block, and one in no block
        let history = fold_lines(&["begin", "answered", "fence 1 10", "answered", "lost 57P01"]);
        assert_eq!(history.refusals[0].leases, [LEASE]);
        assert!(
            fold_lines(&["renew 1 10 5", "lost 57P01"])
                .refusals
                .is_empty()
        );
    }

    #[test]
    fn answer_that_nobody_should_get_is_kept() {
        for lines in [
            &["renew 1 10 5", "refused LH001 no"][..],
            &["refused 57014 no"],
            &[
                "begin",
                "answered",
                "write 7 1 10",
                "refused 40P01 deadlock",
            ],
        ] {
            assert_eq!(fold_lines(lines).unexpected.len(), 1, "{lines:?}");
        }
    }
}
