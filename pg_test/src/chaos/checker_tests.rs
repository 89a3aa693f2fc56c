//! The checker tried on histories with planted faults: each rule has one that breaks it and is found, and near misses
//! that a correct server may well produce.

use std::collections::{HashMap, HashSet};

use super::checker::{Rule, faults, survivals, takeovers};
use super::clock::{Micros, millis};
use super::event::{Lease, Resource};
use super::history::{
    Attempt, Blow, Break, Broken, Denial, End, Fate, Grant, History, Look, Outcome, Record,
    Refusal, Release, Renewal, Row, Sight, State, Write,
};
use super::queues::granted_in_turn;
use super::requests::granted_before;
use super::work::Shape;

const R: Resource = 0;

/// Resource R: token 10 from 0 for 100, renewed, which writes twice and is taken over by 11 at 150; 11 writes and releases;
/// 12 is rolled back; 13 goes on.
fn sound() -> (History, End) {
    let history = History {
        grants: vec![
            grant(10, 0, 5),
            grant(11, 150, 155),
            undone(grant(12, 210, 215), 218),
            grant(13, 220, 225),
        ],
        renewals: vec![renewal(10, 40, 45, true), renewal(10, 150, 160, false)],
        releases: vec![Release {
            client: 1,
            lease: lease(11),
            asked: 200,
            from: 200,
            answered: 205,
            fate: Fate::Committed,
        }],
        writes: vec![
            write(10, 1, 1, 50),
            write(10, 2, 2, 140),
            write(11, 3, 3, 190),
            write(13, 5, 4, 240),
        ],
        refusals: vec![refusal("LH001", &[10], 195)],
        sights: vec![sight(11, 2, 160), sight(13, 3, 230)],
        ..History::default()
    };
    let end = End {
        rows: vec![
            row(1, 10, 1, Shape::Insert),
            row(2, 10, 2, Shape::Update),
            row(3, 11, 3, Shape::Delete),
            row(4, 13, 5, Shape::Copy),
        ],
        counters: HashMap::from([(R, 4)]),
        states: HashMap::from([(
            R,
            State {
                n: 1,
                id: 2,
                token: 10,
            },
        )]),
        items: HashMap::from([((R, 5), 13)]),
        ledger: HashMap::from([(R, 13)]),
        position: 20,
        max_ttl: 100,
        ..End::default()
    };
    (history, end)
}

fn lease(token: i64) -> Lease {
    Lease { resource: R, token }
}

fn grant(token: i64, asked: Micros, answered: Micros) -> Grant {
    Grant {
        client: 1,
        lease: lease(token),
        request: None,
        ttl: 100,
        durable: true,
        asked,
        answered,
        fate: Fate::Committed,
        committed: answered,
        open_until: answered,
    }
}

fn undone(grant: Grant, open_until: Micros) -> Grant {
    Grant {
        fate: Fate::RolledBack,
        open_until,
        ..grant
    }
}

fn elsewhere(grant: Grant) -> Grant {
    Grant {
        lease: Lease {
            resource: 7,
            ..grant.lease
        },
        ..grant
    }
}

fn renewal(token: i64, asked: Micros, answered: Micros, renewed: bool) -> Renewal {
    Renewal {
        client: 1,
        lease: lease(token),
        ttl: 100,
        asked,
        answered,
        renewed,
        fate: Fate::Committed,
    }
}

/// Begun and passed shortly before its commit was sent.
fn write(token: i64, id: i64, seq: i64, commit_asked: Micros) -> Write {
    Write {
        client: 1,
        lease: lease(token),
        id,
        seq,
        began: commit_asked - 5,
        asked: commit_asked - 4,
        passed: commit_asked - 3,
        commit_asked,
        answered: commit_asked + 5,
        fate: Fate::Committed,
    }
}

/// A fence() that passed at `passed`, in a block that did nothing.
fn fence(token: i64, passed: Micros) -> Write {
    Write {
        id: 0,
        fate: Fate::RolledBack,
        ..write(token, 0, 0, passed + 3)
    }
}

fn refusal(sqlstate: &str, tokens: &[i64], answered: Micros) -> Refusal {
    Refusal {
        client: 1,
        leases: tokens.iter().map(|token| lease(*token)).collect(),
        asked: answered - 2,
        answered,
        sqlstate: sqlstate.to_owned(),
    }
}

fn sight(token: i64, seq: i64, asked: Micros) -> Sight {
    Sight {
        client: 1,
        lease: lease(token),
        seq,
        asked,
        answered: asked + 1,
    }
}

/// A break in a statement of its own.
fn break_of(said: Broken, asked: Micros) -> Break {
    Break {
        client: 2,
        resource: R,
        said,
        asked,
        said_at: asked + 5,
        from: asked,
        answered: asked + 5,
        fate: Fate::Committed,
    }
}

fn denial(token: i64, asked: Micros) -> Denial {
    Denial {
        client: 1,
        lease: lease(token),
        asked,
        answered: asked + 5,
    }
}

fn attempt(asked: Micros, answered: Micros, outcome: Outcome) -> Attempt {
    Attempt {
        client: 1,
        pid: 1,
        resource: R,
        request: None,
        is_retry: false,
        wait: 0,
        ttl: 100,
        asked,
        answered,
        outcome,
    }
}

/// Of a request.
fn asked_by(request: i64, asked: Micros, outcome: Outcome) -> Attempt {
    Attempt {
        request: Some(request),
        ..attempt(asked, asked + 5, outcome)
    }
}

/// A call by the backend of that pid that waits, in milliseconds.
fn waits(pid: i32, asked: u64, answered: u64, wait: u64, outcome: Outcome) -> Attempt {
    Attempt {
        pid,
        wait: millis(wait),
        ..attempt(millis(asked), millis(answered), outcome)
    }
}

/// A look that was answered a millisecond after it was sent.
fn look(asked: u64, pids: &[i32]) -> Look {
    Look {
        resource: R,
        pids: pids.to_vec(),
        asked: millis(asked),
        answered: millis(asked + 1),
    }
}

