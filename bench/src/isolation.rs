//! Whether a storm on one resource slows down who uses others: clients that acquire and release resources of their
//! own, beside a storm, against the same beside as many clients that run `SELECT 1`.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use crate::calls::{Answer, Caller};
use crate::cluster::Cluster;
use crate::contest::count;
use crate::pgbench::{Run, Script};
use crate::rates;
use crate::report::{Figure, Ratio, Report, Target};
use crate::stats::{median, order, percentile, range, ratios};
use crate::{Options, Result};

const STORMERS: u32 = 64;
const CLIENTS: u32 = 8;
/// How long whoever gets the resource holds it.
const HOLD: Duration = Duration::from_millis(1);
const TARGET_MS: f64 = 5.0;

/// What the stormers do.
struct Storm {
    name: &'static str,
    /// None: `SELECT 1`.
    wait: Option<&'static str>,
}

/// The first is the yardstick. With a wait some are in the queue and the others are shed.
const STORMS: [Storm; 3] = [
    Storm {
        name: "SELECT 1",
        wait: None,
    },
    Storm {
        name: "acquire, no wait",
        wait: Some("0"),
    },
    Storm {
        name: "acquire, wait of 50 ms",
        wait: Some("50 ms"),
    },
];

/// What a storm did to those beside it.
#[derive(Default)]
struct Beside {
    rates: Vec<f64>,
    p99s: Vec<f64>,
    storms: Vec<Tally>,
}

/// What the stormers were answered, a second.
#[derive(Clone, Copy, Default)]
struct Tally {
    calls: f64,
    granted: f64,
    shed: f64,
}

/// Two rows for each storm: the rate and the p99 of the others.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let cluster = Cluster::with_leasehold(&options.pg_config, &["max_connections = 200"])?;
    rates::touch(&mut cluster.connect()?)?;
    let script = Script::new(&cluster, "acquire", rates::ACQUIRE)?;
    let mut besides: [Beside; STORMS.len()] = Default::default();
    // the first round warms up and is thrown away
    for round in 0..=options.rounds {
        for number in order(round, STORMS.len()) {
            let seconds = if round == 0 { 1 } else { options.seconds };
            let (run, tally) = storm(&cluster, &STORMS[number], || {
                script.run_timed(&cluster, CLIENTS, seconds, &vec![("n", 0)])
            })?;
            let p99 = percentile(&run.times, 0.99);
            eprintln!(
                "isolation, round {round}: {} beside {} {:.0}/s, p99 {p99:.2} ms",
                STORMS[number].name, tally, run.rate
            );
            if round > 0 {
                besides[number].rates.push(run.rate);
                besides[number].p99s.push(p99);
                besides[number].storms.push(tally);
            }
        }
    }
    let [yardstick, storms @ ..] = &besides;
    for (storm, beside) in STORMS[1..].iter().zip(storms) {
        add_rows(storm, beside, yardstick, report);
    }
    Ok(())
}

/// What `run` came to beside a storm, and what the storm was answered.
fn storm(
    cluster: &Cluster,
    storm: &Storm,
    run: impl FnOnce() -> Result<Run>,
) -> Result<(Run, Tally)> {
    let (ready, is_over) = (Barrier::new(STORMERS as usize + 1), AtomicBool::new(false));
    thread::scope(|scope| {
        let stormer = || {
            // whoever fails must come to the barrier too
            let caller = Caller::new(cluster, "hot", storm.wait.unwrap_or("0"));
            ready.wait();
            blow(caller?, storm.wait.is_some(), &is_over)
        };
        let threads: Vec<_> = (0..STORMERS).map(|_| scope.spawn(stormer)).collect();
        ready.wait();
        let begin = Instant::now();
        let result = run();
        is_over.store(true, Ordering::Relaxed);
        let seconds = begin.elapsed().as_secs_f64();
        let mut tally = Tally::default();
        for thread in threads {
            let part = thread.join().map_err(|_| "a stormer panicked")??;
            tally.calls += part.calls / seconds;
            tally.granted += part.granted / seconds;
            tally.shed += part.shed / seconds;
        }
        Ok((result?, tally))
    })
}

/// A stormer's calls, one at once after the other, whatever he is told. In numbers, not a second.
fn blow(mut caller: Caller, acquires: bool, is_over: &AtomicBool) -> Result<Tally> {
    let mut tally = Tally::default();
    while !is_over.load(Ordering::Relaxed) {
        tally.calls += 1.0;
        if !acquires {
            caller.select_1()?;
            continue;
        }
        match caller.acquire()? {
            Answer::Granted(token) => {
                tally.granted += 1.0;
                sleep(HOLD);
                caller.release(token)?;
            }
            Answer::Shed => tally.shed += 1.0,
            Answer::Denied => {}
        }
    }
    Ok(tally)
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.0} calls/s ({:.0} granted, {:.0} shed)",
            self.calls, self.granted, self.shed
        )
    }
}

fn add_rows(storm: &Storm, ours: &Beside, theirs: &Beside, report: &mut Report) {
    let what = format!(
        "acquire + release, {} beside {STORMERS} storming one resource ({})",
        count(CLIENTS),
        storm.name
    );
    let against = |value| Figure {
        name: "beside SELECT 1",
        value,
    };
    let ratio = |ours: &[f64], theirs: &[f64]| {
        let ratios = ratios(ours, theirs);
        let (low, high) = range(&ratios);
        Ratio {
            value: median(&ratios),
            spread: format!(" ({low:.2} to {high:.2})"),
        }
    };
    report.ratio(
        &what,
        format!("{:.0}/s", median(&ours.rates)),
        against(format!("{:.0}/s", median(&theirs.rates))),
        ratio(&ours.rates, &theirs.rates),
        Some(Target::AtLeast(0.8)),
    );
    let p99 = median(&ours.p99s);
    let shown = |p99: f64| format!("{p99:.2} ms");
    let name = format!("{what}: p99");
    if p99 < TARGET_MS {
        report.figure(&name, shown(p99), &format!("under {TARGET_MS} ms"), true);
    } else {
        // a machine that is too small for it
        report.ratio(
            &name,
            shown(p99),
            against(shown(median(&theirs.p99s))),
            ratio(&ours.p99s, &theirs.p99s),
            Some(Target::AtMost(1.1)),
        );
    }
    let mid = |part: fn(&Tally) -> f64| median(&ours.storms.iter().map(part).collect::<Vec<_>>());
    let tally = Tally {
        calls: mid(|tally| tally.calls),
        granted: mid(|tally| tally.granted),
        shed: mid(|tally| tally.shed),
    };
    report.note("  the storm", tally.to_string());
}
