//! The servers of a run: a primary, alone or with one physical standby, which take each other's place.
//!
//! Invariant: of the servers of a run only one is writable at any time. The old primary is gone, and awaited, before its
//! standby is told to promote; a new standby is a copy of the new primary.

use std::path::PathBuf;
use std::time::Duration;

use super::clock::{self, Micros};
use super::history::Blow;
use super::plan::{Kind, Promotion};
use super::wall_clock::WallClock;
use crate::cluster::{Cluster, Stop, tail, wait_for};
use crate::environment::{environment, run};
use crate::process::{Process, Signal};
use crate::session::{LIMIT, Session};

pub const DATABASE: &str = "chaos";
/// A crash ends all processes of a server within so long.
const NOTICED: Duration = Duration::from_secs(2);

pub struct Servers {
    pub kind: Kind,
    primary: Cluster,
    standby: Option<Cluster>,
    wall_clock: Option<WallClock>,
}

impl Servers {
    pub fn start(kind: Kind, settings: &[(&str, &str)], wall_clock: Option<WallClock>) -> Self {
        let common = [
            ("wal_keep_size", "512MB"),
            ("wal_retrieve_retry_interval", "50ms"),
            ("wal_log_hints", "on"),
            // a wall clock that jumps is no reason to part
            ("wal_receiver_timeout", "0"),
            ("wal_sender_timeout", "0"),
        ];
        let synchronous: &[_] = match kind {
            Kind::Synchronous => &[("synchronous_standby_names", "*")],
            _ => &[],
        };
        let builder = Cluster::builder()
            .confs(&common)
            .confs(settings)
            .confs(synchronous);
        let primary = builder.create();
        wall_clock.iter().for_each(|clock| clock.give_to(&primary));
        primary.start();
        Self {
            kind,
            primary,
            standby: None,
            wall_clock,
        }
    }

    pub fn socket_dir(&self) -> PathBuf {
        self.primary.socket_dir().to_owned()
    }

    pub fn session(&self) -> Session {
        self.primary.connect_db(DATABASE)
    }

    /// A session that does not wait for a standby, for what is done while there is none.
    pub fn local_session(&self, database: &str) -> Session {
        let mut config = self.primary.config();
        config
            .dbname(database)
            .options("-c synchronous_commit=local");
        self.primary.connect_with(&config)
    }

    /// Makes a standby of a copy.
    pub fn attach_standby(&mut self) {
        let standby = Cluster::builder().standby_of(&self.primary);
        self.wall_clock
            .iter()
            .for_each(|clock| clock.give_to(&standby));
        self.follow(standby);
    }

    /// Starts a standby, and waits until it streams.
    fn follow(&mut self, standby: Cluster) {
        standby.start();
        self.standby = Some(standby);
        wait_for("the standby to stream", || {
            let streams = "SELECT count(*) = 1 FROM pg_stat_replication WHERE state = 'streaming'";
            self.primary.connect().one::<bool>(streams).then_some(())
        });
    }

    pub fn kill_postmaster(&mut self) -> Blow {
        self.down(kill)
    }

    pub fn stop(&mut self, how: Stop) -> Blow {
        self.down(|primary| primary.stop(how))
    }

    fn down(&mut self, strike: impl FnOnce(&Cluster)) -> Blow {
        let from = clock::now();
        strike(&self.primary);
        let start = clock::now();
        self.primary.start();
        Blow::Down {
            from,
            start,
            until: clock::now(),
        }
    }

    /// SIGKILL to a process of the primary, one of `wanted` if it is there, else its background writer: the postmaster ends
    /// all others and recovers.
    pub fn crash_backend(&mut self, wanted: &[i32]) -> Blow {
        let own: i32 = self
            .primary
            .connect()
            .one("SELECT pid FROM pg_stat_activity WHERE backend_type = 'background writer'");
        let children = Process::children_of(self.primary.postmaster_pid());
        let victim = children.iter().find(|child| wanted.contains(&child.pid));
        let victim = victim.or_else(|| children.iter().find(|child| child.pid == own));
        let from = clock::now();
        victim
            .expect("a server has a background writer")
            .signal(Signal::KILL);
        for child in children.iter().filter(|child| child.pid == own) {
            // one that its client had left was ending by itself: then there was no crash yet
            if !child.wait_gone(NOTICED) {
                child.signal(Signal::KILL);
            }
            assert!(
                child.wait_gone(LIMIT),
                "the server outlived the crash of {}",
                child.pid
            );
        }
        self.primary.wait_ready();
        // the server decides when it starts again, after the kill
        Blow::Down {
            from,
            start: from,
            until: clock::now(),
        }
    }

    /// SIGSTOP to a backend of the primary, or SIGCONT; one that is gone takes no notice.
    pub fn signal_backend(&self, pid: i32, signal: Signal) {
        let children = Process::children_of(self.primary.postmaster_pid());
        let backend = children.iter().find(|child| child.pid == pid);
        backend
            .into_iter()
            .for_each(|backend| backend.signal(signal));
    }

