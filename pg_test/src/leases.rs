//! What tests of the contract have in common: leasehold's calls from a session, and the check that what is refused
//! changes nothing.

use crate::cluster::Db;
use crate::session::{DbErr, Session};

/// A token that no grant can have reached.
pub const NEVER: i64 = i64::MAX;

impl Session {
    /// Acquires for five minutes, which outlasts a test; the resource must be free.
    #[track_caller]
    pub fn acquire(&mut self, resource: &str) -> i64 {
        let token = self.try_acquire(resource);
        token.unwrap_or_else(|| panic!("{resource} could not be had"))
    }

    #[track_caller]
    pub fn try_acquire(&mut self, resource: &str) -> Option<i64> {
        self.one_with("SELECT acquire_lease($1, ttl => '5min')", &[&resource])
    }

    /// Acquires a lease that has expired when this returns.
    #[track_caller]
    pub fn acquire_expired(&mut self, resource: &str) -> i64 {
        let token: Option<i64> = self.one_with(
            "SELECT acquire_lease($1, ttl => '1 microsecond')",
            &[&resource],
        );
        token.unwrap_or_else(|| panic!("{resource} could not be had"))
    }

    /// The token of an expired lease and the one of the lease that took it over, which is live.
    #[track_caller]
    pub fn stale_and_current(&mut self, resource: &str) -> (i64, i64) {
        (self.acquire_expired(resource), self.acquire(resource))
    }

    #[track_caller]
    pub fn renew(&mut self, resource: &str, token: i64) -> bool {
        self.one_with("SELECT renew_lease($1, $2)", &[&resource, &token])
    }

    #[track_caller]
    pub fn release(&mut self, resource: &str, token: i64) -> bool {
        self.one_with("SELECT release_lease($1, $2)", &[&resource, &token])
    }

    #[track_caller]
    pub fn fence(&mut self, resource: &str, token: i64) {
        if let Err(error) = self.try_fence(resource, token) {
            panic!("fence('{resource}', {token})\n  {error}");
        }
    }

    pub fn try_fence(&mut self, resource: &str, token: i64) -> Result<(), DbErr> {
        let verdict: Result<String, DbErr> =
            self.try_one_with("SELECT 'passed' FROM fence($1, $2)", &[&resource, &token]);
        verdict.map(|_| ())
    }

    #[track_caller]
    pub fn check_fence(&mut self, resource: &str, token: i64) -> bool {
        self.one_with("SELECT check_fence($1, $2)", &[&resource, &token])
    }

    /// A column of `lease_info`, as text.
    #[track_caller]
    pub fn info(&mut self, resource: &str, column: &str) -> Option<String> {
        self.one_with(
            &format!("SELECT {column}::text FROM lease_info($1)"),
            &[&resource],
        )
    }

    #[track_caller]
    pub fn state_of(&mut self, resource: &str) -> String {
        self.info(resource, "state").expect("a state is never NULL")
    }

    /// Whether a condition on `lease_info` holds.
    #[track_caller]
    pub fn info_says(&mut self, resource: &str, condition: &str) -> bool {
        self.one_with(
            &format!("SELECT coalesce({condition}, false) FROM lease_info($1)"),
            &[&resource],
        )
    }
}

impl DbErr {
    /// Asserts how we write errors: lower case, no period; facts and next step with each SQLSTATE of our own.
    #[track_caller]
    pub fn well_written(self) -> Self {
        let starts = self
            .message
            .split(' ')
            .next()
            .expect("a message has a word");
        // a keyword stays what it is
        let keyword = starts.chars().all(char::is_uppercase);
        assert!(
            keyword || !starts.starts_with(char::is_uppercase),
            "the message starts in upper case: {self}"
        );
        assert!(
            !self.message.ends_with('.'),
            "the message ends in a period: {self}"
        );
        for (name, part) in [("DETAIL", &self.detail), ("HINT", &self.hint)] {
            let text = part.as_deref().unwrap_or_default();
            assert!(
                !self.sqlstate.starts_with("LH") || !text.is_empty(),
                "there is no {name}: {self}"
            );
            // a setting stays what it is
            let sentence = !text.starts_with(char::is_lowercase) || text.starts_with("leasehold.");
            assert!(sentence, "{name} is no sentence: {self}");
        }
        self
    }

