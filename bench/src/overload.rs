//! What becomes of a resource that ten times as many want as it can serve, and of the server around it.
//!
//! Arrivals come by the clock and not when the last one was answered, as those of users do. Each takes a connection
//! from a large pool; one that finds none free is not sent, and counted. How many the holders can serve is measured
//! before and after, with as many waiters as never leave the resource free.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex, MutexGuard};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use crate::calls::{Answer, Caller, Random, ms, timed};
use crate::cluster::Cluster;
use crate::contest::Load;
use crate::pgbench::Script;
use crate::report::{Figure, Ratio, Report, Target};
use crate::stats::{median, order, percentile, range, ratios};
use crate::{Options, Result};

const CONNECTIONS: usize = 120;
/// So many always want the resource while the capacity is measured.
const WAITERS: usize = 16;
const HOLD: Duration = Duration::from_millis(10);
const WAIT: Duration = Duration::from_millis(200);
const TIMES: f64 = 10.0;
const REFUSED_MS: f64 = 5.0;
/// Clients of the pgbench beside it.
const CLIENTS: u32 = 4;

/// How pgbench's tables are made.
const SCALE: u32 = 10;

/// What those who arrive ask for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Want {
    Lease,
    Select1,
}

/// What became of one who arrived.
struct Sample {
    answer: Option<Answer>,
    /// Milliseconds from the call to its answer.
    ms: f64,
}

/// Rows about goodput, refusals and waits; then about the work beside it.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let cluster = Cluster::with_leasehold(&options.pg_config, &["max_connections = 200"])?;
    let slice = Duration::from_secs((options.minute / 6).max(1).into());
    // the first warms up
    capacity(&cluster, Duration::from_secs(1))?;
    let before = capacity(&cluster, slice)?;
    let pool = Pool::new(&cluster)?;
    let minute = Duration::from_secs(options.minute.into());
    let arrivals = || {
        pool.drive(TIMES * before, Want::Lease, |begin| {
            begin.elapsed() < minute
        })
    };
    let (phase, yardstick) = with_yardstick(&cluster, arrivals)?;
    let after = capacity(&cluster, slice)?;
    phase.report((before, after), &yardstick, report);
    for builtin in ["select-only", "tpcb-like"] {
        beside(options, &cluster, &pool, (TIMES * before, builtin), report)?;
    }
    pool.close()
}

/// Leases a second, where somebody always waits.
fn capacity(cluster: &Cluster, time: Duration) -> Result<f64> {
    let (ready, is_over) = (Barrier::new(WAITERS + 1), AtomicBool::new(false));
    let serve = || -> Result<u32> {
        // whoever fails must come to the barrier too
        let caller = Caller::new(cluster, "wanted", "1 min");
        ready.wait();
        let mut caller = caller?;
        let mut served = 0;
        while !is_over.load(Ordering::Relaxed) {
            let Answer::Granted(token) = caller.acquire()? else {
                return Err("one was turned away while the capacity was measured".into());
            };
            // those that still wait when the time is over do not count
            if !is_over.load(Ordering::Relaxed) {
                sleep(HOLD);
                served += 1;
            }
            caller.release(token)?;
        }
        Ok(served)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..WAITERS).map(|_| scope.spawn(serve)).collect();
        ready.wait();
        let begin = Instant::now();
        sleep(time);
        is_over.store(true, Ordering::Relaxed);
        let seconds = begin.elapsed().as_secs_f64();
        let mut served = 0;
        for thread in threads {
            served += thread.join().map_err(|_| "a waiter panicked")??;
        }
        let rate = f64::from(served) / seconds;
        eprintln!("overload: capacity {rate:.1}/s");
        Ok(rate)
    })
}

/// What a client beside the arrivals sees, in milliseconds.
#[derive(Default)]
struct Beside {
    select_1: Vec<f64>,
    /// Acquires of a resource that nobody else wants.
    acquire: Vec<f64>,
}

/// What `run` comes to, and what one more client sees meanwhile.
fn with_yardstick<T>(cluster: &Cluster, run: impl FnOnce() -> Result<T>) -> Result<(T, Beside)> {
    let is_over = AtomicBool::new(false);
    let watch = || -> Result<Beside> {
        let mut caller = Caller::new(cluster, "unwanted", "0")?;
        let mut random = Random::new(1);
        let mut beside = Beside::default();
        while !is_over.load(Ordering::Relaxed) {
            sleep(random.pause(200.0));
            beside.select_1.push(ms(timed(|| caller.select_1())?.0));
            sleep(random.pause(200.0));
            let (time, answer) = timed(|| caller.acquire())?;
            let Answer::Granted(token) = answer else {
                return Err("a resource that nobody else wants could not be had".into());
            };
            beside.acquire.push(ms(time));
            caller.release(token)?;
        }
        Ok(beside)
    };
    thread::scope(|scope| {
        let watching = scope.spawn(watch);
        let result = run();
        is_over.store(true, Ordering::Relaxed);
        let beside = watching.join().map_err(|_| "the yardstick panicked")??;
        Ok((result?, beside))
    })
}

