//! Layer rights, part rules: how rules come and go, who may say them, and who sees them when.
//!
//! Rules are remembered by each backend, so where they change there is a session that has used the old ones before.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use crate::cluster::{Cluster, Db, Stop};
use crate::copying::Pair;
use crate::environment::{environment, run};
use crate::rights::{allow, disallow, login, may, refused, role_may, rule, rules};
use crate::session::Session;

crate::tests![
    allowed_twice_is_one_rule,
    disallow_of_what_is_not_there_changes_nothing,
    rules_come_with_the_commit,
    rules_are_seen_in_the_midst_of_a_transaction,
    own_transaction_sees_its_rules_at_once,
    rules_go_with_the_rollback,
    rules_of_a_failed_statement_are_forgotten,
    rules_are_seen_by_who_remembers_others,
    rules_that_change_while_they_are_read_count,
    dropped_role_takes_its_rules_along,
    disallow_says_where_there_was_nothing,
    renamed_role_keeps_its_rules,
    only_an_administrator_allows,
    bad_arguments,
    read_only_transactions_change_no_rules,
    standby_changes_no_rules,
    names_are_bytes,
    rules_go_into_a_dump,
    rules_survive_a_restart,
    rules_go_with_the_extension,
    rules_are_of_one_database,
];

fn allowed_twice_is_one_rule() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    allow(&db, "r", &one);
    let first = db.session().rows("TABLE leasehold.rights");
    allow(&db, "r", &one);
    let mut s = db.session();
    s.exec(&format!("GRANT pg_signal_backend TO {two}"));
    db.session_as(&two).exec(&rule("allow_lease", "r", &one));
    assert_eq!(s.rows("TABLE leasehold.rights"), first);
    disallow(&db, "r", &one);
    assert!(rules(&db).is_empty());
    assert!(role_may(&db, &two, "r"));
}

fn disallow_of_what_is_not_there_changes_nothing() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    disallow(&db, "r", &one);
    allow(&db, "r", &one);
    allow(&db, "x:*", &one);
    for (pattern, role) in [
        ("r", &two),
        ("r*", &one),
        ("R", &one),
        ("x:", &one),
        ("x:\\*", &one),
        ("*", &one),
    ] {
        disallow(&db, pattern, role);
    }
    assert_eq!(rules(&db), [format!("r {one}"), format!("x:* {one}")]);
    assert!(!role_may(&db, &two, "r") && !role_may(&db, &two, "x:1"));
}

/// One who has used the rules before, and has nothing in his hands when he asks next.
fn rules_come_with_the_commit() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    let (mut admin, mut s) = (db.session(), db.session_as(&two));
    assert!(may(&mut s, "r"));
    for (call, before) in [("allow_lease", true), ("disallow_lease", false)] {
        admin.exec(&format!("BEGIN; {}", rule(call, "r", &one)));
        assert_eq!(may(&mut s, "r"), before, "{call} before its commit");
        assert_eq!(
            role_may(&db, &two, "r"),
            before,
            "{call} before its commit, in a new session"
        );
        admin.exec("COMMIT");
        assert_eq!(may(&mut s, "r"), !before, "{call} after its commit");
    }
}

fn rules_are_seen_in_the_midst_of_a_transaction() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    let mut s = db.session_as(&two);
    s.exec("BEGIN");
    for _ in 0..2 {
        assert!(may(&mut s, "r"));
        allow(&db, "r", &one);
        assert!(!may(&mut s, "r"));
        disallow(&db, "r", &one);
    }
    s.exec("COMMIT");
}

fn own_transaction_sees_its_rules_at_once() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    db.session()
        .exec(&format!("GRANT pg_signal_backend TO {two}"));
    for warm in [false, true] {
        let mut s = db.session_as(&two);
        if warm {
            assert!(may(&mut s, "r"));
        }
        s.exec("BEGIN");
        s.exec(&rule("allow_lease", "r", &one));
        assert!(!may(&mut s, "r"), "allowed to another, warm: {warm}");
        s.exec(&rule("allow_lease", "r", &two));
        assert!(may(&mut s, "r"), "allowed, warm: {warm}");
        s.exec(&rule("disallow_lease", "r", &two));
        assert!(!may(&mut s, "r"), "disallowed, warm: {warm}");
        s.exec("ROLLBACK");
        // within a statement, which is undone with it
        let mut s = db.session_as(&two);
        assert!(!warm || may(&mut s, "r"));
        s.err(&format!(
            "SELECT allow_lease('r', '{one}'), acquire_lease('r')"
        ))
        .is("42501");
        // and step by step
        let mut s = db.session_as(&two);
        assert!(!warm || may(&mut s, "r"));
        let block = format!(
            "DO $$ BEGIN
                PERFORM allow_lease('r', '{one}');
                BEGIN
                    PERFORM acquire_lease('r');
                    RAISE 'granted';
                EXCEPTION WHEN insufficient_privilege THEN NULL;
                END;
                PERFORM disallow_lease('r', '{one}');
                IF acquire_lease('r', ttl => '1 microsecond') IS NULL THEN RAISE 'not granted'; END IF;
             END $$"
        );
        s.exec(&block);
    }
}

