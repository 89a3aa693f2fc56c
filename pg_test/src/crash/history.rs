//! What clients saw of one database, and whether a correct server can have answered so.
//!
//! Times are microseconds of a clock that no one can set, read by the clients: `invoked` before a statement is sent,
//! `answered` after its answer has come, so what the server did lies between. Where a connection broke before the
//! answer, nothing is concluded from it.
//!
//! A client may believe in a lease from the moment before it asked, for the TTL that it asked for: the server's own
//! count starts later. It believes once the commit has been acknowledged, and until it asks for the release.
//!
//! Invariant: a fault is only reported where no correct server can have produced the history.

use std::collections::{HashMap, HashSet};
use std::fmt;

pub type Micros = i64;
pub type Resource = usize;

/// How a transaction ended, as far as its client knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Committed,
    RolledBack,
    /// The connection broke while the commit was under way.
    Unknown,
}

/// An acquire_lease that answered with a token.
#[derive(Debug, Clone, Copy)]
pub struct Grant {
    pub resource: Resource,
    pub token: i64,
    pub ttl: Micros,
    pub invoked: Micros,
    pub answered: Micros,
    pub fate: Fate,
    /// Until when the transaction was open for sure, where it was rolled back on request.
    pub open_until: Micros,
}

/// A renew_lease, in a transaction of its own, that was answered.
#[derive(Debug, Clone, Copy)]
pub struct Renewal {
    pub token: i64,
    pub ttl: Micros,
    pub invoked: Micros,
    pub answered: Micros,
    pub renewed: bool,
}

/// A release_lease that may have ended the lease from `from` on.
#[derive(Debug, Clone, Copy)]
pub struct Release {
    pub token: i64,
    pub from: Micros,
    pub answered: Micros,
    pub fate: Fate,
}

/// A transaction that tried a fenced write.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    pub resource: Resource,
    pub token: i64,
    /// Unique in the history, and in the row.
    pub id: i64,
    pub began: Micros,
    /// When COMMIT was sent; meaningless for a rolled back one.
    pub commit_invoked: Micros,
    pub answered: Micros,
    pub fate: Fate,
    /// The fence refused it: it is rolled back.
    pub refused: bool,
}

/// What a holder read after it was granted its lease: the number of the last write.
#[derive(Debug, Clone, Copy)]
pub struct Sight {
    pub resource: Resource,
    pub token: i64,
    pub seq: i64,
}

#[derive(Debug, Default)]
pub struct History {
    pub grants: Vec<Grant>,
    pub renewals: Vec<Renewal>,
    pub releases: Vec<Release>,
    pub writes: Vec<Write>,
    pub sights: Vec<Sight>,
}

/// A row that a fenced write has left. `seq` counts the writes of its resource in the order of their commits.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub resource: Resource,
    pub seq: i64,
    pub token: i64,
    pub id: i64,
}

/// What the database holds when all is over.
#[derive(Debug, Default)]
pub struct End {
    pub rows: Vec<Row>,
    /// The counter that `seq` is drawn from, by resource.
    pub counters: HashMap<Resource, i64>,
    /// T_max of the ledger, by resource.
    pub ledger: HashMap<Resource, i64>,
    /// Position of the token sequence.
    pub position: i64,
    /// When the server was struck.
    pub blows: Vec<Micros>,
}

/// What a history can break.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// G2: a token was granted twice.
    TokenTwice,
    /// G2: a token was granted that is below one whose grant had been answered before.
    TokenFell,
    /// G1, G5: a resource was granted while its holder could still believe in its lease.
    GrantedEarly,
    /// G5: a lease was refused to a holder that could still believe in it.
    LostEarly,
    /// G3: a write committed that was sent to its commit when a newer token was known.
    StaleCommit,
    /// G3: in the order of commits, an older token comes after a newer one.
    TokensOfRowsFell,
    /// G7: a write committed that began after its lease had been released.
    WriteAfterRelease,
    /// G4: a holder did not see an earlier holder's write.
    WriteUnseen,
    /// An acknowledged write is not there.
    WriteLost,
    /// A row is there that no client wrote so, or whose write was refused or rolled back.
    RowUnexplained,
    /// G7: a row is there under a token whose grant was rolled back.
    RowOfUndoneGrant,
    /// The counter of a resource and its rows are not of one piece: a transaction was torn.
    TornTransaction,
    /// The ledger does not know of a committed grant, or of a row's token.
    LedgerBehind,
    /// The sequence is behind the ledger or a token that was handed out.
    SequenceBehind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub rule: Rule,
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)
    }
}

