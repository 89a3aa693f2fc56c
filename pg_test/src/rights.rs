//! Layer rights, part who: which roles may acquire which resources, and what those are told that may not.

use crate::cluster::Db;
use crate::queueing::{AWAIT, WAIT};
use crate::session::{DbErr, Session};

crate::tests![
    anyone_may_where_nothing_is_said,
    rights_lists_the_rules,
    exact_rule_is_of_one_name,
    prefix_rule_is_of_all_that_begin_with_it,
    escaped_star_is_a_name,
    closest_rule_decides,
    members_and_superusers_may,
    membership_counts_as_it_is_now,
    current_role_counts,
    refusal_tells_who_may_and_what_to_do,
    hint_can_be_pasted_whatever_the_names_are,
    refused_whether_free_or_held_and_before_any_wait,
    right_that_is_taken_away_ends_the_wait,
    lease_that_was_acquired_before_goes_on,
    retry_by_request_grants_nothing_that_is_not_allowed,
];

/// A new login role without any right of its own, which nothing depends on.
pub fn login(db: &Db, name: &str) -> String {
    let role = format!("{}_{name}", db.name);
    db.session().exec(&format!("CREATE ROLE {role} LOGIN"));
    role
}

pub fn rule(call: &str, pattern: &str, role: &str) -> String {
    let quoted = |text: &str| text.replace('\'', "''");
    format!("SELECT {call}('{}', '{}')", quoted(pattern), quoted(role))
}

pub fn allow(db: &Db, pattern: &str, role: &str) {
    db.session().exec(&rule("allow_lease", pattern, role));
}

pub fn disallow(db: &Db, pattern: &str, role: &str) {
    db.session().exec(&rule("disallow_lease", pattern, role));
}

/// The rules as the view lists them.
pub fn rules(db: &Db) -> Vec<String> {
    let sql = "SELECT resource || ' ' || role FROM leasehold.rights ORDER BY resource, role::text";
    flat(&db.session().rows(sql))
}

fn flat(rows: &[Vec<Option<String>>]) -> Vec<String> {
    rows.iter().flatten().flatten().cloned().collect()
}

/// Whether the session may acquire a resource, which is free. Nothing is left of it; a transaction block goes on.
#[track_caller]
pub fn may(s: &mut Session, resource: &str) -> bool {
    // by the simple protocol, where a statement of its own begins its transaction
    let in_block = s.text("SELECT now() <> statement_timestamp()").as_deref() == Some("t");
    s.exec(if in_block { "SAVEPOINT may" } else { "BEGIN" });
    let answer = s.try_one_with::<Option<i64>>("SELECT acquire_lease($1)", &[&resource]);
    let undo = ["ROLLBACK", "ROLLBACK TO may; RELEASE may"];
    s.exec(undo[usize::from(in_block)]);
    match answer {
        Ok(token) => {
            assert!(token.is_some(), "{resource} is held");
            true
        }
        Err(error) => {
            error.is("42501").well_written();
            false
        }
    }
}

#[track_caller]
pub fn role_may(db: &Db, role: &str, resource: &str) -> bool {
    may(&mut db.session_as(role), resource)
}

/// 42501, with all that is promised of it.
#[track_caller]
pub fn refused(db: &Db, s: &mut Session, sql: &str, pattern: &str, allowed: &[&str], own: &str) {
    let error = db.refused(s, sql, "42501");
    let allowed: Vec<String> = allowed.iter().map(|role| format!("\"{role}\"")).collect();
    error
        .details(&format!("\"{pattern}\" is allowed to "))
        .details(&allowed.join(", "))
        .details(&format!("role \"{own}\""))
        .hints_at("SELECT allow_lease(");
}

fn anyone_may_where_nothing_is_said() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    assert!(rules(&db).is_empty());
    for role in [&one, &two] {
        assert!(role_may(&db, role, "r"));
        db.session_as(role).acquire(role);
    }
    // what is said of others changes nothing, neither that it was said
    allow(&db, "other", &one);
    assert!(role_may(&db, &two, "r") && !role_may(&db, &two, "other"));
    disallow(&db, "other", &one);
    assert!(role_may(&db, &two, "other"));
    // but not without EXECUTE
    let mut s = db.session();
    allow(&db, "r", &one);
    s.exec("REVOKE EXECUTE ON FUNCTION acquire_lease FROM PUBLIC");
    db.session_as(&one)
        .err("SELECT acquire_lease('r')")
        .is("42501")
        .tells("function acquire_lease");
}

