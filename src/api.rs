//! The SQL functions: they check arguments and context, call, and shape the answer.

use std::collections::HashMap;

use leasehold_core::name;
use leasehold_core::record::{End, Lasting, Record, Release, State};
use leasehold_core::ttl::{self, TtlError};

use crate::acquire::{self, Request};
use crate::errors::{self, Answer, Refusal, code};
use crate::events::{Event, Kind};
use crate::fence::{self, Presented};
use crate::pg::fmgr::{Call, Value};
use crate::pg::procedure::{Procedure, row_of_i64};
use crate::pg::srf::{Field, Rows};
use crate::resources::{self, Resource};
use crate::stats::{self, Count};
use crate::table::{self, Database, Entry};
use crate::{ledger, pg, rights, settings, sql_function, tokens, xact};

sql_function!(
    leasehold_acquire_lease,
    pg_finfo_leasehold_acquire_lease,
    acquire_lease
);
sql_function!(
    leasehold_await_lease,
    pg_finfo_leasehold_await_lease,
    await_lease
);
sql_function!(
    leasehold_renew_lease,
    pg_finfo_leasehold_renew_lease,
    renew_lease
);
sql_function!(
    leasehold_release_lease,
    pg_finfo_leasehold_release_lease,
    release_lease
);
sql_function!(leasehold_fence, pg_finfo_leasehold_fence, fence);
sql_function!(
    leasehold_check_fence,
    pg_finfo_leasehold_check_fence,
    check_fence
);
sql_function!(
    leasehold_break_lease,
    pg_finfo_leasehold_break_lease,
    break_lease
);
sql_function!(
    leasehold_all_waiters,
    pg_finfo_leasehold_all_waiters,
    all_waiters
);
sql_function!(
    leasehold_all_contended,
    pg_finfo_leasehold_all_contended,
    all_contended
);
sql_function!(
    leasehold_all_fences,
    pg_finfo_leasehold_all_fences,
    all_fences
);
sql_function!(
    leasehold_lease_info,
    pg_finfo_leasehold_lease_info,
    lease_info
);
sql_function!(
    leasehold_all_leases,
    pg_finfo_leasehold_all_leases,
    all_leases
);
sql_function!(leasehold_home, pg_finfo_leasehold_home, home);

/// Every call starts here: without the shared table there is nothing to ask, and a parallel worker must
/// not. 55000, 25000.
pub fn check_preloaded() -> Answer<()> {
    if !table::is_ready() {
        return Err(errors::not_preloaded(&preload_line()));
    }
    if pg::is_parallel() {
        return Err(errors::in_parallel());
    }
    Ok(())
}

/// The exact line for postgresql.conf: what is preloaded now, and leasehold.
pub fn preload_line() -> String {
    let now = pg::shared_preload_libraries();
    if now.trim().is_empty() {
        "shared_preload_libraries = 'leasehold'".to_owned()
    } else {
        format!("shared_preload_libraries = '{},leasehold'", now.trim())
    }
}

/// acquire_lease(resource text, holder text, ttl interval, wait interval, request uuid, metadata jsonb) RETURNS bigint
fn acquire_lease(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let durable = settings::is_durable();
    let request = Request {
        resource: Resource::named(call.shared_bytes(0))?,
        holder: checked_holder(call.bytes(1))?,
        ttl_us: checked_ttl(call.interval(2))?,
        durable,
        wait_us: checked_wait(call.interval(3))?,
        request: call.uuid(4),
        metadata: checked_metadata(call.json(5), durable)?,
    };
    acquire::check_context("acquire_lease()")?;
    let token = acquire::acquire(&request, || ())?;
    Ok(token.map_or(Value::Null, Value::I64))
}

/// CALL await_lease(resource text, holder text, ttl interval, wait interval, INOUT token bigint)
fn await_lease(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let request = Request {
        resource: Resource::named(call.shared_bytes(0))?,
        holder: checked_holder(call.bytes(1))?,
        ttl_us: checked_ttl(call.interval(2))?,
        durable: settings::is_durable(),
        wait_us: match call.interval(3) {
            None => i64::MAX,
            wait => wait_us(wait)?,
        },
        request: None,
        metadata: None,
    };
    acquire::check_context("await_lease()")?;
    if pg::is_pipelined() {
        return Err(errors::await_in_block());
    }
    let procedure = Procedure::begin(call).ok_or_else(errors::await_in_block)?;
    // whatever it waits for, not under the snapshot of the CALL
    procedure.commit();
    // the new transaction may be of another kind
    acquire::check_context("await_lease()")?;
    let token = acquire::acquire(&request, || procedure.commit())?;
    drop(procedure);
    Ok(row_of_i64(call, token))
}

