//! `make chaos`: runs of all kinds, one after the other, until the minutes are over or the counts are reached, and a table
//! of what was done and seen.
//!
//! `MINUTES=n` mixes everything. `KILLS=`, `PROMOTIONS=`, `CLOCK_STEPS=` and the other names of `Counts` say how often what
//! is to be done in all. With `KIND=` they make one run, which is how a run that has failed says how to repeat it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::plan::{Counts, Kind, Plan};
use super::report::Tally;
use super::rng::Rng;
use super::{SMALL_TABLE, run, seed};

/// True where no rule was broken.
pub fn main() -> Result<bool, String> {
    let (mut total, mut clean) = (Tally::default(), true);
    let orders = Orders::read()?;
    let began = Instant::now();
    for plan in orders.plans() {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&plan, settings(&plan))));
        match outcome {
            Ok(tally) => {
                println!(
                    "{:5} s {plan}: {}",
                    began.elapsed().as_secs(),
                    tally.summary()
                );
                total.add(&tally);
            }
            Err(_) => {
                println!("{:5} s FAILED {plan}", began.elapsed().as_secs());
                total.violations += 1;
                clean = false;
            }
        }
        if orders.over(began.elapsed()) {
            break;
        }
    }
    println!("\n{total}");
    Ok(clean)
}

struct Orders {
    seed: u64,
    minutes: Option<u64>,
    kind: Option<Kind>,
    counts: Counts,
}

impl Orders {
    fn read() -> Result<Self, String> {
        let mut counts = Counts::default();
        for (name, count) in counts.named() {
            *count = number(name)?.unwrap_or(0);
        }
        let kind = match std::env::var("KIND").ok().filter(|text| !text.is_empty()) {
            None => None,
            Some(word) => {
                let kind = Kind::ALL.into_iter().find(|kind| kind.word() == word);
                Some(kind.ok_or("KIND is alone, async or sync")?)
            }
        };
        let orders = Self {
            seed: seed(),
            minutes: number("MINUTES")?,
            kind,
            counts,
        };
        match orders.minutes.is_none() && counts.is_zero() {
            true => Err("say for how long, MINUTES=n, or how often what: KILLS=n ...".to_owned()),
            false => Ok(orders),
        }
    }

    fn over(&self, elapsed: Duration) -> bool {
        let limit = self
            .minutes
            .map(|minutes| Duration::from_secs(60 * minutes));
        limit.is_some_and(|limit| elapsed >= limit)
    }

    /// A run's seed says all of it, but for the counts that are asked for.
    fn plans(&self) -> Box<dyn Iterator<Item = Plan>> {
        let seed = self.seed;
        if let Some(kind) = self.kind {
            return Box::new(std::iter::once(Plan::new(seed, kind, self.counts)));
        }
        if self.minutes.is_some() && self.counts.is_zero() {
            return Box::new((seed..).map(mixed));
        }
        let mut left = self.counts;
        // alone last: it takes what is left when all promotions are done
        let mut kinds = [Kind::Synchronous, Kind::Asynchronous].into_iter().cycle();
        Box::new((seed..).map_while(move |seed| {
            if left.is_zero() {
                return None;
            }
            let kind = match left.promotions {
                0 => Kind::Alone,
                _ => kinds.next().unwrap_or(Kind::Synchronous),
            };
            Some(Plan::new(seed, kind, left.take_portion(kind)))
        }))
    }
}

/// Every other run has a table so small that entries are pushed out of it and come back from the ledger all the time.
fn settings(plan: &Plan) -> &'static [(&'static str, &'static str)] {
    match plan.seed % 2 {
        0 => &[SMALL_TABLE],
        _ => &[],
    }
}

fn mixed(seed: u64) -> Plan {
    let mut rng = Rng::part(seed, 1 << 32);
    let kind = Kind::ALL[rng.below(3) as usize];
    let mut counts = Counts::default();
    for (name, count) in counts.named() {
        let most = match name {
            "PROMOTIONS" if kind == Kind::Alone => 0,
            "CLOCK_STEPS" if rng.chance(50) => 0,
            _ => 4,
        };
        *count = rng.below(most + 1);
    }
    counts.promotions += u64::from(kind != Kind::Alone);
    counts.kills += u64::from(kind == Kind::Alone);
    Plan::new(seed, kind, counts)
}

fn number(name: &str) -> Result<Option<u64>, String> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty());
    text.map(|text| {
        text.parse()
            .map_err(|_| format!("{name}={text} is not a number"))
    })
    .transpose()
}
