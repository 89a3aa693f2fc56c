//! Layer present: the four ways in which a transaction says under which token it writes, and which of them counts
//! where several do.

use crate::cluster::Db;
use crate::leases::NEVER;
use crate::session::Session;

crate::tests![
    own_acquire_presents_within_its_transaction,
    fence_presents_within_its_transaction,
    fence_by_itself_presents_to_no_later_statement,
    fence_counts_for_every_table_and_statement,
    setting_presents,
    set_local_ends_with_the_transaction,
    connection_options_present,
    role_setting_presents,
    several_tokens_in_the_setting,
    two_resources_in_one_transaction,
    setting_is_checked,
    setting_with_stale_and_current_passes,
    setting_with_a_foreign_token_only,
    token_column_presents,
    token_column_counts_only_where_it_is_set,
    unchanged_token_column_proves_nothing,
    token_column_counts_in_the_merge_action_that_sets_it,
    token_column_counts_after_an_error_was_caught,
    token_column_must_not_be_generated,
    token_column_must_be_positive,
    token_column_is_stamped,
    own_acquire_beats_the_rest,
    fence_beats_setting_and_column,
    setting_beats_column,
    setting_makes_columns_ignored_even_for_another_resource,
    each_way_can_be_stale,
    released_token_is_refused,
    uncommitted_token_is_its_transactions_own,
    fence_shows_in_pg_locks,
    fence_of_an_own_lease_released_in_the_same_transaction,
    refusal_is_not_remembered,
    many_resources_in_one_statement,
];

/// Table doc with a token column; rows 1 and 2 for resources doc:1 and doc:2.
fn docs(db: &Db) -> Session {
    let mut s = db.session();
    s.exec("CREATE TABLE doc (id int PRIMARY KEY, n int, tok bigint); INSERT INTO doc VALUES (1, 0), (2, 0)");
    s.exec("SELECT fence_table('doc', 'doc:{id}', 'tok')");
    s
}

/// Doc 1 as `n|tok`.
fn doc_1(s: &mut Session) -> String {
    s.text("SELECT concat(n, '|', tok) FROM doc WHERE id = 1")
        .expect("doc 1 is there")
}

fn own_acquire_presents_within_its_transaction() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("BEGIN");
    let token = s.acquire("doc:1");
    s.exec("UPDATE doc SET n = 1 WHERE id = 1; COMMIT");
    assert_eq!(doc_1(&mut s), format!("1|{token}"));
    // the next transaction has to present it again, in the same session too
    db.refused(&mut s, "UPDATE doc SET n = 2 WHERE id = 1", "LH003");
    assert_eq!(
        s.info("doc:1", "token"),
        Some(token.to_string()),
        "the lease goes on"
    );
    // of another resource it presents nothing
    s.exec("BEGIN");
    s.acquire("doc:9");
    db.refused_write(&mut s, "UPDATE doc SET n = 2 WHERE id = 1", "LH003");
}

fn fence_presents_within_its_transaction() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.exec("BEGIN");
    s.fence("doc:1", token);
    s.exec("UPDATE doc SET n = 1 WHERE id = 1");
    s.exec("UPDATE doc SET n = 2 WHERE id = 1; COMMIT");
    db.refused(&mut s, "UPDATE doc SET n = 3 WHERE id = 1", "LH003");
    s.exec("BEGIN");
    s.fence("doc:1", token);
    s.exec("ROLLBACK");
    db.refused(&mut s, "UPDATE doc SET n = 3 WHERE id = 1", "LH003");
    assert_eq!(doc_1(&mut s), format!("2|{token}"));
}

fn fence_by_itself_presents_to_no_later_statement() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.fence("doc:1", token);
    db.refused(&mut s, "UPDATE doc SET n = 1 WHERE id = 1", "LH003");
    // in the same statement it does
    s.exec(&format!("WITH f AS MATERIALIZED (SELECT fence('doc:1', {token})) UPDATE doc SET n = 1 FROM f WHERE id = 1"));
    assert_eq!(doc_1(&mut s), format!("1|{token}"));
}

