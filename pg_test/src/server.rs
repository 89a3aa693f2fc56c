//! Layer server: the extension in its server: installed and removed, full, restarted, misconfigured, among strangers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::leases::NEVER;
use crate::session::Session;

crate::tests![
    extension_made_again_goes_on_above,
    extension_dropped_and_rolled_back_keeps_leases,
    extension_made_again_and_rolled_back_after_a_restart_keeps_leases,
    extension_made_again_used_and_rolled_back_revives_nothing,
    extension_dropped_with_a_lease_under_way,
    database_dropped_with_live_leases,
    databases_have_namespaces_of_their_own,
    full_table_refuses_and_recovers,
    full_table_of_released_leases_makes_room_without_a_worker,
    full_table_is_shared_by_databases_and_freed_by_rollback,
    expired_leases_never_fill_the_table,
    role_of_the_lease_alone_may_use_it,
    lease_that_is_over_is_nobodys,
    role_switched_within_a_session,
    lease_belongs_to_the_current_role,
    acquire_takes_over_another_roles_lease_when_it_is_over,
    extension_without_preload_is_refused,
    calls_without_preload_are_refused,
    extension_in_a_chosen_schema,
    extension_is_for_superusers,
    hostile_search_path_changes_nothing,
    ordinary_roles_need_no_grants,
    ledger_is_out_of_ordinary_hands,
    settings_have_their_defaults,
    settings_out_of_range_are_refused,
    settings_have_their_scopes,
    max_ttl_counts_from_the_reload,
    lease_survives_a_fast_restart,
    lease_survives_an_immediate_restart,
    lease_survives_a_killed_postmaster,
    lease_survives_a_crashed_backend,
    lease_after_a_restart_lasts_its_full_ttl,
    renewed_ttl_is_what_a_restart_recovers,
    released_lease_is_free_after_a_clean_restart,
    uncommitted_grant_is_nothing_after_a_crash,
    rolled_back_grant_is_nothing_after_a_crash,
    tokens_rise_over_restarts,
    tokens_at_or_below_the_floor_are_stale,
    untouched_leases_are_listed_as_recovering,
    transaction_that_fences_too_much_is_told_what_to_raise,
    standby_answers_questions_only,
    displaced_entry_still_drains,
    grants_under_way_are_never_displaced,
    released_lease_is_free_however_soon_displaced,
    role_dropped_with_a_live_lease,
    extension_with_fenced_tables_is_kept,
    last_tokens_are_handed_out_once,
    used_up_tokens_are_told,
];

fn extension_made_again_goes_on_above() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int)");
    let mut last = 0;
    for _ in 0..3 {
        s.exec("SELECT fence_table('t', 'r')");
        let token = s.acquire("r");
        assert!(token > last, "{token} after {last}");
        s.acquire("other");
        last = s.acquire("third");
        s.exec("DROP EXTENSION leasehold CASCADE; CREATE EXTENSION leasehold");
        // the old leases are out of reach, their tokens good for nothing
        assert_eq!(s.one::<i64>("SELECT count(*) FROM leasehold.leases"), 0);
        assert_eq!(s.state_of("r"), "free");
        assert!(!s.renew("r", token) && !s.release("r", token) && !s.check_fence("r", token));
        let next = s.acquire("r");
        assert!(next > last, "{next} after {last}");
        db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH001");
        assert!(s.release("r", next));
        last = next;
        s.exec("INSERT INTO t VALUES (1)");
    }
}

fn extension_dropped_and_rolled_back_keeps_leases() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    let before = db.state();
    s.exec("BEGIN; DROP EXTENSION leasehold; CREATE EXTENSION leasehold; SELECT acquire_lease('r'); ROLLBACK");
    assert_eq!(db.state(), before);
    assert!(s.renew("r", token));
    assert_eq!(db.session().try_acquire("r"), None);
    // and a block that makes and uses it
    s.exec("DROP EXTENSION leasehold; BEGIN; CREATE EXTENSION leasehold");
    let next = s.acquire("r");
    s.exec("COMMIT");
    assert!(next > token);
    assert!(s.renew("r", next));
}

fn extension_made_again_and_rolled_back_after_a_restart_keeps_leases() {
    for call in [
        "check_fence('r', 1)",
        "acquire_lease('r')",
        "release_lease('r', 1)",
    ] {
        let db = Db::with(&[]);
        let mut s = db.session();
        let (other, token) = (s.acquire("other"), s.acquire("r"));
        drop(s);
        db.cluster.restart(Stop::Fast);
        let mut s = db.session();
        // the first thing that the server hears of the database is a ledger that will never have been
        s.exec(&format!(
            "BEGIN; DROP EXTENSION leasehold; CREATE EXTENSION leasehold; SELECT {call}; ROLLBACK"
        ));
        assert!(s.check_fence("r", token), "after {call}");
        s.fence("r", token);
        assert!(s.renew("r", token) && s.renew("other", other));
        assert_eq!((s.try_acquire("r"), s.try_acquire("other")), (None, None));
        // the floor is that of this ledger: what was granted before the restart and is not in it is stale
        for stale in [other, token] {
            db.refused(
                &mut s,
                &format!("SELECT fence('unknown', {stale})"),
                "LH001",
            );
        }
        assert!(s.acquire("new") > token);
    }
}

/// The ledger that comes back knows which of its leases were granted since the start, and are over.
fn extension_made_again_used_and_rolled_back_revives_nothing() {
    let db = Db::with(&[("leasehold.max_leases", "8"), ("max_worker_processes", "0")]);
    let mut s = db.session();
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '5min')");
    assert!(s.release("r", token));
    s.exec("BEGIN; DROP EXTENSION leasehold; CREATE EXTENSION leasehold; SELECT acquire_lease('r'); ROLLBACK");
    // out of the shared table, so that the ledger is asked
    for i in 0..60 {
        let name = format!("passing {i}");
        let passing = s.acquire(&name);
        assert!(s.release(&name, passing));
    }
    assert!(!s.check_fence("r", token) && !s.renew("r", token));
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH004");
    assert!(s.acquire("r") > token);
}

