//! What a run, or many, have done and seen, in numbers.

use std::collections::BTreeMap;
use std::fmt;

use super::event::Op;

#[derive(Debug, Default, Clone)]
pub struct Tally {
    pub runs: u64,
    /// What was done to servers and clients.
    blows: BTreeMap<String, u64>,
    operations: BTreeMap<&'static str, u64>,
    refusals: BTreeMap<String, u64>,
    pub grants: u64,
    pub takeovers: u64,
    /// Leases that were used after a restart or a promotion that they were granted before.
    pub survivals: u64,
    /// Acquires that brought a wait and were answered by a token or NULL.
    pub waits: u64,
    /// Grants to those that were seen in a queue.
    pub waited: u64,
    /// Those of them whose turn was known to come after that of another.
    pub ordered: u64,
    /// LH005.
    pub sheds: u64,
    /// Requests that were asked for again and got the token that had been granted before.
    pub retried: u64,
    /// Leases that were broken, and the break committed.
    pub breaks: u64,
    /// Fenced writes that were acknowledged.
    pub writes: u64,
    /// Commits that were not answered.
    pub in_doubt: u64,
    /// Grants and writes that were acknowledged and went with an asynchronous or cut off promotion.
    pub lost: u64,
    pub violations: u64,
}

impl Tally {
    pub fn of_a_run() -> Self {
        Self {
            runs: 1,
            ..Self::default()
        }
    }

    pub fn blow(&mut self, what: &str) {
        *self.blows.entry(what.to_owned()).or_default() += 1;
    }

    pub fn operation(&mut self, op: &Op, numbers: &[i64]) {
        let told = numbers.first().copied();
        let what = match (op, told) {
            (Op::Begin | Op::ReleaseSavepoint | Op::Savepoint, _) => return,
            (Op::RollbackTo, _) => "rollback to a savepoint",
            (Op::Commit, _) => "commit of a block",
            (Op::Rollback, _) => "rollback of a block",
            (Op::Acquire(wanted), None) if wanted.wait > 0 => "acquire with a wait: NULL",
            (Op::Acquire(_), None) => "acquire: NULL",
            (Op::Acquire(wanted), Some(_)) if wanted.called => "await_lease: a token",
            (Op::Acquire(wanted), Some(_)) if wanted.wait > 0 => "acquire with a wait: a token",
            (Op::Acquire(wanted), Some(_)) if wanted.durable => "acquire: a token, durable",
            (Op::Acquire(_), Some(_)) => "acquire: a token, memory",
            (Op::Renew { .. }, Some(1)) => "renew: true",
            (Op::Renew { .. }, _) => "renew: false",
            (Op::Release { .. }, Some(1)) => "release: true",
            (Op::Release { .. }, _) => "release: false",
            (Op::Write { leases, .. }, _) if leases.len() > 1 => {
                "fenced write under two leases: passed"
            }
            (Op::Write { .. }, _) => "fenced write: passed",
            (Op::Fence { .. }, _) => "fence(): passed",
            (Op::See { .. }, _) => "read after a grant",
            (Op::Break { .. }, Some(_)) => "break: a token",
            (Op::Break { .. }, None) => "break: NULL",
        };
        *self.operations.entry(what).or_default() += 1;
    }

    pub fn refusal(&mut self, sqlstate: &str) {
        *self.refusals.entry(sqlstate.to_owned()).or_default() += 1;
    }

    pub fn refused(&self, sqlstate: &str) -> u64 {
        self.refusals.get(sqlstate).copied().unwrap_or(0)
    }

    pub fn add(&mut self, other: &Self) {
        fn join<K: Ord + Clone>(ours: &mut BTreeMap<K, u64>, theirs: &BTreeMap<K, u64>) {
            for (what, times) in theirs {
                *ours.entry(what.clone()).or_default() += times;
            }
        }
        join(&mut self.blows, &other.blows);
        join(&mut self.operations, &other.operations);
        join(&mut self.refusals, &other.refusals);
        self.runs += other.runs;
        self.grants += other.grants;
        self.takeovers += other.takeovers;
        self.survivals += other.survivals;
        self.waits += other.waits;
        self.waited += other.waited;
        self.ordered += other.ordered;
        self.sheds += other.sheds;
        self.retried += other.retried;
        self.breaks += other.breaks;
        self.writes += other.writes;
        self.in_doubt += other.in_doubt;
        self.lost += other.lost;
        self.violations += other.violations;
    }

    /// One line.
    pub fn summary(&self) -> String {
        let refused: Vec<String> = self
            .refusals
            .iter()
            .map(|(sqlstate, times)| format!("{times} {sqlstate}"))
            .collect();
        format!(
            "{} grants, {} of {} waits granted, {} in a known order, {} sheds, {} retries granted before, {} breaks, \
             {} writes, {} takeovers, {} survivals, {} commits in doubt, {} lost; refused: {}",
            self.grants,
            self.waited,
            self.waits,
            self.ordered,
            self.sheds,
            self.retried,
            self.breaks,
            self.writes,
            self.takeovers,
            self.survivals,
            self.in_doubt,
            self.lost,
            refused.join(", ")
        )
    }
}

/// A table in Markdown.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| what | times |\n|---|---:|")?;
        let mut line = |what: &str, times: u64| writeln!(f, "| {what} | {times} |");
        line("fresh clusters", self.runs)?;
        for (what, times) in &self.blows {
            line(what, *times)?;
        }
        for (what, times) in &self.operations {
            line(what, *times)?;
        }
        for (sqlstate, times) in &self.refusals {
            line(&format!("refused: {sqlstate}"), *times)?;
        }
        line("grants committed", self.grants)?;
        line("grants over a lease that was not released", self.takeovers)?;
        line("leases used after a restart or promotion", self.survivals)?;
        line("waits for a lease that were answered", self.waits)?;
        line("grants to those that were seen to wait", self.waited)?;
        line(
            "grants whose turn was known to come after another's",
            self.ordered,
        )?;
        line("waits that were refused at once", self.sheds)?;
        line(
            "retries answered with the token granted before",
            self.retried,
        )?;
        line("leases broken", self.breaks)?;
        line("fenced writes acknowledged", self.writes)?;
        line("commits in doubt, resolved in the end", self.in_doubt)?;
        line("acknowledged and lost, where that may be", self.lost)?;
        line("violations", self.violations)
    }
}