fn fence_counts_for_every_table_and_statement() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("CREATE TABLE line (doc int, text text); SELECT fence_table('line', 'doc:{doc}')");
    s.exec("CREATE TABLE log (text text); SELECT fence_table('log', 'doc:1')");
    let token = s.acquire("doc:1");
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1"
    ));
    s.exec("INSERT INTO line VALUES (1, 'a'), (1, 'b'); DELETE FROM line WHERE text = 'b'; INSERT INTO log VALUES ('x')");
    s.exec("TRUNCATE log; COMMIT");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM line"), 1);
    db.refused(
        &mut s,
        &format!("BEGIN; SELECT fence('doc:1', {token}); INSERT INTO line VALUES (2, 'c')"),
        "LH003",
    );
}

fn setting_presents() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.exec(&format!("SET leasehold.token = '{token}'"));
    s.exec("UPDATE doc SET n = 1 WHERE id = 1");
    s.exec("UPDATE doc SET n = 2 WHERE id = 1");
    s.exec("RESET leasehold.token");
    db.refused(&mut s, "UPDATE doc SET n = 3 WHERE id = 1", "LH003");
    assert_eq!(doc_1(&mut s), format!("2|{token}"));
}

fn set_local_ends_with_the_transaction() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.exec(&format!(
        "BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = 1 WHERE id = 1; COMMIT"
    ));
    db.refused(&mut s, "UPDATE doc SET n = 2 WHERE id = 1", "LH003");
    s.exec(&format!("BEGIN; SELECT set_config('leasehold.token', '{token}', true); UPDATE doc SET n = 2 WHERE id = 1; COMMIT"));
    db.refused(&mut s, "UPDATE doc SET n = 3 WHERE id = 1", "LH003");
    assert_eq!(doc_1(&mut s), format!("2|{token}"));
}

fn connection_options_present() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    let mut worker = db.session_with_options(&format!("-c leasehold.token={current}"));
    worker.exec("UPDATE doc SET n = 1 WHERE id = 1");
    // RESET goes back to what the connection brought
    worker.exec("SET leasehold.token = ''");
    db.refused(&mut worker, "UPDATE doc SET n = 2 WHERE id = 1", "LH003");
    worker.exec("RESET leasehold.token; UPDATE doc SET n = 2 WHERE id = 1");
    let mut late = db.session_with_options(&format!("-c leasehold.token={stale}"));
    db.refused(&mut late, "UPDATE doc SET n = 3 WHERE id = 1", "LH001");
    let error = db
        .try_session_with_options("-c leasehold.token=nonsense")
        .err()
        .expect("a bad token in the options");
    error.is("22023");
    assert_eq!(doc_1(&mut s), format!("2|{current}"));
}

fn role_setting_presents() {
    let db = Db::new();
    let mut s = docs(&db);
    let role = db.role();
    s.exec(&format!("GRANT ALL ON doc TO {role}"));
    let token = db.session_as(&role).acquire("doc:1");
    s.exec(&format!(
        "ALTER ROLE {role} SET leasehold.token = '{token}'"
    ));
    db.session_as(&role)
        .exec("UPDATE doc SET n = 1 WHERE id = 1");
    assert_eq!(doc_1(&mut s), format!("1|{token}"));
    db.refused(
        &mut s,
        &format!("ALTER ROLE {role} SET leasehold.token = '-1'"),
        "22023",
    );
}

fn several_tokens_in_the_setting() {
    let db = Db::new();
    let mut s = docs(&db);
    let (one, two) = (s.acquire("doc:1"), s.acquire("doc:2"));
    for setting in [
        format!("{one},{two}"),
        format!(" {two} , {one} "),
        format!("{one},{two},{one},1,{NEVER}"),
    ] {
        s.exec(&format!(
            "SET leasehold.token = '{setting}'; UPDATE doc SET n = n + 1"
        ));
    }
    assert_eq!(
        s.text("SELECT string_agg(concat(n, '|', tok), ' ' ORDER BY id) FROM doc"),
        Some(format!("3|{one} 3|{two}"))
    );
}