/// Rows of a pgbench beside the arrivals, against the same where they run `SELECT 1`.
fn beside(
    options: &Options,
    cluster: &Cluster,
    pool: &Pool,
    (rate, builtin): (f64, &str),
    report: &mut Report,
) -> Result<()> {
    let mut command = cluster.client_program("pgbench");
    let scale = format!("--scale={SCALE}");
    let made = command
        .args(["--initialize", "--quiet", &scale, "postgres"])
        .output()?;
    if !made.status.success() {
        return Err(format!("pgbench: {}", String::from_utf8_lossy(&made.stderr)).into());
    }
    let script = Script::builtin(builtin);
    let wants = [Want::Lease, Want::Select1];
    let (mut rates, mut refused) = ([Vec::new(), Vec::new()], Vec::new());
    let mut selected = Vec::new();
    // the first round warms up and is thrown away
    for round in 0..=options.rounds {
        for number in order(round, wants.len()) {
            let is_over = AtomicBool::new(false);
            let (run, phase) = thread::scope(|scope| -> Result<_> {
                let drive =
                    || pool.drive(rate, wants[number], |_| !is_over.load(Ordering::Relaxed));
                let driving = scope.spawn(drive);
                let run = script.rate(cluster, CLIENTS, options.seconds, &Vec::new());
                is_over.store(true, Ordering::Relaxed);
                let phase = driving.join().map_err(|_| "the arrivals panicked")??;
                Ok((run?, phase))
            })?;
            let name = match wants[number] {
                Want::Lease => "leases",
                Want::Select1 => "SELECT 1",
            };
            eprintln!(
                "overload, round {round}: {builtin} beside arrivals for {name} {run:.0}/s ({})",
                phase.numbers()
            );
            if round > 0 {
                rates[number].push(run);
                match wants[number] {
                    Want::Lease => refused.extend(phase.times(|a| a == Some(Answer::Shed))),
                    Want::Select1 => selected.extend(phase.times(|_| true)),
                }
            }
        }
    }
    let what =
        format!("pgbench {builtin}, {CLIENTS} clients, beside arrivals at ten times the capacity");
    let [ours, theirs] = &rates;
    let ratios = ratios(ours, theirs);
    let (low, high) = range(&ratios);
    report.ratio(
        &what,
        format!("{:.0}/s", median(ours)),
        Figure {
            name: "arrivals run SELECT 1",
            value: format!("{:.0}/s", median(theirs)),
        },
        Ratio {
            value: median(&ratios),
            spread: format!(" ({low:.2} to {high:.2})"),
        },
        Some(Target::AtLeast(0.8)),
    );
    report.note(&format!("{what}: refused"), spread(&refused));
    report.note(
        "  the same for the SELECT 1 of the arrivals",
        spread(&selected),
    );
    Ok(())
}

/// Those who came, as many a second, for a time.
struct Phase {
    samples: Vec<Sample>,
    /// Found no connection.
    not_sent: u32,
    rate: f64,
    seconds: f64,
}

impl Phase {
    fn times(&self, of: impl Fn(Option<Answer>) -> bool) -> Vec<f64> {
        let chosen = self.samples.iter().filter(|sample| of(sample.answer));
        chosen.map(|sample| sample.ms).collect()
    }

    fn numbers(&self) -> String {
        let count = |answer: fn(Answer) -> bool| {
            let answers = self.samples.iter().filter_map(|sample| sample.answer);
            answers.filter(|found| answer(*found)).count()
        };
        format!(
            "{} sent, {} not for want of a connection, {} granted, {} refused, {} NULL",
            self.samples.len(),
            self.not_sent,
            count(|answer| matches!(answer, Answer::Granted(_))),
            count(|answer| answer == Answer::Shed),
            count(|answer| answer == Answer::Denied),
        )
    }