/// Longest metadata, bytes of JSON text.
const METADATA_BYTES_MAX: usize = 4096;

/// 54000, 0A000.
fn checked_metadata(metadata: Option<Vec<u8>>, durable: bool) -> Answer<Option<Vec<u8>>> {
    match metadata {
        Some(_) if !durable => Err(Refusal::new(
            code::FEATURE_NOT_SUPPORTED,
            "a lease in memory cannot have metadata",
        )
        .detail("Metadata are kept in the ledger, and leasehold.durability is memory.")
        .hint("SET leasehold.durability = durable; or pass no metadata.")),
        Some(text) if text.len() > METADATA_BYTES_MAX => {
            Err(Refusal::new(code::LIMIT_EXCEEDED, "metadata are too large")
                .detail(format!(
                    "They have {} bytes as text; at most {METADATA_BYTES_MAX} are allowed.",
                    text.len()
                ))
                .hint("Keep what is larger in a table of your own, and its key here."))
        }
        metadata => Ok(metadata),
    }
}

/// A wait, as long as an interval says. 22004, 22023.
fn wait_us(interval: Option<(i32, i32, i64)>) -> Answer<i64> {
    let (months, days, us) = interval.ok_or_else(|| errors::null_argument("wait"))?;
    let wait_us = ttl::interval_us(months, days, us);
    if wait_us < 0 {
        return Err(
            Refusal::new(code::INVALID_PARAMETER, "wait must not be negative")
                .detail(format!("The wait is {wait_us} microseconds."))
                .hint("Pass an interval such as '5 seconds', or '0' not to wait."),
        );
    }
    Ok(i64::try_from(wait_us).unwrap_or(i64::MAX))
}

/// The same, of a call that holds a snapshot meanwhile.
fn checked_wait(interval: Option<(i32, i32, i64)>) -> Answer<i64> {
    let wait_us = wait_us(interval)?;
    let max_us = settings::max_wait_us();
    if wait_us > max_us {
        // one that cannot be counted is as long as can be
        let above = if wait_us == i64::MAX { "above " } else { "" };
        return Err(
            Refusal::new(code::INVALID_PARAMETER, "wait is above leasehold.max_wait")
                .detail(format!(
                    "The wait is {above}{}; leasehold.max_wait is {}.",
                    errors::seconds(wait_us),
                    errors::seconds(max_us)
                ))
                .hint("Use a shorter wait, or CALL await_lease(), which holds no snapshot while it waits."),
        );
    }
    Ok(wait_us)
}

fn checked_holder(holder: Option<Vec<u8>>) -> Answer<Option<Vec<u8>>> {
    match holder {
        Some(label) if label.is_empty() => Err(errors::empty_name("holder")),
        Some(label) if label.len() > name::HOLDER_BYTES_MAX => {
            Err(errors::holder_too_long(label.len()))
        }
        holder => Ok(holder),
    }
}

fn checked_ttl(interval: Option<(i32, i32, i64)>) -> Answer<i64> {
    let Some((months, days, us)) = interval else {
        return Ok(settings::default_ttl_us());
    };
    let max_us = settings::max_ttl_us();
    let ttl_us = ttl::interval_us(months, days, us);
    ttl::check(ttl_us, max_us).map_err(|error| match error {
        TtlError::NotPositive => Refusal::new(code::INVALID_PARAMETER, "ttl must be positive")
            .detail(format!("The ttl is {ttl_us} microseconds."))
            .hint("Pass an interval such as '30 seconds'."),
        TtlError::AboveMax => Refusal::new(
            code::INVALID_PARAMETER,
            "ttl is above leasehold.max_ttl",
        )
        .detail(format!(
            "The ttl is {} s (a month counts 30 days, a day 24 hours); leasehold.max_ttl is {} s.",
            ttl_us as f64 / 1e6,
            errors::seconds(max_us).trim_end_matches(" s")
        ))
        .hint("Use a shorter ttl and renew the lease, or raise leasehold.max_ttl."),
    })
}

