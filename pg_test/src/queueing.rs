//! What the tests of waiting have in common: sessions that stand in the queue of a resource, and the queue itself.
//!
//! Whoever waits is awaited in `leasehold.waiters` before the test goes on, so the order of arrival is the test's.

use std::sync::Arc;

use crate::cluster::{Cluster, Db, wait_for};
use crate::session::{DbErr, Pending, Session};

/// A call that waits for longer than any test, and holds for longer.
pub const WAIT: &str = "SELECT acquire_lease('r', ttl => '5min', wait => '1min')";

/// The same as a procedure.
pub const AWAIT: &str = "CALL await_lease('r', ttl => '5min')";

impl Db {
    /// On a server of its own, which ends zombies after `grace` and lets calls wait for as long as they like.
    pub fn of_waiters(grace: &str) -> Self {
        let builder = Cluster::builder()
            .conf("leasehold.zombie_grace", grace)
            .conf("leasehold.max_wait", "1h");
        Self::on(&Arc::new(builder.start()))
    }

    /// Waits until these are all who wait for the resource, in this order.
    #[track_caller]
    pub fn wait_queue(&self, resource: &str, pids: &[i32]) {
        let mut session = self.session();
        wait_for(&format!("the queue of {resource} to be {pids:?}"), || {
            (session.queue(resource) == pids).then_some(())
        });
    }

    /// The session runs `sql`, and is the last of those who wait for `resource` when this returns.
    #[track_caller]
    pub fn queued(&self, session: Session, resource: &str, sql: &str) -> Pending {
        let mut watch = self.session();
        let mut pending = session.spawn(sql);
        let pid = pending.pid;
        wait_for("a session to wait", || {
            assert!(!pending.is_done(), "it does not wait: {}", pending.result());
            (watch.queue(resource).last() == Some(&pid)).then_some(())
        });
        pending
    }

    /// A new session that waits for r, as the last one.
    #[track_caller]
    pub fn waiter(&self) -> Pending {
        self.queued(self.session(), "r", WAIT)
    }
}

impl Session {
    /// The pids of those who wait for a resource, by their places.
    #[track_caller]
    pub fn queue(&mut self, resource: &str) -> Vec<i32> {
        let rows = self.rows(&format!(
            "SELECT pid, position FROM leasehold.waiters WHERE resource = '{resource}' ORDER BY position"
        ));
        let number = |row: &Vec<Option<String>>, column: usize| -> i32 {
            let text = row[column].as_deref().expect("a number");
            text.parse().expect("a number")
        };
        let positions: Vec<i32> = rows.iter().map(|row| number(row, 1)).collect();
        let expected: Vec<i32> = (1..).take(rows.len()).collect();
        assert_eq!(positions, expected, "the places are not numbered from 1 on");
        rows.iter().map(|row| number(row, 0)).collect()
    }

    #[track_caller]
    pub fn cancel(&mut self, pid: i32) {
        assert!(self.one::<bool>(&format!("SELECT pg_cancel_backend({pid})")));
    }

    #[track_caller]
    pub fn terminate(&mut self, pid: i32) {
        assert!(self.one::<bool>(&format!("SELECT pg_terminate_backend({pid})")));
    }
}

impl Pending {
    /// The session, and the token that it was granted.
    #[track_caller]
    pub fn granted(self) -> (Session, i64) {
        match self.join() {
            (session, Ok(Some(token))) => (session, token.parse().expect("a token")),
            (_, other) => panic!("not granted: {other:?}"),
        }
    }

    /// The session, after a wait that was in vain.
    #[track_caller]
    pub fn denied(self) -> Session {
        let (session, result) = self.join();
        assert_eq!(result, Ok(None));
        session
    }

    /// The session, and the error that it got.
    #[track_caller]
    pub fn failed(self) -> (Session, DbErr) {
        match self.join() {
            (session, Err(error)) => (session, error),
            (_, Ok(result)) => panic!("no error, but {result:?}"),
        }
    }
}
