//! The checker tried on histories with planted faults: each rule has one that breaks it and is found, and near misses
//! that a correct server may well produce.

use std::collections::{HashMap, HashSet};

use super::checker::{Rule, faults, survivals, takeovers};
use super::clock::Micros;
use super::event::{Lease, Resource};
use super::history::{
    Blow, End, Fate, Grant, History, Record, Refusal, Release, Renewal, Row, Sight, State, Write,
};
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
        unexpected: Vec::new(),
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
        blows: Vec::new(),
        max_ttl: 100,
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