fn two_resources_in_one_transaction() {
    let db = Db::new();
    let mut s = docs(&db);
    let (one, two) = (s.acquire("doc:1"), s.acquire("doc:2"));
    db.refused(
        &mut s,
        &format!("BEGIN; SELECT fence('doc:1', {one}); UPDATE doc SET n = 9"),
        "LH003",
    );
    s.exec(&format!("BEGIN; SELECT fence('doc:1', {one}); SELECT fence('doc:2', {two}); UPDATE doc SET n = 1; COMMIT"));
    // named for one, bare for the other
    s.exec(&format!("BEGIN; SELECT fence('doc:1', {one}); SET LOCAL leasehold.token = '{two}'; UPDATE doc SET n = 2; COMMIT"));
    // the columns of one statement
    s.exec(&format!(
        "UPDATE doc SET n = 3, tok = CASE id WHEN 1 THEN {one} ELSE {two} END"
    ));
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 4, tok = {one}"),
        "LH001",
    );
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 4, tok = {two}"),
        "LH002",
    );
    assert_eq!(
        s.text("SELECT string_agg(concat(n, '|', tok), ' ' ORDER BY id) FROM doc"),
        Some(format!("3|{one} 3|{two}"))
    );
}

fn setting_is_checked() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("SET leasehold.token = '7'");
    let too_many = vec!["1"; 65].join(",");
    let bad = [
        "x",
        "0",
        "-1",
        "1,",
        ",1",
        "1,,2",
        "1;2",
        "1 2",
        "1.0",
        "1e3",
        "0x10",
        "+1x",
        "9223372036854775808",
        "1,0",
        "1,-2",
        "٣",
        &too_many,
    ];
    for value in bad {
        s.err(&format!("SET leasehold.token = '{value}'"))
            .is("22023");
        s.err(&format!(
            "SELECT set_config('leasehold.token', '{value}', false)"
        ))
        .is("22023");
        assert_eq!(
            s.text("SHOW leasehold.token").as_deref(),
            Some("7"),
            "{value} changed the setting"
        );
    }
    for value in [
        "",
        "1",
        " 1 ",
        "34,35",
        " 34 , 35 ",
        "9223372036854775807",
        &vec!["1"; 64].join(","),
    ] {
        s.exec(&format!("SET leasehold.token = '{value}'"));
    }
    s.exec("RESET leasehold.token");
    assert_eq!(s.text("SHOW leasehold.token").as_deref(), Some(""));
}

fn setting_with_stale_and_current_passes() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    for setting in [
        format!("{stale},{current}"),
        format!("{current},{stale}"),
        format!("1,{current},{NEVER}"),
    ] {
        s.exec(&format!(
            "SET leasehold.token = '{setting}'; UPDATE doc SET n = n + 1 WHERE id = 1"
        ));
    }
    assert_eq!(
        doc_1(&mut s),
        format!("3|{current}"),
        "stamped with the one that counts"
    );
    // at least one stale and none T_max
    s.exec(&format!("SET leasehold.token = '{NEVER},{stale}'"));
    db.refused(&mut s, "UPDATE doc SET n = 9 WHERE id = 1", "LH001");
    s.exec(&format!("SET leasehold.token = '{NEVER}'"));
    db.refused(&mut s, "UPDATE doc SET n = 9 WHERE id = 1", "LH002");
}

