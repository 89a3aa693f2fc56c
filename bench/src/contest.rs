//! A contest: competitors that do the same job run in turn, round after round, and the first is compared
//! with each of the others.

use std::thread::sleep;
use std::time::{Duration, Instant};

use postgres::Client;

use crate::cluster::Cluster;
use crate::report::{Figure, Ratio, Report, Target};
use crate::stats::{median, order, range, ratios};
use crate::{Options, Result};

/// Variables of a script, and what `check` needs to know of the leases that `prepare` took.
pub type Variables = Vec<(&'static str, i64)>;

/// What a competitor does over and over.
pub trait Load {
    /// Passes a second.
    fn rate(
        &self,
        cluster: &Cluster,
        clients: u32,
        seconds: u32,
        variables: &Variables,
    ) -> Result<f64>;
}

/// One way to do the job, and what to do before and after each of its runs, which is not measured.
pub struct Competitor<'a> {
    pub name: &'static str,
    pub load: &'a dyn Load,
    pub prepare: fn(&mut Client, clients: u32) -> Result<Variables>,
    pub check: fn(&mut Client, clients: u32, &Variables) -> Result<()>,
}

/// The rows of one number of clients: the first competitor is ours, each other one gives a row.
pub struct Contest<'a> {
    pub what: String,
    pub clients: u32,
    pub competitors: &'a [Competitor<'a>],
    /// Of each other competitor; None for information.
    pub targets: &'a [Option<Target>],
}

impl Contest<'_> {
    /// Runs all rounds and adds the rows.
    pub fn hold(
        &self,
        options: &Options,
        cluster: &Cluster,
        client: &mut Client,
        report: &mut Report,
    ) -> Result<()> {
        let mut rates = vec![Vec::new(); self.competitors.len()];
        // the first round warms up and is thrown away
        for round in 0..=options.rounds {
            for number in order(round, self.competitors.len()) {
                let seconds = if round == 0 { 1 } else { options.seconds };
                let rate = self.run(&self.competitors[number], cluster, client, seconds)?;
                eprintln!(
                    "{}, round {round}: {} {}",
                    self.what,
                    self.competitors[number].name,
                    per_second(rate)
                );
                if round > 0 {
                    rates[number].push(rate);
                }
            }
        }
        let (ours, others) = rates.split_first().ok_or("no competitor")?;
        for ((competitor, theirs), target) in
            self.competitors[1..].iter().zip(others).zip(self.targets)
        {
            let against = Figure {
                name: competitor.name,
                value: per_second(median(theirs)),
            };
            let ratios = ratios(ours, theirs);
            let (low, high) = range(&ratios);
            let ratio = Ratio {
                value: median(&ratios),
                spread: format!(" ({low:.2} to {high:.2})"),
            };
            report.ratio(
                &self.what,
                per_second(median(ours)),
                against,
                ratio,
                *target,
            );
        }
        Ok(())
    }

    fn run(
        &self,
        competitor: &Competitor<'_>,
        cluster: &Cluster,
        client: &mut Client,
        seconds: u32,
    ) -> Result<f64> {
        let variables = (competitor.prepare)(client, self.clients)?;
        settle(client)?;
        let rate = competitor
            .load
            .rate(cluster, self.clients, seconds, &variables)?;
        (competitor.check)(client, self.clients, &variables)?;
        Ok(rate)
    }
}

/// Nothing to ask the server after a run.
pub fn no_check(_: &mut Client, _: u32, _: &Variables) -> Result<()> {
    Ok(())
}

/// Lets the server finish what the run before left to its background processes. They report the
/// end of it to nobody, so we watch the WAL come to rest.
fn settle(client: &mut Client) -> Result<()> {
    const STILL: Duration = Duration::from_millis(100);
    const LIMIT: Duration = Duration::from_secs(10);
    let begin = Instant::now();
    let mut position = wal_position(client)?;
    while begin.elapsed() < LIMIT {
        sleep(STILL);
        let next = wal_position(client)?;
        if next == position {
            return Ok(());
        }
        position = next;
    }
    Err("the server writes WAL without being asked to".into())
}

fn wal_position(client: &mut Client) -> Result<String> {
    Ok(client
        .query_one("SELECT pg_current_wal_insert_lsn()::text", &[])?
        .get(0))
}

/// For the name of a row.
pub fn count(clients: u32) -> String {
    format!("{clients} client{}", if clients == 1 { "" } else { "s" })
}

fn per_second(rate: f64) -> String {
    format!("{rate:.0}/s")
}
