//! Whether those who wait for a resource get it in the order in which they came, how long a hand-over takes, and
//! whether a wake-up is lost where waiters are cancelled and their sessions ended.
//!
//! Arrivals come one after the other: the next call is sent when the one before was seen in `leasehold.waiters`, or
//! was answered. So the order of arrival is known, and every label says the number of its arrival. The order of the
//! grants is what the server's flight recorder says; it has also those whose answer was lost. Releases and hand-overs
//! go on meanwhile.
//!
//! A lost wake-up would show as a resource that is free, with waiters, until one of them looks again by himself.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use postgres::error::SqlState;
use postgres::{Client, SimpleQueryMessage};

use crate::calls::{Random, is_shed};
use crate::cluster::Cluster;
use crate::report::Report;
use crate::stats::{median, percentile};
use crate::{Options, Result};

const WAITERS: usize = 32;
const HAND_OVERS: u64 = 2_000;
const HOLD: Duration = Duration::from_millis(2);
const TARGET_MS: f64 = 50.0;

/// The entry table is small, so that looking at the queue is cheap; the ring keeps every event of a run.
const SETTINGS: [&str; 3] = [
    "max_connections = 200",
    "leasehold.max_leases = 1000",
    "leasehold.event_ring = 30000",
];

/// Rows of runs where nobody is disturbed, with a disk to wait for and without, and of one where a third of those who
/// wait are cancelled or ended.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let variants = [
        ("durable", "undisturbed", false),
        ("memory", "undisturbed", false),
        ("durable", "a third cancelled or ended", true),
    ];
    for (durability, name, is_rough) in variants {
        // on a server of its own, whose recorder has nothing else
        let durable = format!("leasehold.durability = {durability}");
        let settings: Vec<&str> = SETTINGS.into_iter().chain([durable.as_str()]).collect();
        let cluster = Cluster::with_leasehold(&options.pg_config, &settings)?;
        let run = Run::new(&cluster, is_rough);
        run.go()?;
        run.report(&format!("{WAITERS} waiters, {durability}, {name}"), report)?;
    }
    Ok(())
}

/// Who asks to arrive: his backend, and where he is told the number of his arrival.
struct Asker {
    waiter: usize,
    pid: i32,
    number: Sender<u64>,
}

/// A hand-over as its two clients saw it. Microseconds since the run began.
#[derive(Clone, Copy, Default)]
struct Held {
    asked_us: u64,
    granted_us: u64,
    /// When the release was sent; None where it had to be sent again.
    released_us: Option<u64>,
}

/// From when to when something went on, in microseconds since the run began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    from_us: u64,
    to_us: u64,
}

impl Span {
    fn ms(self) -> f64 {
        self.to_us.saturating_sub(self.from_us) as f64 / 1e3
    }

    fn meets(self, other: Span) -> bool {
        self.from_us < other.to_us && other.from_us < self.to_us
    }
}

/// What the waiters had happen to them.
#[derive(Default)]
struct Log {
    /// By token.
    held: HashMap<i64, Held>,
    cancelled: u32,
    ended: u32,
    recovered: u32,
    /// NULL or LH005: nobody should get that here.
    turned_away: u32,
    /// How many waited when the next one arrived.
    lengths: Vec<f64>,
    /// One-row INSERTs beside all that.
    inserts: Vec<Span>,
    hits: u32,
}

struct Run<'a> {
    cluster: &'a Cluster,
    is_rough: bool,
    begin: Instant,
    grants: AtomicU64,
    arrivals: AtomicU64,
    /// Of each waiter: the number of the arrival that was answered last.
    answered: [AtomicU64; WAITERS],
    is_over: AtomicBool,
    log: Mutex<Log>,
}

impl<'a> Run<'a> {
    fn new(cluster: &'a Cluster, is_rough: bool) -> Self {
        Run {
            cluster,
            is_rough,
            begin: Instant::now(),
            grants: AtomicU64::new(0),
            arrivals: AtomicU64::new(0),
            answered: std::array::from_fn(|_| AtomicU64::new(0)),
            is_over: AtomicBool::new(false),
            log: Mutex::default(),
        }
    }

