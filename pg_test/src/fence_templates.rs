//! Layer fence: which resource a row belongs to. A column's text is the same whatever the writing session's settings
//! are; what cannot be turned into a name is refused before anything is written.

use crate::cluster::Db;
use crate::session::Session;

crate::tests![
    text_types_render,
    numbers_render,
    booleans_and_uuids_render,
    enums_render,
    dates_and_times_render_iso_and_utc,
    domains_render,
    other_types_are_refused,
    other_types_are_refused_at_the_write,
    several_columns_and_literals_render,
    braces_are_literal_when_doubled,
    odd_column_names_render,
    bad_templates_are_refused,
    bad_templates_are_refused_at_the_write,
    unknown_columns_are_refused,
    null_in_a_column_is_refused,
    rendered_names_have_a_length,
    rendered_empty_name_is_refused,
];

/// A session with every setting that changes how values print.
fn odd_session(db: &Db) -> Session {
    let mut s = db.session();
    s.exec(
        "SET datestyle = 'German, DMY'; SET timezone = 'Asia/Kathmandu'; SET intervalstyle = sql_standard;
         SET extra_float_digits = -3; SET bytea_output = escape; SET lc_monetary = 'C'; SET lc_numeric = 'C'",
    );
    s
}

/// Asserts that a row with `value` in a column of type `kind` belongs to the resource `x:` followed by `expected`.
#[track_caller]
fn renders(db: &Db, kind: &str, value: &str, expected: &str) {
    let mut s = odd_session(db);
    s.exec(&format!(
        "CREATE TABLE t (c {kind}); SELECT fence_table('t', 'x:{{c}}')"
    ));
    let resource = format!("x:{expected}");
    let insert = format!("INSERT INTO t VALUES ({value})");
    db.refused(&mut s, &insert, "LH003").details(&resource);
    let token = s.acquire(&resource);
    s.exec("BEGIN");
    s.fence(&resource, token);
    if let Err(error) = s.try_exec(&insert) {
        panic!("{kind} {value} does not render as {expected}: {error}");
    }
    // the stored row, read back, belongs to it as well
    s.exec("UPDATE t SET c = c; DELETE FROM t; COMMIT; DROP TABLE t");
    assert!(s.release(&resource, token));
}

fn text_types_render() {
    let db = Db::new();
    renders(&db, "text", "'plain'", "plain");
    renders(&db, "text", "'  blanks  '", "  blanks  ");
    renders(&db, "text", "'{c} {{'", "{c} {{");
    renders(&db, "text", "'日本 🔒 é'", "日本 🔒 é");
    renders(&db, "text", "E'it''s \\\\ \\n'", "it's \\ \n");
    renders(&db, "text", "repeat('x', 200)", &"x".repeat(200));
    renders(&db, "varchar", "'v '", "v ");
    renders(&db, "varchar(10)", "'v'", "v");
    // the cast to text takes the padding off
    renders(&db, "char(8)", "'ab'", "ab");
    renders(&db, "char(8)", "'a b  '", "a b");
}

fn numbers_render() {
    let db = Db::new();
    renders(&db, "smallint", "-32768", "-32768");
    renders(&db, "int", "42", "42");
    renders(&db, "int", "-2147483648", "-2147483648");
    renders(&db, "bigint", "9223372036854775807", "9223372036854775807");
    renders(&db, "numeric", "1.50", "1.50");
    renders(&db, "numeric(10,3)", "1.5", "1.500");
    renders(&db, "numeric", "-0.000", "0.000");
    renders(&db, "numeric", "1e20", "100000000000000000000");
    renders(&db, "numeric", "'NaN'", "NaN");
    renders(&db, "numeric", "'Infinity'", "Infinity");
}