fn setting_with_a_foreign_token_only() {
    let db = Db::new();
    let mut s = docs(&db);
    let below = s.acquire("below");
    let current = s.acquire("doc:1");
    let above = s.acquire("above");
    assert!(below < current && current < above);
    s.exec(&format!("SET leasehold.token = '{below}'"));
    db.refused(&mut s, "UPDATE doc SET n = 1 WHERE id = 1", "LH001");
    s.exec(&format!("SET leasehold.token = '{above}'"));
    db.refused(&mut s, "UPDATE doc SET n = 1 WHERE id = 1", "LH002");
    s.exec(&format!("SET leasehold.token = '{above},{below}'"));
    db.refused(&mut s, "UPDATE doc SET n = 1 WHERE id = 1", "LH001");
}

fn token_column_presents() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 1, tok = {stale} WHERE id = 1"),
        "LH001",
    );
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 1, tok = {NEVER} WHERE id = 1"),
        "LH002",
    );
    s.exec(&format!(
        "UPDATE doc SET n = 1, tok = {current} WHERE id = 1"
    ));
    assert_eq!(doc_1(&mut s), format!("1|{current}"));
    let (stale, current) = s.stale_and_current("doc:3");
    db.refused(
        &mut s,
        &format!("INSERT INTO doc VALUES (3, 0, {stale})"),
        "LH001",
    );
    s.exec(&format!("INSERT INTO doc VALUES (3, 0, {current})"));
    // ON CONFLICT: the insertion presents, and then the update has to
    let upsert = format!(
        "INSERT INTO doc VALUES (3, 5, {current}) ON CONFLICT (id) DO UPDATE SET n = excluded.n"
    );
    db.refused(&mut s, &upsert, "LH003");
    s.exec(&format!("{upsert}, tok = excluded.tok"));
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 3"), 5);
}

fn token_column_counts_only_where_it_is_set() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.exec(&format!("UPDATE doc SET tok = {token} WHERE id = 1"));
    db.refused(&mut s, "DELETE FROM doc WHERE id = 1", "LH003");
    db.refused(&mut s, "UPDATE doc SET n = 1 WHERE id = 1", "LH003");
    db.refused(
        &mut s,
        "INSERT INTO doc VALUES (1, 1) ON CONFLICT (id) DO UPDATE SET n = 1",
        "LH003",
    );
    // set to itself is set
    s.exec("UPDATE doc SET n = 2, tok = tok WHERE id = 1");
    assert_eq!(doc_1(&mut s), format!("2|{token}"));
    // a trigger that fills it in is no statement that sets it
    s.exec(&format!(
        "CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN new.tok := {token}; RETURN new; END';
         CREATE TRIGGER a BEFORE UPDATE ON doc FOR EACH ROW EXECUTE FUNCTION fill()"
    ));
    db.refused(&mut s, "UPDATE doc SET n = 3 WHERE id = 1", "LH003");
}

fn unchanged_token_column_proves_nothing() {
    let db = Db::new();
    let mut s = docs(&db);
    let first = s.acquire_expired("doc:1");
    s.exec(&format!("UPDATE doc SET n = 1, tok = {first} WHERE id = 1"));
    let second = db.session().acquire("doc:1");
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {second}); UPDATE doc SET n = 2 WHERE id = 1; COMMIT"
    ));
    assert_eq!(doc_1(&mut s), format!("2|{second}"));
    // the row now holds the current token, but the late first worker does not bring it
    let mut late = db.session();
    db.refused(&mut late, "UPDATE doc SET n = 3 WHERE id = 1", "LH003");
    db.refused(
        &mut late,
        &format!("UPDATE doc SET n = 3, tok = {first} WHERE id = 1"),
        "LH001",
    );
    assert_eq!(doc_1(&mut s), format!("2|{second}"));
}

