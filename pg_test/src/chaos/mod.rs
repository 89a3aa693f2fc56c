//! Layer chaos: real clusters under a load of clients, while clients, backends and servers are killed and stopped,
//! standbys promoted and the wall clock stepped; and a checker that judges what the clients saw.
//!
//! A run follows a `plan`: `clients` starts client processes, which tell what they do (`event`), the `nemesis` does its
//! deeds to them and to the `servers`, the `observer` looks at the queues, `fold` makes a `history` of what was told, the `checker` judges it, and `report`
//! counts. What a client and the nemesis decide follows from the seed, so `SEED=` repeats it; what servers answer and
//! when does not.
//!
//! Invariant: a run in which nothing of note happened fails. It would have proved nothing.

mod checker;
#[cfg(test)]
mod checker_tests;
pub mod client;
mod clients;
mod clock;
mod event;
mod fold;
mod history;
mod long;
mod nemesis;
mod observer;
mod plan;
mod queues;
mod report;
mod requests;
mod rng;
mod servers;
pub mod wall_clock;
mod work;

pub use long::main as long_run;
pub use plan::{Counts, Kind, Plan};

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::session::{LIMIT, Session};
use clients::{Clients, Told};
use clock::millis;
use event::{Lease, name};
use history::{Broken, End, Fate, History, Outcome, Row, State};
use nemesis::Nemesis;
use observer::Observer;
use report::Tally;
use servers::{DATABASE, Servers};
use wall_clock::WallClock;
use work::{CONTENDED, Shape};

crate::tests![primary_alone, asynchronous_standby, synchronous_standby,];

/// Fewer leases than there are resources at a time.
pub const SMALL_TABLE: (&str, &str) = ("leasehold.max_leases", "12");
/// So few may wait for a resource that more want to.
const FEW_WAITERS: (&str, &str) = ("leasehold.max_waiters", "2");
/// Longest TTL, and how long nothing is granted after a lossy promotion.
const MAX_TTL_MS: u64 = 1000;

fn primary_alone() {
    let counts = Counts {
        kills: 2,
        immediate: 1,
        fast: 1,
        crashes: 1,
        client_kills: 3,
        client_stops: 1,
        waiter_cancels: 2,
        waiter_ends: 1,
        waiter_client_stops: 1,
        waiter_stops: 1,
        clock_steps: 3,
        promotions: 0,
    };
    short_run(Kind::Alone, counts);
}

fn asynchronous_standby() {
    short_run(Kind::Asynchronous, with_promotions());
}

fn synchronous_standby() {
    short_run(Kind::Synchronous, with_promotions());
}

fn with_promotions() -> Counts {
    Counts {
        kills: 1,
        fast: 1,
        client_kills: 1,
        waiter_cancels: 1,
        waiter_ends: 1,
        waiter_client_stops: 1,
        promotions: 3,
        ..Counts::default()
    }
}

fn short_run(kind: Kind, counts: Counts) {
    survives(&Plan::new(seed(), kind, counts), &[]);
}

/// Carries a plan out as a test.
pub fn survives(plan: &Plan, settings: &[(&str, &str)]) {
    let tally = run(plan, settings);
    println!("    {plan}: {}", tally.summary());
}

/// Carries a plan out and judges what came of it; panics where a rule is broken, or where nothing of note happened.
fn run(plan: &Plan, settings: &[(&str, &str)]) -> Tally {
    let mut tally = Tally::of_a_run();
    let clock = (plan.counts.clock_steps > 0).then(WallClock::new);
    let max_ttl = format!("{MAX_TTL_MS}ms");
    let mut all = vec![
        ("leasehold.max_ttl", max_ttl.as_str()),
        ("leasehold.zombie_grace", "100ms"),
    ];
    all.extend(settings);
    if plan.seed % 2 == 1 {
        all.push(FEW_WAITERS);
    }
    let mut servers = Servers::start(plan.kind, &all, clock);
    set_up(&mut servers);
    let mut clients = Clients::start(plan.seed, DATABASE, &servers.socket_dir());
    let observer = Observer::start(&servers.socket_dir());
    let mut nemesis = Nemesis::new(&mut servers, &mut clients, &observer, plan.seed);
    nemesis.carry_out(plan, &mut tally);
    let Nemesis {
        blows,
        strikes,
        disturbed,
        ..
    } = nemesis;
    let over = clock::now();
    let told = finish(clients, &servers, plan);
    let history = History {
        looks: observer.finish(),
        ..fold::fold(&told, &strikes, &mut tally)
    };
    let end = End {
        blows,
        disturbed,
        over,
        max_ttl: millis(MAX_TTL_MS),
        ..end_of(&mut servers.session())
    };
    count(&history, &end, &mut tally);
    judge(plan, &history, &end, &tally);
    is_not_vacuous(plan, &tally);
    tally
}

