//! Layer copies, part databases: what becomes of leases and tokens where a database is copied, restored, upgraded,
//! recovered or made again; and databases in other encodings, where a name is bytes as everywhere.
//!
//! In a copy of a database T_max counts and leases do not. A copy of a server is like that server restarted, or promoted
//! where it was recovered to a new timeline. Tokens go on rising in either, and are moved far ahead of the wall clock
//! first, so that it is not the clock that they rise by.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::Duration;

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::copying::{FAR_AHEAD, epoch};
use crate::environment::{environment, run};
use crate::session::Session;

crate::tests![
    database_made_from_a_template_keeps_t_max_only,
    dump_restored_beside_keeps_t_max_only,
    dump_restored_elsewhere_keeps_t_max_only,
    dump_of_a_dump_keeps_t_max_only,
    dump_restored_in_place_keeps_t_max_only,
    dump_taken_while_grants_go_on_is_of_one_piece,
    extension_made_again_over_a_dump_stays_above,
    extension_made_again_right_after_a_start_stays_above,
    extension_made_again_after_a_restart_stays_above,
    extension_made_again_unused_stays_above,
    upgraded_cluster_keeps_t_max_only,
    upgraded_cluster_is_promoted_to_an_epoch_of_its_own,
    base_backup_started_in_place_is_a_restart,
    older_files_started_in_place_stay_above_by_the_clock,
    recovery_to_a_point_in_time_is_a_promotion,
    single_byte_encoding_counts_its_own_bytes,
    sql_ascii_takes_any_bytes,
];

/// A database with a live lease of `r`, an expired one of `old`, and one of `late` that took `late` over. The last token
/// that it has handed out is in no row: its grant was rolled back.
struct Origin {
    db: Db,
    live: i64,
    old: i64,
    highest: i64,
    last: i64,
}

fn origin() -> Origin {
    origin_in(Db::new())
}

fn origin_in(db: Db) -> Origin {
    let mut s = db.session();
    s.tokens_far_ahead();
    s.exec("CREATE TABLE t (id int); SELECT fence_table('t', 't:{id}')");
    let (live, old) = (s.acquire("r"), s.acquire_expired("old"));
    let (_, highest) = s.stale_and_current("late");
    assert!(old > FAR_AHEAD);
    s.exec("BEGIN");
    let last = s.acquire("undone");
    s.exec("ROLLBACK");
    Origin {
        db,
        live,
        old,
        highest,
        last,
    }
}

/// In a copy no lease of the origin is held, its tokens are stale, and grants go on above them at once.
#[track_caller]
fn is_a_copy(origin: &Origin, copy: &Db) {
    let mut s = copy.session();
    assert_eq!(s.one::<i64>("SELECT count(*) FROM leasehold.leases"), 0);
    let mut last = origin.last;
    for (resource, token) in [
        ("r", origin.live),
        ("old", origin.old),
        ("late", origin.highest),
    ] {
        assert_eq!(s.state_of(resource), "free");
        copy.has_lost(resource, token);
        let next = s.acquire(resource);
        assert!(next > last, "{next} after {last}");
        copy.has_lost(resource, token);
        assert!(s.renew(resource, next));
        last = next;
    }
    copy.refused(&mut s, "INSERT INTO t VALUES (1)", "LH003");
    let token = s.acquire("t:1");
    s.exec(&format!(
        "BEGIN; SELECT fence('t:1', {token}); INSERT INTO t VALUES (1); COMMIT"
    ));
}

#[track_caller]
fn has_lost_nothing(origin: &Origin) {
    let mut s = origin.db.session();
    assert!(s.renew("r", origin.live) && s.check_fence("late", origin.highest));
    assert_eq!(s.try_acquire("r"), None);
}

fn database_made_from_a_template_keeps_t_max_only() {
    let origin = origin();
    let mut admin = origin.db.cluster.connect();
    for strategy in ["wal_log", "file_copy"] {
        let copy = Db {
            cluster: origin.db.cluster.clone(),
            name: format!("{}_{strategy}", origin.db.name),
        };
        let others = format!(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = '{}')",
            origin.db.name
        );
        copy.cluster
            .wait_sql(&others, "the origin's sessions to leave");
        admin.exec(&format!(
            "CREATE DATABASE {} TEMPLATE {} STRATEGY {strategy}",
            copy.name, origin.db.name
        ));
        is_a_copy(&origin, &copy);
        has_lost_nothing(&origin);
    }
}

