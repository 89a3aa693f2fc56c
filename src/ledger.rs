//! The ledger: what is durable. One row per resource in `leasehold.ledger`, the sequence
//! `leasehold.token_seq`, and some numbers about the server that writes them.
//!
//! This module only reads and writes; what a row means for a lease is decided by `resources`.
//!
//! A row of the ledger is written in place (`pg::row`), so what is written to it stays even if the transaction
//! is rolled back. All of it may: T_max rises with a grant that is rolled back, a longer TTL or a lease that
//! did not come about only delay the next grant after a restart, and only leases that are over are marked.
//!
//! Numbers that must be durable at once, whatever becomes of the transaction, are sequences: `token_seq`,
//! `memory_ttl`, `home_timeline` and the others. A grant waits for the flush of what it has raised there.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::CStr;
use std::thread::LocalKey;

use leasehold_core::name::HOLDER_BYTES_MAX;

use crate::errors::{Answer, no_ledger};
use crate::pg::spi::{Arg, Statement};
use crate::pg::{self, Oid};
use crate::rights;
use crate::table::Request;

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
    /// The (sub)transaction of the grant: the row is there before that commits.
    pub granted_by: u64,
    /// The (sub)transaction that broke the lease, 0 for none: so is that.
    pub broken_by: u64,
    /// What its request was called.
    pub request: Option<Request>,
}

/// What a new grant writes.
pub struct NewRow<'a> {
    pub resource: &'a [u8],
    pub token: i64,
    pub ttl_us: i64,
    pub holder: &'a [u8],
    pub role: Oid,
    pub granted_at: i64,
    pub request: Option<Request>,
}

thread_local! {
    static LEDGER: Cell<Oid> = const { Cell::new(0) };
    static INDEX: Cell<Oid> = const { Cell::new(0) };
    static RULE: Cell<Oid> = const { Cell::new(0) };
}

/// The ledger's OID, which is part of every key. 55000 when the extension is not installed.
pub fn oid() -> Answer<Oid> {
    known(&LEDGER, c"ledger")
}

/// The OID of the ledger's only index, its primary key.
fn index() -> Answer<Oid> {
    known(&INDEX, c"ledger_pkey")
}

/// The OID of a relation that was found last, until it changes; or else looked up by name.
fn known(last: &'static LocalKey<Cell<Oid>>, name: &CStr) -> Answer<Oid> {
    let oid = last.get();
    if oid != 0 {
        return Ok(oid);
    }
    pg::hooks::watch_catalogs();
    let oid = pg::relation(c"leasehold", name).ok_or_else(no_ledger)?;
    last.set(oid);
    Ok(oid)
}

/// A relation has changed, was dropped or made; 0: any of them. Neither raises nor allocates.
pub fn relation_changed(relation: Oid) {
    if relation == 0 || relation == LEDGER.get() || relation == INDEX.get() {
        LEDGER.set(0);
        INDEX.set(0);
    }
    // where it is not known which it is, it may be any
    if relation == 0 || RULE.get() == 0 || relation == RULE.get() {
        rights::rules_changed();
    }
    if relation == 0 || relation == RULE.get() {
        RULE.set(0);
    }
}

fn owner(ledger: Oid) -> Answer<Oid> {
    pg::relation_owner(ledger).ok_or_else(no_ledger)
}

/// This server and database.
pub fn here() -> (i64, Oid) {
    (pg::system_identifier(), pg::database())
}

// the columns of leasehold.ledger
const TOKEN: usize = 2;
const TTL: usize = 3;
const SYSTEM: usize = 4;
const GRANTED_AT: usize = 5;
const GRANTED_BY: usize = 6;
const BROKEN_BY: usize = 7;
const REQUEST: usize = 8;
const DATABASE: usize = 9;
const ROLE: usize = 10;
const HOLDER_BYTES: usize = 11;
const RELEASED: usize = 12;
const HAS_REQUEST: usize = 13;
const HOLDER: usize = 14;