fn row(seq: i64, token: i64, id: i64, shape: Shape) -> Row {
    Row {
        lease: lease(token),
        seq,
        id,
        shape,
    }
}

fn down(from: Micros, until: Micros) -> Blow {
    Blow::Down {
        from,
        start: from + 1,
        until,
    }
}

fn promotion(from: Micros, lossless: bool, lost_since: Option<Micros>) -> Blow {
    Blow::Promotion {
        from,
        start: from + 1,
        until: from + 2,
        lossless,
        lost_since,
    }
}

/// What is found in the sound history after a change, and that each fault is told by its piece alone.
#[track_caller]
fn finds(plant: impl FnOnce(&mut History, &mut End), rules: &[Rule]) {
    let (mut history, mut end) = sound();
    plant(&mut history, &mut end);
    are_found(&history, &end, rules);
}

/// The same in a history of nothing else, and an end that nobody has looked at.
#[track_caller]
fn only(plant: impl FnOnce(&mut History, &mut End), rules: &[Rule]) {
    let mut history = History::default();
    let mut end = End {
        ledger: HashMap::from([(R, Micros::MAX), (7, Micros::MAX)]),
        position: Micros::MAX,
        max_ttl: 100,
        ..End::default()
    };
    plant(&mut history, &mut end);
    are_found(&history, &end, rules);
}

#[track_caller]
fn are_found(history: &History, end: &End, rules: &[Rule]) {
    let found = faults(history, end);
    for fault in &found {
        piece_is_shortest(fault.rule, &fault.piece, end);
    }
    let found: HashSet<Rule> = found.iter().map(|fault| fault.rule).collect();
    assert_eq!(found, rules.iter().copied().collect());
}

#[track_caller]
fn piece_is_shortest(rule: Rule, piece: &[Record], end: &End) {
    let by_tables = [
        Rule::TornTransaction,
        Rule::LedgerBehind,
        Rule::SequenceBehind,
    ];
    if by_tables.contains(&rule) {
        return;
    }
    assert!(
        breaks(rule, piece, end),
        "{rule:?} is not told by {piece:?}"
    );
    for left_out in 0..piece.len() {
        let mut rest = piece.to_vec();
        let record = rest.remove(left_out);
        // the write shows in what the row is not as it was written
        let needed = rule != Rule::RowUnexplained || matches!(record, Record::Row(_));
        // it says in words what follows from what is not there
        let needed = needed && !matches!(record, Record::Fact(_));
        assert!(
            !needed || !breaks(rule, &rest, end),
            "{rule:?} does not need {record:?}"
        );
    }
}

/// Whether a history of these records alone breaks a rule.
fn breaks(rule: Rule, piece: &[Record], whole: &End) -> bool {
    let mut history = History::default();
    let mut end = End {
        max_ttl: whole.max_ttl,
        position: Micros::MAX,
        over: whole.over,
        ..End::default()
    };
    for record in piece {
        match record.clone() {
            Record::Grant(grant) => history.grants.push(grant),
            Record::Renewal(renewal) => history.renewals.push(renewal),
            Record::Release(release) => history.releases.push(release),
            Record::Write(write) => history.writes.push(write),
            Record::Refusal(refusal) => history.refusals.push(refusal),
            Record::Sight(sight) => history.sights.push(sight),
            Record::Attempt(attempt) => history.attempts.push(attempt),
            Record::Denial(denial) => history.denials.push(denial),
            Record::Break(broken) => history.breaks.push(broken),
            Record::Look(look) => history.looks.push(look),
            Record::Row(row) => {
                end.rows.push(row);
                end.counters.insert(row.lease.resource, 0);
            }
            Record::Blow(blow) => end.blows.push(blow),
            Record::Fact(_) => {}
        }
    }
    faults(&history, &end)
        .iter()
        .any(|fault| fault.rule == rule)
}

#[test]
fn sound_history_has_no_fault() {
    finds(|_, _| (), &[]);
}

#[test]
fn sound_history_is_counted() {
    let (history, _) = sound();
    // 10 was taken over; 11 was released
    assert_eq!(takeovers(&history, 1), 1);
    assert_eq!(takeovers(&history, 0), 0);
    assert_eq!(survivals(&history, &[down(30, 35)]), 1);
    assert_eq!(survivals(&history, &[down(100, 105), down(230, 235)]), 2);
    assert_eq!(survivals(&history, &[down(300, 305)]), 0);
}

#[test]
fn lease_that_was_broken_is_not_taken_over() {
    let (mut history, _) = sound();
    history.breaks = vec![break_of(Broken::Token(10), 145)];
    assert_eq!(takeovers(&history, 1), 0);
    history.breaks[0].fate = Fate::RolledBack;
    assert_eq!(takeovers(&history, 1), 1);
}

#[test]
fn waits_and_retries_are_counted() {
    let again = |asked: Micros, token: i64| Attempt {
        is_retry: true,
        ..asked_by(7, asked, Outcome::Token(token))
    };
    let first = asked_by(7, 10, Outcome::Token(20));
    let lost = asked_by(7, 10, Outcome::Lost);
    let other = attempt(20, 25, Outcome::Token(21));
    for (attempts, times) in [
        (vec![first, again(16, 20)], 1),
        (vec![first, again(15, 20)], 0),
        (vec![first, again(30, 22)], 0),
        // the answer was lost, and a higher token was told to another meanwhile, or not
        (vec![lost, other, again(30, 20)], 1),
        (vec![lost, other, again(25, 20)], 0),
        (vec![lost, other, again(30, 22)], 0),
    ] {
        let history = History {
            attempts,
            ..History::default()
        };
        assert_eq!(granted_before(&history), times, "{history:?}");
    }
    let mut history = History {
        attempts: vec![
            waits(1, 0, 50, 100, Outcome::Token(20)),
            waits(2, 0, 100, 100, Outcome::Null),
        ],
        ..History::default()
    };
    assert_eq!(granted_in_turn(&history), 0);
    history.looks = vec![look(20, &[1, 2]), look(30, &[1, 2])];
    assert_eq!(granted_in_turn(&history), 1);
}

// --- tokens

