//! Layer server, part search path: leasehold's own statements run with its owner's rights, so what someone else has put
//! in front of PostgreSQL's operators and functions must never be called by them.

use std::sync::Arc;

use crate::cluster::{Cluster, Db, wait_for};
use crate::session::Session;

crate::tests![operators_in_front_are_never_called];

/// Operators and functions that tell who has called them, in a schema in front of PostgreSQL's.
const EVIL: &str = "
    CREATE SCHEMA evil;
    DO $body$
    DECLARE
        kinds text; name text;
        tell text := 'LANGUAGE plpgsql AS $$BEGIN RAISE ''evil was called by %'', current_user; END$$';
    BEGIN
        FOREACH kinds IN ARRAY ARRAY['boolean, boolean', 'text, text', 'bigint, bigint', 'bigint, int', 'int, int',
                                     'oid, oid', 'interval, interval', 'timestamptz, timestamptz'] LOOP
            EXECUTE format('CREATE FUNCTION evil.trap(%s) RETURNS bool %s', kinds, tell);
            FOREACH name IN ARRAY ARRAY['=', '<>', '<', '>', '<=', '>=', '+', '-'] LOOP
                EXECUTE format('CREATE OPERATOR evil.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = evil.trap)', name,
                               split_part(kinds, ', ', 1), split_part(kinds, ', ', 2));
            END LOOP;
        END LOOP;
        FOREACH kinds IN ARRAY ARRAY['max(bigint)', 'nextval(regclass)', 'setval(regclass, bigint)', 'now()',
                                     'setval(regclass, bigint, boolean)', 'count(bigint)'] LOOP
            EXECUTE format('CREATE FUNCTION evil.%s RETURNS bigint %s', kinds, tell);
        END LOOP;
    END $body$;
    CREATE DOMAIN evil.regclass AS pg_catalog.bool";

/// A copy of a database, so that the ledger is another server's at first, of a role that has set its traps there and
/// has put them in front for everyone who connects, the workers of the server included.
fn trapped() -> Db {
    let cluster = Arc::new(Cluster::builder().start());
    let origin = Db::on(&cluster);
    let mut s = origin.session();
    let token = s.acquire("r");
    assert!(s.release("r", token));
    s.acquire("other");
    let owner = origin.role();
    let pid = s.pid;
    drop(s);
    cluster.wait_until_left(pid);
    let others = format!(
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = '{}')",
        origin.name
    );
    cluster.wait_sql(&others, "the origin's sessions to leave");
    let copy = Db {
        cluster: cluster.clone(),
        name: format!("{}_copy", origin.name),
    };
    cluster.connect().exec(&format!(
        "CREATE DATABASE {} TEMPLATE {} OWNER {owner}",
        copy.name, origin.name
    ));
    let mut s = copy.session_as(&owner);
    s.exec(EVIL);
    s.exec(&format!(
        "ALTER DATABASE {} SET search_path = evil, pg_catalog, public",
        copy.name
    ));
    copy
}

/// One round of all that a lease goes through, without an operator of the session's own.
fn go_round(s: &mut Session, resource: &str) {
    let token: i64 = s.one_with("SELECT acquire_lease($1, ttl => '1s')", &[&resource]);
    assert!(s.one_with::<bool>("SELECT renew_lease($1, $2, '5min')", &[&resource, &token]));
    s.fence(resource, token);
    assert!(s.check_fence(resource, token) && s.renew(resource, token));
    s.exec("SELECT * FROM leasehold.leases");
    assert_eq!(s.state_of(resource), "held");
    assert!(s.release(resource, token));
}

fn operators_in_front_are_never_called() {
    let db = trapped();
    let user = db.role();
    for (mut s, resource) in [(db.session(), "r"), (db.session_as(&user), "q")] {
        assert_eq!(
            s.text("SHOW search_path").as_deref(),
            Some("evil, pg_catalog, public")
        );
        go_round(&mut s, resource);
        go_round(&mut s, resource);
        s.exec("CREATE TEMP TABLE t (id int); SELECT fence_table('t', 't:{id}'); SELECT unfence_table('t')");
    }
    let mut plain = db.session_with_options("-c search_path=pg_catalog");
    wait_for("the marks", || {
        let marked: bool = plain
            .one("SELECT bool_and(released) FROM leasehold.ledger WHERE resource IN ('r', 'q')");
        marked.then_some(())
    });
    let log = db.cluster.log();
    assert!(!log.contains("evil was called"), "{log}");
    // the trap is set
    let mut s = db.session();
    for sql in [
        "SELECT true = true",
        "SELECT 'a'::text = 'a'",
        "SELECT 1::bigint < 2::bigint",
        "SELECT max(1::bigint)",
    ] {
        s.err(sql).is("P0001");
    }
    assert!(db.cluster.log().contains("evil was called by postgres"));
}