    fn report(&self, (before, after): (f64, f64), yardstick: &Beside, report: &mut Report) {
        let what = format!(
            "{:.0} arrivals/s for {:.0} s, wait {} ms",
            self.rate,
            self.seconds,
            WAIT.as_millis()
        );
        report.note(&what, self.numbers());
        let granted = self.times(|answer| matches!(answer, Some(Answer::Granted(_))));
        let goodput = granted.len() as f64 / self.seconds;
        let capacity = before.max(after);
        report.ratio(
            &format!("{what}: goodput"),
            format!("{goodput:.1}/s"),
            Figure {
                name: "capacity, before and after",
                value: format!("{before:.1}/s, {after:.1}/s"),
            },
            Ratio {
                value: goodput / capacity,
                spread: String::new(),
            },
            Some(Target::AtLeast(0.9)),
        );
        let shed = self.times(|answer| answer == Some(Answer::Shed));
        if !shed.is_empty() {
            report.figure(
                &format!("{what}: refused"),
                spread(&shed),
                &format!("p99 under {REFUSED_MS} ms"),
                percentile(&shed, 0.99) < REFUSED_MS,
            );
        }
        report.note("  SELECT 1 beside it", spread(&yardstick.select_1));
        let acquires = "  acquire + commit of a resource that nobody else wants";
        report.note(acquires, spread(&yardstick.acquire));
        // whoever gets it at the end of his wait has a commit before him
        let kinds: [(&str, Vec<f64>, &[f64], &str); 2] = [
            (
                "NULL",
                self.times(|answer| answer == Some(Answer::Denied)),
                &yardstick.select_1,
                "SELECT 1",
            ),
            ("grant", granted.clone(), &yardstick.acquire, "acquire"),
        ];
        for (kind, times, than, name) in kinds {
            if times.is_empty() {
                continue;
            }
            let over: Vec<f64> = times.iter().map(|time| time - ms(WAIT)).collect();
            let slack = percentile(than, 0.999);
            let late = over.iter().filter(|over| **over > slack).count();
            report.figure(
                &format!("{what}: {kind} after the end of the wait"),
                format!(
                    "p99.9 {:.2}, highest {:.2} ms; {late} of {} beyond",
                    percentile(&over, 0.999),
                    percentile(&over, 1.0),
                    over.len()
                ),
                &format!("p99.9 at most {slack:.2} ms, that of {name}"),
                percentile(&over, 0.999) <= slack,
            );
        }
        let vain = self.times(|answer| answer == Some(Answer::Denied)).len();
        report.note(
            &format!("{what}: waited in vain, of those not refused"),
            format!(
                "{:.1}%",
                100.0 * vain as f64 / (vain + granted.len()).max(1) as f64
            ),
        );
        if !granted.is_empty() {
            report.note(&format!("{what}: a grant came after"), spread(&granted));
        }
    }
}

/// A set of times in a few words.
fn spread(times: &[f64]) -> String {
    if times.is_empty() {
        return "none".into();
    }
    let slow = times.iter().filter(|ms| **ms > REFUSED_MS).count();
    format!(
        "p50 {:.2}, p99 {:.2}, p99.9 {:.2}, highest {:.2} ms; {:.2}% above {REFUSED_MS} ms",
        percentile(times, 0.5),
        percentile(times, 0.99),
        percentile(times, 0.999),
        percentile(times, 1.0),
        100.0 * slow as f64 / times.len() as f64
    )
}

/// What the threads of the pool and those who send to it share.
#[derive(Default)]
struct Shared {
    free: Vec<usize>,
    samples: Vec<Sample>,
}

/// Connections, with a thread each.
struct Pool {
    shared: Arc<Mutex<Shared>>,
    jobs: Vec<Sender<Want>>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Pool {
    fn new(cluster: &Cluster) -> Result<Self> {
        let mut pool = Pool {
            shared: Arc::default(),
            jobs: Vec::new(),
            threads: Vec::new(),
        };
        let wait = format!("{} ms", WAIT.as_millis());
        for number in 0..CONNECTIONS {
            let caller = Caller::new(cluster, "wanted", &wait)?;
            let (job, jobs) = channel();
            let shared = pool.shared.clone();
            pool.threads
                .push(thread::spawn(move || serve(caller, &jobs, &shared, number)));
            pool.jobs.push(job);
        }
        pool.shared().free = (0..CONNECTIONS).collect();
        Ok(pool)
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("nobody panics with the pool")
    }

    /// Arrivals at a rate, as long as that says; then waits until all are answered.
    fn drive(&self, rate: f64, want: Want, go_on: impl Fn(Instant) -> bool) -> Result<Phase> {
        let mut random = Random::new(7);
        let begin = Instant::now();
        let mut next = begin;
        let mut not_sent = 0;
        while go_on(begin) {
            next += random.pause(rate);
            sleep(next.saturating_duration_since(Instant::now()));
            let free = self.shared().free.pop();
            match free {
                Some(number) => self.jobs[number].send(want)?,
                None => not_sent += 1,
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        // a thread that has failed does not come back
        while self.shared().free.len() < CONNECTIONS {
            if self.threads.iter().any(JoinHandle::is_finished) {
                return Err("a connection of the pool failed".into());
            }
            sleep(Duration::from_millis(1));
        }
        Ok(Phase {
            samples: std::mem::take(&mut self.shared().samples),
            not_sent,
            rate,
            seconds,
        })
    }

    fn close(self) -> Result<()> {
        drop(self.jobs);
        for thread in self.threads {
            thread.join().map_err(|_| "a connection panicked")??;
        }
        Ok(())
    }
}

/// What a connection of the pool does with each who arrives.
fn serve(
    mut caller: Caller,
    jobs: &Receiver<Want>,
    shared: &Mutex<Shared>,
    number: usize,
) -> Result<()> {
    for want in jobs {
        let (time, answer) = match want {
            Want::Select1 => timed(|| caller.select_1().map(|()| None))?,
            Want::Lease => timed(|| caller.acquire().map(Some))?,
        };
        if let Some(Answer::Granted(token)) = answer {
            sleep(HOLD);
            caller.release(token)?;
        }
        let mut shared = shared.lock().map_err(|_| "the pool panicked")?;
        shared.samples.push(Sample {
            answer,
            ms: ms(time),
        });
        shared.free.push(number);
    }
    Ok(())
}
