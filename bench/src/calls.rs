//! The calls of a client that wants a resource, what became of them, and the chance that it leaves things to.

use std::time::{Duration, Instant};

use postgres::error::SqlState;
use postgres::{Client, Statement};

use crate::Result;
use crate::cluster::Cluster;

/// What an acquire was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The token.
    Granted(i64),
    /// NULL: it could not be had in time.
    Denied,
    /// LH005.
    Shed,
}

/// A session that acquires and releases one resource.
pub struct Caller {
    client: Client,
    acquire: Statement,
    release: Statement,
    select_1: Statement,
}

impl Caller {
    /// `wait`: an interval.
    pub fn new(cluster: &Cluster, resource: &str, wait: &str) -> Result<Self> {
        let mut client = cluster.connect()?;
        let acquire = format!("SELECT acquire_lease('{resource}', wait => '{wait}')");
        let release = format!("SELECT release_lease('{resource}', $1)");
        Ok(Caller {
            acquire: client.prepare(&acquire)?,
            release: client.prepare(&release)?,
            select_1: client.prepare("SELECT 1")?,
            client,
        })
    }

    pub fn acquire(&mut self) -> Result<Answer> {
        match self.client.query_one(&self.acquire, &[]) {
            Ok(row) => Ok(row
                .get::<_, Option<i64>>(0)
                .map_or(Answer::Denied, Answer::Granted)),
            Err(error) if error.code().is_some_and(is_shed) => Ok(Answer::Shed),
            Err(error) => Err(error.into()),
        }
    }

    /// A release that was not one is an error.
    pub fn release(&mut self, token: i64) -> Result<()> {
        let row = self.client.query_one(&self.release, &[&token])?;
        match row.get(0) {
            true => Ok(()),
            false => Err(format!("token {token} was not released").into()),
        }
    }

    pub fn select_1(&mut self) -> Result<()> {
        self.client.query_one(&self.select_1, &[])?;
        Ok(())
    }
}

pub fn is_shed(code: &SqlState) -> bool {
    code.code() == "LH005"
}

/// How long it took, and what came of it.
pub fn timed<T>(call: impl FnOnce() -> Result<T>) -> Result<(Duration, T)> {
    let begin = Instant::now();
    let result = call()?;
    Ok((begin.elapsed(), result))
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Numbers that look random, and are the same with the same seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// SplitMix64, public domain.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// From 0 up to 1, without it.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A time up to `most`.
    pub fn time(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.share())
    }

    /// The time until the next of events that come at that rate a second, each by itself.
    pub fn pause(&mut self, rate: f64) -> Duration {
        Duration::from_secs_f64(-(1.0 - self.share()).ln() / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_even_and_pauses_keep_the_rate() {
        let mut random = Random::new(1);
        let shares: f64 = (0..10_000).map(|_| random.share()).sum();
        assert!((4_800.0..5_200.0).contains(&shares), "{shares}");
        let pauses: Duration = (0..10_000).map(|_| random.pause(1_000.0)).sum();
        assert!((9.5..10.5).contains(&pauses.as_secs_f64()), "{pauses:?}");
        assert!((0..100).all(|_| random.below(3) < 3));
    }
}
