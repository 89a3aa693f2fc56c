//! Layer sql: the calls and their arguments. Every value a caller can think of gets its documented answer, and a
//! refused one changes nothing.

use crate::cluster::Db;
use crate::leases::NEVER;

crate::tests![
    signatures_are_those_of_the_contract,
    lease_info_has_its_columns,
    resource_names_are_checked_by_every_call,
    resource_names_count_bytes,
    resource_names_compare_byte_for_byte,
    odd_resource_names_live_a_whole_life,
    holders_are_checked,
    holder_by_default_says_who_asked,
    ttl_bounds_of_acquire,
    ttl_bounds_of_renew,
    ttl_counts_months_and_days,
    ttl_by_default_is_the_setting,
    ttl_of_a_microsecond_is_over_at_once,
    tokens_are_checked_by_every_call,
    never_issued_token_is_good_for_nothing,
    token_of_another_resource_is_good_for_nothing,
    unknown_resource_is_free_and_has_no_lease,
    acquire_of_a_held_lease_answers_null,
    tokens_are_consecutive_while_the_server_runs,
    renew_runs_a_full_ttl_and_never_shortens,
    renew_of_a_lost_lease_says_false,
    release_may_be_repeated_until_superseded,
    release_of_a_lost_lease_says_false,
    check_fence_says_what_fence_would,
    lease_info_tells_a_lease,
    leases_lists_what_lease_info_tells,
    arguments_of_fence_table_are_checked,
    errors_of_our_own_tell_facts_and_next_step,
    acquire_twice_in_one_statement_or_transaction,
];

/// Calls that name a resource and a token, with places for both.
const TOKEN_CALLS: [&str; 4] = [
    "renew_lease({r}, {t})",
    "release_lease({r}, {t})",
    "fence({r}, {t})",
    "check_fence({r}, {t})",
];

fn call(template: &str, resource: &str, token: &str) -> String {
    format!(
        "SELECT {}",
        template.replace("{r}", resource).replace("{t}", token)
    )
}

fn signatures_are_those_of_the_contract() {
    let mut s = Db::new().session();
    let expected = [
        (
            "acquire_lease",
            "resource text, holder text DEFAULT NULL::text, ttl interval DEFAULT NULL::interval, \
             wait interval DEFAULT '00:00:00'::interval, request uuid DEFAULT NULL::uuid, metadata jsonb DEFAULT NULL::jsonb",
            "bigint",
        ),
        (
            "renew_lease",
            "resource text, token bigint, ttl interval DEFAULT NULL::interval",
            "boolean",
        ),
        ("release_lease", "resource text, token bigint", "boolean"),
        ("break_lease", "resource text", "bigint"),
        ("fence", "resource text, token bigint", "void"),
        ("check_fence", "resource text, token bigint", "boolean"),
        ("fenced", "", "trigger"),
    ];
    for (name, arguments, result) in expected {
        let row = s.rows(&format!(
            "SELECT pg_get_function_arguments(oid), pg_get_function_result(oid) FROM pg_proc WHERE proname = '{name}'"
        ));
        assert_eq!(
            row,
            [[Some(arguments.to_owned()), Some(result.to_owned())]],
            "{name}"
        );
    }
    // procedures are called by the names of their arguments
    let arguments = s.text("SELECT pg_get_function_arguments('await_lease'::regproc)");
    let expected = "IN resource text, IN holder text DEFAULT NULL::text, IN ttl interval DEFAULT NULL::interval, \
                    IN wait interval DEFAULT NULL::interval, INOUT token bigint DEFAULT NULL::bigint";
    assert_eq!(arguments.as_deref(), Some(expected));
    let arguments = s.text("SELECT pg_get_function_arguments('fence_table'::regproc)");
    let expected = "target regclass, resource text, token_column name DEFAULT NULL::name, strict boolean DEFAULT false";
    assert_eq!(arguments.as_deref(), Some(expected));
    let arguments = s.text("SELECT pg_get_function_arguments('unfence_table'::regproc)");
    assert_eq!(arguments.as_deref(), Some("target regclass"));
}

