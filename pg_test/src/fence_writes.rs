//! Layer fence: every way there is to write. `guarded` tries each write without a token, under stale ones, with some
//! tokens missing, and under the current ones.

use crate::cluster::Db;
use crate::session::Session;

crate::tests![
    insert_is_fenced,
    update_is_fenced,
    delete_is_fenced,
    copy_is_fenced,
    insert_on_conflict_do_nothing_is_fenced,
    insert_on_conflict_do_update_is_fenced,
    insert_on_conflict_needs_both_rows_resources,
    merge_is_fenced,
    multi_row_statements_need_every_resource,
    update_of_the_resource_column_needs_both_resources,
    prepared_statements_are_fenced,
    writable_ctes_are_fenced,
    auto_updatable_views_are_fenced,
    views_with_instead_of_triggers_are_fenced,
    security_definer_writes_are_fenced,
    foreign_key_cascades_are_fenced,
    foreign_key_set_null_of_the_resource_column_is_refused,
    truncate_of_a_constant_resource_is_fenced,
    truncate_under_a_template_is_refused,
    truncate_reaches_no_partition_unfenced,
    truncate_cascade_is_fenced,
    partitioned_table_is_fenced,
    partition_made_later_is_fenced,
    partitions_with_other_column_order_are_fenced,
    row_movement_between_partitions_is_fenced,
    row_movement_under_a_token_column_is_fenced,
    inherited_tables_are_fenced,
    generated_columns_name_resources,
    other_before_triggers_come_first,
    other_before_triggers_with_late_names_come_first_too,
    trigger_that_turns_the_row_away_needs_no_token,
    renamed_column_is_refused_at_the_next_write,
    dropped_column_is_refused_at_the_next_write,
    column_that_became_unfit_is_refused_at_the_next_write,
    triggers_attached_by_hand_fence,
    wrongly_attached_trigger_is_refused,
    fence_table_again_replaces,
    unfence_table_takes_the_fence_off,
    fence_table_is_for_the_tables_owner,
    fence_table_undone_by_rollback,
    replica_role_writes_past_the_fence,
    foreign_role_cannot_write_under_a_lease,
    stale_transaction_that_passed_the_fence_keeps_takers_out,
    strict_refuses_an_expired_lease,
    oddly_named_and_temporary_tables_are_fenced,
    lost_lease_is_not_renewed_while_it_drains,
];

/// Rows 1 and 2 with resources doc:1 and doc:2.
fn docs(db: &Db) -> Session {
    let mut s = db.session();
    s.exec("CREATE TABLE doc (id int PRIMARY KEY, slug text UNIQUE, n int)");
    s.exec("INSERT INTO doc VALUES (1, 'a', 10), (2, 'b', 20)");
    s.exec("SELECT fence_table('doc', 'doc:{id}')");
    s
}

/// Tries `write`, which touches exactly `resources`: refused without a token (LH003), refused where any one of the
/// tokens is stale (LH001), refused where any one is missing (LH003), and let through under all of them.
#[track_caller]
fn guarded(db: &Db, resources: &[&str], write: &str) {
    guarded_by(db, resources, write, |session| session.try_exec(write));
}

#[track_caller]
fn guarded_by(
    db: &Db,
    resources: &[&str],
    what: &str,
    write: impl Fn(&mut Session) -> Result<(), crate::session::DbErr>,
) {
    let mut s = db.session();
    let refused = |s: &mut Session, sqlstate: &str, how: &str| {
        db.refused_by(s, &format!("{what} ({how})"), sqlstate, |s| {
            write(s).expect_err(&format!("{what} ({how})"))
        });
    };
    refused(&mut s, "LH003", "without a token");
    let pairs: Vec<(i64, i64)> = resources
        .iter()
        .map(|resource| s.stale_and_current(resource))
        .collect();
    for (i, resource) in resources.iter().enumerate() {
        let tokens = pairs
            .iter()
            .enumerate()
            .map(|(k, (stale, current))| if k == i { stale } else { current });
        let tokens: Vec<String> = tokens.map(i64::to_string).collect();
        s.exec(&format!(
            "BEGIN; SET LOCAL leasehold.token = '{}'",
            tokens.join(",")
        ));
        refused(
            &mut s,
            "LH001",
            &format!("with a stale token for {resource}"),
        );
    }
    for (i, resource) in resources.iter().enumerate().filter(|_| resources.len() > 1) {
        s.exec("BEGIN");
        let present = resources
            .iter()
            .zip(&pairs)
            .enumerate()
            .filter(|(k, _)| *k != i);
        present.for_each(|(_, (resource, (_, current)))| s.fence(resource, *current));
        refused(&mut s, "LH003", &format!("without one for {resource}"));
    }
    s.exec("BEGIN");
    resources
        .iter()
        .zip(&pairs)
        .for_each(|(resource, (_, current))| s.fence(resource, *current));
    if let Err(error) = write(&mut s) {
        panic!("{what}: refused under the current tokens\n  {error}");
    }
    s.exec("COMMIT");
    resources
        .iter()
        .zip(&pairs)
        .for_each(|(resource, (_, current))| assert!(s.release(resource, *current)));
}