fn extension_dropped_with_a_lease_under_way() {
    let db = Db::new();
    let (mut s, dropper) = (db.session(), db.session());
    s.exec("BEGIN");
    let token = s.acquire("r");
    // the ledger is locked by the grant, so the drop has to wait for its end
    let dropping = dropper.spawn("DROP EXTENSION leasehold");
    db.cluster.wait_until_blocked(dropping.pid);
    s.exec("COMMIT");
    let (mut dropper, result) = dropping.join();
    result.expect("the drop comes through");
    s.err("SELECT renew_lease('r', 1)").is("42883");
    dropper.exec("CREATE EXTENSION leasehold");
    assert!(dropper.acquire("r") > token);
}

fn database_dropped_with_live_leases() {
    let cluster = Cluster::shared();
    let db = Db::on(&cluster);
    let token = db.session().acquire("r");
    db.session()
        .exec("SELECT acquire_lease('r' || i, ttl => '5min') FROM generate_series(1, 50) i");
    let mut admin = cluster.connect();
    admin.exec(&format!("DROP DATABASE {} WITH (FORCE)", db.name));
    admin.exec(&format!("CREATE DATABASE {}", db.name));
    let mut s = db.session();
    s.exec("CREATE EXTENSION leasehold");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM leasehold.leases"), 0);
    assert!(!s.check_fence("r", token) && !s.renew("r", token));
    s.acquire("r");
}

fn databases_have_namespaces_of_their_own() {
    let (a, b) = (Db::new(), Db::new());
    let (mut s, mut t) = (a.session(), b.session());
    let in_a = s.acquire("r");
    let before = a.state();
    let in_b = t.acquire("r");
    assert_eq!((s.try_acquire("r"), t.try_acquire("r")), (None, None));
    if in_a != in_b {
        assert!(!s.check_fence("r", in_b) && !t.check_fence("r", in_a));
    }
    assert!(t.release("r", in_b));
    assert_eq!(
        a.state(),
        before,
        "a release in one database reached another"
    );
    assert!(s.renew("r", in_a));
    // a fence here drains nothing there
    let expired = t.acquire_expired("q");
    t.exec(&format!("BEGIN; SELECT fence('q', {expired})"));
    s.acquire("q");
    t.exec("COMMIT");
}

/// Acquires fill1, fill2, ... until the table is full; gives how many it took.
fn fill(s: &mut Session) -> usize {
    for i in 1.. {
        if let Err(error) =
            s.try_one::<Option<i64>>(&format!("SELECT acquire_lease('fill{i}', ttl => '5min')"))
        {
            error
                .is("LH006")
                .well_written()
                .hints_at("leasehold.max_leases");
            return i - 1;
        }
        assert!(i < 10_000, "the table takes any number of leases");
    }
    unreachable!("the numbers do not end");
}

fn full_table_refuses_and_recovers() {
    let db = Db::with(&[("leasehold.max_leases", "64")]);
    let mut s = db.session();
    let first = s.acquire("first");
    let count = fill(&mut s) + 1;
    assert!(
        (64..=128).contains(&count),
        "{count} leases fit where 64 always do and 128 may"
    );
    db.refused(&mut s, "SELECT acquire_lease('more')", "LH006");
    // those that are in go on as ever
    assert!(s.renew("first", first) && s.check_fence("first", first));
    assert_eq!(s.try_acquire("first"), None, "held is held, full or not");
    s.fence("first", first);
    let listed: i64 = s.one("SELECT count(*) FROM leasehold.leases WHERE state = 'held'");
    assert_eq!(usize::try_from(listed), Ok(count));
    // one that ends makes room for one
    assert!(s.release("first", first));
    assert!(
        s.one::<Option<i64>>("SELECT acquire_lease('in its place', ttl => '1 microsecond')")
            .is_some()
    );
    s.acquire("in place of the expired one");
    // and its token stays stale
    db.refused(&mut s, &format!("SELECT fence('first', {first})"), "LH004");
    s.exec("SELECT release_lease(resource, token) FROM leasehold.leases WHERE state = 'held'");
    let count = fill(&mut s);
    assert!(
        (64..=128).contains(&count),
        "{count} leases fit after all have ended"
    );
}

/// Leases of before a crash, released since: nobody has told the ledger, so they may not be forgotten before somebody does.
fn full_table_of_released_leases_makes_room_without_a_worker() {
    let db = Db::with(&[("leasehold.max_leases", "8"), ("max_worker_processes", "0")]);
    let mut s = db.session();
    let count = fill(&mut s);
    let tokens: Vec<i64> = (1..=count)
        .map(|i| s.one(&format!("SELECT token FROM lease_info('fill{i}')")))
        .collect();
    drop(s);
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    for (i, token) in (1..).zip(&tokens) {
        assert!(s.release(&format!("fill{i}"), *token));
    }
    for i in 1..=count {
        s.acquire(&format!("new{i}"));
    }
    s.err("SELECT acquire_lease('one too many')").is("LH006");
    drop(s);
    db.cluster.kill_postmaster();
    db.cluster.start();
    // what was forgotten is over all the same
    let mut s = db.session();
    for (i, token) in (1..).zip(&tokens) {
        assert!(
            !s.check_fence(&format!("fill{i}"), *token),
            "fill{i} is back"
        );
    }
}

fn full_table_is_shared_by_databases_and_freed_by_rollback() {
    let db = Db::with(&[("leasehold.max_leases", "64")]);
    let other = Db::on(&db.cluster);
    let mut s = db.session();
    s.exec("BEGIN");
    fill(&mut s);
    s.exec("ROLLBACK");
    let count = fill(&mut other.session());
    assert!(
        count >= 64,
        "{count}: the rolled back grants still take room"
    );
    db.refused(&mut s, "SELECT acquire_lease('more')", "LH006");
    drop(s);
    let mut admin = db.cluster.connect();
    admin.exec(&format!("DROP DATABASE {} WITH (FORCE)", other.name));
}