/// The row of a resource as it is now.
pub fn read(ledger: Oid, resource: &[u8]) -> Answer<Option<Row>> {
    Ok(pg::row::find(ledger, index()?, resource, |fields| Row {
        token: fields.i64(TOKEN).unwrap_or_default(),
        ttl_us: fields.i64(TTL).unwrap_or_default(),
        released: fields.bool(RELEASED).unwrap_or_default(),
        home: (
            fields.i64(SYSTEM).unwrap_or_default(),
            fields.oid(DATABASE).unwrap_or_default(),
        ),
        holder: unpadded(
            fields.bytes(HOLDER).unwrap_or_default(),
            fields.i16(HOLDER_BYTES).unwrap_or_default(),
        ),
        role: fields.oid(ROLE).unwrap_or_default(),
        granted_at: fields.i64(GRANTED_AT).unwrap_or_default(),
        granted_by: fields.i64(GRANTED_BY).unwrap_or_default() as u64,
        broken_by: fields.i64(BROKEN_BY).unwrap_or_default() as u64,
        request: match fields.bool(HAS_REQUEST) {
            Some(true) => fields.uuid(REQUEST),
            _ => None,
        },
    }))
}

/// All holders take the same room, so that a row can be overwritten by the next.
fn padded(holder: &[u8]) -> Vec<u8> {
    let mut padded = holder.to_vec();
    padded.resize(HOLDER_BYTES_MAX.max(holder.len()), b' ');
    padded
}

fn unpadded(mut holder: Vec<u8>, bytes: i16) -> Vec<u8> {
    holder.truncate(usize::try_from(bytes).unwrap_or_default());
    holder
}

static UNRELEASED: Statement = Statement::new(
    c"SELECT resource, token, ttl_us, released, system, database, holder, holder_bytes, role, granted_at,
             granted_by, broken_by
        FROM leasehold.ledger WHERE NOT released",
);

/// All rows that are not marked released; without what their requests were called.
pub fn unreleased(ledger: Oid) -> Answer<Vec<(Vec<u8>, Row)>> {
    Ok(UNRELEASED.read(owner(ledger)?, &[], |row| {
        let values = Row {
            token: row.i64(2).unwrap_or_default(),
            ttl_us: row.i64(3).unwrap_or_default(),
            released: row.bool(4).unwrap_or_default(),
            home: (
                row.i64(5).unwrap_or_default(),
                row.oid(6).unwrap_or_default(),
            ),
            holder: unpadded(
                row.bytes(7).unwrap_or_default(),
                row.i16(8).unwrap_or_default(),
            ),
            role: row.oid(9).unwrap_or_default(),
            granted_at: row.i64(10).unwrap_or_default(),
            granted_by: row.i64(11).unwrap_or_default() as u64,
            broken_by: row.i64(12).unwrap_or_default() as u64,
            request: None,
        };
        (row.bytes(1).unwrap_or_default(), values)
    }))
}

/// Writes a grant: over the resource's row, at once, or as its first one, with the transaction. Nobody
/// else writes a row of another lease meanwhile: the caller holds the fence. False when the ledger knows a
/// newer grant: T_max never falls, here too.
pub fn write(ledger: Oid, new: &NewRow) -> Answer<bool> {
    let (system, database) = here();
    let holder = padded(new.holder);
    let values = [
        Arg::Text(new.resource),
        Arg::I64(new.token),
        Arg::I64(new.ttl_us),
        Arg::I64(system),
        Arg::Timestamp(new.granted_at),
        Arg::I64(pg::subtransaction_number() as i64),
        Arg::I64(0),
        Arg::Uuid(new.request.unwrap_or_default()),
        Arg::Oid(database),
        Arg::Oid(new.role),
        Arg::I16(i16::try_from(new.holder.len()).unwrap_or(0)),
        Arg::Bool(false),
        Arg::Bool(new.request.is_some()),
        Arg::Text(&holder),
    ];
    Ok(pg::row::put(ledger, index()?, &values, |old| {
        old.i64(TOKEN).is_some_and(|token| token < new.token)
    }))
}

/// Makes a longer TTL of a lease known, at once. False where the row is another lease's.
pub fn lengthen(ledger: Oid, resource: &[u8], token: i64, ttl_us: i64) -> Answer<bool> {
    let (column, index) = (TTL as i32, index()?);
    let amended = pg::row::amend(ledger, index, resource, column, |row| {
        (row.i64(TOKEN) == Some(token))
            .then(|| Arg::I64(row.i64(TTL).unwrap_or_default().max(ttl_us)))
    });
    Ok(amended == Some(true))
}

