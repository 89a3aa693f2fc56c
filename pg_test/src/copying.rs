//! Servers made of other servers: base backups, copies of files, standbys and their promotion; and what the tests of
//! them have in common.
//!
//! Invariants: a server made here is not started, so that a test may configure it first. It has the settings of the
//! server that it was made of, and after them those of its builder.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::cluster::{Builder, Cluster, Db, initdb, wait_for};
use crate::environment::{environment, run};
use crate::process::{Process, Signal};
use crate::session::Session;

/// A position of the tokens that the wall clock does not reach before 2060, as after promotions and an upgrade. Where a
/// test moves the sequence here, no token is above another by virtue of the clock.
pub const FAR_AHEAD: i64 = (1 << 50) + (1 << 44);

/// The epoch of a token.
pub fn epoch(token: i64) -> i64 {
    token >> 45
}

impl Builder {
    /// A cluster of its own initdb. All others have one system identifier.
    pub fn anew(self) -> Cluster {
        self.create_as(|data, _| initdb(data))
    }

    /// What pg_basebackup makes of a running server.
    pub fn backup_of(self, origin: &Cluster) -> Cluster {
        self.create_as(|data, dir| base_backup(origin, data, dir, &[]))
    }

    /// The same as a standby.
    pub fn standby_of(self, origin: &Cluster) -> Cluster {
        self.create_as(|data, dir| base_backup(origin, data, dir, &["-R"]))
    }

    /// A copy of the files of a stopped server.
    pub fn files_of(self, origin: &Cluster) -> Cluster {
        assert!(!origin.is_running(), "its files are changing");
        self.create_as(|data, dir| {
            let mut copy = environment().command("cp", dir);
            run(copy.arg("-a").arg(origin.data()).arg(data));
        })
    }
}

fn base_backup(origin: &Cluster, data: &Path, dir: &Path, options: &[&str]) {
    let mut backup = environment().pg_command("pg_basebackup", dir);
    backup.args(["--checkpoint=fast", "--no-sync", "-U", "postgres"]);
    backup.args(options).args(["-p", "5432", "-h"]);
    run(backup.arg(origin.socket_dir()).arg("-D").arg(data));
}

impl Cluster {
    /// Promotes a standby; it is writable when this returns.
    #[track_caller]
    pub fn promote(&self) {
        assert!(self.connect().one::<bool>("SELECT pg_promote(true, 60)"));
    }

    /// Gives this standby the history of timelines that another server knows, and nothing of what was written on them.
    pub fn hear_of_timelines(&self, other: &Self, timelines: &[u32]) {
        for timeline in timelines {
            let file = format!("pg_wal/{timeline:08X}.history");
            let mut copy = environment().command("cp", self.data());
            run(copy.arg(other.data().join(&file)).arg(file));
        }
    }

    /// Waits until recovery is over.
    pub fn wait_writable(&self) {
        self.wait_sql("SELECT NOT pg_is_in_recovery()", "the end of recovery");
    }

    /// Waits until the standby has replayed everything that was committed here.
    pub fn wait_replayed_by(&self, standby: &Self) {
        let committed: String = self
            .connect()
            .one("SELECT pg_current_wal_flush_lsn()::text");
        standby.wait_sql(
            &format!("SELECT pg_last_wal_replay_lsn() >= '{committed}'"),
            "the standby to catch up",
        );
    }

    /// Takes this standby from its primary for good: it does not hear of what is written there from now on.
    pub fn cut_off(&self) {
        let mut admin = self.connect();
        admin.exec("ALTER SYSTEM SET primary_conninfo = ''");
        admin.exec("SELECT pg_reload_conf()");
        self.wait_sql(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)",
            "the WAL receiver to leave",
        );
    }

    /// Stops the WAL receiver of this standby until the answer is dropped: the standby gets nothing, and says nothing.
    pub fn hold_receiver(&self) -> Held {
        let pid = wait_for("a WAL receiver", || {
            let mut session = self.connect();
            session.try_one("SELECT pid FROM pg_stat_wal_receiver").ok()
        });
        Held::hold(pid)
    }

    /// The timeline that this server writes on.
    pub fn timeline(&self) -> i64 {
        let file: String = self
            .connect()
            .one("SELECT pg_walfile_name(pg_current_wal_lsn())");
        i64::from_str_radix(&file[..8], 16).expect("a WAL file begins with its timeline")
    }
}

