//! From what clients told to the records of a history: which transaction a statement belonged to, and how that ended.

use super::clients::Told;
use super::clock::Micros;
use super::event::{Event, Lease, Op, Stamped};
use super::history::{Fate, Grant, History, Refusal, Release, Renewal, Sight, Write};
use super::report::Tally;

/// The history of a run; operations and refusals are counted on the way.
pub fn fold(told: &Told, tally: &mut Tally) -> History {
    let mut history = History::default();
    for (client, events) in told {
        let mut fold = Fold::new(*client, &mut history, tally);
        for stamped in events {
            fold.take(stamped);
        }
        fold.end();
    }
    history
}

/// What a transaction has done, its end still open.
enum Draft {
    Grant(Grant),
    Renewal(Renewal),
    Release(Release),
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
    txn: Option<Txn>,
    asked: Option<(Op, Micros)>,
}

impl<'a> Fold<'a> {
    fn new(client: usize, history: &'a mut History, tally: &'a mut Tally) -> Self {
        Self {
            client,
            history,
            tally,
            txn: None,
            asked: None,
        }
    }

    fn take(&mut self, stamped: &Stamped) {
        let at = stamped.at;
        match &stamped.event {
            Event::Connected(_) => {}
            Event::Asked(op) => {
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
        }
    }

    /// The client was killed, or its work is over.
    fn end(mut self) {
        let last = self.asked.as_ref().map_or(0, |(_, asked)| *asked);
        self.broken_off(last);
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
        match &mut self.txn {
            Some(txn) => txn.drafts.extend(drafts),
            None => self.file(drafts, Fate::Committed, asked, at, at),
        }
    }

    fn drafts_of(&mut self, op: &Op, asked: Micros, at: Micros, numbers: &[i64]) -> Vec<Draft> {
        let client = self.client;
        let first = numbers.first().copied();
        match (op, first) {
            (
                Op::Acquire {
                    resource,
                    ttl,
                    durable,
                },
                Some(token),
            ) => vec![Draft::Grant(Grant {
                client,
                lease: Lease {
                    resource: *resource,
                    token,
                },
                ttl: *ttl,
                durable: *durable,
                asked,
                answered: at,
                fate: Fate::Unknown,
                committed: at,
                open_until: at,
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
                from: asked,
                answered: at,
                fate: Fate::Unknown,
            })],
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
        let legal = match (sqlstate, asked.as_ref().map(|(op, _)| op)) {
            ("LH001" | "LH002" | "LH004", Some(Op::Write { .. } | Op::Fence { .. })) => true,
            ("LH006", Some(Op::Acquire { .. } | Op::Renew { .. })) => true,
            // a taker has ended the statement of a zombie
            ("57014", _) => self.txn.is_some(),
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
        self.refusal(leases, began, at, sqlstate);
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
        if let Some(txn) = &self.txn {
            self.refusal(txn.leases.clone(), txn.open, at, LOST);
        }
        self.broken_off(at);
    }

    /// The connection is gone, or the client.
    fn broken_off(&mut self, at: Micros) {
        let asked = self.asked.take();
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
        let events = (0..)
            .zip(lines)
            .map(|(at, line)| format!("{at} {line}").parse().expect(line));
        fold(&vec![(0, events.collect())], &mut Tally::default())
    }

    const ACQUIRE: &str = "acquire 1 100 1";

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