/// Marks the row of a resource as released, at once, if it is of that token or an older one: nobody runs a
/// lease under it. False where it is newer.
pub fn mark_released(ledger: Oid, resource: &[u8], up_to: i64) -> Answer<bool> {
    let (column, index) = (RELEASED as i32, index()?);
    let amended = pg::row::amend(ledger, index, resource, column, |row| {
        row.i64(TOKEN)
            .is_some_and(|token| token <= up_to)
            .then_some(Arg::Bool(true))
    });
    // no row claims anything
    Ok(amended.unwrap_or(true))
}

/// Marks the row of a lease as broken by the running (sub)transaction: that counts with its commit. Nothing where
/// the row is another lease's, or there is none: the lease is in memory; nor where it is going to be broken by this
/// transaction already: that stays if this subtransaction is rolled back. The caller holds the lock of breaks, and
/// knows under it that no other transaction has broken the lease.
pub fn mark_broken(ledger: Oid, resource: &[u8], token: i64) -> Answer<()> {
    let (column, index) = (BROKEN_BY as i32, index()?);
    let by = pg::subtransaction_number() as i64;
    pg::row::amend(ledger, index, resource, column, |row| {
        let before = row.i64(BROKEN_BY).unwrap_or_default() as u64;
        let is_own = before != 0 && pg::is_own_transaction(before);
        (row.i64(TOKEN) == Some(token) && !is_own).then_some(Arg::I64(by))
    });
    Ok(())
}

static RULES: Statement = Statement::new(
    c"SELECT rule.resource, rule.role::pg_catalog.oid FROM leasehold.rule
        JOIN pg_catalog.pg_authid a ON a.oid OPERATOR(pg_catalog.=) rule.role::pg_catalog.oid",
);
static ALLOW: Statement = Statement::new(
    c"INSERT INTO leasehold.rule (resource, role, granted_by, granted_at)
      VALUES ($1, $2::pg_catalog.regrole, $3::pg_catalog.regrole, $4) ON CONFLICT DO NOTHING",
);
static DISALLOW: Statement = Statement::new(
    c"DELETE FROM leasehold.rule
       WHERE resource OPERATOR(pg_catalog.=) $1 AND role::pg_catalog.oid OPERATOR(pg_catalog.=) $2",
);

/// All rules of roles that exist: the resource as it was given, and the role.
pub fn rules(ledger: Oid) -> Answer<Vec<(Vec<u8>, Oid)>> {
    // so that a change is noticed
    known(&RULE, c"rule")?;
    Ok(RULES.read(owner(ledger)?, &[], |row| {
        (
            row.bytes(1).unwrap_or_default(),
            row.oid(2).unwrap_or_default(),
        )
    }))
}

/// Adds a rule, if it is not there yet.
pub fn allow(ledger: Oid, resource: &[u8], role: Oid, by: Oid, at: i64) -> Answer<()> {
    let args = [
        Arg::Text(resource),
        Arg::Oid(role),
        Arg::Oid(by),
        Arg::Timestamp(at),
    ];
    // before: then it counts for this transaction with the write, and goes with it where that is undone
    pg::invalidate(known(&RULE, c"rule")?);
    ALLOW.write(owner(ledger)?, &args);
    Ok(())
}

/// Takes a rule away: whether it was there.
pub fn disallow(ledger: Oid, resource: &[u8], role: Oid) -> Answer<bool> {
    pg::invalidate(known(&RULE, c"rule")?);
    let gone = DISALLOW.write(owner(ledger)?, &[Arg::Text(resource), Arg::Oid(role)]);
    Ok(gone > 0)
}

static TELL: Statement = Statement::new(
    c"SELECT pg_catalog.pg_notify($1, pg_catalog.json_build_object('seq', $2, 'event', $3, 'resource', $4,
             'token', nullif($5, 0))::pg_catalog.text)",
);