fn checked_token(token: Option<i64>) -> Answer<i64> {
    match token {
        None => Err(errors::null_argument("token")),
        Some(token) if token <= 0 => Err(errors::token_not_positive(token)),
        Some(token) => Ok(token),
    }
}

/// renew_lease(resource text, token bigint, ttl interval) RETURNS boolean
fn renew_lease(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.shared_bytes(0))?;
    let token = checked_token(call.i64(1))?;
    let ttl_us = checked_ttl(call.interval(2))?;
    if pg::in_recovery() {
        return Err(errors::on_standby("renew_lease()"));
    }
    let Some(record) = own_lease(&resource, token, "renew")? else {
        return Ok(Value::Bool(false));
    };
    let owner = xact::owner();
    let Some(lasting) = record.lasting(owner, token, pg::clock::now_us()) else {
        return Ok(Value::Bool(false));
    };
    if !remember(&resource, token, ttl_us, lasting)? {
        return Ok(Value::Bool(false));
    }
    let wall_clock = pg::wall_clock();
    let renewed = table::change(resource.key(), |entry| {
        let renewed = entry
            .record
            .renew(owner, token, ttl_us, pg::clock::now_us());
        if renewed {
            entry.holding.renewed_at = wall_clock;
            let event = Event::now(Kind::Renewed, resource.ledger, &resource.name);
            event.of(token, &entry.holding).record();
        }
        renewed
    });
    if renewed == Some(true) {
        stats::count(Count::Renewals);
    }
    Ok(Value::Bool(renewed.unwrap_or(false)))
}

/// Makes a TTL that is longer than the ledger knows durable before it counts: of this lease, or of all
/// that are in memory. False where the lease is over.
fn remember(resource: &Resource, token: i64, ttl_us: i64, lasting: Lasting) -> Answer<bool> {
    let is_known = if lasting.durable {
        ttl_us <= lasting.ttl_us
    } else {
        ttl_us <= resources::database(resource.ledger)?.memory_ttl_us
    };
    if is_known {
        return Ok(true);
    }
    if pg::read_only_transaction() {
        return Err(errors::read_only(
            "renew_lease()",
            "The ttl is longer than the ledger knows, so it would have to be written there.",
        ));
    }
    if lasting.durable {
        tokens::note_ttl(&resources::database(resource.ledger)?, ttl_us)?;
        // false where a taker has overwritten the row meanwhile
        let is_written = ledger::lengthen(resource.ledger, &resource.name, token, ttl_us)?;
        if is_written {
            xact::lengthened(resource, token, ttl_us);
        }
        return Ok(is_written);
    }
    tokens::raise_memory_ttl(resource.ledger, ttl_us)?;
    xact::lengthened(resource, token, ttl_us);
    Ok(true)
}

/// The record of a resource, if it is in the table (or can be) and `token` is its last one. 42501 when
/// the lease is another role's.
fn own_lease(resource: &Resource, token: i64, to: &str) -> Answer<Option<Record>> {
    let known = table::read(resource.key(), |entry| (entry.record, entry.holding.role));
    let (record, role) = match known {
        Some(known) => known,
        None => {
            let database = resources::database(resource.ledger)?;
            match resource.find(&database)? {
                resources::Found::Nowhere => return Ok(None),
                _ => {
                    let entry = resource.open(&database)?;
                    (entry.record, entry.holding.role)
                }
            }
        }
    };
    if record.t_max != token || record.lease.end == End::Lost {
        return Ok(None);
    }
    let now_us = pg::clock::now_us();
    let is_over = record.release_answer(xact::owner(), token, now_us) == Release::No;
    if record.lease.token == token && !is_over {
        fence::check_role(resource, role, to)?;
    }
    Ok(Some(record))
}

/// release_lease(resource text, token bigint) RETURNS boolean
fn release_lease(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.shared_bytes(0))?;
    let token = checked_token(call.i64(1))?;
    if pg::in_recovery() {
        return Err(errors::on_standby("release_lease()"));
    }
    let Some(record) = own_lease(&resource, token, "release")? else {
        return Ok(Value::Bool(false));
    };
    let answer = record.release_answer(xact::owner(), token, pg::clock::now_us());
    Ok(Value::Bool(match answer {
        Release::Yes => {
            xact::release_at_commit(&resource, token);
            true
        }
        Release::Already => true,
        Release::No => false,
    }))
}

