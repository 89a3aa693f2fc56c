//! Does to servers and clients what a plan says, and writes down when.

use std::thread;
use std::time::Duration;

use super::client::LONG_TTL_MS;
use super::clients::Clients;
use super::clock::{self, Micros};
use super::history::{Blow, Strike};
use super::observer::Observer;
use super::plan::{Deed, Kind, Plan, Promotion};
use super::report::Tally;
use super::rng::Rng;
use super::servers::Servers;
use crate::cluster::{Stop, wait_for};
use crate::process::Signal;

/// A deed falls anywhere within so long after the clients have worked enough.
const WITHIN_MS: u64 = 200;
/// How long a primary goes on that its standby is cut off from, at most.
const CUT_MS: u64 = 400;
/// How long a backend that waits is stopped: longer than the second that those behind it wait for it to look.
const LATE_MS: (u64, u64) = (1200, 1800);
/// Farthest step of the wall clock, in hours.
const STEP_HOURS: u64 = 48;

pub struct Nemesis<'a> {
    servers: &'a mut Servers,
    clients: &'a mut Clients,
    observer: &'a Observer,
    rng: Rng,
    pub blows: Vec<Blow>,
    pub strikes: Vec<Strike>,
    /// From when to when something was done to the servers or to a backend. Clients may do what they like.
    pub disturbed: Vec<(Micros, Micros)>,
    /// Hours that the wall clock is off, for the steps to go both ways.
    hours: i64,
}

impl<'a> Nemesis<'a> {
    pub fn new(
        servers: &'a mut Servers,
        clients: &'a mut Clients,
        observer: &'a Observer,
        seed: u64,
    ) -> Self {
        Self {
            servers,
            clients,
            observer,
            // apart from the clients' own
            rng: Rng::part(seed, u64::MAX),
            blows: Vec::new(),
            strikes: Vec::new(),
            disturbed: Vec::new(),
            hours: 0,
        }
    }

    pub fn carry_out(&mut self, plan: &Plan, tally: &mut Tally) {
        for deed in &plan.deeds {
            self.clients.wait_for_commits(plan.commits);
            thread::sleep(Duration::from_millis(self.rng.below(WITHIN_MS)));
            let from = clock::now();
            self.carry_out_one(*deed, tally);
            if deed.disturbs() {
                self.disturbed.push((from, clock::now()));
            }
        }
        self.clients.wait_for_commits(plan.commits);
    }

    fn carry_out_one(&mut self, deed: Deed, tally: &mut Tally) {
        let what = match deed {
            Deed::KillPostmaster => {
                let blow = self.servers.kill_postmaster();
                self.blows.push(blow);
                "kill -9 of the postmaster"
            }
            Deed::Restart(how) => {
                let blow = self.servers.stop(how);
                self.blows.push(blow);
                match how {
                    Stop::Immediate => "immediate restart",
                    _ => "fast restart",
                }
            }
            Deed::CrashBackend => {
                let mut backends = self.clients.backends();
                // one of them, or none: a process of the server's own
                let chosen = self.rng.below(backends.len() as u64 + 1) as usize;
                backends = backends.get(chosen).copied().into_iter().collect();
                let blow = self.servers.crash_backend(&backends);
                self.blows.push(blow);
                "kill -9 of a backend"
            }
            Deed::KillClient => {
                self.clients.kill(&mut self.rng);
                "kill -9 of a client"
            }
            Deed::StopClients => {
                self.stop_clients();
                "clients stopped for longer than a TTL"
            }
            Deed::CancelWaiter => {
                self.strike("pg_cancel_backend", false);
                "cancel of one that waits"
            }
            Deed::EndWaiter => {
                self.strike("pg_terminate_backend", true);
                "end of the session of one that waits"
            }
            Deed::StopClientOfWaiter => {
                let waiter = self.waiter();
                let stopped = self.clients.stop_client_of(waiter);
                self.pause(LONG_TTL_MS.1, LONG_TTL_MS.1 * 3 / 2);
                self.clients.go_on(&stopped);
                "client of one that waits stopped for longer than a TTL"
            }
            Deed::StopWaiter => {
                let waiter = self.waiter();
                self.servers.signal_backend(waiter, Signal::STOP);
                self.pause(LATE_MS.0, LATE_MS.1);
                self.servers.signal_backend(waiter, Signal::CONT);
                "backend that waits stopped for longer than a second"
            }
            Deed::StepWallClock => {
                self.step_wall_clock();
                "wall clock stepped by hours"
            }
            Deed::Promote(promotion) => return self.promote(promotion, tally),
        };
        tally.blow(what);
    }