/// Sends an event to those who listen on a channel, with the commit.
pub fn tell(
    ledger: Oid,
    channel: &[u8],
    number: u64,
    event: &'static str,
    resource: &[u8],
    token: i64,
) -> Answer<()> {
    let args = [
        Arg::Text(channel),
        Arg::I64(number as i64),
        Arg::Text(event.as_bytes()),
        Arg::Text(resource),
        Arg::I64(token),
    ];
    TELL.write(owner(ledger)?, &args);
    Ok(())
}

static PUT_METADATA: Statement = Statement::new(
    c"INSERT INTO leasehold.metadata AS m (resource, token, metadata) VALUES ($1, $2, $3::pg_catalog.jsonb)
      ON CONFLICT (resource) DO UPDATE SET token = excluded.token, metadata = excluded.metadata",
);
static DELETE_METADATA: Statement =
    Statement::new(c"DELETE FROM leasehold.metadata WHERE resource OPERATOR(pg_catalog.=) $1");
static METADATA: Statement = Statement::new(
    c"SELECT token, metadata::pg_catalog.text FROM leasehold.metadata
       WHERE resource OPERATOR(pg_catalog.=) $1",
);
static ALL_METADATA: Statement =
    Statement::new(c"SELECT resource, token, metadata::pg_catalog.text FROM leasehold.metadata");

/// The token of a lease, and its metadata as text.
pub type Metadata = (i64, Vec<u8>);

/// Writes the metadata of a lease, in the running transaction; over those of an older one.
pub fn put_metadata(ledger: Oid, resource: &[u8], token: i64, metadata: &[u8]) -> Answer<()> {
    let args = [Arg::Text(resource), Arg::I64(token), Arg::Text(metadata)];
    PUT_METADATA.write(owner(ledger)?, &args);
    Ok(())
}

/// Deletes the metadata of a resource, in the running transaction.
pub fn delete_metadata(ledger: Oid, resource: &[u8]) -> Answer<()> {
    DELETE_METADATA.write(owner(ledger)?, &[Arg::Text(resource)]);
    Ok(())
}

/// The metadata that are kept for a resource: of the lease of which token, and as text.
pub fn metadata(ledger: Oid, resource: &[u8]) -> Answer<Option<Metadata>> {
    let rows = METADATA.read(owner(ledger)?, &[Arg::Text(resource)], |row| {
        (
            row.i64(1).unwrap_or_default(),
            row.bytes(2).unwrap_or_default(),
        )
    });
    Ok(rows.into_iter().next())
}

/// The same of all resources.
pub fn all_metadata(ledger: Oid) -> Answer<HashMap<Vec<u8>, Metadata>> {
    let rows = ALL_METADATA.read(owner(ledger)?, &[], |row| {
        let metadata = (
            row.i64(2).unwrap_or_default(),
            row.bytes(3).unwrap_or_default(),
        );
        (row.bytes(1).unwrap_or_default(), metadata)
    });
    Ok(rows.into_iter().collect())
}

/// Deletes the row of a resource, in the running transaction, if it is of that token.
pub fn delete(ledger: Oid, resource: &[u8], token: i64) -> Answer<bool> {
    Ok(pg::row::delete(ledger, index()?, resource, |row| {
        row.i64(TOKEN) == Some(token)
    }))
}

/// A resource and the token of its row.
pub type Named = (Vec<u8>, i64);

static OLD: Statement = Statement::new(
    c"SELECT resource, token FROM leasehold.ledger
       WHERE granted_at OPERATOR(pg_catalog.<) $1 AND resource OPERATOR(pg_catalog.>) $2
       ORDER BY resource LIMIT 10000",
);

/// Resources and tokens of the next rows after a resource that were granted before that moment of the wall
/// clock, ten thousand at most.
pub fn old_rows(ledger: Oid, before: i64, after: &[u8]) -> Answer<Vec<Named>> {
    let args = [Arg::Timestamp(before), Arg::Text(after)];
    Ok(OLD.read(owner(ledger)?, &args, |row| {
        (
            row.bytes(1).unwrap_or_default(),
            row.i64(2).unwrap_or_default(),
        )
    }))
}

