//! Layer server, part pooler: nothing depends on the session, so a lease is acquired, used and released through
//! whatever server connections PgBouncer in transaction mode happens to give.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use postgres::Config;

use crate::cluster::{Cluster, Db, wait_for};
use crate::environment::environment;
use crate::session::{LIMIT, Session};
use crate::watchdog;

crate::tests![
    lease_lives_across_pooled_connections,
    pooled_transactions_present_only_for_themselves
];

pub struct PgBouncer {
    process: Child,
    dir: PathBuf,
    database: String,
}

impl PgBouncer {
    pub fn start(db: &Db) -> Self {
        let dir = db.cluster.dir().join(format!("pgbouncer-{}", db.name));
        let sockets = db.cluster.socket_dir().join(format!("b{}", db.name));
        let _starting = watchdog::starting();
        environment().make_dir(&dir);
        environment().make_dir(&sockets);
        let settings = format!(
            "[databases]\n* = host={} port=5432 user=postgres\n[pgbouncer]\nlisten_port = 6432\nunix_socket_dir = {}\n\
             auth_type = any\npool_mode = transaction\ndefault_pool_size = 10\nlogfile = {}\n",
            db.cluster.socket_dir().display(),
            sockets.display(),
            dir.join("log").display(),
        );
        let file = dir.join("pgbouncer.ini");
        fs::write(&file, settings).expect("the settings can be written");
        let mut command = environment().command("pgbouncer", &dir);
        command
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = command
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start pgbouncer (package pgbouncer): {e}"));
        Self {
            process,
            dir: sockets,
            database: db.name.clone(),
        }
    }

    pub fn connect(&self) -> Session {
        let mut config = Config::new();
        config
            .host_path(&self.dir)
            .port(6432)
            .user("postgres")
            .dbname(&self.database)
            .connect_timeout(LIMIT);
        wait_for("pgbouncer", || Session::connect_pooled(&config).ok())
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Clients that each keep a server connection busy, so that the next transaction gets another one.
struct Busy(Vec<Session>);

impl Busy {
    fn one_more(&mut self, pooler: &PgBouncer) {
        let mut session = pooler.connect();
        session.exec("BEGIN; SELECT 1");
        self.0.push(session);
    }
}

/// The server's pid, and the last value, of a transaction whose last statement gives `pg_backend_pid(), value`.
fn through(s: &mut Session, sql: &str) -> (String, String) {
    let row = s.rows(sql).pop().expect("a row");
    let mut values = row.into_iter().map(Option::unwrap_or_default);
    (
        values.next().expect("a pid"),
        values.next().expect("a value"),
    )
}

fn lease_lives_across_pooled_connections() {
    let db = Db::on(&Cluster::shared());
    db.session().exec("CREATE TABLE doc (id int, n int); INSERT INTO doc VALUES (1, 0); SELECT fence_table('doc', 'doc:{id}')");
    let pooler = PgBouncer::start(&db);
    let mut busy = Busy(Vec::new());
    let mut client = pooler.connect();
    let (pid_1, token) = through(
        &mut client,
        "SELECT pg_backend_pid(), acquire_lease('doc:1', ttl => '5min')",
    );
    busy.one_more(&pooler);
    let write = format!(
        "BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = n + 1 WHERE id = 1;
         SELECT pg_backend_pid(), n FROM doc; COMMIT"
    );
    let (pid_2, n) = through(&mut client, &write);
    assert_eq!(n, "1");
    busy.one_more(&pooler);
    let (pid_3, renewed) = through(
        &mut client,
        &format!("SELECT pg_backend_pid(), renew_lease('doc:1', {token})"),
    );
    assert_eq!(renewed, "t");
    busy.one_more(&pooler);
    let (pid_4, released) = through(
        &mut client,
        &format!("SELECT pg_backend_pid(), release_lease('doc:1', {token})"),
    );
    assert_eq!(released, "t");
    let mut pids = vec![pid_1, pid_2, pid_3, pid_4];
    pids.sort();
    pids.dedup();
    assert_eq!(
        pids.len(),
        4,
        "the steps went over the same server connections: {pids:?}"
    );
    let token: i64 = token.parse().expect("a token");
    let mut next = db.session();
    assert!(next.acquire("doc:1") > token);
    db.refused(&mut next, &write, "LH001");
    assert_eq!(next.one::<i32>("SELECT n FROM doc"), 1);
}

fn pooled_transactions_present_only_for_themselves() {
    let db = Db::on(&Cluster::shared());
    db.session().exec("CREATE TABLE doc (id int, n int); INSERT INTO doc VALUES (1, 0); SELECT fence_table('doc', 'doc:{id}')");
    let pooler = PgBouncer::start(&db);
    let (mut holder, mut other) = (pooler.connect(), pooler.connect());
    let take = "BEGIN; SELECT pg_backend_pid(), acquire_lease('doc:1', ttl => '5min'); COMMIT";
    let (pid, token) = through(&mut holder, take);
    let write = "UPDATE doc SET n = n + 1 WHERE id = 1";
    holder.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); {write}; COMMIT"
    ));
    holder.exec(&format!(
        "BEGIN; SET LOCAL leasehold.token = '{token}'; {write}; COMMIT"
    ));
    // another client on the very connection that acquired and presented
    let (same, _) = through(&mut other, "SELECT pg_backend_pid(), 1");
    assert_eq!(same, pid, "the pool has opened another connection");
    db.refused(&mut other, write, "LH003");
    assert_eq!(db.session().one::<i32>("SELECT n FROM doc"), 2);
}