/// A program of PostgreSQL's that connects to a database.
fn client(program: &str, db: &Db) -> Command {
    let mut command = environment().pg_command(program, db.cluster.dir());
    command
        .args(["-U", "postgres", "-p", "5432", "-h"])
        .arg(db.cluster.socket_dir())
        .args(["-d", &db.name]);
    command
}

/// What pg_dump can write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Plain,
    Custom,
    Directory,
}

const FORMATS: [Format; 3] = [Format::Plain, Format::Custom, Format::Directory];

impl Format {
    /// Dumps a database into a file or directory that is not there yet.
    fn dump(self, db: &Db) -> PathBuf {
        let file = db.cluster.dir().join(format!("{}.{self:?}", db.name));
        let mut command = client("pg_dump", db);
        match self {
            Self::Plain => &mut command,
            Self::Custom => command.arg("--format=custom"),
            Self::Directory => command.args(["--format=directory", "--jobs=2"]),
        };
        run(command.arg("--file").arg(&file));
        file
    }

    /// Restores it into an empty database, and stops at the first error.
    fn restore(self, dump: &Path, db: &Db) {
        match self {
            Self::Plain => {
                let mut psql = client("psql", db);
                psql.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f"]);
                run(psql.arg(dump));
            }
            Self::Custom => {
                run(client("pg_restore", db).arg("--exit-on-error").arg(dump));
            }
            Self::Directory => {
                let mut restore = client("pg_restore", db);
                run(restore.args(["--exit-on-error", "--jobs=2"]).arg(dump));
            }
        }
    }
}

fn dump_restored_beside_keeps_t_max_only() {
    for format in FORMATS {
        let origin = origin();
        let copy = Db::bare_on(&origin.db.cluster);
        format.restore(&format.dump(&origin.db), &copy);
        is_a_copy(&origin, &copy);
        has_lost_nothing(&origin);
    }
}

fn dump_restored_elsewhere_keeps_t_max_only() {
    let origin = origin();
    let elsewhere = Arc::new(Cluster::builder().anew());
    elsewhere.start();
    for format in FORMATS {
        let copy = Db::bare_on(&elsewhere);
        format.restore(&format.dump(&origin.db), &copy);
        is_a_copy(&origin, &copy);
    }
    has_lost_nothing(&origin);
}

fn dump_of_a_dump_keeps_t_max_only() {
    let origin = origin();
    let copy = Db::bare_on(&origin.db.cluster);
    Format::Plain.restore(&Format::Plain.dump(&origin.db), &copy);
    // not used in between
    let second = Db::bare_on(&copy.cluster);
    Format::Custom.restore(&Format::Custom.dump(&copy), &second);
    is_a_copy(&origin, &second);
    // and with a lease of the copy
    let token = second.session().acquire("again");
    let third = Db::bare_on(&copy.cluster);
    Format::Plain.restore(&Format::Plain.dump(&second), &third);
    third.has_lost("again", token);
    third.has_lost("r", origin.live);
    assert!(third.session().acquire("again") > token);
}

/// The database goes back to what it was, by `pg_restore --clean`: its leases do not come back with it.
fn dump_restored_in_place_keeps_t_max_only() {
    let origin = origin();
    let dump = Format::Custom.dump(&origin.db);
    let mut s = origin.db.session();
    let highest = s.spend_tokens();
    drop(s);
    let mut restore = client("pg_restore", &origin.db);
    restore.args(["--exit-on-error", "--clean", "--if-exists"]);
    run(restore.arg(&dump));
    is_a_copy(&origin, &origin.db);
    assert!(origin.db.session().acquire("new") > highest);
}