    pub fn has_wall_clock(&self) -> bool {
        self.wall_clock.is_some()
    }

    /// Steps the wall clock of all servers.
    pub fn step_wall_clock(&mut self, seconds: i64) {
        let clock = self
            .wall_clock
            .as_ref()
            .expect("the run has a wall clock of its own");
        clock.set(seconds);
        clock.is_seen_by(&mut self.primary.connect());
    }

    /// Parts the standby from the primary, which goes on; gives the moment up to which it has all that was acknowledged.
    pub fn cut(&mut self) -> Micros {
        let since = self.catch_up();
        let standby = self.standby.as_ref().expect("the run has a standby");
        let mut session = standby.connect();
        session.exec("ALTER SYSTEM SET primary_conninfo = ''");
        session.exec("SELECT pg_reload_conf()");
        standby.wait_sql(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)",
            "the standby to be cut off",
        );
        since
    }

    /// Waits until the standby has all that was acknowledged up to a moment, and gives the moment.
    fn catch_up(&self) -> Micros {
        let since = clock::now();
        let lsn = self
            .primary
            .connect()
            .text("SELECT pg_current_wal_flush_lsn()");
        let lsn = lsn.expect("a primary has a position");
        let standby = self.standby.as_ref().expect("the run has a standby");
        standby.wait_sql(
            &format!("SELECT pg_last_wal_receive_lsn() >= '{lsn}'"),
            "the standby to have caught up",
        );
        since
    }

    /// Ends the primary and promotes its standby; gives the old primary back. `cut_since` is what `cut` gave where the
    /// standby was cut off.
    pub fn promote(&mut self, how: &Promotion, cut_since: Option<Micros>) -> (Blow, Cluster) {
        let caught_up = match cut_since {
            Some(since) => since,
            None => self.catch_up(),
        };
        let standby = self.standby.take().expect("the run has a standby");
        let mut session = standby.connect();
        let regime = if how.lossless { "lossless" } else { "lossy" };
        session.exec(&format!(
            "ALTER SYSTEM SET leasehold.promotion = '{regime}'"
        ));
        session.exec("SELECT pg_reload_conf()");
        standby.wait_sql(
            &format!("SELECT current_setting('leasehold.promotion') = '{regime}'"),
            "the standby to know the regime",
        );
        let from = clock::now();
        match how.by {
            Some(stop) => self.primary.stop(stop),
            None => kill(&self.primary),
        }
        let clean = cut_since.is_none() && how.by == Some(Stop::Fast);
        if clean {
            self.has_all(&standby);
        }
        let start = clock::now();
        assert!(
            session.one::<bool>("SELECT pg_promote(true, 60)"),
            "{}",
            tail(&standby.log(), 30)
        );
        let lost = !clean && self.kind == Kind::Asynchronous;
        let old = std::mem::replace(&mut self.primary, standby);
        let blow = Blow::Promotion {
            from,
            start,
            until: clock::now(),
            lossless: how.lossless,
            lost_since: lost.then_some(caught_up),
        };
        (blow, old)
    }

    /// Makes the old primary a standby of the new one: what only the old one has is undone.
    pub fn rewind(&mut self, old: Cluster) {
        // pg_rewind takes the timeline of the last checkpoint for the present one
        self.primary.connect().exec("CHECKPOINT");
        let source = format!(
            "host={} port=5432 user=postgres dbname=postgres",
            self.primary.socket_dir().display()
        );
        let mut rewind = environment().pg_command("pg_rewind", old.dir());
        rewind.args(["--no-sync", "-R", "--source-server", &source]);
        run(rewind.arg("-D").arg(old.data()));
        // the files of the source have come along
        let socket_dir = old.socket_dir().to_string_lossy().into_owned();
        old.configure(&format!("unix_socket_directories = '{socket_dir}'\n"));
        self.follow(old);
    }

    /// A clean stop of a primary waits until its standby has all.
    fn has_all(&self, standby: &Cluster) {
        let mut control = environment().pg_command("pg_controldata", self.primary.dir());
        let control = run(control.arg("-D").arg(self.primary.data()));
        let checkpoint = control
            .lines()
            .find_map(|line| line.strip_prefix("Latest checkpoint location:"))
            .expect("a cluster has a checkpoint")
            .trim();
        standby.wait_sql(
            &format!("SELECT pg_last_wal_receive_lsn() > '{checkpoint}'"),
            "the standby to have the last checkpoint",
        );
    }
}

/// kill -9 of a postmaster, which clients connect to meanwhile: stopped first, or what it starts between the look at its
/// children and its end would outlive it unseen.
fn kill(cluster: &Cluster) {
    let pid = cluster.postmaster_pid();
    Process::open(pid).signal(Signal::STOP);
    wait_for("the postmaster to be stopped", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?
            .1
            .trim_start()
            .starts_with('T')
            .then_some(())
    });
    cluster.kill_postmaster();
}