fn expired_leases_never_fill_the_table() {
    let db = Db::with(&[("leasehold.max_leases", "64")]);
    let mut s = db.session();
    let first = s.acquire_expired("r0");
    for i in 1..1000 {
        s.acquire_expired(&format!("r{i}"));
    }
    // long displaced from the table, it is over as before, and its token T_max until the next grant
    assert!(!s.renew("r0", first));
    assert!(s.acquire("r0") > first);
    db.refused(&mut s, &format!("SELECT fence('r0', {first})"), "LH001");
}

fn role_of_the_lease_alone_may_use_it() {
    let db = Db::new();
    let (owner, stranger, member) = (db.role(), db.role(), db.role());
    db.session().exec(&format!("GRANT {owner} TO {member}"));
    let token = db.session_as(&owner).acquire("r");
    let mut s = db.session_as(&stranger);
    for call in [
        "renew_lease('r', {t})",
        "renew_lease('r', {t}, '1s')",
        "release_lease('r', {t})",
        "fence('r', {t})",
    ] {
        db.refused(
            &mut s,
            &format!("SELECT {}", call.replace("{t}", &token.to_string())),
            "42501",
        );
    }
    // to ask is free, and held is held
    assert!(s.check_fence("r", token));
    assert_eq!(s.state_of("r"), "held");
    assert_eq!(s.try_acquire("r"), None);
    // for a wrong token there is no lease to be refused
    assert!(!s.renew("r", NEVER) && !s.release("r", 1));
    let mut m = db.session_as(&member);
    assert!(m.renew("r", token));
    m.fence("r", token);
    assert!(m.release("r", token));
    // released, it is no stranger's business either
    assert!(m.release("r", token));
}

fn lease_that_is_over_is_nobodys() {
    let db = Db::new();
    let (owner, stranger) = (db.role(), db.role());
    let (mut o, mut s) = (db.session_as(&owner), db.session_as(&stranger));
    let expired = o.acquire_expired("r");
    // false for everyone: there is no lease that anybody could be kept from
    assert!(!s.renew("r", expired) && !s.release("r", expired));
    assert!(!s.one::<bool>(&format!("SELECT renew_lease('r', {expired}, '5min')")));
    assert!(!o.renew("r", expired) && !o.release("r", expired));
    // wanted by another, while a transaction is open under it
    o.exec(&format!("BEGIN; SELECT fence('r', {expired})"));
    assert_eq!(s.try_acquire("r"), None);
    assert!(!s.renew("r", expired) && !s.release("r", expired));
    o.exec("COMMIT");
    let live = o.acquire("r");
    assert!(!s.renew("r", expired) && !s.release("r", expired));
    for call in ["renew_lease", "release_lease"] {
        db.refused(&mut s, &format!("SELECT {call}('r', {live})"), "42501");
    }
    assert!(o.renew("r", live));
}

fn role_switched_within_a_session() {
    let db = Db::new();
    let (owner, stranger) = (db.role(), db.role());
    db.session().exec(&format!("GRANT {stranger} TO {owner}"));
    let mut s = db.session_as(&owner);
    let token = s.acquire("r");
    // the session user still is the lease's
    s.exec(&format!("SET ROLE {stranger}"));
    assert!(s.renew("r", token));
    s.fence("r", token);
    // what the other role acquires belongs to it
    let theirs = s.acquire("q");
    assert_eq!(s.info("q", "role").as_deref(), Some(stranger.as_str()));
    db.refused(
        &mut db.session_as(&db.role()),
        &format!("SELECT release_lease('q', {theirs})"),
        "42501",
    );
    s.exec("RESET ROLE");
    assert!(s.release("q", theirs), "a member of the lease's role");
}

fn lease_belongs_to_the_current_role() {
    let db = Db::new();
    let (definer, caller) = (db.role(), db.role());
    db.session().exec(&format!(
        "CREATE FUNCTION take(r text) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT acquire_lease(r)';
         ALTER FUNCTION take OWNER TO {definer}"
    ));
    let mut s = db.session_as(&caller);
    let token: i64 = s.one("SELECT take('r')");
    assert_eq!(s.info("r", "role").as_deref(), Some(definer.as_str()));
    db.refused(
        &mut s,
        &format!("SELECT release_lease('r', {token})"),
        "42501",
    );
    assert!(db.session_as(&definer).release("r", token));
}

fn acquire_takes_over_another_roles_lease_when_it_is_over() {
    let db = Db::new();
    let (first, second) = (db.role(), db.role());
    let old = db.session_as(&first).acquire_expired("r");
    let mut s = db.session_as(&second);
    let new = s.acquire("r");
    assert!(new > old);
    assert_eq!(s.info("r", "role").as_deref(), Some(second.as_str()));
    let mut f = db.session_as(&first);
    assert!(!f.renew("r", old) && !f.release("r", old));
    db.refused(&mut f, &format!("SELECT fence('r', {old})"), "LH001");
    db.refused(&mut f, &format!("SELECT fence('r', {new})"), "42501");
}

const PRELOAD_LINE: &str = "shared_preload_libraries = 'leasehold'";

fn extension_without_preload_is_refused() {
    let cluster = Arc::new(Cluster::builder().without_preload().start());
    let mut s = Db::bare_on(&cluster).session();
    s.err("CREATE EXTENSION leasehold")
        .is("55000")
        .well_written()
        .hints_at(PRELOAD_LINE);
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM pg_extension WHERE extname = 'leasehold'"),
        0
    );
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM pg_namespace WHERE nspname = 'leasehold'"),
        0
    );
    s.err("LOAD 'leasehold'")
        .is("55000")
        .well_written()
        .hints_at(PRELOAD_LINE);
    assert_eq!(s.one::<i32>("SELECT 1"), 1);
}

