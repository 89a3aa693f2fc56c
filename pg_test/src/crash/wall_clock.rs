//! The wall clock jumps, and no lease notices: G5 stands on a clock that no one can set, and G2 on none.
//!
//! The jumps are real to the server, but to it alone: a small library that the C compiler makes (Rust needs one anyway)
//! is loaded into it ahead of the C library.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use crate::cluster::{Cluster, Db, Stop};
use crate::environment::run;

crate::tests![
    leases_do_not_follow_the_wall_clock,
    tokens_rise_though_the_wall_clock_falls,
];

const DAY_S: i64 = 86_400;

struct Server {
    db: Db,
    offset: PathBuf,
}

impl Server {
    fn start() -> Self {
        let cluster = Cluster::builder().create();
        let source = cluster.dir().join("wall_clock.c");
        fs::write(&source, include_str!("wall_clock.c"))
            .expect("the cluster's directory can be written");
        let library = source.with_extension("so");
        run(Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&library)
            .arg(&source));
        let offset = source.with_extension("offset");
        fs::write(&offset, "0").expect("the cluster's directory can be written");
        cluster.set_variable("LD_PRELOAD", &library.to_string_lossy());
        cluster.set_variable("WALL_CLOCK", &offset.to_string_lossy());
        cluster.start();
        let db = Db::on(&Arc::new(cluster));
        Self { db, offset }
    }

    /// Sets the wall clock to so much from the true time, and makes sure that the server has it.
    fn set(&self, seconds: i64) {
        fs::write(&self.offset, seconds.to_string())
            .expect("the cluster's directory can be written");
        let mut session = self.db.session();
        let ahead: f64 = session.one("SELECT extract(epoch FROM clock_timestamp())::float8");
        let ours = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .expect("it is after 1970")
            .as_secs_f64();
        let off = ahead - ours - seconds as f64;
        assert!(
            off.abs() < 3600.0,
            "the server's clock is {off} s from where it was set"
        );
    }
}

fn leases_do_not_follow_the_wall_clock() {
    let server = Server::start();
    let mut session = server.db.session();
    let held = session.acquire("held");
    for days in [10, -10, 1000, 0] {
        let over = session.acquire_expired("over");
        server.set(days * DAY_S);
        assert_eq!(
            session.try_acquire("held"),
            None,
            "{days} days on, a lease was over early"
        );
        assert!(session.check_fence("held", held));
        assert!(session.info_says("held", "remaining BETWEEN '1min' AND '5min'"));
        let next = session.try_acquire("over");
        assert!(
            next > Some(over),
            "{days} days on, a lease that is over holds: {next:?}"
        );
        assert!(session.renew("held", held));
        assert!(session.release("over", next.unwrap_or_default()));
    }
}

fn tokens_rise_though_the_wall_clock_falls() {
    let server = Server::start();
    let cluster = &server.db.cluster;
    let held = server.db.session().acquire("held");
    let mut last = held;
    // the last is before 2026, where the seconds in a token begin
    for (round, days) in [1000, 0, -10, -20_000].into_iter().enumerate() {
        server.set(days * DAY_S);
        match round % 2 {
            0 => cluster.restart(Stop::Fast),
            _ => {
                cluster.kill_postmaster();
                cluster.start();
            }
        }
        let mut session = server.db.session();
        assert_eq!(
            session.try_acquire("held"),
            None,
            "{days} days on, a lease was lost with a restart"
        );
        assert!(session.renew("held", held));
        let token = session.acquire(&format!("r{round}"));
        assert!(token > last, "{days} days on, {token} after {last}");
        last = token;
    }
}