fn insert_is_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    guarded(&db, &["doc:3"], "INSERT INTO doc VALUES (3, 'c', 30)");
    guarded(
        &db,
        &["doc:4"],
        "INSERT INTO doc SELECT 4, 'd', n FROM doc WHERE id = 1",
    );
    assert_eq!(s.one::<i64>("SELECT sum(id) FROM doc"), 10);
}

fn update_is_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    guarded(&db, &["doc:1"], "UPDATE doc SET n = 11 WHERE id = 1");
    // one that changes nothing is a write all the same
    guarded(&db, &["doc:1"], "UPDATE doc SET n = n WHERE id = 1");
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 1"), 11);
    // and one that finds no row is none
    s.exec("UPDATE doc SET n = 0 WHERE id = 99");
}

fn delete_is_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    guarded(&db, &["doc:1"], "DELETE FROM doc WHERE id = 1");
    guarded(
        &db,
        &["doc:2"],
        "DELETE FROM doc USING (VALUES (20)) v(n) WHERE doc.n = v.n",
    );
    assert_eq!(s.one::<i64>("SELECT count(*) FROM doc"), 0);
}

fn copy_is_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    let copy = |s: &mut Session| {
        s.try_copy_in("COPY doc FROM STDIN", "3\tc\t30\n4\td\t40\n")
            .map(|_| ())
    };
    guarded_by(&db, &["doc:3", "doc:4"], "COPY", copy);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM doc"), 4);
}

fn insert_on_conflict_do_nothing_is_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    guarded(
        &db,
        &["doc:3"],
        "INSERT INTO doc VALUES (3, 'c', 30) ON CONFLICT DO NOTHING",
    );
    // the proposed row asks before the conflict is found
    let before = db.tables();
    guarded(
        &db,
        &["doc:1"],
        "INSERT INTO doc VALUES (1, 'z', 99) ON CONFLICT DO NOTHING",
    );
    assert_eq!(db.tables(), before);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM doc"), 3);
}

fn insert_on_conflict_do_update_is_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    guarded(
        &db,
        &["doc:1"],
        "INSERT INTO doc VALUES (1, 'a', 11) ON CONFLICT (id) DO UPDATE SET n = excluded.n",
    );
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 1"), 11);
}

fn insert_on_conflict_needs_both_rows_resources() {
    let db = Db::new();
    let mut s = docs(&db);
    // the proposed row is doc:3, the one it meets is doc:1
    guarded(
        &db,
        &["doc:1", "doc:3"],
        "INSERT INTO doc VALUES (3, 'a', 33) ON CONFLICT (slug) DO UPDATE SET n = excluded.n",
    );
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 1"), 33);
}

fn merge_is_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    let merge = |values: &str, action: &str| {
        format!("MERGE INTO doc USING (VALUES {values}) v(id, n) ON doc.id = v.id WHEN {action}")
    };
    guarded(
        &db,
        &["doc:1"],
        &merge("(1, 11)", "MATCHED THEN UPDATE SET n = v.n"),
    );
    guarded(
        &db,
        &["doc:3"],
        &merge("(3, 30)", "NOT MATCHED THEN INSERT VALUES (v.id, 'c', v.n)"),
    );
    guarded(&db, &["doc:2"], &merge("(2, 0)", "MATCHED THEN DELETE"));
    let both =
        "MATCHED THEN UPDATE SET n = v.n WHEN NOT MATCHED THEN INSERT VALUES (v.id, 'd', v.n)";
    guarded(&db, &["doc:1", "doc:4"], &merge("(1, 12), (4, 40)", both));
    // doing nothing is no write
    s.exec(&merge("(1, 99)", "MATCHED THEN DO NOTHING"));
    let rows = s.text("SELECT string_agg(id || '=' || n, ' ' ORDER BY id) FROM doc");
    assert_eq!(rows.as_deref(), Some("1=12 3=30 4=40"));
}

fn multi_row_statements_need_every_resource() {
    let db = Db::new();
    let mut s = docs(&db);
    guarded(&db, &["doc:1", "doc:2"], "UPDATE doc SET n = n + 1");
    guarded(
        &db,
        &["doc:3", "doc:4"],
        "INSERT INTO doc VALUES (3, 'c', 30), (4, 'd', 40)",
    );
    guarded(
        &db,
        &["doc:1", "doc:2", "doc:3", "doc:4"],
        "DELETE FROM doc",
    );
    assert_eq!(s.one::<i64>("SELECT count(*) FROM doc"), 0);
}

fn update_of_the_resource_column_needs_both_resources() {
    let db = Db::new();
    let mut s = docs(&db);
    guarded(
        &db,
        &["doc:1", "doc:7"],
        "UPDATE doc SET id = 7 WHERE id = 1",
    );
    guarded(
        &db,
        &["doc:7", "doc:8"],
        "UPDATE doc SET id = 8, n = 80 WHERE id = 7",
    );
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 8"), 80);
}