/// In a MERGE the columns that are set are those of all its actions.
fn token_column_counts_in_the_merge_action_that_sets_it() {
    let db = Db::new();
    let mut s = docs(&db);
    let (one, two) = (s.acquire("doc:1"), s.acquire("doc:2"));
    s.exec(&format!(
        "UPDATE doc SET tok = {one} WHERE id = 1; UPDATE doc SET tok = {two} WHERE id = 2"
    ));
    let merge = |rows: &str, token: i64| {
        format!(
            "MERGE INTO doc USING (VALUES {rows}) v(id, kind) ON doc.id = v.id
             WHEN MATCHED AND kind = 'plain' THEN UPDATE SET n = n + 10
             WHEN MATCHED AND kind = 'gone' THEN DELETE
             WHEN MATCHED THEN UPDATE SET n = n + 1, tok = {token}
             WHEN NOT MATCHED THEN INSERT VALUES (v.id, 5, {token})"
        )
    };
    // the row holds the good token of another write
    db.refused(&mut s, &merge("(1, 'plain')", two), "LH003");
    db.refused(&mut s, &merge("(1, 'gone')", two), "LH003");
    let next = {
        assert!(s.release("doc:2", two));
        s.acquire("doc:2")
    };
    db.refused(&mut s, &merge("(2, 'set'), (1, 'plain')", next), "LH003");
    db.refused(&mut s, &merge("(2, 'set')", one), "LH001");
    s.exec(&merge("(2, 'set')", next));
    let row = "SELECT concat(n, '|', tok) FROM doc WHERE id = 2";
    assert_eq!(s.text(row), Some(format!("1|{next}")));
    let three = s.acquire("doc:3");
    s.exec(&merge("(3, 'new')", three));
    // presented otherwise, every action passes and is stamped
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:2', {next}); {}; COMMIT",
        merge("(2, 'plain')", 7)
    ));
    assert_eq!(s.text(row), Some(format!("11|{next}")));
    // a statement that follows in the transaction, or runs inside the MERGE, is told by what it sets itself
    s.exec(&format!(
        "CREATE TABLE log (id int, tok bigint); INSERT INTO log VALUES (2, {next}); SELECT fence_table('log', 'doc:2', 'tok');
         CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN UPDATE log SET tok = tok; RETURN new; END';
         CREATE TRIGGER a BEFORE UPDATE ON doc FOR EACH ROW EXECUTE FUNCTION log()"
    ));
    assert!(s.release("doc:2", next));
    let last = s.acquire("doc:2");
    s.exec(&format!("UPDATE log SET tok = {last}"));
    s.exec(&format!(
        "BEGIN; {}; UPDATE doc SET n = 0, tok = tok WHERE id = 2; COMMIT",
        merge("(2, 'set')", last)
    ));
    assert_eq!(s.text(row), Some(format!("0|{last}")));
}

/// Set to itself is set, whatever another trigger has been through before.
fn token_column_counts_after_an_error_was_caught() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec(
        "CREATE FUNCTION careful() RETURNS trigger LANGUAGE plpgsql AS
         'BEGIN BEGIN PERFORM 1 / 0; EXCEPTION WHEN division_by_zero THEN NULL; END; RETURN new; END';
         CREATE TRIGGER a BEFORE UPDATE ON doc FOR EACH ROW EXECUTE FUNCTION careful()",
    );
    let token = s.acquire("doc:1");
    for n in 1..=2 {
        s.exec(&format!(
            "UPDATE doc SET n = {n}, tok = {token} WHERE id = 1"
        ));
        assert_eq!(doc_1(&mut s), format!("{n}|{token}"));
    }
    // and in a block that goes on after one
    s.exec("BEGIN; SAVEPOINT a");
    s.err("SELECT 1 / 0").is("22012");
    s.exec(&format!(
        "ROLLBACK TO a; UPDATE doc SET n = 3, tok = {token} WHERE id = 1; COMMIT"
    ));
    assert_eq!(doc_1(&mut s), format!("3|{token}"));
}