/// break_lease(resource text) RETURNS bigint
fn break_lease(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.shared_bytes(0))?;
    if pg::in_recovery() {
        return Err(errors::on_standby("break_lease()"));
    }
    if pg::read_only_transaction() {
        return Err(errors::read_only(
            "break_lease()",
            "That a lease is broken is written to the ledger.",
        ));
    }
    check_administrator("break a lease")?;
    pg::heavy::lock_break(resource.hash);
    let database = resources::database(resource.ledger)?;
    // one that has no room in the table is broken in the ledger alone
    let entry = resource.find(&database)?.entry();
    let Some(token) = entry.record.breakable() else {
        let grant = &entry.record.grant;
        if grant.token != 0 && grant.owner != xact::owner() {
            let pid = xact::pid_of(grant.owner);
            pg::notice(
                &format!(
                    "the resource \"{}\" is just being granted",
                    resource.shown()
                ),
                &format!(
                    "The transaction of process {pid} has acquired it and is still open: there is no lease to break before it commits."
                ),
                &format!("To have it undone: SELECT pg_terminate_backend({pid});"),
            );
        }
        return Ok(Value::Null);
    };
    ledger::mark_broken(resource.ledger, &resource.name, token)?;
    xact::break_at_commit(&resource, token);
    Ok(Value::I64(token))
}

/// 42501 unless the current role may end sessions of others.
pub fn check_administrator(to: &str) -> Answer<()> {
    if pg::is_member(pg::current_user(), pg::ROLE_SIGNAL_BACKEND) {
        return Ok(());
    }
    Err(Refusal::new(
        code::INSUFFICIENT_PRIVILEGE,
        format!("permission denied to {to}"),
    )
    .detail(format!(
        "Role \"{}\" is not a member of pg_signal_backend.",
        pg::role_name(pg::current_user())
    ))
    .hint("An administrator can: GRANT pg_signal_backend TO the role."))
}

/// leasehold.all_waiters() RETURNS TABLE: what the view leasehold.waiters shows
fn all_waiters(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let ledger = ledger::oid()?;
    let waiters = match primary_database(ledger)? {
        Some(_) => table::waiters(pg::database(), ledger),
        None => Vec::new(),
    };
    let now_us = pg::clock::now_us();
    let mut rows = Rows::start(call);
    for (name, position, waiter) in &waiters {
        let holder = waiter.holder.as_slice();
        rows.push(&[
            Field::Text(name.as_slice()),
            Field::I32(*position),
            Field::I32(waiter.pid),
            if rights::may_see(waiter.role) {
                Field::Text(holder)
            } else {
                Field::Null
            },
            Field::Oid(waiter.role),
            Field::Interval(now_us.saturating_sub(waiter.since_us).max(0)),
            if waiter.until_us == i64::MAX {
                Field::Null
            } else {
                Field::Interval(waiter.until_us.saturating_sub(now_us).max(0))
            },
        ]);
    }
    Ok(Value::Void)
}

/// fence(resource text, token bigint) RETURNS void
fn fence(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.shared_bytes(0))?;
    let token = checked_token(call.i64(1))?;
    if pg::in_recovery() {
        return Err(errors::on_standby("fence()"));
    }
    let presented = Presented {
        tokens: &[token],
        named: true,
        strict: false,
    };
    fence::pass(&resource, presented)?;
    Ok(Value::Void)
}

/// check_fence(resource text, token bigint) RETURNS boolean
fn check_fence(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.shared_bytes(0))?;
    let token = checked_token(call.i64(1))?;
    let good = if pg::in_recovery() {
        let row = ledger::read(resource.ledger, &resource.name)?;
        row.is_some_and(|row| {
            row.token == token
                && resources::replicated(&row)
                    .record
                    .is_live(pg::clock::now_us())
        })
    } else if fence::holds(&resource, token) {
        true
    } else {
        let database = resources::database(resource.ledger)?;
        fence::would_pass(&resource, &database, token)?
    };
    Ok(Value::Bool(good))
}

