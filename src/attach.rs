//! `fence_table` and `unfence_table`: the triggers of a fenced table.
//!
//! Row triggers of a partitioned table are cloned to its partitions by PostgreSQL; those of a plain
//! inheritance parent and all TRUNCATE triggers are not, so they are made for every table below it
//! that exists now. The SQL functions are declared with a search_path of pg_catalog.

use crate::errors::{self, Answer, Refusal, code, shown};
use crate::pg::fmgr::{Call, Value};
use crate::pg::spi::{self, Arg};
use crate::pg::{self, Oid, trigger as columns};
use crate::trigger::{Resources, checked_token_column, column_refusal};
use crate::{api, sql_function};

sql_function!(
    leasehold_fence_table,
    pg_finfo_leasehold_fence_table,
    fence_table
);
sql_function!(
    leasehold_unfence_table,
    pg_finfo_leasehold_unfence_table,
    unfence_table
);

/// '~' sorts behind the letters and digits that names begin with.
const ROW_TRIGGER: &str = "~leasehold_fenced";
const TRUNCATE_TRIGGER: &str = "~leasehold_fenced_truncate";
/// NAMEDATALEN - 1
const NAME_BYTES_MAX: usize = 63;

/// Names in SQL are bytes of the server's encoding; `shown` is for messages.
struct Table {
    oid: Oid,
    /// Schema-qualified and quoted.
    sql_name: Vec<u8>,
    /// The same for messages.
    name: String,
    kind: u8,
    /// Its row triggers come from the parent.
    is_partition: bool,
}

/// fence_table(target regclass, resource text, token_column name, strict boolean) RETURNS void
fn fence_table(call: &Call) -> Answer<Value> {
    api::check_preloaded()?;
    if pg::in_recovery() {
        return Err(errors::on_standby("fence_table()"));
    }
    let target = call.oid(0).ok_or_else(|| errors::null_argument("target"))?;
    let resource = call
        .bytes(1)
        .ok_or_else(|| errors::null_argument("resource"))?;
    let token_column = call.name(2);
    let strict = call
        .bool(3)
        .ok_or_else(|| errors::null_argument("strict"))?;
    let resources = Resources::parse(&resource)?;
    let tables = tables_below(target)?;
    refuse_partition(target, &tables)?;
    for table in &tables {
        check_columns(table, &resources, token_column.as_deref())?;
    }
    take_off(&tables)?;
    let mut arguments = vec![resource];
    if let Some(column) = &token_column {
        arguments.push([b"token_column=", column.as_slice()].concat());
    }
    if strict {
        arguments.push(b"strict".to_vec());
    }
    put_on(&tables, &arguments)?;
    Ok(Value::Void)
}

/// unfence_table(target regclass) RETURNS void
fn unfence_table(call: &Call) -> Answer<Value> {
    api::check_preloaded()?;
    if pg::in_recovery() {
        return Err(errors::on_standby("unfence_table()"));
    }
    let target = call.oid(0).ok_or_else(|| errors::null_argument("target"))?;
    let tables = tables_below(target)?;
    refuse_partition(target, &tables)?;
    take_off(&tables)?;
    Ok(Value::Void)
}

/// A partition's fence is that of the table at which it was put on. 55000.
fn refuse_partition(target: Oid, tables: &[Table]) -> Answer<()> {
    let Some(parent) = fenced_by_parent(target) else {
        return Ok(());
    };
    let name = tables.first().map_or("", |table| table.name.as_str());
    Err(Refusal::new(
        code::NOT_IN_PREREQUISITE_STATE,
        format!("table {name} is fenced as a partition"),
    )
    .detail(format!("The fence was put on {parent}."))
    .hint(format!(
        "Its whole table can be unfenced: SELECT unfence_table({});",
        errors::literal(parent.as_bytes())
    )))
}

/// The table and everything that inherits from it, the table first. 42809 for what can't be fenced.
fn tables_below(target: Oid) -> Answer<Vec<Table>> {
    let tables = spi::query(
        c"WITH RECURSIVE below(oid, depth) AS (
              SELECT $1, 0
            UNION
              SELECT i.inhrelid, depth + 1 FROM pg_inherits i JOIN below ON i.inhparent = below.oid)
          SELECT c.oid, format('%I.%I', n.nspname, c.relname), c.relkind::text, c.relispartition
            FROM (SELECT oid, min(depth) AS depth FROM below GROUP BY oid) b
            JOIN pg_class c ON c.oid = b.oid JOIN pg_namespace n ON n.oid = c.relnamespace
           ORDER BY b.depth, c.oid",
        &[Arg::Oid(target)],
        |row| Table {
            oid: row.oid(1).unwrap_or_default(),
            sql_name: row.bytes(2).unwrap_or_default(),
            name: shown(&row.bytes(2).unwrap_or_default()),
            kind: row.bytes(3).and_then(|k| k.first().copied()).unwrap_or(0),
            is_partition: row.bool(4).unwrap_or(false),
        },
    );
    let Some(first) = tables.first() else {
        return Err(Refusal::new(
            "42P01",
            format!("relation with OID {target} does not exist"),
        )
        .detail("There is no such table.")
        .hint("Pass the name of a table."));
    };
    if let Some(own) = tables.iter().find(|t| t.name.starts_with("leasehold.")) {
        return Err(Refusal::new(
            code::WRONG_OBJECT_TYPE,
            format!("{} is leasehold's own", own.name),
        )
        .detail("The fence cannot stand before what it rests on.")
        .hint("Fence the tables of the application."));
    }
    if let Some(other) = tables.iter().find(|t| !matches!(t.kind, b'r' | b'p')) {
        return Err(Refusal::new(
            code::WRONG_OBJECT_TYPE,
            format!("{} is not a table", other.name),
        )
        .detail(format!(
            "Only tables and partitioned tables can be fenced, and {} is, or is inherited by, another kind of relation.",
            first.name
        ))
        .hint("Fence the tables that hold the rows; writes through a view arrive there too."));
    }
    Ok(tables)
}