fn lease_info_has_its_columns() {
    let mut s = Db::new().session();
    let expected = "resource,token,holder,state,ttl,remaining,granted_at,renewed_at,role,pid,durable,writers,\
                    waiters,metadata";
    s.exec("CREATE TEMP VIEW info AS SELECT * FROM lease_info('r')");
    for relation in ["leasehold.leases", "pg_temp.info"] {
        let columns = s.text(&format!(
            "SELECT string_agg(attname, ',' ORDER BY attnum)
             FROM pg_attribute WHERE attrelid = '{relation}'::regclass AND attnum > 0"
        ));
        assert_eq!(columns.as_deref(), Some(expected), "{relation}");
    }
}

fn resource_names_are_checked_by_every_call() {
    let db = Db::new();
    let mut s = db.session();
    let calls =
        TOKEN_CALLS
            .iter()
            .chain(&["acquire_lease({r})", "lease_info({r})", "break_lease({r})"]);
    for template in calls {
        db.refused(&mut s, &call(template, "NULL", "1"), "22004");
        db.refused(&mut s, &call(template, "''", "1"), "22023");
        db.refused(&mut s, &call(template, "repeat('x', 256)", "1"), "22001");
        db.refused(&mut s, &call(template, "repeat('x', 100000)", "1"), "22001");
        // 128 characters, 256 bytes
        db.refused(&mut s, &call(template, "repeat('é', 128)", "1"), "22001");
    }
}

fn resource_names_count_bytes() {
    let db = Db::new();
    let mut s = db.session();
    // 255 bytes each
    for name in [
        "repeat('x', 255)",
        "repeat('é', 127) || 'x'",
        "repeat('漢', 85)",
        "repeat('🔒', 63) || 'xyz'",
    ] {
        let token = s
            .one::<Option<i64>>(&format!("SELECT acquire_lease({name})"))
            .expect("a name of 255 bytes is fine");
        assert!(s.one::<bool>(&format!("SELECT check_fence({name}, {token})")));
        let kept: bool = s.one(&format!(
            "SELECT resource = {name} FROM leasehold.leases WHERE token = {token}"
        ));
        assert!(kept, "{name} comes back changed");
        assert!(s.one::<bool>(&format!("SELECT release_lease({name}, {token})")));
    }
}

fn resource_names_compare_byte_for_byte() {
    let db = Db::new();
    let mut s = db.session();
    // the two é are one character and two; neither case, nor normal form, nor blanks are folded
    let names = [
        "r", "R", "r ", " r", "\u{e9}", "e\u{301}", "é ", "ss", "ß", "SS",
    ];
    let tokens: Vec<i64> = names.iter().map(|name| s.acquire(name)).collect();
    for (name, token) in names.iter().zip(&tokens) {
        assert_eq!(s.info(name, "token"), Some(token.to_string()), "{name:?}");
        assert_eq!(s.try_acquire(name), None, "{name:?} is held");
    }
    let listed: i64 = s.one("SELECT count(*) FROM leasehold.leases");
    assert_eq!(listed, 10);
}

fn odd_resource_names_live_a_whole_life() {
    let db = Db::new();
    let mut s = db.session();
    let names = [
        "it's",
        "\"quoted\"",
        "{id}",
        "{{",
        "}}",
        "{",
        "a\\b",
        "a\nb\tc",
        "%s%n",
        "$1",
        ";--",
        "/* c */",
        " ",
        "\u{1}",
        "NULL",
        "*",
        "a*",
        "日本語",
        "🔒",
        "\u{202e}abc",
        "'); DROP TABLE leasehold.ledger; --",
    ];
    for name in names {
        let first = s.acquire(name);
        assert!(s.renew(name, first), "{name:?}");
        s.fence(name, first);
        assert!(s.check_fence(name, first), "{name:?}");
        let listed: i64 = s.one_with(
            "SELECT token FROM leasehold.leases WHERE resource = $1",
            &[&name],
        );
        assert_eq!(listed, first, "{name:?}");
        let refused = s
            .try_fence(name, NEVER)
            .expect_err("a token that was never issued")
            .is("LH002");
        refused.well_written();
        assert!(s.release(name, first), "{name:?}");
        assert!(s.acquire(name) > first, "{name:?}");
    }
}