#[test]
fn token_twice_is_found() {
    finds(
        |history, _| {
            history
                .grants
                .push(elsewhere(undone(grant(12, 210, 216), 217)))
        },
        &[Rule::TokenTwice],
    );
}

#[test]
fn token_below_an_answered_one_is_found_across_resources() {
    finds(
        |history, _| history.grants.push(elsewhere(undone(grant(9, 6, 8), 8))),
        &[Rule::TokenFell],
    );
    // their grants overlap
    finds(
        |history, _| history.grants.push(elsewhere(undone(grant(9, 5, 8), 8))),
        &[],
    );
}

#[test]
fn token_that_falls_with_a_promotion_is_found() {
    let fallen = elsewhere(undone(grant(9, 160, 165), 165));
    for lossless in [true, false] {
        only(
            |history, end| {
                history.grants = vec![grant(10, 0, 5), fallen];
                end.blows = vec![promotion(50, lossless, Some(0))];
            },
            &[Rule::TokenFell],
        );
    }
}

// --- one holder

#[test]
fn grant_within_a_believed_lease_is_found() {
    finds(
        |history, _| history.grants[0].ttl = 156,
        &[Rule::GrantedEarly],
    );
    // granted at its last moment
    finds(|history, _| history.grants[0].ttl = 155, &[]);
}

#[test]
fn belief_counts_from_the_request_and_not_from_the_answer() {
    let plant = |ttl: Micros| {
        move |history: &mut History, _: &mut End| {
            let first = Grant {
                ttl,
                ..grant(10, 10, 100)
            };
            history.grants = vec![first, grant(11, 150, 155)];
        }
    };
    only(plant(145), &[]);
    only(plant(146), &[Rule::GrantedEarly]);
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
    finds(|history, _| history.renewals[0].ttl = 115, &[]);
    for fate in [Fate::RolledBack, Fate::Unknown] {
        finds(
            |history, _| {
                history.renewals[0].ttl = 116;
                history.renewals[0].fate = fate;
            },
            &[],
        );
    }
}

#[test]
fn restart_and_promotion_do_not_end_a_belief() {
    let plant = |durable: bool, blow: Blow| {
        move |history: &mut History, end: &mut End| {
            history.grants[0].ttl = 156;
            history.grants[0].durable = durable;
            end.blows = vec![blow];
            // told after the answer: no refusal within the belief
            history.renewals.pop();
        }
    };
    finds(plant(true, down(142, 149)), &[Rule::GrantedEarly]);
    finds(plant(false, down(142, 149)), &[Rule::GrantedEarly]);
    finds(
        plant(false, promotion(142, true, None)),
        &[Rule::GrantedEarly],
    );
}

#[test]
fn renewal_of_a_superseded_lease_is_found() {
    // told by the overlap alone
    finds(
        |history, _| history.renewals.push(renewal(10, 152, 170, true)),
        &[Rule::GrantedEarly, Rule::LostEarly],
    );
    // a newer grant that is undone later counts as long as it is open
    for (newer, rules) in [
        (grant(11, 150, 155), &[Rule::RenewedStale][..]),
        (undone(grant(11, 150, 155), 171), &[Rule::RenewedStale]),
        (undone(grant(11, 150, 155), 170), &[]),
    ] {
        only(
            |history, _| {
                history.grants = vec![grant(10, 0, 5), newer];
                history.renewals = vec![renewal(10, 156, 170, true)];
            },
            rules,
        );
    }
}

