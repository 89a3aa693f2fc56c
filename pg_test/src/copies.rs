//! Layer server, part databases: copies of a database, where T_max counts and leases do not, and databases in other
//! encodings, where a name is bytes as everywhere.

use crate::cluster::{Cluster, Db};
use crate::environment::{environment, run};
use crate::session::Session;

crate::tests![
    database_made_from_a_template_keeps_t_max_only,
    dump_restored_beside_keeps_t_max_only,
    extension_made_again_over_a_dump_stays_above,
    single_byte_encoding_counts_its_own_bytes,
    sql_ascii_takes_any_bytes,
];

/// A database with a live lease of `r`, an expired one of `old`, and one of `late` that took `late` over.
struct Origin {
    db: Db,
    live: i64,
    old: i64,
    highest: i64,
}

fn origin() -> Origin {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int); SELECT fence_table('t', 't:{id}')");
    let (live, old) = (s.acquire("r"), s.acquire_expired("old"));
    let (_, highest) = s.stale_and_current("late");
    Origin {
        db,
        live,
        old,
        highest,
    }
}

/// In a copy no lease of the origin is held, its tokens are stale, and grants go on above them at once.
fn is_a_copy(origin: &Origin, copy: &Db) {
    let mut s = copy.session();
    for (resource, token) in [
        ("r", origin.live),
        ("old", origin.old),
        ("late", origin.highest),
    ] {
        assert!(!s.check_fence(resource, token), "{resource}");
        copy.refused(
            &mut s,
            &format!("SELECT fence('{resource}', {token})"),
            "LH001",
        );
        assert!(
            !s.renew(resource, token) && !s.release(resource, token),
            "{resource}"
        );
        let next = s.acquire(resource);
        assert!(next > origin.highest, "{next} after {}", origin.highest);
    }
    copy.refused(&mut s, "INSERT INTO t VALUES (1)", "LH003");
    let token = s.acquire("t:1");
    s.exec(&format!(
        "BEGIN; SELECT fence('t:1', {token}); INSERT INTO t VALUES (1); COMMIT"
    ));
    // the origin has lost nothing
    let mut s = origin.db.session();
    assert!(s.renew("r", origin.live) && s.check_fence("late", origin.highest));
    assert_eq!(s.try_acquire("r"), None);
}

fn database_made_from_a_template_keeps_t_max_only() {
    let origin = origin();
    let copy = Db {
        cluster: origin.db.cluster.clone(),
        name: format!("{}_copy", origin.db.name),
    };
    let mut admin = copy.cluster.connect();
    let others = format!(
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = '{}')",
        origin.db.name
    );
    copy.cluster
        .wait_sql(&others, "the origin's sessions to leave");
    admin.exec(&format!(
        "CREATE DATABASE {} TEMPLATE {}",
        copy.name, origin.db.name
    ));
    is_a_copy(&origin, &copy);
}

/// A plain dump of a database.
fn dump(db: &Db) -> String {
    let mut command = environment().pg_command("pg_dump", db.cluster.dir());
    command
        .args(["-U", "postgres", "-p", "5432", "-h"])
        .arg(db.cluster.socket_dir())
        .arg(&db.name);
    run(&mut command)
}

/// Restores a plain dump by psql, which stops at the first error.
fn restore(db: &Db, dump: &str) {
    let file = db.cluster.dir().join(format!("{}.sql", db.name));
    std::fs::write(&file, dump).expect("the dump can be written");
    let mut command = environment().pg_command("psql", db.cluster.dir());
    command.args([
        "-X",
        "-q",
        "-v",
        "ON_ERROR_STOP=1",
        "-U",
        "postgres",
        "-p",
        "5432",
        "-h",
    ]);
    command
        .arg(db.cluster.socket_dir())
        .args(["-d", &db.name, "-f"])
        .arg(&file);
    run(&mut command);
}

fn dump_restored_beside_keeps_t_max_only() {
    let origin = origin();
    let copy = Db::bare_on(&origin.db.cluster);
    restore(&copy, &dump(&origin.db));
    is_a_copy(&origin, &copy);
    // and a dump of the copy does as well
    let second = Db::bare_on(&copy.cluster);
    let token = copy.session().acquire("again");
    restore(&second, &dump(&copy));
    let mut s = second.session();
    assert!(!s.check_fence("again", token));
    assert!(s.acquire("again") > token);
}

fn extension_made_again_over_a_dump_stays_above() {
    let origin = origin();
    let copy = Db::bare_on(&origin.db.cluster);
    restore(&copy, &dump(&origin.db));
    let mut s = copy.session();
    let token = s.acquire("r");
    s.exec("DROP EXTENSION leasehold CASCADE; CREATE EXTENSION leasehold");
    assert!(s.acquire("r") > token);
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