fn holders_are_checked() {
    let db = Db::new();
    let mut s = db.session();
    db.refused(&mut s, "SELECT acquire_lease('r', '')", "22023");
    db.refused(
        &mut s,
        "SELECT acquire_lease('r', repeat('x', 128))",
        "22001",
    );
    db.refused(
        &mut s,
        "SELECT acquire_lease('r', repeat('é', 64))",
        "22001",
    );
    for (i, holder) in [
        "repeat('x', 127)",
        "repeat('é', 63) || 'x'",
        "E'it''s\\n{x}'",
    ]
    .iter()
    .enumerate()
    {
        s.exec(&format!("SELECT acquire_lease('r{i}', {holder})"));
        assert!(
            s.one::<bool>(&format!("SELECT holder = {holder} FROM lease_info('r{i}')")),
            "{holder}"
        );
    }
}

fn holder_by_default_says_who_asked() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("SET application_name = 'billing'");
    s.acquire("r");
    let holder = s.info("r", "holder").expect("there is a holder");
    for part in ["postgres", "billing", &s.pid.to_string()] {
        assert!(holder.contains(part), "{holder} lacks {part}");
    }
    // application names may be up to 63 bytes, role names too: still at most 127 bytes
    s.exec(
        "SET application_name = 'a23456789012345678901234567890123456789012345678901234567890123'",
    );
    s.acquire("q");
    assert!(s.info_says("q", "octet_length(holder) <= 127"));
}

fn ttl_bounds_of_acquire() {
    let db = Db::new();
    let mut s = db.session();
    for ttl in BAD_TTLS {
        db.refused(
            &mut s,
            &format!("SELECT acquire_lease('r', ttl => '{ttl}')"),
            "22023",
        );
    }
    for (i, ttl) in GOOD_TTLS.iter().enumerate() {
        let token: Option<i64> = s.one(&format!("SELECT acquire_lease('r{i}', ttl => '{ttl}')"));
        assert!(token.is_some(), "{ttl}");
        assert!(
            s.one::<bool>(&format!(
                "SELECT ttl = interval '{ttl}' FROM lease_info('r{i}')"
            )),
            "{ttl} is not what is told"
        );
    }
    refuses_infinity(&db, "SELECT acquire_lease('r', ttl => '{}')");
}

fn ttl_bounds_of_renew() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    for ttl in BAD_TTLS {
        db.refused(
            &mut s,
            &format!("SELECT renew_lease('r', {token}, '{ttl}')"),
            "22023",
        );
    }
    for ttl in GOOD_TTLS {
        assert!(
            s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '{ttl}')")),
            "{ttl}"
        );
    }
    refuses_infinity(&db, &format!("SELECT renew_lease('r', {token}, '{{}}')"));
}

/// Not positive, or above the 5 minutes of `leasehold.max_ttl`.
const BAD_TTLS: [&str; 16] = [
    "0",
    "-1 microsecond",
    "-1s",
    "-1 month",
    "1 month -30 days",
    "1 day -24 hours",
    "-1 day 23:59:59",
    "5min 1 microsecond",
    "1 hour",
    "1 day",
    "1 month",
    "1 year",
    "178956970 years 7 months 2147483647 days 2562047788 hours 54.775807 seconds",
    "-178956970 years -8 months -2147483648 days -2562047788 hours -54.775807 seconds",
    "2562047788 hours 54.775807 seconds",
    "178956970 years 7 months -2147483648 days -2562047788 hours -54.775807 seconds",
];