/// lease_info(resource text) RETURNS TABLE of one row
fn lease_info(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let resource = Resource::named(call.shared_bytes(0))?;
    let database = primary_database(resource.ledger)?;
    let found = resource.peek(database.as_ref())?;
    let mut rows = Rows::start(call);
    let found = found.as_ref().map(|(entry, _)| entry);
    let metadata = ledger::metadata(resource.ledger, &resource.name)?;
    let shown = Shown {
        name: &resource.name,
        hash: resource.hash,
        metadata: metadata.as_ref(),
    };
    push_lease(&mut rows, &shown, found, database.as_ref());
    Ok(Value::Void)
}

/// leasehold.all_leases() RETURNS TABLE: what the view leasehold.leases shows
fn all_leases(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let ledger = ledger::oid()?;
    let database = primary_database(ledger)?;
    // the ledger first: what is brought into the table meanwhile is then seen in either
    let durable = ledger::unreleased(ledger)?;
    let shared = match database {
        Some(_) => table::entries(pg::database(), ledger),
        None => Vec::new(),
    };
    let metadata = ledger::all_metadata(ledger)?;
    let seen: std::collections::HashSet<&[u8]> =
        shared.iter().map(|(name, _)| name.as_slice()).collect();
    let mut rows = Rows::start(call);
    let now_us = pg::clock::now_us();
    for (name, entry) in &shared {
        if entry.record.state(now_us) != State::Free {
            let shown = Shown::of(name.as_slice(), &metadata);
            push_lease(&mut rows, &shown, Some(entry), database.as_ref());
        }
    }
    for (name, row) in durable
        .iter()
        .filter(|(name, _)| !seen.contains(name.as_slice()))
    {
        let entry = match &database {
            // granted since the start and gone from the table: it is over
            Some(database) if row.token > database.floor => continue,
            Some(database) => resources::recovered(row, database),
            None => resources::replicated(row),
        };
        if entry.record.state(now_us) != State::Free {
            let shown = Shown::of(name, &metadata);
            push_lease(&mut rows, &shown, Some(&entry), database.as_ref());
        }
    }
    Ok(Value::Void)
}

/// leasehold.all_fences() RETURNS TABLE: which lock in pg_locks is the fence of which resource
fn all_fences(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let ledger = ledger::oid()?;
    let entries = entries(ledger)?;
    let mut rows = Rows::start(call);
    for (name, _) in &entries {
        let (classid, objid, _) = pg::heavy::fence_tag(name::hash(name.as_slice()));
        rows.push(&[
            Field::Text(name.as_slice()),
            Field::Oid(classid),
            Field::Oid(objid),
        ]);
    }
    Ok(Value::Void)
}

/// So many of the most contended resources are shown.
const CONTENDED: usize = 100;

/// leasehold.all_contended() RETURNS TABLE: what the view leasehold.contended shows
fn all_contended(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let ledger = ledger::oid()?;
    let mut entries = entries(ledger)?;
    entries.retain(|(_, entry)| entry.contention.all() != 0 || entry.waiters() > 0);
    entries.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.contention.all()));
    let mut rows = Rows::start(call);
    for (name, entry) in entries.iter().take(CONTENDED) {
        let contention = &entry.contention;
        rows.push(&[
            Field::Text(name.as_slice()),
            Field::I64(contention.grants.into()),
            Field::I64(contention.denials.into()),
            Field::I64(contention.sheds.into()),
            Field::I64(contention.waits.into()),
            match contention.waits {
                0 => Field::Null,
                waits => Field::F64(contention.waited_us as f64 / f64::from(waits) / 1000.0),
            },
            match entry.holds.smoothed_us() {
                0 => Field::Null,
                held_us => Field::F64(held_us as f64 / 1000.0),
            },
            Field::I32(entry.waiters()),
        ]);
    }
    Ok(Value::Void)
}

/// What the shared table has; nothing on a standby.
fn entries(ledger: pg::Oid) -> Answer<Vec<table::Named>> {
    Ok(match primary_database(ledger)? {
        Some(_) => table::entries(pg::database(), ledger),
        None => Vec::new(),
    })
}

/// None on a standby.
fn primary_database(ledger: pg::Oid) -> Answer<Option<Database>> {
    if pg::in_recovery() {
        return Ok(None);
    }
    resources::database(ledger).map(Some)
}