fn calls_without_preload_are_refused() {
    let db = Db::with(&[]);
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int); SELECT fence_table('t', 'r')");
    let token = s.acquire("r");
    drop(s);
    db.cluster.configure("shared_preload_libraries = ''\n");
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    let calls = [
        "SELECT acquire_lease('r')".to_owned(),
        format!("SELECT renew_lease('r', {token})"),
        format!("SELECT release_lease('r', {token})"),
        format!("SELECT fence('r', {token})"),
        format!("SELECT check_fence('r', {token})"),
        "SELECT * FROM lease_info('r')".to_owned(),
        "SELECT * FROM leasehold.leases".to_owned(),
        // never unfenced
        "INSERT INTO t VALUES (1)".to_owned(),
        "TRUNCATE t".to_owned(),
    ];
    for call in calls {
        s.err(&call).is("55000").hints_at(PRELOAD_LINE);
    }
    assert_eq!(s.one::<i64>("SELECT count(*) FROM t"), 0);
    drop(s);
    db.cluster
        .configure("shared_preload_libraries = 'leasehold'\n");
    db.cluster.restart(Stop::Fast);
    assert!(db.session().renew("r", token));
}

fn extension_in_a_chosen_schema() {
    let db = Db::bare_on(&Cluster::shared());
    let mut s = db.session();
    s.exec("CREATE SCHEMA \"My App\"; CREATE EXTENSION leasehold SCHEMA \"My App\"");
    let schemas = s.text(
        "SELECT string_agg(DISTINCT n.nspname, ',') FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace
         WHERE proname IN ('acquire_lease', 'renew_lease', 'release_lease', 'fence', 'check_fence', 'fenced',
                           'fence_table', 'unfence_table', 'lease_info')",
    );
    assert_eq!(schemas.as_deref(), Some("My App"));
    s.exec("CREATE TABLE t (id int); SELECT \"My App\".fence_table('t', 'r')");
    s.err("SELECT acquire_lease('r')").is("42883");
    db.refused(&mut s, "INSERT INTO t VALUES (1)", "LH003");
    let token: i64 = s.one("SELECT \"My App\".acquire_lease('r')");
    s.exec(&format!(
        "SET leasehold.token = '{token}'; INSERT INTO t VALUES (1)"
    ));
    assert_eq!(s.one::<i64>("SELECT token FROM leasehold.leases"), token);
    s.exec("SELECT \"My App\".unfence_table('t'); SET search_path = \"My App\", public");
    assert!(s.release("r", token));
}

fn extension_is_for_superusers() {
    let db = Db::bare_on(&Cluster::shared());
    let role = db.role();
    db.session()
        .exec(&format!("GRANT CREATE ON DATABASE {} TO {role}", db.name));
    db.session_as(&role)
        .err("CREATE EXTENSION leasehold")
        .is("42501");
    assert_eq!(
        db.session()
            .one::<i64>("SELECT count(*) FROM pg_extension WHERE extname = 'leasehold'"),
        0
    );
}

fn hostile_search_path_changes_nothing() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE doc (id int, tok bigint, at timestamptz); CREATE SCHEMA evil");
    s.exec(HOSTILE);
    s.exec("CREATE TEMP TABLE ledger (resource text); CREATE TEMP TABLE pg_class (oid oid); CREATE TEMP TABLE leases ()");
    s.exec("SET search_path = evil, pg_temp, public, pg_catalog");
    s.exec("SELECT public.fence_table('public.doc', 'doc:{id}:{at}', 'tok')");
    let resource = "doc:1:2024-02-03 00:00:00+00";
    let token: i64 = s.one(&format!(
        "SELECT public.acquire_lease('{resource}', ttl => '5min')"
    ));
    s.exec(&format!(
        "INSERT INTO public.doc VALUES (1, {token}, '2024-02-03 00:00+00')"
    ));
    s.exec(&format!(
        "BEGIN; SELECT public.fence('{resource}', {token}); UPDATE public.doc SET id = 1; COMMIT"
    ));
    let before = db.state();
    for (call, sqlstate) in [
        ("UPDATE public.doc SET id = 1", "LH003"),
        ("SELECT public.fence('r', 1)", "LH002"),
    ] {
        s.err(call).is(sqlstate);
    }
    assert_eq!(db.state(), before);
    for call in ["renew_lease({})", "check_fence({})", "release_lease({})"] {
        let arguments = format!("'{resource}', {token}");
        assert!(
            s.one::<bool>(&format!("SELECT public.{}", call.replace("{}", &arguments))),
            "{call}"
        );
    }
    s.exec(&format!(
        "SELECT * FROM public.lease_info('{resource}'); SELECT * FROM leasehold.leases"
    ));
    s.exec("SELECT public.unfence_table('public.doc')");
    // the ledger after a restart is read by other statements, and CREATE EXTENSION runs its script
    s.exec("DROP EXTENSION leasehold; CREATE EXTENSION leasehold SCHEMA public");
    // the trap is set
    s.err("SELECT 1 = 2").is("P0001");
    s.err("SELECT now()").is("P0001");
}

/// Operators, functions, types and tables that stand in front of PostgreSQL's own. To use one is an error.
const HOSTILE: &str = "
    CREATE TABLE evil.ledger (resource text); CREATE TABLE evil.leases (resource text);
    CREATE SEQUENCE evil.token_seq; CREATE TABLE evil.server (n int); CREATE TABLE evil.pg_trigger (oid oid);
    DO $body$
    DECLARE
        kind text; name text;
        raise text := 'LANGUAGE plpgsql AS $$BEGIN RAISE ''evil was called''; END$$';
    BEGIN
        FOREACH kind IN ARRAY ARRAY['int', 'bigint', 'text', 'oid', 'name', 'regclass', 'timestamptz', 'interval'] LOOP
            EXECUTE format('CREATE FUNCTION evil.boo(%1$s, %1$s) RETURNS bool ', kind) || raise;
            FOREACH name IN ARRAY ARRAY['=', '<>', '<', '>', '<=', '>=', '||', '+', '-', '&', '~~', '~'] LOOP
                EXECUTE format('CREATE OPERATOR evil.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = evil.boo)',
                               name, kind, kind);
            END LOOP;
        END LOOP;
        FOREACH name IN ARRAY ARRAY['format', 'concat', 'quote_ident', 'quote_literal', 'length', 'octet_length', 'lower',
                                    'nextval', 'setval', 'to_regclass', 'now', 'clock_timestamp', 'pg_backend_pid',
                                    'current_database', 'fenced', 'acquire_lease', 'fence', 'lease_info'] LOOP
            FOREACH kind IN ARRAY ARRAY['', 'text', 'name', 'regclass', 'text, text', 'text, bigint', 'VARIADIC text[]'] LOOP
                EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS int ', name, kind) || raise;
            END LOOP;
        END LOOP;
    END $body$;
    CREATE DOMAIN evil.text AS pg_catalog.int4; CREATE DOMAIN evil.name AS pg_catalog.int4;
    CREATE DOMAIN evil.oid AS pg_catalog.bool; CREATE DOMAIN evil.regclass AS pg_catalog.bool";