fn prepared_statements_are_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    s.exec("PREPARE write (int) AS UPDATE doc SET n = $1 WHERE id = 1");
    for round in 0..8 {
        db.refused(&mut s, &format!("EXECUTE write({round})"), "LH003");
        db.refused(
            &mut s,
            &format!("BEGIN; SELECT fence('doc:1', {stale}); EXECUTE write({round})"),
            "LH001",
        );
        s.exec(&format!(
            "BEGIN; SELECT fence('doc:1', {current}); EXECUTE write({round}); COMMIT"
        ));
        assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 1"), round);
    }
}

fn writable_ctes_are_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("CREATE TABLE plain (id int)");
    guarded(
        &db,
        &["doc:1"],
        "WITH w AS (UPDATE doc SET n = 11 WHERE id = 1) SELECT 1",
    );
    guarded(
        &db,
        &["doc:1", "doc:5"],
        "WITH gone AS (DELETE FROM doc WHERE id = 1 RETURNING *) INSERT INTO doc SELECT 5, slug, n FROM gone",
    );
    guarded(
        &db,
        &["doc:2"],
        "WITH w AS (UPDATE doc SET n = 0 WHERE id = 2 RETURNING id) INSERT INTO plain TABLE w",
    );
    assert_eq!(s.one::<i64>("SELECT count(*) FROM plain"), 1);
}

fn auto_updatable_views_are_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("CREATE VIEW big AS SELECT id, n FROM doc WHERE n >= 10 WITH CHECK OPTION");
    guarded(&db, &["doc:1"], "UPDATE big SET n = 11 WHERE id = 1");
    guarded(&db, &["doc:3"], "INSERT INTO big VALUES (3, 30)");
    guarded(&db, &["doc:2"], "DELETE FROM big WHERE id = 2");
    assert_eq!(s.one::<i64>("SELECT sum(n) FROM doc"), 41);
}

fn views_with_instead_of_triggers_are_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec(
        "CREATE VIEW v AS SELECT id, sum(n) AS n FROM doc GROUP BY id;
         CREATE FUNCTION write() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF tg_op = 'DELETE' THEN DELETE FROM doc WHERE id = old.id; RETURN old; END IF;
             INSERT INTO doc VALUES (new.id, NULL, new.n) ON CONFLICT (id) DO UPDATE SET n = excluded.n;
             RETURN new;
         END $$;
         CREATE TRIGGER w INSTEAD OF INSERT OR UPDATE OR DELETE ON v FOR EACH ROW EXECUTE FUNCTION write()",
    );
    guarded(&db, &["doc:1"], "UPDATE v SET n = 11 WHERE id = 1");
    guarded(&db, &["doc:3"], "INSERT INTO v VALUES (3, 30)");
    guarded(&db, &["doc:2"], "DELETE FROM v WHERE id = 2");
    assert_eq!(s.one::<i64>("SELECT sum(n) FROM doc"), 41);
}

fn security_definer_writes_are_fenced() {
    let db = Db::new();
    let mut s = docs(&db);
    let (owner, caller) = (db.role(), db.role());
    s.exec(&format!(
        "GRANT ALL ON doc TO {owner};
         CREATE FUNCTION write(v int) RETURNS void LANGUAGE sql SECURITY DEFINER AS 'UPDATE doc SET n = v WHERE id = 1';
         ALTER FUNCTION write OWNER TO {owner}"
    ));
    let (mut owner_session, mut caller_session) = (db.session_as(&owner), db.session_as(&caller));
    db.refused(&mut caller_session, "SELECT write(0)", "LH003");
    // the caller's lease counts, though the function's owner writes
    let token = caller_session.acquire("doc:1");
    caller_session.exec(&format!(
        "BEGIN; SET LOCAL leasehold.token = '{token}'; SELECT write(1); COMMIT"
    ));
    caller_session.release("doc:1", token);
    // the owner's lease counts too, though the caller could not fence under it in its own name
    let token = owner_session.acquire("doc:1");
    caller_session.exec(&format!(
        "BEGIN; SET LOCAL leasehold.token = '{token}'; SELECT write(2); COMMIT"
    ));
    db.refused(
        &mut caller_session,
        &format!("SELECT fence('doc:1', {token})"),
        "42501",
    );
    owner_session.release("doc:1", token);
    // a third role's counts for neither
    let mut third = db.session_as(&db.role());
    let token = third.acquire("doc:1");
    db.refused(
        &mut caller_session,
        &format!("BEGIN; SET LOCAL leasehold.token = '{token}'; SELECT write(3)"),
        "42501",
    );
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 1"), 2);
}

fn foreign_key_cascades_are_fenced() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE customer (id int PRIMARY KEY);
         CREATE TABLE invoice (id int, customer int REFERENCES customer ON DELETE CASCADE ON UPDATE CASCADE);
         INSERT INTO customer VALUES (1), (2); INSERT INTO invoice VALUES (10, 1), (11, 1), (20, 2);
         SELECT fence_table('invoice', 'invoices of {customer}')",
    );
    guarded(
        &db,
        &["invoices of 1", "invoices of 7"],
        "UPDATE customer SET id = 7 WHERE id = 1",
    );
    guarded(&db, &["invoices of 2"], "DELETE FROM customer WHERE id = 2");
    let left = s.text("SELECT string_agg(concat(id, ':', customer), ' ' ORDER BY id) FROM invoice");
    assert_eq!(left.as_deref(), Some("10:7 11:7"));
}

