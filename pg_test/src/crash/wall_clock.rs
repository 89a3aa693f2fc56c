//! The wall clock jumps, and no lease notices: G5 stands on a clock that no one can set, and G2 on none.

use std::sync::Arc;

use crate::chaos::wall_clock::WallClock;
use crate::cluster::{Cluster, Db, Stop};

crate::tests![
    leases_do_not_follow_the_wall_clock,
    tokens_rise_though_the_wall_clock_falls,
];

const DAY_S: i64 = 86_400;

struct Server {
    db: Db,
    clock: WallClock,
}

impl Server {
    fn start() -> Self {
        let (cluster, clock) = (Cluster::builder().create(), WallClock::new());
        clock.give_to(&cluster);
        cluster.start();
        let db = Db::on(&Arc::new(cluster));
        Self { db, clock }
    }

    /// Sets the wall clock to so much from the true time, and makes sure that the server has it.
    fn set(&self, seconds: i64) {
        self.clock.set(seconds);
        self.clock.is_seen_by(&mut self.db.session());
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
