//! Layer fence, part partitions: a partition is fenced by its parent's fence alone, and a row that an UPDATE moves to
//! another partition (a DELETE and an INSERT underneath) is written under what the UPDATE has presented.

use crate::cluster::Db;
use crate::session::Session;

crate::tests![
    trigger_behind_the_fence_is_noticed,
    table_is_fenced_again_and_again_in_one_statement,
    own_tables_are_not_fenced,
    partition_has_no_fence_of_its_own,
    move_under_a_fence_and_a_column,
    move_under_a_column_alone_needs_one_good_for_both,
    move_passes_a_delete_trigger_that_catches_an_error,
    move_passes_a_delete_trigger_that_writes,
    move_does_not_cover_other_deletes,
];

fn partition_has_no_fence_of_its_own() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE part (id int, tok bigint) PARTITION BY RANGE (id);
         CREATE TABLE part_a PARTITION OF part FOR VALUES FROM (0) TO (10);
         CREATE TABLE part_b PARTITION OF part FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id);
         CREATE TABLE part_b1 PARTITION OF part_b FOR VALUES FROM (10) TO (15);
         SELECT fence_table('part', 'part:{id}');
         CREATE TABLE part_c PARTITION OF part FOR VALUES FROM (20) TO (30)",
    );
    let triggers = "SELECT string_agg(concat(tgrelid::regclass, ' ', tgname, ' ', tgargs), ',' ORDER BY tgrelid, tgname)
                    FROM pg_trigger WHERE NOT tgisinternal";
    let before = s.text(triggers);
    for table in ["part_a", "part_b", "part_b1", "part_c"] {
        for call in [
            format!("fence_table('{table}', 'other:{{id}}')"),
            format!("fence_table('{table}', 'part:{{id}}')"),
            format!("unfence_table('{table}')"),
        ] {
            db.refused(&mut s, &format!("SELECT {call}"), "55000")
                .hints_at("unfence_table('public.part')");
            assert_eq!(s.text(triggers), before, "{call}");
        }
    }
    for id in [1, 11, 21] {
        db.refused(&mut s, &format!("INSERT INTO part VALUES ({id})"), "LH003");
    }
    // at the parent it goes on as ever
    s.exec("SELECT fence_table('part', 'new:{id}'); SELECT unfence_table('part')");
    s.exec("SELECT fence_table('part_a', 'a:{id}'); INSERT INTO part VALUES (11), (21)");
    db.refused(&mut s, "INSERT INTO part VALUES (1)", "LH003")
        .tells("a:1");
}

/// Partitions by name, each row's resource is its name's; row 1 is in the first.
fn named(db: &Db) -> Session {
    let mut s = db.session();
    s.exec(
        "CREATE TABLE part (id int, name text, tok bigint) PARTITION BY LIST (name);
         CREATE TABLE part_a PARTITION OF part FOR VALUES IN ('a');
         CREATE TABLE part_b PARTITION OF part FOR VALUES IN ('b');
         INSERT INTO part VALUES (1, 'a'); SELECT fence_table('part', 'mv:{name}', 'tok')",
    );
    s
}

fn row_1(s: &mut Session) -> Option<String> {
    s.text("SELECT concat(tableoid::regclass, '|', tok) FROM part WHERE id = 1")
}

fn move_under_a_fence_and_a_column() {
    let db = Db::new();
    let mut s = named(&db);
    let (stale_a, a) = s.stale_and_current("mv:a");
    let (stale_b, b) = s.stale_and_current("mv:b");
    // what is named for a resource counts for it, the column for the other one
    db.refused(
        &mut s,
        &format!("BEGIN; SELECT fence('mv:b', {b}); UPDATE part SET name = 'b' WHERE id = 1"),
        "LH003",
    );
    db.refused(
        &mut s,
        &format!("BEGIN; SELECT fence('mv:b', {b}); UPDATE part SET name = 'b', tok = {stale_a} WHERE id = 1"),
        "LH001",
    );
    s.exec(&format!(
        "BEGIN; SELECT fence('mv:b', {b}); UPDATE part SET name = 'b', tok = {a} WHERE id = 1; COMMIT"
    ));
    // stamped with the token of the resource that it is now in
    assert_eq!(row_1(&mut s), Some(format!("part_b|{b}")));
    // and back, the other way round
    db.refused(
        &mut s,
        &format!("BEGIN; SELECT fence('mv:a', {a}); UPDATE part SET name = 'a', tok = {stale_b} WHERE id = 1"),
        "LH001",
    );
    s.exec(&format!(
        "BEGIN; SELECT fence('mv:a', {a}); UPDATE part SET name = 'a', tok = {b} WHERE id = 1; COMMIT"
    ));
    assert_eq!(row_1(&mut s), Some(format!("part_a|{a}")));
    // the resource that it leaves named, the one that it goes to presented by the column
    s.exec(&format!(
        "BEGIN; SELECT fence('mv:a', {a}); UPDATE part SET name = 'b', tok = {b} WHERE id = 1; COMMIT"
    ));
    assert_eq!(row_1(&mut s), Some(format!("part_b|{b}")));
}