fn rules_go_with_the_rollback() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    db.session()
        .exec(&format!("GRANT pg_signal_backend TO {two}"));
    for warm in [false, true] {
        let (mut s, mut other) = (db.session_as(&two), db.session_as(&two));
        if warm {
            assert!(may(&mut s, "r") && may(&mut other, "r"));
        }
        // what the own transaction has seen of it meanwhile makes no difference
        for look in [false, true] {
            s.exec(&format!("BEGIN; {}", rule("allow_lease", "r", &one)));
            assert!(!look || !may(&mut s, "r"));
            s.exec("ROLLBACK");
            assert!(may(&mut s, "r"), "rolled back, warm: {warm}, look: {look}");
            // to a savepoint
            s.exec(&format!(
                "BEGIN; SAVEPOINT a; {}",
                rule("allow_lease", "r", &one)
            ));
            assert!(!look || !may(&mut s, "r"));
            s.exec("ROLLBACK TO a");
            assert!(
                may(&mut s, "r"),
                "rolled back to a savepoint, warm: {warm}, look: {look}"
            );
            s.exec("COMMIT");
            assert!(may(&mut s, "r") && may(&mut other, "r"));
            // a rule that was there comes back
            allow(&db, "r", &one);
            s.exec(&format!(
                "BEGIN; SAVEPOINT a; {}",
                rule("disallow_lease", "r", &one)
            ));
            assert!(!look || may(&mut s, "r"));
            s.exec("ROLLBACK TO a");
            assert!(!may(&mut s, "r"), "warm: {warm}, look: {look}");
            s.exec(&rule("disallow_lease", "r", &one));
            assert!(!look || may(&mut s, "r"));
            s.exec("ROLLBACK");
            assert!(!may(&mut s, "r"), "warm: {warm}, look: {look}");
            disallow(&db, "r", &one);
            assert!(may(&mut s, "r") && may(&mut other, "r"));
        }
    }
}

/// The statement that changes rules reads them too, and fails: what it has read must not stay in anybody's memory.
fn rules_of_a_failed_statement_are_forgotten() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    db.session()
        .exec(&format!("GRANT pg_signal_backend TO {two}"));
    let failing = [
        // granted, and then an error
        format!("SELECT allow_lease('r', '{two}'), acquire_lease('r'), 1 / (random() * 0)::int"),
        // refused
        format!("SELECT allow_lease('r', '{one}'), acquire_lease('r')"),
        format!(
            "DO $$ BEGIN PERFORM allow_lease('r', '{one}'); PERFORM acquire_lease('r'); END $$"
        ),
    ];
    for warm in [false, true] {
        for sql in &failing {
            let mut s = db.session_as(&two);
            assert!(!warm || may(&mut s, "r"));
            s.err(sql);
            assert!(rules(&db).is_empty());
            assert!(may(&mut s, "r"), "after {sql}, warm: {warm}");
            // the same where the error is caught
            let caught = format!(
                "DO $b$ BEGIN
                    BEGIN EXECUTE '{}'; EXCEPTION WHEN OTHERS THEN NULL; END;
                    IF acquire_lease('r', ttl => '1 microsecond') IS NULL THEN RAISE 'not granted'; END IF;
                 END $b$",
                sql.replace('\'', "''")
            );
            let mut s = db.session_as(&two);
            assert!(!warm || may(&mut s, "r"));
            s.exec(&caught);
            assert!(may(&mut s, "r"), "after {sql}, caught, warm: {warm}");
        }
        // one that takes the rule away
        allow(&db, "r", &one);
        let mut s = db.session_as(&two);
        assert!(!warm || !may(&mut s, "r"));
        s.err(&format!(
            "SELECT disallow_lease('r', '{one}'), acquire_lease('r'), 1 / (random() * 0)::int"
        ));
        assert!(!may(&mut s, "r"), "warm: {warm}");
        disallow(&db, "r", &one);
    }
}