fn foreign_key_set_null_of_the_resource_column_is_refused() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE customer (id int PRIMARY KEY);
         CREATE TABLE invoice (id int, customer int REFERENCES customer ON DELETE SET NULL);
         INSERT INTO customer VALUES (1); INSERT INTO invoice VALUES (10, 1);
         SELECT fence_table('invoice', 'invoices of {customer}')",
    );
    let token = s.acquire("invoices of 1");
    db.refused(
        &mut s,
        &format!("SET leasehold.token = '{token}'; DELETE FROM customer"),
        "22004",
    );
}

fn truncate_of_a_constant_resource_is_fenced() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE report (n int); INSERT INTO report VALUES (1); SELECT fence_table('report', 'nightly')");
    guarded(&db, &["nightly"], "TRUNCATE report");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM report"), 0);
    guarded(&db, &["nightly"], "INSERT INTO report VALUES (2), (3)");
    guarded(&db, &["nightly"], "UPDATE report SET n = 4");
    guarded(&db, &["nightly"], "TRUNCATE report RESTART IDENTITY");
}

fn truncate_under_a_template_is_refused() {
    let db = Db::new();
    let mut s = docs(&db);
    db.refused(&mut s, "TRUNCATE doc", "0A000");
    let (one, two) = (s.acquire("doc:1"), s.acquire("doc:2"));
    db.refused(
        &mut s,
        &format!("BEGIN; SET LOCAL leasehold.token = '{one},{two}'; TRUNCATE doc"),
        "0A000",
    );
}

fn truncate_reaches_no_partition_unfenced() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE part (id int) PARTITION BY RANGE (id);
         CREATE TABLE part_a PARTITION OF part FOR VALUES FROM (0) TO (10);
         CREATE TABLE part_b PARTITION OF part FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id);
         CREATE TABLE part_b1 PARTITION OF part_b FOR VALUES FROM (10) TO (20);
         INSERT INTO part VALUES (1), (11)",
    );
    s.exec("SELECT fence_table('part', 'part:{id}')");
    for table in ["part", "part_a", "part_b", "part_b1"] {
        db.refused(&mut s, &format!("TRUNCATE {table}"), "0A000");
    }
    s.exec("SELECT fence_table('part', 'whole')");
    for table in ["part_a", "part_b1", "part_b", "part"] {
        guarded(&db, &["whole"], &format!("TRUNCATE {table}"));
    }
    assert_eq!(s.one::<i64>("SELECT count(*) FROM part"), 0);
}

fn truncate_cascade_is_fenced() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE customer (id int PRIMARY KEY); CREATE TABLE invoice (customer int REFERENCES customer);
         INSERT INTO customer VALUES (1); INSERT INTO invoice VALUES (1); SELECT fence_table('invoice', 'invoices')",
    );
    guarded(&db, &["invoices"], "TRUNCATE customer CASCADE");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM customer"), 0);
}

/// Partitions a (id below 10) and b (below 20); rows 1 and 11.
fn parts(db: &Db, template: &str, token_column: &str) -> Session {
    let mut s = db.session();
    s.exec(
        "CREATE TABLE part (id int, n int, tok bigint) PARTITION BY RANGE (id);
         CREATE TABLE part_a PARTITION OF part FOR VALUES FROM (0) TO (10);
         CREATE TABLE part_b PARTITION OF part FOR VALUES FROM (10) TO (20);
         INSERT INTO part VALUES (1, 1), (11, 11)",
    );
    s.exec(&format!(
        "SELECT fence_table('part', '{template}', {token_column})"
    ));
    s
}

fn partitioned_table_is_fenced() {
    let db = Db::new();
    let mut s = parts(&db, "part:{id}", "NULL");
    guarded(&db, &["part:2"], "INSERT INTO part VALUES (2, 2)");
    guarded(&db, &["part:3"], "INSERT INTO part_a VALUES (3, 3)");
    guarded(&db, &["part:11"], "UPDATE part SET n = 12 WHERE id = 11");
    guarded(&db, &["part:1"], "UPDATE part_a SET n = 2 WHERE id = 1");
    guarded(&db, &["part:11"], "DELETE FROM part WHERE id = 11");
    guarded(&db, &["part:2"], "DELETE FROM part_a WHERE id = 2");
    let copy = |s: &mut Session| {
        s.try_copy_in("COPY part (id) FROM STDIN", "4\n14\n")
            .map(|_| ())
    };
    guarded_by(&db, &["part:4", "part:14"], "COPY", copy);
    assert_eq!(s.one::<i64>("SELECT sum(id) FROM part"), 22);
}

fn partition_made_later_is_fenced() {
    let db = Db::new();
    let mut s = parts(&db, "part:{id}", "NULL");
    s.exec("CREATE TABLE part_c PARTITION OF part FOR VALUES FROM (20) TO (30)");
    guarded(&db, &["part:21"], "INSERT INTO part VALUES (21, 1)");
    guarded(&db, &["part:22"], "INSERT INTO part_c VALUES (22, 1)");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM part_c"), 2);
}