/// A resource, to be shown.
struct Shown<'a> {
    name: &'a [u8],
    hash: u64,
    /// What is kept for it, and with the lease of which token.
    metadata: Option<&'a ledger::Metadata>,
}

impl Shown<'_> {
    fn of<'a>(name: &'a [u8], metadata: &'a HashMap<Vec<u8>, ledger::Metadata>) -> Shown<'a> {
        Shown {
            name,
            hash: name::hash(name),
            metadata: metadata.get(name),
        }
    }
}

/// resource, token, holder, state, ttl, remaining, granted_at, renewed_at, role, pid, durable, writers, waiters,
/// metadata
fn push_lease(rows: &mut Rows, of: &Shown, found: Option<&Entry>, database: Option<&Database>) {
    let &Shown {
        name,
        hash,
        metadata,
    } = of;
    let now_us = pg::clock::now_us();
    let waiters = found.map_or(0, Entry::waiters);
    let writers = database.map_or(0, |_| pg::heavy::writers(hash));
    let state = found.map_or(State::Free, |entry| entry.record.state(now_us));
    let grace_us = database.map_or(0, |database| database.grace_until_us.saturating_sub(now_us));
    let shown = shown_state(state, found, grace_us, writers);
    let Some(entry) = found.filter(|_| state != State::Free) else {
        rows.push(&[
            Field::Text(name),
            Field::Null,
            Field::Null,
            Field::Text(shown.as_bytes()),
            Field::Null,
            Field::unless_zero(grace_us.max(0), Field::Interval),
            Field::Null,
            Field::Null,
            Field::Null,
            Field::Null,
            Field::Null,
            Field::I32(writers),
            Field::I32(waiters),
            Field::Null,
        ]);
        return;
    };
    let record = &entry.record;
    let (ttl_us, deadline_us, durable) = if record.grant.token != 0 {
        let grant = &record.grant;
        (grant.ttl_us, grant.deadline_us, grant.durable)
    } else {
        let lease = &record.lease;
        (lease.ttl_us, lease.deadline_us, lease.durable)
    };
    let holding = &entry.holding;
    let may_see = rights::may_see(holding.role);
    let metadata = metadata.filter(|(token, _)| may_see && *token == record.t_max);
    rows.push(&[
        Field::Text(name),
        Field::I64(record.t_max),
        if may_see {
            Field::Text(holding.holder.as_slice())
        } else {
            Field::Null
        },
        Field::Text(shown.as_bytes()),
        Field::Interval(ttl_us),
        Field::Interval(deadline_us.saturating_sub(now_us).max(grace_us).max(0)),
        Field::Timestamp(holding.granted_at),
        Field::unless_zero(holding.renewed_at, Field::Timestamp),
        Field::Oid(holding.role),
        Field::unless_zero(holding.pid, Field::I32),
        Field::Bool(durable),
        Field::I32(writers),
        Field::I32(waiters),
        metadata.map_or(Field::Null, |(_, text)| Field::Json(text)),
    ]);
}

/// The state as it is called in SQL. `grace_us`: so long nothing is granted, for leases that the server does not
/// know may still be believed in.
fn shown_state(state: State, found: Option<&Entry>, grace_us: i64, writers: i32) -> &'static str {
    let is_wanted = found.is_some_and(|entry| entry.record.contested);
    let is_unseen = found.is_some_and(|entry| {
        let lease = &entry.record.lease;
        lease.recovered && lease.token == entry.record.t_max && entry.holding.renewed_at == 0
    });
    match state {
        State::Held if is_unseen => "recovering",
        State::Held => "held",
        _ if is_wanted && writers > 0 => "draining",
        _ if grace_us > 0 => "recovering",
        State::Free => "free",
        State::Expired => "expired",
    }
}

/// leasehold.home() RETURNS TABLE (system bigint, database oid, timeline bigint): this server
fn home(call: &Call) -> Answer<Value> {
    check_preloaded()?;
    let (system, database) = ledger::here();
    let mut rows = Rows::start(call);
    rows.push(&[
        Field::I64(system),
        Field::Oid(database),
        Field::I64(i64::from(pg::timeline())),
    ]);
    Ok(Value::Void)
}