fn token_column_must_not_be_generated() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int, n bigint, tok bigint GENERATED ALWAYS AS (n) STORED)");
    db.refused(&mut s, "SELECT fence_table('t', 't:{id}', 'tok')", "0A000")
        .tells("tok");
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM pg_trigger WHERE tgrelid = 't'::regclass"),
        0
    );
    // by hand, and made so later
    s.exec("CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fenced('t:{id}', 'token_column=tok')");
    let token = s.acquire("t:1");
    db.refused(
        &mut s,
        &format!("INSERT INTO t VALUES (1, {token})"),
        "0A000",
    );
    s.exec("SELECT unfence_table('t'); ALTER TABLE t DROP tok; ALTER TABLE t ADD tok bigint; SELECT fence_table('t', 't:{id}', 'tok')");
    s.exec("ALTER TABLE t DROP tok; ALTER TABLE t ADD tok bigint GENERATED ALWAYS AS (n) STORED");
    db.refused(
        &mut s,
        &format!("INSERT INTO t VALUES (1, {token})"),
        "0A000",
    );
}

fn token_column_must_be_positive() {
    let db = Db::new();
    let mut s = docs(&db);
    s.acquire("doc:1");
    for value in ["0", "-1", "-9223372036854775808"] {
        db.refused(
            &mut s,
            &format!("UPDATE doc SET n = 1, tok = {value} WHERE id = 1"),
            "22023",
        );
        db.refused(
            &mut s,
            &format!("INSERT INTO doc VALUES (3, 1, {value})"),
            "22023",
        );
    }
    db.refused(
        &mut s,
        "UPDATE doc SET n = 1, tok = NULL WHERE id = 1",
        "LH003",
    );
    db.refused(&mut s, "INSERT INTO doc VALUES (3, 1, NULL)", "LH003");
    db.refused(&mut s, "INSERT INTO doc VALUES (3, 1)", "LH003");
}

fn token_column_is_stamped() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    let stamped = |s: &mut Session, n: i32| assert_eq!(doc_1(s), format!("{n}|{token}"));
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1; COMMIT"
    ));
    stamped(&mut s, 1);
    s.exec("SELECT unfence_table('doc'); UPDATE doc SET tok = NULL; SELECT fence_table('doc', 'doc:{id}', 'tok')");
    s.exec(&format!(
        "BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = 2 WHERE id = 1; COMMIT"
    ));
    stamped(&mut s, 2);
    // whatever else the statement puts there, NULL and what is no token included
    for (n, value) in [(3, "7"), (4, "NULL"), (5, "-5")] {
        s.exec(&format!("BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = {n}, tok = {value} WHERE id = 1; COMMIT"));
        stamped(&mut s, n);
    }
    s.exec(&format!("BEGIN; SELECT fence('doc:1', {token}); DELETE FROM doc WHERE id = 1; INSERT INTO doc VALUES (1, 6); COMMIT"));
    stamped(&mut s, 6);
    // a table without a token column keeps its bigint columns
    s.exec("CREATE TABLE t (tok bigint); SELECT fence_table('t', 'doc:1')");
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); INSERT INTO t VALUES (7); COMMIT"
    ));
    assert_eq!(s.one::<i64>("SELECT tok FROM t"), 7);
}

fn own_acquire_beats_the_rest() {
    let db = Db::new();
    let mut s = docs(&db);
    let stale = s.acquire_expired("doc:1");
    s.exec(&format!("BEGIN; SET LOCAL leasehold.token = '{stale}'"));
    let own = s.acquire("doc:1");
    s.exec(&format!("UPDATE doc SET n = 1, tok = {stale} WHERE id = 1"));
    s.exec("UPDATE doc SET n = 2, tok = NULL WHERE id = 1; UPDATE doc SET n = 3, tok = 0 WHERE id = 1; COMMIT");
    assert_eq!(doc_1(&mut s), format!("3|{own}"));
    // and fence() under its own token is no contradiction
    s.release("doc:1", own);
    s.exec("BEGIN");
    let own = s.acquire("doc:1");
    s.fence("doc:1", own);
    s.exec("UPDATE doc SET n = 4 WHERE id = 1; COMMIT");
    // fence() under an older one is refused there and then
    s.release("doc:1", own);
    s.exec("BEGIN");
    s.acquire("doc:1");
    db.refused_write(&mut s, &format!("SELECT fence('doc:1', {own})"), "LH001");
    assert_eq!(doc_1(&mut s), format!("4|{own}"));
}