fn ordinary_roles_need_no_grants() {
    let db = Db::new();
    let role = db.role();
    let mut s = db.session_as(&role);
    s.exec("CREATE TABLE doc (id int); SELECT fence_table('doc', 'doc:{id}')");
    let token = s.acquire("doc:1");
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); INSERT INTO doc VALUES (1); COMMIT"
    ));
    assert!(s.renew("doc:1", token) && s.check_fence("doc:1", token));
    assert_eq!(s.state_of("doc:1"), "held");
    assert_eq!(s.one::<i64>("SELECT token FROM leasehold.leases"), token);
    assert!(s.release("doc:1", token));
    s.exec("SELECT unfence_table('doc')");
}

fn ledger_is_out_of_ordinary_hands() {
    let db = Db::new();
    let role = db.role();
    let mut s = db.session_as(&role);
    s.acquire("r");
    let cases = [
        "SELECT * FROM leasehold.ledger",
        "INSERT INTO leasehold.ledger SELECT * FROM leasehold.ledger",
        "UPDATE leasehold.ledger SET token = 1",
        "DELETE FROM leasehold.ledger",
        "TRUNCATE leasehold.ledger",
        "BEGIN; LOCK TABLE leasehold.ledger IN SHARE MODE",
        "SELECT * FROM leasehold.token_seq",
        "SELECT nextval('leasehold.token_seq')",
        "SELECT setval('leasehold.token_seq', 1)",
        "CREATE TABLE leasehold.mine ()",
        "INSERT INTO leasehold.leases SELECT * FROM leasehold.leases",
    ];
    for sql in cases {
        let error = db.refused(
            &mut s,
            sql,
            if sql.contains("leases") {
                "55000"
            } else {
                "42501"
            },
        );
        drop(error);
    }
    // all of the schema's tables and sequences, whatever they are called
    let open = s.text(
        "SELECT string_agg(relname, ',') FROM pg_class WHERE relnamespace = 'leasehold'::regnamespace
         AND relkind IN ('r', 'S') AND (has_table_privilege(oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE'))",
    );
    assert_eq!(open, None);
    db.refused(&mut s, "ALTER EXTENSION leasehold UPDATE", "42501");
}

fn settings_have_their_defaults() {
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    let mut s = db.session();
    let expected = [
        ("default_ttl", "30s"),
        ("durability", "durable"),
        ("event_ring", "4096"),
        ("ledger_retention", "7d"),
        ("log_events", "off"),
        ("max_leases", "16384"),
        ("max_leases_per_role", "0"),
        ("max_ttl", "5min"),
        ("max_wait", "1min"),
        ("max_waiters", "64"),
        ("notify_channel", ""),
        ("promotion", "lossy"),
        ("token", ""),
        ("zombie_grace", "1s"),
        ("zombie_policy", "terminate"),
    ];
    for (name, value) in expected {
        assert_eq!(
            s.text(&format!("SHOW leasehold.{name}")).as_deref(),
            Some(value),
            "leasehold.{name}"
        );
    }
    let names = s.text(
        "SELECT string_agg(name, ' ' ORDER BY name) FROM pg_settings WHERE name LIKE 'leasehold.%'",
    );
    let listed = expected.map(|(name, _)| format!("leasehold.{name}"));
    assert_eq!(names, Some(listed.join(" ")));
}

fn settings_out_of_range_are_refused() {
    let cluster = Cluster::builder().start();
    let mut s = cluster.connect();
    for value in ["0", "-1", "-1s", "1000000000000"] {
        s.err(&format!("SET leasehold.default_ttl = '{value}'"))
            .is("22023");
        s.err(&format!("ALTER SYSTEM SET leasehold.max_ttl = '{value}'"))
            .is("22023");
        s.err(&format!(
            "ALTER SYSTEM SET leasehold.max_leases = '{value}'"
        ))
        .is("22023");
    }
    for value in ["-1", "-1s", "1000000000000"] {
        s.err(&format!(
            "ALTER SYSTEM SET leasehold.zombie_grace = '{value}'"
        ))
        .is("22023");
    }
    for value in ["0", "-1s", "500ms", "1000000000000"] {
        s.err(&format!(
            "ALTER SYSTEM SET leasehold.ledger_retention = '{value}'"
        ))
        .is("22023");
    }
    for value in ["-1", "1000000000000"] {
        for name in [
            "max_wait",
            "max_waiters",
            "event_ring",
            "max_leases_per_role",
        ] {
            s.err(&format!("ALTER SYSTEM SET leasehold.{name} = '{value}'"))
                .is("22023");
        }
    }
    s.err("SET leasehold.default_ttl = 'soon'").is("22023");
    s.err("SET leasehold.durability = 'disk'").is("22023");
    for (name, value) in [("promotion", "lossful"), ("zombie_policy", "kill")] {
        s.err(&format!("ALTER SYSTEM SET leasehold.{name} = '{value}'"))
            .is("22023");
    }
    s.exec("ALTER SYSTEM SET leasehold.zombie_grace = 0");
    // a misspelt one is no setting of somebody else's
    s.err("SET leasehold.defualt_ttl = '1s'").is("42602");
    assert_eq!(s.text("SHOW leasehold.default_ttl").as_deref(), Some("30s"));
}

fn settings_have_their_scopes() {
    let db = Db::new();
    let role = db.role();
    let mut s = db.session_as(&role);
    s.err("SET leasehold.max_leases = 100").is("55P02");
    let on_reload = [
        ("ledger_retention", "1d"),
        ("log_events", "on"),
        ("max_ttl", "1min"),
        ("max_wait", "0"),
        ("max_waiters", "0"),
        ("notify_channel", "leases"),
        ("promotion", "lossless"),
        ("zombie_grace", "1min"),
        ("zombie_policy", "wait"),
    ];
    for (name, value) in on_reload {
        s.err(&format!("SET leasehold.{name} = '{value}'"))
            .is("55P02");
    }
    s.exec("SET leasehold.default_ttl = '10s'; SET leasehold.token = '5'; SET leasehold.durability = memory");
    let by_context = |context: &str| {
        let sql = "SELECT string_agg(substr(name, 11), ' ' ORDER BY name) FROM pg_settings
                    WHERE name LIKE 'leasehold.%' AND context = $1";
        db.session().one_with::<Option<String>>(sql, &[&context])
    };
    assert_eq!(
        by_context("user").as_deref(),
        Some("default_ttl durability token")
    );
    s.err("SET leasehold.max_leases_per_role = 1").is("42501");
    assert_eq!(
        by_context("postmaster").as_deref(),
        Some("event_ring max_leases")
    );
    assert_eq!(
        by_context("sighup"),
        Some(on_reload.map(|(name, _)| name).join(" "))
    );
    assert_eq!(
        by_context("superuser").as_deref(),
        Some("max_leases_per_role")
    );
}

fn max_ttl_counts_from_the_reload() {
    let db = Db::with(&[]);
    let mut s = db.session();
    let token = s.acquire("r");
    db.refused(&mut s, "SELECT acquire_lease('q', ttl => '6min')", "22023");
    for (max, refused) in [("10min", "11min"), ("20s", "21s")] {
        s.exec(&format!("ALTER SYSTEM SET leasehold.max_ttl = '{max}'"));
        s.exec("SELECT pg_reload_conf()");
        wait_for("the reload", || {
            (s.text("SHOW leasehold.max_ttl").as_deref() == Some(max)).then_some(())
        });
        s.exec(&format!(
            "SELECT acquire_lease('within {max}', ttl => '{max}')"
        ));
        db.refused(
            &mut s,
            &format!("SELECT acquire_lease('q', ttl => '{refused}')"),
            "22023",
        );
        db.refused(
            &mut s,
            &format!("SELECT renew_lease('r', {token}, '{refused}')"),
            "22023",
        );
    }
    // the default of 30s is now above it and acts as it; a lease granted for longer runs on
    s.exec("SELECT acquire_lease('default')");
    assert!(s.info_says("default", "ttl = '20s'::interval"));
    assert!(s.info_says("r", "remaining > '1min'::interval"));
}

/// Takes leases, ends the server by `stop`, starts it, and asserts that the lease is what it was.
fn survives(stop: impl FnOnce(&Cluster)) {
    let db = Db::with(&[]);
    let mut s = db.session();
    s.exec("CREATE TABLE doc (id int PRIMARY KEY, n int); INSERT INTO doc VALUES (1, 0)");
    s.exec("SELECT fence_table('doc', 'doc:{id}')");
    let role = db.role();
    s.exec(&format!("GRANT ALL ON doc TO {role}"));
    let token: i64 = db
        .session_as(&role)
        .one("SELECT acquire_lease('doc:1', 'worker', '5min')");
    drop(s);
    let down = Instant::now();
    stop(&db.cluster);
    let mut s = db.session_as(&role);
    // for the full TTL from the restart, which was after `down`
    assert_eq!(s.state_of("doc:1"), "recovering");
    assert_eq!(db.session().try_acquire("doc:1"), None, "granted early");
    let remaining: f64 =
        s.one("SELECT extract(epoch FROM remaining)::float8 FROM lease_info('doc:1')");
    let least = 300.0 - down.elapsed().as_secs_f64();
    assert!(
        (least..=300.0).contains(&remaining),
        "{remaining} of {least}"
    );
    let known = format!(
        "(token, holder, role::text, durable) = ({token}, 'worker', '{role}', true) AND ttl = '5min'::interval"
    );
    assert!(
        s.info_says("doc:1", &known),
        "{:?}",
        s.rows("SELECT * FROM lease_info('doc:1')")
    );
    assert!(s.check_fence("doc:1", token));
    let mut stranger = db.session_as(&db.role());
    db.refused(
        &mut stranger,
        &format!("SELECT release_lease('doc:1', {token})"),
        "42501",
    );
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1; COMMIT"
    ));
    assert!(s.renew("doc:1", token));
    assert!(s.release("doc:1", token));
    let next = db.session().acquire("doc:1");
    assert!(next > token, "{next} after {token}");
    db.refused(&mut s, &format!("SELECT fence('doc:1', {token})"), "LH001");
    assert_eq!(s.one::<i32>("SELECT n FROM doc"), 1);
}