/// Whatever the dump has of the ledger lies below its position of the tokens, and so does all that was granted before.
fn dump_taken_while_grants_go_on_is_of_one_piece() {
    for format in FORMATS {
        let origin = origin();
        let (highest, done) = (AtomicI64::new(0), AtomicBool::new(false));
        let (dump, before) = thread::scope(|scope| {
            for client in 0..2 {
                let (mut s, highest, done) = (origin.db.session(), &highest, &done);
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        let token = s.acquire_expired(&format!("client{client}"));
                        highest.fetch_max(token, Ordering::Relaxed);
                    }
                });
            }
            // so many that the first block is used up
            wait_for("grants", || {
                (highest.load(Ordering::Relaxed) > origin.highest + 3000).then_some(())
            });
            let before = highest.load(Ordering::Relaxed);
            let dump = format.dump(&origin.db);
            done.store(true, Ordering::Relaxed);
            (dump, before)
        });
        let copy = Db::bare_on(&origin.db.cluster);
        format.restore(&dump, &copy);
        let mut s = copy.session();
        let in_ledger: i64 = s.one("SELECT max(token) FROM leasehold.ledger");
        assert!(in_ledger >= before, "a grant is not in the dump");
        let next = s.acquire("client0");
        assert!(next > in_ledger, "{next} after {in_ledger}");
    }
}

fn extension_made_again_over_a_dump_stays_above() {
    let origin = origin();
    let copy = Db::bare_on(&origin.db.cluster);
    Format::Plain.restore(&Format::Plain.dump(&origin.db), &copy);
    let mut s = copy.session();
    let token = s.acquire("r");
    s.exec(MAKE_AGAIN);
    assert!(s.acquire("r") > token);
}

const MAKE_AGAIN: &str = "DROP EXTENSION leasehold CASCADE; CREATE EXTENSION leasehold";