/// A process that was told to stop, and is told to go on when this is dropped.
pub struct Held(Process);

impl Held {
    /// Stops a process; it has stopped when this returns.
    #[track_caller]
    pub fn hold(pid: i32) -> Self {
        let held = Self(Process::open(pid));
        held.0.signal(Signal::STOP);
        wait_for("a process to stop", || is_stopped(pid).then_some(()));
        held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}

fn is_stopped(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

/// A database on a primary, and the standby that follows it.
pub struct Pair {
    pub db: Db,
    pub standby: Arc<Cluster>,
}

impl Pair {
    pub fn new(settings: &[(&str, &str)]) -> Self {
        // a standby that is slow to come must still find what it has missed
        let builder = Cluster::builder().conf("wal_keep_size", "64MB");
        let db = Db::on(&Arc::new(builder.confs(settings).start()));
        let standby = Cluster::builder().standby_of(&db.cluster);
        standby.start();
        Self {
            db,
            standby: Arc::new(standby),
        }
    }

    pub fn catch_up(&self) {
        self.db.cluster.wait_replayed_by(&self.standby);
    }

    /// The database on the standby.
    pub fn copy(&self) -> Db {
        self.db.at(&self.standby)
    }

    /// The primary dies, with everything that the standby has not heard of, and the standby takes over.
    pub fn fail_over(&self) -> Promoted {
        self.db.cluster.kill_postmaster();
        let before = Instant::now();
        self.standby.promote();
        Promoted {
            db: self.copy(),
            before,
        }
    }
}

/// A database on a server that was promoted.
pub struct Promoted {
    pub db: Db,
    /// An instant before the promotion.
    pub before: Instant,
}

impl Db {
    /// The database of the same name on another server.
    pub fn at(&self, cluster: &Arc<Cluster>) -> Self {
        Self {
            cluster: cluster.clone(),
            name: self.name.clone(),
        }
    }

    /// Every call refuses the token of a lease that was lost. LH001, and the ledger is as it was; leases may run out
    /// meanwhile.
    #[track_caller]
    pub fn has_lost(&self, resource: &str, token: i64) {
        let mut s = self.session();
        let ledger = "SELECT string_agg((resource, token, ttl_us, holder, granted_at)::text, ' ' ORDER BY resource)
                      FROM leasehold.ledger";
        let before = s.text(ledger);
        assert!(!s.check_fence(resource, token), "{resource}: {token}");
        s.err(&format!("SELECT fence('{resource}', {token})"))
            .is("LH001")
            .well_written();
        assert!(
            !s.renew(resource, token) && !s.release(resource, token),
            "{resource}: {token}"
        );
        assert_eq!(s.text(ledger), before, "{resource}: {token}");
    }
}

impl Session {
    #[track_caller]
    pub fn acquire_for(&mut self, resource: &str, ttl: &str) -> i64 {
        let token = self.try_acquire_for(resource, ttl);
        token.unwrap_or_else(|| panic!("{resource} could not be had"))
    }

    #[track_caller]
    pub fn try_acquire_for(&mut self, resource: &str, ttl: &str) -> Option<i64> {
        self.one(&format!(
            "SELECT acquire_lease('{resource}', ttl => '{ttl}')"
        ))
    }

    /// Asks until the resource is granted.
    #[track_caller]
    pub fn await_for(&mut self, resource: &str, ttl: &str) -> i64 {
        wait_for("the grant", || self.try_acquire_for(resource, ttl))
    }

    /// Takes more tokens than any block holds, and gives the last one. Leaves no lease.
    #[track_caller]
    pub fn spend_tokens(&mut self) -> i64 {
        let mut last = 0;
        for _ in 0..5 {
            last = self.one(
                "SELECT max(acquire_lease('spent' || i, ttl => '1 microsecond')) FROM generate_series(1, 500) AS i",
            );
        }
        last
    }

    /// Moves the tokens far ahead of the wall clock; before the first grant.
    #[track_caller]
    pub fn tokens_far_ahead(&mut self) {
        let granted: i64 = self.one("SELECT count(*) FROM leasehold.ledger");
        assert_eq!(granted, 0, "the server counts on from a block that it has");
        self.exec(&format!(
            "SELECT setval('leasehold.token_seq', {FAR_AHEAD})"
        ));
    }
}