fn booleans_and_uuids_render() {
    let db = Db::new();
    renders(&db, "bool", "true", "true");
    renders(&db, "bool", "'f'", "false");
    renders(
        &db,
        "uuid",
        "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    );
}

fn enums_render() {
    let db = Db::new();
    db.session()
        .exec("CREATE TYPE mood AS ENUM ('sad', 'quite happy')");
    renders(&db, "mood", "'quite happy'", "quite happy");
    let mut s = db.session();
    s.exec("ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'");
    renders(&db, "mood", "'blue'", "blue");
}

fn dates_and_times_render_iso_and_utc() {
    let db = Db::new();
    renders(&db, "date", "'2024-02-03'", "2024-02-03");
    renders(&db, "date", "'0044-03-15 BC'", "0044-03-15 BC");
    renders(&db, "date", "'infinity'", "infinity");
    renders(
        &db,
        "timestamp",
        "'2024-02-03 04:05:06.789'",
        "2024-02-03 04:05:06.789",
    );
    renders(&db, "timestamp", "'-infinity'", "-infinity");
    renders(
        &db,
        "timestamptz",
        "'2024-02-03 04:05:06+05:45'",
        "2024-02-02 22:20:06+00",
    );
    renders(
        &db,
        "timestamptz",
        "'2024-07-03 04:05:06.5 Europe/Berlin'",
        "2024-07-03 02:05:06.5+00",
    );
    // read in the session's zone, written in UTC
    renders(
        &db,
        "timestamptz",
        "'2024-02-03 05:45:00'",
        "2024-02-03 00:00:00+00",
    );
    // the session's own settings come back
    let mut s = odd_session(&db);
    s.exec("CREATE TABLE t (c timestamptz); SELECT fence_table('t', '{c}')");
    db.refused(&mut s, "INSERT INTO t VALUES (now())", "LH003");
    assert_eq!(s.text("SHOW datestyle").as_deref(), Some("German, DMY"));
    assert_eq!(s.text("SHOW timezone").as_deref(), Some("Asia/Kathmandu"));
    assert_eq!(
        s.text("SELECT '2024-02-03 00:00+00'::timestamptz")
            .as_deref(),
        Some("03.02.2024 05:45:00 +0545")
    );
}

fn domains_render() {
    let db = Db::new();
    db.session().exec(
        "CREATE DOMAIN code AS text CHECK (value <> ''); CREATE DOMAIN inner_code AS code; CREATE DOMAIN n AS int;
         CREATE TYPE mood AS ENUM ('ok'); CREATE DOMAIN m AS mood; CREATE DOMAIN d AS timestamptz;
         CREATE DOMAIN padded AS char(5)",
    );
    renders(&db, "code", "'a'", "a");
    renders(&db, "inner_code", "'b'", "b");
    renders(&db, "n", "7", "7");
    renders(&db, "m", "'ok'", "ok");
    renders(&db, "d", "'2024-02-03 05:45:00'", "2024-02-03 00:00:00+00");
    renders(&db, "padded", "'ab'", "ab");
}

/// Types whose text hangs on settings, or that are no plain value, with a value each.
const OTHER_TYPES: [(&str, &str); 18] = [
    ("float8", "1.5"),
    ("float4", "1.5"),
    ("interval", "'1 day'"),
    ("json", "'1'"),
    ("jsonb", "'1'"),
    ("int[]", "'{1}'"),
    ("text[]", "'{a}'"),
    ("bytea", "'a'"),
    ("time", "'12:00'"),
    ("timetz", "'12:00+00'"),
    ("money", "1"),
    ("inet", "'::1'"),
    ("point", "'(1,1)'"),
    ("int4range", "'[1,2)'"),
    ("tsvector", "'a'"),
    ("pair", "'(1,2)'"),
    ("half", "0.5"),
    ("bits", "B'1'"),
];

fn other_types(db: &Db) -> Session {
    let mut s = db.session();
    s.exec(
        "CREATE TYPE pair AS (a int, b int); CREATE DOMAIN half AS float8; CREATE DOMAIN bits AS varbit",
    );
    s
}

fn other_types_are_refused() {
    let db = Db::new();
    let mut s = other_types(&db);
    for (kind, value) in OTHER_TYPES {
        s.exec(&format!("CREATE TABLE t (c {kind}, id int)"));
        db.refused(&mut s, "SELECT fence_table('t', 'x:{id}:{c}')", "0A000")
            .hints_at("generated");
        assert_eq!(
            s.one::<i64>("SELECT count(*) FROM pg_trigger WHERE tgrelid = 't'::regclass"),
            0,
            "{kind}"
        );
        s.exec(&format!("INSERT INTO t VALUES ({value}, 1)"));
        s.exec("DROP TABLE t");
    }
}

fn other_types_are_refused_at_the_write() {
    let db = Db::new();
    let mut s = other_types(&db);
    for (kind, value) in OTHER_TYPES {
        s.exec(&format!(
            "CREATE TABLE t (c {kind});
             CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fenced('x:{{c}}')"
        ));
        db.refused(&mut s, &format!("INSERT INTO t VALUES ({value})"), "0A000")
            .hints_at("generated");
        s.exec("DROP TABLE t");
    }
}

fn several_columns_and_literals_render() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (a int, b text, c date); SELECT fence_table('t', 'é/{b}/{a}-{a}/{c}!')");
    let resource = "é/it/7-7/2024-02-03!";
    let insert = "INSERT INTO t VALUES (7, 'it', '2024-02-03')";
    db.refused(&mut s, insert, "LH003").details(resource);
    let token = s.acquire(resource);
    s.exec(&format!(
        "BEGIN; SELECT fence('{resource}', {token}); {insert}; COMMIT"
    ));
    // columns that stand side by side
    s.exec("SELECT fence_table('t', '{a}{b}')");
    let token = s.acquire("7it");
    s.exec(&format!(
        "BEGIN; SELECT fence('7it', {token}); UPDATE t SET c = NULL; COMMIT"
    ));
}