/// The first thing that a server hears of the database is that its tokens are dropped.
/// Between the old one and the new one the server forgets what it has in memory.
fn extension_made_again_after_a_restart_stays_above() {
    let db = Db::with(&[]);
    let bystander = Db::on(&db.cluster);
    db.session().tokens_far_ahead();
    for way in [Way::Fast, Way::Immediate, Way::Killed, Way::Undone] {
        let mut s = db.session();
        s.acquire("before");
        let last = s.spend_tokens();
        s.exec("DROP EXTENSION leasehold");
        if way == Way::Undone {
            for sql in [
                "CREATE EXTENSION leasehold",
                "BEGIN; DROP EXTENSION leasehold; ROLLBACK",
                "DROP EXTENSION leasehold",
            ] {
                s.exec(sql);
            }
        }
        drop(s);
        match way {
            Way::Fast => db.cluster.restart(Stop::Fast),
            Way::Immediate => db.cluster.restart(Stop::Immediate),
            Way::Killed | Way::Undone => {
                db.cluster.kill_postmaster();
                db.cluster.start();
            }
        }
        let mut s = db.session();
        s.exec("CREATE EXTENSION leasehold");
        let next = s.acquire("r");
        assert!(next > last, "{next} after {last}: {way:?}");
        // it is this database's matter
        assert!(bystander.session().acquire("r") < FAR_AHEAD);
        bystander
            .session()
            .exec("DROP EXTENSION leasehold; CREATE EXTENSION leasehold");
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Fast,
    Immediate,
    Killed,
    Undone,
}

fn extension_made_again_right_after_a_start_stays_above() {
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    db.session().tokens_far_ahead();
    let mut last = FAR_AHEAD;
    for stop in [Stop::Fast, Stop::Immediate] {
        let mut s = db.session();
        let token = s.acquire("r");
        assert!(token > last, "{token} after {last}");
        // and those that nobody has kept count of
        last = s.spend_tokens();
        drop(s);
        db.cluster.restart(stop);
        let mut s = db.session();
        s.exec(MAKE_AGAIN);
        assert!(!s.check_fence("r", token) && !s.renew("r", token));
        let next = s.acquire("r");
        assert!(next > last, "{next} after {last}");
        db.has_lost("r", token);
        last = next;
        drop(s);
        db.cluster.restart(stop);
        // twice, each in a session of its own
        db.session().exec(MAKE_AGAIN);
        db.session().exec(MAKE_AGAIN);
    }
    let next = db.session().acquire("r");
    assert!(next > last, "{next} after {last}");
}

fn extension_made_again_unused_stays_above() {
    let db = Db::new();
    let mut s = db.session();
    s.tokens_far_ahead();
    let mut last = s.acquire("r");
    assert!(last > FAR_AHEAD);
    for _ in 0..2 {
        // one that grants nothing, one that only answers, one that is undone
        s.exec(MAKE_AGAIN);
        s.exec(MAKE_AGAIN);
        assert!(!s.check_fence("r", last));
        s.exec(MAKE_AGAIN);
        s.exec(&format!("BEGIN; {MAKE_AGAIN}; ROLLBACK"));
        let next = s.acquire("r");
        assert!(next > last, "{next} after {last}");
        last = next;
    }
}

/// A new cluster with what pg_upgrade brings over from a stopped one.
fn upgrade(old: &Cluster) -> Cluster {
    let new = Cluster::builder().anew();
    let mut command = environment().pg_command("pg_upgrade", new.dir());
    let bindir = &environment().bindir;
    command
        .args(["--username=postgres", "--old-bindir"])
        .arg(bindir);
    command.arg("--new-bindir").arg(bindir);
    command.arg("--old-datadir").arg(old.data());
    command.arg("--new-datadir").arg(new.data());
    run(command.arg("--socketdir").arg(new.socket_dir()));
    new
}

fn upgraded_cluster_keeps_t_max_only() {
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    let mut s = db.session();
    s.exec(&format!(
        "ALTER DATABASE {} SET leasehold.default_ttl = '7s'",
        db.name
    ));
    drop(s);
    let origin = origin_in(db);
    let mut s = origin.db.session();
    // a table that is fenced by its partitions, and one that is fenced as a whole
    s.exec("CREATE TABLE p (id int) PARTITION BY LIST (id); CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)");
    s.exec("SELECT fence_table('p', 'p')");
    let released = s.acquire("released");
    assert!(s.release("released", released));
    drop(s);
    origin.db.cluster.stop(Stop::Fast);
    let upgraded = Arc::new(upgrade(&origin.db.cluster));
    upgraded.start();
    let copy = origin.db.at(&upgraded);
    assert_eq!(upgraded.timeline(), 1);
    is_a_copy(&origin, &copy);
    copy.has_lost("released", released);
    let mut s = copy.session();
    copy.refused(&mut s, "INSERT INTO p VALUES (1)", "LH003");
    copy.refused(&mut s, "TRUNCATE p1", "LH003");
    assert_eq!(s.text("SHOW leasehold.default_ttl").as_deref(), Some("7s"));
    let token = s.acquire("kept");
    drop(s);
    // from now on it is a server like any other
    upgraded.restart(Stop::Fast);
    let mut s = copy.session();
    assert_eq!(s.try_acquire("kept"), None);
    assert!(s.renew("kept", token));
    copy.has_lost("released", released);
    assert!(s.acquire("new") > token);
}

/// The timeline has begun anew with the upgrade, the tokens have not.
fn upgraded_cluster_is_promoted_to_an_epoch_of_its_own() {
    let old = Db::on(&Arc::new(Cluster::builder().start()));
    old.session().tokens_far_ahead();
    let highest = old.session().acquire_for("r", "500ms");
    old.cluster.stop(Stop::Fast);
    let upgraded = upgrade(&old.cluster);
    upgraded.configure("leasehold.max_ttl = '500ms'\n");
    upgraded.start();
    let db = old.at(&Arc::new(upgraded));
    let token = db.session().acquire_for("r", "500ms");
    assert!(
        highest > FAR_AHEAD && token > highest,
        "{token} after {highest}"
    );
    let standby = Cluster::builder().standby_of(&db.cluster);
    standby.start();
    standby.cut_off();
    let lost = db.session().spend_tokens();
    db.cluster.stop(Stop::Fast);
    standby.promote();
    let promoted = db.at(&Arc::new(standby));
    let next = promoted.session().await_for("r", "500ms");
    assert!(epoch(next) > epoch(lost), "{next} after {lost}");
}

fn base_backup_started_in_place_is_a_restart() {
    let origin = origin_in(Db::on(&Arc::new(Cluster::builder().start())));
    let live_before = origin.db.session().acquire("doc");
    let backup = Arc::new(Cluster::builder().backup_of(&origin.db.cluster));
    origin.db.cluster.stop(Stop::Immediate);
    backup.start();
    assert_eq!(backup.timeline(), 1);
    let copy = origin.db.at(&backup);
    let mut s = copy.session();
    for (resource, token) in [
        ("r", origin.live),
        ("late", origin.highest),
        ("doc", live_before),
    ] {
        assert_eq!(s.state_of(resource), "recovering");
        assert_eq!(s.try_acquire(resource), None);
        s.fence(resource, token);
        assert!(s.renew(resource, token), "{resource}");
    }
    copy.has_lost("r", origin.highest);
    // what had expired has no more than its TTL from the start
    let next = wait_for("the lease to expire", || s.try_acquire("old"));
    assert!(next > live_before, "{next} after {live_before}");
    copy.has_lost("old", origin.old);
    assert!(s.release("r", origin.live) && s.acquire("r") > next);
}

/// The copy can't know what was granted since it was made.
fn older_files_started_in_place_stay_above_by_the_clock() {
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    let before = db.session().acquire("r");
    db.cluster.stop(Stop::Fast);
    let older = Arc::new(Cluster::builder().files_of(&db.cluster));
    db.cluster.start();
    let last = db.session().spend_tokens();
    db.cluster.stop(Stop::Fast);
    // tokens follow each other at a second's distance at least
    thread::sleep(Duration::from_secs(1));
    older.start();
    let copy = db.at(&older);
    let mut s = copy.session();
    assert_eq!(s.try_acquire("r"), None);
    assert!(s.renew("r", before));
    let next = s.acquire("q");
    assert!(next > last, "{next} after {last}");
    assert!(!s.check_fence("spent1", last) && !s.renew("spent1", last));
}

/// A server that archives its WAL into a directory beside it.
fn archiving() -> (Db, PathBuf) {
    let cluster = Cluster::builder()
        .conf("leasehold.max_ttl", "1s")
        .conf("archive_mode", "on")
        .create();
    let archive = cluster.dir().join("archive");
    environment().make_dir(&archive);
    cluster.configure(&format!(
        "archive_command = 'cp %p {}/%f'\n",
        archive.display()
    ));
    cluster.start();
    (Db::on(&Arc::new(cluster)), archive)
}

/// A server that recovers a backup from the archive up to `target` and goes on from there, with a `leasehold.max_ttl`
/// that is longer than the test.
fn recovered_to(target: &str, backup: &Cluster, archive: &Path) -> Arc<Cluster> {
    let recovered = Cluster::builder().files_of(backup);
    recovered.configure(&format!(
        "restore_command = 'cp {}/%f %p'\narchive_mode = off\nleasehold.max_ttl = '5min'\n\
         {target}\nrecovery_target_action = 'promote'\n",
        archive.display()
    ));
    let signal = recovered.data().join("recovery.signal");
    run(environment().command("touch", recovered.dir()).arg(signal));
    recovered.start();
    recovered.wait_writable();
    Arc::new(recovered)
}

fn recovery_to_a_point_in_time_is_a_promotion() {
    let (db, archive) = archiving();
    let mut s = db.session();
    s.tokens_far_ahead();
    let known = s.acquire_for("known", "1s");
    let backup = Cluster::builder().backup_of(&db.cluster);
    s.exec("BEGIN");
    let last_known = s.acquire_for("last known", "1s");
    let xid: String = s.one("SELECT pg_current_xact_id()::text");
    s.exec("COMMIT");
    let time: String = s.one("SELECT clock_timestamp()::text");
    s.exec("SELECT pg_create_restore_point('here')");
    let superseding = s.await_for("known", "1s");
    let highest = s.spend_tokens();
    let file: String = s.one("SELECT pg_walfile_name(pg_switch_wal())");
    db.cluster.wait_sql(
        &format!("SELECT coalesce(last_archived_wal >= '{file}', false) FROM pg_stat_archiver"),
        "the archive",
    );
    drop(s);
    db.cluster.stop(Stop::Immediate);
    for target in [
        format!("recovery_target_xid = '{xid}'"),
        format!("recovery_target_time = '{time}'"),
        "recovery_target_name = 'here'".to_owned(),
    ] {
        let cluster = recovered_to(&target, &backup, &archive);
        assert_eq!(cluster.timeline(), 2, "{target}");
        let recovered = db.at(&cluster);
        let mut s = recovered.session();
        let is_there = "SELECT EXISTS (SELECT FROM leasehold.ledger WHERE resource = $1)";
        assert!(s.one_with::<bool>(is_there, &[&"last known"]), "{target}");
        assert!(!s.one_with::<bool>(is_there, &[&"spent1"]), "{target}");
        for (resource, token) in [
            ("known", known),
            ("last known", last_known),
            ("known", superseding),
        ] {
            recovered.has_lost(resource, token);
        }
        for resource in ["known", "last known", "spent1", "new"] {
            assert_eq!(s.try_acquire_for(resource, "1s"), None, "{target}");
        }
        drop(s);
        cluster.configure("leasehold.max_ttl = '1s'\n");
        cluster.restart(Stop::Fast);
        let next = recovered.session().await_for("last known", "1s");
        assert!(next > highest, "{next} after {highest}: {target}");
        recovered.has_lost("known", superseding);
    }
}

/// A new database of an encoding, with the extension.
fn encoded(encoding: &str) -> (Db, Session) {
    let cluster = Cluster::shared();
    let db = Db {
        name: format!("{}_db", encoding.to_lowercase()),
        cluster,
    };
    db.cluster.connect().exec(&format!(
        "CREATE DATABASE {} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0",
        db.name
    ));
    let mut s = db.session();
    s.exec("CREATE EXTENSION leasehold");
    (db, s)
}

fn single_byte_encoding_counts_its_own_bytes() {
    let (db, mut s) = encoded("LATIN1");
    // what a client sends in UTF-8 is converted: 255 characters are 255 bytes here
    let longest = "é".repeat(255);
    let token = s.acquire(&longest);
    assert!(s.check_fence(&longest, token) && s.renew(&longest, token));
    assert_eq!(
        s.info(&longest, "resource").as_deref(),
        Some(longest.as_str())
    );
    db.refused(&mut s, "SELECT acquire_lease(repeat('é', 256))", "22001");
    let token: i64 = s.one("SELECT acquire_lease('café', 'Zoë', '5min')");
    assert!(s.info_says("café", "holder = 'Zoë'"));
    s.exec("CREATE TABLE \"größe\" (\"straße\" text, n int)");
    s.exec("SELECT fence_table('\"größe\"', 'ca{straße}')");
    db.refused(&mut s, "INSERT INTO \"größe\" VALUES ('fé')", "LH003")
        .tells("café");
    s.exec(&format!(
        "BEGIN; SELECT fence('café', {token}); INSERT INTO \"größe\" VALUES ('fé'); COMMIT"
    ));
    db.refused(&mut s, "SELECT fence('café', 9223372036854775807)", "LH002")
        .tells("café")
        .tells("Zoë");
    assert!(s.release("café", token));
}

fn sql_ascii_takes_any_bytes() {
    let (_, mut s) = encoded("SQL_ASCII");
    // bytes that are no text in any encoding of the client
    let name = "chr(255) || chr(128) || 'x'";
    let token: i64 = s.one(&format!("SELECT acquire_lease({name}, {name}, '5min')"));
    let known: bool = s.one(&format!(
        "SELECT resource = {name} AND holder = {name} AND token = {token} FROM lease_info({name})"
    ));
    assert!(known);
    assert!(s.one::<bool>(&format!(
        "SELECT check_fence({name}, {token}) AND renew_lease({name}, {token})"
    )));
    s.exec("CREATE TABLE t (c text); SELECT fence_table('t', '{c}')");
    s.exec(&format!(
        "BEGIN; SELECT fence({name}, {token}); INSERT INTO t VALUES ({name}); COMMIT"
    ));
    // a refusal that names it can be caught and told by its code
    s.exec(&format!(
        "DO $$ BEGIN
             PERFORM fence({name}, 9223372036854775807);
             RAISE 'no refusal';
         EXCEPTION WHEN SQLSTATE 'LH002' THEN NULL;
         END $$"
    ));
    assert!(s.one::<bool>(&format!("SELECT release_lease({name}, {token})")));
}