fn rights_lists_the_rules() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    db.session()
        .exec(&format!("GRANT pg_signal_backend TO {two}"));
    let mut s = db.session();
    let before: String = s.one("SELECT clock_timestamp()::text");
    s.exec(&rule("allow_lease", "x:*", &one));
    db.session_as(&two).exec(&rule("allow_lease", "y", &one));
    let mut other = db.session_as(&one);
    let columns = "SELECT string_agg(attname || ' ' || atttypid::regtype, ', ' ORDER BY attnum) FROM pg_attribute
                    WHERE attrelid = 'leasehold.rights'::regclass AND attnum > 0";
    assert_eq!(
        s.text(columns).as_deref(),
        Some(
            "resource text, role regrole, granted_by regrole, granted_at timestamp with time zone"
        )
    );
    // everyone may see them
    let listed = other.rows(&format!(
        "SELECT resource, role, granted_by FROM leasehold.rights
          WHERE granted_at BETWEEN '{before}' AND clock_timestamp() ORDER BY resource"
    ));
    let row = |of: [&str; 3]| of.map(|value| Some(value.to_owned())).to_vec();
    assert_eq!(
        listed,
        [row(["x:*", &one, "postgres"]), row(["y", &one, &two])]
    );
    // and nobody may change them by hand
    for sql in [
        "DELETE FROM leasehold.rights",
        "UPDATE leasehold.rights SET resource = 'z'",
        "TABLE leasehold.rule",
        "DELETE FROM leasehold.rule",
    ] {
        other.err(sql).is("42501");
    }
}

fn exact_rule_is_of_one_name() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    allow(&db, "job", &one);
    assert!(role_may(&db, &one, "job"));
    let mut s = db.session_as(&two);
    assert!(!may(&mut s, "job"));
    for near in ["jo", "jobs", "Job", "job ", " job", "job*", "*", "\\job"] {
        assert!(may(&mut s, near), "{near}");
    }
}

fn prefix_rule_is_of_all_that_begin_with_it() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    allow(&db, "x:*", &one);
    let (mut may_it, mut may_not) = (db.session_as(&one), db.session_as(&two));
    let longest = format!("x:{}", "y".repeat(253));
    for within in ["x:", "x:1", "x:*", "x::", "x: ", "x:\\", &longest] {
        assert!(may(&mut may_it, within), "{within}");
        assert!(!may(&mut may_not, within), "{within}");
    }
    for outside in ["x", "X:1", " x:1", "y:1", "*"] {
        assert!(may(&mut may_not, outside), "{outside}");
    }
    // an empty prefix is that of everything
    allow(&db, "*", &one);
    assert!(may(&mut may_it, "anything") && !may(&mut may_not, "anything"));
    // a star in the middle is none
    disallow(&db, "*", &one);
    allow(&db, "a*b", &one);
    assert!(!may(&mut may_not, "a*b"));
    assert!(may(&mut may_not, "axb") && may(&mut may_not, "a*bc"));
}

fn escaped_star_is_a_name() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    let mut s = db.session_as(&two);
    for (pattern, name, others) in [
        ("a\\*", "a*", ["a", "ab", "a\\", "a\\*", "a**"]),
        ("\\*", "*", ["", "a", "\\", "\\*", "**"]),
    ] {
        allow(&db, pattern, &one);
        assert!(!may(&mut s, name), "{pattern} {name}");
        assert!(role_may(&db, &one, name));
        for other in others.iter().filter(|other| !other.is_empty()) {
            assert!(may(&mut s, other), "{pattern} {other}");
        }
        disallow(&db, pattern, &one);
        assert!(may(&mut s, name));
    }
}