fn braces_are_literal_when_doubled() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (c text)");
    for (template, resource) in [
        ("a{{b}}", "a{b}"),
        ("{{{c}}}", "{X}"),
        ("{{c}}", "{c}"),
        ("{{", "{"),
        ("}}", "}"),
        ("}}{{{c}", "}{X"),
    ] {
        s.exec(&format!("SELECT fence_table('t', '{template}')"));
        db.refused(&mut s, "INSERT INTO t VALUES ('X')", "LH003")
            .details(resource);
        let token = s.acquire(resource);
        s.exec(&format!(
            "BEGIN; SELECT fence('{resource}', {token}); INSERT INTO t VALUES ('X'); COMMIT"
        ));
        s.release(resource, token);
    }
    // a template of literals only is a constant, which fences TRUNCATE
    s.exec("SELECT fence_table('t', '{{all}}')");
    db.refused(&mut s, "TRUNCATE t", "LH003").details("{all}");
}

fn odd_column_names_render() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (\"Weird Col\" int, \"it's \"\"q\"\"\" int, \"naïve\" int, \" a \" int, \"A\" int, a int)");
    let cases = [
        ("{Weird Col}", "1"),
        ("{it's \"q\"}", "2"),
        ("{naïve}", "3"),
        ("{ a }", "4"),
        ("{A}", "5"),
        ("{a}", "6"),
    ];
    for (template, value) in cases {
        s.exec(&format!(
            "SELECT fence_table('t', 'v:{}')",
            template.replace('\'', "''")
        ));
        db.refused(&mut s, "INSERT INTO t VALUES (1, 2, 3, 4, 5, 6)", "LH003")
            .details(&format!("v:{value}"));
    }
}

const BAD_TEMPLATES: [&str; 12] = [
    "a{", "a}", "{", "}", "{}", "a{c", "a{c}}", "{{c}", "{c{c}}", "{a{{b}}}", "{c}{", "}{",
];