impl History {
    pub fn append(&mut self, mut other: Self) {
        self.grants.append(&mut other.grants);
        self.renewals.append(&mut other.renewals);
        self.releases.append(&mut other.releases);
        self.writes.append(&mut other.writes);
        self.sights.append(&mut other.sights);
    }

    /// Everything that no correct server can have done.
    pub fn faults(&self, end: &End) -> Vec<Fault> {
        let mut faults = Faults(Vec::new());
        self.check_tokens(&mut faults);
        self.check_beliefs(&mut faults);
        self.check_stale_commits(end, &mut faults);
        self.check_releases(end, &mut faults);
        self.check_rows(end, &mut faults);
        self.check_sights(end, &mut faults);
        self.check_ledger(end, &mut faults);
        faults.0
    }

    /// Grants over a lease that its holder had not released, by the committed grants of resources below `below`.
    pub fn takeovers(&self, below: Resource) -> usize {
        let ended: HashSet<i64> = self
            .releases
            .iter()
            .filter(|release| release.fate != Fate::RolledBack)
            .map(|release| release.token)
            .collect();
        self.committed_by_resource()
            .iter()
            .filter(|(resource, _)| **resource < below)
            .map(|(_, grants)| {
                let over = grants.iter().rev().skip(1);
                over.filter(|grant| !ended.contains(&grant.token)).count()
            })
            .sum()
    }

    /// Leases that were granted before one of the instants and successfully used after it.
    pub fn survivals(&self, instants: &[Micros]) -> usize {
        let used = self
            .writes
            .iter()
            .filter(|write| write.fate == Fate::Committed)
            .map(|write| (write.token, write.commit_invoked))
            .chain(
                self.renewals
                    .iter()
                    .filter(|renewal| renewal.renewed)
                    .map(|renewal| (renewal.token, renewal.invoked)),
            );
        let granted: HashMap<i64, Micros> = self
            .grants
            .iter()
            .map(|grant| (grant.token, grant.answered))
            .collect();
        used.filter(|(token, at)| {
            instants.iter().any(|instant| {
                instant < at && granted.get(token).is_some_and(|from| from < instant)
            })
        })
        .map(|(token, _)| token)
        .collect::<HashSet<_>>()
        .len()
    }

    /// Committed grants of each resource, by token.
    fn committed_by_resource(&self) -> HashMap<Resource, Vec<&Grant>> {
        let mut by_resource: HashMap<Resource, Vec<&Grant>> = HashMap::new();
        for grant in self.grants.iter().filter(|g| g.fate == Fate::Committed) {
            by_resource.entry(grant.resource).or_default().push(grant);
        }
        for grants in by_resource.values_mut() {
            grants.sort_by_key(|grant| grant.token);
        }
        by_resource
    }

    /// Whatever became of its transaction, an answered token counts.
    fn check_tokens(&self, faults: &mut Faults) {
        let mut seen = HashSet::new();
        for grant in self.grants.iter().filter(|grant| !seen.insert(grant.token)) {
            faults.add(Rule::TokenTwice, format!("{grant:?}"));
        }
        let mut asked: Vec<&Grant> = self.grants.iter().collect();
        asked.sort_by_key(|grant| grant.invoked);
        let mut answered = asked.clone();
        answered.sort_by_key(|grant| grant.answered);
        let mut answered = answered.into_iter().peekable();
        let mut highest: Option<&Grant> = None;
        for grant in asked {
            while let Some(before) = answered.next_if(|before| before.answered < grant.invoked) {
                if highest.is_none_or(|known| before.token > known.token) {
                    highest = Some(before);
                }
            }
            if let Some(known) = highest.filter(|known| known.token > grant.token) {
                faults.add(Rule::TokenFell, format!("{grant:?} after {known:?}"));
            }
        }
    }