    fn now_us(&self) -> u64 {
        self.begin.elapsed().as_micros() as u64
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().expect("nobody panics with the log")
    }

    fn go(&self) -> Result<()> {
        let (door, askers) = channel();
        thread::scope(|scope| {
            let ordering = scope.spawn(|| self.let_in(askers));
            let yardstick = scope.spawn(|| self.insert());
            let breaker = self.is_rough.then(|| scope.spawn(|| self.strike()));
            let waiters: Vec<_> = (0..WAITERS)
                .map(|number| {
                    let door = door.clone();
                    scope.spawn(move || Waiter::new(self, number, door)?.wait_and_hold())
                })
                .collect();
            drop(door);
            let mut result = Ok(());
            for waiter in waiters {
                let ended = waiter.join().map_err(|_| "a waiter panicked")?;
                result = result.and(ended);
            }
            self.is_over.store(true, Ordering::Relaxed);
            for other in [Some(ordering), Some(yardstick), breaker]
                .into_iter()
                .flatten()
            {
                let ended = other.join().map_err(|_| "a helper panicked")?;
                result = result.and(ended);
            }
            result
        })
    }

    /// Lets one arrive after the other.
    fn let_in(&self, askers: Receiver<Asker>) -> Result<()> {
        let mut client = self.cluster.connect()?;
        let look = client
            .prepare("SELECT count(*), count(*) FILTER (WHERE pid = $1) FROM leasehold.waiters")?;
        for asker in askers {
            let number = self.arrivals.fetch_add(1, Ordering::Relaxed) + 1;
            if asker.number.send(number).is_err() {
                continue;
            }
            loop {
                // in this order: what was not answered by then, and is not in the queue afterwards, has not come yet
                let is_answered = self.answered[asker.waiter].load(Ordering::Acquire) >= number;
                let row = client.query_one(&look, &[&asker.pid])?;
                let (length, is_there): (i64, i64) = (row.get(0), row.get(1));
                if is_there > 0 {
                    self.log().lengths.push(length as f64);
                }
                if is_answered || is_there > 0 {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The yardstick: what a commit takes at the same time.
    fn insert(&self) -> Result<()> {
        let mut client = self.cluster.connect()?;
        client.batch_execute("CREATE TABLE bench_yardstick (n bigint)")?;
        let insert = client.prepare("INSERT INTO bench_yardstick VALUES (1)")?;
        let mut spans = Vec::new();
        while !self.is_over.load(Ordering::Relaxed) {
            let from_us = self.now_us();
            client.execute(&insert, &[])?;
            spans.push(Span {
                from_us,
                to_us: self.now_us(),
            });
            sleep(Duration::from_millis(2));
        }
        self.log().inserts = spans;
        Ok(())
    }

    /// Cancels and ends, at random moments, a third of those who arrive. Half of them are the first in the queue,
    /// and half of these are hit a little later, when they may have been woken.
    fn strike(&self) -> Result<()> {
        let mut client = self.cluster.connect()?;
        let pick = client.prepare(
            "SELECT pid FROM (SELECT pid, row_number() OVER (ORDER BY position) AS place, count(*) OVER () AS all
                 FROM leasehold.waiters) AS w
             WHERE place = 1 + floor($1::float8 * w.all) LIMIT 1",
        )?;
        let cancel = client.prepare("SELECT pg_cancel_backend($1)")?;
        let end = client.prepare("SELECT pg_terminate_backend($1)")?;
        let mut random = Random::new(4);
        let mut hits = 0_u64;
        while !self.is_over.load(Ordering::Relaxed) {
            sleep(random.time(Duration::from_millis(2)));
            if hits * 3 > self.arrivals.load(Ordering::Relaxed) {
                continue;
            }
            let is_first = random.below(2) == 0;
            let place = if is_first { 0.0 } else { random.share() };
            let Some(row) = client.query_opt(&pick, &[&place])? else {
                continue;
            };
            let pid: i32 = row.get(0);
            if is_first && random.below(2) == 0 {
                sleep(random.time(Duration::from_millis(4)));
            }
            let how = if random.below(2) == 0 { &cancel } else { &end };
            let was_hit: bool = client.query_one(how, &[&pid])?.get(0);
            hits += u64::from(was_hit);
        }
        self.log().hits = hits as u32;
        Ok(())
    }
}

/// One of the waiters, and his session, which may be a new one each time.
struct Waiter<'a> {
    run: &'a Run<'a>,
    number: usize,
    door: Sender<Asker>,
    client: Client,
    pid: i32,
    random: Random,
}

impl<'a> Waiter<'a> {
    fn new(run: &'a Run<'a>, number: usize, door: Sender<Asker>) -> Result<Self> {
        let mut waiter = Waiter {
            client: run.cluster.connect()?,
            pid: 0,
            random: Random::new(number as u64),
            run,
            number,
            door,
        };
        waiter.introduce()?;
        Ok(waiter)
    }

    fn introduce(&mut self) -> Result<()> {
        self.pid = self
            .client
            .query_one("SELECT pg_backend_pid()", &[])?
            .get(0);
        Ok(())
    }

    fn wait_and_hold(mut self) -> Result<()> {
        while self.run.grants.load(Ordering::Relaxed) <= HAND_OVERS {
            let (tell, told) = channel();
            let asker = Asker {
                waiter: self.number,
                pid: self.pid,
                number: tell,
            };
            self.door.send(asker).map_err(|_| "nobody lets in")?;
            let arrival = told.recv()?;
            let asked_us = self.run.now_us();
            let answer = self.acquire(arrival);
            let granted_us = self.run.now_us();
            self.run.answered[self.number].store(arrival, Ordering::Release);
            let token = match answer {
                Ok(token) => token,
                Err(error) => {
                    self.hit(error)?;
                    let token = self.lost_token(arrival)?;
                    self.run.log().recovered += u32::from(token.is_some());
                    if let Some(token) = token {
                        self.release(token)?;
                    }
                    continue;
                }
            };
            let Some(token) = token else {
                self.run.log().turned_away += 1;
                continue;
            };
            self.run.grants.fetch_add(1, Ordering::Relaxed);
            sleep(self.random.time(HOLD));
            let released_us = self.release(token)?;
            let held = Held {
                asked_us,
                granted_us,
                released_us,
            };
            self.run.log().held.insert(token, held);
        }
        Ok(())
    }

    /// Half of the waiters call the function, the others the procedure.
    fn acquire(&mut self, arrival: u64) -> std::result::Result<Option<i64>, postgres::Error> {
        let call = if self.number.is_multiple_of(2) {
            format!("SELECT acquire_lease('fair', '{arrival}', wait => '1min')")
        } else {
            format!("CALL await_lease('fair', '{arrival}', wait => '1min')")
        };
        match self.client.simple_query(&call) {
            Ok(messages) => Ok(first_number(&messages)),
            Err(error) if error.code().is_some_and(is_shed) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// After an error: that of the one who strikes, or one that must not be.
    fn hit(&mut self, error: postgres::Error) -> Result<()> {
        let code = error.code();
        if code == Some(&SqlState::QUERY_CANCELED) {
            self.run.log().cancelled += 1;
        } else if error.is_closed() || code == Some(&SqlState::ADMIN_SHUTDOWN) {
            self.run.log().ended += 1;
            self.client = self.run.cluster.connect()?;
            self.introduce()?;
        } else {
            return Err(error.into());
        }
        Ok(())
    }

    /// The lease that was granted to a call whose answer did not come.
    fn lost_token(&mut self, arrival: u64) -> Result<Option<i64>> {
        let sql = format!(
            "SELECT token FROM lease_info('fair') WHERE state = 'held' AND holder = '{arrival}'"
        );
        loop {
            match self.client.simple_query(&sql) {
                Ok(messages) => return Ok(first_number(&messages)),
                Err(error) => self.hit(error)?,
            }
        }
    }

    /// When the release was sent that was the only one.
    fn release(&mut self, token: i64) -> Result<Option<u64>> {
        let sql = format!("SELECT release_lease('fair', {token})");
        let mut sent_us = Some(self.run.now_us());
        loop {
            match self.client.simple_query(&sql) {
                Ok(_) => return Ok(sent_us),
                Err(error) => {
                    self.hit(error)?;
                    sent_us = None;
                }
            }
        }
    }
}

fn first_number(messages: &[SimpleQueryMessage]) -> Option<i64> {
    messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0)?.parse().ok(),
        _ => None,
    })
}

/// A grant in the server's recorder.
struct Grant {
    token: i64,
    arrival: i64,
    /// Milliseconds since the lease before was over.
    free_ms: Option<f64>,
}

impl Run<'_> {
    fn report(&self, what: &str, report: &mut Report) -> Result<()> {
        let grants = self.recorded()?;
        let log = self.log();
        let tokens_in_order = grants.is_sorted_by_key(|grant| grant.token);
        let inversions = inversions(&grants);
        let count = grants.len();
        if count as u64 <= HAND_OVERS || !tokens_in_order {
            return Err(
                format!("{count} grants were recorded, in order: {tokens_in_order}").into(),
            );
        }
        report.figure(
            &format!("{what}: grants out of the order of arrival"),
            format!("{inversions} of {count}"),
            "0",
            inversions == 0,
        );
        let spans = hand_overs(&grants, &log.held);
        let seen: Vec<f64> = spans.iter().map(|span| span.ms()).collect();
        let frees: Vec<f64> = grants.iter().filter_map(|grant| grant.free_ms).collect();
        let name = format!("{what}: hand-over, release sent to answer of the next");
        times(report, &name, &seen, Some(TARGET_MS));
        let name = format!("{what}: hand-over, release to grant at the server");
        times(report, &name, &frees, Some(TARGET_MS));
        let lost = slow(&seen).max(slow(&frees));
        report.figure(
            &format!("{what}: hand-overs slower than {TARGET_MS} ms (a lost wake-up is one)"),
            format!("{lost} of {count}"),
            "0",
            lost == 0,
        );
        let name = "  a one-row INSERT beside them";
        let inserts: Vec<f64> = log.inserts.iter().map(|span| span.ms()).collect();
        times(report, name, &inserts, None);
        for span in spans.iter().filter(|span| span.ms() > TARGET_MS / 2.0) {
            report.note(
                &format!(
                    "  hand-over of {:.0} ms: slowest INSERT meanwhile",
                    span.ms()
                ),
                format!("{:.0} ms", slowest_meanwhile(*span, &log.inserts)),
            );
        }
        report.figure(
            &format!("{what}: turned away"),
            log.turned_away.to_string(),
            "0",
            log.turned_away == 0,
        );
        if !log.lengths.is_empty() {
            report.note(
                &format!("{what}: in the queue when the next one came"),
                format!("{:.0}", median(&log.lengths)),
            );
        }
        if self.is_rough {
            report.note(
                &format!("{what}: struck of all arrivals"),
                format!("{} of {}", log.hits, self.arrivals.load(Ordering::Relaxed)),
            );
            report.note(
                &format!("{what}: calls cancelled, sessions ended, answers lost with a lease"),
                format!("{}, {}, {}", log.cancelled, log.ended, log.recovered),
            );
        }
        Ok(())
    }