fn fence_beats_setting_and_column() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    for setting in [stale, NEVER, 1] {
        s.exec(&format!(
            "BEGIN; SET LOCAL leasehold.token = '{setting}'; SELECT fence('doc:1', {current})"
        ));
        s.exec(&format!(
            "UPDATE doc SET n = n + 1, tok = {stale} WHERE id = 1; COMMIT"
        ));
    }
    assert_eq!(doc_1(&mut s), format!("3|{current}"));
    // the other way round nothing good in the setting helps a stale fence()
    s.exec(&format!("SET leasehold.token = '{current}'"));
    db.refused(&mut s, &format!("SELECT fence('doc:1', {stale})"), "LH001");
}

fn setting_beats_column() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    s.exec(&format!("SET leasehold.token = '{current}'"));
    s.exec(&format!("UPDATE doc SET n = 1, tok = {stale} WHERE id = 1"));
    assert_eq!(doc_1(&mut s), format!("1|{current}"));
    s.exec(&format!("SET leasehold.token = '{stale}'"));
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 2, tok = {current} WHERE id = 1"),
        "LH001",
    );
    s.exec(&format!("SET leasehold.token = '{NEVER}'"));
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 2, tok = {current} WHERE id = 1"),
        "LH002",
    );
}

fn setting_makes_columns_ignored_even_for_another_resource() {
    let db = Db::new();
    let mut s = docs(&db);
    let one = s.acquire("doc:1");
    let two = s.acquire("doc:2");
    s.exec(&format!("SET leasehold.token = '{two}'"));
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 1, tok = {one} WHERE id = 1"),
        "LH002",
    );
    s.exec("SET leasehold.token = ''");
    s.exec(&format!("UPDATE doc SET n = 1, tok = {one} WHERE id = 1"));
    // fence() and an own acquire are named for their resource and leave the columns of others alone
    s.exec(&format!("BEGIN; SELECT fence('doc:2', {two}); UPDATE doc SET n = 2, tok = {one} WHERE id = 1; COMMIT"));
    assert_eq!(doc_1(&mut s), format!("2|{one}"));
}

fn each_way_can_be_stale() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    let update = "UPDATE doc SET n = 1 WHERE id = 1";
    db.refused(
        &mut s,
        &format!("BEGIN; SELECT fence('doc:1', {stale}); {update}"),
        "LH001",
    );
    db.refused(
        &mut s,
        &format!("BEGIN; SET LOCAL leasehold.token = '{stale}'; {update}"),
        "LH001",
    );
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 1, tok = {stale} WHERE id = 1"),
        "LH001",
    );
    let mut optioned = db.session_with_options(&format!("-c leasehold.token={stale}"));
    db.refused(&mut optioned, update, "LH001");
    // the refusal names both tokens
    let error = db.refused(&mut optioned, "DELETE FROM doc WHERE id = 1", "LH001");
    error
        .tells("doc:1")
        .details(&stale.to_string())
        .details(&current.to_string());
}

fn released_token_is_refused() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.release("doc:1", token);
    db.refused(
        &mut s,
        &format!("BEGIN; SELECT fence('doc:1', {token})"),
        "LH004",
    );
    db.refused(
        &mut s,
        &format!("BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = 1"),
        "LH004",
    );
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 1, tok = {token} WHERE id = 1"),
        "LH004",
    );
    let next = db.session().acquire("doc:1");
    assert!(next > token);
    db.refused(
        &mut s,
        &format!("UPDATE doc SET n = 1, tok = {token} WHERE id = 1"),
        "LH001",
    );
}