fn move_under_a_column_alone_needs_one_good_for_both() {
    let db = Db::new();
    let mut s = named(&db);
    let (a, b) = (s.acquire("mv:a"), s.acquire("mv:b"));
    for (token, sqlstate) in [(a, "LH001"), (b, "LH002")] {
        db.refused(
            &mut s,
            &format!("UPDATE part SET name = 'b', tok = {token} WHERE id = 1"),
            sqlstate,
        );
    }
    assert_eq!(row_1(&mut s).as_deref(), Some("part_a|"));
}

/// Partitions by id, each row's resource is its name's; rows 1 and 2 are in the first. `body` is what a trigger does
/// before a row is deleted.
fn with_delete_trigger(db: &Db, body: &str) -> Session {
    let mut s = db.session();
    s.exec(&format!(
        "CREATE TABLE part (id int, name text, tok bigint) PARTITION BY RANGE (id);
         CREATE TABLE part_a PARTITION OF part FOR VALUES FROM (0) TO (10);
         CREATE TABLE part_b PARTITION OF part FOR VALUES FROM (10) TO (20);
         INSERT INTO part VALUES (1, 'x'), (2, 'x'); CREATE TABLE log (id int);
         CREATE FUNCTION before_delete() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body} RETURN old; END$$;
         CREATE TRIGGER a BEFORE DELETE ON part FOR EACH ROW EXECUTE FUNCTION before_delete();
         SELECT fence_table('part', '{{name}}', 'tok')"
    ));
    s
}

/// Both rows move in one statement that presents the token by its column.
#[track_caller]
fn moves(db: &Db, mut s: Session) {
    let (stale, current) = s.stale_and_current("x");
    db.refused(&mut s, "UPDATE part SET id = id + 10", "LH003");
    db.refused(
        &mut s,
        &format!("UPDATE part SET id = id + 10, tok = {stale}"),
        "LH001",
    );
    s.exec(&format!("UPDATE part SET id = id + 10, tok = {current}"));
    let there: i64 = s.one(&format!(
        "SELECT count(*) FROM part_b WHERE tok = {current}"
    ));
    assert_eq!(there, 2);
}

fn move_passes_a_delete_trigger_that_catches_an_error() {
    for inner in [
        "RAISE 'caught'",
        "PERFORM 1 / 0",
        "INSERT INTO log VALUES (old.id); RAISE 'caught'",
        "PERFORM 1",
    ] {
        let db = Db::new();
        let body = format!("BEGIN {inner}; EXCEPTION WHEN others THEN NULL; END;");
        let s = with_delete_trigger(&db, &body);
        moves(&db, s);
    }
}

fn move_passes_a_delete_trigger_that_writes() {
    let db = Db::new();
    let s = with_delete_trigger(&db, "INSERT INTO log VALUES (old.id);");
    moves(&db, s);
    assert_eq!(db.session().one::<i64>("SELECT count(*) FROM log"), 2);
}

fn move_does_not_cover_other_deletes() {
    let db = Db::new();
    // the deletion of another row from inside the move presents nothing
    let mut s = with_delete_trigger(&db, "DELETE FROM part WHERE id = 2 AND old.id = 1;");
    let token = s.acquire("x");
    db.refused(
        &mut s,
        &format!("UPDATE part SET id = 11, tok = {token} WHERE id = 1"),
        "LH003",
    );
    db.refused(
        &mut s,
        &format!(
            "BEGIN; UPDATE part SET tok = {token} WHERE id = 1; DELETE FROM part WHERE id = 1"
        ),
        "LH003",
    );
}

/// A trigger that fires after the fence could move a row to another resource.
fn trigger_behind_the_fence_is_noticed() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE t (id int); SELECT fence_table('t', 't:{id}');
         CREATE FUNCTION elsewhere() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN new.id = 2; RETURN new; END';
         CREATE TRIGGER \"\u{e4}nderung\" BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION elsewhere()",
    );
    let token = s.acquire("t:1");
    s.exec(&format!("SET leasehold.token = '{token}'"));
    db.refused(&mut s, "INSERT INTO t VALUES (1)", "55000")
        .hints_at("fence_table");
    // behind it again, the fence sees where the row goes
    s.exec("SELECT fence_table('t', 't:{id}')");
    db.refused(&mut s, "INSERT INTO t VALUES (1)", "LH002");
    s.exec("DROP TRIGGER \"\u{e4}nderung\" ON t; INSERT INTO t VALUES (1)");
}

fn table_is_fenced_again_and_again_in_one_statement() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int); SELECT fence_table('t', 't:{id}') FROM generate_series(1, 5)");
    let triggers: i64 = s.one("SELECT count(*) FROM pg_trigger WHERE tgrelid = 't'::regclass");
    assert_eq!(triggers, 2);
    db.refused(&mut s, "INSERT INTO t VALUES (1)", "LH003");
}

fn own_tables_are_not_fenced() {
    let db = Db::new();
    let mut s = db.session();
    db.refused(
        &mut s,
        "SELECT fence_table('leasehold.ledger', 'x')",
        "42809",
    );
    assert!(s.try_acquire("x").is_some());
}