fn set_up(servers: &mut Servers) {
    servers
        .local_session("postgres")
        .exec(&format!("CREATE DATABASE {DATABASE}"));
    let mut session = servers.local_session(DATABASE);
    session.exec("CREATE EXTENSION leasehold");
    session.exec(&work::tables());
    if servers.kind != Kind::Alone {
        servers.attach_standby();
    }
}

/// Ends the clients, one way or another, and sees to it that each resource can be had then.
fn finish(clients: Clients, servers: &Servers, plan: &Plan) -> Told {
    match plan.seed % 3 {
        // their transactions stay open
        0 => {
            clients.freeze();
            never_stuck(servers, plan);
            clients.finish(true)
        }
        way => {
            // a statement that sleeps goes by the wall clock: it would not end within hours of a step back
            let kill = way == 1 || plan.counts.clock_steps > 0;
            let told = clients.finish(kill);
            never_stuck(servers, plan);
            told
        }
    }
}

fn never_stuck(servers: &Servers, plan: &Plan) {
    let mut session = servers.session();
    let deadline = Instant::now() + LIMIT;
    for resource in (0..CONTENDED).map(name) {
        let sql = format!("SELECT acquire_lease('{resource}', ttl => '1ms')");
        while session.text(&sql).is_none() {
            assert!(
                Instant::now() < deadline,
                "{resource} cannot be had with {plan}:\n{}",
                who_holds(&mut session, &resource)
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What the server says of a resource, and the transactions that are open.
fn who_holds(session: &mut Session, resource: &str) -> String {
    let lease = format!("SELECT 'lease_info: ' || lease_info::text FROM lease_info('{resource}')");
    let open =
        "SELECT concat_ws(', ', application_name, 'pid ' || pid, state, 'last said: ' || query)
                FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid()";
    let mut rows = session.rows(&lease);
    rows.extend(session.rows(open));
    let lines: Vec<String> = rows.into_iter().flatten().flatten().collect();
    lines.join("\n")
}

fn end_of(session: &mut Session) -> End {
    let number = |text: &Option<String>| -> i64 {
        text.as_deref()
            .and_then(|text| text.parse().ok())
            .expect("a number")
    };
    let resource = |text: &Option<String>| usize::try_from(number(text)).expect("a resource");
    let log = session.rows("SELECT substr(resource, 2), token, seq, id, shape FROM log");
    let counters = session.rows("SELECT substr(resource, 2), seq FROM counter");
    let states = session.rows("SELECT substr(resource, 2), n, id, coalesce(token, 0) FROM state");
    let items = session.rows("SELECT substr(resource, 2), id, token FROM item");
    let ledger = session.rows("SELECT substr(resource, 2), token FROM leasehold.ledger");
    let position = session.text("SELECT last_value FROM leasehold.token_seq");
    let row = |row: &crate::session::Row| Row {
        lease: Lease {
            resource: resource(&row[0]),
            token: number(&row[1]),
        },
        seq: number(&row[2]),
        id: number(&row[3]),
        shape: row[4]
            .as_deref()
            .and_then(Shape::from_word)
            .expect("a shape"),
    };
    let state = |row: &crate::session::Row| State {
        n: number(&row[1]),
        id: number(&row[2]),
        token: number(&row[3]),
    };
    End {
        rows: log.iter().map(row).collect(),
        counters: counters
            .iter()
            .map(|row| (resource(&row[0]), number(&row[1])))
            .collect(),
        states: states
            .iter()
            .map(|row| (resource(&row[0]), state(row)))
            .collect(),
        items: items
            .iter()
            .map(|row| ((resource(&row[0]), number(&row[1])), number(&row[2])))
            .collect(),
        ledger: ledger
            .iter()
            .map(|row| (resource(&row[0]), number(&row[1])))
            .collect(),
        position: number(&position),
        ..End::default()
    }
}

fn count(history: &History, end: &End, tally: &mut Tally) {
    let number = |count: usize| count as u64;
    let committed = |fate: Fate| fate == Fate::Committed;
    tally.grants = number(
        history
            .grants
            .iter()
            .filter(|grant| committed(grant.fate))
            .count(),
    );
    let writes = || {
        history
            .writes
            .iter()
            .filter(|write| write.id != 0 && committed(write.fate))
    };
    tally.writes = number(writes().count());
    tally.takeovers = number(checker::takeovers(history, CONTENDED));
    tally.survivals = number(checker::survivals(history, &end.blows));
    let attempts = || history.attempts.iter();
    let answered = |outcome: Outcome| matches!(outcome, Outcome::Null | Outcome::Token(_));
    let waits = attempts().filter(|attempt| attempt.wait > 0 && answered(attempt.outcome));
    tally.waits = number(waits.count());
    tally.waited = number(queues::granted_in_turn(history));
    tally.ordered = number(checker::ordered(history, end));
    let shed = attempts().filter(|attempt| attempt.outcome == Outcome::Shed);
    tally.sheds = number(shed.count());
    tally.retried = number(requests::granted_before(history));
    let broken = history
        .breaks
        .iter()
        .filter(|broken| committed(broken.fate) && matches!(broken.said, Broken::Token(_)));
    tally.breaks = number(broken.count());
    let there: std::collections::HashSet<(usize, i64)> = end
        .rows
        .iter()
        .map(|row| (row.lease.resource, row.id))
        .collect();
    let lost = writes().filter(|write| !there.contains(&(write.lease.resource, write.id)));
    tally.lost = number(lost.count());
}

fn judge(plan: &Plan, history: &History, end: &End, tally: &Tally) {
    let faults = checker::faults(history, end);
    if let Some(first) = faults.first() {
        let rules: std::collections::BTreeSet<String> = faults
            .iter()
            .map(|fault| format!("{:?}", fault.rule))
            .collect();
        let rules: Vec<String> = rules.into_iter().collect();
        panic!(
            "{} faults ({}) with {plan}; the shortest piece:\n{first}\n{}",
            faults.len(),
            rules.join(", "),
            tally.summary()
        );
    }
    assert!(
        history.unexpected.is_empty(),
        "{} unexpected answers with {plan}:\n{}\n{}",
        history.unexpected.len(),
        history.unexpected[..history.unexpected.len().min(5)].join("\n"),
        tally.summary()
    );
}

fn is_not_vacuous(plan: &Plan, tally: &Tally) {
    let counts = plan.counts;
    let restarts = counts.kills + counts.immediate + counts.fast + counts.crashes;
    let refused = tally.refused("LH001") + tally.refused("LH004");
    let enough = [
        (tally.takeovers >= plan.deeds.len() as u64, "takeovers"),
        (refused >= 1, "stale writes refused"),
        (
            restarts < 3 || tally.survivals >= 1,
            "leases used after a restart",
        ),
        (tally.waited >= 1, "waits granted"),
        (tally.ordered >= 1, "waits granted in a known order"),
        (tally.sheds >= 1, "waits refused"),
        (tally.retried >= 1, "retries of what had been granted"),
        (tally.breaks >= 1, "leases broken"),
    ];
    for (enough, what) in enough {
        assert!(
            enough,
            "too few {what} to prove anything with {plan}: {}",
            tally.summary()
        );
    }
}

pub fn seed() -> u64 {
    match std::env::var("SEED").ok().filter(|text| !text.is_empty()) {
        Some(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("SEED={text} is not a number")),
        None => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::from(since.subsec_nanos())),
    }
}