fn partitions_with_other_column_order_are_fenced() {
    let db = Db::new();
    let mut s = parts(&db, "part:{id}", "NULL");
    s.exec(
        "CREATE TABLE part_c (gone text, tok bigint, n int, id int); ALTER TABLE part_c DROP gone;
         ALTER TABLE part ATTACH PARTITION part_c FOR VALUES FROM (20) TO (30)",
    );
    guarded(&db, &["part:21"], "INSERT INTO part (id, n) VALUES (21, 7)");
    guarded(&db, &["part:21"], "UPDATE part SET n = 8 WHERE id = 21");
    guarded(
        &db,
        &["part:2", "part:22"],
        "INSERT INTO part VALUES (2, 23), (22, 3)",
    );
    guarded(
        &db,
        &["part:1", "part:29"],
        "UPDATE part SET id = 29 WHERE id = 1",
    );
    assert_eq!(s.one::<i64>("SELECT sum(id) FROM part_c"), 72);
}

fn row_movement_between_partitions_is_fenced() {
    let db = Db::new();
    let mut s = parts(&db, "part:{id}", "NULL");
    guarded(
        &db,
        &["part:1", "part:15"],
        "UPDATE part SET id = 15 WHERE id = 1",
    );
    assert_eq!(s.one::<i32>("SELECT n FROM part_b WHERE id = 15"), 1);
    // the same resource on both sides
    s.exec("SELECT fence_table('part', 'n:{n}')");
    guarded(&db, &["n:1"], "UPDATE part SET id = 5 WHERE id = 15");
    assert_eq!(s.one::<i32>("SELECT n FROM part_a WHERE id = 5"), 1);
}

fn row_movement_under_a_token_column_is_fenced() {
    let db = Db::new();
    let mut s = parts(&db, "n:{n}", "'tok'");
    let (stale, current) = s.stale_and_current("n:1");
    db.refused(&mut s, "UPDATE part SET id = 15 WHERE id = 1", "LH003");
    db.refused(
        &mut s,
        &format!("UPDATE part SET id = 15, tok = {stale} WHERE id = 1"),
        "LH001",
    );
    // the move is a deletion and an insertion underneath; the update that sets the column has presented the token
    s.exec(&format!(
        "UPDATE part SET id = 15, tok = {current} WHERE id = 1"
    ));
    assert_eq!(
        s.one::<i64>("SELECT tok FROM part_b WHERE id = 15"),
        current
    );
    // ON CONFLICT and MERGE move rows as well
    let (_, other) = s.stale_and_current("n:11");
    s.exec(&format!(
        "MERGE INTO part USING (VALUES (11, 6)) v(id, new) ON part.id = v.id
         WHEN MATCHED THEN UPDATE SET id = v.new, tok = {other}"
    ));
    assert_eq!(s.one::<i64>("SELECT tok FROM part_a WHERE id = 6"), other);
}

fn inherited_tables_are_fenced() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE parent (id int, n int); CREATE TABLE child (more text) INHERITS (parent);
         CREATE TABLE grandchild () INHERITS (child);
         INSERT INTO parent VALUES (1, 1); INSERT INTO child VALUES (2, 2); INSERT INTO grandchild VALUES (3, 3);
         SELECT fence_table('parent', 'it:{id}')",
    );
    guarded(
        &db,
        &["it:1", "it:2", "it:3"],
        "UPDATE parent SET n = n + 1",
    );
    guarded(&db, &["it:2"], "UPDATE child SET n = n + 1 WHERE id = 2");
    guarded(&db, &["it:4"], "INSERT INTO child VALUES (4, 4)");
    guarded(&db, &["it:5"], "INSERT INTO grandchild VALUES (5, 5)");
    guarded(&db, &["it:3"], "DELETE FROM parent WHERE id = 3");
    for table in ["parent", "ONLY parent", "child", "grandchild"] {
        db.refused(&mut s, &format!("TRUNCATE {table}"), "0A000");
    }
    assert_eq!(s.one::<i64>("SELECT count(*) FROM parent"), 4);
    s.exec("SELECT unfence_table('parent'); UPDATE parent SET n = 0; TRUNCATE parent");
}

fn generated_columns_name_resources() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE price (id int, n float8, tag text GENERATED ALWAYS AS ('tag ' || (id * 2)::text) STORED);
         SELECT fence_table('price', '{tag}')",
    );
    guarded(&db, &["tag 2"], "INSERT INTO price (id) VALUES (1)");
    guarded(&db, &["tag 2"], "UPDATE price SET n = 1.5");
    guarded(&db, &["tag 2", "tag 6"], "UPDATE price SET id = 3");
    guarded(&db, &["tag 6"], "DELETE FROM price");
    let copy = |s: &mut Session| {
        s.try_copy_in("COPY price (id) FROM STDIN", "7\n")
            .map(|_| ())
    };
    guarded_by(&db, &["tag 14"], "COPY", copy);
    assert_eq!(s.text("SELECT tag FROM price").as_deref(), Some("tag 14"));
    // the expression gives NULL
    let token = s.acquire("tag 1");
    db.refused(
        &mut s,
        &format!("SET leasehold.token = '{token}'; INSERT INTO price (id) VALUES (NULL)"),
        "22004",
    );
}

