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
            (Op::Acquire { .. }, None) => "acquire: NULL",
            (Op::Acquire { durable: true, .. }, Some(_)) => "acquire: a token, durable",
            (Op::Acquire { durable: false, .. }, Some(_)) => "acquire: a token, memory",
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
            "{} grants, {} writes, {} takeovers, {} survivals, {} commits in doubt, {} lost; refused: {}",
            self.grants,
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
        line("fenced writes acknowledged", self.writes)?;
        line("commits in doubt, resolved in the end", self.in_doubt)?;
        line("acknowledged and lost, where that may be", self.lost)?;
        line("violations", self.violations)
    }
}