    fn stop_clients(&mut self) {
        let how_many = self.rng.between(1, 3) as usize;
        let stopped = self.clients.stop(how_many, &mut self.rng);
        self.pause(LONG_TTL_MS.1, LONG_TTL_MS.1 * 3 / 2);
        self.clients.go_on(&stopped);
    }

    fn pause(&mut self, low: u64, high: u64) {
        thread::sleep(Duration::from_millis(self.rng.between(low, high)));
    }

    /// The backend of a client that waits for a lease.
    fn waiter(&mut self) -> i32 {
        self.call_for_waiter("").pid
    }

    fn strike(&mut self, function: &str, ends: bool) {
        let strike = self.call_for_waiter(function);
        self.strikes.push(Strike { ends, ..strike });
    }

    /// In one statement with the look, so that it is still waiting most likely.
    fn call_for_waiter(&mut self, function: &str) -> Strike {
        let mut session = self.servers.session();
        let sql = format!(
            "SELECT pid, {function}(pid) FROM
                 (SELECT pid FROM leasehold.waiters ORDER BY random() LIMIT 1) AS waiter"
        );
        wait_for("somebody to wait for a lease", || {
            let from = clock::now();
            let pid = session.text(&sql)?;
            Some(Strike {
                pid: pid.parse().expect("a pid"),
                ends: false,
                from,
                until: clock::now(),
            })
        })
    }

    /// Now ahead, now back.
    fn step_wall_clock(&mut self) {
        let hours = self.rng.between(1, STEP_HOURS).cast_signed();
        self.hours = if self.hours > 0 { -hours } else { hours };
        self.servers.step_wall_clock(self.hours * 3600);
    }

    /// What is counted: a promotion, and what else belongs to it.
    fn promote(&mut self, promotion: Promotion, tally: &mut Tally) {
        let cut_since = promotion.cut.then(|| {
            let since = self.servers.cut();
            self.go_on_alone();
            if promotion.relapse {
                self.relapse(tally);
            }
            since
        });
        let (blow, old) = self.servers.promote(&promotion, cut_since);
        self.blows.push(blow);
        self.clients.publish(&self.servers.socket_dir());
        self.observer.publish(&self.servers.socket_dir());
        if promotion.struck {
            thread::sleep(Duration::from_millis(self.rng.below(WITHIN_MS)));
            self.blows.push(self.servers.kill_postmaster());
        }
        if promotion.rewind {
            self.servers.rewind(old);
        } else {
            drop(old);
            self.servers.attach_standby();
        }
        if promotion.struck {
            tally.blow("kill -9 of the postmaster just promoted");
        }
        tally.blow(if promotion.rewind {
            "new standby by pg_rewind"
        } else {
            "new standby by pg_basebackup"
        });
        tally.blow(&format!(
            "promotion of {} standby, {}, {}",
            match self.servers.kind {
                Kind::Synchronous => "a synchronous",
                _ => "an asynchronous",
            },
            if promotion.cut {
                "cut off"
            } else {
                "caught up"
            },
            if promotion.lossless {
                "lossless"
            } else {
                "lossy"
            }
        ));
    }

    /// Where the run has a wall clock of its own, the restart is ahead of the promotion: the epoch of tokens alone tells
    /// which came first.
    fn relapse(&mut self, tally: &mut Tally) {
        let ahead = self
            .servers
            .has_wall_clock()
            .then_some(STEP_HOURS.cast_signed());
        self.set_wall_clock(ahead, tally);
        let blow = self.servers.kill_postmaster();
        self.blows.push(blow);
        tally.blow("kill -9 of the postmaster cut off from its standby");
        self.go_on_alone();
        self.set_wall_clock(ahead.map(|hours| -hours), tally);
    }

    fn set_wall_clock(&mut self, hours: Option<i64>, tally: &mut Tally) {
        if let Some(hours) = hours {
            self.hours = hours;
            self.servers.step_wall_clock(hours * 3600);
            tally.blow("wall clock stepped by hours");
        }
    }

    /// What is granted and written here, no standby has. Under synchronous replication nobody hears of it.
    fn go_on_alone(&mut self) {
        match self.servers.kind {
            Kind::Synchronous => {
                thread::sleep(Duration::from_millis(self.rng.between(CUT_MS / 4, CUT_MS)));
            }
            _ => self.clients.wait_for_commits(10),
        }
    }
}