fn lease_survives_a_fast_restart() {
    survives(|cluster| cluster.restart(Stop::Fast));
}

fn lease_survives_an_immediate_restart() {
    survives(|cluster| cluster.restart(Stop::Immediate));
}

fn lease_survives_a_killed_postmaster() {
    survives(|cluster| {
        cluster.kill_postmaster();
        cluster.start();
    });
}

fn lease_survives_a_crashed_backend() {
    survives(|cluster| {
        let victim = cluster.connect();
        cluster.crash_backend(victim.pid);
    });
}

fn lease_after_a_restart_lasts_its_full_ttl() {
    let db = Db::with(&[]);
    let token: i64 = db.session().one("SELECT acquire_lease('r', ttl => '2s')");
    db.cluster.stop(Stop::Immediate);
    // nothing counts that went by before this
    let started = Instant::now();
    db.cluster.start();
    let mut s = db.session();
    let next = wait_for("the lease to expire", || s.try_acquire("r"));
    assert!(
        started.elapsed() >= Duration::from_secs(2),
        "granted after {:?}",
        started.elapsed()
    );
    assert!(next > token);
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH001");
}

fn renewed_ttl_is_what_a_restart_recovers() {
    let db = Db::with(&[]);
    let mut s = db.session();
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '1s')");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '5min')")));
    drop(s);
    db.cluster.restart(Stop::Immediate);
    let mut s = db.session();
    assert!(s.info_says("r", "remaining > '1min'::interval"));
    assert_eq!(s.try_acquire("r"), None);
    assert!(s.renew("r", token));
}