const GOOD_TTLS: [&str; 4] = ["1 microsecond", "1 millisecond", "30s", "5min"];

fn refuses_infinity(db: &Db, sql: &str) {
    let mut s = db.session();
    let version: i32 = s.one("SELECT current_setting('server_version_num')::int");
    // intervals have had infinities since PostgreSQL 17; before that the word is no interval
    let sqlstate = if version >= 170_000 { "22023" } else { "22007" };
    for value in ["infinity", "-infinity"] {
        db.refused(&mut s, &sql.replace("{}", value), sqlstate);
    }
}

fn ttl_counts_months_and_days() {
    let db = Db::new();
    let mut s = db.session();
    // a month is 30 days and a day 24 hours: what is left of each is half a minute
    for (i, ttl) in [
        "1 month -29 days -23:59:30",
        "1 day -23:59:30",
        "-1 month 29 days 24:00:30",
    ]
    .iter()
    .enumerate()
    {
        s.exec(&format!("SELECT acquire_lease('r{i}', ttl => '{ttl}')"));
        assert!(
            s.info_says(
                &format!("r{i}"),
                "ttl = '30s'::interval AND remaining BETWEEN '1s' AND '30s'"
            ),
            "{ttl}"
        );
    }
}

fn ttl_by_default_is_the_setting() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("SELECT acquire_lease('a')");
    assert!(s.info_says("a", "ttl = '30s'::interval"));
    s.exec("SET leasehold.default_ttl = '77s'; SELECT acquire_lease('b', ttl => NULL)");
    assert!(s.info_says("b", "ttl = '77s'::interval"));
    // above max_ttl it acts as max_ttl
    s.exec("SET leasehold.default_ttl = '1h'; SELECT acquire_lease('c')");
    assert!(s.info_says("c", "ttl = '5min'::interval"));
    let token = s.info("a", "token").expect("a is held");
    s.exec(&format!("SELECT renew_lease('a', {token}, NULL)"));
    assert!(
        s.info_says("a", "remaining > '1min'::interval"),
        "renew does not take the setting"
    );
}

fn ttl_of_a_microsecond_is_over_at_once() {
    let db = Db::new();
    let mut s = db.session();
    let first = s.acquire_expired("r");
    assert_eq!(s.state_of("r"), "expired");
    assert!(!s.renew("r", first), "over, even if nobody has taken it");
    assert!(s.acquire("r") > first);
}

fn tokens_are_checked_by_every_call() {
    let db = Db::new();
    let mut s = db.session();
    s.acquire("r");
    for template in TOKEN_CALLS {
        db.refused(&mut s, &call(template, "'r'", "NULL"), "22004");
        for token in ["0", "-1", "-9223372036854775808"] {
            db.refused(&mut s, &call(template, "'r'", token), "22023");
        }
    }
}

fn never_issued_token_is_good_for_nothing() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    let before = db.state();
    for never in [1, token + 1, NEVER] {
        assert!(!s.renew("r", never), "{never}");
        assert!(!s.release("r", never), "{never}");
        assert!(!s.check_fence("r", never), "{never}");
    }
    assert_eq!(db.state(), before, "a false answer changes nothing");
    // below T_max it is stale, above it is unknown: nothing more can be told of a token that was never granted
    db.refused(&mut s, "SELECT fence('r', 1)", "LH001");
    db.refused(
        &mut s,
        &format!("SELECT fence('r', {})", token + 1),
        "LH002",
    );
    db.refused(&mut s, &format!("SELECT fence('r', {NEVER})"), "LH002");
    assert!(s.check_fence("r", token));
}