    #[track_caller]
    pub fn hints_at(self, part: &str) -> Self {
        assert!(
            self.hint.as_deref().unwrap_or_default().contains(part),
            "the hint lacks \"{part}\": {self}"
        );
        self
    }

    /// Message or detail.
    #[track_caller]
    pub fn tells(self, part: &str) -> Self {
        assert!(
            self.to_string().contains(part),
            "the error lacks \"{part}\": {self}"
        );
        self
    }

    #[track_caller]
    pub fn details(self, part: &str) -> Self {
        assert!(
            self.detail.as_deref().unwrap_or_default().contains(part),
            "the detail lacks \"{part}\": {self}"
        );
        self
    }
}

impl Db {
    /// Everything committed that a refused call could have changed: leases, ledger, metadata, queues, and the rows of all tables in
    /// schema public.
    #[track_caller]
    pub fn state(&self) -> Vec<String> {
        let mut session = self.session();
        let mut state = flat(session.rows(
            "SELECT concat_ws(' | ', resource, token, holder, state, ttl, granted_at, renewed_at, role, pid, durable)
             FROM leasehold.leases ORDER BY resource, token",
        ));
        state.extend(flat(
            // but for the marks of releases, which the worker writes when it comes to it
            session.rows(
                "SELECT (resource, token, ttl_us, system, database, holder, role, granted_at)::text
                   FROM leasehold.ledger ORDER BY 1",
            ),
        ));
        state.extend(flat(session.rows(
            "SELECT (resource, position, pid)::text FROM leasehold.waiters ORDER BY 1",
        )));
        state.extend(flat(
            session.rows("SELECT m::text FROM leasehold.metadata m ORDER BY 1"),
        ));
        state.extend(self.tables());
        state
    }

    /// The rows of all tables in schema public.
    #[track_caller]
    pub fn tables(&self) -> Vec<String> {
        let mut session = self.session();
        let tables = flat(session.rows(
            "SELECT format('%I.%I', nspname, relname) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
             WHERE nspname = 'public' AND relkind = 'r' ORDER BY 1",
        ));
        tables
            .iter()
            .flat_map(|t| flat(session.rows(&format!("SELECT '{t} ' || t FROM {t} t ORDER BY 1"))))
            .collect()
    }

    /// Runs what must be refused; asserts its SQLSTATE, how the error is written, and that nothing has changed.
    /// Leaves a transaction block that the session was in, which must not have changed anything itself.
    #[track_caller]
    pub fn refused(&self, session: &mut Session, sql: &str, sqlstate: &str) -> DbErr {
        self.refused_by(session, sql, sqlstate, |session| session.err(sql))
    }

    #[track_caller]
    pub fn refused_by(
        &self,
        session: &mut Session,
        what: &str,
        sqlstate: &str,
        call: impl FnOnce(&mut Session) -> DbErr,
    ) -> DbErr {
        let before = self.state();
        let error = call(session);
        assert_eq!(
            error.sqlstate, sqlstate,
            "unexpected SQLSTATE from: {what}\n  {error}"
        );
        session.exec("ROLLBACK");
        let after = self.state();
        assert_eq!(
            before, after,
            "{sqlstate}, and yet something changed: {what}"
        );
        error.well_written()
    }

    /// The same within a transaction block that has taken or released leases, which its rollback undoes: only the
    /// tables are compared.
    #[track_caller]
    pub fn refused_write(&self, session: &mut Session, sql: &str, sqlstate: &str) -> DbErr {
        let before = self.tables();
        let error = session.err(sql);
        assert_eq!(
            error.sqlstate, sqlstate,
            "unexpected SQLSTATE from: {sql}\n  {error}"
        );
        session.exec("ROLLBACK");
        assert_eq!(
            before,
            self.tables(),
            "{sqlstate}, and yet something was written: {sql}"
        );
        error.well_written()
    }
}

fn flat(rows: Vec<Vec<Option<String>>>) -> Vec<String> {
    rows.into_iter()
        .flatten()
        .map(|value| value.unwrap_or_default())
        .collect()
}