    fn check_beliefs(&self, faults: &mut Faults) {
        let beliefs = Beliefs::of(self);
        let mut tokens: HashMap<Resource, Vec<&Grant>> = HashMap::new();
        for grant in &self.grants {
            tokens.entry(grant.resource).or_default().push(grant);
        }
        for grant in &self.grants {
            for next in tokens.get(&grant.resource).into_iter().flatten() {
                if next.token > grant.token && beliefs.hold(grant, next.answered) {
                    faults.add(Rule::GrantedEarly, format!("{next:?} within {grant:?}"));
                }
            }
        }
        let by_token: HashMap<i64, &Grant> = self.grants.iter().map(|g| (g.token, g)).collect();
        let renewals = self.renewals.iter().filter(|renewal| !renewal.renewed);
        let writes = self.writes.iter().filter(|write| write.refused);
        let refused = renewals
            .map(|renewal| (renewal.token, renewal.answered, format!("{renewal:?}")))
            .chain(writes.map(|write| (write.token, write.answered, format!("{write:?}"))));
        for (token, answered, what) in refused {
            if let Some(grant) = by_token.get(&token).filter(|g| beliefs.hold(g, answered)) {
                faults.add(Rule::LostEarly, format!("{what} within {grant:?}"));
            }
        }
    }

    /// Whether a write of unknown fate has committed is told by its row. T_max of a grant that did not commit may be
    /// forgotten once its transaction has ended, so that one counts only while it was open for sure.
    fn check_stale_commits(&self, end: &End, faults: &mut Faults) {
        let there: HashSet<i64> = end.rows.iter().map(|row| row.id).collect();
        for write in self.writes.iter().filter(|write| there.contains(&write.id)) {
            let newer = self.grants.iter().find(|grant| {
                grant.resource == write.resource
                    && grant.token > write.token
                    && grant.answered < write.commit_invoked
                    && (grant.fate == Fate::Committed || write.answered < grant.open_until)
            });
            if let Some(grant) = newer {
                faults.add(Rule::StaleCommit, format!("{write:?} after {grant:?}"));
            }
        }
    }

    /// A crash may forget a release, which delays the next holder and no more.
    fn check_releases(&self, end: &End, faults: &mut Faults) {
        let there: HashSet<i64> = end.rows.iter().map(|row| row.id).collect();
        let releases = self
            .releases
            .iter()
            .filter(|release| release.fate == Fate::Committed);
        let mut released: HashMap<i64, &Release> = HashMap::new();
        for release in releases {
            released.entry(release.token).or_insert(release);
        }
        for write in self.writes.iter().filter(|write| there.contains(&write.id)) {
            let Some(release) = released
                .get(&write.token)
                .filter(|r| r.answered < write.began)
            else {
                continue;
            };
            let struck = |blow: &Micros| release.from <= *blow && *blow <= write.answered;
            if !end.blows.iter().any(struck) {
                faults.add(
                    Rule::WriteAfterRelease,
                    format!("{write:?} after {release:?}"),
                );
            }
        }
    }

    fn check_rows(&self, end: &End, faults: &mut Faults) {
        let tried: HashMap<i64, &Write> = self.writes.iter().map(|w| (w.id, w)).collect();
        let undone: HashSet<i64> = self
            .grants
            .iter()
            .filter(|grant| grant.fate == Fate::RolledBack)
            .map(|grant| grant.token)
            .collect();
        for row in &end.rows {
            let explained = tried.get(&row.id).is_some_and(|write| {
                write.fate != Fate::RolledBack
                    && (write.resource, write.token) == (row.resource, row.token)
            });
            if !explained {
                let write = tried.get(&row.id);
                faults.add(Rule::RowUnexplained, format!("{row:?} by {write:?}"));
            }
            if undone.contains(&row.token) {
                faults.add(Rule::RowOfUndoneGrant, format!("{row:?}"));
            }
        }
        let there: HashSet<i64> = end.rows.iter().map(|row| row.id).collect();
        for write in &self.writes {
            if write.fate == Fate::Committed && !there.contains(&write.id) {
                faults.add(Rule::WriteLost, format!("{write:?}"));
            }
        }
        for (resource, counter) in &end.counters {
            check_order(*resource, *counter, &end.rows, faults);
        }
    }

    /// What a transaction has seen that was then rolled back binds nobody.
    fn check_sights(&self, end: &End, faults: &mut Faults) {
        let committed = self.grants.iter().filter(|g| g.fate == Fate::Committed);
        let committed: HashSet<i64> = committed.map(|grant| grant.token).collect();
        for sight in self
            .sights
            .iter()
            .filter(|sight| committed.contains(&sight.token))
        {
            let unseen = end.rows.iter().find(|row| {
                row.resource == sight.resource && row.token < sight.token && row.seq > sight.seq
            });
            if let Some(row) = unseen {
                faults.add(Rule::WriteUnseen, format!("{row:?} by {sight:?}"));
            }
        }
    }