fn other_before_triggers_come_first() {
    fences_what_other_triggers_leave(&["aaa", "zzz", "ZZZ", "~", "~a"]);
}

fn other_before_triggers_with_late_names_come_first_too() {
    fences_what_other_triggers_leave(&["~leasehold~~~", "~~~z", "\u{fffd}last"]);
}

#[track_caller]
fn fences_what_other_triggers_leave(names: &[&str]) {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("CREATE FUNCTION shift() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN new.id := new.id + 100; RETURN new; END'");
    for name in names {
        s.exec(&format!(
            "CREATE TRIGGER \"{name}\" BEFORE INSERT ON doc FOR EACH ROW EXECUTE FUNCTION shift()"
        ));
        s.exec("SELECT fence_table('doc', 'doc:{id}')");
        guarded(&db, &["doc:103"], "INSERT INTO doc VALUES (3, NULL, 30)");
        // the token for the row as the statement gave it is not enough
        let token = s.acquire("doc:3");
        db.refused(
            &mut s,
            &format!("BEGIN; SELECT fence('doc:3', {token}); INSERT INTO doc VALUES (3)"),
            "LH003",
        );
        s.release("doc:3", token);
        guarded(&db, &["doc:103"], "DELETE FROM doc WHERE id = 103");
        s.exec(&format!("DROP TRIGGER \"{name}\" ON doc"));
    }
}

fn trigger_that_turns_the_row_away_needs_no_token() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec(
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         CREATE TRIGGER skip BEFORE DELETE ON doc FOR EACH ROW EXECUTE FUNCTION skip()",
    );
    let before = db.tables();
    s.exec("DELETE FROM doc");
    assert_eq!(db.tables(), before);
}

fn renamed_column_is_refused_at_the_next_write() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    let write =
        format!("BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = n + 1 WHERE slug = 'a'");
    // the trigger has seen the table under its old name in this very session
    s.exec(&format!("{write}; COMMIT"));
    s.exec("ALTER TABLE doc RENAME id TO number");
    for mut session in [s, db.session()] {
        db.refused(&mut session, &write, "42703");
        db.refused(&mut session, "INSERT INTO doc VALUES (3)", "42703");
        db.refused(&mut session, "DELETE FROM doc", "42703");
    }
    let mut s = db.session();
    s.exec("SELECT fence_table('doc', 'doc:{number}')");
    s.exec(&format!("{write}; COMMIT"));
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE slug = 'a'"), 12);
}

fn dropped_column_is_refused_at_the_next_write() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    let write =
        format!("BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = n + 1 WHERE slug = 'a'");
    s.exec(&format!("{write}; COMMIT"));
    s.exec("ALTER TABLE doc DROP id");
    for mut session in [s, db.session()] {
        db.refused(&mut session, &write, "42703");
        db.refused(&mut session, "DELETE FROM doc", "42703");
    }
    // the token column likewise
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int, tok bigint); SELECT fence_table('t', 'doc:1', 'tok')");
    s.exec(&format!("INSERT INTO t VALUES (1, {token})"));
    s.exec("ALTER TABLE t RENAME tok TO token");
    db.refused(
        &mut s,
        &format!("INSERT INTO t VALUES (2, {token})"),
        "42703",
    );
    s.exec("ALTER TABLE t DROP token");
    db.refused(&mut s, "INSERT INTO t VALUES (2)", "42703");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM t"), 1);
}

fn column_that_became_unfit_is_refused_at_the_next_write() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.exec(&format!(
        "SET leasehold.token = '{token}'; UPDATE doc SET n = 11 WHERE id = 1"
    ));
    s.exec("ALTER TABLE doc ALTER id TYPE float8");
    db.refused(&mut s, "UPDATE doc SET n = 12 WHERE id = 1", "0A000");
    s.exec("ALTER TABLE doc ALTER id TYPE bigint");
    s.exec("UPDATE doc SET n = 13 WHERE id = 1");
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 1"), 13);
    s.exec("CREATE TABLE t (tok bigint); SELECT fence_table('t', 'doc:1', 'tok'); ALTER TABLE t ALTER tok TYPE text");
    db.refused(
        &mut s,
        &format!("INSERT INTO t VALUES ('{token}')"),
        "42804",
    );
}

fn triggers_attached_by_hand_fence() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE t (id int, tok bigint);
         CREATE TRIGGER zz BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW
             EXECUTE FUNCTION fenced('t:{id}', 'token_column=tok', 'strict');
         CREATE TABLE u (n int);
         CREATE TRIGGER zz BEFORE INSERT OR UPDATE OR DELETE ON u FOR EACH ROW EXECUTE FUNCTION fenced('u');
         CREATE TRIGGER zy BEFORE TRUNCATE ON u FOR EACH STATEMENT EXECUTE FUNCTION fenced('u')",
    );
    guarded(&db, &["t:1"], "INSERT INTO t VALUES (1)");
    guarded(&db, &["u"], "INSERT INTO u VALUES (1)");
    guarded(&db, &["u"], "TRUNCATE u");
    let token = s.acquire("t:2");
    s.exec(&format!("INSERT INTO t VALUES (2, {token})"));
    let expired = s.acquire_expired("t:3");
    db.refused(
        &mut s,
        &format!("INSERT INTO t VALUES (3, {expired})"),
        "LH004",
    );
}