fn bad_templates_are_refused() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (c text)");
    for template in BAD_TEMPLATES {
        db.refused(
            &mut s,
            &format!("SELECT fence_table('t', '{template}')"),
            "42601",
        );
        assert_eq!(
            s.one::<i64>("SELECT count(*) FROM pg_trigger WHERE tgrelid = 't'::regclass"),
            0,
            "{template}"
        );
    }
    s.exec("INSERT INTO t VALUES ('free')");
}

fn bad_templates_are_refused_at_the_write() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (c text)");
    for template in BAD_TEMPLATES {
        s.exec(&format!(
            "CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fenced('{template}')"
        ));
        db.refused(&mut s, "INSERT INTO t VALUES ('c')", "42601");
        s.exec("DROP TRIGGER x ON t");
    }
}

fn unknown_columns_are_refused() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (c text, gone int); ALTER TABLE t DROP gone");
    for template in [
        "{nowhere}",
        "{c}{nowhere}",
        "{gone}",
        "{c }",
        "{\"c\"}",
        "{........pg.dropped.2........}",
    ] {
        db.refused(
            &mut s,
            &format!("SELECT fence_table('t', '{template}')"),
            "42703",
        );
    }
    for column in ["nowhere", "gone", "........pg.dropped.2........"] {
        db.refused(
            &mut s,
            &format!("SELECT fence_table('t', 'r', '{column}')"),
            "42703",
        );
    }
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM pg_trigger WHERE tgrelid = 't'::regclass"),
        0
    );
}

fn null_in_a_column_is_refused() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (a int, b text); INSERT INTO t VALUES (NULL, 'x'), (1, 'y')");
    s.exec("SELECT fence_table('t', '{a}/{b}')");
    let token = s.acquire("1/y");
    s.exec(&format!("SET leasehold.token = '{token}'"));
    db.refused(&mut s, "INSERT INTO t VALUES (NULL, 'x')", "22004");
    db.refused(&mut s, "INSERT INTO t VALUES (1, NULL)", "22004");
    db.refused(&mut s, "UPDATE t SET b = NULL WHERE a = 1", "22004");
    // the old row has one
    db.refused(
        &mut s,
        "UPDATE t SET a = 1, b = 'y' WHERE a IS NULL",
        "22004",
    );
    db.refused(&mut s, "DELETE FROM t WHERE a IS NULL", "22004");
}

fn rendered_names_have_a_length() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (c text); SELECT fence_table('t', 'é{c}')");
    // two bytes of literal leave 253
    let longest = format!("é{}", "x".repeat(253));
    let token = s.acquire(&longest);
    s.exec(&format!(
        "SET leasehold.token = '{token}'; INSERT INTO t VALUES (repeat('x', 253))"
    ));
    for value in [
        "repeat('x', 254)",
        "repeat('é', 127)",
        "repeat('x', 100000)",
    ] {
        db.refused(&mut s, &format!("INSERT INTO t VALUES ({value})"), "22001");
    }
    // one that is compressed and stored out of line
    s.exec("SELECT unfence_table('t'); ALTER TABLE t ALTER c SET STORAGE EXTERNAL");
    s.exec("INSERT INTO t VALUES (repeat('y', 50000)); SELECT fence_table('t', 'é{c}')");
    db.refused(&mut s, "DELETE FROM t WHERE c LIKE 'y%'", "22001");
    // one that no row can fit
    s.exec(&format!(
        "SELECT fence_table('t', '{}{{c}}')",
        "x".repeat(256)
    ));
    db.refused(&mut s, "INSERT INTO t VALUES ('')", "22001");
}

fn rendered_empty_name_is_refused() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (c text); SELECT fence_table('t', '{c}')");
    db.refused(&mut s, "INSERT INTO t VALUES ('')", "22023");
    s.exec("CREATE TABLE u (c char(4)); SELECT fence_table('u', '{c}')");
    db.refused(&mut s, "INSERT INTO u VALUES ('')", "22023");
}