fn released_lease_is_free_after_a_clean_restart() {
    let db = Db::with(&[]);
    let mut s = db.session();
    let [taken, fenced, kept] = ["taken", "fenced", "kept"].map(|resource| s.acquire(resource));
    assert!(s.release("taken", taken) && s.release("fenced", fenced));
    drop(s);
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    assert_eq!(s.state_of("taken"), "free");
    assert!(s.acquire("taken") > taken);
    db.refused(
        &mut s,
        &format!("SELECT fence('fenced', {fenced})"),
        "LH004",
    );
    assert!(!s.check_fence("fenced", fenced) && !s.renew("fenced", fenced));
    assert!(
        s.release("fenced", fenced),
        "a repeated release while the token is still T_max"
    );
    assert!(s.renew("kept", kept));
}

fn uncommitted_grant_is_nothing_after_a_crash() {
    let db = Db::with(&[]);
    let mut s = db.session();
    let old = s.acquire("old");
    s.exec("BEGIN");
    let token = s.acquire("r");
    s.exec(&format!("SELECT release_lease('old', {old})"));
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    assert!(!s.check_fence("r", token) && !s.renew("r", token));
    // at or below the floor, it cannot be told from one that was lost
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH001");
    assert!(s.acquire("r") > token);
    assert_eq!(
        s.try_acquire("old"),
        None,
        "the release was never committed"
    );
    assert!(s.renew("old", old));
}

/// The ledger's row is written before the commit, over that of an older lease; it says whose grant it was.
fn rolled_back_grant_is_nothing_after_a_crash() {
    let db = Db::with(&[]);
    let mut s = db.session();
    for resource in ["whole", "savepoint", "open"] {
        let token = s.acquire(resource);
        assert!(s.release(resource, token));
    }
    s.exec("BEGIN");
    let whole = s.acquire("whole");
    s.exec("ROLLBACK; BEGIN; SAVEPOINT a");
    let savepoint = s.acquire("savepoint");
    s.exec("ROLLBACK TO a; COMMIT");
    let mut holder = db.session();
    holder.exec("BEGIN");
    let open = holder.acquire("open");
    // what was written before is on disk with this
    let kept = s.acquire("kept");
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    for (resource, token) in [("whole", whole), ("savepoint", savepoint), ("open", open)] {
        assert!(!s.check_fence(resource, token), "{resource}");
        assert!(!s.renew(resource, token), "{resource}");
        db.refused(
            &mut s,
            &format!("SELECT fence('{resource}', {token})"),
            "LH001",
        );
        assert_eq!(s.state_of(resource), "free");
        assert!(s.acquire(resource) > token, "{resource}");
    }
    assert!(s.renew("kept", kept));
}

fn tokens_rise_over_restarts() {
    let db = Db::with(&[]);
    let mut last = 0;
    for round in 0..4 {
        let mut s = db.session();
        for i in 0..3 {
            let token = s.acquire(&format!("{round}.{i}"));
            assert!(token > last, "{token} after {last}");
            last = token;
        }
        // tokens that only aborted transactions have seen are used up too
        s.exec("BEGIN");
        last = s.acquire(&format!("{round} aborted"));
        drop(s);
        match round {
            0 => db.cluster.restart(Stop::Fast),
            1 => db.cluster.restart(Stop::Immediate),
            2 => db.cluster.restart(Stop::Immediate),
            _ => {
                db.cluster.kill_postmaster();
                db.cluster.start();
            }
        }
    }
    assert!(db.session().acquire("last") > last);
    assert!(last < 1 << 53, "{last} does not survive JavaScript");
}

fn tokens_at_or_below_the_floor_are_stale() {
    let db = Db::with(&[]);
    let mut s = db.session();
    let r = s.acquire("r");
    let q = s.acquire("q");
    drop(s);
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    assert_eq!((s.try_acquire("r"), s.try_acquire("q")), (None, None));
    // the ledger knows r's and q's; anything else at or below the floor may be lost or never granted
    for (resource, token) in [
        ("r", q),
        ("q", r),
        ("unknown", r),
        ("unknown", q),
        ("unknown", 1),
    ] {
        db.refused(
            &mut s,
            &format!("SELECT fence('{resource}', {token})"),
            "LH001",
        );
        assert!(
            !s.check_fence(resource, token)
                && !s.renew(resource, token)
                && !s.release(resource, token)
        );
    }
    for resource in ["r", "unknown"] {
        db.refused(
            &mut s,
            &format!("SELECT fence('{resource}', {NEVER})"),
            "LH002",
        );
    }
    assert!(s.check_fence("r", r) && s.check_fence("q", q));
}

fn untouched_leases_are_listed_as_recovering() {
    let db = Db::with(&[]);
    let mut s = db.session();
    let tokens: Vec<i64> = ["a", "b", "c"].map(|r| s.acquire(r)).into();
    s.release("c", tokens[2]);
    drop(s);
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    let list = "SELECT string_agg(concat(resource, ':', token, ':', state), ' ' ORDER BY resource) FROM leasehold.leases
                WHERE state <> 'free'";
    let expected = format!("a:{}:recovering b:{}:recovering", tokens[0], tokens[1]);
    assert_eq!(s.text(list), Some(expected.clone()));
    // a look is no touch
    assert_eq!(s.text(list), Some(expected));
    assert!(s.renew("a", tokens[0]));
    assert!(s.release("b", tokens[1]));
    assert_eq!(s.text(list), Some(format!("a:{}:held", tokens[0])));
}