fn wrongly_attached_trigger_is_refused() {
    let db = Db::new();
    let mut s = db.session();
    db.refused(&mut s, "SELECT fenced()", "39P01");
    s.exec("CREATE TABLE t (id int); INSERT INTO t VALUES (1); CREATE VIEW v AS SELECT id FROM t");
    let token = s.acquire("t");
    s.exec(&format!("SET leasehold.token = '{token}'"));
    let cases = [
        ("AFTER INSERT ON t FOR EACH ROW", "INSERT INTO t VALUES (2)"),
        (
            "BEFORE INSERT ON t FOR EACH STATEMENT",
            "INSERT INTO t VALUES (2)",
        ),
        (
            "BEFORE UPDATE ON t FOR EACH STATEMENT",
            "UPDATE t SET id = 3",
        ),
        ("AFTER DELETE ON t FOR EACH STATEMENT", "DELETE FROM t"),
        ("AFTER TRUNCATE ON t FOR EACH STATEMENT", "TRUNCATE t"),
        (
            "INSTEAD OF INSERT ON v FOR EACH ROW",
            "INSERT INTO v VALUES (2)",
        ),
    ];
    for (how, write) in cases {
        s.exec(&format!(
            "CREATE TRIGGER x {how} EXECUTE FUNCTION fenced('t')"
        ));
        db.refused(&mut s, write, "39P01");
        s.exec(if how.contains(" v ") {
            "DROP TRIGGER x ON v"
        } else {
            "DROP TRIGGER x ON t"
        });
    }
}

fn triggers_of(s: &mut Session, table: &str) -> i64 {
    s.one(&format!(
        "SELECT count(*) FROM pg_trigger WHERE tgrelid = '{table}'::regclass AND NOT tgisinternal"
    ))
}

fn fence_table_again_replaces() {
    let db = Db::new();
    let mut s = docs(&db);
    let count = triggers_of(&mut s, "doc");
    s.exec("SELECT fence_table('doc', 'all docs')");
    assert_eq!(triggers_of(&mut s, "doc"), count, "old triggers are left");
    guarded(&db, &["all docs"], "UPDATE doc SET n = 0");
    guarded(&db, &["all docs"], "TRUNCATE doc");
    s.exec("SELECT fence_table('doc', 'doc:{id}')");
    guarded(&db, &["doc:1"], "INSERT INTO doc VALUES (1)");
    db.refused(&mut s, "TRUNCATE doc", "0A000");
    let named = s.one::<bool>(
        "SELECT bool_and(tgname LIKE '~leasehold%') FROM pg_trigger WHERE tgrelid = 'doc'::regclass AND NOT tgisinternal",
    );
    assert!(named);
}

fn unfence_table_takes_the_fence_off() {
    let db = Db::new();
    let mut s = docs(&db);
    db.refused(&mut s, "UPDATE doc SET n = 0", "LH003");
    s.exec("SELECT unfence_table('doc')");
    assert_eq!(triggers_of(&mut s, "doc"), 0);
    s.exec("UPDATE doc SET n = 0; TRUNCATE doc");
}

fn fence_table_is_for_the_tables_owner() {
    let db = Db::new();
    let mut s = docs(&db);
    let role = db.role();
    s.exec(&format!(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON doc TO {role}"
    ));
    let mut other = db.session_as(&role);
    let count = triggers_of(&mut s, "doc");
    db.refused(&mut other, "SELECT fence_table('doc', 'mine')", "42501");
    db.refused(&mut other, "SELECT unfence_table('doc')", "42501");
    assert_eq!(triggers_of(&mut s, "doc"), count);
    other.exec("CREATE TABLE own (id int); SELECT fence_table('own', 'own:{id}')");
    db.refused(&mut other, "INSERT INTO own VALUES (1)", "LH003");
    other.exec("SELECT unfence_table('own'); INSERT INTO own VALUES (1)");
}

fn fence_table_undone_by_rollback() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("BEGIN; SELECT unfence_table('doc'); UPDATE doc SET n = 0; ROLLBACK");
    db.refused(&mut s, "UPDATE doc SET n = 0", "LH003");
    s.exec("BEGIN; SELECT fence_table('doc', 'all docs'); ROLLBACK");
    guarded(&db, &["doc:1"], "UPDATE doc SET n = 1 WHERE id = 1");
}

fn replica_role_writes_past_the_fence() {
    let db = Db::new();
    let mut s = docs(&db);
    db.refused(&mut s, "UPDATE doc SET n = 0", "LH003");
    s.exec("SET session_replication_role = replica; UPDATE doc SET n = 0; TRUNCATE doc");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM doc"), 0);
}