fn token_of_another_resource_is_good_for_nothing() {
    let db = Db::new();
    let mut s = db.session();
    let (a, b) = (s.acquire("a"), s.acquire("b"));
    assert!(a < b);
    let before = db.state();
    for (resource, token) in [("a", b), ("b", a), ("unknown", a)] {
        assert!(!s.renew(resource, token), "{resource}");
        assert!(!s.release(resource, token), "{resource}");
        assert!(!s.check_fence(resource, token), "{resource}");
    }
    assert_eq!(db.state(), before, "a false answer changes nothing");
    db.refused(&mut s, &format!("SELECT fence('b', {a})"), "LH001");
    db.refused(&mut s, &format!("SELECT fence('a', {b})"), "LH002");
    db.refused(&mut s, &format!("SELECT fence('unknown', {a})"), "LH002");
}

fn unknown_resource_is_free_and_has_no_lease() {
    let db = Db::new();
    let mut s = db.session();
    let rows = s.rows(
        "SELECT resource, state, token, holder, remaining, role, pid FROM lease_info('nobody''s')",
    );
    let expected = [
        Some("nobody's".to_owned()),
        Some("free".to_owned()),
        None,
        None,
        None,
        None,
        None,
    ];
    assert_eq!(rows, [expected]);
    let before = db.state();
    assert!(
        !s.renew("nobody's", NEVER)
            && !s.release("nobody's", NEVER)
            && !s.check_fence("nobody's", NEVER)
    );
    db.refused(
        &mut s,
        &format!("SELECT fence('nobody''s', {NEVER})"),
        "LH002",
    );
    // there was no token before this server started, so the floor is at nothing
    db.refused(&mut s, "SELECT fence('nobody''s', 1)", "LH002");
    assert_eq!(db.state(), before, "a question makes no lease");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM leasehold.leases"), 0);
}

fn acquire_of_a_held_lease_answers_null() {
    let db = Db::new();
    let (mut holder, mut other) = (db.session(), db.session());
    let token = holder
        .one::<Option<i64>>("SELECT acquire_lease('r', 'me', '5min')")
        .expect("r is free");
    let before = db.state();
    assert_eq!(
        other.one::<Option<i64>>("SELECT acquire_lease('r', 'you')"),
        None
    );
    // the holder's name proves nothing
    assert_eq!(
        other.one::<Option<i64>>("SELECT acquire_lease('r', 'me')"),
        None
    );
    assert_eq!(
        holder.one::<Option<i64>>("SELECT acquire_lease('r', 'me')"),
        None
    );
    assert_eq!(db.state(), before, "a denial changes nothing");
    assert!(holder.release("r", token));
    assert!(other.acquire("r") > token);
}

fn tokens_are_consecutive_while_the_server_runs() {
    let db = Db::new();
    let mut s = db.session();
    let first = s.acquire("r0");
    let rest: Vec<i64> = (1..300).map(|i| s.acquire(&format!("r{i}"))).collect();
    let expected: Vec<i64> = (first + 1..first + 300).collect();
    assert_eq!(rest, expected);
}

fn renew_runs_a_full_ttl_and_never_shortens() {
    let db = Db::new();
    let mut s = db.session();
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '20s')");
    let granted = s.info("r", "granted_at");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '4min')")));
    assert!(s.info_says(
        "r",
        "remaining > '3min'::interval AND remaining <= '4min'::interval"
    ));
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '1s')")));
    assert!(
        s.info_says("r", "remaining > '3min'::interval"),
        "a renewal shortened the lease"
    );
    assert!(s.info_says("r", "renewed_at > granted_at"));
    assert_eq!(s.info("r", "granted_at"), granted, "a renewal is no grant");
    assert_eq!(
        s.info("r", "token"),
        Some(token.to_string()),
        "the token stays"
    );
    assert!(s.check_fence("r", token));
}