// A prepared transaction keeps the virtual transaction id of the session that prepared it.
static PREPARED: Statement = Statement::new(
    c"SELECT DISTINCT p.gid FROM pg_catalog.pg_locks fence
        JOIN pg_catalog.pg_locks own USING (virtualtransaction)
        JOIN pg_catalog.pg_prepared_xacts p ON p.transaction OPERATOR(pg_catalog.=) own.transactionid
       WHERE fence.pid IS NULL AND own.pid IS NULL AND own.locktype OPERATOR(pg_catalog.=) 'transactionid'
         AND fence.database OPERATOR(pg_catalog.=) $1 AND fence.classid OPERATOR(pg_catalog.=) $2
         AND fence.objid OPERATOR(pg_catalog.=) $3 AND fence.objsubid OPERATOR(pg_catalog.=) $4",
);

/// The names of the prepared transactions that hold the fence of a resource.
pub fn prepared_holders(ledger: Oid, hash: u64) -> Answer<Vec<Vec<u8>>> {
    let (high, low, class) = pg::heavy::fence_tag(hash);
    let (_, database) = here();
    let args = [
        Arg::Oid(database),
        Arg::Oid(high),
        Arg::Oid(low),
        Arg::I64(class),
    ];
    Ok(PREPARED.read(owner(ledger)?, &args, |row| {
        row.bytes(1).unwrap_or_default()
    }))
}

// Sub-queries, because a join of them all takes milliseconds to plan.
static NUMBERS: Statement = Statement::new(
    c"SELECT (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM leasehold.token_seq),
             (SELECT CASE WHEN is_called THEN last_value ELSE -1 END FROM leasehold.epoch_base),
             (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM leasehold.memory_ttl),
             (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM leasehold.lost_up_to),
             (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM leasehold.longest_ttl),
             (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM leasehold.epoch_system),
             (SELECT last_value FROM leasehold.home_system),
             (SELECT last_value FROM leasehold.home_database),
             (SELECT last_value FROM leasehold.home_timeline)",
);

/// Numbers that are durable whatever becomes of the transaction that sets them.
#[derive(Clone, Copy, Default)]
pub struct Numbers {
    /// The last token that can have been handed out.
    pub token: i64,
    /// The epoch of timeline 1; None where no block of tokens was ever taken with this extension.
    pub epoch_base: Option<i64>,
    /// The cluster that this is about.
    pub epoch_system: i64,
    /// The longest TTL ever granted in memory, microseconds.
    pub memory_ttl_us: i64,
    /// Leases of tokens up to this one were lost with a promotion, or came with a dump.
    pub lost_up_to: i64,
    /// The longest TTL ever granted in the ledger, microseconds.
    pub longest_ttl_us: i64,
    /// The server that writes the ledger: system identifier and database.
    pub home: (i64, Oid),
    /// The timeline on which it is written.
    pub timeline: u32,
}

/// The numbers as they are now.
pub fn numbers(ledger: Oid) -> Answer<Numbers> {
    let rows = NUMBERS.read(owner(ledger)?, &[], |row| Numbers {
        token: row.i64(1).unwrap_or_default(),
        epoch_base: row.i64(2).filter(|base| *base >= 0),
        memory_ttl_us: row.i64(3).unwrap_or_default(),
        lost_up_to: row.i64(4).unwrap_or_default(),
        longest_ttl_us: row.i64(5).unwrap_or_default(),
        epoch_system: row.i64(6).unwrap_or_default(),
        home: (
            row.i64(7).unwrap_or_default(),
            row.i64(8)
                .and_then(|oid| Oid::try_from(oid).ok())
                .unwrap_or(0),
        ),
        timeline: row.i64(9).and_then(|t| u32::try_from(t).ok()).unwrap_or(0),
    });
    Ok(rows.into_iter().next().unwrap_or_default())
}

/// Whether a relation is the ledger or one of the numbers, and all of these are there. Asked of every relation
/// that is dropped, so it is told at once where there is no ledger.
pub fn is_part(relation: Oid) -> bool {
    if pg::relation(c"leasehold", c"ledger").is_none() {
        return false;
    }
    const PARTS: [&CStr; 11] = [
        c"ledger",
        c"ledger_pkey",
        c"token_seq",
        c"epoch_base",
        c"epoch_system",
        c"lost_up_to",
        c"longest_ttl",
        c"memory_ttl",
        c"home_system",
        c"home_database",
        c"home_timeline",
    ];
    let oids = PARTS.map(|name| pg::relation(c"leasehold", name));
    oids.contains(&Some(relation)) && oids.iter().all(Option::is_some)
}