fn foreign_role_cannot_write_under_a_lease() {
    let db = Db::new();
    let mut s = docs(&db);
    let (owner, stranger) = (db.role(), db.role());
    s.exec(&format!("GRANT ALL ON doc TO {owner}, {stranger}"));
    let (mut owner_session, mut stranger_session) =
        (db.session_as(&owner), db.session_as(&stranger));
    let token = owner_session.acquire("doc:1");
    let write =
        format!("BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = 0 WHERE id = 1");
    db.refused(&mut stranger_session, &write, "42501");
    // the verdict is asked for anew in each transaction
    s.exec(&format!("GRANT {owner} TO {stranger}"));
    stranger_session.exec(&format!("{write}; COMMIT"));
    s.exec(&format!("REVOKE {owner} FROM {stranger}"));
    db.refused(&mut stranger_session, &write, "42501");
    owner_session.exec(&format!("{write}; COMMIT"));
}

fn stale_transaction_that_passed_the_fence_keeps_takers_out() {
    let db = Db::new();
    let mut old = docs(&db);
    let mut taker = db.session();
    let token = old.acquire_expired("doc:1");
    // nobody else wants it yet, so the lease that has run out still passes
    old.exec(&format!(
        "BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = 11 WHERE id = 1"
    ));
    assert_eq!(
        taker.try_acquire("doc:1"),
        None,
        "granted while a transaction is open under the old token"
    );
    assert_eq!(taker.state_of("doc:1"), "draining");
    assert!(taker.info_says("doc:1", "writers = 1"));
    // from the first taker on no further transaction gets in under the old token
    let mut late = db.session();
    let write =
        format!("BEGIN; SET LOCAL leasehold.token = '{token}'; INSERT INTO doc VALUES (1, 'late')");
    db.refused(&mut late, &write, "LH004");
    db.refused(
        &mut late,
        &format!("SELECT fence('doc:1', {token})"),
        "LH004",
    );
    assert!(!late.check_fence("doc:1", token));
    old.exec("COMMIT");
    let next = taker.acquire("doc:1");
    assert!(next > token);
    assert_eq!(
        taker.one::<i32>("SELECT n FROM doc WHERE id = 1"),
        11,
        "the taker sees the old holder's write"
    );
    db.refused(&mut late, &write, "LH001");
}

fn strict_refuses_an_expired_lease() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE lax (n int); CREATE TABLE firm (n int); SELECT fence_table('lax', 'r');
         SELECT fence_table('firm', 'r', strict => true)",
    );
    let live = s.acquire("r");
    s.exec(&format!("BEGIN; SELECT fence('r', {live}); INSERT INTO lax VALUES (1); INSERT INTO firm VALUES (1); COMMIT"));
    s.release("r", live);
    let expired = s.acquire_expired("r");
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {expired}); INSERT INTO lax VALUES (2); COMMIT"
    ));
    let begin = format!("BEGIN; SELECT fence('r', {expired})");
    db.refused(
        &mut s,
        &format!("{begin}; INSERT INTO firm VALUES (2)"),
        "LH004",
    );
    // the verdict that lets the lax table pass is not the strict one's
    db.refused(
        &mut s,
        &format!("{begin}; INSERT INTO lax VALUES (3); INSERT INTO firm VALUES (3)"),
        "LH004",
    );
    db.refused(&mut s, &format!("{begin}; TRUNCATE firm"), "LH004");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM lax"), 2);
}

fn oddly_named_and_temporary_tables_are_fenced() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE SCHEMA \"My \"\"Schema\"; CREATE TABLE \"My \"\"Schema\".\"it's {a} Table\" (id int)");
    s.exec("SELECT fence_table('\"My \"\"Schema\".\"it''s {a} Table\"', 'odd:{id}')");
    guarded(
        &db,
        &["odd:1"],
        "INSERT INTO \"My \"\"Schema\".\"it's {a} Table\" VALUES (1)",
    );
    db.refused(
        &mut s,
        "TRUNCATE \"My \"\"Schema\".\"it's {a} Table\"",
        "0A000",
    );
    s.exec("SELECT unfence_table('\"My \"\"Schema\".\"it''s {a} Table\"')");
    s.exec("CREATE TEMP TABLE t (id int); SELECT fence_table('t', 'temp:{id}')");
    db.refused(&mut s, "INSERT INTO t VALUES (1)", "LH003");
    let token = s.acquire("temp:1");
    s.exec(&format!(
        "BEGIN; SELECT fence('temp:1', {token}); INSERT INTO t VALUES (1); COMMIT"
    ));
    s.exec("CREATE UNLOGGED TABLE u (id int); SELECT fence_table('u', 'u')");
    guarded(&db, &["u"], "INSERT INTO u VALUES (1)");
}

fn lost_lease_is_not_renewed_while_it_drains() {
    let db = Db::new();
    let (mut old, mut taker) = (docs(&db), db.session());
    let token = old.acquire_expired("doc:1");
    old.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 11 WHERE id = 1"
    ));
    assert_eq!(taker.try_acquire("doc:1"), None);
    // neither from inside nor from outside does the lease come back
    assert!(!old.renew("doc:1", token) && !taker.renew("doc:1", token));
    assert!(!old.release("doc:1", token) && !taker.release("doc:1", token));
    old.exec("ROLLBACK");
    assert!(taker.acquire("doc:1") > token);
    assert_eq!(taker.one::<i32>("SELECT n FROM doc WHERE id = 1"), 10);
}