fn renew_of_a_lost_lease_says_false() {
    let db = Db::new();
    let mut s = db.session();
    let expired = s.acquire_expired("expired");
    let released = s.acquire("released");
    assert!(s.release("released", released));
    let (superseded, current) = s.stale_and_current("superseded");
    let before = db.state();
    for (resource, token) in [
        ("expired", expired),
        ("released", released),
        ("superseded", superseded),
    ] {
        assert!(!s.renew(resource, token), "{resource}");
    }
    assert_eq!(db.state(), before, "a lost lease comes back by no renewal");
    assert!(s.renew("superseded", current));
}

fn release_may_be_repeated_until_superseded() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.acquire("r");
    assert!(s.release("r", token));
    assert_eq!(s.state_of("r"), "free");
    assert!(
        s.release("r", token),
        "a repeated release while the token is still T_max"
    );
    let next = other.acquire("r");
    assert!(
        !s.release("r", token),
        "a superseded token releases nothing"
    );
    assert_eq!(s.info("r", "token"), Some(next.to_string()));
    assert!(other.renew("r", next), "the new holder keeps the lease");
}

fn release_of_a_lost_lease_says_false() {
    let db = Db::new();
    let mut s = db.session();
    let expired = s.acquire_expired("expired");
    let (superseded, current) = s.stale_and_current("superseded");
    let before = db.state();
    assert!(!s.release("expired", expired));
    assert!(!s.release("superseded", superseded));
    assert_eq!(db.state(), before);
    assert!(s.check_fence("superseded", current));
}

fn check_fence_says_what_fence_would() {
    let db = Db::new();
    let mut s = db.session();
    let live = s.acquire("live");
    let expired = s.acquire_expired("expired");
    let released = s.acquire("released");
    s.release("released", released);
    let (stale, current) = s.stale_and_current("taken");
    let cases = [
        ("live", live, None),
        // nobody else wants it
        ("expired", expired, None),
        ("released", released, Some("LH004")),
        ("taken", stale, Some("LH001")),
        ("taken", current, None),
        ("taken", NEVER, Some("LH002")),
        ("unknown", NEVER, Some("LH002")),
    ];
    for (resource, token, refusal) in cases {
        let fence = s
            .try_fence(resource, token)
            .err()
            .map(|e| e.well_written().sqlstate);
        assert_eq!(fence.as_deref(), refusal, "fence('{resource}', {token})");
        assert_eq!(
            s.check_fence(resource, token),
            refusal.is_none(),
            "check_fence('{resource}', {token})"
        );
    }
    // it takes no lock
    s.exec("BEGIN");
    assert!(s.check_fence("live", live));
    let locks: i64 = s.one(
        "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
    );
    assert_eq!(locks, 0);
    s.exec("COMMIT");
}

fn lease_info_tells_a_lease() {
    let db = Db::new();
    let role = db.role();
    let mut s = db.session_as(&role);
    let token: i64 = s.one("SELECT acquire_lease('r', 'worker 7', '2min')");
    let expected = format!(
        "(resource, token, holder, state) = ('r', {token}, 'worker 7', 'held')
         AND ttl = '2min'::interval AND remaining > '1min'::interval AND remaining <= '2min'::interval
         AND granted_at BETWEEN now() - '1min'::interval AND clock_timestamp() AND renewed_at IS NULL
         AND role::text = '{role}' AND pid = {} AND durable AND writers = 0",
        s.pid
    );
    assert!(
        s.info_says("r", &expected),
        "{:?}",
        s.rows("SELECT * FROM lease_info('r')")
    );
    // an open transaction that fences under the token is a writer
    let mut writer = db.session_as(&role);
    writer.exec("BEGIN");
    writer.fence("r", token);
    assert!(s.info_says("r", "writers = 1"));
    writer.exec("COMMIT");
    assert!(s.info_says("r", "writers = 0"));
    s.release("r", token);
    assert_eq!(s.state_of("r"), "free");
}