fn uncommitted_token_is_its_transactions_own() {
    let db = Db::new();
    let mut s = docs(&db);
    let mut other = db.session();
    s.exec("BEGIN");
    let token = s.acquire("doc:1");
    let write = format!("UPDATE doc SET n = 1, tok = {token} WHERE id = 1");
    db.refused(
        &mut other,
        &format!("SELECT fence('doc:1', {token})"),
        "LH002",
    );
    db.refused(&mut other, &write, "LH002");
    db.refused(
        &mut other,
        &format!("SET leasehold.token = '{token}'; {write}"),
        "LH002",
    );
    assert!(!other.check_fence("doc:1", token));
    assert!(!other.renew("doc:1", token) && !other.release("doc:1", token));
    assert_eq!(
        other.try_acquire("doc:1"),
        None,
        "granted while another grant is under way"
    );
    s.exec("COMMIT");
    other.exec("RESET leasehold.token");
    other.exec(&write);
    assert!(other.check_fence("doc:1", token) && other.renew("doc:1", token));
}

fn fence_shows_in_pg_locks() {
    let db = Db::new();
    let mut s = docs(&db);
    let mut monitor = db.session();
    let token = s.acquire("doc:1");
    // class number 19528, named in ARCHITECTURE.md
    let locks = format!(
        "SELECT mode FROM pg_locks WHERE pid = {} AND locktype = 'advisory' AND objsubid = 19528 AND granted
         AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        s.pid
    );
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1"
    ));
    assert_eq!(monitor.rows(&locks), [[Some("ShareLock".to_owned())]]);
    assert!(monitor.info_says("doc:1", "writers = 1"));
    s.exec("COMMIT");
    assert_eq!(monitor.rows(&locks).len(), 0);
    // a grant keeps the share of it until its transaction ends
    s.exec("BEGIN");
    s.acquire("doc:7");
    assert_eq!(monitor.rows(&locks), [[Some("ShareLock".to_owned())]]);
    s.exec("COMMIT");
    assert_eq!(monitor.rows(&locks).len(), 0);
}

fn fence_of_an_own_lease_released_in_the_same_transaction() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    // a release takes effect with the commit, so what the transaction writes until then is still the holder's
    s.exec(&format!("BEGIN; SELECT fence('doc:1', {token})"));
    assert!(s.release("doc:1", token));
    s.exec("UPDATE doc SET n = 1 WHERE id = 1; COMMIT");
    assert_eq!(doc_1(&mut s), format!("1|{token}"));
    assert_eq!(s.state_of("doc:1"), "free");
}

fn refusal_is_not_remembered() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    let write = "UPDATE doc SET n = n + 1 WHERE id = 1";
    s.exec("BEGIN; SAVEPOINT a");
    s.err(write).is("LH003");
    s.exec(&format!(
        "ROLLBACK TO a; SET LOCAL leasehold.token = '{stale}'; SAVEPOINT b"
    ));
    s.err(write).is("LH001");
    s.exec(&format!(
        "ROLLBACK TO b; SET LOCAL leasehold.token = '{current}'"
    ));
    s.exec(&format!("{write}; COMMIT"));
    assert_eq!(doc_1(&mut s), format!("1|{current}"));
}

fn many_resources_in_one_statement() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("CREATE TABLE big (id int, round int, tok bigint); SELECT fence_table('big', 'big:{id}', 'tok')");
    s.exec("CREATE TABLE mine AS SELECT id, acquire_lease('big:' || id, ttl => '5min') AS tok FROM generate_series(1, 2000) id");
    s.exec("INSERT INTO big SELECT id, 0, tok FROM mine ORDER BY random()");
    s.exec("UPDATE big SET round = 1, tok = mine.tok FROM mine WHERE mine.id = big.id");
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM big JOIN mine USING (id, tok) WHERE round = 1"),
        2000
    );
    // one that does not fit among two thousand that do
    s.exec("UPDATE mine SET tok = tok - 1 WHERE id = 1357");
    db.refused(
        &mut s,
        "UPDATE big SET round = 2, tok = mine.tok FROM mine WHERE mine.id = big.id",
        "LH001",
    )
    .tells("big:1357");
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM big WHERE round = 1"),
        2000
    );
}
