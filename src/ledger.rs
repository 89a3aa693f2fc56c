//! The ledger: what is durable. One row per resource in `leasehold.ledger`, one row about the server
//! that wrote it in `leasehold.server`, and the sequence `leasehold.token_seq`.
//!
//! This module only reads and writes; what a row means for a lease is decided by `resources`.

use std::cell::Cell;
use std::ffi::CStr;
use std::thread::LocalKey;

use crate::errors::{Answer, no_ledger};
use crate::pg::spi::{Arg, Statement};
use crate::pg::{self, Oid};

/// The last durable lease of a resource.
pub struct Row {
    /// T_max.
    pub token: i64,
    /// The longest TTL of that lease.
    pub ttl_us: i64,
    /// It was released.
    pub released: bool,
    /// System identifier and database of the server that granted it.
    pub home: (i64, Oid),
    /// The label of its holder.
    pub holder: Vec<u8>,
    /// The role that it belongs to.
    pub role: Oid,
    /// Wall clock of the grant.
    pub granted_at: i64,
}

/// What a new grant writes.
pub struct NewRow<'a> {
    pub resource: &'a [u8],
    pub token: i64,
    pub ttl_us: i64,
    pub holder: &'a [u8],
    pub role: Oid,
    pub granted_at: i64,
}

/// The server that the ledger was last written by.
pub struct Server {
    /// System identifier and database.
    pub home: (i64, Oid),
    /// Its timeline.
    pub timeline: u32,
    /// Leases of tokens up to this one were lost with a promotion.
    pub lost_up_to: i64,
}

thread_local! {
    static LEDGER: Cell<Oid> = const { Cell::new(0) };
    static INDEX: Cell<Oid> = const { Cell::new(0) };
}

/// The ledger's OID, which is part of every key. 55000 when the extension is not installed.
pub fn oid() -> Answer<Oid> {
    known(&LEDGER, c"ledger")
}

/// The OID of the ledger's only index, its primary key.
fn index() -> Answer<Oid> {
    known(&INDEX, c"ledger_pkey")
}

/// The OID of a relation that was found last, if it is still there, or else looked up by name.
fn known(last: &'static LocalKey<Cell<Oid>>, name: &CStr) -> Answer<Oid> {
    let oid = last.get();
    if oid != 0 && pg::relation_exists(oid) {
        return Ok(oid);
    }
    let oid = pg::relation(c"leasehold", name).ok_or_else(no_ledger)?;
    last.set(oid);
    Ok(oid)
}

fn owner(ledger: Oid) -> Answer<Oid> {
    pg::relation_owner(ledger).ok_or_else(no_ledger)
}

/// This server and database.
pub fn here() -> (i64, Oid) {
    (pg::system_identifier(), pg::database())
}

/// The row of a resource as committed by now.
pub fn read(ledger: Oid, resource: &[u8]) -> Answer<Option<Row>> {
    Ok(pg::row::find(ledger, index()?, resource, |fields| Row {
        token: fields.i64(2).unwrap_or_default(),
        ttl_us: fields.i64(3).unwrap_or_default(),
        released: fields.bool(4).unwrap_or_default(),
        home: (
            fields.i64(5).unwrap_or_default(),
            fields.oid(6).unwrap_or_default(),
        ),
        holder: fields.bytes(7).unwrap_or_default(),
        role: fields.oid(8).unwrap_or_default(),
        granted_at: fields.i64(9).unwrap_or_default(),
    }))
}

static UNRELEASED: Statement = Statement::new(
    c"SELECT resource, token, ttl_us, released, system, database, holder, role, granted_at
        FROM leasehold.ledger WHERE NOT released",
);

/// All rows that are not marked released.
pub fn unreleased(ledger: Oid) -> Answer<Vec<(Vec<u8>, Row)>> {
    Ok(UNRELEASED.read(owner(ledger)?, &[], |row| {
        (row.bytes(1).unwrap_or_default(), row_of(row, 2))
    }))
}

/// The columns of a row from `first` on; none of them can be NULL.
fn row_of(row: &pg::spi::Row, first: i32) -> Row {
    Row {
        token: row.i64(first).unwrap_or_default(),
        ttl_us: row.i64(first + 1).unwrap_or_default(),
        released: row.bool(first + 2).unwrap_or_default(),
        home: (
            row.i64(first + 3).unwrap_or_default(),
            row.oid(first + 4).unwrap_or_default(),
        ),
        holder: row.bytes(first + 5).unwrap_or_default(),
        role: row.oid(first + 6).unwrap_or_default(),
        granted_at: row.i64(first + 7).unwrap_or_default(),
    }
}

/// Writes a grant, in the running transaction: over the resource's row, or as its first one. Nobody else
/// writes that row: the grant in progress keeps other grants away, the fence renewals, and `marked_now`
/// says that the worker may be at it, so that its transaction must be waited for. False when the
/// ledger knows a newer grant: T_max never falls, here too.
pub fn write(ledger: Oid, new: &NewRow, marked_now: bool) -> Answer<bool> {
    let (system, database) = here();
    let values = [
        Arg::Text(new.resource),
        Arg::I64(new.token),
        Arg::I64(new.ttl_us),
        Arg::Bool(false),
        Arg::I64(system),
        Arg::Oid(database),
        Arg::Text(new.holder),
        Arg::Oid(new.role),
        Arg::Timestamp(new.granted_at),
    ];
    if marked_now {
        return Ok(REPLACE.write(owner(ledger)?, &values) == 1);
    }
    Ok(pg::row::put(ledger, index()?, &values, |old| {
        old.i64(2).is_some_and(|token| token < new.token)
    }))
}