    fn check_ledger(&self, end: &End, faults: &mut Faults) {
        let committed = self.grants.iter().filter(|g| g.fate == Fate::Committed);
        let known = committed
            .map(|grant| (grant.resource, grant.token))
            .chain(end.rows.iter().map(|row| (row.resource, row.token)));
        for (resource, token) in known {
            let t_max = end.ledger.get(&resource).copied().unwrap_or(0);
            if t_max < token {
                let what = format!("resource {resource} is at {t_max}, token {token} is known");
                faults.add(Rule::LedgerBehind, what);
            }
        }
        let handed = self.grants.iter().map(|grant| grant.token);
        let highest = handed.chain(end.ledger.values().copied()).max();
        if let Some(token) = highest.filter(|token| *token > end.position) {
            let what = format!("it is at {}, token {token} is known", end.position);
            faults.add(Rule::SequenceBehind, what);
        }
    }
}

/// What holders may believe in, by what they asked and heard.
struct Beliefs<'a> {
    /// From when a lease may have been ended by its holder.
    ended: HashMap<i64, Micros>,
    renewals: HashMap<i64, Vec<&'a Renewal>>,
}

impl<'a> Beliefs<'a> {
    fn of(history: &'a History) -> Self {
        let mut ended: HashMap<i64, Micros> = HashMap::new();
        for release in history
            .releases
            .iter()
            .filter(|r| r.fate != Fate::RolledBack)
        {
            let from = ended.entry(release.token).or_insert(release.from);
            *from = release.from.min(*from);
        }
        let mut renewals: HashMap<i64, Vec<&Renewal>> = HashMap::new();
        for renewal in history.renewals.iter().filter(|renewal| renewal.renewed) {
            renewals.entry(renewal.token).or_default().push(renewal);
        }
        Self { ended, renewals }
    }

    /// Whether the holder of a grant may believe at `now` that its lease is not over.
    fn hold(&self, grant: &Grant, now: Micros) -> bool {
        if grant.fate != Fate::Committed
            || self
                .ended
                .get(&grant.token)
                .is_some_and(|from| *from <= now)
        {
            return false;
        }
        let renewals = self.renewals.get(&grant.token).into_iter().flatten();
        renewals
            .filter(|renewal| renewal.invoked <= now)
            .map(|renewal| renewal.invoked + renewal.ttl)
            .fold(grant.invoked + grant.ttl, Micros::max)
            > now
    }
}

/// Rows of one resource: numbered without a gap up to the counter, under tokens that never fall.
fn check_order(resource: Resource, counter: i64, rows: &[Row], faults: &mut Faults) {
    let mut rows: Vec<&Row> = rows.iter().filter(|row| row.resource == resource).collect();
    rows.sort_by_key(|row| row.seq);
    if !rows.iter().map(|row| row.seq).eq(1..=counter) {
        let what = format!(
            "resource {resource}: the counter is at {counter}, there are {} rows",
            rows.len()
        );
        faults.add(Rule::TornTransaction, what);
    }
    for pair in rows.windows(2) {
        if let [before, after] = pair
            && after.token < before.token
        {
            faults.add(
                Rule::TokensOfRowsFell,
                format!("{after:?} after {before:?}"),
            );
        }
    }
}

struct Faults(Vec<Fault>);