fn rules_are_seen_by_who_remembers_others() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    let mut sessions: Vec<Session> = (0..4).map(|_| db.session_as(&two)).collect();
    let mut admin = db.session();
    for n in 0..20 {
        let is_allowed = n % 2 == 0;
        assert!(
            sessions.iter_mut().all(|s| may(s, "r") == is_allowed),
            "{n}"
        );
        let call = if is_allowed {
            "allow_lease"
        } else {
            "disallow_lease"
        };
        admin.exec(&rule(call, "r", &one));
    }
}

/// A session that reads the rules waits for one that changes them, with the snapshot that it has taken before.
fn rules_that_change_while_they_are_read_count() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    let (mut admin, mut s) = (db.session(), db.session_as(&two));
    assert!(may(&mut s, "r"));
    // it forgets the rules, and knows how to read them
    login(&db, "newcomer");
    admin.exec(&format!(
        "BEGIN; LOCK leasehold.rule IN ACCESS EXCLUSIVE MODE; {}",
        rule("allow_lease", "r", &one)
    ));
    let reading = s.spawn("SELECT acquire_lease('r', ttl => '1 microsecond')");
    db.cluster.wait_until_blocked(reading.pid);
    admin.exec("COMMIT");
    let (mut s, read) = reading.join();
    read.expect_err("another is allowed it").is("42501");
    for is_allowed in [false, true, false] {
        assert_eq!(may(&mut s, "r"), is_allowed);
        let call = if is_allowed {
            "allow_lease"
        } else {
            "disallow_lease"
        };
        admin.exec(&rule(call, "r", &one));
    }
}

fn dropped_role_takes_its_rules_along() {
    let db = Db::new();
    let other = login(&db, "other");
    for survivors in [false, true] {
        let gone = login(&db, "gone");
        let stays = login(&db, &format!("stays_{survivors}"));
        allow(&db, "r", &gone);
        allow(&db, "x:*", &gone);
        if survivors {
            allow(&db, "r", &stays);
        }
        let mut s = db.session_as(&other);
        assert!(!may(&mut s, "r") && !may(&mut s, "x:1"));
        // within the transaction that drops it
        let mut admin = db.session();
        admin.exec(&format!("BEGIN; DROP ROLE {gone}"));
        assert!(!may(&mut s, "r"));
        admin.exec("ROLLBACK");
        assert!(!may(&mut s, "r"));
        admin.exec(&format!("DROP ROLE {gone}"));
        let left = match survivors {
            true => vec![format!("r {stays}")],
            false => Vec::new(),
        };
        assert_eq!(rules(&db), left);
        assert!(may(&mut s, "x:1"));
        assert_eq!(may(&mut s, "r"), !survivors);
        assert_eq!(role_may(&db, &other, "r"), !survivors);
        if survivors {
            let acquire = "SELECT acquire_lease('r')";
            refused(&db, &mut s, acquire, "r", &[&stays], &other);
            assert!(role_may(&db, &stays, "r"));
        }
        // one of that name made again is another
        admin.exec(&format!("CREATE ROLE {gone} LOGIN"));
        assert_eq!(rules(&db), left);
        assert_eq!(role_may(&db, &gone, "r"), !survivors);
        admin.exec(&format!("DROP ROLE {gone}"));
    }
    // nor is who has granted it held back
    let admin = login(&db, "admin");
    let mut s = db.session();
    s.exec(&format!("GRANT pg_signal_backend TO {admin}"));
    db.session_as(&admin)
        .exec(&rule("allow_lease", "q", &other));
    s.exec(&format!("DROP ROLE {admin}"));
    assert!(role_may(&db, &other, "q"));
    assert!(rules(&db).contains(&format!("q {other}")));
}

fn disallow_says_where_there_was_nothing() {
    let db = Db::new();
    let one = login(&db, "one");
    let mut s = db.session();
    s.exec("SET log_min_messages = notice");
    allow(&db, "typo:*", &one);
    let notices = || {
        let log = db.cluster.log();
        log.matches("was not allowed to role").count()
    };
    let before = notices();
    s.exec(&rule("disallow_lease", "typo", &one));
    assert_eq!(notices(), before + 1);
    assert_eq!(rules(&db), [format!("typo:* {one}")]);
    s.exec(&rule("disallow_lease", "typo:*", &one));
    assert_eq!(notices(), before + 1);
}