fn transaction_that_fences_too_much_is_told_what_to_raise() {
    let db = Db::with(&[
        ("max_locks_per_transaction", "10"),
        ("max_connections", "10"),
        ("max_prepared_transactions", "0"),
    ]);
    let mut s = db.session();
    let before = db.state();
    let error = s.err("SELECT acquire_lease('r' || i) FROM generate_series(1, 15000) i");
    error
        .is("53200")
        .well_written()
        .hints_at("max_locks_per_transaction");
    assert_eq!(db.state(), before);
    s.acquire("r1");
}

fn standby_answers_questions_only() {
    let db = Db::with(&[]);
    let mut s = db.session();
    s.exec("CREATE TABLE doc (id int); SELECT fence_table('doc', 'r')");
    let token = s.acquire("r");
    let standby = db.cluster.standby();
    wait_for("the standby to catch up", || {
        let mut on = standby.connect_db(&db.name);
        on.one::<bool>("SELECT EXISTS (SELECT FROM leasehold.ledger WHERE resource = 'r')")
            .then_some(())
    });
    let mut on = standby.connect_db(&db.name);
    for call in [
        "acquire_lease('r')",
        "renew_lease('r', {t})",
        "release_lease('r', {t})",
        "fence('r', {t})",
    ] {
        on.err(&format!(
            "SELECT {}",
            call.replace("{t}", &token.to_string())
        ))
        .is("25006")
        .well_written();
    }
    assert!(on.check_fence("r", token));
    assert!(!on.check_fence("r", NEVER) && !on.check_fence("r", 1));
    assert_eq!(on.info("r", "token"), Some(token.to_string()));
    assert_eq!(
        on.one::<i64>("SELECT token FROM leasehold.leases WHERE resource = 'r'"),
        token
    );
    assert!(s.renew("r", token), "the primary's lease is as it was");
}

fn displaced_entry_still_drains() {
    let db = Db::with(&[("leasehold.max_leases", "64")]);
    let (mut s, mut old) = (db.session(), db.session());
    let token = s.acquire_expired("r");
    old.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    // its lease is over, so its place may be had
    for i in 0..500 {
        s.acquire_expired(&format!("other{i}"));
    }
    assert_eq!(
        s.try_acquire("r"),
        None,
        "granted while a transaction is open under the old token"
    );
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH004");
    old.exec("COMMIT");
    assert!(s.acquire("r") > token);
}

fn grants_under_way_are_never_displaced() {
    let db = Db::with(&[("leasehold.max_leases", "64")]);
    let (mut s, mut granting, mut releasing) = (db.session(), db.session(), db.session());
    let released = s.acquire("released");
    releasing.exec("BEGIN");
    assert!(releasing.release("released", released));
    granting.exec("BEGIN");
    let granted: i64 = granting.one("SELECT acquire_lease('granted', ttl => '1 microsecond')");
    for i in 0..500 {
        s.acquire_expired(&format!("other{i}"));
    }
    assert_eq!(
        (s.try_acquire("granted"), s.try_acquire("released")),
        (None, None)
    );
    granting.exec("COMMIT");
    releasing.exec("ROLLBACK");
    assert!(s.acquire("granted") > granted);
    assert!(s.renew("released", released));
}

fn released_lease_is_free_however_soon_displaced() {
    let db = Db::with(&[("leasehold.max_leases", "64")]);
    let mut s = db.session();
    let tokens: Vec<(String, i64)> = (0..500)
        .map(|i| {
            let name = format!("r{i}");
            let token = s.acquire(&name);
            assert!(s.release(&name, token));
            (name, token)
        })
        .collect();
    // far more than the table takes: most are known by the ledger alone
    for (name, token) in tokens {
        assert!(
            !s.check_fence(&name, token),
            "the released lease of {name} is good again"
        );
        assert!(
            !s.renew(&name, token),
            "the released lease of {name} lives again"
        );
        let next = s.acquire(&name);
        assert!(next > token);
        assert!(s.release(&name, next));
    }
}

fn role_dropped_with_a_live_lease() {
    let db = Db::new();
    let role = db.role();
    let token = db.session_as(&role).acquire("r");
    let mut s = db.session();
    s.exec(&format!(
        "REVOKE ALL ON SCHEMA public FROM {role}; DROP ROLE {role}"
    ));
    assert_eq!(s.state_of("r"), "held");
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM leasehold.leases WHERE resource = 'r'"),
        1
    );
    // nobody is a member of it any more
    let mut other = db.session_as(&db.role());
    db.refused(
        &mut other,
        &format!("SELECT release_lease('r', {token})"),
        "42501",
    );
    assert_eq!(other.try_acquire("r"), None);
    assert!(s.release("r", token), "a superuser is as good as a member");
    assert!(other.acquire("r") > token);
}

fn extension_with_fenced_tables_is_kept() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int); SELECT fence_table('t', 'r')");
    s.err("DROP EXTENSION leasehold").is("2BP01");
    db.refused(&mut s, "INSERT INTO t VALUES (1)", "LH003");
}

fn last_tokens_are_handed_out_once() {
    let db = Db::with(&[]);
    db.session()
        .exec("SELECT setval('leasehold.token_seq', 9223372036854775804)");
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    assert_eq!(s.acquire("a"), i64::MAX - 2);
    assert_eq!(s.acquire("b"), i64::MAX - 1);
    for resource in ["c", "d", "c"] {
        let call = format!("SELECT acquire_lease('{resource}')");
        db.refused(&mut s, &call, "2200H");
    }
}

fn used_up_tokens_are_told() {
    let db = Db::with(&[]);
    let mut s = db.session();
    let token = s.acquire("r");
    s.exec("SELECT setval('leasehold.token_seq', 9223372036854775807)");
    drop(s);
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    assert_eq!(s.try_acquire("r"), None);
    db.refused(&mut s, "SELECT acquire_lease('q')", "2200H");
    assert!(s.check_fence("r", token) && s.renew("r", token) && s.release("r", token));
    db.refused(&mut s, "SELECT acquire_lease('r')", "2200H");
    assert_eq!(s.state_of("r"), "free");
}