fn closest_rule_decides() {
    let db = Db::new();
    let names = ["all", "x", "xy", "exact", "second"];
    let roles = names.map(|name| login(&db, name));
    // in an order that is not that of their lengths
    for (pattern, role) in [
        ("x:y*", 2),
        ("*", 0),
        ("x:y", 3),
        ("x:y", 4),
        ("x:*", 1),
        ("other:*", 1),
    ] {
        allow(&db, pattern, &roles[role]);
    }
    for (resource, allowed) in [
        ("anything", &[0][..]),
        ("x", &[0]),
        ("x:", &[1]),
        ("x:1", &[1]),
        ("x:y", &[3, 4]),
        ("x:yz", &[2]),
        ("x:y:", &[2]),
    ] {
        for (place, role) in roles.iter().enumerate() {
            let expected = allowed.contains(&place);
            assert_eq!(
                role_may(&db, role, resource),
                expected,
                "{resource}: {role}"
            );
        }
    }
    // where the closest one goes, the next decides
    disallow(&db, "x:y", &roles[3]);
    assert!(role_may(&db, &roles[4], "x:y") && !role_may(&db, &roles[3], "x:y"));
    disallow(&db, "x:y", &roles[4]);
    assert!(role_may(&db, &roles[2], "x:y") && !role_may(&db, &roles[4], "x:y"));
    disallow(&db, "x:y*", &roles[2]);
    assert!(role_may(&db, &roles[1], "x:y") && !role_may(&db, &roles[2], "x:y"));
    disallow(&db, "x:*", &roles[1]);
    assert!(role_may(&db, &roles[0], "x:y") && !role_may(&db, &roles[1], "x:y"));
    disallow(&db, "*", &roles[0]);
    assert!(role_may(&db, &roles[1], "x:y"));
}

fn members_and_superusers_may() {
    let db = Db::new();
    let (group, inner) = (login(&db, "group"), login(&db, "inner"));
    let (member, nested) = (login(&db, "member"), login(&db, "nested"));
    let (stranger, lazy) = (login(&db, "stranger"), login(&db, "lazy"));
    let mut s = db.session();
    s.exec(&format!(
        "ALTER ROLE {lazy} NOINHERIT; GRANT {group} TO {member}, {inner}, {lazy}; GRANT {inner} TO {nested}"
    ));
    allow(&db, "*", &group);
    for role in [&group, &inner, &member, &nested, &lazy] {
        assert!(role_may(&db, role, "r"), "{role}");
    }
    assert!(!role_may(&db, &stranger, "r"));
    assert!(may(&mut s, "r"), "a superuser may everything");
    // to be allowed what a group is allowed makes nobody a member of it
    allow(&db, "r", &member);
    assert!(!role_may(&db, &group, "r") && role_may(&db, &member, "r"));
    // a group of everybody there is none, but one can be made
    disallow(&db, "r", &member);
    allow(&db, "r", "pg_monitor");
    s.exec(&format!("GRANT pg_monitor TO {stranger}"));
    assert!(role_may(&db, &stranger, "r") && !role_may(&db, &member, "r"));
}

fn membership_counts_as_it_is_now() {
    let db = Db::new();
    let (group, member) = (login(&db, "group"), login(&db, "member"));
    allow(&db, "r", &group);
    let (mut admin, mut s) = (db.session(), db.session_as(&member));
    for _ in 0..3 {
        assert!(!may(&mut s, "r"));
        admin.exec(&format!("GRANT {group} TO {member}"));
        assert!(may(&mut s, "r"));
        admin.exec(&format!("REVOKE {group} FROM {member}"));
    }
    admin.exec(&format!("ALTER ROLE {member} SUPERUSER"));
    assert!(may(&mut s, "r"));
    admin.exec(&format!("ALTER ROLE {member} NOSUPERUSER"));
    assert!(!may(&mut s, "r"));
}