fn renamed_role_keeps_its_rules() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    allow(&db, "r", &one);
    let mut s = db.session_as(&two);
    assert!(!may(&mut s, "r"));
    let name = format!("{one}_new");
    db.session()
        .exec(&format!("ALTER ROLE {one} RENAME TO {name}"));
    assert_eq!(rules(&db), [format!("r {name}")]);
    refused(
        &db,
        &mut s,
        "SELECT acquire_lease('r')",
        "r",
        &[&name],
        &two,
    );
    assert!(role_may(&db, &name, "r"));
}

fn only_an_administrator_allows() {
    let db = Db::new();
    let (one, own) = (login(&db, "one"), login(&db, "own"));
    allow(&db, "there", &one);
    let mut s = db.session_as(&own);
    for call in ["allow_lease", "disallow_lease"] {
        for pattern in ["there", "r", "*"] {
            // to oneself as to others
            for role in [&one, &own] {
                db.refused(&mut s, &rule(call, pattern, role), "42501")
                    .tells("say who may acquire")
                    .details(&format!("\"{own}\""))
                    .hints_at("GRANT pg_signal_backend");
            }
        }
    }
    assert_eq!(rules(&db), [format!("there {one}")]);
    db.session()
        .exec(&format!("GRANT pg_signal_backend TO {own}"));
    s.exec(&rule("allow_lease", "r", &one));
    s.exec(&rule("disallow_lease", "there", &one));
    assert_eq!(rules(&db), [format!("r {one}")]);
    // an administrator's own right is no other than anybody's
    assert!(!may(&mut s, "r"));
    // the current role counts here too
    s.exec(&format!("SET ROLE {own}"));
    s.exec(&rule("disallow_lease", "r", &one));
    assert!(rules(&db).is_empty());
    db.session()
        .exec(&format!("REVOKE pg_signal_backend FROM {own}"));
    db.refused(&mut s, &rule("allow_lease", "r", &one), "42501");
    assert!(rules(&db).is_empty());
}

fn bad_arguments() {
    let db = Db::new();
    let one = login(&db, "one");
    allow(&db, "there", &one);
    let mut s = db.session();
    let none: u32 = s.one(
        "SELECT n::oid FROM generate_series(4000000000, 4100000000) n
          WHERE NOT EXISTS (SELECT FROM pg_authid WHERE oid = n::oid) LIMIT 1",
    );
    let cases = [
        (format!("NULL, '{one}'"), "22004", "resource"),
        ("'r', NULL".to_owned(), "22004", "to_role"),
        ("NULL, NULL".to_owned(), "22004", "resource"),
        (format!("'', '{one}'"), "22023", "resource"),
        (format!("repeat('x', 256), '{one}'"), "22001", "resource"),
        (
            format!("repeat('x', 256) || '*', '{one}'"),
            "22001",
            "resource",
        ),
        (
            format!("repeat('x', 255) || '\\*', '{one}'"),
            "22001",
            "resource",
        ),
        (format!("repeat('é', 128), '{one}'"), "22001", "resource"),
        (format!("repeat('x', 100000), '{one}'"), "22001", "resource"),
        (format!("'r', {none}::oid::regrole"), "42704", "role"),
        ("'r', 0::oid::regrole".to_owned(), "42704", "role"),
    ];
    for call in ["allow_lease", "disallow_lease"] {
        for (arguments, sqlstate, about) in &cases {
            db.refused(&mut s, &format!("SELECT {call}({arguments})"), sqlstate)
                .tells(about);
            assert_eq!(rules(&db), [format!("there {one}")], "{call}({arguments})");
        }
        s.err(&format!("SELECT {call}('r', 'nobody of that name')"));
        s.err(&format!("SELECT {call}('r', 'nobody_of_that_name')"))
            .is("42704");
    }
    // the longest ones are fine
    for (pattern, resource) in [
        ("repeat('x', 255)", "repeat('x', 255)"),
        ("repeat('y', 255) || '*'", "repeat('y', 255)"),
        ("repeat('z', 254) || '\\*'", "repeat('z', 254) || '*'"),
    ] {
        s.exec(&format!("SELECT allow_lease({pattern}, '{one}')"));
        let mut other = db.session_as(&login(&db, &resource[8..9]));
        other
            .err(&format!("SELECT acquire_lease({resource})"))
            .is("42501")
            .well_written();
        s.exec(&format!("SELECT disallow_lease({pattern}, '{one}')"));
        assert!(
            other
                .text(&format!("SELECT acquire_lease({resource})"))
                .is_some()
        );
    }
}