    /// All grants, in the order in which the server did them.
    fn recorded(&self) -> Result<Vec<Grant>> {
        let mut client = self.cluster.connect()?;
        let rows = client.query(
            "SELECT event, token, holder, (extract(epoch FROM at) * 1000000)::bigint FROM leasehold.events
             WHERE resource = 'fair' AND event IN ('granted', 'released', 'expired') ORDER BY seq",
            &[],
        )?;
        let mut grants = Vec::new();
        let mut over_us: Option<i64> = None;
        for row in rows {
            let (event, token, holder, at_us): (&str, i64, &str, i64) =
                (row.get(0), row.get(1), row.get(2), row.get(3));
            match event {
                "granted" => grants.push(Grant {
                    token,
                    arrival: holder.parse()?,
                    free_ms: over_us.take().map(|over_us| (at_us - over_us) as f64 / 1e3),
                }),
                "released" => over_us = Some(at_us),
                _ => return Err("a lease ran out".into()),
            }
        }
        Ok(grants)
    }
}

/// How many grants came after that of a later arrival, or twice for the same.
fn inversions(grants: &[Grant]) -> usize {
    let mut latest = 0;
    let mut inversions = 0;
    for grant in grants {
        inversions += usize::from(grant.arrival <= latest);
        latest = latest.max(grant.arrival);
    }
    inversions
}