fn current_role_counts() {
    let db = Db::new();
    let (allowed, other, both) = (login(&db, "may"), login(&db, "other"), login(&db, "both"));
    let mut admin = db.session();
    admin.exec(&format!("GRANT {allowed}, {other} TO {both}"));
    allow(&db, "r", &allowed);
    let mut s = db.session_as(&both);
    assert!(may(&mut s, "r"));
    s.exec(&format!("SET ROLE {other}"));
    let acquire = "SELECT acquire_lease('r')";
    refused(&db, &mut s, acquire, "r", &[&allowed], &other);
    s.exec(&format!("SET ROLE {allowed}"));
    assert!(may(&mut s, "r"));
    s.exec("RESET ROLE");
    // a superuser that has taken on a role is no superuser
    admin.exec(&format!("SET ROLE {other}"));
    refused(&db, &mut admin, acquire, "r", &[&allowed], &other);
    admin.exec("RESET ROLE");
    // whoever owns the function, whoever calls it
    for (function, owner) in [("of_may", &allowed), ("of_other", &other)] {
        admin.exec(&format!(
            "CREATE FUNCTION {function}() RETURNS bigint LANGUAGE sql SECURITY DEFINER
             AS 'SELECT acquire_lease(''r'', ttl => ''1 microsecond'')';
             ALTER FUNCTION {function} OWNER TO {owner}"
        ));
    }
    let mut caller = db.session_as(&other);
    assert!(caller.text("SELECT of_may()").is_some());
    let mut caller = db.session_as(&allowed);
    refused(
        &db,
        &mut caller,
        "SELECT of_other()",
        "r",
        &[&allowed],
        &other,
    );
}

fn refusal_tells_who_may_and_what_to_do() {
    let db = Db::new();
    let (one, two, own) = (login(&db, "a"), login(&db, "b"), login(&db, "own"));
    allow(&db, "x:*", &one);
    allow(&db, "x:*", &two);
    let mut s = db.session_as(&own);
    let error = db.refused(&mut s, "SELECT acquire_lease('x:7')", "42501");
    assert_eq!(
        error.message,
        "permission denied to acquire resource \"x:7\""
    );
    // in one order or the other
    let detail = error.detail.expect("a DETAIL");
    let expected = [(&one, &two), (&two, &one)].map(|(first, second)| {
        format!(
            "\"x:*\" is allowed to \"{first}\", \"{second}\", and role \"{own}\" is a member of none of them."
        )
    });
    assert!(expected.contains(&detail), "{detail}");
    assert_eq!(
        error.hint,
        Some(format!(
            "An administrator can: SELECT allow_lease('x:*', '{own}');"
        ))
    );
    // it can be caught
    s.exec(
        "DO $$ BEGIN
            PERFORM acquire_lease('x:7');
            RAISE 'granted';
         EXCEPTION WHEN insufficient_privilege THEN NULL;
         END $$",
    );
}

/// The statement in the hint.
#[track_caller]
fn pasted(error: &DbErr) -> &str {
    let hint = error.hint.as_deref().unwrap_or_default();
    let (_, statement) = hint
        .split_once(": ")
        .unwrap_or_else(|| panic!("no statement in the hint: {error}"));
    statement
}

fn hint_can_be_pasted_whatever_the_names_are() {
    let db = Db::new();
    let one = login(&db, "one");
    let mut admin = db.session();
    for (number, odd) in [
        "Mixed",
        "two words",
        "it's",
        "say \"so\"",
        "ünï",
        "a.b",
        "select",
        "back\\slash",
    ]
    .into_iter()
    .enumerate()
    {
        let own = format!("{odd} {}", db.name);
        let own = if number % 2 == 0 {
            format!("{}{}", db.name, odd)
        } else {
            own
        };
        let quoted = format!("\"{}\"", own.replace('"', "\"\""));
        admin.exec(&format!("CREATE ROLE {quoted} LOGIN"));
        for pattern in [
            "plain".to_owned(),
            format!("it's {number}*"),
            "\\*".to_owned(),
            "é*".to_owned(),
        ] {
            allow(&db, &pattern, &one);
            let resource = pattern.replace("\\*", "*");
            let mut s = db.session_as(&own);
            let error = s
                .try_one_with::<Option<i64>>("SELECT acquire_lease($1)", &[&resource])
                .expect_err("others are allowed it");
            let error = error.is("42501").well_written().details(&own);
            if let Err(refusal) = admin.try_exec(pasted(&error)) {
                panic!("pasted from: {error}\n  {refusal}");
            }
            assert!(may(&mut s, &resource), "{error}");
            admin.exec("SELECT disallow_lease(resource, role) FROM leasehold.rights");
        }
        admin.exec(&format!("DROP ROLE {quoted}"));
    }
}