fn read_only_transactions_change_no_rules() {
    let db = Db::new();
    let one = login(&db, "one");
    allow(&db, "there", &one);
    let mut s = db.session();
    for (call, pattern) in [("allow_lease", "r"), ("disallow_lease", "there")] {
        for begin in [
            "BEGIN READ ONLY",
            "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY",
        ] {
            s.exec(begin);
            db.refused(&mut s, &rule(call, pattern, &one), "25006");
        }
        s.exec("SET default_transaction_read_only = on");
        db.refused(&mut s, &rule(call, pattern, &one), "25006");
        s.exec("RESET default_transaction_read_only");
    }
    assert_eq!(rules(&db), [format!("there {one}")]);
    // at any other level they can be changed, and are read as they are
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        s.exec(&format!("BEGIN ISOLATION LEVEL {level}; SELECT 1"));
        allow(&db, "meanwhile", &one);
        s.exec(&rule("allow_lease", level, &one));
        s.exec("COMMIT");
        let other = login(&db, &level[..3].to_lowercase());
        assert!(!role_may(&db, &other, level) && !role_may(&db, &other, "meanwhile"));
        let mut other = db.session_as(&other);
        other.exec(&format!(
            "SET default_transaction_isolation = '{}'",
            level.to_lowercase()
        ));
        other
            .err("SELECT acquire_lease('meanwhile')")
            .is("42501")
            .well_written();
        disallow(&db, "meanwhile", &one);
        assert!(
            other
                .text("SELECT acquire_lease('meanwhile', ttl => '1 microsecond')")
                .is_some()
        );
    }
}

fn standby_changes_no_rules() {
    let pair = Pair::new(&[]);
    let one = login(&pair.db, "one");
    let two = login(&pair.db, "two");
    allow(&pair.db, "there", &one);
    pair.catch_up();
    let copy = pair.copy();
    let mut on = copy.session();
    for (call, pattern) in [("allow_lease", "r"), ("disallow_lease", "there")] {
        let error = copy.refused(&mut on, &rule(call, pattern, &one), "25006");
        assert!(error.detail.is_some() && error.hint.is_some(), "{error}");
    }
    let mut on = copy.session_as(&two);
    copy.refused(&mut on, &rule("allow_lease", "r", &two), "25006");
    copy.refused(&mut on, "SELECT acquire_lease('there')", "25006");
    // they are there to be seen, and count from the promotion on
    assert_eq!(rules(&copy), [format!("there {one}")]);
    drop(on);
    let promoted = pair.fail_over();
    let mut s = promoted.db.session_as(&two);
    s.err("SELECT acquire_lease('there')")
        .is("42501")
        .well_written()
        .details(&one);
    disallow(&promoted.db, "there", &one);
    assert_eq!(s.try_acquire("there"), None, "the grace goes on");
}

fn names_are_bytes() {
    let db = Db::new();
    let mut admin = db.session();
    let one = format!("{} ünï 漢", db.name);
    admin.exec(&format!("CREATE ROLE \"{one}\" LOGIN"));
    let two = login(&db, "two");
    let mut s = db.session_as(&two);
    let of = |pattern: &str| format!("SELECT allow_lease('{pattern}', '\"{one}\"')");
    // é in one character and in two
    for (pattern, within, outside) in [
        ("caf\u{e9}", "caf\u{e9}", "cafe\u{301}"),
        ("caf\u{e9}*", "caf\u{e9}s", "cafe\u{301}s"),
        ("漢*", "漢字", "字"),
        ("🔒\\*", "🔒*", "🔒"),
    ] {
        admin.exec(&of(pattern));
        let error = s
            .try_one_with::<Option<i64>>("SELECT acquire_lease($1)", &[&within])
            .expect_err("it is another's");
        error
            .is("42501")
            .well_written()
            .tells(within)
            .details(pattern)
            .details(&one);
        assert!(may(&mut s, outside), "{pattern} {outside}");
        assert!(role_may(&db, &one, within));
        admin.exec("SELECT disallow_lease(resource, role) FROM leasehold.rights");
    }
    // in a database whose encoding is another
    let name = format!("{}_latin1", db.name);
    admin.exec(&format!(
        "CREATE DATABASE {name} TEMPLATE template0 ENCODING latin1 LOCALE 'C'"
    ));
    let latin = Db {
        cluster: db.cluster.clone(),
        name,
    };
    latin.session().exec("CREATE EXTENSION leasehold");
    allow(&latin, "caf\u{e9}*", "postgres");
    let mut s = latin.session_as(&two);
    s.err("SELECT acquire_lease('caf\u{e9}1')")
        .is("42501")
        .well_written()
        .details("caf\u{e9}*");
    assert!(may(&mut s, "cafe"));
    assert!(role_may(&latin, "postgres", "caf\u{e9}1"));
}