/// From the sending of a release, or of the next one's call where that came later, to the next one's answer. Of those
/// pairs of which both were seen.
fn hand_overs(grants: &[Grant], held: &HashMap<i64, Held>) -> Vec<Span> {
    let pair = |pair: &[Grant]| {
        let (before, after) = (held.get(&pair[0].token)?, held.get(&pair[1].token)?);
        let from_us = before.released_us?.max(after.asked_us);
        Some(Span {
            from_us,
            to_us: after.granted_us,
        })
    };
    grants.windows(2).filter_map(pair).collect()
}

/// Whether something else was slow at the time: the disk, or all of the machine.
fn slowest_meanwhile(span: Span, others: &[Span]) -> f64 {
    let times = others.iter().filter(|other| span.meets(**other));
    times.map(|other| other.ms()).fold(0.0, f64::max)
}

fn slow(times: &[f64]) -> usize {
    times.iter().filter(|time| **time > TARGET_MS).count()
}

/// A row of p50, p99 and the highest, which is judged.
fn times(report: &mut Report, what: &str, times: &[f64], most_ms: Option<f64>) {
    if times.is_empty() {
        return report.note(what, "none".into());
    }
    let highest = percentile(times, 1.0);
    let text = format!(
        "p50 {:.2}, p99 {:.2}, highest {highest:.2} ms",
        percentile(times, 0.5),
        percentile(times, 0.99)
    );
    match most_ms {
        Some(most) => report.figure(what, text, &format!("at most {most} ms"), highest <= most),
        None => report.note(what, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(token: i64, arrival: i64) -> Grant {
        Grant {
            token,
            arrival,
            free_ms: None,
        }
    }

    #[test]
    fn whoever_is_overtaken_is_counted() {
        let in_order = [grant(1, 1), grant(2, 4), grant(3, 5)];
        assert_eq!(inversions(&in_order), 0);
        let overtaken = [
            grant(1, 4),
            grant(2, 1),
            grant(3, 2),
            grant(4, 5),
            grant(5, 5),
        ];
        assert_eq!(inversions(&overtaken), 3);
    }

    #[test]
    fn hand_over_begins_when_both_are_there() {
        let held = |asked_us, granted_us, released_us| Held {
            asked_us,
            granted_us,
            released_us,
        };
        let all = HashMap::from([
            (1, held(0, 0, Some(1_000))),
            (2, held(500, 3_000, Some(4_000))),
            (3, held(5_000, 8_000, None)),
            (4, held(6_000, 9_000, Some(9_500))),
        ]);
        let grants = [
            grant(1, 1),
            grant(2, 2),
            grant(3, 3),
            grant(4, 4),
            grant(5, 5),
        ];
        let span = |from_us, to_us| Span { from_us, to_us };
        let spans = hand_overs(&grants, &all);
        assert_eq!(spans, [span(1_000, 3_000), span(5_000, 8_000)]);
        let others = [span(0, 1_000), span(2_000, 2_500), span(2_900, 9_000)];
        assert_eq!(slowest_meanwhile(spans[0], &others), 6.1);
        assert_eq!(slowest_meanwhile(spans[0], &others[..1]), 0.0);
    }
}