fn refused_whether_free_or_held_and_before_any_wait() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    allow(&db, "*", &one);
    let mut s = db.session_as(&two);
    let mut holder = db.session_as(&one);
    for is_held in [false, true] {
        if is_held {
            holder.acquire("r");
        }
        for sql in [
            "SELECT acquire_lease('r')",
            "SELECT acquire_lease('r', request => gen_random_uuid())",
            "SELECT acquire_lease('r', metadata => '{}')",
            WAIT,
            AWAIT,
            "CALL await_lease('r', wait => '1ms')",
        ] {
            refused(&db, &mut s, sql, "*", &[&one], &two);
            assert!(holder.queue("r").is_empty(), "{sql}");
        }
        // in memory as well
        s.exec("SET leasehold.durability = memory");
        refused(&db, &mut s, "SELECT acquire_lease('r')", "*", &[&one], &two);
        s.exec("RESET leasehold.durability");
    }
}

fn right_that_is_taken_away_ends_the_wait() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    for sql in [WAIT, AWAIT] {
        for by in ["disallow", "allow"] {
            let mut s = db.session();
            // who waits has read the rules, with or without one of the resource
            allow(&db, "r", "postgres");
            if by == "disallow" {
                allow(&db, "r", &one);
            } else {
                disallow(&db, "r", "postgres");
            }
            let token = s.acquire("r");
            let mut waiter = db.session_as(&one);
            assert!(may(&mut waiter, "other"));
            let waiting = db.queued(waiter, "r", sql);
            let behind = db.queued(db.session(), "r", WAIT);
            match by {
                "disallow" => disallow(&db, "r", &one),
                _ => allow(&db, "r", &two),
            }
            assert!(s.release("r", token));
            // he may have looked before the release already
            let (mut waiter, result) = waiting.join();
            let error = match result {
                Err(error) => error,
                Ok(token) => panic!("{sql}: granted {token:?} after {by}"),
            };
            error.is("42501").well_written().details(&one);
            let (mut behind, token) = behind.granted();
            assert!(behind.release("r", token));
            assert!(may(&mut waiter, "other"));
            s.exec("SELECT disallow_lease(resource, role) FROM leasehold.rights");
        }
    }
}

fn lease_that_was_acquired_before_goes_on() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    let mut admin = db.session();
    admin.exec(&format!(
        "CREATE TABLE doc (n int); SELECT fence_table('doc', 'r'); GRANT ALL ON doc TO {one}"
    ));
    let mut s = db.session_as(&one);
    let token = s.acquire("r");
    allow(&db, "r", &two);
    assert!(s.renew("r", token) && s.check_fence("r", token));
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {token}); INSERT INTO doc VALUES (1); COMMIT"
    ));
    s.exec(&format!(
        "SET leasehold.token = '{token}'; UPDATE doc SET n = 2; RESET leasehold.token"
    ));
    // longer, which writes the ledger
    let longer = format!("SELECT renew_lease('r', {token}, '299s')");
    assert!(s.one::<bool>(&longer));
    assert!(s.release("r", token));
    refused(&db, &mut s, "SELECT acquire_lease('r')", "r", &[&two], &one);
    // and nobody else is let in by the right alone
    let token = db.session_as(&two).acquire("r");
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "42501");
}

fn retry_by_request_grants_nothing_that_is_not_allowed() {
    let db = Db::new();
    let (one, two) = (login(&db, "one"), login(&db, "two"));
    let mut s = db.session_as(&one);
    let request = "SELECT acquire_lease('r', ttl => '5min', request => '00000000-0000-0000-0000-000000000001')";
    let token: i64 = s.one(request);
    assert_eq!(s.one::<i64>(request), token);
    allow(&db, "r", &two);
    // while the lease lives it is the same one; when that is over, a new one is wanted
    assert_eq!(s.one::<i64>(request), token);
    assert!(s.release("r", token));
    refused(&db, &mut s, request, "r", &[&two], &one);
    allow(&db, "r", &one);
    assert!(s.one::<i64>(request) > token);
}