impl Faults {
    fn add(&mut self, rule: Rule, what: String) {
        self.0.push(Fault { rule, what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const R: Resource = 0;

    /// Resource R: token 10 from 0 for 100, which writes twice and is taken over by 11 at 150; 11 writes and releases;
    /// 12 is rolled back; 13 goes on.
    fn sound() -> (History, End) {
        let history = History {
            grants: vec![
                grant(10, 0, 5, Fate::Committed),
                grant(11, 150, 155, Fate::Committed),
                grant(12, 210, 215, Fate::RolledBack),
                grant(13, 220, 225, Fate::Committed),
            ],
            renewals: vec![renewal(10, 40, 45, true), renewal(10, 150, 160, false)],
            releases: vec![Release {
                token: 11,
                from: 200,
                answered: 205,
                fate: Fate::Committed,
            }],
            writes: vec![
                write(10, 1, 50),
                write(10, 2, 140),
                write(11, 3, 190),
                refused(write(10, 4, 195)),
                write(13, 5, 240),
            ],
            sights: vec![
                Sight {
                    resource: R,
                    token: 11,
                    seq: 2,
                },
                Sight {
                    resource: R,
                    token: 13,
                    seq: 3,
                },
            ],
        };
        let end = End {
            rows: vec![row(1, 10, 1), row(2, 10, 2), row(3, 11, 3), row(4, 13, 5)],
            counters: HashMap::from([(R, 4)]),
            ledger: HashMap::from([(R, 13)]),
            position: 20,
            blows: Vec::new(),
        };
        (history, end)
    }

    fn grant(token: i64, invoked: Micros, answered: Micros, fate: Fate) -> Grant {
        Grant {
            resource: R,
            token,
            ttl: 100,
            invoked,
            answered,
            fate,
            open_until: if fate == Fate::RolledBack {
                answered + 3
            } else {
                0
            },
        }
    }

    fn renewal(token: i64, invoked: Micros, answered: Micros, renewed: bool) -> Renewal {
        Renewal {
            token,
            ttl: 100,
            invoked,
            answered,
            renewed,
        }
    }

    fn write(token: i64, id: i64, commit_invoked: Micros) -> Write {
        Write {
            resource: R,
            token,
            id,
            began: commit_invoked - 5,
            commit_invoked,
            answered: commit_invoked + 5,
            fate: Fate::Committed,
            refused: false,
        }
    }

    fn refused(write: Write) -> Write {
        Write {
            fate: Fate::RolledBack,
            refused: true,
            ..write
        }
    }

    fn row(seq: i64, token: i64, id: i64) -> Row {
        Row {
            resource: R,
            seq,
            token,
            id,
        }
    }

    #[track_caller]
    fn finds(plant: impl FnOnce(&mut History, &mut End), rules: &[Rule]) {
        let (mut history, mut end) = sound();
        plant(&mut history, &mut end);
        let found: HashSet<Rule> = history.faults(&end).iter().map(|f| f.rule).collect();
        assert_eq!(found, rules.iter().copied().collect());
    }

    #[test]
    fn sound_history_has_no_fault() {
        finds(|_, _| (), &[]);
    }

    #[test]
    fn sound_history_is_counted() {
        let (history, _) = sound();
        // 10 was taken over; 11 was released
        assert_eq!(history.takeovers(1), 1);
        assert_eq!(history.survivals(&[30]), 1);
        assert_eq!(history.survivals(&[145, 230]), 1);
        assert_eq!(history.survivals(&[300]), 0);
    }

    #[test]
    fn token_twice_is_found() {
        finds(
            |history, _| {
                history.grants.push(Grant {
                    resource: 7,
                    ..grant(12, 210, 216, Fate::RolledBack)
                })
            },
            &[Rule::TokenTwice],
        );
    }

    #[test]
    fn token_below_an_answered_one_is_found_across_resources() {
        finds(
            |history, _| {
                history.grants.push(Grant {
                    resource: 7,
                    ..grant(9, 6, 8, Fate::RolledBack)
                })
            },
            &[Rule::TokenFell],
        );
    }

    #[test]
    fn tokens_of_overlapping_grants_may_have_any_order() {
        finds(
            |history, _| {
                history.grants.push(Grant {
                    resource: 7,
                    ..grant(9, 5, 8, Fate::RolledBack)
                })
            },
            &[],
        );
    }

    #[test]
    fn grant_within_a_believed_lease_is_found() {
        finds(
            |history, _| history.grants[0].ttl = 156,
            &[Rule::GrantedEarly],
        );
    }

    #[test]
    fn grant_that_is_rolled_back_is_early_all_the_same() {
        finds(
            |history, _| history.releases[0].from = 216,
            &[Rule::GrantedEarly],
        );
    }

    #[test]
    fn renewal_prolongs_the_belief() {
        finds(
            |history, _| history.renewals[0].ttl = 116,
            &[Rule::GrantedEarly],
        );
    }

    #[test]
    fn renewal_of_a_superseded_lease_is_found() {
        finds(
            |history, _| history.renewals.push(renewal(10, 152, 170, true)),
            &[Rule::GrantedEarly, Rule::LostEarly],
        );
    }

    #[test]
    fn release_of_unknown_fate_ends_the_belief_and_a_rolled_back_one_does_not() {
        finds(|history, _| history.releases[0].fate = Fate::Unknown, &[]);
        finds(
            |history, _| history.releases[0].fate = Fate::RolledBack,
            &[Rule::GrantedEarly],
        );
    }

    #[test]
    fn grant_of_unknown_fate_is_not_believed_in() {
        finds(
            |history, _| {
                history.grants[0].ttl = 1000;
                history.grants[0].fate = Fate::Unknown;
            },
            &[],
        );
    }

    #[test]
    fn refusals_within_a_believed_lease_are_found() {
        finds(
            |history, _| history.renewals.push(renewal(13, 250, 260, false)),
            &[Rule::LostEarly],
        );
        finds(
            |history, _| history.writes.push(refused(write(13, 9, 250))),
            &[Rule::LostEarly],
        );
        finds(
            |history, _| history.writes.push(refused(write(13, 9, 350))),
            &[],
        );
    }

    #[test]
    fn stale_write_is_found_by_the_order_of_rows() {
        finds(
            |_, end| {
                end.rows[1].seq = 3;
                end.rows[2].seq = 2;
            },
            &[Rule::TokensOfRowsFell, Rule::WriteUnseen],
        );
    }

    #[test]
    fn stale_write_is_found_by_time_before_the_new_holder_writes() {
        finds(
            |history, _| history.writes[1].commit_invoked = 156,
            &[Rule::StaleCommit],
        );
        finds(
            |history, _| {
                history.writes[1].commit_invoked = 156;
                history.writes[1].fate = Fate::Unknown;
            },
            &[Rule::StaleCommit],
        );
    }

    #[test]
    fn commit_under_way_at_the_takeover_is_no_fault() {
        finds(|history, _| history.writes[1].commit_invoked = 155, &[]);
    }

    #[test]
    fn grant_that_is_rolled_back_closes_older_tokens_while_it_is_open() {
        let plant = |open_until: Micros| {
            move |history: &mut History, _: &mut End| {
                history.grants.push(Grant {
                    open_until,
                    ..grant(14, 232, 234, Fate::RolledBack)
                });
                history.grants[3].ttl = 5;
            }
        };
        finds(plant(250), &[Rule::StaleCommit]);
        finds(plant(244), &[]);
    }

    #[test]
    fn write_after_a_release_is_found_unless_the_server_was_struck_in_between() {
        finds(
            |history, _| history.releases[0].answered = 180,
            &[Rule::WriteAfterRelease],
        );
        finds(
            |history, end| {
                history.releases[0].from = 170;
                history.releases[0].answered = 180;
                end.blows = vec![182];
            },
            &[],
        );
    }

    #[test]
    fn unseen_write_is_found() {
        finds(|history, _| history.sights[0].seq = 1, &[Rule::WriteUnseen]);
        finds(
            |history, _| {
                history.sights[0].seq = 1;
                history.grants[1].fate = Fate::Unknown;
            },
            &[],
        );
    }

    #[test]
    fn lost_write_is_found() {
        finds(
            |_, end| {
                end.rows.pop();
                end.counters.insert(R, 3);
            },
            &[Rule::WriteLost],
        );
    }

    #[test]
    fn write_of_unknown_fate_may_be_there_or_not() {
        finds(|history, _| history.writes[4].fate = Fate::Unknown, &[]);
        finds(
            |history, end| {
                history.writes[4].fate = Fate::Unknown;
                end.rows.pop();
                end.counters.insert(R, 3);
            },
            &[],
        );
    }

    #[test]
    fn rows_that_nobody_wrote_so_are_found() {
        finds(
            |history, _| history.writes[4].fate = Fate::RolledBack,
            &[Rule::RowUnexplained],
        );
        finds(
            |_, end| end.rows[3].id = 99,
            &[Rule::RowUnexplained, Rule::WriteLost],
        );
        finds(
            |history, _| history.writes[4].token = 14,
            &[Rule::RowUnexplained],
        );
    }

    #[test]
    fn row_under_an_undone_grant_is_found() {
        finds(
            |history, end| {
                history.writes[4].token = 12;
                history.writes[4].commit_invoked = 218;
                end.rows[3].token = 12;
            },
            &[Rule::RowOfUndoneGrant, Rule::WriteUnseen],
        );
    }

    #[test]
    fn torn_transaction_is_found() {
        finds(
            |_, end| {
                end.counters.insert(R, 5);
            },
            &[Rule::TornTransaction],
        );
        finds(|_, end| end.rows[3].seq = 5, &[Rule::TornTransaction]);
    }

    #[test]
    fn ledger_and_sequence_behind_are_found() {
        finds(
            |_, end| {
                end.ledger.insert(R, 12);
            },
            &[Rule::LedgerBehind],
        );
        finds(|_, end| end.ledger.clear(), &[Rule::LedgerBehind]);
        finds(|_, end| end.position = 12, &[Rule::SequenceBehind]);
        finds(
            |_, end| {
                end.ledger.insert(7, 21);
            },
            &[Rule::SequenceBehind],
        );
    }
}