static REPLACE: Statement = Statement::new(
    c"UPDATE leasehold.ledger
         SET token = $2, ttl_us = $3, released = $4, system = $5, database = $6, holder = $7,
             role = $8, granted_at = $9
       WHERE resource OPERATOR(pg_catalog.=) $1 AND token OPERATOR(pg_catalog.<) $2",
);

// Never waits: the row is locked by another transaction that lengthens this lease.
static LENGTHEN: Statement = Statement::new(
    c"WITH lease AS (SELECT resource FROM leasehold.ledger
                      WHERE resource OPERATOR(pg_catalog.=) $1 AND token OPERATOR(pg_catalog.=) $2
                        FOR UPDATE SKIP LOCKED)
      UPDATE leasehold.ledger AS l SET ttl_us = GREATEST(l.ttl_us, $3)
        FROM lease WHERE l.resource OPERATOR(pg_catalog.=) lease.resource",
);

/// Makes a longer TTL of a lease durable, in the running transaction. False where its row is locked.
pub fn lengthen(ledger: Oid, resource: &[u8], token: i64, ttl_us: i64) -> Answer<bool> {
    let lengthened = LENGTHEN.write(
        owner(ledger)?,
        &[Arg::Text(resource), Arg::I64(token), Arg::I64(ttl_us)],
    );
    Ok(lengthened == 1)
}

/// Marks a lease as released, in the running transaction, for a resource whose entry says that it is
/// being marked: so nobody else writes the row. False where the row is another lease's.
pub fn mark_released(ledger: Oid, resource: &[u8], token: i64) -> Answer<bool> {
    let column = 4;
    Ok(pg::row::set_true(
        ledger,
        index()?,
        resource,
        column,
        |row| row.i64(2) == Some(token),
    ))
}

static POSITION: Statement = Statement::new(
    c"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM leasehold.token_seq",
);

/// The last token that can have been handed out, by the sequence.
pub fn token_position(ledger: Oid) -> Answer<i64> {
    let rows = POSITION.read(owner(ledger)?, &[], |row| row.i64(1).unwrap_or_default());
    Ok(rows.into_iter().next().unwrap_or_default())
}

static RESERVE: Statement = Statement::new(
    c"SELECT pg_catalog.setval('leasehold.token_seq'::pg_catalog.regclass, $1, true)",
);

/// Moves the sequence, and waits until that is on disk. Not undone by a rollback.
pub fn reserve_tokens(ledger: Oid, up_to: i64) -> Answer<()> {
    RESERVE.write(owner(ledger)?, &[Arg::I64(up_to)]);
    pg::flush_own_wal();
    Ok(())
}

static SERVER: Statement =
    Statement::new(c"SELECT system, database, timeline, lost_up_to FROM leasehold.server");

/// The server that the ledger was last written by, if it says.
pub fn server(ledger: Oid) -> Answer<Option<Server>> {
    let rows = SERVER.read(owner(ledger)?, &[], |row| Server {
        home: (
            row.i64(1).unwrap_or_default(),
            row.oid(2).unwrap_or_default(),
        ),
        timeline: row.i64(3).and_then(|t| u32::try_from(t).ok()).unwrap_or(0),
        lost_up_to: row.i64(4).unwrap_or_default(),
    });
    Ok(rows.into_iter().next())
}

// Never waits: where another transaction is at it, that one will do.
static MOVE_IN: Statement = Statement::new(
    c"WITH here AS (SELECT lost_up_to FROM leasehold.server FOR UPDATE SKIP LOCKED)
      UPDATE leasehold.server AS s SET system = $1, database = $2, timeline = $3,
             lost_up_to = GREATEST(s.lost_up_to, $4)
        FROM here",
);

/// Makes this server, database and timeline the ledger's, in the running transaction. False when
/// another transaction is doing so.
pub fn move_in(ledger: Oid, lost_up_to: i64) -> Answer<bool> {
    let (system, database) = here();
    let moved = MOVE_IN.write(
        owner(ledger)?,
        &[
            Arg::I64(system),
            Arg::Oid(database),
            Arg::I64(i64::from(pg::timeline())),
            Arg::I64(lost_up_to),
        ],
    );
    Ok(moved == 1)
}

static LONGEST: Statement = Statement::new(c"SELECT pg_catalog.max(ttl_us) FROM leasehold.ledger");

/// The longest TTL that the ledger knows.
pub fn longest_ttl_us(ledger: Oid) -> Answer<i64> {
    let rows = LONGEST.read(owner(ledger)?, &[], |row| row.i64(1).unwrap_or_default());
    Ok(rows.into_iter().next().unwrap_or_default())
}