/// A program of PostgreSQL's on a database.
fn client(program: &str, db: &Db) -> Command {
    let mut command = environment().pg_command(program, db.cluster.dir());
    command
        .args(["-U", "postgres", "-p", "5432", "-d", &db.name, "-h"])
        .arg(db.cluster.socket_dir());
    command
}

fn restore(dump: &Path, db: &Db) {
    let mut psql = client("psql", db);
    psql.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f"]);
    run(psql.arg(dump));
}

fn rules_go_into_a_dump() {
    let db = Db::new();
    let (one, two, gone) = (login(&db, "one"), login(&db, "two"), login(&db, "gone"));
    let odd = format!("{} Odd \"ünï\"", db.name);
    let mut admin = db.session();
    admin.exec(&format!(
        "CREATE ROLE \"{}\"; GRANT pg_signal_backend TO {gone}",
        odd.replace('"', "\"\"")
    ));
    allow(&db, "x:*", &one);
    allow(&db, "caf\u{e9}\\*", &one);
    allow(&db, "r", &format!("\"{}\"", odd.replace('"', "\"\"")));
    allow(&db, "r", &gone);
    // by one who is no more, and to one who is no more
    db.session_as(&gone)
        .exec(&rule("allow_lease", "by gone", &one));
    admin.exec(&format!("DROP ROLE {gone}"));
    let file = db.cluster.dir().join(format!("{}.dump", db.name));
    run(client("pg_dump", &db).arg("--file").arg(&file));
    let copy = Db::bare_on(&db.cluster);
    restore(&file, &copy);
    let listed = "SELECT resource, role::oid, granted_by::oid, granted_at FROM leasehold.rights ORDER BY resource";
    assert_eq!(rules(&copy).len(), 4);
    assert_eq!(copy.session().rows(listed), admin.rows(listed));
    let mut s = copy.session_as(&two);
    for (resource, expected) in [
        ("x:1", false),
        ("caf\u{e9}*", false),
        ("caf\u{e9}", true),
        ("r", false),
        ("by gone", false),
    ] {
        assert_eq!(may(&mut s, resource), expected, "{resource}");
    }
    assert!(role_may(&copy, &one, "x:1"));
    // and changed as any others
    disallow(&copy, "x:*", &one);
    assert!(may(&mut s, "x:1"));
    assert!(!role_may(&db, &two, "x:1"));
}

fn rules_survive_a_restart() {
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    allow(&db, "x:*", &one);
    let listed = "TABLE leasehold.rights";
    let before = db.session().rows(listed);
    for stop in [Stop::Fast, Stop::Immediate] {
        db.cluster.restart(stop);
        assert_eq!(db.session().rows(listed), before, "{stop:?}");
        // the first thing that the server hears of the database
        assert!(
            !role_may(&db, &two, "x:1") && role_may(&db, &one, "x:1"),
            "{stop:?}"
        );
        assert!(role_may(&db, &two, "y"));
    }
}

fn rules_go_with_the_extension() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    allow(&db, "r", &one);
    let (mut s, mut admin) = (db.session_as(&two), db.session());
    assert!(!may(&mut s, "r"));
    admin.exec("BEGIN; DROP EXTENSION leasehold; CREATE EXTENSION leasehold");
    assert!(may(&mut admin, "r"));
    admin.exec("ROLLBACK");
    assert!(!may(&mut s, "r"));
    admin.exec("DROP EXTENSION leasehold");
    s.err("SELECT acquire_lease('r')").is("42883");
    admin.exec("CREATE EXTENSION leasehold");
    assert!(rules(&db).is_empty());
    assert!(may(&mut s, "r"));
    // those of the new one count for who remembers the old one's
    allow(&db, "r", &one);
    assert!(!may(&mut s, "r"));
    assert!(role_may(&db, &one, "r"));
}

fn rules_are_of_one_database() {
    let db = Db::new();
    let other = Db::on(&db.cluster);
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    allow(&db, "r", &one);
    assert!(rules(&other).is_empty());
    assert!(!role_may(&db, &two, "r") && role_may(&other, &two, "r"));
    disallow(&other, "r", &one);
    assert_eq!(rules(&db), [format!("r {one}")]);
}