fn leases_lists_what_lease_info_tells() {
    let db = Db::new();
    let mut s = db.session();
    s.acquire("a");
    s.acquire("b");
    s.acquire_expired("c");
    let same: bool = s.one(
        "SELECT bool_and(to_jsonb(l) - 'remaining' = to_jsonb(i) - 'remaining')
         FROM leasehold.leases l, lease_info(l.resource) i",
    );
    assert!(same);
    let names = s.text("SELECT string_agg(resource, ',' ORDER BY resource) FROM leasehold.leases WHERE state = 'held'");
    assert_eq!(names.as_deref(), Some("a,b"));
}

fn arguments_of_fence_table_are_checked() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int, token bigint, word text); CREATE VIEW v AS TABLE t; CREATE SEQUENCE q");
    s.exec("CREATE MATERIALIZED VIEW m AS TABLE t; CREATE FOREIGN DATA WRAPPER w; CREATE SERVER srv FOREIGN DATA WRAPPER w");
    s.exec("CREATE FOREIGN TABLE f (id int) SERVER srv");
    let cases = [
        ("NULL, 'r'", "22004"),
        ("'t', NULL", "22004"),
        ("'t', 'r', strict => NULL", "22004"),
        ("'t', ''", "22023"),
        ("'t', repeat('x', 256)", "22001"),
        ("'nowhere', 'r'", "42P01"),
        ("'t', 'r', 'nowhere'", "42703"),
        ("'t', 'r', 'id'", "42804"),
        ("'t', 'r', 'word'", "42804"),
        ("'v', 'r'", "42809"),
        ("'q', 'r'", "42809"),
        ("'m', 'r'", "42809"),
        ("'f', 'r'", "42809"),
    ];
    for (arguments, sqlstate) in cases {
        db.refused(
            &mut s,
            &format!("SELECT fence_table({arguments})"),
            sqlstate,
        );
        let triggers: i64 =
            s.one("SELECT count(*) FROM pg_trigger WHERE tgname LIKE '%leasehold%'");
        assert_eq!(triggers, 0, "a trigger is left by fence_table({arguments})");
    }
    db.refused(&mut s, "SELECT unfence_table(NULL)", "22004");
    s.exec("INSERT INTO t VALUES (1, 1, 'not fenced')");
}

fn errors_of_our_own_tell_facts_and_next_step() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int); SELECT fence_table('t', 'job 7')");
    let stale: i64 = s.one("SELECT acquire_lease('job 7', 'first', '1 microsecond')");
    let current: i64 = s.one("SELECT acquire_lease('job 7', 'second', '5min')");
    // the resource, the presented token, the current one and its holder
    let error = db.refused(&mut s, &format!("SELECT fence('job 7', {stale})"), "LH001");
    error
        .tells("job 7")
        .details(&stale.to_string())
        .details(&current.to_string())
        .details("second");
    let error = db.refused(&mut s, &format!("SELECT fence('job 7', {NEVER})"), "LH002");
    error
        .tells("job 7")
        .details(&NEVER.to_string())
        .details(&current.to_string());
    db.refused(&mut s, "INSERT INTO t VALUES (1)", "LH003")
        .tells("job 7")
        .hints_at("leasehold.token");
    s.release("job 7", current);
    db.refused(
        &mut s,
        &format!("SELECT fence('job 7', {current})"),
        "LH004",
    )
    .tells("job 7")
    .details(&current.to_string());
}

fn acquire_twice_in_one_statement_or_transaction() {
    let db = Db::new();
    let mut s = db.session();
    let granted: i64 =
        s.one("SELECT count(acquire_lease('r', ttl => '5min')) FROM generate_series(1, 100)");
    assert_eq!(granted, 1);
    s.exec("BEGIN");
    let token = s.acquire("q");
    assert_eq!(s.try_acquire("q"), None, "it is held, by whomever");
    s.exec("COMMIT");
    assert!(s.renew("q", token));
    let row = s.rows("SELECT acquire_lease('a') < acquire_lease('b'), acquire_lease('a') IS NULL");
    assert_eq!(row, [[Some("t".to_owned()), Some("t".to_owned())]]);
}