fn check_columns(table: &Table, resources: &Resources, token_column: Option<&[u8]>) -> Answer<()> {
    for column in resources.columns() {
        columns::check_column(table.oid, &column)
            .map_err(|error| column_refusal(&shown(&column), &table.name, error))?;
    }
    if let Some(column) = token_column {
        checked_token_column(table.oid, &table.name, column)?;
    }
    Ok(())
}

/// The table at which a partition's fence was put on, if it was not here.
fn fenced_by_parent(target: Oid) -> Option<String> {
    spi::query(
        c"WITH RECURSIVE up(oid) AS (
              SELECT t.oid FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
               WHERE t.tgrelid = $1 AND p.prosrc = 'leasehold_fenced' AND t.tgparentid <> 0
            UNION
              SELECT t.tgparentid FROM pg_trigger t JOIN up ON t.oid = up.oid)
          SELECT format('%I.%I', n.nspname, c.relname) FROM up
            JOIN pg_trigger t ON t.oid = up.oid JOIN pg_class c ON c.oid = t.tgrelid
            JOIN pg_namespace n ON n.oid = c.relnamespace
           WHERE t.tgparentid = 0",
        &[Arg::Oid(target)],
        |row| shown(&row.bytes(1).unwrap_or_default()),
    )
    .pop()
}

/// Drops the fence's own triggers; those that came from a parent go with the parent's.
fn take_off(tables: &[Table]) -> Answer<()> {
    for table in tables {
        let names = spi::query(
            c"SELECT quote_ident(t.tgname) FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
               WHERE t.tgrelid = $1 AND p.prosrc = 'leasehold_fenced' AND t.tgparentid = 0",
            &[Arg::Oid(table.oid)],
            |row| row.bytes(1).unwrap_or_default(),
        );
        for name in names {
            let sql = [b"DROP TRIGGER ", &name[..], b" ON ", &table.sql_name].concat();
            spi::ddl(&pg::c_string(sql));
        }
    }
    Ok(())
}

fn put_on(tables: &[Table], arguments: &[Vec<u8>]) -> Answer<()> {
    let function = fenced_function()?;
    let arguments: Vec<Vec<u8>> = arguments.iter().map(|a| pg::quote_literal(a)).collect();
    let arguments = arguments.join(&b", "[..]);
    let row_trigger = name_behind_others(tables)?;
    for (i, table) in tables.iter().enumerate() {
        let truncate = (TRUNCATE_TRIGGER.as_bytes(), "TRUNCATE", "STATEMENT");
        let rows = (&row_trigger[..], "INSERT OR UPDATE OR DELETE", "ROW");
        let is_cloned = i > 0 && table.is_partition;
        for (name, events, each) in [Some(truncate), (!is_cloned).then_some(rows)]
            .into_iter()
            .flatten()
        {
            let sql = [
                b"CREATE TRIGGER ",
                &pg::quote_identifier(name)[..],
                format!(" BEFORE {events} ON ").as_bytes(),
                &table.sql_name,
                format!(" FOR EACH {each} EXECUTE FUNCTION ").as_bytes(),
                &function,
                b"(",
                &arguments,
                b")",
            ]
            .concat();
            spi::ddl(&pg::c_string(sql));
        }
    }
    Ok(())
}

/// The trigger function by its full name, in the schema that the extension was created in.
fn fenced_function() -> Answer<Vec<u8>> {
    spi::query(
        c"SELECT format('%I.%I', n.nspname, p.proname)
            FROM pg_extension e
            JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
             AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
            JOIN pg_proc p ON p.oid = d.objid JOIN pg_namespace n ON n.oid = p.pronamespace
           WHERE e.extname = 'leasehold' AND p.prosrc = 'leasehold_fenced'",
        &[],
        |row| row.bytes(1).unwrap_or_default(),
    )
    .pop()
    .ok_or_else(errors::no_ledger)
}

/// BEFORE triggers fire in the order of their names, and ours must see what the others made of the
/// row. 55000 when no name is left behind the last one.
fn name_behind_others(tables: &[Table]) -> Answer<Vec<u8>> {
    let mut last = Vec::new();
    for table in tables {
        let names = spi::query(
            c"SELECT t.tgname::text FROM pg_trigger t
               WHERE t.tgrelid = $1 AND NOT t.tgisinternal AND t.tgtype & 3 = 3",
            &[Arg::Oid(table.oid)],
            |row| row.bytes(1).unwrap_or_default(),
        );
        last = names.into_iter().fold(last, Vec::max);
    }
    if last.as_slice() < ROW_TRIGGER.as_bytes() {
        return Ok(ROW_TRIGGER.as_bytes().to_vec());
    }
    if last.len() < NAME_BYTES_MAX {
        last.push(b'~');
        return Ok(last);
    }
    Err(Refusal::new(
        code::NOT_IN_PREREQUISITE_STATE,
        "no trigger name sorts after the table's other BEFORE triggers",
    )
    .detail(format!(
        "The last of them is \"{}\", which has the longest name possible.",
        shown(&last)
    ))
    .hint("Rename that trigger with ALTER TRIGGER."))
}