#[test]
fn release_ends_the_belief_when_it_is_asked_for() {
    // of unknown fate it may have done its work, one that is rolled back has not
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

// --- breaks

#[test]
fn break_ends_the_belief_when_it_is_asked_for() {
    let plant = |broken: Break| {
        move |history: &mut History, _: &mut End| {
            history.grants = vec![
                Grant {
                    ttl: 156,
                    ..grant(10, 0, 5)
                },
                grant(11, 150, 155),
            ];
            history.breaks = vec![broken];
        }
    };
    let broken = break_of(Broken::Token(10), 145);
    only(plant(broken), &[]);
    let fate = |fate: Fate| Break { fate, ..broken };
    only(plant(fate(Fate::Unknown)), &[]);
    only(plant(fate(Fate::RolledBack)), &[Rule::GrantedEarly]);
    // its commit was sent after the grant
    let later = Break {
        from: 156,
        answered: 160,
        ..broken
    };
    only(plant(later), &[Rule::GrantedEarly]);
    only(
        plant(break_of(Broken::Token(9), 145)),
        &[Rule::GrantedEarly, Rule::BreakMissed],
    );
}

#[test]
fn break_that_was_not_heard_of_may_have_ended_any_lease_of_its_resource() {
    let plant = |broken: Break, blows: Vec<Blow>| {
        move |history: &mut History, end: &mut End| {
            history.grants = vec![
                Grant {
                    ttl: 156,
                    ..grant(10, 0, 5)
                },
                grant(11, 150, 155),
            ];
            history.breaks = vec![broken];
            end.blows = blows;
        }
    };
    let unheard = |asked: Micros| Break {
        answered: Micros::MAX,
        fate: Fate::Unknown,
        ..break_of(Broken::Unheard, asked)
    };
    only(plant(unheard(145), vec![]), &[]);
    only(plant(unheard(-50), vec![]), &[]);
    only(plant(unheard(156), vec![]), &[Rule::GrantedEarly]);
    // its backend was gone before the lease was granted
    only(
        plant(unheard(-50), vec![down(-40, -30)]),
        &[Rule::GrantedEarly],
    );
    only(plant(unheard(-50), vec![down(-60, -30)]), &[]);
    let elsewhere = Break {
        resource: 7,
        ..unheard(145)
    };
    only(plant(elsewhere, vec![]), &[Rule::GrantedEarly]);
}

#[test]
fn token_of_a_broken_lease_that_is_good_for_something_is_found() {
    type Plant = fn(&mut History, Micros);
    let plants: [Plant; 4] = [
        |history, began| history.writes.push(write(10, 9, 1, began + 5)),
        |history, began| history.writes.push(fence(10, began + 2)),
        |history, asked| history.renewals.push(renewal(10, asked, asked + 5, true)),
        |history, asked| {
            history.releases.push(Release {
                client: 1,
                lease: lease(10),
                asked,
                from: asked,
                answered: asked + 5,
                fate: Fate::Committed,
            });
        },
    ];
    for plant in plants {
        let broken = |fate: Fate, blows: Vec<Blow>, asked: Micros, rules: &[Rule]| {
            only(
                |history, end| {
                    history.grants = vec![grant(10, 0, 5)];
                    let broken = break_of(Broken::Token(10), 20);
                    history.breaks = vec![Break { fate, ..broken }];
                    plant(history, asked);
                    let writes = history.writes.iter_mut();
                    writes.for_each(|write| write.fate = Fate::RolledBack);
                    end.blows = blows;
                },
                rules,
            );
        };
        let found = &[Rule::BrokenTokenUsed];
        broken(Fate::Committed, vec![], 26, found);
        // let in before that was answered, it may go on
        broken(Fate::Committed, vec![], 25, &[]);
        broken(Fate::RolledBack, vec![], 26, &[]);
        broken(Fate::Unknown, vec![], 26, &[]);
        // over a restart too, and a promotion, unless that loses it
        broken(Fate::Committed, vec![down(27, 30)], 40, found);
        broken(Fate::Committed, vec![promotion(27, true, None)], 40, found);
        broken(
            Fate::Committed,
            vec![promotion(27, true, Some(26))],
            40,
            found,
        );
        broken(
            Fate::Committed,
            vec![promotion(27, true, Some(25))],
            40,
            &[],
        );
    }
}

#[test]
fn lease_that_was_released_before_it_was_broken_may_be_released_again() {
    for (first, rules) in [(24, &[][..]), (26, &[Rule::BrokenTokenUsed])] {
        only(
            |history, _| {
                history.grants = vec![grant(10, 0, 5)];
                history.breaks = vec![break_of(Broken::Token(10), 20)];
                history.releases = vec![release(10, first), release(10, 50)];
            },
            rules,
        );
    }
}

#[test]
fn break_that_does_not_find_a_lease_is_found() {
    for said in [Broken::Nothing, Broken::Token(11)] {
        let broken = |asked: Micros| {
            move |history: &mut History, _: &mut End| {
                history.breaks.push(Break {
                    fate: Fate::RolledBack,
                    ..break_of(said, asked)
                });
            }
        };
        finds(broken(230), &[Rule::BreakMissed]);
        // it ran out meanwhile; it was granted meanwhile
        finds(broken(316), &[]);
        finds(broken(224), &[]);
    }
    finds(
        |history, _| history.breaks.push(break_of(Broken::Token(13), 245)),
        &[],
    );
    finds(
        |history, _| history.breaks.push(break_of(Broken::Nothing, 206)),
        &[],
    );
    // a lease in memory that the server has lost
    only(
        |history, end| {
            history.grants = vec![Grant {
                durable: false,
                ..grant(10, 0, 5)
            }];
            history.breaks = vec![break_of(Broken::Nothing, 40)];
            end.blows = vec![down(20, 30)];
        },
        &[],
    );
}

// --- what is asked for again

/// The sound history, where 13 was granted to request 7.
#[track_caller]
fn retried(attempt: Attempt, plant: impl FnOnce(&mut History, &mut End), rules: &[Rule]) {
    finds(
        |history, end| {
            history.grants[3].request = Some(7);
            history.attempts.push(attempt);
            plant(history, end);
        },
        rules,
    );
}

#[test]
fn retry_that_does_not_get_its_lease_is_found() {
    for outcome in [Outcome::Null, Outcome::Shed, Outcome::Token(14)] {
        retried(asked_by(7, 240, outcome), |_, _| (), &[Rule::RetryForgot]);
        // another request; the first answer had not come; the lease ran out meanwhile
        retried(asked_by(8, 240, outcome), |_, _| (), &[]);
        retried(asked_by(7, 225, outcome), |_, _| (), &[]);
        retried(asked_by(7, 316, outcome), |_, _| (), &[]);
        // it may have been released, or broken, meanwhile
        let released = |history: &mut History, _: &mut End| {
            history.releases.push(release(13, 244));
        };
        retried(asked_by(7, 240, outcome), released, &[]);
        let broken = |history: &mut History, _: &mut End| {
            history.breaks.push(break_of(Broken::Token(13), 245));
        };
        retried(asked_by(7, 240, outcome), broken, &[]);
        // over a restart, of a lease that is durable
        let restart = |_: &mut History, end: &mut End| end.blows = vec![down(246, 250)];
        retried(asked_by(7, 260, outcome), restart, &[Rule::RetryForgot]);
        let in_memory = |history: &mut History, end: &mut End| {
            history.grants[3].durable = false;
            end.blows = vec![down(246, 250)];
        };
        retried(asked_by(7, 260, outcome), in_memory, &[]);
    }
    for outcome in [Outcome::Token(13), Outcome::Lost, Outcome::Failed] {
        retried(asked_by(7, 240, outcome), |_, _| (), &[]);
    }
}

#[test]
fn retry_that_gets_a_lease_that_is_over_is_found() {
    let again = |asked: Micros| asked_by(7, asked, Outcome::Token(13));
    let found = &[Rule::RetryRevived];
    // 13 was committed by 225, for 100; what is asked again within that time restarts nothing
    retried(again(325), |_, _| (), &[]);
    retried(again(326), |_, _| (), found);
    retried(
        again(326),
        |history, _| history.attempts.push(again(324)),
        found,
    );
    retried(
        again(326),
        |h, _| h.renewals.push(renewal(13, 250, 260, true)),
        &[],
    );
    retried(
        again(361),
        |h, _| h.renewals.push(renewal(13, 250, 260, true)),
        found,
    );
    retried(
        again(326),
        |history, _| history.unheard_renewals.push((13, 250)),
        &[],
    );
    retried(again(326), |_, end| end.blows = vec![down(246, 250)], &[]);
    // released, or broken
    retried(
        again(276),
        |history, _| history.releases.push(release(13, 270)),
        found,
    );
    retried(
        again(275),
        |history, _| history.releases.push(release(13, 270)),
        &[],
    );
    // a crash may forget the release
    let forgotten = |history: &mut History, end: &mut End| {
        history.releases.push(release(13, 270));
        end.blows = vec![down(276, 280)];
    };
    retried(again(290), forgotten, &[]);
    let broken = |history: &mut History, end: &mut End| {
        history.breaks.push(break_of(Broken::Token(13), 270));
        end.blows = vec![down(276, 280)];
    };
    retried(again(290), broken, found);
    // a newer one was granted
    let newer = |history: &mut History, end: &mut End| {
        history.grants[3].ttl = 60;
        history.grants.push(grant(14, 285, 289));
        end.ledger.insert(R, 14);
        end.blows = vec![down(246, 250)];
    };
    retried(again(290), newer, found);
    retried(again(289), newer, &[]);
}

#[test]
fn second_live_token_of_one_request_is_found() {
    only(
        |history, _| {
            let first = Grant {
                request: Some(7),
                ..grant(10, 0, 5)
            };
            let second = Grant {
                request: Some(7),
                ..grant(11, 50, 55)
            };
            history.grants = vec![first, second];
            history.attempts = vec![
                asked_by(7, 0, Outcome::Token(10)),
                asked_by(7, 50, Outcome::Token(11)),
            ];
        },
        &[Rule::GrantedEarly, Rule::RetryForgot],
    );
}

fn release(token: i64, asked: Micros) -> Release {
    Release {
        client: 1,
        lease: lease(token),
        asked,
        from: asked,
        answered: asked + 5,
        fate: Fate::Committed,
    }
}

#[test]
fn release_that_is_refused_is_found() {
    // 13 lives
    finds(
        |history, _| history.denials.push(denial(13, 250)),
        &[Rule::LostEarly],
    );
    finds(|history, _| history.denials.push(denial(13, 320)), &[]);
    // 11 had not run out when it was released, and nothing newer was asked for yet
    let again = |asked: Micros| {
        move |history: &mut History, end: &mut End| {
            history.grants = vec![grant(11, 150, 155)];
            history.releases = vec![release(11, 180)];
            history.denials = vec![denial(11, asked)];
            end.blows = vec![down(300, 310)];
        }
    };
    let found = &[Rule::ReleaseForgotten];
    only(again(200), found);
    only(again(180), found);
    only(again(250), &[]);
    for fate in [Fate::Unknown, Fate::RolledBack] {
        let rules = match fate {
            Fate::RolledBack => &[Rule::LostEarly],
            _ => found,
        };
        only(
            |history, end| {
                again(200)(history, end);
                history.releases[0].fate = fate;
            },
            rules,
        );
    }
    // it is forgotten, or something newer may have been granted, heard of or not
    type Plant = fn(&mut History, &mut End);
    let excuses: [Plant; 6] = [
        |history, _| history.grants[0].durable = false,
        |history, _| history.grants.push(undone(grant(12, 204, 210), 211)),
        |history, _| history.attempts.push(attempt(204, 206, Outcome::Lost)),
        |history, _| history.attempts.push(attempt(204, 206, Outcome::Failed)),
        |history, _| history.attempts.push(attempt(100, 140, Outcome::Lost)),
        |history, _| history.breaks.push(break_of(Broken::Token(11), 204)),
    ];
    for excuse in excuses {
        only(
            |history, end| {
                again(200)(history, end);
                excuse(history, end);
            },
            &[],
        );
    }
    only(
        |history, end| {
            again(200)(history, end);
            history.attempts = vec![
                attempt(206, 207, Outcome::Lost),
                attempt(190, 195, Outcome::Null),
                attempt(190, 195, Outcome::Shed),
            ];
        },
        found,
    );
}

// --- queues

#[track_caller]
fn queue(attempts: &[Attempt], looks: &[Look], disturbed: &[(u64, u64)], rules: &[Rule]) {
    only(
        |history, end| {
            history.attempts = attempts.to_vec();
            history.looks = looks.to_vec();
            let disturbed = disturbed
                .iter()
                .map(|(from, to)| (millis(*from), millis(*to)));
            end.disturbed = disturbed.collect();
            end.over = millis(200_000);
        },
        rules,
    );
}

#[test]
fn call_that_lasts_longer_than_its_wait_is_found() {
    let found = &[Rule::WaitedTooLong];
    for (outcome, allowed) in [
        (Outcome::Null, 10_000),
        (Outcome::Shed, 10_000),
        (Outcome::Failed, 10_000),
        (Outcome::Token(10), 30_000),
        (Outcome::Open, 30_000),
    ] {
        queue(&[waits(1, 0, allowed + 500, 500, outcome)], &[], &[], &[]);
        queue(&[waits(1, 0, allowed + 501, 500, outcome)], &[], &[], found);
        queue(&[waits(1, 0, allowed + 1, 0, outcome)], &[], &[], found);
    }
    // the answer was lost, and that was not noticed for a while
    queue(&[waits(1, 0, 100_000, 500, Outcome::Lost)], &[], &[], &[]);
    // stopped for good at the end of the run
    queue(
        &[waits(1, 190_000, 290_000, 500, Outcome::Open)],
        &[],
        &[],
        &[],
    );
}

#[test]
fn call_that_gives_up_early_is_found() {
    queue(&[waits(1, 0, 500, 500, Outcome::Null)], &[], &[], &[]);
    queue(
        &[waits(1, 0, 499, 500, Outcome::Null)],
        &[],
        &[],
        &[Rule::GaveUpEarly],
    );
    for outcome in [
        Outcome::Shed,
        Outcome::Token(10),
        Outcome::Failed,
        Outcome::Lost,
    ] {
        queue(&[waits(1, 0, 499, 500, outcome)], &[], &[], &[]);
    }
}

#[test]
fn grant_to_who_came_later_is_found() {
    let found = &[Rule::OutOfTurn];
    let first = |outcome: Outcome| waits(1, 0, 900, 800, outcome);
    let second = |token: i64| waits(2, 20, 600, 800, Outcome::Token(token));
    let both = &[look(30, &[1, 2])];
    queue(&[first(Outcome::Token(11)), second(12)], both, &[], &[]);
    queue(&[first(Outcome::Token(12)), second(11)], both, &[], found);
    // its wait was over after the other's grant
    queue(&[first(Outcome::Null), second(11)], both, &[], found);
    let sooner = waits(1, 0, 900, 500, Outcome::Null);
    queue(&[sooner, second(11)], both, &[], &[]);
    // it has left
    for outcome in [Outcome::Failed, Outcome::Lost, Outcome::Open, Outcome::Shed] {
        queue(&[first(outcome), second(11)], both, &[], &[]);
    }
    // who came first is not known
    let unordered = [&[look(30, &[2, 1])][..], &[look(30, &[1])], &[]];
    for looks in unordered {
        queue(&[first(Outcome::Token(12)), second(11)], looks, &[], &[]);
    }
    // a look that may have been true before the call, or after
    queue(
        &[first(Outcome::Token(12)), second(11)],
        &[look(20, &[1, 2])],
        &[],
        &[],
    );
    queue(
        &[first(Outcome::Token(12)), second(11)],
        &[look(600, &[1, 2])],
        &[],
        &[],
    );
    // another resource
    let elsewhere = Look {
        resource: 7,
        ..look(30, &[1, 2])
    };
    queue(
        &[first(Outcome::Token(12)), second(11)],
        &[elsewhere],
        &[],
        &[],
    );
    // it was sent after the first had been seen to wait
    let later = waits(2, 40, 600, 0, Outcome::Token(11));
    queue(
        &[first(Outcome::Token(12)), later],
        &[look(30, &[1])],
        &[],
        found,
    );
    queue(
        &[first(Outcome::Token(12)), later],
        &[look(39, &[1])],
        &[],
        &[],
    );
}

#[test]
fn turns_of_retries_and_of_who_was_passed_over_are_not_judged() {
    let both = &[look(30, &[1, 2])];
    let (first, second) = (
        waits(1, 0, 900, 800, Outcome::Token(12)),
        waits(2, 20, 600, 800, Outcome::Token(11)),
    );
    let again = |attempt: Attempt| Attempt {
        is_retry: true,
        ..attempt
    };
    queue(&[again(first), second], both, &[], &[]);
    queue(&[first, again(second)], both, &[], &[]);
    queue(&[first, second], both, &[(600, 700)], &[]);
    queue(&[first, second], both, &[(601, 700)], &[Rule::OutOfTurn]);
}

#[test]
fn waiter_that_is_not_granted_what_is_free_is_found() {
    let found = &[Rule::LeftWaiting];
    let waiter = waits(1, 10_000, 12_600, 2_500, Outcome::Null);
    queue(&[waiter], &[], &[], found);
    queue(
        &[waits(1, 10_000, 12_600, 2_000, Outcome::Null)],
        &[],
        &[],
        &[],
    );
    for outcome in [
        Outcome::Token(12),
        Outcome::Failed,
        Outcome::Lost,
        Outcome::Shed,
    ] {
        queue(&[waits(1, 10_000, 12_600, 2_500, outcome)], &[], &[], &[]);
    }
    // something was done to the servers not long before
    queue(&[waiter], &[], &[(7_000, 9_500)], &[]);
    queue(&[waiter], &[], &[(7_000, 9_499)], found);
    queue(&[waiter], &[], &[(12_501, 13_000)], found);
    // another may have had it, heard of or not
    queue(
        &[waiter, waits(2, 12_000, 12_001, 0, Outcome::Lost)],
        &[],
        &[],
        &[],
    );
    queue(
        &[waiter, waits(2, 4_400, 5_001, 0, Outcome::Failed)],
        &[],
        &[],
        found,
    );
    queue(
        &[waiter, waits(2, 12_001, 12_001, 0, Outcome::Lost)],
        &[],
        &[],
        found,
    );
    queue(
        &[waiter, waits(2, 11_000, 12_001, 0, Outcome::Null)],
        &[],
        &[],
        found,
    );
    queue(
        &[waiter, waits(2, 5_000, 5_600, 0, Outcome::Open)],
        &[],
        &[],
        &[],
    );
}

#[test]
fn resource_is_not_free_while_it_may_be_held_or_held_up() {
    let held = |token: i64, asked: u64, ttl: u64| Grant {
        ttl: millis(ttl),
        ..grant(token, millis(asked), millis(asked + 10))
    };
    let plant = |change: fn(&mut History), from: u64, ttl: u64| {
        move |history: &mut History, _: &mut End| {
            history.attempts = vec![waits(1, 10_000, 13_100, 3_000, Outcome::Null)];
            history.grants = vec![held(10, from, ttl)];
            change(history);
        }
    };
    let found = &[Rule::LeftWaiting];
    // until a second before the end
    only(plant(|_| (), 9_000, 1_990), &[]);
    only(plant(|_| (), 9_000, 1_989), found);
    only(plant(|_| (), 12_001, 500), found);
    only(plant(|_| (), 11_500, 500), &[]);
    only(
        plant(|history| history.grants[0].fate = Fate::Unknown, 5_000, 990),
        &[],
    );
    only(
        plant(
            |history| history.grants[0].fate = Fate::RolledBack,
            5_990,
            9_990,
        ),
        &[],
    );
    only(
        plant(
            |history| history.grants[0].fate = Fate::RolledBack,
            5_980,
            9_990,
        ),
        found,
    );
    type Change = fn(&mut History, Release);
    let release_it: Change = |history, release| history.releases.push(release);
    let ask_for_it: Change = |history, release| {
        history.releases.push(Release {
            fate: Fate::Unknown,
            ..release
        });
    };
    let break_it: Change = |history, release| {
        history.breaks.push(Break {
            answered: release.answered,
            ..break_of(Broken::Token(10), release.asked)
        });
    };
    for (change, rules) in [
        (release_it, &found[..]),
        (ask_for_it, &[]),
        (break_it, found),
    ] {
        only(
            |history, end| {
                plant(|_| (), 9_000, 2_500)(history, end);
                change(
                    history,
                    Release {
                        answered: millis(10_500),
                        ..release(10, millis(10_400))
                    },
                );
            },
            rules,
        );
    }
    only(
        plant(
            |history| {
                let renewed = renewal(10, millis(9_500), millis(9_600), true);
                history.renewals.push(Renewal {
                    ttl: millis(1_400),
                    ..renewed
                });
            },
            9_000,
            990,
        ),
        &[],
    );
    only(
        plant(|h| h.unheard_renewals.push((10, millis(8_500))), 8_000, 990),
        &[],
    );
    // a transaction that the fence let in, and an administrator who thinks about it
    only(
        plant(
            |history| {
                history.writes.push(Write {
                    fate: Fate::RolledBack,
                    began: millis(6_000),
                    asked: millis(6_001),
                    passed: millis(6_002),
                    answered: millis(6_003),
                    ..write(10, 9, 1, millis(6_003))
                });
            },
            5_000,
            990,
        ),
        &[],
    );
    only(
        plant(
            |history| {
                history.breaks.push(Break {
                    fate: Fate::RolledBack,
                    answered: millis(12_000),
                    ..break_of(Broken::Nothing, millis(9_000))
                });
            },
            5_000,
            990,
        ),
        &[],
    );
}

// --- what a holder is promised

#[test]
fn refusals_within_a_believed_lease_are_found() {
    finds(
        |history, _| history.renewals.push(renewal(13, 250, 260, false)),
        &[Rule::LostEarly],
    );
    for sqlstate in ["LH001", "LH002", "LH004"] {
        finds(
            |history, _| history.refusals.push(refusal(sqlstate, &[13], 250)),
            &[Rule::LostEarly],
        );
    }
    finds(
        |history, _| history.refusals.push(refusal("LH001", &[13], 320)),
        &[],
    );
    // one of two is over, and which it was the error does not say
    finds(
        |history, _| history.refusals.push(refusal("LH001", &[11, 13], 250)),
        &[],
    );
}

#[test]
fn durable_lease_outlives_a_restart_and_a_lossless_promotion() {
    let plant = |durable: bool, blow: Blow| {
        move |history: &mut History, end: &mut End| {
            history.grants[3].durable = durable;
            history.renewals.push(renewal(13, 270, 280, false));
            end.blows = vec![blow];
        }
    };
    finds(plant(true, down(245, 250)), &[Rule::LostEarly]);
    finds(plant(true, promotion(246, true, None)), &[Rule::LostEarly]);
    finds(plant(true, promotion(246, false, None)), &[]);
    finds(plant(true, promotion(246, true, Some(210))), &[]);
    finds(plant(false, down(245, 250)), &[]);
    finds(plant(false, promotion(246, true, None)), &[]);
    // before it was granted, or after it was refused
    finds(plant(false, down(200, 205)), &[Rule::LostEarly]);
    finds(plant(false, down(281, 290)), &[Rule::LostEarly]);
}

#[test]
fn session_of_a_holder_that_is_ended_is_found_unless_the_server_was_struck() {
    for sqlstate in ["57014", "08006"] {
        let plant = |history: &mut History| history.refusals.push(refusal(sqlstate, &[13], 260));
        finds(|history, _| plant(history), &[Rule::EndedEarly]);
        // its lease is over
        finds(
            |history, _| history.refusals.push(refusal(sqlstate, &[11], 260)),
            &[],
        );
    }
    finds(
        |history, end| {
            history.refusals.push(refusal("08006", &[13], 260));
            end.blows = vec![down(255, 259)];
        },
        &[],
    );
}

// --- the fence

#[test]
fn stale_write_is_found_by_the_order_of_rows() {
    finds(
        |history, end| {
            end.rows[1].seq = 3;
            end.rows[2].seq = 2;
            history.writes[1].seq = 3;
            history.writes[2].seq = 2;
            end.states.clear();
        },
        &[Rule::TokensOfRowsFell, Rule::WriteUnseen],
    );
}

#[test]
fn stale_write_is_found_by_time_before_the_new_holder_writes() {
    for fate in [Fate::Committed, Fate::Unknown] {
        finds(
            |history, _| {
                history.writes[1].commit_asked = 156;
                history.writes[1].fate = fate;
            },
            &[Rule::StaleCommit],
        );
    }
    // its commit was under way
    finds(|history, _| history.writes[1].commit_asked = 155, &[]);
    // one that was not answered has not taken place
    finds(
        |history, _| {
            history.writes.push(Write {
                fate: Fate::Unknown,
                passed: 152,
                asked: 151,
                ..write(10, 9, 3, 156)
            });
        },
        &[],
    );
}

#[test]
fn token_that_passes_after_a_newer_one_is_found_though_nothing_commits() {
    finds(
        |history, _| history.writes.push(fence(10, 170)),
        &[Rule::PassedStale],
    );
    // asked for before the newer one was answered
    finds(|history, _| history.writes.push(fence(10, 155)), &[]);
}

#[test]
fn grant_that_is_rolled_back_closes_older_tokens_while_it_is_open() {
    let plant = |open_until: Micros| {
        move |history: &mut History, _: &mut End| {
            history.grants.push(undone(grant(14, 232, 234), open_until));
            history.grants[3].ttl = 5;
        }
    };
    finds(plant(250), &[Rule::PassedStale]);
    finds(plant(237), &[]);
    finds(
        |history, end| {
            plant(250)(history, end);
            history.writes[3].asked = 233;
        },
        &[Rule::StaleCommit],
    );
}

#[test]
fn lost_grant_closes_older_tokens_for_good() {
    // 11 went with a promotion that loses it, and 10 writes on the new server
    finds(
        |history, end| {
            end.blows = vec![promotion(165, true, Some(149))];
            history.writes.push(fence(10, 180));
        },
        &[Rule::PassedStale],
    );
}

#[test]
fn write_after_a_release_is_found_unless_the_server_was_struck_in_between() {
    let plant = |history: &mut History| {
        history.releases[0].from = 170;
        history.releases[0].answered = 180;
    };
    finds(|history, _| plant(history), &[Rule::PassedReleased]);
    finds(
        |history, end| {
            plant(history);
            end.blows = vec![down(181, 183)];
        },
        &[],
    );
}

// --- promotions

#[test]
fn grant_in_the_grace_of_a_lossy_promotion_is_found() {
    // granted at 220 to 225
    let blows = |blows: Vec<Blow>| move |_: &mut History, end: &mut End| end.blows = blows;
    finds(
        blows(vec![promotion(206, false, None)]),
        &[Rule::GrantedInGrace],
    );
    finds(blows(vec![promotion(206, true, None)]), &[]);
    finds(blows(vec![down(206, 208)]), &[]);
    // 100 after the promotion is told to begin; a restart within that time begins it anew
    for (blows, rules) in [
        (vec![promotion(124, false, None)], &[][..]),
        (vec![promotion(125, false, None)], &[Rule::GrantedInGrace]),
        (
            vec![promotion(40, false, None), down(130, 133)],
            &[Rule::GrantedInGrace],
        ),
        (vec![promotion(40, false, None), down(120, 123)], &[]),
        (vec![promotion(30, false, None), down(140, 143)], &[]),
    ] {
        only(
            |history, end| {
                history.grants = vec![grant(13, 220, 225)];
                end.blows = blows;
            },
            rules,
        );
    }
}

#[test]
fn lease_that_outlives_a_lossy_promotion_is_found() {
    let plant = |lossless: bool| {
        move |_: &mut History, end: &mut End| {
            end.blows = vec![promotion(100, lossless, None)];
            end.max_ttl = 10;
        }
    };
    // 10 writes at 136
    finds(plant(false), &[Rule::OutlivedPromotion]);
    finds(plant(true), &[]);
    only(
        |history, end| {
            history.grants = vec![grant(10, 0, 5)];
            history.renewals = vec![renewal(10, 60, 65, true)];
            end.blows = vec![promotion(50, false, None)];
        },
        &[Rule::OutlivedPromotion],
    );
}

#[test]
fn acknowledged_write_may_go_with_a_promotion_that_loses_it_and_only_then() {
    let plant = |blow: Blow| {
        move |_: &mut History, end: &mut End| {
            end.rows.pop();
            end.counters.insert(R, 3);
            end.items.clear();
            end.blows = vec![blow];
            end.max_ttl = 1;
        }
    };
    // 5 was acknowledged at 245
    finds(plant(promotion(250, false, Some(245))), &[]);
    finds(plant(promotion(250, false, Some(246))), &[Rule::WriteLost]);
    finds(plant(promotion(250, false, None)), &[Rule::WriteLost]);
    finds(plant(promotion(240, false, Some(230))), &[Rule::WriteLost]);
    finds(plant(down(250, 255)), &[Rule::WriteLost]);
}

// --- what is there in the end

#[test]
fn unseen_write_is_found() {
    finds(|history, _| history.sights[0].seq = 1, &[Rule::WriteUnseen]);
    for fate in [Fate::Unknown, Fate::RolledBack] {
        finds(
            |history, _| {
                history.sights.push(sight(12, 2, 216));
                history.grants[2].fate = fate;
            },
            &[],
        );
    }
}

#[test]
fn write_of_unknown_fate_may_be_there_or_not() {
    finds(|history, _| history.writes[3].fate = Fate::Unknown, &[]);
    finds(
        |history, end| {
            history.writes[3].fate = Fate::Unknown;
            end.rows.pop();
            end.counters.insert(R, 3);
            end.items.clear();
        },
        &[],
    );
}

#[test]
fn rows_that_nobody_wrote_so_are_found() {
    finds(
        |history, _| history.writes[3].fate = Fate::RolledBack,
        &[Rule::RowUnexplained],
    );
    finds(
        |_, end| {
            end.rows[3].id = 99;
            end.items = HashMap::from([((R, 99), 13)]);
        },
        &[Rule::RowUnexplained, Rule::WriteLost],
    );
    finds(
        |history, _| history.writes[3].lease.token = 14,
        &[Rule::RowUnexplained],
    );
    finds(
        |history, _| history.writes[3].seq = 9,
        &[Rule::RowUnexplained],
    );
}

#[test]
fn row_under_an_undone_grant_is_found() {
    finds(
        |history, end| {
            let last = &mut history.writes[3];
            (last.lease.token, last.asked, last.commit_asked) = (12, 216, 218);
            end.rows[3].lease.token = 12;
            end.items = HashMap::from([((R, 5), 12)]);
        },
        &[Rule::RowOfUndoneGrant, Rule::WriteUnseen],
    );
}

#[test]
fn torn_transaction_is_found() {
    let plants: [fn(&mut End); 7] = [
        |end| {
            end.counters.insert(R, 5);
        },
        |end| {
            if let Some(state) = end.states.get_mut(&R) {
                state.n = 2;
            }
        },
        |end| {
            if let Some(state) = end.states.get_mut(&R) {
                state.id = 1;
            }
        },
        // the trigger stamps the row with the token
        |end| {
            if let Some(state) = end.states.get_mut(&R) {
                state.token = 11;
            }
        },
        |end| end.items.clear(),
        |end| {
            end.items.insert((R, 1), 10);
        },
        |end| {
            end.items.insert((R, 5), 11);
        },
    ];
    for plant in plants {
        finds(|_, end| plant(end), &[Rule::TornTransaction]);
    }
}

#[test]
fn ledger_behind_is_found() {
    let plants: [fn(&mut End); 2] = [
        |end| {
            end.ledger.insert(R, 12);
        },
        |end| end.ledger.clear(),
    ];
    for plant in plants {
        finds(|_, end| plant(end), &[Rule::LedgerBehind]);
        finds(
            |history, end| {
                plant(end);
                history
                    .grants
                    .iter_mut()
                    .for_each(|grant| grant.durable = false);
            },
            &[],
        );
    }
    finds(
        |_, end| {
            end.ledger.insert(R, 12);
            end.blows = vec![promotion(250, false, Some(225))];
        },
        &[],
    );
}

#[test]
fn sequence_behind_is_found() {
    finds(|_, end| end.position = 12, &[Rule::SequenceBehind]);
    finds(|_, end| end.position = 13, &[]);
}