static RESERVE: Statement = Statement::new(
    c"SELECT pg_catalog.setval('leasehold.token_seq'::pg_catalog.regclass, $1, true)",
);
static SET_EPOCH_BASE: Statement = Statement::new(
    c"SELECT pg_catalog.setval('leasehold.epoch_base'::pg_catalog.regclass, $1, true),
             pg_catalog.setval('leasehold.epoch_system'::pg_catalog.regclass, $2, true)",
);
static SET_LOST_UP_TO: Statement = Statement::new(
    c"SELECT pg_catalog.setval('leasehold.lost_up_to'::pg_catalog.regclass, $1, true)",
);
static SET_HOME: Statement = Statement::new(
    c"SELECT pg_catalog.setval('leasehold.home_system'::pg_catalog.regclass, $1, true),
             pg_catalog.setval('leasehold.home_database'::pg_catalog.regclass, $2, true),
             pg_catalog.setval('leasehold.home_timeline'::pg_catalog.regclass, $3, true)",
);
static SET_LONGEST_TTL: Statement = Statement::new(
    c"SELECT pg_catalog.setval('leasehold.longest_ttl'::pg_catalog.regclass, $1, true)",
);
static SET_MEMORY_TTL: Statement = Statement::new(
    c"SELECT pg_catalog.setval('leasehold.memory_ttl'::pg_catalog.regclass, $1, true)",
);

/// Moves the sequence of tokens, and waits until that is on disk. Not undone by a rollback. The caller
/// holds the lock of the numbers.
pub fn reserve_tokens(ledger: Oid, up_to: i64) -> Answer<()> {
    RESERVE.write(owner(ledger)?, &[Arg::I64(up_to)]);
    pg::flush_own_wal();
    Ok(())
}

/// Sets the epoch of timeline 1 of this cluster; on disk with the next block. As above.
pub fn set_epoch_base(ledger: Oid, epoch_base: i64) -> Answer<()> {
    let (system, _) = here();
    SET_EPOCH_BASE.write(owner(ledger)?, &[Arg::I64(epoch_base), Arg::I64(system)]);
    Ok(())
}

/// Notes which leases were lost; on disk with the next block. As above.
pub fn set_lost_up_to(ledger: Oid, token: i64) -> Answer<()> {
    SET_LOST_UP_TO.write(owner(ledger)?, &[Arg::I64(token)]);
    Ok(())
}

/// Makes this server, database and timeline the ledger's, and waits until that is on disk. As above.
pub fn set_home(ledger: Oid) -> Answer<()> {
    let (system, database) = here();
    let args = [
        Arg::I64(system),
        Arg::I64(i64::from(database)),
        Arg::I64(i64::from(pg::timeline())),
    ];
    SET_HOME.write(owner(ledger)?, &args);
    pg::flush_own_wal();
    Ok(())
}

/// Raises the longest TTL in the ledger; on disk, and on the standby, with the next commit that waits for
/// that. As above.
pub fn set_longest_ttl(ledger: Oid, ttl_us: i64) -> Answer<()> {
    SET_LONGEST_TTL.write(owner(ledger)?, &[Arg::I64(ttl_us)]);
    Ok(())
}

/// Raises the longest TTL in memory, and waits until that is on disk. As above.
pub fn set_memory_ttl(ledger: Oid, ttl_us: i64) -> Answer<()> {
    SET_MEMORY_TTL.write(owner(ledger)?, &[Arg::I64(ttl_us)]);
    pg::flush_own_wal();
    Ok(())
}

static HIGHEST: Statement = Statement::new(c"SELECT pg_catalog.max(token) FROM leasehold.ledger");

/// The highest token that the ledger knows. Reads all of it.
pub fn highest_token(ledger: Oid) -> Answer<i64> {
    let rows = HIGHEST.read(owner(ledger)?, &[], |row| row.i64(1).unwrap_or_default());
    Ok(rows.into_iter().next().unwrap_or_default())
}
